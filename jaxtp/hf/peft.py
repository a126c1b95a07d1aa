"""Reads and writes adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

The format: https://huggingface.co/docs/peft/developer_guides/checkpoint. Tensor names decide which modules have
adapters. A list in `target_modules` must agree; a regular expression is not run, since an attacker can make it run
forever.

Our adapters have one rank and one scale in all layers. Zeros pad a lower rank and fill a layer without an adapter;
training does not change them (`jaxtp/layers/lora.py`). A different scale is multiplied into B.
"""

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.checkpoint.logical import Variable, add_padding, logical_spec, named_variables, replace_arrays
from jaxtp.config import reading
from jaxtp.config.reading import shown
from jaxtp.config.schema import nearest_file
from jaxtp.hf.adapters import Adapter, adapters, target_of
from jaxtp.hf.config_json import choose_family
from jaxtp.hf.families.family import LAYER, Family, Tensor
from jaxtp.hf.load import Progress, check_finite
from jaxtp.hf.model_folder import Attributes, HFError, explain_pickle, positive, quote, read_json, switch, whole
from jaxtp.hf.safetensors import DTYPES, Block, SafetensorsError, StoredTensor, read_header, write_file
from jaxtp.hf.save import FORMAT_DTYPES, HostGather, atomic_folder, require_finite, tokenizer_files, write_json
from jaxtp.hf.tensor_map import TensorPart, group_by_tensor, split_path
from jaxtp.layers.lora import TARGETS, LoraConfig, Target, frozen
from jaxtp.layers.parameter import DType, logical_shape
from jaxtp.mesh import current_mesh, mesh_sizes
from jaxtp.models.config import ModelConfig, unadapted
from jaxtp.models.decoder import Decoder, abstract_decoder

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
FACTORS = {"a": "lora_A", "b": "lora_B"}


