"""Why the best setting is best, what limits it, and what else would be better if it fitted."""

import dataclasses
from collections.abc import Iterator

from jaxtp.estimate.roofline import StepTime
from jaxtp.estimate.search import MEMORY_ERROR, NEAR, Model, Search, Setting, search
from jaxtp.mesh import AXES, TP

GB = 1e9
FAR = 1.5
"""What lacks more than half of the room again is not spoken of."""


def why(found: Search, configured: Setting | None, model: Model) -> list[str]:
    """Sentences about what was found; at least one setting fits.

    Args:
      found: the search.
      configured: the configuration as it is, if its mesh can run it.
      model: what the search was about.
    """
    best = found.settings[0]
    fits = "surely fits" if best.fits_surely else "fits"
    return [
        f"{_how(best)} is the fastest that {fits}, with {best.spare / GB:,.1f} GB to spare: {_share(best)} of a step "
        "is left for computing where nothing overlaps.",
        *_doubt(best),
        _limit(best),
        *_others(found, best),
        *_as_configured(best, configured),
        *_would_be_faster(found, best),
        *_fused_attention(found, best, model),
    ]


def _limit(best: Setting) -> str:
    """The largest part of a step."""
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
    """`over tp 32%, over fsdp 20%`, of a step."""
    each = sorted(time.communication.items(), key=lambda part: -part[1])
    return ", ".join(f"over {' and '.join(axes)} {seconds / time.serial:.0%}" for axes, seconds in each)


def _doubt(best: Setting) -> Iterator[str]:
    """Where even the best fits by less than the model of memory may be off, or something is not modelled."""
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
    """The best of another tp that fits, for the two that come next."""
    seen = {best.sizes[TP]}
    for setting in found.fitting:
        if setting.sizes[TP] in seen or len(seen) > 2:
            continue
        seen.add(setting.sizes[TP])
        yield f"{_how(setting, best)} leaves {_share(setting)} for computing: {_slower(setting, best)}."


def _as_configured(best: Setting, configured: Setting | None) -> Iterator[str]:
    if configured is None or configured.config == best.config:
        return
    if configured.fits:
        doubt = "" if configured.has_margin else f", less than the {MEMORY_ERROR:.0%}"
        spare = f"{configured.spare / GB:,.1f} GB to spare{doubt}"
        yield f"As configured, {_how(configured)}: {_slower(configured, best)}, {spare}."
    else:
        yield f"As configured, {_how(configured)}, it lacks {-configured.spare / GB:,.1f} GB."


def _would_be_faster(found: Search, best: Setting) -> Iterator[str]:
    """The fastest of those that do not lack too much, if it does not fit, or not surely."""
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


def _fused_attention(found: Search, best: Setting, model: Model) -> Iterator[str]:
    """What would be the best with a kernel that never holds the scores, on GPUs that have it."""
    config = best.config.model
    if config.attention == "cudnn" or best.target.hardware.platform != "cuda" or config.precision.compute == "float32":
        return
    fused = dataclasses.replace(best.config, model=dataclasses.replace(config, attention="cudnn"))
    meshes = [setting.sizes for setting in found.settings]
    other = search(fused, best.target, model, meshes, as_configured=found.as_configured).settings[0]
    faster, freed = best.time.expected / other.time.expected, other.spare - best.spare
    if other.fits and (faster > NEAR or freed > GB):
        yield (
            f"--model.attention cudnn never holds the scores: the best would be {_how(other)}, {faster:.2f} x as fast, "
            f"with {other.spare / GB:,.1f} GB to spare."
        )


def _how(setting: Setting, beside: Setting | None = None) -> str:
    """The mesh, and remat and micro-batches where they differ from those of another."""
    config = setting.config
    ways = (f"remat {config.model.remat}", f"micro-batches of {setting.rows}")
    before = ("", "") if beside is None else (f"remat {beside.config.model.remat}", f"micro-batches of {beside.rows}")
    told = [way for way, other in zip(ways, before, strict=True) if way != other]
    return f"{setting} with {' and '.join(told)}" if told else str(setting)


def _share(setting: Setting) -> str:
    return f"{setting.time.computing_share:.0%}"


def _slower(setting: Setting, best: Setting) -> str:
    ratio = setting.time.expected / best.time.expected
    return "as fast, within the model's error" if ratio < NEAR else f"{ratio:.2f} x slower"


def mesh_flag(setting: Setting) -> str:
    """`fsdp=2,tp=4`."""
    return ",".join(f"{axis}={setting.sizes[axis]}" for axis in AXES if setting.sizes[axis] > 1) or "tp=1"
