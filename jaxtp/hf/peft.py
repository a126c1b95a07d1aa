"""Reads and writes adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

The format: https://huggingface.co/docs/peft/developer_guides/checkpoint. Tensor names decide which modules have
adapters. A list in `target_modules` must agree; a regular expression is not evaluated, since a hostile one may never
end. A layer without an adapter gets zeros, which training does not change (`jaxtp/layers/lora.py`).
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.checkpoint.logical import Variable, named_variables
from jaxtp.config import reading
from jaxtp.config.reading import truncate
from jaxtp.hf.adapters import Adapter, adapters
from jaxtp.hf.config_json import choose_family
from jaxtp.hf.families.family import LAYER, TEXT_PREFIXES, Family, Tensor
from jaxtp.hf.load import load_tensors
from jaxtp.hf.model_folder import (
    Attributes,
    HFError,
    explain_pickle,
    join_problems,
    positive,
    prefix_errors,
    quote,
    read_attributes,
    switch,
    whole,
)
from jaxtp.hf.safetensors import DTYPES, StoredTensor, read_header
from jaxtp.hf.save import SaveOptions, check_options, json_bytes, write_folder
from jaxtp.hf.tensor_map import TensorPart, dims, group_by_tensor, place, split_path
from jaxtp.layers.lora import TARGETS, LoraConfig, freeze_state
from jaxtp.layers.parameter import logical_shape
from jaxtp.mesh import current_mesh
from jaxtp.models.config import ModelConfig, adapter_targets
from jaxtp.models.decoder import Decoder, abstract_decoder

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX, MODULES = "base_model.model.", "model.language_model."
"""Beginning of every name, and of the text modules of a multimodal model."""
_TENSOR = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight")
_KNOWN = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "lora_dropout", "bias", "target_modules", "exclude_modules"),
        *("layers_to_transform", "layers_pattern", "init_lora_weights", "fan_in_fan_out", "task_type"),
        # No effect on outputs, or only together with another attribute, which is refused:
        *("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version", "megatron_core"),
        *("qalora_group_size", "runtime_config", "eva_config", "ensure_weight_tying"),
    }
)
_INITS_THAT_KEEP_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that do not change the kernels, unlike pissa and others."""


class _LayerAdapter(NamedTuple):
    adapter: Adapter
    stack_index: int
    """Index in the stack of layers."""
    tensor: Tensor
    """The adapted kernel in the model's file."""


_Modules = Mapping[str, list[_LayerAdapter]]
"""The adapters of each module in PEFT, by the module's name: several if the file fuses projections."""


def _modules(config: ModelConfig, family: Family) -> _Modules:
    tensors = {tensor.ours: tensor for tensor in family.tensors}
    modules: dict[str, list[_LayerAdapter]] = {}
    for adapter in adapters(config):
        if (kernel := split_path(adapter.kernel)[1]) not in tensors:
            raise HFError(f"a {family.model_type} has no {kernel}")
        tensor = tensors[kernel]
        for index, layer in enumerate(adapter.layers):
            module = _in_memory(tensor.theirs.removesuffix(".weight").replace(LAYER, str(layer)), family)
            modules.setdefault(module, []).append(_LayerAdapter(adapter, index, tensor))
    return modules


def _in_memory(module: str, family: Family) -> str:
    # The name in transformers' memory. Multimodal files have other names, and so did older versions.
    before = family.prefix if family.wrapper is None else MODULES
    known = (*(form for form, _ in TEXT_PREFIXES), family.prefix) if family.wrapper is not None else (before,)
    beginning = next((form for form in known if module.startswith(form)), "")
    return before + module.removeprefix(beginning) if beginning else module


