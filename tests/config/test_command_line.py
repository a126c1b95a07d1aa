"""What every command line takes alike: files, meshes, and help of two lengths; and `jaxtp`,
which has them all.
"""

import contextlib
import importlib
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from runs import run_program
from support import assert_refused, swept
from tables import assert_errors, raised_by, read_json, read_table

from jaxtp.__main__ import COMMANDS as JAXTP_COMMANDS
from jaxtp.__main__ import main as jaxtp_main
from jaxtp.config.affects import POSITIONAL, Argument, settings_of
from jaxtp.config.command_line import (
    Command,
    help_text,
    leaf_settings,
    parse_mesh,
    spellings,
)
from jaxtp.config.hints import INSTEAD, OTHER_NAMES
from jaxtp.config.schema import ConfigError, Count, Keys, UserPath
from jaxtp.data.prepare.__main__ import COMMAND as PREPARE
from jaxtp.generate.__main__ import COMMAND as GENERATE
from jaxtp.mesh import mesh_shape
from jaxtp.tools.convert.__main__ import COMMANDS as CONVERT
from jaxtp.tools.estimate.__main__ import COMMAND as ESTIMATE
from jaxtp.train.__main__ import COMMAND as TRAIN

TABLES = read_table(__file__, "command_lines")

SCRIPT = Path(__file__).parents[2] / "scripts" / "completion.py"


def all_commands():
    for name in JAXTP_COMMANDS.values():
        module = importlib.import_module(f"{name}.__main__")
        yield from (
            getattr(module, "COMMANDS", None).values()
            if hasattr(module, "COMMANDS")
            else [module.COMMAND]
        )


COMMANDS = {command.program: command for command in all_commands()}


def printed(command, *flags, capsys):
    with pytest.raises(SystemExit, match="0"):
        command.load(flags)
    return capsys.readouterr().out


def names_of(schema):
    return {name for setting in leaf_settings(schema).values() for name in spellings(setting)}


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


def first_sentence(setting):
    return re.split(r"(?<=\.)\s", help_text(setting), maxsplit=1)[0]


@swept("program", COMMANDS, "jaxtp train")
def test_help_fits_a_terminal_and_points_to_all_settings(program, terminal, capsys):
    """The first sentence of each setting is all that the short help shows."""
    command = COMMANDS[program]
    short = printed(command, "--help", capsys=capsys)
    lines = short.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith(f"usage: {program} ")
    shown = " ".join(short.split())
    flags = set(re.findall(r"--[a-z][\w.-]+", short))
    for setting in command.used_settings():
        first = first_sentence(setting)
        assert re.fullmatch(r"(?!See )\S+ \S+ .*\.", first), setting.name
        assert first in shown or (command.short_help and setting.name not in command.short_help), (
            setting.name
        )
    everything = printed(command, "--help-all", capsys=capsys)
    if command.short_help:
        assert "--help-all" in flags
        assert flags - {"--help", "--help-all"} <= set(re.findall(r"--[a-z][\w.-]+", everything)), (
            "what is first is among all"
        )
        assert len(everything.splitlines()) > len(lines)


def test_the_short_help_begins_with_the_settings_of_the_command(terminal, capsys):
    shown = printed(ESTIMATE, "--help", capsys=capsys)
    assert shown.index("--hardware ") < shown.index("--model.from-hf")
    shown = printed(TRAIN, "--help", capsys=capsys)
    assert shown.index("--run.dir") < shown.index("--json")


def test_optional_references_show_a_file_and_a_name(terminal, capsys):
    shown = printed(TRAIN, "--help", capsys=capsys)
    for flag in ("model.build", "data.batches", "train.loss", "optimizer.build"):
        assert f"--{flag} FILE.py:NAME\n" in shown
    assert "--train.callbacks FILE.py:NAME ..." in shown
    assert "--build FILE.py:NAME" in printed(GENERATE, "--help-all", capsys=capsys)


def test_lists_of_settings_name_those_that_there_are():
    """A name of `short_help` or `ignored` that no field has any more would show or refuse
    nothing.
    """
    for command in COMMANDS.values():
        for name in (*command.short_help, *command.ignored):
            assert name in settings_of(command.schema), name


def test_help_of_a_section(terminal, capsys):
    text = printed(TRAIN, "--help", "checkpoint", capsys=capsys)
    assert "--checkpoint.keep-every" in text
    assert "--model" not in text
    assert "--help SECTION" not in text
    assert "--help-all" in printed(
        TRAIN, "--config", "configs/llama3_8b.yaml", "--help", capsys=capsys
    )


