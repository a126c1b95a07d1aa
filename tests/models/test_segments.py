"""Documents packed into rows give the numbers of each document alone: logits, loss and gradients, on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from support import MESHES, TOLERANCE, by_name, random_weights, relative_error, state_on_mesh, sweep_of, without_mesh

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


def build():
    return jaxtp.Decoder(CONFIG, rngs=nnx.Rngs(0))


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


def check(graph, state, batch, alone, to_names):
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
    for name, grad in to_names(grads).items():
        assert relative_error(grad, expected_grads[name]) < TOLERANCE, name


@pytest.mark.wide
def test_without_a_mesh(batch, alone):
    graph, state = without_mesh(build, alone[0])
    check(graph, state, batch, alone, lambda g: {".".join(map(str, p)): v[...] for p, v in nnx.to_flat_state(g)})


@pytest.mark.parametrize(("mesh", "sequence_parallel"), sweep_of([MESHES, [True, False]]), ids=str)
def test_on_every_mesh(batch, alone, mesh, sequence_parallel):
    if sequence_parallel and mesh[2] == 1:
        pytest.skip("no tp to split the sequence over")
    config = dataclasses.replace(CONFIG, sequence_parallel=sequence_parallel)
    on = jaxtp.make_mesh(*mesh)
    graph, state = state_on_mesh(lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0)), alone[0], on)
    with jax.set_mesh(on):
        check(graph, state, batch, alone, lambda grads: by_name(grads, on))


VARIED = {
    "layers that differ": dataclasses.replace(
        CONFIG,
        num_layers=3,
        pattern=({"sliding_window": 4, "rope_theta": 50.0}, {}),
        attention_softcap=2.0,
        norm="rms_plus_one",
        norm_placement="both",
    ),
    "parallel": dataclasses.replace(CONFIG, norm_placement="parallel", embedding_norm=True, head_bias=True),
    "learned positions": dataclasses.replace(CONFIG, learned_positions=T, rope_theta=None, norm="layer", mlp="plain"),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_other_layers(batch, name, sequence_parallel):
    """A document alone, at the beginning of a row, has the logits that it has after others."""
    config, mesh = dataclasses.replace(VARIED[name], sequence_parallel=sequence_parallel), jaxtp.make_mesh(2, 2, 2)
    weights = random_weights(lambda: jaxtp.Decoder(VARIED[name], rngs=nnx.Rngs(0)))
    graph, state = state_on_mesh(lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0)), weights, mesh)
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


def test_no_document_sees_another(batch, alone):
    """The gradient of a document's logits with respect to the embeddings of others is exactly zero."""
    graph, state = without_mesh(build, alone[0])
    block = jaxtp.models.decoder.layer(nnx.merge(graph, state).blocks, 0)
    x = jax.random.normal(jax.random.key(0), (1, T, CONFIG.d_model))
    segments = batch["segments"][:1]
    jacobian = jax.jit(jax.jacobian(lambda x: block(x, None, Sequences(segments=segments)).sum(axis=-1)))(x)[0, :, 0]
    influence = np.abs(jacobian).sum(axis=-1)
    sees = (segments[0][:, None] == segments[0][None]) & np.tril(np.ones((T, T), bool))
    np.testing.assert_array_equal(influence > 0, sees)


def test_positions_restart():
    segments = jnp.array([[1, 1, 1, 2, 3, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    expected = [[0, 1, 2, 0, 0, 1, 0, 1], list(range(8))]
    np.testing.assert_array_equal(segment_positions(segments), expected)
    assert segment_mask(segments)[0, 0].sum() == 9 + 1 + 4 + 4
