"""`jaxtp score`: opens a model and a dataset, and writes scores (`scoring.py`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from flax import nnx
from jax.sharding import Mesh

from jaxtp.checkpoint import silence_orbax
from jaxtp.config import entry
from jaxtp.config.affects import POSITIONAL, Argument
from jaxtp.config.command_line import Command
from jaxtp.config.files import fingerprint
from jaxtp.config.hints import Problem, explained
from jaxtp.config.schema import (
    ConfigError,
    Count,
    DataPath,
    OptionalFolder,
    Positive,
    UserPath,
)
from jaxtp.data.copies import local
from jaxtp.data.manifest import DatasetError
from jaxtp.data.rows import Rows
from jaxtp.data.samples import LongDocuments, Packing, RowSettings, make_rows
from jaxtp.data.scores import Record, Scored
from jaxtp.data.store import Dataset, open_dataset
from jaxtp.distributed.agreement import raise_everywhere, reporting_failure, run_and_report, watch
from jaxtp.distributed.joining import join_processes
from jaxtp.generate.loading import (
    InferenceMeshConfig,
    ModelSource,
    SourceConfig,
    inference_mesh,
    load_model,
    open_source,
    print_status,
    request_devices,
)
from jaxtp.hf.runs import base_checksums
from jaxtp.mesh import mesh_sizes
from jaxtp.tools.evaluate.inputs import require_tokenizer
from jaxtp.tools.score.scoring import Job, begin, score
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.validation import context_problems, refuse

PROGRAM = "jaxtp score"
DESCRIPTION = """\
Computes log-probabilities of a dataset's tokens, for losses that need a reference or a teacher.

jaxtp score data/pairs --model models/base --out scores/base --data.sequence-length 2048
jaxtp train --config dpo.yaml --data.scores scores/base

The model, a run of jaxtp train or a folder in Hugging Face's format, reads the rows that a run with
the same --data settings trains on, on any mesh. The scores are the log-probability of each label
(for DPO), or with --top-k 64 the most probable next tokens and their log-probabilities (for
distillation). A run with data.scores has them in its batches, as log_probs, or top_ids and
top_log_probs; it needs no memory for the model. jaxtp/data/scores.py documents the format.

After an interruption the same command resumes; on the same mesh the files are the same to the byte.
In a finished folder it compares the files with their checksums.
"""
SHOWN_FIRST = (
    *("dataset", "model", "out", "top_k", "temperature"),
    *("data.sequence_length", "data.packing", "data.long_documents"),
    *("batch_size", "dtype", "adapters"),
)


@dataclass(frozen=True, kw_only=True)
class ScoredDataConfig:
    """How documents become rows: as in the run that reads the scores."""

    sequence_length: Count | None = None
    """Tokens in a sequence, as in the run that reads the scores."""

    packing: Packing = "documents"
    """How documents fill sequences, as in the run; see jaxtp train --help data."""

    long_documents: LongDocuments = "split"
    """Treatment of documents longer than a sequence, as in the run; see jaxtp train --help data."""


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(SourceConfig):
    """The model, the dataset, the rows, and devices."""

    dataset: Annotated[DataPath | None, POSITIONAL, Argument("DATASET")] = None
    """Dataset of jaxtp prepare, made with the model's tokenizer; all its splits are scored."""

    model: OptionalFolder = None
    """A run of jaxtp train, one of its checkpoints, or a model in Hugging Face's format."""

    out: Annotated[UserPath | None, Argument("DIR")] = None
    """New folder for the scores; the same command resumes in it."""

    top_k: Count | None = None
    """Number of most probable next tokens to store at each position; by default only the label's
    log-probability."""

    temperature: Positive = 1.0
    """Temperature of the probabilities: divides the logits before the softmax."""

    data: ScoredDataConfig = ScoredDataConfig()

    batch_size: Count = 8
    """Rows of a batch, rounded up to a multiple of mesh.dp * mesh.fsdp."""

    mesh: InferenceMeshConfig = InferenceMeshConfig()


