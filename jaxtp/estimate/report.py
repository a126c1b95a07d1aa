"""Report of an estimate: the settings, ranked; the best one in detail, each number with where it comes from."""

import dataclasses
from collections.abc import Iterator

from jaxtp.audit.tables import columns
from jaxtp.communication import sums
from jaxtp.estimate.search import LEAST_PART, MEMORY_ERROR, NEAR, Model, Search, Setting, Target, rows_of
from jaxtp.hardware import GB, TABLE, Hardware, link_of
from jaxtp.hf.attributes import stored_dtype
from jaxtp.layers.costs import Product
from jaxtp.mesh import divisors, sized
from jaxtp.models.config import ModelConfig
from jaxtp.models.costs import describe_active
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import DataConfig, TrainConfig, describe_kernels

MAX_ROWS = 10
NOTES = (
    "micro-batches: how many a step has, of how many sequences on a device; GB: at the peak, of each device",
    "computing: its share of a step in which nothing overlaps",
    f"ranked: settings with {MEMORY_ERROR:.0%} headroom first, then those that just fit (tight), each by speed;",
    f"  of those within {NEAR - 1:.0%} of the fastest, the simplest: tp in a host, fewer micro-batches, less tp or cp",
    "MFU: 6 FLOPs for each token and parameter (frozen: 4; looked up: 0), causal attention, nothing twice, of the peak",
)
EXACT, MODELLED, AT_MOST = "exact", "modelled", "at most"
PROVENANCE_OF_MEMORY = {"parameters": EXACT, "optimizer": EXACT, "batch": EXACT}


def heading(config: TrainConfig, where: Target, model: Model) -> str:
    """Returns what is asked: hardware, model, batch."""
    hardware, sizes, data = where.hardware, config.model, config.data
    tokens = data.global_batch_size * data.sequence_length
    rows = {
        "on": f"{where.devices} x {hardware.name}: {hardware.memory / GB:,.1f} GB each, of which JAX takes "
        f"{where.room / GB:,.1f}; {hardware.flops / 1e12:,.0f} TFLOP/s, {hardware.bandwidth / 1e12:,.2f} TB/s; "
        f"{_links(hardware)}, {hardware.network / GB:,.0f} beyond",
        "model": f"{model.parameters:,} parameters{describe_active(sizes, model.parameters)}: "
        f"{sizes.num_layers} layers, d_model {sizes.d_model}, {sizes.precision.compute} compute, "
        f"{config.optimizer.name}",
        "kernels": describe_kernels(config, sized(), hardware.platform),
        "batch": f"{data.global_batch_size:,} sequences of {data.sequence_length:,} tokens = {tokens:,}"
        f"{_assumed_length(data)}",
        "assumed": f"{hardware.matmul_efficiency:.0%} of the peak in large products, "
        f"{hardware.bandwidth_efficiency:.0%} of memory's bandwidth, {hardware.link_efficiency:.0%} of links "
        f"({hardware.source if hardware.name not in TABLE else 'jaxtp/hardware.py'})",
        "tried": f"dp, fsdp, cp (in parts of at least {LEAST_PART:,} tokens) and tp; pipeline parallelism is not "
        "considered",
    }
    if (stored := _stored_in_16_bits(sizes)) is not None:
        rows["dtype"] = (
            f"the model's files are in {stored}, and float32 is asked for; --model.precision.compute {stored}"
        )
    if not optimizers.is_modelled(config.optimizer):
        rows["without"] = (
            f"the update by {config.optimizer.name}: its products, its temporaries and what it moves between devices "
            "are not modelled"
        )
    if sizes.remat == "offload":
        rows["without"] = "what is offloaded, on its way to the host and back: no time is counted for it"
    return "\n".join(f"{name:<8}{text}" for name, text in rows.items())


def _assumed_length(data: DataConfig) -> str:
    """Returns a note where the length of sequences is the default, which decides about attention, memory and time."""
    assumed = data.sequence_length == DataConfig().sequence_length
    return " (the default; --data.sequence-length N asks about another)" if assumed else ""


def _stored_in_16_bits(model: ModelConfig) -> str | None:
    """Returns the dtype of a model in Hugging Face format, where that has 16 bits and the compute dtype has not."""
    if model.from_hf is None or model.precision.compute != "float32" or not model.from_hf.exists():
        return None
    stored = stored_dtype(model.from_hf)
    return stored if stored in ("bfloat16", "float16") else None


def _links(hardware: Hardware) -> str:
    if hardware.direct:
        return f"{link_of(hardware, 2) / GB:,.0f} GB/s to each of {hardware.domain - 1}"
    return f"{hardware.link / GB:,.0f} GB/s among {hardware.domain}"


def ranking(found: Search) -> str:
    """Returns a table with the best setting of each mesh."""
    shown = found.settings[:MAX_ROWS]
    table = columns(
        ("mesh", "remat", "micro-batches", "GB", "to spare", "tokens/s", "MFU", "computing"), [_row(s) for s in shown]
    )
    lines = [table]
    if more := len(found.settings) - len(shown):
        lines.append(f"... and {more} more meshes (--json FILE has all)")
    counts = [f"{_count(len(found.all), 'setting')} of {_count(len(found.settings), 'mesh', 'meshes')}"]
    counts += _left_out(found)
    if found.refused:
        mesh, reason = next(iter(found.refused.items()))
        short = reason.partition(";")[0]
        counts.append(f"{_count(len(found.refused), 'mesh', 'meshes')} cannot run it, such as {mesh}: {short}")
    return "\n".join([*lines, *counts, *NOTES, *_of_experts(found.settings[0])])


