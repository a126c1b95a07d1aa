"""The self-check of devices: right ones pass, and each planted fault is named with its device."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from support import swept

import jaxtp
from jaxtp.collectives import axis_index
from jaxtp.config.entry import NumericsError
from jaxtp.config.schema import ConfigError
from jaxtp.train import known_versions, self_check, setup
from jaxtp.train.__main__ import main
from jaxtp.train.self_check import (
    Operation,
    check_collectives,
    check_devices,
    check_outside_of_jit,
    operations,
)


@swept("dtype", ["float32", "bfloat16"], "bfloat16")
def test_right_devices_pass(dtype):
    assert "every device" in check_devices(jaxtp.make_mesh(fsdp=2, tp=2, cp=2), dtype)


def planted(monkeypatch, name, run):
    """Has one operation computed in another way on devices, and alone."""
    case = operations("float32")[name]
    fault = Operation(run, case.on_host, case.arguments, case.tolerance)
    monkeypatch.setattr(self_check, "operations", lambda dtype: {name: fault})


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("a product", lambda a, b: a[:, :-1] @ b[:-1]),
        ("a sum over a long axis", lambda x: x[:, :-64].sum(-1)),
        ("a scatter-add", lambda rows, index: jnp.zeros((64, 64)).at[index].set(rows)),
    ],
)
def test_a_wrong_operation_is_named(monkeypatch, name, run):
    planted(monkeypatch, name, run)
    with pytest.raises(
        NumericsError, match=rf"device 0 of process 0 \(cpu\) computes {name} outside of jit wrong"
    ):
        check_outside_of_jit(jaxtp.make_mesh(), "float32")
    with pytest.raises(
        NumericsError, match=rf"device 0 of process 0 \(cpu\) computes {name} wrong"
    ):
        check_devices(jaxtp.make_mesh(), "float32")


def test_a_wrong_operation_is_explained_by_a_version_that_is_known_to_be_bad(monkeypatch):
    planted(monkeypatch, "an elementwise operation", lambda x: x * 0)
    monkeypatch.setattr(self_check, "native_versions", lambda: {"jax": "0.11.1"})
    everywhere = replace(known_versions.TABLE[0], devices="")
    monkeypatch.setattr(known_versions, "TABLE", (everywhere,))
    with pytest.raises(
        NumericsError, match=r"(?s)outside of jit wrong: .*\nWARNING jax 0\.11\.1, .*40633"
    ):
        check_outside_of_jit(jaxtp.make_mesh(), "float32")


def test_the_one_device_that_is_wrong_is_named(monkeypatch):
    def wrong_on_one(x):
        return x.sum(-1) * (1 + 0.01 * (axis_index("tp") == 2))

    planted(monkeypatch, "a sum over a long axis", wrong_on_one)
    with pytest.raises(
        NumericsError,
        match=r"device 2 of process 0 .* a sum over a long axis wrong: .* off by 1.0e-02",
    ):
        check_devices(jaxtp.make_mesh(tp=4), "float32")


FAULTS = {
    "all-gather": ("all_gather", lambda x, axis: jnp.tile(x, 2)),
    "all-reduce": ("all_reduce", lambda x, axis: 2 * x),
    "reduce-scatter": ("reduce_scatter", lambda x, axis: x[: x.size // 2]),
    "all-to-all": ("all_to_all", lambda x, axis, split, join: x),
    "permute": ("permute", lambda x, axis: x),
}


@pytest.mark.parametrize("collective", FAULTS)
def test_a_wrong_collective_is_named_with_its_axis(monkeypatch, collective):
    name, fault = FAULTS[collective]
    monkeypatch.setattr(self_check, name, fault)
    with pytest.raises(
        NumericsError, match=rf"device \d of process 0 .* by {collective} over mesh\.fsdp"
    ):
        check_collectives(jaxtp.make_mesh(fsdp=2))


def test_collectives_are_right_over_every_axis():
    check_collectives(jaxtp.make_mesh(dp=2, cp=2))
    check_collectives(jaxtp.make_mesh(fsdp=3, tp=2))


def test_the_numbers_that_collectives_sum_are_exact_for_a_thousand_devices():
    numbers = self_check.exact_numbers(1024, 1024)
    assert numbers.sum(0, dtype=np.float64).max() < 2**24
    assert numbers.shape[1] % 1024 == 0


@pytest.mark.parametrize("checked", ["check_devices", "check_outside_of_jit", "check_attention"])
@pytest.mark.parametrize(
    ("platform", "flags", "code"),
    [("cuda", [], 3), ("cuda", ["--launch.no-self-check"], 2), ("cpu", [], 2)],
)
def test_a_run_checks_its_gpus_unless_self_check_is_off(
    checked, platform, flags, code, command, monkeypatch, capsys
):
    def wrong(mesh, dtype):
        raise NumericsError("device 0 is wrong")

    def reached(*_):
        raise ConfigError("the folder is locked next")

    monkeypatch.setattr(setup, "platform_of", lambda device: platform)
    monkeypatch.setattr(self_check, checked, wrong)
    monkeypatch.setattr(setup.run_folder, "locked", reached)
    assert main([*command, *flags]) == code
    assert (
        "device 0 is wrong" if code == 3 else "the folder is locked next"
    ) in capsys.readouterr().err
