"""Chunks of the loss: of a device's tokens, however many rows they are in."""

import math
import re

import accounts
import jax
import jax.numpy as jnp
import numpy as np
from support import relative_error, swept, use_mesh
from tables import read_table

from jaxtp import Precision
from jaxtp.layers import HeadConfig, LayerContext
from jaxtp.layers.loss import vocab_parallel_statistics, vocab_parallel_top_k
from jaxtp.layers.parameter import PaddedDim
from jaxtp.losses import vocab_parallel_cross_entropy

D = 24
V = 40
CHUNK = 6
LOW = Precision(compute="bfloat16")


def total(x, table, labels, chunk_size, precision=Precision()):
    head = HeadConfig(V, LayerContext(precision=precision), chunk_size=chunk_size)
    return vocab_parallel_cross_entropy(x, table, labels, head)[0]


def given(rows, length):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, length, D))
    table = jax.random.normal(keys[1], (V, D))
    return x, table, jax.random.randint(keys[2], (rows, length), 0, V)


def traced(rows, length, chunk_size, precision=Precision()):
    """Returns the equations of the loss and its gradients."""
    gradient = jax.grad(lambda *args: total(*args, chunk_size, precision), argnums=(0, 1))
    return [*accounts.equations(jax.make_jaxpr(gradient)(*given(rows, length)).jaxpr)]


def test_products_are_in_the_compute_dtype():
    for dtype in ("bfloat16", "float32"):
        equations = traced(4, 4, CHUNK, Precision(compute=dtype))
        products = [
            [v.aval.dtype for v in e.invars] for e in equations if e.primitive.name == "dot_general"
        ]
        assert len(products) >= 4
        assert all(dtypes == [dtype, dtype] for dtypes in products)


def test_tokens_are_listed_without_a_copy():
    """Where chunks divide the tokens, the loops read the activation and write its gradient as
    they are.
    """
    outputs = [(e.primitive.name, v.aval.size) for e in traced(8, 8, 8) for v in e.outvars]
    assert {name for name, size in outputs if size == 8 * 8 * D} == {"name", "scan", "reshape"}


def test_chunks_add_up_their_gradients_in_float32():
    """In bfloat16 a sum of 512 would have lost what the later ones add."""
    x, table, labels = given(4, 128)
    whole, added = (
        jax.jit(jax.grad(lambda table, size=size: total(x, table, labels, size, LOW)))(table)
        for size in (512, 1)
    )
    assert relative_error(added, whole) < 2**-8
    assert jnp.linalg.norm(whole) > 1


def test_second_derivatives():
    x, table, labels = given(2, 4)

    def plain(x, table):
        return -jnp.take_along_axis(
            jax.nn.log_softmax(x @ table.T), labels[..., None], axis=-1
        ).sum()

    def second(loss):
        along = lambda *args: sum(map(jnp.vdot, jax.grad(loss, (0, 1))(*args), (x, table)))
        return jax.grad(along, (0, 1))

    ours = lambda x, table: total(x, table, labels, CHUNK)
    with use_mesh(tp=2):
        found, expected = jax.jit(lambda *args: (second(ours)(*args), second(plain)(*args)))(
            x, table
        )
    assert max(map(relative_error, found, expected)) < 1e-5


CASES = read_table(__file__)
TEMPERATURE = 0.7
TOP = 7


def log_probs_of(found, labels):
    normaliser = found.log_normaliser if labels.ndim == 2 else found.log_normaliser[..., None]
    return jnp.where(labels == -100, 0, found.label_logit - normaliser)


