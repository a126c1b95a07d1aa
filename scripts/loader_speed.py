"""Measures the data loader's throughput and memory, without training.

    python scripts/loader_speed.py [--documents 10000000]

The script writes two datasets of synthetic documents (bytes; log-normal lengths, median 300); one
is five times as large as the other. It times the batches of a training process on the host:
memory-mapped files, packing, shuffling and stacking. Memory is the growth of a separate process's
anonymous memory; pages of mapped files do not count, because the operating system may drop them.

`--documents` times the start instead, with a dataset of this many documents of such lengths:
opening it, planning the rows, hashing the order of the samples, and the first batch, in separate
processes after the imports. Its tokens are zeros in sparse files.
"""

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from jaxtp.data.batches import Position, token_batches
from jaxtp.data.corpus import BYTE_TOKENIZER, load_corpus
from jaxtp.data.manifest import (
    DOCUMENTS,
    MANIFEST,
    OFFSET,
    SPLITS,
    TOKENS,
    Manifest,
    Shard,
    SplitRecord,
    shard_file,
    totals,
)
from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.samples import Data, RowSettings, make_rows, shuffled
from jaxtp.data.store import open_dataset

VOCAB = 256
ROWS = 64
SHARD_TOKENS = PrepareConfig.shard_tokens


def random_lengths(random: np.random.Generator, count: int) -> np.ndarray:
    """Returns the lengths of documents."""
    return np.clip(random.lognormal(5.7, 1.0, count), 8, 50_000).astype(int)


def write_dataset(folder: Path, tokens: int) -> None:
    """Writes a dataset of about `tokens` tokens with `jaxtp prepare`."""
    random = np.random.default_rng(0)
    lengths = []
    while sum(lengths) < tokens:
        lengths += random_lengths(random, 10_000).tolist()
    source = folder.with_suffix(".jsonl")
    alphabet = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", np.uint8)
    with source.open("w", encoding="utf-8") as file:
        for length in lengths:
            text = random.choice(alphabet, length).tobytes().decode()
            file.write(json.dumps({"text": text}) + "\n")
    with contextlib.redirect_stdout(io.StringIO()):
        assert prepare([str(source), "--out", str(folder), "--held-out", "0"]) == 0
    source.unlink()


