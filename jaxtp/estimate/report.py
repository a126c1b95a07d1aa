"""What an estimate prints: the settings, ranked; the best one in detail, each number with where it comes from."""

from jaxtp.estimate.remedies import kinds_of
from jaxtp.estimate.search import Model, Search, Setting, Target
from jaxtp.models.budget import Move
from jaxtp.models.config import ModelConfig
from jaxtp.parallel.tables import columns
from jaxtp.train.config import TrainConfig

GB = 1e9
MAX_ROWS = 10
EXACT, MODELLED, AT_MOST = "exact", "modelled", "at most"
PROVENANCE_OF_MEMORY = {"parameters": EXACT, "optimizer": EXACT, "batch": EXACT}


def heading(config: TrainConfig, where: Target, model: Model) -> str:
    """What is asked: hardware, model, batch."""
    hardware, sizes, data = where.hardware, config.model, config.data
    tokens = data.global_batch_size * data.sequence_length
    rows = {
        "on": f"{where.devices} x {hardware.name}: {hardware.memory / GB:,.1f} GB each, of which JAX takes "
        f"{where.room / GB:,.1f}; {hardware.flops / 1e12:,.0f} TFLOP/s, {hardware.bandwidth / 1e12:,.2f} TB/s; "
        f"{hardware.link / GB:,.0f} GB/s among {hardware.domain}, {hardware.network / GB:,.0f} beyond",
        "model": f"{model.parameters:,} parameters: {sizes.num_layers} layers, d_model {sizes.d_model}, "
        f"{sizes.precision.compute} compute, {sizes.attention} attention, {config.optimizer.name}",
        "batch": f"{data.global_batch_size:,} sequences of {data.sequence_length:,} tokens = {tokens:,}",
        "assumed": f"{hardware.matmul_efficiency:.0%} of the peak in large products, "
        f"{hardware.bandwidth_efficiency:.0%} of memory's bandwidth, {hardware.link_efficiency:.0%} of links "
        "(jaxtp/hardware.py)",
    }
    return "\n".join(f"{name:<8}{text}" for name, text in rows.items())


def ranking(found: Search) -> str:
    """The best setting of each mesh, a line each."""
    shown = found.settings[:MAX_ROWS]
    table = columns(
        ("mesh", "remat", "micro-batches", "GB", "to spare", "tokens/s", "MFU", "computing"), [_row(s) for s in shown]
    )
    lines = [table]
    if more := len(found.settings) - len(shown):
        lines.append(f"... and {more} more meshes (--json FILE has all)")
    counts = [f"{len(found.all):,} settings of {len(found.settings)} meshes"]
    if found.refused:
        mesh, reason = next(iter(found.refused.items()))
        short = reason.partition(";")[0]
        counts.append(f"{len(found.refused)} meshes cannot run it, such as {mesh}: {short}")
    return "\n".join([*lines, *counts])


def _row(setting: Setting) -> tuple[str, ...]:
    low, high = setting.tokens_per_second_range
    slow, fast = setting.mfu_range
    return (
        str(setting),
        setting.config.model.remat,
        f"{setting.config.train.accumulation} of {setting.rows}",
        f"{setting.memory.total / GB:,.1f}",
        f"{setting.spare / GB:,.1f}" + ("" if setting.fits_surely else ", tight") if setting.fits else "does not fit",
        f"{low:,.0f} to {high:,.0f}",
        f"{slow:.0%} to {fast:.0%}",
        f"{setting.time.computing_share:.0%}",
    )


def details(setting: Setting) -> str:
    """Memory, time and communication of one setting."""
    return "\n\n".join((_memory(setting), _time(setting), _communication(setting)))


def _memory(setting: Setting) -> str:
    rows = [
        (name.replace("_", " "), f"{getattr(setting.memory, name) / GB:,.2f}", PROVENANCE_OF_MEMORY.get(name, MODELLED))
        for name in kinds_of(setting)
        if getattr(setting.memory, name)
    ]
    total = ("total", f"{setting.memory.total / GB:,.2f}", f"of {setting.target.room / GB:,.2f} for JAX")
    return columns(("on each device", "GB", ""), [*rows, total])


def _time(setting: Setting) -> str:
    time = setting.time
    tera = f"{setting.work.flops / 1e12:,.1f} TFLOP, {EXACT if is_plain(setting.config.model) else AT_MOST}"
    rows = [
        ("matrix products", time.products, tera),
        ("norms, gates, scores, logits", time.elementwise, "at the speed of memory"),
        ("update", time.update, "at the speed of memory"),
        *(
            (f"over {' and '.join(axes)}", seconds, "by the network" if axes in time.crossing else "by fast links")
            for axes, seconds in time.communication.items()
        ),
        ("nothing overlaps", time.serial, ""),
        ("everything overlaps", time.overlapped, ""),
    ]
    return columns(
        ("a step, modelled", "seconds", ""), [(name, f"{seconds:,.3f}", note) for name, seconds, note in rows]
    )


def _communication(setting: Setting) -> str:
    rows = [
        (kind, "+".join(axes), f"{count:,}", f"{sent / GB:,.3f}", provenance_of_moves(setting.config))
        for (kind, axes), (count, sent) in by_kind(setting.moves).items()
    ]
    return columns(("collective", "over", "times", "GB sent by a device", ""), rows)


def by_kind(moves: tuple[Move, ...]) -> dict[tuple[str, tuple[str, ...]], tuple[int, float]]:
    """How often and how many bytes each device sends, by kind and axes."""
    totals: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}
    for move in moves:
        count, sent = totals.get((move.kind, move.axes), (0, 0.0))
        totals[move.kind, move.axes] = count + move.count, sent + move.bytes_sent
    return totals


def is_plain(model: ModelConfig) -> bool:
    """Whether the formulas are exact for it: a Llama; biases, q/k norms, adapters and tied tables make them bounds."""
    biases = model.attention_bias or model.attention_out_bias or model.mlp_bias
    return not (biases or model.tie_embeddings or model.lora.rank) and model.qk_norm == "none"


def provenance_of_moves(config: TrainConfig) -> str:
    """Of tier 1's collectives."""
    return EXACT if is_plain(config.model) else AT_MOST
