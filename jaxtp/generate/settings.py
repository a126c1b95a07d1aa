"""Settings of generation: how tokens are chosen, and when a text ends."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import tyro
from pydantic import Field

from jaxtp.config import ConfigError, Count, CountOrZero, allowed, to_plain, validate


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Settings of one call; the filters work in the order of their fields, each on what the one before has left."""

    max_tokens: Count = 128
    """Tokens after which a text ends, whatever it says."""

    seed: CountOrZero = 0
    """Seed of the first prompt; each further one has the next. A prompt gives the same text in any batch."""

    repetition_penalty: Annotated[float, Field(ge=0.01, le=100), allowed("from 0.01 to 100")] = 1.0
    """Divides the positive logits of tokens that the text or its prompt has, and multiplies their negative ones (CTRL);
    1 is off."""

    temperature: Annotated[float, Field(ge=0, le=1000), allowed("from 0 to 1000")] = 0.0
    """Divides the logits; 0 always takes the likeliest token."""

    top_k: CountOrZero = 0
    """Keeps this many of the likeliest tokens; 0 is off."""

    top_p: Annotated[float, Field(gt=0, le=1), allowed("above 0, up to 1")] = 1.0
    """Keeps the likeliest tokens until their probabilities reach this sum; 1 is off."""

    min_p: Annotated[float, Field(ge=0, le=1), allowed("from 0 to 1")] = 0.0
    """Keeps the tokens that have at least this share of the likeliest token's probability; 0 is off."""

    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")] = ()
    """A text that ends the output, and is not part of it. Can be given several times."""


def check(settings: GenerationSettings) -> None:
    """Checks settings that were built in Python.

    Raises:
      ConfigError: a value cannot be, or would have no effect; the message names all of them.
    """
    if isinstance(settings.stop, str):
        raise ConfigError(f"stop={settings.stop!r} is one text; for one give ({settings.stop!r},)")
    validate(GenerationSettings, {**to_plain(settings), "stop": tuple(settings.stop)}, source="settings")
    problems = list(contradictions(settings))
    if problems:
        raise ConfigError("; ".join(problems))


def contradictions(
    settings: GenerationSettings, spelled: Callable[[str, object], str] = lambda name, value: f"{name}={value}"
) -> Iterator[str]:
    """Yields a message for each setting that would have no effect, or end every text at once.

    Args:
      settings: settings, each of them valid by itself.
      spelled: returns a setting and its value as the user would write them.
    """
    off = GenerationSettings()
    idle = [n for n in ("top_k", "top_p", "min_p") if getattr(settings, n) != getattr(off, n)]
    if settings.temperature == 0 and idle:
        values = ", ".join(spelled(name, getattr(settings, name)) for name in idle)
        yield (
            f"{values} {'has' if len(idle) == 1 else 'have'} no effect at temperature 0, which always takes the "
            "likeliest token; give a temperature too"
        )
    if "" in settings.stop:
        yield f"{spelled('stop', repr(''))} would end everything; leave it out"
