"""The folder of a dataset in the making: its journal, and the files that grow.

`begin` decides whether a command starts, resumes or finds finished a dataset, or must leave the folder alone.

`journal.json` exists from the start until `dataset.json` does. It records the position in the inputs and each file's
length there. It is written every few seconds, after everything that it describes is on disk; a resume drops the rest.
Shards end only by their number of tokens, so neither batches nor interruptions affect the result.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import Field

from jaxtp.config import schema
from jaxtp.config.files import PARTIAL, sha256, sync_file, write_atomically
from jaxtp.config.schema import expand
from jaxtp.data.documents import Tokens
from jaxtp.data.manifest import (
    DOCUMENTS,
    MANIFEST,
    OFFSET,
    PROMPT,
    PROMPTS,
    SPLITS,
    TOKENIZER,
    TOKENS,
    Count,
    DatasetError,
    Manifest,
    Shard,
    TokenizerInfo,
    parse,
    read_manifest,
    shard_file,
)
from jaxtp.data.prepare.conversations import Conversations, template_checksum
from jaxtp.data.prepare.prepare_config import PrepareConfig, arguments
from jaxtp.data.prepare.readers import Fields, Position, PrepareError, Source
from jaxtp.data.prepare.sources import Listing, differences, listing, parse_listing
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import Tokenizer
from jaxtp.data.tokenizer_files import TEMPLATE, TOKENIZER_CONFIG

JOURNAL = "journal.json"
INPUTS = "inputs.jsonl"
SEEN = "seen.sha256"
"""File of the hashes of all documents so far, with --dedup."""

_MAX_LINES = 10
_SHARD = re.compile(rf"({'|'.join(SPLITS)})-\d{{5,}}\.({TOKENS}|{DOCUMENTS}|{PROMPTS})")
_BUFFER = 2**20
_DIGEST = 16
"""Stored bytes of each hash: two of 10^12 documents collide with a probability of 10^-14."""


def damaged(path: Path, how: str) -> PrepareError:
    """Returns the error for a dataset that cannot be resumed."""
    return PrepareError(f"{path}: damaged, so the command cannot go on: {how}; --overwrite starts afresh")


@dataclass
class Progress:
    """A split's full shards, and the open shard's content."""

    shards: list[Shard] = field(default_factory=list)
    documents: Count = 0
    tokens: Count = 0
    text_bytes: Count = 0
    longest: Count = 0


@dataclass(frozen=True)
class Job:
    """A command: output folder, settings and inputs."""

    out: Path
    config: PrepareConfig
    sources: list[Source]
    tokenizer: Tokenizer | None
    """None if it is to be trained."""
    conversations: Conversations | None

    @property
    def fields(self) -> Fields:
        """The columns that make a document."""
        return self.config.fields if self.conversations is None else self.conversations.fields


@dataclass
class State:
    """Content of the journal."""

    arguments: Mapping[str, object]
    tokenizer: TokenizerInfo | None = None
    """None until it is known."""
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """`batches.threshold`; None in datasets that older versions started, which held out the share itself."""
    position: Position = Position(0, 0)
    seen: Annotated[int, Field(ge=0)] = 0
    """Number of valid hashes in the file `SEEN`."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of items that were left out, by reason."""
    splits: dict[str, Progress] = field(default_factory=lambda: {name: Progress() for name in SPLITS})

    def skip(self, kind: str, count: int = 1) -> None:
        """Counts skipped items."""
        if count:
            self.skipped[kind] = self.skipped.get(kind, 0) + count

    def save(self, out: Path) -> None:
        """Replaces the journal; its contents must describe data on disk."""
        write_atomically(out / JOURNAL, json.dumps(asdict(self)).encode())


