"""Compares the training step, by time or compiled program, with a Llama's step in plain JAX.

    python scripts/step_beside_plain.py --mesh tp=2
    python scripts/step_beside_plain.py --model 8b --rows 8 --mesh fsdp=8 --absent
    python scripts/step_beside_plain.py --model smollm2 --remat none --variants ../before jaxtp

The plain step is what an expert would write: `jit` with `NamedSharding`, constraints on products
and on the norm before the gather, `scan` over layers, `jax.checkpoint`, a loss in chunks, Optax.
Both start from the same weights and read the same tokens; the script stops if their first or last
losses differ. Blocks of steps of each take turns in one process, and ratios are medians over
neighbouring blocks; the time of this process's threads, which other processes disturb less, is
compared too. A variant may be the folder of another checkout. `--absent` compiles for H100s
that need not be present, and shows a roofline by part. `--profile` also writes the compiled
programs and a profile of each.
"""

import argparse
import dataclasses
import functools
import importlib
import operator
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import yaml
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parts import TOTALS, part_table, peak_gib, read_parts, roofline, totals

import jaxtp
from jaxtp.analysis.hardware import find
from jaxtp.analysis.schedule import read_schedule
from jaxtp.analysis.tables import columns
from jaxtp.checkpoint.logical import named_arrays
from jaxtp.config.command_line import parse_mesh
from jaxtp.config.schema import replace_nested
from jaxtp.data.loader import abstract_batch
from jaxtp.mesh import AXES, describe_mesh, mesh_of
from jaxtp.tools.estimate.compiler import TARGET_CONFIGS
from jaxtp.tools.estimate.search import describe_model, estimate, target
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import DataConfig, LoopConfig, MeshConfig, OptimizerConfig, TrainConfig
from jaxtp.train.setup import plan_step
from jaxtp.train.state import Blueprint, plan_state
from jaxtp.train.step import compiler_options, fetch

MODELS = {
    "tiny": {
        "vocab_size": 256,
        "d_model": 64,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 4,
        "d_ff": 128,
    },
    "25m": {
        "vocab_size": 8192,
        "d_model": 512,
        "num_layers": 6,
        "num_heads": 8,
        "num_kv_heads": 4,
        "d_ff": 1408,
    },
    "smollm2": {
        "vocab_size": 49152,
        "d_model": 576,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "d_ff": 1536,
        "tie_embeddings": True,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "d_model": 1024,
        "num_layers": 28,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 3072,
        "tie_embeddings": True,
    },
    "1b": {
        "vocab_size": 128256,
        "d_model": 2048,
        "num_layers": 16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "d_ff": 8192,
    },
    "8b": {
        "vocab_size": 128256,
        "d_model": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "d_ff": 14336,
    },
}
RATE = 1e-4
DECAY = 0.1
SPECS = {
    "embedding": P("tp", "fsdp"),
    "head": P("fsdp", "tp"),
    "norm": P(None),
    **{name: P(None, "fsdp", "tp") for name in ("wq", "wk", "wv", "wg", "wu")},
    **{name: P(None, "tp", "fsdp") for name in ("wo", "wd")},
    **{name: P(None, None) for name in ("n1", "n2")},
}
OURS = {
    "embedding": "embedding.embedding",
    "head": "head.kernel",
    "norm": "norm.scale",
    **{name: f"blocks.attention.qkv.kernels.{i}" for i, name in enumerate(("wq", "wk", "wv"))},
    **{name: f"blocks.mlp.gate_up.kernels.{i}" for i, name in enumerate(("wg", "wu"))},
    **{"wo": "blocks.attention.out.kernel", "wd": "blocks.mlp.down.kernel"},
    **{"n1": "blocks.attention_norm.scale", "n2": "blocks.mlp_norm.scale"},
}
MODULES = {"jaxtp", "parts", "step_beside_plain"}
OTHERS: dict[str, dict[str, Any]] = {}
"""Imported modules of other checkouts, by folder."""
Params = dict[str, jax.Array]
Options = Mapping[str, int | bool | str]


