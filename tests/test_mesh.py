import math
import os
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from runs import run_program
from support import use_mesh
from tables import read_table

from jaxtp import (
    AttentionConfig,
    CausalSelfAttention,
    ColumnParallelLinear,
    Decoder,
    ModelConfig,
    Norm,
    RowParallelLinear,
    VocabParallelEmbedding,
    make_mesh,
)
from jaxtp.distributed.devices import request_virtual_devices
from jaxtp.layers.gated_delta import GatedDeltaConfig, GatedDeltaNet
from jaxtp.mesh import (
    AXES,
    MeshError,
    abstract_mesh,
    as_mesh,
    current_mesh,
    fitting_meshes,
    is_number_configured,
    mesh_shape,
    mesh_sizes,
    platform_of,
)

TABLES = read_table(__file__)


class FakeGPU:
    """A device with the attributes that the check of the count reads."""

    platform = "gpu"
    device_kind = "NVIDIA H100"


@pytest.mark.parametrize(
    ("kind", "version", "platform"),
    TABLES["gpus"],
)
def test_gpus_of_amd_are_no_gpus_of_nvidia(kind, version, platform):
    device = FakeGPU()
    device.device_kind = kind
    device.client = SimpleNamespace(platform_version=version)
    assert platform_of(device) == platform


def gpus(count):
    return [FakeGPU() for _ in range(count)]


def test_tp_neighbours_are_neighbouring_devices_from_the_first():
    ids = [[device.id for device in row] for row in make_mesh(dp=2, tp=4).devices[:, 0, 0]]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_minus_one_takes_what_is_left():
    assert mesh_sizes(make_mesh(dp=-1, tp=4)) == mesh_shape(dp=jax.device_count() // 4, tp=4)


@pytest.mark.parametrize(
    "sizes",
    TABLES["sizes"],
)
def test_impossible_sizes(sizes):
    with pytest.raises(MeshError, match="|".join(f"{axis}[= ]" for axis in sizes)):
        make_mesh(**sizes)


def test_axes_are_named():
    with pytest.raises(
        MeshError, match=r"make_mesh\(2, 1, 4\): .* make_mesh\(dp=2, fsdp=1, tp=4\)"
    ):
        make_mesh(2, 1, 4)


def test_a_mesh_is_one_however_it_is_given():
    mesh = make_mesh(fsdp=2, tp=4)
    with jax.set_mesh(mesh):
        assert as_mesh(None, "this") == mesh
    sizes = {"fsdp": 2, "tp": 4}
    for given in (mesh, sizes, "fsdp=2,tp=4", "fsdp=-1,tp=4,dp=2"):
        found = as_mesh(given, "this")
        assert found.shape["tp"] == 4
        assert found == mesh or found.size == jax.device_count()
    for given in (mesh, sizes, "fsdp=2,tp=4", mesh.abstract_mesh):
        assert as_mesh(given, "this", abstract=True) == abstract_mesh(mesh_shape(**sizes))
    assert as_mesh(mesh.abstract_mesh, "this") == mesh.abstract_mesh
    for wrong in (8, [2, 4], {"pp": 2}, "pp=2", {"tp": 0}):
        with pytest.raises(MeshError, match=r"this|pp|tp=0"):
            as_mesh(wrong, "this")


def test_a_decoder_outside_of_a_mesh_says_that_devices_are_idle():
    config = ModelConfig(d_model=16, num_layers=1)
    build = partial(Decoder, config, rngs=nnx.Rngs(0))
    with pytest.warns(UserWarning, match=r"one of \d+ devices.*jax\.set_mesh"):
        build()
    with warnings.catch_warnings(), jax.set_mesh(make_mesh()):
        warnings.simplefilter("error")
        build()
        nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("devices", [[], [0, 0]])
def test_a_mesh_of_no_device_or_of_one_twice_is_refused(devices):
    with pytest.raises(MeshError, match="one or more distinct devices"):
        make_mesh(tp=len(devices) or 1, devices=[jax.devices()[i] for i in devices])


TOO_LARGE = {
    r"needs 16 devices, and there are 8 \(NVIDIA H100\).*\(1, 1, 1, 8\)": {
        "tp": 16,
        "devices": gpus(8),
    },
    r'before any other JAX operation, or jax.config.update\("jax_num_cpu_devices", 32\)': {
        "tp": 32
    },
    r"needs 1000000 devices.*the limit of virtual CPU devices is 1024": {"dp": 1_000_000},
}


def test_a_mesh_that_is_too_large_says_what_can_be_done():
    jax.devices()
    for message, given in TOO_LARGE.items():
        with pytest.raises(MeshError, match=message):
            make_mesh(**given)


def test_of_many_meshes_some_are_listed_those_of_powers_of_two_first():
    with pytest.raises(
        MeshError, match=r"\(dp, fsdp, cp, tp\): \(\d+, \d+, 1, 1\), .*, \.\.\.$"
    ) as error:
        make_mesh(tp=999, devices=gpus(720))
    assert len(str(error.value)) < 400


def test_fitting_meshes_use_every_device():
    for devices in (1, 2, 6, 8, 24):
        found = [tuple(sizes.values()) for sizes in fitting_meshes(devices)]
        assert {math.prod(sizes) for sizes in found} == {devices}
        assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("axes", "kind", "problem"),
    [
        (("model",), "Auto", r"lacks \['dp', 'fsdp', 'cp', 'tp'\]"),
        (AXES, "Explicit", r"\('dp', 'fsdp', 'cp', 'tp'\) .* AxisType.Explicit, .*make_mesh"),
    ],
    ids=["axes", "types"],
)
def test_a_mesh_of_other_axes_is_refused(axes, kind, problem):
    kinds = (jax.sharding.AxisType[kind],) * len(axes)
    mesh = jax.make_mesh((1,) * len(axes), axes, devices=jax.devices()[:1], axis_types=kinds)
    with jax.set_mesh(mesh), pytest.raises(MeshError, match=problem):
        current_mesh()


