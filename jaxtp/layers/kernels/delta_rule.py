"""The gated delta rule by chunks in plain `lax`, for every backend.

The state S of a value head, `[K, V]`, maps keys to values. Each token decays it, writes its value
and reads:

    S = exp(log_decay) * S;    S = S + k^T (write * (v - k S));    y = q S

The decay of Kimi Delta Attention (arXiv 2510.26692) is a number for each row of S.

In a chunk of c tokens all writes together solve a unit lower triangular system (the WY form: Yang
et al., arXiv 2412.06464), so that only the states at the beginnings of chunks are computed one
after the other.

Letters of einsum: b rows, g key heads, r value heads of each, n chunks, i and j tokens of a chunk,
k and v widths.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxtp.collectives import vary_alike, vary_like
from jaxtp.layers.kernels.padding import pad_to, round_up

CARRIED = "carried"
"""`checkpoint_name` of the states and new values that the backward pass of `chunk_states` needs."""

_BLOCK = 32  # Number of chunks that `chunk_sums` sums by one matrix product

State = Array | Callable[[Array, Array], Array] | None
_Results = tuple[Array, Array, Array]
Scan = Callable[[Array, Array, Array, Array, Array], _Results]
Recurrence = Callable[..., _Results]  # see `states_by`


class Tokens(NamedTuple):
    """Tokens of sequences; value head h uses the query and key of head h // (Hv // Hk)."""

    q: Array  # L2-normalised, `[B, T, Hk, K]`
    k: Array  # L2-normalised, `[B, T, Hk, K]`
    v: Array  # `[B, T, Hv, V]`
    log_decay: Array  # at most 0, `[B, T, Hv]`, or `[B, T, Hv, K]` with a decay for each row of S
    write: Array  # the strength of writing, `[B, T, Hv]`
    # Whether a document begins at a token, which reads nothing from before, `[B, T]`
    starts: Array | None = None


def delta_rule(
    tokens: Tokens,
    state: State = None,
    *,
    chunk: int = 64,
    scan: Scan | None = None,
    subtracts: bool = True,
) -> tuple[Array, Array]:
    """Returns the queries' results, `[B, T, Hv, V]`, and the final state, `[B, Hv, K, V]`.

    The state is at least float32. Products are in the dtype of `v` with float32 sums. The backward
    pass saves the arguments and `CARRIED`.

    Args:
      state: the initial state; a function gets the tokens' affine map,
        `(M [B, Hv, K, K], U [B, Hv, K, V])` with final state = M initial + U, and returns it; None
        is zero. Without `subtracts` M is the diagonal, `[B, Hv, K, 1]`.
      chunk: tokens of a chunk, a power of two.
      scan: replaces `chunk_states`.
      subtracts: if not, a token writes `write * v`, whatever value the state has for its key.
    """
    q, k, v, log_decay, write, starts = tokens
    rows, length, heads, values = v.shape
    wide = jnp.promote_types(v.dtype, jnp.float32)
    chunk = min(chunk, 1 << (length - 1).bit_length())
    if starts is None:
        starts = jnp.zeros((rows, length), bool)
    if state is None or callable(state):
        initial = jnp.zeros((rows, heads, k.shape[3], values), wide)
    else:
        initial = state
    tokens = Tokens(
        q.astype(v.dtype),
        k.astype(v.dtype),
        v,
        log_decay.astype(wide),
        write.astype(wide),
        starts,
    )
    tokens, initial = vary_alike((tokens, initial.astype(wide)))
    begin = state if callable(state) else None
    save_carried = jax.checkpoint_policies.save_only_these_names(CARRIED)

    @partial(jax.checkpoint, policy=save_carried)
    def run(tokens: Tokens, initial: Array) -> tuple[Array, Array]:
        kind = _Chunks if tokens.log_decay.ndim == 3 else _ChannelChunks
        chunks = kind(chunk, tokens)
        if not subtracts:
            return chunks.sums(None if state is None else begin or (lambda *_: initial))
        return chunks.rule(scan or chunk_states, begin, initial)

    y, final = run(tokens, initial)
    return y[:, :length], final


