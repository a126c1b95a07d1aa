"""`propose_plan`: a plan read off the model's own jaxpr.

Column and row layers are paired as in Megatron-LM (arXiv 1909.08053), wherever nothing between them needs the split dim
whole. What is left is split only where that saves more bytes of parameters than it moves: vocabularies.

A proposed plan is tried on an abstract mesh before it is given.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from jaxtp.mesh import CP, TP, MeshError, abstract_mesh
from jaxtp.parallel.initialisation import abstract_model
from jaxtp.parallel.parallelize import parallelize
from jaxtp.parallel.plan import Plan, spelled
from jaxtp.parallel.styles import ContextParallel
from jaxtp.propose.draft import draft_plan
from jaxtp.propose.flows import ROOT
from jaxtp.propose.marking import Traced, trace
from jaxtp.propose.pairing import Group
from jaxtp.propose.proposal import Proposal, Reason, merge_reasons
from jaxtp.propose.reasons import in_order, reasons
from jaxtp.propose.sharing import share_inputs
from jaxtp.propose.subject import Meant, Subject, sizes_of, subject_of


def propose_plan(
    model: nnx.Module | Callable[[], nnx.Module],
    *inputs: Any,
    mesh: Meant = None,
    call: Callable[..., Any] | None = None,
    report: Callable[[str], None] | None = print,
) -> Proposal:
    """Proposes how to split a model over tp; sequences are divided over cp in all of it.

    The model is traced abstractly: it is not changed, and no array is made. A trace shows what runs on these inputs, so
    a branch of Python that they do not take is not split.

    Args:
      model: as it would be given to `parallelize`, real, abstract, or a function that makes it.
      *inputs: of one call, a global batch: pytrees of arrays or `jax.ShapeDtypeStruct`s, dim 0 the batch; anything else
        in them is passed as it is.
      mesh: what the plan is for, by default the mesh in context. The devices need not be there: sizes do,
        `{"fsdp": 2, "tp": 4}`.
      call: what is run, of the model and the inputs; by default `model(*inputs)`.
      report: called with the reasoning; None for silence. It is `str(proposal)`, too.

    Returns:
      The plan, a dict from patterns to styles that can be edited; empty where nothing is worth a split. Its `reasons`
      say why, module by module, and what each split costs.

    Raises:
      MeshError: there is no mesh, or it has one device along tp.
      TypeError: what is given for a model is none, and no function that makes one.
    """
    sizes, subject = _sizes(mesh), subject_of(model, inputs, call)
    proposal = _propose(subject, trace(subject), sizes)
    if report:
        report(str(proposal))
    return proposal


def _propose(subject: Subject, traced: Traced, sizes: Mapping[str, int]) -> Proposal:
    """Returns a proposal that has been tried: user code that cannot work on shared inputs gets a plan without them."""
    shared = _proposal(traced, sizes, share=True)
    try:
        _try(subject, shared, sizes)
    except Exception as error:
        alone = _proposal(traced, sizes, share=False)
        _try(subject, alone, sizes)
        problem = (str(error) or type(error).__name__).splitlines()[0]
        lost = f"inputs of column layers are not shared: {problem}"
        return Proposal(alone, (*alone.reasons, Reason(ROOT, "", lost, 0)), sizes)
    return shared


def _try(subject: Subject, plan: Plan, sizes: Mapping[str, int]) -> None:
    """Traces the call of a model under a plan, on an abstract mesh; raises whatever goes wrong in plan or model."""
    mesh = abstract_mesh(sizes)
    with jax.sharding.use_abstract_mesh(mesh):
        program, state = subject.program(parallelize(abstract_model(subject.model), plan, mesh=mesh))
        jax.eval_shape(program, state, subject.arrays)


def _proposal(traced: Traced, sizes: Mapping[str, int], *, share: bool) -> Proposal:
    draft = draft_plan(traced, Group.of(sizes))
    share_inputs(draft, share=share)
    plan = {draft.patterns[path]: draft.styles[path] for path in in_order(draft) if path in draft.styles}
    found = merge_reasons(reasons(draft))
    return Proposal(plan, found, sizes) if sizes[CP] == 1 else _over_context(plan, found, sizes)


def _over_context(plan: Plan, found: list[Reason], sizes: Mapping[str, int]) -> Proposal:
    """Returns a proposal in which the model itself is `ContextParallel`."""
    if "" in plan:
        raise MeshError(
            f"the model is a single layer, to be {spelled(plan[''])}, and cannot be ContextParallel() too, as "
            f"{CP}={sizes[CP]} needs it; propose a plan for a model around it, or for a mesh with {CP}=1"
        )
    why = f"sequences are divided over {CP}; what mixes positions is left to the compiler, and is not in these bytes"
    reason = Reason(ROOT, spelled(ContextParallel()), why, 0)
    return Proposal({"": ContextParallel(), **plan}, [reason, *found], sizes)


def _sizes(mesh: Meant) -> dict[str, int]:
    sizes = sizes_of(mesh, "propose_plan")
    if sizes[TP] < 2:
        raise MeshError(
            f"propose_plan splits over {TP}, which has {sizes[TP]} device; set a mesh with more, or say what the plan "
            f'is for: propose_plan(..., mesh={{"{TP}": 4}})'
        )
    return sizes
