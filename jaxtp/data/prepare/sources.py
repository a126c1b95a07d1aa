"""Finds the input files and tables."""

import os
import stat
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtp.config.schema import HF_PREFIX, expand, nearest_file
from jaxtp.data.prepare import readers
from jaxtp.data.prepare.prepare_config import (
    CHOSEN,
    PROMPT_FIELD,
    REJECTED,
    TEXT_FIELD,
    PrepareConfig,
    check,
)
from jaxtp.data.prepare.readers import (
    DATASETS,
    GZIP,
    JSONL,
    PARQUET,
    TEXT,
    ZSTD,
    PrepareError,
    Source,
)

if TYPE_CHECKING:
    import datasets

_JSON = ".json"
_FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines", _JSON), JSONL),
    **dict.fromkeys((".parquet", ".pq"), PARQUET),
}
_TABLES = {".csv": "", ".tsv": ', delimiter="\\t"'}
_CONVERT = (
    "python -c 'import csv, json, sys; [print(json.dumps(row)) for row in "
    "csv.DictReader(sys.stdin{})]' < FILE > NEW.jsonl"
)
"""A command that makes JSON Lines of a table, and by suffix what it adds for this table."""
_LAYOUTS: tuple[dict[str, Any], ...] = (
    {"messages": "messages"},
    {"messages": "conversations"},
    {"messages": "instruction"},
    {"prompt_field": PROMPT_FIELD, "completion_field": "completion"},
    {"preference": True},
)
"""Settings that read the well-known layouts of rows."""
_SAVED = ("state.json", "dataset_dict.json")  # Files of a folder that `save_to_disk` has written


def find_sources(config: PrepareConfig) -> list[Source]:
    """Returns all sources, in a folder by path and without hidden files."""
    sources = list(chain.from_iterable(_sources_of(name, config) for name in config.inputs))
    if any(source.format == PARQUET for source in sources):
        _require("pyarrow", "Parquet")
    if any(source.path.lower().endswith(ZSTD) for source in sources):
        _require(readers.ZSTD_LIBRARY, ZSTD)
    return sources


def with_layout(config: PrepareConfig, sources: list[Source]) -> PrepareConfig:
    """Finds and prints the layout of the rows, as the first of them shows it.

    Pairs, and prompts and completions, are conversations if the row has messages; pairs also if a
    template is named.
    """
    if config.messages is not None and not config.preference:
        return config
    if not config.has_prompts and config.field != TEXT_FIELD:
        check(config)
        return config
    layouts = [replace(config, **settings) for settings in _LAYOUTS]
    names = chain(
        [TEXT_FIELD],
        *(layout.fields.names for layout in layouts),
        config.fields.names,
        config.fields.optional,
    )
    fields = readers.AnyFields("", optional=tuple(dict.fromkeys(names)))
    tables = (source for source in sources if source.format != TEXT)
    rows = (readers.first_row(source, fields) for source in tables)
    row: readers.Row = next(filter(None, rows), {})
    before = config
    if not config.has_prompts and TEXT_FIELD not in row:
        for layout in layouts:
            if row.keys() >= set(replace(layout, tools_field=None).fields.names):
                config = layout
                break
    has_messages = any(
        isinstance(row.get(name), list | dict) for name in config.fields.names_in(row)
    )
    is_of_messages = config.has_prompts and has_messages
    if is_of_messages or (config.preference and config.template is not None):
        config = replace(config, messages=config.messages or config.fields.text)
    check(config)
    kind = "prompts and completions" if config.messages is None else "conversations"
    if config.preference:
        kind = f"pairs of {'texts' if config.messages is None else kind}"
    if row and (config.preference or config != before):
        shown = [CHOSEN, REJECTED] if config.preference else config.fields.names
        print(f"{'layout':<12}{kind}, {' and '.join(map(repr, shown))}", flush=True)
    return config


def _require(library: str, files: str) -> None:
    try:
        import_module(library)
    except ImportError:
        raise PrepareError(
            f"{files} files need the library {library}: pip install 'jaxtp[data]'"
        ) from None


