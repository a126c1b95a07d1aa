"""The batches of a run: jaxtp's token data, or a user's."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from jaxtp.config.files import fingerprint
from jaxtp.config.reading import truncate
from jaxtp.config.schema import ConfigError
from jaxtp.data.batches import Batches, Position, token_batches
from jaxtp.data.corpus import load_corpus
from jaxtp.data.loader import Batch, on_mesh, split
from jaxtp.data.samples import Data, RowSettings
from jaxtp.train.config import TrainConfig
from jaxtp.train.init_source import InitialState, InitSource
from jaxtp.train.task import Loss, Task
from jaxtp.train.user_loss import attribute
from jaxtp.train.validation import check_vocabulary

if TYPE_CHECKING:
    from jaxtp.data.scores import Wanted

TOKENS, ROWS = "tokens", "rows"


@dataclass(frozen=True)
class RunData:
    """The batches to train and evaluate on."""

    train: Batches
    validation: Batches | None
    micro_batches: int  # whose rows are the same on every mesh
    tokens: Data | None = None  # jaxtp's token data

    @property
    def unit(self) -> str:
        """Unit of speed: `tokens`, or `rows` of other data."""
        return ROWS if self.tokens is None else TOKENS

    @property
    def units_per_row(self) -> int:
        """Tokens in a row; 1 for other data."""
        return 1 if self.tokens is None else int(self.train.shapes["inputs"].shape[1])

    @property
    def description(self) -> Mapping[str, object]:
        """JSON for checkpoints, to detect changes on resume."""
        return self.train.description if self.tokens is None else self.tokens.description

    @property
    def num_rows(self) -> int | None:
        """Rows in an epoch, if known."""
        return self.train.num_rows if self.tokens is None else sum(map(len, self.tokens.train_rows))

    @property
    def global_batch_size(self) -> int:
        """Rows in a batch."""
        return self.train.global_batch_size

    def describe_validation(self, name: str | None) -> str:
        """Describes a user's validation data, for the summary."""
        if self.validation is None:
            return "none: there are no validation batches"
        rows, size = self.validation.num_rows, self.validation.global_batch_size
        if rows is None:
            return str(name)
        rest = 0 if self.validation.with_weights else rows % size
        left = rest and f"; the last {rest} are left out, since the loss does not read batch['weights']"
        return f"{name}: {rows:,} rows in batches of {size:,}{left or ''}"

    def pad_short_batches(self, on: bool) -> None:
        """Gives batches a column of weights and pads short ones, if the loss reads the weights of rows."""
        for batches in (self.train, self.validation):
            if batches is not None:
                batches.with_weights = on

    def abstract(self, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns a training batch of abstract arrays."""
        return split(self.train.shapes, mesh)

    def batches(self, mesh: Mesh, position: Position, count: int) -> Iterator[tuple[Batch, Position]]:
        """Yields training batches, and the position after each."""
        return on_mesh(self.train, mesh, position, count, micro_batches=self.micro_batches)

    def validation_batches(self, mesh: Mesh, most: int) -> Iterator[Batch]:
        """Yields at most `most` batches to evaluate on, the same in each evaluation."""
        if self.validation is not None:
            for batch, _ in on_mesh(self.validation, mesh, Position(), most, micro_batches=self.micro_batches):
                yield batch


def load_tokens(config: TrainConfig, source: InitSource, loss: Loss | None = None) -> Data:
    """Opens jaxtp's token data and plans its rows; raises a `ValueError` for a user's mistake."""
    data = config.data
    corpus = load_corpus(data.path, data.mixture, data.validation)
    if not config.model.is_foreign:
        check_vocabulary(config.model, corpus.tokenizer.vocab_size, corpus.description)
    source.check_tokenizer(corpus.tokenizer)
    settings = _row_settings(config)
    scores = None
    if data.scores is not None:
        from jaxtp.data.scores import open_scores

        scores = open_scores(data.scores, _wanted_scores(config, loss))
        scores.check(corpus.tokenizer, settings)
    return Data(corpus, settings, config.run.seed, scores)


def _row_settings(config: TrainConfig) -> RowSettings:
    data = config.data
    return RowSettings(data.sequence_length, config.model.vocab_size, data.packing, data.long_documents)


def _wanted_scores(config: TrainConfig, loss: Loss | None) -> "Wanted":
    from jaxtp.data.scores import Wanted

    # A reference is the run's initial model; a teacher is another, which the run does not know.
    is_reference = attribute(loss, "reads_reference", False)
    model = (config.run.init_from or config.model.from_hf) if is_reference else None
    return Wanted(dataset=config.data.path, model=model, labels_only=is_reference)


def _check_reference(config: TrainConfig, data: Data, loss: Loss | None) -> None:
    # A reference is the model without its adapters, or log-probabilities of the labels.
    if not attribute(loss, "reads_reference", False):
        return
    from jaxtp.data.scores import free_folder

    path, scores = config.data.path, data.scores
    wanted = _wanted_scores(config, loss)
    if scores is not None and scores.record.top_k is not None:
        command = wanted.command(_row_settings(config), out=free_folder(scores.folder))
        raise ConfigError(
            f"data.scores={scores.folder} has the {scores.record.top_k} most probable tokens at each position, and the "
            f"loss needs the log-probabilities of the labels: {command}"
        )
    if scores is None and not config.model.lora.rank:
        out = None if path is None else free_folder(path.with_name(f"{path.name}-scores"))
        raise ConfigError(
            f"the loss needs a reference: {wanted.command(_row_settings(config), out=out)}; its folder is then "
            "--data.scores. Or train adapters (--model.lora.rank 16): the reference is then the model without them"
        )


def check_scored_model(data: Data | None, initial: InitialState, mesh: Mesh) -> None:
    """Raises `ConfigError` if log-probabilities are not of the initial model; all processes must call it."""
    if data is None or data.scores is None or data.scores.record.top_k is not None:
        return
    from jaxtp.hf.runs import base_checksums

    scores, base, weights = data.scores, initial.base, initial.state["model"]
    sha256 = base["sha256"] if base else fingerprint(base_checksums(weights, mesh))  # type: ignore[arg-type]
    if sha256 != scores.record.model_sha256:
        raise ConfigError(
            f"data.scores={scores.folder} has log-probabilities of {truncate(scores.record.model)}, and this run "
            f"starts from other weights; score the data by its initial model: {scores.command()}"
        )


def _check_temperature(data: Data, loss: Loss | None) -> None:
    scores = data.scores
    wanted: float | None = attribute(loss, "scores_temperature", None)
    if scores is not None and wanted not in (None, scores.record.temperature):
        raise ConfigError(
            f"data.scores={scores.folder} has scores at temperature {scores.record.temperature:g}, and the loss needs "
            f"those at {wanted:g}; score again, or change the loss: {scores.command(temperature=wanted)}"
        )


def open_data(config: TrainConfig, source: InitSource, task: Task) -> RunData:
    """Opens a run's batches; raises a `ValueError` for a user's mistake."""
    size, seed = config.data.global_batch_size, config.run.seed
    micro_batches = 1 if task.loss is None else config.train.accumulation
    if config.data.scores is not None and (task.loss is None or task.batches is not None):
        why = "data.batches replaces them" if task.loss else "the default loss does not read them; set --train.loss"
        raise ConfigError(f"data.scores={config.data.scores}: {why}, or leave data.scores out")
    if task.batches is None:
        tokens = load_tokens(config, source, task.loss)
        if tokens.corpus.has_pairs and task.loss is None:
            raise ConfigError(f"{tokens.corpus.description}: pairs need a loss for them: --train.loss jaxtp:DPO")
        _check_temperature(tokens, task.loss)
        _check_reference(config, tokens, task.loss)
        held_out = token_batches(tokens.validation(config.eval.batches, size), size, once=True)
        return RunData(token_batches(tokens.train, size), held_out, micro_batches, tokens)
    from jaxtp.data.sources import open_batches

    train = open_batches(task.batches, batch_size=size, seed=seed)
    validation = None
    if task.validation is not None:
        validation = open_batches(task.validation, batch_size=train.global_batch_size, once=True)
    return RunData(train, validation, micro_batches)