def test_jaxtp_lists_its_commands_and_runs_them(terminal, capsys):
    with pytest.raises(SystemExit):
        jaxtp_main([])
    listed = capsys.readouterr().out
    assert not [
        name for name in COMMANDS if not re.search(rf"^  {name.split()[1]} ", listed, re.MULTILINE)
    ]
    assert len(listed.splitlines()) <= 60
    with pytest.raises(SystemExit):
        jaxtp_main(["convert"])
    assert "or its adapters in PEFT's format." in " ".join(capsys.readouterr().out.split())
    assert jaxtp_main(["--version"]) == 0
    assert re.fullmatch(r"jaxtp \d+\.\d+\.\d+\n", capsys.readouterr().out)
    for words, said in TABLES["hints"].items():
        assert_refused(jaxtp_main, words.split(), said, capsys)


def test_a_mesh_is_one_flag_or_several():
    for program, words, sizes in read_table(__file__, "meshes"):
        asked, _ = COMMANDS[program].load(words.split())
        found = {
            axis: size
            for axis, size in vars(asked.mesh).items()
            if axis in mesh_shape() and size != 1
        }
        assert found == sizes, words


def test_a_size_that_no_mesh_has_is_one_short_error():
    for size in ("0", "-1", "9" * 5000):
        with pytest.raises(ConfigError, match=r"is not a number of devices: 1, 2, ...$") as error:
            parse_mesh(f"tp={size}", ["tp"])
        assert len(str(error.value)) < 300


def test_several_meshes_are_one_list():
    for flags in (
        ["--mesh", "tp=8", "fsdp=2,tp=4", "--as-configured"],
        ["--mesh", "tp=8", "--as-configured", "--mesh=fsdp=2,tp=4"],
    ):
        asked, _ = ESTIMATE.load(flags)
        assert asked.meshes == ("tp=8", "fsdp=2,tp=4")
        assert asked.as_configured


def load(row):
    COMMANDS[f"jaxtp {row['command']}"].load(shlex.split(row["flags"]))


def test_mistaken_flags_are_errors_that_name_what_is_meant():
    """Also flags of other programs."""
    rows = read_table(__file__, "mistaken_flags")
    rows.append(
        {
            "command": "train",
            "flags": "--\x1b[2J\udcff",
            "says": r"--\x1b[2J\udcff: unexpected argument",
        }
    )
    rows.append({"command": "train", "flags": "\udcff\0" + 999 * "9", "says": r"\udcff\x00999"})
    assert_errors(rows, lambda row: raised_by(load, row))


def test_names_of_other_programs_are_no_settings_and_what_they_mean_is_one():
    known = {name for command in COMMANDS.values() for name in names_of(command.schema)}
    assert OTHER_NAMES.keys() <= known
    assert {setting for _, setting, _ in INSTEAD} <= known
    # A row of INSTEAD is read only where a command does not have the name.
    shadowed = set(" ".join(OTHER_NAMES.values()).split()) & names_of(TRAIN.schema)
    assert not shadowed


def test_a_flag_turns_off_what_a_file_turns_on(tmp_path):
    flags = [f"--config={tmp_path}/c.yaml"]
    for on in (True, False):
        (tmp_path / "c.yaml").write_text(
            yaml.safe_dump({"model": "m", "prompt": ["a", "b"], "chat": on})
        )
        for more, chat in (([], on), (["--chat"], True), (["--no-chat"], False)):
            assert GENERATE.load([*flags, *more])[0].chat == chat
    assert GENERATE.load([*flags, "--prompt", "c"])[0].prompt == ("c",), (
        "and a list replaces that of the file"
    )


def test_a_value_may_look_like_a_flag():
    for text in ("--- a/file", "-- and so on", "---", "-x", "--"):
        assert GENERATE.load(["--model", "m", f"--prompt={text}"])[0].prompt == (text,)
    for text in ("--- a/file", "-- and so on", "-1"):
        assert GENERATE.load(["--model", "m", "--prompt", text])[0].prompt == (text,)


