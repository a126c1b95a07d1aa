"""Compiling a step so that the partitioner's own text can be read."""

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache


def compile_with_spmd_text(lowered: Any, options: Mapping[str, bool | int | str] | None = None) -> tuple[Any, str]:
    """Compiles what `jax.jit(f).lower(...)` gave.

    Args:
      lowered: a `jax.stages.Lowered`.
      options: XLA's compiler options.

    Returns:
      The `jax.stages.Compiled`, and the HLO text after SPMD partitioning, before any pass for one kind of device; on
      a single device nothing is partitioned, and the text is that before all passes.
    """
    with tempfile.TemporaryDirectory() as folder, _no_compilation_cache():
        dump = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
            "xla_dump_hlo_pass_re": "spmd-partitioning",
        }
        compiled = lowered.compile(compiler_options={**(options or {}), **dump})
        (text,) = _find(folder, r"after_(tpu-)?spmd-partitioning\.") or _find(folder, r"\.before_optimizations\.txt$")
        return compiled, text.read_text()


def _find(folder: str, pattern: str) -> list[Path]:
    return [path for path in Path(folder).iterdir() if re.search(pattern, path.name)]


@contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """A step found in the persistent cache is not compiled, and leaves no text."""
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether the cache is used is decided once, until this
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
