"""Which attention kernel `auto` takes, which uses a kernel refuses, and what it says of them."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxtp
from jaxtp.analysis.hardware import TABLE
from jaxtp.config.schema import ConfigError
from jaxtp.layers.kernels import select
from jaxtp.layers.kernels.fused_attention import DTYPES, MOST_HEAD_DIM, block_sizes, fused_attention
from jaxtp.layers.kernels.select import KERNELS, Use, architecture_of, candidates, pick_kernel, unsupported
from jaxtp.mesh import mesh_shape

HOPPER = Use(platform="cuda 9.0", dtype="bfloat16", head_dim=128, length=4096, packed=False)
AUTO = [
    ({}, "cudnn"),
    ({"packed": True}, "fused"),
    ({"dtype": "float32"}, "fused"),
    ({"softcap": 50.0}, "fused"),
    ({"part": True}, "fused"),
    ({"window": 128}, "cudnn"),
    ({"head_dim": 256}, "cudnn"),
    ({"head_dim": 250}, "fused"),
    ({"head_dim": 512}, "blockwise"),
    ({"sinks": True}, "fused"),
    ({"head_dim": 192, "value_head_dim": 128}, "cudnn"),
    ({"head_dim": 192, "value_head_dim": 128, "platform": "cuda 8.0"}, "fused"),
    ({"value_head_dim": 512}, "blockwise"),
    *(({"platform": f"cuda {capability}"}, "fused") for capability in ("8.0", "8.9", "10.0", "12.0")),
    ({"platform": "cuda"}, "fused"),
    ({"platform": "rocm"}, "blockwise"),
    ({"platform": "cpu"}, "blockwise"),
    ({"platform": "cpu", "length": 256}, "xla"),
]


def test_auto_takes_the_fastest_kernel_that_supports_the_use():
    picked = [(changes, *pick_kernel("auto", replace(HOPPER, **changes))) for changes, _ in AUTO]
    assert [(changes, kernel.name) for changes, kernel, _ in picked] == AUTO
    assert all(why for *_, why in picked)


REFUSED = [
    ({"packed": True}, "data.packing=documents", "(fused or"),
    ({"softcap": 50.0}, "model.attention_softcap", "(fused or"),
    ({"dtype": "float32"}, "model.precision.compute is float32", "(fused or"),
    ({"head_dim": 132}, "head_dim of at most 256, a multiple of 8, not 132", "(fused or"),
    ({"head_dim": 256, "platform": "cuda 8.0"}, "at most 128, a multiple of 8, not 256", "(fused or"),
    ({"head_dim": 256, "platform": "cuda 12.0"}, "at most 128, a multiple of 8, not 256", "(fused or"),
    ({"head_dim": 64, "value_head_dim": 264}, "not 264", "(blockwise or xla)"),
    ({"sinks": True}, "model.attention_sinks", "(fused or blockwise or xla)"),
    ({"platform": "rocm"}, "on cuda, not on rocm", "(blockwise or xla)"),
    ({"part": True}, "mesh.context=ulysses, but not with gather", "(fused or"),
]


def test_a_kernel_that_does_not_support_a_use_is_refused_with_those_that_do():
    for changes, *words in REFUSED:
        use = replace(HOPPER, **changes)
        (problem,) = unsupported("cudnn", use)
        assert not [word for word in ("model.attention=cudnn", "auto", *words) if word not in problem], problem
        assert not list(unsupported("auto", use))


def test_a_layer_refuses_a_kernel_that_does_not_run_here():
    config = jaxtp.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, attention="cudnn")
    layer = nnx.eval_shape(lambda: jaxtp.CausalSelfAttention(8, config, rngs=nnx.Rngs(0)))
    with pytest.raises(ConfigError, match=r"model\.attention=cudnn.*cuda, not on cpu"):
        nnx.eval_shape(lambda layer: layer(jnp.zeros((1, 4, 8))), layer)
    (problem,) = jaxtp.AttentionConfig(attention="cudnn", attention_sinks=True).problems(mesh_shape())
    assert "model.attention=cudnn: it has no model.attention_sinks" in problem.text
    assert "fused on cuda or" in problem.text


@pytest.mark.parametrize(
    ("installed", "widest"),
    [((9, 22, 0), 128), ((9, 24, 0, 43), 128), ((9, 25, 0, 15), 256), ((10, 0), 256), (None, 256)],
)
def test_the_widest_head_of_cudnn_on_blackwell_depends_on_its_version(monkeypatch, installed, widest):
    """NVIDIA/TransformerEngine#3056: an older one has no backward pass, and JAX lets it through."""
    monkeypatch.setattr(select, "installed_cudnn", lambda: installed)
    wide = replace(HOPPER, platform="cuda 10.0", head_dim=256)
    assert KERNELS["cudnn"].head_dims(wide)[0] == widest
    assert any(unsupported("cudnn", wide)) == (widest == 128)


def test_the_architecture_is_that_of_the_device_or_of_its_row_in_the_table():
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA RTX A6000", compute_capability="8.6")
    assert architecture_of(device) == "cuda 8.6"
    kinds = {"NVIDIA H100 NVL": "cuda 9.0", "NVIDIA of tomorrow": "cuda", "AMD Instinct MI300X": "rocm"}
    for kind, architecture in kinds.items():
        assert architecture_of(SimpleNamespace(platform="gpu", device_kind=kind)) == architecture
    assert architecture_of(jax.devices()[0]) == "cpu"
    rows = {"h100": "cuda 9.0", "b200": "cuda 10.0", "l40s": "cuda 8.9", "v5e": "tpu"}
    assert {name: TABLE[name].architecture for name in rows} == rows


def test_auto_takes_the_kernel_that_was_measured_to_be_faster():
    use = replace(HOPPER, length=4095)  # measured here alone
    names = lambda asked, use: [kernel.name for kernel in candidates(asked, use)]
    assert names("auto", use) == ["cudnn", "fused"]
    assert names("auto", replace(use, platform="cuda 8.9")) == ["fused", "cudnn"]
    for asked, changes in (("cudnn", {}), ("auto", {"packed": True}), ("auto", {"platform": "cpu"})):
        assert len(candidates(asked, replace(use, **changes))) == 1
    select.record_fastest(use, "fused", "measured")
    assert pick_kernel("auto", use) == (KERNELS["fused"], "measured")
    assert pick_kernel("cudnn", use)[0].name == "cudnn"
    assert pick_kernel("auto", replace(use, window=128))[0].name == "cudnn"


def test_every_head_has_blocks_that_triton_takes():
    assert KERNELS["fused"].head_dims(Use(head_dim=1))[0] == MOST_HEAD_DIM
    for dtype in DTYPES:
        for head_dim in (16, 32, 64, 128, MOST_HEAD_DIM):
            sizes = [size for blocks in block_sizes(head_dim, dtype) for size in (blocks.queries, blocks.keys)]
            assert all(size >= 16 and size & (size - 1) == 0 for size in sizes)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "dtype", "message"),
    [
        (3, 2, 16, "float32", "3 query heads are not divisible by 2 kv heads"),
        (2, 1, 264, "float32", "head_dim 264 is above 256"),
        (2, 1, 16, "int32", "int32, int32, int32.*bfloat16, float16, float32"),
    ],
)
def test_heads_and_dtypes_that_the_fused_kernels_do_not_take_are_refused(heads, kv_heads, width, dtype, message):
    q, kv = (jax.ShapeDtypeStruct((1, 4, number, width), dtype) for number in (heads, kv_heads))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda q, k, v: fused_attention(q, k, v, scale=1.0), q, kv, kv)
