"""The allocator of GPU memory: options for JAX's CUDA plugin, and advice on its limits."""

import re

import jax
import pytest
from jaxlib import xla_client

from jaxtp.distributed import environment
from jaxtp.distributed.devices import (
    FRACTION,
    SMALLER_STEP,
    advice,
    choose_allocator,
    describe_out_of_memory,
    memory_fraction,
    most_bytes,
)

OPTIONS = "jax_pjrt_client_create_options"
GB = 10**9


@pytest.fixture
def options_after(tmp_path, monkeypatch):
    """Chooses an allocator on a machine with a GPU.

    Returns the options that JAX passes to its CUDA plugin when the backend starts.
    """
    from jax._src import xla_bridge  # the plugin itself registers by it

    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(environment, "NVIDIA", [tmp_path / "nvidiactl"])
    for variable in (FRACTION, "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)
    before = getattr(jax.config, OPTIONS)
    given = []
    monkeypatch.setattr(xla_client, "pjrt_plugin_initialized", lambda name: True)
    monkeypatch.setattr(
        xla_client, "make_c_api_client", lambda name, options, *_: given.append(options)
    )

    def choose(allocator):
        choose_allocator(allocator)
        xla_bridge.make_pjrt_c_api_client(
            "cuda", options=xla_client.generate_pjrt_gpu_plugin_options()
        )
        return given.pop()

    yield choose
    jax.config.update(OPTIONS, before)


def test_default_allocator_leaves_environment_unchanged(options_after, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "vmm")
    assert options_after("default")["allocator"] == "vmm"


def test_cuda_async_sets_allocator_and_pool_size(options_after, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    options = options_after("cuda_async")
    assert (options["allocator"], options["memory_fraction"]) == ("cuda_async", 0.85)
    assert type(options["memory_fraction"]) is float  # as text the plugin refuses it


def test_existing_variables_and_options_are_kept(options_after, monkeypatch):
    for variable in (FRACTION, "XLA_CLIENT_MEM_FRACTION"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "0.8")
            assert options_after("cuda_async")["memory_fraction"] == 0.8
            assert memory_fraction("cuda_async") == 0.8
    for before in ("use_tfrt_gpu_client:true;allocator:bfc", {"use_tfrt_gpu_client": "true"}):
        jax.config.update(OPTIONS, before)
        options = options_after("cuda_async")
        assert (options["allocator"], options["use_tfrt_gpu_client"]) == ("cuda_async", "true")


def test_no_options_are_set_without_a_gpu(tmp_path, monkeypatch):
    """The backend of a TPU ends at an unknown option."""
    before = getattr(jax.config, OPTIONS)
    monkeypatch.setattr(environment, "NVIDIA", [tmp_path / "nvidiactl"])
    choose_allocator("cuda_async")
    assert getattr(jax.config, OPTIONS) == before


ADVICE = [
    # The allocator, the peak in GB of 100, the fraction, and what is said of it.
    ("default", 80, 0.75, "None"),
    ("default", 95, 0.75, "5.0 GB to spare; 10.0 GB are advisable"),
    ("default", 101, 0.75, "None"),  # it does not fit, which is said elsewhere
    ("cuda_async", 95, 0.85, "None"),
    (
        "cuda_async",
        101,
        0.85,
        f"above the 100.0 GB .* Raise {FRACTION} from 0.85 to at most 0.9, .*{SMALLER_STEP}",
    ),
    (
        "cuda_async",
        80,
        0.95,
        f"{FRACTION}=0.95 leaves less than 10% of the memory outside of the pool",
    ),
]


def test_advice_depends_on_allocator_and_peak():
    for allocator, peak, fraction, said in ADVICE:
        assert re.search(said, str(advice(allocator, peak * GB, 100 * GB, fraction))), (
            allocator,
            peak,
        )


def test_cuda_async_step_may_exceed_the_pool_up_to_the_reserve():
    assert most_bytes("default", 75, 0.75) == 75
    assert most_bytes("cuda_async", 75, 0.75) == pytest.approx(90)
    assert most_bytes("cuda_async", 95, 0.95) == 95
    assert (
        memory_fraction("default", {})
        == memory_fraction("default", {"XLA_CLIENT_MEM_FRACTION": "x"})
        == 0.75
    )


def test_out_of_memory_error_suggests_remedies():
    error = jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 15354000000 bytes."
    )
    assert "memory is fragmented: --launch.allocator cuda_async" in describe_out_of_memory(
        error, "default"
    )
    assert SMALLER_STEP in describe_out_of_memory(error, "cuda_async")
    assert (
        describe_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: no such kernel"), "default")
        is None
    )
