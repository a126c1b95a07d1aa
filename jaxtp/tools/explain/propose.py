"""`propose_plan`: derives a plan from a model's jaxpr.

It pairs column and row layers as Megatron-LM does (arXiv 1909.08053), if nothing between them needs the split dim
whole. It splits other layers, for example vocabularies, only if that saves more parameter bytes than it sends, and
tries the plan on an abstract mesh.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
from flax import nnx

from jaxtp.mesh import CP, TP, MeshError, abstract_mesh, describe_mesh
from jaxtp.parallelize.initialisation import abstract_model
from jaxtp.parallelize.parallelize import parallelize
from jaxtp.parallelize.plan import Plan, format_style
from jaxtp.parallelize.styles import Colwise, ContextParallel, PrepareOutput, Replicate, Style
from jaxtp.tools.explain.dataflow import ROOT, LayerCall
from jaxtp.tools.explain.pairing import PlanDraft, TPGroup, draft_plan
from jaxtp.tools.explain.reasons import Reason, merge_reasons, plan_order, replicate_input, style_reasons
from jaxtp.tools.explain.traced_model import Callee, MeshLike, ModelCall, TracedModel, axis_sizes, trace_model

_RESULT = ""
"""Stands for the result of a module instead of an argument's name."""


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
    take are not split.

    Args:
      model: real, abstract, or a function that returns a model.
      *inputs: a global batch: pytrees of arrays or `jax.ShapeDtypeStruct`s, dim 0 the batch; other values pass
        unchanged.
      mesh: by default the mesh in context. Sizes are enough, `{"fsdp": 2, "tp": 4}`.
      call: a function of the model and the inputs; by default `model(*inputs)`.
      report: called with `str(proposal)`; None for no output.

    Returns:
      The plan, an editable dict; empty if no split is worth its communication. Its `reasons` give each module's cost.

    Raises:
      MeshError: there is no mesh, or tp is 1. PlanError: `model` is neither a module nor a function that returns a
        module.
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
    plan = {draft.patterns[path]: draft.styles[path] for path in plan_order(draft) if path in draft.styles}
    reasons = merge_reasons(style_reasons(draft))
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


_Reading = tuple[str, str | None, list[LayerCall]]
"""A module, its argument that is made whole (`_RESULT`; None if a layer does so alone), and the calls that read it."""


def _share_inputs(draft: PlanDraft, *, share: bool) -> None:
    arguments: dict[str, set[str]] = {}
    for calls in _calls_by_input(draft):
        for path, argument, readers in _sharing(draft, calls, arguments) if share else _each(calls):
            draft.bytes[path] = draft.bytes.get(path, 0) + draft.group.columns(readers)
            if argument is not None:
                arguments.setdefault(path, set()).add(argument)
                draft.shared.setdefault(path, []).extend(call.path for call in readers)
    for path, names in arguments.items():
        whole = PrepareOutput(Replicate(), Replicate())
        draft.styles[path] = whole if names == {_RESULT} else replicate_input(names)


def _calls_by_input(draft: PlanDraft) -> list[list[LayerCall]]:
    groups: dict[object, list[LayerCall]] = {}
    for call in draft.dataflow.calls:
        if isinstance(draft.styles.get(call.path), Colwise) and call.input.has_grad:
            groups.setdefault((call.input.key, call.times), []).append(call)
    return list(groups.values())


def _sharing(draft: PlanDraft, calls: list[LayerCall], arguments: dict[str, set[str]]) -> Iterator[_Reading]:
    # The innermost module around all readers, else the array's maker, else several modules.
    if len({call.path for call in calls}) == 1:
        yield calls[0].path, None, calls
        return
    around = [_entries(call, arguments) for call in calls]
    common = [entry for entry in around[0] if all(entry in others for others in around)]
    makers = [path for path in calls[0].input.left if path and path not in {*draft.styles, *arguments}]
    if common:
        yield *common[-1], calls
    elif makers:
        yield makers[0], _RESULT, calls
    else:
        groups: dict[tuple[str, str | None], list[LayerCall]] = {}
        for call, entries in zip(calls, around, strict=True):
            groups.setdefault(entries[-1] if entries else (call.path, None), []).append(call)
        for (path, argument), readers in groups.items():
            shared = len({call.path for call in readers}) > 1
            yield from [(path, argument, readers)] if shared else _each(readers)


def _each(calls: list[LayerCall]) -> Iterable[_Reading]:
    return [(call.path, None, [call]) for call in calls]


def _entries(call: LayerCall, arguments: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Returns the modules (outermost first) around a layer that its input entered unchanged, with the argument."""
    return [
        (path, argument)
        for path, argument in call.input.entered
        if path and call.path.startswith(f"{path}.") and _RESULT not in arguments.get(path, ())
    ]
