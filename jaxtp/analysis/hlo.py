"""Counts collectives and products in HLO text.

The text is a compiled program, or XLA's dump after SPMD partitioning. The dump precedes
backend-specific passes, which merge, split and schedule collectives, and begins with tables of file
names, locations, and stack frames.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import jax.numpy as jnp
import numpy as np

from jaxtp.analysis.census import (
    A_TURN,
    AT_MOST,
    Counted,
    kernel_products,
)
from jaxtp.analysis.collective import PERMUTE, REDUCE_SCATTER, Collective
from jaxtp.layers.experts import RARELY
from jaxtp.mesh import Sizes, parts

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_DTYPES = {"pred": "bool", "bf16": "bfloat16", "f8e4m3fn": "float8_e4m3fn"}
_DTYPE_NAMES = {"f": "float", "s": "int", "u": "uint", "c": "complex"}
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) "
    r"(?P<opcode>[a-z][a-z0-9\-]*)\((?P<text>.*)$"
)
_CALLEES = re.compile(
    r"(?:to_apply|calls|true_computation|false_computation|branch_computations)="
    r"([%\w.\-]+|\{[^}]*\})"
)
_LIBRARY = re.compile("gemm|matmul|fmha")
_IN_BYTECODE = re.compile(r"\\00(?:dot|dot_scaled|wgmma|mma|tcgen05_mma)\\00")
"""Matrix products in the code of a kernel, in Triton's or Mosaic GPU's names."""
_LIBRARIES = re.compile("/(site|dist)-packages/")
Operand = tuple[str, int | None]
"""The name of an instruction that is read; a number selects a part of its tuple (`%p#1`)."""


class HloError(ValueError):
    """Unknown spelling, probably of a newer XLA."""


@dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    root: str | None  # mark of the instruction whose value the computation returns; None for others
    name: str
    type: str
    opcode: str
    text: str  # after the opening parenthesis: operands, attributes, metadata

    @property
    def op_name(self) -> str:
        """The program's operation; empty if missing."""
        return self.attribute("op_name")

    @property
    def callees(self) -> list[str]:
        """Computations that it runs once; excludes `condition` and `body` of a `while`."""
        return re.findall(r"[\w.\-]+", " ".join(_CALLEES.findall(self.text)))

    @cached_property
    def operands(self) -> list[Operand]:
        """Instructions that it reads, in order."""
        named_parts = re.findall(r"%([\w.\-]+)(?:#(\d+))?", self.text.split(")")[0])
        return [(name, int(part) if part else None) for name, part in named_parts]

    def attribute(self, name: str) -> str:
        """Returns the word after `name=`, without quotes; empty if missing."""
        match = re.search(rf'\b{name}=(?:"(?P<quoted>[^"]*)"|%?(?P<word>[\w.\-]+))', self.text)
        return match[match.lastgroup or 0] if match else ""


Computation = Sequence[Instruction]
"""The instructions of a computation; in a compiled program, in the order of its schedule."""
Module = Mapping[str, Computation]
"""Computations by name."""


@lru_cache(maxsize=1)  # a program is read several times
def parse_module(text: str) -> tuple[Module, str]:
    """Returns the computations, and the entry's name.

    Raises `HloError` if the text is not a module.
    """
    module: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = header["name"]
            module[current] = []
            if header["entry"]:
                entry = current
        elif current and (match := _INSTRUCTION.match(line)):
            module[current].append(Instruction(**match.groupdict()))
    if not entry:
        raise HloError("no ENTRY computation: not the text of an HLO module")
    return module, entry


def root_of(computation: Computation) -> Instruction:
    """Returns the computation's root."""
    (root,) = [instruction for instruction in computation if instruction.root]
    return root


def named(computation: Computation, name: str) -> Instruction:
    """Returns the instruction with that name; raises ValueError if there is none."""
    (instruction,) = [maker for maker in computation if maker.name == name]
    return instruction


def read_frames(text: str) -> dict[str, str]:
    """Returns `file:line` by frame id, of the innermost frame outside of installed libraries."""
    header, *_ = text.partition(") -> ")  # before the first computation
    file_names, *_ = header.partition("\nFunctionNames")
    files = dict(re.findall(r'^(\d+) "(.+)"', file_names, re.MULTILINE))
    places = {}
    frames = {}
    place = r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)"
    for row, file, line in re.findall(place, header, re.MULTILINE):
        places[row] = (file, line)
    frame = r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
    for row, location, parent in re.findall(frame, header, re.MULTILINE):
        frames[row] = (location, parent)

    def source(frame: str) -> str:
        while True:
            location, parent = frames[frame]
            file, line = places.get(location, ("0", "?"))
            name = files.get(file, "?")
            # The outermost frame is its own parent, or has none.
            if not _LIBRARIES.search(name) or parent == frame or parent not in frames:
                return f"{name}:{line}"
            frame = parent

    return {frame: source(frame) for frame in frames}


