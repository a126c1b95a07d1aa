"""A model on disk that can be generated from, of whatever kind."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jax.sharding import Mesh

from jaxtp.data.tokenizer import Tokenizer
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.rope import RopeScaling
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder


class SourceError(ValueError):
    """A folder that no model can be read from, or one without its tokenizer."""


@dataclass(frozen=True)
class Source:
    """A model on disk; nothing of its weights has been read."""

    name: str
    """For people."""

    config: ModelConfig
    """As it is to be run."""

    tokenizer: Tokenizer

    load: Callable[[Mesh], Decoder]
    """Reads the weights onto a mesh."""

    end_ids: frozenset[int]
    """Tokens that end a text."""

    prefix: tuple[int, ...] = ()
    """Ids that the model expects before a text."""

    template: str | None = None
    """Chat template, in Jinja."""

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """What the template may name: bos_token, eos_token."""

    context: int | None = None
    """Tokens of a prompt and its text that the model was made for at most; None where nothing says so."""


@dataclass(frozen=True)
class Options:
    """How to read a source."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Of weights and computation; None for the source's own."""

    tokenizer: Path | None = None
    """A tokenizer.json, or a folder that has one, instead of the source's own."""

    base: Path | None = None
    """The model beside the adapters of a run, where it is not where the run found it."""

    special_tokens: bool = False
    """Text that spells a special token becomes that token."""

    ignore_config: tuple[str, ...] = ()
    """Attributes of a config.json that are passed over though they are not understood."""


def stretched(context: int | None, scaling: RopeScaling) -> int | None:
    """The context of a model with what a scaling of its rotary embedding adds, which its config.json may leave out."""
    if context is None or scaling.kind == "none":
        return context
    return max(context, int((context if scaling.kind == "linear" else scaling.original_length) * scaling.factor))


def to_generate(config: ModelConfig, dtype: Literal["float32", "bfloat16"] | None) -> ModelConfig:
    """A model's configuration without what only training needs.

    Weights are stored in the dtype that they are multiplied in: layers cast to it anyway, before anything else.
    """
    compute = dtype or config.precision.compute
    precision = dataclasses.replace(config.precision, param=compute, compute=compute)
    return dataclasses.replace(
        config,
        attention="xla",
        dropout=0.0,
        remat="none",
        sequence_parallel=None,
        lora=LoraConfig(),
        precision=precision,
    )
