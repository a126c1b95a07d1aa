"""The partitioner's text: of a program that was compiled before too, and with what the compiler
warned of."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
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


class Watched:
    """A lowered program that counts its compilations with a text, in each of which the compiler
    warns."""

    def __init__(self, program):
        self.program = program
        self.compiled = 0

    def as_text(self, **options):
        return self.program.as_text(**options)

    def compile(self, compiler_options):
        if "xla_dump_to" in compiler_options:
            self.compiled += 1
            os.write(2, WARNING.encode())
        return self.program.compile(compiler_options=compiler_options)


WARNING = "E0000 [SPMD] Involuntary full rematerialization\n"


def test_the_text_is_kept_by_the_program_and_its_options(cache):
    cases = [(2.0, None), (2.0, None), (3.0, None), (2.0, {"xla_backend_optimization_level": 0})]
    programs = [Watched(lowered(factor)) for factor, _ in cases]
    (again, first), (compiled, second), (_, other), (_, less) = (
        compile_with_spmd_text(program, options)
        for program, (_, options) in zip(programs, cases, strict=True)
    )
    assert [program.compiled for program in programs] == [1, 0, 1, 1], "the second is the first"
    assert "all-reduce" in first
    assert second == first != other
    assert "all-reduce" in less
    x = jax.device_put(jnp.ones((8, 8)), compiled.input_shardings[0][0])
    assert float(compiled(x)) == float(again(x)) == 128


def test_a_program_that_jax_has_compiled_before_has_a_text(cache):
    lowered(2.0).compile()
    assert "all-reduce" in compile_with_spmd_text(lowered(2.0))[1]


def test_a_warning_of_the_compiler_is_given_each_time(cache):
    for _ in range(2):
        with captured_stderr() as printed:
            compile_with_spmd_text(Watched(lowered(2.0)))
        assert printed == [WARNING]