def count_collectives_in_hlo(text: str, mesh_sizes: Sizes) -> Counter[Collective]:
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
    for _, instruction, scope, times, counted in walk(module, entry):
        if instruction.opcode not in KINDS:
            continue
        source = frames.get(instruction.attribute("stack_frame_id"), "")
        for collective in collectives_of(instruction, scope, mesh_sizes):
            if collective.group > 1:
                counts[dataclasses.replace(collective, source=source, counted=counted)] += times
    return counts


def count_flops_in_hlo(text: str) -> int:
    """Returns the FLOPs of one device's matrix products: 2 per multiply-add.

    Causal attention counts as half, also with windows and documents; experts in kernels count with
    all rows.

    Raises:
      HloError: unknown spelling of a product, unknown kernel with a product, or a data-dependent
        trip count.
    """
    module, entry = parse_module(text)
    flops = 0
    for computation, instruction, _, times, counted in walk(module, entry):
        if is_product(instruction):
            check_counted(instruction, counted)
            product = product_flops(module[computation], instruction)
            if product is None:
                raise HloError(
                    f"cannot tell what a product multiplies: {instruction.name} "
                    f"{instruction.text[:200]}"
                )
            flops += times * product
    return flops


def is_product(instruction: Instruction) -> bool:
    """Returns whether it is a matrix product, or a library's or custom kernel with products."""
    if instruction.opcode != "custom-call":
        return instruction.opcode == "dot"
    target = instruction.attribute("custom_call_target")
    return bool(_LIBRARY.search(target) or _IN_BYTECODE.search(instruction.text))


def walk(
    module: Module, name: str, scope: str = "", times: int = 1, counted: Counted = ""
) -> Iterator[tuple[str, Instruction, str, int, Counted]]:
    """Yields the computation, instruction, scope, count, and meaning of the count, of what runs."""
    for instruction in module[name]:
        op_name = instruction.op_name
        inner = op_name if op_name.startswith("jit(") else f"{scope}/{op_name}".strip("/")
        yield name, instruction, inner, times, counted
        if instruction.opcode == "while":
            turns = _trip_count(module, module[name], instruction)
            bodies = conditions = 1
            meaning: Counted = A_TURN
            if turns is not None:
                bodies = turns
                conditions = turns + 1
                meaning = counted
            for part, runs in (("body", bodies), ("condition", conditions)):
                yield from walk(module, instruction.attribute(part), inner, times * runs, meaning)
        elif instruction.opcode in ("call", "conditional", "fusion"):
            meaning = counted
            if instruction.opcode == "conditional":
                meaning = counted or AT_MOST
            for callee in instruction.callees:
                yield from walk(module, callee, inner, times, meaning)


def _trip_count(module: Module, around: Computation, loop: Instruction) -> int | None:
    """Returns the iterations of a `while` in `around`; None if unknown.

    Reads the compiler's note or, without a note, the loop's counter.
    """
    if f"/{RARELY}/" in loop.op_name:
        return 0
    if note := re.search(r'known_trip_count"?:?\{"?n"?:?"(\d+)"', loop.text):
        return int(note[1])
    try:
        return len(_counts(module, around, loop))
    except (ValueError, IndexError):  # the loop has no counter
        return None


def _counts(module: Module, around: Computation, loop: Instruction) -> range:
    # The values of a loop's counter, which begins and ends at constants, and grows by a constant.
    condition = module[loop.attribute("condition")]
    body = module[loop.attribute("body")]
    test = root_of(condition)
    init = named(around, loop.operands[0][0])
    result = root_of(body)
    counter = _number(condition, test.operands[0], "parameter")
    after, _ = _resolve(body, result.operands[counter])
    before = _number(body, after.operands[0], "parameter")
    step = _number(body, after.operands[1], "constant")
    structure = (init.opcode, result.opcode, after.opcode, test.opcode, test.attribute("direction"))
    if structure != ("tuple", "tuple", "add", "compare", "LT") or before != counter or step < 1:
        raise HloError(f"{loop.name} has no counter")
    first = _number(around, init.operands[counter], "constant")
    return range(first, _number(condition, test.operands[1], "constant"), step)


def _resolve(computation: Computation, operand: Operand) -> tuple[Instruction, int | None]:
    # The instruction behind copies, and the part of its tuple or the value of a constant.
    maker = named(computation, operand[0])
    if maker.opcode == "copy":
        return _resolve(computation, maker.operands[0])
    if maker.opcode == "get-tuple-element":
        return named(computation, maker.operands[0][0]), int(maker.attribute("index") or 0)
    value = re.match(r"s(?:32|64)\[\]\S* (-?\d+)\)", f"{maker.type} {maker.text}")
    return maker, int(value[1]) if value else operand[1]


def _number(computation: Computation, operand: Operand, opcode: str) -> int:
    maker, number = _resolve(computation, operand)
    if maker.opcode != opcode or number is None:
        raise HloError(f"{maker.name} is no {opcode}")
    return number


