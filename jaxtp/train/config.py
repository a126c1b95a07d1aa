"""The configuration of a training run.

The defaults are `configs/tiny.yaml`. `validation.py` checks it.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from jaxtp.config.affects import (
    ARCHITECTURE,
    COST,
    NOTHING,
    NUMBERS,
    ONLY_IN_FILES,
    RUNS_CODE,
    SAMPLES,
    SHORT_HELP,
    STEP,
    Affects,
    Argument,
    ArgumentsOf,
    WithinSection,
    settings,
)
from jaxtp.config.schema import (
    Address,
    Count,
    CountOrZero,
    DataKey,
    DataPath,
    FolderOrUrl,
    Fraction,
    NonNegative,
    Positive,
    Reference,
    Settings,
    Share,
    UserPath,
    as_base,
)
from jaxtp.data.samples import LongDocuments, Packing
from jaxtp.distributed.devices import Allocator
from jaxtp.layers.context import Context
from jaxtp.mesh import AXES, Sizes, describe_mesh
from jaxtp.models.config import BlockChanges, Changes, ModelConfig, OriginConfig

Beta = Annotated[float, Field(ge=0, lt=1)]


def _not_here(path: Path) -> Path:
    if path == Path():
        raise ValueError("should not be the current folder; name another one")
    return path


Folder = Annotated[UserPath, AfterValidator(_not_here)]


_BUCKET = r"://[\w.-]+(/.*)?"


def _of_store(url: str) -> str:
    if not re.fullmatch(f"(s3|gs){_BUCKET}|file:///.+", url):
        raise ValueError("should be s3://BUCKET/PATH, gs://BUCKET/PATH or file:///FOLDER")
    return url


StoreUrl = Annotated[str, AfterValidator(_of_store)]


def _of_google(url: str) -> str:
    if not re.fullmatch(f"gs{_BUCKET}", url):
        raise ValueError(
            "should be gs://BUCKET/PATH, because Orbax writes checkpoints to no other store; "
            "--run.mirror URL copies checkpoints to S3, from a folder that all hosts share"
        )
    return url


GoogleUrl = Annotated[str, AfterValidator(_of_google)]


def _not_aim(name: object) -> object:
    if name == "aim":
        raise ValueError(
            "is no longer a tracker; tensorboard, wandb and mlflow are, and a callback can write "
            "to any other (--train.callbacks FILE.py:NAME)"
        )
    return name


TrackerName = Annotated[Literal["tensorboard", "wandb", "mlflow"], BeforeValidator(_not_aim)]


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """Folder, seed and initial weights."""

    dir: Annotated[Folder, NOTHING, SHORT_HELP] = Path("runs/tiny")
    """Folder of the run, which resumes if the folder is given again. It has config.yaml,
    metrics.jsonl and checkpoints/."""

    mirror: Annotated[StoreUrl | None, NOTHING] = None
    """Address (s3://BUCKET/PATH or gs://BUCKET/PATH) that gets a copy of the newest checkpoint,
    in the background. A start downloads the newest one if it is newer than any in the folder."""

    seed: Annotated[CountOrZero, Affects(numbers=True, fixed=True)] = 0
    """Seed of the initial weights and of the order of the data."""

    resume_at: Annotated[Count | None, NOTHING] = None
    """Step of an older checkpoint in run.dir. The run continues from a copy of it in a new folder,
    whose name is that of run.dir with -at-STEP."""

    init_from: FolderOrUrl | None = None
    """Folder of another run of the same model, whose newest weights the new run starts from."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Settings):
    """Devices along each axis; one axis may be -1, for all remaining."""

    dp: int = 1
    """Replicas of the parameters."""

    fsdp: int = 2
    """Shards of each parameter, gathered before use."""

    cp: int = 1
    """Parts of each sequence, for long sequences. Parameters are sharded over cp too, and gathered
    before use."""

    tp: int = 4
    """Shards of each matrix product."""

    context: Context = "auto"
    """Method of attention over cp. With ulysses, each device computes some heads over all tokens;
    with gather, it gathers all keys and values for its own tokens. auto takes the method that moves
    fewer bytes, ulysses on a tie."""

    allow_padding: bool = True
    """Pad heads and d_ff that tp does not divide; if false, such a mesh is an error."""

    tp_across_hosts: bool = False
    """Allow a tp group to span hosts. Every layer then waits for the network between the hosts."""

    def __str__(self) -> str:
        return describe_mesh(self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    def of_sizes(self, sizes: Sizes) -> "MeshConfig":
        """Returns a copy with other sizes."""
        return replace(self, **sizes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class DataConfig(Settings):
    """Training and validation data."""

    path: Annotated[DataPath | None, SAMPLES, SHORT_HELP] = None
    """A folder made by jaxtp prepare, its URL, or a text file, which is read as bytes; by default
    the sources of Python's standard library."""

    mixture: Annotated[dict[DataKey, Positive], ONLY_IN_FILES, SAMPLES] = field(
        default_factory=dict
    )
    """In a YAML file, instead of path: several datasets and their weights, such as {data/code: 0.7,
    data/prose: 0.3}."""

    validation: Annotated[DataPath | None, SAMPLES] = None
    """Data to evaluate on: its held-out split, or all of it if it has none. By default the held-out
    split of the training data."""

    scores: Annotated[FolderOrUrl | None, STEP] = None
    """A folder made by jaxtp score from this data. It adds the column log_probs, or top_ids and
    top_log_probs, to the batches for train.loss."""

    batches: Annotated[Reference | None, SAMPLES, SHORT_HELP] = None
    """Batches of your own: a function of the step that returns a dict of rows, a dataset, or an
    iterable. The settings data.path to data.sequence_length then have no effect."""

    validation_batches: Annotated[Reference | None, SAMPLES, SHORT_HELP] = None
    """Batches of your own to evaluate on. Without them, a run with data.batches evaluates
    nothing."""

    packing: Annotated[Packing, Affects(cost=True, numbers=True, fixed=True)] = "documents"
    """How documents fill sequences. documents packs whole documents, and attention stays within
    each document; concatenated joins all documents, cuts them wherever a sequence is full, and
    attention crosses documents."""

    long_documents: Annotated[LongDocuments, Affects(samples=True, fixed=True)] = "split"
    """Treatment of packed documents that are longer than a sequence: split cuts them, drop leaves
    them out, stop is an error. Pairs of answers are never cut: for them split is an error too."""

    sequence_length: Annotated[Count, Affects(cost=True, numbers=True, fixed=True), SHORT_HELP] = (
        128
    )
    """Tokens in a sequence, divisible by mesh.cp."""

    global_batch_size: Annotated[Count, STEP, SHORT_HELP] = 16
    """Sequences in a step, on all devices together. Divisible by mesh.dp * mesh.fsdp *
    train.accumulation."""

    @property
    def packed(self) -> bool:
        """Whether rows have segment ids."""
        return self.packing == "documents"


@dataclass(frozen=True, kw_only=True)
class GroupConfig(Settings):
    """Settings of a group of parameters."""

    learning_rate_scale: NonNegative = 1.0
    """Multiplies the learning rate; 0 freezes."""

    weight_decay: NonNegative | None = None
    """Replaces optimizer.weight_decay, for vectors too."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Settings):
    """Optimizer and learning rate schedule."""

    build: Annotated[Reference | None, STEP, SHORT_HELP] = None
    """An Optax transformation of your own, or a function that returns one."""

    name: Annotated[
        Literal["adamw", "lion", "adafactor", "muon"], Affects(cost=True, numbers=True, fixed=True)
    ] = "adamw"
    """Rule of the updates. lion usually takes a third of adamw's learning rate; adafactor factors
    second moments; muon orthogonalises the updates of matrices in the blocks, and uses adamw for
    all other parameters."""

    first_moment: Annotated[
        Literal["param", "bfloat16"], Affects(cost=True, numbers=True, fixed=True)
    ] = "param"
    """Dtype of the first moment, or of the momentum of lion and muon: the dtype of the parameters,
    or bfloat16 with stochastic rounding."""

    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Decay of the learning rate after the warm-up; wsd stays at the peak and decays at the end."""

    decay_fraction: Fraction = 0.2
    """Fraction of all steps, at the end, in which the schedule wsd decays."""

    groups: Annotated[dict[str, GroupConfig], ONLY_IN_FILES, Affects(numbers=True, fixed=True)] = (
        field(default_factory=dict)
    )
    """In a YAML file: settings by pattern of parameter paths, such as "blocks.*.kernel":
    {learning_rate_scale: 0.5}; * matches anything. The first matching pattern applies; a pattern
    that matches no parameter is an error."""

    learning_rate: Annotated[Positive, NUMBERS, SHORT_HELP] = 5e-3
    """Learning rate at its peak, after the warm-up."""

    warmup_steps: CountOrZero = 20
    """Steps in which the learning rate rises linearly from zero; at most train.steps."""

    final_fraction: Share = 0.1
    """Learning rate at the last step, as a fraction of the peak; unused by the constant
    schedule."""

    beta1: Beta = 0.9
    """Decay of the first moment, or of muon's momentum."""

    beta2: Beta = 0.95
    """Decay of the second moment, or of lion's momentum; unused by adafactor."""

    eps: Annotated[float, Field(ge=1e-37, allow_inf_nan=False)] = 1e-8
    """Number added to the root of the second moment."""

    weight_decay: NonNegative = 0.1
    """Decoupled weight decay of matrices, multiplied by the learning rate. Norms and biases do not
    decay."""

    clip_norm: Positive = 1.0
    """Gradients are scaled down to this global L2 norm."""


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Settings):
    """Length of the training, loss, logging and failures."""

    steps: Annotated[Count, STEP, SHORT_HELP] = 400
    """Optimizer updates in the whole run. The learning rate decays over them."""

    epochs: Annotated[Positive | None, SAMPLES, SHORT_HELP] = None
    """Passes over the data, instead of train.steps. The command computes the number of steps when
    it starts, and writes it to config.yaml. A pass over a mixture has as many rows as all its
    sources together."""

    accumulation: Annotated[Count, COST, SHORT_HELP] = 1
    """Micro-batches of a step, to save memory. They run one after the other, and their gradients
    add up to the gradient of the batch, up to rounding."""

    loss: Annotated[Reference | None, STEP, SHORT_HELP] = None
    """Loss that replaces the cross-entropy of the next token: a function (model, batch, key) ->
    (sum, weight). A third result is a dict of metrics. Or a class whose instances are such
    functions."""

    loss_arguments: Annotated[BlockChanges, STEP, ArgumentsOf("loss")] = Changes({})
    """Arguments of train.loss, such as --train.loss-arguments.beta 0.2: the arguments of its class,
    or further arguments of its function."""

    callbacks: Annotated[tuple[Reference, ...], NOTHING, SHORT_HELP] = ()
    """Functions (trainer, step) that every process calls after each step."""

    z_loss: Annotated[NonNegative, NUMBERS] = 0.0
    """Weight of the squared log-normaliser of the softmax in the training loss; 1e-4 is usual, 0 is
    off."""

    balance_loss: Annotated[NonNegative, NUMBERS] = 1e-2
    """Weight of the loss that evens the load of experts, averaged over layers; 1e-3 is usual for a
    trained model."""

    router_z_loss: Annotated[NonNegative, NUMBERS] = 0.0
    """Weight of the squared log-normaliser of the routers' softmax, averaged over layers; 1e-3 is
    usual, 0 is off."""

    selection_bias_rate: Annotated[Share, NUMBERS] = 1e-3
    """Amount by which an update moves each expert's bias against its load, if model.selection_bias
    is on."""

    log_every: Annotated[Count, NOTHING] = 10
    """Steps between lines of metrics.jsonl; the first and the last step are always logged."""

    non_finite: Annotated[Literal["stop", "skip"], NOTHING] = "stop"
    """Reaction to a non-finite loss or gradient, whose update is never applied. stop saves the
    state and the batch and ends the run, skip continues. If the loss and the gradient are finite,
    but the update is not, the run always ends."""

    max_skipped: Annotated[Count, NOTHING] = 10
    """Maximum number of skipped steps in a row before the run ends. Steps without labels, or whose
    loss has the weight 0, are always skipped, and are counted separately."""

    spike: Annotated[Literal["keep", "skip"], NUMBERS] = "keep"
    """Skip a step whose loss or gradient norm is far above those of the steps before; needs
    non_finite=skip."""

    spike_deviations: Annotated[Positive, NUMBERS] = 6.0
    """A number is a spike if it is more than so many standard deviations above the mean of the
    window."""

    spike_window: Annotated[int, Field(ge=2, le=10_000), NUMBERS] = 100
    """Number of earlier steps to compare with: the last ones with an update, not counting the
    previous step. Until there are as many, no step is skipped."""

    allow_oversize: Annotated[bool, NOTHING] = False
    """Train even if a step needs more memory than a device has. The estimate is partly a model, and
    can be wrong."""

    stall_seconds: Annotated[NonNegative, NOTHING] = 1800.0
    """Seconds after which a step counts as stalled, and the run prints the stacks of all Python
    threads; 0 is off."""

    stall_abort_seconds: Annotated[NonNegative, NOTHING] = 0.0
    """Seconds after which a stalled step, evaluation or save ends the process with exit code 75,
    so that a scheduler can restart it; 0 is off. The first step includes compilation."""

    stopped_exit_code: Annotated[int, Field(ge=0, le=255), NOTHING] = 0
    """Exit code when a signal stops a run early; not 0 for schedulers that restart only failed jobs
    (Kubernetes)."""

    verify_every: Annotated[CountOrZero, NOTHING] = 0
    """Steps between checks for silent corruption, which compare replicas and compute a step twice.
    A difference ends the run, and the error names the devices. A check stores a copy of the
    state in host memory. 0 is off."""

    deterministic: Annotated[bool, NOTHING] = False
    """On GPUs, compile the step without operations that sum in a varying order (XLA's flag
    xla_gpu_exclude_nondeterministic_ops). The step may be slower. verify_every implies the flag.
    CPUs do not need it."""

    @property
    def excludes_nondeterministic(self) -> bool:
        """Whether a compiled step gives the same bits each time."""
        return self.deterministic or self.verify_every > 0

    @property
    def skips_allowed(self) -> int:
        """Maximum number of steps in a row that may be skipped."""
        return self.max_skipped if self.non_finite == "skip" else 0


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Settings):
    """Trackers besides metrics.jsonl, and norms to log."""

    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Trackers that get the metrics: tensorboard writes event files into the run's folder; wandb
    and mlflow need jaxtp's extra of this name. The flag takes several (--metrics.trackers
    tensorboard wandb); an empty list in a YAML file turns all off. A callback may be another
    tracker."""

    project: str = "jaxtp"
    """W&B project, or MLflow experiment, of the run."""

    norm_groups: tuple[str, ...] = ()
    """Patterns of parameter paths, such as "blocks.mlp.*": the norms of the matching gradients and
    parameters are logged too."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Settings):
    """Processes and start of a run."""

    allocator: Annotated[Allocator, COST] = "default"
    """Allocator of GPU memory. default is JAX's (BFC), whose free memory can fragment; cuda_async
    is CUDA's pool, which does not fragment while steps peak below its share of the memory (0.85, or
    XLA_PYTHON_CLIENT_MEM_FRACTION). With jax 0.11 or newer XLA_PYTHON_CLIENT_ALLOCATOR=platform
    asks the driver for each array."""

    bind: str | None = None
    """Address at which process 0 and its JAX coordinator listen for the other processes. By default
    loopback if all processes run on one host, otherwise every address."""

    self_check: bool = True
    """On GPUs, first compare results of devices, collectives and attention kernels with the host,
    which takes a few seconds."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Settings):
    """A trace of a few steps, for XProf and Perfetto."""

    start: CountOrZero = 0
    """First step to trace; 0 traces none. The first two steps or so include warm-up."""

    steps: Count = 5
    """Number of steps to trace."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Settings):
    """Evaluation on the held-out split."""

    every: Annotated[CountOrZero, NOTHING, SHORT_HELP] = 100
    """Steps between evaluations. A run with validation data always evaluates before the first step
    and after the last; with 0, only then."""

    batches: Count = 8
    """Maximum number of batches in an evaluation, which reads each held-out row at most once, and
    the same rows on every mesh."""

    tasks: Annotated[tuple[str, ...], Argument("NAME")] = ()
    """Tasks or groups of lm-evaluation-harness to run on the weights in training (pip install
    'jaxtp[eval]'). The scores are logged as eval_TASK/METRIC, and equal those of jaxtp evaluate
    on the checkpoint of that step."""

    tasks_every: CountOrZero = 500
    """Steps between runs of the tasks, which also run after the last step; with 0, only then."""

    task_folder: Annotated[tuple[UserPath, ...], RUNS_CODE] = ()
    """Folders of your own tasks, in the harness's YAML, which may call Python functions of the
    folder."""

    num_fewshot: CountOrZero | None = None
    """Examples shown before each question of a task; by default the number in the task."""

    limit: Count | None = None
    """Use at most this many examples of each task."""

    chat: bool = False
    """Ask tasks' questions as chat messages, with the model's chat template."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Settings):
    """When to save, and which checkpoints to keep."""

    every: Annotated[CountOrZero, NOTHING, SHORT_HELP] = 50
    """Steps between saves; 0 saves only at the end."""

    url: GoogleUrl | None = None
    """Address (gs://BUCKET/PATH) of the checkpoints, in place of the run's folder, which may then
    be on another disk on each host."""

    keep: Count = 2
    """Number of the newest checkpoints to keep."""

    keep_every: CountOrZero = 0
    """Also keep the checkpoints at multiples of this step; 0 for none."""

    keep_best: bool = True
    """Also keep the checkpoint with the lowest validation loss, among the checkpoints of evaluated
    steps."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything about a run."""

    run: RunConfig = RunConfig()
    mesh: Annotated[MeshConfig, COST] = MeshConfig()
    origin: Annotated[OriginConfig, WithinSection("model")] = OriginConfig()
    model: Annotated[ModelConfig, ARCHITECTURE] = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: Annotated[OptimizerConfig, NUMBERS] = OptimizerConfig()
    train: LoopConfig = LoopConfig()
    eval: Annotated[EvalConfig, NOTHING] = EvalConfig()
    checkpoint: Annotated[CheckpointConfig, NOTHING] = CheckpointConfig()
    metrics: Annotated[MetricsConfig, NOTHING] = MetricsConfig()
    profile: Annotated[ProfileConfig, NOTHING] = ProfileConfig()
    launch: Annotated[LaunchConfig, NOTHING] = LaunchConfig()

    @property
    def place(self) -> Path:
        """The folder or the URL of the run's checkpoints and other files."""
        url = self.checkpoint.url
        return self.run.dir if url is None else Address(url)


IGNORED_BY_STEP = tuple(settings(TrainConfig, lambda mark: not (mark.numbers or mark.cost)))
"""Settings that do not affect a single step; commands that only analyze a step omit them."""

IGNORED_BY_COST = tuple(settings(TrainConfig, lambda mark: not mark.cost))
"""Settings that change neither the time nor the memory of a step."""


def training_of(config: TrainConfig) -> TrainConfig:
    """Returns the training part of a command's configuration."""
    return as_base(config, TrainConfig)
