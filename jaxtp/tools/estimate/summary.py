"""An estimate's printed summary, JSON record and picture."""

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax

import jaxtp
from jaxtp.analysis.collective import sums
from jaxtp.analysis.hardware import GB, TABLE, Hardware, link_of
from jaxtp.analysis.step_costs import describe_active, describe_padding
from jaxtp.analysis.tables import columns
from jaxtp.config.hints import divisors
from jaxtp.distributed.allocator import advice
from jaxtp.hf.config_json import stored_dtype
from jaxtp.mesh import TP, sized
from jaxtp.models.config import ModelConfig
from jaxtp.tools.estimate.remedies import Alternative
from jaxtp.tools.estimate.search import MEMORY_ERROR, NEAR, Model, Search, Setting, Target, is_plain, rows_of
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.memory import Memory, save_bytes
from jaxtp.train.run_report import describe_context, describe_kernels

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Panel
    from matplotlib.figure import Figure

WIDTH = 110
MAX_ROWS = 10
EXACT, MODELLED, AT_MOST = "exact", "modelled", "at most"
EXACT_MEMORY = ("parameters", "optimizer", "batch")
UNITS = (("milliseconds", 1e-3), ("seconds", 1), ("minutes", 60), ("hours", 3600), ("days", 86400))


def in_lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Returns `label   text` for each row, wrapped under its text."""
    indent = " " * 8
    return [
        textwrap.fill(f"{label:<8}{text}", WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        for label, text in rows
    ]


def heading(config: TrainConfig, where: Target, model: Model) -> str:
    """Formats hardware, model and batch."""
    hardware, sizes, data = where.hardware, config.model, config.data
    tokens = data.global_batch_size * data.sequence_length
    share = "" if where.share is None else f" ({where.share:.0%}, {where.share_source})"
    assumed = data.sequence_length == DataConfig().sequence_length
    rows = {
        "on": f"{where.devices} x {hardware.name}: {hardware.memory / GB:,.1f} GB each, of which JAX takes "
        f"{where.room / GB:,.1f}{share}; "
        f"{hardware.flops / 1e12:,.0f} TFLOP/s, {hardware.bandwidth / 1e12:,.2f} TB/s; "
        f"{_links(hardware)}, {hardware.network / GB:,.0f} beyond",
        "model": f"{model.parameters:,} parameters{describe_active(sizes, model.parameters)}: "
        f"{sizes.num_layers} layers, d_model {sizes.d_model}, {sizes.precision.compute} compute, "
        f"{config.optimizer.name}",
        "kernels": describe_kernels(config, sized(), hardware.architecture),
        "batch": f"{data.global_batch_size:,} sequences of {data.sequence_length:,} tokens = {tokens:,}"
        f"{' (the default; --data.sequence-length N changes it)' if assumed else ''}",
        "assumed": f"{hardware.matmul_efficiency:.0%} of the peak in large products, "
        f"{hardware.bandwidth_efficiency:.0%} of memory's bandwidth, {hardware.link_efficiency:.0%} of links "
        f"({hardware.source if hardware.name not in TABLE else 'jaxtp/analysis/hardware.py'})",
    }
    if (stored := _stored_in_16_bits(sizes)) is not None:
        rows["dtype"] = f"the model's files are in {stored}, and compute is float32; --model.precision.compute {stored}"
    if not optimizers.is_modelled(config.optimizer):
        rows["without"] = f"the update by {config.optimizer.name}: its time, memory and communication are not modelled"
    if sizes.remat == "offload":
        rows["without"] = "the time of offloaded activations on their way to the host and back"
    return "\n".join(f"{name:<8}{text}" for name, text in rows.items())


def _stored_in_16_bits(model: ModelConfig) -> str | None:
    if model.from_hf is None or model.precision.compute != "float32" or not model.from_hf.exists():
        return None
    stored = stored_dtype(model.from_hf)
    return stored if stored in ("bfloat16", "float16") else None


def _links(hardware: Hardware) -> str:
    if hardware.direct:
        return f"{link_of(hardware, 2) / GB:,.0f} GB/s to each of {hardware.domain - 1}"
    return f"{hardware.link / GB:,.0f} GB/s among {hardware.domain}"


def ranking(found: Search) -> str:
    """Formats a table with each mesh's best setting."""
    shown = found.settings[:MAX_ROWS]
    lines = [
        columns(
            ("mesh", "remat", "micro-batches", "GB", "to spare", "tokens/s", "MFU", "computing"),
            [_row(s) for s in shown],
        )
    ]
    if more := len(found.settings) - len(shown):
        lines.append(f"... and {more} more meshes (--json FILE has all)")
    lines.append(f"{_count(len(found.all), 'setting')} of {_count(len(found.settings), 'mesh', 'meshes')}")
    every = divisors(rows_of(found.settings[0].config))
    tried = {s.config.train.accumulation for s in found.all if s.sizes == found.settings[0].sizes}
    if not found.as_configured and len(tried) < len(every):
        lines.append(
            f"micro-batches: {len(tried)} of the {len(every)} numbers that divide {every[-1]:,} rows were tried"
        )
    if found.refused:
        mesh, reason = next(iter(found.refused.items()))
        refused = _count(len(found.refused), "mesh", "meshes")
        lines.append(f"{refused} cannot run it, such as {mesh}: {reason.partition(';')[0]}")
    return "\n".join(lines)


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def _row(setting: Setting) -> tuple[str, ...]:
    (low, high), (slow, fast) = setting.tokens_per_second_range, setting.mfu_range
    doubts = {"tight": not setting.has_margin, "without the update": not setting.update_is_modelled}
    spare = ", ".join((f"{setting.spare / GB:,.1f}", *(doubt for doubt, holds in doubts.items() if holds)))
    return (
        str(setting),
        setting.config.model.remat,
        f"{setting.config.train.accumulation} of {setting.rows}",
        f"{setting.memory.total / GB:,.1f}",
        spare if setting.fits else "does not fit",
        f"{low:,.0f} to {high:,.0f}",
        f"{slow:.0%} to {fast:.0%}",
        f"{setting.time.computing_share:.0%}",
    )


