"""`propose_plan`: derives a plan from a model's jaxpr, with reasons; and notes on a plan's avoidable communication.

It pairs column and row layers as Megatron-LM does (arXiv 1909.08053), if nothing between them needs the split dim
whole. It splits other layers, for example vocabularies, only if that saves more parameter bytes than it sends, and
tries the plan on an abstract mesh.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import jax
from flax import nnx

from jaxtp.analysis.collective import ALL_REDUCE
from jaxtp.mesh import CP, TP, MeshError, abstract_mesh, describe_mesh
from jaxtp.parallelize.initialisation import abstract_model
from jaxtp.parallelize.layouts import as_tuple
from jaxtp.parallelize.parallelize import parallelize
from jaxtp.parallelize.plan import Plan, format_style
from jaxtp.parallelize.stock import signature
from jaxtp.parallelize.styles import (
    Colwise,
    ContextParallel,
    PrepareInput,
    PrepareOutput,
    Replicate,
    Rowwise,
    SequenceParallel,
    Style,
)
from jaxtp.tools.explain.dataflow import ROOT, Dataflow, LayerCall, find_dataflow, layer_dims
from jaxtp.tools.explain.pairing import PlanDraft, Region, TPGroup, draft_plan
from jaxtp.tools.explain.propagation_rules import ELEMENTWISE
from jaxtp.tools.explain.traced_model import Callee, MeshLike, ModelCall, TracedModel, axis_sizes, trace_model

_RESULT = ""
"""Stands for the result of a module instead of an argument's name."""


@dataclass(frozen=True)
class Reason:
    """Why a module has its style, or none."""

    module: str  # its pattern in the plan; several modules with one reason share it
    style: str  # as written in the plan; empty for a module that stays whole
    why: str
    bytes: float  # that each device sends over tp, forward and backward, for all modules of the pattern

    def __str__(self) -> str:
        sent = f"  {self.bytes:,.0f} bytes" if self.bytes else ""
        return f"{self.module}  {self.style or 'whole'}{sent}\n    {self.why}"


def _merge_reasons(reasons: Iterable[Reason]) -> list[Reason]:
    merged: dict[tuple[str, str, str], float] = {}
    for reason in reasons:
        key = (reason.module, reason.style, reason.why)
        merged[key] = merged.get(key, 0) + reason.bytes
    return [Reason(*key, total) for key, total in merged.items()]


class Proposal(dict[str, Style]):
    """A plan for `parallelize`: styles by pattern, with a reason for every layer, in model order."""

    def __init__(self, plan: Mapping[str, Style], reasons: Iterable[Reason], sizes: Mapping[str, int]):
        super().__init__(plan)
        self.reasons = tuple(reasons)
        self.sizes = dict(sizes)

    @property
    def bytes(self) -> float:
        """Bytes per device over tp for forward and backward, without recomputation."""
        return sum(reason.bytes for reason in self.reasons)

    def __str__(self) -> str:
        mesh = f"mesh {describe_mesh(self.sizes)}"
        if not self:
            header = f"no plan for {mesh}: nothing in this model is worth a split over tp"
        else:
            header = f"plan for {mesh}: each device sends {self.bytes:,.0f} bytes over tp, forward and backward"
        return "\n".join([header, *(f"\n{reason}" for reason in self.reasons)])


def propose_plan(
    model: nnx.Module | Callable[[], nnx.Module],
    *inputs: object,
    mesh: MeshLike = None,
    call: Callee | None = None,
    report: Callable[[str], None] | None = print,
) -> Proposal:
    """Proposes how to split a model over tp. With cp > 1, cp splits the whole model's sequences.

    Tracing is abstract: the model stays unchanged, and nothing is allocated. Python branches that these inputs do not
    take are not split. The plan is an editable dict, empty if no split is worth its communication.

    Args:
      model, *inputs, mesh, call: as in `explain`; dim 0 of each input is the batch.
      report: called with `str(proposal)`; None for no output.

    Raises:
      MeshError: there is no mesh, or tp is 1.
      PlanError: `model` is neither a module nor a function that returns a module.
    """
    sizes = axis_sizes(mesh, "propose_plan")
    if sizes[TP] < 2:
        raise MeshError(
            f"propose_plan splits over {TP}, which has {sizes[TP]} device; set a mesh with more, or pass the mesh that "
            f'the plan is for: propose_plan(..., mesh={{"{TP}": 4}})'
        )
    model_call = ModelCall.of(model, inputs, call)
    proposal = _tested_proposal(model_call, trace_model(model_call), sizes)
    if report:
        report(str(proposal))
    return proposal


