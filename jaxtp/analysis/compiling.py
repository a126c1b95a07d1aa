"""Compiling a step and reading the partitioner's output."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled

Options = Mapping[str, bool | int | str]


def compile_with_spmd_text(lowered: Any, options: Options | None = None) -> tuple[Compiled, str]:
    """Returns the compiled program and its HLO text after SPMD partitioning.

    The text precedes backend-specific passes; on a single device, which has no partitioning, it
    precedes all passes.
    """
    compiled, text = compile_and_dump(lowered, options)
    if not text:
        with _no_compilation_cache():
            return compile_and_dump(lowered, options)
    return compiled, text


def compile_and_dump(lowered: Any, options: Options | None) -> tuple[Compiled, str]:
    """Returns the program and its text, which is empty if JAX's persistent cache has the program.

    The compiler then does not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
            "xla_dump_hlo_pass_re": "spmd-partitioning",
        }
        compiled = lowered.compile(compiler_options={**(options or {}), **dump})
        endings = ("after_spmd-partitioning.*", "after_tpu-spmd-partitioning.*")
        for ending in (*endings, ".before_optimizations.txt"):
            for path in Path(folder).glob(f"*{ending}"):
                return compiled, path.read_text()
        return compiled, ""


@contextmanager
def _no_compilation_cache() -> Iterator[None]:
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX decides only once whether to use the cache, until a reset
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
