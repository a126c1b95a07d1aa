"""Tests correctness and speed of the package on one GPU, or on all GPUs of a host.

    python scripts/gpu_acceptance.py --out runs/acceptance

Each part runs in its own process, so a failure affects no other part. `results.json` has the results, which are also
printed as a table; each part writes a log. A part that has passed on these devices and versions is skipped; `--only`
selects parts, and `--again` ignores earlier results. Parts in `--together` run first, at the same time, which affects
their speed. On CPUs all parts run at a small size, which tests the script and not the speed. The script names and omits
parts that this machine cannot run (no second GPU, no torch).
"""

import argparse
import dataclasses
import gzip
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from jaxtp.config.files import write_atomically
from jaxtp.layers.kernels.select import KERNELS, Kernel, Use

Result = dict[str, Any]
SEQUENCE, SECONDS_PER_PART = 4096, 900
STEPS_TOLD, SCORES_FIT = 5, 4096  # longer sequences are not timed in kernels that store all scores
PARTS_OF_A_STEP = ("attention", "mlp", "norm", "embedding", "cross_entropy", "optimizer", "grad_norm", "param_norm")
ONE_B = {"vocab_size": 128256, "d_model": 2048, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64}
ONE_B |= {"d_ff": 8192, "tie_embeddings": True}
EIGHT_B = {"vocab_size": 128256, "d_model": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "d_ff": 14336}
TINY = {"vocab_size": 256, "d_model": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
TINY |= {"d_ff": 128}

ON_DEVICE = ("devices", "attention", "attention-speed", "experts", "ceiling", "float8")
"""Parts that use the device in their own process. The others start processes, which need all of its memory."""

PEERS, PEER_ROWS = ("jaxtp", "transformers"), 2
KINDS = {
    "attention": "attention|fmha|flash|sdpa",
    "product": "gemm|nvjet|cutlass|xmma|dot|cublas",
    "copy": "(?i)mem(cpy|set)",
}
"""Kinds of kernels in a profile, by patterns of their names."""

SMALL = ": everything runs small, and says nothing about speed"
MOST_LAYERS = 8
"""Of the 8B model: a run saves its last state, which takes longer than its steps."""


class LeftOutError(Exception):
    """This machine cannot run a part; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """This machine's devices, as a separate process sees them."""

    platform: str
    kind: str
    count: int
    memory: int
    versions: Mapping[str, str]

    @property
    def is_small(self) -> bool:
        """Whether parts run at a small size."""
        return self.platform == "cpu"

    @property
    def hardware(self) -> str:
        """Returns the device's name in `jaxtp estimate`; h100 for CPUs."""
        from jaxtp.analysis.hardware import of_kind

        found = of_kind(self.kind)
        if found is None and not self.is_small:
            raise LeftOutError(f"jaxtp/analysis/hardware.py does not have {self.kind!r}")
        return "h100" if found is None else found.name


def look() -> Machine:
    """Returns the devices that this process sees."""
    import jax

    first = jax.devices()[0]
    memory = (first.memory_stats() or {}).get("bytes_limit", 0)
    names = ("jax", "jaxlib", "flax", "torch", "transformers")
    versions = {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)}
    return Machine(first.platform, first.device_kind, jax.device_count(), memory, versions)


def run(command: list[str], log: Path, *, codes: tuple[int, ...] = (0,), **environment: str) -> str:
    """Runs a command, appends its output to the log, and returns its output.

    Raises:
      RuntimeError: the exit code is not in `codes`.
    """
    printed = log.with_suffix(".stdout.txt")  # what a process that is killed has printed
    with log.open("a") as told, printed.open("w") as output:
        print("$", *command, file=told, flush=True)
        done = subprocess.run(command, stdout=output, stderr=told, env={**os.environ, **environment})
    errors, text = log.read_text().strip(), printed.read_text()
    with log.open("a") as file:
        file.write(f"{text}\n")
    if done.returncode not in codes:
        raise RuntimeError(f"{' '.join(command[:4])} ... ended with {done.returncode}: {errors[-500:]}")
    return text


def train(out: Path, name: str, settings: Result, log: Path, **environment: str) -> list[Result]:
    """Trains with these settings, and returns the logged steps."""
    folder = out / name
    file = out / f"{name}.yaml"
    settings = {**settings, "run": {"dir": str(folder)}, "checkpoint": {"every": 0}}
    settings.setdefault("eval", {"every": 0, "batches": 1})
    file.write_text(yaml.safe_dump(settings))
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "jaxtp.train", "--config", str(file)], log, **environment)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "step_seconds" in record]


