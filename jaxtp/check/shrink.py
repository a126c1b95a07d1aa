"""A configuration small enough for virtual CPU devices that keeps what can go wrong on a mesh.

Kept: the kinds of layers, biases and norms, the numbers of heads, what divides what (vocabulary, sequence, chunks of
the loss), windows beside chunks of the sequence, remat, precision, dropout, accumulation, the optimizer. Shrunk:
widths, layers, sequence, batch.

So the check compares what is left of a configuration when sizes are taken out, not a toy model of its own.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from jaxtp.config import changed
from jaxtp.layers.activations import Context, Method, is_split
from jaxtp.layers.branch import Small, like
from jaxtp.mesh import CP, DP, FSDP, SEQUENCE, STORAGE, TP, batch_parts, parts, sized
from jaxtp.models.config import padded_sizes, shrunk, violations
from jaxtp.train.config import TrainConfig, context_problems, padding_problems, share_of

MAX_DEVICES = 16
COMMON_TP = 8
MIN_SEQUENCE, MIN_ROWS = 24, 4
UPDATES = 3
MIN_EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    """A mesh, whether activations between the blocks are split over tp along the sequence, and attention over cp."""

    sizes: Mapping[str, int]
    """Devices along each axis."""
    sequence_parallel: bool
    context: Context = "auto"
    """Method of attention over cp; auto where there is none, or where it differs between blocks."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        """Returns the mesh in words, such as `fsdp 2 x cp 2 x tp 4, sequence-parallel, ulysses`."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one device"
        told = {"sequence-parallel": self.sequence_parallel, self.context: self.sizes[CP] > 1}
        return ", ".join([mesh, *(name for name, holds in told.items() if holds)])


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
    others += [{DP: 2, FSDP: 2, CP: 2, TP: least}, {CP: 8}, {FSDP: 8}, {DP: 8}]
    meshes = [own, *(sized(**sizes) for sizes in others)]
    meshes = [sizes for sizes in meshes if math.prod(sizes.values()) <= MAX_DEVICES]
    asked = methods_of(config, mesh)[0]  # not what auto would take on fewer devices
    cases = [case for sizes in meshes for case in cases_of(config, sizes, asked)[:1]]
    cases[1:1] = cases_of(config, own, asked)[1:] or cases_of(config, sized(tp=tp))[1:]
    over_cp = cases_of(config, sized(cp=2, tp=least), asked)
    cases += [case for case in over_cp if case.sequence_parallel == over_cp[0].sequence_parallel]  # by each method
    small = [case for case in cases if 1 < case.devices <= MAX_DEVICES]
    return list({str(case): case for case in small}.values())


def cases_of(config: TrainConfig, sizes: Mapping[str, int], asked: Context = "auto") -> list[Case]:
    """Returns the cases on one mesh, the configuration's own kind first; none if the model cannot run on it.

    Args:
      config: the run.
      sizes: devices along each axis.
      asked: method over cp of the first, where it can be that.
    """
    methods = sorted(methods_of(config, sizes), key=lambda method: method != asked)
    split = is_split(None, config.data.sequence_length, sizes)
    first = split and config.model.sequence_parallel is not False
    cases = [Case(sizes, first, methods[0]), *([Case(sizes, not first, methods[0])] if split else [])]
    cases += [Case(sizes, first, method) for method in methods[1:]]
    return [case for case in cases if not any(unfit(config, case))]


def methods_of(config: TrainConfig, sizes: Mapping[str, int]) -> list[Context]:
    """Returns the methods of attention over cp to check: what the run takes there first, the others if it says auto."""
    if sizes[CP] == 1 or config.mesh.context != "auto":
        return [config.mesh.context if sizes[CP] > 1 else "auto"]
    taken = {block.attended(sizes[TP]).method(share_of(config, sizes))[0] for block in config.model.block_kinds()}
    own = taken.pop() if len(taken) == 1 else "auto"
    return [own, *(method for method in get_args(Method) if method != own)]


def unfit(config: TrainConfig, case: Case, *, fixed: bool = False) -> Iterator[str]:
    """Yields why a run cannot be checked in a case; `fixed` as in `models.config.violations`."""
    run = on_case(config, case)
    found = list(violations(run.model, case.sizes, fixed=fixed))
    problems = (*context_problems(run, case.sizes), *padding_problems(run, case.sizes))
    yield from found or (problem.text for problem in problems)


def on_case(config: TrainConfig, case: Case) -> TrainConfig:
    """Returns the configuration with the case's sequence parallelism, and its method of attention over cp."""
    return changed(config, {"model.sequence_parallel": case.sequence_parallel, "mesh.context": case.context})


def shrink(config: TrainConfig, cases: list[Case]) -> TrainConfig:
    """Returns the same architecture and parallel structure, small, for all the cases.

    Args:
      config: the run, which fits each case's mesh.
      cases: what it will be run on.
    """
    # What splits a sequence: in the order zigzag, twice as many chunks as there are devices along cp.
    chunks = math.lcm(*(parts(case.sizes, SEQUENCE) * (2 if case.sizes[CP] > 1 else 1) for case in cases))
    accumulation = min(config.train.accumulation, 2)
    rows = like(0, math.lcm(*(batch_parts(case.sizes) for case in cases)) * accumulation, MIN_ROWS)
    sequence = like(config.data.sequence_length, chunks, MIN_SEQUENCE)
    small = Small(
        tps=frozenset(case.sizes[TP] for case in cases),
        shards=math.lcm(*(parts(case.sizes, STORAGE) for case in cases)),
        length=sequence,
        before=config.data.sequence_length,
    )
    # A rate at which three updates move the weights enough to be compared; and an epsilon above rounding: with a
    # smaller one Adam makes whole steps of elements whose gradient is nothing but rounding.
    schedule = {"optimizer.learning_rate": 1e-2, "optimizer.warmup_steps": 1, "train.steps": 10}
    schedule |= {"optimizer.eps": max(config.optimizer.eps, MIN_EPSILON)}
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
    """Returns tp and cp as they are, as far as 16 devices allow, and fsdp and dp of at most 2 each."""
    tp = _at_most(mesh[TP], MAX_DEVICES // min(2, mesh[CP]))
    cp = _at_most(mesh[CP], MAX_DEVICES // tp)
    fsdp = 2 if mesh[FSDP] > 1 and 2 * cp * tp <= MAX_DEVICES else 1
    dp = 2 if mesh[DP] > 1 and 2 * fsdp * cp * tp <= MAX_DEVICES else 1
    return sized(dp=dp, fsdp=fsdp, cp=cp, tp=tp)


def _at_most(size: int, limit: int) -> int:
    """Returns a size, divided by its smallest primes until it is within a limit."""
    while size > limit:
        size = next((size // prime for prime in (2, 3, 5, 7) if size % prime == 0), 1)
    return size