def begin(job: Job) -> State | None:
    """Returns the state to resume from; None if finished."""
    out, config = job.out, job.config
    settings = arguments(config) | ({} if config.messages is None else {"template": template_checksum(config)})
    exists = (out / MANIFEST).exists() or (out / JOURNAL).exists()
    if exists and config.overwrite:
        _require_inputs_elsewhere(out, config)
        State(settings).save(out)  # the journal marks a half-cleared folder as ours
        for name in (MANIFEST, TOKENIZER, TEMPLATE, TOKENIZER_CONFIG, INPUTS, SEEN):
            (out / name).unlink(missing_ok=True)
        drop_unknown(out, set())
    if (out / MANIFEST).exists():
        try:
            manifest = read_manifest(out)
            open_dataset(out)  # checks the size of every file
        except DatasetError as error:
            raise PrepareError(f"{error}; --overwrite starts afresh") from None
        _refuse(out, "a dataset", _changed(manifest, job, settings, None))
        clear_leftovers(out)
        return None
    state = _load(out)
    if state is None:
        _require_empty(out)
    else:
        # unread inputs may differ, unless the tokenizer was trained on them
        is_trained = config.train_bpe is not None and state.tokenizer is not None
        read = None if is_trained else state.position.source + (state.position.item > 0)
        if changed := _changed(state, job, settings, read):
            if any(progress.shards or progress.documents for progress in state.splits.values()):
                _refuse(out, "an unfinished dataset", changed)
            state = None
    if state is None:
        state = State(settings)
        state.save(out)
    lines = [json.dumps(record) + "\n" for record in listing(job.sources)]
    write_atomically(out / INPUTS, "".join(lines).encode())
    return state


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Creates and locks the folder until the process ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise PrepareError(f"{out}: {error.strerror}; name another folder by --out DIR") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise PrepareError(f"{out} is being written by another command; wait until it ends") from None
    finally:
        os.close(descriptor)


def clear_leftovers(out: Path) -> None:
    """Deletes files that a finished dataset does not need."""
    for path in (*out.glob(f"*{PARTIAL}"), out / SEEN, out / JOURNAL):
        path.unlink(missing_ok=True)


def drop_unknown(out: Path, known: set[str]) -> None:
    """Deletes shard files that are not in the journal."""
    for path in out.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in known:
            path.unlink()


def _load(out: Path) -> State | None:
    path = out / JOURNAL
    try:
        state = parse(State, path.read_bytes())
        if state.splits.keys() != set(SPLITS) or min(state.position) < 0:
            raise DatasetError(f"splits {', '.join(state.splits)}, position {tuple(state.position)}")
        return state
    except FileNotFoundError:
        return None
    except (OSError, DatasetError) as error:
        raise damaged(path, str(error)) from None


def _require_empty(out: Path) -> None:
    foreign = sorted(path.name for path in out.iterdir() if not path.name.endswith(PARTIAL))
    if foreign:
        raise PrepareError(
            f"{out} holds other files ({', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''}) and no "
            "dataset; name a folder of its own by --out DIR"
        )


def _require_inputs_elsewhere(out: Path, config: PrepareConfig) -> None:
    for path in (*(expand(Path(name)) for name in config.inputs), config.tokenizer, config.template):
        if path is not None and path.resolve().is_relative_to(out.resolve()):
            raise PrepareError(f"--overwrite would delete {path} with {out}; copy it elsewhere, or name another --out")


def _changed(before: Manifest | State, job: Job, settings: dict[str, object], read: int | None) -> list[str]:
    """Returns changed settings, or else changes of the first `read` inputs."""
    defaults = arguments(PrepareConfig())  # of settings that are newer than the dataset
    changed = schema.differences({**defaults, **before.arguments}, settings)
    if before.tokenizer is not None and job.tokenizer is not None:
        old, new = asdict(before.tokenizer), asdict(job.tokenizer.info)
        changed += schema.differences({"tokenizer": old}, {"tokenizer": new})
    return changed or differences(_listed(job.out)[:read], listing(job.sources)[:read])


def _refuse(out: Path, what: str, changed: list[str]) -> None:
    if changed:
        more = [f"and {len(changed) - _MAX_LINES} more"] if len(changed) > _MAX_LINES else []
        lines = "\n".join(f"  {line}" for line in [*changed[:_MAX_LINES], *more])
        raise PrepareError(
            f"{out} holds {what} that was made otherwise (there -> asked for):\n{lines}\n"
            "--overwrite starts afresh; another --out DIR keeps it. Nothing was changed."
        )


