"""Reports of tiers 2 and 3, for people and for machines."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxtp.audit.schedule import Scheduled
from jaxtp.audit.tables import columns
from jaxtp.estimate.partitioned import Bytes, Partitioned
from jaxtp.estimate.report import unit_of
from jaxtp.estimate.search import Setting
from jaxtp.estimate.target import Compiled
from jaxtp.hardware import GB
from jaxtp.train.config import multiplies_all


def partitioned_lines(setting: Setting, found: Partitioned) -> Iterator[str]:
    """Yields the lines that show tier 2 beside tier 1."""
    yield f"compiled {setting} for {setting.target.devices} virtual CPU devices in {found.seconds:.0f} s"
    accounts = found.planned, found.realised
    unit, size = unit_of(sum(found.planned.values()))
    rows = [
        (kind, "+".join(axes), *(f"{sent.get((kind, axes), 0) / size:,.3f}" for sent in accounts))
        for kind, axes in dict.fromkeys((*found.planned, *found.realised))
    ]
    yield columns(("collective", "over", f"{unit} sent, tier 1", f"{unit} sent, compiled"), rows)
    yield _verdict(found)
    yield from (f"  {problem}" for problem in found.problems)
    yield from (f"  the compiler warns: {line}" for line in found.warnings)
    yield from (f"  ({note})" for note in found.notes)


def _verdict(found: Partitioned) -> str:
    if not found.within:
        return "the partitioned program does not move what tier 1 says"
    if found.equal:
        return "the partitioned program moves what tier 1 says, in kind, axes and bytes, and nothing else"
    return "the partitioned program moves no more than the bounds of tier 1, in kind, axes and bytes, and nothing else"


def partitioned_record(found: Partitioned) -> dict[str, Any]:
    """Returns tier 2 as plain values."""
    return {
        "provenance": "compiled",
        "equal_to_tier_1": found.equal,
        "within_tier_1": found.within,
        "planned": _sent(found.planned),
        "realised": _sent(found.realised),
        **{name: getattr(found, name) for name in ("problems", "warnings", "notes", "seconds")},
    }


def target_lines(setting: Setting, found: Compiled) -> Iterator[str]:
    """Yields the lines that show tier 3 beside tier 1."""
    where = f"{setting.target.devices} x {setting.target.hardware.name}"
    yield f"compiled {setting} for {where}, which need not be there, in {found.seconds:.0f} s"
    peak, room = found.peak_bytes, setting.target.room
    rows = [
        ("state and batch", f"{found.argument_bytes / GB:,.2f}", "compiled"),
        ("temporaries", f"{found.temp_bytes / GB:,.2f}", "compiled"),
        (
            "peak",
            f"{peak / GB:,.2f}",
            f"of {room / GB:,.2f} for JAX: {'fits' if fits(setting, found) else 'does not fit'}",
        ),
        ("tier 1 said", f"{setting.memory.total / GB:,.2f}", f"{setting.memory.total / peak - 1:+.0%} of the peak"),
    ]
    yield columns(("on each device", "GB", ""), rows)
    yield from _products(setting, found)
    header = ("collective", "over", "times", "GB of messages", "beside computing", "operations beside them")
    yield ""
    yield columns(header, [_scheduled(one) for one in found.collectives])
    yield "(messages are counted whole, as each collective is called; the compiler merges small ones)"
    yield from (f"  ({note})" for note in found.notes)


def _products(setting: Setting, found: Compiled) -> Iterator[str]:
    """Yields a line on the products of a mixture of experts, which may be far more than what is due."""
    model, platform = setting.config.model, setting.target.hardware.platform
    if model.most_experts and found.flops is not None:
        how = "they multiply every row with every expert" if multiplies_all(model, platform) else "in kernels"
        yield (
            f"products outside of kernels: {found.flops / 1e12:,.1f} TFLOP, tier 1 said "
            f"{setting.costs.flops_of_xla / 1e12:,.1f}; those of experts: {how}"
        )


def _scheduled(one: Scheduled) -> tuple[str, ...]:
    size = f"{one.collective.bytes / GB:,.3f}"
    counts = f"{one.count:,}", size, f"{one.overlapped:,}", f"{one.computing:,}"
    return one.collective.kind, "+".join(one.collective.axes), *counts


def fits(setting: Setting, found: Compiled) -> bool:
    """Returns whether there is memory for what was compiled."""
    return found.peak_bytes <= setting.target.room


def target_record(setting: Setting, found: Compiled) -> dict[str, Any]:
    """Returns tier 3 as plain values."""
    return {
        "provenance": "compiled",
        **dataclasses.asdict(found),
        "collectives": [one.record() for one in found.collectives],
        "fits": fits(setting, found),
        "tier_1_to_peak": setting.memory.total / found.peak_bytes,
    }


def _sent(sent: Bytes) -> list[dict[str, Any]]:
    return [{"kind": kind, "axes": list(axes), "bytes_sent": size} for (kind, axes), size in sent.items()]