def is_gpu(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform in ("gpu", "cuda")


class Plain:
    """The step in plain JAX."""

    def __init__(self, model: jaxtp.ModelConfig, mesh: Mesh, rows: int, length: int):
        self.model = model
        self.mesh = mesh
        self.rows = rows
        self.length = length
        self.dtype = jnp.dtype(model.precision.compute)
        matrices = {name for name, spec in SPECS.items() if len(spec) > 1 and None not in spec[-2:]}
        rule = optax.adamw(
            RATE,
            b2=0.95,
            weight_decay=DECAY,
            mask=lambda params: {name: name in matrices for name in params},
        )
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), rule)
        policies = jax.checkpoint_policies
        self.policy = {
            "full": policies.nothing_saveable,
            "save_dots": policies.dots_with_no_batch_dims_saveable,
            "none": policies.everything_saveable,
        }[model.remat]

    def constrain(self, x: jax.Array, *spec: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    @jax.named_scope("norm")
    def norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.model.norm_eps) * scale
        sharded = self.constrain(y.astype(self.dtype), "fsdp", "tp", None)
        return self.constrain(sharded, "fsdp", None, None)

    def rotate(self, x: jax.Array) -> jax.Array:
        half = self.model.head_dim // 2
        angles = jnp.arange(self.length)[:, None] * self.model.rope_theta ** (
            -jnp.arange(half) / half
        )
        sin = jnp.sin(angles)[:, None]
        cos = jnp.cos(angles)[:, None]
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(self.dtype)

    def block(self, x: jax.Array, w: Params) -> jax.Array:
        model = self.model
        w = {
            name: value.astype(self.dtype) if value.ndim > 1 else value for name, value in w.items()
        }

        def column(name):
            return self.constrain(w[name], None, "tp")

        def row(name):
            return self.constrain(w[name], "tp", None)

        h = self.norm(x, w["n1"])
        q, k, v = (
            self.constrain(h @ column(name), "fsdp", None, "tp") for name in ("wq", "wk", "wv")
        )
        q, k, v = (y.reshape(*y.shape[:2], -1, model.head_dim) for y in (q, k, v))
        kernel = "cudnn" if is_gpu(self.mesh) else "xla"
        attend = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation=kernel
        )
        heads = P("fsdp", None, "tp", None)
        attend = jax.shard_map(
            attend, mesh=self.mesh, in_specs=heads, out_specs=heads, check_vma=False
        )
        o = self.constrain(
            attend(self.rotate(q), self.rotate(k), v).reshape(*x.shape[:2], -1), "fsdp", None, "tp"
        )
        x = x + self.constrain(o @ row("wo"), "fsdp", "tp", None)
        h = self.norm(x, w["n2"])
        with jax.named_scope("mlp"):
            gate, up = (
                self.constrain(h @ column(name), "fsdp", None, "tp") for name in ("wg", "wu")
            )
            return x + self.constrain((jax.nn.silu(gate) * up) @ row("wd"), "fsdp", "tp", None)

    def loss(self, params: Params, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        x = self.constrain(params["embedding"].astype(self.dtype)[inputs], "fsdp", "tp", None)
        layers = {
            name: value
            for name, value in params.items()
            if name not in ("embedding", "head", "norm")
        }
        block = jax.checkpoint(self.block, policy=self.policy, prevent_cse=False)
        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, layers)
        x = self.norm(x, params["norm"])
        table = params["head"] if "head" in params else params["embedding"].T
        head = self.constrain(table.astype(self.dtype), None, "tp")
        chunks = max(1, self.rows // self.mesh.shape["fsdp"] * self.length // self.model.loss_chunk)

        @jax.checkpoint
        def chunk(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            x, labels = part
            logits = self.constrain(x @ head, "fsdp", None, "tp").astype(jnp.float32)
            right = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
            return total + jnp.sum(jax.nn.logsumexp(logits, -1) - right), None

        split = [
            a.reshape(a.shape[0], chunks, -1, *a.shape[2:]).swapaxes(0, 1) for a in (x, labels)
        ]
        return jax.lax.scan(chunk, jnp.float32(0), tuple(split))[0] / inputs.size

    def step(
        self, state: tuple[Params, Any], batch: dict[str, jax.Array]
    ) -> tuple[tuple[Params, Any], jax.Array]:
        params, optimizer = state
        loss, grads = jax.value_and_grad(self.loss)(params, batch["inputs"], batch["labels"])
        with jax.named_scope("optimizer"):
            updates, optimizer = self.optimizer.update(grads, optimizer, params)
            return (optax.apply_updates(params, updates), optimizer), loss

    def jitted(self, params: Params) -> tuple[Any, Any]:
        """Returns the step, and the abstract state for these parameters."""
        state = (params, jax.eval_shape(self.optimizer.init, params))

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            name = next(
                (key.key for key in reversed(path) if getattr(key, "key", None) in SPECS), ""
            )
            return NamedSharding(self.mesh, SPECS.get(name, P()))

        shardings = jax.tree_util.tree_map_with_path(sharding, state)
        abstract = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, shardings
        )
        scalar = NamedSharding(self.mesh, P())
        return jax.jit(self.step, donate_argnums=0, out_shardings=(shardings, scalar)), abstract


def model_of(settings: Mapping[str, Any]) -> jaxtp.ModelConfig:
    """Returns the model of these settings, with the dtypes by name."""
    return jaxtp.ModelConfig(
        **{**settings, "precision": jaxtp.Precision(**settings["precision"])},
        rope_theta=500000.0,
    )


def our_config(model: jaxtp.ModelConfig, rows: int, length: int) -> TrainConfig:
    """Returns the settings of the same step."""
    rule = OptimizerConfig(
        learning_rate=RATE, schedule="constant", warmup_steps=0, weight_decay=DECAY
    )
    data = DataConfig(sequence_length=length, global_batch_size=rows, packing="concatenated")
    return TrainConfig(model=model, data=data, optimizer=rule, train=LoopConfig(steps=1000))


class Runner:
    """A compiled step, and its state."""

    def __init__(self, name: str, lowered: Any, make_state: Callable[[], Any], options: Options):
        started = time.perf_counter()
        self.name = name
        self.compiled = lowered.compile(dict(options))
        self.compile_seconds = time.perf_counter() - started
        print(f"{name}: compiled in {self.compile_seconds:.1f} s", file=sys.stderr, flush=True)
        self.state: Any = make_state
        self.loss: Any = None
        self.processor_seconds: list[float] = []

    def start(self) -> None:
        self.state = self.state()

    def seconds(self, batch: dict[str, jax.Array], steps: int) -> float:
        """Returns the time of a step, over several."""
        started = time.perf_counter()
        processor_started = time.process_time()
        for _ in range(steps):
            self.state, self.loss = self.compiled(self.state, batch)
        jax.block_until_ready((self.state, self.loss))
        self.processor_seconds.append((time.process_time() - processor_started) / steps)
        return (time.perf_counter() - started) / steps

    def last_loss(self) -> float:
        return float(self.loss) if self.name == "plain" else fetch(self.loss)["loss"]


def plain_params(state: Any) -> Params:
    """Returns the plain step's params, by the values of a state of ours."""
    arrays = named_arrays(state)
    paths = {name: f"model.{path}" for name, path in OURS.items()}
    params = {name: arrays[path] for name, path in paths.items() if path in arrays}
    if "head" in params:
        params["head"] = params["head"].T
    return params


def plain_runner(
    plain: Plain, plan: Blueprint, batch: Mapping[str, jax.ShapeDtypeStruct], options: Options
) -> Runner:
    """Returns the compiled plain step; it starts from our weights."""
    with jax.set_mesh(plain.mesh):
        step, abstract = plain.jitted(jax.eval_shape(plain_params, plan.abstract))
        lowered = step.lower(abstract, batch)

    def start() -> Any:
        with jax.set_mesh(plain.mesh):
            shardings = jax.tree.map(lambda a: a.sharding, abstract)
            made = jax.jit(plain_params, out_shardings=shardings[0])(plan.create(0))
            return made, jax.jit(plain.optimizer.init, out_shardings=shardings[1])(made)

    return Runner("plain", lowered, start, options)


@contextmanager
def checkout(folder: str) -> Iterator[Any]:
    """Imports the package from another checkout, and yields this script on top of it."""
    ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] in MODULES}
    for name in ours:
        del sys.modules[name]
    sys.modules.update(OTHERS.get(folder, {}))
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("step_beside_plain")
    finally:
        sys.path.remove(folder)
        theirs = [name for name in sys.modules if name.split(".")[0] in MODULES]
        OTHERS[folder] = {name: sys.modules.pop(name) for name in theirs}
        sys.modules.update(ours)


