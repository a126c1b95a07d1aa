"""Adapters written as PEFT has them, and merged into their kernels."""

import contextlib
import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from support import sweep

import jaxtp
from jaxtp.checkpoint.checksum import NonFiniteError
from jaxtp.checkpoint.logical import named_variables
from jaxtp.config.schema import ConfigError
from jaxtp.hf.adapters import adapters
from jaxtp.layers.lora import LoraConfig

PLAIN = jaxtp.ModelConfig(vocab_size=37, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, d_ff=24)
LORA = LoraConfig(rank=3, alpha=5.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
ADAPTED = dataclasses.replace(PLAIN, lora=LORA)
IDS = np.arange(16).reshape(2, 8) * 5 % 37


logits_of = nnx.jit(lambda model: model(IDS))


@nnx.jit
def decoder():
    """A model whose adapters are not zero."""
    model = jaxtp.Decoder(ADAPTED, rngs=nnx.Rngs(3))
    rngs = nnx.Rngs(4)
    trained = jax.tree.map(lambda a: 0.3 * jax.random.normal(rngs.params(), a.shape), nnx.state(model, nnx.LoRAParam))
    nnx.update(model, trained)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The base and the adapters as folders, and the logits of both together on one device."""
    folder, model = tmp_path_factory.mktemp("adapters"), decoder()
    graph, _ = nnx.split(nnx.eval_shape(lambda: jaxtp.Decoder(PLAIN, rngs=nnx.Rngs(0))))
    others = nnx.filter_state(nnx.state(model), lambda _, variable: not isinstance(variable, nnx.LoRAParam))
    jaxtp.save_hf(nnx.merge(graph, others), folder / "base")
    jaxtp.save_peft(model, folder / "adapters", base=folder / "base")
    return folder, np.asarray(logits_of(model))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_not_exported_in_silence(tmp_path, value, capsys):
    adapted = decoder()
    whole = jaxtp.merge_adapters(adapted)
    for model, module, path, save in (
        (adapted, adapted.blocks.mlp.down.loras[0].b, "blocks.mlp.down.loras.0.b", jaxtp.save_peft),
        (whole, whole.blocks.mlp.down.kernel, "blocks.mlp.down.kernel", jaxtp.save_hf),
    ):
        module.set_value(module[...].at[1, 2, 3].set(value))
        with pytest.raises(NonFiniteError, match=rf"{path} has 1 element that is not finite; nothing is written"):
            save(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert capsys.readouterr().err == "", "of a tokenizer that would not be written"
        save(model, tmp_path / path, allow_non_finite=True)
        assert (tmp_path / path).is_dir()
        assert "no tokenizer is written" in capsys.readouterr().err


def test_what_peft_adds_to_the_base_is_what_the_adapters_add(folders, tmp_path):
    folder, logits = folders
    config = json.loads((folder / "adapters/adapter_config.json").read_text())
    adapters = load_file(folder / "adapters/adapter_model.safetensors")
    tensors = load_file(folder / "base/model.safetensors")
    for name in [name for name in adapters if name.endswith("lora_A.weight")]:
        target = name.removeprefix("base_model.model.").replace("lora_A.", "")
        b = adapters[name.replace("lora_A", "lora_B")]
        tensors[target] = tensors[target] + config["lora_alpha"] / config["r"] * b @ adapters[name]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "base/config.json").read_text())
    np.testing.assert_allclose(logits_of(jaxtp.load_hf(tmp_path)), logits, atol=2e-5)
    assert len(adapters) == 2 * len(LORA.targets) * PLAIN.num_layers
    assert config["target_modules"] == list(LORA.targets)
    assert config["base_model_name_or_path"] == str(folder / "base")


@pytest.mark.wide
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tp": 2}, {"dp": 2, "tp": 4}, {"fsdp": 4}, {"cp": 2, "tp": 2}], ids=str)
def test_from_any_mesh_and_merged_on_it(folders, tmp_path, sizes):
    folder, logits = folders
    with jax.set_mesh(jaxtp.make_mesh(**sizes)):
        model = decoder()
        jaxtp.save_peft(model, tmp_path / "adapters", base=folder / "base")
        merged = jaxtp.merge_adapters(model)
        np.testing.assert_allclose(merged(np.tile(IDS, (2, 1)))[:2], logits, atol=2e-5)
    one, other = (load_file(where / "adapters/adapter_model.safetensors") for where in (folder, tmp_path))
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(other[name], array, atol=1e-6)
    kernel = merged.blocks.mlp.down.kernel[...]
    assert kernel.sharding == model.blocks.mlp.down.kernel[...].sharding


@pytest.mark.parametrize("sizes", sweep([None, {"fsdp": 2, "tp": 2}, {"cp": 2, "tp": 2}]), ids=str)
def test_added_to_a_loaded_model_they_begin_as_nothing(folders, tmp_path, sizes):
    folder, _ = folders
    with contextlib.nullcontext() if sizes is None else jax.set_mesh(jaxtp.make_mesh(**sizes)):
        model = jaxtp.load_hf(folder / "base")
        adapted = jaxtp.add_adapters(model, LORA)
        np.testing.assert_array_equal(logits_of(adapted), logits_of(model))
        a = adapted.blocks.mlp.down.loras[0].a[...]
        assert np.abs(np.asarray(a)).max() > 0
        assert sizes is None or a.addressable_shards[0].data.shape[1] == PLAIN.d_ff // 2
        jaxtp.save_peft(adapted, tmp_path / "out")


GPT2 = dataclasses.replace(
    PLAIN,
    num_kv_heads=4,
    head_dim=4,
    **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), True),
    **{"norm": "layer", "mlp": "plain", "rope_theta": None, "learned_positions": 8},
)
GEMMA2 = dataclasses.replace(
    PLAIN,
    norm_eps=0.1,  # what leaves a branch is small, and divided by what it is, with its rounding
    **{"norm": "rms_plus_one", "norm_placement": "both", "query_scale": 0.5, "embedding_scale": 4.0},
    pattern=({"sliding_window": 4}, {}),
)


@pytest.mark.wide
@pytest.mark.parametrize("config", [GPT2, GEMMA2], ids=["gpt2", "gemma2"])
def test_of_other_layers(config, tmp_path):
    """A projection that there is not has none; what is a part of a tensor has its ranks in the adapter of the whole."""
    model = jaxtp.add_adapters(jaxtp.Decoder(config, rngs=nnx.Rngs(0)), LoraConfig(rank=2))
    nnx.update(model, jax.tree.map(lambda a: a + 0.1, nnx.state(model, nnx.LoRAParam)))
    np.testing.assert_allclose(logits_of(jaxtp.merge_adapters(model)), logits_of(model), atol=2e-5)
    jaxtp.save_peft(model, tmp_path / "out")
    tensors = load_file(tmp_path / "out/adapter_model.safetensors")
    if config is GEMMA2:
        assert {name.split(".")[4] for name in tensors} == {"0", "1"}
        assert len(tensors) == 2 * 7 * 2
        return
    described = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert described["target_modules"] == ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert described["rank_pattern"] == {"attn.c_attn": 6}
    assert described["fan_in_fan_out"]
    assert tensors["base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"].shape == (6, 16)


EXPERTS = {"num_experts": 3, "experts_per_token": 2, "d_ff": 8}
MIXTURES = {
    "plain": {**EXPERTS, "mlp": "plain"},
    "shared": {**EXPERTS, "shared_experts": 12, "first_blocks": ({"num_experts": 0, "d_ff": 24},)},
    "beside an MLP": {**EXPERTS, "dense_mlp": 12, "norm_placement": "both"},
    "latent": {"kv_rank": 8, "rope_head_dim": 4, "head_dim": 8, "value_head_dim": 6, "num_kv_heads": 4},
}
MIXTURES["linear"] = {
    **{"delta_key_heads": 2, "delta_key_dim": 3, "delta_value_dim": 5, "attention_gate": True},
    "pattern": ({"delta_value_heads": 4}, {}),
}
MIXTURES["latent queries"] = {**MIXTURES["latent"], **MIXTURES["shared"], "query_rank": 8}


@pytest.mark.wide
@pytest.mark.parametrize("sizes", [None, {"fsdp": 2, "tp": 2}, {"tp": 3}], ids=str)
@pytest.mark.parametrize("kind", MIXTURES)
def test_merged_in_mixtures_and_other_attention(kind, sizes):
    with contextlib.nullcontext() if sizes is None else jax.set_mesh(jaxtp.make_mesh(**sizes)):
        model = jaxtp.Decoder(dataclasses.replace(PLAIN, **MIXTURES[kind]), rngs=nnx.Rngs(0))
        adapted, random = jaxtp.add_adapters(model, LoraConfig(rank=2)), np.random.default_rng(0)
        moved = jax.tree.map(lambda a: a + 0.1 * random.normal(size=a.shape), nnx.state(adapted, nnx.LoRAParam))
        nnx.update(adapted, moved)
        with_them = logits_of(adapted)
        np.testing.assert_allclose(logits_of(jaxtp.merge_adapters(adapted)), with_them, atol=5e-5)
        assert np.abs(with_them - logits_of(model)).max() > 1e-2
    each = [adapter.lora for adapter in adapters(adapted.config)]
    assert {f"{lora}.{factor}" for lora in each for factor in "ab"} == {*named_variables(moved)}


def test_the_other_function_is_named(tmp_path):
    with pytest.raises(jaxtp.HFError, match="save_peft"):
        jaxtp.save_hf(decoder(), tmp_path / "out")
    with pytest.raises(jaxtp.HFError, match="save_hf"):
        jaxtp.save_peft(jaxtp.Decoder(PLAIN, rngs=nnx.Rngs(0)), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_option_that_there_is_not_is_an_error(tmp_path):
    model = jaxtp.Decoder(PLAIN, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"dtpye: no such option; family, .*dtype, .*max_shard_size are"):
        jaxtp.save_hf(model, tmp_path / "out", dtpye="bfloat16")
    with pytest.raises(TypeError, match="like: no such option"):
        jaxtp.save_peft(decoder(), tmp_path / "out", like="elsewhere")
    assert not list(tmp_path.iterdir())


def test_adapters_are_not_replaced_and_are_some(folders):
    adapted = jaxtp.add_adapters(jaxtp.load_hf(folders[0] / "base"), LORA)
    with pytest.raises(ConfigError, match="has adapters already; add them to their kernels by merge_adapters"):
        jaxtp.add_adapters(adapted, LORA)
    for nothing in (LoraConfig(rank=0), LoraConfig(rank=2, targets=())):
        with pytest.raises(ConfigError, match="make no adapters"):
            jaxtp.add_adapters(jaxtp.load_hf(folders[0] / "base"), nothing)


def test_what_the_import_cannot_be_told(folders):
    with pytest.raises(jaxtp.HFError, match="did you mean remat"):
        jaxtp.load_hf(folders[0] / "base", remta="none")
    with pytest.raises(jaxtp.HFError, match="add_adapters"):
        jaxtp.load_hf(folders[0] / "base", lora=LORA)


@pytest.mark.parametrize("frozen", ["bfloat16", "float16"])
def test_adapters_beside_weights_in_16_bits_are_merged_in_float32_and_rounded_once(frozen, tmp_path):
    model = jaxtp.Decoder(dataclasses.replace(PLAIN, precision=jaxtp.Precision(param=frozen)), rngs=nnx.Rngs(0))
    adapted = jaxtp.add_adapters(model, LORA)
    adapters = nnx.state(adapted, nnx.LoRAParam)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(adapters)} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(adapted, jaxtp.FrozenParam))} == {frozen}
    nnx.update(adapted, jax.tree.map(lambda a: a + 0.1, adapters))
    down = adapted.blocks.mlp.down
    a, b = (np.asarray(factor[...]) for factor in (down.loras[0].a, down.loras[0].b))
    exact = np.asarray(down.kernel[...], np.float32) + LORA.scale * a @ b
    whole = jaxtp.merge_adapters(adapted, dtype="float32")
    np.testing.assert_allclose(whole.blocks.mlp.down.kernel[...], exact, atol=1e-6)
    np.testing.assert_allclose(logits_of(whole), logits_of(adapted), atol=2e-5)
    rounded = jaxtp.merge_adapters(adapted)
    assert rounded.config.precision.param == frozen
    np.testing.assert_array_equal(rounded.blocks.mlp.down.kernel[...], whole.blocks.mlp.down.kernel[...].astype(frozen))
    jaxtp.save_peft(adapted, tmp_path / "adapters")
    assert {array.dtype.name for array in load_file(tmp_path / "adapters/adapter_model.safetensors").values()} == {
        "float32"
    }
    again = jaxtp.load_peft(model, tmp_path / "adapters")
    np.testing.assert_array_equal(again.blocks.mlp.down.loras[0].b[...], b)
