"""Compiling a step and reading the partitioner's output."""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled

from jaxtp.config.files import write_atomically
from jaxtp.distributed.environment import xla_flags

Options = Mapping[str, bool | int | str]


def compile_with_spmd_text(lowered: Any, options: Options | None = None) -> tuple[Compiled, str]:
    """Returns the compiled program and its HLO text after SPMD partitioning.

    The text precedes backend-specific passes; on a single device, which has no partitioning, it
    precedes all passes. JAX's persistent compilation cache, if any, also keeps the text and the
    compiler's output, so a cached program is not compiled again, and its warnings are repeated.
    """
    place = _place_of_text(lowered, options)
    if place and place.exists():
        stored = json.loads(place.read_text())
        os.write(2, stored["printed"].encode())
        return lowered.compile(compiler_options=dict(options or {})), stored["text"]
    with captured_stderr() as printed:
        compiled, text = _compile_and_dump(lowered, options)
        if not text:  # the program came from the persistent cache, so the compiler printed no text
            with _no_compilation_cache():
                compiled, text = _compile_and_dump(lowered, options)
    output = "".join(printed)
    os.write(2, output.encode())
    if place:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, json.dumps({"text": text, "printed": output}).encode())
    return compiled, text


@contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """Collects lines on stderr, also from the compiler's C++."""
    lines: list[str] = []
    sys.stderr.flush()
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            lines += file.readlines()


def _compile_and_dump(lowered: Any, options: Options | None) -> tuple[Compiled, str]:
    # The text is empty if the program came from the cache.
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


def _place_of_text(lowered: Any, options: Options | None) -> Path | None:
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if not folder or not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined]
        return None
    versions = (jax.__version__, jaxlib.version.__version__, jax.default_backend(), xla_flags())
    program = lowered.as_text(debug_info=True)
    described = repr((versions, sorted((options or {}).items()), program))
    return Path(folder) / f"partitioned-{hashlib.sha256(described.encode()).hexdigest()}.json"


@contextmanager
def _no_compilation_cache() -> Iterator[None]:
    # A program found in the persistent cache is not compiled, and leaves no text.
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX decides only once whether to use the cache, until a reset
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