def other_runner(variant: str, *settings: Any, options: Options) -> Runner:
    """Returns the compiled step of another checkout, whose folder may be followed by settings."""
    folder, _, changes = variant.partition(",")
    with checkout(folder) as script:
        (runner,) = script.runners(*settings, [changes or "jaxtp"], options)
    make_state = runner.state

    def start() -> Any:
        with checkout(folder):
            return make_state()

    runner.name = variant
    runner.state = start
    return runner


def runners(
    settings: Mapping[str, Any],
    mesh: Mesh,
    rows: int,
    length: int,
    variants: list[str],
    options: Options,
) -> list[Runner]:
    """Returns the compiled steps of a model: plain, and this package's variants."""
    found = []
    model = model_of(settings)
    config = our_config(model, rows, length)
    plan = plan_state(model, optimizers.build(config.optimizer, config.train.steps), mesh)
    platform = "cuda" if is_gpu(mesh) else "cpu"
    for variant in variants:
        if variant == "plain":
            found.append(
                plain_runner(
                    Plain(model, mesh, rows, length),
                    plan,
                    abstract_batch(mesh, rows, length),
                    options,
                )
            )
            continue
        # In the root of a checkout, `jaxtp` is a folder too.
        if variant != "jaxtp" and Path(variant.partition(",")[0]).is_dir():
            found.append(other_runner(variant, settings, mesh, rows, length, options=options))
            continue
        changes = {} if variant == "jaxtp" else dict(part.split("=") for part in variant.split(","))
        changed = replace_nested(
            config, {name: yaml.safe_load(value) for name, value in changes.items()}
        )
        ours = plan_state(changed.model, plan.optimizer, mesh)
        lowered = plan_step(changed).trace_on(mesh).lower()
        create = functools.partial(ours.create, 0)
        found.append(
            Runner(
                variant, lowered, create, {**options, **compiler_options(changed.model, platform)}
            )
        )
    return found


