"""Facts about the arrays of a model, and findings of a walk through its jaxpr."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jaxtp.communication import Collective

ROOT = "the model itself"
"""Name of the module whose path is empty, for messages."""

Labels = frozenset[str]
"""The column layers by whose outputs an array is split."""


@dataclass(frozen=True)
class Flow:
    """Facts about an array."""

    dim: int | None = None
    """Split along tp, where the layers of `labels` are column layers."""

    labels: Labels = frozenset()

    trained: bool = False
    """Has a gradient: it depends on a parameter."""

    batched: bool = False
    """Depends on the inputs: each device has its part of the batch."""

    source: tuple[int, frozenset[int]] | None = None
    """Bytes and dims before it was broadcast; None for an array that was not."""

    key: object = field(default_factory=object)
    """The same for two arrays that are one."""

    entered: tuple[tuple[str, str], ...] = ()
    """Modules into which it went as it is, and as which argument, from the outermost."""

    left: tuple[str, ...] = ()
    """Modules that gave it as it is, from the innermost."""


@dataclass(frozen=True)
class Call:
    """A call of a stock layer."""

    path: str
    method: str
    given: Flow
    """Its input."""

    shapes: tuple[Any, Any]
    """Abstract values of its input and output."""

    times: int
    """Number of runs in one forward pass."""

    row: bool = False
    """Its input is split in the dim that a row layer splits."""


@dataclass
class Record:
    """Findings of a walk."""

    calls: list[Call] = field(default_factory=list)
    norms: list[Call] = field(default_factory=list)
    """Calls of norms; one can run on parts of a dim that it leaves alone."""

    joined: list[Labels] = field(default_factory=list)
    """Layers that are split together or not at all."""

    blocked: dict[str, str] = field(default_factory=dict)
    """Layers whose output is needed whole, and why."""

    through: dict[str, dict[str, None]] = field(default_factory=dict)
    """Operations that the split output of a layer passes, by layer."""

    moved: dict[Labels, Counter[Collective]] = field(default_factory=dict)
    """The sums and gathers of gradients, over tp, because of a split between layers."""

    open: dict[Labels, Any] = field(default_factory=dict)
    """Layers whose split output is an output of the model, and its abstract value."""
