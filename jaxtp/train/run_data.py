"""The batches of a run: jaxtp's token data, or a user's."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from jaxtp.config.files import fingerprint
from jaxtp.config.reading import truncate
from jaxtp.config.schema import Address, ConfigError
from jaxtp.data.batches import Batches, Position, SampleBatches, token_batches
from jaxtp.data.corpus import load_corpus
from jaxtp.data.loader import Batch, on_mesh
from jaxtp.data.samples import Data, RowSettings
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.init_source import InitialState, InitSource
from jaxtp.train.loss import Objective

if TYPE_CHECKING:
    from jaxtp.data.scores import Record
    from jaxtp.train.parts import Parts

TOKENS = "tokens"
ROWS = "rows"


@dataclass(frozen=True)
class RunData:
    """The batches to train and evaluate on."""

    train: Batches
    validation: Batches | None
    # Number of micro-batches, whose rows are the same on every mesh
    micro_batches: int
    # jaxtp's token data, unless the batches are a user's
    tokens: Data | None = None

    @property
    def unit(self) -> str:
        """Unit of speed: `tokens`, or `rows` of other data."""
        return ROWS if self.tokens is None else TOKENS

    @property
    def units_per_row(self) -> int:
        """Number of units in a row."""
        return 1 if self.tokens is None else int(self.train.shapes["inputs"].shape[1])

    @property
    def description(self) -> Mapping[str, object]:
        """A description of the data, in JSON, by which a resumed run detects changes."""
        return self.train.description if self.tokens is None else self.tokens.description

    @property
    def num_rows(self) -> int | None:
        """Rows in an epoch, if known."""
        return self.train.num_rows if self.tokens is None else sum(map(len, self.tokens.train_rows))

    def describe_validation(self, name: str | None) -> str:
        """Describes a user's validation data, for the summary."""
        if self.validation is None:
            return "none: there are no validation batches"
        rows = self.validation.num_rows
        size = self.validation.global_batch_size
        if rows is None:
            return str(name)
        text = f"{name}: {rows:,} rows in batches of {size:,}"
        remainder = rows % size
        if remainder and not self.validation.with_weights:
            text += (
                f"; the last {remainder} are left out, since the loss does not read "
                "batch['weights']"
            )
        return text

    def pad_short_batches(self, reads_weights: bool) -> None:
        """Pads short batches, and adds a column of weights, if the loss reads weights."""
        self.train.with_weights = reads_weights
        if self.validation is not None:
            self.validation.with_weights = reads_weights

    def batches(
        self, mesh: Mesh, position: Position, count: int
    ) -> Iterator[tuple[Batch, Position]]:
        """Yields training batches, and the position after each."""
        return on_mesh(self.train, mesh, position, count, micro_batches=self.micro_batches)

    def validation_batches(self, mesh: Mesh, max_count: int) -> Iterator[Batch]:
        """Yields at most `max_count` batches to evaluate on, the same in each evaluation."""
        if self.validation is not None:
            for batch, _ in on_mesh(
                self.validation, mesh, Position(), max_count, micro_batches=self.micro_batches
            ):
                yield batch


def load_tokens(config: TrainConfig, source: InitSource, parts: "Parts") -> Data:
    """Opens jaxtp's token data and plans its rows; raises a `UserError` for a mistake."""
    data = config.data
    corpus = load_corpus(data.path, data.mixture, data.validation)
    # Before the sizes, which new tokens explain
    source.check_tokenizer(corpus.tokenizer)
    parts.model.check_vocabulary(corpus, config.model.vocab_size)
    settings = RowSettings(
        data.sequence_length, config.model.vocab_size, data.packing, data.long_documents
    )
    scores = None
    if data.scores is not None:
        from jaxtp.data.copies import local
        from jaxtp.data.scores import open_scores

        scores = open_scores(local(data.scores))
        scores.again = _score_command(config, parts.loss, scores.record)
        scores.check(settings)
    return Data(corpus, settings, config.run.seed, scores)