COMMAND = Command(
    program=PROGRAM, schema=ScoreConfig, description=DESCRIPTION, short_help=SHOWN_FIRST
)
INTERRUPTED = "interrupted; the same command resumes"


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
      0; 2 for a user's mistake or damaged scores; 3 for a number that is not finite; 75 if another
      process was lost; 130 for Ctrl-C.
    """
    silence_orbax()
    return run_and_report(lambda: entry.attempt(PROGRAM, lambda: _run(argv), INTERRUPTED))


def _run(argv: Sequence[str]) -> None:
    join_processes()
    with raise_everywhere(watch):
        config, _ = COMMAND.load(argv)
        request_devices(config.mesh)
    with reporting_failure():
        _score(config)


def _missing(config: ScoreConfig) -> Iterator[str]:
    if config.dataset is None:
        yield "name a dataset of jaxtp prepare: jaxtp score DATASET"
    if config.model is None:
        yield "name the model by --model DIR"
    if config.out is None:
        yield "name a folder for the scores by --out DIR"
    if config.data.sequence_length is None:
        yield "set --data.sequence-length to the length that the training run will use"


def _score(config: ScoreConfig) -> None:
    path = config.model
    out = config.out
    length = config.data.sequence_length
    if config.dataset is None or path is None or out is None or length is None:
        raise ConfigError("; ".join(_missing(config)))
    with raise_everywhere():
        dataset = open_dataset(local(config.dataset))
        source = _open_model(config, path)
        require_tokenizer(dataset, config.tokenizer or path, source)
        _check(config, source, length)
        mesh = inference_mesh(config.mesh, source.config)
        _check_length(source, mesh, length)
        settings = RowSettings(
            length, source.config.vocab_size, config.data.packing, config.data.long_documents
        )
        rows = {}
        for name, documents in dataset.splits.items():
            rows_of_split = make_rows(documents, settings)
            if len(rows_of_split):
                rows[name] = rows_of_split
        if not rows:
            raise DatasetError(f"{dataset.folder} has no document with a label to score")
        job = Job(out, _record(config, source, dataset, rows), rows)
        if out.exists():  # before the weights are read
            begin(job)
    model = load_model(source, mesh)
    identity = fingerprint(base_checksums(nnx.state(model), mesh))
    score(replace(job, record=replace(job.record, model_sha256=identity)), model, config.batch_size)


def _record(
    config: ScoreConfig, source: ModelSource, dataset: Dataset, rows: Mapping[str, Rows]
) -> Record:
    scored = {}
    for name, split_rows in rows.items():
        documents = dataset.splits[name]
        scored[name] = Scored(documents.identity, split_rows.identity, len(split_rows))
    return Record(
        format=2,
        model=source.name,
        model_sha256="",
        dtype=source.config.precision.compute,
        dataset=str(config.dataset),
        vocab_size=source.config.vocab_size,
        top_k=config.top_k,
        temperature=config.temperature,
        sequence_length=config.data.sequence_length or 0,
        packing=config.data.packing,
        long_documents=config.data.long_documents,
        splits=scored,
    )


def _open_model(config: ScoreConfig, path: Path) -> ModelSource:
    # The weights keep their stored dtype, so that their checksum does not depend on --dtype.
    source = open_source(path, config)
    precision = replace(source.config.precision, param=source.stored.dtype)
    return replace(source, config=replace(source.config, precision=precision))


def _check(config: ScoreConfig, source: ModelSource, length: int) -> None:
    if config.top_k is not None and config.top_k > source.config.vocab_size:
        raise ConfigError(
            f"--top-k {config.top_k}: {source.name} has only {source.config.vocab_size} tokens"
        )
    if source.context is not None and length > source.context:
        print_status(
            f"warning: sequences of {length:,} tokens, but the model was made for "
            f"{source.context:,}"
        )


def _check_length(source: ModelSource, mesh: Mesh, length: int) -> None:
    def problems_after(changes: Mapping[str, int]) -> Iterator[Problem]:
        sizes = {axis: changes.get(f"mesh.{axis}", size) for axis, size in mesh_sizes(mesh).items()}
        data = DataConfig(sequence_length=changes.get("data.sequence_length", length))
        return context_problems(TrainConfig(model=source.config, data=data), sizes)

    refuse(explained(problems_after, fixed=True))


if __name__ == "__main__":
    entry.run(PROGRAM, main)
