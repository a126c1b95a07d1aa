"""Initial weights from another run or a Hugging Face folder, and initial adapters."""

import dataclasses
import hashlib
import shlex
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax
from flax import nnx

from jaxtp.checkpoint.io_errors import CheckpointError
from jaxtp.checkpoint.storage import Info, newest_checkpoint, read_info
from jaxtp.config.files import sha256
from jaxtp.config.reading import truncate
from jaxtp.config.schema import ConfigError, differences, replace_nested
from jaxtp.data.added_tokens import NewTokens, added_tokens, with_tokens
from jaxtp.data.copies import local
from jaxtp.data.manifest import TOKENIZER, TokenizerInfo
from jaxtp.data.tokenizer import read_tokenizer, tokenizer_file
from jaxtp.data.tokenizer_files import MAX_POSITIONS, TokenizerError
from jaxtp.distributed.agreement import raise_everywhere
from jaxtp.hf.adapters import ROWS, initial_rows
from jaxtp.hf.config_json import dtype_of, read_config, stored_dtype, vocabulary_size
from jaxtp.hf.model_folder import CONFIG, HFError, open_folder, read_attributes
from jaxtp.hf.peft import PeftFolder, open_peft, read_peft
from jaxtp.hf.runs import (
    check_base,
    copy_hf_files,
    hf_files_of,
    load_base,
    load_frozen,
    own_or_decoder,
    run_model_config,
)
from jaxtp.hf.tokenizer_changes import changed_files
from jaxtp.hf.wrapper import text_attributes
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.parameter import DType
from jaxtp.models.config import ModelConfig, architecture
from jaxtp.train.config import RunConfig, TrainConfig
from jaxtp.train.init_source import Default, InitialState, InitSource
from jaxtp.train.resume import Restored
from jaxtp.train.state import Blueprint

RATE = 1e-5
ADAPTER_RATE = 2e-4
"""Usual learning rates of AdamW for all weights of a trained model, and for adapters."""
LION = 1 / 3  # Lion's rate relative to AdamW's (Chen et al., arXiv 2302.06675)
LENGTH = 1024  # Tokens in a sequence, if the model supports that many
# Files of tokenizers that have no tokenizer.json
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt")
# Maximum number of settings that a message lists; the settings of another model differ in about ten
_MAX_SHOWN = 2


