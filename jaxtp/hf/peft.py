"""A model's adapters into a folder as PEFT has it: adapter_config.json and adapter_model.safetensors.

https://huggingface.co/docs/peft/developer_guides/checkpoint says what is in one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxtp.checkpoint.logical import named_variables
from jaxtp.checkpoint.safetensors import DTYPES, Block, write_file
from jaxtp.hf.adapters import Adapter, adapters
from jaxtp.hf.attributes import choose_family
from jaxtp.hf.folder import HFError
from jaxtp.hf.load import Progress
from jaxtp.hf.names import Place, by_tensor, split_path
from jaxtp.hf.writing import SPELLED, Gathered, appearing, tokenizer_files, write_json
from jaxtp.layers.lora import LoraConfig, LoraParam
from jaxtp.layers.parameter import DType, logical_shape
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder
from jaxtp.models.families.family import LAYER, Family, Tensor

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
    progress: Progress | None = None,
) -> None:
    """Writes the adapters of a model, from any mesh, as `peft.PeftModel.from_pretrained` reads them.

    Args:
      model: a model with adapters.
      path: a folder that is not there yet, or is empty; it appears when it is complete.
      base: the folder of the model beside them, which is recorded; if None, it has to be named where they are loaded.
      family: `model_type`; by default the first of the supported ones that can be this model.
      tokenizer_from: a folder whose tokenizer files are copied.
      dtype: of the tensors; by default that of the parameters.
      progress: called as bytes are written.

    Raises:
      HFError: it has no adapters, no family can be this model, or the folder cannot be written.
    """
    config = model.config
    if not config.lora.rank:
        raise HFError("the model has no adapters; write all of it by save_hf")
    stored_as = SPELLED[dtype or config.precision.param]
    variables = named_variables(nnx.state(model, LoraParam))
    chosen = choose_family(replace(config, lora=LoraConfig()), family)
    having = _layers_with(config, variables)
    tensors = by_tensor(_places(having, variables, chosen))
    copied = {} if tokenizer_from is None else tokenizer_files(Path(tokenizer_from))
    gather = Gathered(variables, tensors, DTYPES[stored_as], progress)
    if jax.process_index() != 0:
        for name in tensors:  # what the first process writes is gathered by all
            gather(name)
        return
    with appearing(Path(path)) as folder:
        write_file(folder / WEIGHTS, {name: (stored_as, part.shape) for name, (part, *_) in tensors.items()}, gather)
        write_json(folder / CONFIG, _described(config, having, chosen, base))
        for file, content in copied.items():
            (folder / file).write_bytes(content)


_Having = Mapping[Adapter, list[int]]
"""Which of the layers that are stacked have an adapter; where PEFT's began with some layers, the others are zero."""


def _layers_with(config: ModelConfig, variables: dict[str, nnx.Variable[Any]]) -> _Having:
    some = {adapter: _is_some(variables[f"{adapter.lora}.a"][...]) for adapter in adapters(config)}
    found = {adapter: np.flatnonzero(layers).tolist() for adapter, layers in some.items()}
    return found if any(found.values()) else {adapter: [*range(len(adapter.layers))] for adapter in found}


def _is_some(stacked: Array) -> Block:
    """Returns which of the layers are not zero `[L]`, on every process."""
    sharding = stacked.sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    return np.asarray(jax.jit(lambda a: jnp.any(a != 0, axis=(1, 2)), out_shardings=everywhere)(stacked))


def _places(having: _Having, variables: dict[str, nnx.Variable[Any]], family: Family) -> Iterator[Place]:
    for adapter, layers in having.items():
        module = _tensor(adapter, family).theirs.removesuffix(".weight")
        for factor in FACTORS:
            shape = logical_shape(variables[f"{adapter.lora}.{factor}"])
            yield from _places_in(adapter, layers, module, factor, shape)


def _tensor(adapter: Adapter, family: Family) -> Tensor:
    """Returns the tensor that an adapter is beside.

    Raises:
      HFError: it is a part of a tensor: PEFT would have one adapter for all of it.
    """
    kernel = split_path(adapter.kernel)[1]
    (tensor,) = (tensor for tensor in family.tensors if tensor.ours == kernel)
    if sum(other.theirs == tensor.theirs for other in family.tensors) > 1:
        raise HFError(
            f"{adapter.target} of a {family.model_type} is a part of {tensor.theirs}, which has one adapter in PEFT; "
            "merge the adapters and export the model: --merged, or save_hf(merge_adapters(model))"
        )
    return tensor


def _places_in(
    adapter: Adapter, layers: Sequence[int], module: str, factor: str, shape: tuple[int, ...]
) -> Iterator[Place]:
    """Yields where a factor of an adapter is, layer by layer; PEFT has `[out, in]`, as PyTorch's linear layers."""
    for index in layers:
        name = f"{PREFIX}{module.replace(LAYER, str(adapter.layers[index]))}.{FACTORS[factor]}.weight"
        yield Place(f"{adapter.lora}.{factor}", name, index, transposed=True, shape=shape[:0:-1])


def _described(config: ModelConfig, having: _Having, family: Family, base: str | Path | None) -> dict[str, Any]:
    """Returns what PEFT's `LoraConfig` reads; all else is its default."""
    beside = {adapter.target: _tensor(adapter, family) for adapter in adapters(config)}
    modules = {target: tensor.theirs.removesuffix(".weight") for target, tensor in beside.items()}
    lora, names = config.lora, [_short(target, module) for target, module in modules.items()]
    if any(len(layers) < len(adapter.layers) for adapter, layers in having.items()):
        places = [(adapter, adapter.layers[index]) for adapter, layers in having.items() for index in layers]
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


def _short(target: str, module: str) -> str:
    """Returns the name that a projection has in every layer."""
    return target if module.endswith(f".{target}") else module.partition(f"{LAYER}.")[2]
