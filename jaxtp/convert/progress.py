"""How far a conversion is."""

import sys
import time

from jaxtp.hf.load import Progress


def progress(verb: str) -> Progress | None:
    """In a terminal, a line that counts."""
    if not sys.stderr.isatty():
        return None
    started = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > 0.2 or done == total:
            last = now
            rate = done / 1e9 / max(now - started, 1e-3)
            end = "\n" if done == total else ""
            print(
                f"\r{done / 1e9:.2f} of {total / 1e9:.2f} GB {verb}, {rate:.2f} GB/s ",
                end=end,
                file=sys.stderr,
                flush=True,
            )

    return show
