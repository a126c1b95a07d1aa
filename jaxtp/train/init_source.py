"""Sources of initial weights: random numbers, another run, or a Hugging Face model.

`resolve` reads `run.init_from`, `model.from_hf` and `model.lora.from`; everything later asks the `InitSource`. Only
sources that need `jaxtp.hf` import it.
"""

import dataclasses
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import jax
from flax import nnx

from jaxtp.checkpoint.io_errors import CheckpointError
from jaxtp.checkpoint.storage import newest_checkpoint, newest_info, read_info
from jaxtp.config.files import sha256
from jaxtp.config.schema import ConfigError, differences
from jaxtp.data.manifest import TOKENIZER, TokenizerInfo
from jaxtp.distributed.agreement import raise_everywhere
from jaxtp.layers.lora import LoraConfig, frozen
from jaxtp.layers.parameter import DType
from jaxtp.models.config import ModelConfig, architecture
from jaxtp.train.config import TrainConfig
from jaxtp.train.state import Blueprint

if TYPE_CHECKING:
    from jaxtp.hf.peft import PeftFolder

_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt")
"""Files of a tokenizer without a tokenizer.json."""
_MAX_SHOWN = 2
"""Settings in a message; a recipe for another model differs in ten."""
_NAME_IT = "name that by --model.from-hf FOLDER or --run.init-from RUN"

AnyConfig = TypeVar("AnyConfig", bound=TrainConfig)


@dataclass(frozen=True)
class InitialState:
    """A run's state before its first step."""

    state: nnx.State

    base: dict[str, str] | None = None
    """Identity of the frozen model under the adapters, if there are any."""

    description: str = ""


@dataclass(frozen=True)
class InitSource:
    """Random weights; subclasses load weights."""

    path: Path | None = None
    """Folder of the model, as configured."""

    adapters: "PeftFolder | None" = None
    """Initial adapters; None if there are none, or if the resumed run already has them."""

    @property
    def info(self) -> Mapping[str, Any] | None:
        """Info of another run's checkpoint."""
        return None

    @property
    def dtype(self) -> DType:
        """Dtype of the stored weights."""
        return "float32"

    @property
    def max_length(self) -> object:
        """Sequence length in the model's config.json, unchecked; None if missing."""
        if (files := self.files()) is None or not (files / "config.json").is_file():
            return None
        from jaxtp.data.tokenizer_files import LONGEST
        from jaxtp.hf.model_folder import read_attributes

        return read_attributes(files).get(LONGEST)

    def files(self) -> Path | None:
        """Returns the folder of tokenizer and config.json, if any."""
        return None

    def check(self, config: TrainConfig) -> None:
        """Raises ConfigError if the source does not fit the run."""
        if config.model.lora.rank:
            raise ConfigError(
                f"model.lora.rank={config.model.lora.rank} trains adapters of a model that stays as it is; {_NAME_IT}"
            )

    def check_tokenizer(self, made_by: TokenizerInfo) -> None:
        """Raises ConfigError if the data are known to use another tokenizer."""

    def changes(self, config: TrainConfig) -> list[str]:
        """Returns model settings that differ from the source."""
        return []

    def open_adapters(self, config: TrainConfig) -> "PeftFolder":
        """Returns the adapters of `model.lora.from`, checked against the model.

        Raises:
          HFError: unreadable or untrainable adapters, or another model's.
          ConfigError: no model to adapt.
        """
        from jaxtp.hf.peft import open_peft

        found = open_peft(Path(str(config.model.lora.from_peft)), *self._base_model(config))
        found.check_trainable()
        return found

    def _base_model(self, config: TrainConfig) -> tuple[ModelConfig, str | None]:
        raise ConfigError(f"model.lora.from={config.model.lora.from_peft} are adapters of a model; {_NAME_IT}")

    def create_state(
        self, config: TrainConfig, blueprint: Blueprint, resumed: Mapping[str, Any] | None = None
    ) -> InitialState:
        """Creates the initial state; all processes must call it.

        Args:
          resumed: info of a checkpoint of adapters, which identifies the frozen model.

        Raises:
          HFError, CheckpointError: unreadable weights, or not the resumed run's.
        """
        if self.path is None:
            return InitialState(blueprint.create(config.run.seed))
        from jaxtp.hf.peft import read_peft
        from jaxtp.hf.runs import check_base, copy_hf_files, describe_base, load_base

        base, changes = None, self.changes(config)
        try:
            weights, origin = load_base(self.path, config.model, blueprint.mesh)
        except CheckpointError as error:
            raise CheckpointError("; ".join([str(error), *changes])) from None
        if config.model.lora.rank:
            base = describe_base(weights, origin, blueprint.mesh)
            if resumed is not None:
                check_base(resumed, base, origin)
            weights = frozen(weights)
        lines = [f"weights from {origin}", *changes]
        if config.model.lora.from_peft is not None and resumed is None:
            with raise_everywhere():
                found = self.adapters or self.open_adapters(config)
                adapters = read_peft(found, blueprint.abstract["model"], blueprint.mesh)
            weights = nnx.merge_state(weights, adapters)
            lines += [f"adapters from {found.path}", *found.notes]
        state = blueprint.create(config.run.seed, weights)
        with raise_everywhere():
            if jax.process_index() == 0 and (files := self.files()) is not None:
                copy_hf_files(files, config.run.dir)
        return InitialState(state, base, "; ".join(lines))


