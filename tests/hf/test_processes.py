"""Loading, generating and saving in two processes."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from runs import free_address
from safetensors.numpy import load_file

import jaxtp
from jaxtp.data.tokenizer import ByteTokenizer

FOLDER = Path(__file__).parent / "references" / "llama31_rope"
PROGRAM = """
import sys
from jaxtp.launch.joining import join_processes
join_processes()
import jax, jaxtp
from jaxtp.data.tokenizer import ByteTokenizer
with jax.set_mesh(jaxtp.make_mesh(1, 2, 2)):
    model = jaxtp.load_hf(sys.argv[1])
    jaxtp.save_hf(model, sys.argv[2])
    results = jaxtp.Generator(model, ByteTokenizer()).generate(["ab", "c"], jaxtp.GenerationSettings(max_tokens=4))
print("ids", [list(result.ids) for result in results])
"""


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    address = free_address()
    shared = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_NUM_CPU_DEVICES": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(FOLDER), str(tmp_path / "out")],
            env={**os.environ, **shared, "JAX_PROCESS_ID": str(process), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    with jax.set_mesh(jaxtp.make_mesh(1, 2, 2)):
        generator = jaxtp.Generator(jaxtp.load_hf(FOLDER), ByteTokenizer())
        results = generator.generate(["ab", "c"], jaxtp.GenerationSettings(max_tokens=4))
    expected = f"ids {[list(result.ids) for result in results]}"
    assert [expected in output for output in outputs] == [True, True]
    written, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", FOLDER))
    assert written.keys() == original.keys()
    assert all(np.array_equal(written[name], original[name]) for name in original)
