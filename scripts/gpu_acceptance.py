"""Tests the package on one GPU, or all GPUs of a host, and compares its speed with the hardware's.

    python scripts/gpu_acceptance.py --out runs/acceptance

Rows of the table have the measured milliseconds, the milliseconds at the peaks of the hardware, and
the ratio. At the peaks, a compiled program's kernels run one after the other, and each takes the
time of its FLOPs or bytes; decoding takes the time of the bytes of weights and KV cache. Each part
runs in its own process, so a failure affects no other part, and writes a log. `results.json` has
the results. A part that has passed on these devices and versions is skipped; `--only` selects
parts, and `--again` ignores earlier results. On CPUs all parts run at a small size, which tests the
script and not the speed. The script names and omits parts that this machine cannot run (no second
GPU, no torch).
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
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import yaml

import jaxtp
from jaxtp.config.files import write_atomically
from jaxtp.layers.kernels.select import KERNELS, Kernel, Use
from jaxtp.train.config import TrainConfig

Result = dict[str, Any]
SEQUENCE = 4096
SECONDS_PER_PART = 900
SCORES_FIT = 4096  # longer sequences are not timed in kernels that store all scores
BLOCKS = 5
PROFILED = 2  # blocks of three steps that are timed; steps in a profile
CONFIGS = Path(__file__).parent.parent / "configs"
ONE_B = {
    "vocab_size": 128256,
    "d_model": 2048,
    "num_layers": 16,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 64,
}
ONE_B |= {"d_ff": 8192, "tie_embeddings": True}
EIGHT_B = {
    "vocab_size": 128256,
    "d_model": 4096,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "d_ff": 14336,
}
TINY = {
    "vocab_size": 256,
    "d_model": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}
TINY |= {"d_ff": 128}

SMALL = ": everything runs small, and says nothing about speed"


@dataclasses.dataclass(frozen=True)
class Step:
    """A step that is timed.

    It has a file of configs/, layers and rows that fit on one GPU, and changed settings.
    """

    config: str
    layers: int
    rows: int
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    beside_plain: bool = False
    has_experts: bool = False


STEPS = {
    "8b": Step(
        "llama3_8b", 4, 4, {"model.remat": "full", "model.loss_chunk": SEQUENCE}, beside_plain=True
    ),
    "8b-save": Step("llama3_8b", 4, 4, {"model.remat": "save_dots"}),
    "8b-float8": Step(
        "llama3_8b", 4, 4, {"model.remat": "full", "model.precision.matmul": "float8"}
    ),
    "1b": Step("pretrain_1b", 16, 2, {"model.remat": "save_dots"}),
    "70b-lora": Step("lora_llama31_70b", 4, 2, {"model.remat": "full"}),
    "experts": Step("qwen3_30b_a3b", 4, 4, has_experts=True),
}


ON_DEVICE = (
    "attention",
    "attention-speed",
    "experts",
    "decode",
    *(f"step-{name}" for name in STEPS),
)
"""Parts that use the device in their own process. The others start processes, which need all of its
memory."""


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
            raise LeftOutError(f"jaxtp/analysis/hardware.toml does not have {self.kind!r}")
        return "h100" if found is None else found.name


def look() -> Machine:
    """Returns the devices that this process sees."""
    import jax

    first = jax.devices()[0]
    memory = (first.memory_stats() or {}).get("bytes_limit", 0)
    names = ("jax", "jaxlib", "flax", "torch", "transformers")
    versions = {
        name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)
    }
    return Machine(first.platform, first.device_kind, jax.device_count(), memory, versions)


def run(command: list[str], log: Path, *, codes: tuple[int, ...] = (0,), **environment: str) -> str:
    """Runs a command, appends its output to the log, and returns its output.

    Raises:
      RuntimeError: the exit code is not in `codes`.
    """
    printed = log.with_suffix(".stdout.txt")  # what a process that is killed has printed
    with log.open("a") as told, printed.open("w") as output:
        print("$", *command, file=told, flush=True)
        done = subprocess.run(
            command, stdout=output, stderr=told, env={**os.environ, **environment}
        )
    errors = log.read_text().strip()
    text = printed.read_text()
    with log.open("a") as file:
        file.write(f"{text}\n")
    if done.returncode not in codes:
        raise RuntimeError(
            f"{' '.join(command[:4])} ... ended with {done.returncode}: {errors[-500:]}"
        )
    return text


def devices(machine: Machine, out: Path, log: Path) -> Result:
    """Times `jaxtp doctor`, which checks devices, collectives, kernels and versions."""
    file = out / "doctor.json"
    words = ["-m", "jaxtp", "doctor", "--folder", str(out), "--json", str(file)]
    started = time.perf_counter()
    run([sys.executable, *words], log, codes=(0, 3))
    seconds = time.perf_counter() - started
    rows = json.loads(file.read_text())["findings"]
    wrong = [row["text"] for row in rows if row["error"]]
    return {"right": not wrong, "wrong": "; ".join(wrong) or "none", "doctor_seconds": seconds}


def attention_cases(machine: Machine) -> Iterator[tuple[Kernel, Use, tuple[int, int]]]:
    """Yields kernels, uses that they support, and numbers of query and kv heads."""
    import jax

    from jaxtp.layers.kernels.select import architecture_of

    length = 64 if machine.is_small else 1024
    heads = ((64, 64, 4, 1), (128, 128, 8, 2), (192, 128, 4, 4))
    shapes = (
        [("float32", heads[0])]
        if machine.is_small
        else [("float32", heads[0]), *(("bfloat16", h) for h in heads)]
    )
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
    from jaxtp.guards.self_check import TOLERANCE, relative_errors

    kernel, use, heads = case
    what = (
        f"{'packed' if use.packed else 'one text'} {use.window} "
        f"{use.softcap}{' part' if use.part else ''}"
    )
    name = (
        f"{kernel.name} {use.dtype} {heads[0]}x{use.head_dim}x{use.value_head_dim} "
        f"{what}{' sinks' * use.sinks}"
    )
    try:
        errors = relative_errors(kernel.run, use, *heads)
    except Exception as error:
        return name, {"failed": first_line(error), "right": False}
    return name, {"errors": errors, "right": max(errors) <= TOLERANCE[str(use.dtype)]}


def attention(machine: Machine, out: Path, log: Path) -> Result:
    """Compares each attention kernel that runs here with plain float32 attention.

    Threads compile at the same time.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(pool.map(compare_attention, attention_cases(machine)))
    wrong = [name for name, one in found.items() if not one["right"]]
    return {
        "right": not wrong,
        "cases": len(found),
        "wrong": ", ".join(wrong) or "none",
        "kernels": found,
    }