def _tensor_parts(
    modules: _Modules, variables: Mapping[str, Variable], config: ModelConfig, family: Family
) -> Iterator[TensorPart]:
    """Yields A and B of each module; fused projections share A, and their Bs are fused like their kernels."""
    blocks = {stack: block for stack, _, block in config.kinds()}
    for module, projections in modules.items():
        a, b = (f"{PREFIX}{module}.lora_{factor}.weight" for factor in "AB")
        outputs = [logical_shape(variables[f"{projection.adapter.lora}.b"])[-1] for projection in projections]
        for i, (adapter, index, tensor) in enumerate(projections):
            _, inputs, rank = logical_shape(variables[f"{adapter.lora}.a"])
            yield TensorPart(f"{adapter.lora}.a", a, index, transposed=True, shape=(rank, inputs))
            first, width, columns = place(tensor, i, outputs, family, blocks[str(split_path(adapter.kernel)[0])])
            part = TensorPart(f"{adapter.lora}.b", b, index, transposed=True, shape=(width, rank), first=first)
            yield replace(part, columns=columns)


def _name_in_layer(module: str) -> str:
    return re.split(r"\.\d+\.", module, maxsplit=1)[-1]


def save_peft(
    model: Decoder, path: str | Path, *, base: str | Path | None = None, **options: Unpack[SaveOptions]
) -> None:
    """Writes a model's adapters, from any mesh, for `peft.PeftModel.from_pretrained`.

    Layers whose adapters are all zero are left out: `load_peft` fills layers without adapters with zeros.

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
    family = choose_family(replace(config, lora=LoraConfig()), options.get("family"))
    modules, paths = _modules(config, family), {split_path(path)[1] for path in named_variables(nnx.state(model))}
    parts = Counter(tensor.theirs for tensor in family.tensors if tensor.ours in paths)
    for (adapter, _, tensor), *_ in modules.values():
        if parts[tensor.theirs] > 1:
            raise HFError(
                f"{adapter.target} of a {family.model_type} is a part of {tensor.theirs}, which has one adapter in "
                "PEFT; merge the adapters and export the model: --merged, or save_hf(merge_adapters(model))"
            )
    variables = named_variables(nnx.state(model, nnx.LoRAParam))
    nonzero = {adapter: _nonzero_layers(variables[f"{adapter.lora}.a"][...]) for adapter in adapters(config)}
    adapted = {m: each for m, each in modules.items() if each[0].stack_index in nonzero[each[0].adapter]} or modules
    files = {WEIGHTS: group_by_tensor(_tensor_parts(adapted, variables, config, family))}
    # A vision tower has modules of the same short names.
    are_short = len(adapted) == len(modules) and family.wrapper is None
    others = {CONFIG: json_bytes(_peft_config(config.lora, adapted, are_short, base))}
    write_folder(Path(path), variables, files, others, options.get("dtype") or config.lora.dtype, options)


def _nonzero_layers(stacked: Array) -> list[int]:
    sharding = stacked.sharding
    replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    nonzero = jax.jit(lambda a: jnp.any(a != 0, axis=(1, 2)), out_shardings=replicated)(stacked)
    indices: list[int] = np.flatnonzero(nonzero).tolist()
    return indices


def _peft_config(lora: LoraConfig, modules: _Modules, are_short: bool, base: str | Path | None) -> dict[str, object]:
    targets = {module: projections[0].adapter.target for module, projections in modules.items()}
    short = [target if module.endswith(f".{target}") else _name_in_layer(module) for module, target in targets.items()]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "target_modules": list(dict.fromkeys(short) if are_short else modules),
        "bias": "none",
        "fan_in_fan_out": not all(each.tensor.transposed for projections in modules.values() for each in projections),
        "inference_mode": True,
    }


@dataclass(frozen=True)
class PeftFolder:
    """A folder of adapters that fit a model; their weights are not read yet."""

    path: Path
    lora: LoraConfig
    tensors: Mapping[str, StoredTensor]
    parts: Mapping[str, list[TensorPart]]  # parts of each tensor, by the tensor's name
    notes: tuple[str, ...]  # messages to print before training
    untrainable: str | None  # why the adapters can only be merged, not trained; None if they can be trained

    def check_trainable(self) -> None:
        """Raises `HFError` if the adapters cannot be trained."""
        if self.untrainable is not None:
            raise HFError(
                f"{self.path}: {self.untrainable}; merge them by `jaxtp convert export MODEL OUT "
                f"--adapters {self.path}`, and train OUT"
            )


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
    """Reads the adapters of an abstract state, in its shapes and shardings."""
    return load_tensors(folder.tensors, folder.parts, nnx.filter_state(abstract, nnx.LoRAParam), mesh)


def open_peft(path: Path, config: ModelConfig, family: str | None = None) -> PeftFolder:
    """Opens a folder of adapters; raises `HFError` if they are unreadable, unsupported, or do not fit the model."""
    attributes = read_attributes(path, CONFIG, "PEFT's format")
    plain = replace(config, lora=LoraConfig())
    with prefix_errors(path):
        _check_attributes(attributes)
        return _match_model(path, attributes, plain, choose_family(plain, family))


def _check_attributes(attributes: Attributes) -> None:
    problems = []
    if (kind := attributes.get("peft_type")) != "LORA":
        problems.append(f"peft_type = {quote(kind)} is not supported, only 'LORA'")
    if (bias := attributes.get("bias", "none")) not in ("none", None):
        problems.append(f"bias = {quote(bias)} is not supported, only 'none': biases are not trained with adapters")
    if (init := attributes.get("init_lora_weights", True)) not in _INITS_THAT_KEEP_BASE:
        problems.append(
            f"init_lora_weights = {quote(init)} is not supported: it also changes the kernels; PEFT can convert "
            "the adapters (path_initial_model_for_weight_conversion)"
        )
    if dropout := attributes.get("lora_dropout"):
        positive("lora_dropout", dropout)
    problems += [
        f"{truncate(name)} = {quote(value)} is not supported, only LoRA with PEFT's defaults"
        for name, value in attributes.items()
        if name not in _KNOWN and value not in (None, False, {}, [])
    ]
    if problems:
        raise HFError(join_problems(problems))


def _match_model(path: Path, attributes: Attributes, config: ModelConfig, family: Family) -> PeftFolder:
    """Compares the names and shapes in a folder with a model's; raises `HFError` if they differ."""
    rank, alpha = whole("r", attributes.get("r")), positive("lora_alpha", attributes.get("lora_alpha"))
    rslora = switch("use_rslora", attributes.get("use_rslora") or False)
    base = attributes.get("base_model_name_or_path")
    made_for = f"; they were made for {truncate(base, 200)} (base_model_name_or_path)" if base else ""
    lora = LoraConfig(rank=rank, alpha=alpha, rslora=rslora, targets=adapter_targets(config))
    possible = _modules(replace(config, lora=lora), family)
    tensors = _read_factors(path, rank, possible, config, family, made_for)
    adapted = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors}
    _check_names(attributes, adapted, possible, made_for)
    targets = {projection.adapter.target for module in adapted for projection in possible[module]}
    lora = replace(lora, targets=tuple(target for target in TARGETS if target in targets))
    config = replace(config, lora=lora)
    modules = _modules(config, family)
    variables = named_variables(nnx.filter_state(abstract_decoder(config)[1], nnx.LoRAParam))
    used = {module: projections for module, projections in modules.items() if module in adapted}
    parts = group_by_tensor(_tensor_parts(used, variables, config, family))
    for name, (part, *_) in parts.items():
        if tensors[name].shape != part.shape:
            shapes = f"{dims(tensors[name].shape)}, and this model needs {dims(part.shape)}"
            raise HFError(f"{name} is {shapes}{made_for}")
    notes, untrainable = [], None
    if dropout := attributes.get("lora_dropout"):
        notes.append(f"lora_dropout = {quote(dropout)} is not applied")
    if len(used) < len(modules):
        notes.append(f"{len(used)} of {len(modules)} modules have an adapter; the others are not trained")
    if fused := [module for module, projections in used.items() if len(projections) > 1]:
        untrainable = f"{fused[0]} fuses several projections with one adapter, and jaxtp trains one for each"
    return PeftFolder(path, lora, tensors, parts, tuple(notes), untrainable)


