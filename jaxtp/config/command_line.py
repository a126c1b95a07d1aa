"""Command lines: dataclasses filled from a YAML file and flags, with help, completion and one-line errors.

Every command takes `--config FILE` (YAML), dotted flags that override it (`--mesh.tp 4`), `--mesh fsdp=2,tp=4`,
`--print-config`, `--help`, `--help SECTION` and `--help-all`. tyro formats help and completion scripts; flags are
parsed here and validated by pydantic, like files, so that an error is one line that names the flag.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import math
import os
import re
import shutil
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial, reduce
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from docstring_parser import parse_from_object

from jaxtp.config.reading import shown
from jaxtp.config.schema import ConfigError, Switch, flag, hints_of, leaves, merged, read_values, to_yaml, validate

T = TypeVar("T")

HELP, SHORT_HELP, ALL_HELP = "--help", "-h", "--help-all"
CONFIG, MESH, PRINT = "--config", "--mesh", "--print-config"
_MIN_COLUMNS = 20
_JOIN = "__"
"""Joins the keys of a setting into the name of a field."""
OTHER_NAMES = {
    "optimizer.learning_rate": "lr max_lr peak_lr base_lr",
    "optimizer.schedule": "scheduler lr_scheduler lr_scheduler_type",
    "optimizer.warmup_steps": "warmup warmup_iters num_warmup_steps",
    "optimizer.weight_decay": "wd",
    "optimizer.clip_norm": "max_grad_norm grad_clip clip_grad gradient_clip_val",
    "optimizer.name": "optim",
    "train.epochs": "num_epochs num_train_epochs max_epochs",
    "train.steps": "max_steps num_steps total_steps max_iters",
    "train.accumulation": "gradient_accumulation_steps grad_accum accumulation_steps accumulate_grad_batches",
    "data.global_batch_size": "batch_size train_batch_size",
    "data.sequence_length": "seq_len seq_length max_seq_len max_seq_length block_size context_length",
    "data.path": "dataset dataset_name dataset_path data_dir train_file",
    "model.from_hf": "model_name_or_path model_name base_model pretrained",
    "model.lora.rank": "lora_r lora_rank r",
    "model.lora.alpha": "lora_alpha",
    "model.precision.compute": "precision dtype mixed_precision torch_dtype bf16 fp16",
    "model.remat": "gradient_checkpointing activation_checkpointing recompute",
    "model.d_model": "hidden_size n_embd",
    "model.num_layers": "n_layer n_layers num_hidden_layers",
    "mesh.tp": "tp_size tensor_parallel_size tensor_model_parallel_size",
    "run.dir": "output_dir save_dir resume resume_from_checkpoint",
    "checkpoint.every": "save_steps save_interval save_every",
    "metrics.trackers": "report_to",
    "out": "output_dir save_dir",
    "model": "model_name_or_path hf_model",
    "sequence_length": "max_length max_seq_len",
    "max_tokens": "max_new_tokens max_gen_len",
    "processes": "nproc_per_node num_processes",
}
"""Names of settings in other programs, for suggestions."""


@dataclass(frozen=True)
class Setting:
    """One value of a schema."""

    owner: type
    """Dataclass that has the field."""
    keys: tuple[str, ...]
    kind: Any
    """Type without annotations."""
    marks: tuple[object, ...]
    """Annotations, pydantic's and tyro's."""
    default: object
    flag: str
    """`--mesh.tp`."""

    @property
    def name(self) -> str:
        """`mesh.tp`."""
        return ".".join(self.keys)

    @property
    def is_positional(self) -> bool:
        """Whether the value is given without a flag."""
        return tyro.conf.Positional in self.marks

    @property
    def is_list(self) -> bool:
        """Whether it takes several values."""
        return get_origin(self.kind) is tuple

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is dataclasses.MISSING

    @property
    def place(self) -> str:
        """Name in usage and errors: `HF_DIR` or `--mesh.tp`."""
        names = (name for mark in self.marks if (name := getattr(mark, "metavar", None)))
        return next(names, self.name.upper()) if self.is_positional else self.flag

    def spellings(self) -> Iterator[str]:
        """Yields its flags without leading dashes, words joined by _."""
        if self.is_positional or tyro.conf.Fixed in self.marks:
            return
        name = _key(self.flag)
        yield name
        if self.kind is bool:
            yield _negated(name)
        for alias in (alias for mark in self.marks for alias in getattr(mark, "aliases", None) or ()):
            yield _key(alias)

    def value_of(self, words: Sequence[str]) -> object:
        """Returns the value for pydantic to validate."""
        values = [self._plain_value(word) for word in words]
        return tuple(values) if self.is_list else values[-1]

    def _plain_value(self, word: str) -> object:
        choices = {_plain(part) for part in get_args(self.kind)}
        if type(None) in choices and not {str, Path} & choices and word.lower() in ("none", "null"):
            return None
        if get_origin(self.kind) is Literal:
            return next((choice for choice in get_args(self.kind) if str(choice) == word), word)
        return word


_CONFIG = Setting(object, (CONFIG,), Path | None, (tyro.conf.arg(metavar="FILE"),), None, CONFIG)
_MESH = Setting(object, (MESH,), str | None, (tyro.conf.arg(metavar="fsdp=2,tp=4"),), None, MESH)
_PRINT = Setting(object, (PRINT,), bool, get_args(Switch)[1:], False, PRINT)
_TEXTS = {
    CONFIG: "YAML file of settings; flags replace them.",
    MESH: "Size of each axis of the mesh, by default 1.",
    PRINT: "Prints the resulting settings as YAML and exits.",
}


@dataclass(frozen=True, kw_only=True)
class Command(Generic[T]):
    """A command, or a member of a family such as `jaxtp convert import`."""

    program: str
    """`jaxtp train`."""

    schema: type[T]
    """Dataclass of its settings."""

    description: str
    """Purpose and examples for the help; the first line stands in lists of commands."""

    first: tuple[str, ...] = ()
    """Dotted names of the settings that --help shows; empty for all."""

    without: tuple[str, ...] = ()
    """Dotted names of settings and sections that a --config file may have but the command ignores."""

    printed: Callable[[T], Any] = lambda config: config
    """Selects what --print-config prints of the configuration."""

    def load(
        self, argv: Sequence[str], fit: Callable[[T, Set[str]], tuple[T, list[str]]] | None = None
    ) -> tuple[T, list[str]]:
        """Returns the configuration of a command line, and notes on its defaults.

        Args:
          fit: fills in defaults from the configuration and the dotted names of explicit settings, which it must not
            change; returns the configuration and notes.

        Raises:
          ConfigError: unreadable YAML, unknown key or flag, wrong type, or value out of range.
          SystemExit: after help or `--print-config` (0).
        """
        before = list(itertools.takewhile(lambda word: word != "--", argv))
        if at := next((i for i, word in enumerate(before, 1) if _key(word) in ("help", "h", "help_all")), 0):
            self._print_help(_key(before[at - 1]) == "help_all", "".join(before[at : at + 1]), _value(before, CONFIG))
            raise SystemExit(0)
        values = self._parse(argv)
        path, mesh, printing = (values.pop(own.keys, None) for own in (_CONFIG, _MESH, _PRINT))
        if mesh is not None:
            kinds = get_type_hints(get_type_hints(self.schema)["mesh"])
            axes = [name for name, kind in kinds.items() if int in (kind, *get_args(kind))]
            sizes = parse_mesh(str(mesh), axes, allow_rest=True)
            values = {("mesh", axis): size for axis, size in sizes.items()} | values
        from_file = {} if path is None else read_values(Path(str(path)))
        validate(self.schema, from_file, source=str(path)) if path is not None else None
        flags: dict[str, Any] = {}
        for (*sections, key), value in values.items():
            reduce(lambda inner, section: inner.setdefault(section, {}), sections, flags)[key] = value
        config = validate(self.schema, merged(from_file, flags), source="command line", spelled=self._spelled)
        explicit = {*leaves(from_file), *map(".".join, values)}
        config, notes = fit(config, explicit) if fit else (config, [])
        if printing:
            print("".join(f"# {note}\n" for note in notes) + to_yaml(self.printed(config)), end="")
            raise SystemExit(0)
        return config, notes

    def offered(self) -> list[Setting]:
        """Returns the settings, `--config`, `--print-config` and `--mesh` first."""
        own = []
        if not any(setting.is_required for setting in settings_of(self.schema)):
            own += [_CONFIG, _PRINT]
        settings = [setting for setting in settings_of(self.schema) if not self._is_unused(setting.name)]
        has_section = dataclasses.is_dataclass(get_type_hints(self.schema).get("mesh"))
        if has_section and not any(setting.flag == MESH for setting in settings):  # check and estimate take a list
            own += [_MESH]
        return own + settings

    def help_schema(self, settings: Sequence[Setting], config: T | None = None, *, short: bool = True) -> type:
        """Returns a flat dataclass of settings for tyro.

        Args:
          config: supplies defaults; the schema's if None.
          short: keep only the first clause of each text.
        """
        fields: list[tuple[str, object, dataclasses.Field[Any]]] = []
        for setting in settings:
            own = setting.owner is object
            default = setting.default if own or config is None else reduce(getattr, setting.keys, config)
            text = _TEXTS[setting.flag] if own else _docstrings(setting.owner).get(setting.keys[-1], "")
            text = re.split(r"[.;:](?=\s|$)", text, maxsplit=1)[0] + "." if short else text
            has_help = any(getattr(mark, "help", None) for mark in setting.marks)
            has_metavar = any(getattr(mark, "metavar", None) for mark in setting.marks)
            shown = tyro.conf.arg(
                name=None if setting.is_positional else setting.flag.removeprefix("--"),
                metavar=None if has_metavar else _metavar(setting.kind),
                help=None if has_help else text,
                help_behavior_hint="" if default is None or default is False or default == () else None,
            )
            kind, marks = setting.kind, setting.marks
            name = _JOIN.join(setting.keys).strip("-").replace("-", "_")
            fields.append((name, Annotated[(kind, *marks, shown)], _field(default)))
        return dataclasses.make_dataclass("Settings", fields, frozen=True, kw_only=True, namespace={"__doc__": ""})

    def _print_help(self, everything: bool, section: str, path: str | None) -> None:
        settings = self.offered()
        config = None
        if _CONFIG in settings:
            config = validate(self.schema, {} if path is None else read_values(Path(path)), source=str(path))
        sections = list(dict.fromkeys(each.keys[0] for each in settings if len(each.keys) > 1))
        more, short = "", False
        if section and not section.startswith("-") and not everything:
            if section not in sections:
                hint = _nearest(section, sections)
                raise ConfigError(
                    f"{HELP} {shown(section)}: {self.program} has no such section; "
                    + (f"did you mean {hint}?" if hint else f"there are {', '.join(sections) or 'none'}")
                )
            settings = [each for each in settings if each.keys[0] == section]
        elif self.first and not everything:
            short = True
            settings = [each for each in settings if each.name in self.first or each.owner is object]
            more = f"\n\nMore settings: {HELP} SECTION ({', '.join(sections)}), or {ALL_HELP}"
        schema = self.help_schema(settings, config, short=short)
        printed = io.StringIO()
        with _columns(_MIN_COLUMNS) as width, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            tyro.cli(schema, args=[HELP], prog=self.program, description="", config=(tyro.conf.AvoidSubcommands,))
        usage, _, options = printed.getvalue().partition("\n")
        lines = "\n".join(map(str.rstrip, options.strip("\n").splitlines()))
        print(usage, _filled(self.description + more, width), lines.rstrip(), sep="\n\n")

    def _parse(self, argv: Sequence[str]) -> dict[tuple[str, ...], object]:
        values: dict[tuple[str, ...], object] = {}
        rest: list[str] = []
        words = deque(argv)
        while words:
            if (word := words.popleft()) == "--":
                rest += words
                break
            if not _is_flag(word):
                rest.append(word)
                continue
            spelled, equals, value = word.partition("=")
            setting = self._find(spelled)
            if setting.kind is bool:
                if equals:
                    raise ConfigError(f"{word}: takes no value; {' or '.join(map(_flag, setting.spellings()))}")
                values[setting.keys] = _key(spelled) != _negated(_key(setting.flag))
                continue
            if setting.flag in (CONFIG, MESH) and setting.keys in values and not setting.is_list:
                raise ConfigError(f"{spelled} is given twice")
            many = setting.is_list and tyro.conf.UseAppendAction not in setting.marks
            found = [value] if equals else []
            while words and not equals and (many or not found) and not _is_flag(words[0]) and words[0] != "--":
                found.append(words.popleft())
            if not found or (setting.owner is object and found == [""]):
                raise ConfigError(f"{spelled} needs a value; one that begins with - is given as {spelled}=-...")
            before = values.get(setting.keys, ())
            new = setting.value_of(found)
            values[setting.keys] = (*before, *new) if isinstance(before, tuple) and isinstance(new, tuple) else new
        return self._with_positionals(values, rest)

    def _with_positionals(
        self, values: dict[tuple[str, ...], object], words: list[str]
    ) -> dict[tuple[str, ...], object]:
        for setting in settings_of(self.schema):
            if setting.is_positional and words:
                count = len(words) if setting.is_list else 1
                values[setting.keys] = setting.value_of(words[:count])
                words = words[count:]
            if setting.is_required and setting.keys not in values:
                raise ConfigError(f"{self.program} needs {setting.place}; see {self.program} {HELP}")
        if words:
            raise ConfigError(f"{shown(words[0], 300) or repr('')}: no flag takes this; see {self.program} {HELP}")
        return values

    def _find(self, spelled: str) -> Setting:
        name = _key(spelled)
        setting = self._by_name().get(name)
        unused = spellings(self.schema).get(name, tuple(name.split(".")))
        if setting is None and self._is_unused(".".join(unused)):
            raise ConfigError(f"{spelled}: {self.program} does not use it; leave it out (a {CONFIG} file may have it)")
        if setting is None:
            raise ConfigError(f"{shown(spelled)}: {self._suggestion(name)}")
        if not spelled.startswith("--"):
            raise ConfigError(f"{spelled}: flags begin with two dashes; did you mean -{spelled}?")
        return setting

    def _suggestion(self, name: str) -> str:
        for setting in settings_of(self.schema):
            if setting.is_positional and setting.name == name:
                return f"give {setting.place} without a flag"
            if tyro.conf.Fixed in setting.marks and f"{name}.".startswith(f"{setting.name}."):
                return f"{setting.name} has no flag; set it in a {CONFIG} file"
        known = list(self._by_name())
        if within := next((other for other in known if other.startswith(f"{name}.")), None):
            return f"is a section of settings, such as {_flag(within)}"
        close = _nearest(name, known)
        hint = f"did you mean {_flag(close)}?" if close else f"see {self.program} {ALL_HELP if self.first else HELP}"
        return f"{self.program} has no such setting; {hint}"

    def _by_name(self) -> dict[str, Setting]:
        return {name: setting for setting in self.offered() for name in setting.spellings()}

    def _is_unused(self, name: str) -> bool:
        return any(name == other or name.startswith(f"{other}.") for other in self.without)

    def _spelled(self, keys: Sequence[object], value: object) -> str:
        known = {setting.keys: setting.place for setting in settings_of(self.schema)}
        place = known.get(tuple(map(str, keys[:1]))) or flag(self.schema, keys)
        return f"{place} {shown(value, 300) or repr(value)}"


def parse_mesh(text: str, axes: Sequence[str], *, allow_rest: bool = False) -> dict[str, int]:
    """Parses `fsdp=2,tp=4`; other axes have size 1.

    Args:
      axes: valid names.
      allow_rest: accept -1, for the remaining devices.

    Raises:
      ConfigError: if malformed.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in axes:
            problem = f"{shown(repr(axis))} is not an axis; they are {', '.join(axes)}, as in fsdp=2,tp=4"
        elif not (re.fullmatch("0*[1-9][0-9]{0,9}", size) or (allow_rest and size == "-1")):
            problem = f"{axis}={shown(size)} is not a number of devices: 1, 2, ..."
        elif axis in sizes:
            problem = f"{axis} is given twice"
        else:
            sizes[axis] = int(size)
            continue
        raise ConfigError(f"{MESH} {shown(text)}: {problem}")
    if (devices := math.prod(sizes.values())) >= 2**31:  # JAX counts devices in 32 bits
        raise ConfigError(f"{MESH} {shown(text)}: {devices:,} devices are too many for JAX")
    return dict.fromkeys(axes, 1) | sizes


