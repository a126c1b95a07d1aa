"""The data of a run: prepared datasets, a text file, or the standard library."""

import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxtp.config.entry import UserError
from jaxtp.config.reading import open_regular
from jaxtp.config.schema import nearest_file
from jaxtp.data.documents import Documents, InMemory
from jaxtp.data.manifest import BYTES, TRAIN, VALIDATION, TokenizerInfo

BYTE_TOKENIZER = TokenizerInfo(BYTES, None, 256, None)
LIBRARY = "standard library of Python"  # The beginning of the default data's description
PREFIX = "prefix"  # Key in `Corpus.describe`: the tokens that each document starts with
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
_PREPARED_FIRST = re.compile(
    r"\.(jsonl|ndjson|jsonlines|json|parquet|pq|csv|tsv|gz|zst)", re.IGNORECASE
)


class CorpusError(UserError):
    """A corpus is missing, unreadable, too small or inconsistent."""


@dataclass(frozen=True)
class Source:
    """The data of a path: one part of a mixture."""

    name: str
    weight: float
    train: Documents
    validation: Documents | None
    """The documents to evaluate on, if there are any."""
    tokenizer: TokenizerInfo = BYTE_TOKENIZER


@dataclass(frozen=True)
class Corpus:
    """All data of a run."""

    sources: tuple[Source, ...]
    tokenizer: TokenizerInfo
    description: str

    @property
    def unit(self) -> str:
        """The unit of the data: `bytes` or `tokens`."""
        return "bytes" if self.tokenizer.kind == BYTES else "tokens"

    @property
    def has_pairs(self) -> bool:
        """Like `Documents.has_pairs`."""
        return self.sources[0].train.has_pairs

    @property
    def train_tokens(self) -> int:
        """Training tokens of all sources."""
        return sum(source.train.num_tokens for source in self.sources)

    @property
    def loss_tokens(self) -> int | None:
        """Number of tokens with a loss; None if no document has a prompt, so that all tokens count
        except the first of each document."""
        if not any(source.train.has_prompts for source in self.sources):
            return None
        return sum(source.train.num_loss_tokens for source in self.sources)

    @property
    def validation_tokens(self) -> int:
        """Validation tokens of all sources."""
        return sum(
            source.validation.num_tokens for source in self.sources if source.validation is not None
        )

    def not_evaluated(self) -> str | None:
        """Describes the sources that have no validation data; None if all have some."""
        missing = [source.name for source in self.sources if source.validation is None]
        if not missing:
            return None
        extent = "none" if len(missing) == len(self.sources) else "partly"
        return (
            f"{extent}: {' and '.join(missing)} {'has' if len(missing) == 1 else 'have'} no "
            "held-out documents; prepare again with --held-out 0.05, or name other data by "
            "--data.validation"
        )

    @cached_property  # every save reads it
    def identity(self) -> str:
        """Hash of all documents and weights."""
        parts = [
            f"{s.weight} {s.train.identity} {s.validation and s.validation.identity}"
            for s in self.sources
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def describe(self) -> dict[str, object]:
        """Returns a record of the data, for `jaxtp generate`, and to detect changes on resume."""
        record: dict[str, object] = {
            "source": self.description,
            "train_tokens": self.train_tokens,
            "validation_tokens": self.validation_tokens,
            "tokenizer": self.tokenizer.name,
            "sha256": self.identity,
        }
        # Older runs have no prefix.
        if self.tokenizer.prefix:
            record[PREFIX] = list(self.tokenizer.prefix)
        return record


def load_corpus(
    path: Path | None, mixture: Mapping[str, float] | None = None, validation: Path | None = None
) -> Corpus:
    """Opens the data of a run, by default the standard library.

    Paths are prepared datasets, whose tokens are not read yet, or text files.

    Args:
      mixture: weights by path; replaces `path`.
      validation: other data to evaluate on: its validation split, or all of it if that is empty.
    """
    if mixture:
        sources = []
        for name, weight in mixture.items():
            source = _open(Path(name))
            sources.append(replace(source, name=name, weight=weight))
        description = " + ".join(f"{weight:g} x {name}" for name, weight in mixture.items())
    else:
        sources = [_open(path) if path else standard_library()]
        description = sources[0].name
    opened = list(sources)
    if validation:
        other = _open(validation)
        opened.append(other)
        # A dataset for evaluation may have no validation split.
        held_out = other.validation or other.train
        sources = [replace(source, validation=held_out) for source in sources]
    _require_one_tokenizer(opened)
    _require_one_kind(opened)
    for source in sources:
        if not source.train.num_tokens:
            raise CorpusError(
                f"{source.name} has no documents to train on; prepare it with a smaller --held-out"
            )
    return Corpus(tuple(sources), sources[0].tokenizer, description)


def standard_library(root: Path | None = None) -> Source:
    """Returns a standard library's source files; by default the interpreter's.

    Leaves out tests, site-packages and `encodings`, which are tables. Holds out about 1 in 20
    files, by a hash of their paths.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _SKIPPED_FOLDERS  # it does not enter them
        paths += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    train: list[bytes] = []
    validation: list[bytes] = []
    for path in sorted(paths):
        digest = hashlib.sha256(path.as_posix().encode()).digest()
        is_held_out = int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0
        (validation if is_held_out else train).append(_read(root / path))
    if not any(train) or not any(validation):
        raise CorpusError(
            f"{root}: no Python sources to train on; name a text file of your own with "
            "--data.path FILE"
        )
    name = f"{LIBRARY} {platform.python_version()}, {len(paths)} files"
    return Source(name, 1.0, _in_memory(train, str(root)), _in_memory(validation, str(root)))


def text_file(path: Path) -> Source:
    """Returns a file as one document, whose last twentieth is held out."""
    if _PREPARED_FIRST.fullmatch(path.suffix) and path.exists():
        raise CorpusError(
            f"data.path={path} is not plain text: make a dataset of it by jaxtp prepare {path} "
            "--out FOLDER (with --field NAME, or --messages NAME for conversations), and name that "
            "folder"
        )
    if not path.exists():
        raise CorpusError(
            f"data.path={path}: there is no such file or dataset{nearest_file(path)}; jaxtp "
            "prepare makes a dataset"
        )
    content = _read(path)
    if len(content) < _HELD_OUT_ONE_IN:
        raise CorpusError(f"data.path={path} has {len(content)} bytes: too few to train on")
    split = len(content) - len(content) // _HELD_OUT_ONE_IN
    name = str(path)
    return Source(
        name, 1.0, _in_memory([content[:split]], name), _in_memory([content[split:]], name)
    )


def _open(path: Path) -> Source:
    from jaxtp.data.copies import local

    folder = local(path)
    if not folder.is_dir():
        return text_file(folder)
    from jaxtp.data.store import open_dataset

    dataset = open_dataset(folder)
    train = dataset.splits[TRAIN]
    validation: Documents | None = dataset.splits[VALIDATION]
    if not dataset.splits[VALIDATION].num_tokens:
        validation = None
    return Source(str(path), 1.0, train, validation, dataset.tokenizer)


def _require_one_tokenizer(sources: Sequence[Source]) -> None:
    first, *other_sources = sources
    tokenizer = first.tokenizer
    for other in other_sources:
        names = f"{first.name} and {other.name}"
        if (other.tokenizer.name, other.tokenizer.vocab_size) != (
            tokenizer.name,
            tokenizer.vocab_size,
        ):
            raise CorpusError(
                f"{names} were not made by the same tokenizer: prepare one of them again, with "
                "--tokenizer FOLDER/tokenizer.json of the other"
            )
        if other.tokenizer != tokenizer:
            raise CorpusError(
                f"the documents of {names} begin or end with different tokens (before them "
                f"{list(tokenizer.prefix)} and {list(other.tokenizer.prefix)}, after them "
                f"{tokenizer.eos_id} and {other.tokenizer.eos_id}): prepare one of them again, "
                "with the same --bos and --eos"
            )


def _require_one_kind(sources: Sequence[Source]) -> None:
    names = {source.train.has_pairs: source.name for source in sources}
    if len(names) == 2:
        raise CorpusError(
            f"{names[True]} has pairs of a chosen and a rejected answer, but {names[False]} does "
            "not: name datasets of one kind; jaxtp prepare --preference makes pairs"
        )


def _in_memory(contents: list[bytes], source: str) -> InMemory:
    lengths = np.array(list(map(len, filter(None, contents))), np.int64)
    return InMemory(np.frombuffer(b"".join(contents), np.uint8), lengths, source)


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise CorpusError(f"{path}: {error.strerror}") from None
    except MemoryError:
        raise CorpusError(
            f"{path}: {path.stat().st_size:,} bytes do not fit in memory; jaxtp prepare {path} "
            "--out FOLDER makes a dataset that is memory-mapped"
        ) from None
