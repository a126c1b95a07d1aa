"""Why a proposed plan is as it is, in words, for every layer of the model."""

from collections.abc import Iterable, Iterator

from flax import nnx

from jaxtp.parallel.plan import spelled
from jaxtp.parallel.styles import Colwise, PrepareInput, PrepareOutput, SequenceParallel
from jaxtp.propose.draft import Draft, is_vocabulary, vocabulary_bytes
from jaxtp.propose.flows import ROOT
from jaxtp.propose.pairing import Region, excludes
from jaxtp.propose.passing import ELEMENTWISE
from jaxtp.propose.ports import is_stock
from jaxtp.propose.proposal import Reason


def reasons(draft: Draft) -> Iterator[Reason]:
    """Yields a reason for each module that has a style, each layer that has none, and modules with own matrices."""
    for path in in_order(draft):
        if path in draft.styles:
            style, sent = spelled(draft.styles[path]), draft.bytes.get(path, 0)
            yield Reason(draft.patterns[path], style, _why_styled(draft, path), sent)
        else:
            yield Reason(draft.patterns[path] or ROOT, "", _why_whole(draft, path), 0)
    for path, module in draft.traced.modules.items():
        if path not in draft.layers and (sizes := _matrices(module)):
            why = f"has {sizes} of its own: styles split the layers of Flax"
            why = "makes nothing that this call returns" if is_stock(module) else why
            yield Reason(draft.patterns[path] or ROOT, "", why, 0)


def in_order(draft: Draft) -> list[str]:
    """Returns the layers as they are called, each module that shares an array for some of them before those."""
    order: list[str] = []
    norms = [call.path for call in draft.record.norms if isinstance(draft.styles.get(call.path), SequenceParallel)]
    for path in dict.fromkeys([*draft.layers, *norms]):
        order += [module for module, readers in draft.shared.items() if path in readers and module not in order]
        order.append(path)
    return order


def _why_styled(draft: Draft, path: str) -> str:
    region, style = draft.region(path), draft.styles[path]
    if isinstance(style, (PrepareInput, PrepareOutput)):
        readers = draft.shared[path]
        return f"one array for {_names(draft, readers)}: its gradient is all-reduced once, not {len(readers)} times"
    if isinstance(style, SequenceParallel):
        return (
            f"runs on parts of dim {style.sequence_dim} of its input, which column layers split; it leaves that alone"
        )
    if region is None:
        return f"its vocabulary is split: {_trade(draft.saved(path), vocabulary_bytes(draft, path))}"
    if not isinstance(style, Colwise):
        return f"sums over what {_names(draft, region.columns)} makes; its output is all-reduced"
    if region.rows:
        return (
            f"its output stays split up to {_names(draft, region.rows)}{_through(draft, path)}; {_input(draft, path)}"
        )
    trade = _trade(draft.saved(*region.columns), region.bytes)
    return f"its output ends the model and stays split: {trade}, before a softmax cross-entropy; {_input(draft, path)}"


def _input(draft: Draft, path: str) -> str:
    """Returns what becomes of the gradient of a column layer's input."""
    if not any(call.given.trained for call in draft.calls(path)):
        return "its input has no gradient"
    sharing = [module for module, readers in draft.shared.items() if path in readers]
    return f"its input is shared by {_names(draft, sharing)}" if sharing else "its input's gradient is all-reduced"


def _through(draft: Draft, path: str) -> str:
    """Names the operations between the layers of a region."""
    passed = draft.record.through.get(path, {})
    names = dict.fromkeys("element-wise" if name in ELEMENTWISE else name for name in passed)
    return f" through {', '.join(names)}" if names else ""


def _why_whole(draft: Draft, path: str) -> str:
    if kept := [call for call in draft.calls(path) if call.given.dim is not None and not call.row]:
        return f"leaves alone what {_names(draft, kept[0].given.labels)} split; what it reads is gathered for it"
    own = next((region for region in draft.regions if path in region.columns), None)
    vocabulary = f"; to split its vocabulary {_trade(draft.saved(path), vocabulary_bytes(draft, path))}"
    if own is None:
        return f"no column: {draft.closed[path]}{vocabulary if is_vocabulary(draft, path) else _as_row(draft, path)}"
    if own.rows:
        return f"would feed {_names(draft, own.rows)}{_better(draft, own)}"
    return f"ends the model: to split it {_trade(draft.saved(*own.columns), own.bytes)}"


def _as_row(draft: Draft, path: str) -> str:
    feeding = next((region for region in draft.regions if path in region.rows), None)
    if feeding is None:
        return "; no row: what it reads is not split"
    return f"; could sum over what {_names(draft, feeding.columns)} makes{_better(draft, feeding)}"


def _better(draft: Draft, region: Region) -> str:
    """Returns why a region was not chosen."""
    if region.bytes >= region.alone:
        return f", which moves {region.bytes:,.0f} bytes, no less than each alone ({region.alone:,.0f})"
    rivals = {path for other in draft.chosen if excludes(region, other) for path in other.layers}
    return f", which moves {region.bytes:,.0f} bytes; better are {_names(draft, rivals)}"


def _trade(saved: float, moved: float) -> str:
    return f"saves {saved:,.0f} bytes of parameters and moves {moved:,.0f}"


def _names(draft: Draft, paths: Iterable[str]) -> str:
    return ", ".join(sorted({draft.patterns[path] for path in paths}))


def _matrices(module: nnx.Module) -> str:
    own = {name: value for name, value in vars(module).items() if isinstance(value, nnx.Param)}
    large = {name: value.shape for name, value in own.items() if len(value.shape) > 1}
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in large.items())
