"""Finds the input files and tables."""

import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtp.config.schema import HF_PREFIX, ConfigError, expand, nearest_file
from jaxtp.data.prepare import readers
from jaxtp.data.prepare.prepare_config import TEXT_FIELD, PrepareConfig, check
from jaxtp.data.prepare.readers import (
    ARRAY,
    BINARY,
    DATASETS,
    DECOMPRESSION_ERRORS,
    GZIP,
    JSONL,
    PARQUET,
    TEXT,
    ZSTD,
    BadInputError,
    PrepareError,
    Source,
    open_stream,
    shorten,
)

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
"""For a value of --messages, the description of the layout, and the fields that identify its
rows."""

_SUFFIXES = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), JSONL),
    **dict.fromkeys((".parquet", ".pq"), PARQUET),
}
_JSON = ".json"
_SYNTAX = (_JSON, ".csv", ".tsv", ".ipynb", ".html", ".htm", ".xml", ".rtf")
"""Suffixes of text with much syntax. The summary counts these files."""
_CONVERT = (
    "python -c 'import csv, json, sys; [print(json.dumps(r)) for r in csv.DictReader(sys.stdin{})]'"
)
_UNPACK = {GZIP: "gzip -dc", ZSTD: "zstd -dc"}


def _by_suffix(suffixes: str, kind: str, advice: str) -> dict[str, tuple[str, str]]:
    return dict.fromkeys(suffixes.split(), (kind, advice))


_PACKED = "unpack it, or pack it with gzip or zstd instead"
_NOT_TEXT: dict[str, tuple[str, str]] = {
    **_by_suffix(
        ".zip .tar .tgz .7z .rar .jar .whl",
        "an archive",
        "unpack it, and name its files or their folder",
    ),
    **_by_suffix(".bz2 .xz .lzma .lz4 .br .z", "packed in a way that is not read", _PACKED),
    **_by_suffix(".pdf", "a PDF", "extract its text first, with pdftotext for example"),
    **_by_suffix(
        ".docx .doc .odt .epub .pptx .ppt .odp",
        "a document with layout",
        "save it as plain text first",
    ),
    **_by_suffix(".xlsx .xls .ods", "a spreadsheet", "save it as CSV, and make JSON Lines of that"),
    **_by_suffix(
        ".arrow .feather .orc .avro",
        "a table in a format that is not read",
        "write it as Parquet or JSON Lines; a folder made by save_to_disk is hf:FOLDER",
    ),
    **_by_suffix(".db .sqlite .sqlite3 .duckdb", "a database", "export its rows as JSON Lines"),
    **_by_suffix(
        ".npy .npz .h5 .hdf5 .pkl .pickle .pt .pth .ckpt .onnx .safetensors .gguf .tokens",
        "a file of arrays",
        "prepare reads text",
    ),
    **_by_suffix(
        ".png .jpg .jpeg .gif .webp .bmp .tif .tiff .ico .mp3 .wav .flac .ogg .m4a .mp4 .mkv .avi "
        ".mov .webm",
        "an image, audio or video",
        "prepare reads text",
    ),
    **_by_suffix(
        ".exe .dll .so .o .a .pyc .class .dylib .woff .woff2 .ttf .otf",
        "a binary",
        "prepare reads text",
    ),
}
"""Files that are never text, by suffix: a description, and how a user gets text out of them."""
_SIGNATURES = {
    b"\x1f\x8b": ("packed with gzip", "give it a name that ends with .gz"),
    b"\x28\xb5\x2f\xfd": ("packed with zstd", "give it a name that ends with .zst"),
    b"PAR1": ("Parquet", "give it a name that ends with .parquet, or --format parquet"),
}
"""First bytes of files that can be read under another name."""
_PEEKED_BYTES = 4096  # The first object of a list must start in this prefix
_ARRAY_START = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")
_NESTED_ROWS = re.compile(rb'\{\s*"((?:[^"\\]|\\.)*)"\s*:\s*\[')
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
    """Detects and prints the layout of conversations by the keys of the first row.

    Does nothing if the user names a field.
    """
    source = next((source for source in sources if source.format != TEXT), None)
    if source is not None:
        if config.preference:
            return _with_layout_of_pairs(config, source)
        if config.messages is None and config.prompt_field is None and config.field == TEXT_FIELD:
            names = readers.first_keys(source)
            for name, (layout, fields) in _LAYOUTS.items():
                if fields.issubset(names) and TEXT_FIELD not in names:
                    config = replace(config, messages=name)
                    check(config)
                    _print_layout(layout, names, config)
                    return config
    if config.template is not None and config.messages is None and not config.preference:
        raise ConfigError("--template is for conversations; give --messages FIELD too")
    return config


def _with_layout_of_pairs(config: PrepareConfig, source: Source) -> PrepareConfig:
    """Reads conversations if the first row has messages, or a template is named; otherwise
    texts."""
    row = readers.first_row(source, config.fields)
    has_messages = any(
        isinstance(row.get(name), list | dict) for name in config.fields.names_in(row)
    )
    if has_messages or config.template is not None:
        config = replace(config, messages=config.fields.text)
        check(config)
    kind = "texts" if config.messages is None else "conversations"
    layout = f"pairs of {kind}, 'chosen' and 'rejected'"
    _print_layout(layout, readers.first_keys(source), config)
    return config


