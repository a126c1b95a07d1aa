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
from jaxtp.hf.names import Place
from jaxtp.hf.writing import SPELLED, DType, Gathered, appearing, tokenizer_files, write_json
from jaxtp.layers.lora import LoraConfig, LoraParam
from jaxtp.layers.parameter import logical_shape
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder
from jaxtp.models.families.family import LAYER

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
    tensors = {place.theirs: place for place in _places(config, variables, family)}
    copied = {} if tokenizer_from is None else tokenizer_files(Path(tokenizer_from))
    gather = Gathered(variables, tensors, DTYPES[stored_as], progress)
    if jax.process_index() != 0:
        for name in tensors:  # what the first process writes is gathered by all
            gather(name)
        return
    with appearing(Path(path)) as folder:
        write_file(folder / WEIGHTS, {name: (stored_as, place.shape) for name, place in tensors.items()}, gather)
        write_json(folder / CONFIG, _described(config.lora, base))
        for file, content in copied.items():
            (folder / file).write_bytes(content)


def _places(config: ModelConfig, variables: dict[str, nnx.Variable[Any]], family: str | None) -> Iterator[Place]:
    chosen = choose_family(replace(config, lora=LoraConfig()), family)
    names = {tensor.ours: tensor.theirs for tensor in chosen.tensors}
    for adapter in adapters(config):
        module = names[adapter.kernel].removesuffix(".weight")
        for factor in _FACTORS:
            yield from _layers(adapter, module, factor, logical_shape(variables[f"{adapter.lora}.{factor}"]))


def _layers(adapter: Adapter, module: str, factor: str, shape: tuple[int, ...]) -> Iterator[Place]:
    """A factor of an adapter, layer by layer; PEFT has `[out, in]`, as PyTorch's linear layers."""
    for layer in range(shape[0]):
        name = f"{_PREFIX}{module.replace(LAYER, str(layer))}.{_FACTORS[factor]}.weight"
        yield Place(f"{adapter.lora}.{factor}", name, layer, transposed=True, shape=shape[:0:-1])


def _described(lora: LoraConfig, base: str | Path | None) -> dict[str, Any]:
    """What PEFT's `LoraConfig` reads; all else is its default."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