def explained(
    found: Search, model: Model, configured: Setting | None, alternatives: Sequence[Alternative]
) -> list[tuple[str, str]]:
    """Returns labelled lines on the best setting: fit, costs, limits, improvements."""
    best = found.settings[0]
    rows = [("best", _verdict(found, best)), ("memory", _memory(best))]
    if not best.fits:
        rows += [("", text) for text in _warnings(best)]
        rows += [("instead", f"{other}: {_how(other.setting)}, {_of_room(other.setting)}") for other in alternatives]
        return rows if alternatives else [*rows, ("instead", "try a shorter sequence or a smaller loss chunk")]
    rows += [("", text) for text in _warnings(best)]
    time, taken = best.time, host_bytes_of_save(best, model) / GB
    rows.append(("step", f"{time.overlapped:,.3f} to {time.serial:,.3f} seconds, modelled: {_parts(best)}"))
    rows.append(("sends", _sent(best)))
    rows.append(("save", f"up to {taken:,.1f} GB of the memory of each host, while a checkpoint is written"))
    computing = {name: seconds for name, seconds in _seconds(best).items() if not name.startswith("over ")}
    limit, seconds = max({**computing, "communication": time.moving}.items(), key=lambda part: part[1])
    rows.append(("limit", f"{limit}, {seconds / time.serial:.0%} of a step"))
    for other in alternatives:
        ratio = time.expected / other.setting.time.expected
        spare = f"{other.setting.spare / GB:,.1f} GB to spare"
        rows.append(("faster", f"{other}: {_how(other.setting)}, {ratio:.2f} x as fast, {spare}"))
    rows.append(("run", _run(best)))
    if configured is not None and configured.config != best.config:
        rows.append(("now", _as_configured(configured, best)))
    return rows


def _verdict(found: Search, best: Setting) -> str:
    if not best.fits:
        kinds = dataclasses.asdict(best.memory)
        largest = max(kinds, key=lambda name: kinds[name])
        least = f"{best.memory.total / GB:,.1f} GB, {kinds[largest] / GB:,.1f} of it {label(largest)}"
        return f"Nothing fits. The least is {_how(best)}: {least}"
    surely = "surely " if best.fits_surely else ""
    fastest = min(setting.time.expected for setting in found.fitting if setting.has_margin == best.has_margin)
    which = (
        f"fastest that {surely}fits" if best.time.expected == fastest else f"simplest of the fastest that {surely}fit"
    )
    return f"{_how(best)}: the {which}, {best.spare / GB:,.1f} GB to spare"


def _how(setting: Setting) -> str:
    return f"{setting} with remat {setting.config.model.remat} and micro-batches of {setting.rows}"


def _of_room(setting: Setting) -> str:
    return f"{setting.memory.total / GB:,.1f} of {setting.target.room / GB:,.1f} GB"