def _tested_proposal(call: ModelCall, traced: TracedModel, sizes: Mapping[str, int]) -> Proposal:
    """Falls back to a plan without shared inputs if the model fails on them."""
    proposal = _proposal(traced, sizes, share=True)
    try:
        _try(call, proposal, sizes)
    except Exception as error:
        proposal = _proposal(traced, sizes, share=False)
        _try(call, proposal, sizes)
        problem = (str(error) or type(error).__name__).splitlines()[0]
        proposal.reasons += (Reason(ROOT, "", f"inputs of column layers are not shared: {problem}", 0),)
    return proposal


def _try(call: ModelCall, plan: Plan, sizes: Mapping[str, int]) -> None:
    mesh = abstract_mesh(sizes)
    with jax.sharding.use_abstract_mesh(mesh):
        function, state = call.functional(parallelize(abstract_model(call.model), plan, mesh=mesh))
        jax.eval_shape(function, state, call.arrays)


def _proposal(traced: TracedModel, sizes: Mapping[str, int], *, share: bool) -> Proposal:
    draft = draft_plan(traced, TPGroup.of(sizes))
    _share_inputs(draft, share=share)
    plan = {draft.patterns[path]: draft.styles[path] for path in _plan_order(draft) if path in draft.styles}
    reasons = _merge_reasons(_style_reasons(draft))
    if sizes[CP] == 1:
        return Proposal(plan, reasons, sizes)
    if "" in plan:
        raise MeshError(
            f"the model is a single layer, to be {format_style(plan[''])}, and cannot be ContextParallel() too, as "
            f"{CP}={sizes[CP]} needs it; propose a plan for a model around it, or for a mesh with {CP}=1"
        )
    why = f"sequences are divided over {CP}; what the compiler sends to mix positions is not in these bytes"
    reason = Reason(ROOT, format_style(ContextParallel()), why, 0)
    return Proposal({"": ContextParallel(), **plan}, [reason, *reasons], sizes)


def _share_inputs(draft: PlanDraft, *, share: bool) -> None:
    groups: dict[object, list[LayerCall]] = {}
    for call in draft.dataflow.calls:
        if isinstance(draft.styles.get(call.path), Colwise) and call.input.has_grad:
            groups.setdefault((call.input.key, call.times), []).append(call)
    arguments: dict[str, set[str]] = {}
    for calls in groups.values():
        several = len({call.path for call in calls}) > 1
        if share and several and (found := _sharing_module(draft, calls, arguments)):
            path, argument = found
            draft.bytes[path] = draft.bytes.get(path, 0) + draft.group.columns(calls)
            arguments.setdefault(path, set()).add(argument)
            draft.shared.setdefault(path, []).extend(call.path for call in calls)
            continue
        for call in calls if several else calls[:1]:  # a layer that reads an array twice reduces its gradient once
            draft.bytes[call.path] = draft.bytes.get(call.path, 0) + draft.group.columns([call])
    for path, names in arguments.items():
        whole = PrepareOutput(Replicate(), Replicate())
        draft.styles[path] = whole if names == {_RESULT} else _replicate_input(names)


def _sharing_module(draft: PlanDraft, calls: list[LayerCall], arguments: dict[str, set[str]]) -> tuple[str, str] | None:
    """Returns the innermost module around all readers of an array, with the argument, else the array's maker."""
    around = [_entries(call, arguments) for call in calls]
    common = [entry for entry in around[0] if all(entry in others for others in around)]
    makers = [path for path in calls[0].input.left if path and path not in {*draft.styles, *arguments}]
    return common[-1] if common else (makers[0], _RESULT) if makers else None


