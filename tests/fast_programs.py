"""Makes programs compile fast, keeps their partitioned text, and draws random numbers cheaply.
`--as-users` leaves all three as users have them.
"""

import hashlib
import itertools
import json
import os
import re
import sys
import tempfile
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from environment import USERS_XLA_FLAGS
from jax._src.interpreters import mlir as mlir_of_jax
from jax.extend.core.primitives import threefry2x32_p
from jax.interpreters import mlir

from jaxtp.analysis import compiling
from jaxtp.config.files import write_atomically

_PLACES = re.compile(r'"[^"\n]*/(?:jaxtp|site-packages)/[^"\n]*":\d+:\d+(?: to (?:\d+)?:\d+)?')
"""Lines of the package and of libraries in the text of a program. A program stays the same if they
move, or if the package lies elsewhere."""


def compile_fast():
    """Turns XLA's optimizations off. The partitioning and the mathematics stay the same.

    Tests spend most of their time compiling, and this takes less than half of the time. The
    emitters that jaxlib 0.10 still has beside its new ones take half of that again.
    """
    flags = [
        USERS_XLA_FLAGS,
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    if version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags)
    if version("jax").startswith("0.10."):
        mlir_of_jax.make_ir_context = one_context_for_many(mlir_of_jax.make_ir_context)


def keep_partitioned_texts():
    """Keeps the text of a program beside the program in JAX's cache, and what the compiler warned
    of, so that a program with a text is compiled once too.
    """
    compile_and_dump = compiling.compile_and_dump

    def read_or_dump(lowered, options):
        folder = jax.config.jax_compilation_cache_dir
        if not folder:
            return compile_and_dump(lowered, options)
        options = dict(options or {})
        program = _PLACES.sub("", lowered.as_text(debug_info=True))
        flags = os.environ.get("XLA_FLAGS")
        key = repr((version("jaxlib"), flags, sorted(options.items()), program))
        digest = hashlib.sha256(key.encode()).hexdigest()
        place = Path(folder) / f"partitioned-{digest}.json"
        if place.exists():
            text, warnings = json.loads(place.read_text())
            os.write(2, warnings.encode())
            return lowered.compile(compiler_options=options), text
        with captured_stderr() as lines:
            compiled, text = compile_and_dump(lowered, options)
        warnings = "".join(lines)
        os.write(2, warnings.encode())
        if text:
            write_atomically(place, json.dumps([text, warnings]).encode())
        return compiled, text

    compiling.compile_and_dump = read_or_dump


@contextmanager
def captured_stderr():
    """Collects lines on stderr, also from the compiler's C++."""
    lines = []
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


def one_context_for_many(make_context):
    """Returns a function that makes one MLIR context for a hundred programs.

    JAX 0.10 makes one for each program, which takes five of the six milliseconds of lowering a
    small program.
    """
    contexts = itertools.chain.from_iterable(
        itertools.repeat(make_context(), 100) for _ in itertools.count()
    )
    return lambda: next(contexts)


def use_cheap_random_bits():
    """Replaces Threefry, which takes half of the time of a program that draws weights."""
    cheap = mlir.lower_fun(random_bits, multiple_results=True)
    mlir.register_lowering(threefry2x32_p, cheap, platform="cpu")


def random_bits(key_1, key_2, count_1, count_2):
    """Returns two words that depend on key and counter, as Threefry does, without its twenty
    rounds.
    """
    key = key_1 * np.uint32(0x9E3779B1) + key_2 * np.uint32(0x85EBCA77)
    word = key + count_1 * np.uint32(0xC2B2AE3D) + count_2
    words = []
    for constant in (0x27D4EB2F, 0x165667B1):
        mixed = word ^ np.uint32(constant)
        mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        words.append(mixed ^ (mixed >> np.uint32(16)))
    return words
