"""Modules are split over tp as transformers splits them, by its `base_model_tp_plan`."""

import pytest
from hf_reference import FOLDER
from tables import read_table

from jaxtp.checkpoint.logical import named_variables
from jaxtp.hf.config_json import family_of, model_config
from jaxtp.hf.families.family import LAYER
from jaxtp.hf.model_folder import read_attributes
from jaxtp.hf.tensor_map import alternatives, split_path
from jaxtp.layers.parameter import spec_of
from jaxtp.mesh import TP, axes_of
from jaxtp.models.decoder import abstract_decoder

DIM = read_table(__file__)
"""The dim of jaxtp's parameter that tp splits, by the last name of the module. The head is
`[V, D]`; kernels are `[in, out]`."""


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3_5", "deepseek_v3", "phi3", "gpt_neox"])
def test_modules_are_split_as_in_transformers(name):
    attributes = read_attributes(FOLDER / name)
    family = family_of(attributes, name)
    config = model_config(attributes, name, ())
    blocks = {stack: block for stack, _, block in config.kinds()}
    compared = 0
    for path, variable in named_variables(abstract_decoder(config)[1]).items():
        stack, general = split_path(path)
        tensor = alternatives(general, family, blocks.get(str(stack), config.block()))[0]
        *_, module = tensor.name.removesuffix(".weight").split(".")
        if module not in DIM or ".experts." in tensor.name:
            continue
        dims = list(spec_of(variable))[int(LAYER in tensor.name) :]
        split = [dim for dim, axes in enumerate(dims) if TP in axes_of(axes)]
        assert split == [dim for dim in [DIM[module]] if dim is not None], tensor.name
        compared += 1
    assert compared >= 5