def choose(program: str, commands: Mapping[str, Command[Any]], argv: Sequence[str]) -> tuple[Command[Any], list[str]]:
    """Splits off the command of a family; `--help` lists them.

    Raises:
      ConfigError, SystemExit: as `choose_name`.
    """
    summaries = {name: command.description.partition("\n")[0] for name, command in commands.items()}
    name, rest = choose_name(program, summaries, argv)
    return commands[name], rest


def choose_name(
    program: str, commands: Mapping[str, str], argv: Sequence[str], note: str = ""
) -> tuple[str, list[str]]:
    """Splits off the command name.

    Args:
      program: the family: `jaxtp convert`.
      commands: one-line summaries by name.
      note: ends the list; by default points to `COMMAND --help`.

    Raises:
      ConfigError: unknown command.
      SystemExit: after printing the list for `--help` (0).
    """
    name, *rest = argv or (HELP,)
    if name in (HELP, SHORT_HELP, ALL_HELP):
        width = max(map(len, commands)) + 2
        columns = max(2 * width, shutil.get_terminal_size().columns)
        fill = partial(textwrap.fill, width=columns, subsequent_indent=" " * (width + 2))
        print(f"usage: {program} COMMAND ...\n")
        print(*(fill(f"  {command:<{width}}{text}") for command, text in commands.items()), sep="\n")
        print(note or f"\n{program} COMMAND --help says more.")
        raise SystemExit(0)
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {program} {close[0]}?" if close else f"there are {', '.join(commands)}"
        raise ConfigError(f"{shown(repr(name))} is not a command of {program}; {hint}")
    return name, rest


