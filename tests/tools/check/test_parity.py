"""Sixteen meshes, sequence parallel or not, and many models: every gradient and three updates equal one device's."""

import dataclasses
from functools import partial

import numpy as np
import pytest
from support import sizes_of, sweep

import jaxtp
from jaxtp.layers.kernels.fused_attention import fused_attention
from jaxtp.layers.kernels.select import KERNELS
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.rope import RopeScaling
from jaxtp.tools.check import parity
from jaxtp.tools.check.shrink import ONE_DEVICE, UPDATES, Case
from jaxtp.train.config import DataConfig, LoopConfig, OptimizerConfig, TrainConfig

LLAMA = jaxtp.ModelConfig(
    vocab_size=32, d_model=16, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=4, d_ff=24, rope_theta=2.0
)
BASE = TrainConfig(
    model=LLAMA,
    data=DataConfig(sequence_length=8, global_batch_size=16),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
    train=LoopConfig(steps=10),
)


def variant(*, train=BASE.train, **model):
    return dataclasses.replace(BASE, model=dataclasses.replace(LLAMA, **model), train=train)


LONGROPE = RopeScaling(
    kind="longrope", factor=2.0, original_length=4, short_factor=(1.0,) * 6, long_factor=(1.0, 1.1, 1.3, 1.6, 2.0, 2.5)
)
CONFIGS = {
    "llama": BASE,
    "shared kv heads": variant(
        num_kv_heads=2, head_dim=12, remat="save_dots", qk_norm="head", dropout=0.2, rope_scaling=LONGROPE
    ),
    "odd": variant(
        vocab_size=19,
        num_kv_heads=1,
        head_dim=8,
        tie_embeddings=True,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        qk_norm="projection",
        loss_chunk=3,
        remat="none",
        scan_layers=False,
        train=LoopConfig(steps=10, accumulation=2),
    ),
    "accumulation": variant(
        remat="save_gathered",
        dropout=0.1,
        sliding_window=3,
        rope_scaling=RopeScaling(kind="yarn", factor=2.0, original_length=8),
        train=LoopConfig(steps=10, accumulation=2, z_loss=1e-3),
    ),
    "adapters": variant(
        num_kv_heads=2, head_dim=12, lora=LoraConfig(rank=3), train=LoopConfig(steps=10, accumulation=2)
    ),
    "adapters beside bfloat16": variant(
        num_kv_heads=2, lora=LoraConfig(rank=3), precision=jaxtp.Precision(param="bfloat16")
    ),
    "adapters beside 8 bits": variant(num_kv_heads=2, head_dim=12, lora=LoraConfig(rank=3, base="float8")),
    "rings": variant(
        num_heads=9,
        num_kv_heads=1,
        attention_bias=True,
        attention_out_bias=True,
        remat="save_gathered",
        overlap="ring",
    ),
    "blockwise": variant(num_kv_heads=2, head_dim=12, attention="blockwise", attention_softcap=5.0, sliding_window=5),
    "fused": variant(num_kv_heads=2, head_dim=12, attention="fused", attention_softcap=5.0, sliding_window=5),
    "rings of adapters": variant(
        num_kv_heads=2,
        head_dim=12,
        remat="save_dots",
        overlap="ring",
        lora=LoraConfig(rank=3, targets=("q_proj", "v_proj", "down_proj")),
    ),
}
IN_FLOAT8 = partial(variant, precision=jaxtp.Precision(matmul="float8", matmul_least=1))
FLOAT8 = {
    "": IN_FLOAT8(num_kv_heads=2, head_dim=12),
    "rings": IN_FLOAT8(num_heads=9, num_kv_heads=1, attention_bias=True, mlp_bias=True, overlap="ring"),
    "accumulation": IN_FLOAT8(remat="none", train=LoopConfig(steps=10, accumulation=2)),
    "adapters": IN_FLOAT8(num_kv_heads=2, remat="save_dots", lora=LoraConfig(rank=3)),
    "adapters beside 8 bits": IN_FLOAT8(remat="save_gathered", lora=LoraConfig(rank=3, base="float8")),
    "delta": IN_FLOAT8(
        delta_value_heads=4, delta_key_heads=2, delta_key_dim=6, delta_value_dim=8, norm="rms_plus_one", norm_eps=1e-2
    ),
    "latent": IN_FLOAT8(kv_rank=8, rope_head_dim=2, value_head_dim=6, query_rank=24),
    "parallel blocks": IN_FLOAT8(norm_placement="parallel", remat="save_reduced"),
    "experts": IN_FLOAT8(num_experts=4, shared_experts=16),
}
CONFIGS |= {f"float8 {name}".rstrip(): config for name, config in FLOAT8.items()}
IN_MXFP8 = partial(
    variant, d_model=32, head_dim=32, d_ff=256, precision=jaxtp.Precision(matmul="mxfp8", matmul_least=1)
)
DELTA = {"delta_value_heads": 4, "delta_key_heads": 2, "delta_key_dim": 6, "delta_value_dim": 32, "norm_eps": 1e-2}
MXFP8 = {
    "": IN_MXFP8(num_kv_heads=2),
    "adapters": IN_MXFP8(
        num_kv_heads=2, lora=LoraConfig(rank=3, base="float8"), train=LoopConfig(steps=10, accumulation=2)
    ),
    "latent": IN_MXFP8(head_dim=64, kv_rank=64, rope_head_dim=32, value_head_dim=32, query_rank=32),
    "delta": IN_MXFP8(
        **DELTA, precision=jaxtp.Precision(matmul="mxfp8", matmul_least=1, matmul_layers="*.mlp.*|*.attention.out")
    ),
}
CONFIGS |= {f"mxfp8 {name}".rstrip(): config for name, config in MXFP8.items()}
BATCH_MESHES = [(2, 1, 1), (8, 1, 1), (1, 2, 1), (1, 8, 1), (2, 4, 1), (4, 2, 1)]
TP_MESHES = [
    *((1, 1, 2), (1, 1, 4), (1, 1, 8), (1, 2, 2), (1, 2, 4)),
    *((1, 4, 2), (2, 1, 2), (2, 1, 4), (4, 1, 2), (2, 2, 2)),
]


