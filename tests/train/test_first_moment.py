"""A first moment in bfloat16: rounded without bias, from bits that neither mesh nor interruption
changes.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.random import default_rng
from numpy.testing import assert_array_equal
from small_state import padded_variable
from support import sizes_of, swept
from tables import read_table
from variants import small_model, variant

from jaxtp.config.schema import to_plain
from jaxtp.layers.parameter import padding_of, unpad
from jaxtp.mesh import mesh_of, mesh_shape
from jaxtp.tools.check import parity
from jaxtp.tools.check.shrink import ONE_DEVICE, Case
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import OptimizerConfig, TrainConfig
from jaxtp.train.memory import memory_per_device
from jaxtp.train.optimizer import noise_of, round_stochastically
from jaxtp.train.resume import check_resumable
from jaxtp.train.run_folder import RunFolderError
from jaxtp.train.validation import violations_on

SHAPE = (32, 1024)
TABLES = read_table(__file__)


def config_of(name, **settings):
    return OptimizerConfig(
        name=name, first_moment="bfloat16", warmup_steps=0, clip_norm=1e9, **settings
    )


@jax.jit
def rounded(array, seeds):
    return jax.vmap(lambda seed: round_stochastically(array, noise_of(seed, array.shape)))(seeds)


SEEDS = jax.random.bits(jax.random.key(1), 64, jnp.uint32)


def test_rounding_is_to_a_neighbour_and_unbiased():
    size, sign = jax.random.normal(jax.random.key(0), (2, *SHAPE))
    x = np.asarray(jnp.exp(20 * size) * sign)  # over 70 powers of two
    down = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    up = (
        ((x.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000))
        .view(np.float32)
        .astype(np.float64)
    )
    y = np.asarray(rounded(x, SEEDS).astype(jnp.float32), np.float64)
    assert ((y == down) | (y == up)).all()
    error = (y - x) / np.abs(up - down)
    bound = 5 / np.sqrt(6 * error.size)  # five standard deviations of the mean
    assert abs(error.mean()) < bound
    share = (x - down) / (up - down)
    deviation = (error.mean(0) / np.sqrt(np.maximum(share * (1 - share), 1e-9) / len(SEEDS))).std()
    assert deviation == pytest.approx(1, abs=0.05), "each element on its own"
    for shifted in (error[1:, :, :], np.roll(error, 1, 1)[1:], np.roll(error, 1, 2)[1:]):
        assert abs((error[:-1] * shifted).mean()) < bound, "independent of steps and neighbours"


def test_exact_and_non_finite_values_stay():
    exact = np.array(
        [0.0, 1.0, -1.5, 2.0**-126, -(2.0**-133), 3.3895314e38, np.inf, -np.inf], np.float32
    )
    for found in rounded(exact, SEEDS).astype(jnp.float32):
        assert_array_equal(found, exact)
    nans = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(rounded(nans, SEEDS).astype(jnp.float32)).all()


def test_a_slow_decay_shrinks_a_moment():
    """Rounded to nearest, 0.999 of a bfloat16 is itself."""
    rule = optimizers.build(config_of("adamw", beta1=0.999), 10)
    params = {"head.kernel": np.ones(SHAPE, np.float32)}

    @jax.jit
    def mean_after_50_updates():
        state = rule.init(params)
        state = optax.tree.set(
            state, mu=jax.tree.map(lambda mu: mu + 1, optax.tree.get(state, "mu"))
        )
        gradients = {"head.kernel": jnp.zeros(SHAPE)}
        state = jax.lax.fori_loop(
            0, 50, lambda _, state: rule.update(gradients, state, params)[1], state
        )
        (mu,) = optax.tree.get(state, "mu").values()
        assert mu.dtype == jnp.bfloat16
        return mu.astype(jnp.float32).mean()

    assert float(mean_after_50_updates()) == pytest.approx(0.999**50, rel=1e-4)


def moments(name, sizes):
    """The first moments after two updates, unpadded."""
    random = default_rng(0)
    rule = optimizers.build(config_of(name), 10)
    variables = {}
    with jax.set_mesh(mesh_of(sizes)):
        for path, row in TABLES["weights"].items():
            weight = jnp.asarray(random.standard_normal(row["shape"], np.float32))
            variables[path] = padded_variable(path, weight, row)

        @jax.jit
        def two_updates(gradients):
            state = rule.init(gradients)
            for _ in range(2):
                _, state = rule.update(gradients, state, gradients, variables=variables)
            return [mu for _, mu in optax.tree.get_all_with_path(state, "mu")]

        # Muon has a tree for matrices, and one for the others.
        found = {}
        for mu in two_updates({path: variable[...] for path, variable in variables.items()}):
            found |= {path: array for path, array in mu.items() if isinstance(array, jax.Array)}
    return {
        path: unpad(np.asarray(found[path]), padding_of(variables[path]), sizes["tp"])
        for path in found
    }


CASES = [("adamw", (1, 2, 4)), ("lion", (1, 1, 2)), ("muon", (2, 2, 2))]


@swept("case", CASES, CASES[0])
def test_every_mesh_rounds_alike(case):
    """To the bit, also where it pads heads: noise is by the index without padding."""
    name, mesh = case
    expected = moments(name, mesh_shape())
    for path, array in moments(name, sizes_of(mesh)).items():
        assert array.dtype == jnp.bfloat16
        assert_array_equal(array, expected[path], err_msg=path)


RUN = variant(TrainConfig(model=small_model()), TABLES["run"])
WIDE = replace(RUN, optimizer=OptimizerConfig())


@pytest.mark.wide
def test_a_run_equals_one_device_but_for_few_last_digits():
    """Rounding of float32 decides where a value is next to the noise."""
    config = replace(RUN, optimizer=replace(RUN.optimizer, name="muon"))
    initial = parity.initial_arrays(config)
    one = parity.run(config, ONE_DEVICE, initial)
    many = parity.run(config, Case(mesh_shape(fsdp=2, tp=2), True), initial, audited=True)
    assert not many.problems
    assert parity.compare(many, one).within(parity.TOLERANCES["bfloat16"])
    changed = [(many.state[path] != mu).ravel() for path, mu in one.state.items() if ".mu." in path]
    assert np.concatenate(changed).mean() < 0.01, "other noise would change a third"


def test_an_estimate_has_two_bytes_less_for_each_parameter():
    before, after = (memory_per_device(config, mesh_shape()) for config in (WIDE, RUN))
    saved = before.parameters // 2
    assert replace(after, optimizer=after.optimizer + saved) == before


def test_another_dtype_is_refused_on_resuming_and_with_adafactor():
    info = {"config": to_plain(RUN), "corpus": {}, "mesh": {}, "next_sample": 0}
    assert not check_resumable(to_plain(RUN), {}, info)
    with pytest.raises(RunFolderError, match=r"optimizer\.first_moment: bfloat16 -> param"):
        check_resumable(to_plain(WIDE), {}, info)
    config = replace(RUN, optimizer=replace(RUN.optimizer, name="adafactor"))
    (problem,) = violations_on(config, mesh_shape())
    assert "optimizer.first_moment=bfloat16 has no effect without optimizer.name" in problem
