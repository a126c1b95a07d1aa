"""Checks of a configuration: consistency, mesh and devices."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxtp.config.hints import (
    Problem,
    Switch,
    explained,
    mesh_settings,
    not_divisible,
    product_text,
    without_effect,
)
from jaxtp.config.schema import ConfigError, replace_nested
from jaxtp.distributed.devices import most_devices
from jaxtp.layers.context import LocalShape
from jaxtp.layers.kernels import grouped
from jaxtp.layers.kernels.select import (
    Kernel,
    KernelName,
    Use,
    architecture_of,
    matmul_problem,
    pick_kernel,
    unsupported,
)
from jaxtp.mesh import (
    AXES,
    BATCH,
    CONTEXT,
    CP,
    SEQUENCE,
    TP,
    Sizes,
    describe_mesh,
    mesh_sizes,
    parts,
)
from jaxtp.models.block import BlockConfig
from jaxtp.models.config import ModelConfig, model_problems, padded_sizes
from jaxtp.train.config import TrainConfig

Find = Callable[[TrainConfig, Sizes], Iterable[Problem]]
"""Returns the conflicts of settings and mesh."""


def check(
    config: TrainConfig,
    mesh: Sizes,
    available: Callable[[], int | None] = most_devices,
    find: Find | None = None,
) -> None:
    """Checks that settings fit each other and the mesh; ignores `config.mesh`.

    Args:
      available: returns the number of available devices; called only if something does not fit.
      find: by default `problems`.

    Raises:
      ConfigError: all violations with the nearest values that work.
    """
    find = find or problems
    if any(find(config, mesh)):
        refuse(violations_on(config, mesh, available(), find))


def check_decoder(config: TrainConfig, mesh: Mesh) -> None:
    """Raises ConfigError if a decoder does not fit the mesh or its devices."""
    sizes = mesh_sizes(mesh)
    check(config, sizes)
    check_kernels(config, sizes, architecture_of(mesh.devices.flat[0]))


def refuse(violations: Iterable[str]) -> None:
    """Raises ConfigError if there are violations."""
    lines = [f"\n  {violation}" for violation in violations]
    if lines:
        raise ConfigError(f"these settings do not fit each other:{''.join(lines)}")


def check_kernels(config: TrainConfig, mesh: Sizes, platform: str) -> None:
    """Raises ConfigError if a requested kernel does not run on the platform."""
    for problem in kernel_problems(config, mesh, platform):
        raise ConfigError(problem)


def kernel_problems(config: TrainConfig, mesh: Sizes, platform: str | None = None) -> Iterator[str]:
    """Yields the reasons why requested kernels cannot compute this run."""
    model = config.model
    uses = run_uses(config, mesh, platform)
    for problem in dict.fromkeys(chain(*(unsupported(model.attention, use) for use in uses))):
        yield (
            f"model.attention={model.attention}: {problem}; the run has "
            f"data.packing={config.data.packing}, mesh.context={config.mesh.context} and "
            f"model.precision.compute={model.precision.compute}"
        )
    if model.most_experts:
        for problem in grouped.unsupported(model.grouped, platform):
            yield f"model.grouped={model.grouped}: {problem}"
    matmul = model.precision.matmul
    if matmul_obstacle := matmul_problem(matmul, platform or "cpu"):
        yield f"model.precision.matmul={matmul}: {matmul_obstacle}"


def chosen_kernels(config: TrainConfig, mesh: Sizes, platform: str) -> dict[KernelName, str]:
    """Returns the run's attention kernels on a platform, with reasons."""
    choices = (pick_kernel(config.model.attention, use) for use in run_uses(config, mesh, platform))
    return {kernel.name: why for kernel, why in choices}


def run_uses(config: TrainConfig, mesh: Sizes, platform: str | None) -> list[Use]:
    """Returns the use of attention by each kind of block."""
    share = replace(share_of(config, mesh), packed=config.data.packed, platform=platform)
    dtype = config.model.precision.compute
    return [block.use_on(share, dtype) for block in attention_blocks(config.model)]


AttentionCase = tuple[Kernel, Use, tuple[int, int]]
"""A kernel, its use, and the numbers of query and kv heads on a device."""


