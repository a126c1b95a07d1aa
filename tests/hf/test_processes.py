"""Loading, generating and saving in two processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hf_folders import assert_same, read_tensors
from runs import free_address
from support import use_mesh

import jaxtp
from jaxtp import hf
from jaxtp.data.tokenizer import ByteTokenizer

FOLDER, EXPERTS = (
    Path(__file__).parent / "references" / name for name in ("llama31_rope", "mixtral")
)
PROGRAM = """
import sys
from jaxtp.distributed.joining import join_processes
join_processes()
import jax, jaxtp
from jaxtp.data.tokenizer import ByteTokenizer
with jax.set_mesh(jaxtp.make_mesh(fsdp=2, tp=2)):
    model = jaxtp.hf.load(sys.argv[1])
    jaxtp.hf.save(model, sys.argv[2])
    print("streamed", sum(float(array.sum(dtype="float64")) for _, array in jaxtp.hf.stream_weights(model)))
    results = jaxtp.generate.Generator(model, ByteTokenizer()).generate(["ab", "c"], jaxtp.generate.Settings(max_tokens=4))
with jax.set_mesh(jaxtp.make_mesh(tp=4)):
    jaxtp.hf.save(jaxtp.hf.load(sys.argv[3]), sys.argv[4])
with jax.set_mesh(jaxtp.make_mesh(fsdp=2, tp=2)):
    jaxtp.hf.save(jaxtp.hf.load(sys.argv[3]), sys.argv[5], experts="stacked")
print("ids", [list(result.ids) for result in results])
"""  # noqa: E501


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    address = free_address()
    shared = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
        "JAX_NUM_CPU_DEVICES": "2",
    }
    out, separate, stacked = (tmp_path / name for name in ("out", "separate", "stacked"))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, (FOLDER, out, EXPERTS, separate, stacked))],
            env={**os.environ, **shared, "JAX_PROCESS_ID": str(process), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    with use_mesh(1, 2, 2):
        generator = jaxtp.generate.Generator(hf.load(FOLDER), ByteTokenizer())
        results = generator.generate(["ab", "c"], jaxtp.generate.Settings(max_tokens=4))
    expected = f"ids {[list(result.ids) for result in results]}"
    assert [expected in output for output in outputs] == [True, True]
    total = sum(array.sum(dtype="float64") for array in read_tensors(FOLDER).values())
    streamed = [float(output.split("streamed ")[1].split()[0]) for output in outputs]
    assert streamed == pytest.approx([total, total]), "every process gets every tensor"
    hf.save(hf.load(stacked), tmp_path / "again")
    for folder, source in ((out, FOLDER), (separate, EXPERTS), (tmp_path / "again", EXPERTS)):
        assert_same(read_tensors(folder), read_tensors(source))
