"""The weights that a run begins with: random ones, those of another run, or a model in Hugging Face format."""

import dataclasses
from collections.abc import Iterator, Set
from pathlib import Path
from typing import TypeVar

import jax

from jaxtp.checkpoint.stored import newest, newest_info, stored_info
from jaxtp.config import ConfigError, differences
from jaxtp.data.manifest import TOKENIZER, TokenizerInfo
from jaxtp.files import sha256
from jaxtp.hf.attributes import read_config
from jaxtp.hf.folder import read_attributes
from jaxtp.hf.peft_load import PeftFolder, open_peft
from jaxtp.hf.runs import keep_files, kept_family, kept_files, model_of
from jaxtp.layers.lora import LoraConfig
from jaxtp.models.config import ModelConfig, architecture
from jaxtp.train.config import TrainConfig

_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt")
"""Files of a tokenizer without a tokenizer.json."""

_NAME_IT = "name that by --model.from-hf FOLDER or --run.init-from RUN"

AnyConfig = TypeVar("AnyConfig", bound=TrainConfig)


def with_model(config: AnyConfig, given: Set[str] = frozenset()) -> AnyConfig:
    """Returns the configuration with the sizes of the model that `model.from_hf` names, if it names one, and with the
    adapters that `model.lora.from` names.

    Args:
      config: the configuration that was asked for.
      given: the dotted names of settings that were given, even if they have the default's value.

    Raises:
      HFError: the model or the adapters cannot be read, or are not understood.
      ConfigError: settings that contradict them.
    """
    return _with_adapters(_with_sizes(config), given)


def _with_sizes(config: AnyConfig) -> AnyConfig:
    if config.model.from_hf is None and config.model.ignore_config:
        raise ConfigError("--ignore-config is of a model that --model.from-hf names, and there is none")
    if config.model.from_hf is None or _goes_on_without(config):
        return config
    found = read_config(config.model.from_hf, config.model.ignore_config)
    there = architecture(found) | {"lora": architecture(config.model)["lora"]}
    problems = list(_contradictions(config.model, there))
    if problems:
        raise ConfigError(f"{config.model.from_hf} is another model: {'; '.join(problems)}; leave these settings out")
    sizes = {name: getattr(found, name) for name in there if name != "lora"}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes))


def _with_adapters(config: AnyConfig, given: Set[str]) -> AnyConfig:
    lora = config.model.lora
    if lora.from_peft is None:
        return config
    recorded = _recorded_adapters(config)
    found = open_adapters(config).lora if recorded is None else recorded
    problems = []
    for name in ("rank", "alpha", "rslora", "targets"):
        asked, theirs = getattr(lora, name), getattr(found, name)
        is_asked = f"model.lora.{name}" in given or asked != getattr(LoraConfig(), name)
        if is_asked and (set(asked) != set(theirs) if name == "targets" else asked != theirs):
            problems.append(f"model.lora.{name}={_said(asked)}, where they have {_said(theirs)}")
    if problems:
        raise ConfigError(f"{lora.from_peft} has other adapters: {'; '.join(problems)}; leave these settings out")
    found = dataclasses.replace(found, from_peft=lora.from_peft)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, lora=found))


