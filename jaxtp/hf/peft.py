"""Reads and writes adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

The format: https://huggingface.co/docs/peft/developer_guides/checkpoint. Tensor names decide which
modules have adapters. Plain lists in `target_modules` and `target_parameters` must agree; a regular
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
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxtp.checkpoint.logical import named_variables, select_paths
from jaxtp.config import reading
from jaxtp.config.entry import say
from jaxtp.config.reading import truncate
from jaxtp.hf.adapters import ROWS, Adapter, adapters, initial_rows
from jaxtp.hf.config_json import check_adaptable, choose_family
from jaxtp.hf.families.family import EXPERT, TEXT_PREFIXES, Family, Layout
from jaxtp.hf.loading import Progress, load_tensors, print_notes
from jaxtp.hf.model_folder import CONFIG as MODEL_CONFIG
from jaxtp.hf.model_folder import (
    Attributes,
    HFError,
    MutableAttributes,
    explain_gguf,
    explain_pickle,
    join_problems,
    plain_number,
    positive,
    prefix_errors,
    quote,
    read_attributes,
    switch,
    whole,
    without_wrappers,
)
from jaxtp.hf.safetensors import DTYPES, StoredTensor, StoredTensors, read_header
from jaxtp.hf.saving import json_bytes, write_folder
from jaxtp.hf.tensor_map import (
    HEAD,
    TABLE,
    Parameters,
    TensorPart,
    TensorParts,
    dims,
    group_by_tensor,
    layout_of,
    name_of,
    split_path,
    tensor_parts,
)
from jaxtp.layers.experts import EXPERT_TARGETS
from jaxtp.layers.lora import TARGETS, LoraConfig, Target, freeze_state
from jaxtp.layers.parameter import DType, logical_shape
from jaxtp.mesh import current_mesh
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder, abstract_decoder

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
"""Beginning of every tensor's name."""
_TOKENS = "trainable_token_indices"
_ROWS = ".token_adapter.trainable_tokens_delta"
"""Attribute with the tokens whose rows are trained, and the end of the names of these rows, which
replace those of the base model."""
_SAVED = "modules_to_save"
"""Attribute with the modules of tables of which all rows are trained."""
_NAMING = {"target_modules", "rank_pattern", "alpha_pattern", _TOKENS, _SAVED}
"""Attributes with names of modules."""
_TENSOR = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight")
_ATTRIBUTES = """
    peft_type r lora_alpha use_rslora lora_dropout bias target_modules exclude_modules
    layers_to_transform layers_pattern init_lora_weights fan_in_fan_out task_type
    target_parameters rank_pattern alpha_pattern
    base_model_name_or_path revision auto_mapping inference_mode peft_version megatron_core
    qalora_group_size runtime_config eva_config ensure_weight_tying trainable_token_indices
    modules_to_save
"""
"""Attributes that an import reads; those from base_model_name_or_path on have no effect on outputs,
or only with another attribute, which is refused."""
# PEFT's first version with these A and B of stacked experts; older ones exchanged them
_VERSION = "0.19.0"
_CHOICES = ("exclude_modules", "layers_to_transform", "layers_pattern")
"""Attributes that choose among the modules that `target_modules` names."""
REFUSED_BY_PEFT = {"falcon_h1", "mamba2", "nemotron_h"}
"""Families whose `out_proj` can have no adapter in PEFT."""
_INITS_THAT_KEEP_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that do not change the kernels, unlike pissa and others."""


_Modules = TensorParts
"""The parts of each tensor that can have an adapter, by its name in transformers' memory; a part is
a kernel."""
# A model's adapters by kernel
_Adapters = Mapping[str, Adapter]


def _modules(config: ModelConfig, family: Family, layout: Layout) -> _Modules:
    abstract = abstract_decoder(replace(config, lora=LoraConfig()))[1]
    parameters = named_variables(nnx.filter_state(abstract, nnx.Param))
    kernels = adapters(replace(config, lora=LoraConfig(rank=1)))
    order = {kernel: i for i, kernel in enumerate(kernels)}
    # All but experts in modules have the names of memory: Granite's files stack experts in modules.
    in_modules = {tensor.path for tensor in family.tensors if EXPERT in tensor.name}
    experts = {path: parameters[path] for path in order if split_path(path)[1] in in_modules}
    shared = {path: parameters[path] for path in parameters.keys() - experts.keys()}
    named = chain(
        tensor_parts(experts, config, family, layout),
        tensor_parts(shared, config, family, "stacked"),
    )
    parts = [
        replace(part, name=_in_memory(part.name, family)) for part in named if part.path in order
    ]
    return group_by_tensor(sorted(parts, key=lambda part: order[part.path]))


def _in_memory(module: str, family: Family) -> str:
    # The name in transformers' memory. Multimodal models and files have other names, and so did
    # older versions.
    module = _renamed(module, family)
    in_memory = family.prefix if family.wrapper is None else family.wrapper.in_memory
    for prefix, _ in (*TEXT_PREFIXES, (family.prefix, "")):
        if module.startswith(prefix):
            return in_memory + module.removeprefix(prefix)
    return module


def _renamed(value: Any, family: Family) -> Any:
    """Returns a name, or the names in an attribute, as `family.renamed` has them."""
    if isinstance(value, str):
        for stored, loaded in family.renamed.items():
            value = value.replace(stored, loaded)
    elif isinstance(value, list):
        value = [_renamed(name, family) for name in value]
    elif isinstance(value, dict):
        value = {_renamed(name, family): value[name] for name in value}
    return value


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
    variables: Parameters,
    *,
    diagonal: bool,
) -> TensorParts:
    """Returns the parts of each A, then of each B, by the tensor's name.

    B is block-diagonal if `diagonal` and it has several parts. A part without an adapter has zeros.
    """
    stems = _stems(adapted)
    parts = []
    for factor, (name, kernels) in product("AB", adapted.items()):
        for i, kernel in enumerate(kernels):
            if kernel.path not in trained:
                continue
            lora = trained[kernel.path].lora
            *experts, inputs, rank = logical_shape(variables[f"{lora}.a"])[1:]
            stacked = experts if kernel.expert is None else []
            first = i * rank if diagonal else 0
            ranks = rank * len(kernels) if diagonal else rank
            joined = math.prod(stacked) * ranks
            part = TensorPart(
                f"{lora}.{factor.lower()}",
                _tensor_name(stems[name], factor),
                kernel.index,
                transposed=True,
                shape=(*stacked, ranks, inputs),
                first=first,
                expert=kernel.expert,
                stored=(joined, inputs),
            )
            if factor == "B":
                outputs = kernel.ordered_shape[-1]
                part = replace(
                    part,
                    shape=(outputs, ranks, *stacked),
                    first=kernel.first,
                    columns=kernel.columns,
                    stored=(outputs, joined),
                    inner=first,
                    experts_last=bool(stacked),
                )
            parts.append(part)
    return group_by_tensor(parts)


def _row_modules(config: ModelConfig, family: Family) -> dict[str, str]:
    """Returns the modules in transformers' memory of tables, by the paths of their `token_rows`."""
    tables = [TABLE] if config.tie_embeddings else [TABLE, HEAD]
    return {
        ROWS[path]: _in_memory(name_of(path, family), family).removesuffix(".weight")
        for path in tables
    }