def attention_speed(machine: Machine, out: Path, log: Path) -> Result:
    """Times attention, forward and backward, in two rows with the heads of 8B and 1B models."""
    import jax
    from bench import medians

    from jaxtp.guards.self_check import problem, results
    from jaxtp.layers.kernels.select import architecture_of

    most = ceiling(machine, out, log)["flops_per_second"]
    found: Result = {}
    shapes = itertools.product(
        (128, 64), (64,) if machine.is_small else (2048, 8192), (False, True)
    )
    for head_dim, length, packed in shapes:
        dtype = "float32" if machine.is_small else "bfloat16"
        platform = architecture_of(jax.devices()[0])
        use = Use(head_dim=head_dim, dtype=dtype, length=length, packed=packed, platform=platform)
        kernels = [kernel for kernel in KERNELS.values() if not any(kernel.problems(use))]
        if length > SCORES_FIT:
            kernels = [kernel for kernel in kernels if not kernel.stores_scores]
        arrays, settings = problem(use, 32, 8, max_length=length)
        # There are 2 products forward and 5 backward, of half of the scores.
        flops = 7 * 2 * 32 * length**2 * head_dim

        def timed(
            kernel: Kernel, arrays: Any = arrays, settings: Any = settings, flops: int = flops
        ) -> Result:
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
    """Compares grouped products of experts, and their gradients, with a loop; times them.

    The loop over experts is in float32.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from bench import medians

    from jaxtp.guards.self_check import TOLERANCE
    from jaxtp.layers.kernels.grouped import grouped_matmul, unsupported
    from jaxtp.mesh import platform_of
    from jaxtp.tools.check.parity import relative_error

    groups, rows, width, features = (4, 64, 16, 24) if machine.is_small else (32, 8192, 2048, 768)
    random = np.random.default_rng(0)
    # The sizes are uneven; some rows have no expert.
    sizes = random.multinomial(rows - rows // 8, random.dirichlet(np.ones(groups)))
    ends = np.cumsum(sizes)
    shapes = ((rows, width), (groups, width, features), (rows, features))
    arrays = [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]

    def one_by_one(x: np.ndarray, w: np.ndarray, grad: np.ndarray) -> list[np.ndarray]:
        # On the CPU: a GPU would compile and tune three products for each size.
        y = np.zeros_like(grad)
        dx = np.zeros_like(x)
        dw = np.zeros_like(w)
        for group, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            mine = slice(end - size, end)
            y[mine] = x[mine] @ w[group]
            dx[mine] = grad[mine] @ w[group].T
            dw[group] = x[mine].T @ grad[mine]
        return [y, dx, dw]

    def results(multiply: Callable[..., Any], x: Any, w: Any, grad: Any) -> Any:
        y, back = jax.vjp(multiply, x, w)
        return y, *back(grad)

    found: Result = {}
    with jax.default_matmul_precision("highest"):
        for dtype in ("float32", "bfloat16"):
            given = [array.astype(dtype) for array in arrays]
            exact = one_by_one(*(np.asarray(array.astype(jnp.float32)) for array in given))
            for method in ("xla", "pallas"):
                if any(unsupported(method, platform_of(jax.devices()[0]))):
                    continue
                multiply = partial(
                    grouped_matmul, sizes_E=jnp.asarray(sizes, jnp.int32), method=method
                )
                program = partial(jax.jit(partial(results, multiply)), *given)
                errors = [
                    relative_error(np.asarray(a, np.float32), b)
                    for a, b in zip(program(), exact, strict=True)
                ]
                key = f"{method} {dtype}"
                seconds = medians({key: program}, 3)[key]
                found[key] = {
                    "errors": errors,
                    "right": max(errors) <= TOLERANCE[dtype],
                    "milliseconds": 1e3 * seconds,
                }
    return {"right": all(one["right"] for one in found.values()), "products": found}


def ceiling(machine: Machine, out: Path, log: Path) -> Result:
    """Times one large matrix product, the upper limit of FLOP/s on this device."""
    import jax
    import jax.numpy as jnp
    from bench import medians

    size, dtype = (256, "float32") if machine.is_small else (8192, "bfloat16")
    a, b = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in (0, 1))
    product = jax.jit(jnp.matmul)
    seconds = medians({"product": lambda: product(a, b)}, 5, calls=5)["product"]
    return {"flops_per_second": 2 * size**3 / seconds, "size": size, "dtype": dtype}


def settings_of(machine: Machine, case: Step) -> TrainConfig:
    """Returns a configuration of configs/ on one device, with fewer layers; tiny on CPUs."""
    from jaxtp.config.schema import from_yaml, replace_nested

    changes: Result = {f"mesh.{axis}": 1 for axis in ("dp", "fsdp", "cp", "tp")} | {
        "train.accumulation": 1
    }
    changes |= {
        "data.packing": "concatenated",
        "data.sequence_length": SEQUENCE,
        "data.global_batch_size": case.rows,
        "model.num_layers": case.layers,
    }
    changes |= {"model.precision.reduce": "bfloat16", **case.changes}
    if machine.is_small:
        changes |= {f"model.{name}": size for name, size in TINY.items()} | {
            "data.sequence_length": 64
        }
        changes |= {"model.precision.compute": "float32", "model.precision.reduce": "float32"}
        changes |= {"model.precision.matmul_least": 16}
        changes |= (
            {"model.num_experts": 4, "model.experts_per_token": 2} if case.has_experts else {}
        )
    return replace_nested(from_yaml(TrainConfig, CONFIGS / f"{case.config}.yaml"), changes)


def step(machine: Machine, out: Path, log: Path, *, name: str) -> Result:
    """Times a training step and its parts; also gives the times at the hardware's peaks."""
    import jax
    from parts import SECONDS, peak_gib, read_parts, roofline
    from step_beside_plain import Plain, Runner, make_batch, plain_runner

    from jaxtp.analysis.hardware import find
    from jaxtp.data.loader import abstract_batch
    from jaxtp.tools.estimate.search import describe_model, estimate, target
    from jaxtp.train import optimizer as optimizers
    from jaxtp.train.setup import plan_step
    from jaxtp.train.state import plan_state
    from jaxtp.train.step import compiler_options

    case = STEPS[name]
    hardware = find(machine.hardware)
    config = settings_of(machine, case)
    if config.model.precision.matmul == "float8" and not hardware.float8:
        raise LeftOutError(f"{machine.kind} has no products in float8")
    mesh = jaxtp.make_mesh(devices=jax.devices()[:1])
    data = config.data
    rows = data.global_batch_size
    length = data.sequence_length
    plan = plan_state(config.model, optimizers.build(config.optimizer, config.train.steps), mesh)
    options = compiler_options(
        config.model, "cuda" if machine.platform == "gpu" else machine.platform
    )
    lowered = plan_step(config).trace_on(mesh).lower()
    create = partial(plan.create, 0)
    ours = Runner(name, lowered, create, options)
    batch = make_batch(mesh, config.model.vocab_size, rows, length)
    runners = [ours]
    if case.beside_plain:
        runners.append(
            plain_runner(
                Plain(config.model, mesh, rows, length),
                plan,
                abstract_batch(mesh, rows, length),
                options,
            )
        )
    for runner in runners:
        runner.start()
        runner.seconds(batch, 3)
    blocks = [[runner.seconds(batch, 3) for runner in runners] for _ in range(BLOCKS)]
    seconds = statistics.median(block[0] for block in blocks)
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    setting = estimate(config, target(hardware, 1), describe_model(config))
    parts = roofline(setting, read_parts(ours.compiled.as_text()), ())
    peaks = {part: one[SECONDS[0]] + one[SECONDS[1]] for part, one in parts.items()}
    found: Result = {"rows": [["a step, ms", 1e3 * seconds, 1e3 * peaks["all"]]]}
    moved = parts["all"]["product_bytes"] + parts["all"]["other_bytes"]
    found |= {"FLOPs / least": parts["all"]["flops"] / parts["all"]["least_flops"]}
    found |= {"bytes / least": moved / parts["all"]["least_bytes"]}
    found |= {
        "tokens/s": rows * length / seconds,
        "compiled in s": ours.compile_seconds,
        "compiled GiB": peak_gib(ours.compiled),
    }
    if case.beside_plain:
        found["time / plain"] = statistics.median(block[0] / block[1] for block in blocks)
    elif memory:
        found["GiB in use at most"] = memory / 2**30
    profiled = ours
    if machine.platform == "gpu":  # kernels of a CUDA graph have no names
        profiled = Runner(
            name, lowered, lambda: ours.state, {**options, "xla_gpu_enable_command_buffer": ""}
        )
        profiled.start()
        profiled.seconds(batch, 1)
    with jax.profiler.trace(str(out / f"{log.stem}-profile"), create_perfetto_trace=True):
        profiled.seconds(batch, PROFILED)
    (trace,) = (out / f"{log.stem}-profile").rglob("perfetto_trace.json.gz")
    with gzip.open(trace) as file:
        spent = summed(json.load(file)["traceEvents"], scopes(profiled.compiled.as_text()))
    for part, microseconds in spent.items():
        found["rows"].append([part, microseconds / PROFILED / 1e3, 1e3 * peaks.get(part, 0.0)])
    return found


