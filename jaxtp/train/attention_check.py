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
from jaxtp.layers.activations import Part
from jaxtp.layers.kernels import KERNELS, Use, chosen
from jaxtp.mesh import TP, mesh_sizes, platform_of
from jaxtp.train.config import TrainConfig, run_uses

MOST_TOKENS, LEAST_TOKENS = 1024, 16
"""Tokens of the problem: several blocks of every kernel, and some that see others."""

TOLERANCE = {"float32": 5e-3, "float16": 1e-2, "bfloat16": 2e-2}
"""Largest error by compute dtype, relative in the norm. Float32 may be multiplied in TF32, which has 10 bits."""

STRETCH = 16
"""Tokens of a stretch. Each may be off by twice as much: a wrong edge is lost in the norm of everything."""

CHUNKS, HALO = 7, 5
"""Chunks of a sequence, of which a part has every other, and keys that lie before it."""

_LITTLE = 0.1
"""Share of the root mean square of the output's gradient under which another gradient counts as that large."""

_SPREAD = 8.0
"""Standard deviation of the scores where there is a softcap, at most."""

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
    for block, use in dict(zip(blocks, run_uses(config, mesh_sizes(mesh), platform), strict=True)).items():
        kernel, _ = chosen(config.model.attention, use)
        other = "xla" if kernel.name == "blockwise" else "blockwise"
        try:
            with jax.default_device(device):
                errors = relative_errors(kernel.run, use, *block.heads.on_device(mesh_sizes(mesh)[TP]))
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as reason:
            raise ConfigError(
                f"model.attention: the kernel {kernel.name} does not run on {device.device_kind}: "
                f"{str(reason).partition(chr(10))[0]}; try --model.attention {other}"
            ) from reason
        for what, error in zip(_RESULTS, errors, strict=True):
            if error <= (most := TOLERANCE[str(use.dtype)]):  # what is not a number is not
                continue
            raise ConfigError(
                f"model.attention: the kernel {kernel.name} is wrong on {device.device_kind}: {what} is off by "
                f"{error:.1e} of its norm, and {use.dtype} explains {most:.0e}; try --model.attention {other}"
            )


def relative_errors(run: Callable[..., Array], use: Use, num_queries: int, num_keys: int) -> list[float]:
    """Returns the errors of a kernel's output and gradients for so many heads, relative in the norm.

    Of each the larger of the whole's error and half of the worst stretch's.
    """
    arrays, settings = problem(use, num_queries, num_keys)
    found = jax.jit(partial(results, run, settings))(*arrays)
    with jax.default_matmul_precision("highest"):
        plain = partial(results, KERNELS["xla"].run, settings)
        right = jax.jit(plain)(*(array.astype(jnp.float32) for array in arrays))
    return [_error(f.astype(jnp.float32), r, arrays[-1]) for f, r in zip(found, right, strict=True)]


def _error(found: Array, right: Array, dy: Array) -> float:
    """Returns the error of `[b, T, N, H]`; gradients that cancel to little are measured by the output's."""
    least = jnp.sqrt(jnp.mean(jnp.square(dy.astype(jnp.float32)))) * _LITTLE

    def norms(x: Array) -> Array:  # of a row's stretches: the square roots of their means
        rows, length = x.shape[:2]
        squares = jnp.pad(jnp.mean(jnp.square(x), axis=(2, 3)), ((0, 0), (0, -length % STRETCH)))
        return jnp.sqrt(squares.reshape(rows, -1, STRETCH).mean(-1))

    off, size = norms(found - right), norms(right)
    whole = jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(size))), least)
    worst = jnp.max(off / jnp.maximum(size, whole))
    return float(jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(off))) / whole, worst / 2))


def problem(use: Use, num_queries: int, num_keys: int) -> tuple[list[Array], dict[str, Any]]:
    """Returns queries, keys, values and a gradient of the output, and what else a kernel is called with.

    Two rows, which are packed differently: documents that end anywhere, one of three tokens, and padding. The window
    is shorter than most of them. Scores are large enough for a softcap to matter. A part is every other chunk, from
    the first on, so that there are gaps and documents end in chunks; its keys begin before the sequence.
    """
    length = max(LEAST_TOKENS, min(int(use.length or MOST_TOKENS), MOST_TOKENS))
    part = _every_other(length // CHUNKS) if use.part else None
    lengths = (length, length) if part is None else (part.queries.size, HALO + length)
    heads = (num_queries, num_keys, num_keys, num_queries)
    keys = jax.random.split(jax.random.key(0), len(heads))
    which = (0, 1, 1, 0)  # queries or keys
    shapes = [(2, lengths[of], count, use.head_dim) for of, count in zip(which, heads, strict=True)]
    arrays = [jax.random.normal(key, shape, use.dtype) for key, shape in zip(keys, shapes, strict=True)]
    spread = 1.0 if use.softcap is None else min(_SPREAD, use.softcap)
    arrays[0] = (arrays[0] * (spread / (use.factor * use.head_dim**0.5))).astype(arrays[0].dtype)
    ends = jnp.array(
        [[length // 5, length // 2, length - 3], [length // 3, length - length // 7 - 3, length - length // 7]]
    )
    segments = jnp.sum(jnp.arange(length) >= ends[:, :, None], axis=1) + 1
    segments = segments.at[1].set(jnp.where(segments[1] > ends.shape[1], 0, segments[1])).astype(jnp.int32)
    window = use.window and max(1, min(use.window, length // 8))
    return arrays, {
        "segments_BT": segments if use.packed else None,
        "scale": use.factor,
        "window": window,
        "softcap": use.softcap,
        "part": part,
    }


def _every_other(size: int) -> Part:
    """Returns a part of every other chunk of so many tokens."""
    position = jnp.arange(CHUNKS * size, dtype=jnp.int32)
    return Part(position.reshape(CHUNKS, size)[::2].ravel(), -HALO)


def results(
    run: Callable[..., Array], settings: Mapping[str, Any], q: Array, k: Array, v: Array, dy: Array
) -> tuple[Array, ...]:
    """Returns the output of a kernel, and the gradients of queries, keys and values."""
    y, gradients = jax.vjp(lambda q, k, v: run(q, k, v, **settings), q, k, v)
    return (y, *gradients(dy))
