"""Documents packed into rows give the numbers of each document alone: loss and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import TOLERANCE, assert_close, by_name, decoder, random_weights, without_mesh
from variants import small_model

import jaxtp
from jaxtp.layers.context import Sequences
from jaxtp.layers.positions import segment_mask, segment_positions

CONFIG = small_model(vocab_size=19, num_layers=2, num_heads=8, norm_eps=1e-3, attention_sinks=True)
LENGTHS = [5, 9, 2]
T = sum(LENGTHS)
SEGMENTS = np.repeat([[1, 2, 3]], LENGTHS, axis=1).astype(np.int32)


@pytest.mark.wide
def test_packed_documents_have_the_numbers_of_documents_alone():
    """On one device, where logits are the plain mathematics' (test_decoder.py), and which meshes
    equal.
    """
    build = decoder(CONFIG)
    graph, state = without_mesh(build, random_weights(build))
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, T), np.int32)
    labels = np.roll(ids, -1, axis=1)
    labels[:, np.cumsum(LENGTHS) - 1] = -100
    # A row for each document, which begins there; what comes after it is not seen, and has no
    # labels.
    alone, of_alone = (np.repeat(array, len(LENGTHS), axis=0) for array in (ids, labels))
    for row, (length, end) in enumerate(zip(LENGTHS, np.cumsum(LENGTHS), strict=True)):
        alone[row] = np.roll(alone[row], length - end)
        of_alone[row] = np.roll(of_alone[row], length - end)
        of_alone[row, length:] = -100

    @jax.jit
    def run(state):
        loss = lambda state, *given, **segments: nnx.merge(graph, state).loss(*given, **segments)
        gradient = jax.value_and_grad(loss, has_aux=True)
        return gradient(state, ids, labels, segments=SEGMENTS), gradient(state, alone, of_alone)

    ((found, count), grads), ((expected, expected_count), expected_grads) = run(state)
    assert count == expected_count == T - len(LENGTHS)
    assert float(found) == pytest.approx(float(expected), rel=TOLERANCE)
    assert_close(by_name(grads, jaxtp.make_mesh()), by_name(expected_grads, jaxtp.make_mesh()))


@pytest.mark.wide
def test_no_position_sees_the_future_or_another_document():
    """The gradient of a position with respect to the embeddings of others is exactly zero."""
    graph, state = nnx.split(jax.jit(lambda: jaxtp.layers.DecoderBlock(CONFIG, rngs=nnx.Rngs(0)))())
    x = np.random.default_rng(0).standard_normal((1, T, CONFIG.d_model)).astype(np.float32)

    @jax.jit
    def influences(state, x):
        block = nnx.merge(graph, state)
        of = lambda *args: jax.jacobian(lambda x: block(x, *args).sum(axis=-1))(x)[0, :, 0]
        return [
            jnp.abs(of(*args)).sum(axis=-1) for args in ((), (None, Sequences(segments=SEGMENTS)))
        ]

    whole, packed = influences(state, x)
    past = np.tril(np.ones((T, T), bool))
    np.testing.assert_array_equal(whole > 0, past)
    np.testing.assert_array_equal(packed > 0, past & (SEGMENTS[0][:, None] == SEGMENTS[0][None]))


def test_positions_restart():
    segments = np.array([[1, 1, 1, 2, 3, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    positions, mask = jax.jit(
        lambda segments: (segment_positions(segments), segment_mask(segments))
    )(segments)
    np.testing.assert_array_equal(positions, [[0, 1, 2, 0, 0, 1, 0, 1], range(8)])
    assert mask[0, 0].sum() == 9 + 1 + 4 + 4
