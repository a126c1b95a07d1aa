"""Why the best setting is best, what limits it, and what would be better; or, where nothing fits, what would."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from jaxtp.estimate.alternatives import Alternative
from jaxtp.estimate.report import label
from jaxtp.estimate.roofline import StepTime
from jaxtp.estimate.search import MEMORY_ERROR, NEAR, Search, Setting
from jaxtp.hardware import GB
from jaxtp.mesh import TP
from jaxtp.models.costs import describe_padding
from jaxtp.train.config import describe_context, describe_grouped, multiplies_all

UNITS = (("milliseconds", 1e-3), ("seconds", 1), ("minutes", 60), ("hours", 3600), ("days", 86400))
"""Units of time; devices are paid by the hour, never by the day."""
FAR = 1.5
"""Largest memory, as a multiple of the room, of settings that are mentioned as faster."""

NO_REMEDY = "No more of these devices would help: look at the sequence and the loss chunk."


def why(found: Search, configured: Setting | None, alternatives: Iterable[Alternative]) -> list[str]:
    """Returns sentences about what was found; at least one setting fits.

    Args:
      found: the search.
      configured: the configuration as it is, if its mesh can run it.
      alternatives: what would be faster.
    """
    best = found.settings[0]
    return [
        f"{_how(best)} is {_superlative(found, best)}, with {best.spare / GB:,.1f} GB to spare: "
        f"{_share(best)} of a step is left for computing where nothing overlaps.",
        *_doubt(best),
        *_padding(best),
        *_experts(best),
        *_context(best),
        _run(best),
        _limit(best),
        *(_better(other, best) for other in alternatives),
        *_others(found, best),
        *_as_configured(best, configured),
        *_would_be_faster(found, best),
    ]


def what_would_fit(found: Search, alternatives: Iterable[Alternative]) -> list[str]:
    """Returns sentences about a search in which nothing fits: what the least lacks, and what would do.

    Args:
      found: the search.
      alternatives: what would fit.
    """
    least = found.settings[0]
    kinds = dataclasses.asdict(least.memory)
    largest = max(kinds, key=lambda name: kinds[name])
    return [
        f"Nothing fits. The least is {_how(least)}: {least.memory.total / GB:,.1f} GB, {kinds[largest] / GB:,.1f} of "
        f"it {label(largest)}, where {least.target.room / GB:,.1f} are there.",
        *_without_update(least),
        *([_remedy(other) for other in alternatives] or [NO_REMEDY]),
    ]


def _without_update(least: Setting) -> Iterator[str]:
    if not least.update_is_modelled:
        yield f"What the update by {least.config.optimizer.name} holds is not in these numbers: it is not modelled."


def _remedy(other: Alternative) -> str:
    memory = f"{other.setting.memory.total / GB:,.1f} of {other.setting.target.room / GB:,.1f} GB"
    return f"{other} would do: {_how(other.setting)}, {memory}."


def _padding(best: Setting) -> Iterator[str]:
    if (padded := describe_padding(best.config.model, best.sizes)) is not None:
        yield f"Sizes are padded {padded}."


def _experts(best: Setting) -> Iterator[str]:
    model, platform = best.config.model, best.target.hardware.platform
    if multiplies_all(model, platform):
        flops = [sum(p.flops * share(p) for p in best.costs.products) for share in (lambda p: 1.0, lambda p: p.counted)]
        yield (
            f"Experts: {'; '.join(describe_grouped(model, platform))}; of all products with weights "
            f"{flops[1] / flops[0]:.0%} would be enough."
        )


def _context(best: Setting) -> Iterator[str]:
    if (text := describe_context(best.config, best.sizes)) is not None:
        yield f"It divides {text}."


def _better(other: Alternative, best: Setting) -> str:
    ratio = best.time.expected / other.setting.time.expected
    spare = f"{other.setting.spare / GB:,.1f} GB to spare"
    change = str(other).rstrip(",")
    return f"With {change}, the best would be {_how(other.setting)}: {ratio:.2f} x as fast, with {spare}."


def _superlative(found: Search, best: Setting) -> str:
    """Returns words for the fastest, or for the simplest of several as fast."""
    surely = "surely " if best.fits_surely else ""
    fastest = min(setting.time.expected for setting in found.fitting if setting.has_margin == best.has_margin)
    if best.time.expected == fastest:
        return f"the fastest that {surely}fits"
    return f"the simplest of the fastest that {surely}fit"


def _run(best: Setting) -> str:
    """Returns how long all steps take, and how much of the devices' time."""
    steps, devices = best.config.train.steps, best.target.devices
    seconds = [each * steps for each in (best.time.overlapped, best.time.serial)]
    of_devices, unit = in_unit([devices * each for each in seconds], UNITS[:-1])
    taken = " ".join(in_unit(seconds, UNITS))
    tokens = steps * best.config.data.global_batch_size * best.config.data.sequence_length
    hours = f"{of_devices} {best.target.hardware.name} {unit} in all"
    return f"All {steps:,} steps, {tokens:,} tokens, take {taken}, modelled: {hours}."


