"""The collectives of a compiled program, and what its schedule computes while they run.

The text of a program compiled for GPUs lists the operations in the order in which they are issued, and splits each
collective into a start and a done: what lies between them runs beside it.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxtp.audit.hlo import KINDS, check_counted, collectives_of, walk
from jaxtp.audit.text import Instruction, Module, parse_module
from jaxtp.communication import Collective

START = "-start"
_COMPUTES = {"fusion", "dot", "convolution", "custom-call", "while", "call", "conditional", "sort", "reduce"}


@dataclass(frozen=True)
class Moved:
    """Collectives of one kind over the same mesh axes."""

    kind: str
    """all-reduce, all-gather, reduce-scatter, all-to-all or permute."""

    axes: tuple[str, ...]
    """Mesh axes along which the devices talk."""

    count: int
    """Operations in a step; one may move several arrays."""

    bytes: int
    """Whole messages of a step, on one device."""

    overlapped: int
    """Of `count`: those that have something computed between their start and their done."""

    computing: int
    """Operations that compute between start and done, over all of them in a step."""


def read_schedule(text: str, sizes: Mapping[str, int]) -> tuple[Moved, ...]:
    """What a compiled program moves, by kind and axes, the most bytes first; what one device does alone is left out.

    Args:
      text: the program, as `jax.stages.Compiled.as_text()` gives it.
      sizes: devices along each axis of the mesh, in its order.

    Raises:
      HloError: a spelling that is not known, or a collective in a loop that turns as often as data say.
    """
    totals: dict[tuple[str, tuple[str, ...]], Moved] = {}
    for one in _each(text, sizes):
        before = totals.get((one.kind, one.axes))
        totals[one.kind, one.axes] = one if before is None else _sum(before, one)
    return tuple(sorted(totals.values(), key=lambda moved: -moved.bytes))


def _each(text: str, sizes: Mapping[str, int]) -> Iterator[Moved]:
    module, entry = parse_module(text)
    for computation, instruction, scope, times, counted in walk(module, entry):
        operation = _operation(instruction, module)
        if operation is None:
            continue
        messages = [c for c in collectives_of(operation, scope, sizes) if c.group > 1]
        if messages:
            check_counted(instruction, counted)
            between = times * _computing_beside(instruction, module[computation])
            yield _moved(messages, times, between)


def _moved(messages: Sequence[Collective], times: int, computing: int) -> Moved:
    first = messages[0]
    kind = "all-reduce" if first.kind.startswith("all-reduce") else first.kind
    overlapped = times if computing else 0
    return Moved(kind, first.axes, times, times * int(sum(m.bytes for m in messages)), overlapped, computing)


def _sum(a: Moved, b: Moved) -> Moved:
    summed = {name: getattr(a, name) + getattr(b, name) for name in ("count", "bytes", "overlapped", "computing")}
    return dataclasses.replace(a, **summed)


def _operation(instruction: Instruction, module: Module) -> Instruction | None:
    """The collective that an instruction is or starts, its type that of the result; None for anything else."""
    if instruction.opcode in KINDS:
        return instruction
    kind = instruction.opcode.removesuffix(START)
    if kind in KINDS:
        result = instruction.type if kind == "all-reduce" else _result_of_start(instruction.type)
        return dataclasses.replace(instruction, opcode=kind, type=result)
    if instruction.opcode == f"async{START}":
        wrapped = (inner for callee in instruction.callees for inner in module[callee] if inner.opcode in KINDS)
        return next(wrapped, None)
    return None


def _result_of_start(type_: str) -> str:
    """Of `(operands, results, ...)`: the results, one array or a tuple of them."""
    parts, depth, begin = [], 0, 1
    for at, character in enumerate(type_):
        depth += character in "([{"
        depth -= character in ")]}"
        if (character == "," and depth == 1) or depth == 0:
            parts.append(type_[begin:at])
            begin = at + 1
    return parts[1]


def _computing_beside(start: Instruction, computation: Sequence[Instruction]) -> int:
    """Operations that compute after a start and before its done; none beside a collective that is one operation."""
    if not start.opcode.endswith(START):
        return 0
    at = next(i for i, instruction in enumerate(computation) if instruction is start)
    count = 0
    for instruction in computation[at + 1 :]:
        if instruction.opcode.endswith("-done") and re.match(rf"%?{re.escape(start.name)}[,)#]", instruction.rest):
            return count
        count += instruction.opcode in _COMPUTES
    return 0  # its done is in another turn of the loop