def save_peft(
    model: Decoder,
    path: str | Path,
    *,
    base: str | Path | None = None,
    family: str | None = None,
    tokenizer_from: str | Path | None = None,
    dtype: DType | None = None,
    allow_non_finite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes a model's adapters, from any mesh, for `peft.PeftModel.from_pretrained`.

    Args:
      path: a new or empty folder; appears when complete.
      base: base model folder to record; without it, users name it when they load the adapters.
      family: `model_type`; by default the first that can represent the model.
      tokenizer_from: see `save_hf`.
      dtype: of the tensors; by default the adapters' dtype.

    Raises:
      NonFiniteError: a weight is not finite.
      HFError: the model has no adapters, no family can represent it, or the folder is not writable.
    """
    config = model.config
    if not config.lora.rank:
        raise HFError("the model has no adapters; write all of it by save_hf")
    stored_as = FORMAT_DTYPES[dtype or config.lora.dtype]
    variables = named_variables(nnx.state(model, nnx.LoRAParam))
    if not allow_non_finite:
        require_finite(variables)
    chosen = choose_family(replace(config, lora=LoraConfig()), family)
    adapted_layers = _adapted_layers(config, variables)
    tensors = group_by_tensor(_factor_parts(adapted_layers, variables, chosen))
    copied = tokenizer_files(tokenizer_from)
    gather = HostGather(variables, tensors, DTYPES[stored_as], progress)
    if jax.process_index() != 0:
        for name in tensors:  # a gather is collective
            gather(name)
        return
    with atomic_folder(Path(path)) as folder:
        write_file(folder / WEIGHTS, {name: (stored_as, part.shape) for name, (part, *_) in tensors.items()}, gather)
        write_json(folder / CONFIG, _peft_config(config, adapted_layers, chosen, base))
        for file, content in copied.items():
            (folder / file).write_bytes(content)


_AdaptedLayers = Mapping[Adapter, list[int]]
"""Indices of the stacked layers that have each adapter; the others are zero, as they were read from PEFT."""


def _adapted_layers(config: ModelConfig, variables: dict[str, Variable]) -> _AdaptedLayers:
    some = {adapter: _nonzero_layers(variables[f"{adapter.lora}.a"][...]) for adapter in adapters(config)}
    found = {adapter: np.flatnonzero(layers).tolist() for adapter, layers in some.items()}
    return found if any(found.values()) else {adapter: [*range(len(adapter.layers))] for adapter in found}


def _nonzero_layers(stacked: Array) -> Block:
    sharding = stacked.sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    return np.asarray(jax.jit(lambda a: jnp.any(a != 0, axis=(1, 2)), out_shardings=everywhere)(stacked))


def _factor_parts(
    adapted_layers: _AdaptedLayers, variables: dict[str, Variable], family: Family
) -> Iterator[TensorPart]:
    for adapter, layers in adapted_layers.items():
        module = _tensor_of(adapter, family).theirs.removesuffix(".weight")
        for factor in FACTORS:
            shape = logical_shape(variables[f"{adapter.lora}.{factor}"])
            yield from _factor_parts_of(adapter, layers, module, factor, shape)


def _tensor_of(adapter: Adapter, family: Family) -> Tensor:
    kernel = split_path(adapter.kernel)[1]
    (tensor,) = (tensor for tensor in family.tensors if tensor.ours == kernel)
    if sum(other.theirs == tensor.theirs for other in family.tensors) > 1:
        raise HFError(
            f"{adapter.target} of a {family.model_type} is a part of {tensor.theirs}, which has one adapter in PEFT; "
            "merge the adapters and export the model: --merged, or save_hf(merge_adapters(model))"
        )
    return tensor


def _factor_parts_of(
    adapter: Adapter, layers: Sequence[int], module: str, factor: str, shape: tuple[int, ...]
) -> Iterator[TensorPart]:
    for index in layers:
        name = f"{PREFIX}{module.replace(LAYER, str(adapter.layers[index]))}.{FACTORS[factor]}.weight"
        yield TensorPart(f"{adapter.lora}.{factor}", name, index, transposed=True, shape=shape[:0:-1])


def _peft_config(
    config: ModelConfig, adapted_layers: _AdaptedLayers, family: Family, base: str | Path | None
) -> dict[str, Any]:
    beside = {adapter.target: _tensor_of(adapter, family) for adapter in adapters(config)}
    modules = {target: tensor.theirs.removesuffix(".weight") for target, tensor in beside.items()}
    lora, names = config.lora, [_short_name(target, module) for target, module in modules.items()]
    if any(len(layers) < len(adapter.layers) for adapter, layers in adapted_layers.items()):
        places = [(adapter, adapter.layers[index]) for adapter, layers in adapted_layers.items() for index in layers]
        names = [modules[adapter.target].replace(LAYER, str(layer)) for adapter, layer in places]
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
        "fan_in_fan_out": not all(tensor.transposed for tensor in beside.values()),
        "inference_mode": True,
    }


def _short_name(target: str, module: str) -> str:
    return target if module.endswith(f".{target}") else module.partition(f"{LAYER}.")[2]


_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "lora_dropout", "alpha_pattern", "rank_pattern", "bias"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights"),
        *("fan_in_fan_out", "task_type"),
    }
)
"""Attributes that are read, or that repeat what the tensors or the model say."""
_IGNORED = frozenset(
    {
        *("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version", "megatron_core"),
        *("qalora_group_size", "runtime_config", "eva_config", "ensure_weight_tying"),
    }
)
"""Attributes that do not affect what adapters compute, or only with another one, which is refused."""
INITS_THAT_KEEP_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that do not change the kernels, unlike pissa and others."""
_TENSOR = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight")
_LITERAL = re.compile(r"[\w.]+")
"""A key of alpha_pattern that is not a regular expression."""
_LISTED = 8


@dataclass(frozen=True)
class _FactorPart:
    """A tensor with one layer's factor, or a part of it."""

    tensor: StoredTensor
    ours: str
    index: int
    """Index in the stack of layers."""
    first: int
    """First row in the tensor: PEFT's B of a fused kernel concatenates projections."""
    times: float
    """Factor for a scale that differs from the model's."""


@dataclass(frozen=True)
class PeftFolder:
    """A folder of adapters that fits a model, without its weights."""

    path: Path
    lora: LoraConfig
    parts: Mapping[str, tuple[_FactorPart, ...]]
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
    """Opens a folder of adapters for a model configuration without adapters.

    Raises:
      HFError: the adapters are unreadable, unsupported, or do not fit.
    """
    if not path.is_dir():
        raise HFError(f"{path}: {'not a folder' if path.exists() else 'no such folder'}{nearest_file(path)}")
    if not os.path.lexists(path / CONFIG):
        raise HFError(f"{path}: no {CONFIG}; a folder of adapters in PEFT's format has one")
    attributes = read_json(path, CONFIG)
    plain = replace(config, lora=LoraConfig())
    try:
        _check_attributes(attributes)
        return _Reader(path, attributes, plain, choose_family(plain, family)).result()
    except (HFError, SafetensorsError) as error:
        named = str(error).startswith(str(path))
        raise HFError(str(error) if named else f"{path}: {error}") from None


def load_peft(model: Decoder, path: str | Path, *, family: str | None = None) -> Decoder:
    """Returns a copy of a model, sharing its arrays, with the adapters of a PEFT folder.

    Args:
      model: without adapters, on the mesh in context or on one device.
      family: PEFT's `model_type`; by default the first that can represent this model.

    Raises:
      HFError: the folder is refused, or its adapters cannot be trained.
    """
    if model.config.lora.rank:
        raise HFError("the model has adapters already; add them to their kernels by merge_adapters first")
    found = open_peft(Path(path), model.config, family)
    found.check_trainable()
    return with_peft(model, found, None if current_mesh() is None else jax.sharding.get_mesh())


def with_peft(model: Decoder, found: PeftFolder, mesh: Mesh | None) -> Decoder:
    """Returns a copy of a model with an open folder's adapters; see `load_peft`."""
    config = replace(model.config, lora=found.lora)
    graph, abstract = abstract_decoder(config)
    adapted: Decoder = nnx.merge(graph, nnx.merge_state(frozen(nnx.state(model)), read_peft(found, abstract, mesh)))
    return adapted


def read_peft(found: PeftFolder, abstract: nnx.State, mesh: Mesh | None) -> nnx.State:
    """Reads adapters into the shapes and shardings of an abstract state."""
    own = nnx.filter_state(abstract, nnx.LoRAParam)
    try:
        return replace_arrays(
            own, {name: _placed(found.parts.get(name, ()), v, mesh) for name, v in named_variables(own).items()}
        )
    except SafetensorsError as error:
        raise HFError(str(error)) from None


def _placed(parts: Collection[_FactorPart], variable: Variable, mesh: Mesh | None) -> Array:
    host = np.zeros(logical_shape(variable), np.float32)
    for part in parts:
        target = host[part.index].T
        stored = part.tensor.read()
        check_finite(part.tensor, 0, stored)
        rows = stored[part.first : part.first + len(target)]
        target[: len(rows), : rows.shape[1]] = rows
        target *= part.times
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
        problems.append(f"bias = {quote(bias)} is not supported, only 'none': biases are not trained beside adapters")
    if (init := attributes.get("init_lora_weights", True)) not in INITS_THAT_KEEP_BASE:
        problems.append(
            f"init_lora_weights = {quote(init)} is not supported: it changes the kernels as well; PEFT converts them "
            "(path_initial_model_for_weight_conversion)"
        )
    if not isinstance(attributes.get("rank_pattern") or {}, dict):
        problems.append(f"rank_pattern = {quote(attributes['rank_pattern'])}: should give ranks by names of modules")
    if dropout := attributes.get("lora_dropout"):
        positive("lora_dropout", dropout)
    for name, value in attributes.items():
        if name not in _READ | _IGNORED and value not in (None, False) and value != {} and value != []:
            problems.append(f"{shown(name)} = {quote(value)} is not supported: only LoRA as PEFT has it by default is")
    if problems:
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        raise HFError("; ".join([*problems[:_LISTED], *more]))


class _Reader:
    def __init__(self, path: Path, attributes: Attributes, config: ModelConfig, family: Family):
        self.path, self.attributes, self.config, self.family = path, attributes, config, family
        self.rank, self.alpha = whole("r", attributes.get("r")), positive("lora_alpha", attributes.get("lora_alpha"))
        self.rslora = switch("use_rslora", attributes.get("use_rslora") or False)
        self.alphas = _alphas(attributes.get("alpha_pattern") or {})
        self.targets: dict[str, tuple[Target, ...]] = {}
        for tensor in family.tensors:
            if (target := target_of(tensor.ours)) is not None:
                module = tensor.theirs.removesuffix(".weight")
                self.targets[module] = tuple(dict.fromkeys((*self.targets.get(module, ()), target)))

    def result(self) -> PeftFolder:
        factors = self._factors()
        self._check_names(factors)
        ranks = {module: self._rank(pair) for module, pair in factors.items()}
        scales = {module: self._scale(module, rank) for module, rank in ranks.items()}
        least, most = min(scales.values()), max(scales.values())
        one_scale = math.isclose(least, most, rel_tol=1e-9)
        lora = LoraConfig(rank=max(ranks.values()), alpha=self.alpha, rslora=self.rslora)
        if one_scale and not math.isclose(most, lora.scale, rel_tol=1e-9):
            lora = replace(lora, alpha=self.alpha * most / lora.scale)
        general = {module: self._general(module) for module in factors}
        chosen = {target for module, _ in general.values() for target in self.targets[module]}
        lora = replace(lora, targets=tuple(target for target in TARGETS if target in chosen))
        for problem in unadapted(self.config, lora.targets):
            raise HFError(problem.text)
        times = {module: 1.0 if one_scale else scale / lora.scale for module, scale in scales.items()}
        parts = self._parts(factors, lora, times)
        fused = next((module for module, _ in general.values() if len(self.targets[module]) > 1), None)
        untrainable = None
        if fused is not None:
            untrainable = f"{fused} is several projections with one adapter, which would be trained apart"
        elif not one_scale:
            untrainable = f"the adapters have several scales (alpha_pattern, rank_pattern), from {least:g} to {most:g}"
        return PeftFolder(self.path, lora, parts, tuple(self._notes(general)), untrainable)

    def _factors(self) -> dict[str, dict[str, StoredTensor]]:
        try:
            weights = reading.inside(self.path, WEIGHTS)
        except OSError as error:
            raise HFError(f"{self.path / WEIGHTS}: {error.strerror}") from None
        if not os.path.lexists(weights):
            raise HFError(explain_pickle(self.path, "peft") or f"no {WEIGHTS} is there")
        found: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in read_header(weights).items():
            if (match := _TENSOR.fullmatch(name)) is None:
                raise HFError(f"{shown(name, 200)} is not supported; adapters of {', '.join(self._modules())} are")
            module, factor = match.groups()
            self._general(module)
            found.setdefault(module, {})[factor] = tensor
            if tensor.dtype not in DTYPES:
                raise HFError(f"{shown(name, 200)} is {tensor.dtype}, not float32, bfloat16 or float16")
        for module, pair in found.items():
            for factor in FACTORS.values():
                if factor.removeprefix("lora_") not in pair:
                    raise HFError(f"missing: {PREFIX}{shown(module, 200)}.{factor}.weight")
        if not found:
            raise HFError(f"{WEIGHTS} holds no adapters")
        return found

    def _modules(self) -> list[str]:
        return [module.rpartition(f"{LAYER}.")[2] for module in self.targets]

    def _general(self, module: str) -> tuple[str, int]:
        match = re.search(r"\.(\d{1,9})\.", module)
        general = "" if match is None else f"{module[: match.start(1)]}{LAYER}{module[match.end(1) :]}"
        if match is None or general not in self.targets:
            raise HFError(
                f"adapters of {shown(module, 200)} are not supported; a {self.family.model_type} can have them of "
                f"{', '.join(self._modules())}"
            )
        if (layer := int(match[1])) >= self.config.num_layers or match[1] != str(layer):
            raise HFError(
                f"{PREFIX}{shown(module, 200)} is of layer {match[1]}, and the model has {self.config.num_layers}"
                + self._made_for()
            )
        return general, layer

    def _made_for(self) -> str:
        name = self.attributes.get("base_model_name_or_path")
        return f"; they were made for {shown(name, 200)} (base_model_name_or_path)" if name else ""

    def _check_names(self, factors: Collection[str]) -> None:
        asked, excluded = (self._names(name) for name in ("target_modules", "exclude_modules"))
        chosen, layers = self.attributes.get("layers_to_transform"), list(range(self.config.num_layers))
        if chosen not in (None, []):
            listed = chosen if isinstance(chosen, list) else [chosen]
            if not all(type(layer) is int for layer in listed):
                raise HFError(f"layers_to_transform = {quote(chosen)}: should be numbers of layers")
            layers = sorted({*layers} & {*listed})
        if asked is None or excluded is None or self.attributes.get("layers_pattern"):
            return
        modules = (module.replace(LAYER, str(layer)) for layer in layers for module in self._existing())
        expected = [module for module in modules if _suffixes(module) & asked and not _suffixes(module) & excluded]
        for module in expected:
            if module not in factors:
                raise HFError(
                    f"missing: {PREFIX}{module}.lora_A.weight, which target_modules ask for" + self._made_for()
                )
        known = set(expected)
        for module in factors:
            if module not in known:
                raise HFError(f"left over: {PREFIX}{module}.lora_A.weight, which target_modules do not name")

    def _names(self, name: str) -> set[str] | None:
        value = self.attributes.get(name)
        if isinstance(value, str):
            return None
        if not (value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value))):
            raise HFError(f"{name} = {quote(value)}: should be a list of names, or an expression")
        return set(value or ())

    def _existing(self) -> list[str]:
        plain = all(block.mlp == "plain" for block in self.config.block_kinds())
        sparse = self.config.most_experts > 0
        skipped = {"gate_proj"} if plain else {"gate_proj", "up_proj", "down_proj"} if sparse else set()
        return [module for module, targets in self.targets.items() if not skipped & {*targets}]

    def _rank(self, pair: Mapping[str, StoredTensor]) -> int:
        first = pair["A"].shape[0] if len(pair["A"].shape) == 2 else 0
        if first != self.rank and not self.attributes.get("rank_pattern"):
            raise HFError(f"{pair['A'].name} has the shape {_dims(pair['A'])}, and r = {self.rank}")
        if not 0 < first < 2**16:
            raise HFError(f"{pair['A'].name} has the shape {_dims(pair['A'])}; a rank from 1 to 65,535 is supported")
        return first

    def _scale(self, module: str, rank: int) -> float:
        named = [self.alphas[name] for name in _suffixes(module) if name in self.alphas]
        alpha = min(named)[1] if named else self.alpha  # the first match wins
        return LoraConfig(rank=rank, alpha=alpha, rslora=self.rslora).scale

    def _parts(
        self, factors: Mapping[str, Mapping[str, StoredTensor]], lora: LoraConfig, times: Mapping[str, float]
    ) -> dict[str, tuple[_FactorPart, ...]]:
        config = replace(self.config, lora=lora)
        variables = named_variables(nnx.filter_state(abstract_decoder(config)[1], nnx.LoRAParam))
        places: dict[tuple[Target, int], tuple[Adapter, int]] = {
            (adapter.target, layer): (adapter, index)
            for adapter in adapters(config)
            for index, layer in enumerate(adapter.layers)
        }
        found: dict[str, list[_FactorPart]] = {}
        for module, pair in factors.items():
            general, layer = self._general(module)
            first = 0
            for target in self.targets[general]:
                if (target, layer) not in places:
                    raise HFError(f"{PREFIX}{module}: the model has no such projection" + self._made_for())
                adapter, index = places[target, layer]
                a, b = (f"{adapter.lora}.{factor}" for factor in FACTORS)
                inner, outer = logical_shape(variables[a])[1], logical_shape(variables[b])[2]
                found.setdefault(a, []).append(_FactorPart(pair["A"], a, index, 0, 1.0))
                found.setdefault(b, []).append(_FactorPart(pair["B"], b, index, first, times[module]))
                first += outer
            rank = pair["A"].shape[0]
            for tensor, shape in ((pair["A"], (rank, inner)), (pair["B"], (first, rank))):
                if tensor.shape != shape:
                    raise HFError(
                        f"{tensor.name} is {_dims(tensor)}, and this model needs {'x'.join(map(str, shape))}"
                        + self._made_for()
                    )
        return {name: tuple(parts) for name, parts in found.items()}

    def _notes(self, general: Mapping[str, tuple[str, int]]) -> Iterator[str]:
        if dropout := self.attributes.get("lora_dropout"):
            yield f"lora_dropout = {quote(dropout)} is not applied"
        places = len({module for module, _ in general.values()}) * self.config.num_layers
        if len(general) < places:
            yield f"{len(general)} of {places} modules have an adapter, and the others stay as they are"


def _alphas(pattern: Any) -> dict[str, tuple[int, float]]:
    if not isinstance(pattern, dict) or not all(map(_LITERAL.fullmatch, pattern)):
        raise HFError(f"alpha_pattern = {quote(pattern)} is not supported: names of modules are, and no expressions")
    alphas = ((name, positive(f"alpha_pattern[{shown(name)}]", alpha)) for name, alpha in pattern.items())
    return {name: (at, alpha) for at, (name, alpha) in enumerate(alphas)}


def _suffixes(module: str) -> set[str]:
    words = module.split(".")
    return {".".join(words[at:]) for at in range(len(words))}


def _dims(tensor: StoredTensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"
