"""The partitioner's text: of a program that was compiled before too, and with what the compiler warned of."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.analysis import compiling
from jaxtp.analysis.compiling import captured_stderr, compile_with_spmd_text


@pytest.fixture
def cache(tmp_path):
    """An empty compilation cache, which is JAX's for this test."""
    usual = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", usual)
    compilation_cache.reset_cache()


def lowered(factor):
    mesh = jaxtp.make_mesh(tp=4)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("tp")))
    with jax.set_mesh(mesh):
        return jax.jit(lambda x: (factor * x).sum()).lower(x)


def test_the_text_is_kept_by_the_program(cache, monkeypatch):
    count = []
    compile_and_dump = compiling._compile_and_dump
    monkeypatch.setattr(compiling, "_compile_and_dump", lambda *args: (count.append(args), compile_and_dump(*args))[1])
    cases = [(2.0, None), (2.0, None), (3.0, None), (2.0, {"xla_backend_optimization_level": 0})]
    (again, first), (compiled, second), (_, other), (_, less) = (
        compile_with_spmd_text(lowered(factor), options) for factor, options in cases
    )
    assert len(count) == 3, "the second is the first"
    assert "all-reduce" in first
    assert second == first != other
    assert "all-reduce" in less
    x = jax.device_put(jnp.ones((8, 8)), compiled.input_shardings[0][0])
    assert float(compiled(x)) == float(again(x)) == 128


def test_a_program_that_jax_has_compiled_before_has_a_text(cache):
    lowered(2.0).compile()
    assert "all-reduce" in compile_with_spmd_text(lowered(2.0))[1]


def test_a_warning_of_the_compiler_is_given_each_time(cache, monkeypatch):
    warning = "E0000 [SPMD] Involuntary full rematerialization\n"
    compile_and_dump = compiling._compile_and_dump
    monkeypatch.setattr(
        compiling, "_compile_and_dump", lambda *args: (os.write(2, warning.encode()), compile_and_dump(*args))[1]
    )
    for _ in range(2):
        with captured_stderr() as printed:
            compile_with_spmd_text(lowered(2.0))
        assert printed == [warning]
