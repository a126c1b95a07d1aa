"""Examines the attention kernels of tokamax for Hopper without a GPU.

    python scripts/tokamax_absent.py

1. Interprets the kernels on the CPU, and prints the relative errors of the output and gradients
   beside `xla` in float32; rounding explains 2e-2 in bfloat16 (`guards/self_check.py`).
2. Compiles the kernels for an absent H100, and prints what ptxas reports of each.
3. Compiles a step with packed rows for eight absent H100s, with `fused` and with `tokamax`.

It needs Python 3.12, `jaxtp[tokamax,estimate-gpu]` and ptxas. The interpreter of jax 0.12 knows the
barriers that tokamax uses between warpgroups. Three things it lacks are added here: barriers of a
single warp, products whose left side is in registers, and accumulators with an initial value.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tokamax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jax.extend import backend
from jax.sharding import SingleDeviceSharding
from parts import peak_gib
from step_beside_plain import MODELS, model_of, our_config

from jaxtp.analysis.tables import columns
from jaxtp.config.schema import replace_nested
from jaxtp.guards.self_check import relative_errors, results
from jaxtp.layers.kernels.select import KERNELS, Use
from jaxtp.mesh import AXES, describe_mesh, mesh_of
from jaxtp.tools.estimate.compiler import ABSENT_GPU, TARGET_CONFIGS, Topology
from jaxtp.train.setup import plan_step

CASES = {
    "packed, grouped heads": (Use(head_dim=64, packed=True), 4, 2),
    "packed, window": (Use(head_dim=64, packed=True, window=40), 2, 1),
    "window, softcap, one document": (
        Use(head_dim=128, packed=False, window=40, softcap=30.0),
        2,
        2,
    ),
    "packed, narrow values, odd width": (Use(head_dim=72, value_head_dim=40, packed=True), 2, 1),
}
MESH = dict(zip(AXES, (1, 2, 1, 4), strict=True))
MODEL = {**MODELS["8b"], "num_layers": 4, "head_dim": 128, "remat": "save_dots"}
MODEL |= {"precision": {"compute": "bfloat16", "reduce": "bfloat16"}}
LENGTH = 300  # two tiles of queries and a part of another
REPORT = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads\n.*Used (\d+) registers")


def h100() -> Any:
    return Topology(name="1x1x8", target_config=TARGET_CONFIGS["h100"]).devices()


@contextmanager
def interpreted(device: Any) -> Iterator[None]:
    """Interprets Mosaic kernels as they are traced for the device."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.pallas.mosaic_gpu.interpret.params import (
        InterpretGPUParams,
        force_gpu_interpret_mode,
    )
    from tokamax._src import mosaic_gpu as operations

    def read(memory: Any, thread: Any, key: jax.Array, transforms: Any) -> tuple[Any, Any, Any]:
        if key.ndim == 2:  # an array in registers
            return np.asarray(key, np.float32), None, None
        found = gpu_callbacks.HostAllocationKey.from_array(key)
        kept = gpu_callbacks._remove_noop_transforms(transforms)
        part = memory.access(found, jax.tree.map(int, kept))
        content, *_ = memory.get_buffer_content(found, part, thread, logging_info=None)
        return np.asarray(content, np.float32), found, part

    @gpu_callbacks.fail_on_exception
    def multiply(*, token: Any, thread: Any, **given: Any) -> Any:
        memory = gpu_callbacks._get_shared_memory()
        a, b, accumulator = (
            read(memory, thread, given[f"{x}_allocation_key_as_array"], given[f"{x}_transforms"])
            for x in ("a", "b", "acc")
        )
        total, key, part = accumulator
        total = total + a[0] @ b[0]
        memory.store_buffer_content(key, part, total, thread, logging_info=None)
        return token

    @gpu_callbacks.fail_on_exception
    def meet(
        token: Any, place: Any, thread: Any, name: Any, *, num_threads: int, **given: Any
    ) -> Any:
        memory = gpu_callbacks._get_shared_memory()
        barrier = memory.named_barrier(thread, int(name), num_threads // 128)
        barrier.arrive(thread, None, None)
        if given["sync"]:
            barrier.wait(thread, None)
        return token

    def with_whole_groups(operation: Any) -> Any:
        # The interpreter counts warpgroups, of which a warp is one here.
        return lambda name, num_threads: operation(name, num_threads=-(-num_threads // 128) * 128)

    def run_state(body: Any) -> Any:
        def run(initial: tuple[Any, Any]) -> tuple[Any, Any]:
            accumulator, total = initial

            def accumulate(ref: Any) -> Any:
                body((ref, None))
                return ref[...]

            shape = mosaic_gpu.ACC(accumulator.shape, accumulator.dtype)
            return accumulator._init + pl.run_scoped(accumulate, shape), total

        return run

    put = mock.patch.object
    with ExitStack() as stack:
        for name in ("bar_arrive", "bar_sync"):
            whole = with_whole_groups(getattr(operations, name))
            stack.enter_context(put(operations, name, whole))
        stack.enter_context(put(gpu_callbacks, "wgmma", multiply))
        stack.enter_context(put(gpu_callbacks, "_named_barrier", meet))
        stack.enter_context(put(pl, "run_state", run_state))
        stack.enter_context(put(backend, "get_default_device", return_value=device))
        modelled = InterpretGPUParams(inline_mgpu="_hack_model_inline_mgpu_tokamax")
        stack.enter_context(force_gpu_interpret_mode(modelled))
        yield


def errors(device: Any) -> Iterator[tuple[str, ...]]:
    for name, (use, *heads) in CASES.items():
        case = replace(use, dtype="bfloat16", length=LENGTH)
        with interpreted(device):
            found = relative_errors(KERNELS["tokamax"].run, case, *heads)
        yield name, *(f"{error:.1e}" for error in found)


def compiled(head_dim: int) -> None:
    """Compiles the kernels for 2 x 2048 tokens; ptxas prints its report."""
    device = h100()[0]
    on_device = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    use = Use(head_dim=head_dim)
    q, k = (on_device((2, 2048, heads, head_dim), jnp.bfloat16) for heads in (32, 8))

    def attend(segments: Any, *arrays: Any) -> Any:
        settings = {"segments_BT": segments, "window": None, **use.scores}
        return results(KERNELS["tokamax"].run, settings, *arrays)

    with jax.default_device(device):
        lowered = jax.jit(attend).lower(on_device((2, 2048), jnp.int32), q, k, k, q)
        lowered.compile(ABSENT_GPU)


def reports(head_dim: int) -> Iterator[tuple[str, ...]]:
    environment = {**os.environ, "MOSAIC_GPU_DUMP_PTXAS": "1"}
    command = [sys.executable, __file__, "--head-dim", str(head_dim)]
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = REPORT.findall(text.stdout + text.stderr)
    for kernel, (stores, loads, registers) in zip(
        ("forward", "keys", "queries"), found, strict=True
    ):
        yield str(head_dim), kernel, registers, stores, loads


def steps() -> Iterator[tuple[str, ...]]:
    config = our_config(model_of(MODEL), 8, 4096)
    config = replace_nested(config, {"data.packing": "documents"})
    mesh = mesh_of(MESH, h100())
    for name in ("fused", "tokamax"):
        plan = plan_step(replace_nested(config, {"model.attention": name}))
        with jax.default_device(h100()[0]):
            traced = plan.trace_on(mesh)
            with jax.set_mesh(mesh):
                program = traced.lower().compile(ABSENT_GPU)
        text = program.as_text()
        calls = len(re.findall('custom_call_target="mosaic_gpu', text))
        yield name, str(calls), f"{peak_gib(program):.2f}"


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    if "--head-dim" in sys.argv:
        compiled(int(sys.argv[-1]))
        return
    print(f"jax {jax.__version__}, tokamax {tokamax.__version__}, kernels of sm90\n")
    header = ("relative error", "output", "queries", "keys", "values")
    print(columns(header, list(errors(h100()[0]))), flush=True)
    rows = [row for width in (64, 128) for row in reports(width)]
    header = ("head_dim", "kernel", "registers", "bytes spilled", "bytes reloaded")
    print(f"\n{columns(header, rows)}", flush=True)
    header = (f"packed step, {describe_mesh(MESH)}", "calls of Mosaic", "peak GiB")
    print(f"\n{columns(header, list(steps()))}")


if __name__ == "__main__":
    main()
