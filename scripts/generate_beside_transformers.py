"""Compares the generation speed of jaxtp and transformers on the same CPU cores, or on one GPU.

    python scripts/generate_beside_transformers.py --model DIR --transformers-python PATH

Model, dtype, prompts and number of tokens are the same. Each library has its own process, which
waits while the other works. The script times calls of `Generator.generate`, and of transformers'
`model.generate` (greedy, with its cache). Prefill is the time of a call for one token per prompt;
decode is the additional time of a call for more. Numbers are medians of `--repeats` calls, after
one that compiles. All prompts of a batch have one length, so transformers needs no padding. If the
tokens differ, the script fails.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

CASES = [(1, 16), (8, 16), (1, 512), (8, 128)]
"""Prompts in a batch, and tokens in each prompt."""
DTYPES = ("float32", "bfloat16")
Generate = Callable[[list[list[int]], int], list[list[int]]]


def of_jaxtp(folder: str, dtype: str) -> Generate:
    from pathlib import Path

    import jaxtp
    from jaxtp.generate.__main__ import GenerateConfig
    from jaxtp.generate.loading import open_source

    mesh = jaxtp.make_mesh()
    source = open_source(Path(folder), GenerateConfig(dtype=dtype))  # type: ignore[arg-type]
    generator = jaxtp.generate.Generator(
        source.load(mesh), source.tokenizer, end_ids=frozenset(), donate=True
    )

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        found = generator.generate(prompts, jaxtp.generate.Settings(max_tokens=tokens))
        return [list(result.ids) for result in found]

    return generate


def of_transformers(folder: str, dtype: str) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    )
    model.generation_config.eos_token_id = None

    @torch.no_grad()
    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device)
        mask = torch.ones_like(ids)
        found = model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        return [row[len(prompts[0]) :].tolist() for row in found]

    return generate


WORKERS = {"jaxtp": of_jaxtp, "transformers": of_transformers}


def work(name: str, folder: str, dtype: str) -> None:
    """Reads lines with prompts and a number of tokens from stdin; answers with seconds and ids."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    generate = WORKERS[name](folder, dtype)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        prompts, tokens = json.loads(line)
        started = time.perf_counter()
        ids = generate(prompts, tokens)
        print(json.dumps([time.perf_counter() - started, ids]), file=answers, flush=True)


class Worker:
    """A process that generates on request."""

    def __init__(self, python: str, name: str, folder: str, dtype: str):
        command = [python, __file__, "--worker", name, "--model", folder, "--dtypes", dtype]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def __call__(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        assert self._process.stdin is not None
        print(json.dumps([prompts, tokens]), file=self._process.stdin, flush=True)
        seconds, ids = self._answer()
        return seconds, ids

    def end(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> list:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} has ended")
        return json.loads(line)


def compare(
    workers: dict[str, Worker], rows: int, length: int, tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Returns prefill and decode tokens per second of each worker."""
    found: dict[str, list[list[float]]] = {name: [] for name in workers}
    for turn in range(repeats + 1):
        prompts = [
            [(31 * turn + 7 * row + 13 * place) % 1000 + 50 for place in range(length)]
            for row in range(rows)
        ]
        made = []
        for name, worker in workers.items():
            one, _ = worker(prompts, 1)
            more, ids = worker(prompts, 1 + tokens)
            found[name].append([rows * length / one, rows * tokens / max(more - one, 1e-9)])
            made.append(ids)
        same = sum(a == b for a, b in zip(*made, strict=True))
        if "float32" in workers["jaxtp"]._process.args:
            assert same == rows, f"{rows - same} of {rows} texts differ"
    return {
        name: [statistics.median(rates) for rates in zip(*values[1:], strict=True)]
        for name, values in found.items()
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder in Hugging Face format")
    parser.add_argument(
        "--transformers-python", default=sys.executable, help="a Python with torch and transformers"
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument(
        "--tokens",
        type=int,
        default=48,
        help="tokens for each prompt, after the first (default 48)",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        work(arguments.worker, arguments.model, arguments.dtypes[0])
        return
    pythons = {"jaxtp": sys.executable, "transformers": arguments.transformers_python}
    print(
        f"{os.cpu_count()} cores, {arguments.tokens} tokens for each prompt, medians of "
        f"{arguments.repeats}, tokens/s"
    )
    print(f"{'dtype':<10}{'prompts':>16}{'':>12}{'jaxtp':>10}{'transformers':>14}{'ratio':>8}")
    for dtype in arguments.dtypes:
        workers = {
            name: Worker(python, name, arguments.model, dtype) for name, python in pythons.items()
        }
        for rows, length in CASES:
            found = compare(workers, rows, length, arguments.tokens, arguments.repeats)
            for index, what in enumerate(("prefill", "decode")):
                ours = found["jaxtp"][index]
                theirs = found["transformers"][index]
                batch = f"{rows} x {length}"
                print(
                    f"{dtype:<10}{batch:>16}{what:>12}"
                    f"{ours:>10,.1f}{theirs:>14,.1f}{ours / theirs:>8.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
