"""A short version of scripts/torture.py, and what its checks are worth."""

import json
import random
import runpy
from pathlib import Path

import pytest
from runs import TEXT

from jaxtp.train.__main__ import main as train

SCRIPT = Path(__file__).parent.parent.parent / "scripts/torture.py"


@pytest.fixture(scope="module")
def torture():
    return runpy.run_path(str(SCRIPT))


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_loses_no_step(torture, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 4)
    flags = torture["SMALL"] | {"run.dir": tmp_path / "whole", "data.path": text, "train.steps": 90}
    sizes = zip(("dp", "fsdp", "tp"), torture["MESHES"][0], strict=True)
    flags |= {f"mesh.{axis}": size for axis, size in sizes}
    assert train([f"--{name}={value}" for name, value in flags.items()]) == 0
    rounds = torture["torture"](tmp_path / "run", text, 90, 2, True, random.Random(1))
    assert len(rounds) == 2
    assert set(torture["differences"](tmp_path / "whole", tmp_path / "run").values()) == {0}


def test_the_script_notices_a_step_that_is_missing_twice_or_different(torture, tmp_path):
    row = {"loss": 1.0, "grad_norm": 1.0, "param_norm": 1.0}
    rows = [row | {"step": step, "tokens": 8 * step} for step in (1, 2, 3)]

    def differences(found):
        for name, written in (("whole", rows), ("run", found)):
            (tmp_path / name).mkdir(exist_ok=True)
            lines = [json.dumps(each) + "\n" for each in written]
            (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
        return torture["differences"](tmp_path / "whole", tmp_path / "run")

    assert set(differences(rows).values()) == {0}
    assert differences([rows[0], rows[1] | {"loss": 1.5}, rows[2]])["loss"] == 0.5
    for wrong in ([rows[0], rows[2]], [*rows, rows[2]]):
        with pytest.raises(AssertionError, match=r"missing|twice"):
            differences(wrong)