@dataclass(frozen=True, kw_only=True)
class Pretrained(InitSource):
    """A trained model."""

    path: Path
    # Folder of the tokenizer and config.json, if there is one
    files: Path | None
    model: ModelConfig
    data: Path | None = None
    """The dataset, or the first of a mixture."""
    new_tokens: NewTokens | None = None
    """Tokens that the model's tokenizer lacks."""
    adapters: PeftFolder | None = None
    """Initial adapters; None if there are none, or if the resumed run already has them."""

    @property
    def dtype(self) -> DType:
        """Dtype of the stored weights."""
        raise NotImplementedError

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The text model's settings in config.json, unchecked; empty without this file."""
        if self.files is None or not (self.files / CONFIG).is_file():
            return {}
        attributes = read_attributes(self.files)
        return {**text_attributes(attributes), "model_type": attributes.get("model_type")}

    def length_warning(self, config: TrainConfig) -> str | None:
        """Warns if sequences are longer than the maximum in config.json."""
        max_length = self.attributes.get(MAX_POSITIONS)
        length = config.data.sequence_length
        if type(max_length) is not int or length <= max_length:
            return None
        return (
            f"sequences of {length:,} tokens, but the model was made for {max_length:,} "
            f"(max_position_embeddings in its config.json); jaxtp evaluate and generate go beyond "
            f"{max_length:,} only with --beyond-context"
        )

    def defaults(self, config: TrainConfig, resumed: Info | None) -> Iterator[Default]:
        """Yields dtypes, learning rate, lengths and batch size.

        Frozen weights keep the dtype in which they are stored.
        """
        if resumed is not None:
            yield from self._resumed_defaults(config, resumed)
            return
        lora = config.model.lora
        if lora.rank:
            reason = f"the frozen weights as {self.path} has them; adapters in {lora.dtype}"
            yield _dtype_default("model.precision.param", self.dtype, reason)
        yield self._learning_rate(config)
        yield self._sequence_length(config)

    def _resumed_defaults(self, config: TrainConfig, resumed: Info) -> Iterator[Default]:
        reason = f"as the run in {config.run.dir} has it"
        if config.model.lora.rank:
            model = run_model_config(config.run.dir, resumed)
            yield _dtype_default("model.precision.param", model.precision.param, reason)
            yield _dtype_default("model.lora.dtype", model.lora.dtype, reason)
        for name in (
            "optimizer.learning_rate",
            "optimizer.warmup_steps",
            "data.sequence_length",
            "data.global_batch_size",
        ):
            section, key = name.split(".")
            yield name, resumed["config"][section][key], reason

    def _learning_rate(self, config: TrainConfig) -> Default:
        rate, reason = self._full_rate()
        if config.model.lora.rank:
            rate = ADAPTER_RATE
            reason = "usual for adapters"
        if config.optimizer.name == "lion":
            rate *= LION
            reason += ", and a third of it for lion"
        return "optimizer.learning_rate", float(f"{rate:.2g}"), reason

    def _full_rate(self) -> tuple[float, str]:
        return RATE, "usual for all weights of a trained model"

    def _sequence_length(self, config: TrainConfig) -> Default:
        max_length = config.model.learned_positions or self.attributes.get(MAX_POSITIONS)
        length = config.data.sequence_length
        reason = "the model does not state its maximum"
        if type(max_length) is int and max_length > 0:
            length = min(max_length, LENGTH)
            reason = f"the model was trained for {max_length:,}"
        return "data.sequence_length", length, reason

    def changes(self, model: ModelConfig) -> list[str]:
        """Returns the model settings that differ from the source's."""
        before = architecture(self.model)
        now = architecture(model)
        return differences(before | {"lora": now["lora"]}, now, "model.")

    def open_adapters(self, model: ModelConfig) -> PeftFolder:
        """Opens the adapters of `model.lora.from_peft`.

        Raises `HFError` if they are unreadable, or belong to another model.
        """
        family = self.attributes.get("model_type")
        return open_peft(local(str(model.lora.from_peft)), self.model, family)

    def describe_new_rows(self) -> list[str]:
        """Describes the rows of the vocabulary that its files do not have."""
        return []

    def create_state(
        self, run: RunConfig, blueprint: Blueprint, restored: Restored | None = None
    ) -> InitialState:
        """Loads the weights, unless the restored checkpoint has all of them."""
        model = blueprint.config
        if restored is not None and not model.lora.rank:
            return super().create_state(run, blueprint, restored)
        base = None
        changes = self.changes(model)
        new_ids = None if self.new_tokens is None else self.new_tokens.ids
        try:
            if model.lora.rank:
                abstract = blueprint.abstract["model"]
                weights, base, origin = load_frozen(self.path, model, blueprint.mesh, abstract)
            else:
                weights, origin = load_base(self.path, model, blueprint.mesh, new_ids=new_ids)
        except CheckpointError as error:
            raise CheckpointError("; ".join([str(error), *changes])) from None
        if base is not None and restored is not None:
            check_base(restored.info, base, origin)
        lines = [f"weights from {origin}", *changes, *self.describe_new_rows()]
        if (model.lora.tokens or model.lora.tables) and restored is None:
            # Spare rows of the frozen tables stay as they are, so that every command reads the same
            # base model, but new tokens do not begin as those.
            tables, _ = load_base(
                self.path,
                model,
                blueprint.mesh,
                ROWS.__contains__,
                has_notes=False,
                new_ids=new_ids,
            )
            rows = initial_rows(tables, blueprint.abstract["model"], model.lora)
            weights = nnx.merge_state(weights, rows)
        if model.lora.from_peft is not None and restored is None:
            with raise_everywhere():
                folder = self.adapters or self.open_adapters(model)
                adapters = read_peft(folder, blueprint.abstract["model"], blueprint.mesh)
            weights = nnx.merge_state(weights, adapters)
            lines += [f"adapters from {folder.path}", *folder.notes]
        state = blueprint.create(run.seed, weights)
        with raise_everywhere():
            if jax.process_index() == 0 and self.files is not None:
                changed = changed_files(self.files, local(self.data), self.new_tokens)
                copy_hf_files(self.files, run.dir, changed)
        # A checkpoint of adapters does not contain the frozen model.
        if restored is not None:
            state = nnx.merge_state(state, restored.state)
        return InitialState(state, base, "; ".join(lines))


