"""Costs of each layer on one device, as closed formulas: fast enough to search thousands of settings.

`branch_costs` dispatches on the class of a branch: register a function for a new class, or it is traced
(`traced_costs.py`). `tests/models/test_budget.py` and `test_work.py` compare formulas with jaxprs and compiled
programs.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import singledispatch
from typing import TypedDict

from jaxtp.analysis.collective import ALL_GATHER, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, Collective
from jaxtp.analysis.costs import (
    FLOAT32,
    INT32,
    RECOMPUTE_POLICIES,
    REGATHER_POLICIES,
    REPROJECT_POLICIES,
    REREDUCE_POLICIES,
    SAVED_RESULT_POLICIES,
    CachedBytes,
    CollectiveCost,
    Cost,
    ElementwiseTraffic,
    Product,
    SavedActivations,
    ScoreTraffic,
    Weight,
    Workload,
    Workspace,
    enter,
    itemsize,
    leave,
    ring,
    sums_over,
)
from jaxtp.layers.activations import Method
from jaxtp.layers.attention import CausalSelfAttention
from jaxtp.layers.branch import Branch
from jaxtp.layers.context import ContextAttention, chunk_size, halo, hops, num_routes
from jaxtp.layers.embedding import EMBEDDING, LearnedPositions, VocabParallelEmbedding
from jaxtp.layers.experts import EXPERTS, MixtureOfExperts
from jaxtp.layers.kernels.grouped import is_dense, pick_method
from jaxtp.layers.kernels.select import num_scores, pick_kernel
from jaxtp.layers.linear import COLUMN, ROW, ColumnParallelLinear, RowParallelLinear
from jaxtp.layers.lora import Lora
from jaxtp.layers.mlp import MLP
from jaxtp.layers.norm import ATTEND, Norm, QKNorm
from jaxtp.layers.overlap import is_ring
from jaxtp.layers.parameter import PaddedDim, Precision
from jaxtp.mesh import CONTEXT, CP, STORAGE, TP, parts

SCORE_PASSES = 5
"""Times that float32 scores go through memory outside of products: mask and maximum, exponentials, division; backward
the product with the probabilities, and the difference. An estimate."""


class _Projection(TypedDict):
    """Shared by the weights of one projection."""

    module: str
    precision: Precision


@singledispatch
def branch_costs(branch: Branch, work: Workload, *, read: bool) -> Iterator[Cost]:
    """Yields the costs of a branch without arrays; `read`: the backward pass reads its result."""
    raise TypeError(f"{type(branch).__name__} has no formulas (branch_costs.register); traced_costs reads its program")


def has_formulas(branch: Branch) -> bool:
    """Returns whether `branch_costs` supports the branch, whose `__call__` may be inherited but not replaced."""
    kind = type(branch)
    registered = next((base for base in kind.__mro__ if base in branch_costs.registry), object)
    return registered is not object and kind.__call__ is registered.__call__


def column_costs(layer: ColumnParallelLinear, work: Workload, name: str) -> Iterator[Cost]:
    """Yields the costs of a column layer; `name` labels its product."""
    tokens, compute = work.tokens, itemsize(layer.precision.compute)
    recomputed = work.remat in REPROJECT_POLICIES
    local = [f.local(work.tp) for f in layer.features]
    shared: _Projection = {"module": COLUMN, "precision": layer.precision}
    for i, f in enumerate(layer.features):
        group = f.shared_by(work.tp)
        yield Weight(size=layer.in_features * f.size, split=f, group=group, **shared)
        if layer.biases:
            fixed = i in layer.fixed_biases
            yield Weight(size=f.size, split=f, group=group, fsdp=False, again=recomputed, fixed=fixed, **shared)
    hidden = tokens * layer.in_features * compute
    split = work.is_split(layer.sequence_parallel)
    if is_ring(layer.overlap, work.tp, split=split):
        times = work.num_evals(recomputed, 1 + (not work.frozen or bool(layer.adapted)))
        chunks, saved_input = work.tp, hidden // work.tp
        yield ring(COLUMN, work, hidden, times)
    else:
        chunks, saved_input = 1, hidden
        yield from enter(COLUMN, work, hidden, split=split, again=work.remat in REGATHER_POLICIES)
    count = chunks * work.num_evals(recomputed, work.num_gradients)
    yield Product.of(name, (tokens // chunks, layer.in_features, sum(local)), compute, count)
    yield Workspace(3 * hidden)
    outputs = tokens * sum(local) * compute
    saved = {"none": saved_input, "save_gathered": saved_input, "save_dots": outputs}
    yield SavedActivations(saved.get(work.remat, 0))
    for i, lora in zip(layer.adapted, layer.loras, strict=True):
        f = layer.features[i]
        a = Weight(size=layer.in_features * lora.rank, tp=False, used_by_all_tp=True, **shared)
        b = Weight(size=lora.rank * f.size, split=f, fsdp=False, group=f.shared_by(work.tp), **shared)
        yield from lora_costs(lora, work, (layer.in_features, local[i]), (a, b), recomputed=recomputed)


def row_costs(layer: RowParallelLinear, work: Workload, name: str, *, read: bool) -> Iterator[Cost]:
    """Yields the costs of a row layer."""
    compute, split = itemsize(layer.precision.compute), work.is_split(layer.sequence_parallel)
    recomputed = read and work.remat in REREDUCE_POLICIES
    rows = layer.in_features
    local = rows.padded(work.tp) // work.tp
    shared: _Projection = {"module": ROW, "precision": layer.precision}
    yield Weight(size=rows.size * layer.features, split=rows, transposed=True, **shared)
    if layer.bias is not None:
        again = read and work.remat != "none"
        yield Weight(size=layer.features, tp=False, used_by_all_tp=split, again=again, **shared)
    chunks, size = 1, work.tokens * layer.features * compute
    if is_ring(layer.overlap, work.tp, split=split):
        chunks = work.tp
        yield ring(ROW, work, size, work.num_evals(recomputed, 1))
    else:
        yield from leave(ROW, work, size, split=split, again=recomputed)
    count = chunks * work.num_evals(recomputed, work.num_gradients)
    yield Product.of(name, (work.tokens // chunks, local, layer.features), compute, count)
    if read and work.remat in ("save_dots", "save_gathered", "save_reduced"):
        yield SavedActivations(work.between(layer.sequence_parallel) * layer.features * compute)
    for lora in layer.loras:
        a = Weight(size=rows.size * lora.rank, split=rows, fsdp=False, **shared)
        b = Weight(size=lora.rank * layer.features, tp=False, used_by_all_tp=True, **shared)
        yield from lora_costs(lora, work, (local, layer.features), (a, b), recomputed=recomputed)


def lora_costs(
    lora: Lora, work: Workload, features: tuple[int, int], weights: tuple[Weight, Weight], *, recomputed: bool
) -> Iterator[Cost]:
    """Yields the costs of an adapter with local `features` and weights A and B, whose product may be recomputed."""
    compute = itemsize(weights[0].precision.compute)
    yield from (replace(weight, adapter=True) for weight in weights)
    inner = work.num_evals(work.remat in REPROJECT_POLICIES, 2)
    yield Product.of("adapter's A", (work.tokens, features[0], lora.rank), compute, inner)
    yield Product.of("adapter's B", (work.tokens, lora.rank, features[1]), compute, work.num_evals(recomputed, 2))
    if work.remat in ("none", "save_dots"):
        yield SavedActivations(work.tokens * lora.rank * compute)


def norm_costs(norm: Norm, work: Workload, *, inside: bool = True, recomputed: bool = False) -> Iterator[Cost]:
    """Yields the costs of a norm; a backward pass reloads scales inside of blocks, and biases if recomputed."""
    shared: _Projection = {"module": norm.name, "precision": norm.precision}
    used_by_all = work.is_split(norm.sequence_parallel)
    for again in (inside,) if norm.bias is None else (inside, recomputed):
        yield Weight(size=norm.features, tp=False, used_by_all_tp=used_by_all, again=again, **shared)
    if inside:
        residual = work.between(norm.sequence_parallel) * norm.features
        yield ElementwiseTraffic(2 * residual * itemsize(norm.precision.compute))
        if work.remat == "none":  # the input, and the result for the gradient of the scale
            yield SavedActivations(FLOAT32 * residual * (1 if work.frozen else 2))


def qk_norm_costs(norm: QKNorm, work: Workload) -> Iterator[Cost]:
    """Yields the costs of a norm of queries or keys."""
    shared: _Projection = {"module": ATTEND, "precision": norm.precision}
    if norm.per_head:
        yield Weight(size=norm.heads.factors[-1], fsdp=False, tp=False, used_by_all_tp=True, **shared)
        return
    # The mean square over tp: a float for each token, forward, recomputed and backward.
    yield sums_over(ATTEND, (TP,), work.sizes, work.tokens * FLOAT32, 3 if work.training else 1)
    yield Weight(size=norm.heads.size, fsdp=False, group=norm.heads.shared_by(work.tp), split=norm.heads, **shared)


@branch_costs.register
def attention_costs(layer: CausalSelfAttention, work: Workload, *, read: bool) -> Iterator[Cost]:
    """Yields the costs of attention."""
    config, compute, cp = layer.config, itemsize(layer.precision.compute), work.sizes[CP]
    kernel, _ = pick_kernel(config.attention, config.use_on(work, layer.precision.compute))
    stored_kv, group, _ = config.heads.stored(work.tp)
    heads, kv_heads = config.heads.on_device(work.tp)
    queries, keys = (work.tokens * count * config.head_dim for count in (heads, kv_heads))
    yield from column_costs(layer.qkv, work, "q, k, v")
    for norm in layer.qk_norms:
        yield from qk_norm_costs(norm, work)

    attention = config.context_attention(work.tp)
    method, _ = attention.method(work)
    head_bytes = config.head_dim * compute
    yield from context_costs(attention, method, head_bytes, work, result_read=not work.frozen or bool(layer.out.loras))
    chunks = query_chunks(method, work)
    number, m, n = kernel.blocks(chunks, config.sliding_window)
    saved = kernel.can_save_result and work.remat in SAVED_RESULT_POLICIES
    recomputed = work.remat in RECOMPUTE_POLICIES and not saved
    runs = work.rows * (heads // cp if method == "ulysses" else heads) * number
    through = 2 * m * config.head_dim * compute + (m * n * FLOAT32 if kernel.streams_scores else 0)
    counted = num_scores(chunks, config.sliding_window) / (number * m * n)
    # A kernel that does not hold the scores computes them again in its backward pass.
    for name, k, columns, num_backward in (
        ("scores", config.head_dim, n, 2 if kernel.stores_scores else 3),
        ("weighted values", n, config.head_dim, 2),
    ):
        count = work.num_evals(recomputed, num_backward) * runs
        yield Product(name, m, k, columns, count, bytes=through, attention=True, counted=counted)
    scores = runs * m * n if kernel.stores_scores else 0
    if kernel.streams_scores:
        yield ScoreTraffic(runs * m * n * FLOAT32 * SCORE_PASSES)
    rotated = stored_kv * (group + 1) * config.head_dim // work.tp
    yield ElementwiseTraffic(work.tokens * 2 * rotated * compute)
    # Two arrays of scores in float32: the scores or their gradient, and a constant that the mask selects, which XLA
    # takes out of the loop over the blocks. Two in the compute dtype: the softmax, in the layouts of two products.
    remote = remote_bytes(attention, method, head_bytes, work)
    yield Workspace(scores * 2 * (FLOAT32 + compute) + remote)
    if work.remat == "none":
        # Scores before and after the softmax, and queries and keys before their rotation, in float32. With several kv
        # heads the backward loop reads the scores in another layout than the forward loop writes, and XLA copies them.
        copies = 2 + (kv_heads > 1)
        yield SavedActivations(FLOAT32 * (copies * scores + queries + keys) + compute * (queries + keys))
        yield SavedActivations(remote)
    if saved:
        yield SavedActivations(queries * compute + work.tokens * heads * FLOAT32)
    yield CachedBytes(2 * keys * compute)
    yield from row_costs(layer.out, work, "attention out", read=read)


def query_chunks(method: Method, work: Workload) -> tuple[range, ...]:
    """Returns the query positions of the device with the most work."""
    length, size = work.length, chunk_size(work.length, work.sizes[CP], zigzag=work.zigzag)
    if method == "ulysses":
        return (range(length),)
    last = (range(length - size, length),)
    return (range(size), *last) if work.zigzag else last


def remote_bytes(attention: ContextAttention, method: Method, head_bytes: int, work: Workload) -> int:
    """Returns the bytes of queries, keys and values on a device after the exchange over cp.

    `head_bytes` is the size of one head of one token.
    """
    cp, token = work.sizes[CP], work.tokens * head_bytes
    if cp == 1:
        return 0
    if method == "ulysses":
        return (attention.queries + 2 * attention.ulysses_kv_heads(cp)) * token
    reach, chunks = halo(work.length, cp, attention.window, zigzag=work.zigzag), 1 + work.zigzag
    positions = work.length if reach is None else work.length // cp + chunks * reach
    return 2 * attention.keys * head_bytes * work.rows * positions


def context_costs(
    attention: ContextAttention, method: Method, head_bytes: int, work: Workload, *, result_read: bool = True
) -> Iterator[CollectiveCost]:
    """Yields the collectives of attention over cp; `result_read`: the backward pass reads the output's input."""
    cp, token = work.sizes[CP], work.tokens * head_bytes
    recomputed = work.remat in RECOMPUTE_POLICIES
    both = work.num_evals(recomputed, 1)
    reach = halo(work.length, cp, attention.window, zigzag=work.zigzag)
    if method == "ulysses":
        shared = attention.ulysses_kv_heads(cp)
        for heads in (attention.queries, shared, shared):
            yield CollectiveCost(Collective(ALL_TO_ALL, CONTEXT, cp, heads * token, ATTEND), both)
        result = Collective(ALL_TO_ALL, CONTEXT, cp, attention.queries * token, ATTEND)
        yield CollectiveCost(result, work.num_evals(recomputed and result_read, 1))
    elif reach is None:
        size = attention.keys * token * cp
        yield CollectiveCost(Collective(ALL_GATHER, CONTEXT, cp, size, ATTEND), 2 * work.num_evals(recomputed, 0))
        yield CollectiveCost(Collective(REDUCE_SCATTER, CONTEXT, cp, size, ATTEND), 2 * int(work.training))
    else:
        for hop, tokens in hops(reach, chunk_size(work.length, cp, zigzag=work.zigzag)):
            size = 2 * attention.keys * head_bytes * work.rows * tokens
            count = num_routes(cp, hop, zigzag=work.zigzag)
            yield CollectiveCost(Collective(PERMUTE, CONTEXT, cp, size, ATTEND), count * both)


