"""Reads and writes adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

The format: https://huggingface.co/docs/peft/developer_guides/checkpoint. Tensor names decide which
modules have adapters. The lists in `target_modules` and `target_parameters` must agree; a regular
expression is not evaluated, since a hostile one may never end. A layer or expert without an adapter
gets zeros, which training does not change (`jaxtp/layers/lora.py`).

PEFT has one A and one B for a kernel of several projections (Phi-3's qkv_proj), and for all experts
that are stacked in one parameter: `[E * r, in]` and `[out, r * E]`. jaxtp has an adapter for each
projection. An import copies A; an export of n projections with different As writes rank n * r, with
a block-diagonal B, which an import takes apart. A projection without an adapter has zeros there.
"""

import math
import os.path
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxtp.checkpoint.logical import Variable, named_variables
from jaxtp.config import reading
from jaxtp.config.reading import truncate
from jaxtp.hf.adapters import Adapter, adapters
from jaxtp.hf.config_json import check_adaptable, choose_family
from jaxtp.hf.families.family import EXPERT, TEXT_PREFIXES, Family, Layout
from jaxtp.hf.load import load_tensors
from jaxtp.hf.model_folder import CONFIG as MODEL_CONFIG
from jaxtp.hf.model_folder import (
    Attributes,
    HFError,
    explain_gguf,
    explain_pickle,
    join_problems,
    positive,
    prefix_errors,
    quote,
    read_attributes,
    switch,
    whole,
    without_wrappers,
)
from jaxtp.hf.safetensors import DTYPES, StoredTensor, read_header
from jaxtp.hf.save import SaveOptions, check_options, json_bytes, write_folder
from jaxtp.hf.tensor_map import TensorPart, dims, group_by_tensor, tensor_parts
from jaxtp.layers.lora import TARGETS, LoraConfig, freeze_state
from jaxtp.layers.mlp import MLP_TARGETS
from jaxtp.layers.parameter import logical_shape
from jaxtp.mesh import current_mesh
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder, abstract_decoder

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
MODULES = "model.language_model."
"""Beginning of every name, and of the text modules of a multimodal model."""
_TENSOR = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight")
_KNOWN = frozenset(
    {
        *(
            "peft_type",
            "r",
            "lora_alpha",
            "use_rslora",
            "lora_dropout",
            "bias",
            "target_modules",
            "exclude_modules",
        ),
        *(
            "layers_to_transform",
            "layers_pattern",
            "init_lora_weights",
            "fan_in_fan_out",
            "task_type",
        ),
        *("target_parameters", "rank_pattern", "alpha_pattern"),
        # No effect on outputs, or only together with another attribute, which is refused:
        *(
            "base_model_name_or_path",
            "revision",
            "auto_mapping",
            "inference_mode",
            "peft_version",
            "megatron_core",
        ),
        *("qalora_group_size", "runtime_config", "eva_config", "ensure_weight_tying"),
    }
)
# PEFT's first version with these A and B of stacked experts; older ones exchange them
_VERSION = "0.19.0"
_EXPERT = re.compile(r"\.experts\.\d")
_INITS_THAT_KEEP_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that do not change the kernels, unlike pissa and others."""


_Modules = Mapping[str, list[TensorPart]]
"""The parts of each tensor that can have an adapter, by its name in transformers' memory; a part is
a kernel."""
_Adapters = Mapping[str, Adapter]  # A model's adapters by kernel


def _modules(config: ModelConfig, family: Family, layout: Layout) -> _Modules:
    if not any(EXPERT in tensor.name for tensor in family.tensors):
        layout = "stacked"  # as in memory: Granite's files stack experts in modules
    parameters = named_variables(
        nnx.filter_state(abstract_decoder(replace(config, lora=LoraConfig()))[1], nnx.Param)
    )
    order = {
        kernel: i for i, kernel in enumerate(_by_kernel(replace(config, lora=LoraConfig(rank=1))))
    }
    parts = [
        part for part in tensor_parts(parameters, config, family, layout) if part.path in order
    ]
    parts.sort(key=lambda part: order[part.path])
    return group_by_tensor(replace(part, name=_in_memory(part.name, family)) for part in parts)


def _by_kernel(config: ModelConfig) -> _Adapters:
    return {adapter.kernel: adapter for adapter in adapters(config)}


def _in_memory(module: str, family: Family) -> str:
    # The name in transformers' memory. Multimodal models and files have other names, and so did
    # older versions.
    known = (*(form for form, _ in TEXT_PREFIXES), family.prefix)
    beginning = next((form for form in known if module.startswith(form)), None)
    before = family.prefix if family.wrapper is None else MODULES
    return module if beginning is None else before + module.removeprefix(beginning)


def _is_stacked(part: TensorPart) -> bool:
    return part.expert is None and len(part.shape) == 3


def _stems(names: Iterable[str]) -> dict[str, str]:
    """Returns the module with the adapter of each tensor.

    PEFT wraps a module once for each adapted parameter.
    """
    stems: dict[str, str] = {}
    wrapped: Counter[str] = Counter()
    for name in reversed([*names]):
        module = name.rpartition(".")[0]
        stems[name] = module + ".base_layer" * wrapped[module]
        wrapped[module] += 1
    return dict(reversed(stems.items()))


def _tensor_name(stem: str, factor: str) -> str:
    return f"{PREFIX}{stem}.lora_{factor}.weight"


def _factors(
    adapted: _Modules,
    trained: _Adapters,
    variables: Mapping[str, Variable],
    *,
    diagonal: bool,
    exchanged: Collection[str] = (),
) -> Iterator[TensorPart]:
    """Yields the parts of each A, then of each B.

    B is block-diagonal if `diagonal` and it has several parts.

    A part without an adapter has zeros. `exchanged` tensors have A in place of B, as before
    `_VERSION`.
    """
    stems = _stems(adapted)
    for factor in "AB":
        for name, kernels in adapted.items():
            for i, part in enumerate(kernels):
                if (adapter := trained.get(part.path)) is None:
                    continue
                *experts, inputs, rank = logical_shape(variables[f"{adapter.lora}.a"])[1:]
                stacked = experts if part.expert is None else []
                outputs = part.ordered_shape[-1]
                joined = math.prod(stacked)
                first, ranks = (i * rank, len(kernels) * rank) if diagonal else (0, rank)
                # The shape is `[E * r, sides]`, unlike `[sides, r * E]`.
                is_first = (factor == "A") != (name in exchanged)
                sides = inputs if factor == "A" else outputs
                where = TensorPart(
                    f"{adapter.lora}.{factor.lower()}",
                    _tensor_name(stems[name], "A" if is_first else "B"),
                    part.index,
                    transposed=name not in exchanged,
                    shape=(*stacked, ranks, sides) if is_first else (sides, ranks, *stacked),
                    expert=part.expert,
                    stored=(joined * ranks, sides) if is_first else (sides, ranks * joined),
                    experts_last=bool(stacked) and not is_first,
                )
                if factor == "A":
                    yield replace(where, first=first)
                else:
                    yield replace(where, first=part.first, inner=first, columns=part.columns)


def save_peft(
    model: Decoder,
    path: str | Path,
    *,
    base: str | Path | None = None,
    **options: Unpack[SaveOptions],
) -> None:
    """Writes a model's adapters, from any mesh, for `peft.PeftModel.from_pretrained`.

    Layers whose adapters are all zero are left out: `load_peft` fills layers without adapters with
    zeros.

    Args:
      path: a new or empty folder; appears when complete.
      base: base model folder to record; without it, users name it when they load the adapters.
      **options: see `SaveOptions`.

    Raises:
      NonFiniteError: a weight is not finite.
      HFError: the model has no adapters, no family can represent it, or the folder is not writable.
    """
    check_options(options, SaveOptions)
    _check_base(base)
    config = model.config
    layout = options.get("experts", "stacked")
    if not config.lora.rank:
        raise HFError("the model has no adapters; write all of it by save_hf")
    family = choose_family(replace(config, lora=LoraConfig()), options.get("family"))
    trained = _by_kernel(config)
    variables = named_variables(nnx.state(model, nnx.LoRAParam))
    every = _modules(config, family, layout)
    arrays = {kernel: variables[f"{adapter.lora}.a"][...] for kernel, adapter in trained.items()}
    nonzero = {kernel: _on_host(_nonzero_layers, a) for kernel, a in arrays.items()}
    modules = {
        name: [part for part in parts if part.path in trained] for name, parts in every.items()
    }
    modules = {name: parts for name, parts in modules.items() if parts}
    used = [
        name
        for name, parts in modules.items()
        if any(nonzero[part.path][part.index] for part in parts)
    ]
    adapted = {name: every[name] for name in used or modules}
    pairs = {(first.path, other.path) for first, *others in modules.values() for other in others}
    diagonal = not all(
        _on_host(jnp.array_equal, arrays[first], arrays[other]) for first, other in pairs
    )
    files = {WEIGHTS: group_by_tensor(_factors(adapted, trained, variables, diagonal=diagonal))}
    # A vision tower has modules of the same names.
    are_short = len(adapted) == len(modules) and family.wrapper is None
    described = _peft_config(config, adapted, are_short=are_short, diagonal=diagonal)
    others = {
        CONFIG: json_bytes(
            {**described, "base_model_name_or_path": None if base is None else str(base)}
        )
    }
    write_folder(
        Path(path), variables, files, others, options.get("dtype") or config.lora.dtype, options
    )


def _nonzero_layers(stacked: Array) -> Array:
    return jnp.any(stacked != 0, axis=range(1, stacked.ndim))


def _on_host(function: Callable[..., Array], *arrays: Array) -> NDArray[np.bool_]:
    """Computes on the arrays' mesh, for every process."""
    sharding = arrays[0].sharding
    replicated = (
        NamedSharding(sharding.mesh, PartitionSpec())
        if isinstance(sharding, NamedSharding)
        else None
    )
    return np.asarray(jax.jit(function, out_shardings=replicated)(*arrays))


