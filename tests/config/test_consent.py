"""Code that a configuration names runs only with the user's consent, because anyone may have
written the file.
"""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import raised_by

from jaxtp.__main__ import COMMANDS
from jaxtp.config.affects import RUNS_CODE, settings_of
from jaxtp.config.python_object import is_public
from jaxtp.config.schema import ConfigError, nested
from jaxtp.train.__main__ import COMMAND as TRAIN
from jaxtp.train.config import TrainConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
REFERENCES = [
    "data.batches",
    "data.validation_batches",
    "eval.task_folder",
    "model.build",
    "model.plan",
    "optimizer.build",
    "train.callbacks",
    "train.loss",
]
EVIL = "from pathlib import Path\nPath('PWNED').touch()\ndef code(*a, **b): pass\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL)
    return tmp_path


def write(path, values):
    path.write_text(
        yaml.safe_dump(nested((name.split("."), value) for name, value in values.items()))
    )
    return [f"--config={path}"]


def value_of(name, reference):
    return (
        [reference] if name in ("train.callbacks", "eval.task_folder", "task_folder") else reference
    )


def run(program, words):
    return import_module(f"{COMMANDS[program]}.__main__").main(words)


NAMES = dict.fromkeys(("check", "estimate", "explain", "train"), REFERENCES)
NAMES |= {"evaluate": ["build", "task_folder"], "generate": ["build"], "score": ["build"]}
"""What names code in the files of each command that reads one."""


@pytest.mark.parametrize("program", NAMES)
def test_no_command_runs_code_that_a_file_names(program, folder, capsys):
    for name in NAMES[program]:
        words = write(folder / "shared.yaml", {name: value_of(name, "evil.py:code")})
        assert run(program, words) == 2
        error = capsys.readouterr().err
        flag = f"--{name.replace('_', '-')}"
        for part in ("shared.yaml names code", f"\n  {flag} evil.py:code\n", "--allow-code"):
            assert part in error, name
        assert not Path("PWNED").exists()


def test_a_file_cannot_call_a_function_of_the_standard_library(folder, capsys):
    loss = {"train.loss": "jaxtp.losses:DPO", "data.batches": "itertools:count"}
    call = {"model.build": "os:system", "model.arguments": {"command": "touch PWNED"}}
    words = write(folder / "shared.yaml", call | loss)
    listed = (
        "--model.build os:system\n  --data.batches itertools:count\n  "
        "--model.arguments.command 'touch PWNED'\n"
    )
    for program in ("check", "estimate", "explain", "train"):
        assert run(program, words) == 2
        assert listed in capsys.readouterr().err, program
    assert not Path("PWNED").exists()