@branch_costs.register
def mlp_costs(layer: MLP, work: Workload, *, read: bool) -> Iterator[Cost]:
    """Yields the costs of an MLP."""
    gated = layer.config.mlp == "gated"
    features = work.tokens * (layer.hidden.padded(work.tp) // work.tp) * itemsize(layer.precision.compute)
    yield from column_costs(layer.gate_up, work, "gate, up") if gated else column_costs(layer.up, work, "up")
    yield ElementwiseTraffic((3 if gated else 2) * features)
    saved = (6 if gated else 3) * features  # gate, up, sigmoid, silu, its derivative and the product
    yield Workspace(saved)
    if work.remat == "none":
        yield SavedActivations(saved)
    yield from row_costs(layer.down, work, "down", read=read)


@branch_costs.register
def experts_costs(layer: MixtureOfExperts, work: Workload, *, read: bool) -> Iterator[Cost]:
    """Yields the costs of experts under uniform routing."""
    config, experts = layer.config, layer.config.num_experts
    split = work.is_split(layer.sequence_parallel)
    in_float32 = replace(layer.precision, compute="float32")
    yield Weight(module=EXPERTS, size=layer.d_model * experts, tp=False, used_by_all_tp=split, precision=in_float32)
    size, active = experts * layer.d_model * config.d_ff, config.experts_per_token / experts
    for _ in ("gate", "up", "down"):
        yield Weight(module=EXPERTS, size=size, active=active, precision=layer.precision)
    hidden = work.tokens * layer.d_model * itemsize(layer.precision.compute)
    routing = 2 * FLOAT32 * work.tokens * config.experts_per_token
    for entered in (routing, hidden):
        yield from enter(EXPERTS, work, entered, split=split, again=work.remat in REGATHER_POLICIES)
    yield from leave(EXPERTS, work, hidden, split=split, again=read and work.remat in REREDUCE_POLICIES)
    if not split and work.training:  # gradients of scores and normalisers, which one device of a tp group sums up
        yield sums_over(EXPERTS, (TP,), work.sizes, FLOAT32 * (experts + 1) * work.rows)
    yield from _expert_products(layer, work, read=read)
    yield from _expert_memory(layer, work, read=read)


def _expert_products(layer: MixtureOfExperts, work: Workload, *, read: bool) -> Iterator[Cost]:
    # Each of the N * k choices by the tokens of a tp group is a row. Products compute the rows routed to the device's
    # experts, elementwise operations all rows. Dense products multiply all rows with all experts.
    config, compute = layer.config, itemsize(layer.precision.compute)
    tokens, choices = work.between(layer.sequence_parallel), work.tokens * config.experts_per_token
    routed = work.num_evals(work.remat in RECOMPUTE_POLICIES, work.num_gradients)
    yield Product.of("router", (tokens, layer.d_model, config.num_experts), FLOAT32, routed)
    local, width = layer.on_device(work.tp)
    rows = choices // work.tp if config.over_tp(work.tp) else choices
    method, _ = pick_method(config.grouped, work.platform)
    for name, inner, outer, recomputed in (
        ("experts' gate, up", layer.d_model, 2 * width, work.remat in REPROJECT_POLICIES),
        ("experts' down", width, layer.d_model, read and work.remat in REREDUCE_POLICIES),
    ):
        count, kernels = work.num_evals(recomputed, work.num_gradients), local * inner * outer
        if is_dense(method, work.platform):
            moved = (local * choices * inner + choices * outer + kernels) * compute
            yield Product(name, local * choices, inner, outer, count, moved, counted=rows / (local * choices))
        else:
            moved = (rows * inner + choices * outer + kernels) * compute
            yield Product(name, rows, inner, outer, count, moved, in_kernel=method == "pallas")
    yield ElementwiseTraffic(compute * (3 * choices * width + 2 * (choices + rows) * layer.d_model))
    if parts(work.sizes, STORAGE) > 1:  # reorders gathered kernels
        yield ElementwiseTraffic(compute * 2 * 3 * local * layer.d_model * width)


def _expert_memory(layer: MixtureOfExperts, work: Workload, *, read: bool) -> Iterator[Cost]:
    config, compute = layer.config, itemsize(layer.precision.compute)
    tokens, choices = work.between(layer.sequence_parallel), work.tokens * config.experts_per_token
    hidden, (local, width) = work.tokens * layer.d_model * compute, layer.on_device(work.tp)
    yield Workspace(compute * choices * (6 * width + 2 * layer.d_model))
    if is_dense(pick_method(config.grouped, work.platform)[0], work.platform):
        # Rows repeated for each expert, in two products at a time.
        yield Workspace(compute * 2 * local * choices * max(width, layer.d_model))
    yield SavedActivations(INT32 * tokens * config.experts_per_token)
    if work.remat == "none":
        scores = 4 * FLOAT32 * tokens * config.num_experts
        yield SavedActivations(choices * width * (6 * compute + FLOAT32) + hidden + scores)
    if work.remat == "save_gathered":
        yield SavedActivations(hidden + 2 * FLOAT32 * choices)
    if work.remat == "save_dots":
        yield SavedActivations(compute * choices * 2 * width)
    if read and work.remat in ("save_dots", "save_gathered", "save_reduced"):
        yield SavedActivations(tokens * layer.d_model * compute)


def embedding_costs(layer: VocabParallelEmbedding, work: Workload) -> Iterator[Cost]:
    """Yields the costs of an embedding."""
    yield from lookup_costs(layer, work, exchanges=layer.exchanges(work))
    size = work.tokens * layer.features * itemsize(layer.precision.compute)
    yield from leave(EMBEDDING, work, size, split=work.is_split(layer.sequence_parallel), again=False)


def lookup_costs(layer: VocabParallelEmbedding, work: Workload, *, exchanges: bool) -> Iterator[Cost]:
    """Yields the costs of gathering the table over fsdp, or exchanging looked-up rows."""
    table = table_weight(EMBEDDING, layer.vocab_size, layer.features, layer.precision)
    yield replace(table, gathered=not exchanges)
    if exchanges:
        shards = parts(work.sizes, STORAGE)
        ids = Collective(ALL_GATHER, STORAGE, shards, shards * work.tokens * INT32, EMBEDDING)
        rows = work.between(layer.sequence_parallel) * layer.features * itemsize(layer.precision.compute)
        yield CollectiveCost(ids, 1)
        backward = work.training and not work.frozen
        yield CollectiveCost(Collective(ALL_TO_ALL, STORAGE, shards, rows, EMBEDDING), 1 + backward)


def table_weight(module: str, vocab_size: int, features: int, precision: Precision) -> Weight:
    """Returns a vocabulary table, loaded once."""
    size, split = vocab_size * features, PaddedDim((vocab_size,))
    return Weight(module=module, size=size, split=split, precision=precision, again=False)


def positions_costs(layer: LearnedPositions, work: Workload) -> Iterator[Cost]:
    """Yields the costs of learned positions."""
    shared: _Projection = {"module": "learned_positions", "precision": layer.precision}
    split = work.is_split(layer.sequence_parallel)
    yield Weight(size=layer.num_positions * layer.features, tp=False, used_by_all_tp=split, again=False, **shared)