@swept("case", CASES, "one label over all axes")
def test_log_probabilities_entropy_and_top_ids_of_each_token(case):
    """Against float64 on whole logits; 37 ids are not divided by tp, and no chunk divides the
    tokens of a device.
    """
    (dp, fsdp, cp, tp), softcap, split, *dims = CASES[case]
    size = 37
    x, table, _ = given(4, 8)
    arrays = (x, table[:size], 3 * table[:size, 0]) if split else (x, table[:size])
    scale, temperature = (0.5, TEMPERATURE) if split else (1.0, 1.0)
    # repeats in K labels
    labels = jax.random.randint(jax.random.key(3), (4, 8, *dims), 0, 3 if dims else size)
    labels = labels.at[:, 6:].set(-100).at[:, 5, ...].set(size - 1)
    weights = (
        jax.random.normal(jax.random.key(4), (4, 8, *dims)),
        jax.random.normal(jax.random.key(5), (4, 8)),
    )
    head = HeadConfig(
        size,
        LayerContext(sequence_parallel=split),
        scale=scale,
        softcap=softcap,
        temperature=temperature,
        chunk_size=CHUNK,
    )

    def objective(log_probs, entropy):
        return jnp.sum(weights[0] * log_probs) + jnp.sum(weights[1] * entropy)

    def dense(x, table, bias=0):
        logits = scale * (jnp.einsum("btd,vd->btv", x, table) + bias)
        logits = (softcap * jnp.tanh(logits / softcap) if softcap else logits) / temperature
        log_softmax = jax.nn.log_softmax(logits)
        found = jnp.take_along_axis(log_softmax, jnp.maximum(labels, 0).reshape(4, 8, -1), axis=-1)
        log_probs = jnp.where(labels == -100, 0, found.reshape(labels.shape))
        entropy = -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1)
        return objective(log_probs, entropy), (log_probs, entropy, *jax.lax.top_k(log_softmax, TOP))

    def ours(x, *params):
        padded = PaddedDim((size,)).padded(tp) - size
        params = [jnp.pad(each, ((0, padded), (0, 0))[: each.ndim]) for each in params]
        projection = params[0], head, *(params[1:] or [None])
        found = vocab_parallel_statistics(x, projection, labels, entropy=True)
        numbers = log_probs_of(found, labels), found.entropy
        return objective(*numbers), (*numbers, *vocab_parallel_top_k(x, projection, TOP))

    both = [jax.value_and_grad(each, range(len(arrays)), has_aux=True) for each in (dense, ours)]
    with jax.enable_x64(True):
        (_, expected), expected_grads = jax.jit(both[0])(*(jnp.float64(each) for each in arrays))
    with use_mesh(dp, fsdp, tp, cp=cp):
        (_, found), grads = jax.jit(both[1])(*arrays)
    assert max(map(relative_error, [*found, *grads], [*expected, *expected_grads])) < 1e-5
    assert not np.asarray(found[0])[labels == -100].any()


def test_the_likeliest_label_has_the_highest_logit():
    x, table, labels = given(4, 8)
    logits = np.einsum("btd,vd->btv", np.float64(x), np.float64(table[:37]))
    labels = jnp.where(labels < 37, labels, -100).at[:, :3].set(logits.argmax(-1)[:, :3])
    with use_mesh(tp=4):
        statistics = lambda x, table: vocab_parallel_statistics(
            x, (table, HeadConfig(37), None), labels
        )
        found = jax.jit(statistics)(x, table)
    assert found.entropy is None
    assert np.array_equal(found.label_logit >= found.highest, labels == logits.argmax(-1))


@swept("mesh", [(1, 1, 4), (1, 2, 2)], (1, 1, 4))
def test_no_array_of_the_compiled_program_has_all_logits(mesh):
    """Nor more than a few numbers of K labels for each token; 128 tokens, of chunks of 8 on a
    device.
    """
    _, fsdp, tp = mesh
    ids = 1024
    tokens = 128 // fsdp
    labels = jnp.zeros((8, 16, 3), jnp.int32)
    head = HeadConfig(ids, chunk_size=8)

    def objective(x, table):
        found = vocab_parallel_statistics(x, (table, head, None), labels, entropy=True)
        values, top = vocab_parallel_top_k(x, (table, head, None), 5)
        return jnp.sum(log_probs_of(found, labels)) + jnp.sum(found.entropy * values[..., 0]), top

    with use_mesh(*mesh):
        run = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))
        text = run.lower(jnp.ones((8, 16, 4)), jnp.ones((ids, 4))).compile().as_text()
    sizes = {
        math.prod(map(int, dims.split(","))) for dims in re.findall(r"\b[fs]32\[([\d,]+)\]", text)
    }
    assert 8 * ids // tp in sizes
    assert max(sizes - {4 * ids}) <= 2 * 8 * ids // tp < tokens * ids // tp