def test_a_key_of_a_mapping_is_a_flag(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train: {loss_arguments: {beta: 1, kind: x}}")
    flags = [
        "--train.loss-arguments.beta",
        "0.1",
        "--train.loss_arguments.on=true",
        "--model.arguments.sizes=[1, 2]",
    ]
    config, _ = TRAIN.load([f"--config={file}", *flags, "--model.arguments.text", "a: b: c"])
    assert config.train.loss_arguments == {"beta": 0.1, "kind": "x", "on": True}
    assert config.origin.arguments == {"sizes": [1, 2], "text": "a: b: c"}
    with pytest.raises(ConfigError, match=r"--data\.mixture"):
        TRAIN.load(["--data.mixture.code", "1"])


def test_none_is_no_value_where_a_setting_may_have_none(tmp_path):
    (tmp_path / "c.yaml").write_text("model: {learned_positions: 16}\ndata: {path: none}")
    flags = [f"--config={tmp_path}/c.yaml"]
    assert TRAIN.load(flags)[0].model.learned_positions == 16
    for word in ("none", "null"):
        assert (
            TRAIN.load([*flags, "--model.learned-positions", word])[0].model.learned_positions
            is None
        )
    assert TRAIN.load(flags)[0].data.path.name == "none", "which is a name like others"


def test_own_flags_are_spelled_either_way(capsys):
    for flag, other in (
        ("--print_config", "--print-config"),
        ("--help_all", "--help-all"),
        ("-h", "--help"),
    ):
        assert printed(SMALL, flag, capsys=capsys) == printed(SMALL, other, capsys=capsys)


def test_what_follows_two_dashes_is_no_flag():
    values = ("--x.txt", "--help", "--config", "--print-config", "--mesh")
    assert PREPARE.load(["--out", "o", "--", *values])[0].inputs == values
    assert str(CONVERT["import"].load(["--mesh", "tp=2", "--", "-a", "--b"])[0].run) == "--b"


def test_help_of_a_section_beside_values_without_a_flag(capsys):
    text = printed(CONVERT["export"], "--help", "mesh", capsys=capsys)
    assert "--mesh.tp" in text
    assert "--family" not in text


def test_help_ends_in_a_terminal_of_few_columns(monkeypatch, capsys):
    for columns in (1, 5, 19):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert "--config FILE" in printed(SMALL, "--help", capsys=capsys)


OF_NO_USE = """
run: {dir: runs/x, seed: 3}
train: {log_every: 7, z_loss: 0.1}
optimizer: {learning_rate: 0.1, beta1: 0.5, schedule: wsd}
checkpoint: {every: 3}
"""


def test_what_a_command_has_no_use_for_may_stand_in_a_file_and_changes_nothing(
    tmp_path, monkeypatch
):
    """Settings that `estimate` does not offer, changed in a file: its numbers stay the same."""
    monkeypatch.chdir(tmp_path)  # where no earlier run has settings of its own
    Path("c.yaml").write_text(OF_NO_USE)
    results = []
    for flags in ([], ["--config", "c.yaml"]):
        with contextlib.redirect_stdout(None):
            assert jaxtp_main(["estimate", "--mesh", "tp=8", *flags, "--json", "e.json"]) == 0
        results.append(read_json(Path("e.json")) | {"config": None})
    assert results[0] == results[1]


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Settings of a section."""

    size: Count = 4
    """Size in elements; even is faster."""

    kind: Literal["a", "b"] = "a"
    """Kind of it."""


@dataclass(frozen=True, kw_only=True)
class Small:
    """Settings of a small command."""

    source: Annotated[UserPath, POSITIONAL, Argument("DIR")] = Path("here")
    """Folder to read."""

    inner: Inner = Inner()

    word: Keys = ()
    """A word. The second sentence is in the long help."""

    fast: bool = False
    """Is quick."""


SMALL = Command(
    program="jaxtp small",
    schema=Small,
    description="Example.\n\njaxtp small --fast",
    short_help=("word",),
)


@pytest.mark.parametrize(
    "flags", ["--help", "--help-all", "--help inner", "b --word x --inner.size 6 --print-config"]
)
def test_golden_output(flags, terminal, capsys):
    """Rewrite the file after a change that is meant: GOLDEN=1 pytest -k golden."""
    text = printed(SMALL, *flags.split(), capsys=capsys)
    golden = Path(__file__).parent / "golden" / f"{flags.replace('--', '').replace(' ', '_')}.txt"
    if os.environ.get("GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.journey
def test_bash_completes(tmp_path):
    printed = run_program(sys.executable, SCRIPT, "bash", check=True)
    (tmp_path / "jaxtp.bash").write_text(printed.stdout)
    offered = TABLES["completions"]
    asked = [
        f"source {tmp_path / 'jaxtp.bash'}",
        "f=$(complete -p jaxtp | sed 's/.*-F \\([^ ]*\\) .*/\\1/')",
    ]
    for typed in offered:
        words = f"COMP_WORDS=(jaxtp {typed}); COMP_CWORD={len(typed.split())}; COMPREPLY=()"
        asked.append(f'{words}; $f; echo "${{COMPREPLY[@]}}"')
    done = run_program("bash", "-c", "\n".join(asked), check=True)
    answers = [line.strip() for line in done.stdout.splitlines()]
    assert dict(zip(offered, answers, strict=True)) == offered
    for shell in ("zsh", "fish"):
        printed = run_program(sys.executable, SCRIPT, shell, check=True).stdout
        assert "model.lora.rank" in printed


def test_values_that_are_no_setting_of_a_section_are_refused_before_the_mesh(tmp_path):
    (tmp_path / "list.yaml").write_text("- a")
    with pytest.raises(ConfigError, match="expected a mapping of sections"):
        TRAIN.load([f"--config={tmp_path}/list.yaml", "--mesh", "tp=2"])