def scopes(text: str) -> dict[str, str]:
    """Returns the scope of each instruction of a compiled program."""
    return dict(re.findall(r'%?([\w.-]+) = .*op_name="([^"]*)"', text))


def summed(events: list[Result], names: Mapping[str, str]) -> dict[str, float]:
    """Returns the microseconds of a profile's kernels by part of the step; on GPUs, of its streams.

    Args:
      names: scopes by instruction.
    """
    from parts import part_of

    named = [event for event in events if event.get("name") in ("process_name", "thread_name")]
    labels = {(event["pid"], event.get("tid")): event["args"]["name"] for event in named}

    def is_stream(event: Result) -> bool:
        thread, process = (labels.get((event["pid"], tid), "") for tid in (event.get("tid"), None))
        return "Stream" in thread and "/device:GPU" in process

    timed = [event for event in events if event.get("ph") == "X"]
    chosen = [event for event in timed if is_stream(event)]
    chosen = chosen or [event for event in timed if "hlo_op" in (event.get("args") or {})]
    found = Counter[str]()
    for event in chosen:
        about = event.get("args") or {}
        scope = (
            f"{names.get(str(about.get('hlo_op', '')), '')} {about.get('name', '')} {event['name']}"
        )
        found[part_of(scope)] += event["dur"]
    return dict(found)


