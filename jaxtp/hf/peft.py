"""Reads and writes adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

The format: https://huggingface.co/docs/peft/developer_guides/checkpoint. Tensor names decide which modules have
adapters. A list in `target_modules` must agree; a regular expression is not run, since an attacker can make it run
forever. A layer without an adapter gets zeros, which training does not change (`jaxtp/layers/lora.py`).
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.checkpoint.logical import Variable, add_padding, logical_spec, named_variables, replace_arrays
from jaxtp.config import reading
from jaxtp.config.reading import truncate
from jaxtp.config.schema import nearest_file
from jaxtp.hf.adapters import Adapter, adapters, target_of
from jaxtp.hf.config_json import choose_family
from jaxtp.hf.families.family import LAYER, Family, Tensor
from jaxtp.hf.load import check_finite
from jaxtp.hf.model_folder import (
    Attributes,
    HFError,
    explain_pickle,
    join_problems,
    named,
    positive,
    quote,
    read_json,
    switch,
    whole,
)
from jaxtp.hf.safetensors import DTYPES, StoredTensor, read_header
from jaxtp.hf.save import SaveOptions, check_options, json_bytes, write_folder
from jaxtp.hf.tensor_map import TensorPart, dims, group_by_tensor, split_path
from jaxtp.layers.lora import TARGETS, LoraConfig, Target, freeze_state
from jaxtp.layers.parameter import logical_shape
from jaxtp.mesh import current_mesh, mesh_sizes
from jaxtp.models.config import ModelConfig, adapter_problems
from jaxtp.models.decoder import Decoder, abstract_decoder

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
FACTORS = {"a": "lora_A", "b": "lora_B"}


def save_peft(
    model: Decoder, path: str | Path, *, base: str | Path | None = None, **options: Unpack[SaveOptions]
) -> None:
    """Writes a model's adapters, from any mesh, for `peft.PeftModel.from_pretrained`.

    Args:
      path: a new or empty folder; appears when complete.
      base: base model folder to record; without it, users name it when they load the adapters.
      **options: see `SaveOptions`.

    Raises:
      NonFiniteError: a weight is not finite.
      HFError: the model has no adapters, no family can represent it, or the folder is not writable.
    """
    check_options(options, SaveOptions)
    config = model.config
    if not config.lora.rank:
        raise HFError("the model has no adapters; write all of it by save_hf")
    variables = named_variables(nnx.state(model, nnx.LoRAParam))
    family = choose_family(replace(config, lora=LoraConfig()), options.get("family"))
    layers = _adapted_layers(config, variables)
    files = {WEIGHTS: group_by_tensor(_factor_parts(layers, variables, family))}
    others = {CONFIG: json_bytes(_peft_config(config, layers, family, base))}
    write_folder(Path(path), variables, files, others, options.get("dtype") or config.lora.dtype, options)


_AdaptedLayers = Mapping[Adapter, list[int]]
"""Indices of the stacked layers that have each adapter; the others are zero, as they were read from PEFT."""


def _adapted_layers(config: ModelConfig, variables: Mapping[str, Variable]) -> _AdaptedLayers:
    nonzero = {adapter: _nonzero_layers(variables[f"{adapter.lora}.a"][...]) for adapter in adapters(config)}
    return nonzero if any(nonzero.values()) else {adapter: [*range(len(adapter.layers))] for adapter in nonzero}


def _nonzero_layers(stacked: Array) -> list[int]:
    sharding = stacked.sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    nonzero = jax.jit(lambda a: jnp.any(a != 0, axis=(1, 2)), out_shardings=everywhere)(stacked)
    indices: list[int] = np.flatnonzero(nonzero).tolist()
    return indices


def _factor_parts(layers: _AdaptedLayers, variables: Mapping[str, Variable], family: Family) -> Iterator[TensorPart]:
    for adapter, indices in layers.items():
        module = _module(_tensor_of(adapter, family))
        for factor, theirs in FACTORS.items():
            path = f"{adapter.lora}.{factor}"
            shape = logical_shape(variables[path])[:0:-1]
            for index in indices:
                name = f"{PREFIX}{module.replace(LAYER, str(adapter.layers[index]))}.{theirs}.weight"
                yield TensorPart(path, name, index, transposed=True, shape=shape)


def _module(tensor: Tensor) -> str:
    return tensor.theirs.removesuffix(".weight")


def _tensor_of(adapter: Adapter, family: Family) -> Tensor:
    kernel = split_path(adapter.kernel)[1]
    (tensor,) = (tensor for tensor in family.tensors if tensor.ours == kernel)
    if sum(other.theirs == tensor.theirs for other in family.tensors) > 1:
        raise HFError(
            f"{adapter.target} of a {family.model_type} is a part of {tensor.theirs}, which has one adapter in PEFT; "
            "merge the adapters and export the model: --merged, or save_hf(merge_adapters(model))"
        )
    return tensor


def _peft_config(
    config: ModelConfig, layers: _AdaptedLayers, family: Family, base: str | Path | None
) -> dict[str, Any]:
    tensors = {adapter.target: _tensor_of(adapter, family) for adapter in layers}
    modules = {target: _module(tensor) for target, tensor in tensors.items()}
    if all(len(indices) == len(adapter.layers) for adapter, indices in layers.items()):
        names = [_short_name(target, module) for target, module in modules.items()]
    else:
        places = [(adapter, adapter.layers[index]) for adapter, indices in layers.items() for index in indices]
        names = [modules[adapter.target].replace(LAYER, str(layer)) for adapter, layer in places]
    lora = config.lora
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "target_modules": names,
        "bias": "none",
        "fan_in_fan_out": not all(tensor.transposed for tensor in tensors.values()),
        "inference_mode": True,
    }


def _short_name(target: str, module: str) -> str:
    return target if module.endswith(f".{target}") else module.partition(f"{LAYER}.")[2]


_KNOWN = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "lora_dropout", "bias", "target_modules", "exclude_modules"),
        *("layers_to_transform", "layers_pattern", "init_lora_weights", "fan_in_fan_out", "task_type"),
        # Without effect on what adapters compute, or only with another attribute, which is refused:
        *("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version", "megatron_core"),
        *("qalora_group_size", "runtime_config", "eva_config", "ensure_weight_tying"),
    }
)
_INITS_THAT_KEEP_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that do not change the kernels, unlike pissa and others."""
_TENSOR = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True)
class _FactorPart:
    """A tensor with one layer's factor, or a part of it."""

    tensor: StoredTensor
    index: int
    """Index in the stack of layers."""
    first: int = 0
    """First row in the tensor: PEFT's B of a fused kernel concatenates projections."""


