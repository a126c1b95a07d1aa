"""A folder of adapters as PEFT has it, read for a model: adapter_config.json and adapter_model.safetensors.

Which modules have adapters is what the tensors say: `target_modules` is how PEFT made them, and a regular expression in
it, which anybody can write so that it never ends, is not run. A list of names there must agree with the tensors.

A model of ours has adapters of one rank and one scale in all layers. A lower rank is padded with zeros, and a layer
without an adapter has zeros, which training leaves as they are (`jaxtp/layers/lora.py`); another scale goes into B.
"""

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding

from jaxtp import reading
from jaxtp.checkpoint.logical import filled, logical_spec, named_variables, with_padding
from jaxtp.checkpoint.safetensors import DTYPES, SafetensorsError, StoredTensor, read_header
from jaxtp.config import nearest_file
from jaxtp.hf.adapters import Adapter, adapters, target_of
from jaxtp.hf.attributes import choose_family
from jaxtp.hf.folder import HFError, read_json, refused_pickle
from jaxtp.hf.load import check_finite
from jaxtp.hf.peft import CONFIG, FACTORS, PREFIX, WEIGHTS
from jaxtp.hf.values import positive, said, switch, whole
from jaxtp.layers.lora import TARGETS, LoraConfig, LoraParam, Target
from jaxtp.layers.parameter import logical_shape
from jaxtp.mesh import current_mesh, mesh_sizes
from jaxtp.models.config import ModelConfig, unadapted
from jaxtp.models.decoder import Decoder, abstract_decoder
from jaxtp.models.families.family import LAYER, Family
from jaxtp.reading import shown

_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "lora_dropout", "alpha_pattern", "rank_pattern", "bias"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights"),
        *("fan_in_fan_out", "task_type"),
    }
)
"""Attributes that are read, or that say again what the tensors or the model say."""
_SAYS_NOTHING = frozenset(
    {
        *("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version", "megatron_core"),
        *("qalora_group_size", "runtime_config", "eva_config", "ensure_weight_tying"),
    }
)
"""Attributes that say nothing of what adapters compute, or something only beside another, which is refused."""
_KEEP_THE_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the kernels as they are; others, such as pissa, change them as well."""
_TENSOR = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight")
_LITERAL = re.compile(r"[\w.]+")
"""A key of alpha_pattern that is a name, and no regular expression."""
_LISTED = 8


@dataclass(frozen=True)
class _Part:
    """A tensor, and the adapter's factor of a layer that it is, or is a part of."""

    tensor: StoredTensor
    ours: str
    index: int
    """Which of the stacked layers it is."""
    first: int
    """Row of the tensor at which it begins: in PEFT's B the projections of a fused kernel follow each other."""
    times: float
    """Multiplies it, where the scale of its adapter is not that of the model's."""


@dataclass(frozen=True)
class PeftFolder:
    """The content of a folder of adapters, read but for the weights, and compared with a model."""

    path: Path
    lora: LoraConfig
    parts: Mapping[str, tuple[_Part, ...]]
    """By the dotted path of a factor of the model's adapters."""
    notes: tuple[str, ...]
    """Lines worth knowing before they are trained."""
    untrainable: str | None
    """The reason why they can be added to kernels alone, and not be trained; None if they can."""

    def check_trainable(self) -> None:
        """Checks that training can go on with them.

        Raises:
          HFError: it cannot.
        """
        if self.untrainable is not None:
            raise HFError(
                f"{self.path}: {self.untrainable}; make a model of both by `jaxtp convert export MODEL OUT "
                f"--adapters {self.path}`, and train that"
            )