ARGUMENTS = {"model.build": "model.arguments", "train.loss": "train.loss_arguments"}
SHOWN = [
    "command 'touch PWNED'",
    "depth 4",
    "lines '\"a\\nb\"'",
    'nested \'{"a": [1, "b"]}\'',
    "text '\"4\"'",
]
GIVEN = {
    "command": "touch PWNED",
    "depth": 4,
    "text": "4",
    "nested": {"a": [1, "b"]},
    "lines": "a\nb",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_a_file_are_shown(name, folder, capsys):
    """In the refusal, and before the code runs with consent of each kind."""
    file = folder / "mine.yaml"
    words = write(file, {name: "evil.py:code", ARGUMENTS[name]: GIVEN})
    flag = f"--{ARGUMENTS[name].replace('_', '-')}"
    shown = [f"{flag}.{each}" for each in SHOWN]
    lines = "\n  ".join([f"--{name} evil.py:code", *shown])
    with pytest.raises(ConfigError, match=re.escape(lines) + "$"):
        TRAIN.load(words)
    TRAIN.load([*words, "--allow-code"])
    listed = ", ".join(shown)
    assert (
        capsys.readouterr().err == f"{file} names code that runs: --{name} evil.py:code, {listed}\n"
    )
    same, _ = TRAIN.load([*words, f"--{name}", "evil.py:code"])
    assert capsys.readouterr().err == f"{file} has arguments of code that runs: {listed}\n"
    words = write(file, {})
    given = [word for each in shown for word in shlex.split(each)]
    assert TRAIN.load([*words, f"--{name}", "evil.py:code", *given])[0] == same
    assert capsys.readouterr().err == ""


def test_code_of_a_flag_gets_arguments_of_other_code_only_with_consent(folder, capsys):
    of_file = {"model.build": "evil.py:code", "model.arguments": {"command": "touch PWNED"}}
    words = write(folder / "shared.yaml", of_file)
    words += ["--model.build", "os:system"]
    assert run("train", words) == 2
    error = capsys.readouterr().err
    assert (
        "shared.yaml has arguments of other code than the code that runs; if you trust it, add "
        "--allow-code" in error
    )
    assert "\n  --model.arguments.command 'touch PWNED'\n" in error
    assert not Path("PWNED").exists()
    TRAIN.load([*words, "--allow-code"])
    TRAIN.load([*words, "--model.arguments.command", "true"])


def test_arguments_in_a_file_that_names_no_code_are_shown(folder, capsys):
    words = write(folder / "mine.yaml", {"model.arguments": {"width": 8}})
    TRAIN.load([*words, "--model.build", "mine.py:build"])
    shown = "mine.yaml has arguments of code that runs: --model.arguments.width 8"
    assert shown in capsys.readouterr().err


def test_arguments_are_shown_as_a_flag_takes_them_and_long_ones_in_part(folder):
    for command, shown in (
        ("-rf /", r"command='-rf /'$"),
        ("a" * 10_000, r"command a{200,300}\.\.\.$"),
    ):
        call = {"model.build": "os:system", "model.arguments": {"command": command}}
        with pytest.raises(ConfigError, match=shown):
            TRAIN.load(write(folder / "shared.yaml", call))
    TRAIN.load(["--model.build", "os:system", "--model.arguments.command=-rf /"])


def test_arguments_of_a_loss_of_jaxtps_own_need_no_consent(folder, capsys):
    TRAIN.load(
        write(
            folder / "shared.yaml",
            {"train.loss": "jaxtp.losses:DPO", "train.loss_arguments": {"beta": 0.2}},
        )
    )
    assert capsys.readouterr().err == ""


def test_consent_is_the_same_flag_or_a_flag_for_all(folder, capsys):
    for name in REFERENCES:
        words = write(folder / "mine.yaml", {name: value_of(name, "evil.py:code")})
        same, _ = TRAIN.load([*words, f"--{name}", "evil.py:code"])
        assert capsys.readouterr().err == ""
        assert TRAIN.load([*words, "--allow-code"])[0] == same
        named = f"mine.yaml names code that runs: --{name.replace('_', '-')} evil.py:code\n"
        assert named in capsys.readouterr().err
        with pytest.raises(ConfigError, match="names code"):
            TRAIN.load([*words, "--train.steps", "3"])


def test_neither_a_file_nor_its_base_can_consent(folder):
    (folder / "base.yaml").write_text("allow_code: true")
    for values in ({"allow_code": True}, {"base": "base.yaml"}):
        with pytest.raises(ConfigError, match="allow_code: unknown key"):
            TRAIN.load(write(folder / "shared.yaml", values))


def test_printing_needs_no_consent(folder, capsys):
    words = write(folder / "shared.yaml", {"model.build": "evil.py:code"})
    with pytest.raises(SystemExit):
        TRAIN.load([*words, "--print-config"])
    assert "build: evil.py:code" in capsys.readouterr().out


def test_the_recipes_need_no_consent():
    for path in CONFIGS:
        TRAIN.load([f"--config={path}"])


PUBLIC = (
    "jaxtp.losses:DPO",
    "jaxtp:DPO",  # as in files of jaxtp 0.2
    "jaxtp.losses:Distillation",
    "jaxtp.train.preference:DPO",
    "jaxtp:ModelConfig",
)
NOT_PUBLIC = (
    "jaxtp.hf:save",
    "jaxtp:Trainer",  # its arguments could name code
    "jaxtp:absent",
    "jaxtp.config:DPO",
    "jaxtp/evil.py:DPO",
    "jaxtp.py:DPO",
    "jaxtp.config.python_object:importlib",
    "jaxtpx:DPO",
    "DPO",
    "",
)


def test_only_settings_and_losses_of_the_package_are_public():
    """Also by the name that `config.yaml` has."""
    assert [name for name in (*PUBLIC, *NOT_PUBLIC) if is_public(name)] == list(PUBLIC)


def test_a_folder_of_code_is_not_public_whatever_its_name(folder, capsys):
    assert run("evaluate", write(folder / "mine.yaml", {"task_folder": ["jaxtp.losses:DPO"]})) == 2
    assert "--task-folder jaxtp.losses:DPO" in capsys.readouterr().err


def test_every_setting_that_names_a_part_of_a_run_is_marked():
    known = settings_of(TrainConfig)
    assert (
        sorted(name for name, setting in known.items() if RUNS_CODE in setting.marks) == REFERENCES
    )


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    named=st.dictionaries(
        st.sampled_from(REFERENCES),
        st.sampled_from(["evil.py:code", "os:system", "jaxtp.losses:DPO"]),
    ),
    in_base=st.sets(st.sampled_from(REFERENCES)),
    flags=st.sets(st.sampled_from(REFERENCES)),
)
def test_any_file_is_refused_unless_flags_replace_all_its_names(named, in_base, flags, folder):
    above = {"base": "base.yaml"}
    base = {}
    for name, reference in named.items():
        (base if name in in_base else above)[name] = value_of(name, reference)
    write(folder / "base.yaml", base)
    words = write(folder / "shared.yaml", above)
    for name in flags:
        words += [f"--{name}", "evil.py:code"]
    left = [
        name
        for name, reference in named.items()
        if name not in flags and reference != "jaxtp.losses:DPO"
    ]
    error = raised_by(TRAIN.load, words)
    assert ("names code" in error) == bool(left)
    assert not [name for name in left if f"--{name.replace('_', '-')} " not in error]
    assert not Path("PWNED").exists()