Commands = Mapping[str, Command[Any] | Mapping[str, Command[Any]]]
"""Commands by name; a family maps the names of its commands."""


def completion(program: str, commands: Commands, words: Mapping[str, Sequence[str]], shell: str) -> str:
    """Returns a shell completion script.

    Args:
      words: commands that take one word of a list.
      shell: bash, zsh or fish.
    """
    kinds = tuple(_subcommand(name, command) for name, command in {**commands, **words}.items())
    markers = (tyro.conf.AvoidSubcommands, tyro.conf.OmitSubcommandPrefixes)
    script = io.StringIO()
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
        flags = ["--tyro-print-completion", shell]
        tyro.cli(Union[kinds], args=flags, prog=program, config=markers)  # type: ignore[call-overload]  # noqa: UP007
    return script.getvalue()


def _subcommand(name: str, command: Command[Any] | Mapping[str, Command[Any]] | Sequence[str]) -> Any:
    if isinstance(command, Command):
        return Annotated[command.help_schema(command.offered()), tyro.conf.subcommand(name=name)]
    if isinstance(command, Mapping):
        kinds = [_subcommand(*item) for item in command.items()]
    else:
        kinds = [Annotated[dataclasses.make_dataclass(word, []), tyro.conf.subcommand(name=word)] for word in command]
    if len(kinds) == 1:  # tyro would mistake it for the family, and complete its flags without its name
        kinds.append(Annotated[None, tyro.conf.subcommand(name=HELP)])
    inner: Any = Union[tuple(kinds)]  # noqa: UP007
    family = dataclasses.make_dataclass(name, [("command", inner)])
    return Annotated[family, tyro.conf.subcommand(name=name)]


