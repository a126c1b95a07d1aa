"""`jaxtp checkpoint`: inspect, verify, diff."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import pytest
from small_state import small_state
from support import assert_refused
from tables import read_json, read_table

import jaxtp
from jaxtp.checkpoint import storage
from jaxtp.checkpoint.__main__ import describe_difference, main
from jaxtp.checkpoint.io_errors import DamagedError
from jaxtp.checkpoint.manager import Checkpoints


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Checkpoints of a run on (1, 2, 2), of when there was no cp; in the second, one array is
    larger by one.
    """
    folder = tmp_path_factory.mktemp("run")
    info = read_table(__file__)
    mesh = jaxtp.make_mesh(fsdp=2, tp=2)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, small_state(step - 1, mesh, "tp", ("fsdp", "cp")), mesh, info)
    return folder


def test_inspect_prints_the_arrays_of_a_checkpoint(run, tmp_path, capsys):
    assert_refused(
        main,
        ["inspect", str(tmp_path)],
        "no finished checkpoint there; name the folder of a run",
        capsys,
    )
    assert main(["inspect", str(run)]) == 0
    out = capsys.readouterr().out
    assert "step      2, next sample 8" in out
    assert "written   on mesh dp 1 x fsdp 2 x cp 1 x tp 2 by 1 process(es)" in out
    assert re.search(
        r"^model.weight +4x6 +float32 +96 .*\('tp', \('fsdp', 'cp'\)\)$", out, re.MULTILINE
    )


def test_inspect_prints_a_copy_of_a_checkpoint_that_another_loop_wrote(tmp_path, capsys):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, small_state(), jaxtp.make_mesh(), {"config": "mine.yaml", "mesh": [4]})
    copy = (tmp_path / "1").rename(tmp_path / "best")
    assert main(["inspect", str(copy), f"--json={tmp_path}/record.json"]) == 0
    out = capsys.readouterr().out
    assert 'info      {"config": "mine.yaml", "mesh": [4], "eval_loss": null}\n' in out
    assert "model.weight" in out
    record = read_json(tmp_path / "record.json")
    assert (record["step"], record["config"]) == ("best", "mine.yaml")


def test_verify_finds_a_bit_that_was_turned_over(run, tmp_path, capsys):
    assert main(["verify", str(run / "checkpoints/1")]) == 0
    assert "no problems" in capsys.readouterr().out
    copy = Path(shutil.copytree(run / "checkpoints/2", tmp_path / "copy"))
    files = [path for path in (copy / "state").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert main(["verify", str(copy)]) in (1, 2)
    captured = capsys.readouterr()
    assert "arrays, 1 problem\n" in captured.out or "damaged" in captured.err
    assert "Traceback" not in captured.err


def test_verify_names_each_damaged_array(run, monkeypatch, capsys):
    read = mock.Mock(side_effect=[DamagedError("unreadable"), {"step": jax.numpy.int32(9)}])
    monkeypatch.setattr(storage, "read_arrays", read)
    assert main(["verify", str(run)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("model.weight: unreadable\nstep: does not match its saved checksum\n")
    monkeypatch.setattr(storage, "read_metadata", lambda folder: {})
    assert_refused(main, ["verify", str(run)], "arrays are missing: model.weight, step", capsys)


def test_diff_prints_the_largest_difference_of_each_array(run, capsys):
    first, second = (str(run / "checkpoints" / step) for step in "12")
    assert main(["diff", first, second]) == 1
    assert capsys.readouterr().out.startswith("7.450e-02               model.weight\n1 of ")
    assert main(["diff", first, first]) == 0


def test_an_array_that_was_not_part_of_the_saved_state_is_compared_by_its_elements(run):
    first, second = (storage.open_checkpoint(run / "checkpoints" / step) for step in "12")
    sums = {name: sum_ for name, sum_ in first.info["checksums"].items() if name != "model.weight"}
    unknown = replace(first, info={**first.info, "checksums": sums})
    assert describe_difference(unknown, second, "model.weight") == "7.450e-02"
    assert describe_difference(first, replace(second, arrays={}), "step") == "() and absent"
