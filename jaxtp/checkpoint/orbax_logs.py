"""Keeps the libraries' messages on a failed read out of a command's output; its own message says what is damaged."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_metadata_warning() -> Iterator[None]:
    """Silences Orbax's warning of a file that our checkpoints do not have and that nothing needs."""
    logger = logging.getLogger("absl")
    needed = lambda record: "Metadata file does not exist" not in record.getMessage()  # noqa: E731
    logger.addFilter(needed)
    try:
        yield
    finally:
        logger.removeFilter(needed)


def quieten() -> None:
    """Silences Orbax's warnings, and TensorStore's futures that outlive the event loop that waited for them or that
    nobody waited for."""
    for library in ("absl", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        of_a_read = "_read_array_index_and_device_put" in repr(unraisable.object)
        if not of_a_read and "Event loop is closed" not in str(unraisable.exc_value):
            before(unraisable)

    sys.unraisablehook = hook