def _row_parts(config: ModelConfig, family: Family) -> dict[str, list[TensorPart]]:
    """Returns the trained rows of tables by the name of their tensor; empty without any."""
    lora = config.lora
    parts: dict[str, list[TensorPart]] = {}
    if not (lora.tokens or lora.tables):
        return parts
    shape = (config.vocab_size if lora.tables else len(lora.tokens), config.d_model)
    for path, module in _row_modules(config, family).items():
        name = f"{PREFIX}{module}{'.weight' if lora.tables else _ROWS}"
        parts[name] = [TensorPart(path, name, None, transposed=False, shape=shape)]
    return parts


def _row_attributes(config: ModelConfig, family: Family) -> MutableAttributes:
    lora = config.lora
    names = [module.rpartition(".")[2] for module in _row_modules(config, family).values()]
    if lora.tables:
        return {_SAVED: names}
    return {_TOKENS: {name: list(lora.tokens) for name in names}} if lora.tokens else {}


def save_adapters(
    model: Decoder,
    path: str | Path,
    *,
    base: str | Path | None = None,
    family: str | None = None,
    tokenizer_from: str | Path | None = None,
    dtype: DType | None = None,
    experts: Layout = "stacked",
    allow_non_finite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes a model's adapters, from any mesh, for `peft.PeftModel.from_pretrained`.

    Layers whose adapters are all zero are left out: `load_adapters` fills layers without adapters
    with zeros.

    Args:
      path: a new or empty folder; appears when complete.
      base: base model folder to record; without it, users name it when they load the adapters.
      family, tokenizer_from, dtype, experts, allow_non_finite, progress: see `save`.

    Raises:
      NonFiniteError: a weight is not finite, unless `allow_non_finite`.
      HFError: the model has no adapters, no family can represent it, or the folder is not writable.
    """
    _check_base(base)
    config = model.config
    if not config.lora.rank:
        raise HFError("the model has no adapters; write all of it by jaxtp.hf.save")
    chosen = choose_family(replace(config, lora=LoraConfig()), family)
    trained = adapters(config)
    variables = named_variables(nnx.state(model, nnx.LoRAParam))
    modules = _modules(config, chosen, experts)
    arrays = {kernel: variables[f"{adapter.lora}.a"][...] for kernel, adapter in trained.items()}
    trainable = {name: kernels for name, kernels in modules.items() if _trained(kernels, trained)}
    used = _nonzero_modules(trainable, arrays) or trainable
    diagonal = not _have_equal_a(trainable.values(), arrays)
    parts = {
        **_factors(used, trained, variables, diagonal=diagonal),
        **_row_parts(config, chosen),
    }
    # A vision tower has modules of the same names.
    are_short = len(used) == len(trainable) and chosen.wrapper is None
    attributes = _peft_config(config, used, are_short=are_short, diagonal=diagonal)
    attributes |= _row_attributes(config, chosen)
    attributes["base_model_name_or_path"] = None if base is None else str(base)
    _report_refused(chosen, used)
    write_folder(
        Path(path),
        variables,
        {WEIGHTS: parts},
        {CONFIG: json_bytes(attributes)},
        dtype or config.lora.dtype,
        tokenizer_from=tokenizer_from,
        allow_non_finite=allow_non_finite,
        progress=progress,
    )


def _report_refused(family: Family, modules: Iterable[str]) -> None:
    is_refused = any(name.endswith("out_proj.weight") for name in modules)
    if family.model_type in REFUSED_BY_PEFT and is_refused and jax.process_index() == 0:
        say(
            f"PEFT refuses adapters of out_proj in a {family.model_type}; without o_proj in "
            "--model.lora.targets it reads all others"
        )


def _trained(kernels: Iterable[TensorPart], trained: Container[str]) -> list[TensorPart]:
    return [kernel for kernel in kernels if kernel.path in trained]


def _nonzero_modules(modules: _Modules, arrays: Mapping[str, Array]) -> _Modules:
    nonzero = {kernel: _on_host(_nonzero_layers, a) for kernel, a in arrays.items()}
    used = {}
    for name, kernels in modules.items():
        if any(nonzero[kernel.path][kernel.index] for kernel in _trained(kernels, arrays)):
            used[name] = kernels
    return used


def _have_equal_a(modules: Iterable[Sequence[TensorPart]], arrays: Mapping[str, Array]) -> bool:
    """Returns whether the kernels of each module have the same A."""
    # A dict, not a set: the processes compare arrays together, so all need the same order.
    pairs: dict[tuple[str, str], None] = {}
    for kernels in modules:
        first, *other_paths = (kernel.path for kernel in _trained(kernels, arrays))
        pairs |= dict.fromkeys((first, path) for path in other_paths)
    return all(_on_host(jnp.array_equal, arrays[first], arrays[path]) for first, path in pairs)


def _nonzero_layers(stacked: Array) -> Array:
    return jnp.any(stacked != 0, axis=range(1, stacked.ndim))


def _on_host(function: Callable[..., Array], *arrays: Array) -> NDArray[np.bool_]:
    """Computes on the arrays' mesh, for every process."""
    sharding = arrays[0].sharding
    replicated = None
    if isinstance(sharding, NamedSharding):
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
    return np.asarray(jax.jit(function, out_shardings=replicated)(*arrays))


def _peft_config(
    config: ModelConfig, adapted: _Modules, *, are_short: bool, diagonal: bool
) -> MutableAttributes:
    lora = config.lora
    modules = list[str]()
    parameters = list[str]()
    counts = dict[str, int]()
    # In a model with experts, PEFT takes other modules of these names for experts, from version
    # 0.19 on.
    last_names = {name: name.removesuffix(".weight").rpartition(".")[2] for name in adapted}
    mixed = set()
    for name, (kernel, *_) in adapted.items():
        is_mlp = last_names[name] in EXPERT_TARGETS.values() and not _is_stacked(kernel)
        if is_mlp and config.most_experts and kernel.expert is None:
            mixed.add(name)
    for name, kernels in adapted.items():
        is_parameter = name in mixed or _is_stacked(kernels[0])
        full_name = name if is_parameter else name.removesuffix(".weight")
        in_layer = re.split(r"\.\d+\.", full_name, maxsplit=1)[-1]
        names = parameters if is_parameter else modules
        if not are_short:
            names.append(full_name)
        elif is_parameter:
            names.append(in_layer)
        elif kernels[0].expert is None:
            names.append(last_names[name] if last_names[name] in TARGETS else in_layer)
        else:
            names.append(in_layer if mixed else last_names[name])
        if len(kernels) > 1 and diagonal:
            counts[in_layer] = len(kernels)
    first_kernels = [kernels[0] for kernels in adapted.values()]
    rslora = lora.rslora and all(kernel.expert is None for kernel in first_kernels)
    # PEFT doubles rank and alpha for a fused kernel, which keeps the scale only without rslora.
    alpha = lora.alpha if rslora == lora.rslora else lora.scale * lora.rank
    attributes: MutableAttributes = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": plain_number(alpha),
        "use_rslora": rslora,
        "lora_dropout": 0.0,
        "target_modules": list(dict.fromkeys(modules)),
        "bias": "none",
        "fan_in_fan_out": not all(
            kernel.transposed or _is_stacked(kernel) for kernel in first_kernels
        ),
        "inference_mode": True,
    }
    if parameters:
        attributes["target_parameters"] = list(dict.fromkeys(parameters))
        attributes["peft_version"] = _VERSION
    if counts:
        root = math.sqrt if rslora else float
        attributes["rank_pattern"] = {name: count * lora.rank for name, count in counts.items()}
        attributes["alpha_pattern"] = {
            name: plain_number(root(count) * alpha) for name, count in counts.items()
        }
    return attributes


