"""Context parallelism: every sequence is divided over the devices along cp, `T / cp` tokens on each.

Whole rows of ids, labels and segments are on every device of a cp group: they are four bytes a token. Each takes its
own tokens of them (`Sequences.own`): nothing moves, and neither data nor checkpoints know of cp. (In the first design
the loader divided rows, in zigzag order, to be undone wherever users see tokens, and that saved nothing.) Weights are
stored over (fsdp, cp), and gathered and scattered as if that were one axis. From the embedding to the loss a layer that
works on one position at a time does not notice that others are elsewhere. Attention does, and has two ways to see them:

    ulysses   all-to-all: all tokens of N/(tp*cp) heads instead of T/cp tokens of N/tp heads, and back afterwards
              (Jacobs et al., arXiv 2309.14509). Any kernel runs as without cp. kv heads are copied so that cp divides.
    gather    keys and values of all tokens are gathered, queries stay (Llama 3, arXiv 2407.21783, section 3.3.2); any
              number of heads. Under a window a device fetches what its tokens see and it has not, the halo.

For each sequence a device sends, forward and backward, in units of (cp-1)/cp * T/cp * H/tp elements: ulysses
`4N + 4K'`, K' the kv heads with their copies, gather `4K * cp`; and half of that again where a block is computed again.
Gradients of keys and values are summed over cp in the compute dtype, as those of activations are over tp. One function
(`Attended.method`) compares the two, and the forward pass, the accounts of a step and the summary all ask it.

In causal attention later tokens see more. So that all devices have the same work in gather, each has two chunks of the
sequence, in the order zigzag: of the chunks 0 to 2cp-1, device c has c and 2cp-1-c. Tokens are in that order in all
arrays between embedding and loss; logits, and whatever else users see, are in natural order. Under windows, and in
ulysses, the order is contiguous, because there all have the same work: the layers decide it (`BranchConfig.zigzag`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxtp.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    batch_spec,
    check_divides,
    device_view,
    permute,
    token_spec,
)
from jaxtp.communication import ALL_GATHER, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, Collective
from jaxtp.layers.activations import Context, Method, Part
from jaxtp.layers.costs import ELEMENTWISE_AGAIN, Moves, Share, bytes_sent
from jaxtp.mesh import CONTEXT, CP

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Facts about the sequences of a batch, for layers in which a token sees others."""

    segments: Array | None = None
    """Documents of each row (`layers/activations.py`), in natural order; None where a row is one."""

    context: Context = field(default="auto", metadata=_STATIC)
    """The method of attention over cp that is asked for."""

    zigzag: bool = field(default=False, metadata=_STATIC)
    """Whether devices hold tokens in the order zigzag."""

    experts: Array | None = None
    """Experts to use instead of a router's choice, `[B, T, k]` in natural order."""

    record: bool = field(default=False, metadata=_STATIC)
    """Whether routers give their choices too (`layers/balance.py`)."""

    def own(self, x_BT: Array) -> Array:
        """Returns an array of whole rows `[B, T]` in the order in which devices hold tokens, split over cp.

        Raises:
          ValueError: cp does not divide T.
        """
        if axis_size(CP) == 1:
            return x_BT
        check_divides("a sequence over cp", x_BT.shape, token_spec())

        def take(x: Array) -> Array:
            parts = [lax.dynamic_slice_in_dim(x, start, size, 1) for start, size in self._chunks(x.shape[1])]
            return jnp.concatenate(parts, axis=1)  # [B/(dp*fsdp), T/cp]

        return device_view(take, "own_tokens", in_specs=(batch_spec(None),), out_specs=token_spec())(x_BT)

    def natural(self, x: Any, dim: int = 1) -> Any:
        """Returns an array of all tokens, in the order in which devices hold them, in natural order."""
        return to_natural(x, axis_size(CP), dim) if self.zigzag else x

    def positions(self, length: int) -> Array:
        """Returns the position of each token in its row, in the order in which devices hold tokens, `[T]`."""
        index, cp = jnp.arange(length), axis_size(CP)
        if not self.zigzag:
            return index
        size = length // (2 * cp)
        device, slot = index // (2 * size), index // size % 2
        return jnp.where(slot == 0, device, 2 * cp - 1 - device) * size + index % size

    def own_positions(self, length: int) -> Array:
        """Returns the positions of this device's tokens, inside `device_view`: `[T/cp]`, ascending."""
        return jnp.concatenate([start + jnp.arange(size) for start, size in self._chunks(length)])

    def _chunks(self, length: int) -> list[tuple[Array | int, int]]:
        """Returns the first position and the size of each chunk of this device, inside `device_view`."""
        cp, index = axis_size(CP), axis_index(CP)
        if cp == 1:
            return [(0, length)]
        size = chunk_size(length, cp, zigzag=self.zigzag)
        first = (index * size, size)
        return [first, ((2 * cp - 1 - index) * size, size)] if self.zigzag else [first]

    def attend(
        self, run: Callable[..., Array], method: Method, window: int | None, q: Array, k: Array, v: Array
    ) -> Array:
        """Attends from this device's tokens to all that they see, inside `device_view`.

        Args:
          run: a kernel, `run(q, k, v, segments, part=)`.
          method: how.
          window: positions that each one sees.
          q: queries `[b, T/cp, N/tp, H]`, rotated; keys and values alike, with kv heads.
          k: keys.
          v: values.
        """
        cp = axis_size(CP)
        if cp == 1:
            return run(q, k, v, self.segments)
        if method == "ulysses":
            copies = copies_of(k.shape[2], cp)
            k, v = (x if copies == 1 else jnp.repeat(x, copies, axis=2) for x in (k, v))
            q, k, v = (all_to_all(x, *CONTEXT, split=2, join=1) for x in (q, k, v))  # [b, T, N/(tp*cp), H]
            return all_to_all(run(q, k, v, self.segments), *CONTEXT, split=1, join=2)
        size, length = q.shape[1], q.shape[1] * cp
        chunks = self._chunks(length)
        reach = halo(length, cp, window, zigzag=self.zigzag)
        if reach is None:
            k, v = (self.natural(all_gather(x, *CONTEXT, dim=1)) for x in (k, v))  # [b, T, K/tp, H]
            return run(q, k, v, self.segments, part=Part(self.own_positions(length), 0))
        seen = with_halo(jnp.concatenate([k, v], axis=2), reach, len(chunks))
        results = []
        for number, ((start, size), kv) in enumerate(zip(chunks, seen, strict=True)):
            queries = q[:, number * size : (number + 1) * size]
            part = Part(start + jnp.arange(size), start - reach)
            results.append(run(queries, *jnp.split(kv, 2, axis=2), self.segments, part=part))
        return jnp.concatenate(results, axis=1)