def decode(machine: Machine, out: Path, log: Path) -> Result:
    """Times reading prompts and decoding with 8B; also gives the times at the hardware's peaks."""
    import jax
    from flax import nnx

    from jaxtp.analysis.hardware import find

    hardware = find(machine.hardware)
    precision = jaxtp.Precision(param="bfloat16", compute="bfloat16")
    shape = TINY if machine.is_small else EIGHT_B | {"num_layers": 32}
    config = jaxtp.ModelConfig(**shape, remat="none", precision=precision)
    with jax.set_mesh(jaxtp.make_mesh(devices=jax.devices()[:1])):
        model = nnx.jit(lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0)))()
    arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
    table = config.vocab_size * config.d_model
    # Decoding looks up few rows of the embedding.
    read = sum(array.nbytes for array in arrays) - 2 * table
    size = sum(array.size for array in arrays) - 2 * table
    generator = jaxtp.generate.Generator(
        model, jaxtp.generate.ByteTokenizer(), end_ids=frozenset(), donate=True
    )
    length, tokens = (16, 4) if machine.is_small else (512, 128)
    found: Result = {"rows": []}
    for rows in (1, 8):
        one = []
        more = []
        for turn in range(4):
            prompts = [
                [(31 * turn + 7 * row + 13 * place) % 200 + 3 for place in range(length)]
                for row in range(rows)
            ]
            for times, count in ((one, 1), (more, 1 + tokens)):
                started = time.perf_counter()
                generator.generate(prompts, jaxtp.generate.Settings(max_tokens=count))
                times.append(time.perf_counter() - started)
        first = statistics.median(one[1:])
        each = (statistics.median(more[1:]) - first) / tokens
        cache = (
            4
            * config.num_layers
            * config.num_kv_heads
            * config.head_dim
            * rows
            * (length + tokens / 2)
        )
        least = 2 * (size * rows * length + table * rows) / hardware.flops
        found["rows"].append([f"reading {rows} x {length} tokens, ms", 1e3 * first, 1e3 * least])
        found["rows"].append(
            [f"a token of {rows} rows, ms", 1e3 * each, 1e3 * (read + cache) / hardware.bandwidth]
        )
    return found