def _listed(out: Path) -> Listing:
    path = out / INPUTS
    try:
        return parse_listing(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None


def _open_cut(path: Path, size: int) -> BinaryIO:
    """Opens a file that grows, without what follows its first `size` bytes."""
    file = path.open("a+b", _BUFFER)
    if path.stat().st_size < size:
        file.close()
        raise damaged(path, "it is shorter than it was")
    file.truncate(size)
    return file


class SplitWriter:
    """Appends documents to a split, first cut to `progress`."""

    def __init__(
        self, folder: Path, split: str, tokenizer: TokenizerInfo, prompts: bool, shard_tokens: int, progress: Progress
    ):
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, tokenizer.dtype, shard_tokens
        self._suffixes = (TOKENS, DOCUMENTS, PROMPTS) if prompts else (TOKENS, DOCUMENTS)
        self.progress = progress
        self._files: dict[str, BinaryIO] = {}
        for index, shard in enumerate(progress.shards):
            sizes = shard.file_sizes(self._dtype)
            for suffix in self._suffixes:
                path = self._path(index, suffix)
                if not path.exists() or path.stat().st_size != sizes.get(suffix):
                    raise damaged(path, f"it should have {sizes.get(suffix, 0):,} bytes")
        if progress.documents:
            sizes = self._shard(dict.fromkeys(self._suffixes, "")).file_sizes(self._dtype)
            self._files = {suffix: _open_cut(self._open_path(suffix), sizes[suffix]) for suffix in self._suffixes}

    def append(self, parts: Iterable[Tokens], prompt: int, text_bytes: int) -> int:
        """Writes a document with a nonempty part; returns its number of tokens."""
        if not self._files:
            self._files = {suffix: _open_cut(self._open_path(suffix), 0) for suffix in self._suffixes}
            self._files[DOCUMENTS].write(bytes(OFFSET.itemsize))
        length, progress = 0, self.progress
        for part in parts:
            length += len(part)
            self._files[TOKENS].write(part.astype(self._dtype, copy=False).tobytes())
        progress.documents += 1
        progress.tokens += length
        progress.text_bytes += text_bytes
        progress.longest = max(progress.longest, length)
        self._files[DOCUMENTS].write(progress.tokens.to_bytes(OFFSET.itemsize, "little"))
        if PROMPTS in self._suffixes:
            self._files[PROMPTS].write(prompt.to_bytes(PROMPT.itemsize, "little"))
        if progress.tokens >= self._shard_tokens:
            self.end_shard()
        return length

    def save(self) -> None:
        """Flushes the open shard to disk."""
        for file in self._files.values():
            sync_file(file)

    def end_shard(self) -> None:
        """Closes the open shard, if any."""
        if self._files:
            self.close()
            shard = self._shard({suffix: sha256(self._open_path(suffix)) for suffix in self._suffixes})
            self.progress = Progress([*self.progress.shards, shard])

    def close(self) -> None:
        """Flushes the files to disk and closes them."""
        try:
            self.save()
        finally:
            files, self._files = self._files, {}
            for file in files.values():
                file.close()

    def files(self) -> set[str]:
        """Returns the file names of all shards."""
        count = len(self.progress.shards) + bool(self.progress.documents)
        return {self._path(index, suffix).name for index in range(count) for suffix in self._suffixes}

    def _path(self, shard: int, suffix: str) -> Path:
        return shard_file(self._folder, self._split, shard, suffix)

    def _open_path(self, suffix: str) -> Path:
        return self._path(len(self.progress.shards), suffix)

    def _shard(self, sums: dict[str, str]) -> Shard:
        progress = self.progress
        return Shard(progress.documents, progress.tokens, progress.text_bytes, progress.longest, sums)


class Seen:
    """Document hashes, in memory and in a file cut to `count` hashes."""

    def __init__(self, path: Path, count: int):
        self._file = _open_cut(path, count * _DIGEST)
        self._file.seek(0)
        self._digests = {self._file.read(_DIGEST) for _ in range(count)}

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, digest: bytes) -> bool:
        """Adds a hash; returns whether it is new."""
        short = digest[:_DIGEST]
        if short in self._digests:
            return False
        self._digests.add(short)
        self._file.write(short)
        return True

    def save(self) -> None:
        """Flushes the file to disk."""
        sync_file(self._file)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
