"""User models: `builder` calls the user's function, `decoder_settings` describes its Decoder.

The settings of a Decoder carry the function that makes it (`ModelConfig.decoder`), so that all code
that makes a decoder from settings makes the user's.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flax import nnx

from jaxtp.config.affects import settings_of
from jaxtp.config.hints import by_dotted_path
from jaxtp.config.python_object import (
    check_arguments,
    describe_value,
    reference_to,
    signature_of,
    user_code,
)
from jaxtp.config.schema import ConfigError, to_plain, validate
from jaxtp.mesh import abstract_mesh, as_only, mesh_shape
from jaxtp.models.config import ModelConfig, OriginConfig
from jaxtp.models.decoder import Decoder

Builder = Callable[[nnx.Rngs], nnx.Module]


def builder(function: Callable[..., Any], origin: OriginConfig) -> Builder:
    """Returns a function that builds a model with the origin's arguments.

    Raises `ConfigError` if it takes others.
    """
    name = origin.build or describe_value(function)
    arguments = dict(origin.arguments)
    if isinstance(function, nnx.Module):
        raise ConfigError(f"{name} is a model; give its class, or a function that returns it")
    if not callable(function):
        raise ConfigError(
            f"{name} is {describe_value(function)}, and should be a function that returns a model"
        )
    signature = signature_of(function)
    takes_rngs = signature is not None and "rngs" in signature.parameters
    with_rngs = partial(function, rngs=None) if takes_rngs else function
    check_arguments(name, with_rngs, "model.arguments", arguments)

    def build(rngs: nnx.Rngs) -> nnx.Module:
        from jaxtp.plans.parallelize import mark_arrays_as_data

        with user_code(name):
            model = function(**({"rngs": rngs} if takes_rngs else {}) | arguments)
        if not isinstance(model, nnx.Module):
            raise ConfigError(
                f"{name} returns {describe_value(model)}, and should return an nnx.Module"
            )
        mark_arrays_as_data(model)
        return model

    return build


def decoder_settings(model: Any, origin: OriginConfig) -> ModelConfig | None:
    """Returns the settings of a Decoder, or None if the model is another.

    Args:
      model: a function that builds the model, or a subclass of `ModelConfig` or its instance.
      origin: has the name of `model`, and its arguments.

    Raises:
      ConfigError: `model` does not take the arguments, fails, or returns a Decoder that its class
        does not make from settings.
    """
    if isinstance(model, type) and issubclass(model, ModelConfig):
        model = validate(model, origin.arguments, source="model.arguments")
    elif isinstance(model, ModelConfig) and origin.arguments:
        raise ConfigError(f"{origin.build} are settings, which take no model.arguments")
    if isinstance(model, ModelConfig):
        settings: ModelConfig | None = replace(model, decoder=model.decoder or Decoder)
    else:
        settings = _settings_of_built(builder(model, origin), origin)
    if settings is not None and (settings.lora.rank or origin.from_hf is not None):
        raise ConfigError(
            f"{origin.build}: a Decoder of your own takes weights by --run.init-from, and has no "
            "adapters"
        )
    return settings


def call_of_load(path: Path, build: str | None) -> str:
    """Returns the Python expression that loads a run of a user's model.

    `build` names the model.
    """
    place, _, name = (build or "").rpartition(":")
    reference = repr(build)
    if place == "__main__":  # of a notebook
        reference = name
    elif not place or build is None or build.startswith("<"):
        reference = "..."
    return f"jaxtp.load_run({str(path)!r}, build={reference})"


def _settings_of_built(build: Builder, origin: OriginConfig) -> ModelConfig | None:
    model = _abstract(build)
    if not isinstance(model, Decoder):
        return None
    kind = type(model)

    def make(config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.Module:
        # Only the function knows the initial weights, and only the class takes other settings.
        if config == settings:
            return build(rngs)
        return kind(config, rngs=rngs)

    settings = replace(model.config, decoder=make)
    call = f"{kind.__name__}(config, rngs=rngs)"
    rule = (
        "jaxtp makes the model with other settings too, to check it and to generate: its __init__ "
        "should make all of it from its config, as Decoder's does"
    )
    try:
        other = _shapes(_abstract(lambda rngs: kind(model.config, rngs=rngs)))
    except TypeError as error:
        raise ConfigError(f"{origin.build}: {call} fails: {error}. {rule}") from error
    differing = sorted({path for path, _ in _shapes(model).items() ^ other.items()})
    if differing:
        raise ConfigError(f"{origin.build} and {call} differ in {', '.join(differing[:3])}. {rule}")
    return settings


def recorded(config: ModelConfig) -> dict[str, object]:
    """Returns the settings of a run for a subclass of ModelConfig: it, its name and arguments."""
    kind: Any = type(config)
    clashes = settings_of(OriginConfig).keys() & settings_of(kind).keys()
    if clashes:
        raise ConfigError(
            f"{kind.__name__} has fields of jaxtp's names: rename {', '.join(clashes)}"
        )
    plain = to_plain(config)
    arguments = {}
    for setting in settings_of(kind).values():
        if len(setting.path) == 1 and getattr(config, setting.path[0]) != setting.default:
            arguments[setting.name] = plain[setting.name]
    return {
        "model": replace(config, decoder=config.decoder or Decoder),
        "model.build": reference_to(kind),
        "model.arguments": arguments,
    }


def _abstract(build: Builder) -> nnx.Module:
    # On one device, which every model fits.
    with as_only(abstract_mesh(mesh_shape())):
        return nnx.eval_shape(lambda: build(nnx.Rngs(0)))


def _shapes(model: nnx.Module) -> dict[str, str]:
    shapes = {}
    for path, variable in by_dotted_path(nnx.to_flat_state(nnx.state(model))).items():
        shapes[path] = f"{type(variable).__name__} {variable.dtype}{variable.shape}"
    return shapes
