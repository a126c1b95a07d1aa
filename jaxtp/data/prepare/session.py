"""The folder of an unfinished dataset: its journal, and the files that grow.

`begin` decides whether a command starts or resumes a dataset, finds it finished, or refuses the
folder.

`journal.json` exists from the start until `dataset.json` exists. It records the position in the
inputs, and the length of each file at this position. It is written every few seconds, once all data
that it describes is on disk; a resumed command drops later data. The number of tokens alone decides
where a shard ends, so neither batches nor interruptions affect the result.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import IO, Annotated

from pydantic import Field

from jaxtp.config import schema
from jaxtp.config.files import (
    PARTIAL,
    open_directly,
    require_empty,
    sha256,
    sync_file,
    write_atomically,
)
from jaxtp.config.reading import first_lines, read_bytes
from jaxtp.config.schema import expand
from jaxtp.data.documents import Tokens
from jaxtp.data.manifest import (
    DOCUMENTS,
    INPUTS,
    MANIFEST,
    MAX_ITEMS,
    OFFSET,
    ORIGIN,
    ORIGINS,
    PROMPT,
    PROMPTS,
    SPLITS,
    TOKENIZER,
    TOKENS,
    Count,
    DatasetError,
    Input,
    Manifest,
    Shard,
    TokenizerInfo,
    file_sizes,
    parse,
    read_inputs,
    read_manifest,
    shard_file,
)
from jaxtp.data.prepare.conversations import Conversations
from jaxtp.data.prepare.prepare_config import PrepareConfig, arguments
from jaxtp.data.prepare.readers import Fields, Position, PrepareError, Source
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import Tokenizer
from jaxtp.data.tokenizer_files import TEMPLATE, TOKENIZER_CONFIG

JOURNAL = "journal.json"
HASHES = "seen.sha256"  # File of the hashes of all documents so far, with --dedup

_MAX_LINES = 10
_SHARD = re.compile(rf"({'|'.join(SPLITS)})-\d{{5,}}\.({TOKENS}|{DOCUMENTS}|{PROMPTS}|{ORIGINS})")
_BUFFER = 2**20
_MAX_JOURNAL = 2**30  # Maximum bytes of the journal


def damaged_error(path: Path, how: str) -> PrepareError:
    """Returns the error for a dataset that cannot be resumed."""
    return PrepareError(
        f"{path}: damaged, so the command cannot resume: {how}; --overwrite starts over"
    )


@dataclass
class Progress:
    """The full shards of a split, and the content of its open shard."""

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
    tokenizer: Tokenizer
    conversations: Conversations | None
    fields: Fields


@dataclass
class State:
    """Content of the journal."""

    arguments: Mapping[str, object]
    tokenizer: TokenizerInfo | None = None  # None until it is written
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The result of `batches.threshold`; None for a dataset that an older version started: its
    threshold is `held_out`."""
    day: str | None = None  # the day that the chat template writes
    has_origins: bool = False  # false if an older version started the dataset
    position: Position = Position(0, 0)
    seen: Annotated[int, Field(ge=0)] = 0  # number of valid hashes in the file `HASHES`
    # Number of items that were left out, by reason
    skipped: dict[str, int] = field(default_factory=dict)
    splits: dict[str, Progress] = field(
        default_factory=lambda: {name: Progress() for name in SPLITS}
    )

    def skip(self, kind: str, count: int = 1) -> None:
        """Counts skipped items."""
        if count:
            self.skipped[kind] = self.skipped.get(kind, 0) + count

    def save(self, out: Path) -> None:
        """Replaces the journal, which must describe data on disk."""
        write_atomically(out / JOURNAL, json.dumps(asdict(self)).encode())


