"""What we export, read by transformers and peft, and what peft writes, read by us: the logits
are the same.
"""

from dataclasses import replace
from functools import partial
from itertools import chain

import jax
import numpy as np
import pytest
from flax import nnx
from hf_folders import move_adapters, random_model, reference_tensors, stored_tensors, write_tensors
from hf_reference import FOLDER, model_types
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from support import use_mesh
from tables import read_json, read_table, write_json
from variants import small_model

import jaxtp
from jaxtp import add_adapters, hf, merge_adapters
from jaxtp.hf.config_json import family_of
from jaxtp.hf.families import ALIASES, FAMILIES, WRAPPERS
from jaxtp.hf.model_folder import read_attributes
from jaxtp.hf.peft import REFUSED_BY_PEFT
from jaxtp.hf.safetensors import read_header, with_scales
from jaxtp.layers.lora import LoraConfig
from jaxtp.models.block import adapter_kernels
from jaxtp.tools.convert.__main__ import main as convert

TABLES = read_table(__file__)

torch, transformers, peft = map(pytest.importorskip, ("torch", "transformers", "peft"))
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
# of libraries that are not ours
pytestmark = [pytest.mark.wide, pytest.mark.filterwarnings("ignore")]
READ = {*FAMILIES, *WRAPPERS, *ALIASES}
SOURCES = sorted(
    path.parent for path in FOLDER.glob("*/config.json") if model_types(path.parent.name) <= READ
)
make_references = pytest.importorskip("make_references")
conversion = pytest.importorskip("peft.utils.transformers_weight_conversion")
CONVERTED = {
    name
    for name, pattern in conversion._MODEL_TO_CONVERSION_PATTERN.items()
    if pattern in conversion._MOE_TARGET_MODULE_MAPPING
}
"""Families whose adapters in modules of experts PEFT reads; in others (Qwen2-MoE), it skips them
silently.
"""
PLAIN = small_model(vocab_size=256, num_layers=2, head_dim=6)
IDS = (np.arange(16).reshape(2, 8) * 5 % 37).astype(np.int32)
KINDS = TABLES["adapters"]


def loaded(folder):
    attributes = read_json(folder / "config.json")
    (architecture,) = attributes["architectures"]  # no AutoModel has them all
    dequantized = {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    model, info = getattr(transformers, architecture).from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        **(dequantized if "quantization_config" in attributes else {}),
    )
    assert not any(info[amiss] for amiss in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def theirs(folder, ids, adapters=None):
    """Returns logits of a folder in transformers, with adapters in peft."""
    model = loaded(folder)
    if adapters is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapters))
    return in_double(model, ids)


def in_double(model, ids):
    """Returns logits of a model of transformers or peft, computed in float64."""
    with torch.no_grad(), make_references.InDouble(margin=0):
        return (
            model.double()
            .eval()(torch.from_numpy(ids.astype(np.int64)), use_cache=False)
            .logits.numpy()
        )


@partial(jax.jit, static_argnums=0)
def logits_of(graph, state, ids):
    return nnx.merge(graph, state)(ids)


def ours(model, ids):
    return np.asarray(logits_of(*nnx.split(model), ids))


def test_mxfp4_is_what_transformers_reads(tmp_path):
    """Each byte with each scale but NaN, and a folder."""
    shape = (255, 16, 1, 16)
    arrays = {
        "e_blocks": np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 1, 16), shape),
        "e_scales": np.broadcast_to(np.arange(255, dtype=np.uint8)[:, None, None], shape[:-1]),
    }
    write_tensors(tmp_path / "it", arrays)
    found = with_scales(read_header(tmp_path / "it"), (1, 1))["e_blocks"].read()
    expected = mxfp4.convert_moe_packed_tensors(*(torch.tensor(array) for array in arrays.values()))
    assert_array_equal(found.view(np.uint16), expected.mT.contiguous().view(torch.uint16).numpy())
    folder = FOLDER / "gpt_oss_mxfp4"
    assert_allclose(theirs(folder, IDS), ours(hf.load(folder), IDS), atol=5e-5)


