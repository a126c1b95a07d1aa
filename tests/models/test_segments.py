"""Positions and the mask of documents that are packed into rows.

That each has the numbers of the document alone: `test_context.py`, and the kernels' own tests in
`layers/test_kernels.py`.
"""

import jax
import numpy as np
from numpy.testing import assert_array_equal

from jaxtp.layers.positions import segment_mask, segment_positions


def test_positions_restart():
    segments = np.array([[1, 1, 1, 2, 3, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
    positions, mask = jax.jit(
        lambda segments: (segment_positions(segments), segment_mask(segments))
    )(segments)
    assert_array_equal(positions, [[0, 1, 2, 0, 0, 1, 0, 1], range(8)])
    assert mask[0, 0].sum() == 9 + 1 + 4 + 4