def open_peft(path: Path, config: ModelConfig, family: str | None = None) -> PeftFolder:
    """Returns the adapters in a folder for a model, of which nothing but the configuration is needed.

    Args:
      path: the folder.
      config: the model; its own adapters do not count.
      family: `model_type` of the model that PEFT had; by default the first that can be this one.

    Raises:
      HFError: they cannot be read, are of another kind or another model; the message names the first of what is wrong.
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
    """Returns a model with the adapters of a folder as PEFT has it, split like the kernels that they are beside; its
    arrays are shared.

    Args:
      model: without adapters, on the mesh in context or on one device without one.
      path: the folder.
      family: `model_type` of the model that PEFT had; by default the first of the supported ones that can be this one.

    Raises:
      HFError: the model has adapters already, or as `open_peft`; or their layout is one that we cannot train.
    """
    if model.config.lora.rank:
        raise HFError("the model has adapters already; add them to their kernels by merge_adapters first")
    found = open_peft(Path(path), model.config, family)
    found.check_trainable()
    return with_peft(model, found, None if current_mesh() is None else jax.sharding.get_mesh())


def with_peft(model: Decoder, found: PeftFolder, mesh: Mesh | None, dtype: str | None = None) -> Decoder:
    """Returns a model with the adapters of a folder; see `load_peft`.

    Args:
      model: without adapters.
      found: the folder.
      mesh: the mesh that the model is on.
      dtype: of the adapters; by default that of the model's parameters.
    """
    config = replace(model.config, lora=found.lora)
    graph, abstract = abstract_decoder(config)
    adapted: Decoder = nnx.merge(graph, nnx.merge_state(nnx.state(model), read_peft(found, abstract, mesh, dtype)))
    return adapted


def read_peft(found: PeftFolder, abstract: nnx.State, mesh: Mesh | None, dtype: str | None = None) -> nnx.State:
    """Returns the adapters of a folder, out of a model's abstract state; see `with_peft`.

    Raises:
      HFError: an element is not finite, or the files changed while they were read.
    """
    own = nnx.filter_state(abstract, LoraParam)
    try:
        return filled(
            own, {name: _placed(found.parts.get(name, ()), v, mesh, dtype) for name, v in named_variables(own).items()}
        )
    except SafetensorsError as error:
        raise HFError(str(error)) from None


def _placed(parts: Collection[_Part], variable: nnx.Variable[Any], mesh: Mesh | None, dtype: str | None) -> Array:
    """Returns a factor of all stacked layers: `[L, in, rank]` or `[L, rank, out]`, each device's part on its device."""
    host = np.zeros(logical_shape(variable), np.float32)
    for part in parts:
        target = host[part.index].T
        stored = part.tensor.read()
        check_finite(part.tensor, 0, stored)
        rows = stored[part.first : part.first + len(target)]
        target[: len(rows), : rows.shape[1]] = rows
        target *= part.times
    host = host.astype(jnp.dtype(dtype or variable.dtype))
    if mesh is None:
        return jnp.asarray(host)
    sharding = NamedSharding(mesh, logical_spec(variable, mesh_sizes(mesh)))
    array = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    return with_padding(array, variable, mesh)


def _check_attributes(attributes: Mapping[str, Any]) -> None:
    """Checks what all adapters have in common.

    Raises:
      HFError: they are of a kind that is not ours, by an attribute that the message names.
    """
    problems = []
    if (kind := attributes.get("peft_type")) != "LORA":
        problems.append(f"peft_type = {said(kind)} is not supported, only 'LORA'")
    if (bias := attributes.get("bias", "none")) not in ("none", None):
        problems.append(f"bias = {said(bias)} is not supported, only 'none': biases are not trained beside adapters")
    if (begun := attributes.get("init_lora_weights", True)) not in _KEEP_THE_BASE:
        problems.append(
            f"init_lora_weights = {said(begun)} is not supported: it changes the kernels as well; PEFT converts them "
            "(path_initial_model_for_weight_conversion)"
        )
    if not isinstance(attributes.get("rank_pattern") or {}, dict):
        problems.append(f"rank_pattern = {said(attributes['rank_pattern'])}: should give ranks by names of modules")
    if dropout := attributes.get("lora_dropout"):
        positive("lora_dropout", dropout)
    for name, value in attributes.items():
        if name not in _READ | _SAYS_NOTHING and value not in (None, False) and value != {} and value != []:
            problems.append(f"{shown(name)} = {said(value)} is not supported: only LoRA as PEFT has it by default is")
    if problems:
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        raise HFError("; ".join([*problems[:_LISTED], *more]))