def _peft_config(
    config: ModelConfig, adapted: _Modules, *, are_short: bool, diagonal: bool
) -> dict[str, object]:
    lora = config.lora
    modules = list[str]()
    parameters = list[str]()
    counts = dict[str, int]()
    # In a model with experts, PEFT takes other modules of these names for experts, from version
    # 0.19 on.
    names = {name: name.removesuffix(".weight").rpartition(".")[2] for name in adapted}
    mixed = {
        name
        for name, (part, *_) in adapted.items()
        if config.most_experts
        and names[name] in MLP_TARGETS
        and part.expert is None
        and not _is_stacked(part)
    }
    for name, (part, *others) in adapted.items():
        is_parameter = name in mixed or _is_stacked(part)
        full = name if is_parameter else name.removesuffix(".weight")
        end = re.split(r"\.\d+\.", full, maxsplit=1)[-1]
        is_last = not is_parameter and (
            names[name] in TARGETS if part.expert is None else not mixed
        )
        short = names[name] if is_last else end
        (parameters if is_parameter else modules).append(short if are_short else full)
        if others and diagonal:
            counts[end] = 1 + len(others)
    rslora = lora.rslora and not any(part.expert is not None for part, *_ in adapted.values())
    # PEFT doubles both for a fused kernel.
    alpha = lora.alpha if rslora == lora.rslora else lora.scale * lora.rank
    attributes: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": _number(alpha),
        "use_rslora": rslora,
        "lora_dropout": 0.0,
        "target_modules": list(dict.fromkeys(modules)),
        "bias": "none",
        "fan_in_fan_out": any(
            not (part.transposed or _is_stacked(part)) for part, *_ in adapted.values()
        ),
        "inference_mode": True,
    }
    if parameters:
        attributes |= {
            "target_parameters": list(dict.fromkeys(parameters)),
            "peft_version": _VERSION,
        }
    if counts:
        factors = {end: math.sqrt(count) if rslora else count for end, count in counts.items()}
        attributes["rank_pattern"] = {end: count * lora.rank for end, count in counts.items()}
        attributes["alpha_pattern"] = {
            end: _number(factor * alpha) for end, factor in factors.items()
        }
    return attributes


