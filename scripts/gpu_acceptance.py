"""Tests correctness and speed of the package on one GPU, or on all GPUs of a host.

    python scripts/gpu_acceptance.py --out runs/acceptance

Each part runs in its own process, so a failure affects no other part. `results.json` has the results, which are also
printed as a table; each part writes a log. A part that has passed on these devices and versions is skipped; `--only`
selects parts, and `--again` ignores earlier results. On CPUs all parts run at a small size, which tests the script and
not the speed. The script names and omits parts that this machine cannot run (no second GPU, no torch).
"""

import argparse
import dataclasses
import gzip
import importlib.metadata
import importlib.util
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from jaxtp.config.files import write_atomically

Result = dict[str, Any]
SEQUENCE, SECONDS_PER_PART = 4096, 900
PARTS_OF_A_STEP = ("attention", "mlp", "norm", "embedding", "cross_entropy", "optimizer", "grad_norm", "param_norm")
ONE_B = {"vocab_size": 128256, "d_model": 2048, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64}
ONE_B |= {"d_ff": 8192, "tie_embeddings": True}
EIGHT_B = {"vocab_size": 128256, "d_model": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "d_ff": 14336}
TINY = {"vocab_size": 256, "d_model": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
TINY |= {"d_ff": 128}


SMALL = ": everything runs small, and says nothing about speed"


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
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\n")
    if done.returncode not in codes:
        raise RuntimeError(f"{' '.join(command[:4])} ... ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


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
    steps, length = (6, 64) if machine.is_small else (30, SEQUENCE)
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


def attention(machine: Machine, out: Path, log: Path) -> Result:
    """Compares each attention kernel that runs here with plain float32 attention, and times it."""
    import jax

    from jaxtp.layers.kernels.select import KERNELS, Use
    from jaxtp.mesh import platform_of
    from jaxtp.tools.bench.__main__ import medians
    from jaxtp.train.self_check import TOLERANCE, problem, relative_errors, results

    found: Result = {}
    length = 64 if machine.is_small else 1024
    dtypes, heads = (("float32", "bfloat16"), ((64, 64, 4, 1), (128, 128, 8, 2), (192, 128, 4, 4)))
    masks = (
        (False, None, None, False, False),
        (True, None, None, False, False),
        (True, length // 5, 30.0, False, False),
        (True, None, None, True, False),
        (True, length // 5, None, False, True),
        (True, None, None, True, True),
    )
    cases = itertools.product(dtypes[: 1 if machine.is_small else 2], heads[: 1 if machine.is_small else 3], masks)
    for dtype, (head_dim, values, queries, keys), (packed, window, softcap, part, sinks) in cases:
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
            platform=platform_of(jax.devices()[0]),
        )
        for kernel in (kernel for kernel in KERNELS.values() if not any(kernel.problems(use))):
            errors = relative_errors(kernel.run, use, queries, keys)
            arrays, settings = problem(use, queries, keys)
            program = partial(jax.jit(partial(results, kernel.run, settings)), *arrays)
            what = f"{'packed' if packed else 'one text'} {window}{' part' if part else ''}{' sinks' if sinks else ''}"
            key = f"{kernel.name} {dtype} {queries}x{head_dim}x{values} {what}"
            seconds = medians({key: program}, 3)[key]
            found[key] = {"errors": errors, "right": max(errors) <= TOLERANCE[dtype], "milliseconds": 1e3 * seconds}
    return {"right": all(one["right"] for one in found.values()), "kernels": found}


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
    for layers in range(1, 33):
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


def peer(machine: Machine, out: Path, log: Path) -> Result:
    """Times the 1B model in compiled transformers, alternating with jaxtp."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise LeftOutError(f"{' and '.join(missing)} not installed")
    rounds = []
    for turn in range(1 if machine.is_small else 2):
        ours = step(machine, out, log, f"peer-ours-{turn}", ONE_B)["tokens_per_second"]
        asked = [TINY, 64] if machine.is_small else [ONE_B, SEQUENCE]
        said = run([sys.executable, __file__, "--torch", json.dumps(asked)], log)
        theirs = json.loads(said.splitlines()[-1])["tokens_per_second"]
        rounds.append({"ours": ours, "transformers": theirs, "ratio": ours / theirs})
    return {"rounds": rounds, "ratio": sorted(r["ratio"] for r in rounds)[len(rounds) // 2]}


def torch_step(model: Mapping[str, Any], length: int, rows: int = 4) -> Result:
    """Returns the tokens per second of training the model in transformers, AdamW included."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
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
    network = LlamaForCausalLM(config).to(device)
    network.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(network.parameters(), fused=device == "cuda")
    compiled = torch.compile(network) if device == "cuda" else network
    ids = torch.randint(0, model["vocab_size"], (rows, length), device=device)

    def update() -> None:
        with torch.autocast(device, torch.bfloat16):
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


def profile(machine: Machine, out: Path, log: Path) -> Result:
    """Profiles two steps of the 1B model, and sums the time of operations by module."""
    settings = step_settings(machine, ONE_B, 4) | {"profile": {"start": 3, "steps": 2}}
    train(out, "profile", settings, log)
    (trace,) = (out / "profile" / "profile").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    busy: Counter[str] = Counter()
    for event in events:
        about = event.get("args") or {}
        if event.get("ph") != "X" or not ("hlo_op" in about or "hlo_module" in about):
            continue
        path = f"{about.get('name', '')} {about.get('tf_op', '')} {about.get('long_name', '')} {event['name']}"
        busy[next((part for part in PARTS_OF_A_STEP if part in path), "other")] += event.get("dur", 0)
    total = sum(busy.values()) or 1
    return {"microseconds": dict(busy), "shares": {name: spent / total for name, spent in busy.most_common()}}


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
    "experts": experts,
    "numbers": numbers,
    "allocators": allocators,
    "step-1b": one_b,
    "step-8b": eight_b,
    "ceiling": ceiling,
    "peer": peer,
    "profile": profile,
    "several": several,
}


def attempt(name: str, out: Path) -> Result:
    """Runs a part in its own process, and returns its result."""
    started, log = time.perf_counter(), out / f"{name}.log"
    log.write_text("")
    command = [sys.executable, __file__, "--out", str(out), "--part", name]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        try:
            printed, errors = process.communicate(timeout=SECONDS_PER_PART)
        except BaseException as ended:
            os.killpg(process.pid, signal.SIGKILL)  # also kills its children, which would occupy the GPU
            if isinstance(ended, subprocess.TimeoutExpired):
                return {"failed": f"it took more than {SECONDS_PER_PART} s"}
            raise
    with log.open("a") as file:
        file.write(printed + errors)
    try:
        found = json.loads(printed.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        found = {"failed": (errors.strip().splitlines() or ["no output"])[-1][:500]}
    return {**found, "seconds": time.perf_counter() - started}


def part(name: str, out: Path) -> Result:
    """Runs a part in this process, and returns its result."""
    try:
        return PARTS[name](look(), out, out / f"{name}.log")
    except LeftOutError as reason:
        return {"left_out": str(reason)}


def row(name: str, result: Result) -> str:
    for key, verdict in (("left_out", "left out"), ("failed", "FAILED")):
        if key in result:
            return f"{name:<12}{verdict:<10}{result[key]}"
    shown = {key: value for key, value in result.items() if isinstance(value, int | float | str) and key != "right"}
    shown |= {**result.get("relative_error", {}), **result.get("shares", {})}
    told = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items())
    return f"{name:<12}{'WRONG' if result.get('right') is False else 'ok':<10}{', '.join(told)}"


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
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--torch", help=argparse.SUPPRESS)
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.torch:
        print(json.dumps(torch_step(*json.loads(given.torch))))
        return 0
    if given.look:
        print(json.dumps(dataclasses.asdict(look())))
        return 0
    if given.part:
        print(json.dumps(part(given.part, given.out)))
        return 0
    machine = json.loads(run([sys.executable, __file__, "--out", str(given.out), "--look"], given.out / "look.log"))
    print(
        f"{machine['count']} x {machine['kind']}, {machine['versions']}{SMALL if machine['platform'] == 'cpu' else ''}"
    )
    file = given.out / "results.json"
    results = {} if given.again and given.only == list(PARTS) else earlier(file, machine)
    for name in given.only:
        if given.again or not has_passed(results.get(name)):
            results[name] = attempt(name, given.out)
            write_atomically(file, json.dumps({"machine": machine, "parts": results}, indent=1).encode())
        print(row(name, results[name]), flush=True)
    bad = [name for name, result in results.items() if "failed" in result or result.get("right") is False]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
