"""`propose_plan`: derives a plan from a model's jaxpr, with reasons.

It pairs column and row layers as Megatron-LM does (arXiv 1909.08053), if nothing between them needs
the split dim whole (`regions.py`). Column layers that read one array share its gradient's
all-reduce.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
from flax import nnx

from jaxtp.analysis.dataflow import ROOT, Dataflow, LayerCall
from jaxtp.analysis.regions import Region, choose, find_regions
from jaxtp.analysis.traced_model import Forward, ModelCall, TracedModel, trace_model
from jaxtp.analysis.work import count_work, repeated_work
from jaxtp.mesh import (
    CP,
    TP,
    MeshError,
    MeshLike,
    Sizes,
    abstract_mesh,
    as_mesh,
    describe_mesh,
    mesh_sizes,
)
from jaxtp.plans.layouts import declared_spec, declared_specs, dim_over
from jaxtp.plans.module_wrappers import find_modules
from jaxtp.plans.parallelize import DECLARED, Build, abstract_model, parallelize
from jaxtp.plans.plan import Plan, format_style, patterns_for
from jaxtp.plans.stock import signature
from jaxtp.plans.styles import (
    Colwise,
    ContextParallel,
    PrepareInput,
    PrepareOutput,
    Replicate,
    Rowwise,
    SequenceParallel,
    Style,
)

_RESULT = ""  # Stands for the result of a module, in place of an argument's name


@dataclass(frozen=True)
class Reason:
    """Why a module has its style, or none."""

    module: str  # pattern in the plan; modules with the same reason share it
    # The style as written in the plan; "as declared" if only the model's specs split it, empty if
    # nothing does
    style: str
    why: str
    # Bytes sent by each device over tp, forward and backward, for all modules of the pattern
    bytes: float = 0

    def __str__(self) -> str:
        line = f"{self.module}  {self.style or 'whole'}"
        if self.bytes:
            line += f"  {self.bytes:,.0f} bytes"
        return f"{line}\n    {self.why}"


class Proposal(dict[str, Style]):
    """A plan for `parallelize`: styles by pattern, and a reason for every layer in model order."""

    def __init__(self, plan: Mapping[str, Style], reasons: Iterable[Reason], sizes: Sizes):
        super().__init__(plan)
        self.reasons = tuple(reasons)
        self.sizes = dict(sizes)
        self.notes: tuple[str, ...] = ()  # about work and parameters that tp does not divide

    @property
    def bytes(self) -> float:
        """Bytes per device over tp for forward and backward, without recomputation."""
        return sum(reason.bytes for reason in self.reasons)

    def __str__(self) -> str:
        mesh = describe_mesh(self.sizes)
        text = f"no plan for mesh {mesh}: nothing in this model is worth a split over tp"
        if self:
            text = (
                f"plan for mesh {mesh}: each device sends {self.bytes:,.0f} bytes over tp, forward "
                "and backward"
            )
        for reason in self.reasons:
            text += f"\n\n{reason}"
        for note in self.notes:
            text += f"\n\nnote: {note}"
        return text


def propose_plan(
    model: nnx.Module | Build,
    *inputs: object,
    mesh: MeshLike = None,
    call: Forward | None = None,
    report: Callable[[str], None] | None = print,
) -> Proposal:
    """Proposes how to split a model over tp.

    With cp > 1, cp splits the sequences of the whole model.

    Tracing is abstract: the model is unchanged, and nothing is allocated. Python branches that
    these inputs do not take are not split. The plan is an editable dict, empty if no split is worth
    its communication.

    Args:
      model, *inputs, mesh, call: as in `explain`; dim 0 of each input is the batch.
      report: called with `str(proposal)`; None for no output.

    Raises:
      MeshError: there is no mesh, or tp is 1.
      PlanError: `model` is neither a module nor a function that returns a module.
    """
    abstract = as_mesh(mesh, "propose_plan", abstract=True)
    sizes = mesh_sizes(abstract)
    if sizes[TP] < 2:
        raise MeshError(
            f"propose_plan splits over {TP}, which has {sizes[TP]} device; set a mesh with more, "
            "or pass the mesh that "
            f'the plan is for: propose_plan(..., mesh={{"{TP}": 4}})'
        )
    with jax.sharding.use_abstract_mesh(abstract):
        model_call = ModelCall.of(model, inputs, call)
        traced = trace_model(model_call)

    def attempt(*, share: bool) -> Proposal:
        proposal = _proposal(traced, sizes, share=share)
        proposal.notes = _trace_plan(model_call, proposal, sizes)
        return proposal

    try:
        proposal = attempt(share=True)
    except Exception as error:  # the model's code may not accept `Copies`
        proposal = attempt(share=False)
        problem = (str(error) or type(error).__name__).splitlines()[0]
        proposal.reasons += (Reason(ROOT, "", f"column layers do not share inputs: {problem}"),)
    if report:
        report(str(proposal))
    return proposal


def _trace_plan(call: ModelCall, plan: Plan, sizes: Sizes) -> tuple[str, ...]:
    # Returns notes about work and parameters that tp does not divide; fails if the model's code
    # does not accept the plan.
    mesh = abstract_mesh(sizes)
    with jax.sharding.use_abstract_mesh(mesh):
        model = parallelize(abstract_model(call.model), plan, mesh=mesh)
        function, state = call.functional(model)
        products, _ = count_work(
            jax.make_jaxpr(function)(state, call.arrays), sizes, (state, call.arrays)
        )
        return *merge_equal(undivided_parameters(model, sizes)), *repeated_work(products, sizes[TP])


def undivided_parameters(model: nnx.Module, sizes: Sizes) -> Iterator[str]:
    """Yields a note for each parameter that declares a split over tp which the mesh cannot make."""
    for info in find_modules(model):
        for name, parameter in info.parameters.items():
            declared = parameter.replace(out_sharding=parameter.get_metadata().get(DECLARED))
            before = declared_spec(declared, parameter.ndim)
            after = declared_spec(parameter, parameter.ndim)
            if dim_over(TP, before) is not None and dim_over(TP, after) is None:
                shape = "x".join(map(str, parameter.shape))
                where = f"{info.path or ROOT} declares {name} {shape} as {before}"
                yield f"{where}, which tp {sizes[TP]} does not divide: no split"


def merge_equal(notes: Iterable[str]) -> list[str]:
    """Merges notes about equal layers: `*` replaces their numbers."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=[.) ])", "*", note) for note in notes)
    merged = []
    for note, count in counts.items():
        merged.append(note if count == 1 else f"{note} (x {count})")
    return merged