def case(mesh, split):
    return Case(sizes_of(mesh), split)


CASES = [case(mesh, False) for mesh in BATCH_MESHES]  # without tp, sequence parallelism is nothing
CASES += [case(mesh, split) for mesh in TP_MESHES for split in (True, False)]
SPLIT = [(1, 1, 8), (2, 2, 2)]
"""Meshes on which the sequence is divided, for every model but the plain one, which is tried on all, divided or not."""
SOME = [case(mesh, mesh in SPLIT) for mesh in [(8, 1, 1), (1, 8, 1), (1, 1, 8), (1, 2, 4), (1, 4, 2), (2, 2, 2)]]
"""Cases of every model: each axis alone, and together."""
OVER_CP = [
    Case(sizes_of(mesh), mesh[-1] > 1, method)
    for mesh, method in (
        *(((2, 2, 2, 2), "gather"), ((1, 1, 2, 4), "ulysses")),
        *(((1, 2, 4, 1), "gather"), ((1, 1, 4, 2), "ulysses")),
    )
]
"""Cases of float8 over cp; test_context.py has those of float32."""
ALL_MESHES = "llama", "float8", "mxfp8"
TRIED = [(name, tried) for name in CONFIGS for tried in CASES if name in ALL_MESHES or tried in SOME]
TRIED += [
    (name, case(mesh, False))
    for name in ("blockwise", "fused")
    for mesh in (*BATCH_MESHES, *TP_MESHES)
    if case(mesh, False) not in SOME and case(mesh, True) not in SOME
]


@pytest.fixture(scope="module")
def interpreted():
    """The kernel for GPUs, run by its interpreter."""
    with pytest.MonkeyPatch.context() as patched:
        anywhere = dataclasses.replace(KERNELS["fused"], run=fused_attention, platforms=None)
        patched.setitem(KERNELS, "fused", anywhere)
        yield


@pytest.fixture(scope="module")
def one_device(request, interpreted):
    config = CONFIGS[request.param]
    initial = parity.initial_arrays(config)
    return config, initial, parity.run(config, ONE_DEVICE, initial)