@dataclass(frozen=True)
class PeftFolder:
    """A folder of adapters that fit a model; their weights are not read yet."""

    path: Path
    lora: LoraConfig
    tensors: StoredTensors
    parts: TensorParts
    """Parts of each tensor, by the tensor's name."""
    notes: tuple[str, ...]
    """Messages to print before training."""


def load_adapters(model: Decoder, path: str | Path, *, family: str | None = None) -> Decoder:
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
    """Returns a copy of a model with an open folder's adapters; see `load_adapters`."""
    print_notes(folder.path, folder.notes)
    graph, abstract = abstract_decoder(replace(model.config, lora=folder.lora))
    weights = nnx.state(model)
    rows = initial_rows(weights, abstract, folder.lora)
    read = read_peft(folder, abstract, mesh)
    return nnx.merge(graph, nnx.merge_state(freeze_state(weights), rows, read))


def read_peft(folder: PeftFolder, abstract: nnx.State, mesh: Mesh | None) -> nnx.State:
    """Reads the adapters of an abstract state, in its shapes and shardings.

    Rows of tokens that the folder lacks are left out.
    """
    paths = {part.path for part in chain.from_iterable(folder.parts.values())}
    lacking = {*ROWS.values()} - paths
    factors = nnx.filter_state(abstract, nnx.LoRAParam)
    factors = select_paths(factors, lambda path: path not in lacking)
    return load_tensors(folder.tensors, folder.parts, factors, mesh)


