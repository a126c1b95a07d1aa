"""config.json as it is found: what says nothing is passed over, what could change the model is refused by name."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structures import VALUES, changed, examples, gives_one_of

import jaxtp
from jaxtp.check.__main__ import main as check
from jaxtp.convert.__main__ import main as convert
from jaxtp.data.tokenizer_files import TokenizerError, chat_template, end_token, special_tokens
from jaxtp.estimate.__main__ import main as estimate
from jaxtp.generate.__main__ import main as generate
from jaxtp.hf.attributes import model_config
from jaxtp.hf.values import positive
from jaxtp.train.__main__ import main as train

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "use_cache": True,
    "vocab_size": 49152,
}
BOOKKEEPING = {
    "_model_name_or_path": "x",
    "_name_or_path": "x",
    "_flash_attn_2_enabled": True,
    "_anything": [1],
    "unk_token_id": 0,
    "image_token_id": 7,
    "forced_bos_token_id": None,
    "use_flash_attn": True,
    "use_memorry_efficient_attention": False,
    "unsloth_fixed": True,
    "auto_map": {"AutoTokenizer": ["x.X", None], "AutoConfig": "y.Y"},
}


def test_a_real_configuration_is_read():
    config = model_config(SMOLLM2, "config.json")
    assert (config.d_model, config.num_heads, config.num_kv_heads, config.head_dim) == (576, 9, 3, 64)
    assert (config.tie_embeddings, config.rope_theta, config.norm_eps) == (True, 100_000.0, 1e-5)


@pytest.mark.parametrize("name", BOOKKEEPING)
def test_bookkeeping_says_nothing(name):
    assert model_config(SMOLLM2 | {name: BOOKKEEPING[name]}, "config.json") == model_config(SMOLLM2, "config.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope_interleaved", True),
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("quantization_config", {"bits": 4}),
        ("partial_rotary_factor", 0.5),
    ],
)
def test_what_is_known_to_change_the_model_cannot_be_passed_over(name, value):
    with pytest.raises(jaxtp.HFError, match=f"{name} = .* it is known to change the model$"):
        model_config(SMOLLM2 | {name: value}, "config.json")
    with pytest.raises(jaxtp.HFError, match=f"--ignore-config {name}: it is known to change the model, and cannot"):
        model_config(SMOLLM2 | {name: value}, "config.json", [name])


@pytest.mark.parametrize("name", ["logit_scale", "use_sparse", "auto_map", "a b"])
def test_what_is_not_understood_is_refused_unless_it_is_passed_over(name):
    found = SMOLLM2 | {name: {"AutoModelForCausalLM": "x.X"}}
    quoted = f"'{name}'" if " " in name else name
    with pytest.raises(jaxtp.HFError, match=f"taken for one that could change .* by --ignore-config {quoted}$"):
        model_config(found, "config.json")
    assert model_config(found, "config.json", [name]) == model_config(SMOLLM2, "config.json")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pad_tokn_id", "there is no such attribute; did you mean pad_token_id"),
        ("hidden_size", "it is known to change the model"),
        ("model_type", "it is known to change the model"),
        ("rope_scaling", "it is known to change the model"),
        ("architectures", "it is known to change the model"),
    ],
)
def test_what_cannot_be_passed_over(name, message):
    with pytest.raises(jaxtp.HFError, match=f"--ignore-config {name}: {message}"):
        model_config(SMOLLM2, "config.json", [name])


FOLDERS = {
    "train": (train, lambda folder, run: ["--model.from-hf", folder, "--run.dir", run]),
    "check": (check, lambda folder, run: ["--model.from-hf", folder]),
    "estimate": (estimate, lambda folder, run: ["--model.from-hf", folder]),
    "generate": (generate, lambda folder, run: ["--model", folder, "--prompt", "x"]),
    "import": (convert, lambda folder, run: ["import", folder, run]),
    "plan": (convert, lambda folder, run: ["plan", folder]),
}


@pytest.mark.parametrize("command", FOLDERS)
def test_every_command_names_the_way_out_and_has_it(command, tmp_path, capsys):
    main, arguments = FOLDERS[command]
    folder, run = tmp_path / "model", tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMOLLM2 | {"twist": 1, "turn": 2, "hidden_act": "gelu"}))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    given = list(map(str, arguments(folder, run)))
    assert _exit_code(main, given) == 2
    _exit_code(main, [*given, "--ignore-config", "twist"])
    first, second = capsys.readouterr().err.split(": error: ")[1:]
    assert "--ignore-config twist" in first
    assert "--ignore-config turn" in first
    assert "--ignore-config twist" not in second
    assert "--ignore-config turn" in second
    _exit_code(main, [*given, "--ignore-config", "twist", "--ignore-config", "turn"])
    assert "--ignore-config" not in capsys.readouterr().err


def _exit_code(main, arguments):
    try:
        return main(arguments)
    except SystemExit as stopped:
        return stopped.code


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan"), True, "1", None, [], 0])
def test_what_is_no_positive_number(value):
    with pytest.raises(jaxtp.HFError, match=r"factor = .*: should be a number above 0"):
        positive("factor", value)


KINDS = st.sampled_from(["llama", "mistral", "qwen2", "qwen3"])
ROPES = st.fixed_dictionaries(
    {},
    optional={
        name: VALUES | st.floats(0.5, 8)
        for name in (
            *("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim", "attention_factor"),
            *("low_freq_factor", "high_freq_factor", "truncate", "rope_theta"),
        )
    }
    | {"rope_type": st.sampled_from(["linear", "llama3", "yarn", "default"]) | VALUES},
)
CONFIGS = st.one_of(
    changed(SMOLLM2),
    st.builds(
        lambda kind, rope: SMOLLM2 | {"model_type": kind, "rope_scaling": rope, "architectures": None}, KINDS, ROPES
    ),
)


def check_config(attributes, folder):
    (folder / "config.json").write_text(json.dumps(attributes))
    gives_one_of(jaxtp.ModelConfig, jaxtp.HFError, lambda: jaxtp.read_config(folder))


@examples(40)
@given(CONFIGS)
def test_any_structure_as_config_json(tmp_path, attributes):
    check_config(attributes, tmp_path)


BESIDE = {
    "eos_token": {"content": "</s>"},
    "bos_token": "<s>",
    "eos_token_id": [1, 2],
    "chat_template": [{"name": "default", "template": "x"}],
}


def check_beside(described, folder):
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "generation_config.json").write_text(json.dumps(described))
    gives_one_of(tuple | None, TokenizerError, lambda: end_token(folder))
    gives_one_of(dict, TokenizerError, lambda: special_tokens(folder))
    gives_one_of(str | None, TokenizerError, lambda: chat_template(folder))


@examples(40)
@given(st.one_of(changed(BESIDE), VALUES))
def test_any_structure_beside_a_tokenizer(tmp_path, described):
    check_beside(described, tmp_path)


@pytest.mark.wide
@examples(300)
@given(CONFIGS, changed(BESIDE))
def test_many_structures(tmp_path, attributes, described):
    check_beside(described, tmp_path)
    check_config(attributes, tmp_path)
