"""Measures bytes, FLOPs and residuals of a step, for comparison with the costs that its layers
declare."""

import math
from dataclasses import dataclass

import jax
from flax import nnx
from parts import type_bytes
from support import mesh_by_size, sizes_of, use_mesh

from jaxtp.analysis.census import count_collectives
from jaxtp.analysis.census import equations as needed
from jaxtp.analysis.collective import bytes_by_place
from jaxtp.analysis.compiling import compile_with_spmd_text
from jaxtp.analysis.hlo import count_flops_in_hlo, parse_module
from jaxtp.analysis.step_costs import StepCosts, step_costs
from jaxtp.data.loader import abstract_batch
from jaxtp.layers import DecoderBlock, remat
from jaxtp.mesh import mesh_of
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import LoopConfig, MeshConfig, TrainConfig
from jaxtp.train.parts import step_settings
from jaxtp.train.state import plan_state
from jaxtp.train.step import make_train_step

B = 16
T = 16
"""Batch size and sequence length."""


def step_of(config, mesh, accumulation, context="auto"):
    """Returns a training step, and the plan of its state."""
    run = TrainConfig(
        model=config, train=LoopConfig(accumulation=accumulation), mesh=MeshConfig(context=context)
    )
    plan = plan_state(config, optimizers.build(run.optimizer, run.train.steps), mesh)
    return make_train_step(step_settings(run), plan), plan


@dataclass(frozen=True)
class Account:
    """What a whole step does on each device, counted in its jaxpr, and what is declared of it."""

    sent: dict
    """Bytes by place: module and axes."""

    flops: float
    """FLOPs of matrix products."""

    costs: StepCosts


def account_of(config, mesh, accumulation=1, context="auto"):
    """Returns the account of a step, of which nothing is compiled."""
    sizes = sizes_of(mesh)
    jaxpr = traced_step(config, sizes, accumulation, context)
    rows = {"batch_size": B, "sequence_length": T, "accumulation": accumulation, "context": context}
    return Account(
        sent=bytes_by_place(count_collectives(jaxpr, sizes)),
        flops=flops_of(jaxpr),
        costs=step_costs(config, sizes, **rows),
    )


def traced_step(config, sizes, accumulation=1, context="auto"):
    """Returns the jaxpr of a whole step on a mesh of these sizes."""
    mesh = mesh_of(sizes)
    step, plan = step_of(config, mesh, accumulation, context)
    with jax.set_mesh(mesh):
        return step.trace(plan.abstract, abstract_batch(mesh, B, T)).jaxpr


def flops_of(jaxpr):
    """Returns the FLOPs of the matrix products in a jaxpr, each as often as it runs."""
    total = 0
    for equation, times, *_ in needed(jaxpr.jaxpr):
        if equation.primitive.name in ("dot_general", "ragged_dot_general"):
            total += times * flops_of_product(equation)
    return total


def flops_of_product(equation):
    left = equation.invars[0].aval
    result = equation.outvars[0].aval
    if equation.primitive.name == "dot_general":
        times = 1
        (contracted, _), _ = equation.params["dimension_numbers"]
    else:
        (contracted, _), _ = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        # On a CPU XLA multiplies every row with the matrix of every group.
        times = equation.invars[2].aval.size if result.ndim == 2 else 1
    return 2 * times * result.size * math.prod(left.shape[dim] for dim in contracted)


def compiled_flops(config, mesh, accumulation):
    """Returns the FLOPs of matrix products in a whole step, after partitioning."""
    mesh = mesh_by_size(*mesh)
    step, plan = step_of(config, mesh, accumulation)
    with jax.set_mesh(mesh):
        lowered = step.lower(plan.sharded, abstract_batch(mesh, B, T))
    _, text = compile_with_spmd_text(lowered, {"xla_backend_optimization_level": 0})
    return count_flops_in_hlo(text)


def equations(jaxpr):
    """Yields the equations of a jaxpr and of its inner jaxprs."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def kept(config, rows, length, tp=1):
    """Returns the residuals of one block, as abstract global arrays."""
    with use_mesh(tp=tp):
        abstract = nnx.eval_shape(lambda: DecoderBlock(config, rngs=nnx.Rngs(0)))
        graph, params, frozen = nnx.split(abstract, nnx.Param, ...)
        block = jax.checkpoint(
            lambda x, *states: nnx.merge(graph, *states)(x), policy=remat.policy(config.remat)
        )
        x = jax.ShapeDtypeStruct((rows, length, config.d_model), config.precision.compute)
        backward = jax.eval_shape(
            lambda x, params, frozen: jax.vjp(
                lambda x, params: block(x, params, frozen), x, params
            )[1],
            *(x, params, frozen),
        )
    return jax.tree.leaves(backward)


def kept_activations(config, rows, length, tp=1):
    """Returns the bytes of a block's residuals on all devices, without weights."""
    return sum(
        array.size * array.dtype.itemsize
        for array in kept(config, rows, length, tp)
        if array.ndim > 2
    )


REARRANGES = (
    "copy",
    "transpose",
    "convert",
    "concatenate",
    "all-gather",
    "all-to-all",
    "pad",
    "reshape",
    "slice",
)
LOOKS_UP = ("gather", "dynamic-slice", "scatter", "dynamic-update-slice")


def bytes_of_a_turn(text, least):
    """Returns what one iteration of a program's outermost loop does with arrays of at least `least`
    bytes: bytes that its instructions read, and the instructions that rearrange one such array into
    another.

    An instruction that gathers from an array, or updates it in place, does not count as reading the
    array; one that adds does not rearrange.
    """
    module, entry = parse_module(text)
    (loop,) = [instruction for instruction in module[entry] if instruction.opcode == "while"]
    body = module[loop.attribute("body")]
    types = {instruction.name: instruction for instruction in body}
    read = 0
    rearranged = []
    for instruction in body:
        if instruction.opcode in ("parameter", "tuple", "get-tuple-element", "bitcast", "constant"):
            continue
        inside = [
            module[callee]
            for callee in instruction.callees
            if instruction.opcode in ("fusion", "call")
        ]
        opcodes = {i.opcode for computation in inside for i in computation} or {instruction.opcode}
        if (
            not opcodes & {"dot", "add", *LOOKS_UP}
            and opcodes & {*REARRANGES}
            and _bytes(instruction.type) >= least
        ):
            rearranged.append(f"{instruction.opcode} {instruction.type} {sorted(opcodes)}")
        for index, (name, _) in enumerate(instruction.operands):
            size = _bytes(types[name].type)
            if size >= least and not any(
                _only_looked_up(computation, index) for computation in inside
            ):
                looked_up = instruction.opcode in LOOKS_UP and index == 0
                read += 0 if looked_up else size
    return read, rearranged


def _bytes(type):
    """Returns the bytes of an array; 0 for a tuple."""
    return 0 if type.startswith("(") else type_bytes(type)


def _only_looked_up(computation, index):
    """Returns whether a fusion only gathers from an argument or updates it in place."""
    (parameter,) = [
        i for i in computation if i.opcode == "parameter" and i.text.startswith(f"{index})")
    ]
    names = {parameter.name}
    users = []
    for instruction in computation:
        if names & {name for name, _ in instruction.operands}:
            if instruction.opcode == "bitcast":
                names.add(instruction.name)
            else:
                users.append(instruction)
    return all(user.opcode in LOOKS_UP and user.operands[0][0] in names for user in users)
