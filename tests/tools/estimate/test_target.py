"""Compiling for devices, there or not: what comes back, and every way in which it does not."""

import dataclasses
import json
import math
import re
import subprocess
import sys

import pytest
from support import sweep, sweep_of

import jaxtp
from jaxtp.analysis.step_costs import step_costs
from jaxtp.config.schema import ConfigError
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import mesh_shape
from jaxtp.tools.estimate import compiler as tiers
from jaxtp.tools.estimate.compiler import (
    GPU_COMPILERS,
    TARGET_CONFIGS,
    DoesNotFitError,
    TargetError,
    Topology,
    ask,
    compile_for,
    installed,
    topology,
    torus,
    with_cudnn,
)
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.memory import memory_per_device, with_attention

SIZES = mesh_shape(fsdp=2, tp=4)
CONFIG = TrainConfig(
    model=jaxtp.ModelConfig(precision=jaxtp.Precision(compute="bfloat16"), remat="full"),
    data=DataConfig(sequence_length=128, global_batch_size=4),
)
NOWHERE = Topology(platform="cuda", name="1x1x8", target_config="", compiler="none")
ANSWER = {
    "argument_bytes": 3,
    "temp_bytes": 4,
    "peak_bytes": 7,
    "seconds": 1.5,
    "flops": 10,
    "in_float8": 0,
    "not_in_float8": {},
    "parts": {},
    "collectives": [
        {"kind": "all-gather", "axes": ["tp"], "group": 4, "count": 2, "bytes": 8, "overlapped": 1, "computing": 3},
    ],
}


def compiler(code):
    """A process that stands for the compiler's."""
    return [sys.executable, "-c", f"import json, os, sys, time\nrequest = json.load(sys.stdin)\n{code}"]


def ask_fake(code, timeout_s=30):
    return ask(CONFIG, SIZES, NOWHERE, timeout_s=timeout_s, compiler=compiler(code))


def test_an_answer_is_read():
    compiled = ask_fake(f"print('noise')\nprint(json.dumps({ANSWER!r}))")
    assert (compiled.argument_bytes, compiled.peak_bytes, compiled.seconds) == (3, 7, 1.5)
    (moved,) = compiled.collectives
    assert (moved.kind, moved.axes, moved.group, moved.bytes) == ("all-gather", ("tp",), SIZES["tp"], 8)
    assert (moved.count, moved.overlapped) == (2, 1)


WARNING = "Involuntary full rematerialization of "


def test_the_compiler_s_warnings_are_notes():
    code = f"print('W0000 {WARNING}%a\\nW0001 {WARNING}%a', file=sys.stderr)\nprint(json.dumps({ANSWER!r}))"
    assert ask_fake(code).notes[1:] == (f"{WARNING}%a",)


def warned(value):
    """Code of a compiler that warns with a value."""
    return f"print({WARNING!r} + json.dumps({value}), file=sys.stderr)\nprint(json.dumps({ANSWER!r}))"


def test_the_process_is_told_the_program_and_kept_from_devices():
    value = "[os.environ['JAX_PLATFORMS'], request['sizes']['tp'], request['config']['model']['remat']]"
    assert json.loads(ask_fake(warned(value)).notes[-1].removeprefix(WARNING)) == ["cpu", 4, "full"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os.kill(os.getpid(), 8)", r"crashed \(SIGFPE\) without a word"),
        ("print('F0000 missing field', file=sys.stderr); os.abort()", r"crashed \(SIGABRT\):\n  F0000 missing field"),
        ("raise RuntimeError('no such topology')", r"failed:\n(.*\n)*  RuntimeError: no such topology"),
        ("print('hello')", r"gave no answer: 'hello"),
        ("pass", r"gave no answer: ''"),
        ("print(json.dumps({'error': 'no such device'}))", r"no such device"),
    ],
    ids=["signal", "abort", "exception", "noise", "silence", "error"],
)
def test_what_goes_wrong_is_said_in_one_message(code, message):
    with pytest.raises(TargetError, match=message):
        ask_fake(code)


def test_that_it_does_not_fit_is_told_apart():
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


def test_a_missing_compiler_names_the_extra():
    with pytest.raises(TargetError, match=r"not installed: pip install 'jaxtp\[estimate-gpu\]'"):
        installed(("no-such-compiler",), "estimate-gpu")
    assert installed(("no-such-compiler", "jax"), "estimate-gpu").startswith("jax ")


CUDNN_RUN = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(CONFIG.model, attention="cudnn", head_dim=64),
    data=dataclasses.replace(CONFIG.data, packing="concatenated"),
)