def _proposal(traced: TracedModel, sizes: Sizes, *, share: bool) -> Proposal:
    draft = _draft_plan(traced, sizes)
    _share_inputs(draft, share=share)
    plan: dict[str, Style] = {}
    for path in _plan_order(draft):
        if path in draft.styles:
            plan[draft.patterns[path]] = draft.styles[path]
    sent: dict[Reason, float] = {}
    if sizes[CP] > 1:
        if "" in plan:
            raise MeshError(
                f"the model is a single layer: it cannot be both {format_style(plan[''])} and, for "
                f"{CP}={sizes[CP]}, ContextParallel(); propose a plan for a model around it, or "
                f"for a mesh with {CP}=1"
            )
        plan = {"": ContextParallel(), **plan}
        why = (
            f"sequences are divided over {CP}; these bytes exclude the compiler's collectives "
            "that mix positions"
        )
        sent[Reason(ROOT, format_style(ContextParallel()), why)] = 0
    for reason, size in _reasons(draft):
        sent[reason] = sent.get(reason, 0) + size
    reasons = [replace(reason, bytes=size) for reason, size in sent.items()]
    return Proposal(plan, reasons, sizes)


@dataclass
class PlanDraft:
    """Styles by module path, with reasons."""

    traced: TracedModel
    dataflow: Dataflow
    regions: list[Region]  # all candidates
    excluded: dict[str, str]  # layers that cannot be column layers, and why
    chosen: list[Region]
    styles: dict[str, Style] = field(default_factory=dict)
    # Bytes sent by each device because of a module's style
    bytes: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    shared: dict[str, list[str]] = field(default_factory=dict)
    """Column layers that share a replicated array, by the module whose style replicates it."""

    @cached_property
    def patterns(self) -> dict[str, str]:
        """A pattern for each module, after all styles are set."""
        by_path: dict[str, Style | None] = {}
        for info in find_modules(self.traced.model):
            by_path |= dict.fromkeys(info.paths, self.styles.get(info.path))
        for path in self.traced.modules:
            by_path[path] = self.styles.get(path)
        return patterns_for(by_path)

    def region(self, path: str) -> Region | None:
        """Returns a layer's chosen region."""
        for region in self.chosen:
            if path in region.layers:
                return region
        return None


