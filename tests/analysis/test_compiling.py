"""The partitioner's text, of a program that was compiled before too."""

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.analysis.compiling import compile_with_spmd_text


def lowered():
    mesh = jaxtp.make_mesh(tp=4)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("tp")))
    with jax.set_mesh(mesh):
        return jax.jit(lambda x: (2 * x).sum()).lower(x)


def test_a_program_that_jax_has_compiled_before_has_a_text(tmp_path):
    usual = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    try:
        lowered().compile()
        compiled, text = compile_with_spmd_text(lowered())
    finally:
        jax.config.update("jax_compilation_cache_dir", usual)
        compilation_cache.reset_cache()
    assert "all-reduce" in text
    x = jax.device_put(jnp.ones((8, 8)), compiled.input_shardings[0][0])
    assert float(compiled(x)) == 128