def _print_layout(layout: str, names: list[str], config: PrepareConfig) -> None:
    unread = [name for name in names if name not in config.fields.names_in(names)]
    if unread:
        layout += f"; not read: {', '.join(map(shorten, unread))}"
    print(f"{'layout':<12}{layout}", flush=True)


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
    format: str = config.format
    if format == "auto":
        format = _format_in_folder(path, config) if in_folder else _format_of_named(path, config)
    if format == JSONL and _is_array(path, config):
        format = ARRAY
    limits = config.max_document_bytes, config.max_window_bytes
    skips = config.on_error == "skip"
    return Source(
        str(path), status.st_size, status.st_mtime_ns, format, *limits, in_folder, skips=skips
    )


def _format_in_folder(path: Path, config: PrepareConfig) -> str:
    """Returns the format by suffix.

    A `.json` file among sources is text, unless the command reads rows with fields.
    """
    suffix = _suffix(path)
    if suffix in _NOT_TEXT:
        return BINARY
    if suffix == _JSON and config.has_prompts and _has_rows(path, config):
        return JSONL
    return format_of(path)


def _format_of_named(path: Path, config: PrepareConfig) -> str:
    """Returns the format by suffix and first bytes.

    Raises `PrepareError` for a file that has neither text nor rows.
    """
    suffix = _suffix(path)
    format = format_of(path)
    if format != TEXT:
        return format
    if suffix == _JSON:
        format = JSONL if _has_rows(path, config) else _refuse_json(path, config)
    elif suffix in (".csv", ".tsv"):
        raise PrepareError(
            f"{path} is a table, which would be read as one text; make JSON Lines of it:\n  "
            f"{_conversion(path)}\n"
            "--format text reads it as one text"
        )
    refusal = _NOT_TEXT.get(suffix) or _signed(path)
    if refusal is not None:
        kind, advice = refusal
        raise PrepareError(f"{path} is {kind}, and not text: {advice}")
    return format


def _conversion(path: Path) -> str:
    """Returns the command that makes JSON Lines of a .csv or .tsv file."""
    separator = ", delimiter=chr(9)" if _suffix(path) == ".tsv" else ""
    unpack = _UNPACK.get(path.suffix.lower(), "cat")
    new = path.with_name(path.name.partition(".")[0] + ".jsonl")
    return (
        f"{unpack} {shlex.quote(str(path))} | {_CONVERT.format(separator)} > "
        f"{shlex.quote(str(new))}"
    )


def _has_rows(path: Path, config: PrepareConfig) -> bool:
    """Returns whether a JSON file is a list of objects or JSON Lines."""
    limits = config.max_document_bytes, config.max_window_bytes
    source = Source(str(path), 0, 0, JSONL, *limits)
    return _is_array(path, config) or readers.starts_with_object(source)


def _refuse_json(path: Path, config: PrepareConfig) -> str:
    """Raises `PrepareError`; returns TEXT for an empty or broken file, which the reader refuses."""
    start = _first_bytes(path, config)
    if not start.strip():
        return TEXT
    hint = "write its rows as JSON Lines, an object a line"
    if nested := _NESTED_ROWS.match(start.removeprefix(b"\xef\xbb\xbf").lstrip()):
        name = nested[1].decode(errors="replace")
        hint = f"if {name!r} is the list of its rows, {readers.of_nested_rows(name)}"
    raise PrepareError(
        f"{path} is neither a list of objects nor JSON Lines: {hint}; --format text reads it as "
        "one text"
    )


def _is_array(path: Path, config: PrepareConfig) -> bool:
    """Returns whether a file starts as a list of objects."""
    return _ARRAY_START.match(_first_bytes(path, config)) is not None


def _first_bytes(path: Path, config: PrepareConfig) -> bytes:
    """Returns the start of the unpacked content; empty if it cannot be read."""
    unreadable = (*DECOMPRESSION_ERRORS, BadInputError, OSError, ImportError)
    with suppress(*unreadable), open_stream(path, config.max_window_bytes) as (content, _):
        return content.read(_PEEKED_BYTES)
    return b""


def _signed(path: Path) -> tuple[str, str] | None:
    """Returns a description and advice if the first bytes call for another suffix."""
    if path.suffix.lower() not in _UNPACK:
        with suppress(OSError), path.open("rb") as file:
            start = file.read(max(map(len, _SIGNATURES)))
            for mark, kind in _SIGNATURES.items():
                if start.startswith(mark):
                    return kind
    return None


def format_of(path: Path) -> str:
    """Returns the format by suffix; unknown suffixes are text."""
    return _SUFFIXES.get(_suffix(path), TEXT)


def _suffix(path: Path) -> str:
    if path.suffix.lower() in _UNPACK:
        path = path.with_suffix("")
    return path.suffix.lower()


def syntax_counts(sources: list[Source]) -> Mapping[str, int]:
    """Returns the number of files, by suffix, that are read as text with their syntax."""
    counts = Counter[str]()
    for source in sources:
        suffix = _suffix(Path(source.path))
        if source.format == TEXT and suffix in _SYNTAX:
            counts[suffix] += 1
    return counts


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