def _score_command(config: TrainConfig, loss: Objective, record: "Record | None" = None) -> str:
    # Returns a command of `jaxtp score` for the run, like the one of `record`; unknown paths are
    # words in capitals. A loss with a reference needs scores by the run's initial model. A teacher
    # is another model, unknown to the run.
    data = config.data
    is_reference = loss.attribute("reads_reference", False)
    temperature = loss.attribute("scores_temperature", None)
    model = (config.run.init_from or config.origin.from_hf) if is_reference else None
    is_elsewhere = data.path is None or isinstance(data.path, Address)
    out = "FOLDER" if is_elsewhere else f"{data.path}-scores"
    flags: list[object] = []
    if record is not None:
        out = f"{data.scores}-2"
        temperature = temperature or record.temperature
        if record.top_k is not None and not is_reference:
            flags += ["--top-k", record.top_k]
    flags += ["--data.sequence-length", data.sequence_length]
    if data.packing != DataConfig.packing:
        flags += ["--data.packing", data.packing]
    if data.long_documents != DataConfig.long_documents:
        flags += ["--data.long-documents", data.long_documents]
    if temperature not in (None, 1):
        flags += ["--temperature", f"{temperature:g}"]
    words = ["jaxtp", "score", data.path or "DATASET", "--model", model or "MODEL", "--out", out]
    return shlex.join(map(str, words + flags))


def _check_scores(config: TrainConfig, data: Data, loss: Objective) -> None:
    # A loss with a reference needs log-probabilities of the labels, or a model with adapters.
    scores = data.scores
    required: float | None = loss.attribute("scores_temperature", None)
    if scores is not None and required not in (None, scores.record.temperature):
        raise ConfigError(
            f"data.scores={scores.folder} has scores at temperature {scores.record.temperature:g}, "
            f"and the loss needs scores at {required:g}; score again, or change the loss: "
            f"{scores.again}"
        )
    if not loss.attribute("reads_reference", False):
        return
    if scores is not None and scores.record.top_k is not None:
        raise ConfigError(
            f"data.scores={scores.folder} has the {scores.record.top_k} most probable tokens at "
            f"each position, and the loss needs the log-probabilities of the labels: {scores.again}"
        )
    if scores is None and not config.model.lora.rank:
        raise ConfigError(
            f"the loss needs a reference: {_score_command(config, loss)}; its folder is "
            "then --data.scores. Or train adapters (--model.lora.rank 16): the reference "
            "is then the model without them"
        )


def check_scored_model(data: Data | None, initial: InitialState, mesh: Mesh) -> None:
    """Raises ConfigError if the log-probabilities in `data.scores` are not by the initial model.

    All processes must call it.
    """
    if data is None or data.scores is None or data.scores.record.top_k is not None:
        return
    from jaxtp.hf.runs import base_checksums

    scores = data.scores
    base = initial.base
    weights = initial.state["model"]
    sha256 = base["sha256"] if base else fingerprint(base_checksums(weights, mesh))  # type: ignore[arg-type]
    if sha256 != scores.record.model_sha256:
        raise ConfigError(
            f"data.scores={scores.folder} has log-probabilities of "
            f"{truncate(scores.record.model)}, and this run "
            f"starts from other weights; score the data by its initial model: {scores.again}"
        )


def open_data(config: TrainConfig, source: InitSource, parts: "Parts") -> RunData:
    """Opens a run's batches; raises a `UserError` for a mistake."""
    size = config.data.global_batch_size
    seed = config.run.seed
    objective = parts.loss
    micro_batches = 1 if objective.is_by_row else config.train.accumulation
    has_own_batches = parts.batches is not None
    if config.data.scores is not None and (objective.reads_only_tokens or has_own_batches):
        why = "data.batches replaces them"
        if objective.reads_only_tokens:
            why = "the default loss does not read them; set --train.loss"
        raise ConfigError(f"data.scores={config.data.scores}: {why}, or leave data.scores out")
    if parts.batches is None:
        tokens = load_tokens(config, source, parts)
        if tokens.corpus.has_pairs and objective.reads_only_tokens:
            raise ConfigError(
                f"{tokens.corpus.description}: pairs need a loss for them: "
                "--train.loss jaxtp.losses:DPO"
            )
        _check_scores(config, tokens, objective)
        samples = tokens.validation(config.eval.batches, size)
        held_out = None if samples is None else token_batches(samples, size, once=True)
        return RunData(token_batches(tokens.train, size), held_out, micro_batches, tokens)
    from jaxtp.data.sources import open_batches

    train = open_batches(parts.batches, batch_size=size, seed=seed)
    validation = None
    if parts.validation is not None:
        validation = open_batches(parts.validation, batch_size=train.global_batch_size, once=True)
    return RunData(train, validation, micro_batches)


def reading_rows(batches: SampleBatches) -> str:
    """Returns advice on a dataset, which may be of batches."""
    how = "leave out its batch(), or end it with .to_iter_dataset()"
    if not batches.name.startswith("grain "):
        how = "give its rows, or a function that yields the batches: batches=lambda: iter(BATCHES)"
    return f"{batches.name} is read by rows; if its items are batches, {how}"