def open_peft(path: Path, config: ModelConfig, family: str | None = None) -> PeftFolder:
    """Opens a folder of adapters.

    Raises `HFError` if they are unreadable, unsupported, or do not fit the model.
    """
    attributes = read_attributes(path, CONFIG, "PEFT's format")
    base = attributes.get("base_model_name_or_path")
    _check_base(base)
    plain = replace(config, lora=LoraConfig())
    with prefix_errors(path):
        _check_attributes(attributes)
        tensors, notes = without_wrappers(_read_tensors(path))
    with prefix_errors(f"{path}, made for {truncate(base, 200)}" if base else path):
        chosen = choose_family(plain, family)
        names = {name: _renamed(attributes[name], chosen) for name in _NAMING & attributes.keys()}
        folder = _match_model(path, tensors, {**attributes, **names}, plain, chosen)
    return replace(folder, notes=(*notes, *folder.notes))


def _check_base(base: object) -> None:
    if isinstance(base, str | Path) and os.path.isfile(Path(base) / MODEL_CONFIG):
        with prefix_errors(Path(base)):
            check_adaptable(read_attributes(Path(base)))


def _check_attributes(attributes: Attributes) -> None:
    problems = []
    kind = attributes.get("peft_type")
    if kind != "LORA":
        problems.append(f"peft_type = {quote(kind)} is not supported, only 'LORA'")
    bias = attributes.get("bias", "none")
    if bias not in ("none", None):
        problems.append(
            f"bias = {quote(bias)} is not supported, only 'none': biases are not trained with "
            "adapters"
        )
    init = attributes.get("init_lora_weights", True)
    if init not in _INITS_THAT_KEEP_BASE:
        problems.append(
            f"init_lora_weights = {quote(init)} is not supported: it also changes the kernels; "
            "PEFT can convert the adapters (path_initial_model_for_weight_conversion)"
        )
    if attributes.get("lora_dropout"):
        positive("lora_dropout", attributes["lora_dropout"])
    allowed = _ATTRIBUTES.split()
    for name, value in attributes.items():
        if name not in allowed and value not in (None, False, {}, []):
            problems.append(
                f"{truncate(name)} = {quote(value)} is not supported, only LoRA with PEFT's "
                "defaults"
            )
    if problems:
        raise HFError(join_problems(problems))


