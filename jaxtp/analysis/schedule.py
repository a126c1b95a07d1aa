"""Collectives of a compiled program with the computation scheduled during each, and its kernels.

Text compiled for GPUs lists operations in issue order, and splits collectives into start and done;
operations in between overlap. Each operation outside of fusions is a kernel, which reads its
operands and writes its results once.
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
_CALLS = {"fusion", "while", "call", "conditional"}
_COMPUTES = _CALLS | {"dot", "convolution", "custom-call", "sort", "reduce"}
_VALUES = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
_NO_KERNELS = (
    _CALLS - {"fusion"} | _VALUES | {"after-all", "opt-barrier", "partition-id", "replica-id"}
)
_SLICES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that read a part of their first operand or update it in place, with the operand that
is the update."""
_MOVES = _VALUES | {
    *("copy", "transpose", "reshape", "convert", "concatenate", "pad", "reverse"),
    *("slice", "dynamic-slice", "dynamic-update-slice"),
}
AMOUNTS = (
    "kernels",
    "flops",
    "flops_16",
    "product_bytes",
    "other_bytes",
    "copied_bytes",
    "unknown",
)
"""Measures of a program on one device: the number of kernels; the FLOPs of products, and the 16-bit
FLOPs that take as long (half for 8 bits, twice for 32); the bytes of operands and results of
kernels with products, of kernels without products, and of the latter that only copy, transpose or
convert; the number of products with unknown FLOPs."""
Part = dict[str, float]
COLLECTIVES = "collectives"
OTHER = "other"
PARTS = {
    "optimizer": "optimizer|adam|(grad|param)_norm",
    "embedding, loss": r"embed|cross_entropy|logits|\bloss|head\b",
    "norms": "norm",
    "attention": "attend|dot_product|fmha|flash|attention_(forward|queries|keys)|delta",
    "MLP": r"\bmlp|experts|moe|feed_forward|ffn",
    "projections": "attention|linear|proj|dense",
}
"""Parts of a step, by the first pattern that is in the name of one of a kernel's operations."""


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
        operation = _operation(instruction, module)
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


def _operation(instruction: Instruction, module: Module) -> Instruction | None:
    # The collective that an instruction is or starts, with its result's type.
    if instruction.opcode in KINDS:
        return instruction
    kind = instruction.opcode.removesuffix(START)
    if kind in KINDS:
        result = instruction.type if kind == "all-reduce" else _result_of_start(instruction.type)
        return replace(instruction, opcode=kind, type=result)
    if instruction.opcode == f"async{START}":
        for inner in _inside(instruction, module):
            if inner.opcode in KINDS:
                return inner
    return None


def _inside(instruction: Instruction, module: Module) -> Iterator[Instruction]:
    """Yields the instructions of the computations that an instruction calls."""
    return chain.from_iterable(module[name] for name in instruction.callees)


def _result_of_start(type_: str) -> str:
    # The second half of `(operands, results)`, without the handles of a permute.
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
    if instruction.opcode not in _CALLS:
        return hlo.is_product(instruction)
    body = module.get(instruction.attribute("body") or "", ())
    return any(_multiplies(inner, module) for inner in (*_inside(instruction, module), *body))


def read_parts(text: str) -> dict[str, Part]:
    """Returns the kernels of a compiled program by part of the step.

    The parts are `PARTS`, `OTHER` and `COLLECTIVES`.

    Raises:
      HloError: a data-dependent trip count.
    """
    module, entry = hlo.parse_module(text)
    totals = {name: dict.fromkeys(AMOUNTS, 0.0) for name in (*PARTS, OTHER, COLLECTIVES)}
    fused: set[str] = set()
    for instruction in chain.from_iterable(module.values()):
        if instruction.opcode == "fusion":
            fused.update(instruction.callees)
    for computation, kernel, scope, times, counted in walk(module, entry):
        if computation in fused or kernel.opcode in _NO_KERNELS or kernel.opcode.endswith("-done"):
            continue
        hlo.check_counted(kernel, counted)
        name, amounts = _kernel(kernel, computation, scope, module)
        for key, amount in amounts.items():
            totals[name][key] += times * amount
    return totals


def part_of(*names: str) -> str:
    """Returns the part of a kernel with operations of these names."""
    for name in names:
        for part, pattern in PARTS.items():
            if re.search(pattern, name):
                return part
    return OTHER


