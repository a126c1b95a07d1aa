"""Sixteen virtual CPU devices, and a compilation cache that survives the run."""

import os
from pathlib import Path

# Compiles in less than half the time, the same program; tests spend most of theirs compiling.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 16)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(autouse=True)
def _no_mesh_left_behind():
    yield
    assert jax.sharding.get_abstract_mesh().empty, "a test left its mesh in context"