class _StoredModule(NamedTuple):
    """A module with an adapter in a file."""

    kernels: Sequence[TensorPart]
    a: StoredTensor
    b: StoredTensor


def _match_model(
    path: Path, stored: StoredTensors, attributes: Attributes, config: ModelConfig, family: Family
) -> PeftFolder:
    lora_of_rows, rows, stored = _split_rows(stored, attributes, config, family)
    parameters = _names("target_parameters", attributes)
    modules = _modules(config, family, layout_of(stored) if parameters else "separate")
    possible = {
        name: kernels
        for name, kernels in modules.items()
        if not _is_stacked(kernels[0]) or _suffixes(name) & parameters
    }
    stems = _stems(possible)
    stored = _check_tensors(stored, dict.fromkeys(stems.values()), config, family)
    adapted = _stored_modules(possible, stems, stored, attributes)
    _check_names(attributes, stems, adapted)
    lora, diagonal = _lora_config(attributes, adapted)
    trained = adapters(replace(config, lora=lora))
    lora = replace(
        lora,
        targets=_used_targets(trained, adapted, diagonal=diagonal),
        tokens=lora_of_rows.tokens,
        tables=lora_of_rows.tables,
    )
    config = replace(config, lora=lora)
    trained = adapters(config)
    variables = named_variables(nnx.filter_state(abstract_decoder(config)[1], nnx.LoRAParam))
    adapted_kernels = {name: module.kernels for name, module in adapted.items()}
    parts = _factors(adapted_kernels, trained, variables, diagonal=diagonal)
    tensors = {
        name: replace(stored[name], shape=kernels[0].shape) for name, kernels in parts.items()
    }
    row_parts = _row_parts(config, family)
    parts = {**parts, **{name: row_parts[name] for name in rows}}
    tensors |= rows
    trainable = [kernels for kernels in modules.values() if _trained(kernels, trained)]
    notes = tuple(_notes(attributes, len(adapted), len(trainable)))
    return PeftFolder(path, lora, tensors, parts, notes)