@dataclass(frozen=True, kw_only=True)
class RunSource(InitSource):
    """Another run's newest checkpoint."""

    path: Path
    checkpoint: Path
    stored: Mapping[str, Any]
    model: ModelConfig

    @property
    def info(self) -> Mapping[str, Any]:
        """Info of the checkpoint."""
        return self.stored

    @property
    def dtype(self) -> DType:
        """Dtype of the stored weights."""
        dtype: DType = self.stored["config"]["model"]["precision"]["param"]
        return dtype

    def files(self) -> Path | None:
        """Returns the folder of tokenizer and config.json."""
        from jaxtp.hf.runs import hf_files_of

        return hf_files_of(self.checkpoint)

    def check(self, config: TrainConfig) -> None:
        """Checks the folder and the order of the blocks."""
        if self.checkpoint.is_relative_to(config.run.dir):
            raise ConfigError(
                f"run.init_from={self.path} is the run in run.dir={config.run.dir} itself; name another folder with "
                "--run.dir, or leave --run.init-from out to resume it"
            )
        # Weights are loaded by path: stacked otherwise, the layers would come in another order.
        layers, stored = (
            [(path, list(numbers)) for path, numbers, _ in model.kinds()] for model in (config.model, self.model)
        )
        if layers != stored and config.model.num_layers == self.model.num_layers:
            raise ConfigError(
                f"run.init_from={self.path} has its blocks in another order: model.pattern={list(self.model.pattern)} "
                f"and model.first_blocks={list(self.model.first_blocks)}; give the same"
            )

    def check_tokenizer(self, made_by: TokenizerInfo) -> None:
        """Compares the tokenizers."""
        before = self.stored.get("corpus", {}).get("tokenizer", made_by.name)
        if made_by.name != before:
            raise ConfigError(
                f"run.init_from={self.path} was trained on data of another tokenizer ({before[:12]}) than these "
                f"({made_by.name[:12]}), whose tokens mean something else; prepare them by that one"
            )

    def changes(self, config: TrainConfig) -> list[str]:
        """Compares the models."""
        before, now = architecture(self.model), architecture(config.model)
        return differences(before | {"lora": now["lora"]}, now, "model.")

    def _base_model(self, config: TrainConfig) -> tuple[ModelConfig, str | None]:
        from jaxtp.hf.runs import family_of_run

        return self.model, family_of_run(self.checkpoint)


@dataclass(frozen=True, kw_only=True)
class HFSource(InitSource):
    """A model in Hugging Face format."""

    path: Path
    model: ModelConfig | None
    """None if the folder is gone, and not needed because the run is resumed."""

    @property
    def dtype(self) -> DType:
        """Dtype of the stored weights."""
        from jaxtp.hf.config_json import dtype_of, stored_dtype
        from jaxtp.hf.model_folder import HFError, open_folder

        try:
            return dtype_of(open_folder(self.path))
        except HFError:  # an estimate needs no weights: config.json states the dtype
            stated = stored_dtype(self.path)
        return stated if stated in get_args(DType) else "float32"  # type: ignore[return-value]

    def files(self) -> Path | None:
        """Returns the folder of tokenizer and config.json."""
        return self.path

    def check(self, config: TrainConfig) -> None:
        """Accepts any run."""

    def check_tokenizer(self, made_by: TokenizerInfo) -> None:
        """Compares the tokenizers."""
        if (file := self.path / TOKENIZER).is_file():
            if sha256(file) != made_by.sha256:
                raise ConfigError(
                    f"the data were not made by the model's tokenizer; prepare them with --tokenizer {file}"
                )
        elif made_by.sha256 is None and any((self.path / name).exists() for name in _OTHER_TOKENIZERS):
            raise ConfigError(
                f"the data are bytes, and {self.path} has a tokenizer of its own, without the {TOKENIZER} by which "
                "jaxtp prepare could make them; transformers writes one: AutoTokenizer.save_pretrained(folder)"
            )

    def _base_model(self, config: TrainConfig) -> tuple[ModelConfig, str | None]:
        from jaxtp.hf.model_folder import read_attributes

        return config.model, read_attributes(self.path).get("model_type")