def attention_cases(config: TrainConfig, mesh: Mesh) -> list[AttentionCase]:
    """Returns a run's attention kernels, their uses, and query and kv heads of a device."""
    sizes = mesh_sizes(mesh)
    uses = run_uses(config, sizes, architecture_of(mesh.local_devices[0]))
    heads = [block.heads.on_device(sizes[TP]) for block in attention_blocks(config.model)]
    kernels = [pick_kernel(config.model.attention, use)[0] for use in uses]
    return list(dict.fromkeys(zip(kernels, uses, heads, strict=True)))


def attention_blocks(model: ModelConfig) -> list[BlockConfig]:
    """Returns the distinct settings of blocks that have attention."""
    return [block for block in model.block_kinds() if block.has_attention]


def share_of(config: TrainConfig, mesh: Sizes) -> LocalShape:
    """Returns the shape of one row of the batch on a device."""
    return LocalShape(
        sizes=mesh, rows=1, length=config.data.sequence_length, context=config.mesh.context
    )


def problems(config: TrainConfig, mesh: Sizes) -> Iterator[Problem]:
    """Yields each conflict of a decoder's settings and the mesh; ignores `config.mesh`."""
    size_problems = [*model_problems(config.model, mesh), *context_problems(config, mesh)]
    yield from size_problems
    if not size_problems:
        yield from map(Problem, kernel_problems(config, mesh))
        yield from padding_problems(config, mesh)
    yield from general_problems(config, mesh)
    length = config.data.sequence_length
    positions = config.model.learned_positions
    if positions is not None and length > positions:
        yield Problem(
            f"data.sequence_length={length} is more than model.learned_positions={positions}"
        )
    unused = without_effect(config, _switches(config))
    yield from map(Problem, (*_moment_problems(config), *unused, *_float16_problems(config)))


def violations_on(
    config: TrainConfig,
    mesh: Sizes,
    devices: int | None = None,
    find: Find = problems,
) -> Iterator[str]:
    """Yields each conflict of settings and mesh, with the nearest values that work.

    Ignores `config.mesh`.

    Args:
      devices: the number of available devices, if known.
      find: returns the conflicts.
    """

    def problems_after(changes: Mapping[str, int]) -> Iterator[Problem]:
        sizes = {axis: changes.get(f"mesh.{axis}", mesh[axis]) for axis in AXES}
        settings = {name: changes[name] for name in changes if not name.startswith("mesh.")}
        yield from find(replace_nested(config, settings), sizes)
        needed = math.prod(sizes.values())
        if devices is not None and needed > devices:
            yield Problem(
                f"the mesh {describe_mesh(sizes)} needs {needed} devices, and there are {devices}",
                among={f"mesh.{axis}": size for axis, size in sizes.items()},
            )

    is_new = config.origin.from_hf is None and config.run.init_from is None
    return explained(problems_after, fixed=not is_new)


def general_problems(config: TrainConfig, mesh: Sizes) -> Iterator[Problem]:
    """Yields the conflicts of settings and mesh that any model has."""
    # A user's batches have their own size.
    if config.data.batches is None:
        yield from batch_problems(config, mesh)
    if config.data.path is not None and config.data.mixture:
        yield Problem(
            f"data.path={config.data.path} and data.mixture exclude each other: leave one of "
            "them out"
        )
    has_project = not {"wandb", "mlflow"}.isdisjoint(config.metrics.trackers)
    is_wsd = config.optimizer.schedule == "wsd"
    switches = (
        ("data.packing=documents", config.data.packed, ["data.long_documents"]),
        ("optimizer.schedule=wsd", is_wsd, ["optimizer.decay_fraction"]),
        ("profile.start", config.profile.start, ["profile.steps"]),
        ("train.non_finite=skip", config.train.non_finite == "skip", ["train.spike"]),
        (
            "train.spike=skip",
            config.train.spike == "skip",
            ["train.spike_deviations", "train.spike_window"],
        ),
        ("wandb or mlflow in metrics.trackers", has_project, ["metrics.project"]),
        ("eval.tasks", config.eval.tasks, _TASK_SETTINGS),
    )
    yield from map(Problem, without_effect(config, switches))
    if config.profile.start > config.train.steps:
        yield Problem(
            f"profile.start={config.profile.start} is after the last step, "
            f"train.steps={config.train.steps}"
        )


def batch_problems(
    config: TrainConfig, mesh: Sizes, *, have_own_rows: bool = False
) -> Iterator[Problem]:
    """Yields why the batch cannot be split over the mesh and the micro-batches.

    Args:
      have_own_rows: the batches are a user's, so that no setting changes their number of rows.
    """
    batch = config.data.global_batch_size
    factors = mesh_settings(BATCH, mesh) | {"train.accumulation": config.train.accumulation}
    if not have_own_rows:
        yield from not_divisible("data.global_batch_size", batch, factors)
    elif batch % math.prod(factors.values()):
        text = f"batches have {batch} rows, not divisible by {product_text(factors)}"
        yield Problem(text, dict.fromkeys(factors, batch))