@dataclass(frozen=True, kw_only=True)
class RunSource(Pretrained):
    """Another run's newest checkpoint."""

    checkpoint: Path
    info: Info

    @property
    def dtype(self) -> DType:
        """Dtype of the stored weights."""
        return self.model.precision.param

    def check(self, config: TrainConfig) -> None:
        """Checks the folder and the order of the blocks."""
        if self.checkpoint.is_relative_to(config.run.dir):
            raise ConfigError(
                f"run.init_from={self.path} is the run in run.dir={config.run.dir} itself; "
                "leave --run.init-from out to resume it, or name another folder with --run.dir"
            )
        # Weights are matched by path. If the runs stack layers differently, a path names other
        # layers.
        has_same_blocks = _arrangement(config.model) == _arrangement(self.model)
        if not has_same_blocks and config.model.num_layers == self.model.num_layers:
            raise ConfigError(
                f"the blocks of run.init_from={self.path} are arranged differently; set "
                f"model.pattern={list(self.model.pattern)} and "
                f"model.first_blocks={list(self.model.first_blocks)}"
            )

    def check_tokenizer(self, tokenizer: TokenizerInfo) -> None:
        """Compares the tokenizers."""
        before = self.info.get("corpus", {}).get("tokenizer", tokenizer.name)
        if tokenizer.name != before:
            raise ConfigError(
                f"run.init_from={self.path} was trained with tokenizer {before[:12]}, but this "
                f"dataset was prepared with tokenizer {tokenizer.name[:12]}, whose ids mean other "
                "tokens; prepare it with the run's tokenizer"
            )

    def defaults(self, config: TrainConfig, resumed: Info | None) -> Iterator[Default]:
        """Also yields the sizes of the model."""
        for name in _sizes(self.model):
            yield f"model.{name}", getattr(self.model, name), ""
        yield from super().defaults(config, resumed)

    def _full_rate(self) -> tuple[float, str]:
        optimizer = self.info["config"]["optimizer"]
        peak = optimizer["learning_rate"]
        if optimizer["name"] == "lion":
            peak /= LION
        limit = f"not below the smaller of {RATE:.0e} and that peak"
        reason = f"a tenth of the peak learning rate of {self.path} ({peak:.3g}), but {limit}"
        return max(peak / 10, min(peak, RATE)), reason

    def _sequence_length(self, config: TrainConfig) -> Default:
        length = self.info["config"]["data"]["sequence_length"]
        return "data.sequence_length", length, f"as {self.path} was trained"