def test_every_family_is_a_reference():
    """But for types of text models that are read as others."""
    of_references = set().union(*(model_types(source.name) for source in SOURCES))
    assert of_references == READ - {"kimi_k2", "qwen2_vl_text", "exaone4_5_text"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_an_export_is_read_by_transformers_and_peft(source, tmp_path):
    """The model with adapters: beside it in peft, and merged; experts in one layout, and in the
    other.
    """
    family = family_of(read_attributes(source), source.name)
    name = model_type(source)
    whole = {"family": name} if family.wrapper is None else {"like": source}
    with np.load(source / "reference.npz") as reference:
        ids = reference["input_ids"].astype(np.int32)
    with use_mesh(1, 2, 2):
        model = hf.load(source)
        config = LoraConfig(rank=2, rslora=True)
        if name in REFUSED_BY_PEFT:  # PEFT refuses adapters of its out_proj
            kernels = chain(*map(adapter_kernels, model.config.block_kinds()))
            targets = {target for target, _ in kernels} - {"o_proj"}
            config = replace(config, targets=tuple(targets))
        adapted = move_adapters(add_adapters(model, config), scale=0.05)
        expected = ours(adapted, ids)
        layout = "stacked" if model.config.most_experts and family.wrapper is None else "separate"
        hf.save(merge_adapters(adapted), tmp_path / "merged", **whole, experts=layout)
        hf.save(model, tmp_path / "base", **whole)
        hf.save_adapters(adapted, tmp_path / "adapters", family=name)
        if name in CONVERTED:
            hf.save_adapters(
                adapted, tmp_path / "adapters of modules", family=name, experts="separate"
            )
    if family.wrapper is not None:
        kept, written = (others(folder, family.wrapper) for folder in (source, tmp_path / "merged"))
        assert kept
        assert written == kept
    assert_allclose(theirs(tmp_path / "merged", ids), expected, atol=1e-4)
    for adapters in tmp_path.glob("adapters*"):
        assert_allclose(theirs(tmp_path / "base", ids, adapters), expected, atol=1e-4)


def model_type(folder):
    family = family_of(read_attributes(folder), folder.name)
    return family.model_type if family.wrapper is None else family.wrapper.model_type


def others(folder, wrapper):
    """Returns dtype, shape and bytes of the tensors outside of the text model."""
    tensors = stored_tensors(folder)
    return {
        name: tensors[name]
        for name in tensors
        if name.removeprefix("model.").startswith(wrapper.other_tensors)
    }


def by_peft(base, folder, **settings):
    """Writes adapters of peft's, of which B is random; returns the logits."""
    torch.manual_seed(0)
    model = peft.get_peft_model(
        loaded(base), peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    ).eval()
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("lora_B", "trainable_tokens_delta", "modules_to_save")):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return in_double(model, IDS)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformers") / "base"
    hf.save(random_model(PLAIN), folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_peft_are_read_on_a_mesh_and_merged_by_the_command(kind, base, tmp_path):
    """And written back, and read by peft."""
    begun = by_peft(base, tmp_path / "theirs", **KINDS[kind])
    assert (
        convert(["export", str(base), str(tmp_path / "merged"), f"--adapters={tmp_path}/theirs"])
        == 0
    )
    assert_allclose(theirs(tmp_path / "merged", IDS), begun, atol=1e-4)
    assert_trained_on(base, begun, tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "llama_tied_bias"])
def test_rows_of_tokens_of_tied_tables(name, tmp_path):
    settings = {"r": 2, "target_modules": ["c_attn" if name == "gpt2" else "q_proj"]}
    settings["trainable_token_indices"] = [1, 30]
    begun = by_peft(FOLDER / name, tmp_path / "theirs", **settings)
    assert_trained_on(FOLDER / name, begun, tmp_path)