def _sources_of(name: str, config: PrepareConfig) -> list[Source]:
    if name.startswith(HF_PREFIX):
        table = _open_table(name)
        limit = config.max_document_bytes
        return [Source(name, int(table.data.nbytes), 0, DATASETS, limit, table=table)]
    path = expand(Path(name))
    try:
        status = path.stat()
    except OSError as error:
        raise PrepareError(f"{path}: {error.strerror}{nearest_file(path)}") from None
    if stat.S_ISREG(status.st_mode):
        return [_file(path, status, config, in_folder=False)]
    if not stat.S_ISDIR(status.st_mode):
        raise PrepareError(f"{path} is neither a file nor a folder")
    files = _walk(path, config)
    is_saved = not {path / name for name in _SAVED}.isdisjoint(files)
    if is_saved and any(file.suffix == ".arrow" for file in files):
        raise PrepareError(f"{path} is a dataset made by save_to_disk; name it {HF_PREFIX}{path}")
    sources = [_file(file, file.stat(), config, in_folder=True) for file in files]
    if not sources:
        matching = ""
        if config.include:
            matching = f" that matches --include {' '.join(config.include)}"
        raise PrepareError(f"{path}: no file in this folder{matching}")
    return sources


def _open_table(name: str) -> "datasets.Dataset":
    """Opens `hf:FOLDER[:SPLIT]` or `hf:NAME[:CONFIGURATION]:SPLIT`."""
    try:
        import datasets
    except ImportError:
        raise PrepareError(
            f"{name} needs the library datasets: pip install 'jaxtp[datasets]'"
        ) from None
    first, *options = name.removeprefix(HF_PREFIX).split(":")
    is_folder = Path(first).is_dir()
    if not (is_folder or options):
        raise PrepareError(
            f"{name}: no such folder; for a dataset by name, also name the split: {name}:train"
        )
    datasets.disable_progress_bars()
    try:
        if is_folder:
            table = datasets.load_from_disk(first)
            if options:
                table = table[options[0]]
        else:
            table = datasets.load_dataset(first, *options[:-1], split=options[-1])
    except Exception as error:  # the library's errors have no common class
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise PrepareError(f"{name}: {first_line}") from None
    if not isinstance(table, datasets.Dataset):
        names = ", ".join(f"{name}:{split}" for split in table)
        raise PrepareError(f"{name} has several splits; name one: {names}")
    return table


def _file(path: Path, status: os.stat_result, config: PrepareConfig, in_folder: bool) -> Source:
    format = _format(path, config, in_folder)
    limit = config.max_document_bytes
    return Source(str(path), status.st_size, status.st_mtime_ns, format, limit, in_folder)


def _format(path: Path, config: PrepareConfig, in_folder: bool) -> str:
    """Returns the format by suffix; unknown suffixes are text.

    A `.json` file among sources is text, unless the command reads rows with fields.
    """
    if config.format != "auto":
        return config.format
    is_packed = path.suffix.lower() in (GZIP, ZSTD)
    suffix = Path(path.stem if is_packed else path).suffix.lower()
    if in_folder:
        if suffix == _JSON and not config.has_prompts:
            return TEXT
    elif suffix in _TABLES:
        unpack = "unpack it, and " if is_packed else ""
        raise PrepareError(
            f"{path} is a table, which would be read as one text; {unpack}make JSON Lines of it:"
            f"\n  {_CONVERT.format(_TABLES[suffix])}\n"
            f"named .txt instead of {suffix}, it is read as one text"
        )
    return _FORMATS.get(suffix, TEXT)


def _walk(root: Path, config: PrepareConfig) -> list[Path]:
    """Returns a folder's files by path; follows links to files only."""

    def refuse(error: OSError) -> None:
        raise PrepareError(f"{error.filename}: {error.strerror}")

    def matches(path: Path, patterns: tuple[str, ...]) -> bool:
        inside = path.relative_to(root).as_posix()
        return any(
            fnmatchcase(inside if "/" in pattern else path.name, pattern) for pattern in patterns
        )

    def is_left_out(path: Path) -> bool:
        return path.name.startswith(".") or matches(path, config.exclude)

    paths: list[Path] = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not is_left_out(Path(folder, name))]
        for path in map(Path(folder).joinpath, files):
            is_included = not config.include or matches(path, config.include)
            if is_included and not is_left_out(path) and _is_file(path):
                paths.append(path)
    return sorted(paths)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise PrepareError(
            f"{path}: {error.strerror}; --exclude {path.name} leaves it out"
        ) from None
