"""The text of an HLO module: its computations, their instructions, and what each of those reads and runs."""

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


Operand = tuple[str, int | None]
"""The name of what an instruction reads; with a number, that part of a tuple (`%p#1`)."""


class HloError(ValueError):
    """A spelling that this reader does not know: a newer XLA, most likely."""


@dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    root: str | None
    """Not None for the instruction whose value the computation returns."""

    name: str
    type: str
    opcode: str
    rest: str
    """What follows the opening parenthesis: operands, attributes, metadata."""

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
        """The word that follows `name=`, without quotes; None if there is no such attribute."""
        found = re.search(rf'\b{name}=(?:"([^"]*)"|%?([\w.\-]+))', self.rest)
        return None if found is None else (found[1] if found[1] is not None else found[2])


Module = Mapping[str, Sequence[Instruction]]
"""Instructions by computation; in the text of a compiled program, in the order of its schedule."""


def parse_module(text: str) -> tuple[Module, str]:
    """The computations of a module, and the name of the one that is run.

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
    """The instruction whose value a computation returns."""
    return next((instruction for instruction in computation if instruction.root), None)


def named(computation: Sequence[Instruction], name: str) -> Instruction | None:
    """The instruction of that name."""
    return next((instruction for instruction in computation if instruction.name == name), None)