def resolve(config: AnyConfig, explicit: Set[str] = frozenset()) -> tuple[AnyConfig, InitSource]:
    """Returns the configuration with model and adapter sizes, and the weights' source.

    Args:
      explicit: dotted names of the user's settings, even at their default.

    Raises:
      HFError, CheckpointError: unreadable model, run or adapters.
      ConfigError: contradicting settings.
    """
    run, folder = config.run.init_from, config.model.from_hf
    if run is not None and folder is not None:
        raise ConfigError("--run.init-from and --model.from-hf are conflicting weight sources; leave one of them out")
    if folder is None and config.model.ignore_config:
        raise ConfigError("--ignore-config applies to the model of --model.from-hf, and there is none")
    source = InitSource()
    if run is not None:
        from jaxtp.hf.runs import run_model_config

        checkpoint = newest_checkpoint(run)
        stored = read_info(checkpoint)
        source = RunSource(path=run, checkpoint=checkpoint, stored=stored, model=run_model_config(checkpoint, stored))
    elif folder is not None:
        from jaxtp.hf.config_json import read_config

        model = None
        if not _source_no_longer_needed(config, folder):
            model = read_config(folder, config.model.ignore_config)
            config = _with_sizes(config, folder, model)
        source = HFSource(path=folder, model=model)
    if config.model.lora.from_peft is None:
        return config, source
    lora = _resumed_adapters(config)
    if lora is None:
        source = dataclasses.replace(source, adapters=source.open_adapters(config))
        assert source.adapters is not None
        lora = source.adapters.lora
    return _with_adapters(config, lora, explicit), source


def stored_source(info: Mapping[str, Any]) -> Path | None:
    """Returns the `run.init_from` of a checkpoint's run."""
    stored = info["config"]["run"]["init_from"]
    return None if stored is None else Path(stored)


def describe_length(config: TrainConfig, source: InitSource) -> str | None:
    """Warns if sequences are longer than the initial model supports."""
    longest, length = source.max_length, config.data.sequence_length
    if type(longest) is not int or length <= longest:
        return None
    return (
        f"sequences of {length:,} tokens, but the model was made for {longest:,} (max_position_embeddings in its "
        f"config.json); jaxtp evaluate and generate go beyond {longest:,} only with --beyond-context"
    )


def _source_no_longer_needed(config: TrainConfig, folder: Path) -> bool:
    # The folder is gone, but the run to resume has the weights and the sizes.
    if folder.exists() or config.model.lora.rank or (info := newest_info(config.run.dir)) is None:
        return False
    from jaxtp.hf.runs import run_model_config

    return run_model_config(config.run.dir, info) == config.model


def _with_sizes(config: AnyConfig, folder: Path, model: ModelConfig) -> AnyConfig:
    stored = architecture(model) | {"lora": architecture(config.model)["lora"]}
    default = architecture(ModelConfig())
    problems = [
        f"model.{name}={value}, where it has {stored[name]}"
        for name, value in architecture(config.model).items()
        if value not in (default[name], stored[name])
    ]
    if len(problems) > _MAX_SHOWN:
        raise ConfigError(
            f"{folder} is another model: {problems[0]}, and {len(problems) - 1} more; leave these "
            "settings out, or write a configuration for it: jaxtp estimate --model.from-hf DIR --write FILE.yaml"
        )
    if problems:
        raise ConfigError(f"{folder} is another model: {'; '.join(problems)}; leave these settings out")
    sizes = {name: getattr(model, name) for name in stored if name != "lora"}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes))


def _resumed_adapters(config: TrainConfig) -> LoraConfig | None:
    # A run that was initialised with these adapters no longer needs their folder.
    if (info := newest_info(config.run.dir)) is None:
        return None
    from jaxtp.hf.runs import run_model_config

    lora = run_model_config(config.run.dir, info).lora
    return lora if lora.rank and lora.from_peft == config.model.lora.from_peft else None


def _with_adapters(config: AnyConfig, found: LoraConfig, explicit: Set[str]) -> AnyConfig:
    lora, problems = config.model.lora, []
    for name in ("rank", "alpha", "rslora", "targets"):
        requested, stored = getattr(lora, name), getattr(found, name)
        is_requested = f"model.lora.{name}" in explicit or requested != getattr(LoraConfig(), name)
        if is_requested and (set(requested) != set(stored) if name == "targets" else requested != stored):
            texts = (" ".join(value) if isinstance(value, tuple) else str(value) for value in (requested, stored))
            problems.append(f"model.lora.{name}={', where they have '.join(texts)}")
    if problems:
        raise ConfigError(f"{lora.from_peft} has other adapters: {'; '.join(problems)}; leave these settings out")
    found = dataclasses.replace(found, from_peft=lora.from_peft, dtype=lora.dtype)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, lora=found))
