"""The kernel of Gated DeltaNet's states against `lax`, interpreted on the CPU."""

import dataclasses
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from support import TOLERANCE, assert_close, sweep_of

import jaxtp
from jaxtp.analysis.step_costs import _traced_products
from jaxtp.collectives import device_view
from jaxtp.layers import gated_delta
from jaxtp.layers.kernels import delta_kernels, delta_rule
from jaxtp.mesh import mesh_shape
from jaxtp.train.config import TrainConfig
from jaxtp.train.run_report import describe_delta, describe_kernels
from jaxtp.train.self_check import _uses

NAMES = ("w", "u", "k_decayed", "decay", "state")
RULE = ("q", "k", "v", "log_decay", "write")
SIZES = {  # rows, heads, chunks, tokens of a chunk, width of keys, width of values
    "whole blocks": (1, 2, 3, 16, 16, 32),
    "no power of two": (2, 1, 4, 12, 24, 72),
    "narrow": (1, 1, 2, 1, 3, 5),
}


def draw(sizes, dtype="float32"):
    """Arguments, some of the decays 0 as where documents begin, and gradients of the results."""
    rows, heads, chunks, length, keys, values = sizes
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal((rows, heads, *shape)) * keys**-0.5, dtype)

    wide = partial(normal, dtype="float32")
    u, w, k_decayed = normal(chunks, length, values), normal(chunks, length, keys), normal(chunks, length, keys)
    decay = jnp.asarray(rng.uniform(-0.5, 1, (rows, heads, chunks)).clip(0), "float32")
    grads = wide(chunks, keys, values), normal(chunks, length, values), wide(keys, values)
    return (w, u, k_decayed, decay, wide(keys, values)), grads


@partial(jax.jit, static_argnums=0)
def found(scan, arrays, grads):
    results, backward = jax.vjp(scan, *arrays)
    return dict(zip(("states", "new", "final"), results, strict=True)), dict(zip(NAMES, backward(grads), strict=True))


def check(sizes, dtype, tolerance):
    arrays = draw(sizes, dtype)
    ours, right = found(delta_kernels.chunk_states, *arrays), found(delta_rule.chunk_states, *arrays)
    for results, expected in zip(ours, right, strict=True):
        assert jax.tree.map(jnp.result_type, results) == jax.tree.map(jnp.result_type, expected)
        assert_close(results, expected, tolerance)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    sweep_of([SIZES, delta_kernels.DTYPES], ("no power of two", "float32"), ("whole blocks", "bfloat16")),
)
def test_results_and_gradients(sizes, dtype):
    check(SIZES[sizes], dtype, TOLERANCE if dtype == "float32" else 2 * float(jnp.finfo(dtype).eps))


@pytest.mark.wide
@given(st.tuples(*map(partial(st.integers, 1), (2, 2, 4, 40, 40, 70))))
@settings(max_examples=25)
def test_any_sizes(sizes):
    check(sizes, "float32", TOLERANCE)


@pytest.mark.wide
def test_the_widest_keys():
    check((1, 1, 2, 64, delta_kernels.MOST_KEY_DIM, 32), "float32", TOLERANCE)


