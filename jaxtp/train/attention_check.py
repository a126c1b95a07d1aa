"""Checks the kernels of attention on the devices that a run has, before it starts.

Kernels have been wrong on one model of GPU, or under one kind of mask, without a word. So the kernel that a run is
about to use computes a small problem of the run's own shape on the first device of each process, forward and backward,
and is compared with plain products in float32.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jaxtp.config import ConfigError
from jaxtp.layers.kernels import KERNELS, Use, chosen
from jaxtp.mesh import TP, mesh_sizes, platform_of
from jaxtp.train.config import TrainConfig, run_uses

MOST_TOKENS = 1024
"""Tokens of the problem, at most: several blocks of every kernel."""

TOLERANCE = {"float32": 5e-3, "float16": 1e-2, "bfloat16": 4e-2}
"""Largest error by compute dtype, relative in the norm. Float32 may be multiplied in TF32, which has 10 bits."""

_RESULTS = ("its output", "its gradient of the queries", "its gradient of the keys", "its gradient of the values")


def check_attention(config: TrainConfig, mesh: Mesh, *, on_cpu: bool = False) -> None:
    """Checks every kernel of attention that a run takes; a second's worth.

    Args:
      config: the run.
      mesh: its devices.
      on_cpu: CPUs, on which everything is made of plain products, are checked too.

    Raises:
      ConfigError: a kernel does not run, or gives something else than plain products.
    """
    device = mesh.local_devices[0]
    platform = platform_of(device)
    if platform == "cpu" and not on_cpu:
        return
    blocks = config.model.block_kinds()
    for block, use in dict(zip(blocks, run_uses(config, platform), strict=True)).items():
        kernel, _ = chosen(config.model.attention, use)
        try:
            with jax.default_device(device):
                errors = relative_errors(kernel.run, use, *block.heads.on_device(mesh_sizes(mesh)[TP]))
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as reason:
            raise ConfigError(
                f"model.attention: the kernel {kernel.name} does not run on {device.device_kind}: "
                f"{str(reason).partition(chr(10))[0]}; try --model.attention blockwise"
            ) from reason
        for what, error in zip(_RESULTS, errors, strict=True):
            if error <= (most := TOLERANCE[str(use.dtype)]):  # what is not a number is not
                continue
            raise ConfigError(
                f"model.attention: the kernel {kernel.name} is wrong on {device.device_kind}: {what} is off by "
                f"{error:.1e} of its norm, and {use.dtype} explains {most:.0e}; try --model.attention blockwise"
            )


def relative_errors(run: Callable[..., Array], use: Use, num_queries: int, num_keys: int) -> list[float]:
    """Returns the errors of a kernel's output and gradients for so many heads, relative in the norm."""
    arrays, settings = problem(use, num_queries, num_keys)
    found = jax.jit(partial(results, run, settings))(*arrays)
    with jax.default_matmul_precision("highest"):
        plain = partial(results, KERNELS["xla"].run, settings)
        right = jax.jit(plain)(*(array.astype(jnp.float32) for array in arrays))
    off = [jnp.linalg.norm(f.astype(jnp.float32) - r) / jnp.linalg.norm(r) for f, r in zip(found, right, strict=True)]
    return [float(error) for error in off]


def problem(use: Use, num_queries: int, num_keys: int) -> tuple[list[Array], dict[str, Any]]:
    """Returns queries, keys, values and a gradient of the output, and what else a kernel is called with."""
    length = min(int(use.length or MOST_TOKENS), MOST_TOKENS)
    heads = (num_queries, num_keys, num_keys, num_queries)
    keys = jax.random.split(jax.random.key(0), len(heads))
    shapes = [(1, length, count, use.head_dim) for count in heads]
    arrays = [jax.random.normal(key, shape, use.dtype) for key, shape in zip(keys, shapes, strict=True)]
    # Documents that end anywhere, and padding, as rows have them.
    ends = jnp.array([length // 5, length // 2, length - length // 7])
    segments = jnp.searchsorted(ends, jnp.arange(length), side="right") + 1
    documents = jnp.where(segments > len(ends), 0, segments)[None].astype(jnp.int32) if use.packed else None
    window = use.window and max(1, min(use.window, length // 4))  # shorter than the documents
    return arrays, {
        "segments_BT": documents,
        "scale": use.head_dim**-0.5,
        "window": window,
        "softcap": use.softcap,
    }


def results(
    run: Callable[..., Array], settings: Mapping[str, Any], q: Array, k: Array, v: Array, dy: Array
) -> tuple[Array, ...]:
    """Returns the output of a kernel, and the gradients of queries, keys and values."""
    y, gradients = jax.vjp(lambda q, k, v: run(q, k, v, **settings), q, k, v)
    return (y, *gradients(dy))