@dataclass(frozen=True)
class PeftFolder:
    """A folder of adapters that fits a model, without its weights."""

    path: Path
    lora: LoraConfig
    parts: Mapping[str, list[_FactorPart]]
    """By dotted path of the factor."""
    notes: tuple[str, ...]
    """Messages to print before training."""
    untrainable: str | None
    """Why they can only be merged, not trained; or None."""

    def check_trainable(self) -> None:
        """Refuses adapters that cannot be trained."""
        if self.untrainable is not None:
            raise HFError(
                f"{self.path}: {self.untrainable}; make a model of both by `jaxtp convert export MODEL OUT "
                f"--adapters {self.path}`, and train that"
            )


def open_peft(path: Path, config: ModelConfig, family: str | None = None) -> PeftFolder:
    """Opens a folder of adapters; raises `HFError` if they are unreadable, unsupported, or do not fit the model."""
    if not path.is_dir():
        raise HFError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}{nearest_file(path)}")
    if not os.path.lexists(path / CONFIG):
        raise HFError(f"{path}: no {CONFIG}; a folder of adapters in PEFT's format has one")
    attributes = read_json(path, CONFIG)
    plain = replace(config, lora=LoraConfig())
    with named(path):
        _check_attributes(attributes)
        return _Reader(path, attributes, plain, choose_family(plain, family)).result()


def load_peft(model: Decoder, path: str | Path, *, family: str | None = None) -> Decoder:
    """Returns a copy of a model, sharing its arrays, with the adapters of a PEFT folder.

    Args:
      model: without adapters, on the mesh in context or on one device.
      family: `model_type`; by default the first that can represent this model.

    Raises:
      HFError: the folder is refused, or its adapters cannot be trained.
    """
    if model.config.lora.rank:
        raise HFError("the model has adapters already; add them to their kernels by merge_adapters first")
    folder = open_peft(Path(path), model.config, family)
    folder.check_trainable()
    return with_peft(model, folder, None if current_mesh() is None else jax.sharding.get_mesh())


def with_peft(model: Decoder, folder: PeftFolder, mesh: Mesh | None) -> Decoder:
    """Returns a copy of a model with an open folder's adapters; see `load_peft`."""
    graph, abstract = abstract_decoder(replace(model.config, lora=folder.lora))
    state = nnx.merge_state(freeze_state(nnx.state(model)), read_peft(folder, abstract, mesh))
    return nnx.merge(graph, state)


def read_peft(folder: PeftFolder, abstract: nnx.State, mesh: Mesh | None) -> nnx.State:
    """Reads adapters into the shapes and shardings of an abstract state."""
    factors = nnx.filter_state(abstract, nnx.LoRAParam)
    variables = named_variables(factors)
    return replace_arrays(
        factors, {name: _placed(folder.parts.get(name, ()), v, mesh) for name, v in variables.items()}
    )


