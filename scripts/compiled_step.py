"""Measures communication, memory and FLOPs of the training step, compiled for virtual CPU devices.

    python scripts/compiled_step.py

It runs nothing, and prints four tables for a Llama of 0.2 billion parameters:

1. Bytes that a device sends in a step, by mesh axis, in the HLO after SPMD partitioning. Explicit
   layers (this package) are compared with the same modules under sharding constraints alone, as in
   most JAX trainers. A GPU's compiler later merges some of the collectives that the partitioner
   adds.
2. Memory: temporaries per device at tp 8, relative to an eighth of one device's, and the donated
   share of the state. XLA's CPU backend assigns these buffers; a GPU's differ.
3. FLOPs of all matrix products over all devices, relative to one device.
4. Median time to compile 64 layers, and 4 layers; the two take turns.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.analysis.compiling import compile_with_spmd_text
from jaxtp.analysis.hlo import count_collectives_in_hlo, count_flops_in_hlo
from jaxtp.analysis.step_costs import step_costs
from jaxtp.analysis.tables import columns
from jaxtp.collectives import batch_spec
from jaxtp.data.loader import abstract_batch
from jaxtp.mesh import TP, mesh_sizes
from jaxtp.tools.check.shrink import Case
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import OptimizerConfig, TrainConfig
from jaxtp.train.parts import step_settings
from jaxtp.train.state import (
    Blueprint,
    TrainState,
    bytes_per_device,
    decoder_maker,
    plan_state,
)
from jaxtp.train.step import make_train_step

MODEL = jaxtp.ModelConfig(
    vocab_size=32768,
    d_model=1024,
    num_layers=8,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    d_ff=4096,
    attention="xla",  # the constraints wrap it
    loss_chunk=4096,
    precision=jaxtp.Precision(compute="bfloat16"),
)
BATCH = 16
SEQUENCE = 2048
SMALL = dataclasses.replace(
    MODEL, vocab_size=512, d_model=64, num_layers=2, head_dim=8, d_ff=128, loss_chunk=256
)
MESHES = [(1, 1, 8), (1, 2, 4), (2, 2, 2), (1, 8, 1)]
SETTINGS = OptimizerConfig()


class Measured:
    """The compiled step of a model on a mesh, explicit or with constraints only."""

    def __init__(
        self,
        model: jaxtp.ModelConfig,
        mesh: tuple[int, int, int],
        rows: int,
        length: int,
        explicit: bool = True,
    ):
        self.mesh = jaxtp.make_mesh(**by_axis(mesh))
        self.sizes = mesh_sizes(self.mesh)
        plan = plan_state if explicit else plan_without_layers
        self.plan = plan(model, optimizers.build(SETTINGS, 10), self.mesh)
        step = make_train_step(step_settings(TrainConfig(optimizer=SETTINGS)), self.plan)
        with jax.set_mesh(self.mesh) if explicit else constraints_only(self.mesh):
            lowered = step.lower(self.plan.sharded, abstract_batch(self.mesh, rows, length))
            started = time.perf_counter()
            self.compiled, self.text = compile_with_spmd_text(lowered)
            self.seconds = time.perf_counter() - started
        self.collectives = count_collectives_in_hlo(self.text, self.sizes)

    def sent(self) -> dict[tuple[str, ...], float]:
        """Returns the bytes that a device sends, by mesh axes."""
        sent: dict[tuple[str, ...], float] = {}
        for collective, times in self.collectives.items():
            sent[collective.axes] = sent.get(collective.axes, 0) + times * collective.bytes_sent
        return sent


def plan_without_layers(
    model: jaxtp.ModelConfig, optimizer: object, mesh: jax.sharding.Mesh
) -> Blueprint:
    """Returns a plan with the same parameters and shardings.

    Its modules are built without a mesh.
    """
    built = nnx.eval_shape(lambda: TrainState(decoder_maker(model), optimizer, seed=0))
    return dataclasses.replace(plan_state(model, optimizer, mesh), graph=nnx.split(built)[0])


@contextmanager
def constraints_only(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Constrains the outputs of layers to their sharding in this package.

    It also constrains inputs and outputs of attention. The compiler chooses the rest.
    """

    def constrain(x: object, spec: P) -> object:
        return jax.tree.map(
            lambda a: jax.lax.with_sharding_constraint(a, NamedSharding(mesh, spec)), x
        )

    def constrained(call: Callable, spec: P) -> Callable:
        return lambda self, x: constrain(call(self, x), spec)

    attend = jax.nn.dot_product_attention
    heads = batch_spec(None, TP, None)

    def constrained_attention(q: jax.Array, k: jax.Array, v: jax.Array, **kwargs: object) -> object:
        return constrain(attend(*constrain((q, k, v), heads), **kwargs), heads)

    between = batch_spec(TP, None) if mesh.shape[TP] > 1 else batch_spec(None, None)
    specs = {
        jaxtp.ColumnParallelLinear: batch_spec(None, TP),
        jaxtp.RowParallelLinear: between,
        jaxtp.Norm: between,
        jaxtp.VocabParallelEmbedding: between,
    }
    originals = {cls: cls.__call__ for cls in specs}
    for cls, spec in specs.items():
        cls.__call__ = constrained(originals[cls], spec)
    jax.nn.dot_product_attention = constrained_attention
    try:
        yield
    finally:
        jax.nn.dot_product_attention = attend
        for cls, call in originals.items():
            cls.__call__ = call