def ratios_of(script: str, pattern: str, log: Path, *words: str) -> Result:
    """Runs a script beside this one; returns the numbers in its output that the pattern names."""
    text = run([sys.executable, str(Path(__file__).parent / script), *words], log)
    return {name.strip(): float(value) for name, value in re.findall(pattern, text)}


def start(machine: Machine, out: Path, log: Path) -> Result:
    """Compares the time to the first step, and of a tiny step, with plain JAX."""
    repeats = "1" if machine.is_small else "3"
    return ratios_of(
        "start_speed.py",
        r"(?m)^  (.*?) +[\d.]+ m?s .*\) +([\d.]+)$",
        log,
        "--here",
        "--repeats",
        repeats,
    )


def checkpoint(machine: Machine, out: Path, log: Path) -> Result:
    """Times saving and restoring beside Orbax."""
    megabytes = "20" if machine.is_small else "1000"
    repeats = "1" if machine.is_small else "3"
    words = ("--one-device", "--megabytes", megabytes, "--repeats", repeats)
    return ratios_of("checkpoint_speed.py", r"(?m)^(.* / Orbax.*?) +([\d.]+)$", log, *words)


def peer(machine: Machine, out: Path, log: Path) -> Result:
    """Times the step of 1B, alternating with compiled PyTorch with and without recomputation."""
    if (
        importlib.util.find_spec("torch") is None
        or importlib.util.find_spec("transformers") is None
    ):
        raise LeftOutError("torch and transformers are not installed")
    found: Result = {}
    for checkpointing in (False, True):
        model, length = (TINY, 64) if machine.is_small else (ONE_B, SEQUENCE)
        words = json.dumps([model, length, STEPS["1b"].rows, checkpointing])
        name = f"tokens/s, PyTorch {'with' if checkpointing else 'without'} recomputation"
        found[name] = json.loads(
            run([sys.executable, __file__, "--torch", words], log).splitlines()[-1]
        )
    return found


