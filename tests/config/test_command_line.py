"""What every command line takes alike: files, meshes, and help of two lengths; and `jaxtp`, which has them all."""

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro
import yaml
from support import sweep

from jaxtp.__main__ import COMMANDS as JAXTP_COMMANDS
from jaxtp.__main__ import main as jaxtp_main
from jaxtp.config import command_line
from jaxtp.config.command_line import Command, completion, leaf_settings, parse_mesh, spellings
from jaxtp.config.entry import UserError
from jaxtp.config.hints import INSTEAD, OTHER_NAMES
from jaxtp.config.schema import ConfigError, Count, Keys, UserPath
from jaxtp.data.prepare.__main__ import COMMAND as PREPARE
from jaxtp.generate.__main__ import COMMAND as GENERATE
from jaxtp.tools.bench.__main__ import COMMANDS as BENCH
from jaxtp.tools.check.__main__ import COMMAND as CHECK
from jaxtp.tools.convert.__main__ import COMMANDS as CONVERT
from jaxtp.tools.estimate.__main__ import COMMAND as ESTIMATE
from jaxtp.tools.evaluate.__main__ import COMMAND as EVALUATE
from jaxtp.tools.explain.__main__ import COMMAND as EXPLAIN
from jaxtp.tools.launch.__main__ import COMMAND as LAUNCH
from jaxtp.train.__main__ import COMMAND as TRAIN
from jaxtp.train.config import IGNORED_BY_COST, TrainConfig


def all_commands():
    for name in JAXTP_COMMANDS.values():
        module = importlib.import_module(f"{name}.__main__")
        yield from getattr(module, "COMMANDS", None).values() if hasattr(module, "COMMANDS") else [module.COMMAND]


COMMANDS = {command.program: command for command in all_commands()}


def printed(command, *flags, capsys):
    with pytest.raises(SystemExit) as ended:
        command.load(flags)
    assert ended.value.code == 0
    return capsys.readouterr().out


def names_of(schema):
    return {name for setting in leaf_settings(schema) for name in spellings(setting)}


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize("program", sweep([*COMMANDS], "jaxtp train"))
def test_help_fits_a_terminal_and_says_where_the_rest_is(program, terminal, capsys):
    command = COMMANDS[program]
    short = printed(command, "--help", capsys=capsys)
    lines = short.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith(f"usage: {program} ")
    assert all(f"--{setting}" in short for setting in ("help", "json") if setting == "help" or command.short_help)
    if command.short_help:
        everything = printed(command, "--help-all", capsys=capsys)
        assert "--help-all" in short
        named = set(re.findall(r"--[a-z][\w.-]+", short)) - {"--help-all"}
        assert named <= set(re.findall(r"--[a-z][\w.-]+", everything)), "what is shown first is among all"
        assert len(everything.splitlines()) > len(lines)


def help_of(setting):
    own = next((text for mark in setting.marks if (text := getattr(mark, "help", None))), None)
    return own or command_line._docstrings(setting.owner)[setting.path[-1]]


@pytest.mark.parametrize("program", COMMANDS)
def test_the_first_sentence_of_each_help_text_says_what_a_setting_does(program):
    """It is all that the short help shows: `Depth.` and `Init source.` said nothing."""
    for setting in COMMANDS[program].used_settings():
        first = re.split(r"(?<=\.)\s", help_of(setting), maxsplit=1)[0]
        assert first.endswith("."), f"{setting.name}: {first}"
        assert len(first.split()) >= 3, f"{setting.name}: {first}"
        assert not first.startswith("See "), f"{setting.name}: {first}"


@pytest.mark.parametrize("program", sweep([*COMMANDS], "jaxtp train"))
def test_the_short_help_has_whole_sentences(program, terminal, capsys):
    command = COMMANDS[program]
    shown = " ".join(printed(command, "--help", capsys=capsys).split())
    for setting in command.used_settings():
        if not command.short_help or setting.name in command.short_help:
            first = re.split(r"(?<=\.)\s", help_of(setting), maxsplit=1)[0]
            assert " ".join(first.split()) in shown, setting.name


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


