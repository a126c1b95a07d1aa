"""The gated delta rule by chunks against the rule token by token; what its backward pass saves."""

from functools import partial

import deltas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_array_equal
from support import assert_close

from jaxtp.layers.kernels import delta_rule as kernel
from jaxtp.layers.kernels.delta_rule import Tokens, delta_step, unit_inverse

NAMES = ("y", "final state", "dq", "dk", "dv", "d log_decay", "d write", "d state")
EXACT = 1e-12  # relative L2 norm in float64


def delta_rule(q, k, v, log_decay, write, starts, state=None, **options):
    return kernel.delta_rule(Tokens(q, k, v, log_decay, write, starts), state, **options)


def token_by_token(q, k, v, log_decay, write, starts, state, *, subtracts=True):
    q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    return deltas.read(q, k, v, jnp.exp(log_decay), write, starts, state, subtracts=subtracts)


def draw(length, heads=(2, 4), widths=(3, 5), dtype="float64", rows=2, by_channel=False):
    """Arguments of the rule, and the gradients of its results. Some tokens decay to nothing."""
    rng = default_rng(0)
    keys, values = heads
    wide, deep = widths
    q, k = rng.normal(size=(2, rows, length, keys, wide))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, dy = rng.normal(size=(2, rows, length, values, deep))
    channels = [wide] * by_channel
    log_decay = -np.exp(rng.normal(-2, 3, (rows, length, values, *channels)))
    write = 1 / (1 + np.exp(-rng.normal(size=(rows, length, values))))
    state, d_final = rng.normal(size=(2, rows, values, wide, deep))
    wide = jnp.promote_types(dtype, "float32")
    small = (
        [jnp.asarray(x, dtype) for x in (q, k, v)],
        [jnp.asarray(x, wide) for x in (log_decay, write)],
    )
    starts = jnp.asarray(rng.random((rows, length)) < 0.12)
    return (*small[0], *small[1], starts, jnp.asarray(state, wide)), (
        jnp.asarray(dy, dtype),
        jnp.asarray(d_final, wide),
    )


def run(rule, arguments, grads):
    """The results of a rule, and the gradients of its arguments but `starts`."""
    *tokens, starts, state = arguments
    results, backward = jax.vjp(lambda *a: rule(*a[:5], starts, a[5]), *tokens, state)
    return dict(zip(NAMES, (*results, *backward(grads)), strict=True))


@partial(jax.jit, static_argnames="subtracts")
def expected(arguments, grads, subtracts=True):
    return run(partial(token_by_token, subtracts=subtracts), arguments, grads)


@partial(jax.jit, static_argnames=("chunk", "subtracts"))
def found(arguments, grads, chunk=64, subtracts=True):
    return run(partial(delta_rule, chunk=chunk, subtracts=subtracts), arguments, grads)


RULES = [{}, {"by_channel": True}, {"subtracts": False}]


def assert_exact(chunk, length, subtracts=True, **sizes):
    with jax.enable_x64(True):
        given = draw(length, **sizes)
        right = expected(*given, subtracts)
        assert_close(found(*given, chunk, subtracts), right, EXACT)


@pytest.mark.parametrize("rule", RULES)
def test_chunks_are_the_rule_token_by_token(rule):
    """Of packed documents; neither the initial state nor its gradient passes a start."""
    assert_exact(8, 37, **rule)


def test_states_before_many_chunks_are_sums_in_blocks_of_chunks():
    assert_exact(1, 37, subtracts=False)


@pytest.mark.wide  # each example is a program
@settings(max_examples=6)
@given(
    st.integers(1, 40),
    st.sampled_from([1, 2, 16, 64]),
    st.sampled_from([(1, 1), (1, 4), (3, 6)]),
    st.integers(1, 5),
    st.sampled_from(RULES),
)
def test_any_length_chunk_heads_and_width(length, chunk, heads, width, rule):
    assert_exact(chunk, length, heads=heads, widths=(width, 3), **rule)


