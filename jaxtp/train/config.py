"""The configuration of a training run; its defaults are `configs/tiny.yaml`."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import jax.numpy as jnp
import tyro
from pydantic import AfterValidator, Field

from jaxtp.config import ConfigError, Count, CountOrZero, NonNegative, Positive, UserPath, allowed, changed
from jaxtp.data.samples import LongDocuments, Packing
from jaxtp.hints import Problem, explained, not_divisible
from jaxtp.layers import grouped, remat
from jaxtp.layers.activations import Context, is_split
from jaxtp.layers.costs import Share
from jaxtp.layers.kernels import KernelName, Use, chosen, refused
from jaxtp.layers.rings import is_ring
from jaxtp.mesh import (
    AXES,
    BATCH,
    CONTEXT,
    CP,
    SEQUENCE,
    TP,
    batch_parts,
    describe_mesh,
    most_devices,
    parts,
    product_of,
    request_virtual_devices,
    settings_of,
)
from jaxtp.models.config import ModelConfig, model_problems, padded_sizes

Beta = Annotated[float, Field(ge=0, lt=1), allowed("from 0 to below 1")]


def _not_here(path: Path) -> Path:
    if path == Path():
        raise ValueError("should name a folder of its own")
    return path


Folder = Annotated[UserPath, AfterValidator(_not_here)]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The folder, the seed and the origin of a run."""

    dir: Folder = Path("runs/tiny")
    """Folder of config.yaml, metrics.jsonl and checkpoints/. The same folder again resumes the run."""

    seed: CountOrZero = 0
    """Seed of the initial weights and of the order of the data."""

    init_from: UserPath | None = None
    """Folder of another run of the same model: a new run starts from the weights of its newest checkpoint, and from
    nothing else of it."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis; -1, for one of them, takes all that are left."""

    dp: int = 1
    """Replicas of the parameters."""

    fsdp: int = 2
    """Shards of each parameter, gathered before use."""

    cp: int = 1
    """Parts of each sequence, for long ones; also shards of each parameter, gathered before use."""

    tp: int = 4
    """Shards of each matrix product."""

    context: Context = "auto"
    """Attention over cp: ulysses gives each device all tokens of some heads, gather all keys and values of its tokens.
    auto takes what moves less, of what the heads allow; ulysses where both move the same."""

    allow_padding: bool = True
    """Pad heads and d_ff where tp does not divide them; false refuses such a mesh."""

    tp_across_hosts: bool = False
    """Let the devices of one tp group be on several hosts: every layer then waits for the network between them."""

    @property
    def sizes(self) -> dict[str, int]:
        """Number of devices along each axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    def of_sizes(self, sizes: Mapping[str, int]) -> "MeshConfig":
        """Returns the section with other sizes of axes."""
        return replace(self, **sizes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data to train and to evaluate on."""

    path: UserPath | None = None
    """A folder that jaxtp prepare made, or a text file, whose bytes are the tokens; by default the sources of
    the running Python's standard library."""

    mixture: Annotated[dict[str, Positive], tyro.conf.Fixed] = field(default_factory=dict)
    """In a YAML file, instead of path: weights of several, such as {data/code: 0.7, data/prose: 0.3}."""

    validation: UserPath | None = None
    """Data to evaluate on: the held-out part of such a folder or file, or all of a folder that holds nothing out. By
    default what is held out of the data to train on."""

    packing: Packing = "documents"
    """documents: each whole and by itself, several in a sequence, attention within each only. concatenated: all one
    after the other, cut wherever a sequence is full, attention across."""

    long_documents: LongDocuments = "split"
    """A document longer than a sequence, where they are packed: split cuts it, drop leaves it out, stop refuses it."""

    sequence_length: Count = 128
    """Tokens in a sequence. Divisible by mesh.cp."""

    global_batch_size: Count = 16
    """Sequences in a step, over all devices. Divisible by mesh.dp * mesh.fsdp * train.accumulation."""

    @property
    def packed(self) -> bool:
        """Whether rows have segments."""
        return self.packing == "documents"


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Settings of one group of parameters."""

    learning_rate_scale: NonNegative = 1.0
    """Multiplies the learning rate; 0 freezes."""

    weight_decay: NonNegative | None = None
    """Weight decay instead of optimizer.weight_decay, for vectors too."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The rule that turns gradients into updates, and the learning rate over the steps."""

    name: Literal["adamw", "lion", "adafactor", "muon"] = "adamw"
    """Rule: adamw; lion (a third of adamw's rate is usual); adafactor, whose second moments are factored; muon, which
    orthogonalises the updates of matrices in the blocks, and uses adamw for the rest."""

    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate after the warm-up; wsd stays at the peak and decays at the end."""

    decay_fraction: Annotated[float, Field(gt=0, le=1), allowed("above 0, up to 1")] = 0.2
    """Share of all steps in which wsd decays."""

    groups: Annotated[dict[str, GroupConfig], tyro.conf.Fixed] = field(default_factory=dict)
    """In a YAML file: settings by pattern of parameter path, such as "blocks.*.kernel": {learning_rate_scale: 0.5};
    * matches anything, the first pattern that matches holds, and one that matches nothing is an error."""

    learning_rate: Positive = 5e-3
    """Peak learning rate."""

    warmup_steps: CountOrZero = 20
    """Steps of linear warm-up from zero; cut to train.steps where it is longer."""

    final_fraction: Annotated[float, Field(ge=0, le=1), allowed("from 0 to 1")] = 0.1
    """Learning rate at the last step, as a fraction of the peak; not of the constant schedule."""

    beta1: Beta = 0.9
    """Decay of the first moment, or of muon's momentum."""

    beta2: Beta = 0.95
    """Decay of the second moment; of lion's momentum. Not of adafactor."""

    eps: Annotated[float, Field(ge=1e-37, allow_inf_nan=False), allowed("1e-37 or more")] = 1e-8
    """Added to the root of the second moment."""

    weight_decay: NonNegative = 0.1
    """Decoupled decay, of matrices only: not of norms and biases."""

    clip_norm: Positive = 1.0
    """Gradients are scaled down to this global L2 norm."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The length of the training, its loss, and its reports."""

    steps: Count = 400
    """Optimizer updates in the whole run; the learning rate decays over them."""

    accumulation: Count = 1
    """Micro-batches of a step, one after the other; their gradients add up to those of the whole batch, but for
    rounding: the sums are in model.precision.reduce, or in the parameters' dtype if it is the wider."""

    z_loss: NonNegative = 0.0
    """Weight of the squared log-normaliser of the softmax in the training loss; 1e-4 is usual, 0 is off."""

    balance_loss: NonNegative = 1e-2
    """Weight of the loss that evens the load of a model's experts, averaged over layers; 1e-3 is usual where a trained
    model is trained further."""

    router_z_loss: NonNegative = 0.0
    """Weight of the squared log-normaliser of the routers' softmax, averaged over layers; 1e-3 is usual, 0 is off."""

    selection_bias_rate: Annotated[float, Field(ge=0, le=1), allowed("from 0 to 1")] = 1e-3
    """Step by which an update moves each expert's bias against its load, where model.selection_bias is on."""

    log_every: Count = 10
    """Steps between lines of metrics.jsonl; the last step is always logged."""

    non_finite: Literal["stop", "skip"] = "stop"
    """Reaction to a step whose loss or gradient is not finite. Its update is never applied: stop saves the state and
    the batch for inspection and ends the run, skip goes on. An update that is not finite although they are ends the run
    either way."""

    max_skipped: Count = 10
    """Steps in a row that skip may leave out before it stops."""

    allow_oversize: bool = False
    """Train even where a step takes more memory than a device has, by the estimate, which is modelled in part."""

    stall_seconds: NonNegative = 1800.0
    """A step that takes longer prints the stacks of all Python threads; 0 never does."""

    stall_abort_seconds: NonNegative = 0.0
    """A step, evaluation or save that takes longer ends the process with exit code 75, so that what started it can
    start it again, from the newest checkpoint; the first step is compiled in that time too. 0 never does."""

    stopped_exit_code: Annotated[int, Field(ge=0, le=255), allowed("from 0 to 255")] = 0
    """Exit code where a signal stops a run before its last step. What takes 0 for done, as a Job of Kubernetes does,
    needs another to start the run again."""

    verify_every: CountOrZero = 0
    """Steps between verifications, which look for silent corruption: what devices hold in copies is compared, and the
    step is computed twice. A difference ends the run and names the devices. Host memory holds the state twice
    meanwhile. 0 never does."""

    @property
    def skips_allowed(self) -> int:
        """Number of steps in a row that may be skipped."""
        return self.max_skipped if self.non_finite == "skip" else 0


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Trackers beside metrics.jsonl, and norms to log."""

    trackers: tuple[Literal["tensorboard", "wandb", "aim"], ...] = ("tensorboard",)
    """tensorboard writes event files into the run's folder; wandb and aim are extras of those names. A flag takes
    several (--metrics.trackers tensorboard wandb); none with an empty list in a YAML file."""

    project: str = "jaxtp"
    """Project of W&B, or experiment of Aim, that the run belongs to."""

    norm_groups: tuple[str, ...] = ()
    """Patterns of parameter path, such as "blocks.mlp.*": the norms of the gradients and of the parameters that each
    matches are logged too. One that matches nothing is an error."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The start of a run of several processes."""

    preflight_bandwidth: bool = False
    """Also measure how fast each axis of the mesh gathers, before anything of the run is allocated."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """A trace of a few steps, for XProf and Perfetto."""

    start: CountOrZero = 0
    """The first step to trace; 0 traces none. Not before step 3 or so, where everything has warmed up."""

    steps: Count = 5
    """Steps to trace."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on the held-out split."""

    every: CountOrZero = 100
    """Steps between evaluations; 0 evaluates before the first step and after the last only, as every run does."""

    batches: Count = 8
    """Batches of data.global_batch_size in an evaluation, at most: each held-out row counts once. The same each time
    and on every mesh."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and what to keep."""

    every: CountOrZero = 50
    """Steps between checkpoints; 0 saves at the end only."""

    keep: Count = 2
    """Newest checkpoints to keep."""

    keep_every: CountOrZero = 0
    """Also keep those at multiples of this step; 0 for none."""

    keep_best: bool = True
    """Also keep the one with the lowest validation loss, among those saved at a step that was evaluated."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything about a run."""

    run: RunConfig = RunConfig()
    mesh: MeshConfig = MeshConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: LoopConfig = LoopConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    profile: ProfileConfig = ProfileConfig()
    launch: LaunchConfig = LaunchConfig()


