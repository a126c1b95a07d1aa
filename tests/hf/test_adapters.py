"""Adapters written as PEFT has them, and merged into their kernels."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from flax import nnx
from hf_folders import move_adapters, random_model, read_tensors, values
from hf_reference import FOLDER
from numpy.testing import assert_allclose, assert_array_equal
from support import swept, use_mesh
from tables import read_table, with_tuples
from variants import small_model

import jaxtp
from jaxtp import Precision, add_adapters, hf, layers, merge_adapters
from jaxtp.checkpoint.checksum import NonFiniteError
from jaxtp.config.schema import ConfigError
from jaxtp.hf.adapters import adapters
from jaxtp.layers.lora import LoraConfig

PLAIN = small_model(vocab_size=37, num_layers=2, head_dim=6)
LORA = LoraConfig(rank=3, alpha=5.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
ADAPTED = replace(PLAIN, lora=LORA)
IDS = np.arange(16).reshape(2, 8) * 5 % 37


logits_of = nnx.jit(lambda model: model(IDS))


def test_weights_that_are_not_finite_are_not_exported_in_silence(tmp_path, capsys):
    adapted = random_model(ADAPTED)
    whole = merge_adapters(adapted)
    down = adapted.blocks.mlp.down
    for model, variable, path, save, value in (
        (adapted, down.loras[0].b, "blocks.mlp.down.loras.0.b", hf.save_adapters, np.inf),
        (whole, whole.blocks.mlp.down.kernel, "blocks.mlp.down.kernel", hf.save, np.nan),
    ):
        variable.set_value(variable[...].at[1, 2, 3].set(value))
        with pytest.raises(NonFiniteError, match=f"{path} has 1 element"):
            save(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert capsys.readouterr().err == "", "of a tokenizer that would not be written"
        save(model, tmp_path / path, allow_non_finite=True)
        assert (tmp_path / path).is_dir()
        assert "no tokenizer is written" in capsys.readouterr().err


OTHERS = read_table(__file__)
OTHERS["latent queries"] = {**OTHERS["latent"], **OTHERS["shared"], "query_rank": 8}


ROTATED = list(zip(OTHERS, itertools.cycle([{}, {"fsdp": 2, "tp": 2}, {"tp": 3}]), strict=False))


@swept("case", ROTATED)
def test_adapters_of_mixtures_and_other_attention_are_merged(case):
    kind, sizes = case
    with use_mesh(**sizes):
        model = random_model(replace(PLAIN, **with_tuples(OTHERS[kind])))
        adapted = move_adapters(add_adapters(model, LoraConfig(rank=2)))
        merged = merge_adapters(adapted)
        assert_allclose(logits_of(merged), logits_of(adapted), atol=5e-5)
    before = values(model)
    after = values(merged)
    moved = {path for path in before if not np.allclose(before[path], after[path], atol=1e-3)}
    assert moved == adapters(adapted.config).keys()
    each = [adapter.lora for adapter in adapters(adapted.config).values()]
    assert {f"{lora}.{factor}" for lora in each for factor in "ab"} == {
        *values(adapted, nnx.LoRAParam)
    }


def test_what_cannot_be_exported_or_adapted_is_refused(tmp_path):
    adapted = random_model(ADAPTED)
    plain = random_model(PLAIN)
    base = FOLDER / "phi3"
    out = tmp_path / "out"
    refusals = [  # the error, words of its message, and the call
        (jaxtp.errors.HFError, "save_adapters", lambda: hf.save(adapted, out)),
        (jaxtp.errors.HFError, r"jaxtp\.hf\.save$", lambda: hf.save_adapters(plain, out)),
        (jaxtp.errors.HFError, "remat", lambda: hf.load(base, remta="none")),
        (jaxtp.errors.HFError, "add_adapters", lambda: hf.load(base, lora=LORA)),
        (ConfigError, "merge_adapters", lambda: add_adapters(adapted, LORA)),
        (ConfigError, "make no adapters", lambda: add_adapters(plain, LoraConfig(rank=0))),
        (
            ConfigError,
            "make no adapters",
            lambda: add_adapters(plain, LoraConfig(rank=2, targets=())),
        ),
    ]
    for kind, words, action in refusals:
        with pytest.raises(kind, match=words):
            action()
    assert not list(tmp_path.iterdir())


def test_adapters_beside_weights_in_16_bits_are_merged_in_float32_and_rounded_once(tmp_path):
    frozen = "bfloat16"
    lora = LoraConfig(rank=3, alpha=5.0, targets=("down_proj",))
    model = random_model(replace(PLAIN, num_layers=1, precision=Precision(param=frozen)))
    adapted = move_adapters(add_adapters(model, lora))
    assert {array.dtype.name for array in values(adapted, nnx.LoRAParam).values()} == {"float32"}
    assert {array.dtype.name for array in values(adapted, layers.FrozenParam).values()} == {frozen}
    down = adapted.blocks.mlp.down
    a, b = (np.asarray(factor[...]) for factor in (down.loras[0].a, down.loras[0].b))
    exact = np.asarray(down.kernel[...], np.float32) + lora.scale * a @ b
    whole = merge_adapters(adapted, dtype="float32")
    assert_allclose(whole.blocks.mlp.down.kernel[...], exact, atol=1e-6)
    rounded = merge_adapters(adapted)
    assert rounded.config.precision.param == frozen
    assert_array_equal(
        rounded.blocks.mlp.down.kernel[...], whole.blocks.mlp.down.kernel[...].astype(frozen)
    )
    hf.save_adapters(adapted, tmp_path / "adapters")
    written = read_tensors(tmp_path / "adapters/adapter_model.safetensors")
    assert {array.dtype.name for array in written.values()} == {"float32"}
    again = hf.load_adapters(model, tmp_path / "adapters")
    assert_array_equal(again.blocks.mlp.down.loras[0].b[...], b)