def _tokens(attributes: Attributes, config: ModelConfig, family: Family) -> tuple[int, ...]:
    """Returns the tokens whose rows are trained; raises `HFError` if tables have different ones."""
    value = attributes.get(_TOKENS)
    if not value:
        return ()
    names = [module.rpartition(".")[2] for module in _row_modules(config, family).values()]
    lists: list[Any] = [value]
    if isinstance(value, dict):
        lists = list(value.values())
        for name in value:
            if name.rpartition(".")[2] not in names:
                raise HFError(
                    f"{_TOKENS} of {quote(name)} is not supported, only {', '.join(names)}"
                )
    tokens = lists[0]
    is_list = isinstance(tokens, list) and set(map(type, tokens)) == {int}
    if not is_list or len({*tokens}) < len(tokens) or any(other != tokens for other in lists):
        raise HFError(
            f"{_TOKENS} = {quote(value)}: should be different ids, for all tables the same"
        )
    if min(tokens) < 0 or max(tokens) >= config.vocab_size:
        raise HFError(
            f"{_TOKENS} has the id {max(tokens)}, and the model has {config.vocab_size} rows; "
            f"--model.add-tokens or --model.vocab-size {max(tokens) + 1} of jaxtp train adds rows"
        )
    return tuple(tokens)


