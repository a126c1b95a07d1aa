"""The files that the inputs are, in the order in which they are read."""

import json
import os
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from jaxtp.config import expand, nearest_file
from jaxtp.prepare import formats
from jaxtp.prepare.compression import ZSTD, zstandard
from jaxtp.prepare.config import PrepareConfig
from jaxtp.prepare.errors import END, PrepareError
from jaxtp.prepare.formats import DATASETS, PARQUET, Event, Fields, Source

HUGGING_FACE = "hf:"


class Position(NamedTuple):
    """Position in the inputs: what comes before it has been read."""

    source: int
    item: int
    """Number of items of that source that have been read."""


def find_sources(config: PrepareConfig) -> list[Source]:
    """Returns all sources of the inputs: those of a folder sorted by path, without hidden ones.

    Raises:
      PrepareError: an input is missing, cannot be read, holds nothing to read, or needs a library that is not there.
    """
    sources = [source for name in config.inputs for source in _of_input(name, config)]
    if any(source.format == PARQUET for source in sources):
        formats.pyarrow_and_parquet()
    if any(source.path.endswith(ZSTD) for source in sources):
        zstandard()
    return sources


def read(sources: list[Source], start: Position, fields: Fields) -> Iterator[tuple[Event, Position]]:
    """Yields every event from a position on, each with the position after it."""
    for index in range(start.source, len(sources)):
        skip = start.item if index == start.source else 0
        for event in formats.read(sources[index], skip, fields):
            yield event, Position(index + 1, 0) if event.item == END else Position(index, event.item)


def listing(sources: list[Source]) -> list[dict[str, Any]]:
    """Returns a record of each source, by which a later command tells whether the inputs are still the same."""
    return [{"path": source.path, "bytes": source.size, "modified": source.modified} for source in sources]


def differences(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """Returns a line for each source in which two listings differ."""
    old, new = ({record["path"]: record for record in records} for records in (before, now))
    lines = [f"{path}: no longer among the inputs" for path in old if path not in new]
    lines += [f"{path}: was not among the inputs" for path in new if path not in old]
    for path in old.keys() & new.keys():
        if old[path]["bytes"] != new[path]["bytes"]:
            lines.append(f"{path}: had {old[path]['bytes']:,} bytes, has {new[path]['bytes']:,}")
        elif old[path] != new[path]:
            lines.append(f"{path}: was modified since")
    return sorted(lines) or (["the order of the inputs"] if before != now else [])


def parse_listing(text: str) -> list[dict[str, Any]]:
    """Returns the listing that `inputs.jsonl` holds.

    Raises:
      ValueError: it holds none.
    """
    records = [json.loads(line) for line in text.splitlines()]
    if not all(isinstance(record, dict) and record.keys() == {"path", "bytes", "modified"} for record in records):
        raise ValueError("not a list of inputs")
    return records


def _of_input(name: str, config: PrepareConfig) -> list[Source]:
    if name.startswith(HUGGING_FACE):
        return [_table(name, config)]
    path = expand(Path(name))
    try:
        status = path.stat()
    except OSError as error:
        raise PrepareError(f"{path}: {error.strerror}{nearest_file(path)}") from None
    if stat.S_ISREG(status.st_mode):
        return [_file(path, status, config, found=False)]
    if not stat.S_ISDIR(status.st_mode):
        raise PrepareError(f"{path} is neither a file nor a folder")
    sources = [_file(file, file.stat(), config, found=True) for file in _walk(path, config)]
    if not sources:
        matching = f" that matches --include {' '.join(config.include)}" if config.include else ""
        raise PrepareError(f"{path}: no file in this folder{matching}")
    return sources


def _file(path: Path, status: os.stat_result, config: PrepareConfig, found: bool) -> Source:
    kind = formats.format_of(path) if config.format == "auto" else config.format
    limits = config.max_document_bytes, config.max_window_bytes
    return Source(str(path), status.st_size, status.st_mtime_ns, kind, *limits, found)


def _walk(root: Path, config: PrepareConfig) -> list[Path]:
    """Returns the files in a folder, sorted by path; links to files are followed, links to folders are not."""

    def refuse(error: OSError) -> None:
        raise PrepareError(f"{error.filename}: {error.strerror}")

    found = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        here = Path(folder)
        folders[:] = [name for name in folders if not _left_out(here / name, root, config)]
        found += [here / name for name in files if _wanted(here / name, root, config)]
    return sorted(found)


def _wanted(path: Path, root: Path, config: PrepareConfig) -> bool:
    if _left_out(path, root, config):
        return False
    if config.include and not any(_matches(path, root, pattern) for pattern in config.include):
        return False
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise PrepareError(f"{path}: {error.strerror}; --exclude {path.name} leaves it out") from None


def _left_out(path: Path, root: Path, config: PrepareConfig) -> bool:
    return path.name.startswith(".") or any(_matches(path, root, pattern) for pattern in config.exclude)


def _matches(path: Path, root: Path, pattern: str) -> bool:
    return fnmatchcase(path.relative_to(root).as_posix() if "/" in pattern else path.name, pattern)


def _table(name: str, config: PrepareConfig) -> Source:
    """Returns a table of the library datasets: `hf:FOLDER[:SPLIT]` or `hf:NAME[:CONFIGURATION]:SPLIT`."""
    try:
        import datasets
    except ImportError:
        raise PrepareError(f"{name} needs the library datasets: pip install 'jaxtp[datasets]'") from None
    first, *rest = name.removeprefix(HUGGING_FACE).split(":")
    is_folder = Path(first).is_dir()
    if not (is_folder or rest):
        raise PrepareError(f"{name}: no such folder; of a dataset by name also name the split: {name}:train")
    datasets.disable_progress_bars()
    try:
        if is_folder:
            found = datasets.load_from_disk(first)
            table = found[rest[0]] if rest else found
        else:
            table = datasets.load_dataset(first, *rest[:-1], split=rest[-1])
    except Exception as error:  # the library has no exception of its own
        raise PrepareError(f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from None
    if not isinstance(table, datasets.Dataset):
        raise PrepareError(f"{name} has several splits; name one: {', '.join(f'{name}:{split}' for split in table)}")
    limits = config.max_document_bytes, config.max_window_bytes
    return Source(name, int(table.data.nbytes), 0, DATASETS, *limits, table=table)
