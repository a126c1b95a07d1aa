"""Which attention kernel `auto` takes, which uses a kernel refuses, and what it says of them."""

import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tables import assert_errors, read_table

import jaxtp
from jaxtp.analysis.hardware import TABLE
from jaxtp.config.schema import ConfigError
from jaxtp.layers.kernels import select
from jaxtp.layers.kernels.fused_attention import block_sizes
from jaxtp.layers.kernels.select import (
    KERNELS,
    Use,
    architecture_of,
    pick_kernel,
    unsupported,
)
from jaxtp.layers.parameter import DType

HOPPER = Use(platform="cuda 9.0", dtype="bfloat16", head_dim=128, length=4096, packed=False)
CHOICES = read_table(__file__)


def test_auto_takes_the_fastest_kernel_that_supports_the_use():
    for taken, uses in CHOICES["auto"].items():
        for changes in uses:
            kernel, why = pick_kernel("auto", replace(HOPPER, **changes))
            assert kernel.name == taken, changes
            assert why


def test_a_kernel_that_does_not_support_a_use_is_refused_with_those_that_do(monkeypatch):
    def error_of(row):
        use = replace(HOPPER, **row["use"])
        assert not list(unsupported("auto", use))
        (problem,) = unsupported(kernel, use)
        return problem

    installed = {"tokamax"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name if name in installed else None
    )
    for kernel in ("cudnn", "tokamax"):
        assert_errors(CHOICES[f"{kernel} refuses"], error_of)
    packed = replace(HOPPER, packed=True, window=128, softcap=50.0)
    assert not list(unsupported("tokamax", packed))
    # `auto` does not take it.
    assert pick_kernel("auto", packed)[0].name == "fused"
    installed.clear()
    (problem,) = unsupported("tokamax", packed)
    assert "pip install 'jaxtp[tokamax]'" in problem


def test_a_layer_refuses_a_kernel_that_does_not_run_here():
    config = jaxtp.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, attention="cudnn")
    layer = nnx.eval_shape(lambda: jaxtp.CausalSelfAttention(8, config, rngs=nnx.Rngs(0)))
    with pytest.raises(ConfigError, match=r'^attention="cudnn": .*cuda, not on cpu'):
        nnx.eval_shape(lambda layer: layer(jnp.zeros((1, 4, 8))), layer)


@pytest.mark.parametrize(("installed", "widest"), CHOICES["widest head"])
def test_the_widest_head_of_cudnn_on_blackwell_depends_on_its_version(
    monkeypatch, installed, widest
):
    """NVIDIA/TransformerEngine#3056: an older one has no backward pass, and JAX lets it through."""
    monkeypatch.setattr(select, "installed_cudnn", lambda: installed and tuple(installed))
    wide = replace(HOPPER, platform="cuda 10.0", head_dim=256)
    assert KERNELS["cudnn"].head_dims(wide)[0] == widest
    assert any(unsupported("cudnn", wide)) == (widest == 128)


def test_the_architecture_is_that_of_the_device_or_of_its_row_in_the_table():
    device = SimpleNamespace(
        platform="gpu", device_kind="NVIDIA RTX A6000", compute_capability="8.6"
    )
    assert architecture_of(device) == "cuda 8.6"
    kinds = {
        "NVIDIA H100 NVL": "cuda 9.0",
        "NVIDIA of tomorrow": "cuda",
        "AMD Instinct MI300X": "rocm",
    }
    for kind, architecture in kinds.items():
        assert architecture_of(SimpleNamespace(platform="gpu", device_kind=kind)) == architecture
    assert architecture_of(jax.devices()[0]) == "cpu"
    rows = {"h100": "cuda 9.0", "b200": "cuda 10.0", "l40s": "cuda 8.9", "v5e": "tpu"}
    assert {name: TABLE[name].architecture for name in rows} == rows


def test_every_head_has_blocks_that_triton_takes():
    widest, _ = KERNELS["fused"].head_dims(Use(head_dim=1))
    for dtype in get_args(DType):
        for head_dim in (16, 32, 64, 128, widest):
            sizes = [
                size
                for blocks in block_sizes(head_dim, dtype)
                for size in (blocks.queries, blocks.keys)
            ]
            assert all(size >= 16 and size & (size - 1) == 0 for size in sizes)
