"""The text of an HLO module: its computations, their instructions, what each reads and runs, and where it comes from.

A module's text begins with tables: names of files, places in them, and stack frames that refer to their callers. Older
ones have the file and line in the metadata of each instruction.
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
    """A spelling that this reader does not know: a newer XLA, most likely."""


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
        """The operation of the program that it comes from; empty if it does not say."""
        return self.attribute("op_name") or ""

    @property
    def callees(self) -> list[str]:
        """The computations that it runs once; for a `while` there are none, see `condition` and `body`."""
        branches = _BRANCHES.search(self.rest)
        return _CALLEE.findall(self.rest) + (re.findall(r"[\w.\-]+", branches[1]) if branches else [])

    @cached_property
    def operands(self) -> list[Operand]:
        """Names of the instructions that it reads, in order."""
        found = re.findall(r"%([\w.\-]+)(?:#(\d+))?", self.rest.split(")")[0])
        return [(name, int(part) if part else None) for name, part in found]

    def attribute(self, name: str) -> str | None:
        """Returns the word that follows `name=`, without quotes; None if there is no such attribute."""
        found = re.search(rf'\b{name}=(?:"([^"]*)"|%?([\w.\-]+))', self.rest)
        return None if found is None else (found[1] if found[1] is not None else found[2])


Module = Mapping[str, Sequence[Instruction]]
"""Instructions by computation; in the text of a compiled program, in the order of its schedule."""


def parse_module(text: str) -> tuple[Module, str]:
    """Returns the computations of a module, and the name of the one that is run.

    Raises:
      HloError: it is not the text of a module.
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
    """Returns the instruction whose value a computation returns."""
    return next((instruction for instruction in computation if instruction.root), None)


def named(computation: Sequence[Instruction], name: str) -> Instruction | None:
    """Returns the instruction of that name."""
    return next((instruction for instruction in computation if instruction.name == name), None)


def read_frames(text: str) -> dict[int, str]:
    """Returns `file:line` by the id of a stack frame: of the innermost one that is not in an installed library."""
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
    """Returns `file:line` that the metadata of an instruction names; empty if none."""
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
