"""The settings of `jaxtp evaluate`, and the window length that follows from them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxtp.config.affects import REPEATED, RUNS_CODE, Argument
from jaxtp.config.hints import nearest_multiples
from jaxtp.config.schema import (
    ConfigError,
    Count,
    CountOrZero,
    DataPath,
    Day,
    OptionalFile,
    OptionalFolder,
    UserPath,
)
from jaxtp.data.prepare.prepare_config import TEXT_FIELD
from jaxtp.distributed.agreement import is_multiprocess
from jaxtp.generate.loading import (
    InferenceMeshConfig,
    ModelSource,
    SourceConfig,
    problems_of_generation,
)
from jaxtp.generate.request import limits_of
from jaxtp.mesh import CP

if TYPE_CHECKING:
    from jaxtp.train.config import TrainConfig

MAX_DEFAULT_LENGTH = 2048  # Maximum window length, unless a setting or a run determines it

_Paths = Annotated[tuple[str, ...], REPEATED, Argument("PATH")]
_Datasets = Annotated[tuple[DataPath, ...], REPEATED, Argument("DIR")]
_Folders = Annotated[tuple[UserPath, ...], REPEATED, Argument("DIR")]
_Names = Annotated[tuple[str, ...], REPEATED, Argument("NAME")]


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(SourceConfig):
    """The models, the data, how to measure, and devices."""

    model: OptionalFolder = None
    """Folder of a run of jaxtp train, of one of its checkpoints, or of a model in Hugging Face's
    format."""

    data: _Datasets = ()
    """Dataset of jaxtp prepare, made with the model's tokenizer; can be given several times."""

    split: Literal["auto", "train", "validation"] = "auto"
    """Split of the datasets; auto takes the validation split, or all of a dataset without one."""

    text: _Paths = ()
    """Text file (one document), .jsonl or .parquet (a document per line or row), also as .gz or
    .zst, or a folder of them; can be given several times."""

    field: str = TEXT_FIELD
    """Field of the text in JSONL and Parquet."""

    limit: Count | None = None
    """Read at most this many documents of each dataset and file, or examples of each task."""

    sequence_length: Count | None = None
    """Tokens in a window. The default is the model's context, but at most 2,048; for a run that
    started from random weights, it is the run's sequence length."""

    stride: Count | None = None
    """Tokens between the starts of two windows of a long document; by default sequence-length, so
    windows do not overlap. With a smaller stride, each token after the first window sees at least
    sequence-length - stride + 1 tokens; it counts once."""

    beyond_context: bool = False
    """Allow a --sequence-length beyond the model's context (max_position_embeddings in its
    config.json)."""

    tasks: _Names = ()
    """Task or group of lm-evaluation-harness, instead of data (pip install 'jaxtp[eval]'); can be
    given several times."""

    task_folder: Annotated[_Folders, RUNS_CODE] = ()
    """A folder of your own tasks, in the harness's YAML, which may call Python functions of the
    folder. Can be given several times."""

    num_fewshot: CountOrZero | None = None
    """Examples shown before each question; by default the number in the task."""

    chat: bool = False
    """Ask tasks' questions as chat messages, with the model's chat template."""

    date: Day | None = None
    """With --chat: the day that a chat template with a date writes (strftime_now); by default the
    day that it wrote into the run's data, else today."""

    batch_size: Count = 8
    """Rows of a batch, rounded up to a multiple of mesh.dp * mesh.fsdp."""

    json: OptionalFile = None
    """File for all numbers as JSON; - for standard output, instead of the table."""

    mesh: InferenceMeshConfig = InferenceMeshConfig()

    @property
    def source_options(self) -> SourceConfig:
        """The settings for opening a model."""
        return replace(self, special_tokens=self.special_tokens or bool(self.tasks))


SHOWN_FIRST = (
    *("model", "data", "text", "sequence_length", "stride", "tasks", "num_fewshot"),
    *("chat", "adapters", "dtype", "limit", "batch_size", "json"),
)


_NEEDS = {
    "split": "data",
    "field": "text",
    **dict.fromkeys(("task_folder", "num_fewshot", "chat"), "tasks"),
    "date": "chat",
}


def conflicts(config: EvaluateConfig) -> Iterator[str]:
    """Yields a message for each conflict between the settings."""
    default = EvaluateConfig()
    changed = [name for name in vars(config) if getattr(config, name) != getattr(default, name)]
    if config.model is None:
        yield "name the model by --model DIR"
    if config.tasks:
        for name in changed:
            if name in ("data", "text", "stride"):
                yield f"--{name} is for text, and tasks have their own; run the command twice"
        yield from problems_of_generation(config.mesh)
    elif not (config.data or config.text):
        yield "give documents by --data DIR or --text FILE, or tasks by --tasks NAME"
    for name in changed:
        needed = _NEEDS.get(name)
        if needed is not None and needed not in changed:
            yield f"--{name.replace('_', '-')} has no effect without --{needed}"


def require_harness(setting: str) -> None:
    """Raises ConfigError if lm-evaluation-harness is not installed, or cannot run here."""
    if find_spec("lm_eval") is None:
        raise ConfigError(f"{setting} needs lm-evaluation-harness: pip install 'jaxtp[eval]'")
    if is_multiprocess():
        raise ConfigError(
            f"{setting} runs in one process, and there are several; one process drives all GPUs "
            "of a host"
        )


def tasks_of_run(config: "TrainConfig") -> Callable[[Any, Any], None]:
    """Returns the callback of `eval.tasks`.

    Raises ConfigError if the harness is missing, or the run cannot do the tasks.
    """
    require_harness("eval.tasks")
    from jaxtp.tools.evaluate.harness import TasksOfRun

    return TasksOfRun(config)


def window_length(config: EvaluateConfig, source: ModelSource) -> int:
    """Returns the window length; for tasks, the maximum tokens of a request.

    Raises:
      ConfigError: it exceeds the model's context, is not divisible by cp, or is less than the
        stride.
    """
    cp = max(config.mesh.cp, 1)
    length = config.sequence_length
    context = limits_of(source.config, source.context).context
    if length is None:
        length = max(_default_length(config, source, context) // cp, 1) * cp
    if context is not None and length > context:
        learned = source.config.learned_positions
        if learned is not None and length > learned:
            raise ConfigError(
                f"--sequence-length {length}: the model has {learned:,} learned positions "
                f"(model.learned_positions); give at most {context}"
            )
        if not config.beyond_context:
            raise ConfigError(
                f"--sequence-length {length}: the model's context is {context:,} tokens "
                f"(max_position_embeddings in its config.json); give at most {context}, or allow "
                "it by --beyond-context"
            )
    if length % cp:
        nearest = " or ".join(map(str, nearest_multiples(length, cp)))
        raise ConfigError(
            f"--sequence-length {length} is not divisible by --mesh.{CP} {cp}; nearest: {nearest}"
        )
    if config.stride is not None and config.stride > length:
        raise ConfigError(
            f"--stride {config.stride} is more than the {length} tokens of a window "
            "(--sequence-length), so tokens between windows would be skipped"
        )
    return length


def _default_length(config: EvaluateConfig, source: ModelSource, context: int | None) -> int:
    if config.tasks and context is not None:
        return context
    length = source.trained_length or MAX_DEFAULT_LENGTH
    return length if context is None else min(length, context)