FIRST = (
    "run.dir",
    "model.from_hf",
    "model.lora.rank",
    "model.remat",
    "data.path",
    "data.sequence_length",
    "data.global_batch_size",
    "optimizer.learning_rate",
    "train.steps",
    "train.accumulation",
    "eval.every",
    "checkpoint.every",
)
"""Settings that the help of a command shows first."""

NOT_OF_A_STEP = (
    "run.dir",
    "data.path",
    "data.mixture",
    "data.validation",
    "data.long_documents",
    "train.log_every",
    "train.non_finite",
    "train.max_skipped",
    "train.allow_oversize",
    "train.stall_seconds",
    "train.stall_abort_seconds",
    "train.stopped_exit_code",
    "train.verify_every",
    "eval",
    "checkpoint",
    "metrics",
    "profile",
    "launch",
)
"""Settings of a run that say nothing of its step: commands that ask about the step alone do not offer them."""

NOT_OF_ITS_COST = (
    *NOT_OF_A_STEP,
    "run.seed",
    *(
        f"optimizer.{name}"
        for name in (
            "schedule",
            "decay_fraction",
            "groups",
            "learning_rate",
            "warmup_steps",
            "final_fraction",
            "beta1",
            "beta2",
            "eps",
            "weight_decay",
            "clip_norm",
        )
    ),
    *(f"train.{name}" for name in ("z_loss", "balance_loss", "router_z_loss", "selection_bias_rate")),
)
"""Settings that change neither the time nor the memory of a step."""