def _kernel(kernel: Instruction, computation: str, scope: str, module: Module) -> tuple[str, Part]:
    around = module[computation]
    if operation := _operation(kernel, module):
        types = (*hlo.operand_types(around, kernel), operation.type)
        return COLLECTIVES, {"kernels": 1, "other_bytes": sum(map(hlo.type_bytes, types))}
    if kernel.opcode.endswith(START):
        opcode = kernel.opcode.removesuffix(START)
        kernel = replace(kernel, opcode=opcode, type=_result_of_start(kernel.type))
    inside = [(around, kernel)]
    if kernel.opcode == "fusion":
        fused = walk(module, kernel.callees[0])
        inside += [(module[name], inner) for name, inner, *_ in fused]
    products = [(callee, inner) for callee, inner in inside if hlo.is_product(inner)]
    names = [inner.op_name for _, inner in (*products, *inside)]
    names = list(filter(None, names)) or [scope]
    part = part_of(*(re.sub(r"\bjit\([^()]*\)", "", name) for name in names))
    if kernel.opcode == "custom-call":  # its workspace is not traffic
        kernel = replace(kernel, type=re.sub(r"\b[su]8\[\d+\]", "", kernel.type))
    size = _traffic(kernel, around, module)
    if not products:
        copied = size * _only_moves(kernel, module)
        return part, {"kernels": 1, "other_bytes": size, "copied_bytes": copied}
    amounts = dict.fromkeys(AMOUNTS, 0.0) | {"kernels": 1, "product_bytes": size}
    for callee, product in products:
        operands = hlo.operand_types(callee, product)[:2]
        # An array of 8 elements has as many bytes as an element has bits.
        bits = [hlo.type_bytes(re.sub(r"\[.*", "[8]", operand)) for operand in operands]
        flops = hlo.product_flops(callee, product)
        if flops is None:
            amounts["unknown"] += 1
        else:
            amounts["flops"] += flops
            amounts["flops_16"] += flops * max(bits, default=16) / 16
    return part, amounts


def _only_moves(instruction: Instruction, module: Module) -> bool:
    if instruction.opcode == "fusion":
        return all(_only_moves(inner, module) for inner in _inside(instruction, module))
    # A scalar, such as the index of a slice
    scalar = "[]" in instruction.type and instruction.opcode != "reduce"
    return instruction.opcode in _MOVES or scalar


def _traffic(kernel: Instruction, around: Computation, module: Module) -> float:
    # Bytes read and written. Of an array that is sliced or updated in place, only the slice counts.
    sizes = list(map(hlo.type_bytes, hlo.operand_types(around, kernel)))
    if kernel.opcode == "fusion":
        fused = module[kernel.callees[0]]
        read = sum(_read(fused, i, size, module) for i, size in enumerate(sizes))
        return read + _written(fused, hlo.root_of(fused))
    if kernel.opcode in _UPDATES:
        return 2 * sizes[_UPDATES[kernel.opcode]]
    written = hlo.type_bytes(kernel.type)
    return written + (written if kernel.opcode in _SLICES else sum(sizes))


def _read(fused: Computation, parameter: int, size: float, module: Module) -> float:
    # Bytes that a fusion reads of a parameter of that size.
    names: set[str] = set()
    total = 0.0
    for reader in fused:
        if reader.opcode == "parameter" and reader.text.startswith(f"{parameter})"):
            names.add(reader.name)
        positions = [i for i, (name, _) in enumerate(reader.operands) if name in names]
        if not positions or (positions == [0] and reader.opcode in _UPDATES):
            continue
        if reader.opcode == "bitcast":
            names.add(reader.name)
        elif reader.opcode == "fusion":
            callee = module[reader.callees[0]]
            total += sum(_read(callee, i, size, module) for i in positions)
        elif positions == [0] and reader.opcode in _SLICES:
            total += hlo.type_bytes(reader.type)
        else:
            return size
    return min(total, size)


def _written(fused: Computation, result: Instruction | None) -> float:
    if result is None or result.opcode == "parameter":
        return 0.0
    operands = [hlo.named(fused, name) for name, _ in result.operands]
    if result.opcode in ("tuple", "bitcast"):
        return sum(_written(fused, operand) for operand in operands)
    written = None
    if result.opcode in _UPDATES:
        written = operands[_UPDATES[result.opcode]]
    return hlo.type_bytes((written or result).type)