def _number(value: float) -> float:
    return int(value) if value.is_integer() else value


@dataclass(frozen=True)
class PeftFolder:
    """A folder of adapters that fit a model; their weights are not read yet."""

    path: Path
    lora: LoraConfig
    tensors: Mapping[str, StoredTensor]
    parts: Mapping[str, list[TensorPart]]  # parts of each tensor, by the tensor's name
    notes: tuple[str, ...]  # messages to print before training


def load_peft(model: Decoder, path: str | Path, *, family: str | None = None) -> Decoder:
    """Returns a copy of a model, sharing its arrays, with the adapters of a PEFT folder.

    Args:
      model: without adapters, on the mesh in context or on one device.
      family: `model_type`; by default the first that can represent this model.

    Raises:
      HFError: the folder is refused.
    """
    if model.config.lora.rank:
        raise HFError(
            "the model has adapters already; add them to their kernels by merge_adapters first"
        )
    folder = open_peft(Path(path), model.config, family)
    return with_peft(model, folder, None if current_mesh() is None else jax.sharding.get_mesh())


def with_peft(model: Decoder, folder: PeftFolder, mesh: Mesh | None) -> Decoder:
    """Returns a copy of a model with an open folder's adapters; see `load_peft`."""
    graph, abstract = abstract_decoder(replace(model.config, lora=folder.lora))
    return nnx.merge(
        graph, nnx.merge_state(freeze_state(nnx.state(model)), read_peft(folder, abstract, mesh))
    )


