"""Column layers that read one array: where it is brought to all devices once, so that its gradient is summed once."""

from collections.abc import Iterator
from typing import Any

from jaxtp.parallel.layouts import Replicate
from jaxtp.parallel.styles import Colwise, PrepareInput, PrepareOutput, Style
from jaxtp.propose.draft import Draft
from jaxtp.propose.flows import Call

RESULT = ""
"""Name of the result of a module, in place of an argument."""

Share = tuple[str, str | None, list[Call]]
"""A module, its argument (or `RESULT`; None for a layer that shares with nobody), and who reads it."""


def share_inputs(draft: Draft, *, share: bool = True) -> None:
    """Gives a style to the modules that can share an array for column layers, and counts what its gradient moves.

    Args:
      draft: a plan without such styles, which is completed.
      share: whether modules may; if not, every column layer is on its own.
    """
    arguments: dict[str, set[str]] = {}
    for calls in _readers(draft):
        for path, argument, readers in _sharing(draft, calls, arguments) if share else _alone(calls):
            draft.bytes[path] = draft.bytes.get(path, 0) + draft.group.columns(readers)
            if argument is not None:
                arguments.setdefault(path, set()).add(argument)
                draft.shared.setdefault(path, []).extend(call.path for call in readers)
    for path, names in arguments.items():
        draft.styles[path] = preparation(names)


def _readers(draft: Draft) -> list[list[Call]]:
    """Calls of column layers by the array that they read, where it has a gradient."""
    readers: dict[Any, list[Call]] = {}
    for call in draft.record.calls:
        if isinstance(draft.styles.get(call.path), Colwise) and call.given.trained:
            readers.setdefault((call.given.key, call.times), []).append(call)
    return list(readers.values())


def _sharing(draft: Draft, calls: list[Call], arguments: dict[str, set[str]]) -> Iterator[Share]:
    """Yields the innermost module that all readers are in, or else the one that made the array, or else several."""
    if len({call.path for call in calls}) == 1:
        yield calls[0].path, None, calls
        return
    around = [_entries(call, arguments) for call in calls]
    common = [entry for entry in around[0] if all(entry in others for others in around)]
    makers = [path for path in calls[0].given.left if path and path not in {*draft.styles, *arguments}]
    if common:
        yield *common[-1], calls
    elif makers:
        yield makers[0], RESULT, calls
    else:
        yield from _by_argument(calls, arguments)


def _by_argument(calls: list[Call], arguments: dict[str, set[str]]) -> Iterator[Share]:
    groups: dict[tuple[str, str | None], list[Call]] = {}
    for call in calls:
        around = _entries(call, arguments)
        groups.setdefault(around[-1] if around else (call.path, None), []).append(call)
    for (path, argument), readers in groups.items():
        if len({call.path for call in readers}) > 1:
            yield path, argument, readers
        else:
            yield from _alone(readers)


def _alone(calls: list[Call]) -> Iterator[Share]:
    return ((call.path, None, [call]) for call in calls)


def _entries(call: Call, arguments: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Returns the modules around a layer through whose arguments its input came as it is, from the outermost."""
    return [
        (path, argument)
        for path, argument in call.given.entered
        if path and call.path.startswith(f"{path}.") and RESULT not in arguments.get(path, ())
    ]


def preparation(names: set[str]) -> Style:
    """Returns the style that makes arguments of a module `Replicate()`, by their places or names; or its result."""
    if names == {RESULT}:
        return PrepareOutput(Replicate(), Replicate())
    places = [int(name) for name in names if name.isdigit()]
    named = {name: Replicate() for name in sorted(names) if not name.isdigit()} or None
    layouts = tuple(Replicate() if i in places else None for i in range(max(places, default=-1) + 1)) or None
    first = Replicate() if layouts == (Replicate(),) else layouts
    return PrepareInput(first, first, named, named)
