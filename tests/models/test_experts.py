"""Mixtures of experts: outputs, gradients and three updates of any mesh are those of one device, and so is balance."""

import dataclasses
from functools import cache

import pytest
from support import sizes_of, sweep

import jaxtp
from jaxtp.check import parity
from jaxtp.check.shrink import ONE_DEVICE, Case
from jaxtp.layers.lora import LoraConfig
from jaxtp.train.config import DataConfig, LoopConfig, OptimizerConfig, TrainConfig

T = 16
MIXTURE = jaxtp.ModelConfig(
    vocab_size=29,
    d_model=16,
    num_layers=2,
    num_heads=8,
    num_kv_heads=8,
    head_dim=4,
    d_ff=24,
    rope_theta=2.0,
    num_experts=6,
    experts_per_token=2,
)
BASE = TrainConfig(
    model=MIXTURE,
    data=DataConfig(sequence_length=T, global_batch_size=8),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
    train=LoopConfig(steps=10, balance_loss=0.3, router_z_loss=0.1),
)
TWICE = dataclasses.replace(BASE.train, accumulation=2, z_loss=1e-3)
BIASED = {"selection_bias": True, "experts_per_token": 3}


def variant(*, optimizer="adamw", packed=True, loop=BASE.train, **model):
    return dataclasses.replace(
        BASE,
        model=dataclasses.replace(MIXTURE, **model),
        data=dataclasses.replace(BASE.data, packing="documents" if packed else "stream"),
        optimizer=dataclasses.replace(BASE.optimizer, name=optimizer, weight_decay=0.1),
        train=loop,
    )


CONFIGS = {
    "mixture": BASE,
    "some layers are dense": variant(
        num_layers=4,
        num_kv_heads=2,
        pattern=({"sliding_window": 3, "selection_bias": True}, {"num_experts": 0, "d_ff": 20}),
        dropout=0.2,
        loop=TWICE,
    ),
    "biased": variant(**BIASED, num_kv_heads=2, remat="none", loop=TWICE),
    "kinds of experts": variant(
        num_layers=5,
        first_blocks=(
            {"num_experts": 0, "d_ff": 40},
            {"num_experts": 4, "experts_per_token": 1, "normalize_experts": False},
        ),
        pattern=({"selection_bias": True}, {"num_experts": 5, "d_ff": 8}),
        num_kv_heads=1,
        tie_embeddings=True,
        remat="save_dots",
    ),
    "written out": variant(scan_layers=False, normalize_experts=False, remat="save_gathered", loop=TWICE),
    "rings": variant(num_kv_heads=2, overlap="ring", remat="save_reduced", activation="gelu_tanh"),
    "adapters": variant(
        lora=LoraConfig(rank=3, targets=("q_proj", "v_proj", "o_proj")), dropout=0.1, remat="save_gathered", loop=TWICE
    ),
    "one expert a token": variant(experts_per_token=1, packed=False, remat="save_reduced"),
    "all experts a token": variant(experts_per_token=6, remat="none", norm_placement="both"),
    "muon": variant(optimizer="muon", **BIASED),
    "muon of square kernels": variant(optimizer="muon", d_ff=16, num_experts=4, loop=TWICE),
    "adafactor": variant(optimizer="adafactor", d_model=128, d_ff=192),
    "lion": variant(optimizer="lion", loop=TWICE),
}
"""Rows are packed: documents cross chunks, the last row is padding alone, and one from its middle on."""

FIRST = [("some layers are dense", (1, 2, 2, 2)), ("some layers are dense", (2, 1, 1, 4))]
"""Experts over tp, with all kinds of blocks; and inside."""

MESHES = [
    *((1, 1, 1, 2), (1, 1, 1, 3), (1, 1, 1, 4), (1, 1, 1, 6), (1, 1, 1, 8), (8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 1)),
    *((2, 2, 1, 2), (1, 2, 1, 4), (2, 1, 2, 2), (1, 2, 2, 2), (1, 1, 2, 4), (2, 2, 2, 2), (1, 1, 2, 8), (1, 2, 4, 2)),
]
SOME = [(1, 2, 1, 4), (2, 1, 2, 2), (1, 1, 2, 3), (1, 2, 2, 4), (2, 2, 1, 2)]
TRIED = [("mixture", mesh) for mesh in MESHES]
TRIED += [(name, SOME[(at + i) % len(SOME)]) for i, name in enumerate(CONFIGS) for at in (0, 1, 3)]
TRIED = list(dict.fromkeys([*FIRST, *TRIED]))


@cache
def on_one_device(name):
    initial = parity.initial_arrays(CONFIGS[name])
    return initial, parity.run(CONFIGS[name], ONE_DEVICE, initial)


@pytest.mark.parametrize("tried", sweep(TRIED, *FIRST), ids=str)
def test_a_mesh_equals_one_device(tried):
    name, mesh = tried
    initial, expected = on_one_device(name)
    split = mesh[-1] > 1 and T % (mesh[-1] * mesh[-2]) == 0
    numbers = parity.run(CONFIGS[name], Case(sizes_of(mesh), split), initial, audited=True)
    errors = parity.compare(numbers, expected)
    assert errors.within(parity.TOLERANCES["float32"]), errors
    assert numbers.problems == ()
    assert any("mlp.router" in name for name in numbers.gradients) or CONFIGS[name].model.lora.rank