def settings_of(schema: type) -> tuple[Setting, ...]:
    """Returns the settings of a schema."""
    return _all_settings(schema)


def _settings(root: type, schema: Any, prefix: tuple[str, ...]) -> Iterator[Setting]:
    for field in dataclasses.fields(schema):
        hint, keys = hints_of(schema)[field.name], (*prefix, field.name)
        if dataclasses.is_dataclass(section := _plain(hint)):
            yield from _settings(root, section, keys)
        else:
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            marks = getattr(hint, "__metadata__", ())
            yield Setting(schema, keys, _plain(hint), marks, default, flag(root, keys))


_all_settings: Callable[[Any], tuple[Setting, ...]] = cache(lambda schema: tuple(_settings(schema, schema, ())))


def spellings(schema: type) -> dict[str, tuple[str, ...]]:
    """Maps flags, without leading dashes and with words joined by _, to keys."""
    return {name: setting.keys for setting in settings_of(schema) for name in setting.spellings()}


def _nearest(name: str, known: Sequence[str]) -> str | None:
    # Tries other programs' names, the same key in other sections, then misspellings.
    last = name.rpartition(".")[2].lower()
    for setting, others in OTHER_NAMES.items():
        if last in others.split() and setting in known:
            return setting
    same = [other for other in known if other.rpartition(".")[2] == last]
    close = difflib.get_close_matches(name, same or known, n=1, cutoff=0 if same else 0.6)
    return close[0] if close else None


