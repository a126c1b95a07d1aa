"""Short convolutions against sums over tokens in float64, on meshes: outputs and gradients."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from layer_programs import LayerProgram
from numpy.random import default_rng
from packed_reference import D, batch
from support import assert_close, cached_and_whole, decoder, random_weights, swept, without_mesh

from jaxtp import ModelConfig
from jaxtp.layers.context import Sequences
from jaxtp.layers.convolution import ShortConvolution, ShortConvolutionConfig
from jaxtp.layers.linear import LayerContext
from jaxtp.mesh import mesh_shape
from jaxtp.tools.check.__main__ import verdicts
from jaxtp.tools.check.shrink import Case, shrink
from jaxtp.train.config import DataConfig, TrainConfig

CASES = [  # the width, a mesh [dp, fsdp, cp, tp], and whether its order is zigzag
    (3, (1, 2, 2, 2), True),
    (3, (1, 2, 1, 2), False),
    (3, (1, 1, 1, 5), False),
    (1, (2, 1, 2, 1), False),
    (7, (1, 1, 4, 1), True),  # A chunk has 3 tokens, fewer than the convolution reads.
    (7, (1, 1, 4, 3), False),
]
"""Of these, 5 devices pad the 24 features."""


def layer_of(width, **context):
    config = ShortConvolutionConfig(short_conv=width)
    return lambda: ShortConvolution(D, config, LayerContext(**context), rngs=nnx.Rngs(0))


def convolution(w, x):
    segments = batch()[2]
    scale, gate, value = (x @ w[f"in_proj.kernels.{i}"] for i in range(3))
    length = x.shape[1]
    mixed = []
    for token in range(length):
        total = 0
        for back, tap in enumerate(w["taps"][::-1]):
            earlier = token - back
            if earlier >= 0:
                is_same = segments[:, earlier] == segments[:, token]
                product = (scale * value)[:, earlier]
                total += jnp.where(is_same[:, None], tap * product, 0)
        mixed.append(total)
    return (gate * jnp.stack(mixed, axis=1)) @ w["out.kernel"]


@cache
def expected(width):
    """Returns weights, input and the output's gradient in float32; and results in float64."""
    weights = random_weights(layer_of(width))
    arrays = default_rng(0).standard_normal((2, *batch()[2].shape, D))
    with jax.enable_x64(True):
        wide = {path: np.asarray(array, np.float64) for path, array in weights.items()}
        y, backward = jax.vjp(jax.jit(convolution), wide, arrays[0])
        grads, grad_x = backward(arrays[1])
    return weights, arrays.astype(np.float32), {"y": y, "x": grad_x, **grads}


@swept("case", CASES, CASES[0], CASES[2])
def test_a_layer_is_the_sum_over_earlier_tokens_of_a_document(case):
    width, mesh, zigzag = case
    weights, arrays, right = expected(width)

    def call(layer, x, segments):
        sequences = Sequences(segments=segments, zigzag=zigzag)
        order = sequences.positions(x.shape[1])
        return sequences.natural(layer(x[:, order], sequences))

    build = layer_of(width, sequence_parallel=mesh[-1] == 2)
    found = LayerProgram(build, weights, mesh, call=call)(*arrays, batch()[2])
    assert_close(found, {path: right[path] for path in found})


MODEL = ModelConfig(vocab_size=61, d_model=32, num_layers=1, d_ff=48, short_conv=3, loss_chunk=8)


def test_a_cache_has_what_the_convolution_reads():
    build = decoder(MODEL)
    ids = default_rng(0).integers(0, MODEL.vocab_size, (2, 6), np.int32)
    for cut in (1, 4):
        cached, whole = cached_and_whole(*without_mesh(build, random_weights(build)), ids, cut)
        assert_close({"hidden": cached}, {"hidden": whole})


def test_the_check_passes_over_cp_and_tp():
    case = Case(mesh_shape(cp=2, tp=2), True, "gather")
    run = TrainConfig(model=MODEL, data=DataConfig(sequence_length=16, global_batch_size=16))
    (verdict,) = verdicts(shrink(run, [case]), [case])
    assert verdict.passed, (verdict.errors, verdict.problems)