def check(config: TrainConfig, mesh: dict[str, int], most: Callable[[], int | None] = most_devices) -> None:
    """Checks that the sizes fit each other and the mesh.

    Args:
      config: the run.
      mesh: number of devices along each axis.
      most: returns the most devices that a mesh can have, or None; called where something does not fit.

    Raises:
      ConfigError: with every violation, each with the nearest values that work.
    """
    if any(_problems(config, mesh)):
        _refuse(violations_on(config, mesh, most()))


def check_devices(config: TrainConfig, mesh: Mapping[str, int]) -> None:
    """Checks that there are as many devices as the mesh needs; starts JAX's backend.

    Raises:
      ConfigError: there are fewer; with the nearest sizes that fit them and the model.
    """
    request_virtual_devices(math.prod(mesh.values()))
    _refuse(violations_on(config, mesh, most_devices()))


def _refuse(problems: Iterable[str]) -> None:
    if found := list(problems):
        raise ConfigError("these settings do not fit each other:\n" + "\n".join(f"  {problem}" for problem in found))


def check_vocabulary(model: ModelConfig, needed: int, source: str) -> None:
    """Checks that the model has every token of the data.

    Raises:
      ConfigError: it has not.
    """
    if model.vocab_size < needed:
        raise ConfigError(
            f"the ids of {source} go up to {needed - 1}, and model.vocab_size={model.vocab_size} has fewer; a new "
            f"model needs at least --model.vocab-size {needed}, that of a run is in --config RUN/config.yaml"
        )