def _field(default: object) -> Any:
    return dataclasses.field() if default is dataclasses.MISSING else dataclasses.field(default_factory=lambda: default)


def _is_flag(word: str) -> bool:
    return re.match(r"--?[^\W\d_]", word) is not None


def _key(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _negated(key: str) -> str:
    section, dot, last = key.rpartition(".")
    return f"{section}{dot}no_{last}"


def _value(words: Sequence[str], name: str) -> str | None:
    for word, after in itertools.pairwise([*words, ""]):
        spelled, equals, value = word.partition("=")
        if spelled == name:
            return value if equals else after
    return None


def _plain(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _metavar(kind: Any) -> str | None:
    others = [_plain(part) for part in get_args(kind) if part is not type(None)]
    if len(others) != 1 or len(get_args(kind)) != 2:
        return None
    return {Path: "PATH", str: "TEXT", int: "INT", float: "FLOAT"}.get(others[0])


def _docstrings(schema: type) -> dict[str, str]:
    classes = (kind for kind in reversed(schema.__mro__) if dataclasses.is_dataclass(kind))
    found = (text for kind in classes for text in parse_from_object(kind).params)
    return {text.arg_name: " ".join((text.description or "").split()) for text in found}


def _filled(text: str, width: int) -> str:
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        is_code = paragraph.startswith(("jaxtp ", " "))
        lines = "\n".join(f"  {line.strip()}" for line in paragraph.splitlines())
        fill = partial(textwrap.fill, width=width, break_on_hyphens=False, break_long_words=False)
        paragraphs.append(lines if is_code else fill(" ".join(paragraph.split())))
    return "\n\n".join(paragraphs)


@contextlib.contextmanager
def _columns(least: int) -> Iterator[int]:
    # Makes libraries format for at least `least` columns: tyro hangs below six.
    before, found = os.environ.get("COLUMNS"), shutil.get_terminal_size().columns
    try:
        if found < least:
            os.environ["COLUMNS"] = str(least)
        yield max(found, least)
    finally:
        if found < least:
            os.environ.pop("COLUMNS")
            os.environ.update({} if before is None else {"COLUMNS": before})
