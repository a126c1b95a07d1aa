"""The folder of a dataset while it is made: its lock, its files, and whose it is.

`journal.json` is there from the first moment until `dataset.json` is. It says how far the inputs have been read and how
long each file was then; what is longer or not in it was written later and is dropped when the command goes on. A
journal is written when all that it speaks of is on disk, every few seconds. Shards are cut by tokens alone, so neither
batches nor interruptions show in the result. The other choice was to cut the work into segments that are written whole:
that would hold a shard in memory, and give each segment a validation shard of its own.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxtp.data.manifest import DOCUMENTS, MANIFEST, PROMPTS, SPLITS, TOKENIZER, TOKENS
from jaxtp.data.tokenizer_files import TEMPLATE, TOKENIZER_CONFIG
from jaxtp.files import PARTIAL
from jaxtp.prepare.errors import PrepareError

JOURNAL = "journal.json"
INPUTS = "inputs.jsonl"
SEEN = "seen.sha256"
"""File of the first 16 bytes of the hash of each document so far, with --dedup."""

_SHARD = re.compile(rf"({'|'.join(SPLITS)})-\d{{5,}}\.({TOKENS}|{DOCUMENTS}|{PROMPTS})")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Creates the folder, and keeps other commands out until the process ends, however it ends.

    Raises:
      PrepareError: another command is at work there, or it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise PrepareError(f"{folder}: {error.strerror}; name another folder by --out DIR") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise PrepareError(f"{folder} is being written by another command; wait until it ends") from None
    finally:
        os.close(descriptor)


def damaged(path: Path, how: str) -> PrepareError:
    """Returns the error of an unfinished dataset that cannot be gone on with."""
    return PrepareError(f"{path}: damaged, so the command cannot go on: {how}; --overwrite starts afresh")


def require_ours(folder: Path) -> None:
    """Checks that a folder without journal and manifest is empty, so that nothing of others is mixed or deleted.

    Raises:
      PrepareError: it is not.
    """
    foreign = sorted(path.name for path in folder.iterdir() if not path.name.endswith(PARTIAL))
    if foreign:
        raise PrepareError(
            f"{folder} holds other files ({', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''}) and no "
            "dataset; name a folder of its own by --out DIR"
        )


def clear(folder: Path) -> None:
    """Deletes a dataset but for a new journal, by which the folder stays ours; files of others stay too."""
    for name in (MANIFEST, TOKENIZER, TEMPLATE, TOKENIZER_CONFIG, INPUTS, SEEN):
        (folder / name).unlink(missing_ok=True)
    drop_unknown(folder, set())


def clear_leftovers(folder: Path) -> None:
    """Deletes what a finished dataset has no use for."""
    for path in folder.glob(f"*{PARTIAL}"):
        path.unlink()
    for name in (SEEN, JOURNAL):
        (folder / name).unlink(missing_ok=True)


def drop_unknown(folder: Path, known: set[str]) -> None:
    """Deletes the files of shards that the journal does not know."""
    for path in folder.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in known:
            path.unlink()
