"""`jaxtp prepare`."""

import json
from collections.abc import Sequence
from pathlib import Path

from jaxtp.config import entry
from jaxtp.config.command_line import Command
from jaxtp.config.files import require_writable, write_json
from jaxtp.config.reading import MAX_JSON, read_bytes
from jaxtp.data.copies import local, sending
from jaxtp.data.manifest import MANIFEST, DatasetError
from jaxtp.data.prepare.prepare_config import FIRST, PrepareConfig, check
from jaxtp.data.prepare.run import prepare
from jaxtp.data.prepare.show import show
from jaxtp.data.store import open_dataset, verify

PROGRAM = "jaxtp prepare"
DESCRIPTION = """Makes a dataset of tokens out of text, JSONL, Parquet and folders of source files.

jaxtp prepare books/ more.jsonl.zst --out data/books --tokenizer models/llama

Each text or source file is a document, and so is each line of JSONL and each row of Parquet.
After an interruption the same command resumes, and the result is the same to the byte.
jaxtp/data/store.py documents the format.

jaxtp prepare --verify data/books

compares a dataset with its checksums.

jaxtp prepare chats.jsonl --tokenizer models/llama --messages messages --show 3

shows what would be learned of the first conversations, and writes nothing.
"""
COMMAND = Command(program=PROGRAM, schema=PrepareConfig, description=DESCRIPTION, short_help=FIRST)
INTERRUPTED = "interrupted; the same command, without --overwrite, resumes"


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, 1 for a damaged dataset, 2 for a user error, 130 for Ctrl-C."""
    return entry.attempt(PROGRAM, lambda: _run(argv), INTERRUPTED)


def _run(argv: Sequence[str]) -> int:
    config, _ = COMMAND.load(argv)
    check(config, has_layout=False)
    require_writable("--json", config.json)
    if config.verify is not None:
        return _verify(local(config.verify), config.json)
    if config.show is not None:
        show(config, config.show)
    elif config.out is not None:
        with sending(config.out, resumes=True, replaces=config.overwrite) as out:
            prepare(out, config)
            if config.json is not None:
                record = json.loads(read_bytes(out / MANIFEST, MAX_JSON))
                write_json("--json", config.json, {"folder": str(config.out), **record})
    return 0


def _verify(folder: Path, file: Path | None) -> int:
    tokens: dict[str, int] = {}
    problems: list[str] = []
    try:
        dataset = open_dataset(folder)
        tokens = {name: split.num_tokens for name, split in dataset.splits.items()}
        for problem in verify(dataset):
            problems.append(problem)
            print(problem)
    except DatasetError as error:
        if not (folder / MANIFEST).exists():
            raise
        problems.append(str(error))
        print(error)
    counts = "".join(f"{name} {count:,} tokens, " for name, count in tokens.items())
    print(f"{folder}: {counts}{len(problems) or 'no'} problem{'' if len(problems) == 1 else 's'}")
    write_json("--json", file, {"folder": str(folder), "tokens": tokens, "problems": problems})
    return 1 if problems else 0


if __name__ == "__main__":
    entry.run(PROGRAM, main)