@pytest.mark.parametrize(("name", "modules", "parameters"), TABLES["trained"], ids=str)
def test_adapters_of_peft_are_trained_on(name, modules, parameters, tmp_path):
    """PEFT has one A for several projections in one tensor, we have one for each; PEFT's is
    theirs, in a row.
    """
    settings = {"r": 2, "target_modules": modules}
    if parameters:
        settings["target_parameters"] = [f"mlp.experts.{parameter}" for parameter in parameters]
    assert_trained_on(
        FOLDER / name, by_peft(FOLDER / name, tmp_path / "theirs", **settings), tmp_path
    )


@pytest.mark.parametrize(("name", "targets"), TABLES["some"], ids=str)
def test_adapters_of_some_projections_of_a_tensor(name, targets, tmp_path):
    """The others of its tensor have zeros."""
    with use_mesh(1, 2, 2):
        model = hf.load(FOLDER / name)
        adapted = move_adapters(
            add_adapters(model, LoraConfig(rank=2, targets=tuple(targets))), scale=0.05
        )
        hf.save_adapters(adapted, tmp_path / "ours", family=model_type(FOLDER / name))
        expected = ours(adapted, IDS)
        again = hf.load_adapters(model, tmp_path / "ours", family=model_type(FOLDER / name))
        assert_allclose(ours(again, IDS), expected, atol=1e-5)
    assert_allclose(theirs(FOLDER / name, IDS, tmp_path / "ours"), expected, atol=1e-4)


def test_all_linear_layers_of_a_model_with_experts_but_its_gate(tmp_path):
    """PEFT also adapts the gate of the shared expert, which has no adapter here."""
    base = FOLDER / "qwen3_5_moe"
    but = {"exclude_modules": ["shared_expert_gate"]}
    by_peft(base, tmp_path / "with it", r=2, target_modules="all-linear")
    with pytest.raises(
        jaxtp.errors.HFError, match=r"adapters of .*shared_expert_gate are not supported"
    ):
        hf.load_adapters(hf.load(base), tmp_path / "with it")
    begun = by_peft(base, tmp_path / "theirs", r=2, target_modules="all-linear", **but)
    assert_trained_on(base, begun, tmp_path)


OLDER = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}


@pytest.mark.parametrize("name", OLDER)
def test_adapters_of_peft_of_experts_in_modules(name, tmp_path):
    """As it did with transformers 4, and both read it now."""
    random = default_rng(0)
    tensors = {}
    for path, kernel in reference_tensors(name).items():
        if path.removesuffix(".weight").endswith(OLDER[name]):
            module = f"base_model.model.{path.removesuffix('.weight')}"
            for factor, shape in (("A", (2, kernel.shape[1])), ("B", (kernel.shape[0], 2))):
                tensors[f"{module}.lora_{factor}.weight"] = random.normal(
                    size=shape, scale=0.3
                ).astype(np.float32)
    folder = tmp_path / "theirs"
    folder.mkdir()
    write_tensors(folder / "adapter_model.safetensors", tensors)
    attributes = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 3,
        "target_modules": OLDER[name],
    }
    write_json(folder / "adapter_config.json", attributes)
    assert_trained_on(FOLDER / name, theirs(FOLDER / name, IDS, folder), tmp_path)


def assert_trained_on(base, begun, tmp_path):
    """PEFT's adapters in `theirs` are read, changed, merged, and read by PEFT."""
    family = model_type(base)
    with use_mesh(1, 2, 2):
        adapted = hf.load_adapters(hf.load(base), tmp_path / "theirs", family=family)
        assert_allclose(ours(adapted, IDS), begun, atol=1e-4)
        hf.save_adapters(adapted, tmp_path / "same", family=family)
        move_adapters(adapted, scale=0.05)
        hf.save_adapters(adapted, tmp_path / "ours", family=family)
        after = ours(adapted, IDS)
        assert_allclose(ours(merge_adapters(adapted), IDS), after, atol=1e-4)
    assert_allclose(theirs(base, IDS, tmp_path / "same"), begun, atol=1e-4)
    assert_allclose(theirs(base, IDS, tmp_path / "ours"), after, atol=1e-4)
    assert np.abs(after - begun).max() > 1e-3  # ten times what may differ