def _read_factors(
    path: Path, rank: int, possible: _Modules, config: ModelConfig, family: Family, made_for: str
) -> dict[str, StoredTensor]:
    """Returns A and B of each adapted module by name."""
    try:
        weights = reading.inside(path, WEIGHTS)
    except OSError as error:
        raise HFError(f"{path / WEIGHTS}: {error.strerror}") from None
    if not weights.exists():
        raise HFError(explain_pickle(path, "peft") or f"no {WEIGHTS} is there")
    if not (stored := read_header(weights)):
        raise HFError(f"{WEIGHTS} holds no adapters")
    tensors = {
        PREFIX * name.startswith(PREFIX) + _in_memory(name.removeprefix(PREFIX), family): stored[name]
        for name in stored
    }
    kinds = ", ".join(dict.fromkeys(map(_name_in_layer, possible)))
    for name, tensor in tensors.items():
        if (match := _TENSOR.fullmatch(name)) is None:
            raise HFError(f"{truncate(name, 200)} is not supported, only adapters of {kinds}")
        module, factor = match.groups()
        layer = re.search(r"\.(\d{1,9})\.", module)
        if module not in possible and layer is not None and module.replace(layer[0], ".0.", 1) in possible:
            where = f"layer {layer[1]}, and the model has {config.num_layers} layers"
            raise HFError(f"{PREFIX}{truncate(module, 200)} is in {where}{made_for}")
        if module not in possible:
            raise HFError(
                f"adapters of {truncate(module, 200)} are not supported in a {family.model_type}, only of {kinds}"
            )
        if tensor.dtype not in DTYPES:
            raise HFError(f"{truncate(name, 200)} is {tensor.dtype}, not float32, bfloat16 or float16")
        if factor == "A" and tensor.shape[:1] != (rank,):
            raise HFError(f"{truncate(name, 200)} has the shape {dims(tensor.shape)}, and r = {rank}")
        other = f"{PREFIX}{module}.lora_{'B' if factor == 'A' else 'A'}.weight"
        if other not in tensors:
            raise HFError(f"missing: {other}")
    return tensors