def to_natural(x: Any, cp: int, dim: int) -> Any:
    """Returns an array of JAX or NumPy in natural order that is in the order zigzag over cp devices along a dim."""
    library: Any = jnp if isinstance(x, Array) else np
    before, length, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    chunks = x.reshape(*before, cp, 2, length // (2 * cp), *after)
    first, second = (library.take(chunks, slot, axis=dim + 1) for slot in (0, 1))
    return library.concatenate([first, library.flip(second, dim)], axis=dim).reshape(x.shape)


def copies_of(kv_heads: int, cp: int) -> int:
    """Returns how often ulysses copies the kv heads of a device: the fewest that cp then divides."""
    return cp // math.gcd(kv_heads, cp)


def chunk_size(length: int, cp: int, *, zigzag: bool) -> int:
    """Returns the number of tokens in a chunk of a sequence, of which a device has two in the order zigzag."""
    return length // (2 * cp if zigzag else cp)


def halo(length: int, cp: int, window: int | None, *, zigzag: bool) -> int | None:
    """Returns the number of tokens before a chunk that its tokens see; None to gather all, which is no more."""
    if window is None:
        return None
    size = chunk_size(length, cp, zigzag=zigzag)
    moved = sum(num_routes(cp, hop, zigzag=zigzag) * tokens for hop, tokens in hops(window - 1, size))
    return window - 1 if moved < length // cp * (cp - 1) else None


def hops(reach: int, size: int) -> list[tuple[int, int]]:
    """Returns how far each chunk before one is that a halo reaches into, and how many tokens of it are seen."""
    return [(hop, min(size, reach - (hop - 1) * size)) for hop in range(-(-reach // size), 0, -1)]


def routes(cp: int, hop: int, *, zigzag: bool) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Returns who sends a chunk to whoever has the one that comes `hop` chunks later, if that is another device.

    Returns:
      Pairs of devices, source and target, by the places that the chunk has on the one and the later on the other.
    """
    count = 2 * cp if zigzag else cp

    def holder(chunk: int) -> tuple[int, int]:
        return (chunk, 0) if chunk < cp else (count - 1 - chunk, 1)

    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for chunk in range(hop, count):
        (source, sent), (target, received) = holder(chunk - hop), holder(chunk)
        if source != target:
            found.setdefault((sent, received), []).append((source, target))
    return found


def num_routes(cp: int, hop: int, *, zigzag: bool) -> int:
    """Returns the number of `routes`."""
    if not zigzag:
        return int(hop < cp)
    from_first_to_second = min(2 * cp - 1, cp - 1 + hop) - max(cp, hop) + 1 - hop % 2  # one pair is of one device
    return 2 * (hop < cp) + (from_first_to_second > 0)


def with_halo(x: Array, reach: int, num_chunks: int) -> list[Array]:
    """Returns each chunk of this device behind the `reach` tokens before it: zeros where there are none.

    Args:
      x: this device's tokens `[b, T/cp, ...]`.
      reach: number of tokens.
      num_chunks: chunks that they are, 2 in the order zigzag.
    """
    chunks, cp = jnp.split(x, num_chunks, axis=1), axis_size(CP)
    pieces: list[list[Array]] = [[] for _ in chunks]
    for hop, tokens in hops(reach, chunks[0].shape[1]):
        tails = [chunk[:, -tokens:] for chunk in chunks]
        arrived = [jnp.zeros_like(tail) for tail in tails]
        if num_chunks == 2:  # of the two chunks of one device, one may be so far before the other
            arrived[1] = jnp.where(2 * axis_index(CP) == 2 * cp - 1 - hop, tails[0], 0)
        for (sent, received), pairs in routes(cp, hop, zigzag=num_chunks == 2).items():
            arrived[received] += permute(tails[sent], CP, pairs)
        for each, tail in zip(pieces, arrived, strict=True):
            each.append(tail)
    return [jnp.concatenate([*before, chunk], axis=1) for before, chunk in zip(pieces, chunks, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Attended:
    """Attention as far as context parallelism is concerned."""

    queries: int
    """Query heads of a device."""
    keys: int
    """kv heads of a device."""
    head_bytes: int
    """Bytes of a head of one token."""
    window: int | None
    """Positions that each one sees."""

    def shared(self, cp: int) -> int:
        """Returns the number of kv heads of a device, with those that ulysses copies."""
        return self.keys * copies_of(self.keys, cp)

    def method(self, share: Share) -> tuple[Method, str]:
        """Returns how a device attends over cp, and why: of what is possible that which moves less in training."""
        cp = share.sizes[CP]
        if cp == 1:
            return "ulysses", "a device has all tokens of its heads"
        if share.context != "auto":
            return share.context, "as configured"
        if self.queries % cp:
            return "gather", f"cp {cp} does not divide the {self.queries} query heads of a device"
        trained = replace(share, training=True, frozen=False, remat="none")  # a forward pass does not know of these
        ulysses, gather = (bytes_sent(self.moves(way, "", trained), trained) for way in ("ulysses", "gather"))
        if ulysses <= gather:
            return "ulysses", f"it moves {ulysses / max(gather, 1):.2f} x what gather does"
        return "gather", f"it moves {gather / ulysses:.2f} x what ulysses does"

    def uneven(self, share: Share) -> bool:
        """Returns whether devices that hold a chunk each, one after the other, have unequal work."""
        gathers = self.method(share)[0] == "gather"
        return gathers and halo(share.length, share.sizes[CP], self.window, zigzag=False) is None

    def zigzag(self, share: Share) -> bool:
        """Returns whether devices have even work in the order zigzag alone, which takes a length that 2cp divides."""
        return share.length % (2 * share.sizes[CP]) == 0 and self.uneven(share)

    def chunks(self, method: Method, share: Share) -> tuple[range, ...]:
        """Returns the positions of the queries of the device that has the most to do."""
        length, size = share.length, chunk_size(share.length, share.sizes[CP], zigzag=share.zigzag)
        if method == "ulysses":
            return (range(length),)
        last = (range(length - size, length),)
        return (range(size), *last) if share.zigzag else last

    def moved_bytes(self, method: Method, share: Share) -> int:
        """Returns the bytes of queries, keys and values that a device has of other devices' tokens, with its own."""
        cp, token = share.sizes[CP], share.tokens * self.head_bytes
        if cp == 1:
            return 0
        if method == "ulysses":
            return (self.queries + 2 * self.shared(cp)) * token
        reach, chunks = halo(share.length, cp, self.window, zigzag=share.zigzag), 1 + share.zigzag
        positions = share.length if reach is None else share.length // cp + chunks * reach
        return 2 * self.keys * self.head_bytes * share.rows * positions

    def moves(self, method: Method, module: str, share: Share, *, result_read: bool = True) -> Iterator[Moves]:
        """Yields what a method moves.

        Args:
          method: how.
          module: name of the layer.
          share: of the device.
          result_read: the backward pass reads what attention gives to the output projection.
        """
        cp, token = share.sizes[CP], share.tokens * self.head_bytes
        again = share.remat in ELEMENTWISE_AGAIN
        seen = share.passes(again, 1)
        reach = halo(share.length, cp, self.window, zigzag=share.zigzag)
        if method == "ulysses":
            for heads in (self.queries, self.shared(cp), self.shared(cp)):
                yield Moves(Collective(ALL_TO_ALL, CONTEXT, cp, heads * token, module), seen)
            result = Collective(ALL_TO_ALL, CONTEXT, cp, self.queries * token, module)
            yield Moves(result, share.passes(again and result_read, 1))
        elif reach is None:
            gathered = self.keys * token * cp
            yield Moves(Collective(ALL_GATHER, CONTEXT, cp, gathered, module), 2 * share.passes(again, 0))
            yield Moves(Collective(REDUCE_SCATTER, CONTEXT, cp, gathered, module), 2 * int(share.training))
        else:
            for hop, tokens in hops(reach, chunk_size(share.length, cp, zigzag=share.zigzag)):
                sent = 2 * self.keys * self.head_bytes * share.rows * tokens
                count = num_routes(cp, hop, zigzag=share.zigzag)
                yield Moves(Collective(PERMUTE, CONTEXT, cp, sent, module), count * seen)
