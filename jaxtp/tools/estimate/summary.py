"""An estimate's table and JSON record."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import starmap

import jax

import jaxtp
from jaxtp.analysis.collective import Collective, with_joined_axes
from jaxtp.analysis.hardware import GB, TABLE, link_of
from jaxtp.analysis.step_costs import describe_active, describe_padding
from jaxtp.analysis.tables import Cells, Record, between, columns, gigabytes
from jaxtp.distributed.allocator import advice
from jaxtp.mesh import mesh_shape
from jaxtp.tools.estimate.remedies import Alternative
from jaxtp.tools.estimate.search import MEMORY_ERROR, Model, Search, Setting, Target, is_plain
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.memory import save_bytes
from jaxtp.train.run_report import (
    describe_context,
    describe_kernels,
    describe_loss,
    describe_matmul,
)

MAX_ROWS = 10
EXACT = "exact"
MODELLED = "modelled"
AT_MOST = "at most"
EXACT_MEMORY = ("parameters", "optimizer", "batch")


def heading(config: TrainConfig, where: Target, model: Model) -> str:
    """Formats hardware, model and batch."""
    hardware = where.hardware
    sizes = config.model
    data = config.data
    tokens = data.global_batch_size * data.sequence_length
    share = "" if where.share is None else f" ({where.share:.0%}, {where.share_source})"
    links = f"{hardware.link / GB:,.0f} GB/s among {hardware.domain}"
    if hardware.direct:
        links = f"{link_of(hardware, 2) / GB:,.0f} GB/s to each of {hardware.domain - 1}"
    matmul = sizes.precision.matmul
    in_dtype = "" if matmul == "compute" else f" in {matmul}"
    default_length = ""
    if data.sequence_length == DataConfig().sequence_length:
        default_length = " (the default; --data.sequence-length N changes it)"
    source = "jaxtp/analysis/hardware.py" if hardware.name in TABLE else hardware.source
    rows = {
        "devices": f"{where.devices} x {hardware.name}: {hardware.memory / GB:,.1f} GB each, of "
        f"which JAX takes {where.room / GB:,.1f}{share}; {hardware.peak(matmul) / 1e12:,.0f} "
        f"TFLOP/s{in_dtype}, {hardware.bandwidth / 1e12:,.2f} TB/s; {links}, "
        f"{hardware.network / GB:,.0f} beyond",
        "model": f"{model.parameters:,} parameters{describe_active(sizes, model.parameters)}: "
        f"{sizes.num_layers} layers, d_model {sizes.d_model}, {sizes.precision.compute} compute, "
        f"{config.optimizer.name}",
        **_loss(config, model),
        "kernels": describe_kernels(config, mesh_shape(), hardware.architecture),
        "matmul": describe_matmul(sizes),
        "batch": f"{data.global_batch_size:,} sequences of {data.sequence_length:,} tokens = "
        f"{tokens:,}{default_length}",
        "assumed": f"{hardware.matmul_efficiency:.0%} of the peak in large products, "
        f"{hardware.bandwidth_efficiency:.0%} of memory's bandwidth, "
        f"{hardware.link_efficiency:.0%} of links ({source})",
    }
    if not optimizers.is_modelled(config.optimizer):
        rows["without"] = (
            f"the update by {config.optimizer.name}: its time, memory and communication are not "
            "modelled"
        )
    if sizes.remat == "offload":
        rows["without"] = "the time of offloaded activations on their way to the host and back"
    return "\n".join(f"{name:<8}{text}" for name, text in rows.items() if text is not None)


def _loss(config: TrainConfig, model: Model) -> dict[str, str]:
    loss = model.loss
    if not loss:
        return {}
    work = f"{loss.flops * config.data.global_batch_size / 1e12:,.1f} TFLOP a step"
    return {
        "loss": f"{describe_loss(config.train)}: {work}, {loss.relative:.2f} times the "
        f"cross-entropy's, traced on one device;\n{'':<8}its time is modelled in proportion, and "
        "its peak of memory in the backward pass"
    }


def ranking(results: Search) -> str:
    """Formats a table with each mesh's best setting."""
    shown = results.settings[:MAX_ROWS]
    header = ("mesh", "remat", "micro-batches", "GB", "to spare", "tokens/s", "MFU", "computing")
    lines = [columns(header, list(map(_row, shown)))]
    if more := len(results.settings) - len(shown):
        lines.append(f"... and {more} more meshes (--json FILE has all)")
    counts = f"settings tried: {len(results.all):,}; meshes: {len(results.settings):,}"
    if results.refused:
        mesh, reason = next(iter(results.refused.items()))
        counts += f"; refused: {len(results.refused):,}, such as {mesh}: {reason.partition(';')[0]}"
    return "\n".join([*lines, counts])