def delta_step(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    write: Array,
    state: Array,
    *,
    subtracts: bool = True,
) -> tuple[Array, Array]:
    """Returns one token's result of each row, `[B, Hv, V]`, and the new state, `[B, Hv, K, V]`."""
    group = v.shape[1] // k.shape[1]
    q = jnp.repeat(q.astype(state.dtype), group, axis=1)  # [B, Hv, K]
    k = jnp.repeat(k.astype(state.dtype), group, axis=1)
    decay = jnp.exp(log_decay).reshape(*v.shape[:2], -1)  # [B, Hv, 1], or [B, Hv, K]
    # XLA would copy a state that is decayed, grouped or transposed before the product, and not
    # update it in place.
    queries_keys = jnp.stack([q * decay, k * decay], axis=2)
    read = jnp.einsum("bhsk,bhkv->bhsv", queries_keys, state)
    new = write[..., None] * (v - read[:, :, 1] if subtracts else v)
    after = decay[..., None] * state + k[..., None] * new[:, :, None]
    from_state = read[:, :, 0]
    score = jnp.sum(q * k, axis=-1, keepdims=True)
    y = from_state + score * new
    return y.astype(v.dtype), after


class _Chunks:
    """Tokens in chunks, `[B, Hk, Hv // Hk, C, c, ...]`; queries and keys without the third dim."""

    def __init__(self, chunk: int, tokens: Tokens):
        q, k, v, log_decay, write, starts = tokens
        rows, length, keys, _ = k.shape

        def chunks(x: Array, *heads: int) -> Array:
            x = pad_to(x, {1: round_up(length, chunk)})
            x = x.reshape(rows, -1, chunk, *heads, *x.shape[3:])
            count = len(heads)
            return jnp.moveaxis(x, range(3, 3 + count), range(1, 1 + count))

        group = v.shape[2] // keys
        self.q = chunks(q, keys)
        self.k = chunks(k, keys)
        self.v = chunks(v, keys, group)
        log_decay = chunks(log_decay, keys, group)
        self.write = chunks(write, keys, group)
        # 0 stands for a document that began before the chunk.
        document = jnp.cumsum(chunks(jnp.asarray(starts)), axis=-1)[:, None, None]
        index = jnp.arange(chunk)
        self.lower = index[:, None] > index
        same_document = document[..., :, None] == document[..., None, :]
        self.is_visible = same_document & (index[:, None] >= index)
        self._set_decays(log_decay, document == 0)

    def _set_decays(self, log_decay: Array, continues: Array) -> None:
        # Sums of the decays of tokens j+1 to i. Differences of one running sum would lose digits
        # after strong decay.
        is_summed = (self.lower | jnp.eye(len(self.lower), dtype=bool)).astype(log_decay.dtype)
        decays = jnp.where(self.lower, log_decay[..., None], 0)
        sums = _exact("il,bgrnlj->bgrnij", is_summed, decays)
        self.between = jnp.where(self.is_visible, jnp.exp(sums), 0)
        from_begin = jnp.exp(sums[..., 0] + log_decay[..., :1])
        self.from_state = jnp.where(continues, from_begin, 0)
        self.to_end = self.between[..., -1, :, None]
        self.whole = self.from_state[..., -1]

    def of_values(self, x: Array) -> Array:
        """Repeats the numbers of each key head for its value heads."""
        # The transpose of a concatenation is additions, of a broadcast a reduction, which XLA for
        # CPUs does slowly.
        return jnp.concatenate([x[:, :, None]] * self.v.shape[2], axis=2)

    def times_keys(self, x: Array) -> Array:
        """Returns the products of queries or keys with the keys of a chunk."""
        return self.of_values(_product("bgnik,bgnjk->bgnij", x, self.k))

    def from_keys(self, inverse: Array) -> Array:
        """Returns what is subtracted of the state before a chunk: `w` of `chunk_states`."""
        decayed_inverse = (inverse * self.from_state[..., None, :]).astype(self.v.dtype)
        # In the other order XLA for CPUs would transpose a factor, which it cannot for bfloat16
        # without optimization.
        return _product("bgnjk,bgrnij->bgrnik", self.k, decayed_inverse)

    def of_states(self, states: Array) -> Array:
        """Returns what queries read from the states before their chunks, `[..., K, V]`."""
        read = _product("bgnik,bgrnkv->bgrniv", self.q, states.astype(self.v.dtype))
        return self.from_state[..., None] * read

    def rule(
        self,
        scan: Scan,
        begin: Callable[[Array, Array], Array] | None,
        initial: Array,
    ) -> tuple[Array, Array]:
        """Returns what the tokens read, and the final state; see `delta_rule`."""
        w, u = self._solved_writes()
        k = self.of_values(self.k) * self.to_end
        w, u, k = (_by_head(x.astype(self.v.dtype)) for x in (w, u, k))
        decay = _by_head(self.whole)
        if begin is not None:
            # The affine map of all chunks: the images of the zero state and of the identity
            width = w.shape[-1]
            columns = jnp.concatenate([u, jnp.zeros_like(w)], axis=-1)
            zeros = jnp.zeros_like(initial, shape=(*initial.shape[:3], width))
            identity = zeros + jnp.eye(width, dtype=initial.dtype)
            basis = jnp.concatenate([initial, identity], axis=-1)
            *_, image = scan(w, columns, k, decay, basis)
            state = begin(image[..., -width:], image[..., :-width])
            initial = vary_like(state.astype(initial.dtype), initial)
        states, new, final = scan(w, u, k, decay, initial)
        new = new.reshape(*self.v.shape[:3], *new.shape[2:])
        return self._results(states, new, self.between), final

    def sums(self, begin: Callable[[Array, Array], Array] | None) -> tuple[Array, Array]:
        """Returns what the tokens read, and the final state, without `subtracts`."""
        dtype = self.v.dtype
        written = self.between * self.write[..., None, :]  # [B, Hk, Hv // Hk, C, c, c]
        k = self.of_values(self.k) * written[..., -1, :, None]
        changes = _by_head(_product("bgrnjk,bgrnjv->bgrnkv", k.astype(dtype), self.v))
        decay = _by_head(self.from_state[..., -1])
        states, final = chunk_sums(changes, decay)
        if begin is not None:
            # `states` and `final` started from zero; the initial state decays over all chunks.
            whole = jnp.prod(decay, axis=-1)[..., None, None]
            diagonal = jnp.broadcast_to(whole, (*final.shape[:3], 1))
            state = vary_like(begin(diagonal, final).astype(final.dtype), final)
            states += _decays_until(decay)[..., None, None] * state[:, :, None]
            final = final + diagonal * state
        return self._results(states, self.v, written), final

    def _solved_writes(self) -> tuple[Array, Array]:
        """Returns `w` and `u` of `chunk_states`, from the system of all writes of a chunk."""
        dtype = self.v.dtype
        weights = self.write[..., None] * self.times_keys(self.k) * self.between
        system = jnp.where(self.lower, weights, 0)
        inverse = unit_inverse(system) * self.write[..., None, :]
        u = _product("bgrnij,bgrnjv->bgrniv", inverse.astype(dtype), self.v)
        return self.from_keys(inverse), u

    def _results(self, states: Array, new: Array, weights: Array) -> Array:
        """Returns what queries read from the state before their chunk, and from the chunk.

        Query i reads `new[j]` with the factor `weights[i, j]`.
        """
        dtype = self.v.dtype
        heads = self.v.shape[:3]
        states = states.reshape(*heads, *states.shape[2:])
        y = self.of_states(states)
        scores = self.times_keys(self.q) * weights
        y += _product("bgrnij,bgrnjv->bgrniv", scores.astype(dtype), new)
        y = _by_head(y).astype(dtype)
        y = jnp.moveaxis(y, 1, 3)  # [B, C, c, Hv, V]
        return y.reshape(y.shape[0], -1, *y.shape[3:])


