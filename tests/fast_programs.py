"""Makes programs compile fast, and draw random numbers cheaply. `--as-users` leaves both as
users have them.
"""

import itertools
import os
from importlib.metadata import version

import numpy as np
from environment import USERS_XLA_FLAGS
from jax._src.interpreters import mlir as mlir_of_jax
from jax.extend.core.primitives import threefry2x32_p
from jax.interpreters import mlir


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