def test_a_list_of_commands_shows_whole_sentences(terminal, capsys):
    with pytest.raises(SystemExit):
        jaxtp_main(["convert"])
    listed = capsys.readouterr().out
    assert "others that it refuses, with what they need.\n" in " ".join(listed.split(" ")).replace("\n          ", " ")


@pytest.mark.parametrize("program", COMMANDS)
def test_no_setting_is_named_that_is_not_there(program):
    """A name of `first` or `without` that no field has any more would show or refuse nothing."""
    command = COMMANDS[program]
    for name in (*command.short_help, *command.ignored):
        schema = command.schema
        for key in name.split("."):
            schema = schema.__dataclass_fields__[key].default if isinstance(schema, type) else getattr(schema, key)


@pytest.mark.parametrize("program", sweep([*COMMANDS], "jaxtp prepare"))
def test_every_flag_that_the_help_has_is_known(program, terminal, capsys):
    """Flags are looked up before tyro parses those that are given."""
    command = COMMANDS[program]
    text = printed(command, "--help-all", capsys=capsys)
    heads = re.findall("^(?:│ )? {0,4}(--[a-z].*?)(?:  |$)", text, re.MULTILINE)
    listed = {name for head in heads if "{fixed}" not in head for name in re.findall(r"--[a-z][\w.-]*", head)}
    known = {f"--{name.replace('_', '-')}" for name in names_of(command.schema)}
    assert listed - known <= {"--allow-code", "--config", "--mesh", "--print-config"}
    assert listed & known or not known


def test_help_of_a_section(terminal, capsys):
    text = printed(TRAIN, "--help", "checkpoint", capsys=capsys)
    assert "--checkpoint.keep-every" in text
    assert "--model" not in text
    assert "--help SECTION" not in text
    assert "--help-all" in printed(TRAIN, "--config", "configs/llama3_8b.yaml", "--help", capsys=capsys)