def _check_names(attributes: Attributes, adapted: Collection[str], possible: _Modules, made_for: str) -> None:
    """Compares the adapted modules with the lists in the configuration, unless a regular expression chooses them."""
    lists = {name: attributes.get(name) for name in ("target_modules", "exclude_modules")}
    if any(isinstance(value, str) for value in lists.values()) or attributes.get("layers_pattern"):
        return
    for name, value in lists.items():
        if not (value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value))):
            raise HFError(f"{name} = {quote(value)}: should be a list of names, or an expression")
    layers = attributes.get("layers_to_transform")
    layers = layers if isinstance(layers, list) else [] if layers is None else [layers]
    if not all(type(layer) is int for layer in layers):
        raise HFError(f"layers_to_transform = {quote(layers)}: should be layer numbers")
    wanted, excluded = (set(value) if isinstance(value, list) else set() for value in lists.values())
    expected = [
        module
        for module, ((adapter, index, _), *_) in possible.items()
        if (not layers or adapter.layers[index] in layers)
        and _suffixes(module) & wanted
        and not _suffixes(module) & excluded
    ]
    for module in expected:
        if module not in adapted:
            raise HFError(f"missing: {PREFIX}{module}.lora_A.weight, which target_modules require{made_for}")
    for module in sorted({*adapted} - {*expected}):
        raise HFError(f"unexpected: {PREFIX}{module}.lora_A.weight, which target_modules do not name")


def _suffixes(module: str) -> set[str]:
    words = module.split(".")
    return {".".join(words[at:]) for at in range(len(words))}