@pytest.mark.parametrize("there", [True, False], ids=["installed", "missing"])
def test_cudnn_is_compiled_where_its_library_is_installed(there, tmp_path, monkeypatch):
    package = tmp_path / "nvidia_cudnn_cu13-9.9.dist-info"
    if there:
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cudnn-cu13\nVersion: 9.9\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("LD_LIBRARY_PATH", "/other")
    monkeypatch.setattr(tiers, "topology", lambda *_: dataclasses.replace(NOWHERE, compiler="jax-cuda13-plugin 1"))
    value = "[request['config']['model']['attention'], request['target']['compiler'], os.environ['LD_LIBRARY_PATH']]"
    monkeypatch.setattr(tiers, "COMPILER", compiler(warned(value)))
    compiled = compile_for(CUDNN_RUN, SIZES, "h100", hosts=1, devices_per_host=8, timeout_s=60)
    attention, versions, folders = json.loads(compiled.notes[1].removeprefix(WARNING))
    if there:
        assert (attention, versions) == ("cudnn", "jax-cuda13-plugin 1, nvidia-cudnn-cu13 9.9")
        assert folders == f"{tmp_path}/nvidia/cudnn/lib:/other"
    else:
        assert (attention, versions, folders) == ("fused", "jax-cuda13-plugin 1", "/other")
        assert "pip install 'jaxtp[estimate-cudnn]'" in compiled.notes[-1]


def test_only_what_can_be_compiled_for_is():
    with pytest.raises(TargetError, match=r"no compiler works for mi300x .* h100"):
        topology("mi300x", 1, 8)
    with pytest.raises(TargetError, match=r"dp 1 x fsdp 2 x cp 1 x tp 4 takes 8 devices, and 2 hosts of 8"):
        compile_for(CONFIG, SIZES, "h100", hosts=2, devices_per_host=8, timeout_s=1)
    with pytest.raises(TargetError, match=r"fsdp -1 .*: each axis needs at least 1 device"):
        compile_for(CONFIG, mesh_shape(fsdp=-1, tp=8), "h100", hosts=1, devices_per_host=8, timeout_s=1)
    with pytest.raises(ConfigError, match=r"d_model=\d+ is not divisible by mesh.fsdp=3"):
        compile_for(CONFIG, mesh_shape(fsdp=3), "h100", hosts=1, devices_per_host=3, timeout_s=1)


@pytest.mark.parametrize("dims", [2, 3])
def test_a_slice_is_nearly_a_cube(dims):
    for exponent in range(11):
        shape = torus(2**exponent, dims)
        assert math.prod(shape) == 2**exponent
        assert len(shape) == dims
        assert max(shape) <= 2 * min(shape)
    with pytest.raises(TargetError, match=r"12 TPUs: a slice has a power of two, such as 8 or 16"):
        torus(12, dims)


@pytest.mark.parametrize("name", TARGET_CONFIGS)
def test_a_description_of_a_gpu_leaves_nothing_zero(name):
    values = {key: float(value) for key, value in re.findall(r"(\w+): ([\d.]+)", TARGET_CONFIGS[name])}
    assert all(value for key, value in values.items() if key != "minor")
    assert (
        0.85 * values["device_memory_size"]
        < {"a100-40": 40, "a100": 80, "h100": 80, "h200": 141, "b200": 192, "l40s": 48, "rtx4090": 24}[name] * 2**30
    )


RINGS = TrainConfig(
    model=jaxtp.ModelConfig(
        d_model=1024,
        d_ff=2048,
        head_dim=128,
        num_layers=16,
        attention="xla",
        precision=jaxtp.Precision(compute="bfloat16"),
        overlap="ring",
    ),
    data=DataConfig(sequence_length=1024, global_batch_size=4),
)
"""Products that XLA computes as those of a large model: of smaller ones it splits the sum."""


