"""Checks of devices, collectives and attention kernels before a run.

The first device of each process computes a few small operations eagerly, and all devices compute
them in one compiled program. Both results are compared with float64 on the host. Then each
collective that layers use moves integers along each mesh axis.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from operator import matmul
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jaxtp.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    device_view,
    permute,
    reduce_scatter,
    vary_everywhere,
)
from jaxtp.config.entry import NumericsError
from jaxtp.config.schema import ConfigError
from jaxtp.guards.finding import Finding, findings
from jaxtp.guards.known_versions import known_problems, versions_here
from jaxtp.layers.kernels.select import KERNELS, Kernel, Use, architecture_of
from jaxtp.layers.positions import Part
from jaxtp.mesh import AXES, describe_mesh, mesh_sizes

HostArray = np.ndarray[Any, Any]

EXACT = 1e-4  # Maximum error of a float32 operation, relative to the largest value of its result

TOLERANCE = {"float32": 5e-3, "float16": 1e-2, "bfloat16": 2e-2}
"""Maximum relative error of a product, by compute dtype. Products of float32 may run in TF32, whose
mantissa has 10 bits."""

_PER_DEVICE = PartitionSpec(AXES)  # One row per device


@dataclass(frozen=True)
class Operation:
    """A device operation, its arguments, and its reference on the host in float64.

    By default the reference is the operation itself, on arrays of NumPy.
    """

    run: Callable[..., Any]
    arguments: tuple[HostArray, ...]
    tolerance: float = EXACT
    on_host: Callable[..., HostArray] | None = None

    @cached_property
    def expected(self) -> HostArray:
        """The reference result."""
        wide = (np.asarray(array, np.float64) for array in self.arguments)
        return np.asarray((self.on_host or self.run)(*wide))


@cache
def operations(dtypes: tuple[str, ...]) -> dict[str, Operation]:
    """Returns the operations by name: a product in each of `dtypes`, the others in float32."""
    random = np.random.default_rng(0)

    def draw(rows: int, columns: int) -> HostArray:
        return random.standard_normal((rows, columns)).astype(np.float32)

    a = draw(256, 512)
    b = draw(512, 256)
    numbers = np.abs(draw(8, 2**17))
    logits = 8 * draw(64, 4096)
    rows = draw(4096, 64)
    index = random.integers(64, size=4096, dtype=np.int32)
    cases = {}
    for dtype in map(jnp.dtype, dtypes):
        factors = (a.astype(dtype), b.astype(dtype))
        cases[f"a product in {dtype}"] = Operation(matmul, factors, TOLERANCE[dtype.name])

    def softmax(x: HostArray) -> HostArray:
        shares = np.exp(x - x.max(-1, keepdims=True))
        return np.asarray(shares / shares.sum(-1, keepdims=True))

    return cases | {
        "an elementwise operation": Operation(lambda x: (x + 1) ** 0.5, (numbers[0, :512],)),
        "a sum over a long axis": Operation(lambda x: x.sum(-1), (numbers,)),
        "a softmax": Operation(jax.nn.softmax, (logits,), on_host=softmax),
        "a scatter-add": Operation(
            lambda rows, index: jnp.zeros((64, 64)).at[index].add(rows),
            (rows, index),
            on_host=lambda rows, index: (np.arange(64)[:, None] == index) @ rows,
        ),
    }


def check_outside_of_jit(mesh: Mesh, dtypes: Sequence[str]) -> list[Finding]:
    """Compares operations of this process's first device, outside of jit, with the host."""
    # With jax 0.11 on an RTX A6000, `jnp.ones(4) + 1` was 513 outside of jit, and 2 inside
    # (jax-ml/jax#40633).
    first = mesh.local_devices[0]
    compared = []
    with jax.default_device(first):
        for name, case in operations(tuple(dtypes)).items():
            result = case.run(*map(jnp.asarray, case.arguments))
            compared += _compare(f"{name} outside of jit", case, {first: np.asarray(result)})
    return compared