def test_what_tp_does_not_divide_is_refused_not_replicated():
    with use_mesh(dp=2, fsdp=2, tp=4):
        with pytest.raises(
            ValueError, match=r"kernel: dim 1 .* is 6, not divisible by tp=4; nearest: 4 or 8"
        ):
            ColumnParallelLinear(4, 6, rngs=nnx.Rngs(0))
        layer = ColumnParallelLinear(4, 8, rngs=nnx.Rngs(0))
        with pytest.raises(
            ValueError,
            match=r"column_parallel_linear: dim 0 .* is 3, not .* dp=2 x fsdp=2; nearest: 4",
        ):
            layer(np.ones((3, 5, 4)))


@pytest.fixture
def start_jax(monkeypatch):
    """Returns JAX's configuration, as it is before its backend has started."""

    def install(processes=1, number=-1):
        config = SimpleNamespace(jax_num_cpu_devices=number)
        config.update = partial(setattr, config)
        distributed = SimpleNamespace(is_initialized=lambda: processes > 1)
        monkeypatch.setattr(
            "jaxtp.mesh.jax", SimpleNamespace(config=config, distributed=distributed)
        )
        monkeypatch.setattr("jaxtp.mesh._numbers_of_devices", set())
        return config

    return install


def test_no_more_virtual_devices_are_asked_for_than_can_be_had(start_jax):
    """A billion virtual devices would take all memory."""
    config = start_jax()
    request_virtual_devices(10**9)
    assert config.jax_num_cpu_devices == -1


def test_there_are_virtual_devices_for_a_later_mesh_and_for_an_axis_of_minus_one(start_jax):
    for asked, made in {1: 8, 2: 8, 3: 9, 5: 10, 8: 8, 12: 12}.items():
        config = start_jax()
        for number in (asked, 16):
            assert not is_number_configured()
            request_virtual_devices(number)
            assert config.jax_num_cpu_devices == made


def test_one_of_several_processes_has_no_spare_devices(start_jax):
    config = start_jax(processes=2)
    request_virtual_devices(3)
    assert config.jax_num_cpu_devices == 3


def test_a_number_of_devices_that_the_user_set_stays(start_jax):
    config = start_jax(number=2)
    request_virtual_devices(4)
    assert config.jax_num_cpu_devices == 2
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
    environment = {
        name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"
    }
    done = run_program(sys.executable, "-c", LATER, env=environment, check=True)
    assert done.stdout.split() == ["2", "8", "4"]


OF_SIZES = {
    "column": lambda size: ColumnParallelLinear(4, size, rngs=nnx.Rngs(0)),
    "column input": lambda size: ColumnParallelLinear(size, (4, 4), rngs=nnx.Rngs(0)),
    "row": lambda size: RowParallelLinear(4, size, rngs=nnx.Rngs(0)),
    "embedding": lambda size: VocabParallelEmbedding(size, 4, rngs=nnx.Rngs(0)),
    "norm": Norm,
}


@pytest.mark.parametrize("layer", OF_SIZES)
def test_a_size_that_is_no_size_is_named(layer):
    for size in (0, -1, 4.0, "4", None):
        with pytest.raises(ValueError, match=rf"={size!r}: should be a whole number, 1 or more"):
            OF_SIZES[layer](size)


def test_heads_that_do_not_divide_are_refused_by_their_layer():
    attention = AttentionConfig(num_heads=8, num_kv_heads=3)
    with pytest.raises(ValueError, match="num_heads=8 is not divisible by num_kv_heads=3"):
        CausalSelfAttention(16, attention, rngs=nnx.Rngs(0))
    delta = GatedDeltaConfig(delta_value_heads=4, delta_key_heads=0)
    with pytest.raises(ValueError, match=r"delta_value_heads=4 .* delta_key_heads=0"):
        GatedDeltaNet(16, delta, rngs=nnx.Rngs(0))


def test_sizes_of_numpy_are_sizes():
    column = ColumnParallelLinear(np.int64(4), np.int64(8), rngs=nnx.Rngs(0))
    assert column(np.ones((2, 3, 4), np.float32)).shape == (2, 3, 8)
