"""The self-check of devices: right ones pass, and each planted fault is named with its device."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from support import swept
from tables import read_table

from jaxtp.collectives import axis_index
from jaxtp.config.entry import NumericsError
from jaxtp.config.schema import ConfigError
from jaxtp.guards import doctor, known_versions, self_check
from jaxtp.guards.finding import conclude, findings
from jaxtp.guards.self_check import (
    check_collectives,
    check_devices,
    check_outside_of_jit,
    operations,
)
from jaxtp.mesh import make_mesh
from jaxtp.train import setup
from jaxtp.train.__main__ import main


def texts(findings, verdict="WRONG"):
    """Returns the texts of findings with a verdict."""
    return [finding.text for finding in findings if finding.verdict == verdict]


@swept("dtype", ["float32", "bfloat16"], "bfloat16")
def test_right_devices_pass(dtype):
    found = list(check_devices(make_mesh(fsdp=2, tp=2, cp=2), (dtype,)))
    assert texts(found) == []
    assert [finding.text[:9] for finding in found] == ["8 devices"] * 5


def planted(monkeypatch, name, run):
    """Has one operation computed in another way on devices, and alone."""
    case = operations(("float32",))[name]
    fault = replace(case, run=run, on_host=lambda *_: case.expected)
    monkeypatch.setattr(self_check, "operations", lambda dtypes: {name: fault})


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("a product in float32", lambda a, b: a[:, :-1] @ b[:-1]),
        ("a sum over a long axis", lambda x: x[:, :-64].sum(-1)),
        ("a scatter-add", lambda rows, index: jnp.zeros((64, 64)).at[index].set(rows)),
    ],
)
def test_a_wrong_operation_is_named(monkeypatch, name, run):
    planted(monkeypatch, name, run)
    (text,) = texts(check_outside_of_jit(make_mesh(), ("float32",)))
    assert f"device 0 of process 0 (cpu) computes {name} outside of jit wrong" in text
    (finding,) = check_devices(make_mesh(), ("float32",))
    assert f"device 0 of process 0 (cpu) computes {name} wrong" in str(finding.error)
    assert finding.exit_code == 3


def test_a_wrong_operation_is_explained_by_a_version_that_is_known_to_be_bad(monkeypatch):
    planted(monkeypatch, "an elementwise operation", lambda x: x * 0)
    monkeypatch.setattr(self_check, "versions_here", lambda: {"jax": "0.11.1"})
    everywhere = replace(known_versions.TABLE[0], devices="")
    monkeypatch.setattr(known_versions, "TABLE", (everywhere,))
    (text,) = texts(check_outside_of_jit(make_mesh(), ("float32",)))
    assert "\nWARNING jax 0.11.1, " in text
    assert "40633" in text


def test_all_devices_that_are_wrong_are_named(monkeypatch):
    def wrong_on_two(x):
        return x.sum(-1) * (1 + 0.01 * (axis_index("tp") >= 2))

    planted(monkeypatch, "a sum over a long axis", wrong_on_two)
    found = texts(check_devices(make_mesh(tp=4), ("float32",)))
    assert [text.partition(" of process")[0] for text in found] == ["device 2", "device 3"]
    assert "off by 1.0e-02" in found[0]


def test_a_program_that_does_not_run_is_a_finding(monkeypatch, tmp_path):
    def broken(x):
        raise RuntimeError("out of resources")

    planted(monkeypatch, "an elementwise operation", broken)
    settings = {"dtypes": ("float32",), "attention": ()}
    stages = list(doctor.examine(make_mesh(), {}, lambda: tmp_path, **settings))
    assert [finding.text for stage in stages for finding in stage if finding.error] == [
        "out of resources"
    ] * 2


def test_a_run_whose_devices_compute_wrong_makes_no_folder(monkeypatch):
    planted(monkeypatch, "an elementwise operation", lambda x: 2 * x)

    def folder():
        raise AssertionError("it was made")

    stages = doctor.examine(make_mesh(), {}, folder, dtypes=("float32",), attention=())
    with pytest.raises(NumericsError, match="an elementwise operation"):
        conclude(stages)


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
    found = list(check_collectives(make_mesh(fsdp=2)))
    assert texts(found)
    assert all(f"by {collective} over mesh.fsdp" in text for text in texts(found))
    assert len(texts(found, "ok")) == 4


def test_collectives_are_right_over_every_axis():
    for mesh in (make_mesh(dp=2, cp=2), make_mesh(fsdp=3, tp=2)):
        found = list(check_collectives(mesh))
        assert [finding.verdict for finding in found] == ["ok"] * 10


def test_the_numbers_that_collectives_sum_are_exact_for_a_thousand_devices():
    numbers = self_check.exact_numbers(1024, 1024)
    assert numbers.sum(0, dtype=np.float64).max() < 2**24
    assert numbers.shape[1] % 1024 == 0


@pytest.mark.parametrize("checked", ["check_devices", "check_outside_of_jit", "check_attention"])
@pytest.mark.parametrize(
    ("platform", "flags", "code"),
    read_table(__file__),
)
def test_a_run_checks_its_gpus_unless_self_check_is_off(
    checked, platform, flags, code, command, monkeypatch, capsys
):
    def broken(*_):
        return findings("devices", "all", [NumericsError("device 0 is wrong")])

    def reached(*_):
        raise ConfigError("the folder is locked next")

    monkeypatch.setattr(setup, "platform_of", lambda device: platform)
    monkeypatch.setattr(doctor, checked, broken)
    monkeypatch.setattr(setup.run_folder, "locked", reached)
    assert main([*command, *flags]) == code
    assert (
        "device 0 is wrong" if code == 3 else "the folder is locked next"
    ) in capsys.readouterr().err
