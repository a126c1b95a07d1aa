"""The settings of `jaxtp evaluate`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro

from jaxtp.config import ConfigError, Count, CountOrZero, Switch, UserPath
from jaxtp.data.manifest import TRAIN, VALIDATION
from jaxtp.generate import config as generation
from jaxtp.generate.config import SourceConfig
from jaxtp.mesh import CP
from jaxtp.prepare.config import TEXT_FIELD

LENGTH, SOURCE = "length", "source"
DOCUMENTS: Literal["documents"] = "documents"
CONCATENATED: Literal["concatenated"] = "concatenated"
FIRST = (
    "model",
    "data",
    "text",
    "by",
    "sequence_length",
    "stride",
    "tasks",
    "num_fewshot",
    "chat",
    "adapters",
    "dtype",
    "limit",
    "batch_size",
    "json",
)
"""Settings that the help shows first."""

Paths = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="PATH")]
Folders = Annotated[tuple[UserPath, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="DIR")]
Names = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME")]
Groupings = Annotated[tuple[Literal["length", "source"], ...], tyro.conf.UseAppendAction]


@dataclass(frozen=True, kw_only=True)
class MeshConfig(generation.MeshConfig):
    """Number of devices along each axis."""

    cp: int = 1
    """Parts of each sequence: for sequences that do not fit one device. Tasks that generate texts need 1."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(SourceConfig):
    """The model, what it is measured on, how, and the devices."""

    data: Folders = ()
    """A dataset of jaxtp prepare, made by the model's tokenizer. Can be given several times."""

    split: Literal["auto", "train", "validation"] = "auto"
    """Part of the datasets: auto takes the validation split, and all of a dataset that has none."""

    text: Paths = ()
    """A text file (one document), .jsonl or .parquet (a document on each line or row), also .gz or .zst, or a folder of
    them. Can be given several times."""

    field: str = TEXT_FIELD
    """Field that has the text in a line of JSONL or a row of Parquet."""

    max_document_bytes: Count = 2**26
    """A larger document, or line of JSONL, is refused: it is held in memory, with ten times as much for its tokens."""

    by: Groupings = ()
    """Shows the numbers by the length of documents in tokens too, or by source: dataset or file. Can be given twice."""

    limit: Count | None = None
    """Reads at most so many documents of each dataset and file, or examples of each task."""

    sequence_length: Count | None = None
    """Tokens that are read together at most; by default as many as the run was trained on, and of a model in Hugging
    Face's format what it was made for, up to 2,048."""

    stride: Count | None = None
    """Tokens by which the windows of a document longer than that are apart; by default as many as a window has, so that
    they do not overlap. With a smaller stride each token but those of the first window sees at least sequence-length
    minus stride tokens before its own window's new ones; each is counted once, and read several times."""

    packing: Literal["documents", "none", "concatenated"] = DOCUMENTS
    """documents: a row holds several, none of which sees another; none: each window has a row of its own, which gives
    the same numbers, more slowly; concatenated: all documents of a source one after the other, cut wherever a row is
    full, and each sees those before it, as models are often trained and measured."""

    beyond_context: Switch = False
    """Accepts a --sequence-length beyond what the model was made for (max_position_embeddings in its config.json)."""

    tasks: Names = ()
    """A task or group of lm-evaluation-harness, instead of data (pip install 'jaxtp[eval]'). Can be given several
    times."""

    task_folder: Folders = ()
    """A folder of tasks of your own, in the harness's YAML. Can be given several times."""

    num_fewshot: CountOrZero | None = None
    """Examples that tasks show before each question; by default as each task says."""

    chat: Switch = False
    """Asks tasks' questions as messages of a chat, by the model's chat template."""

    cache: Annotated[UserPath | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder to keep the answers to tasks in, so that the same command again goes on where it was interrupted."""

    batch_size: Count = 8
    """Rows that are read together, rounded up to a multiple of mesh.dp * mesh.fsdp."""

    json: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write every number to, for machines; - for standard output, instead of the table."""

    mesh: MeshConfig = MeshConfig()

    @property
    def of_model(self) -> SourceConfig:
        """The settings that say how the model is opened."""
        return replace(self, special_tokens=self.special_tokens or bool(self.tasks))


def check(config: EvaluateConfig) -> None:
    """Checks the settings against each other.

    Raises:
      ConfigError: with every contradiction.
    """
    of_tasks = _contradictions_of_tasks(config) if config.tasks else _contradictions_of_data(config)
    problems = [*([] if config.model is not None else ["name the model by --model DIR"]), *of_tasks]
    if problems:
        raise ConfigError("; ".join(problems))


def _contradictions_of_data(config: EvaluateConfig) -> Iterator[str]:
    if not (config.data or config.text):
        yield "name what to measure it on: --data DIR, --text FILE, or --tasks NAME"
    if config.split != "auto" and not config.data:
        yield f"--split {config.split} is of datasets, and there is no --data DIR; {TRAIN} and {VALIDATION} are theirs"
    if config.field != TEXT_FIELD and not config.text:
        yield f"--field {config.field} is of JSONL and Parquet, and there is no --text FILE"
    for name in ("task_folder", "num_fewshot", "chat", "cache"):
        if getattr(config, name):
            yield f"--{name.replace('_', '-')} is of tasks, and there is no --tasks NAME"
    if config.packing == CONCATENATED and LENGTH in config.by:
        yield "--by length is of documents, which --packing concatenated cuts anywhere; leave one of the two out"
    if config.packing == CONCATENATED and config.stride is not None:
        yield "--stride is of windows of a document, and --packing concatenated makes rows of all; leave one out"


def _contradictions_of_tasks(config: EvaluateConfig) -> Iterator[str]:
    default = EvaluateConfig()
    for name in ("data", "text", "by", "split", "field", "stride", "packing"):
        if getattr(config, name) != getattr(default, name):
            yield f"--{name} is of text, and --tasks have their own; run the command twice"
    if config.mesh.cp != 1:
        yield (
            f"--mesh.{CP} {config.mesh.cp}: tasks may generate texts, and a cache is not divided over cp; its devices "
            f"can be tp's: --mesh.tp {config.mesh.cp}"
        )
