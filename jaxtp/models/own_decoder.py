"""A decoder of the user's: `decoder_settings` finds the class and the settings of the Decoder that a function builds.

The settings name the class (`ModelConfig.decoder`), so that all code that makes a decoder from settings makes it.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh

from jaxtp.config.affects import settings_of
from jaxtp.config.python_object import reference_to, user_code_error
from jaxtp.config.schema import ConfigError, to_plain, validate
from jaxtp.mesh import abstract_mesh, mesh_shape
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder


def builder(function: Callable[..., Any], config: ModelConfig) -> Callable[[nnx.Rngs], nnx.Module]:
    """Returns a function that builds a model with the arguments of the settings.

    Raises:
      ConfigError: `function` does not take these arguments.
    """
    name, arguments = config.build or repr(function), dict(config.arguments)
    if isinstance(function, nnx.Module):
        raise ConfigError(f"{name} is a model; give its class, or a function that returns it")
    # `inspect` would read the `__call__` of NNX's metaclass.
    is_class = isinstance(function, type)
    try:
        signature = inspect.signature(function.__init__ if is_class else function)
    except ValueError:  # a C function
        signature = inspect.Signature([inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)])
    takes_rngs = "rngs" in signature.parameters
    try:
        signature.bind(*([None] if is_class else []), **({"rngs": None} if takes_rngs else {}) | arguments)
    except TypeError as error:
        takes = ", ".join(each for each in list(signature.parameters)[is_class:] if each != "rngs") or "none"
        raise ConfigError(f"{name}: {error}; model.arguments can give {takes}") from None

    def build(rngs: nnx.Rngs) -> nnx.Module:
        from jaxtp.parallelize.parallelize import mark_arrays_as_data

        try:
            model = function(**({"rngs": rngs} if takes_rngs else {}) | arguments)
        except Exception as error:
            raise user_code_error(name, error) from error
        if not isinstance(model, nnx.Module):
            raise ConfigError(f"{name} returns {model!r:.100}, and should return an nnx.Module")
        mark_arrays_as_data(model)
        return model

    return build


def decoder_settings(source: Any, config: ModelConfig) -> ModelConfig | None:
    """Returns the settings of a Decoder, or None if the model is another.

    Args:
      source: a function that builds the model, or a subclass of `ModelConfig` or its instance.
      config: names `source`, and gives its arguments.

    Raises:
      ConfigError: `source` does not take the arguments, fails, or returns a Decoder that its class does not make from
        settings.
    """
    if isinstance(source, type) and issubclass(source, ModelConfig):
        source = validate(source, config.arguments, source="model.arguments")
    elif isinstance(source, ModelConfig) and config.arguments:
        raise ConfigError(f"{config.build} are settings, which take no model.arguments")
    if isinstance(source, ModelConfig):
        return _checked(_declared(source, type(source).decoder or Decoder, config.build, config.arguments))
    build = builder(source, config)
    model = _abstract(build)
    if not isinstance(model, Decoder):
        return None
    kind: Any = type(model)

    def make(config: ModelConfig, *, rngs: nnx.Rngs) -> Decoder:
        # Only the function knows the initial weights, and only the class takes other settings.
        made: Any = build(rngs) if config == found else kind(config, rngs=rngs)
        return made

    found = _declared(model.config, make, config.build, config.arguments)
    name = f"{kind.__name__}(config, rngs=rngs)"
    try:
        other = _shapes(_abstract(lambda rngs: kind(model.config, rngs=rngs)))
    except TypeError as error:
        raise ConfigError(f"{config.build}: {name} fails: {error}. {_CONTRACT}") from error
    if differing := sorted({at for at, _ in _shapes(model).items() ^ other.items()}):
        raise ConfigError(f"{config.build} and {name} differ in {', '.join(differing[:3])}. {_CONTRACT}")
    return _checked(found)


_CONTRACT = (
    "jaxtp makes the model with other settings too, to check it and to generate: its __init__ should make all of it "
    "from its config, as Decoder's does"
)


def recorded(config: ModelConfig) -> ModelConfig:
    """Returns the settings of a subclass with its name and arguments, so that they can be read from a file."""
    kind: Any = type(config)
    if kind is ModelConfig or config.build is not None:
        return config
    defaults = {name: setting.default for name, setting in settings_of(kind).items()}
    plain = to_plain(config)
    arguments = {name: plain[name] for name, value in vars(config).items() if value != defaults[name]}
    return _declared(config, kind.decoder or Decoder, reference_to(kind), arguments)


def _declared(
    config: ModelConfig, make: Callable[..., Decoder], build: str | None, arguments: Mapping[str, Any]
) -> ModelConfig:
    # A subclass of the settings' class names the class of the decoder; `dataclasses.replace` keeps it.
    base = type(config)
    kind: Any = type(base.__name__, (base,), {"decoder": staticmethod(make), "__module__": base.__module__})
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return kind(**values | {"build": build, "arguments": arguments})


def _checked(config: ModelConfig) -> ModelConfig:
    if config.lora.rank or config.from_hf is not None:
        raise ConfigError(
            f"{config.build}: a Decoder of your own takes weights by --run.init-from, and has no adapters"
        )
    return config


def _abstract(build: Callable[[nnx.Rngs], nnx.Module]) -> nnx.Module:
    # On one device, which every model fits.
    none, one = AbstractMesh((), ()), abstract_mesh(mesh_shape())  # a context mesh cannot change its size directly
    with jax.sharding.use_abstract_mesh(none), jax.sharding.use_abstract_mesh(one):
        model: nnx.Module = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    return model


def _shapes(model: nnx.Module) -> dict[str, str]:
    return {
        ".".join(map(str, path)): f"{type(variable).__name__} {variable.dtype}{variable.shape}"
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }
