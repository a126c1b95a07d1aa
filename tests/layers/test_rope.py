"""Rotary angles at long positions, longrope's choice between its lists, and what cannot be."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.random import default_rng
from tables import raised_by

import jaxtp
from jaxtp.config.schema import from_yaml, to_yaml
from jaxtp.layers.rope import UNSCALED, RopeScaling, apply_rope, rope_frequencies
from jaxtp.mesh import mesh_shape
from jaxtp.models.block_rules import rope_problems
from jaxtp.models.config import violations
from jaxtp.tools.check.small_model import ShrinkSpec, shrink_block
from jaxtp.train.__main__ import COMMAND as TRAIN
from jaxtp.train.config import TrainConfig

SHORT = (1.0, 1.1, 1.3, 1.6)
LONG = (1.2, 2.5, 9.0, 31.0)
LONGROPE = RopeScaling(
    kind="longrope", factor=8.0, original_length=16, short_factor=SHORT, long_factor=LONG
)


def rotated(positions, head_dim, theta, scaling=UNSCALED, length=1):
    """What pairs of (1, 0) are rotated to, as complex numbers `[T, H/2]`."""
    ones = np.zeros((1, len(positions), 1, head_dim), np.float32)
    ones[..., : head_dim // 2] = 1
    run = jax.jit(lambda x, positions: apply_rope(x, positions, theta, scaling, length))
    y = np.asarray(run(ones, np.asarray(positions, np.int32)), np.float64)[0, :, 0]
    return y[:, : head_dim // 2] + 1j * y[:, head_dim // 2 :]


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e4), (80, 5e5), (128, 1e6)])
def test_angles_are_right_at_any_position(head_dim, theta):
    """Products in float32 are off by 0.06 at a million, and by whole turns at the last ones."""
    ends = [2**power + more for power in (12, 16, 17, 20, 22, 24, 30) for more in (-1, 0, 1)]
    positions = np.array([0, 1, 3, *ends, 2**31 - 1, -1, -70_000], np.int64)
    angles = positions[:, None] * rope_frequencies(head_dim, theta, UNSCALED, 1)
    assert np.abs(rotated(positions, head_dim, theta) * np.exp(-1j * angles) - 1).max() < 1e-6


def test_frequencies_above_a_turn_are_rotated_too():
    """Factors below 1 may make them."""
    scaling = RopeScaling(kind="linear", factor=1e-3)
    angles = np.arange(99)[:, None] * rope_frequencies(8, 1e4, scaling, 1)
    assert angles.max() > 9e4
    assert np.abs(rotated(range(99), 8, 1e4, scaling) * np.exp(-1j * angles) - 1).max() < 1e-6


@pytest.mark.parametrize(
    ("length", "factors"), [(1, SHORT), (16, SHORT), (17, LONG), (2**17, LONG)]
)
def test_longrope_takes_the_list_by_the_positions_that_there_can_be(length, factors):
    """Whatever positions there are: they may be of packed documents, or a cache that is not
    full.
    """
    size = math.sqrt(1 + math.log(8) / math.log(16))
    angles = np.arange(40)[:, None] * 1e4 ** -(np.arange(4) / 4) / factors
    found = rotated(range(40), 8, 1e4, LONGROPE, length)
    assert np.abs(found / size * np.exp(-1j * angles) - 1).max() < 1e-6


@given(
    theta=st.floats(0, exclude_min=True, allow_infinity=False),
    scaling=st.builds(
        RopeScaling,
        kind=st.sampled_from(["linear", "llama3", "yarn", "longrope", "proportional"]),
        original_length=st.integers(1, 2**31 - 1),
        truncate=st.booleans(),
        short_factor=st.just(SHORT),
        long_factor=st.tuples(*[st.floats(0, exclude_min=True, allow_infinity=False)] * 4),
        **dict.fromkeys(
            ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
            st.floats(0, exclude_min=True, allow_infinity=False),
        ),
    ),
)
@example(1.0, RopeScaling(kind="llama3", low_freq_factor=5e-324, high_freq_factor=1e-323))
def test_any_numbers_are_a_problem_or_frequencies(theta, scaling):
    if not list(rope_problems(8, theta, scaling)):
        assert np.isfinite(rope_frequencies(8, theta, scaling, 100)).all()


def test_a_fraction_is_a_narrower_head_and_the_rest_of_it_is_unchanged():
    x = default_rng(0).standard_normal((2, 5, 3, 16)).astype(np.float32)
    rotate = jax.jit(apply_rope, static_argnums=(2, 3, 4, 5))
    for fraction, dims in ((0.25, 4), (0.4, 6), (0.75, 12), (1.0, 16)):
        for scaling in (UNSCALED, RopeScaling(kind="yarn", factor=4.0, original_length=8)):
            given = np.arange(5), 50.0, scaling, 5
            found = rotate(x, *given, fraction)
            narrow = rotate(x[..., :dims], *given)
            assert np.array_equal(found[..., dims:], x[..., dims:])
            assert np.array_equal(found[..., :dims], narrow)


def test_proportional_frequencies_are_those_of_the_whole_head_then_zero():
    scaling = RopeScaling(kind="proportional", factor=8.0)
    for fraction, pairs in ((0.25, 2), (0.5, 4), (1.0, 8)):
        found = rope_frequencies(16, 1e6, scaling, 5, fraction)
        assert np.array_equal(found[:pairs], rope_frequencies(16, 1e6, UNSCALED, 5)[:pairs] / 8)
        assert np.array_equal(found[pairs:], np.zeros(8 - pairs))


def test_a_small_model_rotates_pairs_too():
    for fraction in (0.25, 0.4, 0.5, 0.75, 1.0):
        for kind in ("none", "longrope", "proportional"):
            pairs = (1.0,) * (int(80 * fraction) // 2)
            scaling = RopeScaling(
                kind=kind, original_length=64, short_factor=pairs, long_factor=pairs
            )
            model = jaxtp.ModelConfig(head_dim=80, rotary_fraction=fraction, rope_scaling=scaling)
            spec = ShrinkSpec(tps=frozenset({1, 2}), shards=2, length=24, before=48)
            small = shrink_block(model, spec)
            assert small["head_dim"] <= 16
            for each in (model, replace(model, **small)):
                assert not [*violations(each, mesh_shape())], (fraction, kind)


def test_factors_of_longrope_are_lists_in_yaml_and_flags(tmp_path):
    path = tmp_path / "long.yaml"
    scaled = TrainConfig(model=jaxtp.ModelConfig(head_dim=8, rope_scaling=LONGROPE))
    path.write_text(to_yaml(scaled))
    assert from_yaml(TrainConfig, path).model == scaled.model
    config, _ = TRAIN.load(
        [f"--config={path}", "--model.rope-scaling.long-factor", "2", "3.5", "4", "5e1"]
    )
    assert config.model.rope_scaling == replace(LONGROPE, long_factor=(2.0, 3.5, 4.0, 50.0))
    for wrong in ("abc", "[1, 2, x]", "[1, .nan]", "[1, -2]", "[[1]]"):
        path.write_text(f"model: {{rope_scaling: {{kind: longrope, short_factor: {wrong}}}}}")
        error = raised_by(from_yaml, TrainConfig, path)
        assert "model.rope_scaling.short_factor" in error
        assert len(error.splitlines()) == 2


@pytest.mark.parametrize(("before", "length"), [(4096, 12), (8192, 6), (2048, 24), (2**20, 2)])
def test_a_small_model_keeps_the_list_of_factors_that_holds(before, length):
    """Its sequences of 24 are on the same side of the original length as those of the run."""
    factors = tuple(1 + i / 48 for i in range(48))
    scaling = replace(
        LONGROPE, original_length=2048, short_factor=factors, long_factor=factors[::-1]
    )
    model = jaxtp.ModelConfig(head_dim=96, rope_scaling=scaling)
    small = ShrinkSpec(tps=frozenset({1, 2}), shards=2, length=24, before=before)
    found = shrink_block(model, small)
    assert (found["head_dim"], found["rope_scaling"].original_length) == (8, length)
    assert found["rope_scaling"].short_factor == factors[::12]
    assert found["rope_scaling"].long_factor == factors[::-12]
    assert not list(rope_problems(8, 2.0, found["rope_scaling"]))
    assert "short_factor of 4" in str(found["rope_scaling"])