TRIED += [(name, case((1, 2, 4), True)) for name in ("rings", "rings of adapters")]
IN_8_BITS = [name for name, config in CONFIGS.items() if config.model.precision.matmul != "compute"]
TRIED += [(name, tried) for name in IN_8_BITS for tried in (OVER_CP if name in ALL_MESHES else OVER_CP[:1])]
FIRST = {"llama": case((2, 2, 2), True), "float8": OVER_CP[0], "mxfp8": OVER_CP[0]}


@pytest.mark.parametrize(
    ("one_device", "case"),
    [pytest.param(*tried, marks=() if tried in FIRST.items() else pytest.mark.wide) for tried in TRIED],
    indirect=["one_device"],
    ids=str,
)
def test_any_mesh_equals_one_device(one_device, case):
    config, initial, expected = one_device
    errors = parity.compare(parity.run(config, case, initial, *expected.states, replayed=expected), expected)
    matmul = config.model.precision.matmul
    assert errors.within(parity.TOLERANCES["float32" if matmul == "compute" else matmul]), errors


@pytest.mark.parametrize("one_device", sweep(list(CONFIGS), *FIRST), indirect=True)
def test_the_numbers_are_not_trivial(one_device):
    """Gradients are there, and the updates move every parameter by more than a tolerance could hide."""
    _, initial, numbers = one_device
    assert all(np.linalg.norm(gradient) > 1e-6 for gradient in numbers.gradients.values())
    trained = {f"model.{name}" for name in numbers.gradients}
    moved = {n: parity.relative_error(a, initial[n]) for n, a in numbers.state.items() if n.startswith("model.")}
    assert min(moved[name] for name in trained) > 1e-3, moved
    assert {moved[name] for name in moved.keys() - trained} <= {0.0}, "what is frozen stays as it was"
    assert len(set(numbers.losses)) == UPDATES


@pytest.mark.wide
@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 2, 4)], ids=str)
def test_bfloat16_within_its_tolerance(mesh):
    config = variant(precision=jaxtp.Precision(compute="bfloat16"))
    initial = parity.initial_arrays(config)
    one, many = (parity.run(config, case, initial) for case in (ONE_DEVICE, case(mesh, True)))
    assert parity.compare(many, one).within(parity.TOLERANCES["bfloat16"])


@pytest.mark.wide
@pytest.mark.parametrize("one_device", ["accumulation"], indirect=True)
def test_accumulation_equals_the_whole_batch(one_device):
    config, initial, accumulated = one_device
    whole = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulation=1))
    errors = parity.compare(parity.run(whole, ONE_DEVICE, initial), accumulated)
    assert errors.within(parity.TOLERANCES["float32"]), errors


def test_errors_are_those_of_the_worst():
    a = parity.Numbers(np.ones(3), np.ones(3), {"w": np.ones(4), "v": np.ones(4)}, {"w": np.ones(4)})
    b = dataclasses.replace(a, gradients={"w": np.ones(4), "v": np.full(4, 1.5)}, state={"w": np.full(4, np.nan)})
    errors = parity.compare(b, a)
    tolerance = parity.Tolerance(1, 1)
    worst = errors.worst(tolerance)
    assert (errors.loss, errors.gradients, worst) == (0, {"w": 0, "v": 0.5}, ("v", "w"))
    assert not errors.within(parity.Tolerance(1, 1)), "a NaN is not within any tolerance"
    assert parity.compare(a, a).within(parity.Tolerance(0, 0))


def test_twice_what_rounding_does_to_one_device_is_allowed():
    exact, one, mesh = (parity.Numbers(np.ones(3), np.ones(3), {"v": np.full(4, v)}, {}) for v in (1.0, 1.04, 1.11))
    tolerance = parity.TOLERANCES["bfloat16"]
    assert not parity.compare(mesh, one).within(tolerance)
    assert parity.compare(mesh, one, exact).within(tolerance)
    far = dataclasses.replace(mesh, gradients={"v": np.full(4, 1.15)})
    assert not parity.compare(far, one, exact).within(tolerance)