def step_settings(machine: Machine, model: Mapping[str, Any], rows: int, **mesh: int) -> Result:
    """Returns the settings of a run of a few steps."""
    steps, length = (6, 64) if machine.is_small else (16, SEQUENCE)
    return {
        "model": {
            **(TINY if machine.is_small else model),
            "remat": "save_dots",
            "precision": {"compute": "float32" if machine.is_small else "bfloat16"},
        },
        "data": {"sequence_length": length, "global_batch_size": rows, "packing": "documents"},
        "mesh": {"dp": 1, "fsdp": 1, "tp": 1, **mesh},
        "train": {"steps": steps, "log_every": 2},
        "optimizer": {"warmup_steps": 2},
    }


def devices(machine: Machine, out: Path, log: Path) -> Result:
    """Times the self-check of the devices and their collectives."""
    import jax

    from jaxtp.config.entry import NumericsError
    from jaxtp.mesh import make_mesh
    from jaxtp.train.self_check import check_devices, check_outside_of_jit

    mesh = make_mesh(fsdp=jax.device_count())
    started = time.perf_counter()
    try:
        for check in (check_outside_of_jit, check_devices):
            check(mesh, "float32" if machine.is_small else "bfloat16", on_cpu=True)
    except NumericsError as error:
        return {"right": False, "wrong": str(error)}
    return {"right": True, "check_seconds": time.perf_counter() - started}


