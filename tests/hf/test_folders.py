"""Folders that hold more than a text model, fused and interleaved rows, float8 blocks: read, and
written back.
"""

import os
import shutil
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_folders import (
    assert_all_refused,
    assert_same,
    changed_tensors,
    float8,
    move_adapters,
    random_model,
    read_tensors,
    reference_attributes,
    reference_tensors,
    stored_tensors,
    values,
    write_model,
)
from hf_reference import FOLDER
from numpy.random import default_rng
from numpy.testing import assert_allclose
from support import assert_refused, swept, use_mesh
from tables import read_json, read_table, write_json

import jaxtp
from jaxtp import Precision, add_adapters, hf, make_mesh, merge_adapters
from jaxtp.hf.config_json import model_config
from jaxtp.hf.model_folder import open_folder
from jaxtp.hf.peft import open_peft
from jaxtp.hf.runs import load_base
from jaxtp.hf.safetensors import read_header
from jaxtp.hf.saving import atomic_folder, write_files
from jaxtp.layers.lora import LoraConfig
from jaxtp.tools.convert.__main__ import main as convert

BFLOAT16 = jnp.dtype("bfloat16")
TABLES = read_table(__file__)
VISION = {
    "vision_tower.embeddings.weight": np.arange(12).reshape(3, 4).astype(BFLOAT16),
    "vision_tower.position_ids": np.arange(5),
    "multi_modal_projector.weight": np.full((2, 2), np.nan, np.float32),
}
"""An integer and a value that is not finite: nothing of it is looked at."""
FORMS = {
    "older": ("language_model.model.", "language_model."),
    "newer": ("model.language_model.", "model."),
}


def multimodal(path, form="older", change=lambda tensors: tensors):
    """Writes a Gemma 3 with a vision tower."""
    prefix, before = FORMS[form]
    text = {
        prefix + name.removeprefix("model."): array
        for name, array in reference_tensors("gemma3").items()
    }
    vision = {
        before.removeprefix("language_model.") + name: array for name, array in VISION.items()
    }
    kind = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "mm_tokens_per_image": 4,
    }
    described = kind | {
        "text_config": reference_attributes("gemma3"),
        "vision_config": {"hidden_size": 4},
    }
    write_model(path, described, change(vision | text))
    for name in ("preprocessor_config.json", "tokenizer.json"):
        (path / name).write_text('{"size": 4}')
    return path


@swept("form", FORMS, "newer")
def test_a_multimodal_folder_comes_back_with_its_text_changed(form, tmp_path):
    source = multimodal(tmp_path / "source", form)
    model = hf.load(source)
    assert_same(values(model), values(hf.load(FOLDER / "gemma3")))
    model.norm.scale[...] += 1
    hf.save(model, tmp_path / "out", like=source, max_shard_size="20KB")
    before = stored_tensors(source)
    after = stored_tensors(tmp_path / "out")
    assert [name for name in before | after if before.get(name) != after.get(name)] == [
        FORMS[form][0] + "norm.weight"
    ]
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        assert read_json(tmp_path / "out" / name) == read_json(source / name)
    changes = {"dtype": "bfloat16", "max_position_embeddings": 99}
    hf.save(model, tmp_path / "b", like=source, dtype="bfloat16", attributes=changes)
    assert read_json(tmp_path / "b/config.json")["text_config"].items() >= changes.items()
    hf.save(model, tmp_path / "text")
    assert read_json(tmp_path / "text/config.json")["model_type"] == "gemma3_text"
    assert not [name for name in stored_tensors(tmp_path / "text") if "vision" in name]


ONES = np.ones((4, 2), BFLOAT16)
FLOAT32 = ("A_log", "linear_attn.norm.weight")
"""Tensors of Qwen 3.5 on the Hub that are float32 beside bfloat16."""


