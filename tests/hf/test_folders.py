"""Folders that hold more than a text model, fused and interleaved rows, float8 blocks: read, and written back."""

import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_reference import FOLDER
from support import sweep, sweep_of

import jaxtp
from jaxtp.checkpoint.logical import named_variables
from jaxtp.hf.config_json import changed_config, open_whole
from jaxtp.hf.families import FAMILIES
from jaxtp.hf.families.family import Tensor
from jaxtp.hf.load import _checked_blocks
from jaxtp.hf.model_folder import open_folder
from jaxtp.hf.peft import open_peft
from jaxtp.hf.runs import load_base
from jaxtp.hf.safetensors import DTYPES, read_header, with_scales, write_file
from jaxtp.hf.save import atomic_folder, gather_tensors, write_files
from jaxtp.hf.tensor_map import group_by_tensor, place, tensor_parts
from jaxtp.layers.lora import LoraConfig
from jaxtp.models.config import BlockConfig
from jaxtp.tools.convert.__main__ import main as convert

VISION = {
    "vision_tower.embeddings.weight": ("BF16", np.arange(12).reshape(3, 4)),
    "vision_tower.position_ids": ("I64", np.arange(5)),
    "multi_modal_projector.weight": ("F32", np.full((2, 2), np.nan)),
}
"""An integer and a value that is not finite: nothing of it is looked at."""
FORMS = {"older": ("language_model.model.", "language_model."), "newer": ("model.language_model.", "model.")}


def numpy_of(dtype):
    return {**DTYPES, "I64": np.dtype(np.int64), "F8_E4M3": np.dtype(jnp.float8_e4m3fn)}[dtype]


def write_tensors(path, tensors):
    arrays = {name: np.asarray(array).astype(numpy_of(dtype)) for name, (dtype, array) in tensors.items()}
    header = {name: (dtype, arrays[name].shape) for name, (dtype, _) in tensors.items()}
    write_file(path / "model.safetensors", header, arrays.__getitem__)


def multimodal(path, form="older", change=lambda tensors: tensors, **attributes):
    """A Gemma 3 with a vision tower."""
    prefix, before = FORMS[form]
    text = json.loads((FOLDER / "gemma3/config.json").read_text())
    stored = read_header(FOLDER / "gemma3/model.safetensors")
    tensors = {prefix + name.removeprefix("model."): (t.dtype, t.read()) for name, t in stored.items()}
    vision = {before.removeprefix("language_model.") + name: value for name, value in VISION.items()}
    path.mkdir()
    write_tensors(path, change(vision | tensors))
    kind = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 4}
    described = kind | {"text_config": text, "vision_config": {"hidden_size": 4}, **attributes}
    (path / "config.json").write_text(json.dumps(described))
    (path / "preprocessor_config.json").write_text('{"size": 4}')
    return path


def contents(folder):
    return {name: (t.dtype, t.shape, t.data().tobytes()) for name, t in open_folder(folder).tensors.items()}


