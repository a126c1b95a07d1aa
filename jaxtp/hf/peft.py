"""A model's adapters into a folder as PEFT has it: adapter_config.json and adapter_model.safetensors.

https://huggingface.co/docs/peft/developer_guides/checkpoint says what is in one.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxtp.checkpoint.logical import named_variables
from jaxtp.checkpoint.safetensors import DTYPES, write_file
from jaxtp.hf.adapters import Adapter, adapters
from jaxtp.hf.attributes import choose_family
from jaxtp.hf.folder import HFError
from jaxtp.hf.load import Progress
from jaxtp.hf.names import Place, by_tensor, split_path
from jaxtp.hf.writing import SPELLED, DType, Gathered, appearing, tokenizer_files, write_json
from jaxtp.layers.lora import LoraConfig, LoraParam
from jaxtp.layers.parameter import logical_shape
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder
from jaxtp.models.families.family import LAYER, Family, Tensor

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_FACTORS = {"a": "lora_A", "b": "lora_B"}


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
    tensors = by_tensor(_places(config, variables, chosen))
    copied = {} if tokenizer_from is None else tokenizer_files(Path(tokenizer_from))
    gather = Gathered(variables, tensors, DTYPES[stored_as], progress)
    if jax.process_index() != 0:
        for name in tensors:  # what the first process writes is gathered by all
            gather(name)
        return
    with appearing(Path(path)) as folder:
        write_file(folder / WEIGHTS, {name: (stored_as, part.shape) for name, (part, *_) in tensors.items()}, gather)
        write_json(folder / CONFIG, _described(config, chosen, base))
        for file, content in copied.items():
            (folder / file).write_bytes(content)


def _places(config: ModelConfig, variables: dict[str, nnx.Variable[Any]], family: Family) -> Iterator[Place]:
    for adapter in adapters(config):
        module = _tensor(adapter, family).theirs.removesuffix(".weight")
        for factor in _FACTORS:
            yield from _layers(adapter, module, factor, logical_shape(variables[f"{adapter.lora}.{factor}"]))


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


def _layers(adapter: Adapter, module: str, factor: str, shape: tuple[int, ...]) -> Iterator[Place]:
    """Yields where a factor of an adapter is, layer by layer; PEFT has `[out, in]`, as PyTorch's linear layers."""
    for index, layer in enumerate(adapter.layers):
        name = f"{_PREFIX}{module.replace(LAYER, str(layer))}.{_FACTORS[factor]}.weight"
        yield Place(f"{adapter.lora}.{factor}", name, index, transposed=True, shape=shape[:0:-1])


def _described(config: ModelConfig, family: Family, base: str | Path | None) -> dict[str, Any]:
    """Returns what PEFT's `LoraConfig` reads; all else is its default."""
    beside = {adapter.target: _tensor(adapter, family) for adapter in adapters(config)}
    modules = {target: tensor.theirs.removesuffix(".weight") for target, tensor in beside.items()}
    lora = config.lora
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [
            target if module.endswith(f".{target}") else module.partition(f"{LAYER}.")[2]
            for target, module in modules.items()
        ],
        "bias": "none",
        "fan_in_fan_out": not all(tensor.transposed for tensor in beside.values()),
        "inference_mode": True,
    }
