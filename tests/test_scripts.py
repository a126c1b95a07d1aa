"""Scripts that measure are run small; others have a test of their own."""

import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from corpora import write_bpe
from flax import nnx

import jaxtp

SCRIPTS = Path(__file__).parent.parent / "scripts"
SMALL = {
    "generation.py --only host --turns 1": "one token of 8 rows, CPU ms",
    "mamba2_speed.py --width 256 --lengths 16 --rounds 1": "mamba2: 2 all-gather of 16,384 bytes",
    "decision.py": "Trainer, scripts/examples/mixer.py: ",
    "beside_peers.py --model tiny --cases packed": "left out: not installed: give --titan",
    "loader_speed.py --tokens 100000 --seconds 0.1 --repeats 1": "concatenated, 4,096 tokens",
}


@pytest.mark.journey
@pytest.mark.parametrize("line", SMALL)
def test_a_script_runs(line):
    script, *flags = shlex.split(line)
    command = [sys.executable, str(SCRIPTS / script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert SMALL[line] in done.stdout


def test_the_page_of_settings_is_made_from_the_docstrings():
    made = runpy.run_path(str(SCRIPTS / "settings.py"))
    assert made["PAGE"].read_text() == made["page"](), "run python scripts/settings.py"


@pytest.mark.journey
def test_tool_calls_are_learned_and_counted(tmp_path):
    """A tiny model learns nothing in two steps; the whole path to its answers is run."""
    script = SCRIPTS / "tool_calls.py"
    tokenizer = write_bpe(tmp_path / "t", [script.read_text()], 600)
    config = jaxtp.ModelConfig(
        vocab_size=600, d_model=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4, d_ff=16
    )
    model = tmp_path / "model"
    jaxtp.hf.save(jaxtp.Decoder(config, rngs=nnx.Rngs(0)), model, tokenizer_from=tokenizer)
    flags = ["--rows", "40", "--questions", "4", "--steps", "2", "--folder", str(tmp_path / "made")]
    command = [sys.executable, str(script), "--model", str(model), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "before the run: 0 of 4 calls are right" in done.stdout
    assert "after the run: 0 of 4 calls are right" in done.stdout