def missing():
    try:
        return "" if installed(GPU_COMPILERS, "estimate-gpu") else "never"
    except TargetError as error:
        return str(error)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_step_is_compiled_for_gpus_that_are_not_there(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # the tests' own are for CPUs
    target = topology("h100", 1, 8)
    first = ask(CONFIG, SIZES, target, timeout_s=300)
    memory = memory_per_device(CONFIG, SIZES)
    assert first.argument_bytes == memory.state + memory.batch
    assert first.argument_bytes + first.temp_bytes <= first.peak_bytes < 2**30
    assert sum(part["flops"] for part in first.parts.values()) == first.flops
    assert min(first.parts[name]["product_bytes"] for name in ("attention", "MLP", "projections")) > 0
    moved = {(m.kind, m.axes): m for m in first.collectives}
    layers = CONFIG.model.num_layers
    gathered, scattered = moved["all-gather", ("fsdp",)], moved["reduce-scatter", ("fsdp",)]
    assert scattered.count > layers
    assert gathered.count > layers
    assert moved["all-gather", ("tp",)].overlapped > 0


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_no_stack_of_frozen_weights_is_copied(monkeypatch):
    """A layer adds its input, 0.25 MiB, and gradients of adapters; a copy of its weights would be 3."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    low = jaxtp.Precision(param="bfloat16", compute="bfloat16")
    wide = {"d_model": 2048, "num_heads": 16, "num_kv_heads": 16, "head_dim": 128, "d_ff": 4096, "attention": "xla"}
    temp = []
    for layers in (4, 36):
        model = jaxtp.ModelConfig(num_layers=layers, lora=LoraConfig(rank=4), precision=low, remat="full", **wide)
        config = TrainConfig(model=model, data=DataConfig(sequence_length=64, global_batch_size=8))
        temp.append(ask(config, mesh_shape(fsdp=8), topology("h100", 1, 8), timeout_s=300).temp_bytes)
    assert temp[1] - temp[0] < 32 * 2**19


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_attention_of_cudnn_is_compiled_without_a_gpu(monkeypatch):
    """It holds no scores."""
    if with_cudnn(topology("h100", 1, 8)) is None:
        pytest.skip("its library is not installed: pip install 'jaxtp[estimate-cudnn]'")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    long = dataclasses.replace(CUDNN_RUN, data=dataclasses.replace(CUDNN_RUN.data, sequence_length=8192))
    by_kernel = {
        name: compile_for(with_attention(long, name), SIZES, "h100", hosts=1, devices_per_host=8, timeout_s=300)
        for name in ("cudnn", "fused", "xla")
    }
    assert by_kernel["cudnn"].notes[-1] == "the workspace of cuDNN's kernels is not counted"
    costs = step_costs(long.model, SIZES, batch_size=4, sequence_length=8192, platform="cuda 9.0")
    assert by_kernel["cudnn"].flops == by_kernel["fused"].flops == costs.flops
    assert by_kernel["cudnn"].peak_bytes <= 1.05 * by_kernel["fused"].peak_bytes
    assert by_kernel["cudnn"].peak_bytes < 0.5 * by_kernel["xla"].peak_bytes


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("remat", sweep(["full", "none"], "full"))
def test_what_rings_move_is_hidden_behind_products(remat, monkeypatch):
    """Forward and backward; embedding, head and loss have no rings."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    config = dataclasses.replace(RINGS, model=dataclasses.replace(RINGS.model, remat=remat))
    compiled = ask(config, SIZES, topology("h100", 1, 8), timeout_s=300)
    over_tp = [moved for moved in compiled.collectives if moved.axes == ("tp",)]
    sent = {m.kind: m.bytes_sent for m in over_tp}
    hidden = sum(m.hidden_bytes / m.bytes * m.bytes_sent for m in over_tp)
    assert hidden > 0.9 * sum(sent.values()), sent


COMPILED = """
import json, math, re, sys
from functools import partial
import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtp.tools.estimate.compiler import ABSENT_GPU, topology
from jaxtp.mesh import mesh_of, mesh_shape

def compiled(step, *shapes, hardware="h100"):
    mesh = mesh_of(mesh_shape(), topology(hardware, 1, 1).devices())
    arrays = [jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, PartitionSpec())) for shape in shapes]
    with jax.set_mesh(mesh):
        program = jax.shard_map(step, in_specs=PartitionSpec(), out_specs=PartitionSpec())
        options = ABSENT_GPU | {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
        return jax.jit(program).lower(*arrays).compile(compiler_options=options)
"""
"""A kernel that spills registers fails to compile."""

GROUPED = f"""{COMPILED}
from jaxtp.analysis.hlo import count_flops_in_hlo
from jaxtp.layers.kernels.grouped import grouped_matmul

def step(method, rows, kernels, sizes, grad):
    y, backward = jax.vjp(lambda rows, kernels: grouped_matmul(rows, kernels, sizes, method), rows, kernels)
    return y, *backward(grad)

rows, width, columns, groups = json.load(sys.stdin)
shapes = ((rows, width), "bfloat16"), ((groups, width, columns), "bfloat16"), ((groups,), "int32"), \\
    ((rows, columns), "bfloat16")
for method in ("pallas", "xla"):
    program = compiled(partial(step, method), *shapes)
    text = program.as_text()
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\\bbf16\\[([\\d,]+)\\]", text)]
    print(json.dumps({{
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "kernels": text.count('custom_call_target="__gpu$xla.gpu.triton"'),
        "flops": count_flops_in_hlo(text),
        "products": len(re.findall(r" dot\\(", text)),
        "largest": max(sizes),
    }}))
"""


def answers(program, request):
    """Returns the lines of JSON that a program prints."""
    done = subprocess.run([sys.executable, "-c", program], input=json.dumps(request), capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_each_row_is_multiplied_with_its_own_expert_alone(monkeypatch):
    """By Pallas' kernels, which spill no registers; XLA lays the rows out for each of the experts, in memory."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    rows, width, columns, groups = shape = 4096 * 8, 2048, 768, 128
    pallas, xla = answers(GROUPED, shape)
    assert (pallas["kernels"], pallas["products"]) == (3, 0)
    assert pallas["flops"] == 3 * 2 * rows * width * columns
    assert pallas["largest"] == groups * width * columns
    assert pallas["temporaries"] < 2**20
    assert (xla["kernels"], xla["products"]) == (0, 3)
    assert xla["largest"] == groups * rows * width
    assert xla["temporaries"] >= groups * rows * width * 2


MXFP8 = f"""{COMPILED}
from jaxtp.layers.mxfp8 import mx_matmul

def step(x, w, grad):
    y, backward = jax.vjp(mx_matmul, x, w)
    return y, *backward(grad)

shapes = [(shape, "bfloat16") for shape in json.load(sys.stdin)]
text = compiled(step, *shapes, hardware="b200").as_text()
print(json.dumps([text.count('custom_call_target="__cudnn$blockScaledDot"'), len(re.findall(r" dot\\(", text))]))
"""


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_blackwell_multiplies_scaled_blocks(monkeypatch):
    """Output and input gradient; XLA would silently multiply in bfloat16 what cuDNN does not take."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert answers(MXFP8, [(2, 500, 2048), (2048, 4096), (2, 500, 4096)]) == [[2, 1]]


DELTA = f"""{COMPILED}
from jaxtp.layers.kernels.delta_rule import Tokens, delta_rule
from jaxtp.layers.kernels.select import pick_scan

def states(scan, w, u, k_decayed, decay, state, *grads):
    results, backward = jax.vjp(scan, w, u, k_decayed, decay, state)
    return *results, *backward(grads)

def rule(scan, *arrays):
    *inputs, starts, grad = arrays
    y, backward = jax.vjp(lambda *inputs: delta_rule(Tokens(*inputs, starts), scan=scan)[0], *inputs)
    return y, *backward(grad)

whole, dtype, width = json.load(sys.stdin)
scan, _ = pick_scan(width, "cuda 9.0")
def of(*shape, dtype="float32"):
    return (1, *shape), dtype

if whole:
    tokens, each = of(1024, 6, width, dtype=dtype), of(1024, 6)
    programs = [(rule, one, (tokens,) * 3 + (each, each, of(1024, dtype="bool"), tokens)) for one in (scan, None)]
else:
    tokens, states_of_all, state = of(6, 16, 64, width, dtype=dtype), of(6, 16, width, width), of(6, width, width)
    programs = [(states, scan, (tokens,) * 3 + (of(6, 16), state, states_of_all, tokens, state))]
for step, one, shapes in programs:
    program = compiled(partial(step, one), *shapes)
    text = program.as_text()
    print(json.dumps({{
        "temporaries": program.memory_analysis().temp_size_in_bytes,
        "kernels": re.findall(r'gpu.triton".*?op_name="[^"]*/delta_(\\w+)/', text),
        "loops": len(re.findall(r" while\\(", text)),
    }}))
"""


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(
    ("dtype", "width"), sweep_of([["bfloat16", "float32"], [128, 256]], ("bfloat16", 128), ("float32", 128))
)
def test_the_states_of_gated_deltanet_spill_no_registers(dtype, width, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    (compiled,) = answers(DELTA, (False, dtype, width))
    assert compiled["kernels"] == ["states", "gradient"]


@pytest.mark.wide
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_gated_deltanet_is_compiled_without_loops(monkeypatch):
    """The backward pass does not compute the states again, and takes no more memory than with loops."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    pallas, xla = answers(DELTA, (True, "bfloat16", 128))
    assert (pallas["kernels"], pallas["loops"]) == (["states", "gradient"], 0)
    assert (xla["kernels"], xla["loops"]) == ([], 2)
    assert pallas["temporaries"] <= xla["temporaries"]
