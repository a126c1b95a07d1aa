"""Documents packed into rows give the numbers of each document alone: logits, loss and gradients, on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from support import TOLERANCE, by_name, random_weights, relative_error, state_on_mesh, without_mesh
from variants import variants

import jaxtp
from jaxtp.data.documents import InMemory
from jaxtp.data.packing import Packed
from jaxtp.layers.context import Sequences
from jaxtp.layers.sequence_parallel import segment_mask, segment_positions

B, T = 8, 16
CONFIG = jaxtp.ModelConfig(
    vocab_size=19,
    d_model=16,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    d_ff=24,
    norm_eps=1e-3,
    attention_sinks=True,
)
LENGTHS = [5, 9, 2, 7, 12, 4, 3, 8, 6, 10, 1, 5, 11, 3, 2, 6, 9, 4, 7, 2]  # 116 tokens for 128 places


def build(config=CONFIG):
    return jaxtp.Decoder(config, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, sum(LENGTHS)).astype(np.uint8)
    rows = Packed(InMemory(tokens, np.array(LENGTHS), "test"), T, CONFIG.vocab_size)
    assert len(rows) == B
    assert rows.padding > 0
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.fixture(scope="module")
def alone(batch):
    """Weights; logits of every position, the summed loss and its gradients, document by document, plainly computed.

    Each document has a row of its own, where nothing is before it, and what comes after it is not seen.
    """
    weights = random_weights(build)
    places = [
        (row, batch["segments"][row] == segment)
        for row in range(B)
        for segment in range(1, batch["segments"][row].max() + 1)
    ]
    ids, labels = np.zeros((len(places), T), np.int32), np.full((len(places), T), -100, np.int32)
    for document, (row, where) in enumerate(places):
        ids[document, : where.sum()] = batch["inputs"][row, where]
        labels[document, : where.sum()] = batch["labels"][row, where]

    def total(weights):
        found = reference.decoder_logits(weights, CONFIG, ids)
        return reference.cross_entropy(found, labels)[0], found

    (loss, found), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(weights)
    logits = np.zeros((B, T, CONFIG.vocab_size), np.float32)
    for document, (row, where) in enumerate(places):
        logits[row, where] = np.asarray(found)[document, : where.sum()]
    return weights, logits, loss, {name: np.asarray(grad) for name, grad in grads.items()}


def check(graph, state, batch, alone, mesh):
    _, expected_logits, expected_loss, expected_grads = alone

    def loss(state):
        model = nnx.merge(graph, state)
        total, count = model.loss(batch["inputs"], batch["labels"], segments_BT=batch["segments"])
        return total, (count, model(batch["inputs"], batch["segments"]))

    (total, (count, logits)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
    assert count == sum(LENGTHS) - len(LENGTHS)
    assert float(total) == pytest.approx(float(expected_loss), rel=TOLERANCE)
    used = batch["segments"] > 0
    assert relative_error(np.asarray(logits)[used], expected_logits[used]) < TOLERANCE
    for name, grad in by_name(grads, mesh).items():
        assert relative_error(grad, expected_grads[name]) < TOLERANCE, name


@pytest.mark.wide
@pytest.mark.parametrize(("mesh", "split"), [(None, None), ((1, 1, 8), False), ((2, 2, 2), True)], ids=str)
def test_packed_documents_have_the_numbers_of_documents_alone(batch, alone, mesh, split):
    build_split = lambda: build(dataclasses.replace(CONFIG, sequence_parallel=split))
    if mesh is None:
        check(*without_mesh(build, alone[0]), batch, alone, jaxtp.make_mesh())
        return
    mesh = jaxtp.make_mesh(*mesh)
    with jax.set_mesh(mesh):
        check(*state_on_mesh(build_split, alone[0], mesh), batch, alone, mesh)


VARIED = variants(
    CONFIG,
    {
        "layers that differ": {
            "pattern": [{"sliding_window": 4, "rope_theta": 50.0}, {}],
            "attention_softcap": 2.0,
            "norm": "rms_plus_one",
            "norm_placement": "both",
        },
        "parallel": {"norm_placement": "parallel", "embedding_norm": True, "head_bias": True},
        "learned positions": {
            "learned_positions": T,
            "rope_theta": None,
            "norm": "layer",
            "mlp": "plain",
            "sequence_parallel": False,
        },
    },
)


@pytest.mark.wide
@pytest.mark.parametrize("name", VARIED)
def test_a_document_alone_has_the_logits_that_it_has_after_others(batch, name):
    mesh = jaxtp.make_mesh(2, 2, 2)
    make = lambda: build(VARIED[name])
    graph, state = state_on_mesh(make, random_weights(make), mesh)
    rows, segments = batch["inputs"], batch["segments"]
    begins = [int(np.argmax(row == row.max())) for row in segments]
    moved = np.stack([np.roll(row, -begin) for row, begin in zip(rows, begins, strict=True)])
    run = jax.jit(lambda state, ids, segments: nnx.merge(graph, state)(ids, segments))
    with jax.set_mesh(mesh):
        packed, alone = run(state, rows, segments), run(state, moved, np.ones_like(segments))
    for row, begin in enumerate(begins):
        length = int((segments[row] == segments[row].max()).sum())
        expected = np.asarray(alone)[row, :length]
        assert relative_error(np.asarray(packed)[row, begin : begin + length], expected) < TOLERANCE


def test_no_position_sees_the_future_or_another_document(batch):
    """The gradient of a position with respect to the embeddings of others is exactly zero."""
    graph, state = nnx.split(jax.jit(lambda: jaxtp.DecoderBlock(CONFIG, rngs=nnx.Rngs(0)))())
    x = np.random.default_rng(0).standard_normal((1, T, CONFIG.d_model)).astype(np.float32)
    segments = batch["segments"][:1]

    @jax.jit
    def influences(state, x):
        block = nnx.merge(graph, state)
        of = lambda *args: jax.jacobian(lambda x: block(x, *args).sum(axis=-1))(x)[0, :, 0]
        return [jnp.abs(of(*args)).sum(axis=-1) for args in ((), (None, Sequences(segments=segments)))]

    whole, packed = influences(state, x)
    past = np.tril(np.ones((T, T), bool))
    np.testing.assert_array_equal(whole > 0, past)
    np.testing.assert_array_equal(packed > 0, past & (segments[0][:, None] == segments[0][None]))


def test_positions_restart():
    segments = np.array([[1, 1, 1, 2, 3, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    positions, mask = jax.jit(lambda segments: (segment_positions(segments), segment_mask(segments)))(segments)
    np.testing.assert_array_equal(positions, [[0, 1, 2, 0, 0, 1, 0, 1], range(8)])
    assert mask[0, 0].sum() == 9 + 1 + 4 + 4
