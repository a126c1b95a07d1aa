"""The kernel of Gated DeltaNet's states against `lax`, interpreted on the CPU."""

from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_programs import LayerProgram
from numpy.random import default_rng
from support import TOLERANCE, assert_close, random_weights, swept
from tables import read_table

import jaxtp
from jaxtp.analysis.step_costs import step_costs
from jaxtp.layers import gated_delta
from jaxtp.layers.context import Sequences
from jaxtp.layers.kernels import delta_kernels, delta_rule
from jaxtp.mesh import mesh_shape
from jaxtp.train.config import TrainConfig
from jaxtp.train.run_report import describe_delta, describe_kernels
from jaxtp.train.validation import chosen_kernels, run_uses

NAMES = ("w", "u", "k_decayed", "decay", "state")
SIZES = read_table(__file__, "delta_sizes") | {
    "widest keys": (1, 1, 2, 64, delta_kernels.MAX_KEY_DIM, 32),
}


def draw(sizes, dtype="float32", by_channel=False):
    """Arguments, some of the decays 0 as where documents begin, and gradients of the results."""
    rows, heads, chunks, length, keys, values = sizes
    rng = default_rng(0)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal((rows, heads, *shape)) * keys**-0.5, dtype)

    wide = partial(normal, dtype="float32")
    u = normal(chunks, length, values)
    w = normal(chunks, length, keys)
    k_decayed = normal(chunks, length, keys)
    channels = [keys] * by_channel
    decay = jnp.asarray(rng.uniform(-0.5, 1, (rows, heads, chunks, *channels)).clip(0), "float32")
    grads = wide(chunks, keys, values), normal(chunks, length, values), wide(keys, values)
    return (w, u, k_decayed, decay, wide(keys, values)), grads


@partial(jax.jit, static_argnums=0)
def found(scan, arrays, grads):
    results, backward = jax.vjp(scan, *arrays)
    return dict(zip(("states", "new", "final"), results, strict=True)), dict(
        zip(NAMES, backward(grads), strict=True)
    )


def check(sizes, dtype, tolerance, *, by_channel=False):
    arrays = draw(sizes, dtype, by_channel)
    ours = found(delta_kernels.chunk_states, *arrays)
    right = found(delta_rule.chunk_states, *arrays)
    for results, expected in zip(ours, right, strict=True):
        assert jax.tree.map(jnp.result_type, results) == jax.tree.map(jnp.result_type, expected)
        assert_close(results, expected, tolerance)


DTYPES = {
    "whole blocks": "bfloat16",
    "no power of two": "float32",
    "narrow": "float16",
    "widest keys": "float32",
}


@swept("sizes", SIZES, "no power of two")
def test_results_and_gradients_are_those_of_lax(sizes):
    dtype = DTYPES[sizes]
    check(SIZES[sizes], dtype, TOLERANCE if dtype == "float32" else 2 * float(jnp.finfo(dtype).eps))


@pytest.mark.wide  # each example is a program
@given(st.tuples(*map(partial(st.integers, 1), (2, 2, 4, 40, 40, 70))), st.booleans())
@settings(max_examples=6)
def test_any_sizes_give_the_results_of_lax(sizes, by_channel):
    check(sizes, "float32", TOLERANCE, by_channel=by_channel)


HEADS = {"delta_value_heads": 4, "delta_key_heads": 2, "delta_key_dim": 8, "delta_value_dim": 8}
SUMMARIES = read_table(__file__)


def test_the_summary_of_a_run_says_what_computes_the_states_and_why():
    for width, platform, *words in SUMMARIES:
        model = jaxtp.ModelConfig(num_layers=2, **{**HEADS, "delta_key_dim": width})
        (said,) = describe_delta(model, platform)
        assert not [word for word in words if word not in said], said
        assert describe_kernels(model, {}, platform) == said
        hybrid = TrainConfig(model=replace(model, pattern=({}, {"delta_value_heads": 0})))
        kernels = chosen_kernels(hybrid, mesh_shape(), platform)
        attention, *others = describe_kernels(hybrid.model, kernels, platform).split("; ")
        assert " attention (" in attention
        assert others[-1] == said


def test_only_blocks_with_attention_use_its_kernels():
    model = jaxtp.ModelConfig(
        num_layers=2, pattern=({}, {"delta_value_heads": 0}), attention="blockwise", **HEADS
    )
    (use,) = run_uses(TrainConfig(model=model), mesh_shape(), "cpu")
    assert use.head_dim == model.head_dim


@pytest.mark.wide
def test_products_in_the_kernel_are_counted():
    config = jaxtp.ModelConfig(
        num_layers=1, d_model=16, vocab_size=16, num_heads=4, num_kv_heads=4, d_ff=16, **HEADS
    )
    of = lambda platform: step_costs(
        config, mesh_shape(), batch_size=2, sequence_length=64, platform=platform
    )
    # The kernel's backward pass has a few products more. Without all that are in it there would be
    # fewer.
    assert of("cpu").flops <= of("cuda 9.0").flops < 1.1 * of("cpu").flops


@pytest.mark.wide
def test_a_layer_with_the_kernel_is_that_with_lax():
    """Of packed documents, on a mesh. The backward pass does not compute the states again."""
    arrays = default_rng(0).standard_normal((2, 2, 72, 12), "float32")
    segments = np.where(np.arange(72) < 65, 1, 2) + np.array([[0], [1]])
    build = lambda: gated_delta.GatedDeltaNet(
        12, gated_delta.GatedDeltaConfig(**HEADS), rngs=nnx.Rngs(0)
    )
    weights = random_weights(build)
    results = []
    programs = []
    for platform in ("cpu", "cuda 9.0"):
        call = lambda layer, x: layer(x, Sequences(segments=segments))
        run = LayerProgram(build, weights, (1, 1, 1, 2), call=call)
        with mock.patch.object(gated_delta, "architecture_of", return_value=platform):
            programs.append(str(run.jaxpr(*arrays)))
            results.append(run(*arrays))
    assert_close(results[1], results[0])
    counts = [
        [text.count(f"name=delta_{name}") for name in ("states", "gradient")] for text in programs
    ]
    assert counts == [[0, 0], [1, 1]]
