"""What a training step of the decoder must move: its communication budget, by module and mesh axis.

Over tp, in units of (t-1)/t * batch * sequence * d_model * bytes sent by a device, each layer, forward and backward:

| module                    | all-reduce: forward, again, backward | sequence-parallel: forward, again, backward |
|---------------------------|--------------------------------------|---------------------------------------------|
| attention, column layer   | 0, 0, 2                              | 1, 1, 1                                     |
| attention, row layer      | 2, 2, 0                              | 1, 1, 1                                     |
| mlp, column layer         | 0, 0, 2                              | 1, 1, 1                                     |
| mlp, row layer            | 2, never, 0                          | 1, never, 1                                 |
| embedding                 | 2, never, 0                          | 1, never, 1                                 |
| head                      | 0, never, 2                          | 1, never, 1                                 |

"Again" is paid where the remat policy does not keep the result (`remat`): `full` and `offload` repeat all three,
`save_dots` the gathers of the column layers. The block's last reduction is never repeated: nothing of the backward pass
reads it. The loss adds three all-reduces of a float per token.

Every weight is gathered over fsdp for the forward and, in a block, again for the backward pass, in the compute dtype;
its gradient is reduced over fsdp and dp once, in the reduction dtype. Megatron-LM (arXiv 1909.08053, 2205.05198), ZeRO
stage 3 (arXiv 1910.02054).
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from jaxtp.audit.audit import Place
from jaxtp.layers.lora import Target
from jaxtp.layers.sequence import is_split
from jaxtp.mesh import DP, FSDP, TP
from jaxtp.models.config import ModelConfig

COLUMN, ROW, LOSS = "column_parallel_linear", "row_parallel_linear", "vocab_parallel_cross_entropy"
_AGAIN = {"none": (), "save_gathered": (), "save_dots": (COLUMN,), "full": (COLUMN, ROW), "offload": (COLUMN, ROW)}
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
FLOAT32 = 4


@dataclass(frozen=True)
class _Weight:
    """A stored array, and how its layer loads it."""

    module: str
    size: int
    """Elements of the whole array, padding included."""
    tp: bool = True
    """Split over tp."""
    fsdp: bool = True
    """Split over fsdp."""
    group: int = 1
    """Neighbours over tp that gather each other's parts."""
    used_by_all_tp: bool = False
    """Its gradient is summed over tp."""
    gathers: int = 2
    """Times that a step gathers it."""
    copies: int = 1
    """Layers that have one."""
    frozen: bool = False
    """It has no gradient."""


@dataclass(frozen=True)
class Move:
    """Collectives of one kind that a module asks for in a step."""

    module: str
    """As `Collective.module` has it."""

    kind: str
    """all-reduce, all-gather or reduce-scatter."""

    axes: tuple[str, ...]
    """Mesh axes of more than one device along which the devices talk."""

    group: int
    """Devices that take part in each."""

    count: int
    """How often a step runs it, over layers and micro-batches."""

    size: float
    """Bytes of the whole message of each, on average."""

    @property
    def bytes_sent(self) -> float:
        """Bytes that each device sends in a step, in rings; as `Collective.bytes_sent`."""
        return self.count * self.size * _ring(self.group) * (2 if self.kind == ALL_REDUCE else 1)


def step_moves(
    config: ModelConfig, mesh: Mapping[str, int], *, batch_size: int, sequence_length: int, accumulation: int = 1
) -> tuple[Move, ...]:
    """What each device may send in a training step, by module, kind and mesh axes; exact for the Llama shapes.

    With biases, q/k norms and adapters it is an upper bound.

    Args:
      config: the model.
      mesh: devices along each axis.
      batch_size: sequences in the step, over all devices and micro-batches.
      sequence_length: tokens in a sequence.
      accumulation: micro-batches.
    """
    rows = batch_size // (mesh[DP] * mesh[FSDP] * accumulation)
    split = is_split(config.sequence_parallel, sequence_length, mesh[TP])
    moves = [
        *_activations(config, mesh, rows, sequence_length, split),
        *(move for weight in _all_weights(config, mesh, split) for move in _weight_moves(weight, config, mesh)),
    ]
    spanned = (dataclasses.replace(m, axes=tuple(a for a in mesh if a in m.axes and mesh[a] > 1)) for m in moves)
    return tuple(dataclasses.replace(m, count=m.count * accumulation) for m in spanned if m.bytes_sent)