@swept("wide", [FLOAT32, ()])
def test_a_folder_keeps_its_dtypes_and_its_layout_of_experts(wide, tmp_path, capsys):
    shutil.copytree(FOLDER / "qwen3_5_moe_mm", tmp_path / "source")
    tensors = {
        name: array.astype(np.float32 if name.endswith(wide) else BFLOAT16)
        for name, array in reference_tensors("qwen3_5_moe_mm").items()
    }
    write_model(tmp_path / "source", reference_attributes("qwen3_5_moe_mm"), tensors)
    model = hf.load(tmp_path / "source")
    assert model.config.precision.param == "bfloat16"
    hf.save(model, tmp_path / "out", like=tmp_path / "source")
    found = stored_tensors(tmp_path / "out")
    assert found == stored_tensors(tmp_path / "source")
    assert [name for name in found if "experts.gate_up_proj" in name]
    heads = [name for name in found if "mtp." in name]
    said = capsys.readouterr().err
    assert f"{len(heads)} tensors that predict further tokens (mtp." in said


@pytest.mark.parametrize("name", ["qwen3_5_mm", "idefics3"])
def test_a_text_model_may_have_the_names_of_its_multimodal_folder(name, tmp_path):
    """As transformers writes a Qwen3_5ForCausalLM that it has read there."""
    tensors = {
        path: array
        for path, array in reference_tensors(name).items()
        if not any(other in path for other in (".visual.", ".vision_model.", ".connector."))
    }
    write_model(tmp_path / "in", reference_attributes(name)["text_config"], tensors)
    model = hf.load(tmp_path / "in")
    assert_same(values(model), values(hf.load(FOLDER / name)))
    hf.save(model, tmp_path / "out", like=tmp_path / "in")
    assert "model.embed_tokens.weight" in read_tensors(tmp_path / "out")


def test_a_shared_expert_of_width_zero_is_none(tmp_path):
    """transformers writes its tensors, and a gate; others write none."""
    attributes = reference_attributes("qwen3_5_moe") | {"shared_expert_intermediate_size": 0}
    tensors = reference_tensors("qwen3_5_moe")
    without = changed_tensors(tensors, {"drop": ".shared_expert."})
    empty = {
        name: array[:, :0] if "down_proj" in name else array[:0] for name, array in tensors.items()
    }
    found = hf.load(write_model(tmp_path / "empty", attributes, empty | without))
    assert not found.config.shared_experts
    assert_same(
        values(found), values(hf.load(write_model(tmp_path / "without", attributes, without)))
    )


@pytest.mark.wide
def test_no_tensor_of_a_multimodal_folder_is_made_up_or_skipped(tmp_path):
    refusals = {}
    for words, change in TABLES["mixed up"].items():
        folder = multimodal(tmp_path / words, change=partial(changed_tensors, change=change))
        refusals[words] = partial(hf.load, folder), [words]
    assert_all_refused(refusals)


@pytest.mark.wide
def test_prediction_heads_are_copied(tmp_path):
    """Layers past the last, as GLM-4.5 has them."""
    attributes = small_attributes("glm4_moe") | {"num_nextn_predict_layers": 1}
    hf.save(random_model(model_config(attributes, "it")), tmp_path / "plain", family="glm4_moe")
    stored = read_tensors(tmp_path / "plain")
    source = write_model(
        tmp_path / "source", attributes, stored | {"model.layers.2.eh_proj.weight": ONES}
    )
    hf.save(hf.load(source), tmp_path / "out", like=source)
    assert stored_tensors(tmp_path / "out") == stored_tensors(source)
    assert read_json(tmp_path / "out/config.json") == attributes
    write_model(source, attributes, stored | {"model.layers.3.eh_proj.weight": ONES})
    with pytest.raises(
        jaxtp.errors.HFError, match=r"num_nextn_predict_layers = 1, .*model\.layers\.3"
    ):
        hf.load(source)