def kernels(config: TrainConfig, mesh: Mapping[str, int], platform: str) -> dict[KernelName, str]:
    """Returns the kernels of attention that a run takes on a mesh of a kind of device, and why each."""
    found = (chosen(config.model.attention, use) for use in run_uses(config, mesh, platform))
    return {kernel.name: why for kernel, why in found}


def kernel_problems(config: TrainConfig, mesh: Mapping[str, int], platform: str | None = None) -> Iterator[str]:
    """Yields why a kernel that is asked for cannot do the run, on a kind of device if one is given."""
    found = (refused(config.model.attention, use) for use in run_uses(config, mesh, platform))
    yield from dict.fromkeys(problem for problems in found for problem in problems)
    if config.model.most_experts:
        yield from grouped.refused(config.model.grouped, platform)


def check_kernels(config: TrainConfig, mesh: Mapping[str, int], platform: str) -> None:
    """Checks that the kernels that are asked for can do the run on a kind of device.

    Raises:
      ConfigError: one cannot.
    """
    for problem in kernel_problems(config, mesh, platform):
        raise ConfigError(problem)


def describe_kernels(config: TrainConfig, mesh: Mapping[str, int], platform: str) -> str:
    """Returns a line on the kernels that a run takes on a mesh of a kind of device: of attention, and of experts."""
    attention = [f"{name} attention ({why})" for name, why in kernels(config, mesh, platform).items()]
    return "; ".join([" and ".join(attention), *describe_grouped(config.model, platform)])


def describe_grouped(model: ModelConfig, platform: str) -> Iterator[str]:
    """Yields how experts multiply on a kind of device, where there are any; a warning where an accelerator multiplies
    every row with every expert."""
    if not (experts := model.most_experts):
        return
    method, why = grouped.method_of(model.grouped, platform)
    yield f"{method} products of experts ({why})"
    if platform != "cpu" and multiplies_all(model, platform):
        yield f"WARNING: that multiplies every row with every expert, {experts} times the work and the memory of rows"


def multiplies_all(model: ModelConfig, platform: str) -> bool:
    """Returns whether a kind of device multiplies every row with every expert."""
    return model.most_experts > 0 and grouped.dense(grouped.method_of(model.grouped, platform)[0], platform)


def describe_experts(model: ModelConfig, tp: int) -> str | None:
    """Returns a line on how experts are divided over tp; None where there are none."""
    blocks = [block for block in model.block_kinds() if block.num_experts]
    divided = dict.fromkeys(
        f"{block.num_experts // tp} of {block.num_experts} on each device, whole"
        if block.over_tp(tp)
        else f"all {block.num_experts} on each device, {block.d_ff // tp} of the width {block.d_ff} of each"
        for block in blocks
    )
    return f"over tp {tp}: {' and '.join(divided)}" if divided else None


