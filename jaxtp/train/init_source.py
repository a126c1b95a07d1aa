"""Sources of initial weights: random numbers, or a trained model (`pretrained.py`).

`resolve` reads `run.init_from`, `model.from_hf` and `model.lora.from_peft`; later code uses the
`InitSource`.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flax import nnx

from jaxtp.checkpoint.storage import Info
from jaxtp.config.schema import ConfigError
from jaxtp.data.manifest import TokenizerInfo
from jaxtp.train.config import RunConfig, TrainConfig
from jaxtp.train.state import Blueprint

if TYPE_CHECKING:
    from jaxtp.train.resume import Restored

MODEL = "model."
"""Prefix of the names of a model's variables in a checkpoint."""

NAME_MODEL = "name its folder by --model.from-hf FOLDER or --run.init-from RUN"

Default = tuple[str, object, str]
"""The dotted name of a setting, its value, and a reason, which is printed unless it is empty."""


@dataclass(frozen=True)
class InitialState:
    """A run's state before its first step."""

    state: nnx.State
    # Identity of the frozen model under the adapters, if there are any
    base: dict[str, str] | None = None
    description: str = ""


@dataclass(frozen=True)
class InitSource:
    """Random weights; subclasses load weights."""

    # Folder of the model, as configured
    path: Path | None = None

    def check(self, config: TrainConfig) -> None:
        """Raises ConfigError if the source does not fit the run."""
        if self.path is None and config.model.lora.rank:
            raise ConfigError(
                f"model.lora.rank={config.model.lora.rank} adds adapters to a trained model; "
                f"{NAME_MODEL}"
            )

    def check_tokenizer(self, tokenizer: TokenizerInfo) -> None:
        """Raises ConfigError if the data are known to use another tokenizer."""

    def defaults(self, config: TrainConfig, resumed: Info | None) -> Iterator[Default]:
        """Yields settings that suit the model.

        `resumed` is the info of the run's newest checkpoint.
        """
        yield from ()

    def length_warning(self, config: TrainConfig) -> str | None:
        """Warns if sequences are longer than the model supports."""
        return None

    def create_state(
        self, run: RunConfig, blueprint: Blueprint, restored: "Restored | None" = None
    ) -> InitialState:
        """Creates the initial state, or completes a restored one; all processes must call it.

        Raises:
          HFError, CheckpointError: the weights are unreadable, or are not the resumed run's.
        """
        if restored is None:
            return InitialState(blueprint.create(run.seed))
        return InitialState(restored.state)


@dataclass(frozen=True)
class OwnModelRun(InitSource):
    """Another run of a user's model, whose variables have the same paths and shapes."""

    path: Path

    def check(self, config: TrainConfig) -> None:
        """Refuses the run's own folder."""
        if self.path == config.run.dir:
            raise ConfigError(
                f"run.init_from={self.path} is the run in run.dir itself; leave run.init_from out "
                "to resume it"
            )

    def create_state(
        self, run: RunConfig, blueprint: Blueprint, restored: "Restored | None" = None
    ) -> InitialState:
        """Loads the model's variables from the newest checkpoint, unless the run is resumed.

        A model that has all variables of the run may have others, which begin as its code makes
        them.
        """
        if restored is not None:
            return super().create_state(run, blueprint, restored)
        from jaxtp.checkpoint.logical import named_variables, select_paths
        from jaxtp.checkpoint.manager import load_weights
        from jaxtp.checkpoint.storage import newest_checkpoint, read_info_on_all

        _, info = read_info_on_all(self.path, lambda: newest_checkpoint(self.path))
        stored = {name.removeprefix(MODEL) for name in info["checksums"] if name.startswith(MODEL)}
        variables = blueprint.abstract["model"]
        names = named_variables(variables).keys()
        if stored <= names:
            variables = select_paths(variables, stored.__contains__)
        weights, folder = load_weights(self.path, variables, blueprint.mesh)
        state = blueprint.create(run.seed, weights)
        description = f"weights from {folder}"
        if names > stored:
            new = ", ".join(sorted(names - stored))
            description += f", which has no {new}: they begin as new ones"
        return InitialState(state, description=description)


def resolve(
    config: TrainConfig, explicit: Set[str], resumed: Info | None
) -> tuple[TrainConfig, InitSource]:
    """Returns the configuration with the sizes of model and adapters, and the source of weights.

    Args:
      explicit: dotted names of the settings that the user gave, even if they are defaults.
      resumed: the info of the run's newest checkpoint.

    Raises:
      HFError, CheckpointError: the model, run or adapters are unreadable.
      ConfigError: settings contradict each other.
    """
    run = config.run.init_from
    folder = config.origin.from_hf
    adapters = config.model.lora.from_peft
    if run is not None and folder is not None:
        raise ConfigError(
            "--run.init-from and --model.from-hf are conflicting weight sources; leave one of "
            "them out"
        )
    if folder is None and config.origin.ignore_config:
        raise ConfigError(
            "--ignore-config applies to the model of --model.from-hf, and there is none"
        )
    if folder is None and config.origin.add_tokens:
        raise ConfigError(
            "--model.add-tokens is for the tokenizer of --model.from-hf, and there is none; "
            "`jaxtp convert export RUN FOLDER` makes one of a run"
        )
    if config.origin.build is not None and run is not None:
        from jaxtp.data.copies import local

        return config, OwnModelRun(local(run))
    if config.origin.build is not None:
        return config, InitSource()
    if run is not None or folder is not None:
        from jaxtp.train.pretrained import resolve_pretrained

        return resolve_pretrained(config, explicit, resumed)
    if adapters is not None:
        raise ConfigError(
            f"model.lora.from_peft={adapters} are adapters of a trained model; {NAME_MODEL}"
        )
    return config, InitSource()