def allocators(machine: Machine, out: Path, log: Path) -> Result:
    """Trains with each GPU memory allocator, and compares losses; on CPUs the setting has no effect."""
    import jax

    names = ["default", "cuda_async", *(["platform"] if jax.__version_info__ >= (0, 11) else [])]
    found: Result = {}
    losses = []
    for name in names:
        settings = step_settings(machine, ONE_B, 4) | {"launch": {"allocator": name}}
        records = train(out, f"allocator-{name}", settings, log)
        losses.append([record["loss"] for record in records])
        found[f"tokens/s with {name}"] = statistics.median(r["tokens_per_second"] for r in records[len(records) // 2 :])
        found[f"peak bytes with {name}"] = records[-1].get("memory_peak_bytes")
    off = max(abs(a - b) / abs(a) for other in losses[1:] for a, b in zip(losses[0], other, strict=True))
    return {"right": off < 1e-2, "loss_off": off, **found}


def attention_cases(machine: Machine) -> Iterator[tuple[Kernel, Use, tuple[int, int]]]:
    """Yields kernels, uses that they support, and numbers of query and kv heads."""
    import jax

    from jaxtp.layers.kernels.select import architecture_of

    length = 64 if machine.is_small else 1024
    heads = ((64, 64, 4, 1), (128, 128, 8, 2), (192, 128, 4, 4))
    shapes = [("float32", heads[0])] if machine.is_small else [("float32", heads[0]), *(("bfloat16", h) for h in heads)]
    masks = (
        (False, None, None, False, False),
        (False, length // 5, None, False, False),
        (True, None, None, False, False),
        (True, length // 5, 30.0, False, False),
        (True, None, None, True, False),
        (True, length // 5, None, False, True),
        (True, None, None, True, True),
    )
    cases = itertools.product(shapes, masks)
    for (dtype, (head_dim, values, *numbers)), (packed, window, softcap, part, sinks) in cases:
        use = Use(
            head_dim=head_dim,
            value_head_dim=values,
            sinks=sinks,
            window=window,
            softcap=softcap,
            dtype=dtype,
            length=length,
            packed=packed,
            part=part,
            platform=architecture_of(jax.devices()[0]),
        )
        for kernel in KERNELS.values():
            if not any(kernel.problems(use)):
                yield kernel, use, (numbers[0], numbers[1])


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0][:500]


def compare_attention(case: tuple[Kernel, Use, tuple[int, int]]) -> tuple[str, Result]:
    """Returns a name for the case, and the errors of its output and gradients."""
    from jaxtp.train.self_check import TOLERANCE, relative_errors

    kernel, use, heads = case
    what = f"{'packed' if use.packed else 'one text'} {use.window} {use.softcap}{' part' if use.part else ''}"
    name = f"{kernel.name} {use.dtype} {heads[0]}x{use.head_dim}x{use.value_head_dim} {what}{' sinks' * use.sinks}"
    try:
        errors = relative_errors(kernel.run, use, *heads)
    except Exception as error:
        return name, {"failed": first_line(error), "right": False}
    return name, {"errors": errors, "right": max(errors) <= TOLERANCE[str(use.dtype)]}


def attention(machine: Machine, out: Path, log: Path) -> Result:
    """Compares each attention kernel that runs here with plain float32 attention; threads compile at the same time."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(pool.map(compare_attention, attention_cases(machine)))
    wrong = [name for name, one in found.items() if not one["right"]]
    return {"right": not wrong, "cases": len(found), "wrong": ", ".join(wrong) or "none", "kernels": found}


def attention_speed(machine: Machine, out: Path, log: Path) -> Result:
    """Times attention, forward and backward, in two rows with the heads of 8B and 1B models."""
    import jax

    from jaxtp.layers.kernels.select import architecture_of
    from jaxtp.tools.bench.__main__ import medians
    from jaxtp.train.self_check import problem, results

    most = ceiling(machine, out, log)["flops_per_second"]
    found: Result = {}
    shapes = itertools.product((128, 64), (64,) if machine.is_small else (2048, 8192), (False, True))
    for head_dim, length, packed in shapes:
        dtype, platform = "float32" if machine.is_small else "bfloat16", architecture_of(jax.devices()[0])
        use = Use(head_dim=head_dim, dtype=dtype, length=length, packed=packed, platform=platform)
        kernels = [kernel for kernel in KERNELS.values() if not any(kernel.problems(use))]
        if length > SCORES_FIT:
            kernels = [kernel for kernel in kernels if not kernel.stores_scores]
        arrays, settings = problem(use, 32, 8, most=length)
        flops = 7 * 2 * 32 * length**2 * head_dim  # 2 products forward and 5 backward, of half of the scores

        def timed(kernel: Kernel, arrays: Any = arrays, settings: Any = settings, flops: int = flops) -> Result:
            try:
                program = jax.jit(partial(results, kernel.run, settings))
                seconds = medians({"": partial(program, *arrays)}, 5, calls=5)[""]
            except Exception as error:
                return {"failed": first_line(error)}
            return {
                "milliseconds": 1e3 * seconds,
                "tflops": flops / seconds / 1e12,
                "of_product": flops / seconds / most,
            }

        for kernel in kernels:
            name = f"{kernel.name} 32/8 heads of {head_dim}, {length} tokens{', packed' * packed}"
            found[name] = timed(kernel)
            print(name, found[name], file=sys.stderr, flush=True)
    shown = {name: one["milliseconds"] for name, one in found.items() if "milliseconds" in one}
    return {"kernels": found, "ceiling_tflops": most / 1e12, "milliseconds": shown}


def experts(machine: Machine, out: Path, log: Path) -> Result:
    """Compares grouped products of experts, and their gradients, with a float32 loop over experts; times them."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxtp.layers.kernels.grouped import grouped_matmul, unsupported
    from jaxtp.mesh import platform_of
    from jaxtp.tools.bench.__main__ import medians
    from jaxtp.tools.check.parity import relative_error
    from jaxtp.train.self_check import TOLERANCE

    groups, rows, width, features = (4, 64, 16, 24) if machine.is_small else (32, 8192, 2048, 768)
    random = np.random.default_rng(0)
    sizes = random.multinomial(rows - rows // 8, random.dirichlet(np.ones(groups)))  # uneven; some rows have no expert
    ends = np.cumsum(sizes)
    shapes = ((rows, width), (groups, width, features), (rows, features))
    arrays = [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]

    def one_by_one(x: Any, w: Any) -> Any:
        parts = [x[end - size : end] @ w[group] for group, (size, end) in enumerate(zip(sizes, ends, strict=True))]
        return jnp.concatenate([*parts, jnp.zeros((rows - ends[-1], features), x.dtype)])

    def results(multiply: Callable[..., Any], x: Any, w: Any, grad: Any) -> Any:
        y, back = jax.vjp(multiply, x, w)
        return y, *back(grad)

    found: Result = {}
    with jax.default_matmul_precision("highest"):
        for dtype in ("float32", "bfloat16"):
            given = [array.astype(dtype) for array in arrays]
            exact = jax.jit(partial(results, one_by_one))(*(array.astype(jnp.float32) for array in given))
            for method in ("xla", "pallas"):
                if any(unsupported(method, platform_of(jax.devices()[0]))):
                    continue
                multiply = partial(grouped_matmul, sizes_E=jnp.asarray(sizes, jnp.int32), method=method)
                program = partial(jax.jit(partial(results, multiply)), *given)
                errors = [
                    relative_error(np.asarray(a, np.float32), np.asarray(b))
                    for a, b in zip(program(), exact, strict=True)
                ]
                key = f"{method} {dtype}"
                seconds = medians({key: program}, 3)[key]
                found[key] = {"errors": errors, "right": max(errors) <= TOLERANCE[dtype], "milliseconds": 1e3 * seconds}
    return {"right": all(one["right"] for one in found.values()), "products": found}


def numbers(machine: Machine, out: Path, log: Path) -> Result:
    """Trains a small model on the CPU and here in float32 with the highest matmul precision, and compares losses."""
    settings = step_settings(dataclasses.replace(machine, platform="cpu"), TINY, 4)
    settings["train"] = {"steps": 20, "log_every": 1}
    exact = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    here = train(out, "numbers-here", settings, log, **exact)
    there = train(out, "numbers-cpu", settings, log, JAX_PLATFORMS="cpu", **exact)
    off = {
        name: max(abs(a[name] - b[name]) / abs(b[name]) for a, b in zip(here, there, strict=True))
        for name in ("loss", "grad_norm")
    }
    return {"right": off["loss"] < 1e-4 and off["grad_norm"] < 1e-3, "relative_error": off}


def dump_flags(folder: Path) -> str:
    """Returns XLA_FLAGS with which XLA writes compiled steps into a folder."""
    dumps = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*step.*"
    return f"{os.environ.get('XLA_FLAGS', '')} {dumps}"


def step(machine: Machine, out: Path, log: Path, name: str, model: Mapping[str, Any], rows: int = 4) -> Result:
    """Compares time and memory of a training step with `jaxtp estimate`."""
    settings = step_settings(machine, model, rows)
    records = train(out, name, settings, log)
    last = records[len(records) // 2 :]
    names = ("tokens_per_second", "mfu", "memory_peak_bytes")
    measured = {key: statistics.median(r[key] for r in last) for key in names if last[0].get(key) is not None}
    said = out / f"{name}-estimate.json"
    asked = ["--config", str(out / f"{name}.yaml"), "--hardware", f"{machine.hardware}x1", "--mesh", "tp=1"]
    run([sys.executable, "-m", "jaxtp", "estimate", *asked, "--as-configured", "--json", str(said)], log, codes=(0, 1))
    estimated = json.loads(said.read_text())["meshes"][0]
    return {
        **measured,
        "losses": [record["loss"] for record in records[:STEPS_TOLD]],
        "estimated_tokens_per_second": estimated["tokens_per_second_range"],
        "estimated_bytes": estimated["bytes_per_device"]["total"],
        "layers": settings["model"]["num_layers"],
    }


def one_b(machine: Machine, out: Path, log: Path) -> Result:
    """Times a step of 1B parameters."""
    return step(machine, out, log, "step-1b", ONE_B)


def eight_b(machine: Machine, out: Path, log: Path) -> Result:
    """Times a step of an 8B model with as many layers as fit."""
    return step(machine, out, log, "step-8b", {**EIGHT_B, "num_layers": layers_that_fit(machine)}, rows=2)


def layers_that_fit(machine: Machine) -> int:
    """Returns the most layers of an 8B model whose step takes at most 85% of the memory."""
    from jaxtp.config.schema import validate
    from jaxtp.mesh import mesh_shape
    from jaxtp.train.config import TrainConfig
    from jaxtp.train.memory import memory_per_device

    if machine.is_small:
        return 2
    fits = 1
    for layers in range(1, MOST_LAYERS + 1):
        settings = step_settings(machine, {**EIGHT_B, "num_layers": layers}, 2)
        config = validate(TrainConfig, settings, source="the step")
        if memory_per_device(config, mesh_shape(), platform="cuda").total > 0.85 * machine.memory:
            break
        fits = layers
    return fits


def ceiling(machine: Machine, out: Path, log: Path) -> Result:
    """Times one large matrix product, the upper limit of FLOP/s on this device."""
    import jax
    import jax.numpy as jnp

    from jaxtp.tools.bench.__main__ import medians

    size, dtype = (256, "float32") if machine.is_small else (8192, "bfloat16")
    a, b = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in (0, 1))
    product = jax.jit(jnp.matmul)
    seconds = medians({"product": lambda: product(a, b)}, 5, calls=5)["product"]
    return {"flops_per_second": 2 * size**3 / seconds, "size": size, "dtype": dtype}


def need_float8(machine: Machine) -> None:
    from jaxtp.analysis.hardware import find

    if not find(machine.hardware).float8:
        raise LeftOutError(f"{machine.kind} has no products in float8")


def float8(machine: Machine, out: Path, log: Path) -> Result:
    """Times projections of an 8B model, in TFLOP/s, and looks for float8 in the compiled programs."""
    import jax
    import jax.numpy as jnp

    from jaxtp.analysis.hlo import read_float8
    from jaxtp.collectives import Float8
    from jaxtp.layers.float8 import product
    from jaxtp.tools.bench.__main__ import medians

    need_float8(machine)
    model, tokens = (TINY, 64) if machine.is_small else (EIGHT_B, 2 * SEQUENCE)
    hidden, width = model["d_model"], model["d_ff"]
    heads = (model["num_heads"] + 2 * model["num_kv_heads"]) * model["head_dim"]
    found: Result = {}
    missed, errors = [], []
    for name, (inner, outer) in {
        "q, k, v": (hidden, heads),
        "gate, up": (hidden, 2 * width),
        "down": (width, hidden),
    }.items():
        x, w = (
            jax.random.normal(jax.random.key(i), s, "bfloat16") for i, s in enumerate(((tokens, inner), (inner, outer)))
        )
        quantised = Float8.of(x, dim=-1), Float8.of(w)
        cases: dict[str, tuple[Callable[..., Any], tuple[Any, Any]]] = {
            "16 bits": (jnp.matmul, (x, w)),
            "float8": (lambda x, w: product(x, w, "bfloat16"), quantised),
            "float8, quantising": (lambda x, w: product(Float8.of(x, dim=-1), Float8.of(w), "bfloat16"), (x, w)),
        }
        programs = {}
        for way, (multiply, operands) in cases.items():
            compiled = jax.jit(multiply).lower(*operands).compile()
            programs[way] = partial(compiled, *operands)
            in_float8, wrong = read_float8(compiled.as_text() or "")
            if way != "16 bits" and (wrong or not in_float8) and name not in missed:
                missed.append(name)
        for way, seconds in medians(programs, 5, calls=5).items():
            found[f"{name} in {way}"] = 2e-12 * tokens * inner * outer / seconds
        right, ours = (programs[way]().astype("float32") for way in ("16 bits", "float8"))
        errors.append(float(jnp.linalg.norm(ours - right) / jnp.linalg.norm(right)))
    is_right = max(errors) < 0.05 and (machine.is_small or not missed)
    return {"right": is_right, **found, "largest error": max(errors), "not in float8": ", ".join(missed) or "none"}


def float8_step(machine: Machine, out: Path, log: Path) -> Result:
    """Trains in both dtypes: times a step of an 8B model's width, and compares the loss of a tiny model."""
    from jaxtp.analysis.hlo import read_float8

    need_float8(machine)
    found: Result = {}
    losses = []
    for matmul in ("compute", "float8"):
        settings = step_settings(machine, {**EIGHT_B, "num_layers": min(4, layers_that_fit(machine))}, 2)
        settings["model"]["precision"] |= {"matmul": matmul, "matmul_least": 16}
        dumps, cache = dump_flags(out / f"{matmul}-programs"), {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        records = train(out, f"float8-{matmul}", settings, log, XLA_FLAGS=dumps, **cache)
        found[f"tokens/s in {matmul}"] = statistics.median(r["tokens_per_second"] for r in records[len(records) // 2 :])
        found[f"peak bytes in {matmul}"] = records[-1].get("memory_peak_bytes")
        tiny = step_settings(dataclasses.replace(machine, platform="cpu"), TINY, 4)
        tiny["model"]["precision"] = settings["model"]["precision"]
        tiny["train"] = {"steps": 20 if machine.is_small else 200, "log_every": 1}
        losses.append(statistics.mean(record["loss"] for record in train(out, f"tiny-{matmul}", tiny, log)[-10:]))
    read = [read_float8(file.read_text()) for file in (out / "float8-programs").glob("*after_optimizations.txt")]
    in_float8, missed = sum(right for right, _ in read), {layer: "" for _, wrong in read for layer in wrong}
    off = abs(losses[1] - losses[0]) / losses[0]
    is_right = off < 3e-2 and (machine.is_small or (in_float8 > 0 and not missed))
    shown = {"loss_off": off, "products in float8": in_float8, "not in float8": ", ".join(missed) or "none"}
    return {"right": is_right, **shown, "losses": losses, **found}


def need_torch() -> None:
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise LeftOutError(f"{' and '.join(missing)} not installed")


def peer(machine: Machine, out: Path, log: Path) -> Result:
    """Times the 1B model in two remat policies, alternating with compiled transformers in two settings."""
    need_torch()
    found: Result = {}

    def attempted(name: str, tokens_per_second: Callable[[], float]) -> None:
        try:
            found[name] = tokens_per_second()
        except RuntimeError as error:
            found[f"{name} failed"] = str(error)[-300:]
        print(name, found, file=sys.stderr, flush=True)

    def ours(remat: str) -> float:
        settings = step_settings(machine, ONE_B, PEER_ROWS)
        settings["model"]["remat"], settings["data"]["packing"] = remat, "concatenated"
        records = train(out, f"peer-{remat}", settings, log)
        return statistics.median(record["tokens_per_second"] for record in records[len(records) // 2 :])

    def theirs(checkpointing: bool) -> float:
        model, length = (TINY, 64) if machine.is_small else (ONE_B, SEQUENCE)
        said = run([sys.executable, __file__, "--torch", json.dumps([model, length, PEER_ROWS, checkpointing])], log)
        return json.loads(said.splitlines()[-1])["tokens_per_second"]

    for remat, checkpointing in (("save_dots", False), ("none", True)):
        attempted(f"jaxtp {remat}", partial(ours, remat))
        attempted(
            f"transformers {'with' if checkpointing else 'without'} checkpointing", partial(theirs, checkpointing)
        )
    speeds = {who: [v for k, v in found.items() if k.startswith(who) and isinstance(v, float)] for who in PEERS}
    ratio = {"ratio of the fastest": max(speeds[PEERS[0]]) / max(speeds[PEERS[1]])} if all(speeds.values()) else {}
    return found | ratio


def llama(model: Mapping[str, Any]) -> Any:
    """Returns the model in transformers, with random weights, on the device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=model["vocab_size"],
        hidden_size=model["d_model"],
        num_hidden_layers=model["num_layers"],
        num_attention_heads=model["num_heads"],
        num_key_value_heads=model["num_kv_heads"],
        head_dim=model["head_dim"],
        intermediate_size=model["d_ff"],
        tie_word_embeddings=model.get("tie_embeddings", False),
        attn_implementation="sdpa",
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return LlamaForCausalLM(config)


def torch_step(model: Mapping[str, Any], length: int, rows: int, checkpointing: bool) -> Result:
    """Returns the tokens per second of training the model in transformers, AdamW included."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    network = llama(model).train()
    if checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    optimizer = torch.optim.AdamW(network.parameters(), fused=device == "cuda")
    compiled = torch.compile(network) if device == "cuda" else network
    ids = torch.randint(0, model["vocab_size"], (rows, length), device=device)

    def update() -> None:
        with torch.autocast(device, torch.bfloat16), sdpa_kernel(backends, set_priority=True):
            loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    for _ in range(3):
        update()
    times = []
    for _ in range(3 if device == "cpu" else 10):
        start = time.perf_counter()
        update()
        times.append(time.perf_counter() - start)
    return {"tokens_per_second": rows * length / sorted(times)[len(times) // 2]}


def generate(machine: Machine, out: Path, log: Path) -> Result:
    """Compares prefill and decode of the 1B model with transformers, in bfloat16 with random weights."""
    need_torch()
    from generate_beside_transformers import Worker, compare
    from tokenizers import Tokenizer, models

    found: Result = {}
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # both libraries are on the device
    with tempfile.TemporaryDirectory() as folder:
        model = (TINY | {"vocab_size": 2048}) if machine.is_small else ONE_B
        run([sys.executable, __file__, "--save", json.dumps([model, folder])], log)
        words = {str(i): i for i in range(model["vocab_size"])}
        Tokenizer(models.WordLevel(words, unk_token="0")).save(f"{folder}/tokenizer.json")
        workers = {name: Worker(sys.executable, name, folder, "bfloat16") for name in PEERS}
        for rows in (1, 8):
            length, tokens = (16, 8) if machine.is_small else (512, 128)
            rates = compare(workers, rows, length, tokens, 3)
            for (who, speeds), (i, what) in itertools.product(rates.items(), enumerate(("prefill", "decode"))):
                found[f"{who} {what} {rows} x {length}, tokens/s"] = speeds[i]
            print(found, file=sys.stderr, flush=True)
        for worker in workers.values():
            worker.end()
    return found


def save(model: Mapping[str, Any], folder: str) -> None:
    """Writes random weights of the model in bfloat16, as transformers does."""
    import torch

    llama(model).to(torch.bfloat16).save_pretrained(folder)


def profile(machine: Machine, out: Path, log: Path) -> Result:
    """Profiles two steps of the 1B model, and sums the time of operations by module and by kind of kernel."""
    settings = step_settings(machine, ONE_B, 4) | {"profile": {"start": 3, "steps": 2}}
    settings["train"]["steps"] = 5
    by_kernel = "" if machine.is_small else " --xla_gpu_enable_command_buffer="  # kernels of a CUDA graph have no names
    train(out, "profile", settings, log, XLA_FLAGS=f"{dump_flags(out / 'profile-programs')}{by_kernel}")
    (trace,) = (out / "profile" / "profile").rglob("perfetto_trace.json.gz")
    shutil.copy(trace, out / "profile-trace.json.gz")
    return summed(json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"], operation_names(out))


def operation_names(out: Path) -> dict[str, str]:
    """Returns the name that JAX gave to each operation of the compiled step; of a fusion, its operations' names."""
    files = list((out / "profile-programs").glob("*after_optimizations.txt"))
    text = max((file.read_text() for file in files), key=len, default="")
    names: dict[str, str] = {}
    inside: dict[str, str] = {}
    for computation in re.split(r"\n\n", text):
        title = re.match(r"\s*(?:ENTRY )?%?([\w.-]+)", computation)
        inside[title[1] if title else ""] = " ".join(re.findall(r'op_name="([^"]*)"', computation))
    for line in text.splitlines():
        found = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = ", line)
        called = re.search(r"calls=%?([\w.-]+)", line)
        if found:
            own = " ".join(re.findall(r'op_name="([^"]*)"', line))
            names[found[1]] = own or (inside.get(called[1], "") if called else "")
    return names


def summed(events: list[Result], names: Mapping[str, str]) -> Result:
    """Returns a trace's time by module and by kind of kernel, and the share of time without any."""
    labels: dict[tuple[Any, ...], str] = {}
    for event in events:
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name"):
            whose = (event["pid"],) if event["name"] == "process_name" else (event["pid"], event.get("tid"))
            labels[whose] = event["args"]["name"]

    def is_stream(event: Result) -> bool:
        thread = labels.get((event["pid"], event.get("tid")), "")
        return "Stream" in thread and "/device:GPU" in labels.get((event["pid"],), "")

    timed = [event for event in events if event.get("ph") == "X"]
    chosen = [event for event in timed if is_stream(event)]  # a GPU; operations of CPUs run in threads of the host
    chosen = chosen or [event for event in timed if "hlo_op" in (event.get("args") or {})]
    modules, kinds = Counter[str](), Counter[str]()
    for event in chosen:
        about = event.get("args") or {}
        operations = str(about.get("hlo_op", "")).split("/")
        told = [about.get(key, "") for key in ("name", "tf_op", "long_name")] + [names.get(op, "") for op in operations]
        path, spent = f"{told} {event['name']}", event.get("dur", 0)
        modules[next((part for part in PARTS_OF_A_STEP if part in path), "other")] += spent
        kinds[next((kind for kind, name in KINDS.items() if re.search(name, event["name"])), "other")] += spent
    total = sum(modules.values()) or 1
    ends = [(event["ts"], event["ts"] + event.get("dur", 0)) for event in chosen]
    span = max(end for _, end in ends) - min(start for start, _ in ends) if ends else 1
    return {
        "microseconds": dict(modules),
        "shares": {name: spent / total for name, spent in modules.most_common()},
        "kernels": {name: spent / total for name, spent in kinds.most_common()},
        "busy": total / span,
    }


def several(machine: Machine, out: Path, log: Path) -> Result:
    """Measures the bandwidth between devices, and steps at each tp with and without ring overlap."""
    if machine.count < 2:
        raise LeftOutError("there is one device")
    file = str(out / "hardware.yaml")
    run([sys.executable, "-m", "jaxtp", "bench", "comm", "--like", machine.hardware, "--out", file], log)
    found: Result = {"hardware": yaml.safe_load((out / "hardware.yaml").read_text())}
    for tp, overlap in itertools.product((tp for tp in (2, 4, 8) if tp <= machine.count), ("none", "ring")):
        settings = step_settings(machine, EIGHT_B | {"num_layers": 8}, 4, tp=tp)
        settings["model"]["overlap"] = overlap
        records = train(out, f"tp-{tp}-{overlap}", settings, log)
        measured = (record["tokens_per_second"] for record in records[len(records) // 2 :])
        found[f"tokens/s at tp {tp}{' with rings' * (overlap == 'ring')}"] = statistics.median(measured)
    return found


PARTS: dict[str, Callable[[Machine, Path, Path], Result]] = {
    "devices": devices,
    "attention": attention,
    "attention-speed": attention_speed,
    "experts": experts,
    "numbers": numbers,
    "allocators": allocators,
    "step-1b": one_b,
    "step-8b": eight_b,
    "ceiling": ceiling,
    "float8": float8,
    "float8-step": float8_step,
    "peer": peer,
    "generate": generate,
    "profile": profile,
    "several": several,
}


def attempt(name: str, out: Path, machine: Result, most: int, **environment: str) -> Result:
    """Runs a part in its own process for at most `most` seconds, and returns its result."""
    started, log = time.perf_counter(), out / f"{name}.log"
    log.write_text("")
    command = [sys.executable, __file__, "--out", str(out), "--part", name]
    command += ["--machine", json.dumps(machine)]
    pipes: Result = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": {**os.environ, **environment}}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        try:
            printed, errors = process.communicate(timeout=most)
        except BaseException as ended:
            os.killpg(process.pid, signal.SIGKILL)  # also kills its children, which would occupy the GPU
            if isinstance(ended, subprocess.TimeoutExpired):
                printed, errors = process.communicate()
                with log.open("a") as file:
                    file.write(printed + errors)
                return {"failed": f"it took more than {most} s"}
            raise
    with log.open("a") as file:
        file.write(printed + errors)
    try:
        found = json.loads(printed.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        found = {"failed": (errors.strip().splitlines() or ["no output"])[-1][:500]}
    return {**found, "seconds": time.perf_counter() - started}


def part(name: str, out: Path, machine: Machine) -> Result:
    """Runs a part in this process, and returns its result."""
    import jax

    if name not in ON_DEVICE:
        jax.config.update("jax_platforms", "cpu")
    try:
        return PARTS[name](machine, out, out / f"{name}.log")
    except LeftOutError as reason:
        return {"left_out": str(reason)}


def attempts(names: list[str], together: list[str], run_part: Callable[..., Result]) -> Iterator[tuple[str, Result]]:
    """Yields the result of each part as it ends; those in `together` run first, at the same time."""
    first = [name for name in names if name in together]
    with ThreadPoolExecutor(len(first) or 1) as pool:
        running = {pool.submit(run_part, name, XLA_PYTHON_CLIENT_PREALLOCATE="false"): name for name in first}
        for future in as_completed(running):
            yield running[future], future.result()
    for name in names:
        if name not in first:
            yield name, run_part(name)


def row(name: str, result: Result) -> str:
    for key, verdict in (("left_out", "left out"), ("failed", "FAILED")):
        if key in result:
            return f"{name:<16}{verdict:<10}{result[key]}"
    shown = {key: value for key, value in result.items() if isinstance(value, int | float | str) and key != "right"}
    shown |= {**result.get("relative_error", {}), **result.get("shares", {}), **result.get("milliseconds", {})}
    told = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items())
    return f"{name:<16}{'WRONG' if result.get('right') is False else 'ok':<10}{', '.join(told)}"


def earlier(file: Path, machine: Result) -> dict[str, Result]:
    """Returns the earlier results of this machine; none if the file is from another machine or damaged."""
    try:
        kept = json.loads(file.read_text())
        if all(kept["machine"][name] == machine[name] for name in ("kind", "count", "versions")):
            return {name: result for name, result in kept["parts"].items() if isinstance(result, dict)}
        print(f"{file} is of {kept['machine']['count']} x {kept['machine']['kind']}, or other versions: all runs again")
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, KeyError, AttributeError):
        print(f"{file} cannot be read: all runs again")
    return {}


def has_passed(result: Result | None) -> bool:
    """Returns whether a part's result need not be repeated."""
    return result is not None and not {"failed", "left_out"} & result.keys() and result.get("right") is not False


def main() -> int:
    """Runs the parts without a result; returns 1 if one fails or has wrong numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/acceptance"), help="folder of results and logs")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts to run")
    parser.add_argument("--again", action="store_true", help="also run parts that have a result")
    parser.add_argument("--together", nargs="+", choices=list(PARTS), default=[], help="parts to run at the same time")
    parser.add_argument("--seconds", type=int, default=SECONDS_PER_PART, help="longest time of a part")
    parser.add_argument("--machine", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--torch", help=argparse.SUPPRESS)
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.torch:
        print(json.dumps(torch_step(*json.loads(given.torch))))
        return 0
    if given.save:
        save(*json.loads(given.save))
        return 0
    if given.look:
        print(json.dumps(dataclasses.asdict(look())))
        return 0
    if given.part:
        print(json.dumps(part(given.part, given.out, Machine(**given.machine))))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the processes of a part too
    machine = json.loads(run([sys.executable, __file__, "--out", str(given.out), "--look"], given.out / "look.log"))
    print(
        f"{machine['count']} x {machine['kind']}, {machine['versions']}{SMALL if machine['platform'] == 'cpu' else ''}"
    )
    file = given.out / "results.json"
    results = {} if given.again and given.only == list(PARTS) else earlier(file, machine)
    wanted = [name for name in given.only if given.again or not has_passed(results.get(name))]
    for name, result in attempts(
        wanted, given.together, partial(attempt, out=given.out, machine=machine, most=given.seconds)
    ):
        results[name] = result
        write_atomically(file, json.dumps({"machine": machine, "parts": results}, indent=1).encode())
        print(row(name, result), flush=True)
    for name in given.only:
        if name not in wanted:
            print(row(name, results[name]))
    bad = [name for name, result in results.items() if "failed" in result or result.get("right") is False]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