def random_ids(vocab_size: int, rows: int, length: int) -> np.ndarray:
    """Returns the ids of inputs and labels, `[rows, length + 1]`."""
    return np.random.default_rng(0).integers(0, vocab_size, (rows, length + 1)).astype(np.int32)


def make_batch(mesh: Mesh, vocab_size: int, rows: int, length: int) -> dict[str, jax.Array]:
    ids = random_ids(vocab_size, rows, length)
    shardings = jax.tree.map(lambda a: a.sharding, abstract_batch(mesh, rows, length))
    return jax.device_put({"inputs": ids[:, :-1], "labels": ids[:, 1:]}, shardings)


def take_turns(
    found: list[Any], batch: dict[str, jax.Array], blocks: int, steps: int, *, low: bool
) -> tuple[list[list[float]], list[float]]:
    """Returns the seconds per step of each runner in each block, and the last losses.

    Three steps precede.
    """
    for runner in found:
        runner.seconds(batch, 1)
    agree(found, low=low)
    for runner in found:
        runner.seconds(batch, 2)
    times = [[runner.seconds(batch, steps) for runner in found] for _ in range(blocks)]
    return times, agree(found, low=low)


def agree(found: list[Any], *, low: bool) -> list[float]:
    """Returns the last losses; ends the script if they differ by more than rounding."""
    losses = [runner.last_loss() for runner in found]
    if max(losses) - min(losses) > (2e-2 if low else 1e-3):
        sys.exit(
            "losses differ: "
            + ", ".join(f"{runner.name} {loss}" for runner, loss in zip(found, losses, strict=True))
        )
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="25m")
    parser.add_argument("--layers", type=int, help="number of layers, if not the model's")
    parser.add_argument("--remat", choices=["full", "save_dots", "none"], default="full")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int)
    parser.add_argument(
        "--chunk", type=int, default=4096, help="tokens of a device whose logits exist at a time"
    )
    parser.add_argument("--compute", help="default: float32 on CPUs, bfloat16 on GPUs")
    parser.add_argument("--mesh", default="tp=1")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["plain", "jaxtp"],
        help="steps: plain, jaxtp, jaxtp with settings, such as "
        "model.precision.matmul=float8,model.remat=none, or the folder of another checkout, also "
        "with settings",
    )
    parser.add_argument("--blocks", type=int, default=11)
    parser.add_argument("--steps", type=int, default=3, help="of a block")
    parser.add_argument(
        "--absent", action="store_true", help="compile for 8 absent H100s, and run nothing"
    )
    parser.add_argument("--profile", type=Path, help="folder of compiled programs and profiles")
    given = parser.parse_args()
    sizes = parse_mesh(given.mesh, AXES)
    options = dict[str, int | bool | str]()
    if given.absent:
        jax.config.update("jax_platforms", "cpu")
        options = {"xla_gpu_autotune_level": 0}
        absent = topologies.get_topology_desc(
            "1x1x8", "cuda", topology="1x1x8", target_config=TARGET_CONFIGS["h100"]
        )
        mesh = mesh_of(sizes, absent.devices)
    else:
        mesh = mesh_of(sizes)
    gpu = is_gpu(mesh)
    length = given.length or (4096 if gpu else 256)
    shape: dict[str, Any] = MODELS[given.model]
    settings = {
        "head_dim": shape["d_model"] // shape["num_heads"],
        **shape,
        "num_layers": given.layers or shape["num_layers"],
        "remat": given.remat,
        "loss_chunk": given.chunk,
        "precision": {
            "compute": given.compute or ("bfloat16" if gpu else "float32"),
            "reduce": "bfloat16" if gpu else "float32",
        },
    }
    model = model_of(settings)
    found = runners(settings, mesh, given.rows, length, given.variants, options)
    device = mesh.devices.flat[0]
    print(
        f"jax {jax.__version__}, {mesh.size} x {device.device_kind}, {describe_mesh(sizes)}; "
        f"{given.model} with {model.num_layers} layers, {given.rows} x {length} tokens, remat "
        f"{given.remat}, chunks of {given.chunk}",
        flush=True,
    )
    table: list[tuple[str, ...]] = []
    if given.profile:
        given.profile.mkdir(parents=True, exist_ok=True)
        for i, runner in enumerate(found):
            (given.profile / f"{i}.hlo.txt").write_text(runner.compiled.as_text())
    if given.absent:
        config = dataclasses.replace(
            our_config(model, given.rows, length), mesh=MeshConfig(**sizes)
        )
        setting = estimate(config, target(find("h100"), mesh.size), describe_model(config))
        for runner in found:
            text = runner.compiled.as_text()
            collectives = read_schedule(text, sizes)
            parts = roofline(setting, read_parts(text), collectives)
            table.append((runner.name, *totals(runner.compiled, parts, collectives)))
            print(f"\n{runner.name}\n{part_table(parts)}")
        print(f"\n{columns(('step', *TOTALS), table)}")
        return
    batch = make_batch(mesh, model.vocab_size, given.rows, length)
    for runner in found:
        runner.start()
    times, losses = take_turns(
        found, batch, given.blocks, given.steps, low=given.compute == "bfloat16" or gpu
    )
    for i, runner in enumerate(found):
        each = [row[i] for row in times]
        ratios = [row[i] / row[0] for row in times]
        both = (each.processor_seconds[-given.blocks :] for each in (runner, found[0]))
        processor = map(operator.truediv, *both)
        low, middle, high = statistics.quantiles(each, n=4)
        table.append(
            (
                runner.name,
                f"{losses[i]:.4f}",
                f"{1e3 * middle:.2f}",
                f"{1e3 * low:.2f} to {1e3 * high:.2f}",
                f"{given.rows * length / middle:,.0f}",
                f"{statistics.median(ratios):.3f}",
                f"{statistics.median(processor):.3f}",
                f"{peak_gib(runner.compiled):.2f}",
                f"{runner.compile_seconds:.1f}",
            )
        )
    header = (
        "step",
        "loss",
        "ms",
        "quartiles",
        "tokens/s",
        f"time / {found[0].name}",
        "CPU time",
        "GiB",
        "compile s",
    )
    print(columns(header, table), flush=True)
    if given.profile:
        for i, runner in enumerate(found):
            with jax.profiler.trace(str(given.profile / str(i)), create_perfetto_trace=True):
                runner.seconds(batch, 2)


if __name__ == "__main__":
    main()