@pytest.mark.parametrize("form", sweep([*FORMS], "newer"))
def test_a_multimodal_folder_comes_back_with_its_text_changed(form, tmp_path):
    source = multimodal(tmp_path / "source", form)
    with jax.set_mesh(jaxtp.make_mesh(tp=2)):
        model = jaxtp.load_hf(source)
        text = jaxtp.load_hf(FOLDER / "gemma3")
    for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(text)), strict=True):
        np.testing.assert_array_equal(a, b)
    model.norm.scale[...] += 1
    jaxtp.save_hf(model, tmp_path / "out", like=source, max_shard_size="20KB")
    before, after = contents(source), contents(tmp_path / "out")
    assert [name for name in before | after if before.get(name) != after.get(name)] == [FORMS[form][0] + "norm.weight"]
    for name in ("config.json", "preprocessor_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((source / name).read_text())
    jaxtp.save_hf(model, tmp_path / "text")
    assert json.loads((tmp_path / "text/config.json").read_text())["model_type"] == "gemma3_text"
    assert not [name for name in contents(tmp_path / "text") if "vision" in name]


FLOAT32 = ("A_log", "linear_attn.norm.weight")
"""Tensors of Qwen 3.5 on the Hub that are float32 beside bfloat16."""


@pytest.mark.parametrize("wide", [FLOAT32, pytest.param((), marks=pytest.mark.wide)], ids=["3.5", "3.6"])
def test_a_folder_keeps_its_dtypes_and_its_layout_of_experts(wide, tmp_path):
    shutil.copytree(FOLDER / "qwen3_5_moe_mm", tmp_path / "source")
    stored = read_header(FOLDER / "qwen3_5_moe_mm/model.safetensors")
    tensors = {name: ("F32" if name.endswith(wide) else "BF16", tensor.read()) for name, tensor in stored.items()}
    write_tensors(tmp_path / "source", tensors)
    model = jaxtp.load_hf(tmp_path / "source")
    assert model.config.precision.param == "bfloat16"
    jaxtp.save_hf(model, tmp_path / "out", like=tmp_path / "source")
    assert contents(tmp_path / "out") == contents(tmp_path / "source")
    assert [name for name in contents(tmp_path / "out") if "mtp." in name or "experts.gate_up_proj" in name]


def test_a_text_model_may_have_the_names_of_its_multimodal_folder(tmp_path):
    """As transformers writes a Qwen3_5ForCausalLM that it has read there."""
    attributes = json.loads((FOLDER / "qwen3_5_mm/config.json").read_text())["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(attributes | {"architectures": ["Qwen3_5ForCausalLM"]}))
    stored = read_header(FOLDER / "qwen3_5_mm/model.safetensors")
    write_tensors(tmp_path, {name: (t.dtype, t.read()) for name, t in stored.items() if ".visual." not in name})
    found, expected = (nnx.state(jaxtp.load_hf(folder)) for folder in (tmp_path, FOLDER / "qwen3_5_mm"))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.wide
def test_a_shared_expert_of_width_zero(tmp_path):
    """transformers writes its tensors, and a gate; others write none."""
    attributes = json.loads((FOLDER / "qwen3_5_moe/config.json").read_text()) | {"shared_expert_intermediate_size": 0}
    (tmp_path / "config.json").write_text(json.dumps(attributes))
    stored = read_header(FOLDER / "qwen3_5_moe/model.safetensors")
    tensors = {name: (t.dtype, t.read()) for name, t in stored.items()}
    inner = {name: value for name, value in tensors.items() if ".shared_expert." in name}
    empty = {n: (dtype, a[:, :0] if "down_proj" in n else a[:0]) for n, (dtype, a) in inner.items()}
    logits = []
    for changed in (empty, {}):
        write_tensors(tmp_path, {n: value for n, value in tensors.items() if ".shared_expert." not in n} | changed)
        model = jaxtp.load_hf(tmp_path)
        assert not model.config.shared_experts
        logits.append(model(np.arange(6, dtype=np.int32)[None]))
    np.testing.assert_array_equal(*logits)


PREFIX = FORMS["older"][0]
LEFT = "language_model.model.layers.0.more.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"model.language_model.norm.weight": t[f"{PREFIX}norm.weight"]}, "begin in two ways"),
        (lambda t: {n: v for n, v in t.items() if n != f"{PREFIX}norm.weight"}, "missing: model.norm.weight$"),
        (lambda t: t | {LEFT: ("F32", np.ones(3))}, "unexpected: model.layers.0.more.weight$"),
        (lambda t: t | {"audio_tower.weight": ("F32", np.ones(3))}, "unexpected: audio_tower.weight$"),
        (lambda t: {n.removeprefix("language_model."): v for n, v in t.items()}, "no tensor's name begins with"),
        (lambda t: t | {"model.norm.weight": t[f"{PREFIX}norm.weight"]}, "begin in two ways"),
    ],
    ids=["mixed", "missing", "left over", "other", "no prefix", "twice"],
)
def test_no_tensor_is_made_up_or_passed_over(change, message, tmp_path):
    with pytest.raises(jaxtp.HFError, match=message):
        jaxtp.load_hf(multimodal(tmp_path / "source", change=change))


