"""A configuration small enough for virtual CPU devices that keeps what can go wrong on a mesh.

Kept: the kinds of layers, biases and norms, the numbers of heads, what divides what (vocabulary, sequence, chunks of
the loss), remat, precision, dropout, accumulation, the optimizer. Shrunk: widths, layers, sequence, batch.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxtp.config import changed
from jaxtp.layers.branch import Small, like
from jaxtp.mesh import DP, FSDP, STORAGE, TP, batch_parts, parts, sized
from jaxtp.models.config import padded_sizes, shrunk, violations
from jaxtp.train.config import TrainConfig, padding_problems

MAX_DEVICES = 16
COMMON_TP = 8
MIN_SEQUENCE, MIN_ROWS = 24, 4
UPDATES = 3


@dataclass(frozen=True)
class Case:
    """A mesh, and whether activations between the blocks are split over tp along the sequence."""

    sizes: Mapping[str, int]
    """Devices along each axis."""
    sequence_parallel: bool

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        """Returns the mesh in words, such as `fsdp 2 x tp 4, sequence-parallel`."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one device"
        return f"{mesh}, sequence-parallel" if self.sequence_parallel else mesh


ONE_DEVICE = Case(sized(), False)


def default_cases(config: TrainConfig, mesh: Mapping[str, int]) -> list[Case]:
    """Returns the configuration's own mesh, scaled down to 16 devices, and others for each axis alone and together."""
    own = _own_mesh(mesh)
    able = [tp for tp in range(2, MAX_DEVICES + 1) if cases_of(config, sized(tp=tp))]
    tps = [tp for tp in able if not padded_sizes(config.model, tp)] or [1]
    padded = [tp for tp in (2, 4, COMMON_TP) if tp in able and tp not in tps][:1]
    few = [tp for tp in tps if tp <= COMMON_TP] or tps[:1]
    least, most = few[0], few[-1]
    tp = own[TP] if own[TP] > 1 else most
    half = tp // 2 if tp // 2 in tps else tp
    middle = max(tp for tp in few if tp <= max(COMMON_TP // 2, least))
    others = [{TP: tp}, {TP: half}, {FSDP: 2, TP: half}, {DP: 2, FSDP: 2, TP: least}, {DP: 2, TP: middle}, {TP: most}]
    others += [{TP: tp} for tp in padded]
    meshes = [own, *(sized(**sizes) for sizes in (*others, {FSDP: 8}, {DP: 8}))]
    meshes = [sizes for sizes in meshes if math.prod(sizes.values()) <= MAX_DEVICES]
    cases = [case for sizes in meshes for case in cases_of(config, sizes)[:1]]
    cases[1:1] = cases_of(config, own)[1:] or cases_of(config, sized(tp=tp))[1:]
    return [case for i, case in enumerate(cases) if case != ONE_DEVICE and case not in cases[:i]]


def cases_of(config: TrainConfig, sizes: Mapping[str, int]) -> list[Case]:
    """Returns the cases on one mesh, the configuration's own kind first; none if the model cannot run on it."""
    if any(violations(config.model, sizes)) or any(padding_problems(config, sizes)):
        return []
    can_split = sizes[TP] > 1 and config.data.sequence_length % sizes[TP] == 0
    preferred = can_split and config.model.sequence_parallel is not False
    return [Case(sizes, preferred)] + ([Case(sizes, not preferred)] if can_split else [])


def shrink(config: TrainConfig, cases: list[Case]) -> TrainConfig:
    """Returns the same architecture and parallel structure, small, for all the cases.

    Args:
      config: the run, which fits each case's mesh.
      cases: what it will be run on.
    """
    tps = math.lcm(*(case.sizes[TP] for case in cases))
    accumulation = min(config.train.accumulation, 2)
    rows = like(0, math.lcm(*(batch_parts(case.sizes) for case in cases)) * accumulation, MIN_ROWS)
    sequence = like(config.data.sequence_length, tps, MIN_SEQUENCE)
    small = Small(
        tps=frozenset(case.sizes[TP] for case in cases),
        shards=math.lcm(*(parts(case.sizes, STORAGE) for case in cases)),
        length=sequence,
        before=config.data.sequence_length,
    )
    # A rate at which three updates move the weights enough to be compared.
    schedule = {"optimizer.learning_rate": 1e-2, "optimizer.warmup_steps": 1, "train.steps": 10}
    batch = {"data.sequence_length": sequence, "data.global_batch_size": rows, "train.accumulation": accumulation}
    return changed(config, {"model": shrunk(config.model, small), **batch, **schedule})


def describe(config: TrainConfig, small: TrainConfig) -> Iterator[str]:
    """Yields what was shrunk: `model.d_model 4096 -> 64`."""
    for section in ("model", "data", "train"):
        before, after = getattr(config, section), getattr(small, section)
        for field in dataclasses.fields(before):
            old, new = getattr(before, field.name), getattr(after, field.name)
            if old != new and field.name != "steps":
                yield f"{section}.{field.name} {old} -> {new}"


def _own_mesh(mesh: Mapping[str, int]) -> dict[str, int]:
    """Returns tp as it is, up to 16, and fsdp and dp of at most 2 each, as many as 16 devices allow."""
    tp = mesh[TP]
    while tp > MAX_DEVICES:
        tp = next((tp // prime for prime in (2, 3, 5, 7) if tp % prime == 0), 1)
    fsdp = 2 if mesh[FSDP] > 1 and 2 * tp <= MAX_DEVICES else 1
    dp = 2 if mesh[DP] > 1 and 2 * fsdp * tp <= MAX_DEVICES else 1
    return sized(dp=dp, fsdp=fsdp, tp=tp)