class _ChannelChunks(_Chunks):
    """Chunks of tokens that decay each row of the states by itself.

    A product of two tokens is a sum over rows, each decayed between the tokens.
    """

    def _set_decays(self, log_decay: Array, continues: Array) -> None:
        self.log_decay = log_decay  # [B, Hk, Hv // Hk, C, c, K]
        self.between = self.is_visible.astype(log_decay.dtype)
        first, last = sums_in_blocks(log_decay)[-1]
        self.from_state = jnp.where(continues[..., None], jnp.exp(first), 0)
        self.to_end = jnp.where(self.is_visible[..., -1, :, None], jnp.exp(last), 0)
        self.whole = self.from_state[..., -1, :]

    def times_keys(self, x: Array) -> Array:
        """Returns the products, which have the decays already."""
        return decayed_products(self.of_values(x), self.of_values(self.k), self.log_decay)

    def from_keys(self, inverse: Array) -> Array:
        """See `_Chunks`."""
        k = (self.of_values(self.k) * self.from_state).astype(self.v.dtype)
        return _product("bgrnjk,bgrnij->bgrnik", k, inverse.astype(k.dtype))

    def of_states(self, states: Array) -> Array:
        """See `_Chunks`."""
        q = (self.of_values(self.q) * self.from_state).astype(self.v.dtype)
        return _product("bgrnik,bgrnkv->bgrniv", q, states.astype(q.dtype))