def check_devices(mesh: Mesh, dtypes: Sequence[str]) -> Iterator[Finding]:
    """Compares operations of all devices with the host; all processes must call it.

    Args:
      dtypes: compute dtypes of products.
    """
    cases = operations(tuple(dtypes))

    def body(arguments: Mapping[str, tuple[Array, ...]]) -> dict[str, Array]:
        return {
            name: vary_everywhere(case.run(*arguments[name]))[None] for name, case in cases.items()
        }

    arguments = {name: case.arguments for name, case in cases.items()}
    replicated = (jax.tree.map(lambda _: PartitionSpec(), arguments),)
    check = device_view(body, "device_check", replicated, dict.fromkeys(cases, _PER_DEVICE))
    with jax.set_mesh(mesh):
        results = jax.block_until_ready(jax.jit(check)(arguments))
    for name, case in cases.items():
        shards = results[name].addressable_shards
        yield from _compare(name, case, {s.device: np.asarray(s.data)[0] for s in shards})


def _compare(name: str, case: Operation, results: Mapping[jax.Device, HostArray]) -> list[Finding]:
    size = np.max(np.abs(case.expected))
    worst = 0.0
    errors = []
    for device, result in results.items():
        error = np.max(np.abs(result.astype(np.float64) - case.expected)) / size
        # Also refuses NaN
        if error <= case.tolerance:
            worst = max(worst, error)
            continue
        message = (
            f"{_describe(device)} computes {name} wrong: the result is off by {error:.1e} of its "
            f"largest value, and rounding explains {case.tolerance:.0e}; try another device, "
            "driver or version of JAX (--launch.no-self-check starts a run anyway)"
        )
        problems = known_problems(versions_here(), device.device_kind, architecture_of(device))
        errors.append(NumericsError("\n".join([message, *problems])))
    devices = f"{len(results)} device{'s' * (len(results) > 1)}"
    text = f"{devices}, off by {worst:.0e} of {case.tolerance:.0e}"
    return findings("devices", name, errors, text)


def _describe(device: jax.Device) -> str:
    return f"device {device.id} of process {device.process_index} ({device.device_kind})"


def check_collectives(mesh: Mesh) -> Iterator[Finding]:
    """Moves integers along each axis by each collective; all processes must call it."""
    numbers = {
        axis: exact_numbers(mesh.size, size) for axis, size in mesh_sizes(mesh).items() if size > 1
    }
    specs = dict.fromkeys(numbers, _PER_DEVICE)

    def along(axis: str, x: Array) -> dict[str, Array]:
        return {
            name: vary_everywhere(move(x, axis))[None] for name, (move, _) in _COLLECTIVES.items()
        }

    def body(rows: dict[str, Array]) -> dict[str, dict[str, Array]]:
        return {axis: along(axis, row[0]) for axis, row in rows.items()}

    with jax.set_mesh(mesh):
        exchange = jax.jit(device_view(body, "collectives", (specs,), specs))
        results = jax.block_until_ready(exchange(numbers))
    for axis, moved in results.items():
        for name, array in moved.items():
            check = partial(_check_received, mesh, axis, name, numbers[axis])
            errors = filter(None, map(check, array.addressable_shards))
            text = f"{mesh.shape[axis]} devices, equal"
            yield from findings("collectives", f"{name} over {axis}", errors, text)


def _check_received(
    mesh: Mesh, axis: str, name: str, numbers: HostArray, shard: jax.Shard
) -> NumericsError | None:
    devices = mesh.devices.shape
    position = list(map(int, np.unravel_index(shard.index[0].start or 0, devices)))
    dim = mesh.axis_names.index(axis)
    index = position.pop(dim)
    # The rows of all devices along the axis
    rows = np.moveaxis(numbers.reshape(*devices, -1), dim, -2)[tuple(position)]
    _, expected = _COLLECTIVES[name]
    if np.array_equal(np.asarray(shard.data)[0], expected(rows, index)):
        return None
    return NumericsError(
        f"{_describe(shard.device)} receives wrong numbers by {name} over mesh.{axis}, of "
        f"{describe_mesh(mesh_sizes(mesh))}: its links, or the devices along that axis, are broken"
    )


