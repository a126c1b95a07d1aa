"""An estimate's table and JSON record."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

import jax

import jaxtp
from jaxtp.analysis.collective import Collective, with_joined_axes
from jaxtp.analysis.hardware import GB, TABLE, link_of
from jaxtp.analysis.step_costs import describe_active, describe_padding
from jaxtp.analysis.tables import Cells, Record, between, columns, gigabytes
from jaxtp.config.console import styled
from jaxtp.mesh import mesh_shape
from jaxtp.tools.estimate.remedies import Alternative
from jaxtp.tools.estimate.search import (
    MEMORY_ERROR,
    Candidate,
    Model,
    Search,
    Setting,
    Target,
    rank,
)
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.memory import save_bytes
from jaxtp.train.run_report import (
    describe_context,
    describe_kernels,
    describe_loss,
    describe_matmul,
)
from jaxtp.train.validation import chosen_kernels, share_of

MAX_ROWS = 10
_LESS_NEEDED = (7, 6, 2)  # Columns that a narrow terminal lacks, the first to go first
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
    kernels = chosen_kernels(config, mesh_shape(), hardware.architecture)
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
        "kernels": describe_kernels(sizes, kernels, hardware.architecture),
        "matmul": describe_matmul(sizes),
        "batch": f"{data.global_batch_size:,} sequences of {data.sequence_length:,} tokens = "
        f"{tokens:,}{default_length}",
        "assumed": f"{hardware.matmul_efficiency:.0%} of the peak in large products, "
        f"{hardware.bandwidth_efficiency:.0%} of memory's bandwidth, "
        f"{hardware.link_efficiency:.0%} of links ({source})",
    }
    left_out = []
    if not optimizers.is_modelled(config.optimizer):
        left_out.append(
            f"the update by {config.optimizer.name}: its time, memory and communication are not "
            "modelled"
        )
    if sizes.remat == "offload":
        left_out.append("the time of offloaded activations on their way to the host and back")
    if left_out:
        rows["without"] = f";\n{'':<8}".join(left_out)
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


def ranking(results: Search, width: int, has_colour: bool) -> str:
    """Formats a table with each mesh's best setting, where it is too wide with fewer columns."""
    shown = results.settings[:MAX_ROWS]
    header = ("mesh", "remat", "micro-batches", "GB", "to spare", "tokens/s", "MFU", "computing")
    cells = [list(header), *map(list, map(_row, shown))]
    lines = columns(cells[0], cells[1:]).splitlines()
    for column in _LESS_NEEDED:
        if max(map(len, lines)) > width:
            for row in cells:
                del row[column]
            lines = columns(cells[0], cells[1:]).splitlines()
    lines[1] = styled(lines[1], "bold", has_colour and shown[0].fits)
    if more := len(results.settings) - len(shown):
        lines.append(f"... and {more} more meshes (--json FILE has all)")
    counts = f"settings tried: {len(results.all):,}; meshes: {len(results.settings):,}"
    return "\n".join([*lines, counts, *refusals(results.refused)])


def refusals(refused: Mapping[str, str]) -> Iterator[str]:
    """Yields a line about the meshes that cannot run a configuration, if there are any."""
    for mesh, reason in itertools.islice(refused.items(), 1):
        why = re.split("[;\n]", reason)[0]
        yield f"meshes refused: {len(refused):,}, such as {mesh}: {why}"


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
        ("memory", memory_by_kind(best)),
        *(("", text) for text in _warnings(best)),
    ]
    if best.fits:
        rows.insert(1, ("why", _reason(results)))
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


def _reason(results: Search) -> str:
    # Why the best setting is the first, and the largest part of its time.
    best = results.settings[0]
    fastest = min(results.settings, key=rank)
    reason = "the fastest mesh that fits"
    if fastest is not best:
        reason = f"the simplest mesh that is about as fast as the fastest, {fastest}"
    seconds = _seconds(best)
    largest = max(seconds, key=seconds.__getitem__)
    share = f"{seconds[largest] / best.time.serial:.0%}"
    kind = "communication " if largest.startswith("over") else ""
    return f"it is {reason}; the largest part of a step, {share}, is {kind}{largest}"


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


def memory_by_kind(setting: Candidate) -> str:
    """Formats the memory of a device, exact and modelled kinds apart."""
    unit, size = ("GB", GB) if setting.memory.total >= GB else ("MB", GB / 1000)
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
    padding = describe_padding(best.config.model, best.sizes)
    if padding is not None:
        yield f"padded {padding}"
    context = describe_context(best.config.model, share_of(best.config, best.sizes))
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
        "meshes": list(map(setting_record, results.settings)),
        "refused": dict(results.refused),
    }


def candidate_record(candidate: Candidate) -> Record:
    """Returns the axes, memory and seconds of a mesh for JSON."""
    time = candidate.time
    return {
        **candidate.sizes,
        "fits": candidate.fits,
        "bytes_per_device": {**vars(candidate.memory), "total": candidate.memory.total},
        "bytes_to_spare": candidate.spare,
        "seconds": {
            "products": time.products,
            "attention": time.attention,
            "elementwise": time.elementwise,
            "update": time.update,
            "communication": with_joined_axes(time.communication),
            "serial": time.serial,
            "overlapped": time.overlapped,
        },
    }


def setting_record(setting: Setting) -> Record:
    """Returns a setting for JSON; `tokens_per_second` is at the expected time."""
    return {
        **candidate_record(setting),
        "fits_surely": setting.fits_surely,
        "update_is_modelled": setting.update_is_modelled,
        "remat": setting.config.model.remat,
        "accumulation": setting.config.train.accumulation,
        "micro_batch_size": setting.rows,
        "collectives": list(itertools.starmap(_collective_record, setting.costs.traffic.items())),
        "flops_per_device": setting.costs.flops * setting.relative_work,
        "padding": setting.costs.padding,
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