def _draft_plan(traced: TracedModel, sizes: Sizes) -> PlanDraft:
    regions, dataflow, excluded = find_regions(traced, sizes)
    draft = PlanDraft(traced, dataflow, regions, excluded, choose(regions))
    for path in dataflow.layers:
        region = draft.region(path)
        if region is None:
            continue
        if path in region.columns:
            draft.styles[path] = Colwise()
            draft.bytes[path] = region.inner_bytes * (path == min(region.columns))
        else:
            draft.styles[path] = Rowwise()
            draft.bytes[path] = region.bytes
            if region.columns:
                draft.bytes[path] = dataflow.output_bytes(dataflow.calls_of(path))
    for call in dataflow.norms:
        is_split = any(call.input.columns <= region.columns for region in draft.chosen)
        if call.input.dim is not None and is_split:
            draft.styles[call.path] = SequenceParallel(call.input.dim)
    return draft


def _share_inputs(draft: PlanDraft, *, share: bool) -> None:
    groups = defaultdict[object, list[LayerCall]](list)
    for call in draft.dataflow.calls:
        if isinstance(draft.styles.get(call.path), Colwise) and call.input.has_grad:
            groups[call.input.key, call.times].append(call)
    arguments = defaultdict[str, set[str]](set)
    for calls in groups.values():
        several = len({call.path for call in calls}) > 1
        sharing = _sharing_module(draft, calls, arguments) if share and several else None
        if sharing:
            path, argument = sharing
            draft.bytes[path] += draft.dataflow.input_bytes(calls)
            arguments[path].add(argument)
            draft.shared.setdefault(path, []).extend(call.path for call in calls)
            continue
        # Two calls of a layer on one array reduce its gradient once.
        for call in calls if several else calls[:1]:
            draft.bytes[call.path] += draft.dataflow.input_bytes([call])
    for path, names in arguments.items():
        if names == {_RESULT}:
            draft.styles[path] = PrepareOutput(Replicate(), Replicate())
        else:
            draft.styles[path] = _replicate_input(names)


def _sharing_module(
    draft: PlanDraft, calls: list[LayerCall], arguments: dict[str, set[str]]
) -> tuple[str, str] | None:
    """Returns the innermost module around all readers of an array, and its argument.

    If there is none, returns the module that returned the array.
    """
    first, *others_entered = (_modules_entered(call, arguments) for call in calls)
    shared = set(first).intersection(*others_entered)
    for entry in reversed(first):
        if entry in shared:
            return entry
    for path in calls[0].input.left:
        if path and path not in draft.styles and path not in arguments:
            return path, _RESULT
    return None