@pytest.mark.parametrize("rule", RULES)
def test_one_token_is_a_step_of_the_rule(rule):
    subtracts = rule.get("subtracts", True)
    with jax.enable_x64(True):
        (*tokens, _, state), _ = draw(1, by_channel="by_channel" in rule)
        y, final = delta_step(*(x[:, 0] for x in tokens), state, subtracts=subtracts)
        right = token_by_token(*tokens, jnp.zeros((2, 1), bool), state, subtracts=subtracts)
        assert_close(
            {"y": y[:, None], "final": final}, dict(zip(("y", "final"), right, strict=True)), EXACT
        )


def test_the_inverse_is_exact_where_powers_of_the_matrix_overflow():
    """Equal keys that overwrite each other, without decay: entries of the 32nd power reach
    10^17.
    """
    size = 64
    below = jnp.tril(jnp.ones((size, size), "float32"), -1)
    assert_array_equal(jax.jit(unit_inverse)(below), np.eye(size) - np.eye(size, k=-1))


def hard_cases(q, k, v, log_decay, write, starts, state):
    """Yields arguments by the name of a case."""
    same = jnp.broadcast_to(k[:, :1], k.shape)
    yield (
        "equal keys, overwritten, no decay",
        (q, same, v, 0 * log_decay, jnp.ones_like(write), starts, state),
    )
    yield "no token keeps the state", (q, k, v, 0 * log_decay - 100, write, starts, state)
    slow = (0 * log_decay - 1e-3).at[:, ::50].set(-1e5)
    yield "slow decay after a strong one", (q, k, v, slow, write, starts, state)


@pytest.mark.wide
@pytest.mark.parametrize("by_channel", [False, True])
def test_float32_is_as_exact_in_hard_cases(by_channel):
    arguments, grads = draw(130, widths=(8, 8), dtype="float32", by_channel=by_channel)
    for case, hard in hard_cases(*arguments):
        result = found(hard, grads)
        with jax.enable_x64(True):
            wide = jax.tree.map(
                lambda x: x if x.dtype == bool else np.asarray(x, "float64"), (hard, grads)
            )
            right = expected(*wide)
        assert all(np.isfinite(x).all() for x in result.values()), case
        result, right = jax.tree.map(
            lambda x: np.where(np.abs(np.asarray(x)) < 1e-30, 0, x), (result, right)
        )
        assert_close(result, right, 5e-6)


@pytest.mark.wide
@pytest.mark.parametrize("by_channel", [False, True])
def test_bfloat16_is_about_as_exact_as_token_by_token_in_float32(by_channel):
    """That rule rounds its results once, to half of this bound; by chunks the factors of
    products are rounded too.
    """
    arguments, grads = draw(130, widths=(16, 16), dtype="bfloat16", by_channel=by_channel)
    result = found(arguments, grads)
    wide = jax.tree.map(
        lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, (arguments, grads)
    )
    right = expected(*wide)
    assert_close(result, right, float(jnp.finfo(jnp.bfloat16).eps))


@pytest.mark.wide
@pytest.mark.parametrize("by_channel", [False, True])
def test_memory_is_linear_in_the_tokens(by_channel):
    def compiled(length):
        options = {"widths": (16, 16), "dtype": "float32", "by_channel": by_channel}
        shapes = jax.eval_shape(lambda: draw(length, **options))
        return found.lower(*shapes).compile()

    programs = [compiled(length) for length in (256, 512)]
    small, large = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert large < 2.3 * small
    assert "512,512" not in programs[1].as_text()


def test_the_backward_pass_saves_the_arguments_states_and_new_values():
    arguments, _ = draw(256, widths=(16, 8), dtype="float32")
    backward = jax.eval_shape(lambda *a: jax.vjp(delta_rule, *a)[1], *arguments)
    saved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(backward))
    states = 4 * 2 * 4 * (256 // 64) * 16 * 8
    assert saved <= sum(x.nbytes for x in arguments) + states + arguments[2].nbytes + 2**10
