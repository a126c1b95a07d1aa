"""Trying a plan without devices: the abstract model, parallelized for an abstract mesh, is run on abstract arrays."""

from collections.abc import Mapping

import jax
from flax import nnx

from jaxtp.parallel.parallelize import parallelize
from jaxtp.parallel.plan import Plan
from jaxtp.propose.meshes import abstract_mesh
from jaxtp.propose.subject import Subject


def try_plan(subject: Subject, plan: Plan, sizes: Mapping[str, int]) -> None:
    """Traces the call of a model under a plan.

    Args:
      subject: the model, which is not changed, and the call.
      plan: styles by pattern.
      sizes: of the mesh.

    Raises:
      Exception: whatever goes wrong, in the plan or in the model's own code.
    """
    mesh = abstract_mesh(sizes)
    with jax.sharding.use_abstract_mesh(mesh):
        graph, state = nnx.split(parallelize(subject.model(), plan, mesh=mesh))
        jax.eval_shape(lambda state, arrays: subject.run(nnx.merge(graph, state), arrays), state, subject.arrays)
