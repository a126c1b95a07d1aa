"""Tensor-parallel training of transformer models in JAX that you can trust.

The names that most programs use are here, and the others in namespaces: `jaxtp.layers`,
`jaxtp.plans`, `jaxtp.losses`, `jaxtp.hf`, `jaxtp.generate`, `jaxtp.errors` and `jaxtp.typing`. Each
is imported at its first use, so `import jaxtp` takes milliseconds; `__init__.pyi` lists them.

Functions that take a model return the model to use. `parallelize` and `freeze` change the model in
place, so that memory holds no array twice. Functions for adapters return a new model, which shares
the arrays of the old one.
"""

from importlib import import_module

from jaxtp.config import public_names

_RENAMED = {
    "CP": '"cp"',
    "DP": '"dp"',
    "FSDP": '"fsdp"',
    "TP": '"tp"',
    "GenerationSettings": "jaxtp.generate.Settings",
    "Task": "Trainer(model=..., loss=..., batches=..., optimizer=...)",
    "load_hf": "jaxtp.hf.load",
    "load_peft": "jaxtp.hf.load_adapters",
    "save_hf": "jaxtp.hf.save",
    "save_peft": "jaxtp.hf.save_adapters",
}
"""Names of jaxtp 0.2 whose last word changed; a namespace has the others."""

_load, _names, __all__ = public_names.attach(__name__, __file__, _RENAMED)


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("importlib.metadata").version(__name__)
    return _load(name)


def __dir__() -> list[str]:
    return [*_names(), "__version__"]