def decayed_products(x: Array, k: Array, log_decay: Array) -> Array:
    """Returns `sum over K of x_i k_j exp(log_decay_j+1 + ... + log_decay_i)`, `[..., c, c]`.

    It is zero for tokens i before j. The factors are `x exp(sum)` and `k exp(sum)` with sums on
    both sides of a token between i and j, so that no exponent is above 0: pairs of blocks of 1, 2,
    4 and more tokens, one level after the other.

    Args:
      x, k, log_decay: `[..., c, K]`, with a power of two c.
    """
    products = jnp.sum(x.astype(log_decay.dtype) * k, axis=-1)[..., None, None]
    # Each level has blocks [..., c / size, size, K].
    for first, last in sums_in_blocks(log_decay)[:-1]:
        size = first.shape[-2]
        later = (in_blocks(x, size) * jnp.exp(first))[..., 1::2, :, :].astype(x.dtype)
        earlier = (in_blocks(k, size) * jnp.exp(last))[..., ::2, :, :].astype(k.dtype)
        corner = _product("...ik,...jk->...ij", later, earlier)
        upper = jnp.concatenate([products[..., ::2, :, :], jnp.zeros_like(corner)], axis=-1)
        lower = jnp.concatenate([corner, products[..., 1::2, :, :]], axis=-1)
        products = jnp.concatenate([upper, lower], axis=-2)
    return products[..., 0, :, :]


def sums_in_blocks(x: Array) -> list[tuple[Array, Array]]:
    """Returns sums of numbers `[..., c, K]` in blocks of 1, 2, 4, ..., c of them.

    The first sum is from the beginning of the block to a number, the second over those after it;
    both are `[..., c / size, size, K]`, of the last level `[..., c, K]`.
    """
    first = x[..., None, :]
    last = jnp.zeros_like(first)
    levels = [(first, last)]
    while first.shape[-3] > 1:
        totals = first[..., -1:, :]
        halves = [first[..., ::2, :, :], totals[..., ::2, :, :] + first[..., 1::2, :, :]]
        first = jnp.concatenate(halves, axis=-2)
        halves = [last[..., ::2, :, :] + totals[..., 1::2, :, :], last[..., 1::2, :, :]]
        last = jnp.concatenate(halves, axis=-2)
        levels.append((first, last))
    levels[-1] = (first[..., 0, :, :], last[..., 0, :, :])
    return levels


def in_blocks(x: Array, size: int) -> Array:
    """`[..., c, K] -> [..., c / size, size, K]`."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])


def _by_head(x: Array) -> Array:
    """`[B, Hk, Hv // Hk, ...] -> [B, Hv, ...]`."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


@jax.custom_vjp
def chunk_sums(changes: Array, decay: Array) -> tuple[Array, Array]:
    """Returns the states before chunks, `[B, H, C, K, V]`, and the final state.

    Each chunk makes S = decay * S + changes; the first S is zero. A block of chunks is one product,
    and the states before blocks are found in the same way: a loop over chunks is many kernels on a
    GPU, and copies its results.

    Args:
      changes: `[B, H, C, K, V]`, float32.
      decay: of the whole chunk, `[B, H, C]`; 0 where a document begins in it.
    """
    return _sums(decay, changes)


def _sums(decay: Array, changes: Array) -> tuple[Array, Array]:
    rows, heads, count, *state = changes.shape
    size = min(count, _BLOCK)
    padding = ((0, 0), (0, 0), (0, -count % size))
    decay = jnp.pad(decay, padding, constant_values=1).reshape(rows, heads, -1, size)
    changes = jnp.pad(changes, (*padding, (0, 0), (0, 0))).reshape(*decay.shape, *state)
    index = jnp.arange(size)
    is_later = index[:, None] > index
    # [..., n, l]: how a state after chunk l decays until chunk n begins
    decays = jnp.cumprod(jnp.where(is_later, decay[..., None], 1), axis=-2)
    decays = jnp.where(is_later, jnp.roll(decays, 1, axis=-2), 0)
    states = _exact("bhrnl,bhrlkv->bhrnkv", decays, changes)
    last = decay[..., -1, None, None] * states[..., -1, :, :] + changes[..., -1, :, :]
    if count == size:
        return states[:, :, 0], last[:, :, 0]
    before, final = _sums(jnp.prod(decay, axis=-1), last)
    states += _decays_until(decay)[..., None, None] * before[:, :, :, None]
    return states.reshape(rows, heads, -1, *state)[:, :, :count], final


def _decays_until(decay: Array) -> Array:
    """Returns how a state before all chunks decays until each of them begins, `[..., C]`."""
    decays = jnp.cumprod(decay, axis=-1)[..., :-1]
    return jnp.concatenate([jnp.ones_like(decay[..., :1]), decays], axis=-1)


def _sums_forward(*operands: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    states, final = chunk_sums(*operands)
    states = checkpoint_name(states, CARRIED)
    return (states, final), (operands[1], states)


def _sums_backward(saved: tuple[Array, Array], grads: tuple[Array, Array]) -> tuple[Array, Array]:
    decay, states = saved
    # They are linear in the changes, so their transpose needs none.
    _, transposed = jax.vjp(partial(_sums, decay), states)
    (d_changes,) = transposed(grads)
    return d_changes, jnp.sum(states * d_changes, axis=(-2, -1))


chunk_sums.defvjp(_sums_forward, _sums_backward)


def chunk_states(
    w: Array,
    u: Array,
    k_decayed: Array,
    decay: Array,
    state: Array,
) -> _Results:
    """Returns the states before chunks, `[B, H, C, K, V]`, the new values and the final state.

    In each chunk, new values = u - w S and then S = decay * S + k_decayed^T (new values).

    Args:
      w, k_decayed: `[B, H, C, c, K]`.
      u: `[B, H, C, c, V]`.
      decay: of the whole chunk, `[B, H, C]`, or `[B, H, C, K]` of each row of the state; 0 where a
        document begins in it.
      state: `[B, H, K, V]`, float32.
    """
    return states_by(_recurrence, w, u, k_decayed, decay, state)


def _recurrence(
    a: Array,
    u: Array,
    b: Array,
    decay: Array,
    state: Array,
    d_states: Array | None,
) -> _Results:
    # The carry is one state: a policy that saves everything saves the carry of each turn.
    def step(state: Array, n: Array) -> tuple[Array, tuple[Array, Array]]:
        product = _product("bhck,bhkv->bhcv", a[:, :, n], state.astype(a.dtype))
        new = u[:, :, n] - product if d_states is None else u[:, :, n] + product
        new = new.astype(u.dtype)
        change = _product("bhck,bhcv->bhkv", b[:, :, n], new)
        decayed = decay[:, :, n].reshape(*state.shape[:2], -1, 1) * state
        if d_states is not None:
            change = d_states[:, :, n] - change
        return decayed + change, (state, new)

    index = jnp.arange(a.shape[2])
    final, chunks = lax.scan(step, state, index, reverse=d_states is not None)
    states, new = (jnp.moveaxis(x, 0, 2) for x in chunks)
    return states, new, final


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def states_by(run: Recurrence, *operands: Array) -> _Results:
    """Computes `chunk_states` of its operands by a recurrence.

    Its gradient is the same recurrence, from the last chunk to the first; the other gradients are
    products over all chunks. `run(a, u, b, decay, state, d_states)` returns the states before each
    visit, the new values, the last state:

        d_states    order       new              next state
        None        forward     u - a @ state    decay * state + b.T @ new
        an array    backward    u + a @ state    decay * state - b.T @ new + d_states
    """
    return run(*operands, None)


def _forward(run: Recurrence, *operands: Array) -> tuple[_Results, tuple[Array, ...]]:
    w, _, k_decayed, decay, _ = operands
    states, new, final = run(*operands, None)
    states = checkpoint_name(states, CARRIED)
    new = checkpoint_name(new, CARRIED)
    return (states, new, final), (w, k_decayed, decay, states, new)


def _backward(run: Recurrence, saved: tuple[Array, ...], grads: _Results) -> tuple[Array, ...]:
    w, k, decay, states, new = saved
    d_states, d_new, d_final = grads
    d_after, d_u, d_state = run(k, d_new, w, decay, d_final, d_states)
    d_w = -_product("bhncv,bhnkv->bhnck", d_u, states.astype(w.dtype))
    d_k = _product("bhncv,bhnkv->bhnck", new, d_after.astype(k.dtype))
    d_w = d_w.astype(w.dtype)
    d_k = d_k.astype(k.dtype)
    d_decay = jnp.sum(states * d_after, axis=tuple(range(decay.ndim - 5, 0)))
    return d_w, d_u, d_k, d_decay, d_state


states_by.defvjp(_forward, _backward)


@jax.custom_vjp
def unit_inverse(below: Array) -> Array:
    """Returns the inverse of the identity plus `below`, `[..., c, c]`.

    `below` is zero on and above the diagonal. By blocks: two of half the size, then the block below
    them. Powers of `below` can be large where the inverse is not.
    """
    size = below.shape[-1]
    if size == 1:
        return jnp.ones_like(below)
    half = size // 2
    blocks = [below[..., :half, :half], below[..., half:, half:]]
    inverses = unit_inverse(jnp.stack(blocks))
    corner = _exact("...ij,...jk->...ik", inverses[1], below[..., half:, :half])
    corner = -_exact("...ij,...jk->...ik", corner, inverses[0])
    upper = jnp.concatenate([inverses[0], jnp.zeros_like(corner)], axis=-1)
    lower = jnp.concatenate([corner, inverses[1]], axis=-1)
    return jnp.concatenate([upper, lower], axis=-2)


def _unit_inverse_backward(inverse: Array, grad: Array) -> tuple[Array]:
    grad = _exact("...ji,...jk->...ik", inverse, grad)
    return (-_exact("...ij,...kj->...ik", grad, inverse),)


unit_inverse.defvjp(lambda below: (unit_inverse(below),) * 2, _unit_inverse_backward)


def _exact(letters: str, a: Array, b: Array) -> Array:
    return jnp.einsum(letters, a, b, precision=lax.Precision.HIGHEST)


def _product(letters: str, a: Array, b: Array) -> Array:
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(letters, a, b, preferred_element_type=wide)