_COLLECTIVES: dict[
    str, tuple[Callable[[Array, str], Array], Callable[[HostArray, int], HostArray]]
] = {
    "all-gather": (lambda x, axis: all_gather(x, axis), lambda rows, index: rows.ravel()),
    "all-reduce": (lambda x, axis: all_reduce(x, axis), lambda rows, index: rows.sum(0)),
    "reduce-scatter": (
        lambda x, axis: reduce_scatter(x, axis),
        lambda rows, index: np.split(rows.sum(0), len(rows))[index],
    ),
    "all-to-all": (
        lambda x, axis: all_to_all(x, axis, split=0, join=0),
        lambda rows, index: np.split(rows, len(rows), axis=1)[index].ravel(),
    ),
    "permute": (lambda x, axis: permute(x, axis), lambda rows, index: rows[index - 1]),
}
"""Collectives, each with the array that the device at `index` of an axis receives, given the rows
of all devices along this axis."""


def exact_numbers(devices: int, size: int) -> HostArray:
    """Returns a row per device, whose length `size` divides; their sums are exact in float32."""
    return (
        np.arange(devices, dtype=np.float32)[:, None] % 1021 * 8
        + np.arange(2 * size, dtype=np.float32) % 8
    )


MAX_TOKENS = 1024  # Maximum length of the sequences: several blocks of every kernel

SPAN = 16
"""Tokens of a span. A span may have twice the relative error of the whole; the norm of the whole
alone would hide a wrong edge of a mask."""

CHUNKS = 7
HALO = 5
"""Number of chunks of a sequence, and of keys before it, to check context parallelism."""

_RESULTS = (
    "its output",
    "its gradient of the queries",
    "its gradient of the keys",
    "its gradient of the values",
    "its gradient of the sinks",
)


Case = tuple[Kernel, Use, tuple[int, int]]
"""A kernel, its use, and the query and kv heads of a device."""


def check_attention(
    device: jax.Device, kernel: Kernel, use: Use, heads: tuple[int, int]
) -> list[Finding]:
    """Compares a small problem of a kernel, forward and backward, with `xla` in float32."""
    # Some kernels were wrong on one model of GPU, or with one kind of mask.
    masks = f"{' packed' * bool(use.packed)}{(use.window and f' window {use.window}') or ''}"
    subject = f"{kernel.name} {use.dtype}{masks}"
    obstacle = next(kernel.problems(use), None)
    if obstacle is not None:
        return [Finding("attention", subject, obstacle, "--")]
    tolerance = TOLERANCE[str(use.dtype)]
    errors: list[float] = []
    problem = None
    try:
        with jax.default_device(device):
            errors = relative_errors(kernel.run, use, *heads)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as reason:
        problem = f"does not run on {device.device_kind}: {str(reason).partition(chr(10))[0]}"
    # A run may have no sinks.
    for result, error in zip(_RESULTS, errors, strict=False):
        # Also refuses NaN
        if problem is None and not error <= tolerance:
            problem = (
                f"is wrong on {device.device_kind}: {result} is off by {error:.1e} of its norm, "
                f"and {use.dtype} explains {tolerance:.0e}"
            )
    if problem is None:
        return [Finding("attention", subject, f"off by {max(errors):.0e} of {tolerance:.0e}")]
    other = "xla" if kernel.name == "blockwise" else "blockwise"
    advice = f"model.attention: the kernel {kernel.name} {problem}; try --model.attention {other}"
    return findings("attention", subject, [ConfigError(advice)])


def relative_errors(
    run: Callable[..., Array], use: Use, num_queries: int, num_keys: int
) -> list[float]:
    """Returns the relative errors, in the norm, of a kernel's output and gradients.

    An error is the maximum of the total error and half of the worst span's error.
    """
    arrays, settings = problem(use, num_queries, num_keys)
    actual = jax.jit(partial(results, run, settings))(*arrays)
    with jax.default_matmul_precision("highest"):
        reference = jax.jit(partial(results, KERNELS["xla"].run, settings))
        expected = reference(*(array.astype(jnp.float32) for array in arrays))
    pairs = zip(actual, expected, strict=True)
    return [_error(a.astype(jnp.float32), e, arrays[3]) for a, e in pairs]