def test_jaxtp_lists_its_commands_and_runs_them(terminal, capsys):
    with pytest.raises(SystemExit):
        jaxtp_main([])
    listed = capsys.readouterr().out
    assert all(re.search(rf"^  {name.split()[1]} ", listed, re.MULTILINE) for name in COMMANDS)
    assert len(listed.splitlines()) <= 60
    assert max(map(len, listed.splitlines())) <= 100
    with pytest.raises(SystemExit):
        jaxtp_main(["convert"])
    assert "  export " in capsys.readouterr().out
    assert jaxtp_main(["--version"]) == 0
    assert re.fullmatch(r"jaxtp \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert jaxtp_main(["estimte"]) == 2
    assert (
        capsys.readouterr().err == "jaxtp: error: 'estimte' is not a command of jaxtp; did you mean jaxtp estimate?\n"
    )
    assert jaxtp_main(["convert", "exprt"]) == 2
    assert "did you mean jaxtp convert export?" in capsys.readouterr().err
    assert jaxtp_main(["bench", "x"]) == 2
    assert "'x' is not a command of jaxtp bench; there are comm" in capsys.readouterr().err


def meshes(command, *flags):
    asked, _ = command.load([*flags])
    return {axis: size for axis, size in vars(asked.mesh).items() if axis in ("dp", "fsdp", "cp", "tp")}


def test_a_mesh_is_one_flag_or_several():
    whole = {"dp": 1, "fsdp": 2, "cp": 1, "tp": 8}
    assert meshes(TRAIN, "--mesh", "fsdp=2,tp=8") == whole
    assert meshes(TRAIN, "--mesh=tp=8", "--mesh.fsdp", "2") == whole
    assert meshes(TRAIN, "--mesh.fsdp", "2", "--mesh", "tp=8") == whole, "in any order"
    assert meshes(TRAIN, "--config", "configs/llama3_8b.yaml", "--mesh", "fsdp=2,tp=8") == whole
    assert meshes(TRAIN, "--mesh", "fsdp=-1,tp=4") == {"dp": 1, "fsdp": -1, "cp": 1, "tp": 4}
    assert meshes(GENERATE, "--mesh", "fsdp=2") == {"dp": 1, "fsdp": 2, "cp": 1, "tp": 1}
    assert meshes(EVALUATE, "--mesh", "cp=2") == {"dp": 1, "fsdp": 1, "cp": 2, "tp": 1}
    assert meshes(CONVERT["export"], "a", "b", "--mesh", "tp=2") == {"fsdp": 1, "tp": 2}


@pytest.mark.parametrize("size", ["0", "-1", "9" * 5000])
def test_a_size_that_no_mesh_has_is_one_short_error(size):
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


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (TRAIN, ["--mesh", "tp=2,xp=4"], "--mesh tp=2,xp=4: 'xp' is not an axis; they are dp, fsdp, cp, tp"),
        (TRAIN, ["--mesh", "8"], "'8' is not an axis"),
        (TRAIN, ["--mesh", "tp=0"], "tp=0 is not a number of devices"),
        (TRAIN, ["--mesh", "tp=-2"], "tp=-2 is not a number of devices"),
        (TRAIN, ["--mesh", "tp=2,tp=4"], "tp is given twice"),
        (TRAIN, ["--mesh", "tp=2", "--mesh", "tp=4"], "--mesh is given twice"),
        (TRAIN, ["--mesh"], "--mesh needs a value"),
        (TRAIN, ["--mesh", "--train.steps", "3"], "--mesh needs a value"),
        (TRAIN, ["--mesh", "tp=2", "fsdp=2"], "fsdp=2: unexpected argument"),
        (TRAIN, ["--help", "modell"], "jaxtp train has no such section; did you mean model?"),
        (TRAIN, ["--config"], "--config needs a value"),
        (TRAIN, ["--config", "a.yaml", "--config=b.yaml"], "--config is given twice"),
        (CONVERT["export"], ["a", "b", "--mesh", "cp=2"], "'cp' is not an axis; they are fsdp, tp"),
        (CONVERT["export"], ["a", "b", "--config", "c.yaml"], "--config: jaxtp convert export has no such setting"),
        (TRAIN, ["--mesh.tq", "3"], "--mesh.tq: jaxtp train has no such setting; did you mean --mesh.tp?"),
        (
            TRAIN,
            ["--train.remat", "full"],
            "--train.remat: jaxtp train has no such setting; did you mean --model.remat",
        ),
        (TRAIN, ["--confg=a.yaml"], "--confg: jaxtp train has no such setting; did you mean --config?"),
        (
            TRAIN,
            ["--\x1b[2J\udcff"],
            r"--\x1b[2J\udcff: unexpected argument; see jaxtp train --help",
        ),
        (TRAIN, ["--data.mixture", "x"], "--data.mixture: data.mixture has no flag; set it in a --config file"),
        (TRAIN, ["--mesh.tp", "x"], "--mesh.tp x: should be a valid integer"),
        (TRAIN, ["--model.remat=fool"], "--model.remat fool: should be 'none', "),
        (TRAIN, ["--mesh.tp"], "--mesh.tp needs a value; a value that begins with - is written --mesh.tp=-..."),
        (TRAIN, ["--mesh", ""], "--mesh needs a value"),
        (TRAIN, ["--mesh", "tp=2,", "fsdp=2"], "fsdp=2: unexpected argument"),
        (TRAIN, ["--mesh", "\x1b[31mred\nx"], r"--mesh \x1b[31mred\nx: '\x1b[31mred\nx' is not an axis"),
        (TRAIN, ["--mesh", "dp=65536,tp=65536"], "4,294,967,296 devices are too many for JAX"),
        (ESTIMATE, ["--mesh", "--as-configured"], "--mesh needs a value"),
        (TRAIN, ["--print_config=true"], "--print_config=true: takes no value"),
        (
            TRAIN,
            ["--train.allow-oversize=true"],
            "--train.allow-oversize=true: takes no value; --train.allow-oversize or --train.no-allow-oversize",
        ),
        (TRAIN, ["--run.dir", ""], "--run.dir '': should be a path, but is empty; . is the current folder"),
        (TRAIN, ["--model.lora", "4"], "--model.lora: is a section of settings, such as --model.lora.from"),
        (TRAIN, ["--optimizer.lr", "1"], "no such setting; did you mean --optimizer.learning-rate?"),
        (TRAIN, ["--optimizer.warmup", "4"], "no such setting; did you mean --optimizer.warmup-steps?"),
        (TRAIN, ["--optimizer.learning-rat", "1"], "no such setting; did you mean --optimizer.learning-rate?"),
        (PREPARE, ["--mesh", "tp=2"], "--mesh: jaxtp prepare has no such setting; see jaxtp prepare --help-all"),
        (PREPARE, ["--mesh"], "--mesh: jaxtp prepare has no such setting"),
        (PREPARE, ["--inputs", "a.txt"], "--inputs: give INPUT without a flag"),
        (LAUNCH, ["--logs", "x"], "jaxtp launch needs --processes; see jaxtp launch --help"),
        (LAUNCH, ["--config", "x"], "--config: jaxtp launch has no such setting"),
        (CONVERT["export"], ["", "b"], "RUN_DIR '': should be a path, but is empty"),
        (TRAIN, ["--mesh.tp", "\x1b[2J"], r"--mesh.tp \x1b[2J: should be a valid integer"),
        (TRAIN, ["\udcff\0" + 999 * "9"], r"\udcff\x00999"),
        (TRAIN, ["--mesh.tp", "4", "5"], "5: unexpected argument; see jaxtp train --help"),
        (CONVERT["export"], ["a"], "HF_DIR"),
        (CONVERT["import"], ["-x", "b"], "-x: jaxtp convert import has no such setting"),
        (TRAIN, [""], "'': unexpected argument"),
        (TRAIN, ["a b.yaml"], "a b.yaml: unexpected argument; to read the file, use --config 'a b.yaml'"),
        (TRAIN, ["a.yml"], "a.yml: unexpected argument; to read the file, use --config a.yml"),
        (EXPLAIN, ["m.py:f", "a.yaml"], "a.yaml: unexpected argument; see jaxtp explain --help"),
        (TRAIN, ["-train.steps", "5"], "-train.steps: flags begin with two dashes; did you mean --train.steps?"),
        (TRAIN, ["--mesh.allow-padding", "true"], "true: unexpected argument"),
        (TRAIN, ["--no-mesh.allow-padding"], "did you mean --mesh.allow-padding?"),
        (TRAIN, ["--model.no-sequence-parallel"], "did you mean --model.sequence-parallel?"),
        (TRAIN, ["--model.sequence-parallel"], "--model.sequence-parallel needs a value"),
        (
            TRAIN,
            ["--train.loss-arguments.length-normalized", "--train.steps", "3"],
            "--train.loss-arguments.length-normalized needs a value, such as true; a value",
        ),
        (
            TRAIN,
            ["--model.ignore-config"],
            "--model.ignore-config needs a value; a value that begins with - is written",
        ),
        (
            TRAIN,
            ["--optimizer.groups.emb.learning-rate", "3"],
            "optimizer.groups has no flag; set it in a --config file",
        ),
        (EXPLAIN, ["m.py:f", "--mesh", "tp=2", "--mesh", "tp=4"], "--mesh is given twice"),
        (EXPLAIN, ["m.py:f", "--mesh", "tp=2", "fsdp=2"], "fsdp=2: unexpected argument"),
        (CHECK, ["--json", ""], "--json '': should be a path, but is empty"),
        (ESTIMATE, ["--tier", "5"], "--tier 5: should be 1, 2 or 3"),
        (CHECK, ["--checkpoint.every", "5"], "--checkpoint.every: jaxtp check does not use it; leave it out"),
        (CHECK, ["--train.log-every=5"], "--train.log-every: jaxtp check does not use it"),
        (ESTIMATE, ["--train.no-allow-oversize"], "jaxtp estimate does not use it"),
        (ESTIMATE, ["--optimizer.learning-rate", "1"], "jaxtp estimate does not use it"),
        (BENCH["comm"], ["--data.path", "x"], "--data.path: jaxtp bench comm does not use it"),
    ],
)
def test_mistakes(command, flags, message):
    with pytest.raises(UserError) as error:
        command.load(flags)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("command", "typed", "setting"),
    [
        (TRAIN, "--lr", "--optimizer.learning-rate"),
        (TRAIN, "--learning_rate", "--optimizer.learning-rate"),
        (TRAIN, "--num_warmup_steps", "--optimizer.warmup-steps"),
        (TRAIN, "--epochs", "--train.epochs"),
        (TRAIN, "--num_train_epochs", "--train.epochs"),
        (TRAIN, "--batch-size", "--data.global-batch-size"),
        (TRAIN, "--training.batch_size", "--data.global-batch-size"),
        (TRAIN, "--gradient_accumulation_steps", "--train.accumulation"),
        (TRAIN, "--max_seq_length", "--data.sequence-length"),
        (TRAIN, "--output_dir", "--run.dir"),
        (TRAIN, "--bf16", "--model.precision.compute"),
        (TRAIN, "--fp16", "--model.precision.compute"),
        (TRAIN, "--model.lora.r", "--model.lora.rank"),
        (TRAIN, "--lora_r", "--model.lora.rank"),
        (TRAIN, "--lora_alpha", "--model.lora.alpha"),
        (TRAIN, "--tensor_parallel_size", "--mesh.tp"),
        (CHECK, "--LR", "--optimizer.learning-rate"),
        (PREPARE, "--output_dir", "--out"),
        (EVALUATE, "--max_length", "--sequence-length"),
        (LAUNCH, "--nproc_per_node", "--processes"),
        (GENERATE, "--max_new_tokens", "--max-tokens"),
        (GENERATE, "--model_name_or_path", "--model"),
    ],
)
def test_a_flag_of_another_program_names_the_setting_that_is_meant(command, typed, setting):
    with pytest.raises(UserError) as error:
        command.load([typed, "1"])
    assert str(error.value) == f"{typed}: {command.program} has no such setting; did you mean {setting}?"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--model.lora.dropout", "adapters have no dropout; --model.dropout drops out of the result of each branch"),
        ("--lora_dropout", "adapters have no dropout; --model.dropout drops out of the result of each branch"),
        ("--train.warmup-ratio", "--optimizer.warmup-steps is a number of updates, not a share"),
        ("--model.load-in-4bit", "--model.lora.base float8 keeps the frozen kernels of adapters in 8 bits; 4 bits "),
        ("--per_device_train_batch_size", "--data.global-batch-size is the number of sequences in a step, "),
        ("--dataset_text_field", "jaxtp prepare reads the texts, with --field, and --data.path names the dataset "),
        ("--neftune_noise_alpha", "see jaxtp train --help-all"),
        ("--train.group-by-length", "see jaxtp train --help-all"),
        ("--optimizer.momentum", "see jaxtp train --help-all"),
    ],
)
def test_a_flag_of_another_program_without_its_equal_is_answered_with_what_there_is(typed, hint):
    with pytest.raises(UserError) as error:
        TRAIN.load([typed, "1"])
    assert str(error.value).startswith(f"{typed}: jaxtp train has no such setting; {hint}")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("model: {lora: {dropout: 0.1}}", "model.lora.dropout: unknown key; adapters have no dropout; model.dropout "),
        ("model: {lora: {r: 8}}", "model.lora.r: unknown key; did you mean model.lora.rank?"),
        ("optimizer: {lr: 1}", "optimizer.lr: unknown key; did you mean optimizer.learning_rate?"),
        ("train: {learning_rate: 1}", "train.learning_rate: unknown key; did you mean optimizer.learning_rate?"),
        ("train: {warmup_ratio: 1}", "optimizer.warmup_steps is a number of updates, not a share"),
        ("seed: 1", "seed: unknown key; did you mean run.seed?"),
        ("model: {hidden_size: 8}", "model.hidden_size: unknown key; did you mean model.d_model?"),
        ("optimizer: {groups: {a: {lr: 1}}}", "optimizer.groups.a.lr: unknown key; known keys: "),
    ],
)
def test_a_key_of_another_program_in_a_file_is_answered_like_a_flag(text, hint, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        TRAIN.load(["--config", str(tmp_path / "c.yaml")])
    assert hint in str(error.value)


def test_names_of_other_programs_are_no_settings_and_what_they_mean_is_one():
    known = {name for command in COMMANDS.values() for name in names_of(command.schema)}
    assert OTHER_NAMES.keys() <= known
    assert {setting for setting, _ in INSTEAD.values()} <= known
    others = [*OTHER_NAMES.values(), *INSTEAD]
    shadowed = {name for names in others for name in names.split()} & names_of(TRAIN.schema)
    assert not shadowed


def test_a_flag_turns_off_what_a_file_turns_on(tmp_path):
    for on in (True, False):
        (tmp_path / "c.yaml").write_text(yaml.safe_dump({"model": "m", "prompt": ["a", "b"], "chat": on}))
        flags = ["--config", str(tmp_path / "c.yaml")]
        assert [GENERATE.load([*flags, *more])[0].chat for more in ([], ["--chat"], ["--no-chat"])] == [on, True, False]
    assert GENERATE.load([*flags, "--prompt", "c"])[0].prompt == ("c",), "and a list replaces that of the file"


def test_a_value_may_look_like_a_flag():
    for text in ("--- a/file", "-- and so on", "---", "-x", "--"):
        assert GENERATE.load(["--model", "m", f"--prompt={text}"])[0].prompt == (text,)
    for text in ("--- a/file", "-- and so on", "-1"):
        assert GENERATE.load(["--model", "m", "--prompt", text])[0].prompt == (text,)


def test_a_key_of_a_mapping_is_a_flag(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train: {loss_arguments: {beta: 1, kind: x}}")
    flags = ["--train.loss-arguments.beta", "0.1", "--train.loss_arguments.on=true", "--model.arguments.sizes=[1, 2]"]
    config, _ = TRAIN.load(["--config", str(file), *flags, "--model.arguments.text", "a: b: c"])
    assert config.train.loss_arguments == {"beta": 0.1, "kind": "x", "on": True}
    assert config.model.arguments == {"sizes": [1, 2], "text": "a: b: c"}
    with pytest.raises(ConfigError, match=r"--data\.mixture"):
        TRAIN.load(["--data.mixture.code", "1"])


def test_none_is_no_value_where_a_setting_may_have_none(tmp_path):
    (tmp_path / "c.yaml").write_text("model: {learned_positions: 16}\ndata: {path: none}")
    flags = ["--config", str(tmp_path / "c.yaml")]
    assert TRAIN.load(flags)[0].model.learned_positions == 16
    assert TRAIN.load([*flags, "--model.learned-positions", "none"])[0].model.learned_positions is None
    assert TRAIN.load([*flags, "--model.learned-positions", "null"])[0].model.learned_positions is None
    assert TRAIN.load(flags)[0].data.path.name == "none", "which is a name like others"


@pytest.mark.wide
def test_own_flags_are_spelled_either_way(capsys):
    assert printed(TRAIN, "--print_config", capsys=capsys) == printed(TRAIN, "--print-config", capsys=capsys)
    assert printed(TRAIN, "--help_all", capsys=capsys) == printed(TRAIN, "--help-all", capsys=capsys)


def test_what_follows_two_dashes_is_no_flag():
    values = ("--x.txt", "--help", "--config", "--print-config", "--mesh")
    assert PREPARE.load(["--out", "o", "--", *values])[0].inputs == values
    assert str(CONVERT["import"].load(["--mesh", "tp=2", "--", "-a", "--b"])[0].run) == "--b"


def test_help_of_a_section_beside_values_without_a_flag(capsys):
    text = printed(CONVERT["export"], "--help", "mesh", capsys=capsys)
    assert "--mesh.tp" in text
    assert "--family" not in text


def test_completion_takes_a_shell_alone(capsys):
    assert jaxtp_main(["completion", "bash", "--bogus"]) == 2
    assert capsys.readouterr().err.startswith("jaxtp: error: --bogus: jaxtp completion has no such setting")
    assert jaxtp_main(["completion", "bsh"]) == 2
    assert capsys.readouterr().err.endswith("SHELL bsh: should be 'bash', 'zsh' or 'fish'\n")


@pytest.mark.parametrize("columns", ["1", "5", "19"])
def test_help_ends_in_a_terminal_of_few_columns(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    assert max(map(len, printed(GENERATE, "--help", capsys=capsys).splitlines())) > int(columns)


def test_what_a_command_has_no_use_for_may_stand_in_a_file_and_changes_nothing(tmp_path, monkeypatch):
    """Every setting that `estimate` does not offer, changed in a file: its numbers stay the same."""
    other = {
        "run": {"dir": "runs/x", "seed": 3},
        "train": {"log_every": 7, "z_loss": 0.1},
        "optimizer": {"learning_rate": 0.1, "beta1": 0.5, "schedule": "wsd"},
        "checkpoint": {"every": 3},
    }
    names = {f"{section}.{name}" for section, values in other.items() for name in values}
    assert {name for name in names if not name.startswith("checkpoint")} <= set(IGNORED_BY_COST)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(other))
    monkeypatch.chdir(tmp_path)  # where no earlier run has settings of its own
    results = []
    for flags in ([], ["--config", str(tmp_path / "c.yaml")]):
        file = tmp_path / "e.json"
        with contextlib.redirect_stdout(None):
            assert jaxtp_main(["estimate", "--mesh", "tp=8", *flags, "--json", str(file)]) == 0
        results.append({key: value for key, value in json.loads(file.read_text()).items() if key != "config"})
    assert results[0] == results[1]


@pytest.mark.wide
def test_a_command_without_settings_of_its_own_first_shows_all(capsys):
    small = Command(program="jaxtp x", schema=TrainConfig, description="Does.\n\njaxtp x --a b\njaxtp x --c d\n")
    text = printed(small, "-h", capsys=capsys)
    assert "\n  jaxtp x --a b\n  jaxtp x --c d\n" in text
    assert "--checkpoint.keep-every" in text


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

    source: Annotated[UserPath, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")] = Path("here")
    """Folder to read."""

    inner: Inner = Inner()

    word: Keys = ()
    """A word. The second sentence is in the long help."""

    fast: bool = False
    """Is quick."""


SMALL = Command(program="jaxtp small", schema=Small, description="Example.\n\njaxtp small --fast", short_help=("word",))


@pytest.mark.parametrize("flags", ["--help", "--help-all", "--help inner", "b --word x --inner.size 6 --print-config"])
def test_golden_output(flags, terminal, capsys):
    """Rewrite the file after a change that is meant: GOLDEN=1 pytest -k golden."""
    text = printed(SMALL, *flags.split(), capsys=capsys)
    golden = Path(__file__).parent / "golden" / f"{flags.replace('--', '').replace(' ', '_')}.txt"
    if os.environ.get("GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.wide
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_flags(shell):
    script = completion("jaxtp", {"train": TRAIN, "convert": CONVERT, "check": CHECK}, shell)
    for word in ("train", "convert", "export", "--model.lora.rank", "--mesh", "--config", "--merged"):
        assert word in script, word
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.wide
def test_completion_offers_what_a_command_takes():
    script = completion("jaxtp", {"bench": BENCH, "check": CHECK, "estimate": ESTIMATE}, "bash")
    assert " comm" in script
    assert "--message-bytes" in script
    assert not re.search(r"--command\.|--checkpoint\.every|--data\.mixture|--metrics\.", script)


@pytest.mark.journey
def test_bash_completes(tmp_path):
    script = subprocess.run(
        [sys.executable, "-m", "jaxtp", "completion", "bash"], capture_output=True, text=True, check=True
    ).stdout
    (tmp_path / "jaxtp.bash").write_text(script)
    offered = {
        "train --model.lora.ra": "--model.lora.rank",
        "bench com": "comm",
        "bench comm --message": "--message-bytes",
        "convert ex": "export",
        "convert export --ad": "--adapters",
        "train --model.remat save_d": "save_dots",
        "check --checkpoint.": "",
        "comp": "completion",
    }
    asked = [f"source {tmp_path / 'jaxtp.bash'}", "f=$(complete -p jaxtp | sed 's/.*-F \\([^ ]*\\) .*/\\1/')"]
    for typed in offered:
        words = f"COMP_WORDS=(jaxtp {typed}); COMP_CWORD={len(typed.split())}; COMPREPLY=()"
        asked.append(f'{words}; $f; echo "${{COMPREPLY[@]}}"')
    path = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", "\n".join(asked)], capture_output=True, text=True, check=True, env=path)
    answers = [line.strip() for line in done.stdout.splitlines()]
    assert dict(zip(offered, answers, strict=True)) == offered


def test_values_that_are_no_setting_of_a_section_are_refused_before_the_mesh(tmp_path):
    (tmp_path / "list.yaml").write_text("- a")
    with pytest.raises(ConfigError, match="expected a mapping of sections"):
        TRAIN.load(["--config", str(tmp_path / "list.yaml"), "--mesh", "tp=2"])
