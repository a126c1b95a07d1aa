"""Counts collectives in HLO text, as XLA dumps it after SPMD partitioning.

The text precedes backend-specific passes, which merge, split and schedule collectives. Loops count each iteration
(`loops`).
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxtp.analysis.census import message_bytes
from jaxtp.analysis.collective import PERMUTE, Collective
from jaxtp.analysis.loops import A_TURN, AT_MOST, Counted, runs, turns_in_hlo
from jaxtp.analysis.text import HloError, Instruction, Module, parse_module, read_frames, source_line

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_DTYPES = {"pred": "bool", "bf16": "bfloat16"} | {
    f"{letter}{bits}": f"{name}{bits}"
    for letter, name in (("f", "float"), ("s", "int"), ("u", "uint"), ("c", "complex"))
    for bits in (8, 16, 32, 64, 128)
}
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


def count_collectives_in_hlo(text: str, mesh_sizes: Mapping[str, int]) -> Counter[Collective]:
    """Counts the collectives of an HLO module, except in groups of one device.

    `Collective.counted` marks inexact counts.

    Args:
      text: with op names in its metadata.
      mesh_sizes: in the mesh's order, the order of partition ids.

    Raises:
      HloError: unknown spelling of a device group.
    """
    module, entry = parse_module(text)
    frames = read_frames(text)
    counts: Counter[Collective] = Counter()
    for computation, instruction, scope, times, counted in walk(module, entry):
        for collective in collectives_of(instruction, scope, mesh_sizes) if instruction.opcode in KINDS else ():
            if collective.group > 1:
                source = _source(instruction, module[computation], frames)
                counts[dataclasses.replace(collective, source=source, counted=counted)] += times
    return counts


def count_flops_in_hlo(text: str) -> int:
    """Returns the FLOPs of one device's matrix products: 2 per multiply-add.

    Raises:
      HloError: unknown spelling of a product, or a data-dependent trip count.
    """
    module, entry = parse_module(text)
    flops = 0
    for computation, instruction, _, times, counted in walk(module, entry):
        if instruction.opcode == "dot":
            check_counted(instruction, counted)
            flops += times * _dot_flops(module[computation], instruction)
    return flops


def _source(instruction: Instruction, computation: Sequence[Instruction], frames: Mapping[int, str]) -> str:
    # Where the partitioner left no line: the line of a reader of the result.
    name = re.compile(rf"%{re.escape(instruction.name)}(#\d+)?[,)]")
    readers = (other.rest for other in computation if name.search(other.rest))
    lines = (source_line(metadata, frames) for metadata in (instruction.rest, *readers))
    return next(filter(None, lines), "")


def walk(
    module: Module, name: str, scope: str = "", times: int = 1, counted: Counted = ""
) -> Iterator[tuple[str, Instruction, str, int, Counted]]:
    """Yields each executed instruction: computation, instruction, scope, count, and the count's meaning."""
    for instruction in module[name]:
        op_name = instruction.op_name
        here = op_name if op_name.startswith("jit(") else f"{scope}/{op_name}".strip("/")
        yield name, instruction, here, times, counted
        if instruction.opcode == "while":
            bodies, conditions, meant = runs(turns_in_hlo(module, module[name], instruction), counted)
            yield from walk(module, instruction.attribute("body") or "", here, times * bodies, meant)
            yield from walk(module, instruction.attribute("condition") or "", here, times * conditions, meant)
        elif instruction.opcode in ("call", "conditional", "fusion"):
            branches = instruction.opcode == "conditional" and not counted
            for callee in instruction.callees:
                yield from walk(module, callee, here, times, AT_MOST if branches else counted)


def check_counted(instruction: Instruction, counted: Counted) -> None:
    """Checks that an instruction's count is known.

    Raises:
      HloError: it is in a loop with a data-dependent trip count.
    """
    if counted == A_TURN:
        raise HloError(f"cannot tell how often the loop turns that has {instruction.name}: its data decide")