def padding_problems(config: TrainConfig, mesh: Sizes) -> Iterator[Problem]:
    """Yields model sizes that the mesh would pad, if padding is forbidden."""
    refused = {} if config.mesh.allow_padding else padded_sizes(config.model, mesh[TP])
    for name, (size, padded) in refused.items():
        text = f"mesh.tp={mesh[TP]} pads {size} {name} to {padded}, and mesh.allow_padding is false"
        yield Problem(text, among={f"mesh.{TP}": size})


def context_problems(config: TrainConfig, mesh: Sizes) -> Iterator[Problem]:
    """Yields why sequences cannot be split over cp, or tp with sequence parallelism."""
    length = config.data.sequence_length
    axes = SEQUENCE if config.model.sequence_parallel else CONTEXT
    undivided = list(not_divisible("data.sequence_length", length, mesh_settings(axes, mesh)))
    yield from undivided
    if undivided or parts(mesh, CONTEXT) == 1:
        return
    share = share_of(config, mesh)
    if share.context != "ulysses":
        return
    blocks = attention_blocks(config.model)
    for queries in dict.fromkeys(block.heads.on_device(share.tp)[0] for block in blocks):
        if queries % mesh[CP]:
            text = (
                f"mesh.context=ulysses: mesh.cp={mesh[CP]} does not divide the {queries} query "
                f"heads of a device over mesh.tp={share.tp}; use gather or auto"
            )
            yield Problem(text, among={f"mesh.{CP}": queries})


def _switches(config: TrainConfig) -> Iterator[Switch]:
    model = config.model
    yield "model.sequence_parallel", model.sequence_parallel is not False, ["model.overlap"]
    has_moment = config.optimizer.name != "adafactor"
    yield "optimizer.name=adamw, lion or muon", has_moment, ["optimizer.first_moment"]
    experts = ["train.balance_loss", "train.router_z_loss"]
    # The settings of an existing model may name experts although it has none.
    if config.origin.from_hf is None and config.run.init_from is None:
        experts += _EXPERTS_SETTINGS
    yield "model.num_experts", model.most_experts, experts
    has_bias = any(block.selection_bias for block in model.block_kinds())
    yield "model.selection_bias", has_bias, ["train.selection_bias_rate"]


_TASK_SETTINGS = (
    "eval.tasks_every",
    "eval.task_folder",
    "eval.num_fewshot",
    "eval.limit",
    "eval.chat",
)
_EXPERTS_SETTINGS = (
    "model.experts_per_token",
    "model.normalize_experts",
    "model.normalize_floor",
    "model.experts_scale",
    "model.router_scores",
    "model.expert_groups",
    "model.groups_per_token",
    "model.group_score",
)


def _float16_problems(config: TrainConfig) -> Iterator[str]:
    dtypes = {
        f"model.precision.{name}": dtype for name, dtype in vars(config.model.precision).items()
    }
    if config.model.lora.rank:
        # Frozen weights have no gradient.
        del dtypes["model.precision.param"]
        dtypes["model.lora.dtype"] = config.model.lora.dtype
    halves = [name for name, dtype in dtypes.items() if dtype == "float16"]
    if halves:
        yield (
            f"cannot train in float16 ({', '.join(halves)}): jaxtp has no loss scaling, and "
            "gradients below 6e-8 would vanish; use bfloat16, or float32 on GPUs without bfloat16"
        )


def _moment_problems(config: TrainConfig) -> Iterator[str]:
    # A decay that rounds to 1 would freeze the moments.
    dtype = config.model.trained_dtype
    setting = "lora.dtype" if config.model.lora.rank else "precision.param"
    max_beta = 1 - float(jnp.finfo(dtype).eps)
    alternative = "" if dtype == "float32" else f", or model.{setting}=float32"
    for name in ("beta1", "beta2"):
        beta = getattr(config.optimizer, name)
        if beta > max_beta and config.optimizer.name != "adafactor":
            yield (
                f"optimizer.{name}={beta} rounds to 1 in {dtype}, the dtype of the moments, so "
                f"they would never decay; use at most {max_beta}{alternative}"
            )