def test_prediction_heads_are_copied(tmp_path):
    """Layers past the last, as GLM-4.5 has them."""
    sizes = dict.fromkeys(("hidden_size", "vocab_size", "intermediate_size", "moe_intermediate_size"), 8)
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 2, "num_experts_per_tok": 1}
    attributes = {"model_type": "glm4_moe", "head_dim": 4, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    model = jaxtp.Decoder(jaxtp.hf.config_json.model_config(attributes | sizes, "it"), rngs=nnx.Rngs(0))
    jaxtp.save_hf(model, tmp_path / "plain", family="glm4_moe")
    shutil.copytree(tmp_path / "plain", tmp_path / "source")
    stored = {name: (t.dtype, t.read()) for name, t in read_header(tmp_path / "plain/model.safetensors").items()}
    write_tensors(tmp_path / "source", stored | {"model.layers.2.eh_proj.weight": ("BF16", np.ones((4, 2)))})
    (tmp_path / "source/config.json").write_text(json.dumps(attributes | sizes))
    jaxtp.save_hf(jaxtp.load_hf(tmp_path / "source"), tmp_path / "out", like=tmp_path / "source")
    assert contents(tmp_path / "out") == contents(tmp_path / "source")
    assert json.loads((tmp_path / "out/config.json").read_text()) == attributes | sizes
    write_tensors(tmp_path / "source", stored | {"model.layers.3.eh_proj.weight": ("BF16", np.ones((4, 2)))})
    with pytest.raises(jaxtp.HFError, match=r"num_nextn_predict_layers = 1, and the file has model\.layers\.3"):
        jaxtp.load_hf(tmp_path / "source")


def test_an_export_needs_the_folder_that_its_run_came_from(tmp_path, capsys):
    source = multimodal(tmp_path / "source")
    assert convert(["import", str(source), str(tmp_path / "run")]) == 0
    assert convert(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert contents(tmp_path / "out") == contents(source)
    source.rename(tmp_path / "moved")
    assert convert(["export", str(tmp_path / "run"), str(tmp_path / "other")]) == 2
    assert f"{source}: no such folder" in capsys.readouterr().err
    assert convert(["export", str(tmp_path / "run"), str(tmp_path / "b"), "--like", str(tmp_path / "moved")]) == 0
    assert contents(tmp_path / "b") == contents(tmp_path / "moved")
    assert convert(["export", str(tmp_path / "run"), str(tmp_path / "text"), "--text-only"]) == 0
    jaxtp.load_hf(tmp_path / "text")
    shutil.copytree(FOLDER / "gemma2", tmp_path / "gemma2")
    assert convert(["export", str(tmp_path / "run"), str(tmp_path / "c"), "--like", str(tmp_path / "gemma2")]) == 2
    assert "another model" in capsys.readouterr().err


BLOCK = BlockConfig(num_heads=4, num_kv_heads=2, head_dim=6, rotary_fraction=2 / 3, d_ff=8)
LAYOUTS = {
    "heads": ("num_heads", (24, 24, 24), lambda q, k, v: [q.reshape(4, 6), k.reshape(4, 6), v.reshape(4, 6)]),
    "groups": ("num_kv_heads", (24, 12, 12), lambda q, k, v: [q.reshape(2, 12), k.reshape(2, 6), v.reshape(2, 6)]),
    "features": ("d_ff", (8, 8), lambda gate, up: [gate[:, None], up[:, None]]),
    "one after another": (None, (24, 12), lambda q, k: [q[None], k[None]]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_of_fused_tensors_alternate(layout):
    chunks, widths, chunked = LAYOUTS[layout]
    tensor = Tensor("blocks.mlp.gate_up.kernels.0", "fused", chunks=chunks)
    places = [place(tensor, part, widths, FAMILIES["llama"], BLOCK) for part in range(len(widths))]
    parts = np.split(np.arange(sum(widths)), np.cumsum(widths)[:-1])
    fused = np.concatenate(chunked(*parts), axis=1).ravel()
    for (first, width, columns), part in zip(places, parts, strict=True):
        assert width == sum(widths)
        np.testing.assert_array_equal(fused[first + np.arange(len(part)) if columns is None else columns], part)


def test_interleaved_pairs_become_halves():
    """Only the rotated part of a head moves, and what is read is written back."""
    tensor = Tensor("blocks.attention.qkv.biases.0", "q")
    columns = place(tensor, 0, (24,), FAMILIES["glm4"], BLOCK).columns
    assert columns[:12].tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert place(Tensor("blocks.attention.qkv.biases.2", "v"), 0, (24,), FAMILIES["glm4"], BLOCK).columns is None


def test_interleaved_pairs_of_latent_attention():
    """The last dims of each query head, and of the key that heads share."""
    block = BlockConfig(head_dim=6, num_heads=2, num_kv_heads=2, kv_rank=5, rope_head_dim=4, value_head_dim=3)
    for name, width, expected in (
        ("query_up.kernels.0", 12, [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]),
        ("latent_down.kernel", 9, [0, 1, 2, 3, 4, 5, 7, 6, 8]),
    ):
        found = place(Tensor(f"blocks.attention.{name}", "q"), 0, (width,), FAMILIES["deepseek_v3"], block)
        assert found.columns.tolist() == expected
    other = place(Tensor("blocks.attention.latent_up.kernels.0", "kv"), 0, (10,), FAMILIES["deepseek_v3"], block)
    assert other.columns is None


def test_a_kimi_is_written_as_what_it_is(tmp_path):
    """transformers has no kimi_k2, and an export has no Python files."""
    shutil.copytree(FOLDER / "deepseek_v3", tmp_path / "kimi")
    attributes = json.loads((FOLDER / "deepseek_v3/config_v4.json").read_text())
    (tmp_path / "kimi/config.json").write_text(json.dumps(attributes | {"model_type": "kimi_k2"}))
    whole = open_whole(tmp_path / "kimi", jaxtp.read_config(FOLDER / "deepseek_v3"))
    assert changed_config(whole, "float32", None) == {
        name: value for name, value in attributes.items() if name != "auto_map"
    }


def test_adapters_need_pairs_next_to_each_other():
    """PEFT's files do not tell the layout of the model."""
    config = dataclasses.replace(jaxtp.read_config(FOLDER / "deepseek_v3_yarn"), lora=LoraConfig(rank=2))
    with pytest.raises(jaxtp.HFError, match="rope_interleave = False: adapters need the usual layout"):
        load_base(FOLDER / "deepseek_v3_yarn", config, jaxtp.make_mesh())


def test_adapters_in_python_need_pairs_next_to_each_other(tmp_path):
    """Where the folder of the base is named, by the caller or in the adapters' configuration."""
    base, named = FOLDER / "deepseek_v3_yarn", {"base_model_name_or_path": str(FOLDER / "deepseek_v3_yarn")}
    model = jaxtp.Decoder(dataclasses.replace(jaxtp.read_config(base), lora=LoraConfig(rank=2)), rngs=nnx.Rngs(0))
    refused = pytest.raises(jaxtp.HFError, match="deepseek_v3_yarn: rope_interleave = False: adapters need the usual")
    with refused:
        jaxtp.save_peft(model, tmp_path / "out", base=base)
    (tmp_path / "adapter_config.json").write_text(json.dumps(named))
    with refused:
        open_peft(tmp_path, jaxtp.read_config(base))


MIXED = {"fsdp": 2, "tp": 4}
SMALL = {
    "gpt_neox": {"hidden_size": 32, "num_attention_heads": 4, "rotary_pct": 0.5},
    "glm4": {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "glm4_moe": {
        **{"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6},
    },
    "stablelm": {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "qk_layernorm": True}
    | {"partial_rotary_factor": 0.5},
    "cohere": {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "use_qk_norm": True},
}


@pytest.mark.parametrize(("family", "mesh"), sweep_of([list(SMALL), [{}, MIXED]], ("stablelm", MIXED)), ids=str)
def test_rows_are_read_on_any_mesh_as_they_were_written(family, mesh, tmp_path):
    attributes = {"model_type": family, "vocab_size": 11, "intermediate_size": 12, "num_hidden_layers": 2}
    config = jaxtp.hf.config_json.model_config(attributes | SMALL[family], "it")
    model = jaxtp.Decoder(config, rngs=nnx.Rngs(0))
    variables = named_variables(nnx.state(model))
    rng = np.random.default_rng(0)
    for variable in variables.values():
        variable[...] = jnp.asarray(rng.standard_normal(variable.shape), variable.dtype)
    jaxtp.save_hf(model, tmp_path / "out", family=family)
    with jax.set_mesh(jaxtp.make_mesh(**mesh)):
        again = jaxtp.load_hf(tmp_path / "out")
    parts = group_by_tensor(tensor_parts(named_variables(nnx.state(again)), config, FAMILIES[family]))
    written = dict(zip(parts, gather_tensors(named_variables(nnx.state(again)), parts, "float32"), strict=True))
    for name, tensor in read_header(tmp_path / "out/model.safetensors").items():
        np.testing.assert_array_equal(written[name], tensor.read())
    jaxtp.save_hf(again, tmp_path / "bfloat16", family=family, dtype="bfloat16")
    kinds = {name: tensor.dtype for name, tensor in read_header(tmp_path / "bfloat16/model.safetensors").items()}
    assert {name.rpartition(".")[-1] for name in kinds if kinds[name] == "F32"} <= {"e_score_correction_bias"}
    assert jaxtp.load_hf(tmp_path / "bfloat16").config.precision.param == "bfloat16"
    ids = np.arange(10, dtype=np.int32).reshape(2, 5)
    with jax.set_mesh(jaxtp.make_mesh(**mesh)):
        np.testing.assert_allclose(again(ids), jaxtp.load_hf(tmp_path / "out")(ids))


LATENTS = pytest.param("deepseek_v3", [5, 7], marks=pytest.mark.wide)


@pytest.mark.parametrize(("name", "block"), [("mistral", [16, 24]), ("mistral", None), LATENTS], ids=str)
def test_float8_is_multiplied_by_its_scales(name, block, tmp_path):
    """Of each block, also where a block is cut off, or of the whole matrix."""
    source = read_header(FOLDER / name / "model.safetensors")
    rng, tensors, expected = np.random.default_rng(0), {}, {}
    for key, tensor in source.items():
        array = tensor.read().astype(np.float32)
        expected[key] = ("F32", array)
        if "_proj" in key:
            grid = (
                () if block is None else tuple(-(-size // step) for size, step in zip(array.shape, block, strict=True))
            )
            scale = np.asarray(rng.uniform(0.001, 0.1, grid), np.float32)
            steps = array.shape if block is None else block
            rows, columns = (np.arange(size) // step for size, step in zip(array.shape, steps, strict=True))
            whole = scale if block is None else scale[rows][:, columns]
            small = np.clip(array / whole, -400, 400).astype(numpy_of("F8_E4M3"))
            tensors |= {key: ("F8_E4M3", small), f"{key}_scale_inv": ("F32", scale)}
            expected[key] = ("F32", small.astype(np.float32) * whole)
    config = json.loads((FOLDER / name / "config.json").read_text())
    for folder, stored, more in (
        ("float8", expected | tensors, {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}),
        ("float32", expected, {}),
    ):
        (tmp_path / folder).mkdir()
        write_tensors(tmp_path / folder, stored)
        (tmp_path / folder / "config.json").write_text(json.dumps(config | more))
    found, wanted = (jaxtp.load_hf(tmp_path / folder, precision=jaxtp.Precision()) for folder in ("float8", "float32"))
    for a, b in zip(jax.tree.leaves(nnx.state(found)), jax.tree.leaves(nnx.state(wanted)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_float8_whose_scale_is_too_large_is_refused(tmp_path):
    tensors = {"it": ("F8_E4M3", np.full((2, 2), 448, numpy_of("F8_E4M3")))}
    write_tensors(tmp_path, tensors | {"it_scale_inv": ("F32", np.full((1, 1), 3e38, np.float32))})
    (tensor,) = with_scales(read_header(tmp_path / "model.safetensors"), (2, 2)).values()
    with pytest.raises(jaxtp.HFError, match="it has elements that are not finite"):
        list(_checked_blocks(tensor, None, 0, 2))


@pytest.mark.parametrize(
    ("method", "way"), [("mxfp4", r"Mxfp4Config\(dequantize=True\)"), ("awq", "base model"), ("gptq", "base model")]
)
def test_other_quantised_weights_name_the_way_to_bfloat16(method, way, tmp_path):
    config = json.loads((FOLDER / "llama_gqa/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(jaxtp.HFError, match=f"quant_method = '{method}' is not supported.*{way}"):
        jaxtp.read_config(tmp_path)


def test_the_nearest_family_of_an_unknown_one():
    attributes = json.loads((FOLDER / "qwen3/config.json").read_text()) | {"model_type": "new", "sinks": True}
    with pytest.raises(jaxtp.HFError, match=r"'new' is not supported.* is qwen3, which lacks sinks = True"):
        jaxtp.hf.config_json.model_config(attributes, "it")
    with pytest.raises(jaxtp.HFError, match="because of Mamba-2 layers"):
        jaxtp.hf.config_json.model_config({"model_type": "bamba"}, "it")


@pytest.mark.parametrize("wrapped", [False, True], ids=["interleaved", "multimodal"])
def test_adapters_have_the_rows_and_names_of_their_kernels(wrapped, tmp_path):
    """In the files, a merged kernel is the kernel plus the product of its adapter."""
    if wrapped:
        model, family = jaxtp.load_hf(multimodal(tmp_path / "source")), "gemma3"
    else:
        attributes = {"model_type": "glm4", "vocab_size": 11, "intermediate_size": 12, "num_hidden_layers": 2}
        config = jaxtp.hf.config_json.model_config(attributes | SMALL["glm4"], "it")
        model, family = jaxtp.Decoder(config, rngs=nnx.Rngs(0)), "glm4"
    adapted = jaxtp.add_adapters(model, jaxtp.LoraConfig(rank=2, alpha=2.0, targets=("q_proj", "k_proj")))
    for number, variable in enumerate(named_variables(nnx.state(adapted, nnx.LoRAParam)).values()):
        variable[...] = jax.random.normal(jax.random.key(number), variable.shape)
    for write, name in ((jaxtp.save_hf, "base"), (jaxtp.save_hf, "merged"), (jaxtp.save_peft, "adapters")):
        write(
            {"base": model, "merged": jaxtp.merge_adapters(adapted)}.get(name, adapted), tmp_path / name, family=family
        )
    base, merged = (open_folder(tmp_path / name).tensors for name in ("base", "merged"))
    factors = read_header(tmp_path / "adapters/adapter_model.safetensors")
    before = "base_model.model.model.language_model." if wrapped else "base_model.model.model."
    for module in ("layers.0.self_attn.q_proj", "layers.1.self_attn.k_proj"):
        a, b = (factors[f"{before}{module}.lora_{factor}.weight"].read() for factor in "AB")
        kernel = f"model.{module}.weight"
        np.testing.assert_allclose(merged[kernel].read(), base[kernel].read() + b @ a, atol=1e-5)
    again = jaxtp.load_peft(model, tmp_path / "adapters", family=family)
    for a, b in zip(*(jax.tree.leaves(nnx.state(each, nnx.LoRAParam)) for each in (adapted, again)), strict=True):
        np.testing.assert_array_equal(a, b)


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