def _said(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _recorded_adapters(config: TrainConfig) -> LoraConfig | None:
    """Returns the adapters of the run that goes on, if it began with these: it needs their folder no more."""
    info = newest_info(config.run.dir)
    lora = None if info is None else model_of(config.run.dir, info).lora
    return lora if lora is not None and lora.rank and lora.from_peft == config.model.lora.from_peft else None


def open_adapters(config: TrainConfig) -> PeftFolder:
    """Returns the adapters that a run begins with, compared with its model.

    Raises:
      HFError: they cannot be read, are of another model, or cannot be trained.
      ConfigError: there is no model beside them.
    """
    folder = Path(str(config.model.lora.from_peft))
    if (source := config.model.from_hf) is not None:
        found = open_peft(folder, config.model, read_attributes(source).get("model_type"))
    elif config.run.init_from is not None:
        begun = newest(config.run.init_from)
        found = open_peft(folder, model_of(begun, stored_info(begun)), kept_family(begun))
    else:
        raise ConfigError(f"model.lora.from={folder} are adapters of a model; {_NAME_IT}")
    found.check_trainable()
    return found


def check_origin(config: TrainConfig) -> None:
    """Checks that the model that a run begins with is there.

    Raises:
      ConfigError: two beginnings, or adapters of nothing.
      CheckpointError: there is no such run, or it does not say of which model it is.
    """
    if (run := config.run.init_from) is not None:
        begun = newest(run)
        if begun.is_relative_to(config.run.dir):
            raise ConfigError(
                f"run.init_from={run} is the run in run.dir={config.run.dir} itself; name another folder with "
                "--run.dir, or leave --run.init-from out to go on with it"
            )
        if config.model.from_hf is not None:
            raise ConfigError("--run.init-from and --model.from-hf are two beginnings; leave one of them out")
        _check_stacking(config.model, run, model_of(begun, stored_info(begun)))
    elif config.model.lora.rank and config.model.from_hf is None:
        raise ConfigError(
            f"model.lora.rank={config.model.lora.rank} trains adapters of a model that stays as it is; {_NAME_IT}"
        )


def changes_since(config: TrainConfig) -> list[str]:
    """Returns the settings of the model in which a run differs from the one that it begins with, if it does."""
    if (run := config.run.init_from) is None:
        return []
    begun = newest(run)
    before, now = (architecture(model) for model in (model_of(begun, stored_info(begun)), config.model))
    return differences(before | {"lora": now["lora"]}, now, "model.")


def _check_stacking(model: ModelConfig, run: Path, before: ModelConfig) -> None:
    """Checks that blocks are stacked as in the model of another run: else its layers would come in another order.

    Raises:
      ConfigError: they are not.
    """
    layers, there = ([(path, list(numbers)) for path, numbers, _ in each.kinds()] for each in (model, before))
    if layers != there and model.num_layers == before.num_layers:
        raise ConfigError(
            f"run.init_from={run} has its blocks in another order: model.pattern={list(before.pattern)} and "
            f"model.first_blocks={list(before.first_blocks)}; give the same"
        )


def check_tokenizer(config: TrainConfig, made_by: TokenizerInfo) -> None:
    """Checks that the data were made by the tokenizer of the model that a run begins with, as far as that is known.

    Raises:
      ConfigError: they were not.
    """
    if (run := config.run.init_from) is not None:
        before = stored_info(newest(run)).get("corpus", {}).get("tokenizer", made_by.name)
        if made_by.name != before:
            raise ConfigError(
                f"run.init_from={run} was trained on data of another tokenizer ({before[:12]}) than these "
                f"({made_by.name[:12]}), whose tokens mean something else; prepare them by that one"
            )
    if (folder := config.model.from_hf) is None:
        return
    if (file := folder / TOKENIZER).is_file():
        if sha256(file) != made_by.sha256:
            raise ConfigError(f"the data were not made by the model's tokenizer; prepare them with --tokenizer {file}")
    elif made_by.sha256 is None and any((folder / name).exists() for name in _OTHER_TOKENIZERS):
        raise ConfigError(
            f"the data are bytes, and {folder} has a tokenizer of its own, without the {TOKENIZER} by which "
            "jaxtp prepare could make them; transformers writes one: AutoTokenizer.save_pretrained(folder)"
        )


def _goes_on_without(config: TrainConfig) -> bool:
    """Returns whether the model's folder is gone and not needed, because the run has its weights and sizes."""
    if config.model.from_hf is None or config.model.from_hf.exists() or config.model.lora.rank:
        return False
    info = newest_info(config.run.dir)
    return info is not None and model_of(config.run.dir, info) == config.model


def keep_files_of_origin(config: TrainConfig) -> None:
    """Keeps what came with the model that a run begins with, its tokenizer and chat template, in the run's folder."""
    source = config.model.from_hf
    if source is None and config.run.init_from is not None:
        source = kept_files(newest(config.run.init_from))
    if source is not None and jax.process_index() == 0:
        keep_files(source, config.run.dir)


def _contradictions(model: ModelConfig, there: dict[str, object]) -> Iterator[str]:
    """Names the settings that are neither the default nor what the model has."""
    default = architecture(ModelConfig())
    for name, value in architecture(model).items():
        if value not in (default[name], there[name]):
            yield f"model.{name}={value}, where it has {there[name]}"
