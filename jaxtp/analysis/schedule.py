"""Collectives of a compiled program, and the computation scheduled during each.

Text compiled for GPUs lists operations in issue order, and splits collectives into start and done; operations in
between overlap.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxtp.analysis.collective import Axes, Collective
from jaxtp.analysis.hlo import KINDS, Instruction, Module, check_counted, collectives_of, is_product, parse_module, walk

START = "-start"
_NUMBERS = ("count", "bytes", "overlapped", "computing", "hidden_bytes")
_COMPUTES = {"fusion", "dot", "convolution", "custom-call", "while", "call", "conditional", "sort", "reduce"}


@dataclass(frozen=True, kw_only=True)
class Scheduled(Collective):
    """Collectives of one kind over the same axes, with all their bytes of a step, and the overlapping computation."""

    count: int  # operations in a step; one may move several arrays
    overlapped: int  # operations that have something computed between their start and their done
    computing: int  # operations that compute between start and done, over all of them in a step
    hidden_bytes: float = 0.0  # bytes of messages with a matrix product between start and done

    def __add__(self, other: "Scheduled") -> "Scheduled":
        """Returns the total; kind and axes must match."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in _NUMBERS})

    def record(self) -> dict[str, object]:
        """Returns the numbers as plain values."""
        return {name: getattr(self, name) for name in ("kind", "axes", *_NUMBERS)}


def read_schedule(text: str, sizes: Mapping[str, int]) -> tuple[Scheduled, ...]:
    """Returns the collectives of a compiled program by kind and axes, most bytes first.

    Args:
      text: from `jax.stages.Compiled.as_text()`.
      sizes: in the mesh's order.

    Raises:
      HloError: unknown spelling, or a data-dependent trip count.
    """
    module, entry = parse_module(text)
    totals: dict[tuple[str, Axes], Scheduled] = {}
    for computation, instruction, _, times, counted in walk(module, entry):
        operation = _operation(instruction, module)
        messages = [] if operation is None else [c for c in collectives_of(operation, "", sizes) if c.group > 1]
        if not messages:
            continue
        check_counted(instruction, counted)
        beside = _beside(instruction, module[computation])
        computing = times * sum(other.opcode in _COMPUTES for other in beside)
        first, size = messages[0], times * sum(one.bytes for one in messages)
        one = Scheduled(
            *(first.kind, first.axes, first.group, size),
            count=times,
            overlapped=times if computing else 0,
            computing=computing,
            hidden_bytes=size if any(_multiplies(other, module) for other in beside) else 0,
        )
        place = one.kind, one.axes
        totals[place] = totals[place] + one if place in totals else one
    return tuple(sorted(totals.values(), key=lambda one: -one.bytes))


def _operation(instruction: Instruction, module: Module) -> Instruction | None:
    # The collective that an instruction is or starts, with its result's type.
    if instruction.opcode in KINDS:
        return instruction
    kind = instruction.opcode.removesuffix(START)
    if kind in KINDS:
        result = instruction.type if kind == "all-reduce" else _result_of_start(instruction.type)
        return replace(instruction, opcode=kind, type=result)
    if instruction.opcode == f"async{START}":
        wrapped = (inner for callee in instruction.callees for inner in module[callee] if inner.opcode in KINDS)
        return next(wrapped, None)
    return None


def _result_of_start(type_: str) -> str:
    # The second half of `(operands, results)`, without the handles of a permute.
    arrays = [array for array in re.findall(r"\b[a-z]\w*\[[\d,]*\]", type_) if array != "u32[]"]
    return " ".join(arrays[len(arrays) // 2 :])


def _beside(start: Instruction, computation: Sequence[Instruction]) -> Sequence[Instruction]:
    # The instructions between start and done; none for a synchronous collective.
    if not start.opcode.endswith(START):
        return ()
    at = computation.index(start) + 1
    for end, instruction in enumerate(computation[at:], start=at):
        if instruction.opcode.endswith("-done") and re.match(rf"%?{re.escape(start.name)}[,)#]", instruction.rest):
            return computation[at:end]
    return ()  # its done is in another iteration of the loop


def _multiplies(instruction: Instruction, module: Module) -> bool:
    if instruction.opcode == "fusion":
        return any(_multiplies(inner, module) for callee in instruction.callees for inner in module[callee])
    return is_product(instruction)
