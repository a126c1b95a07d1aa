"""Which layer feeds which, through which operations: what a jaxpr says about how a model can be split.

Every stock layer is first taken for a column layer: its output is split along its features. The walk then follows
each split dim through the jaxpr (jit, remat, scans included) to whatever ends it: a layer that sums over it, which can
be the row layer of the pair, or an operation that needs it whole, with the reason.

A layer whose output turns out to be needed whole is closed, and the walk repeated, until what is left are regions
without communication (`pairing.py`). Everything between stock layers is one rule for each primitive (`passing.py`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxtp.communication import ALL_GATHER, ALL_REDUCE, Collective
from jaxtp.mesh import TP
from jaxtp.propose.equations import body_of, differentiable, has_split_dim, live, opened, parts_of_scan, source_of
from jaxtp.propose.flows import ROOT, Call, Flow, Labels, Record
from jaxtp.propose.marking import Mark, Traced, read_mark
from jaxtp.propose.passing import Blocked, agree, pass_through
from jaxtp.propose.ports import Ports, is_norm, is_stock, parameter_bytes, ports_of


def walk(traced: Traced, closed: Iterable[str], *, tp: int, parts: int) -> Record:
    """Follows the split output of every stock layer that is not closed.

    Args:
      traced: the model.
      closed: layers whose output is whole.
      tp: devices among which a dim is split; it must divide.
      parts: devices among which the batch is.
    """
    walker = _Walk(traced.modules, frozenset(closed), tp, parts)
    given = [Flow(trained=trained) for trained in traced.trained]
    jaxpr = traced.jaxpr.jaxpr
    given += [Flow(batched=True) for _ in jaxpr.invars[len(given) :]]
    for flow, variable in zip(walker.run(jaxpr, given, 1), jaxpr.outvars, strict=True):
        if flow.dim is not None:
            walker.record.open[flow.labels] = variable.aval
    return walker.record


class _Walk:
    def __init__(self, modules: Mapping[str, Any], closed: Labels, tp: int, parts: int):
        self.modules, self.closed, self.tp, self.parts = modules, closed, tp, parts
        self.record = Record()
        self.places: list[str] = []
        self.layer: tuple[Mark, Flow, Any] | None = None  # the stock layer that is being run, and its input

    def run(self, jaxpr: Any, given: Sequence[Flow], times: int) -> list[Flow]:
        known = dict(zip(jaxpr.invars, given, strict=True))

        def read(variable: Any) -> Flow:
            return Flow() if isinstance(variable, jax.extend.core.Literal) else known.get(variable, Flow())

        for equation in live(jaxpr):
            results = self.equation(equation, [read(v) for v in equation.invars], times)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, equation: Any, flows: list[Flow], times: int) -> list[Flow]:
        name = equation.primitive.name
        if mark := read_mark(equation):
            return [self.cross(mark, equation, flows[0], times)]
        if self.layer:  # what a stock layer computes is known from its ports
            return [Flow() for _ in equation.outvars]
        if name == "scan":
            return self.scan(equation, flows, times)
        if name == "cond":
            return self.branches(equation, flows, times)
        if body := body_of(equation):
            return self.run(body, flows, times)
        return self.operation(equation, flows, times)

    def cross(self, mark: Mark, equation: Any, flow: Flow, times: int) -> Flow:
        aval = equation.invars[0].aval
        if mark.enters:
            if not self.places or self.places[-1] != mark.path:
                self.places.append(mark.path)
            if mark.argument:
                flow = replace(flow, entered=(*flow.entered, (mark.path, mark.argument)))
            if self.layer is None and is_stock(self.modules[mark.path]):
                self.layer = (mark, flow, aval)
            return flow
        if mark.path in self.places:
            del self.places[self.places.index(mark.path) :]
        if self.layer and self.layer[0].path == mark.path:
            flow = self.leave_layer(*self.layer, aval, times)
        return replace(flow, left=(*flow.left, mark.path) if mark.argument else flow.left, entered=())

    def leave_layer(self, mark: Mark, given: Flow, before: Any, after: Any, times: int) -> Flow:
        self.layer = None
        module = self.modules[mark.path]
        ports = ports_of(module, mark.method, before.ndim)
        row = ports is not None and given.dim is not None and given.dim == ports.row
        calls = self.record.norms if is_norm(module) else self.record.calls
        calls.append(Call(mark.path, mark.method, given, (before, after), times, row))
        if given.dim is not None and not row:
            if ports and given.dim in ports.kept:
                return self.keep(calls[-1], ports)
            self.block(given.labels, f"goes into {mark.path}, which needs all {before.shape[given.dim]} of it")
        whole = Flow(trained=True, batched=given.batched)
        if ports is None or ports.column is None or mark.path in self.closed:
            return whole
        return replace(whole, dim=ports.column, labels=frozenset({mark.path}))

    def keep(self, call: Call, ports: Ports) -> Flow:
        """Returns the flow out of a layer that leaves the split dim alone.

        A norm can be told to run on parts; the gradient of its parameters is then summed. Any other runs on whole
        arrays: what it reads is gathered, and the gradient of what it makes.
        """
        given, (before, after) = call.given, call.shapes
        if is_norm(self.modules[call.path]):
            self.move(given.labels, ALL_REDUCE, parameter_bytes(self.modules[call.path]), 1)
        else:
            whole = Flow(trained=True, batched=given.batched)
            self.move(given.labels, ALL_GATHER, self.bytes(given, before), call.times)
            self.move(given.labels, ALL_GATHER, self.bytes(whole, after), call.times)
        return Flow(ports.kept[given.dim or 0], given.labels, trained=True, batched=given.batched)

    def operation(self, equation: Any, flows: list[Flow], times: int) -> list[Flow]:
        trained = any(flow.trained for flow in flows) and equation.primitive.name != "stop_gradient"
        batched, source = any(flow.batched for flow in flows), source_of(equation, flows)
        labels = frozenset[str]().union(*(flow.labels for flow in flows))
        dims = self.pass_through(equation, flows, labels, times) if labels else [None] * len(equation.outvars)
        return [
            Flow(dim, labels if dim is not None else frozenset(), trained and differentiable(v.aval), batched, source)
            for dim, v in zip(dims, equation.outvars, strict=True)
        ]

    def pass_through(self, equation: Any, flows: list[Flow], labels: Labels, times: int) -> Sequence[int | None]:
        try:
            dims = pass_through(equation, [flow.dim for flow in flows])
            for dim, result in zip(dims, equation.outvars, strict=True):
                self.check_divides(equation, result.aval.shape[dim])
        except Blocked as why:
            place = next((place for place in reversed(self.places) if place), ROOT)
            self.block(labels, f"{why} (in {place})")
            return [None] * len(equation.outvars)
        self.record.joined.append(labels)
        self.note(labels, equation.primitive.name)
        self.reduce_gradients(equation, flows, labels, times)
        return dims

    def check_divides(self, equation: Any, size: int) -> None:
        if size % self.tp:
            name = equation.primitive.name
            raise Blocked(f"becomes a dim of {size} by {name}, which tp {self.tp} does not divide")

    def reduce_gradients(self, equation: Any, flows: list[Flow], labels: Labels, times: int) -> None:
        """Counts the gradient of a whole operand beside a split one: gathered, or summed where it has no such dim."""
        for flow, operand in zip(flows, equation.invars, strict=True):
            if flow.dim is None and flow.trained:
                kind = ALL_GATHER if has_split_dim(equation, flows, flow, operand.aval) else ALL_REDUCE
                self.move(labels, kind, self.bytes(flow, operand.aval), times)

    def scan(self, equation: Any, flows: list[Flow], times: int) -> list[Flow]:
        """Walks the body until what its steps carry is known, then once for the record."""
        body = opened(equation.params["jaxpr"])
        first, carries = parts_of_scan(equation, body)
        constants, carry = [replace(f, entered=()) for f in flows[:first]], flows[first : first + carries]
        slices = [self.shift(flow, -1) for flow in flows[first + carries :]]
        times *= equation.params["length"]
        for _ in range(2 + 2 * carries):
            kept, self.record = self.record, Record()
            after = self.run(body, [*constants, *carry, *slices], times)[:carries]
            self.record = kept
            avals = [variable.aval for variable in equation.outvars[:carries]]
            before, carry = carry, [self.meet([*c], aval, times) for *c, aval in zip(carry, after, avals, strict=True)]
            if [(c.dim, c.labels) for c in carry] == [(c.dim, c.labels) for c in before]:
                break
        results = self.run(body, [*constants, *carry, *slices], times)
        return [*results[:carries], *(self.shift(flow, 1) for flow in results[carries:])]

    def branches(self, equation: Any, flows: list[Flow], times: int) -> list[Flow]:
        results = [self.run(opened(branch), flows[1:], times) for branch in equation.params["branches"]]
        avals = [variable.aval for variable in equation.outvars]
        return [self.meet([*found], aval, times) for *found, aval in zip(*results, avals, strict=True)]

    def meet(self, flows: list[Flow], aval: Any, times: int) -> Flow:
        """Returns what is known of a value that is one of several: split as any of them is, unless they differ.

        The gradient of one that is whole is then gathered.
        """
        labels = frozenset[str]().union(*(flow.labels for flow in flows))
        trained, batched = any(flow.trained for flow in flows), any(flow.batched for flow in flows)
        try:
            dim = agree([flow.dim for flow in flows]) if labels else None
        except Blocked as why:
            self.block(labels, str(why))
            return Flow(trained=trained, batched=batched)
        if labels:
            self.record.joined.append(labels)
            for flow in flows:
                if flow.dim is None and flow.trained:
                    self.move(labels, ALL_GATHER, self.bytes(flow, aval), times)
        return Flow(dim, labels, trained, batched)

    def shift(self, flow: Flow, by: int) -> Flow:
        """Returns an array of a scan beside one step of it: a dim less, or more."""
        flow = replace(flow, key=object(), source=None, entered=(), left=())
        if flow.dim is None:
            return flow
        if flow.dim + by < 0:
            self.block(flow.labels, "is what a scan runs over")
            return replace(flow, dim=None, labels=frozenset())
        return replace(flow, dim=flow.dim + by)

    def block(self, labels: Labels, why: str) -> None:
        for label in labels:
            self.record.blocked.setdefault(label, f"its output {why}")

    def note(self, labels: Labels, operation: str) -> None:
        for label in labels:
            self.record.through.setdefault(label, {})[operation] = None

    def move(self, labels: Labels, kind: str, size: float, times: int) -> None:
        self.record.moved.setdefault(labels, Counter())[Collective(kind, (TP,), self.tp, size)] += times

    def bytes(self, flow: Flow, aval: Any) -> float:
        size = flow.source[0] if flow.source else aval.size * aval.dtype.itemsize
        return size / (self.parts if flow.batched else 1)