def _row(setting: Setting) -> Cells:
    low, high = setting.mfu_range
    spare = gigabytes(setting.spare) if setting.fits else "does not fit"
    if setting.fits and not setting.has_margin:
        spare += ", tight"
    if setting.fits and not setting.update_is_modelled:
        spare += ", without the update"
    return (
        str(setting),
        setting.config.model.remat,
        f"{setting.config.train.accumulation} of {setting.rows}",
        gigabytes(setting.memory.total),
        spare,
        speed_range(setting),
        f"{between(100 * low, 100 * high)}%",
        f"{setting.time.computing_share:.0%}",
    )


def speed_range(setting: Setting) -> str:
    """Formats the range of tokens/s."""
    return between(*setting.tokens_per_second_range)


def explained(
    results: Search,
    configured: Setting | None,
    alternatives: Sequence[Alternative],
    price: float | None = None,
) -> str:
    """Formats the best setting: its fit, memory, time and cost, and changes that improve it.

    Args:
      configured: the configuration on its own mesh, if it can run there.
      price: of a device hour.
    """
    best = results.settings[0]
    time = best.time
    steps = best.config.train.steps
    verdict = "" if best.fits else "nothing fits; the least is "
    rows = [
        ("best", f"{verdict}{_used(best)}"),
        ("memory", _memory(best)),
        *(("", text) for text in _warnings(best)),
    ]
    if best.fits:
        parts = sorted(_seconds(best).items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name} {seconds / time.serial:.0%}" for name, seconds in parts)
        rows.append(("step", f"{between(time.overlapped, time.serial)} seconds: {shares}"))
        low, high = device_hours(best)
        hours = between(low / best.target.devices, high / best.target.devices)
        rows.append(("run", f"{steps:,} steps: {hours} hours, {_cost(best, 1.0, price)}"))
    if configured is not None and configured.config != best.config:
        rows.append(("now", _beside(configured, best)))
    for other in alternatives:
        rows.append(("try", f"{other}: {_proposed(other.setting, best, price)}"))
    return "\n".join(f"{label:<8}{text}" for label, text in rows)


def _proposed(setting: Setting, best: Setting, price: float | None) -> str:
    # The cost is for all tokens of the run, because a step may have fewer tokens with the change.
    cost = _cost(setting, best.tokens / setting.tokens, price)
    return f"{_beside(setting, best)}; {speed_range(setting)} tokens/s, {cost}"


def _cost(setting: Setting, runs: float, price: float | None) -> str:
    """Formats the device hours of `runs` times the steps of a setting, and their price."""
    low, high = device_hours(setting)
    low *= runs
    high *= runs
    hours = f"{between(low, high)} {setting.target.hardware.name} hours"
    return hours if price is None else f"{hours}; cost {between(low * price, high * price)}"


def _used(setting: Setting) -> str:
    verdict = "" if setting.fits else ", does not fit"
    return (
        f"{setting} with remat {setting.config.model.remat} and micro-batches of {setting.rows}: "
        f"{gigabytes(setting.memory.total)} of {gigabytes(setting.target.room)} GB{verdict}"
    )


def _beside(setting: Setting, best: Setting) -> str:
    if not (setting.fits and best.fits):
        return _used(setting)
    return f"{_used(setting)}, {best.time.expected / setting.time.expected:.2f} x as fast"


def _memory(setting: Setting) -> str:
    unit, size = ("GB", GB) if setting.memory.total >= GB / 10 else ("MB", GB / 1000)
    exact = list[str]()
    modelled = list[str]()
    kinds = sorted(dataclasses.asdict(setting.memory).items(), key=lambda kind: -kind[1])
    for kind, amount in kinds:
        if amount:
            texts = exact if kind in EXACT_MEMORY else modelled
            label = "head and logits" if kind == "logits" else kind.replace("_", " ")
            texts.append(f"{label} {amount / size:,.2f}")
    total = (
        f"{setting.memory.total / size:,.2f} of {setting.target.room / size:,.2f} {unit} for JAX"
    )
    return f"{total}: exact {', '.join(exact)};\n{'':<8}modelled {', '.join(modelled)}"