def _split_rows(
    stored: StoredTensors, attributes: Attributes, config: ModelConfig, family: Family
) -> tuple[LoraConfig, dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Returns which rows of tables are trained, these by their names, and the other tensors.

    PEFT also saves tables by themselves where the model got more rows.
    """
    modules = _row_modules(config, family)
    tokens = _tokens(attributes, config, family)
    ends = product(modules.values(), (".weight", _ROWS))
    possible = {f"{PREFIX}{module}{end}" for module, end in ends}
    rows: dict[str, StoredTensor] = {}
    factors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        in_memory = PREFIX + _in_memory(name.removeprefix(PREFIX), family)
        if in_memory in possible:
            rows[in_memory] = tensor
        else:
            factors[name] = tensor
    tables = any(name.endswith(".weight") for name in rows)
    lora = LoraConfig(rank=1, tokens=() if tables else tokens, tables=tables)
    parts = _row_parts(replace(config, lora=lora), family)
    for name, tensor in rows.items():
        shape = parts[name][0].shape if name in parts else (len(tokens), config.d_model)
        if name not in parts or tensor.shape != shape or tensor.dtype not in DTYPES:
            raise HFError(
                f"{truncate(tensor.name, 200)} is {tensor.dtype} {dims(tensor.shape)}, and this "
                f"model needs {dims(shape)}; --model.add-tokens or --model.vocab-size of jaxtp "
                "train gives it more rows"
            )
    needed = {f"{PREFIX}{modules[ROWS[TABLE]]}{_ROWS}"} if tokens else set()
    for saved in _names(_SAVED, attributes):
        matching = [name for name in possible if saved in _suffixes(name.removesuffix(".weight"))]
        if not matching:
            raise HFError(
                f"{_SAVED} = {quote(attributes[_SAVED])} is not supported, only "
                f"{' and '.join(modules.values())}"
            )
        needed.update(matching)
    missing = sorted(needed - rows.keys())
    if missing:
        raise HFError(f"missing: {missing[0]}, which {CONFIG} requires")
    return lora, rows, factors


def _notes(attributes: Attributes, num_adapted: int, num_trainable: int) -> Iterator[str]:
    if attributes.get("lora_dropout"):
        yield f"lora_dropout = {quote(attributes['lora_dropout'])} is not applied"
    if num_adapted < num_trainable:
        yield (
            f"{num_adapted} of {num_trainable} modules have an adapter; the others are not trained"
        )


def _stored_modules(
    possible: _Modules,
    stems: Mapping[str, str],
    stored: StoredTensors,
    attributes: Attributes,
) -> dict[str, _StoredModule]:
    """Returns the modules with adapters; raises `HFError` if an old version of PEFT wrote them."""
    numbers = re.findall(r"\d{1,4}", str(attributes.get("peft_version")))
    is_old = [int(number) for number in numbers[:2]] < [0, 19]
    modules = {}
    for name, kernels in possible.items():
        a = stored.get(_tensor_name(stems[name], "A"))
        if a is None:
            continue
        kernel = kernels[0]
        outputs = kernel.ordered_shape[-1:]
        # For square kernels, only the version tells.
        if is_old and _is_stacked(kernel) and kernel.transposed and a.shape[1:] == outputs:
            raise HFError(
                f"{truncate(a.name, 200)}: PEFT before {_VERSION}, or of a version that the "
                "configuration does not name, exchanged A and B of experts that are stacked in one "
                "parameter; merge them into the model by that version: merge_and_unload()"
            )
        modules[name] = _StoredModule(kernels, a, stored[_tensor_name(stems[name], "B")])
    return modules


def _used_targets(
    trained: _Adapters, adapted: Mapping[str, _StoredModule], *, diagonal: bool
) -> tuple[Target, ...]:
    """Returns the targets of the kernels that have an adapter; reads A if B is block-diagonal."""
    used = set()
    for module in adapted.values():
        kernels = module.kernels
        if diagonal and len(kernels) > 1:
            # One row of ranks for each stacked expert: [E, kernels, r * in]
            blocks = module.a.read().reshape(_num_stacked(kernels[0]), len(kernels), -1)
            has_adapter = (blocks != 0).any(axis=(0, 2))
            kernels = list(compress(kernels, has_adapter)) or kernels
        used |= {trained[kernel.path].target for kernel in kernels}
    return tuple(filter(used.__contains__, TARGETS))


def _read_tensors(path: Path) -> dict[str, StoredTensor]:
    try:
        weights = reading.inside(path, WEIGHTS)
    except OSError as error:
        raise HFError(f"{path / WEIGHTS}: {error.strerror}") from None
    if not weights.exists():
        raise HFError(
            explain_pickle(path, "peft") or explain_gguf(path) or f"no {WEIGHTS} is there"
        )
    stored = read_header(weights)
    if not stored:
        raise HFError(f"{WEIGHTS} holds no adapters")
    return stored


def _check_tensors(
    tensors: StoredTensors,
    possible: Collection[str],
    config: ModelConfig,
    family: Family,
) -> dict[str, StoredTensor]:
    """Returns tensors by their names in memory.

    Checks that they are float factors of `possible` modules, in pairs.
    """
    in_layers = [re.sub(r"\.\d+\.", ".*.", stem).partition(".*.")[2] for stem in possible]
    kinds = ", ".join(dict.fromkeys(in_layers))
    in_memory: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise HFError(f"{truncate(name, 200)} is not supported, only adapters of {kinds}")
        module = _in_memory(match[1], family)
        if module not in possible:
            raise HFError(
                f"adapters of {truncate(match[1], 200)} are not supported in a "
                f"{family.model_type} of {config.num_layers} layers, only of {kinds}"
            )
        if tensor.dtype not in DTYPES:
            raise HFError(
                f"{truncate(name, 200)} is {tensor.dtype}, not float32, bfloat16 or float16"
            )
        other = in_memory.setdefault(_tensor_name(module, match[2]), tensor)
        if other is not tensor:
            raise HFError(
                f"{truncate(other.name, 200)} and {truncate(name, 200)} are the same adapter; "
                "remove one"
            )
    for module in possible:
        missing = {_tensor_name(module, "A"), _tensor_name(module, "B")} - in_memory.keys()
        if len(missing) == 1:
            raise HFError(f"missing: {missing.pop()}")
    return in_memory


def _lora_config(
    attributes: Attributes, adapted: Mapping[str, _StoredModule]
) -> tuple[LoraConfig, bool]:
    """Returns the settings, and whether the B of several projections is block-diagonal.

    Checks all shapes.
    """
    rslora = switch("use_rslora", attributes.get("use_rslora") or False)
    rank = whole("r", attributes.get("r"))
    alpha = positive("lora_alpha", attributes.get("lora_alpha"))
    rank_of = _pattern(attributes, "rank_pattern", rank, whole)
    alpha_of = _pattern(attributes, "alpha_pattern", alpha, positive)
    parameters = _names("target_parameters", attributes)
    configs: dict[str, LoraConfig] = {}
    for name, module in adapted.items():
        target = name if _suffixes(name) & parameters else name.removesuffix(".weight")
        _check_shapes(rank_of(target), module)
        configs[name] = LoraConfig(rank=rank_of(target), alpha=alpha_of(target), rslora=rslora)
    fused = {name: module for name, module in adapted.items() if len(module.kernels) > 1}
    diagonal = bool(fused) and all(
        configs[name].rank == len(module.kernels) * rank
        and _is_block_diagonal(module.b, module.kernels)
        for name, module in fused.items()
    )
    first, common = next(iter(configs.items()))
    if diagonal:
        first = "r"
        common = LoraConfig(rank=rank, alpha=alpha, rslora=rslora)
    for name, lora in configs.items():
        count = len(adapted[name].kernels) if diagonal else 1
        same_scale = math.isclose(lora.scale, common.scale, rel_tol=1e-6)
        if lora.rank != count * common.rank or not same_scale:
            raise HFError(
                f"{name} has rank {lora.rank} and scale {lora.scale:.4g}, unlike {first} with "
                f"{common.rank} and {common.scale:.4g}; jaxtp has one rank and one scale for all "
                "adapters. PEFT can merge them into the model: merge_and_unload()"
            )
    return common, diagonal


_Value = TypeVar("_Value")


def _pattern(
    attributes: Attributes, name: str, default: _Value, check: Callable[[str, object], _Value]
) -> Callable[[str], _Value]:
    """Returns a function from the name of a module or parameter to its value.

    `attributes[name]` has the values by pattern.
    """
    patterns = attributes.get(name) or {}
    if not isinstance(patterns, dict):
        raise HFError(f"{name} = {quote(patterns)}: should be an object")
    values: dict[str, _Value] = {}
    for pattern, value in patterns.items():
        end = pattern.removeprefix(r".*\.").replace(r"\.", ".")
        values[end] = check(name, value)
        if not re.fullmatch(r"[\w.]+", end):
            raise HFError(
                f"{name}: {quote(end)} is not evaluated, only names of modules and parameters"
            )
    return lambda target: next((values[end] for end in values if end in _suffixes(target)), default)


def _num_stacked(kernel: TensorPart) -> int:
    """Returns the number of experts that are stacked in a kernel's module, or 1."""
    return kernel.shape[0] if _is_stacked(kernel) else 1


def _check_shapes(rank: int, module: _StoredModule) -> None:
    a = module.a
    b = module.b
    *_, inputs, outputs = module.kernels[0].ordered_shape
    experts = _num_stacked(module.kernels[0])
    times = f" for each of {experts} experts" if experts > 1 else ""
    for tensor, shape in ((a, (rank * experts, inputs)), (b, (outputs, rank * experts))):
        if tensor.shape != shape:
            raise HFError(
                f"{truncate(tensor.name, 200)} is {dims(tensor.shape)}, and this model needs "
                f"{dims(shape)} with r = {rank}{times}"
            )


def _is_block_diagonal(b: StoredTensor, parts: Sequence[TensorPart]) -> bool:
    """Returns whether the output dims of each part use only its ranks; reads the tensor."""
    owners = np.zeros(b.shape[0], np.int64)
    for i, part in enumerate(parts):
        owners[slice(part.first, None) if part.columns is None else part.columns] = i
    by_part = b.read().reshape(len(owners), len(parts), -1)
    by_part[np.arange(len(owners)), owners] = 0
    return not (by_part != 0).any()


def _names(name: str, attributes: Attributes) -> set[str]:
    value = attributes.get(name)
    if value is None:
        return set()
    if isinstance(value, list) and set(map(type, value)) <= {str}:
        return set(value)
    raise HFError(f"{name} = {quote(value)}: should be a list of names, or an expression")


def _check_names(
    attributes: Attributes,
    stems: Mapping[str, str],
    adapted: Container[str],
) -> None:
    """Compares the adapted modules with the lists of names in the configuration.

    With anything else in it that chooses modules, the tensors alone decide.
    """
    chosen = [name for name in _CHOICES if attributes.get(name) not in (None, [])]
    if chosen or isinstance(attributes.get("target_modules"), str):
        return
    included = _names("target_modules", attributes)
    parameters = _names("target_parameters", attributes)
    for name, module in stems.items():
        is_named = _suffixes(name) & parameters
        if name.endswith(".weight"):
            is_named |= _suffixes(module) & included
        tensor = _tensor_name(module, "A")
        if is_named and name not in adapted:
            raise HFError(f"missing: {tensor}, which {CONFIG} requires")
        if name in adapted and not is_named:
            raise HFError(f"unexpected: {tensor}, which {CONFIG} does not name")


def _suffixes(module: str) -> set[str]:
    words = module.split(".")
    return {".".join(words[at:]) for at in range(len(words))}