def _placed(parts: Collection[_FactorPart], variable: Variable, mesh: Mesh | None) -> Array:
    host = np.zeros(logical_shape(variable), np.float32)
    for part in parts:
        target, stored = host[part.index].T, part.tensor.read()
        check_finite(part.tensor, 0, stored)
        target[...] = stored[part.first : part.first + len(target)]
    host = host.astype(jnp.dtype(variable.dtype))
    if mesh is None:
        return jnp.asarray(host)
    sharding = NamedSharding(mesh, logical_spec(variable, mesh_sizes(mesh)))
    array = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    return add_padding(array, variable, mesh)


def _check_attributes(attributes: Attributes) -> None:
    problems = []
    if (kind := attributes.get("peft_type")) != "LORA":
        problems.append(f"peft_type = {quote(kind)} is not supported, only 'LORA'")
    if (bias := attributes.get("bias", "none")) not in ("none", None):
        problems.append(f"bias = {quote(bias)} is not supported, only 'none': biases are not trained with adapters")
    if (init := attributes.get("init_lora_weights", True)) not in _INITS_THAT_KEEP_BASE:
        problems.append(
            f"init_lora_weights = {quote(init)} is not supported: it changes the kernels as well; PEFT converts them "
            "(path_initial_model_for_weight_conversion)"
        )
    if dropout := attributes.get("lora_dropout"):
        positive("lora_dropout", dropout)
    for name, value in attributes.items():
        if name not in _KNOWN and value not in (None, False, {}, []):
            problems.append(
                f"{truncate(name)} = {quote(value)} is not supported: only LoRA as PEFT has it by default is"
            )
    if problems:
        raise HFError(join_problems(problems))


