import math
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

import jaxtp
from jaxtp import mesh as meshes
from jaxtp.distributed.devices import request_virtual_devices
from jaxtp.mesh import (
    AXES,
    MeshError,
    current_mesh,
    fitting_meshes,
    is_number_configured,
    mesh_shape,
    mesh_sizes,
)


class FakeGPU:
    """A device with the attributes that the check of the count reads."""

    platform = "gpu"
    device_kind = "NVIDIA H100"


def test_axes_and_sizes():
    mesh = jaxtp.make_mesh(dp=2, fsdp=2, cp=2, tp=2)
    assert mesh.axis_names == ("dp", "fsdp", "cp", "tp")
    assert mesh_sizes(mesh) == {"dp": 2, "fsdp": 2, "cp": 2, "tp": 2}


def test_tp_neighbours_are_neighbouring_devices():
    mesh = jaxtp.make_mesh(dp=2, tp=4)
    ids = [[device.id for device in row] for row in mesh.devices[:, 0, 0]]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_minus_one_takes_what_is_left():
    assert mesh_sizes(jaxtp.make_mesh(dp=-1, tp=4)) == mesh_shape(dp=jax.device_count() // 4, tp=4)


def test_a_smaller_mesh_takes_the_first_devices():
    assert [device.id for device in jaxtp.make_mesh(tp=2).devices.flat] == [0, 1]


@pytest.mark.parametrize(
    "sizes",
    [{"tp": 0}, {"dp": -2}, {"dp": -1, "tp": -1}, {"tp": 3, "dp": -1}, {"tp": "2"}, {"tp": 2.0}, {"fsdp": None}],
)
def test_impossible_sizes(sizes):
    with pytest.raises(MeshError, match="|".join(f"{axis}[= ]" for axis in sizes)):
        jaxtp.make_mesh(**sizes)


@pytest.mark.parametrize("devices", [[], [0, 0]])
def test_a_mesh_of_no_device_or_of_one_twice_is_refused(devices):
    with pytest.raises(MeshError, match="one or more distinct devices"):
        jaxtp.make_mesh(tp=len(devices) or 1, devices=[jax.devices()[i] for i in devices])


def test_too_large_for_the_gpus_lists_the_meshes_that_fit():
    with pytest.raises(MeshError, match=r"needs 16 devices, and there are 8 \(NVIDIA H100\).*\(1, 1, 1, 8\)"):
        jaxtp.make_mesh(tp=16, devices=[FakeGPU() for _ in range(8)])


def test_too_late_for_virtual_devices_says_what_to_do():
    jax.devices()
    with pytest.raises(
        MeshError, match=r'before any other JAX operation, or jax.config.update\("jax_num_cpu_devices", 32\)'
    ):
        jaxtp.make_mesh(tp=32)


def test_more_virtual_devices_than_are_made_are_refused_for_their_number():
    with pytest.raises(MeshError, match=r"needs 1000000 devices.*the limit of virtual CPU devices is 1024"):
        jaxtp.make_mesh(dp=1_000_000)


def test_of_many_meshes_some_are_listed_those_of_powers_of_two_first():
    with pytest.raises(MeshError, match=r"\(dp, fsdp, cp, tp\): \(\d+, \d+, 1, 1\), .*, \.\.\.$") as error:
        jaxtp.make_mesh(tp=999, devices=[FakeGPU() for _ in range(720)])
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("devices", [1, 2, 6, 8, 24])
def test_fitting_meshes_use_every_device(devices):
    meshes = fitting_meshes(devices)
    assert meshes
    assert all(math.prod(sizes.values()) == devices for sizes in meshes)
    assert len({tuple(sizes.items()) for sizes in meshes}) == len(meshes)


@pytest.mark.parametrize(
    ("axes", "kind", "problem"),
    [
        (("model",), jax.sharding.AxisType.Auto, r"lacks \['dp', 'fsdp', 'cp', 'tp'\]"),
        (
            AXES,
            jax.sharding.AxisType.Explicit,
            r"\('dp', 'fsdp', 'cp', 'tp'\) .* AxisType.Explicit, .*make_mesh",
        ),
    ],
    ids=["axes", "types"],
)
def test_a_mesh_of_other_axes_is_refused(axes, kind, problem):
    mesh = jax.make_mesh((1,) * len(axes), axes, devices=jax.devices()[:1], axis_types=(kind,) * len(axes))
    with jax.set_mesh(mesh), pytest.raises(MeshError, match=problem):
        current_mesh()


def test_indivisible_input_names_layer_dim_and_nearest_sizes():
    with jax.set_mesh(jaxtp.make_mesh(dp=2, fsdp=2)):
        layer = jaxtp.ColumnParallelLinear(4, 8, rngs=nnx.Rngs(0))
        with pytest.raises(
            ValueError,
            match=r"column_parallel_linear: dim 0 .* is 3, not divisible by dp=2 x fsdp=2; nearest: 4",
        ):
            layer(jax.numpy.ones((3, 5, 4)))


def test_indivisible_weight_is_refused_not_replicated():
    with (
        jax.set_mesh(jaxtp.make_mesh(tp=4)),
        pytest.raises(ValueError, match=r"kernel: dim 1 .* is 6, not divisible by tp=4; nearest: 4 or 8"),
    ):
        jaxtp.ColumnParallelLinear(4, 6, rngs=nnx.Rngs(0))


class FakeJax:
    """JAX before its backend has started."""

    def __init__(self, processes=1):
        self.config = SimpleNamespace(jax_num_cpu_devices=-1, update=self._update)
        self.distributed = SimpleNamespace(is_initialized=lambda: processes > 1)

    def _update(self, name, value):
        setattr(self.config, name, value)


@pytest.fixture
def fake_jax(monkeypatch):
    def install(processes=1):
        fake = FakeJax(processes)
        monkeypatch.setattr("jaxtp.mesh.jax", fake)
        monkeypatch.setattr("jaxtp.mesh._numbers_of_devices", set())
        return fake

    return install


def test_no_more_virtual_devices_are_asked_for_than_can_be_had(fake_jax):
    """A billion virtual devices would take all memory."""
    jax = fake_jax()
    request_virtual_devices(10**9)
    assert jax.config.jax_num_cpu_devices == -1


@pytest.mark.parametrize(("asked", "made"), [(1, 8), (2, 8), (3, 9), (5, 10), (8, 8), (12, 12)])
def test_there_are_virtual_devices_for_a_later_mesh_and_for_an_axis_of_minus_one(fake_jax, asked, made):
    jax = fake_jax()
    assert not is_number_configured()
    request_virtual_devices(asked)
    assert jax.config.jax_num_cpu_devices == made
    assert not is_number_configured()
    request_virtual_devices(16)
    assert jax.config.jax_num_cpu_devices == made


def test_one_of_several_processes_has_no_spare_devices(fake_jax):
    jax = fake_jax(processes=2)
    meshes.request_virtual_devices(3)
    assert jax.config.jax_num_cpu_devices == 3


def test_a_number_of_devices_that_the_user_set_stays(fake_jax):
    jax = fake_jax()
    jax.config.jax_num_cpu_devices = 2
    request_virtual_devices(4)
    assert jax.config.jax_num_cpu_devices == 2
    assert is_number_configured()


LATER = """
import jax
import jaxtp
print(jaxtp.make_mesh(tp=2).shape["tp"])
print(jaxtp.make_mesh(fsdp=2, tp=4).size)
print(jaxtp.make_mesh(fsdp=-1, tp=2).shape["fsdp"])
"""


@pytest.mark.journey
def test_a_later_mesh_may_be_larger():
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", LATER], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["2", "8", "4"]


@pytest.mark.parametrize("size", [0, -1, 4.0, "4", None])
@pytest.mark.parametrize(
    "layer",
    [
        lambda size: jaxtp.ColumnParallelLinear(4, size, rngs=nnx.Rngs(0)),
        lambda size: jaxtp.ColumnParallelLinear(size, (4, 4), rngs=nnx.Rngs(0)),
        lambda size: jaxtp.RowParallelLinear(4, size, rngs=nnx.Rngs(0)),
        lambda size: jaxtp.VocabParallelEmbedding(size, 4, rngs=nnx.Rngs(0)),
        lambda size: jaxtp.Norm(size),
    ],
    ids=["column", "column input", "row", "embedding", "norm"],
)
def test_a_size_that_is_no_size_is_named(layer, size):
    with pytest.raises(ValueError, match=rf"={size!r}: should be a whole number, 1 or more"):
        layer(size)


def test_sizes_of_numpy_are_sizes():
    column = jaxtp.ColumnParallelLinear(np.int64(4), np.int64(8), rngs=nnx.Rngs(0))
    assert column(np.ones((2, 3, 4), np.float32)).shape == (2, 3, 8)