def read_peft(folder: PeftFolder, abstract: nnx.State, mesh: Mesh | None) -> nnx.State:
    """Reads the adapters of an abstract state, in its shapes and shardings."""
    return load_tensors(
        folder.tensors, folder.parts, nnx.filter_state(abstract, nnx.LoRAParam), mesh
    )


def open_peft(path: Path, config: ModelConfig, family: str | None = None) -> PeftFolder:
    """Opens a folder of adapters.

    Raises `HFError` if they are unreadable, unsupported, or do not fit the model.
    """
    attributes = read_attributes(path, CONFIG, "PEFT's format")
    _check_base(attributes.get("base_model_name_or_path"))
    plain = replace(config, lora=LoraConfig())
    with prefix_errors(path):
        _check_attributes(attributes)
        return _match_model(path, attributes, plain, choose_family(plain, family))


def _check_base(base: object) -> None:
    if isinstance(base, str | Path) and os.path.isfile(Path(base) / MODEL_CONFIG):
        with prefix_errors(Path(base)):
            check_adaptable(read_attributes(Path(base)))


def _check_attributes(attributes: Attributes) -> None:
    problems = []
    if (kind := attributes.get("peft_type")) != "LORA":
        problems.append(f"peft_type = {quote(kind)} is not supported, only 'LORA'")
    if (bias := attributes.get("bias", "none")) not in ("none", None):
        problems.append(
            f"bias = {quote(bias)} is not supported, only 'none': biases are not trained with "
            "adapters"
        )
    if (init := attributes.get("init_lora_weights", True)) not in _INITS_THAT_KEEP_BASE:
        problems.append(
            f"init_lora_weights = {quote(init)} is not supported: it also changes the kernels; "
            "PEFT can convert the adapters (path_initial_model_for_weight_conversion)"
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


def _match_model(
    path: Path, attributes: Attributes, config: ModelConfig, family: Family
) -> PeftFolder:
    base = attributes.get("base_model_name_or_path")
    made_for = (
        f"; they were made for {truncate(base, 200)} (base_model_name_or_path)" if base else ""
    )
    read, notes = without_wrappers(_read_tensors(path))
    targets = _names("target_parameters", attributes)
    layout: Layout = "stacked" if targets and not any(map(_EXPERT.search, read)) else "separate"
    every = _modules(config, family, layout)
    possible = {
        name: parts
        for name, parts in every.items()
        if not _is_stacked(parts[0]) or _suffixes(name) & targets
    }
    stems = _stems(possible)
    stored = _check_tensors(read, stems.values(), config, family, made_for)
    adapted = {
        name: parts for name, parts in possible.items() if _tensor_name(stems[name], "A") in stored
    }
    _check_names(attributes, stems, adapted, made_for)
    factors = {
        name: tuple(stored[_tensor_name(stems[name], factor)] for factor in "AB")
        for name in adapted
    }
    version = re.match(r"(\d{1,4})\.(\d{1,4})", str(attributes.get("peft_version")))
    is_old = version is None or (int(version[1]), int(version[2])) < (0, 19)
    exchanged = {
        name for name, parts in adapted.items() if _is_exchanged(parts[0], factors[name], is_old)
    }
    lora, diagonal = _lora_config(attributes, adapted, factors, exchanged, made_for)
    every_adapter = _by_kernel(replace(config, lora=lora))
    used = {
        every_adapter[part.path].target
        for name, parts in adapted.items()
        for part in (
            _nonzero_parts(factors[name][0], parts) if diagonal and len(parts) > 1 else parts
        )
    }
    lora = replace(lora, targets=tuple(target for target in TARGETS if target in used))
    config = replace(config, lora=lora)
    trained = _by_kernel(config)
    variables = named_variables(nnx.filter_state(abstract_decoder(config)[1], nnx.LoRAParam))
    parts = group_by_tensor(
        _factors(adapted, trained, variables, diagonal=diagonal, exchanged=exchanged)
    )
    tensors = {name: replace(stored[name], shape=part.shape) for name, (part, *_) in parts.items()}
    if dropout := attributes.get("lora_dropout"):
        notes.append(f"lora_dropout = {quote(dropout)} is not applied")
    if len(adapted) < (
        count := sum(any(part.path in trained for part in parts) for parts in every.values())
    ):
        notes.append(
            f"{len(adapted)} of {count} modules have an adapter; the others are not trained"
        )
    return PeftFolder(path, lora, tensors, parts, tuple(notes))


def _read_tensors(path: Path) -> dict[str, StoredTensor]:
    try:
        weights = reading.inside(path, WEIGHTS)
    except OSError as error:
        raise HFError(f"{path / WEIGHTS}: {error.strerror}") from None
    if not weights.exists():
        raise HFError(
            explain_pickle(path, "peft") or explain_gguf(path) or f"no {WEIGHTS} is there"
        )
    if not (stored := read_header(weights)):
        raise HFError(f"{WEIGHTS} holds no adapters")
    return stored


def _check_tensors(
    tensors: Mapping[str, StoredTensor],
    possible: Collection[str],
    config: ModelConfig,
    family: Family,
    made_for: str,
) -> dict[str, StoredTensor]:
    """Returns tensors by their names in memory.

    Checks that they are float factors of `possible` modules, in pairs.
    """
    kinds = ", ".join(
        dict.fromkeys(re.sub(r"\.\d+\.", ".*.", stem).partition(".*.")[2] for stem in possible)
    )
    named: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if (match := _TENSOR.fullmatch(name)) is None:
            raise HFError(f"{truncate(name, 200)} is not supported, only adapters of {kinds}")
        module = _in_memory(match[1], family)
        factor = match[2]
        layer = re.search(r"\.(\d{1,9})\.", module)
        if (
            module not in possible
            and layer is not None
            and module.replace(layer[0], ".0.", 1) in possible
        ):
            where = f"layer {layer[1]}, and the model has {config.num_layers} layers"
            raise HFError(f"{PREFIX}{truncate(module, 200)} is in {where}{made_for}")
        if module not in possible:
            raise HFError(
                f"adapters of {truncate(match[1], 200)} are not supported in a "
                f"{family.model_type}, only of {kinds}"
            )
        if tensor.dtype not in DTYPES:
            raise HFError(
                f"{truncate(name, 200)} is {tensor.dtype}, not float32, bfloat16 or float16"
            )
        if (other := named.setdefault(_tensor_name(module, factor), tensor)) is not tensor:
            raise HFError(
                f"{truncate(other.name, 200)} and {truncate(name, 200)} are the same adapter; "
                "remove one"
            )
    for module in possible:
        missing = [name for factor in "AB" if (name := _tensor_name(module, factor)) not in named]
        if len(missing) == 1:
            raise HFError(f"missing: {missing[0]}")
    return named


def _lora_config(
    attributes: Attributes,
    adapted: _Modules,
    factors: Mapping[str, tuple[StoredTensor, ...]],
    exchanged: Collection[str],
    made_for: str,
) -> tuple[LoraConfig, bool]:
    """Returns the settings, and whether the B of several projections is block-diagonal.

    Checks all shapes.
    """
    rslora = switch("use_rslora", attributes.get("use_rslora") or False)
    rank_of = _pattern(attributes, "rank_pattern", whole("r", attributes.get("r")), whole)
    alpha_of = _pattern(
        attributes, "alpha_pattern", positive("lora_alpha", attributes.get("lora_alpha")), positive
    )
    targets = _names("target_parameters", attributes)
    found: dict[str, LoraConfig] = {}
    for name, parts in adapted.items():
        target = name if _suffixes(name) & targets else name.removesuffix(".weight")
        found[name] = LoraConfig(rank=rank_of(target), alpha=alpha_of(target), rslora=rslora)
        part = parts[0]
        *_, inputs, outputs = part.ordered_shape
        sides = (outputs, inputs) if name in exchanged else (inputs, outputs)
        _check_shapes(
            found[name].rank,
            part.shape[0] if _is_stacked(part) else 1,
            sides,
            factors[name],
            made_for,
        )
    base = LoraConfig(rank=rank_of(""), alpha=alpha_of(""), rslora=rslora)
    joined = [name for name, parts in adapted.items() if len(parts) > 1]
    diagonal = bool(joined) and all(
        found[name].rank == len(adapted[name]) * base.rank
        and name not in exchanged
        and _is_block_diagonal(factors[name][1], adapted[name])
        for name in joined
    )
    first, one = ("r", base) if diagonal else next(iter(found.items()))
    for name, lora in found.items():
        count = len(adapted[name]) if diagonal else 1
        if lora.rank != count * one.rank or not math.isclose(lora.scale, one.scale, rel_tol=1e-6):
            raise HFError(
                f"{name} has rank {lora.rank} and scale {lora.scale:.4g}, unlike {first} with "
                f"{one.rank} and {one.scale:.4g}; jaxtp has one rank and one scale for all "
                "adapters. PEFT can merge them into the model: merge_and_unload()"
            )
    return one, diagonal


_Value = TypeVar("_Value")


def _pattern(
    attributes: Attributes, name: str, default: _Value, check: Callable[[str, object], _Value]
) -> Callable[[str], _Value]:
    """Returns the function from a module's or parameter's name to the value of a pattern.

    The pattern is in the configuration.
    """
    patterns = attributes.get(name) or {}
    if not isinstance(patterns, dict):
        raise HFError(f"{name} = {quote(patterns)}: should be an object")
    values = {
        re.sub(r"\\\.", ".", pattern.removeprefix(r".*\.")): check(name, patterns[pattern])
        for pattern in patterns
    }
    if wrong := [pattern for pattern in values if not re.fullmatch(r"[\w.]+", pattern)]:
        raise HFError(
            f"{name}: {quote(wrong[0])} is not evaluated, only names of modules and parameters"
        )
    return lambda target: next((values[end] for end in values if end in _suffixes(target)), default)


def _is_exchanged(part: TensorPart, factors: Sequence[StoredTensor], is_old: bool) -> bool:
    """Returns whether A and B of stacked experts `[E, out, in]` are of the transposed kernel."""
    a, b = factors
    *_, inputs, outputs = part.ordered_shape
    fits = (*b.shape[:1], *a.shape[1:]) == (inputs, outputs)
    return _is_stacked(part) and part.transposed and fits and (is_old or inputs != outputs)


def _check_shapes(
    rank: int, experts: int, sides: tuple[int, int], factors: Sequence[StoredTensor], made_for: str
) -> None:
    a, b = factors
    if a.shape[:1] != (rank * experts,):
        times = f" for each of {experts} experts" if experts > 1 else ""
        raise HFError(
            f"{truncate(a.name, 200)} has the shape {dims(a.shape)}, and r = {rank}{times}"
        )
    for tensor, shape in ((a, (rank * experts, sides[0])), (b, (sides[1], rank * experts))):
        if tensor.shape != shape:
            raise HFError(
                f"{tensor.name} is {dims(tensor.shape)}, and this model needs "
                f"{dims(shape)}{made_for}"
            )


def _is_block_diagonal(b: StoredTensor, parts: Sequence[TensorPart]) -> bool:
    """Returns whether the output dims of each part use only its ranks; reads the tensor."""
    owners = np.zeros(b.shape[0], np.int64)
    for i, part in enumerate(parts):
        owners[slice(part.first, None) if part.columns is None else part.columns] = i
    for row, block in b.blocks():
        by_part = block.reshape(len(block), len(parts), -1)
        by_part[np.arange(len(block)), owners[row : row + len(block)]] = 0
        if (by_part != 0).any():
            return False
    return True


def _nonzero_parts(a: StoredTensor, parts: Sequence[TensorPart]) -> Sequence[TensorPart]:
    """Returns the parts whose ranks of A are not zero, or all if none are; reads the tensor."""
    blocks = a.read().reshape(parts[0].shape[0] if _is_stacked(parts[0]) else 1, len(parts), -1)
    return [
        part for part, used in zip(parts, (blocks != 0).any(axis=(0, 2)), strict=True) if used
    ] or parts


def _names(name: str, attributes: Attributes) -> set[str]:
    value = attributes.get(name)
    if value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return set(value or ())
    raise HFError(f"{name} = {quote(value)}: should be a list of names, or an expression")


def _check_names(
    attributes: Attributes, stems: Mapping[str, str], adapted: _Modules, made_for: str
) -> None:
    """Compares the adapted modules with the lists in the configuration.

    It does not if a regular expression chooses them.
    """
    parameters = _names("target_parameters", attributes)
    expected = {name: "target_parameters" for name in stems if _suffixes(name) & parameters}
    if unknown := sorted(parameters.difference(*map(_suffixes, stems))):
        raise HFError(
            f"target_parameters name {truncate(unknown[0], 200)}, which is no parameter "
            f"here{made_for}"
        )
    lists = ("target_modules", "exclude_modules")
    is_open = any(isinstance(attributes.get(name), str) for name in lists) or bool(
        attributes.get("layers_pattern")
    )
    if not is_open:
        wanted, excluded = (_names(name, attributes) for name in lists)
        layers = attributes.get("layers_to_transform")
        layers = layers if isinstance(layers, list) else [] if layers is None else [layers]
        if not all(type(layer) is int for layer in layers):
            raise HFError(f"layers_to_transform = {quote(layers)}: should be layer numbers")
        for name, module in stems.items():
            suffixes = _suffixes(module)
            number = re.search(r"\.(\d+)\.", module)
            in_layers = not layers or (number is not None and int(number[1]) in layers)
            if (
                suffixes & wanted
                and not suffixes & excluded
                and in_layers
                and name.endswith(".weight")
            ):
                expected.setdefault(name, "target_modules")
    for name, which in expected.items():
        if name not in adapted:
            raise HFError(
                f"missing: {_tensor_name(stems[name], 'A')}, which {which} require{made_for}"
            )
    for name in () if is_open else sorted({*adapted} - {*expected}):
        raise HFError(
            f"unexpected: {_tensor_name(stems[name], 'A')}, which target_modules do not name"
        )


def _suffixes(module: str) -> set[str]:
    words = module.split(".")
    return {".".join(words[at:]) for at in range(len(words))}
