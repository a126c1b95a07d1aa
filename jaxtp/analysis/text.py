"""Parser of HLO text: computations, instructions, operands, and source lines.

Modules begin with tables of file names, locations, and stack frames; older modules have file and line per instruction.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<opcode>[a-z][a-z0-9\-]*)\((?P<rest>.*)$"
)
_CALLEE = re.compile(r"(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_WRITTEN_OUT = re.compile(r'source_file="([^"]+)" source_line=(\d+)')
_LIBRARIES = ("/site-packages/", "/dist-packages/")

Operand = tuple[str, int | None]
"""The name of what an instruction reads; with a number, that part of a tuple (`%p#1`)."""


class HloError(ValueError):
    """Unknown spelling, probably of a newer XLA."""


@dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    root: str | None
    """Mark of the instruction whose value the computation returns; None for others."""

    name: str
    type: str
    opcode: str
    rest: str
    """Text after the opening parenthesis: operands, attributes, metadata."""

    @property
    def op_name(self) -> str:
        """The program's operation; empty if missing."""
        return self.attribute("op_name") or ""

    @property
    def callees(self) -> list[str]:
        """Computations that it runs once; excludes `condition` and `body` of a `while`."""
        branches = _BRANCHES.search(self.rest)
        return _CALLEE.findall(self.rest) + (re.findall(r"[\w.\-]+", branches[1]) if branches else [])

    @cached_property
    def operands(self) -> list[Operand]:
        """Instructions that it reads, in order."""
        found = re.findall(r"%([\w.\-]+)(?:#(\d+))?", self.rest.split(")")[0])
        return [(name, int(part) if part else None) for name, part in found]

    def attribute(self, name: str) -> str | None:
        """Returns the word after `name=`, without quotes; None if missing."""
        found = re.search(rf'\b{name}=(?:"([^"]*)"|%?([\w.\-]+))', self.rest)
        return None if found is None else (found[1] if found[1] is not None else found[2])


Module = Mapping[str, Sequence[Instruction]]
"""Instructions by computation; in the text of a compiled program, in the order of its schedule."""


def parse_module(text: str) -> tuple[Module, str]:
    """Returns the computations, and the entry's name.

    Raises:
      HloError: not the text of a module.
    """
    module: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = header["name"]
            module[current] = []
            entry = current if header["entry"] else entry
        elif current and (found := _INSTRUCTION.match(line)):
            module[current].append(Instruction(**found.groupdict()))
    if not entry:
        raise HloError("no ENTRY computation: not the text of an HLO module")
    return module, entry


def root_of(computation: Sequence[Instruction]) -> Instruction | None:
    """Returns the computation's root."""
    return next((instruction for instruction in computation if instruction.root), None)


def named(computation: Sequence[Instruction], name: str) -> Instruction | None:
    """Returns the instruction with that name."""
    return next((instruction for instruction in computation if instruction.name == name), None)


def read_frames(text: str) -> dict[int, str]:
    """Returns `file:line` by frame id, of the innermost frame outside of installed libraries."""
    files = {int(i): name for i, name in re.findall(r'^(\d+) "(.+)"$', _table(text, "FileNames"), re.MULTILINE)}
    places = {
        int(i): f"{files.get(int(file), '?')}:{line}"
        for i, file, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", _table(text, "FileLocations"), re.MULTILINE
        )
    }
    frames = {
        int(i): (places.get(int(place), "?"), int(parent or i))
        for i, place, parent in re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", _table(text, "StackFrames"), re.MULTILINE
        )
    }
    return {frame: _outside_libraries(frame, frames) for frame in frames}


def source_line(metadata: str, frames: Mapping[int, str]) -> str:
    """Returns the `file:line` in an instruction's metadata; empty if missing."""
    if found := _FRAME.search(metadata):
        return frames.get(int(found[1]), "")
    written = _WRITTEN_OUT.search(metadata)
    return f"{written[1]}:{written[2]}" if written else ""


def _table(text: str, name: str) -> str:
    found = re.search(rf"^{name}\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def _outside_libraries(frame: int, frames: Mapping[int, tuple[str, int]]) -> str:
    place, caller = frames[frame]
    seen = {frame}
    while any(library in place for library in _LIBRARIES) and caller in frames and caller not in seen:
        seen.add(caller)
        place, caller = frames[caller]
    return place