def _of_experts(setting: Setting) -> Iterator[str]:
    if setting.config.model.most_experts:
        yield "  experts that a token did not choose: 0; all experts are chosen alike, which sets the rows of a device"


def _left_out(found: Search) -> list[str]:
    """Returns a note where only some numbers of micro-batches were tried."""
    best = found.settings[0]
    every = divisors(rows_of(best.config))
    tried = {setting.config.train.accumulation for setting in found.all if setting.sizes == best.sizes}
    if found.as_configured or len(tried) == len(every):
        return []
    return [f"micro-batches: {len(tried)} of the {len(every)} numbers that divide {every[-1]:,} rows were tried"]


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def _row(setting: Setting) -> tuple[str, ...]:
    low, high = setting.tokens_per_second_range
    slow, fast = setting.mfu_range
    return (
        str(setting),
        setting.config.model.remat,
        f"{setting.config.train.accumulation} of {setting.rows}",
        f"{setting.memory.total / GB:,.1f}",
        _spare(setting),
        f"{low:,.0f} to {high:,.0f}",
        f"{slow:.0%} to {fast:.0%}",
        f"{setting.time.computing_share:.0%}",
    )


def _spare(setting: Setting) -> str:
    if not setting.fits:
        return "does not fit"
    doubts = {"tight": not setting.has_margin, "without the update": not setting.update_is_modelled}
    return ", ".join((f"{setting.spare / GB:,.1f}", *(doubt for doubt, holds in doubts.items() if holds)))


def details(setting: Setting) -> str:
    """Returns memory, time and communication of one setting."""
    return "\n\n".join((_memory(setting), _time(setting), _communication(setting)))


def _memory(setting: Setting) -> str:
    unit, size = unit_of(setting.memory.total)
    rows = [
        (label(name), f"{held / size:,.2f}", PROVENANCE_OF_MEMORY.get(name, MODELLED))
        for name, held in dataclasses.asdict(setting.memory).items()
        if held
    ]
    total = ("total", f"{setting.memory.total / size:,.2f}", f"of {setting.target.room / size:,.2f} for JAX")
    return columns(("on each device", unit, ""), [*rows, total])


def _time(setting: Setting) -> str:
    time, work, model = setting.time, setting.costs, setting.config.model
    scores = "its scores go through memory" if work.scores else "in one kernel"
    rows = [
        ("products with weights", time.products, _tera(work.products, model)),
        ("attention", time.attention, f"{_tera(work.attention, model)}; {scores}"),
        ("norms, gates, logits", time.elementwise, "at the speed of memory"),
        ("update", time.update, _of_update(setting)),
        *(
            (f"over {' and '.join(axes)}", seconds, "by the network" if axes in time.crossing else "inside a domain")
            for axes, seconds in time.communication.items()
        ),
        ("nothing overlaps", time.serial, ""),
        ("everything overlaps", time.overlapped, ""),
    ]
    unit, scale = ("seconds", 1) if time.serial >= 0.1 else ("ms", 1000)
    return columns(
        ("a step, modelled", unit, ""), [(name, f"{seconds * scale:,.3f}", note) for name, seconds, note in rows]
    )


def _of_update(setting: Setting) -> str:
    if not setting.update_is_modelled:
        return "the least: not modelled"
    work = f"{_tera(setting.costs.update, setting.config.model)}; the rest " if setting.costs.update else ""
    return f"{work}at the speed of memory"


def _tera(products: tuple[Product, ...], model: ModelConfig) -> str:
    flops = sum(product.flops for product in products)
    return f"{flops / 1e12:,.1f} TFLOP, {EXACT if is_plain(model) else AT_MOST}"


def _communication(setting: Setting) -> str:
    totals = sums(setting.costs.traffic, lambda one: (one.kind, one.axes))
    unit, size = unit_of(sum(sent for _, sent in totals.values()))
    rows = [
        (kind, "+".join(axes), f"{count:,}", f"{sent / size:,.3f}", provenance_of_moves(setting.config))
        for (kind, axes), (count, sent) in totals.items()
    ]
    return columns(("collective", "over", "times", f"{unit} sent by a device", ""), rows)


def label(kind: str) -> str:
    """Returns the name of a kind of memory as it is printed."""
    return {"logits": "head and logits"}.get(kind, kind.replace("_", " "))


def unit_of(largest: float) -> tuple[str, float]:
    """Returns GB and its bytes, or MB where the largest value would be nothing in GB."""
    return ("GB", GB) if largest >= GB / 10 else ("MB", GB / 1000)


def is_plain(model: ModelConfig) -> bool:
    """Returns whether the formulas are exact: for a Llama; biases, q/k norms, adapters, tied tables make bounds."""
    plain = all(
        not (block.attention_bias or block.attention_out_bias or block.mlp_bias) and block.qk_norm == "none"
        for block in model.block_kinds()
    )
    return plain and not (model.tie_embeddings or model.lora.rank)


def provenance_of_moves(config: TrainConfig) -> str:
    """Returns how tier 1 knows the collectives; a rule on global arrays leaves its own to the compiler."""
    provenance = EXACT if is_plain(config.model) else AT_MOST
    rule = config.optimizer
    return provenance if optimizers.is_modelled(rule) else f"{provenance}, but for the update by {rule.name}"
