"""Eleven meshes, with or without sequence parallelism, and many models: every gradient and three
updates equal one device's.
"""

from dataclasses import replace

import numpy as np
import pytest
from support import sizes_of
from tables import read_table
from variants import variants

from jaxtp.config.schema import replace_nested, validate
from jaxtp.layers.kernels.fused_attention import fused_attention
from jaxtp.layers.kernels.select import KERNELS
from jaxtp.tools.check import parity
from jaxtp.tools.check.shrink import ONE_DEVICE, UPDATES, Case
from jaxtp.train.config import TrainConfig


def read_configurations():
    """Returns the configurations of the file beside this one, by name."""
    changes = read_table(__file__, "configurations")
    base = validate(TrainConfig, changes.pop("base"), source="base")
    return variants(base, changes)


CONFIGS = read_configurations()


def case(mesh, split=False, method="auto"):
    return Case(sizes_of(mesh), split, method)


TABLE = read_table(__file__)
DIVIDED = [case(map(int, mesh), split=True) for mesh in ["114", "122", "142"]]
WHOLE_OVER_TP = [case(map(int, mesh)) for mesh in ["118", "124", "412"]]
"""Sizes of dp, fsdp and tp: each mesh once, with or without sequence parallelism."""
BATCH = [case(map(int, mesh)) for mesh in ["811", "181", "241", "421"]]
ALL_AXES = case((2, 2, 2), split=True)
OVER_CP = [case(*given) for given in TABLE["float8"]]
"""Cases of products in 8 bits over cp; test_context.py has those of float32."""
FIRST = {"llama": ALL_AXES, "float8": OVER_CP[0]}
ROTATED = {name: case(*given) for name, given in TABLE["rotated"].items()}


@pytest.fixture(scope="module")
def interpreted():
    """The kernel for GPUs, run by its interpreter."""
    with pytest.MonkeyPatch.context() as patched:
        anywhere = replace(KERNELS["fused"], run=fused_attention, platforms=None)
        patched.setitem(KERNELS, "fused", anywhere)
        yield


def tolerance_of(config):
    matmul = config.model.precision.matmul
    return parity.TOLERANCES["float32" if matmul == "compute" else matmul]


def assert_informative(initial, numbers):
    """Gradients are there, and the updates move every parameter by more than a tolerance could
    hide.
    """
    assert all(np.linalg.norm(gradient) > 1e-6 for gradient in numbers.gradients.values())
    moved = {
        name: parity.relative_error(array, initial[name])
        for name, array in numbers.state.items()
        if name.startswith("model.")
    }
    trained = {f"model.{name}" for name in numbers.gradients}
    assert min(moved[name] for name in trained) > 1e-3, moved
    frozen = moved.keys() - trained
    assert {moved[name] for name in frozen} <= {0.0}
    assert len(set(numbers.losses)) == UPDATES


def on_one_device(config):
    initial = parity.initial_arrays(config)
    return initial, parity.run(config, ONE_DEVICE, initial)


def errors_on(each, config, initial, expected):
    try:
        actual = parity.run(config, each, initial, *expected.states, replayed=expected)
    except Exception as error:
        error.add_note(f"on {each}")
        raise
    return parity.compare(actual, expected)


def groups():
    """Yields configurations with cases that one test tries, in the default suite and in the wide
    tier.
    """
    for name, first in FIRST.items():
        yield pytest.param(name, [first], marks=pytest.mark.heavy, id=f"{name}: {first}")
    wide = [
        ("llama", "batch", BATCH),
        ("llama", "divided", DIVIDED),
        ("llama", "whole", WHOLE_OVER_TP),
        ("float8", "over cp", [*OVER_CP[1:], case((8, 1, 1))]),
    ]
    wide += [(name, str(each), [each]) for name, each in ROTATED.items()]
    for name, group, cases in wide:
        yield pytest.param(name, cases, marks=pytest.mark.wide, id=f"{name}: {group}")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("name", "cases"), list(groups()))
def test_meshes_equal_one_device(name, cases):
    config = CONFIGS[name]
    initial, expected = on_one_device(config)
    assert_informative(initial, expected)
    differing = {}
    for each in cases:
        errors = errors_on(each, config, initial, expected)
        if not errors.within(tolerance_of(config)):
            differing[str(each)] = errors
    assert not differing


@pytest.mark.wide
def test_bfloat16_is_within_its_tolerance():
    config = replace_nested(CONFIGS["llama"], {"model.precision.compute": "bfloat16"})
    initial, one = on_one_device(config)
    many = parity.run(config, case((1, 2, 4), split=True), initial)
    assert parity.compare(many, one).within(parity.TOLERANCES["bfloat16"])


def test_errors_are_those_of_the_worst_arrays():
    ones = np.ones(4)
    expected = parity.Numbers(ones, ones, {"w": ones, "v": ones}, {"w": ones})
    actual = replace(expected, gradients={"w": ones, "v": 1.5 * ones}, state={"w": np.nan * ones})
    errors = parity.compare(actual, expected)
    tolerance = parity.Tolerance(1, 1)
    assert (errors.loss, errors.gradients) == (0, {"w": 0, "v": 0.5})
    assert errors.worst(tolerance) == ("v", "w")
    assert not errors.within(tolerance), "a NaN is not within any tolerance"
    assert parity.compare(expected, expected).within(parity.Tolerance(0, 0))


def test_twice_the_rounding_error_of_one_device_is_allowed():
    ones = np.ones(3)
    exact, one, mesh, far = (
        parity.Numbers(ones, ones, {"v": np.full(4, value)}, {})
        for value in (1.0, 1.04, 1.11, 1.15)
    )
    tolerance = parity.TOLERANCES["bfloat16"]
    assert not parity.compare(mesh, one).within(tolerance)
    assert parity.compare(mesh, one, exact).within(tolerance)
    assert not parity.compare(far, one, exact).within(tolerance)
