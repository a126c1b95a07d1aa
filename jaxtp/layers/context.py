"""Context parallelism: sequences are split over cp, `T / cp` tokens per device.

Every device of a cp group has whole rows of ids, labels and segments and slices its tokens
(`Sequences.local_tokens`), so data and checkpoints do not depend on cp. Only attention and Gated
DeltaNet need other positions. Attention:

    ulysses   all-to-all to all tokens of N/(tp*cp) heads, and back (Jacobs et al., arXiv
              2309.14509). All kernels work; kv heads are copied until cp divides them.
    gather    all-gather of keys and values (Llama 3, arXiv 2407.21783, section 3.3.2). N and K
              are arbitrary. With a window, a device fetches only the missing tokens that its
              tokens see, the halo.

Later tokens see more keys. Gather without a window therefore balances work by zigzag order: of the
chunks 0 to 2cp-1, device c has c and 2cp-1-c. Activations have this order, results for users have
natural order.

Gated DeltaNet works in both orders. Its convolution fetches a halo. A chunk's tokens are an affine
map of the state, and one all-gather of these maps gives each chunk its initial state: its size does
not depend on T.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxtp.collectives import (
    SHARED,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    batch_spec,
    check_divides,
    device_view,
    own_part,
    permute,
    token_spec,
    vary_like,
)
from jaxtp.layers.kernels.delta_rule import CARRIED
from jaxtp.layers.positions import Part
from jaxtp.layers.transport import SequenceParallel, is_split
from jaxtp.mesh import CONTEXT, CP, TP, parts

_STATIC = {"static": True}

_Pair = tuple[int, int]

Method = Literal["ulysses", "gather"]
Context = Literal["auto", Method]


@dataclass(frozen=True, kw_only=True)
class LocalShape:
    """A device's micro-batch, and settings that decide how layers process it."""

    sizes: Mapping[str, int]  # devices along each mesh axis
    rows: int  # sequences on the device
    length: int  # tokens of each whole sequence
    packed: bool = False  # sequences hold several documents
    platform: str | None = "cpu"
    """Architecture of the device (`architecture_of`), which decides the kernels; None if
    unknown."""

    context: Context = "auto"  # requested method of attention over cp
    zigzag: bool = False  # devices along cp hold tokens in zigzag order

    @property
    def tp(self) -> int:
        """Devices along tp."""
        return self.sizes[TP]

    @property
    def tokens(self) -> int:
        """Tokens on the device inside parallel layers."""
        return self.rows * self.length // parts(self.sizes, CONTEXT)

    def is_split(self, setting: SequenceParallel) -> bool:
        """See `is_split`."""
        return is_split(setting, self.length, self.sizes)

    def between(self, setting: SequenceParallel) -> int:
        """Returns the tokens on the device between parallel layers."""
        return self.tokens // self.tp if self.is_split(setting) else self.tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Documents and token order of a batch's sequences, for layers that mix positions.

    A device has whole rows of its arrays.
    """

    segments: Array | None = None
    """Documents of each row (`layers/positions.py`), in natural order; None if each row is
    one document."""

    # Requested method of attention over cp
    context: Context = field(default="auto", metadata=_STATIC)
    # Devices hold tokens in zigzag order
    zigzag: bool = field(default=False, metadata=_STATIC)
    # Experts to use instead of a router's choice, `[B, T, k]` in natural order
    experts: Array | None = None
    record: bool = field(default=False, metadata=_STATIC)
    """Whether routers also return their choices (`layers/balance.py`)."""

    def local_tokens(self, x_BT: Array) -> Array:
        """Splits whole rows `[B, T, ...]` over cp, in device order; cp must divide T."""
        if axis_size(CP) == 1:
            return x_BT
        check_divides("a sequence over cp", x_BT.shape, token_spec())

        def take(x: Array) -> Array:
            chunks = self._chunks(x.shape[1])
            parts = [lax.dynamic_slice_in_dim(x, start, size, 1) for start, size in chunks]
            return jnp.concatenate(parts, axis=1)  # [B/(dp*fsdp), T/cp]

        return device_view(take, "local_tokens", batch_spec(None), token_spec())(x_BT)

    def natural(self, x: object, dim: int = 1) -> Any:
        """Reorders an array of all tokens to natural order."""
        return to_natural(x, axis_size(CP), dim) if self.zigzag else x

    def positions(self, length: int) -> Array:
        """Returns each token's position in its row, in device order, `[T]`."""
        index = jnp.arange(length)
        cp = axis_size(CP)
        if not self.zigzag:
            return index
        size = length // (2 * cp)
        device = index // (2 * size)
        slot = index // size % 2
        chunk = jnp.where(slot == 0, device, 2 * cp - 1 - device)
        return chunk * size + index % size

    def local_positions(self, length: int) -> Array:
        """Returns this device's positions, inside `device_view`: `[T/cp]`, ascending."""
        return jnp.concatenate([start + jnp.arange(size) for start, size in self._chunks(length)])

    @property
    def num_chunks(self) -> int:
        """Chunks of a device."""
        return 2 if self.zigzag else 1

    def initial_states(self, m: Array, u: Array) -> Array:
        """Returns the state before each chunk of this device, `[b * chunks, H, K, V]`.

        A chunk's tokens turn the state S into m S + u, with m `[b * chunks, H, K, K]`, or its
        diagonal `[b * chunks, H, K, 1]`. Call it inside `device_view`.
        """
        # Passing states from chunk to chunk would move less, but in as many steps as there are
        # chunks.
        maps_bHKF = jnp.concatenate([m, u], axis=-1)
        width = m.shape[-1]
        rows = maps_bHKF.reshape(-1, self.num_chunks, *maps_bHKF.shape[1:])
        chunks = jnp.moveaxis(rows, 1, 0)
        gathered = all_gather(chunks, *CONTEXT, dim=0)
        maps = self.natural(checkpoint_name(gathered, CARRIED), dim=0)

        def advance(state: Array, chunk: Array) -> tuple[Array, Array]:
            m, u = jnp.split(chunk, [width], axis=-1)
            product = m * state if width == 1 else jnp.matmul(m, state, precision="highest")
            return u + product, state

        zeros = jnp.zeros((len(rows), *u.shape[1:]), u.dtype)
        _, states = lax.scan(advance, vary_like(zeros, maps), maps)
        own_chunks = self.local_positions(len(maps))
        own_states = jnp.take(states, own_chunks, axis=0, mode="clip")
        return jnp.moveaxis(own_states, 0, 1).reshape(u.shape)

    def _chunks(self, length: int) -> list[tuple[Array | int, int]]:
        """Returns the first position and the size of each chunk of this device."""
        cp = axis_size(CP)
        index = axis_index(CP)
        if cp == 1:
            return [(0, length)]
        size = chunk_size(length, cp, zigzag=self.zigzag)
        chunks: list[tuple[Array | int, int]] = [(index * size, size)]
        if self.zigzag:
            mirrored = 2 * cp - 1 - index
            chunks.append((mirrored * size, size))
        return chunks

    def attend(
        self,
        run: Callable[..., Array],
        method: Method,
        window: int | None,
        q: Array,
        k: Array,
        v: Array,
    ) -> Array:
        """Attends from this device's tokens to all that they see, inside `device_view`.

        `run(q, k, v, segments, part=)` is a kernel; it has sinks from `of_heads`. `q` is
        `[b, T/cp, N/tp, H]`; `q` and `k` are rotated.
        """
        cp = axis_size(CP)
        if cp == 1:
            return run(q, k, v, self.segments)
        if method == "ulysses":
            copies = kv_head_copies(k.shape[2], cp)
            if copies > 1:
                k = jnp.repeat(k, copies, axis=2)
                v = jnp.repeat(v, copies, axis=2)
            # Each is `[b, T, N/(tp*cp), H]`.
            q, k, v = (all_to_all(x, *CONTEXT, split=2, join=1) for x in (q, k, v))
            y = run(q, k, v, self.segments)
            return all_to_all(y, *CONTEXT, split=1, join=2)
        length = q.shape[1] * cp
        reach = halo(length, cp, window, zigzag=self.zigzag)
        if reach is not None:
            return self._attend_in_halo(run, reach, q, k, v)
        # The transpose sums gradients over cp in the compute dtype, like gradients of activations
        # over tp.
        k, v = (checkpoint_name(all_gather(x, *CONTEXT, dim=1), SHARED) for x in (k, v))
        k = self.natural(k)
        v = self.natural(v)  # [b, T, K/tp, H]
        part = Part(self.local_positions(length), 0)
        return run(q, k, v, self.segments, part=part)

    def _attend_in_halo(
        self,
        run: Callable[..., Array],
        reach: int,
        q: Array,
        k: Array,
        v: Array,
    ) -> Array:
        chunks = self._chunks(q.shape[1] * axis_size(CP))
        results = []
        keys_and_values = with_halo(jnp.concatenate([k, v], axis=3), reach, len(chunks))
        begin = 0
        for (start, size), kv in zip(chunks, keys_and_values, strict=True):
            queries = q[:, begin : begin + size]
            begin += size
            part = Part(start + jnp.arange(size), start - reach)
            keys, values = jnp.split(kv, [k.shape[3]], axis=3)
            results.append(run(queries, keys, values, self.segments, part=part))
        return jnp.concatenate(results, axis=1)


