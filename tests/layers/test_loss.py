"""Chunks of the loss: of a device's tokens, however many rows they are in."""

import math
import re

import accounts
import jax
import jax.numpy as jnp
import numpy as np
from numpy.random import default_rng
from support import relative_error, swept, use_mesh
from tables import read_table

from jaxtp import Precision
from jaxtp.analysis.census import equations
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


@swept("dtype", ["bfloat16", "float32"])
def test_products_of_the_head(dtype):
    """Logits, and a gradient of what is trained, in the compute dtype; an evaluation has logits
    alone.
    """
    x, table, labels = given(4, 4)
    loss = lambda x, table: total(x, table, labels, 4, Precision(compute=dtype))
    products = []
    for argnums in ((0, 1), 0, 1, ()):
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums) if argnums != () else loss)(x, table)
        found = [
            (chunks, [v.aval.dtype for v in e.invars])
            for e, chunks, *_ in equations(jaxpr.jaxpr)
            if e.primitive.name == "dot_general"
        ]
        assert all(each == (4, [dtype, dtype]) for each in found)
        products.append(len(found))
    assert products == [3, 2, 2, 1]


def by_formula(x, table, bias, labels, head, z_loss):
    """Returns the loss, and its gradients by hidden states, table and bias, in float64."""
    caps = np.tanh(head.scale * (x @ table.T + bias) / head.softcap)
    logits = head.softcap * caps
    normaliser = np.log(np.exp(logits).sum(-1, keepdims=True))
    is_label = labels[..., None] == np.arange(len(table))
    valid = labels[..., None] != -100
    losses = normaliser - logits[is_label].sum() / valid.sum() + z_loss * normaliser**2
    grad = (1 + 2 * z_loss * normaliser) * np.exp(logits - normaliser) - is_label
    grad *= valid * head.scale * (1 - caps**2)
    by_table = np.einsum("btv,btd->vd", grad, x)
    return np.sum(losses, where=valid), grad @ table, by_table, grad.sum((0, 1))


@swept("seed", range(8), 0)
def test_the_loss_and_its_gradients_equal_their_formulas(seed):
    random = default_rng(seed)
    dp, fsdp, cp, tp = [(2, 2, 1, 2), (1, 1, 2, 4), (1, 2, 2, 2), (1, 1, 1, 8)][seed % 4]
    size = int(random.integers(tp, 50))
    head = HeadConfig(
        size,
        LayerContext(sequence_parallel=bool(seed % 3)),
        scale=random.uniform(0.5, 2),
        softcap=[3.0, 1e6][seed % 2],
        chunk_size=int(random.integers(1, 20)),
    )
    z_loss = [0.1, 0.0][seed // 2 % 2]
    x, table = (random.standard_normal((*dims, D)) for dims in ((4, 8), (size,)))
    bias = random.standard_normal(size)
    labels = random.integers(0, size, (4, 8))
    labels[random.random((4, 8)) < 0.3] = -100
    expected = by_formula(x, table, bias, labels, head, z_loss)

    def ours(x, table, bias):
        added = PaddedDim((size,)).padded(tp) - size
        padded = jnp.pad(table, ((0, added), (0, 0))), jnp.asarray(labels), head
        bias = jnp.pad(bias, (0, added))
        return 3 * vocab_parallel_cross_entropy(x, *padded, bias, z_loss=z_loss)[0]

    with use_mesh(dp, fsdp, tp, cp=cp):
        run = jax.value_and_grad(ours, (0, 1, 2))
        # Both compiled and not.
        run = jax.jit(run) if seed % 2 else run
        loss, grads = run(*(np.float32(each) for each in (x, table, bias)))
    assert max(map(relative_error, [loss, *grads], [3 * each for each in expected])) < 1e-5


def test_tokens_are_listed_without_a_copy():
    """Where chunks divide the tokens, the loops read the activation and write its gradient as
    they are.
    """
    gradient = jax.grad(lambda *args: total(*args, 8), argnums=(0, 1))
    traced = accounts.equations(jax.make_jaxpr(gradient)(*given(8, 8)).jaxpr)
    outputs = [(e.primitive.name, v.aval.size) for e in traced for v in e.outvars]
    found = {name for name, size in outputs if size == 8 * 8 * D}
    # jax 0.12 does not inline the loss's own jit.
    assert found - {"jit"} == {"name", "scan", "reshape", "mul"}


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

    def ours(x, table):
        """Half of it in one pass, half by the numbers of each token."""
        found = vocab_parallel_statistics(x, (table, HeadConfig(V, chunk_size=CHUNK), None), labels)
        by_token = jnp.sum(found.log_normaliser - found.label_logit)
        return (total(x, table, labels, CHUNK) + by_token) / 2

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
