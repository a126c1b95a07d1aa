"""`jaxtp doctor`: every finding, on one process and on several, and its exit code."""

import json
from dataclasses import replace

import pytest
from support import assert_refused

from jaxtp.guards import known_versions, self_check
from jaxtp.tools.doctor.__main__ import main, merged
from jaxtp.tools.launch.__main__ import main as launch


@pytest.fixture
def quick(monkeypatch):
    """Omits operations but one, and compares no kernel."""
    name = "an elementwise operation"
    case = self_check.operations(("float32",))[name]
    monkeypatch.setattr(self_check, "operations", lambda dtypes: {name: case})
    monkeypatch.setattr("jaxtp.tools.doctor.__main__.KERNELS", {})
    return case


def test_a_right_machine_is_shown_and_recorded(quick, tmp_path, capsys):
    file = tmp_path / "doctor.json"
    flags = ["--mesh", "fsdp=2,tp=2", "--folder", str(tmp_path), "--json", str(file)]
    assert main(flags) == 0
    shown = capsys.readouterr().out
    assert "mesh     dp 1 x fsdp 2 x cp 1 x tp 2" in shown
    assert "0 wrong, 0 warnings" in shown
    record = json.loads(file.read_text())
    assert {"host", "versions", "devices", "links", "cache"} <= record["machine"].keys()
    areas = {row["area"] for row in record["findings"]}
    assert areas == {"devices", "versions", "folder", "collectives"}
    assert {row["verdict"] for row in record["findings"]} == {"ok"}
    subjects = {row["subject"] for row in record["findings"]}
    assert {"all-gather over fsdp", "permute over tp"} <= subjects


def test_every_problem_is_reported(quick, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(self_check, "permute", lambda x, axis: x)
    fault = replace(quick, run=lambda x: 2 * x, on_host=lambda x: x)
    monkeypatch.setattr(self_check, "operations", lambda dtypes: {"a root": fault})
    everywhere = replace(known_versions.TABLE[0], devices="", first=(0,), fixed=(99,))
    monkeypatch.setattr(known_versions, "TABLE", (everywhere,))
    assert main(["--mesh", "fsdp=2", "--folder", str(tmp_path / "absent")]) == 3
    shown = capsys.readouterr().out
    assert "computes a root outside of jit wrong" in shown
    assert "device 1 of process 0 (cpu) computes a root wrong" in shown
    assert "device 1 of process 0 (cpu) receives wrong numbers by permute over mesh.fsdp" in shown
    assert "absent cannot be written by process 0" in shown
    assert "WARNING" in shown
    assert "6 wrong, 1 warnings" in shown


def test_a_mistake_alone_is_no_wrong_number(quick, tmp_path, capsys):
    assert main(["--mesh", "tp=1,fsdp=1", "--folder", str(tmp_path / "absent")]) == 2
    assert_refused(main, ["--mesh", "tp=0"], "tp=0", capsys)


def test_processes_are_merged(monkeypatch):
    right, wrong = (
        {"verdict": verdict, "area": "devices", "subject": "sum", "text": text, "error": code}
        for verdict, text, code in (("ok", "1e-7", 0), ("WRONG", "off by 1", 3))
    )
    reports = [[right], [right | {"text": "2e-7"}], [wrong]]
    monkeypatch.setattr("jaxtp.tools.doctor.__main__.all_gather_json", lambda rows: reports)
    assert merged([]) == [right | {"processes": [0, 1]}, wrong | {"processes": [2]}]


@pytest.mark.journey
@pytest.mark.parametrize("code", [0, 2])
def test_several_processes_are_compared(code, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    program = (
        "import os, sys\nfrom jaxtp.tools.doctor.__main__ import main\n"
        f"other = ['--folder', 'other'] if os.environ['JAX_PROCESS_ID'] == '{code // 2}' else []\n"
        f"sys.exit(main(sys.argv[1:] + other * {code // 2}))"
    )
    words = ["--processes=2", "--devices=1", "--", "-c", program, "--mesh=fsdp=2"]
    assert launch(words) == code
    shown = "".join(capfd.readouterr())
    if code == 0:
        assert "2 of 1 device: 2 x cpu" in shown
        assert "all-reduce over fsdp" in shown
    else:
        assert "differ in their configuration" in shown
        assert "folder: . -> other" in shown
        assert "the processes differ" in shown
