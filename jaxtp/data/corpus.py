"""Byte-level corpora that need no download.

A token is a byte, so that the vocabulary is 256 and the loss is nats per byte.
"""

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BYTE_VOCAB_SIZE = 256
_SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "__pycache__",
}
_HELD_OUT_ONE_IN = 20

Tokens = NDArray[np.uint8]


class CorpusError(ValueError):
    """A corpus that is missing, unreadable or too small."""


@dataclass(frozen=True)
class Corpus:
    """Training and validation bytes, and where they come from."""

    train: Tokens
    """`[num_bytes]`."""

    validation: Tokens
    """`[num_bytes]`, held out."""

    source: str
    """For people: what was read."""

    @cached_property  # the loop asks at every save
    def sha256(self) -> str:
        """Of the training bytes followed by the validation bytes."""
        return hashlib.sha256(self.train.tobytes() + self.validation.tobytes()).hexdigest()

    def describe(self) -> dict[str, str | int]:
        """What a run stores of it, to notice when the data changes under a resumed run."""
        return {
            "source": self.source,
            "train_bytes": self.train.size,
            "validation_bytes": self.validation.size,
            "sha256": self.sha256,
        }


def load_corpus(path: Path | None) -> Corpus:
    """The user's text file, or the Python standard library if `path` is None.

    Raises:
      CorpusError: nothing readable there.
    """
    return standard_library() if path is None else text_file(path)


def standard_library(root: Path | None = None) -> Corpus:
    """The sources of the standard library of this Python, in the order of their paths.

    Without test folders, site-packages and `encodings` (tables, not prose). A file is held out if a hash of its
    path says so, about one in twenty.

    Args:
      root: the library's folder; default, that of the running interpreter.

    Raises:
      CorpusError: the folder has no Python sources, as in some minimal or zipped installations.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in paths if not _SKIPPED_FOLDERS.intersection(path.parts)]
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in kept:
        parts[_held_out(path)].append(_read(root / path))
    source = f"standard library of Python {platform.python_version()}, {len(kept)} files"
    corpus = Corpus(_tokens(parts[False]), _tokens(parts[True]), source)
    if not corpus.train.size or not corpus.validation.size:
        raise CorpusError(f"{root}: no Python sources to train on; name a text file of your own with --data.path FILE")
    return corpus


def text_file(path: Path) -> Corpus:
    """Any file, as bytes; the last twentieth is held out.

    Raises:
      CorpusError: the file is missing, a folder, unreadable or empty.
    """
    if path.is_dir():
        raise CorpusError(f"data.path={path} is a folder; name one text file in it")
    content = _read(path)
    if len(content) < _HELD_OUT_ONE_IN:
        raise CorpusError(f"data.path={path} has {len(content)} bytes: too few to train on")
    split = len(content) - len(content) // _HELD_OUT_ONE_IN
    return Corpus(_tokens([content[:split]]), _tokens([content[split:]]), str(path))


def require_length(corpus: Corpus, sequence_length: int) -> None:
    """Checks that both splits hold at least one sequence.

    Raises:
      CorpusError: one is shorter than `sequence_length + 1` bytes.
    """
    for split in ("train", "validation"):
        size = getattr(corpus, split).size
        if size <= sequence_length:
            raise CorpusError(
                f"{corpus.source}: the {split} split has {size} bytes, and data.sequence_length={sequence_length} "
                f"needs {sequence_length + 1}; use a larger file or --data.sequence-length {max(size - 1, 1)}"
            )


def _held_out(path: Path) -> bool:
    digest = hashlib.sha256(path.as_posix().encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CorpusError(f"{path}: {error.strerror}") from None


def _tokens(contents: list[bytes]) -> Tokens:
    return np.frombuffer(b"".join(contents), dtype=np.uint8)