def begin(job: Job) -> State | None:
    """Returns the state to resume from; None if the dataset is finished."""
    out = job.out
    config = job.config
    settings = arguments(config)
    if job.conversations is not None:
        settings["template"] = job.conversations.checksum
    exists = (out / MANIFEST).exists() or (out / JOURNAL).exists()
    if exists and config.overwrite:
        _require_inputs_elsewhere(out, config)
        # The journal marks a half-cleared folder as jaxtp's.
        State(settings, has_origins=True).save(out)
        for name in (MANIFEST, TOKENIZER, TEMPLATE, TOKENIZER_CONFIG, INPUTS, HASHES):
            (out / name).unlink(missing_ok=True)
        drop_unknown(out, set())
    if (out / MANIFEST).exists():
        try:
            manifest = read_manifest(out)
            open_dataset(out)  # checks the size of every file
        except DatasetError as error:
            raise PrepareError(f"{error}; --overwrite starts over") from None
        _refuse(out, "a dataset", _changed(manifest, job, settings, None))
        drop_leftovers(out)
        return None
    state = _load(out)
    if state is None:
        require_empty(out, "dataset")
    else:
        # Inputs that were not read may differ.
        num_read = state.position.source + (state.position.item > 0)
        changed = _changed(state, job, settings, num_read)
        if any(progress.shards or progress.documents for progress in state.splits.values()):
            _refuse(out, "an unfinished dataset", changed)
        elif changed:
            state = None
    if state is None:
        state = State(settings, has_origins=True)
        state.save(out)
    lines = [json.dumps(asdict(record)) + "\n" for record in _inputs(job)]
    write_atomically(out / INPUTS, "".join(lines).encode())
    return state


def drop_leftovers(out: Path) -> None:
    """Deletes files that a finished dataset does not need."""
    for path in (*out.glob(f"*{PARTIAL}"), out / HASHES, out / JOURNAL):
        path.unlink(missing_ok=True)


def drop_unknown(out: Path, names: set[str]) -> None:
    """Deletes shard files that are not in the journal."""
    for path in out.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in names:
            path.unlink()


def _load(out: Path) -> State | None:
    path = out / JOURNAL
    try:
        state = parse(State, read_bytes(path, _MAX_JOURNAL))
        if state.splits.keys() != set(SPLITS) or min(state.position) < 0:
            raise DatasetError(
                f"splits {', '.join(state.splits)}, position {tuple(state.position)}"
            )
        return state
    except FileNotFoundError:
        return None
    except (OSError, DatasetError) as error:
        raise damaged_error(path, str(error)) from None


def _require_inputs_elsewhere(out: Path, config: PrepareConfig) -> None:
    inputs = map(expand, map(Path, config.inputs))
    for path in (*inputs, config.tokenizer, config.template):
        if path is not None and path.resolve().is_relative_to(out.resolve()):
            raise PrepareError(
                f"--overwrite would delete {path} with {out}; copy it elsewhere, or name "
                "another --out"
            )


def _changed(
    before: Manifest | State, job: Job, settings: dict[str, object], num_read: int | None
) -> list[str]:
    """Returns changed settings; if there are none, changes among the first `num_read` inputs."""
    defaults = arguments(PrepareConfig())  # for settings that are newer than the dataset
    # A setting that is gone has no effect now; a tokenizer that one made is compared below.
    remaining = {name: value for name, value in before.arguments.items() if name in settings}
    changed = schema.differences({**defaults, **remaining}, settings)
    if before.tokenizer is not None:
        changed += schema.differences(
            {"tokenizer": asdict(before.tokenizer)}, {"tokenizer": asdict(job.tokenizer.info)}
        )
    if changed:
        return changed
    then = _inputs_before(job.out)[:num_read]
    now = _inputs(job)[:num_read]
    if then == now:
        return []
    return schema.differences(_by_path(then), _by_path(now)) or ["the order of the inputs"]


def _by_path(inputs: Iterable[Input]) -> dict[str, str]:
    return {
        record.path: f"{record.bytes:,} bytes, modified at {record.modified:,} ns"
        for record in inputs
    }


def _refuse(out: Path, subject: str, changed: list[str]) -> None:
    if changed:
        listed = "\n  ".join(first_lines(changed, _MAX_LINES))
        raise PrepareError(
            f"{out} holds {subject} that differs from this command (there -> here):\n  {listed}\n"
            "--overwrite starts over; another --out DIR keeps it. Nothing was changed."
        )


