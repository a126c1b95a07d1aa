"""Scales a configuration down for virtual CPU devices, and chooses meshes to check.

Unchanged: the kinds of layers, biases and norms, numbers of heads, divisibility (vocabulary,
sequence, loss chunks), windows relative to sequence chunks, remat, precision, dropout,
accumulation, the optimizer. Shrunk: widths, layers, sequence, batch.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import get_args

from jaxtp.config.command_line import parse_mesh
from jaxtp.config.schema import ConfigError, replace_nested
from jaxtp.layers.context import Context, Method
from jaxtp.layers.forms import BLOCK
from jaxtp.layers.transport import is_split
from jaxtp.mesh import (
    AXES,
    CP,
    DP,
    FSDP,
    SEQUENCE,
    STORAGE,
    TP,
    Sizes,
    batch_parts,
    check_sizes,
    describe_split,
    mesh_shape,
    parts,
)
from jaxtp.models.config import padded_sizes, violations
from jaxtp.tools.check.small_model import ShrinkSpec, shrink_model, smallest_congruent
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

    sizes: Sizes
    sequence_parallel: bool
    context: Context = "auto"  # "auto" without cp, and if blocks differ in their methods
    accumulation: int | None = None  # None for the configuration's

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        """Example: `fsdp 2 x cp 2 x tp 4, sequence-parallel, ulysses`."""
        words = [describe_split(self.sizes)]
        if self.sequence_parallel:
            words.append("sequence-parallel")
        if self.sizes[CP] > 1 and self.context != "auto":
            words.append(self.context)
        if self.accumulation is not None:
            words.append(f"accumulation {self.accumulation}")
        return ", ".join(words)


ONE_DEVICE = Case(mesh_shape(), False)


def plan(config: TrainConfig, meshes: Sequence[str] = ()) -> tuple[TrainConfig, list[Case]]:
    """Returns the shrunk configuration and its cases, on the requested or default meshes."""
    sizes = config.mesh.sizes
    check_sizes(sizes)
    # A size of -1 may be 1.
    check(config, mesh_shape() if meshes else _resolved(sizes, 1), lambda: None)
    if meshes:
        cases = _requested_cases(config, meshes)
    else:
        cases = default_cases(config, _resolved(sizes, 2))
    return shrink(config, cases), cases


def own_model_cases(config: TrainConfig, meshes: Sequence[str], *, over_cp: bool) -> list[Case]:
    """Returns the requested or default meshes for a user's model; its plan may not fit them."""
    if meshes:
        return [Case(sizes, False) for sizes in _requested_sizes(meshes).values()]
    sizes: list[dict[str, int]] = [{TP: 2}, {TP: 4}, {FSDP: 2}, {FSDP: 2, TP: 2}, {DP: 2}]
    if over_cp:
        sizes += [{CP: 2}, {CP: 2, TP: 2}]
    own_mesh = _scaled_down(_resolved(config.mesh.sizes, 2))
    return _distinct(Case(mesh_shape(**mesh), False) for mesh in (own_mesh, *sizes))


def _resolved(sizes: Sizes, size_of_rest: int) -> dict[str, int]:
    return {axis: size_of_rest if size == -1 else size for axis, size in sizes.items()}


def _distinct(cases: Iterable[Case]) -> list[Case]:
    """Returns the cases that a check can run on several devices, each once."""
    return list({str(case): case for case in cases if 1 < case.devices <= MAX_DEVICES}.values())


def _requested_sizes(meshes: Sequence[str]) -> dict[str, dict[str, int]]:
    requested = {text: parse_mesh(text, AXES) for text in meshes}
    for text, sizes in requested.items():
        count = math.prod(sizes.values())
        if count == 1:
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
        problems = list(unfit(config, first, fixed=config.run.init_from is not None))
        if problems:
            raise ConfigError("\n  ".join([f"--mesh {text}:", *problems]))
        cases += cases_of(config, sizes)
    return _distinct(cases)


def default_cases(config: TrainConfig, mesh: Sizes) -> list[Case]:
    """Returns the configuration's mesh, scaled down to 16 devices, and meshes for each axis.

    The other meshes use the axes separately and together.
    """
    scaled = _scaled_down(mesh)
    tps = [tp for tp in range(2, COMMON_TP + 1) if cases_of(config, mesh_shape(tp=tp))] or [1]
    unpadded = [tp for tp in tps if not padded_sizes(config.model, tp)] or tps
    min_tp = unpadded[0]
    sizes = [
        {TP: scaled[TP]},
        {TP: min_tp},
        {TP: tps[-1]},
        {FSDP: 2, TP: min_tp},
        {DP: 2, TP: min_tp},
        {DP: 2, FSDP: 2, TP: min_tp},
        {DP: 2, FSDP: 2, CP: 2, TP: min_tp},
        {CP: 8},
        {FSDP: 8},
        {DP: 8},
    ]
    method = methods_of(config, mesh)[0]  # on fewer devices, auto might choose another method
    cases = cases_of(config, scaled, method)
    cases += cases_of(config, mesh_shape(tp=unpadded[-1]))
    for axes in sizes:
        cases += cases_of(config, mesh_shape(**axes), method)[:1]
    over_cp = cases_of(config, mesh_shape(cp=2, tp=min_tp), method)
    # One case of each method
    cases += [case for case in over_cp if case.sequence_parallel == over_cp[0].sequence_parallel]
    return _distinct(cases)