def share_of(config: TrainConfig, mesh: Mapping[str, int]) -> Share:
    """Returns what the layers of a run have to know of a device to divide sequences over cp."""
    return Share(sizes=mesh, rows=1, length=config.data.sequence_length, context=config.mesh.context)


def describe_context(config: TrainConfig, mesh: Mapping[str, int]) -> str | None:
    """Returns a line on how attention works over cp, where there is one."""
    if mesh[CP] == 1:
        return None
    share, found = share_of(config, mesh), {}
    for block in config.model.block_kinds():
        attended = block.attended(mesh[TP])
        method, why = attended.method(share)
        where = "" if attended.window is None else f" within a window of {attended.window:,}"
        found[f"{method}{where} ({why})"] = attended.uneven(share)
    chunks = "a chunk on each device"
    if config.model.zigzag(share):
        chunks = "two chunks of each on a device, for even work"
    elif any(found.values()):
        chunks += f"; WARNING: the last has the most to do, as 2 * cp does not divide sequences of {share.length:,}"
    return f"sequences over cp {mesh[CP]}, {chunks}; attention by {' and '.join(found)}"


def describe_overlap(config: TrainConfig, mesh: Mapping[str, int]) -> str | None:
    """Returns a line on how a run overlaps communication and products, where it was asked to."""
    length, tp = config.data.sequence_length, mesh[TP]
    if config.model.overlap == "none":
        return None
    if is_ring(config.model.overlap, tp, split=is_split(config.model.sequence_parallel, length, mesh)):
        return f"rings of tp {tp}: a part of a sequence moves while another is multiplied"
    parts_of = describe_mesh(mesh, [axis for axis in SEQUENCE if mesh[axis] > 1])
    why = "there is no tp" if tp == 1 else f"{parts_of} does not divide sequences of {length}, which tp leaves whole"
    return f"model.overlap=ring does nothing here: {why}"


def run_uses(config: TrainConfig, mesh: Mapping[str, int], platform: str | None) -> list[Use]:
    """Returns what each kind of block of a run asks of a kernel of attention, on a kind of device if one is given."""
    share = replace(share_of(config, mesh), packed=config.data.packed, platform=platform)
    return [block.use_on(share, config.model.precision.compute) for block in config.model.block_kinds()]


def check_platform(config: TrainConfig, mesh: Mapping[str, int], platform: str) -> None:
    """Checks that the devices can do what the run asks of them.

    Args:
      config: the run.
      mesh: devices along each axis.
      platform: kind of device: cpu, cuda, rocm or tpu.

    Raises:
      ConfigError: a kernel that the platform lacks.
      RematError: a remat policy that it cannot carry out.
    """
    remat.policy(config.model.remat)
    check_kernels(config, mesh, platform)


def training_of(config: TrainConfig) -> TrainConfig:
    """Returns the training configuration alone, of a command's configuration that has more settings."""
    return TrainConfig(**{field.name: getattr(config, field.name) for field in fields(TrainConfig)})


def violations_on(config: TrainConfig, mesh: Mapping[str, int], devices: int | None = None) -> Iterator[str]:
    """Yields every reason why the sizes do not fit each other and the mesh, each with the nearest values that work.

    Args:
      config: the run; its own mesh is not looked at.
      mesh: number of devices along each axis.
      devices: the most devices that a mesh can have, if that is known.
    """

    def problems(changes: Mapping[str, int]) -> Iterator[Problem]:
        sizes = {axis: changes.get(f"mesh.{axis}", mesh[axis]) for axis in AXES}
        others = {name: value for name, value in changes.items() if not name.startswith("mesh.")}
        yield from _problems(changed(config, others), sizes)
        if devices is not None and (needed := math.prod(sizes.values())) > devices:
            yield Problem(
                f"the mesh {describe_mesh(sizes)} needs {needed} devices, and there are {devices}",
                among={f"mesh.{axis}": size for axis, size in sizes.items()},
            )

    return explained(problems, fixed=config.model.from_hf is not None or config.run.init_from is not None)