def _dot_flops(computation: Sequence[Instruction], dot: Instruction) -> int:
    operand = re.search(r"%?([\w.\-]+)(?:#(\d+))?[,)]", dot.rest)  # #n is part n of a tuple
    types = [_SHAPE.findall(i.type) for i in computation if operand and i.name == operand[1]]
    contracting = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.rest)
    if not operand or not types or not contracting:
        raise HloError(f"cannot tell what a product multiplies: {dot.rest[:200]}")
    _, lhs = types[0][int(operand[2] or 0)]
    contracted = math.prod(int(lhs.split(",")[int(dim)]) for dim in contracting[1].split(",") if dim)
    result = math.prod(int(dim) for _, dims in _SHAPE.findall(dot.type)[:1] for dim in dims.split(",") if dim)
    return 2 * result * contracted


def collectives_of(instruction: Instruction, scope: str, sizes: Mapping[str, int]) -> Iterator[Collective]:
    """Yields the messages of a collective instruction, one per array.

    Args:
      instruction: has an opcode in `KINDS` and its result's type.
    """
    group = _first_group(instruction.rest, sizes)
    axes = _axes(group, sizes)
    for dtype, dims in _SHAPE.findall(instruction.type):
        shape = [int(dim) for dim in dims.split(",") if dim]
        if instruction.opcode == "reduce-scatter":  # the operand is larger
            dimension = re.search(r"dimensions=\{(\d+)\}", instruction.rest)
            shape[int(dimension[1]) if dimension else 0] *= len(group)
        kind = instruction.opcode.removeprefix("collective-")
        moved = _DTYPES.get(dtype, dtype)
        devices = math.prod(sizes[axis] for axis in axes) if kind == PERMUTE else len(group)  # some may send nothing
        yield Collective(kind, axes, devices, message_bytes(tuple(shape), moved), scope, tuple(shape), moved)


def _first_group(rest: str, sizes: Mapping[str, int]) -> Sequence[int]:
    # Partition ids; the other groups are translations of the first.
    if named := re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}", rest
    ):
        return _named_group(*named.groups())
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        return [int(i) for i in _iota(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2]))[0]]
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return [int(i) for i in listed[1].split(",")]
    if "replica_groups={}" in rest:
        return range(math.prod(sizes.values()))
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", rest):
        return _ring(re.findall(r"(\d+),(\d+)", pairs[1]))
    raise HloError(f"cannot tell which devices take part in a collective: {rest[:200]}")


def _named_group(mesh: str, dims: str | None, permutation: str | None, names: str) -> list[int]:
    # `mesh['dp'=2,'tp'=4] {'tp'}` begins with ids 0 to 3; an iota may permute the devices.
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    ids = _iota(dims or str(math.prod(sizes.values())), permutation).reshape(tuple(sizes.values()))
    taking_part = re.findall(r"'([^']+)'", names)
    return [int(i) for i in ids[tuple(slice(None) if name in taking_part else 0 for name in sizes)].reshape(-1)]


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    # `[2,4]T(1,0)` is 0 to 7 in that shape, transposed.
    shape = [int(dim) for dim in dims.split(",")]
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose([int(dim) for dim in permutation.split(",")]) if permutation else ids


def _ring(pairs: Sequence[tuple[str, str]]) -> list[int]:
    # The longest chain: some devices may send nothing.
    target = {int(source): int(to) for source, to in pairs}
    return max((_chain(first, target) for first in sorted(target)), key=len, default=[0])


def _chain(first: int, target: Mapping[int, int]) -> list[int]:
    chain = [first]
    while (following := target.get(chain[-1])) is not None and following not in chain:
        chain.append(following)
    return chain


def _axes(group: Sequence[int], sizes: Mapping[str, int]) -> tuple[str, ...]:
    positions = np.array(np.unravel_index(np.array(group), tuple(sizes.values())))
    return tuple(axis for axis, along in zip(sizes, positions, strict=True) if len(set(along.tolist())) > 1)
