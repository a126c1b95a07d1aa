"""A restarted run compiles nothing; of several processes, all read programs or all compile them."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from runs import TEXT, run_program

from jaxtp.tools.launch.__main__ import main as launch

# On CPUs each process has keys of its own, so the programs of a run can be read only without the
# devices in the keys.
RESTARTED = """
import os, sys
from jax._src import cache_key
from jaxtp.distributed import programs
from jaxtp.distributed.joining import join_processes
keys, plant = sys.argv[1:]
if keys == "equal":
    cache_key._hash_accelerator_config = lambda *_: None
if keys != "of CPUs":
    programs.OWN_KEYS = ()
join_processes()
import jax, jaxtp
if plant:
    as_text = jax.stages.Lowered.as_text
    jax.stages.Lowered.as_text = lambda self: as_text(self) + plant * jax.process_index()
model = dict(d_model=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=16)
data = dict(sequence_length=16, global_batch_size=4, path="text.txt")
settings = dict(model=model, data=data, eval=dict(batches=1))
settings["run"] = dict(mirror=os.environ.get("MIRROR"))
with jaxtp.Trainer(folder="run", steps=9, settings=settings, mesh="fsdp=2") as trainer:
    for step in trainer:
        break
    with open(f"loss{jax.process_index()}", "a") as file:
        print(step.metrics["loss"], file=file)
"""
FIRST = r"the first step ended [\d.]+ s after the start: (\d+) programs compiled, (\d+) read from"


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts the run for one more step; returns the numbers of programs that process 0 compiled and
    read, and its output.
    """
    (tmp_path / "restarted.py").write_text(RESTARTED)
    (tmp_path / "text.txt").write_text(TEXT[:9000])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")

    def start(keys="of CPUs", plant="", processes=2):
        words = ["restarted.py", keys, plant]
        if processes == 1:
            said = run_program(sys.executable, *words).stdout
        else:
            shutil.rmtree("logs", ignore_errors=True)
            assert launch(["--processes=2", "--devices=1", "--", *words]) == 0
            said = Path("logs/process-0.log").read_text()
        compiled, read = map(int, re.search(FIRST, said).groups())
        return compiled, read, said

    return start


@pytest.mark.journey
def test_a_restarted_process_compiles_nothing(started, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    compiled, read, _ = started(processes=1)
    assert (compiled > 3, read) == (True, 0)
    compiled, read, _ = started(processes=1)
    assert (compiled, read > 1) == (0, True)


@pytest.mark.journey
def test_restarted_processes_read_the_programs_of_their_folder(started):
    compiled, read, said = started("equal")
    assert compiled > 3
    assert "\ncache   run/programs\n" in said
    compiled, read, _ = started("equal")
    assert (compiled, read > 2) == (0, True)
    assert Path("loss0").read_text() == Path("loss1").read_text()

    # All or none of the processes read the step.
    compiled, _, said = started("equal", plant=" ")
    assert compiled == 1
    assert "the cache of programs is off: process 1 (on " in said

    # A copy of the folder may come from someone else.
    shutil.move("run/programs", "programs")
    shutil.copytree("programs", "run/programs")
    compiled, _, _ = started("equal")
    assert compiled > 2


@pytest.mark.journey
@pytest.mark.parametrize("processes", [1, 2])
def test_a_start_on_an_empty_folder_reads_the_programs_of_the_mirror(
    started, monkeypatch, tmp_path, processes
):
    pytest.importorskip("obstore", reason="pip install 'jaxtp[s3]'")
    monkeypatch.setenv("MIRROR", f"file://{tmp_path}/url")
    monkeypatch.setenv("JAXTP_TOKEN", "a secret")
    compiled, _, _ = started("equal", processes=processes)
    assert compiled > 3
    shutil.move("run", "lost")
    compiled, read, said = started("equal", processes=processes)
    assert (compiled, read > 2) == (0, True)
    assert "resumed from the checkpoint at step 1" in said


@pytest.mark.journey
def test_processes_whose_keys_differ_use_no_cache(started, monkeypatch):
    _, _, said = started()
    assert "\ncache   off: on CPUs" in said
    assert not Path("run/programs").exists()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "own")
    _, read, said = started("different")
    assert "\ncache   off: process 1 does not find what process 0 wrote in own" in said
    assert read < 2, "but for the program that is tried"