def padding_problems(config: TrainConfig, mesh: Mapping[str, int]) -> Iterator[Problem]:
    """Yields a problem for each size of the model that a mesh would pad, where the run allows no padding."""
    refused = {} if config.mesh.allow_padding else padded_sizes(config.model, mesh[TP])
    for name, (size, padded) in refused.items():
        text = f"mesh.tp={mesh[TP]} pads {size} {name} to {padded}, and mesh.allow_padding is false"
        yield Problem(text, among={f"mesh.{TP}": size})


def _problems(config: TrainConfig, mesh: Mapping[str, int]) -> Iterator[Problem]:
    """Yields the problems of a configuration on a mesh, without suggestions."""
    problems = [*model_problems(config.model, mesh), *context_problems(config, mesh)]
    yield from problems or (*map(Problem, kernel_problems(config, mesh)), *padding_problems(config, mesh))
    batch, length = config.data.global_batch_size, config.data.sequence_length
    by, divided = f"mesh.{'*'.join(BATCH)} * train.accumulation", batch_parts(mesh) * config.train.accumulation
    among = dict.fromkeys((*settings_of(BATCH), "train.accumulation"), batch)
    yield from not_divisible("data.global_batch_size", batch, by, divided, among)
    if (positions := config.model.learned_positions) is not None and length > positions:
        yield Problem(f"data.sequence_length={length} is more than model.learned_positions={positions}")
    yield from map(Problem, (*_moment_violations(config), *_contradictions(config)))


def context_problems(config: TrainConfig, mesh: Mapping[str, int]) -> Iterator[Problem]:
    """Yields why sequences cannot be divided over cp, and over tp where sequence parallelism is asked for."""
    length, axes = config.data.sequence_length, SEQUENCE if config.model.sequence_parallel else CONTEXT
    among = dict.fromkeys(settings_of(axes), length)
    undivided = [*not_divisible("data.sequence_length", length, product_of(axes, mesh), parts(mesh, axes), among)]
    kinds = config.model.block_kinds() if mesh[CP] > 1 and not undivided else ()
    found = {problem.text: problem for block in kinds for problem in block.context_problems(share_of(config, mesh))}
    yield from (*undivided, *found.values())


def _contradictions(config: TrainConfig) -> Iterator[str]:
    if config.data.path is not None and config.data.mixture:
        yield f"data.path={config.data.path} and data.mixture exclude each other: leave one of them out"
    if config.model.overlap == "ring" and config.model.sequence_parallel is False:
        yield (
            "model.overlap=ring overlaps what sequence parallelism moves, and model.sequence_parallel is false: leave "
            "that out, or set model.overlap=none"
        )
    given, default = config.train, LoopConfig()
    biased = any(block.selection_bias for block in config.model.block_kinds())
    for name, used, instead in (
        ("balance_loss", config.model.most_experts, "model.num_experts"),
        ("router_z_loss", config.model.most_experts, "model.num_experts"),
        ("selection_bias_rate", biased, "model.selection_bias"),
    ):
        if not used and (value := getattr(given, name)) != getattr(default, name):
            yield f"train.{name}={value} is of what {instead} switches on, and that is off; set it, or leave this out"
    halves = (f"{name}=float16" for name, dtype in vars(config.model.precision).items() if dtype == "float16")
    if given_halves := " and ".join(f"model.precision.{half}" for half in halves):
        yield (
            f"{given_halves} cannot be trained in: gradients below 6e-8 vanish without loss scaling, which there is "
            "not; use bfloat16, or float32 on GPUs without it"
        )
    if config.profile.start > config.train.steps:
        yield f"profile.start={config.profile.start} is after the last step, train.steps={config.train.steps}"


def _moment_violations(config: TrainConfig) -> Iterator[str]:
    """Yields the decays that are 1 in the dtype of the moments, or so near that the moments stay as they are."""
    dtype = config.model.precision.param
    most = 1 - float(jnp.finfo(dtype).eps)
    instead = "" if dtype == "float32" else ", or model.precision.param=float32"
    for name in ("beta1", "beta2"):
        beta = getattr(config.optimizer, name)
        if beta > most and config.optimizer.name != "adafactor":
            yield (
                f"optimizer.{name}={beta} is as good as 1 in {dtype}, the dtype of its moments, which would never "
                f"forget; at most {most}{instead}"
            )