def torch_step(model: Mapping[str, Any], length: int, rows: int, checkpointing: bool) -> float:
    """Returns the tokens per second of training the model in transformers, AdamW included."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import LlamaConfig, LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    names = {
        "d_model": "hidden_size",
        "num_layers": "num_hidden_layers",
        "d_ff": "intermediate_size",
    }
    names |= {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
    names |= {"tie_embeddings": "tie_word_embeddings"}
    settings = {names.get(name, name): value for name, value in model.items()}
    with torch.device(device):
        network = LlamaForCausalLM(LlamaConfig(**settings, attn_implementation="sdpa")).train()
    if checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    optimizer = torch.optim.AdamW(network.parameters(), fused=device == "cuda")
    compiled = torch.compile(network) if device == "cuda" else network
    ids = torch.randint(0, model["vocab_size"], (rows, length), device=device)
    times = []
    for _ in range(13):
        started = time.perf_counter()
        with torch.autocast(device, torch.bfloat16), sdpa_kernel(backends, set_priority=True):
            loss = compiled(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(time.perf_counter() - started)
    return rows * length / statistics.median(times[3:])


def several(machine: Machine, out: Path, log: Path) -> Result:
    """Measures the bandwidth between devices, and compares steps with and without rings."""
    if machine.count < 2:
        raise LeftOutError("there is one device")
    file = str(out / "hardware.yaml")
    script = str(Path(__file__).parent / "bench.py")
    run([sys.executable, script, "--like", machine.hardware, "--out", file], log)
    found: Result = {"hardware": yaml.safe_load((out / "hardware.yaml").read_text())}
    for tp in (tp for tp in (2, 4, 8) if tp <= machine.count):
        words = ["--mesh", f"tp={tp}", "--variants", "plain", "jaxtp", "model.overlap=ring"]
        words += (
            ["--model", "tiny", "--length", "64", "--blocks", "3"]
            if machine.is_small
            else ["--model", "8b", "--layers", "8"]
        )
        pattern = (
            r"(?m)^(jaxtp|model.overlap=ring) +[\d.]+ +[\d.]+ +[\d.]+ to [\d.]+ +[\d,]+ +([\d.]+)"
        )
        ratios = ratios_of("step_beside_plain.py", pattern, log, *words)
        found |= {f"time / plain at tp {tp}, {name}": ratio for name, ratio in ratios.items()}
    return found


PARTS: dict[str, Callable[[Machine, Path, Path], Result]] = {
    "devices": devices,
    "attention": attention,
    "experts": experts,
    "attention-speed": attention_speed,
    **{f"step-{name}": partial(step, name=name) for name in STEPS},
    "decode": decode,
    "start": start,
    "checkpoint": checkpoint,
    "peer": peer,
    "several": several,
}


def attempt(name: str, out: Path, machine: Result, most: int) -> Result:
    """Runs a part in its own process for at most `most` seconds, and returns its result."""
    started = time.perf_counter()
    log = out / f"{name}.log"
    log.write_text("")
    command = [sys.executable, __file__, "--out", str(out), "--part", name]
    command += ["--machine", json.dumps(machine)]
    pipes: Result = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        try:
            printed, errors = process.communicate(timeout=most)
        except BaseException as ended:
            # The signal also kills its children, which would occupy the GPU.
            os.killpg(process.pid, signal.SIGKILL)
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


def row(name: str, result: Result) -> str:
    for key, verdict in (("left_out", "left out"), ("failed", "FAILED")):
        if key in result:
            return f"{name:<16}{verdict:<10}{result[key]}"
    shown = {
        key: value
        for key, value in result.items()
        if isinstance(value, int | float | str) and key != "right"
    }
    shown |= result.get("milliseconds", {})
    notes = (
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in shown.items()
    )
    lines = [f"{name:<16}{'WRONG' if result.get('right') is False else 'ok':<10}{', '.join(notes)}"]
    for what, measured, least in result.get("rows", []):
        ratio = f"{measured / least:>8.2f}" if least else ""
        lines.append(f"  {what:<38}{measured:>10.2f}{least:>10.2f}{ratio}")
    return "\n".join(lines)


def earlier(file: Path, machine: Result) -> dict[str, Result]:
    """Returns the earlier results of this machine; none if the file is another's or damaged."""
    try:
        kept = json.loads(file.read_text())
        if all(kept["machine"][name] == machine[name] for name in ("kind", "count", "versions")):
            return {
                name: result for name, result in kept["parts"].items() if isinstance(result, dict)
            }
        print(
            f"{file} is of {kept['machine']['count']} x {kept['machine']['kind']}, or other "
            "versions: all runs again"
        )
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, KeyError, AttributeError):
        print(f"{file} cannot be read: all runs again")
    return {}