class _Reader:
    """Compares what a folder says and holds with a model.

    Args:
      path: the folder.
      attributes: of its adapter_config.json.
      config: the model, without adapters.
      family: the family that it is of, with PEFT's names.
    """

    def __init__(self, path: Path, attributes: Mapping[str, Any], config: ModelConfig, family: Family):
        self.path, self.attributes, self.config, self.family = path, attributes, config, family
        self.rank, self.alpha = whole("r", attributes.get("r")), positive("lora_alpha", attributes.get("lora_alpha"))
        self.rslora = switch("use_rslora", attributes.get("use_rslora") or False)
        self.alphas = _alphas(attributes.get("alpha_pattern") or {})
        self.targets: dict[str, tuple[Target, ...]] = {}
        """The targets of each module that can have an adapter, by its name without the number of its layer."""
        for tensor in family.tensors:
            if (target := target_of(tensor.ours)) is not None:
                module = tensor.theirs.removesuffix(".weight")
                self.targets[module] = tuple(dict.fromkeys((*self.targets.get(module, ()), target)))

    def result(self) -> PeftFolder:
        """Returns the folder.

        Raises:
          HFError: it does not fit the model.
        """
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
        """Returns the tensors A and B of each module that has an adapter."""
        try:
            weights = reading.inside(self.path, WEIGHTS)
        except OSError as error:
            raise HFError(f"{self.path / WEIGHTS}: {error.strerror}") from None
        if not os.path.lexists(weights):
            raise HFError(refused_pickle(self.path, "peft") or f"no {WEIGHTS} is there")
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
        """Returns the name of a module without the number of its layer, and that number."""
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
        """Compares the modules that have tensors with the names that are said to have some, where these are names."""
        asked, excluded = (self._names(name) for name in ("target_modules", "exclude_modules"))
        chosen, layers = self.attributes.get("layers_to_transform"), list(range(self.config.num_layers))
        if chosen not in (None, []):
            listed = chosen if isinstance(chosen, list) else [chosen]
            if not all(type(layer) is int for layer in listed):
                raise HFError(f"layers_to_transform = {said(chosen)}: should be numbers of layers")
            layers = sorted({*layers} & {*listed})
        if asked is None or excluded is None or self.attributes.get("layers_pattern"):
            return
        modules = (module.replace(LAYER, str(layer)) for layer in layers for module in self._existing())
        expected = [module for module in modules if _ends(module) & asked and not _ends(module) & excluded]
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
        """Returns the names in a list of modules, None for an expression, which is not run."""
        value = self.attributes.get(name)
        if isinstance(value, str):
            return None
        if not (value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value))):
            raise HFError(f"{name} = {said(value)}: should be a list of names, or an expression")
        return set(value or ())

    def _existing(self) -> list[str]:
        """Returns the modules that the model has: of an MLP that is not gated there is one fewer."""
        plain = all(block.mlp == "plain" for block in self.config.block_kinds())
        sparse = self.config.most_experts > 0
        skipped = {"gate_proj"} if plain else {"gate_proj", "up_proj", "down_proj"} if sparse else set()
        return [module for module, targets in self.targets.items() if not skipped & {*targets}]

    def _rank(self, pair: Mapping[str, StoredTensor]) -> int:
        """Returns the rank of an adapter, which its tensors have."""
        first = pair["A"].shape[0] if len(pair["A"].shape) == 2 else 0
        if first != self.rank and not self.attributes.get("rank_pattern"):
            raise HFError(f"{pair['A'].name} has the shape {_dims(pair['A'])}, and r = {self.rank}")
        if not 0 < first < 2**16:
            raise HFError(f"{pair['A'].name} has the shape {_dims(pair['A'])}; a rank from 1 to 65,535 is supported")
        return first

    def _scale(self, module: str, rank: int) -> float:
        named = [self.alphas[name] for name in _ends(module) if name in self.alphas]
        alpha = min(named)[1] if named else self.alpha  # the first of the pattern holds
        return LoraConfig(rank=rank, alpha=alpha, rslora=self.rslora).scale

    def _parts(
        self, factors: Mapping[str, Mapping[str, StoredTensor]], lora: LoraConfig, times: Mapping[str, float]
    ) -> dict[str, tuple[_Part, ...]]:
        """Returns the tensors of each factor of the model's adapters, whose shapes have been compared with it."""
        config = replace(self.config, lora=lora)
        variables = named_variables(nnx.filter_state(abstract_decoder(config)[1], LoraParam))
        places: dict[tuple[Target, int], tuple[Adapter, int]] = {
            (adapter.target, layer): (adapter, index)
            for adapter in adapters(config)
            for index, layer in enumerate(adapter.layers)
        }
        found: dict[str, list[_Part]] = {}
        for module, pair in factors.items():
            general, layer = self._general(module)
            first = 0
            for target in self.targets[general]:
                if (target, layer) not in places:
                    raise HFError(f"{PREFIX}{module}: the model has no such projection" + self._made_for())
                adapter, index = places[target, layer]
                a, b = (f"{adapter.lora}.{factor}" for factor in FACTORS)
                inner, outer = logical_shape(variables[a])[1], logical_shape(variables[b])[2]
                found.setdefault(a, []).append(_Part(pair["A"], a, index, 0, 1.0))
                found.setdefault(b, []).append(_Part(pair["B"], b, index, first, times[module]))
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
            yield f"lora_dropout = {said(dropout)} is not applied"
        places = len({module for module, _ in general.values()}) * self.config.num_layers
        if len(general) < places:
            yield f"{len(general)} of {places} modules have an adapter, and the others stay as they are"


def _alphas(pattern: Any) -> dict[str, tuple[int, float]]:
    """Returns the alphas of modules by their names, each with its place in the pattern."""
    if not isinstance(pattern, dict) or not all(map(_LITERAL.fullmatch, pattern)):
        raise HFError(f"alpha_pattern = {said(pattern)} is not supported: names of modules are, and no expressions")
    alphas = ((name, positive(f"alpha_pattern[{shown(name)}]", alpha)) for name, alpha in pattern.items())
    return {name: (at, alpha) for at, (name, alpha) in enumerate(alphas)}


def _ends(module: str) -> set[str]:
    """Returns the names by which PEFT finds a module: its own, and what is left of it after a dot."""
    words = module.split(".")
    return {".".join(words[at:]) for at in range(len(words))}


def _dims(tensor: StoredTensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"
