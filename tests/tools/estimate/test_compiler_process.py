"""Asking a compiler in a process: what comes back, and every way in which it does not."""

import json
import re
import subprocess
import sys
from unittest import mock

import pytest
from tables import read_table

import jaxtp
from jaxtp.analysis.schedule import Scheduled
from jaxtp.config.schema import replace_nested
from jaxtp.mesh import mesh_shape
from jaxtp.tools.estimate import compiler as tiers
from jaxtp.tools.estimate.compiler import (
    TARGET_CONFIGS,
    DoesNotFitError,
    TargetError,
    Topology,
    ask,
    compile_for,
    require_compiler,
    topology,
)
from jaxtp.train.config import DataConfig, TrainConfig

TABLES = read_table(__file__)

SIZES = mesh_shape(fsdp=2, tp=4)
CONFIG = TrainConfig(
    model=jaxtp.ModelConfig(precision=jaxtp.Precision(compute="bfloat16"), remat="full"),
    data=DataConfig(sequence_length=128, global_batch_size=4),
)
NOWHERE = Topology(name="1x1x8", target_config="")
ANSWER = """{
    "argument_bytes": 3, "temp_bytes": 4, "peak_bytes": 7, "seconds": 1.5, "flops": 10,
    "collectives": [
        {"kind": "all-gather", "axes": ["tp"], "group": 4, "count": 2, "bytes": 8, "overlapped": 1, "computing": 3}
    ]
}""".replace("\n", "")  # noqa: E501


def compiler(code):
    """A process that stands for the compiler's."""
    return [
        sys.executable,
        "-c",
        f"import json, os, sys, time\nrequest = json.load(sys.stdin)\n{code}",
    ]


def ask_fake(code, timeout_s=30):
    with mock.patch.object(tiers, "COMPILER", compiler(code)):
        return ask(CONFIG, SIZES, NOWHERE, timeout_s=timeout_s)


def test_an_answer_is_read():
    compiled = ask_fake(f"print('noise')\nprint({ANSWER!r})")
    assert (compiled.argument_bytes, compiled.peak_bytes, compiled.seconds) == (3, 7, 1.5)
    (moved,) = compiled.collectives
    assert moved == Scheduled("all-gather", ("tp",), 4, bytes=8, count=2, overlapped=1, computing=3)


WARNING = "Involuntary full rematerialization of "


def test_the_compiler_s_warnings_are_notes():
    code = f"print('W0000 {WARNING}%a\\nW0001 {WARNING}%a', file=sys.stderr)\nprint({ANSWER!r})"
    assert ask_fake(code).notes[1:] == (f"{WARNING}%a",)


def warned(value):
    """Code of a compiler that warns with a value."""
    return f"print({WARNING!r} + json.dumps({value}), file=sys.stderr)\nprint({ANSWER!r})"


def test_the_process_is_told_the_program_and_kept_from_devices():
    value = (
        "[os.environ['JAX_PLATFORMS'], request['sizes']['tp'], request['config']['model']['remat']]"
    )
    assert json.loads(ask_fake(warned(value)).notes[-1].removeprefix(WARNING)) == ["cpu", 4, "full"]


FAILING = TABLES["crashes"]


@pytest.mark.parametrize("message", FAILING)
def test_a_compiler_that_fails_is_one_message(message):
    with pytest.raises(TargetError, match=message):
        ask_fake(FAILING[message])


def test_a_program_that_does_not_fit_is_an_error_of_its_own():
    with pytest.raises(DoesNotFitError, match="30 of 16 GB"):
        ask_fake("print(json.dumps({'error': 'does not fit: 30 of 16 GB', 'fits': False}))")


@pytest.mark.wide
def test_a_compiler_that_takes_too_long_is_ended(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    with pytest.raises(TargetError, match=r"ended after its time limit of 3 s; .* --timeout 9"):
        ask_fake(code, timeout_s=3)
    gone = subprocess.run(["kill", "-0", pid_file.read_text()], capture_output=True, check=False)
    assert gone.returncode != 0


def test_a_missing_compiler_names_the_extra(monkeypatch):
    monkeypatch.setattr(tiers, "GPU_COMPILERS", ("no-such-compiler",))
    with pytest.raises(TargetError, match=r"not installed: pip install 'jaxtp\[estimate-gpu\]'"):
        require_compiler()
    monkeypatch.setattr(tiers, "GPU_COMPILERS", ("no-such-compiler", "jax"))
    require_compiler()


CUDNN_RUN = replace_nested(
    CONFIG, {"model.attention": "cudnn", "model.head_dim": 64, "data.packing": "concatenated"}
)


def test_cudnn_is_compiled_as_the_fused_attention(monkeypatch):
    monkeypatch.setattr(tiers, "topology", lambda *_: NOWHERE)
    value = "request['config']['model']['attention']"
    monkeypatch.setattr(tiers, "COMPILER", compiler(warned(value)))
    compiled = compile_for(CUDNN_RUN, SIZES, "h100", hosts=1, devices_per_host=8, timeout_s=60)
    assert json.loads(compiled.notes[1].removeprefix(WARNING)) == "fused"
    assert "fused" in compiled.notes[-1]


def test_a_target_that_cannot_be_compiled_for_is_refused():
    for hardware in ("mi300x", "v5e"):
        with pytest.raises(TargetError, match=rf"jaxtp does not compile for {hardware} .* h100"):
            topology(hardware, 1, 8)


def test_a_description_of_a_gpu_leaves_nothing_zero():
    gigabytes = TABLES["sizes"]
    assert gigabytes.keys() == TARGET_CONFIGS.keys()
    for name, description in TARGET_CONFIGS.items():
        values = dict(re.findall(r"(\w+): ([\d.]+)", description))
        assert all(float(value) for key, value in values.items() if key != "minor"), name
        assert 0.85 * float(values["device_memory_size"]) < gigabytes[name] * 2**30
