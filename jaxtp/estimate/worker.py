"""Compiles a training step for a target, there or not, and prints what came out; `estimate.target` starts it.

    jaxtp estimate.worker < request.json

A compiler that is asked for devices that are not there may crash, hang or print, so it gets a process of its own.
"""

import hashlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

import jaxtp
from jaxtp.audit.hlo import count_flops_in_hlo
from jaxtp.audit.schedule import read_schedule
from jaxtp.audit.text import HloError
from jaxtp.config import validate
from jaxtp.mesh import mesh_of
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig
from jaxtp.train.state import plan_state
from jaxtp.train.step import trace_step

ABSENT_GPU = {"xla_gpu_autotune_level": 0}
"""There is none to time kernels on."""

_FORMAT = "5"
"""Version of the format of an answer, for those that are kept."""


def main() -> None:
    """Reads a request, prints the answer on one line; a new one says where it should be kept for the next time."""
    request = json.load(sys.stdin)
    config = validate(TrainConfig, request["config"], source="request")
    target = request["target"]
    mesh = _mesh(target, request["sizes"])
    lowered = _lower(config, mesh)
    place = Path(request["cache"]) / f"{_key(lowered, target, request['sizes'])}.json"
    if place.exists():
        print(place.read_text())
    else:
        print(json.dumps({**_compile(lowered, target, request["sizes"]), "keep": str(place)}))


def _mesh(target: dict[str, Any], sizes: dict[str, int]) -> Mesh:
    if target["here"]:
        return mesh_of(sizes, jax.devices()[: math.prod(sizes.values())])
    own = {"topology": target["name"], "target_config": target["target_config"]}  # GPUs are described by options
    described = topologies.get_topology_desc(
        target["name"], target["platform"], **(own if target["platform"] == "cuda" else {})
    )
    return mesh_of(sizes, described.devices)


def _lower(config: TrainConfig, mesh: Mesh) -> Any:
    blueprint = plan_state(config.model, optimizers.build(config.optimizer, config.train.steps), mesh)
    with jax.set_mesh(mesh):
        return trace_step(config, blueprint).lower()


def _key(lowered: Any, target: dict[str, Any], sizes: dict[str, int]) -> str:
    """Returns a hash of the program, the target and the versions that decide what comes out."""
    parts = (lowered.as_text(), json.dumps([target, sizes]), jax.__version__, jaxtp.__version__, _FORMAT)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _compile(lowered: Any, target: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    options = ABSENT_GPU if target["platform"] == "cuda" and not target["here"] else {}
    started = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"error": f"the compiler says that it does not fit: {str(error).splitlines()[0][:300]}", "fits": False}
    seconds, text = time.perf_counter() - started, compiled.as_text()
    return {
        "seconds": seconds,
        **_memory(compiled, target["platform"]),
        "collectives": [one.record() for one in read_schedule(text, sizes)],
        "flops": _flops(text, target),
    }


def _flops(text: str, target: dict[str, Any]) -> int | None:
    """Returns the operations of products in a program for absent GPUs; None of others, which call libraries."""
    if target["here"] or target["platform"] != "cuda":
        return None
    try:
        return count_flops_in_hlo(text)
    except HloError:
        return None


def _memory(compiled: Any, platform: str) -> dict[str, int]:
    """Returns the sizes of a program; a GPU's temporaries are one block, a TPU's report has what is alive at once."""
    stats = compiled.memory_analysis()
    arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    block = arguments + temporaries + stats.output_size_in_bytes - stats.alias_size_in_bytes
    alive = stats.peak_memory_in_bytes
    peak = alive if platform == "tpu" else block
    return {"argument_bytes": arguments, "temp_bytes": temporaries, "alive_bytes": alive, "peak_bytes": peak}


if __name__ == "__main__":
    main()