def cases_of(config: TrainConfig, sizes: Sizes, first_method: Context = "auto") -> list[Case]:
    """Returns a mesh's cases, the configuration's own first; none if the model cannot run on it."""
    methods = sorted(methods_of(config, sizes), key=lambda method: method != first_method)
    can_split = is_split(None, config.data.sequence_length, sizes)
    first = can_split and config.model.sequence_parallel is not False
    cases = [Case(sizes, first, method) for method in methods]
    if can_split:
        cases.insert(1, Case(sizes, not first, methods[0]))
    return [case for case in cases if not any(unfit(config, case))]


def methods_of(config: TrainConfig, sizes: Sizes) -> list[Context]:
    """Returns the cp attention methods to check: the configuration's, and for auto all methods."""
    attending = attention_blocks(config.model)
    if sizes[CP] == 1 or config.mesh.context != "auto" or not attending:
        return [config.mesh.context if sizes[CP] > 1 else "auto"]
    share = share_of(config, sizes)
    chosen = {block.context_attention(sizes[TP]).method(share)[0] for block in attending}
    automatic = chosen.pop() if len(chosen) == 1 else "auto"
    return [automatic, *(method for method in get_args(Method) if method != automatic)]


def unfit(config: TrainConfig, case: Case, *, fixed: bool = False) -> Iterator[str]:
    """Yields reasons why a run does not fit a case; `fixed` as in `models.config.violations`."""
    run = on_case(config, case)
    fixed = fixed or config.origin.from_hf is not None
    problems = list(violations(run.model, case.sizes, fixed=fixed))
    if not problems:
        further = chain(context_problems(run, case.sizes), padding_problems(run, case.sizes))
        problems = [problem.text for problem in further]
    yield from problems


def on_case(config: TrainConfig, case: Case) -> TrainConfig:
    """Returns the configuration for a case."""
    accumulation = case.accumulation or config.train.accumulation
    changes = {"model.sequence_parallel": case.sequence_parallel, "mesh.context": case.context}
    return replace_nested(config, {**changes, "train.accumulation": accumulation})


def shrink(config: TrainConfig, cases: list[Case]) -> TrainConfig:
    """Returns a small configuration with the same architecture and parallel structure."""
    has_own_batches = config.data.batches is not None
    meshes = [case.sizes for case in cases]
    length = config.data.sequence_length
    new_length = length
    if not has_own_batches:
        # Zigzag order splits a sequence into twice as many chunks as there are devices along cp.
        chunks = math.lcm(*(parts(sizes, SEQUENCE) * min(sizes[CP], 2) for sizes in meshes))
        new_length = smallest_congruent(length, chunks, MIN_SEQUENCE)
    shards = math.lcm(*(parts(sizes, STORAGE) for sizes in meshes))
    spec = ShrinkSpec(
        tps=frozenset(sizes[TP] for sizes in meshes),
        shards=shards,
        length=new_length,
        before=length,
        features=BLOCK if config.model.lora.base == "mxfp4" else 1,
    )
    model = shrink_model(config.model, spec)
    if has_own_batches:
        model = replace(model, vocab_size=config.model.vocab_size)
        return in_three_updates(replace_nested(config, {"model": model}))
    accumulation = min(config.train.accumulation, 2)
    row_parts = math.lcm(*map(batch_parts, meshes)) * accumulation
    changes = {
        "model": model,
        "data.sequence_length": new_length,
        "data.global_batch_size": smallest_congruent(0, row_parts, MIN_ROWS),
        "train.accumulation": accumulation,
    }
    return in_three_updates(replace_nested(config, changes))


def in_three_updates(config: TrainConfig) -> TrainConfig:
    """Returns a configuration whose optimizer moves the weights enough to compare them."""
    changes: dict[str, object] = {
        # With a smaller epsilon, Adam takes full steps for elements whose gradient is only
        # rounding.
        "optimizer.eps": max(config.optimizer.eps, MIN_EPSILON),
        "optimizer.learning_rate": 1e-2,
        "optimizer.warmup_steps": 1,
        "train.epochs": None,
    }
    if config.optimizer.build is None:  # the schedule of a user's optimizer may need all steps
        changes["train.steps"] = 10
    return replace_nested(config, changes)


def describe(config: TrainConfig, small: TrainConfig) -> Iterator[str]:
    """Yields changes: `model.d_model 4096 -> 64`, and only the name of listed blocks."""
    for section in ("model", "data", "train"):
        if section == "data" and config.data.batches is not None:
            continue
        after = vars(getattr(small, section))
        for name, old in vars(getattr(config, section)).items():
            # Of precision only `matmul_least` changes: the small layers are multiplied in 8 bits.
            if old == after[name] or name in ("steps", "precision"):
                continue
            listed = name in ("first_blocks", "pattern")  # their sizes change like the model's
            yield f"{section}.{name}" if listed else f"{section}.{name} {old} -> {after[name]}"


def _scaled_down(mesh: Sizes) -> dict[str, int]:
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
