"""Chunks of the loss: of a device's tokens, however many rows they are in."""

import itertools
import math
from functools import partial

import accounts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import relative_error, sweep

import jaxtp
from jaxtp.analysis.layer_costs import Workload
from jaxtp.analysis.step_costs import loss_costs
from jaxtp.layers.loss import vocab_parallel_token_losses
from jaxtp.layers.parameter import PaddedDim
from jaxtp.mesh import mesh_shape

D, V, CHUNK = 24, 40, 6
LOW = jaxtp.Precision(compute="bfloat16")


def total(x, table, labels, chunk_size, precision=jaxtp.Precision()):
    head = jaxtp.HeadConfig(V, jaxtp.LayerContext(precision=precision), chunk_size=chunk_size)
    return jaxtp.vocab_parallel_cross_entropy(x, table, labels, head)[0]


def given(rows, length):
    keys = jax.random.split(jax.random.key(0), 3)
    x, table = jax.random.normal(keys[0], (rows, length, D)), jax.random.normal(keys[1], (V, D))
    return x, table, jax.random.randint(keys[2], (rows, length), 0, V)


@pytest.mark.parametrize(("rows", "length"), [(1, 16), (4, 4), (8, 2), (1, 3)], ids=str)
def test_logits_exist_for_a_chunk_of_tokens(rows, length):
    gradient = jax.grad(lambda *args: total(*args, chunk_size=CHUNK), argnums=(0, 1))
    jaxpr = jax.make_jaxpr(gradient)(*given(rows, length)).jaxpr
    shapes = {v.aval.shape for equation in accounts.equations(jaxpr) for v in equation.outvars}
    logits = {math.prod(shape[:-1]) for shape in shapes if shape[-1:] == (V,) and len(shape) > 1} - {1, D}
    tokens = rows * length
    assert logits == {min(CHUNK, tokens), tokens % CHUNK or CHUNK}
    work = Workload(sizes=mesh_shape(), rows=rows, length=length)
    config = lambda size: jaxtp.ModelConfig(vocab_size=V, d_model=D, loss_chunk=size, precision=LOW)
    working = [
        sum(cost.bytes for cost in loss_costs(config(size), work) if getattr(cost, "kind", "") == "workspace")
        for size in (CHUNK, 1)
    ]
    assert working[0] - working[1] == 2 * 4 * V * (max(logits) - 1)


def test_tokens_are_listed_without_a_copy():
    """Where chunks divide the tokens, the loops read the activation and write its gradient as they are."""
    gradient = jax.grad(lambda *args: total(*args, chunk_size=8), argnums=(0, 1))
    equations = accounts.equations(jax.make_jaxpr(gradient)(*given(8, 8)).jaxpr)
    on_activations = {e.primitive.name for e in equations for v in e.outvars if v.aval.size == 8 * 8 * D}
    assert on_activations == {"name", "scan", "reshape"}


def test_chunks_add_up_their_gradients_in_float32():
    """In bfloat16 a sum of 512 would have lost what the later ones add."""
    x, table, labels = given(4, 128)
    whole, added = (
        jax.jit(jax.grad(lambda table, size=size: total(x, table, labels, size, LOW)))(table) for size in (512, 1)
    )
    assert relative_error(added, whole) < 2**-8
    assert jnp.linalg.norm(whole) > 1


TOKEN_LOSSES = list(
    itertools.product([(1, 1, 1, 1), (1, 1, 1, 4), (1, 2, 1, 2), (2, 1, 2, 2)], [None, 3.0], [None, True])
)


@pytest.mark.parametrize("case", sweep(TOKEN_LOSSES, *TOKEN_LOSSES[2:15:4]), ids=str)
def test_the_loss_of_each_token_and_whether_it_is_the_likeliest(case):
    """Against float64 on whole logits; 37 ids are not divided by tp, and no chunk divides the tokens of a device."""
    mesh, softcap, split = case
    vocab_size, (x, table, labels) = 37, given(4, 8)
    labels, bias = jnp.where(labels < vocab_size, labels, -100), table[:, 0] if split else None
    logits = np.einsum("btd,vd->btv", np.float64(x), np.float64(table[:vocab_size]))
    logits = logits if bias is None else 0.5 * (logits + np.float64(bias[:vocab_size]))
    logits = softcap * np.tanh(logits / softcap) if softcap else logits
    labels = labels.at[:, :3].set(logits.argmax(-1)[:, :3])
    label_logits = np.take_along_axis(logits, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    expected = np.where(labels >= 0, np.log(np.exp(logits).sum(-1)) - label_logits, 0)
    context, scale = jaxtp.LayerContext(sequence_parallel=split), 0.5 if split else 1.0
    head = jaxtp.HeadConfig(vocab_size, context, scale=scale, softcap=softcap, chunk_size=CHUNK)
    padded = PaddedDim((vocab_size,)).padded(mesh[3])
    with jax.set_mesh(jaxtp.make_mesh(*mesh[:2], mesh[3], cp=mesh[2])):
        losses, likeliest = jax.jit(partial(vocab_parallel_token_losses, head=head))(
            x, table[:padded], labels, bias_V=None if bias is None else bias[:padded]
        )
    assert relative_error(losses, expected) < 1e-6
    assert np.array_equal(likeliest, (labels >= 0) & (label_logits == logits.max(-1)))
    assert not np.asarray(losses)[labels < 0].any()
