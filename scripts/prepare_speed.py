"""Times `jaxtp prepare` on the standard library's sources and a JSONL file, and reading the data.

    python scripts/prepare_speed.py
    python scripts/prepare_speed.py --conversations 100000 --tokenizer models/smollm2

The second times conversations of six messages instead, with a model's tokenizer and template.
`PYTHONPATH` chooses another checkout of the package.

Each command is a separate process; its time includes the start, and the table has its peak memory.
Numbers are medians of `--repeats`. For comparison, the tokenizers library alone encodes the same
text in this process.
"""

import argparse
import hashlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import train_bpe
from tokenizers import Tokenizer

from jaxtp.data.manifest import read_manifest
from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.data.store import Split, open_dataset
from jaxtp.data.tokenizer import load_tokenizer

LIBRARY = [
    sysconfig.get_paths()["stdlib"],
    "--include",
    "*.py",
    "--exclude",
    "site-packages",
    "--exclude",
    "test",
]
LIBRARY += ["--exclude", "tests", "--on-error", "skip", "--held-out", "0"]
READS = 200_000


def seconds(action: Callable[[], object]) -> float:
    """Returns the duration of an action."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def command(out: Path, *arguments: str) -> tuple[float, float]:
    """Runs the command in a new process; returns seconds and peak MB."""
    run = [sys.executable, __file__, "--command", *arguments, "--out", str(out), "--overwrite"]
    started = time.perf_counter()
    output = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    return time.perf_counter() - started, float(output.split()[-1])


def most_resident() -> float:
    """Returns this process's peak resident MB; a child inherits `ru_maxrss` from its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


def row(name: str, out: Path, repeats: int, *arguments: str) -> None:
    found = [command(out, *arguments) for _ in range(repeats)]
    took, memory = (statistics.median(values) for values in zip(*found, strict=True))
    split = read_manifest(out).splits["train"]
    size = split.text_bytes / 1e6
    print(
        f"{name:<44}{size:>8.1f} MB{split.tokens / 1e6:>9.2f} M tokens{took:>8.2f} "
        f"s{size / took:>8.1f} MB/s{memory:>8,.0f} MB of memory",
        flush=True,
    )


def write_jsonl(path: Path, split: Split, copies: int) -> None:
    """Writes `copies` of the documents of a split of bytes."""
    with path.open("w", encoding="utf-8") as file:
        for copy in range(copies):
            for index in range(split.num_documents):
                file.write(
                    json.dumps({"id": copy, "text": split.document(index).tobytes().decode()})
                    + "\n"
                )


def compare_with_library(folder: Path) -> None:
    """Times the library alone on all cores, and checks that each document decodes to its bytes."""
    tokenizer = load_tokenizer(folder / "bpe")
    split = open_dataset(folder / "bpe").splits["train"]
    decoded = [tokenizer.decode(split.document(index)) for index in range(split.num_documents)]
    plain = open_dataset(folder / "bytes").splits["train"]
    assert decoded == [plain.document(index).tobytes() for index in range(plain.num_documents)]
    texts = [document.decode() for document in decoded]
    library = Tokenizer.from_file(str(folder / "bpe/tokenizer.json"))
    took = seconds(lambda: library.encode_batch_fast(texts, add_special_tokens=False))
    print(f"\n{len(decoded):,} documents decode to their bytes")
    print(
        f"the library alone encodes them in {took:.2f} s, "
        f"{sum(map(len, decoded)) / 1e6 / took:.1f} MB/s"
    )


def write_conversations(path: Path, count: int) -> None:
    """Writes conversations of three questions and their answers, of 5 to 60 words each."""
    source = random.Random(0)
    words = Path(json.__file__).read_text().split()
    with path.open("w") as file:
        for _ in range(count):
            messages = []
            for turn in range(6):
                text = " ".join(source.choices(words, k=source.randint(5, 60)))
                messages.append({"role": ("user", "assistant")[turn % 2], "content": text})
            file.write(json.dumps({"messages": messages}) + "\n")


def time_conversations(folder: Path, count: int, tokenizer: str) -> None:
    """Prints wall and CPU seconds of `jaxtp prepare`, and a digest of the tokens that it wrote."""
    rows = folder / "rows.jsonl"
    write_conversations(rows, count)
    out = folder / "out"
    took, memory = command(
        out, str(rows), "--messages", "messages", "--tokenizer", tokenizer, "--held-out", "0"
    )
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    digest = hashlib.sha256()
    for shard in sorted(out.glob("train-*")):
        digest.update(shard.read_bytes())
    print(
        f"{count:,} conversations, {read_manifest(out).splits['train'].tokens:,} tokens, "
        f"{took:.1f} s, {usage.ru_utime + usage.ru_stime:.1f} CPU s, {memory:,.0f} MB of memory, "
        f"sha256 of the shards {digest.hexdigest()[:16]}"
    )


def read_back(split: Split) -> None:
    """Times random reads of documents with one thread and with four."""
    order = np.random.default_rng(0).integers(0, split.num_documents, READS).tolist()
    took = seconds(lambda: [split.document(index, 0, 128) for index in order])
    print(f"{READS / took:,.0f} documents/s read by one thread, {1e6 * took / READS:.1f} us each")
    with ThreadPoolExecutor(4) as pool:
        parts = [order[i::4] for i in range(4)]
        took = seconds(
            lambda: list(pool.map(lambda part: [split.document(i, 0, 128) for i in part], parts))
        )
    print(f"{READS / took:,.0f} documents/s read by four threads")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--copies", type=int, default=8, help="copies of the sources in the JSONL file (default 8)"
    )
    parser.add_argument("--conversations", type=int, help="time so many conversations instead")
    parser.add_argument("--tokenizer", help="a model's folder, for --conversations")
    arguments = parser.parse_args(argv)
    if arguments.conversations:
        with tempfile.TemporaryDirectory() as name:
            time_conversations(Path(name), arguments.conversations, arguments.tokenizer)
        return
    load = f"load average {os.getloadavg()[0]:.1f} at the start"
    print(
        f"{os.cpu_count()} cores, {load}, Python {sys.version.split()[0]}; sources of the standard "
        "library\n"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        repeats = arguments.repeats
        row("sources, bytes", folder / "bytes", repeats, *LIBRARY)
        train_bpe.main([*LIBRARY, "--size", "8192", "--out", str(folder / "t")])
        given = ["--tokenizer", str(folder / "t")]
        row("sources, --tokenizer", folder / "bpe", repeats, *LIBRARY, *given)
        rows = folder / "rows.jsonl"
        write_jsonl(rows, open_dataset(folder / "bytes").splits["train"], arguments.copies)
        row("JSONL, bytes", folder / "jsonl", repeats, str(rows), "--held-out", "0")
        row("JSONL, --tokenizer", folder / "encoded", repeats, str(rows), "--held-out", "0", *given)
        compare_with_library(folder)
        read_back(open_dataset(folder / "encoded").splits["train"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--command"]:
        code = prepare(sys.argv[2:])
        print(most_resident())
        sys.exit(code)
    main()