def has_passed(result: Result | None) -> bool:
    """Returns whether a part's result need not be repeated."""
    return (
        result is not None
        and not {"failed", "left_out"} & result.keys()
        and result.get("right") is not False
    )


def main() -> int:
    """Runs the parts without a result; returns 1 if one fails or has wrong numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/acceptance"), help="folder of results and logs"
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts to run"
    )
    parser.add_argument("--again", action="store_true", help="also run parts that have a result")
    parser.add_argument(
        "--seconds", type=int, default=SECONDS_PER_PART, help="longest time of a part"
    )
    parser.add_argument("--machine", type=json.loads, help=argparse.SUPPRESS)
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
        print(json.dumps(part(given.part, given.out, Machine(**given.machine))))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the processes of a part too
    machine = json.loads(
        run([sys.executable, __file__, "--out", str(given.out), "--look"], given.out / "look.log")
    )
    print(
        f"{machine['count']} x {machine['kind']}, "
        f"{machine['versions']}{SMALL if machine['platform'] == 'cpu' else ''}"
    )
    file = given.out / "results.json"
    results = {} if given.again and given.only == list(PARTS) else earlier(file, machine)
    wanted = [name for name in given.only if given.again or not has_passed(results.get(name))]
    for name in wanted:
        result = attempt(name, given.out, machine, given.seconds)
        results[name] = result
        write_atomically(
            file, json.dumps({"machine": machine, "parts": results}, indent=1).encode()
        )
        print(row(name, result), flush=True)
    for name in given.only:
        if name not in wanted:
            print(row(name, results[name]))
    bad = [
        name
        for name, result in results.items()
        if "failed" in result or result.get("right") is False
    ]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
