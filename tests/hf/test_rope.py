"""Rotary embeddings as config.json spells them: frequencies of transformers, real files, hostile lists."""

import json
import math

import numpy as np
import pytest
from hf_reference import FOLDER
from structures import is_one_clear_message

import jaxtp
from jaxtp.hf.config_json import model_config, write_attributes
from jaxtp.hf.families import FAMILIES
from jaxtp.layers.rope import RopeScaling, _attention_factor, rope_frequencies

CASES = json.loads((FOLDER / "rope.json").read_text())
SIZES = {"vocab_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def told(rope):
    """Says what a case is, without its lists."""
    return "-".join(f"{key}={value}" for key, value in rope.items() if not isinstance(value, list))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{told(case['rope_parameters'])}-{case['length']}")
def test_frequencies_are_those_of_transformers(case):
    """Its own functions in float64; one part in 10^13 is 10^-7 of a radian at a million tokens."""
    head_dim, rope = case["head_dim"], case["rope_parameters"]
    attributes = {**SIZES, "model_type": "llama", "hidden_size": 2 * head_dim, "max_position_embeddings": 131_072}
    config = model_config(attributes | {"rope_parameters": rope}, "it")
    found = rope_frequencies(head_dim, config.rope_theta, config.rope_scaling, case["length"])
    np.testing.assert_allclose(found[case["dims"]], case["frequencies"], rtol=1e-13)
    assert _attention_factor(config.rope_scaling) == pytest.approx(case["size"], rel=1e-13)


LISTS = {"short_factor": [1.0 + i / 100 for i in range(48)], "long_factor": [1.0 + i for i in range(48)]}
PHI35_MINI = {
    "_name_or_path": "Phi-3.5-mini-instruct",
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {**LISTS, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.3",
    "use_cache": True,
    "vocab_size": 32064,
}
"""As it is published but for its lists and auto_map; Phi-3-mini-128k differs in its window, and by "su"."""


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi3_of_128k(name):
    """The original length stands beside the rotary embedding, and the factor is what the longest one is of it."""
    config = model_config(PHI35_MINI | {"rope_scaling": {**LISTS, "type": name}}, "it")
    lists = {key: tuple(value) for key, value in LISTS.items()}
    assert config.rope_scaling == RopeScaling(kind="longrope", factor=32.0, original_length=4096, **lists)
    assert _attention_factor(config.rope_scaling) == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


def test_where_the_original_length_is_looked_for():
    """A Phi-3 has 4096 of its own unless it stands beside the rotary embedding; others take the nearer one last."""
    rope = {**LISTS, "rope_type": "longrope", "original_max_position_embeddings": 512, "factor": 2.0}
    silent = {name: value for name, value in PHI35_MINI.items() if name != "original_max_position_embeddings"}
    llama = {"model_type": "llama", "hidden_size": 3072, **{name: PHI35_MINI[name] for name in SIZES}}
    lengths = [
        model_config(attributes | {"rope_scaling": rope}, "it").rope_scaling.original_length
        for attributes in (silent, PHI35_MINI, llama, llama | {"original_max_position_embeddings": 256})
    ]
    assert lengths == [4096, 4096, 512, 256]
    gemma = llama | {"model_type": "gemma3_text", "head_dim": 96, "original_max_position_embeddings": 256}
    nested = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    found = model_config(gemma | {"rope_parameters": nested, "num_hidden_layers": 6}, "it").layers()
    assert [layer.rope_scaling.original_length for layer in found][-2:] == [8192, 512], "there it is never beside it"


SCALED = [name for name, each in FAMILIES.items() if each.layer_attributes >= {"rope_theta", "rope_scaling"}]
SCALED = [name for name in SCALED if "longrope" in FAMILIES[name].rope_kinds and name != "muse_glimmer_text"]
"""Without Muse Glimmer, some of whose layers rotate nothing."""


@pytest.mark.parametrize("family", SCALED)
def test_what_is_written_reads_back(family):
    """By every family that rotates positions; it is checked by writing."""
    attributes = {name: 64 if name == "hidden_size" else 2 for name in (*SIZES, "hidden_size", "num_key_value_heads")}
    more = {"head_dim": 8, "position_embedding_type": "rope", "layer_types": [FAMILIES[family].only_layer_type] * 2}
    if more["layer_types"] == [None] * 2:
        more.pop("layer_types")
    more |= {"n_routed_experts": 2, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    sizes = {name: value for name, value in more.items() if name in FAMILIES[family].known_attributes()}
    base = model_config(attributes | sizes | {"model_type": family}, "it")
    pairs = range((base.rope_head_dim or int(base.head_dim * base.rotary_fraction)) // 2)
    lists = {"short_factor": tuple(1.0 + i / 2 for i in pairs), "long_factor": tuple(2.0 + 29 * i for i in pairs)}
    scaling = RopeScaling(kind="longrope", factor=3.3, original_length=10, attention_factor=1.1, **lists)
    first = tuple({**changes, "rope_scaling": scaling} for changes in base.first_blocks)
    pattern = tuple({**changes, "rope_scaling": scaling} for changes in base.pattern)
    config = jaxtp.ModelConfig(
        **{**vars(base), "rope_scaling": scaling, "first_blocks": first, "pattern": pattern},
    )
    written = write_attributes(config, FAMILIES[family], "float32")
    assert written["max_position_embeddings"] == 33
    assert json.loads(json.dumps(written)) == written, "lists, as JSON has them"


MANY = [1.0] * 1_000_000
HOSTILE = {
    "a million": (MANY, r"short_factor has 1,000,000 numbers; longrope needs 48, half of model.head_dim=96"),
    "none": ([], r"short_factor has 0 numbers; longrope needs 48"),
    "one too few": (LISTS["short_factor"][1:], r"short_factor has 47 numbers; longrope needs 48"),
    "missing": (None, r"short_factor of the rotary embedding = missing: should be a list of numbers"),
    "a text": ("1.0" * 48, r"short_factor of the rotary embedding = '1.01.*: should be a list of numbers"),
    "an object": ({str(i): 1.0 for i in range(48)}, r"short_factor .*: should be a list of numbers"),
    "texts": ([1.0] * 47 + ["1.0"], r"short_factor\[47\] of the rotary embedding = '1.0': should be a number above 0"),
    "nested": ([[1.0] * 48], r"short_factor\[0\] .*: should be a number above 0"),
    "a million nested": ([MANY], r"short_factor\[0\] .*: should be a number above 0"),
    "NaN": ([math.nan] * 48, r"short_factor\[0\] .* = nan: should be a number above 0"),
    "infinite": ([1.0, math.inf], r"short_factor\[1\] .* = inf: should be a number above 0"),
    "zero": ([1.0, 0], r"short_factor\[1\] .* = 0: should be a number above 0"),
    "negative": ([-1.0], r"short_factor\[0\] .* = -1.0: should be a number above 0"),
    "true": ([True] * 48, r"short_factor\[0\] .* = True: should be a number above 0"),
    "huge": ([10**400], r"short_factor\[0\] .*: should be a number above 0"),
    "tiny": ([1e-320] * 48, r"frequencies of up to inf radians per position"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_lists_are_one_clear_error(name):
    value, message = HOSTILE[name]
    rope = {**LISTS, "rope_type": "longrope", "short_factor": value}
    with pytest.raises(jaxtp.HFError, match=message) as caught:
        model_config(PHI35_MINI | {"rope_scaling": rope}, "it")
    assert is_one_clear_message(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_mscale": 1.0}, "short_mscale of the rotary embedding 'longrope' is unknown"),
        ({"partial_rotary_factor": 0.75}, "short_factor has 48 numbers; longrope needs 36, half of"),
        ({"attention_factor": -1.0}, "attention_factor = -1.0: should be a number above 0"),
        ({"factor": 0}, "factor of the rotary embedding = 0: should be a number above 0"),
        ({"rope_type": "dynamic"}, "rope_type = 'dynamic' is not supported; a phi3 can have default, longrope"),
    ],
)
def test_what_longrope_cannot_say(changes, message):
    rope = {**LISTS, "rope_type": "longrope", **changes}
    with pytest.raises(jaxtp.HFError, match=message):
        model_config(PHI35_MINI | {"rope_scaling": rope}, "it")
