"""Collectives of a compiled program with the computation scheduled during each.

Text compiled for GPUs lists operations in issue order, and splits collectives into start and done;
operations in between overlap.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from jaxtp.analysis import hlo
from jaxtp.analysis.collective import Axes, Collective
from jaxtp.analysis.hlo import KINDS, Computation, Instruction, Module, walk
from jaxtp.analysis.tables import Record
from jaxtp.mesh import Sizes

START = "-start"
_NUMBERS = ("count", "bytes", "overlapped", "computing", "hidden_bytes")
CALLS = {"fusion", "while", "call", "conditional"}
_COMPUTES = CALLS | {"dot", "convolution", "custom-call", "sort", "reduce"}


@dataclass(frozen=True, kw_only=True)
class Scheduled(Collective):
    """All collectives of a step of one kind and group: their bytes, and what overlaps them."""

    count: int  # operations in a step; one may move several arrays
    overlapped: int  # operations with computation between their start and done
    computing: int  # computing operations between start and done, in all of a step
    hidden_bytes: float = 0.0  # bytes of messages with a matrix product between start and done

    def record(self) -> Record:
        """Returns the numbers as plain values."""
        return {name: getattr(self, name) for name in ("kind", "axes", "group", *_NUMBERS)}


def read_schedule(text: str, sizes: Sizes) -> tuple[Scheduled, ...]:
    """Returns the collectives of a compiled program by kind, axes and size of the group.

    The collective with the most bytes is first.

    Args:
      text: from `jax.stages.Compiled.as_text()`.
      sizes: in the mesh's order.

    Raises:
      HloError: unknown spelling, or a data-dependent trip count.
    """
    module, entry = hlo.parse_module(text)
    totals: dict[tuple[str, Axes, int], Counter[str]] = defaultdict(Counter)
    for computation, instruction, _, times, counted in walk(module, entry):
        operation = operation_of(instruction, module)
        if operation is None:
            continue
        messages = list(hlo.collectives_of(operation, "", sizes))
        if not messages or messages[0].group == 1:
            continue
        hlo.check_counted(instruction, counted)
        beside = _beside(instruction, module[computation])
        computing = sum(other.opcode in _COMPUTES for other in beside)
        size: Any = times * sum(message.bytes for message in messages)
        first = messages[0]
        totals[first.kind, first.axes, first.group].update(
            bytes=size,
            count=times,
            overlapped=times * (computing > 0),
            computing=times * computing,
            hidden_bytes=size * any(_multiplies(other, module) for other in beside),
        )
    scheduled = [Scheduled(*place, **numbers) for place, numbers in totals.items()]  # type: ignore[arg-type]
    return tuple(sorted(scheduled, key=lambda collective: -collective.bytes))


def operation_of(instruction: Instruction, module: Module) -> Instruction | None:
    """Returns the collective that an instruction is or starts, with its result's type."""
    if instruction.opcode in KINDS:
        return instruction
    kind = instruction.opcode.removesuffix(START)
    if kind in KINDS:
        result = instruction.type if kind == "all-reduce" else result_of_start(instruction.type)
        return replace(instruction, opcode=kind, type=result)
    if instruction.opcode == f"async{START}":
        for inner in inside(instruction, module):
            if inner.opcode in KINDS:
                return inner
    return None


def inside(instruction: Instruction, module: Module) -> Iterator[Instruction]:
    """Yields the instructions of the computations that an instruction calls."""
    return chain.from_iterable(module[name] for name in instruction.callees)


def result_of_start(type_: str) -> str:
    """Returns the second half of `(operands, results)`, without the handles of a permute."""
    arrays = [array for array in re.findall(r"\b[a-z]\w*\[[\d,]*\]", type_) if array != "u32[]"]
    return " ".join(arrays[len(arrays) // 2 :])


def _beside(start: Instruction, computation: Computation) -> Computation:
    # The instructions between start and done; none for a synchronous collective.
    if not start.opcode.endswith(START):
        return ()
    beside: list[Instruction] = []
    reads_start = re.compile(rf"%?{re.escape(start.name)}[,)#]")
    for instruction in computation[computation.index(start) + 1 :]:
        if instruction.opcode.endswith("-done") and reads_start.match(instruction.text):
            return beside
        beside.append(instruction)
    return ()  # its done is in another iteration of the loop


def _multiplies(instruction: Instruction, module: Module) -> bool:
    if instruction.opcode not in CALLS:
        return hlo.is_product(instruction)
    body = module.get(instruction.attribute("body"), ())
    return any(_multiplies(inner, module) for inner in (*inside(instruction, module), *body))