@pytest.mark.wide
def test_an_export_needs_the_folder_that_its_run_came_from(tmp_path, capsys):
    source = multimodal(tmp_path / "source")
    moved = tmp_path / "moved"
    assert convert(["import", str(source), str(tmp_path / "run")]) == 0

    def export(name, *flags):
        return convert(["export", str(tmp_path / "run"), str(tmp_path / name), *map(str, flags)])

    assert export("out") == 0
    assert stored_tensors(tmp_path / "out") == stored_tensors(source)
    source.rename(moved)
    assert_refused(export, "without it", f"{source}: no such folder", capsys)
    assert export("like it", f"--like={moved}") == 0
    assert stored_tensors(tmp_path / "like it") == stored_tensors(moved)
    assert export("text", "--text-only") == 0
    assert not [name for name in stored_tensors(tmp_path / "text") if "vision" in name]
    assert export("like another", "--like", FOLDER / "gemma2") == 2
    assert "another model" in capsys.readouterr().err


@pytest.mark.wide
def test_a_kimi_is_written_as_what_it_is(tmp_path):
    """transformers has no kimi_k2, and an export has no Python files."""
    shutil.copytree(FOLDER / "deepseek_v3", tmp_path / "kimi")
    attributes = reference_attributes("deepseek_v3", "config_v4.json")
    write_json(tmp_path / "kimi/config.json", attributes | {"model_type": "kimi_k2"})
    hf.save(hf.load(tmp_path / "kimi"), tmp_path / "out", like=tmp_path / "kimi")
    del attributes["auto_map"]
    assert read_json(tmp_path / "out/config.json") == attributes


def test_layers_of_a_kimi_are_called_layers_or_blocks(tmp_path):
    """As on the Hub, and as transformers writes them."""
    tensors = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): array.astype(
            np.float32
        )
        for name, array in reference_tensors("kimi_k25").items()
    }
    source = write_model(
        tmp_path / "source", reference_attributes("kimi_k25", "config_v4.json"), tensors
    )
    model = hf.load(source)
    assert_same(values(model), values(hf.load(FOLDER / "kimi_k25")))
    hf.save(model, tmp_path / "out", like=source)
    assert stored_tensors(tmp_path / "out") == stored_tensors(source)


def test_adapters_need_pairs_next_to_each_other(tmp_path):
    """PEFT's files do not tell the layout of the model; a caller, or the adapters'
    configuration, names its folder.
    """
    base = FOLDER / "deepseek_v3_yarn"
    config = replace(hf.read_config(base), lora=LoraConfig(rank=2))
    write_json(tmp_path / "adapter_config.json", {"base_model_name_or_path": str(base)})
    actions = {
        "a run": partial(load_base, base, config, make_mesh()),
        "save_adapters": partial(
            hf.save_adapters, random_model(config), tmp_path / "out", base=base
        ),
        "adapters": partial(open_peft, tmp_path, hf.read_config(base)),
    }
    assert_all_refused(
        {name: (action, ["rope_interleave = False"]) for name, action in actions.items()}
    )


SMALL = TABLES["small"]
SMALL["glm4_moe"] = SMALL["glm4"] | {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
}


def small_attributes(family):
    sizes = {
        "model_type": family,
        "vocab_size": 11,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
    }
    return sizes | SMALL[family]


def small_config(family):
    return model_config(small_attributes(family), "it")


@swept("family", SMALL)
def test_rows_are_read_on_a_mesh_as_they_were_written(family, tmp_path):
    model = random_model(small_config(family))
    hf.save(model, tmp_path / "out", family=family)
    with use_mesh(tp=4):
        hf.save(hf.load(tmp_path / "out"), tmp_path / "again", family=family)
    assert stored_tensors(tmp_path / "again") == stored_tensors(tmp_path / "out")
    assert_same(values(hf.load(tmp_path / "out")), values(model))


