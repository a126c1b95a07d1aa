"""Finds the input files and tables."""

import os
import stat
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtp.config.schema import HF_PREFIX, ConfigError, expand, nearest_file
from jaxtp.data.prepare import readers
from jaxtp.data.prepare.prepare_config import TEXT_FIELD, PrepareConfig, check
from jaxtp.data.prepare.readers import ARRAY, DATASETS, JSONL, PARQUET, TEXT, ZSTD, PrepareError, Source, shorten

if TYPE_CHECKING:
    import datasets

_LAYOUTS = {
    "messages": ("a conversation in each row's 'messages'", {"messages"}),
    "conversations": ("ShareGPT, a conversation in each row's 'conversations'", {"conversations"}),
    "instruction": (
        "Alpaca, a conversation of each row's 'instruction', 'input' and 'output'",
        {"instruction", "output"},
    ),
}
"""By the value of --messages: the layout's name, and the fields that identify its rows."""


def find_sources(config: PrepareConfig) -> list[Source]:
    """Returns all sources; a folder's by path, without hidden files."""
    sources = [source for name in config.inputs for source in _sources_of(name, config)]
    if any(source.format == PARQUET for source in sources):
        _require("pyarrow", "Parquet")
    if any(source.path.endswith(ZSTD) for source in sources):
        _require("zstandard", ZSTD)
    return sources


def with_layout(config: PrepareConfig, sources: list[Source]) -> PrepareConfig:
    """Detects and prints the layout of conversations by the first row's keys, unless a field is named."""
    source = next((source for source in sources if source.format != TEXT), None)
    if config.preference:
        return config if source is None else _with_layout_of_pairs(config, source)
    names_field = config.messages is not None or config.prompt_field is not None or config.field != TEXT_FIELD
    names = [] if names_field or source is None else readers.first_keys(source)
    layouts = [] if TEXT_FIELD in names else [name for name in _LAYOUTS if _LAYOUTS[name][1] <= {*names}]
    if not layouts:
        if config.template is not None and config.messages is None:
            raise ConfigError("--template is for conversations; give --messages FIELD too")
        return config
    config = replace(config, messages=layouts[0])
    check(config)
    _print_layout(_LAYOUTS[layouts[0]][0], names, config)
    return config


def _with_layout_of_pairs(config: PrepareConfig, source: Source) -> PrepareConfig:
    """Reads conversations if there are messages in the first row, or a template is named; else texts."""
    row = readers.first_row(source, config.fields)
    has_messages = any(isinstance(row.get(name), list | dict) for name in config.fields.names_in(row))
    if has_messages or config.template is not None:
        config = replace(config, messages=config.fields.text)
        check(config)
    layout = f"pairs of {'texts' if config.messages is None else 'conversations'}, 'chosen' and 'rejected'"
    _print_layout(layout, readers.first_keys(source), config)
    return config


def _print_layout(layout: str, names: list[str], config: PrepareConfig) -> None:
    unread = ", ".join(shorten(name) for name in names if name not in config.fields.names_in(names))
    print(f"{'layout':<12}{layout}{f'; not read: {unread}' if unread else ''}", flush=True)


def _require(library: str, files: str) -> None:
    if find_spec(library) is None:
        raise PrepareError(f"{files} files need the library {library}: pip install 'jaxtp[data]'")


def _sources_of(name: str, config: PrepareConfig) -> list[Source]:
    if name.startswith(HF_PREFIX):
        table = _open_table(name)
        limits = config.max_document_bytes, config.max_window_bytes
        return [Source(name, int(table.data.nbytes), 0, DATASETS, *limits, table=table)]
    path = expand(Path(name))
    try:
        status = path.stat()
    except OSError as error:
        raise PrepareError(f"{path}: {error.strerror}{nearest_file(path)}") from None
    if stat.S_ISREG(status.st_mode):
        return [_file(path, status, config, in_folder=False)]
    if not stat.S_ISDIR(status.st_mode):
        raise PrepareError(f"{path} is neither a file nor a folder")
    sources = [_file(file, file.stat(), config, in_folder=True) for file in _walk(path, config)]
    if not sources:
        matching = f" that matches --include {' '.join(config.include)}" if config.include else ""
        raise PrepareError(f"{path}: no file in this folder{matching}")
    return sources


def _open_table(name: str) -> "datasets.Dataset":
    """Opens `hf:FOLDER[:SPLIT]` or `hf:NAME[:CONFIGURATION]:SPLIT`."""
    try:
        import datasets
    except ImportError:
        raise PrepareError(f"{name} needs the library datasets: pip install 'jaxtp[datasets]'") from None
    first, *rest = name.removeprefix(HF_PREFIX).split(":")
    is_folder = Path(first).is_dir()
    if not (is_folder or rest):
        raise PrepareError(f"{name}: no such folder; of a dataset by name also name the split: {name}:train")
    datasets.disable_progress_bars()
    try:
        if is_folder:
            table = datasets.load_from_disk(first)
            table = table[rest[0]] if rest else table
        else:
            table = datasets.load_dataset(first, *rest[:-1], split=rest[-1])
    except Exception as error:  # the library has no base exception
        raise PrepareError(f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from None
    if not isinstance(table, datasets.Dataset):
        raise PrepareError(f"{name} has several splits; name one: {', '.join(f'{name}:{split}' for split in table)}")
    return table


def _file(path: Path, status: os.stat_result, config: PrepareConfig, in_folder: bool) -> Source:
    format = readers.format_of(path) if config.format == "auto" else config.format
    may_be_array = config.format == JSONL or (config.format == "auto" and (config.has_prompts or not in_folder))
    if may_be_array and readers.is_array(path, format, config.max_window_bytes):
        format = ARRAY
    limits = config.max_document_bytes, config.max_window_bytes
    return Source(str(path), status.st_size, status.st_mtime_ns, format, *limits, in_folder)


def _walk(root: Path, config: PrepareConfig) -> list[Path]:
    """Returns a folder's files by path; follows links to files only."""

    def refuse(error: OSError) -> None:
        raise PrepareError(f"{error.filename}: {error.strerror}")

    def matches(path: Path, patterns: tuple[str, ...]) -> bool:
        inside = path.relative_to(root).as_posix()
        return any(fnmatchcase(inside if "/" in pattern else path.name, pattern) for pattern in patterns)

    paths: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        path_of = {name: Path(folder, name) for name in (*folders, *files)}
        included = [n for n, path in path_of.items() if not n.startswith(".") and not matches(path, config.exclude)]
        folders[:] = [name for name in folders if name in included]
        named = [path_of[name] for name in files if name in included]
        paths += [p for p in named if (not config.include or matches(p, config.include)) and _is_file(p)]
    return sorted(paths)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise PrepareError(f"{path}: {error.strerror}; --exclude {path.name} leaves it out") from None