def write_zeros(folder: Path, documents: int) -> None:
    """Writes a dataset, in shards as large as those of `jaxtp prepare`.

    1% more documents are held out.
    """
    folder.mkdir()
    random = np.random.default_rng(0)
    splits = {}
    for split, count in zip(SPLITS, (documents, documents // 100), strict=True):
        lengths = random_lengths(random, count)
        shards = []
        ends = np.cumsum(lengths)
        last = np.searchsorted(ends, np.arange(SHARD_TOKENS, ends[-1], SHARD_TOKENS))
        for index, part in enumerate(np.split(lengths, last + 1)):
            with shard_file(folder, split, index, TOKENS).open("wb") as file:
                file.truncate(part.sum())
            np.cumsum([0, *part]).astype(OFFSET).tofile(shard_file(folder, split, index, DOCUMENTS))
            sums = {suffix: f"{split} {index} {suffix}" for suffix in (TOKENS, DOCUMENTS)}
            tokens = int(part.sum())
            shards.append(Shard(len(part), tokens, tokens, int(part.max()), sums))
        splits[split] = SplitRecord(**totals(shards), shards=tuple(shards))
    (folder / MANIFEST).write_text(Manifest(BYTE_TOKENIZER, False, splits, {}, {}, {}).to_json())


def measure_start(folder: Path, length: int, packing: str) -> dict[str, float]:
    """Returns the seconds of each part of a start, and the total processor time."""
    times = [time.perf_counter()]
    processor = time.process_time()
    corpus = load_corpus(folder)
    times.append(time.perf_counter())
    data = Data(corpus, RowSettings(length, VOCAB, packing), seed=0)
    times.append(time.perf_counter())
    assert data.description
    times.append(time.perf_counter())
    token_batches(data.validation(10, ROWS), ROWS, once=True)
    next(token_batches(data.train, ROWS).read(range(ROWS), Position()))
    times.append(time.perf_counter())
    parts = dict(
        zip(("open", "plan", "order", "first batch"), np.diff(times).tolist(), strict=True)
    )
    return {**parts, "in all": times[-1] - times[0], "of CPU": time.process_time() - processor}


def measure(folder: Path, length: int, packing: str, seconds: float) -> dict[str, float]:
    """Returns tokens per second, without padding, and the seconds until the first batch."""
    started = time.perf_counter()
    rows = make_rows(open_dataset(folder).splits["train"], RowSettings(length, VOCAB, packing))
    samples = shuffled([rows], [1.0], seed=0)
    batches = (
        columns for columns, _ in token_batches(samples, ROWS).read(range(ROWS), Position(), 10**9)
    )
    next(batches)
    first = time.perf_counter() - started
    started = time.perf_counter()
    tokens = 0
    while time.perf_counter() - started < seconds:
        tokens += next(batches)["inputs"].size
    rate = tokens * (1 - rows.padding) / (time.perf_counter() - started)
    return {
        "tokens_per_second": rate,
        "first_batch_seconds": first,
        "padding": rows.padding,
        "rows": len(rows),
    }


def anonymous_bytes() -> int:
    """Returns this process's anonymous bytes, which exclude pages of files."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024


def in_process(folder: Path, length: int, packing: str, seconds: float) -> dict[str, float]:
    """Runs `measure`, or `measure_start` for 0 seconds, in a process.

    Adds its memory's growth after the imports.
    """
    command = [
        sys.executable,
        __file__,
        "--measure",
        str(folder),
        str(length),
        packing,
        str(seconds),
    ]
    return json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    )


def table(sizes: list[int], seconds: float, repeats: int, folder: Path) -> None:
    """Prints a row for each packing and dataset."""
    print(
        f"{'rows':<28}{'data':>14}{'tokens/s':>14}{'padding':>10}"
        f"{'first batch, s':>16}{'memory, MB':>12}"
    )
    for tokens in sizes:
        write_dataset(folder / str(tokens), tokens)
    for packing in ("documents", "concatenated"):
        for length in (1024, 4096):
            for tokens in sizes:
                found = [
                    in_process(folder / str(tokens), length, packing, seconds)
                    for _ in range(repeats)
                ]
                median = {name: statistics.median(run[name] for run in found) for name in found[0]}
                print(
                    f"{f'{packing}, {length:,} tokens':<28}{f'{tokens / 1e6:g}M':>14}"
                    f"{median['tokens_per_second']:>14,.0f}{median['padding']:>10.3%}"
                    f"{median['first_batch_seconds']:>16.2f}{median['memory'] / 1e6:>12.1f}",
                    flush=True,
                )


def start_table(documents: int, repeats: int, folder: Path) -> None:
    """Prints a row for each packing: medians after a run that warms the page cache."""
    write_zeros(folder / "many", documents)
    print(f"start with {documents:,} documents, seconds")
    for packing, length in (("documents", 1024), ("documents", 4096), ("concatenated", 4096)):
        found = [in_process(folder / "many", length, packing, 0) for _ in range(repeats + 1)][1:]
        median = {name: statistics.median(run[name] for run in found) for name in found[0]}
        memory = median.pop("memory") / 1e6
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in median.items())
        print(f"{f'{packing}, {length:,} tokens':<28}{parts}; {memory:,.0f} MB", flush=True)


def main(argv: list[str] | None = None) -> None:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=80_000_000,
        help="tokens of the small dataset; the other has five times as many",
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="seconds of each measurement (default 5)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="repeats; the table has medians (default 3)"
    )
    parser.add_argument(
        "--documents", type=int, default=0, help="times the start with so many documents instead"
    )
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.measure:
        folder, length, packing, seconds = arguments.measure
        before = anonymous_bytes()
        settings = Path(folder), int(length), packing
        found = measure(*settings, float(seconds)) if float(seconds) else measure_start(*settings)
        print(json.dumps(found | {"memory": anonymous_bytes() - before}))
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.documents:
            start_table(arguments.documents, arguments.repeats, Path(folder))
            return
        table(
            [arguments.tokens, 5 * arguments.tokens],
            arguments.seconds,
            arguments.repeats,
            Path(folder),
        )


if __name__ == "__main__":
    main()