def _entries(call: LayerCall, arguments: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Returns the modules (outermost first) around a layer that its input entered unchanged, with the argument."""
    return [
        (path, argument)
        for path, argument in call.input.entered
        if path and call.path.startswith(f"{path}.") and _RESULT not in arguments.get(path, ())
    ]


def _style_reasons(draft: PlanDraft) -> Iterator[Reason]:
    for path in _plan_order(draft):
        if path in draft.styles:
            style, sent = format_style(draft.styles[path]), draft.bytes.get(path, 0)
            yield Reason(draft.patterns[path], style, _why_styled(draft, path), sent)
        else:
            yield Reason(draft.patterns[path] or ROOT, "", _why_whole(draft, path), 0)
    for path, module in draft.traced.modules.items():
        if path not in draft.layers and (matrices := _matrices(module)):
            why = f"has {matrices} of its own: styles split the layers of Flax"
            why = "makes nothing that this call returns" if signature(module) else why
            yield Reason(draft.patterns[path] or ROOT, "", why, 0)


def _plan_order(draft: PlanDraft) -> list[str]:
    # The layers in call order, after the modules that make their input whole.
    order: list[str] = []
    norms = [call.path for call in draft.dataflow.norms if isinstance(draft.styles.get(call.path), SequenceParallel)]
    for path in dict.fromkeys([*draft.layers, *norms]):
        order += [module for module, readers in draft.shared.items() if path in readers and module not in order]
        order.append(path)
    return order


def _replicate_input(names: set[str]) -> PrepareInput:
    # Makes arguments whole, by position or name.
    positions = [int(name) for name in names if name.isdigit()]
    kwargs = {name: Replicate() for name in sorted(names) if not name.isdigit()} or None
    layouts = tuple(Replicate() if i in positions else None for i in range(max(positions, default=-1) + 1)) or None
    args = Replicate() if layouts == (Replicate(),) else layouts
    return PrepareInput(args, args, kwargs, kwargs)


def _why_styled(draft: PlanDraft, path: str) -> str:
    region, style = draft.region(path), draft.styles[path]
    if isinstance(style, (PrepareInput, PrepareOutput)):
        readers = draft.shared[path]
        return f"one array for {_names(draft, readers)}: its gradient is all-reduced once, not {len(readers)} times"
    if isinstance(style, SequenceParallel):
        return f"runs on parts of dim {style.sequence_dim} of its input, which column layers split"
    if region is None:
        return f"its vocabulary is split: {_trade(draft.saved(path), draft.vocabulary_bytes(path))}"
    if not isinstance(style, Colwise):
        return f"sums over the output of {_names(draft, region.columns)}; its output is all-reduced"
    sharing = [module for module, readers in draft.shared.items() if path in readers]
    gradient = f"its input is shared by {_names(draft, sharing)}" if sharing else "its input's gradient is all-reduced"
    if not any(call.input.has_grad for call in draft.calls(path)):
        gradient = "its input has no gradient"
    if region.rows:
        passed = draft.dataflow.through.get(path, {})
        names = dict.fromkeys("element-wise" if name in ELEMENTWISE else name for name in passed)
        through = f" through {', '.join(names)}" if names else ""
        return f"its output stays split up to {_names(draft, region.rows)}{through}; {gradient}"
    trade = _trade(draft.saved(*region.columns), region.bytes)
    return f"its output ends the model and stays split: {trade}, before a softmax cross-entropy; {gradient}"


def _why_whole(draft: PlanDraft, path: str) -> str:
    if split := [call for call in draft.calls(path) if call.input.dim is not None and not call.is_row]:
        return f"runs on whole arrays, between parts split by {_names(draft, split[0].input.columns)}: it gathers them"
    region = next((region for region in draft.regions if path in region.columns), None)
    if region is None:
        feeding = next((region for region in draft.regions if path in region.rows), None)
        row = "; no row: its input is not split"
        if draft.has_vocabulary(path):
            row = f"; to split its vocabulary {_trade(draft.saved(path), draft.vocabulary_bytes(path))}"
        elif feeding is not None:
            row = f"; could sum over the output of {_names(draft, feeding.columns)}{_why_not_chosen(draft, feeding)}"
        return f"no column: {draft.excluded[path]}{row}"
    if region.rows:
        return f"would feed {_names(draft, region.rows)}{_why_not_chosen(draft, region)}"
    return f"ends the model: to split it {_trade(draft.saved(*region.columns), region.bytes)}"


def _why_not_chosen(draft: PlanDraft, region: Region) -> str:
    if region.bytes >= region.bytes_one_by_one:
        return f", which sends {region.bytes:,.0f} bytes, no less than each alone ({region.bytes_one_by_one:,.0f})"
    rivals = {path for other in draft.chosen if region.conflicts(other) for path in other.layers}
    return f", which sends {region.bytes:,.0f} bytes; better are {_names(draft, rivals)}"


def _trade(saved: float, sent: float) -> str:
    return f"saves {saved:,.0f} bytes of parameters and sends {sent:,.0f}"


def _names(draft: PlanDraft, paths: Iterable[str]) -> str:
    return ", ".join(sorted({draft.patterns[path] for path in paths}))


def _matrices(module: nnx.Module) -> str:
    params = {name: value for name, value in vars(module).items() if isinstance(value, nnx.Param)}
    large = {name: value.shape for name, value in params.items() if len(value.shape) > 1}
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in large.items())


def plan_notes(call: ModelCall, styles: Mapping[str, Style], sizes: Mapping[str, int]) -> list[str]:
    """Returns notes on a non-parallel model's avoidable communication, merged over layer numbers."""
    traced, group = trace_model(call), TPGroup.of(sizes)
    split = {path for path, style in styles.items() if isinstance(style, Colwise) and style.output_layouts is None}
    dataflow = find_dataflow(traced, set(traced.modules) - split, tp=group.tp, batch_shards=group.batch_shards)
    notes = [
        *_gathered_outputs(dataflow, group),
        *_whole_row_inputs(dataflow, traced, styles, group),
        *_duplicate_reductions(dataflow, styles, group),
    ]
    merged = Counter(re.sub(r"(?<=\.)\d+(?=[.)])", "*", note) for note in notes)
    return [f"{note} (x {count})" if count > 1 else note for note, count in merged.items()]


def _gathered_outputs(dataflow: Dataflow, group: TPGroup) -> Iterator[str]:
    calls = {call.path: call for call in dataflow.calls}
    for path, why in dataflow.blocked.items():
        yield (
            f"{path} is Colwise(), and {why}: the compiler gathers it, and each device sends at most "
            f"{group.sent(calls[path], 1):,.0f} bytes; leave this style out, or write "
            "Colwise(output_layouts=Replicate()) if it is intended"
        )


def _whole_row_inputs(
    dataflow: Dataflow, traced: TracedModel, styles: Mapping[str, Style], group: TPGroup
) -> Iterator[str]:
    for call in dataflow.calls:
        style, dims = styles.get(call.path), layer_dims(traced.modules[call.path], call.method, call.avals[0].ndim)
        splits_input = dims is not None and dims.row is not None
        if isinstance(style, Rowwise) and style.input_layouts is None and splits_input and not call.is_row:
            sent = group.sent(call, 0)
            cost = f"is gathered, {sent:,.0f} bytes sent by each device" if call.input.has_grad else "is not needed"
            yield (
                f"{call.path} is Rowwise(), and its input is whole on every device: each device slices it, and the "
                f"gradient {cost}; put a Colwise layer before it, or write Rowwise(input_layouts=Replicate()) if it is "
                "intended"
            )


def _duplicate_reductions(dataflow: Dataflow, styles: Mapping[str, Style], group: TPGroup) -> Iterator[str]:
    readers: dict[object, dict[str, LayerCall]] = {}
    for call in dataflow.calls:
        style = styles.get(call.path)
        if isinstance(style, Colwise) and style.input_layouts == Replicate() and call.input.has_grad:
            readers.setdefault(call.input.key, {})[call.path] = call
    for calls in readers.values():
        first = next(iter(calls.values()))
        shared = any(_replicates(styles.get(path), argument) for path, argument in first.input.entered)
        shared |= any(_makes_whole(styles.get(path)) for path in first.input.left)
        if len(calls) > 1 and not shared:
            sent = (len(calls) - 1) * group.sent(first, 0, ALL_REDUCE)
            remedy = "PrepareInput(Replicate(), Replicate()) for a module around them"
            for path, argument in first.input.entered:
                if path and path != first.path:  # the innermost is the last
                    remedy = f"{format_style(_replicate_input({argument}))} for {path!r}"
            yield (
                f"{', '.join(calls)} read one array, and each reduces its gradient over tp; {remedy} reduces it once: "
                f"{sent:,.0f} bytes less sent by each device"
            )


def _replicates(style: Style | None, argument: str) -> bool:
    if not isinstance(style, PrepareInput):
        return False
    if not argument.isdigit():
        return (style.desired_input_kwarg_layouts or {}).get(argument) == Replicate()
    return as_tuple(style.desired_input_layouts)[int(argument) : int(argument) + 1] == (Replicate(),)


def _makes_whole(style: Style | None) -> bool:
    sequence = isinstance(style, SequenceParallel) and style.output_layouts == Replicate()
    return sequence or isinstance(style, PrepareOutput)