def _memory(setting: Setting) -> str:
    unit, size = ("GB", GB) if setting.memory.total >= GB / 10 else ("MB", GB / 1000)
    kinds = sorted(dataclasses.asdict(setting.memory).items(), key=lambda kind: -kind[1])
    exact, modelled = (
        ", ".join(
            f"{label(k)} {amount / size:,.2f}" for k, amount in kinds if amount and (k in EXACT_MEMORY) == is_exact
        )
        for is_exact in (True, False)
    )
    total = f"{setting.memory.total / size:,.2f} of {setting.target.room / size:,.2f} {unit} for JAX"
    return f"{total}: exact {exact}; modelled {modelled}"


def label(kind: str) -> str:
    """Returns a memory kind's printed name."""
    return {"logits": "head and logits"}.get(kind, kind.replace("_", " "))


def _warnings(best: Setting) -> Iterator[str]:
    if not best.update_is_modelled:
        yield (
            f"not sure: the time, memory and communication of the update by {best.config.optimizer.name} are not "
            "modelled; --tier 3 compiles it"
        )
    if best.fits and not best.has_margin:
        yield f"tight: the modelled memory may be off by {MEMORY_ERROR:.0%}; --tier 3 compiles it"
    hardware, room, allocator = best.target.hardware, best.target.room, best.config.launch.allocator
    advised = advice(allocator, best.memory.total, room, room / hardware.memory)
    if hardware.platform == "cuda" and advised is not None:
        yield f"launch.allocator={allocator}: {advised}"
    if (padded := describe_padding(best.config.model, best.sizes)) is not None:
        yield f"padded {padded}"
    if (text := describe_context(best.config, best.sizes)) is not None:
        yield text


def _seconds(setting: Setting) -> dict[str, float]:
    time = setting.time
    over = {f"over {' and '.join(axes)}": seconds for axes, seconds in time.communication.items()}
    return {
        "products with weights": time.products,
        "attention": time.attention,
        "elementwise": time.elementwise,
        "update": time.update,
        **over,
    }