def _modules_entered(call: LayerCall, arguments: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Returns the modules around a layer that pass an argument to it unchanged, and the argument.

    The outermost module is first.
    """
    entered = []
    for path, argument in call.input.entered:
        around = path and call.path.startswith(f"{path}.")
        if around and _RESULT not in arguments.get(path, ()):
            entered.append((path, argument))
    return entered


def _reasons(draft: PlanDraft) -> Iterator[tuple[Reason, float]]:
    # Yields the reasons without their bytes, and the bytes.
    modules = draft.traced.modules
    for path in _plan_order(draft):
        pattern = draft.patterns[path]
        if path in draft.styles:
            style = format_style(draft.styles[path])
            yield Reason(pattern, style, _why_styled(draft, path)), draft.bytes[path]
        else:
            why = _why_whole(draft, path)
            yield Reason(pattern or ROOT, _whole_style(modules[path]), why), 0
    for path, module in modules.items():
        matrices = _matrices(module)
        if matrices and path not in draft.dataflow.layers:
            why = "does not affect the result of this call"
            if signature(module) is None:
                why = f"has its own parameters, {matrices}: styles split only Flax's layers"
            yield Reason(draft.patterns[path] or ROOT, _whole_style(module), why), 0


def _whole_style(module: nnx.Module) -> str:
    return "as declared" if declared_specs(module) else ""


def _plan_order(draft: PlanDraft) -> list[str]:
    # Layers in call order; a module that replicates inputs precedes the layers that read them.
    order: dict[str, None] = {}
    for path in draft.dataflow.layers:
        order |= dict.fromkeys([*_sharing_modules(draft, path), path])
    for call in draft.dataflow.norms:
        if call.path in draft.styles:
            order[call.path] = None
    return list(order)


def _sharing_modules(draft: PlanDraft, path: str) -> list[str]:
    """Returns the modules whose style replicates the layer's input."""
    return [module for module, readers in draft.shared.items() if path in readers]


def _replicate_input(names: set[str]) -> PrepareInput:
    """Returns a style that replicates arguments, by position or name."""
    positions = set(filter(str.isdigit, names))
    kwargs = dict.fromkeys(sorted(names - positions), Replicate()) or None
    args: Replicate | tuple[Replicate | None, ...] | None = None
    if positions == {"0"}:
        args = Replicate()
    elif positions:
        count = 1 + max(map(int, positions))
        args = tuple(Replicate() if str(i) in positions else None for i in range(count))
    return PrepareInput(args, args, kwargs, kwargs)


def _why_styled(draft: PlanDraft, path: str) -> str:
    region = draft.region(path)
    style = draft.styles[path]
    if isinstance(style, (PrepareInput, PrepareOutput)):
        readers = draft.shared[path]
        return (
            f"one input for {_names(draft, readers)}: its gradient is all-reduced once, not "
            f"{len(readers)} times"
        )
    if isinstance(style, SequenceParallel):
        return f"runs on shards of dim {style.sequence_dim} of its input, which column layers split"
    assert region is not None
    if path in region.rows and region.columns:
        return f"sums over the output of {_names(draft, region.columns)}; its output is all-reduced"
    if region.rows and region.columns:
        return f"its output stays split up to {_names(draft, region.rows)}"
    split = "its output stays split for a loss" if region.columns else "its vocabulary is split"
    return f"{split}: {_saved_and_sent(region)}"


def _why_whole(draft: PlanDraft, path: str) -> str:
    for call in draft.dataflow.calls_of(path):
        if call.input.dim is not None and not call.is_row:
            return (
                f"gathers its input, which {_names(draft, call.input.columns)} splits, and runs on "
                "the whole array"
            )
    why = "not Rowwise(): its input is not split"
    # In reverse, so that the first region in which it is a row layer gives the reason.
    for region in reversed(draft.regions):
        if path in region.columns and region.rows:
            return f"would feed {_names(draft, region.rows)}{_why_not_chosen(draft, region)}"
        if path in region.columns:
            in_loss = path in draft.dataflow.summed
            reader = "goes into the loss" if in_loss else "is a result of the model"
            return f"its output {reader}: a split {_saved_and_sent(region)}"
        if path in region.rows:
            why = f"a split of its vocabulary {_saved_and_sent(region)}"
            if region.columns:
                columns = _names(draft, region.columns)
                why = f"could sum over the output of {columns}{_why_not_chosen(draft, region)}"
    return f"not Colwise(): {draft.excluded[path]}; {why}"


def _why_not_chosen(draft: PlanDraft, region: Region) -> str:
    if region.bytes >= region.bytes_one_by_one:
        return (
            f", which sends {region.bytes:,.0f} bytes, no less than layer by layer "
            f"({region.bytes_one_by_one:,.0f})"
        )
    rivals = (rival.layers for rival in draft.chosen if region.conflicts(rival))
    better = _names(draft, frozenset[str]().union(*rivals))
    return f", which sends {region.bytes:,.0f} bytes; a better split is of {better}"


def _saved_and_sent(region: Region) -> str:
    return f"saves {region.saved:,.0f} bytes of parameters and sends {region.bytes:,.0f}"


def _names(draft: PlanDraft, paths: Iterable[str]) -> str:
    return ", ".join(sorted({draft.patterns[path] for path in paths}))


def _matrices(module: nnx.Module) -> str:
    matrices = []
    for name, value in vars(module).items():
        if isinstance(value, nnx.Param) and value.ndim > 1:
            matrices.append(f"{name} {'x'.join(map(str, value.shape))}")
    return ", ".join(matrices)
