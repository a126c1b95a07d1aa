"""The most probable tokens on a mesh whose tp does not divide the vocabulary: some devices have
padding alone.
"""

import jax
import numpy as np
from numpy.random import default_rng
from numpy.testing import assert_allclose
from support import swept, use_mesh

from jaxtp.layers import HeadConfig, LayerContext
from jaxtp.layers.loss import vocab_parallel_top_k
from jaxtp.layers.parameter import PaddedDim

B = 2
T = 6
D = 3
CASES = [(1, 1, 2), (5, 3, 4), (5, 5, 1), (9, 9, 8), (37, 3, 4), (37, 37, 2)]
"""Tokens of the vocabulary, tokens that are asked for, and tp."""


@swept("case", CASES, (9, 9, 8))
def test_the_top_tokens_and_their_log_probabilities(case):
    """Whole numbers give exact logits with many ties, of which the lower id comes first; padding
    is never chosen.
    """
    size, k, tp = case
    random = default_rng(size)
    padded = PaddedDim((size,)).padded(tp)
    x = random.integers(-2, 3, (B, T, D))
    table = random.integers(-2, 3, (padded, D))
    bias = np.where(np.arange(padded) < size, random.integers(-1, 2, padded), 50)
    head = HeadConfig(size, LayerContext(), chunk_size=5)
    arrays = [each.astype(np.float32) for each in (x, table, bias)]
    with use_mesh(tp=tp):
        values, ids = jax.jit(
            lambda x, table, bias: vocab_parallel_top_k(x, (table, head, bias), k)
        )(*arrays)
    logits = (np.einsum("btd,vd->btv", x, table) + bias)[..., :size]
    expected = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
    assert np.array_equal(ids, expected)
    assert (values.dtype, ids.dtype) == (np.float32, np.int32)
    log_probs = logits - np.log(np.exp(np.float64(logits)).sum(-1, keepdims=True))
    assert_allclose(values, np.take_along_axis(log_probs, expected, axis=-1), atol=2e-6)
