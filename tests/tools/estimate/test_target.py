"""Compiling for GPUs that are not there, by their own compiler."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from runs import run_program
from tables import read_table

from jaxtp import ModelConfig, Precision
from jaxtp.analysis.step_costs import step_costs
from jaxtp.config.schema import replace_nested, to_yaml
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import mesh_shape
from jaxtp.tools.estimate.compiler import (
    TargetError,
    ask,
    compile_for,
    require_compiler,
    topology,
)
from jaxtp.train.config import DataConfig, MeshConfig, TrainConfig
from jaxtp.train.memory import memory_per_device


def missing():
    """Returns why no compiler for GPUs can be used; empty if one can."""
    try:
        require_compiler()
    except TargetError as error:
        return str(error)
    return ""


pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(960),
]


@pytest.fixture(autouse=True)
def without_flags_for_cpus(monkeypatch):
    """The suite sets flags for CPUs, which the compiler for GPUs does not know."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


PARTS = Path(__file__).parents[3] / "scripts/parts.py"
SIZES = mesh_shape(fsdp=2, tp=4)
FSDP = mesh_shape(fsdp=8)
IN_HALF = Precision(compute="bfloat16")
CONFIG = TrainConfig(
    model=ModelConfig(precision=IN_HALF, remat="full"),
    data=DataConfig(sequence_length=128, global_batch_size=4),
)


def compiled_for_h100(config, sizes=SIZES):
    return ask(config, sizes, topology("h100", 1, 8), timeout_s=300)


RINGS = TrainConfig(
    model=ModelConfig(
        d_model=1024,
        d_ff=2048,
        head_dim=128,
        num_layers=16,
        attention="xla",
        precision=IN_HALF,
        overlap="ring",
    ),
    data=DataConfig(sequence_length=1024, global_batch_size=4),
)
"""Products that XLA computes as those of a large model: of smaller ones it splits the sum."""


def test_a_step_is_compiled_for_gpus_that_are_not_there():
    first = compiled_for_h100(CONFIG)
    memory = memory_per_device(CONFIG, SIZES)
    assert first.argument_bytes == memory.state + memory.batch
    assert first.argument_bytes + first.temp_bytes <= first.peak_bytes < 2**30
    assert first.flops
    moved = {(m.kind, m.axes): m for m in first.collectives}
    for kind in ("all-gather", "reduce-scatter"):
        assert moved[kind, ("fsdp",)].count > CONFIG.model.num_layers
    assert moved["all-gather", ("tp",)].overlapped > 0


def test_the_parts_of_a_step_are_printed(tmp_path):
    config = replace(CONFIG, mesh=MeshConfig(fsdp=2, tp=4))
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    done = run_program(sys.executable, PARTS, tmp_path / "run.yaml", "h100")
    assert done.returncode == 0, done.stderr
    # The fourth column divides the FLOPs by their minimum, which full remat computes again.
    table, _, step = done.stdout.partition("\n\n")
    ratios = {line.split()[0]: line.split()[3] for line in table.splitlines()}
    assert all(1 <= float(ratios[part]) < 2 for part in ("MLP", "attention", "all")), done.stdout
    header, line, *_ = step.splitlines()
    assert header.split()[:5] == ["GB", "sent", "exposed", "peak", "GiB"]
    numbers = [float(number.replace(",", "")) for number in line.split()]
    sent, exposed, peak, kernels, *_ = numbers
    assert exposed <= sent
    assert peak < 1 < kernels


def test_no_stack_of_frozen_weights_is_copied():
    """A layer adds its input, 0.25 MiB, and gradients of adapters; a copy of its weights would
    be 3.
    """
    low = Precision(param="bfloat16", compute="bfloat16")
    wide = read_table(__file__)
    adapters = LoraConfig(rank=4)
    model = ModelConfig(lora=adapters, precision=low, remat="full", **wide)
    config = TrainConfig(model=model, data=DataConfig(sequence_length=64, global_batch_size=8))
    few, many = (
        compiled_for_h100(replace_nested(config, {"model.num_layers": layers}), FSDP).temp_bytes
        for layers in (4, 36)
    )
    assert many - few < 32 * 2**19


def test_the_attention_of_cudnn_is_compiled_as_the_fused_one():
    """It holds no scores either."""
    changes = {"model.attention": "cudnn", "model.head_dim": 64, "data.packing": "concatenated"}
    long = replace_nested(CONFIG, changes | {"data.sequence_length": 8192})
    where = {"hosts": 1, "devices_per_host": 8, "timeout_s": 300}
    cudnn, xla = (
        compile_for(replace_nested(long, {"model.attention": name}), SIZES, "h100", **where)
        for name in ("cudnn", "xla")
    )
    costs = step_costs(long.model, SIZES, batch_size=4, sequence_length=8192, platform="cuda 9.0")
    assert cudnn.flops == costs.flops
    assert cudnn.peak_bytes < 0.5 * xla.peak_bytes


def test_what_rings_move_is_hidden_behind_products():
    """Forward, backward and in what full remat computes again; embedding, head and loss have no
    rings.
    """
    compiled = compiled_for_h100(replace_nested(RINGS, {"model.remat": "full"}))
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
"""  # noqa: E501
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
"""  # noqa: E501


def answers(program, request):
    """Returns the lines of JSON that a program prints."""
    done = run_program(sys.executable, "-c", program, input=json.dumps(request), timeout=900)
    assert not done.returncode, done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


def test_each_row_is_multiplied_with_its_own_expert_alone():
    """By Pallas' kernels, which spill no registers; XLA lays the rows out for each of the
    experts, in memory.
    """
    shape = [4096 * 8, 2048, 768, 128]
    rows, width, columns, groups = shape
    pallas, xla = answers(GROUPED, shape)
    assert (pallas["kernels"], pallas["products"]) == (3, 0)
    assert pallas["flops"] == 3 * 2 * rows * width * columns
    assert pallas["largest"] == groups * width * columns
    assert pallas["temporaries"] < 2**20
    assert (xla["kernels"], xla["products"]) == (0, 3)
    assert xla["largest"] == groups * rows * width
    assert xla["temporaries"] >= groups * rows * width * 2


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
"""  # noqa: E501


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 128), ("float32", 256)])
def test_the_states_of_gated_deltanet_spill_no_registers(dtype, width):
    (compiled,) = answers(DELTA, (False, dtype, width))
    assert compiled["kernels"] == ["states", "gradient"]


def test_gated_deltanet_is_compiled_without_loops():
    """The backward pass does not compute the states again, and takes no more memory than with
    loops.
    """
    pallas, xla = answers(DELTA, (True, "bfloat16", 128))
    assert (pallas["kernels"], pallas["loops"]) == (["states", "gradient"], 0)
    assert (xla["kernels"], xla["loops"]) == ([], 2)
    assert pallas["temporaries"] <= xla["temporaries"]