class _Reader:
    """Compares the names and shapes in a folder with a model's."""

    def __init__(self, path: Path, attributes: Attributes, config: ModelConfig, family: Family):
        self.path, self.attributes, self.config, self.family = path, attributes, config, family
        self.rank = whole("r", attributes.get("r"))
        base = attributes.get("base_model_name_or_path")
        self.made_for = f"; they were made for {truncate(base, 200)} (base_model_name_or_path)" if base else ""
        self.targets: dict[str, list[Target]] = {}
        for tensor in family.tensors:
            target = target_of(tensor.ours)
            if target is not None and target not in self.targets.setdefault(_module(tensor), []):
                self.targets[_module(tensor)].append(target)

    def result(self) -> PeftFolder:
        """Returns the folder; raises `HFError` if it does not fit."""
        alpha = positive("lora_alpha", self.attributes.get("lora_alpha"))
        rslora = switch("use_rslora", self.attributes.get("use_rslora") or False)
        factors = self._factors()
        self._check_names({general.replace(LAYER, str(layer)) for general, layer in factors})
        modules = dict.fromkeys(general for general, _ in factors)
        chosen = {target for module in modules for target in self.targets[module]}
        targets = tuple(target for target in TARGETS if target in chosen)
        for problem in adapter_problems(self.config, targets):
            raise HFError(problem.text)
        lora = LoraConfig(rank=self.rank, alpha=alpha, rslora=rslora, targets=targets)
        notes, untrainable = [], None
        if dropout := self.attributes.get("lora_dropout"):
            notes.append(f"lora_dropout = {quote(dropout)} is not applied")
        if len(factors) < (places := len(modules) * self.config.num_layers):
            notes.append(f"{len(factors)} of {places} modules have an adapter, and the others stay as they are")
        if fused := [module for module in modules if len(self.targets[module]) > 1]:
            untrainable = f"{fused[0]} is several projections with one adapter, which would be trained apart"
        return PeftFolder(self.path, lora, self._parts(factors, lora), tuple(notes), untrainable)

    def _factors(self) -> dict[tuple[str, int], dict[str, StoredTensor]]:
        """Returns A and B of each module, by its name with a placeholder for the layer, and its layer."""
        try:
            weights = reading.inside(self.path, WEIGHTS)
        except OSError as error:
            raise HFError(f"{self.path / WEIGHTS}: {error.strerror}") from None
        if not os.path.lexists(weights):
            raise HFError(explain_pickle(self.path, "peft") or f"no {WEIGHTS} is there")
        factors: dict[tuple[str, int], dict[str, StoredTensor]] = {}
        for name, tensor in read_header(weights).items():
            if (match := _TENSOR.fullmatch(name)) is None:
                raise HFError(f"{truncate(name, 200)} is not supported; adapters of {self._modules()} are")
            factors.setdefault(self._place(match[1]), {})[match[2]] = tensor
            if tensor.dtype not in DTYPES:
                raise HFError(f"{truncate(name, 200)} is {tensor.dtype}, not float32, bfloat16 or float16")
            if match[2] == "A" and tensor.shape[:1] != (self.rank,):
                raise HFError(f"{truncate(name, 200)} has the shape {dims(tensor.shape)}, and r = {self.rank}")
        for (general, layer), pair in factors.items():
            for factor in {"A", "B"} - pair.keys():
                raise HFError(f"missing: {PREFIX}{general.replace(LAYER, str(layer))}.lora_{factor}.weight")
        if not factors:
            raise HFError(f"{WEIGHTS} holds no adapters")
        return factors

    def _modules(self) -> str:
        return ", ".join(module.rpartition(f"{LAYER}.")[2] for module in self.targets)

    def _place(self, module: str) -> tuple[str, int]:
        match = re.search(r"\.(\d{1,9})\.", module)
        general = "" if match is None else f"{module[: match.start(1)]}{LAYER}{module[match.end(1) :]}"
        if match is None or general not in self.targets:
            raise HFError(
                f"adapters of {truncate(module, 200)} are not supported; a {self.family.model_type} can have them of "
                + self._modules()
            )
        if (layer := int(match[1])) >= self.config.num_layers or match[1] != str(layer):
            raise HFError(
                f"{PREFIX}{truncate(module, 200)} is of layer {match[1]}, and the model has {self.config.num_layers}"
                + self.made_for
            )
        return general, layer

    def _check_names(self, modules: Collection[str]) -> None:
        """Compares the modules that have adapters with target_modules, unless a regular expression chooses them."""
        names = [self.attributes.get(name) for name in ("target_modules", "exclude_modules")]
        if any(isinstance(value, str) for value in names) or self.attributes.get("layers_pattern"):
            return
        for name, value in zip(("target_modules", "exclude_modules"), names, strict=True):
            if not (value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value))):
                raise HFError(f"{name} = {quote(value)}: should be a list of names, or an expression")
        layers = self.attributes.get("layers_to_transform")
        layers = layers if isinstance(layers, list) else [] if layers is None else [layers]
        if not all(type(layer) is int for layer in layers):
            raise HFError(f"layers_to_transform = {quote(layers)}: should be numbers of layers")
        wanted, excluded = (set(value or ()) for value in names)
        expected = [
            module
            for layer in range(self.config.num_layers)
            for module in (general.replace(LAYER, str(layer)) for general in self._existing())
            if (not layers or layer in layers) and _suffixes(module) & wanted and not _suffixes(module) & excluded
        ]
        for module in expected:
            if module not in modules:
                raise HFError(f"missing: {PREFIX}{module}.lora_A.weight, which target_modules ask for{self.made_for}")
        for module in sorted({*modules} - {*expected}):
            raise HFError(f"left over: {PREFIX}{module}.lora_A.weight, which target_modules do not name")

    def _existing(self) -> list[str]:
        plain = all(block.mlp == "plain" for block in self.config.block_kinds())
        sparse = self.config.most_experts > 0
        skipped = {"gate_proj"} if plain else {"gate_proj", "up_proj", "down_proj"} if sparse else set()
        return [module for module, targets in self.targets.items() if not skipped & {*targets}]

    def _parts(
        self, factors: Mapping[tuple[str, int], Mapping[str, StoredTensor]], lora: LoraConfig
    ) -> dict[str, list[_FactorPart]]:
        config = replace(self.config, lora=lora)
        variables = named_variables(nnx.filter_state(abstract_decoder(config)[1], nnx.LoRAParam))
        places = {
            (adapter.target, layer): (adapter, index)
            for adapter in adapters(config)
            for index, layer in enumerate(adapter.layers)
        }
        parts: dict[str, list[_FactorPart]] = {}
        for (general, layer), pair in factors.items():
            inner = outer = 0
            for target in self.targets[general]:
                if (target, layer) not in places:
                    module = general.replace(LAYER, str(layer))
                    raise HFError(f"{PREFIX}{module}: the model has no such projection{self.made_for}")
                adapter, index = places[target, layer]
                a, b = (f"{adapter.lora}.{factor}" for factor in FACTORS)
                parts.setdefault(a, []).append(_FactorPart(pair["A"], index))
                parts.setdefault(b, []).append(_FactorPart(pair["B"], index, outer))
                inner, outer = logical_shape(variables[a])[1], outer + logical_shape(variables[b])[2]
            for tensor, shape in ((pair["A"], (self.rank, inner)), (pair["B"], (outer, self.rank))):
                if tensor.shape != shape:
                    raise HFError(
                        f"{tensor.name} is {dims(tensor.shape)}, and this model needs {dims(shape)}{self.made_for}"
                    )
        return parts


def _suffixes(module: str) -> set[str]:
    words = module.split(".")
    return {".".join(words[at:]) for at in range(len(words))}