def of_heads(x: Array, method: Method) -> Array:
    """Returns the part of `x`, `[N/tp]`, for the query heads that this device attends with."""
    if method == "gather" or axis_size(CP) == 1:
        return x
    return own_part(x, CP, 0)


def to_natural(x: Any, cp: int, dim: int) -> Any:
    """Reorders dim `dim` from zigzag order over cp devices to natural order."""
    library: Any = jnp if isinstance(x, Array) else np
    before = x.shape[:dim]
    size = x.shape[dim] // (2 * cp)
    after = x.shape[dim + 1 :]
    chunks = x.reshape(*before, cp, 2, size, *after)
    first = library.take(chunks, 0, axis=dim + 1)
    second = library.take(chunks, 1, axis=dim + 1)
    in_order = library.concatenate([first, library.flip(second, dim)], axis=dim)
    return in_order.reshape(x.shape)


def kv_head_copies(kv_heads: int, cp: int) -> int:
    """Returns how often ulysses copies a device's kv heads, so that cp divides them."""
    return cp // math.gcd(kv_heads, cp)


def chunk_size(length: int, cp: int, *, zigzag: bool) -> int:
    """Returns the tokens per chunk."""
    return length // (2 * cp if zigzag else cp)


def halo(length: int, cp: int, window: int | None, *, zigzag: bool) -> int | None:
    """Returns how many tokens before a chunk its tokens see; None if gathering sends no more."""
    if window is None:
        return None
    sent = halo_tokens(length, cp, window - 1, zigzag=zigzag)
    return window - 1 if sent < length // cp * (cp - 1) else None


@lru_cache(maxsize=4096)
def halo_tokens(length: int, cp: int, reach: int, *, zigzag: bool) -> int:
    """Returns the tokens whose keys and values a device sends, for halos of `reach` tokens."""
    size = chunk_size(length, cp, zigzag=zigzag)
    sent = 0
    for hop, tokens in hops(reach, size):
        sent += num_routes(cp, hop, zigzag=zigzag) * tokens
    return sent


def hops(reach: int, size: int) -> list[_Pair]:
    """Returns (distance in chunks, tokens seen) of each earlier chunk in a halo."""
    farthest = -(-reach // size)
    earlier = []
    for hop in range(farthest, 0, -1):
        tokens = reach - (hop - 1) * size
        earlier.append((hop, min(size, tokens)))
    return earlier


def num_routes(cp: int, hop: int, *, zigzag: bool) -> int:
    """Returns the number of `routes`, without listing them."""
    straight = int(hop < cp)
    if not zigzag:
        return straight
    # From first to first chunks, from second to second ones, and across, where the only chunk may
    # be the device's own.
    return 2 * straight + int(1 < hop < 2 * cp - 1)


def routes(cp: int, hop: int, *, zigzag: bool) -> dict[_Pair, list[_Pair]]:
    """Returns which devices send a chunk to the holder of the chunk `hop` chunks later.

    The keys are (slot of the sent chunk, slot of the later chunk), the values (source, target)
    pairs, source != target.
    """
    count = 2 * cp if zigzag else cp

    def holder(chunk: int) -> _Pair:
        return (chunk, 0) if chunk < cp else (count - 1 - chunk, 1)

    by_slots: dict[_Pair, list[_Pair]] = {}
    for chunk in range(hop, count):
        source, sent = holder(chunk - hop)
        target, received = holder(chunk)
        if source != target:
            by_slots.setdefault((sent, received), []).append((source, target))
    return by_slots


def with_halo(x: Array, reach: int, num_chunks: int) -> list[Array]:
    """Returns a device's chunks, each after its halo: `reach` tokens, zeros before position 0."""
    chunks = jnp.split(x, num_chunks, axis=1)
    cp = axis_size(CP)
    pieces: list[list[Array]] = [[] for _ in chunks]
    for hop, tokens in hops(reach, chunks[0].shape[1]):
        tails = [chunk[:, -tokens:] for chunk in chunks]
        arrived = [jnp.zeros_like(tail) for tail in tails]
        if num_chunks == 2:
            # This device's first chunk may lie `hop` chunks before its second.
            is_own = 2 * axis_index(CP) == 2 * cp - 1 - hop
            arrived[1] = jnp.where(is_own, tails[0], 0)
        for (sent, received), pairs in routes(cp, hop, zigzag=num_chunks == 2).items():
            arrived[received] += permute(tails[sent], CP, pairs)
        for earlier, tail in zip(pieces, arrived, strict=True):
            earlier.append(tail)
    for earlier, chunk in zip(pieces, chunks, strict=True):
        earlier.append(chunk)
    return [jnp.concatenate(parts, axis=1) for parts in pieces]


@dataclass(frozen=True, kw_only=True)
class ContextAttention:
    """A device's heads and window, and the method of attention over cp that suits them."""

    # Query heads of a device
    queries: int
    # Kv heads of a device
    keys: int
    # Positions that a query sees
    window: int | None

    def ulysses_kv_heads(self, cp: int) -> int:
        """Returns a device's kv heads, including ulysses' copies."""
        return self.keys * kv_head_copies(self.keys, cp)

    def method(self, shape: LocalShape) -> tuple[Method, str]:
        """Returns the method that sends less in training, and the reason."""
        cp = shape.sizes[CP]
        if cp == 1:
            return "ulysses", "a device has all tokens of its heads"
        if shape.context != "auto":
            return shape.context, "as configured"
        if self.queries % cp:
            return "gather", f"cp {cp} does not divide the {self.queries} query heads of a device"
        # Heads of tokens that forward and backward pass send, times cp / 4: ulysses sends (cp -
        # 1)/cp of queries, keys, values and results; gather sends the keys and values of `sent`
        # tokens.
        other_tokens = shape.length // cp * (cp - 1)
        reach = halo(shape.length, cp, self.window, zigzag=shape.zigzag)
        sent = other_tokens
        if reach is not None:
            sent = halo_tokens(shape.length, cp, reach, zigzag=shape.zigzag)
        ulysses = (self.queries + self.ulysses_kv_heads(cp)) * other_tokens
        gather = self.keys * cp * sent
        if ulysses <= gather:
            return "ulysses", f"it moves {ulysses / max(gather, 1):.2f} x what gather does"
        return "gather", f"it moves {gather / ulysses:.2f} x what ulysses does"

    def uneven(self, shape: LocalShape) -> bool:
        """Returns whether contiguous chunks give devices unequal work."""
        method, _ = self.method(shape)
        reach = halo(shape.length, shape.sizes[CP], self.window, zigzag=False)
        return method == "gather" and reach is None

    def zigzag(self, shape: LocalShape) -> bool:
        """Returns whether to use zigzag order."""
        return shape.length % (2 * shape.sizes[CP]) == 0 and self.uneven(shape)