def tokens(length=24):
    """Arguments of the rule: two rows, two heads, and a document that begins in the second chunk."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, length, 2, width)).astype("float32") for width in (4, 4, 6))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay, write = (rng.uniform(*ends, (2, length, 2)).astype("float32") for ends in ((-1, 0), (0, 1)))
    return (q, k, v, log_decay, write), np.arange(length)[None].repeat(2, 0) == 11


def rule(scan, *arrays):
    """The rule with gradients, where rows are split over dp and heads over tp."""
    split, rows = PartitionSpec("dp", None, "tp"), PartitionSpec("dp")

    def read(*arrays):
        return delta_rule.delta_rule(delta_rule.Tokens(*arrays), chunk=8, scan=scan)[0]

    view = device_view(read, "delta", (*(split,) * len(RULE), rows), split)

    def program(*inputs):
        y, backward = jax.vjp(lambda *inputs: view(*inputs, arrays[-1]), *inputs)
        return {"y": y, **dict(zip(RULE, backward(jnp.cos(y)), strict=True))}

    return program(*arrays[:-1])


def test_the_rule_on_a_mesh():
    inputs, starts = tokens()
    expected = jax.jit(partial(rule, None))(*inputs, starts)
    with jax.set_mesh(jaxtp.make_mesh(dp=2, tp=2, devices=jax.devices()[:4])):
        assert_close(jax.jit(partial(rule, delta_kernels.chunk_states))(*inputs, starts), expected)


def test_the_backward_pass_does_not_compute_the_states_again():
    inputs, starts = tokens()
    text = str(jax.make_jaxpr(partial(rule, delta_kernels.chunk_states))(*inputs, starts))
    assert [text.count(f"name=delta_{name}") for name in ("states", "gradient")] == [1, 1]


def test_products_in_the_kernel_are_counted():
    def flops(scan):
        program = jax.make_jaxpr(partial(found, scan))(*draw(SIZES["whole blocks"]))
        return sum(product.flops for product in _traced_products(program.jaxpr))

    assert flops(delta_kernels.chunk_states) == flops(delta_rule.chunk_states)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w": "bfloat16"}, "are bfloat16, float32, float32: the kernel takes one of bfloat16, float16, float32"),
        (
            {"sizes": (1, 1, 1, 65, 16, 16)},
            "chunks of 65 tokens of width 16 do not fit .* at most 64 tokens of width 256",
        ),
        ({"sizes": (1, 1, 1, 16, 257, 16)}, "of 16 tokens of width 257 do not fit"),
    ],
)
def test_what_the_kernel_does_not_take(changes, message):
    (w, *others), _ = draw(changes.get("sizes", SIZES["narrow"]))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(delta_kernels.chunk_states, w.astype(changes.get("w", w.dtype)), *others)


HEADS = {"delta_value_heads": 4, "delta_key_heads": 2, "delta_key_dim": 8, "delta_value_dim": 8}
PALLAS = "pallas states of Gated DeltaNet (it keeps each state on the chip)"


@pytest.mark.parametrize(
    ("width", "platform", "said"),
    [
        (128, "cuda 9.0", PALLAS),
        (128, "cuda", PALLAS),
        (256, "cuda 8.0", PALLAS),
        (257, "cuda 9.0", "xla states of Gated DeltaNet (pallas takes a delta_key_dim of at most 256, not 257)"),
        (
            *(128, "cuda 7.5"),
            "xla states of Gated DeltaNet (pallas runs only from compute capability 8.0 on, not on cuda 7.5)",
        ),
        (128, "cpu", "xla states of Gated DeltaNet (pallas runs only on cuda, not on cpu)"),
    ],
)
def test_the_summary_says_what_computes_the_states(width, platform, said):
    model = jaxtp.ModelConfig(num_layers=2, **{**HEADS, "delta_key_dim": width})
    assert list(describe_delta(model, platform)) == [said]
    assert describe_kernels(TrainConfig(model=model), mesh_shape(), platform) == said
    hybrid = TrainConfig(model=dataclasses.replace(model, pattern=({}, {"delta_value_heads": 0})))
    attention, *others = describe_kernels(hybrid, mesh_shape(), platform).split("; ")
    assert " attention (" in attention
    assert others[-1] == said


def test_only_blocks_with_attention_have_its_kernels_checked():
    model = jaxtp.ModelConfig(num_layers=2, pattern=({}, {"delta_value_heads": 0}), attention="blockwise", **HEADS)
    (use, _), *others = _uses(TrainConfig(model=model), jaxtp.make_mesh(devices=jax.devices()[:1]))
    assert use.head_dim == model.head_dim
    assert not others


def test_the_layer_takes_the_kernel_where_it_runs():
    layer = gated_delta.GatedDeltaNet(12, gated_delta.GatedDeltaConfig(**HEADS), rngs=nnx.Rngs(0))
    with mock.patch.object(gated_delta, "architecture_of", return_value="cuda 9.0"):
        assert "name=delta_states" in str(jax.make_jaxpr(layer)(jnp.ones((1, 8, 12))))
