"""The tutorial, its notebook, and the pictures of the pages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
MAKE = SCRIPTS / "tutorial/make_notebook.py"
NOTEBOOK = SCRIPTS / "tutorial/tensor_parallelism.ipynb"


def run(script, out):
    command = [sys.executable, str(script), f"--out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def cells(notebook):
    return [
        (cell["source"], [output["output_type"] for output in cell.get("outputs", [])])
        for cell in json.loads(notebook.read_text())["cells"]
    ]


@pytest.mark.journey
def test_the_tutorial_runs_in_one_namespace_and_its_notebook_shows_it(tmp_path):
    pytest.importorskip("matplotlib")
    made = tmp_path / "made.ipynb"
    run(MAKE, made)
    assert cells(made) == cells(NOTEBOOK), f"python {MAKE} makes it again"
    assert NOTEBOOK.stat().st_size < 300_000


@pytest.mark.journey
def test_the_pictures_show_what_commands_and_functions_say(tmp_path):
    pytest.importorskip("matplotlib")
    run(SCRIPTS / "pictures", tmp_path)
    drawn = {picture.name: picture.read_text() for picture in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in SCRIPTS.glob("results/*.svg")}
    # Four sums of the block, and two in the legend
    assert (tmp_path / "block_dark.svg").read_text().count("Σ") == 6


@pytest.mark.slow
def test_a_run_that_was_killed_has_the_losses_of_an_undisturbed_one(tmp_path):
    file = tmp_path / "made.json"
    run(SCRIPTS / "pictures/interrupted_run.py", file)
    made = json.loads(file.read_text())
    assert made["checkpoint"] < len(made["killed"]) < len(made["undisturbed"])
    whole = made["undisturbed"]
    assert made["resumed"] == {
        step: pytest.approx(whole[step], abs=1e-5) for step in made["resumed"]
    }