def device_hours(best: Setting) -> tuple[float, float]:
    """Returns the range of the hours of all devices that all steps of a run take."""
    steps = best.config.train.steps * best.target.devices / 3600
    return best.time.overlapped * steps, best.time.serial * steps


def in_unit(seconds: Sequence[float], units: Sequence[tuple[str, float]]) -> tuple[str, str]:
    """Returns a range of times in the largest unit of which it has two, and its name: `5.41 to 6.32`, `hours`."""
    name, size = next((unit for unit in reversed(units) if max(seconds) >= 2 * unit[1]), units[0])
    return " to ".join(
        f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (s / size for s in seconds)
    ), name


def _limit(best: Setting) -> str:
    """Names the largest part of a step."""
    time = best.time
    parts = {
        "matrix products with weights": time.products,
        "attention": time.attention,
        "memory bandwidth (norms, gates, logits)": time.elementwise,
        "the update of the weights": time.update,
        f"communication ({_over(time)})": time.moving,
    }
    name, seconds = max(parts.items(), key=lambda part: part[1])
    return f"What limits it: {name}, {seconds / time.serial:.0%} of a step."


def _over(time: StepTime) -> str:
    """Returns the shares of a step that communication takes: `over tp 32%, over fsdp 20%`."""
    each = sorted(time.communication.items(), key=lambda part: -part[1])
    return ", ".join(f"over {' and '.join(axes)} {seconds / time.serial:.0%}" for axes, seconds in each)


def _doubt(best: Setting) -> Iterator[str]:
    """Yields doubts: the best fits by less than the error of the model of memory, or something is not modelled."""
    if not best.update_is_modelled:
        yield (
            f"None is sure: what the update by {best.config.optimizer.name} computes, moves and holds is not modelled; "
            "--tier 3 compiles it."
        )
    if not best.has_margin:
        yield (
            f"That is less than the {MEMORY_ERROR:.0%} by which the modelled part may be wrong, and nothing has more "
            "to spare: --tier 3 compiles it."
        )


def _others(found: Search, best: Setting) -> Iterator[str]:
    """Yields the best of another tp that fits, for the two that come next."""
    seen = {best.sizes[TP]}
    for setting in found.fitting:
        if setting.sizes[TP] in seen or len(seen) > 2:
            continue
        seen.add(setting.sizes[TP])
        yield f"{_how(setting, best)} leaves {_share(setting)} for computing: {_beside(setting, best)}."


def _as_configured(best: Setting, configured: Setting | None) -> Iterator[str]:
    if configured is None or configured.config == best.config:
        return
    if configured.fits:
        doubt = "" if configured.has_margin else f", less than the {MEMORY_ERROR:.0%}"
        spare = f"{configured.spare / GB:,.1f} GB to spare{doubt}"
        yield f"As configured, {_how(configured)}: {_beside(configured, best)}, {spare}."
    else:
        yield f"As configured it does not fit: {_how(configured)} lacks {-configured.spare / GB:,.1f} GB."


def _would_be_faster(found: Search, best: Setting) -> Iterator[str]:
    """Yields the fastest of those that do not lack too much, if it does not fit, or not surely."""
    near = (setting for setting in found.all if setting.memory.total < FAR * setting.target.room)
    fastest = min(near, key=lambda setting: setting.time.expected, default=best)
    faster = best.time.expected / fastest.time.expected
    if faster > 1 and fastest.fits and not fastest.has_margin:
        yield (
            f"{_how(fastest)} would be {faster:.2f} x as fast, with {fastest.spare / GB:,.1f} GB to spare, less than "
            f"the {MEMORY_ERROR:.0%} by which the modelled part may be wrong."
        )
    elif faster > NEAR and not fastest.fits:
        yield f"{_how(fastest)} would be {faster:.2f} x as fast, and lacks {-fastest.spare / GB:,.1f} GB."


def _how(setting: Setting, beside: Setting | None = None) -> str:
    """Returns the mesh, and remat and micro-batches where they differ from those of another."""
    config = setting.config
    ways = (f"remat {config.model.remat}", f"micro-batches of {setting.rows}")
    before = ("", "") if beside is None else (f"remat {beside.config.model.remat}", f"micro-batches of {beside.rows}")
    told = [way for way, other in zip(ways, before, strict=True) if way != other]
    return f"{setting} with {' and '.join(told)}" if told else str(setting)


def _share(setting: Setting) -> str:
    return f"{setting.time.computing_share:.0%}"


def _beside(setting: Setting, best: Setting) -> str:
    """Returns how fast it is; what is faster than the best has less to spare."""
    ratio = setting.time.expected / best.time.expected
    if ratio < 1 / NEAR:
        return f"{1 / ratio:.2f} x as fast, but less sure to fit"
    return "as fast, within the model's error" if ratio < NEAR else f"{ratio:.2f} x slower"