def traffic(model: jaxtp.ModelConfig, rows: int, length: int) -> str:
    """Returns table 1."""
    table = []
    for mesh in MESHES:
        explicit = Measured(model, mesh, rows, length)
        # Chunks would make constraints alone send more.
        whole = dataclasses.replace(model, loss_chunk=rows * length)
        constrained = Measured(whole, mesh, rows, length, explicit=False)
        budget = sum(
            step_costs(
                model, explicit.sizes, batch_size=rows, sequence_length=length
            ).budget.values()
        )
        ours = explicit.sent()
        theirs = constrained.sent()
        for axes in sorted({*ours, *theirs}):
            cells = [f"{sent.get(axes, 0) / 1e6:,.2f}" for sent in (ours, theirs)]
            table.append((describe(mesh), "+".join(axes), "", *cells, ""))
        total = sum(ours.values())
        other = sum(theirs.values())
        row = (
            f"{budget / 1e6:,.2f}",
            f"{total / 1e6:,.2f}",
            f"{other / 1e6:,.2f}",
            f"{other / total:.2f}",
        )
        table.append((describe(mesh), "all", *row))
    return columns(("mesh", "axes", "budget", "explicit", "constraints only", "ratio"), table)


def memory_and_flops(model: jaxtp.ModelConfig, rows: int, length: int) -> str:
    """Returns tables 2 and 3."""
    table = []
    one = Measured(model, (1, 1, 1), rows, length)
    flops = count_flops_in_hlo(one.text)
    temporaries = one.compiled.memory_analysis().temp_size_in_bytes
    for mesh in [(1, 1, 1), *MESHES]:
        measured = one if mesh == (1, 1, 1) else Measured(model, mesh, rows, length)
        memory = measured.compiled.memory_analysis()
        devices = measured.mesh.size
        table.append(
            (
                describe(mesh),
                f"{memory.temp_size_in_bytes / 1e6:,.1f}",
                f"{memory.temp_size_in_bytes * devices / temporaries:.3f}",
                f"{memory.alias_size_in_bytes / bytes_per_device(measured.plan):.4f}",
                f"{count_flops_in_hlo(measured.text) / 1e9:,.2f}",
                f"{count_flops_in_hlo(measured.text) * devices / flops:.4f}",
            )
        )
    header = (
        "mesh",
        "temporaries, MB",
        "x devices / one",
        "state reused",
        "GFLOP of a device",
        "x devices / one",
    )
    return columns(header, table)


def compile_times(model: jaxtp.ModelConfig, rows: int, length: int, repeats: int) -> str:
    """Returns table 4."""
    times: dict[int, list[float]] = {4: [], 64: []}
    for _ in range(repeats):
        for layers, seconds in times.items():
            deep = dataclasses.replace(model, num_layers=layers)
            seconds.append(Measured(deep, (1, 2, 4), rows, length).seconds)
    medians = {layers: statistics.median(seconds) for layers, seconds in times.items()}
    table = [
        (str(n), f"{medians[n]:.2f}", ", ".join(f"{s:.2f}" for s in seconds))
        for n, seconds in times.items()
    ]
    return columns(("layers", "median s", "all"), table) + f"\nratio {medians[64] / medians[4]:.2f}"


def by_axis(mesh: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("dp", "fsdp", "tp"), mesh, strict=True))


def describe(mesh: tuple[int, int, int]) -> str:
    """Returns a label such as `fsdp 2 x tp 4`."""
    return str(Case(mesh_sizes(jaxtp.make_mesh(**by_axis(mesh))), sequence_parallel=False))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--small", action="store_true", help="compile a tiny model, to test the script"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="number of compilations of each depth (default 3)"
    )
    arguments = parser.parse_args(argv)
    model, rows, length = (SMALL, 8, 64) if arguments.small else (MODEL, BATCH, SEQUENCE)
    print(f"jax {jax.__version__}, 8 virtual CPU devices, {rows} x {length} tokens\n{model}\n")
    print("MB that a device sends in a step, in the HLO after SPMD partitioning\n")
    print(traffic(model, rows, length), flush=True)
    print("\nMemory and FLOPs\n")
    print(memory_and_flops(model, rows, length), flush=True)
    print("\nSeconds to compile\n")
    print(compile_times(model, rows, length, arguments.repeats))


if __name__ == "__main__":
    main()