@dataclass(frozen=True, kw_only=True)
class HFSource(Pretrained):
    """A model in Hugging Face format."""

    @property
    def dtype(self) -> DType:
        """Dtype of the stored weights."""
        try:
            return dtype_of(open_folder(self.path))
        # An estimate needs no weights: config.json states the dtype.
        except HFError:
            dtype = stored_dtype(self.path)
        return dtype if dtype in get_args(DType) else "float32"  # type: ignore[return-value]

    def describe_new_rows(self) -> list[str]:
        """Describes the rows of the vocabulary that its files do not have."""
        num_stored = vocabulary_size(read_attributes(self.path))
        ids = range(num_stored, self.model.vocab_size)
        tokens = ""
        if self.new_tokens is not None:
            ids = self.new_tokens.ids
            tokens = f" of {truncate(' '.join(self.new_tokens.tokens), 200)}"
        if not ids:
            return []
        spare = ", spare ones so far," if ids.stop <= num_stored else ""
        return [
            f"the rows {ids[0]:,} to {ids[-1]:,}{tokens}{spare} begin as the mean of those before"
        ]

    def check_tokenizer(self, tokenizer: TokenizerInfo) -> None:
        """Compares the tokenizers."""
        file = self.path / TOKENIZER
        if file.is_file():
            expected = sha256(file)
            if self.new_tokens is not None:
                expected = hashlib.sha256(self.new_tokens.tokenizer).hexdigest()
            if expected != tokenizer.sha256:
                raise ConfigError(self._explain_data(file, tokenizer))
            return
        has_other = any((self.path / name).exists() for name in _OTHER_TOKENIZERS)
        if has_other and tokenizer.sha256 is None:
            raise ConfigError(
                f"the data are bytes, and {self.path} has its own tokenizer, but no {TOKENIZER} "
                "for jaxtp prepare; transformers writes one: AutoTokenizer.save_pretrained(folder)"
            )

    def _explain_data(self, file: Path, tokenizer: TokenizerInfo) -> str:
        """Explains why a dataset's tokenizer is not the run's."""
        flags = f"--tokenizer {file}"
        if self.new_tokens is not None:
            flags += f" --add-tokens {shlex.join(self.new_tokens.tokens)}"
        data = local(self.data)
        if data is not None and (data / TOKENIZER).is_file():
            path = data / TOKENIZER
            content = read_tokenizer(file)
            before = added_tokens(content, str(file))
            tokens = added_tokens(read_tokenizer(path), str(path))
            new = [token for token in tokens if token not in before]
            with suppress(TokenizerError):
                added = with_tokens(content, new, str(file)).tokenizer
                if new and hashlib.sha256(added).hexdigest() == tokenizer.sha256:
                    return (
                        "the data were prepared with new tokens; name the same here, by "
                        f"--model.add-tokens {shlex.join(new)}"
                    )
        return f"the data were not made with the model's tokenizer; prepare them with {flags}"


def resolve_pretrained(
    config: TrainConfig, explicit: Set[str], resumed: Info | None
) -> tuple[TrainConfig, Pretrained]:
    """Does the work of `init_source.resolve` for a run that names a trained model."""
    run = local(config.run.init_from)
    folder = config.origin.from_hf
    lora = config.model.lora
    data = config.data.path or next(map(Path, config.data.mixture), None)
    source: Pretrained
    if run is not None:
        checkpoint = newest_checkpoint(run)
        info = read_info(checkpoint)
        model = run_model_config(checkpoint, info)
        source = RunSource(
            path=run,
            files=hf_files_of(checkpoint),
            model=model,
            data=data,
            checkpoint=checkpoint,
            info=info,
        )
    else:
        assert folder is not None
        # A run of other weights does not change its own for those of a folder that does not exist.
        began_with = None if resumed is None else resumed["config"]["model"].get("from_hf")
        if lora.rank or str(folder) != began_with:
            folder = local(folder)
        if folder.exists() or lora.rank or str(folder) != began_with:
            model = read_config(folder, config.origin.ignore_config)
        else:
            assert resumed is not None
            # A resumed run has the weights and the sizes, so the folder may be gone.
            model = own_or_decoder(config.run.dir, resumed).config
        new = None
        if config.origin.add_tokens and folder.exists():
            file = tokenizer_file(folder)
            new = with_tokens(read_tokenizer(file), config.origin.add_tokens, str(file))
        config = _with_sizes(config, explicit, folder, model, new)
        source = HFSource(path=folder, files=folder, model=config.model, data=data, new_tokens=new)
    if lora.from_peft is None:
        return _with_new_rows(config, source), source
    # A run that was initialised with these adapters no longer needs their folder.
    if resumed is not None:
        old = own_or_decoder(config.run.dir, resumed).config.lora
        if old.rank and old.from_peft == lora.from_peft:
            config = _with_adapters(config, old, explicit)
            return _with_new_rows(config, source), source
    adapters = source.open_adapters(config.model)
    source = dataclasses.replace(source, adapters=adapters)
    config = _with_adapters(config, adapters.lora, explicit)
    return _with_new_rows(config, source), source


