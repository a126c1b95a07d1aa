"""Notes on what a plan moves that another one would not."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from flax import nnx

from jaxtp.communication import ALL_REDUCE
from jaxtp.parallel.layouts import Replicate
from jaxtp.parallel.plan import spelled
from jaxtp.parallel.styles import Colwise, PrepareInput, PrepareOutput, Rowwise, SequenceParallel, Style
from jaxtp.propose.dataflow import walk
from jaxtp.propose.flows import Call, Record
from jaxtp.propose.marking import trace
from jaxtp.propose.pairing import Group
from jaxtp.propose.ports import ports_of
from jaxtp.propose.sharing import preparation
from jaxtp.propose.subject import Subject


def advice(subject: Subject, styles: Mapping[str, Style], sizes: Mapping[str, int]) -> list[str]:
    """Returns notes on a plan; those that differ in the number of a layer only are one.

    Args:
      subject: the model as it was written, and what is run.
      styles: of the modules that have one, by their paths.
      sizes: devices along each axis.
    """
    traced = trace(subject)
    group = Group.of(sizes)
    split = {path for path, style in styles.items() if isinstance(style, Colwise) and style.output_layouts is None}
    record = walk(traced, set(traced.modules) - split, tp=group.tp, parts=group.parts)
    found = [
        *_needed_whole(record, group),
        *_fed_whole(record, traced.modules, styles, group),
        *_reduced_apart(record, styles, group),
    ]
    merged = Counter(re.sub(r"(?<=\.)\d+(?=[.)])", "*", note) for note in found)
    return [f"{note} (x {count})" if count > 1 else note for note, count in merged.items()]


def _needed_whole(record: Record, group: Group) -> Iterator[str]:
    """Yields notes on column layers whose output something needs whole."""
    calls = {call.path: call for call in record.calls}
    for path, why in record.blocked.items():
        sent = group.sent(calls[path], 1)
        yield (
            f"{path} is Colwise(), and {why}: the compiler brings it together, at most {sent:,.0f} bytes sent by each "
            "device; Colwise(output_layouts=Replicate()) says so, a plan without it saves it"
        )


def _fed_whole(
    record: Record, modules: Mapping[str, nnx.Module], styles: Mapping[str, Style], group: Group
) -> Iterator[str]:
    """Yields notes on row layers whose input is not split."""
    for call in record.calls:
        style, ports = styles.get(call.path), ports_of(modules[call.path], call.method, call.shapes[0].ndim)
        splits_input = ports is not None and ports.row is not None
        if isinstance(style, Rowwise) and style.input_layouts is None and splits_input and not call.row:
            sent = group.sent(call, 0)
            cost = f"is gathered, {sent:,.0f} bytes sent by each device" if call.given.trained else "is not needed"
            yield (
                f"{call.path} is Rowwise(), and its input is whole on every device: each cuts its part, and the "
                f"gradient {cost}; a Colwise layer before it would leave the input split, "
                "Rowwise(input_layouts=Replicate()) says that it is meant"
            )


def _reduced_apart(record: Record, styles: Mapping[str, Style], group: Group) -> Iterator[str]:
    """Yields notes on column layers that read one array, and each reduce its gradient."""
    readers: dict[object, dict[str, Call]] = {}
    for call in record.calls:
        style = styles.get(call.path)
        if isinstance(style, Colwise) and style.input_layouts == Replicate() and call.given.trained:
            readers.setdefault(call.given.key, {})[call.path] = call
    for calls in readers.values():
        first = next(iter(calls.values()))
        if len(calls) > 1 and not _is_shared(first, styles):
            sent = (len(calls) - 1) * group.sent(first, 0, ALL_REDUCE)
            yield (
                f"{', '.join(calls)} read one array, and each reduces its gradient over tp; {_remedy(first)} reduces "
                f"it once: {sent:,.0f} bytes less sent by each device"
            )


def _is_shared(call: Call, styles: Mapping[str, Style]) -> bool:
    makers = (styles.get(path) for path in call.given.left)
    takers = ((styles.get(path), argument) for path, argument in call.given.entered)
    return any(isinstance(style, PrepareInput) and _prepares(style, argument) for style, argument in takers) or any(
        isinstance(style, PrepareOutput)
        or (isinstance(style, SequenceParallel) and style.output_layouts == Replicate())
        for style in makers
    )


def _prepares(style: PrepareInput, argument: str) -> bool:
    """Returns whether a style makes an argument, by its place or its name, `Replicate()`."""
    if not argument.isdigit():
        return (style.desired_input_kwarg_layouts or {}).get(argument) == Replicate()
    layouts = style.desired_input_layouts
    given = layouts if isinstance(layouts, tuple) else (layouts,)
    return given[int(argument) : int(argument) + 1] == (Replicate(),)


def _remedy(call: Call) -> str:
    """Returns the style that shares what a layer reads, and the module whose argument that is."""
    outside = [(path, argument) for path, argument in call.given.entered if path and path != call.path]
    if not outside:
        return "PrepareInput(Replicate(), Replicate()) for a module around them"
    path, argument = outside[-1]
    return f"{spelled(preparation({argument}))} for {path!r}"