def _error(actual: Array, expected: Array, dy: Array) -> float:
    # Arrays are `[b, T, N, H]`, or `[N]` for sinks. Relative to at least a tenth of the norm of
    # `dy`, because some gradients nearly cancel.
    min_norm = jnp.sqrt(jnp.mean(jnp.square(dy.astype(jnp.float32)))) / 10

    def norms(x: Array) -> Array:
        # Returns the root mean square of each span.
        x = x if x.ndim == 4 else x[None, :, None, None]
        rows, length = x.shape[:2]
        squares = jnp.pad(jnp.mean(jnp.square(x), axis=(2, 3)), ((0, 0), (0, -length % SPAN)))
        return jnp.sqrt(squares.reshape(rows, -1, SPAN).mean(-1))

    errors = norms(actual - expected)
    sizes = norms(expected)
    total = jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(sizes))), min_norm)
    worst = jnp.max(errors / jnp.maximum(sizes, total))
    return float(jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(errors))) / total, worst / 2))


def problem(
    use: Use, num_queries: int, num_keys: int, max_length: int = MAX_TOKENS
) -> tuple[list[Array], dict[str, Any]]:
    """Returns the arrays and the keyword arguments of a kernel, for a small problem of two rows.

    The arrays are queries, keys, values, a gradient of the output, and sinks, if there are any.

    Both rows have unaligned documents, one of them of three tokens; the second row ends in padding.
    The window is shorter than most documents. Scores are large enough for a softcap to have an
    effect, and sinks are large enough for theirs. With context parallelism, the queries are every
    other chunk, and keys begin before the sequence.
    """
    length = max(16, min(use.length or max_length, max_length))
    queries = length
    keys = length
    part = None
    if use.part:
        chunks = jnp.arange(length // CHUNKS * CHUNKS, dtype=jnp.int32).reshape(CHUNKS, -1)
        part = Part(chunks[::2].ravel(), -HALO)
        queries = part.queries.size
        keys = HALO + length
    shapes = [(queries, num_queries), (keys, num_keys), (keys, num_keys), (queries, num_queries)]
    randoms = jax.random.split(jax.random.key(0), len(shapes))
    widths = [use.head_dim] * 2 + [use.value_head_dim or use.head_dim] * 2
    arrays = [
        jax.random.normal(key, (2, *shape, width), use.dtype)
        for key, shape, width in zip(randoms, shapes, widths, strict=True)
    ]
    # The standard deviation of the scores
    spread = 1.0 if use.softcap is None else min(8.0, use.softcap)
    arrays[0] = (arrays[0] * (spread / (use.factor * use.head_dim**0.5))).astype(arrays[0].dtype)
    # The ends of the documents in each row; the second row ends in padding.
    ends = jnp.array(
        [
            [length // 5, length // 2, length - 3],
            [length // 3, length - length // 7 - 3, length - length // 7],
        ]
    )
    segments = jnp.sum(jnp.arange(length) >= ends[:, :, None], axis=1, dtype=jnp.int32) + 1
    segments = segments.at[1].set(jnp.where(segments[1] > ends.shape[1], 0, segments[1]))
    window = use.window and max(1, min(use.window, length // 8))
    if use.sinks:
        arrays.append(jnp.linspace(-1, 1, num_queries) + math.log(window or length / 4))
    return arrays, {
        "segments_BT": segments if use.packed else None,
        "scale": use.factor,
        "window": window,
        "softcap": use.softcap,
        "part": part,
    }


def results(
    run: Callable[..., Array],
    settings: Mapping[str, Any],
    q: Array,
    k: Array,
    v: Array,
    dy: Array,
    *sinks: Array,
) -> tuple[Array, ...]:
    """Returns the output, and gradients of queries, keys, values and sinks."""

    def attend(q: Array, k: Array, v: Array, *sinks: Array) -> Array:
        return run(q, k, v, **settings, sinks=sinks[0] if sinks else None)

    y, gradients = jax.vjp(attend, q, k, v, *sinks)
    return (y, *gradients(dy))