def _with_new_rows(config: TrainConfig, source: Pretrained) -> TrainConfig:
    """Adapters also train the rows of new tokens."""
    lora = config.model.lora
    if not lora.rank or lora.tables or source.new_tokens is None:
        return config
    tokens = tuple(dict.fromkeys((*lora.tokens, *source.new_tokens.ids)))
    if source.adapters is not None and source.adapters.lora.tokens not in ((), tokens):
        raise ConfigError(
            f"adapters in {lora.from_peft} have rows of the tokens {_text(lora.tokens)}, and "
            f"model.add_tokens has {_text(tokens)}"
        )
    return replace_nested(config, {"model.lora.tokens": tokens})


def _dtype_default(name: str, dtype: str, reason: str) -> Default:
    return name, dtype, "" if dtype == "float32" else reason


def _arrangement(model: ModelConfig) -> list[tuple[str, list[int]]]:
    return [(path, list(numbers)) for path, numbers, _ in model.kinds()]


def _sizes(model: ModelConfig) -> dict[str, Any]:
    return {name: value for name, value in architecture(model).items() if name != "lora"}


def _with_sizes(
    config: TrainConfig,
    explicit: Set[str],
    folder: Path,
    model: ModelConfig,
    new: NewTokens | None,
) -> TrainConfig:
    default = _sizes(ModelConfig())
    requested = {
        name: value
        for name, value in _sizes(config.model).items()
        if value != default[name] or f"model.{name}" in explicit
    }
    # The model gets rows for more ids than its files have; fewer are refused below.
    sizes = [model.vocab_size, requested.get("vocab_size", 0)]
    if new is not None:
        sizes.append(new.ids.stop)
    model = dataclasses.replace(model, vocab_size=max(sizes))
    stored = _sizes(model)
    problems = [
        f"model.{name}={value}, but the model has {stored[name]}"
        for name, value in requested.items()
        if value != stored[name]
    ]
    if len(problems) > _MAX_SHOWN:
        raise ConfigError(
            f"the model in {folder} does not match: {problems[0]}, and {len(problems) - 1} more; "
            "remove these settings, or write a configuration for it: jaxtp estimate "
            "--model.from-hf DIR --write FILE.yaml"
        )
    if problems:
        raise ConfigError(
            f"the model in {folder} does not match: {'; '.join(problems)}; remove these settings"
        )
    return replace_nested(config, {f"model.{name}": getattr(model, name) for name in stored})


def _with_adapters(config: TrainConfig, stored: LoraConfig, explicit: Set[str]) -> TrainConfig:
    lora = config.model.lora
    problems = []
    names = ["rank", "alpha", "rslora", "targets"]
    if stored.tokens:
        names.append("tokens")
    for name in names:
        requested = getattr(lora, name)
        actual = getattr(stored, name)
        is_requested = f"model.lora.{name}" in explicit or requested != getattr(LoraConfig(), name)
        is_equal = set(requested) == set(actual) if name == "targets" else requested == actual
        if is_requested and not is_equal:
            problems.append(
                f"model.lora.{name}={_text(requested)}, but the adapters have {_text(actual)}"
            )
    if problems:
        raise ConfigError(
            f"adapters in {lora.from_peft} do not match: {'; '.join(problems)}; remove these "
            "settings"
        )
    stored = dataclasses.replace(
        stored,
        from_peft=lora.from_peft,
        dtype=lora.dtype,
        base=lora.base,
        tokens=() if stored.tables else stored.tokens or lora.tokens,
        tables=stored.tables or lora.tables,
    )
    return replace_nested(config, {"model.lora": stored})


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