def _parts(setting: Setting) -> str:
    parts = sorted(_seconds(setting).items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {seconds / setting.time.serial:.0%}" for name, seconds in parts)


def _sent(setting: Setting) -> str:
    unit, size = ("GB", GB) if sum(one.bytes_sent for one in setting.costs.traffic) >= GB / 10 else ("MB", GB / 1000)
    totals = sums(setting.costs.traffic, lambda one: (one.kind, one.axes))
    each = [f"{kind} over {'+'.join(axes)} {sent / size:,.3f}" for (kind, axes), (_, sent) in totals.items()]
    return f"{unit} a device, {provenance_of_moves(setting.config)}: {', '.join(each)}" if each else "nothing"


def _run(best: Setting) -> str:
    steps, data = best.config.train.steps, best.config.data
    seconds = [each * steps for each in (best.time.overlapped, best.time.serial)]
    of_devices, unit = in_unit([best.target.devices * each for each in seconds], UNITS[:-1])  # paid by the hour
    tokens = steps * data.global_batch_size * data.sequence_length
    cost = f"{of_devices} {best.target.hardware.name} {unit} in all"
    return f"{steps:,} steps, {tokens:,} tokens, take {' '.join(in_unit(seconds, UNITS))}, modelled: {cost}"


def device_hours(best: Setting) -> tuple[float, float]:
    """Returns a run's range of device hours."""
    steps = best.config.train.steps * best.target.devices / 3600
    return best.time.overlapped * steps, best.time.serial * steps


def in_unit(seconds: Sequence[float], units: Sequence[tuple[str, float]]) -> tuple[str, str]:
    """Returns a time range in the largest unit with two, and the unit: `5.41 to 6.32`, `hours`."""
    name, size = next((unit for unit in reversed(units) if max(seconds) >= 2 * unit[1]), units[0])
    values = (s / size for s in seconds)
    return " to ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values), name


def _as_configured(configured: Setting, best: Setting) -> str:
    if not configured.fits:
        return f"as configured it does not fit: {_how(configured)} lacks {-configured.spare / GB:,.1f} GB"
    ratio = configured.time.expected / best.time.expected
    speed = f"{ratio:.2f} x slower" if ratio >= NEAR else "as fast, within the model's error"
    if ratio < 1 / NEAR:
        speed = f"{1 / ratio:.2f} x as fast, but less sure to fit"
    return f"as configured, {_how(configured)}: {speed}, {configured.spare / GB:,.1f} GB to spare"


def host_bytes_of_save(setting: Setting, model: Model) -> int:
    """Returns a save's maximum host memory, with one process per host."""
    where = setting.target
    devices = math.gcd(where.devices, where.hardware.domain)
    return save_bytes(setting.config, setting.sizes, model.arrays, devices)


def provenance_of_moves(config: TrainConfig) -> str:
    """Returns how tier 1 knows the collectives, except of unmodelled optimizers."""
    provenance = EXACT if is_plain(config.model) else AT_MOST
    rule = config.optimizer
    return provenance if optimizers.is_modelled(rule) else f"{provenance}, but for the update by {rule.name}"


def record(config: TrainConfig, where: Target, model: Model, found: Search) -> dict[str, object]:
    """Returns the search for JSON; sizes in bytes, times in seconds."""
    best, moves = found.settings[0], provenance_of_moves(config)
    return {
        "jaxtp": jaxtp.__version__,
        "jax": jax.__version__,
        "hardware": dataclasses.asdict(where.hardware),
        "devices": where.devices,
        "bytes_for_jax": where.room,
        "memory_fraction": where.share,
        "parameters": model.parameters,
        "flops_per_token": model.flops_per_token,
        "tokens": config.data.global_batch_size * config.data.sequence_length,
        "steps": config.train.steps,
        "save_host_bytes": host_bytes_of_save(best, model),
        "device_hours": list(device_hours(best)),
        "provenance": {
            "bytes_per_device": {
                kind.name: EXACT if kind.name in EXACT_MEMORY else MODELLED for kind in dataclasses.fields(Memory)
            },
            "collectives": moves,
            "flops_per_device": moves,
            "seconds": MODELLED,
            "tokens_per_second": MODELLED,
        },
        "meshes": [setting_record(setting) for setting in found.settings],
        "refused": dict(found.refused),
    }


def setting_record(setting: Setting) -> dict[str, object]:
    """Returns a setting for JSON; `tokens_per_second` is at the expected time."""
    time = setting.time
    return {
        **setting.sizes,
        "fits": setting.fits,
        "fits_surely": setting.fits_surely,
        "update_is_modelled": setting.update_is_modelled,
        "remat": setting.config.model.remat,
        "accumulation": setting.config.train.accumulation,
        "micro_batch_size": setting.rows,
        "bytes_per_device": dataclasses.asdict(setting.memory) | {"total": setting.memory.total},
        "bytes_to_spare": setting.spare,
        "collectives": [
            {
                "module": one.module,
                "kind": one.kind,
                "axes": list(one.axes),
                "devices": one.group,
                "count": times,
                "bytes_sent": times * one.bytes_sent,
            }
            for one, times in setting.costs.traffic.items()
        ],
        "flops_per_device": setting.costs.flops,
        "padding": setting.costs.padding,
        "seconds": {
            **{name: getattr(time, name) for name in ("products", "attention", "elementwise", "update")},
            "communication": {"+".join(axes): seconds for axes, seconds in time.communication.items()},
            "serial": time.serial,
            "overlapped": time.overlapped,
        },
        "tokens_per_second": setting.tokens_per_second,
        "tokens_per_second_range": list(setting.tokens_per_second_range),
        "mfu_range": list(setting.mfu_range),
    }


def draw(found: Search, title: str, figure: "Figure") -> None:
    """Draws bars of memory by kind and seconds by part, for each tp's best setting."""
    by_tp = {setting.sizes[TP]: setting for setting in reversed(found.settings)}
    settings = [by_tp[tp] for tp in sorted(by_tp)]
    kinds = [kind.name for kind in dataclasses.fields(Memory)]
    seconds = [_seconds(setting) for setting in settings]
    names = dict.fromkeys(name for parts in seconds for name in parts)
    panels = {
        "memory of a device, GB": {label(k): [getattr(s.memory, k) / GB for s in settings] for k in kinds},
        "seconds of a step if nothing overlaps, modelled": {n: [p.get(n, 0.0) for p in seconds] for n in names},
    }
    figure.set_size_inches(12, 6)
    figure.suptitle(title)
    for panel, (name, parts) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        _stack(panel, parts)
        panel.set_title(name, fontsize=10)
        ticks = [f"{s}\n{s.config.model.remat}\n{'' if s.fits else 'does not fit'}" for s in settings]
        panel.set_xticks(range(len(settings)), ticks, fontsize=8)
        panel.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    figure.axes[0].axhline(settings[0].target.room / GB, color="black", linestyle="--", linewidth=1)


def _stack(panel: "Panel", parts: Mapping[str, Sequence[float]]) -> None:
    below = [0.0] * len(next(iter(parts.values())))
    for name, values in parts.items():
        if max(values) > 0:
            panel.bar(range(len(values)), values, bottom=below, width=0.6, label=name)
            below = [bottom + value for bottom, value in zip(below, values, strict=True)]