def step_budget(
    config: ModelConfig, mesh: Mapping[str, int], *, batch_size: int, sequence_length: int, accumulation: int = 1
) -> dict[Place, float]:
    """Bytes that each device may send in a training step, by module and mesh axes; arguments as of `step_moves`."""
    budget: Counter[Place] = Counter()
    for move in step_moves(
        config, mesh, batch_size=batch_size, sequence_length=sequence_length, accumulation=accumulation
    ):
        budget[move.module, move.axes] += move.bytes_sent  # type: ignore[assignment]
    return dict(budget)


def _activations(config: ModelConfig, mesh: Mapping[str, int], rows: int, length: int, split: bool) -> Iterator[Move]:
    tokens, tp, layers = rows * length, mesh[TP], config.num_layers
    whole = tokens * config.d_model * jnp.dtype(config.precision.compute).itemsize
    again = _AGAIN[config.remat]
    for block in ("attention", "mlp"):
        for entry, repeated in ((True, COLUMN in again), (False, block == "attention" and ROW in again)):
            module = f"{block}/{COLUMN if entry else ROW}"
            yield from _between_layers(
                module, entry=entry, again=repeated, copies=layers, tp=tp, size=whole, split=split
            )
    for module, entry in (("vocab_parallel_embedding", False), (LOSS, True)):
        yield from _between_layers(module, entry=entry, again=False, copies=1, tp=tp, size=whole, split=split)
    chunks = -(-length // config.loss_chunk)
    yield Move(LOSS, ALL_REDUCE, (TP,), tp, 3 * chunks, tokens * FLOAT32 / chunks)
    yield Move(LOSS, ALL_REDUCE, (DP, FSDP), mesh[DP] * mesh[FSDP], 1, 2 * FLOAT32)
    if config.qk_norm == "projection":  # a mean square of q and of k: forward, again, backward
        yield Move("attention/attend", ALL_REDUCE, (TP,), tp, layers * 2 * 3, tokens * FLOAT32)


def _between_layers(
    module: str, *, entry: bool, again: bool, copies: int, tp: int, size: float, split: bool
) -> Iterator[Move]:
    """What `enter_parallel` (an entry) or `leave_parallel` moves: forward, backward, and forward again."""
    if split:
        forward, backward = (ALL_GATHER, REDUCE_SCATTER) if entry else (REDUCE_SCATTER, ALL_GATHER)
        yield Move(module, forward, (TP,), tp, copies * (2 if again else 1), size)
        yield Move(module, backward, (TP,), tp, copies, size)
    else:  # an entry is summed backward, an exit forward
        yield Move(module, ALL_REDUCE, (TP,), tp, copies * (2 if again and not entry else 1), size)


def _weights(config: ModelConfig, mesh: Mapping[str, int], split: bool) -> Iterator[_Weight]:
    """Every parameter of the decoder, as its layer loads it."""
    d_model, d_ff, head_dim, layers = config.d_model, config.d_ff, config.head_dim, config.num_layers
    sharing = max(1, mesh[TP] // config.num_kv_heads)
    qkv = ((config.num_heads, 1), (config.num_kv_heads, sharing), (config.num_kv_heads, sharing))
    for heads, group in qkv:
        yield _Weight(f"attention/{COLUMN}", d_model * heads * head_dim, group=group, copies=layers)
        if config.attention_bias:
            yield _Weight(f"attention/{COLUMN}", heads * head_dim, fsdp=False, group=group, copies=layers)
    for heads, group in qkv[:2]:
        if config.qk_norm == "head":
            yield _Weight("attention/attend", head_dim, tp=False, fsdp=False, used_by_all_tp=True, copies=layers)
        if config.qk_norm == "projection":
            yield _Weight("attention/attend", heads * head_dim, fsdp=False, group=group, copies=layers)
    yield _Weight(f"attention/{ROW}", config.num_heads * head_dim * d_model, copies=layers)
    for _ in range(2):  # gate and up
        yield _Weight(f"mlp/{COLUMN}", d_model * d_ff, copies=layers)
        if config.mlp_bias:
            yield _Weight(f"mlp/{COLUMN}", d_ff, fsdp=False, copies=layers)
    yield _Weight(f"mlp/{ROW}", d_ff * d_model, copies=layers)
    for block, has_bias in (("attention", config.attention_out_bias), ("mlp", config.mlp_bias)):
        yield _Weight(f"{block}/rms_norm", d_model, tp=False, used_by_all_tp=split, copies=layers)
        if has_bias:
            yield _Weight(f"{block}/{ROW}", d_model, tp=False, used_by_all_tp=split, copies=layers)
    yield _Weight("rms_norm", d_model, tp=False, used_by_all_tp=split, gathers=1)
    table = -(-config.vocab_size // mesh[TP]) * mesh[TP] * d_model
    yield _Weight("vocab_parallel_embedding", table, gathers=1)
    yield _Weight(LOSS, table, gathers=1)  # of a tied model: the same table, loaded again


def _all_weights(config: ModelConfig, mesh: Mapping[str, int], split: bool) -> Iterator[_Weight]:
    """Those of the model; where there are adapters, they are frozen, and the adapters are trained."""
    if not config.lora.rank:
        yield from _weights(config, mesh, split)
        return
    for weight in _weights(config, mesh, split):
        yield dataclasses.replace(weight, frozen=True)
    yield from _adapters(config, mesh)


def _adapters(config: ModelConfig, mesh: Mapping[str, int]) -> Iterator[_Weight]:
    """A and B of each adapted projection."""
    d_model, d_ff, rank, layers = config.d_model, config.d_ff, config.lora.rank, config.num_layers
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sharing = max(1, mesh[TP] // config.num_kv_heads)
    columns: tuple[tuple[Target, str, int, int], ...] = (
        ("q_proj", "attention", heads, 1),
        ("k_proj", "attention", kv, sharing),
        ("v_proj", "attention", kv, sharing),
        ("gate_proj", "mlp", d_ff, 1),
        ("up_proj", "mlp", d_ff, 1),
    )
    rows: tuple[tuple[Target, str, int], ...] = (("o_proj", "attention", heads), ("down_proj", "mlp", d_ff))
    for target, block, features, group in columns:
        if config.lora.adapted(target):
            yield _Weight(f"{block}/{COLUMN}", d_model * rank, tp=False, used_by_all_tp=True, copies=layers)
            yield _Weight(f"{block}/{COLUMN}", rank * features, fsdp=False, group=group, copies=layers)
    for target, block, features in rows:
        if config.lora.adapted(target):
            yield _Weight(f"{block}/{ROW}", features * rank, fsdp=False, copies=layers)
            yield _Weight(f"{block}/{ROW}", rank * d_model, tp=False, used_by_all_tp=True, copies=layers)


def _weight_moves(weight: _Weight, config: ModelConfig, mesh: Mapping[str, int]) -> Iterator[Move]:
    """`collectives.load_weight`: gathers of the compute dtype, reductions of the reduction dtype."""
    compute, reduce = (jnp.dtype(d).itemsize for d in (config.precision.compute, config.precision.reduce))
    stored = weight.size / (mesh[TP] if weight.tp else 1)  # on a device, fsdp apart
    shard = stored / (mesh[FSDP] if weight.fsdp else 1)
    groups: list[tuple[str, int, float]] = [(TP, weight.group, shard * weight.group)]
    if weight.fsdp:
        groups.append((FSDP, mesh[FSDP], stored * weight.group))
    for axis, devices, size in groups:
        yield Move(weight.module, ALL_GATHER, (axis,), devices, weight.copies * weight.gathers, size * compute)
        if not weight.frozen:
            yield Move(weight.module, REDUCE_SCATTER, (axis,), devices, weight.copies, size * reduce)
    if weight.frozen:
        return
    axes = (DP,) + (() if weight.fsdp else (FSDP,)) + ((TP,) if weight.used_by_all_tp else ())
    devices = mesh[DP] * (1 if weight.fsdp else mesh[FSDP]) * (mesh[TP] if weight.used_by_all_tp else 1)
    yield Move(weight.module, ALL_REDUCE, axes, devices, weight.copies, shard * reduce)


def _ring(devices: int) -> float:
    """The part of a message that each of so many devices sends when it is gathered or scattered around a ring."""
    return (devices - 1) / devices
