"""Examines devices, kernels, versions, processes and the folder of a run, stage by stage.

A run raises the first error (`finding.conclude`); `jaxtp doctor` shows all findings.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from jax.sharding import Mesh

from jaxtp.distributed.agreement import is_multiprocess
from jaxtp.guards.finding import Finding, findings
from jaxtp.guards.known_versions import check_versions
from jaxtp.guards.preflight import check_folder, check_processes
from jaxtp.guards.self_check import (
    Case,
    check_attention,
    check_collectives,
    check_devices,
    check_outside_of_jit,
)


def examine(
    mesh: Mesh,
    settings: Mapping[str, Mapping[str, object]],
    folder: Callable[[], Path],
    *,
    dtypes: Sequence[str],
    attention: Iterable[Case],
    tp_across_hosts: bool = False,
    is_shared: bool = True,
    computes: bool = True,
) -> Iterator[list[Finding]]:
    """Yields this process's findings by stage; all processes must take the same stages.

    Args:
      settings: JSON values by name, in which all processes have to agree.
      folder: returns the folder of runs, which it may make: nothing else is wrong at this stage.
      dtypes: compute dtypes of products.
      attention: kernels to compare with plain attention.
      tp_across_hosts: whether a tp group may span hosts.
      is_shared: whether the folder has to be the same one for all processes.
      computes: whether to compare operations and kernels with the host.
    """
    first = mesh.local_devices[0]
    if computes:
        yield _stage("devices", lambda: check_outside_of_jit(mesh, dtypes))
        yield _stage(
            "attention", lambda: chain(*(check_attention(first, *case) for case in attention))
        )
    yield check_versions(first)
    if is_multiprocess():
        compared = check_processes(mesh, settings, tp_across_hosts=tp_across_hosts)
        yield compared
        if any(finding.error for finding in compared):
            # Collectives of processes that differ may wait for ever.
            yield [Finding("collectives", "all", "the processes differ", "--")]
            return
    yield check_folder(folder(), is_shared=is_shared)
    if computes:
        yield _stage("devices", lambda: check_devices(mesh, dtypes))
    if computes or is_multiprocess():
        yield _stage("collectives", lambda: check_collectives(mesh))


def _stage(area: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    stage: list[Finding] = []
    try:
        stage += check()
    # Of JAX and XLA: a program does not compile or run.
    except (RuntimeError, NotImplementedError) as error:
        stage += findings(area, "its program", [error])
    return stage
