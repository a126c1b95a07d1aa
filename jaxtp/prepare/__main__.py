"""`jaxtp prepare`."""

from collections.abc import Sequence
from pathlib import Path

from jaxtp import config as configuration
from jaxtp import entry
from jaxtp.data.store import DatasetError, open_dataset, verify
from jaxtp.prepare.config import PrepareConfig, check
from jaxtp.prepare.run import prepare

PROGRAM = "jaxtp prepare"
DESCRIPTION = """Makes a dataset of tokens out of text, JSONL, Parquet and folders of source files.

jaxtp prepare books/ more.jsonl.zst --out data/books --train-bpe 8192

A text or source file is a document; so is each line of JSONL and each row of Parquet. Killed or interrupted, the same
command goes on, and the result is the same to the byte. The format is documented in jaxtp/data/store.py.

jaxtp prepare --verify data/books

compares a dataset with its checksums.
"""

INTERRUPTED = "interrupted; the same command, without --overwrite, goes on"


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0, 1 for a damaged dataset, 2 for a user's mistake, 130 for Ctrl-C."""
    return entry.attempt(PROGRAM, lambda: _run(argv), INTERRUPTED)


def _run(argv: Sequence[str]) -> int:
    config, _ = configuration.load(PrepareConfig, argv, prog=PROGRAM, description=DESCRIPTION)
    check(config)
    if config.verify is not None:
        return _verify(config.verify)
    if config.out is not None:
        prepare(config.out, config)
    return 0


def _verify(folder: Path) -> int:
    try:
        dataset = open_dataset(folder)
    except DatasetError as error:
        if not (folder / "dataset.json").exists():
            return entry.fail(PROGRAM, error)
        print(error)
        return 1
    problems = 0
    for problem in verify(dataset):
        problems += 1
        print(problem)
    counts = ", ".join(f"{name} {split.num_tokens:,} tokens" for name, split in dataset.splits.items())
    print(f"{folder}: {counts}, {problems or 'no'} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    entry.run(PROGRAM, main)