def _warnings(best: Setting) -> Iterator[str]:
    if not best.update_is_modelled:
        yield (
            f"not sure: the update by {best.config.optimizer.name} is not modelled; --tier 3 "
            "compiles it"
        )
    if best.fits and not best.has_margin:
        yield f"tight: the modelled memory may be off by {MEMORY_ERROR:.0%}; --tier 3 compiles it"
    hardware = best.target.hardware
    room = best.target.room
    allocator = best.config.launch.allocator
    advised = advice(allocator, best.memory.total, room, room / hardware.memory)
    if hardware.platform == "cuda" and advised is not None:
        yield f"launch.allocator={allocator}: {advised}"
    padding = describe_padding(best.config.model, best.sizes)
    if padding is not None:
        yield f"padded {padding}"
    context = describe_context(best.config, best.sizes)
    if context is not None:
        yield context


def _seconds(setting: Setting) -> dict[str, float]:
    time = setting.time
    return {
        "products with weights": time.products,
        "attention": time.attention,
        "elementwise": time.elementwise,
        "update": time.update,
        **{f"over {' and '.join(axes)}": seconds for axes, seconds in time.communication.items()},
    }


def device_hours(best: Setting) -> tuple[float, float]:
    """Returns a run's range of device hours."""
    steps = best.config.train.steps * best.target.devices / 3600
    return best.time.overlapped * steps, best.time.serial * steps


def record(results: Search) -> Record:
    """Returns the search for JSON; sizes in bytes, times in seconds."""
    best = results.settings[0]
    config = best.config
    where = best.target
    model = results.model
    moves = EXACT if is_plain(config.model) else AT_MOST
    if not optimizers.is_modelled(config.optimizer):
        moves = f"{moves}, except for the update by {config.optimizer.name}"
    return {
        "jaxtp": jaxtp.__version__,
        "jax": jax.__version__,
        "hardware": dataclasses.asdict(where.hardware),
        "devices": where.devices,
        "bytes_for_jax": where.room,
        "memory_fraction": where.share,
        "parameters": model.parameters,
        "flops_per_token": model.flops_per_token,
        "loss": model.loss and dataclasses.asdict(model.loss),
        "tokens": best.tokens,
        "steps": config.train.steps,
        "save_host_bytes": save_bytes(
            config, best.sizes, model.arrays, where.hosts["devices_per_host"]
        ),
        "device_hours": list(device_hours(best)),
        "provenance": {
            "bytes_per_device": {
                **dict.fromkeys(vars(best.memory), MODELLED),
                **dict.fromkeys(EXACT_MEMORY, EXACT),
            },
            "collectives": moves,
            "flops_per_device": moves,
            "seconds": MODELLED,
            "tokens_per_second": MODELLED,
        },
        "meshes": list(map(setting_record, results.settings)),
        "refused": dict(results.refused),
    }


def setting_record(setting: Setting) -> Record:
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
        "bytes_per_device": {**vars(setting.memory), "total": setting.memory.total},
        "bytes_to_spare": setting.spare,
        "collectives": list(starmap(_collective_record, setting.costs.traffic.items())),
        "flops_per_device": setting.costs.flops * setting.relative_work,
        "padding": setting.costs.padding,
        "seconds": {
            "products": time.products,
            "attention": time.attention,
            "elementwise": time.elementwise,
            "update": time.update,
            "communication": with_joined_axes(time.communication),
            "serial": time.serial,
            "overlapped": time.overlapped,
        },
        "tokens_per_second": setting.tokens_per_second,
        "tokens_per_second_range": list(setting.tokens_per_second_range),
        "mfu_range": list(setting.mfu_range),
    }


def _collective_record(collective: Collective, times: float) -> Record:
    return {
        "module": collective.module,
        "kind": collective.kind,
        "axes": collective.axes,
        "devices": collective.group,
        "count": times,
        "bytes_sent": times * collective.bytes_sent,
    }
