"""Scales a configuration down for virtual CPU devices, and chooses meshes to check.

Unchanged: the kinds of layers, biases and norms, numbers of heads, divisibility (vocabulary,
sequence, loss chunks), windows relative to sequence chunks, remat, precision, dropout,
accumulation, the optimizer. Shrunk: widths, layers, sequence, batch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from jaxtp.config.command_line import parse_mesh
from jaxtp.config.schema import ConfigError, replace_nested
from jaxtp.layers.branch import ShrinkSpec, smallest_congruent
from jaxtp.layers.mxfp8 import BLOCK
from jaxtp.layers.sequence_parallel import Context, Method, is_split
from jaxtp.mesh import (
    AXES,
    CP,
    DP,
    FSDP,
    SEQUENCE,
    STORAGE,
    TP,
    batch_parts,
    check_sizes,
    mesh_shape,
    parts,
)
from jaxtp.models.config import padded_sizes, shrink_model, violations
from jaxtp.train.config import TrainConfig
from jaxtp.train.validation import (
    attention_blocks,
    check,
    context_problems,
    padding_problems,
    share_of,
)

MAX_DEVICES = 16
COMMON_TP = 8
MIN_SEQUENCE = 24
MIN_ROWS = 4
UPDATES = 3
MIN_EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    """A mesh to check, with sequence parallelism or not, and a cp attention method."""

    sizes: Mapping[str, int]
    sequence_parallel: bool
    context: Context = "auto"  # "auto" without cp, and if blocks differ in their methods
    accumulation: int | None = None  # None for the configuration's

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        """Example: `fsdp 2 x cp 2 x tp 4, sequence-parallel, ulysses`."""
        mesh = (
            " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1)
            or "one device"
        )
        split = ", sequence-parallel" if self.sequence_parallel else ""
        method = f", {self.context}" if self.sizes[CP] > 1 and self.context != "auto" else ""
        micro = "" if self.accumulation is None else f", accumulation {self.accumulation}"
        return f"{mesh}{split}{method}{micro}"


ONE_DEVICE = Case(mesh_shape(), False)


def plan(config: TrainConfig, meshes: Sequence[str] = ()) -> tuple[TrainConfig, list[Case]]:
    """Returns the shrunk configuration and its cases, on the requested or default meshes."""
    sizes = config.mesh.sizes
    check_sizes(sizes)
    # A size of -1 may be 1.
    smallest = {axis: 1 if meshes or size == -1 else size for axis, size in sizes.items()}
    check(config, smallest, lambda: None)
    resolved = {axis: 2 if size == -1 else size for axis, size in sizes.items()}
    cases = _requested_cases(config, meshes) if meshes else default_cases(config, resolved)
    if not cases:
        raise ConfigError(
            "this model fits no default mesh of several devices; choose one with --mesh"
        )
    return shrink(config, cases), cases


def own_model_cases(config: TrainConfig, meshes: Sequence[str], *, over_cp: bool) -> list[Case]:
    """Returns the requested or default meshes for a model of the user's.

    Its plan need not fit them.
    """
    if meshes:
        return [Case(sizes, False) for sizes in _requested_sizes(meshes).values()]
    own = _scaled_down(
        {axis: 2 if size == -1 else size for axis, size in config.mesh.sizes.items()}
    )
    others: list[dict[str, int]] = [{TP: 2}, {TP: 4}, {FSDP: 2}, {FSDP: 2, TP: 2}, {DP: 2}]
    others += [{CP: 2}, {CP: 2, TP: 2}] if over_cp else []
    cases = [Case(sizes, False) for sizes in (own, *(mesh_shape(**sizes) for sizes in others))]
    return [case for at, case in enumerate(cases) if case.devices > 1 and case not in cases[:at]]


def _requested_sizes(meshes: Sequence[str]) -> dict[str, dict[str, int]]:
    requested = {text: parse_mesh(text, AXES) for text in meshes}
    for text, sizes in requested.items():
        if (count := math.prod(sizes.values())) == 1:
            raise ConfigError(
                f"--mesh {text}: meshes are compared with one device; name a larger one"
            )
        if count > MAX_DEVICES:
            raise ConfigError(
                f"--mesh {text} is {count} devices, and a check runs on at most {MAX_DEVICES} "
                "virtual ones; dp or fsdp of 2 checks the same as a larger size"
            )
    return requested


def _requested_cases(config: TrainConfig, meshes: Sequence[str]) -> list[Case]:
    cases: list[Case] = []
    for text, sizes in _requested_sizes(meshes).items():
        first = Case(sizes, config.model.sequence_parallel or False, methods_of(config, sizes)[0])
        if problems := list(unfit(config, first, fixed=config.run.init_from is not None)):
            raise ConfigError(
                f"--mesh {text}:\n" + "\n".join(f"  {problem}" for problem in problems)
            )
        cases += [case for case in cases_of(config, sizes) if case not in cases]
    return cases


def default_cases(config: TrainConfig, mesh: Mapping[str, int]) -> list[Case]:
    """Returns the configuration's mesh, and meshes for each axis separately and together.

    The former is scaled down to 16 devices.
    """
    scaled = _scaled_down(mesh)
    runnable = [tp for tp in range(2, MAX_DEVICES + 1) if cases_of(config, mesh_shape(tp=tp))]
    unpadded = [tp for tp in runnable if not padded_sizes(config.model, tp)] or [1]
    padded = [tp for tp in (2, 4, COMMON_TP) if tp in runnable and tp not in unpadded][:1]
    common = [tp for tp in unpadded if tp <= COMMON_TP] or unpadded[:1]
    least = common[0]
    most = common[-1]
    tp = scaled[TP] if scaled[TP] > 1 else most
    half = tp // 2 if tp // 2 in unpadded else tp
    middle = max(tp for tp in common if tp <= max(COMMON_TP // 2, least))
    others = [
        {TP: tp},
        {TP: half},
        {FSDP: 2, TP: half},
        {DP: 2, FSDP: 2, TP: least},
        {DP: 2, TP: middle},
        {TP: most},
    ]
    others += [{TP: tp} for tp in padded]
    others += [{DP: 2, FSDP: 2, CP: 2, TP: least}, {CP: 8}, {FSDP: 8}, {DP: 8}]
    meshes = [scaled, *(mesh_shape(**sizes) for sizes in others)]
    method = methods_of(config, mesh)[0]  # on fewer devices, auto might choose another method
    cases = [case for sizes in meshes for case in cases_of(config, sizes, method)[:1]]
    cases[1:1] = cases_of(config, scaled, method)[1:] or cases_of(config, mesh_shape(tp=tp))[1:]
    over_cp = cases_of(config, mesh_shape(cp=2, tp=least), method)
    # The meshes of each method
    cases += [case for case in over_cp if case.sequence_parallel == over_cp[0].sequence_parallel]
    return list({str(case): case for case in cases if 1 < case.devices <= MAX_DEVICES}.values())


def cases_of(
    config: TrainConfig, sizes: Mapping[str, int], first_method: Context = "auto"
) -> list[Case]:
    """Returns a mesh's cases, the configuration's own first.

    The list is empty if the model cannot run on it.
    """
    methods = sorted(methods_of(config, sizes), key=lambda method: method != first_method)
    split = is_split(None, config.data.sequence_length, sizes)
    first = split and config.model.sequence_parallel is not False
    cases = [
        Case(sizes, first, methods[0]),
        *([Case(sizes, not first, methods[0])] if split else []),
    ]
    cases += [Case(sizes, first, method) for method in methods[1:]]
    return [case for case in cases if not any(unfit(config, case))]


def methods_of(config: TrainConfig, sizes: Mapping[str, int]) -> list[Context]:
    """Returns the cp attention methods to check.

    They are the configuration's, and for auto also the others.
    """
    attending = attention_blocks(config.model)
    if sizes[CP] == 1 or config.mesh.context != "auto" or not attending:
        return [config.mesh.context if sizes[CP] > 1 else "auto"]
    share = share_of(config, sizes)
    taken = {block.context_attention(sizes[TP]).method(share)[0] for block in attending}
    automatic = taken.pop() if len(taken) == 1 else "auto"
    return [automatic, *(method for method in get_args(Method) if method != automatic)]


def unfit(config: TrainConfig, case: Case, *, fixed: bool = False) -> Iterator[str]:
    """Yields reasons why a run does not fit a case; `fixed` as in `models.config.violations`."""
    run = on_case(config, case)
    sizes = case.sizes
    problems = (*context_problems(run, sizes), *padding_problems(run, sizes))
    yield from list(violations(run.model, sizes, fixed=fixed)) or (
        problem.text for problem in problems
    )


def on_case(config: TrainConfig, case: Case) -> TrainConfig:
    """Returns the configuration for a case."""
    accumulation = case.accumulation or config.train.accumulation
    changes = {"model.sequence_parallel": case.sequence_parallel, "mesh.context": case.context}
    return replace_nested(config, {**changes, "train.accumulation": accumulation})


def shrink(config: TrainConfig, cases: list[Case]) -> TrainConfig:
    """Returns a small configuration for all cases.

    It has the same architecture and parallel structure.
    """
    same_batches = config.data.batches is not None
    meshes = [case.sizes for case in cases]
    length = config.data.sequence_length
    accumulation = min(config.train.accumulation, 2)
    # Zigzag order splits a sequence into twice as many chunks as there are devices along cp.
    chunks = math.lcm(*(parts(sizes, SEQUENCE) * (2 if sizes[CP] > 1 else 1) for sizes in meshes))
    rows = smallest_congruent(0, math.lcm(*map(batch_parts, meshes)) * accumulation, MIN_ROWS)
    sequence = length if same_batches else smallest_congruent(length, chunks, MIN_SEQUENCE)
    block = BLOCK if config.model.precision.matmul == "mxfp8" else 1
    shards = math.lcm(block, *(parts(sizes, STORAGE) for sizes in meshes))
    tps = frozenset(sizes[TP] for sizes in meshes)
    model = shrink_model(
        config.model,
        ShrinkSpec(tps=tps, shards=shards, length=sequence, before=length, block=block),
    )
    if same_batches:
        return in_three_updates(
            replace_nested(config, {"model": replace(model, vocab_size=config.model.vocab_size)})
        )
    batch = {
        "data.sequence_length": sequence,
        "data.global_batch_size": rows,
        "train.accumulation": accumulation,
    }
    return in_three_updates(replace_nested(config, {"model": model, **batch}))


def in_three_updates(config: TrainConfig) -> TrainConfig:
    """Returns a configuration whose optimizer moves the weights enough to compare them."""
    # With a smaller epsilon, Adam takes full steps for elements whose gradient is only rounding.
    schedule: dict[str, object] = {
        "optimizer.learning_rate": 1e-2,
        "optimizer.warmup_steps": 1,
        "train.epochs": None,
    }
    if config.optimizer.build is None:  # a schedule of the user's may need all steps
        schedule["train.steps"] = 10
    return replace_nested(
        config, {"optimizer.eps": max(config.optimizer.eps, MIN_EPSILON), **schedule}
    )


def describe(config: TrainConfig, small: TrainConfig) -> Iterator[str]:
    """Yields changes: `model.d_model 4096 -> 64`; of listed blocks only the name."""
    for section in ("model", *(["data"] if config.data.batches is None else []), "train"):
        before = vars(getattr(config, section))
        after = vars(getattr(small, section))
        changes = {name: (old, after[name]) for name, old in before.items() if old != after[name]}
        for name, (old, new) in changes.items():
            # Changes of precision concern only `matmul_layers`, which are the same layers.
            if name in ("steps", "precision"):
                continue
            listed = name in ("first_blocks", "pattern")  # their sizes change like the model's
            yield f"{section}.{name}" if listed else f"{section}.{name} {old} -> {new}"


def _scaled_down(mesh: Mapping[str, int]) -> dict[str, int]:
    """Returns tp and cp as large as 16 devices allow, and fsdp and dp of at most 2."""
    tp = _at_most(mesh[TP], MAX_DEVICES // min(2, mesh[CP]))
    cp = _at_most(mesh[CP], MAX_DEVICES // tp)
    fsdp = 2 if mesh[FSDP] > 1 and 2 * cp * tp <= MAX_DEVICES else 1
    dp = 2 if mesh[DP] > 1 and 2 * fsdp * cp * tp <= MAX_DEVICES else 1
    return mesh_shape(dp=dp, fsdp=fsdp, cp=cp, tp=tp)


def _at_most(size: int, limit: int) -> int:
    while size > limit:
        size = next((size // prime for prime in (2, 3, 5, 7) if size % prime == 0), 1)
    return size
