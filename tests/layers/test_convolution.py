"""Short convolutions against sums over tokens in float64, on meshes: outputs and gradients."""

from functools import cache

import deltas
import numpy as np
from flax import nnx
from layer_programs import LayerProgram, in_float64, in_order
from numpy.random import default_rng
from packed_reference import D, batch
from support import assert_close, cached_and_whole, decoder, random_weights, swept, without_mesh
from tables import read_table

from jaxtp import ModelConfig
from jaxtp.layers.convolution import ShortConvolution, ShortConvolutionConfig
from jaxtp.layers.linear import LayerContext
from jaxtp.mesh import mesh_shape
from jaxtp.tools.check.__main__ import verdicts
from jaxtp.tools.check.shrink import Case, shrink
from jaxtp.train.config import DataConfig, TrainConfig

CASES = [(width, tuple(mesh), zigzag) for width, mesh, zigzag in read_table(__file__)]


def layer_of(width, **context):
    config = ShortConvolutionConfig(short_conv=width)
    return lambda: ShortConvolution(D, config, LayerContext(**context), rngs=nnx.Rngs(0))


@cache
def expected(width):
    """Returns weights, input and the output's gradient in float32; and results in float64."""
    weights = random_weights(layer_of(width))
    arrays = default_rng(0).standard_normal((2, *batch()[2].shape, D))
    rule = lambda w, x: deltas.short_convolution(x, batch()[2], w)
    return weights, arrays.astype(np.float32), in_float64(rule, weights, *arrays)


@swept("case", CASES, CASES[0], CASES[2])
def test_a_layer_is_the_sum_over_earlier_tokens_of_a_document(case):
    width, mesh, zigzag = case
    weights, arrays, right = expected(width)
    build = layer_of(width, sequence_parallel=mesh[-1] == 2)
    found = LayerProgram(build, weights, mesh, call=in_order(zigzag))(*arrays, batch()[2])
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