@pytest.mark.wide
def test_a_bias_of_choices_stays_float32_in_an_export_in_bfloat16(tmp_path):
    model = random_model(small_config("glm4_moe"))
    hf.save(model, tmp_path / "out", family="glm4_moe", dtype="bfloat16")
    kinds = {
        name: tensor.dtype
        for name, tensor in read_header(tmp_path / "out/model.safetensors").items()
    }
    assert {name.rpartition(".")[-1] for name in kinds if kinds[name] == "F32"} == {
        "e_score_correction_bias"
    }
    assert hf.load(tmp_path / "out").config.precision.param == "bfloat16"


IN_BLOCKS = [("mistral", [16, 24]), ("mistral", None), ("deepseek_v3", [5, 7])]


@swept("case", IN_BLOCKS, *IN_BLOCKS[:2])
def test_float8_is_multiplied_by_its_scales(case, tmp_path):
    """Of each block, also where a block is cut off, or of the whole matrix."""
    name, block = case
    random = default_rng(0)
    plain = reference_tensors(name)
    scaled = {}
    for key, array in plain.items():
        plain[key] = array.astype(np.float32)
        if "_proj" in key:
            codes, scale, plain[key] = float8(plain[key], block, random)
            scaled |= {key: codes, f"{key}_scale_inv": scale}
    attributes = reference_attributes(name)
    quantized = attributes | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": block}
    }
    folders = [
        write_model(tmp_path / "a", attributes, plain),
        write_model(tmp_path / "b", quantized, plain | scaled),
    ]
    wanted, found = (values(hf.load(folder, precision=Precision())) for folder in folders)
    assert_same(found, wanted)
    if name == "mistral" and block is not None:
        key = next(key for key in scaled if key.endswith("_scale_inv"))
        large = {key: np.full_like(scaled[key], 3e38)}
        with pytest.raises(jaxtp.errors.HFError, match=r"_proj.* not finite"):
            hf.load(write_model(tmp_path / "b", quantized, plain | scaled | large))


@pytest.mark.wide
def test_adapters_have_the_rows_of_their_kernels(tmp_path):
    """In the files, a merged kernel is the kernel plus the product of its adapter."""
    model = random_model(small_config("glm4"))
    family = "glm4"
    adapted = add_adapters(model, jaxtp.LoraConfig(rank=2, alpha=2.0, targets=("q_proj", "k_proj")))
    move_adapters(adapted, scale=1)
    hf.save(model, tmp_path / "base", family=family)
    hf.save(merge_adapters(adapted), tmp_path / "merged", family=family)
    hf.save_adapters(adapted, tmp_path / "adapters", family=family)
    base, merged = (open_folder(tmp_path / name).tensors for name in ("base", "merged"))
    factors = read_tensors(tmp_path / "adapters/adapter_model.safetensors")
    for module in ("layers.0.self_attn.q_proj", "layers.1.self_attn.k_proj"):
        names = [f"base_model.model.model.{module}.lora_{factor}.weight" for factor in "AB"]
        a, b = (factors[name] for name in names)
        kernel = f"model.{module}.weight"
        assert_allclose(merged[kernel].read(), base[kernel].read() + b @ a, atol=1e-5)
    again = hf.load_adapters(model, tmp_path / "adapters", family=family)
    assert_same(values(again, nnx.LoRAParam), values(adapted, nnx.LoRAParam))


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o022, 0o002])
def test_an_exported_folder_has_the_mode_that_the_umask_gives(umask, tmp_path):
    before = os.umask(umask)
    try:
        (tmp_path / "made").mkdir()
        with atomic_folder(tmp_path / "exported") as folder:
            write_files(folder, {"config.json": b"{}"})
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode for name in ("made", "exported")]
    assert modes[0] == modes[1]
    assert (tmp_path / "exported/config.json").stat().st_mode & 0o777 == 0o666 & ~umask
    assert sorted(each.name for each in tmp_path.iterdir()) == ["exported", "made"]