def _inputs(job: Job) -> list[Input]:
    return [Input(source.path, source.size, source.modified) for source in job.sources]


def _inputs_before(out: Path) -> list[Input]:
    try:
        return read_inputs(out)
    except FileNotFoundError:
        return []
    except (OSError, DatasetError) as error:
        raise damaged_error(out / INPUTS, str(error)) from None


def truncate_file(path: Path, size: int) -> None:
    """Truncates a file to an earlier size."""
    if size and (not path.exists() or path.stat().st_size < size):
        raise damaged_error(path, "it is shorter than the journal says")
    with open_directly(path, "ab") as file:
        file.truncate(size)


class SplitWriter:
    """Appends documents to a split, after truncating its files to the progress in `state`."""

    def __init__(self, job: Job, split: str, state: State):
        self._folder = job.out
        self._split = split
        self._dtype = job.tokenizer.info.dtype
        self._config = job.config
        self._suffixes = [TOKENS, DOCUMENTS]
        if job.config.has_prompts:
            self._suffixes.append(PROMPTS)
        if state.has_origins:
            self._suffixes.append(ORIGINS)
        self.progress = progress = state.splits[split]
        self._files: dict[str, IO[bytes]] = {}
        for index, shard in enumerate(progress.shards):
            sizes = file_sizes(shard.documents, shard.tokens, self._dtype)
            for suffix in self._suffixes:
                path = self._path(index, suffix)
                if not path.exists() or path.stat().st_size != sizes[suffix]:
                    raise damaged_error(path, f"it should have {sizes[suffix]:,} bytes")
        if progress.documents:
            sizes = file_sizes(progress.documents, progress.tokens, self._dtype)
            for suffix in self._suffixes:
                truncate_file(self._open_path(suffix), sizes[suffix])

    def append(
        self, parts: Iterable[Tokens], prompt: int, text_bytes: int, origin: Position
    ) -> int:
        """Writes a document, which must not be empty; returns its number of tokens.

        Without prompts in the dataset, `prompt` is ignored.
        """
        length = 0
        progress = self.progress
        if not self._files:
            for suffix in self._suffixes:
                self._files[suffix] = open_directly(self._open_path(suffix), "ab", _BUFFER)
            if not progress.documents:
                self._files[DOCUMENTS].write(bytes(OFFSET.itemsize))
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
        if ORIGINS in self._suffixes:
            number = origin.source * MAX_ITEMS + origin.item
            self._files[ORIGINS].write(number.to_bytes(ORIGIN.itemsize, "little"))
        if progress.tokens >= self._config.shard_tokens:
            is_half = self._config.preference and progress.documents % 2
            if not is_half:  # a pair is in one shard
                self.end_shard()
        return length

    def save(self) -> None:
        """Flushes the open shard to disk."""
        for file in self._files.values():
            sync_file(file)

    def end_shard(self) -> None:
        """Closes the open shard, if any."""
        if self.progress.documents:
            self.close()
            sums = {suffix: sha256(self._open_path(suffix)) for suffix in self._suffixes}
            progress = self.progress
            shard = Shard(
                progress.documents, progress.tokens, progress.text_bytes, progress.longest, sums
            )
            self.progress = Progress([*progress.shards, shard])

    def close(self) -> None:
        """Flushes the files to disk and closes them."""
        files = list(self._files.values())
        self._files = {}
        # Each file is closed, even if another cannot be flushed.
        with ExitStack() as stack:
            for file in files:
                stack.enter_context(file)
            for file in files:
                sync_file(file)

    def files(self) -> set[str]:
        """Returns the file names of all shards."""
        shards = range(len(self.progress.shards) + bool(self.progress.documents))
        return {self._path(*file).name for file in product(shards, self._suffixes)}

    def _path(self, shard: int, suffix: str) -> Path:
        return shard_file(self._folder, self._split, shard, suffix)

    def _open_path(self, suffix: str) -> Path:
        return self._path(len(self.progress.shards), suffix)