def check_counted(instruction: Instruction, counted: Counted) -> None:
    """Raises `HloError` if an instruction is in a loop with a data-dependent trip count."""
    if counted == A_TURN:
        raise HloError(
            f"cannot count the iterations of the loop around {instruction.name}: they depend on "
            "data"
        )


def operand_types(computation: Computation, reader: Instruction) -> list[str]:
    """Returns the type of each array that an instruction reads, as in `bf16[8,4]`."""
    types = {instruction.name: instruction.type for instruction in computation}
    arrays: list[str] = []
    for name, part in reader.operands:
        parts_of_type = [match[0] for match in _SHAPE.finditer(types.get(name, ""))]
        arrays += parts_of_type if part is None else [parts_of_type[part]]
    return arrays


def product_flops(computation: Computation, product: Instruction) -> int | None:
    """Returns the FLOPs of an instruction for which `is_product` holds.

    Returns None if neither the shapes nor the name of the kernel determine them.
    """
    types = [*operand_types(computation, product), product.type]
    *operands, result = [_integers(_SHAPE.findall(type_)[0][1]) for type_ in types]
    target = product.attribute("custom_call_target")
    if "fmha" in target:
        name = "fmhaBackward" if "Backward" in target else "fmha"
        products = kernel_products(name, operands, result)
        factor = 2 if "CAUSAL" in product.text else 4
        return products and factor * math.prod(products)
    contracting = re.search(r'lhs_contracting_dim\w+"?[=:] ?[{[]([\d,"]*)[}\]]', product.text)
    if operands and contracting:
        inner = math.prod(operands[0][dim] for dim in _integers(contracting[1]))
        return 2 * math.prod(result) * inner
    code = re.search(r'\bname = "(\w+)"', product.text)
    products = kernel_products(code[1] if code else "", operands, result)
    return products and 2 * math.prod(products)


def collectives_of(instruction: Instruction, scope: str, sizes: Sizes) -> Iterator[Collective]:
    """Yields the messages of a collective instruction, one per array.

    Args:
      instruction: has an opcode in `KINDS` and its result's type.
    """
    kind = instruction.opcode.removeprefix("collective-")
    ids = _partitions(instruction.text, sizes)
    positions = np.unravel_index(ids, tuple(sizes.values()))
    coordinates = dict(zip(sizes, positions, strict=True))
    axes = tuple(axis for axis, along in coordinates.items() if (along != along[:, :1]).any())
    devices = parts(sizes, axes) if kind == PERMUTE else ids.shape[1]  # some may send nothing
    scattered = re.search(r"dimensions=\{(\d+)\}", instruction.text)
    for hlo_dtype, dims in _SHAPE.findall(instruction.type):
        sizes_of_dims = _integers(dims)
        if kind == REDUCE_SCATTER and scattered:  # the operand is larger
            sizes_of_dims[int(scattered[1])] *= devices
        shape = tuple(sizes_of_dims)
        # `s32` is int32, and `bf16` bfloat16.
        name = re.sub(r"^([fsuc])(?=\d+$)", lambda letter: _DTYPE_NAMES[letter[1]], hlo_dtype)
        dtype = _DTYPES.get(hlo_dtype, name)
        size = math.prod(shape) * jnp.dtype(dtype).itemsize
        yield Collective(kind, axes, devices, size, scope, shape, dtype)


def _partitions(text: str, sizes: Sizes) -> np.ndarray:
    # Ids of devices that exchange messages, one group per row: the first group (the others are
    # shifted copies of it), or all pairs of a permutation.
    if axes := re.search(
        r"replica_groups=mesh\[(.*?)\]"
        r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}",
        text,
    ):
        return _named_group(*axes.groups())
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        groups, devices, dims, permutation = iota.groups()
        return _iota(dims, permutation).reshape(int(groups), int(devices))[:1]
    if group := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return np.array([_integers(group[1])])
    if "replica_groups={}" in text:
        return np.arange(math.prod(sizes.values()))[None]
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", text):
        return np.array(_integers(pairs[1])).reshape(-1, 2)
    raise HloError(f"cannot tell which devices take part in a collective: {text[:200]}")


def _named_group(mesh: str, dims: str | None, permutation: str | None, names: str) -> np.ndarray:
    # `mesh['dp'=2,'tp'=4] {'tp'}` begins with ids 0 to 3; an iota may permute the devices.
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    shape = tuple(sizes.values())
    ids = _iota(dims or str(math.prod(shape)), permutation).reshape(shape)
    for axis, name in enumerate(sizes):
        if f"'{name}'" not in names:
            ids = ids.take([0], axis)
    return ids.reshape(1, -1)


def _iota(dims: str, permutation: str | None) -> np.ndarray:
    # `[2,4]T(1,0)` is 0 to 7 in that shape, transposed.
    ids = np.arange(math.prod(_integers(dims))).reshape(_integers(dims))
    return ids.transpose(_integers(permutation)) if permutation else ids


def _integers(text: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", text)))
