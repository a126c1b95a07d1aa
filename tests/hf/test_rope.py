"""Rotary embeddings as config.json spells them: frequencies of transformers, real files, hostile
lists.
"""

import json
import math
from functools import partial

import jax.numpy as jnp
import pytest
from hf_folders import assert_all_refused
from hf_reference import FOLDER
from numpy.testing import assert_allclose
from tables import read_json, read_table

import jaxtp
from jaxtp.hf.config_json import model_config, write_attributes
from jaxtp.hf.families import FAMILIES
from jaxtp.layers.rope import RopeScaling, apply_rope, rope_frequencies

SIZES = {
    "vocab_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
LISTS = {
    "short_factor": [1.0 + i / 100 for i in range(48)],
    "long_factor": [1.0 + i for i in range(48)],
}
PHI35_MINI = read_table(__file__, "published")["phi35_mini"] | {
    "rope_scaling": {**LISTS, "type": "longrope"}
}
"""As it is published but for its lists and auto_map; Phi-3-mini-128k differs in its window, and
by "su".
"""


def attention_factor(scaling):
    """Returns what queries and keys are multiplied by: at position 0, where nothing is rotated."""
    pair = jnp.ones((1, 1, 1, 2 * max(1, len(scaling.short_factor))))
    return float(apply_rope(pair, jnp.zeros(1, jnp.int32), 1e4, scaling, 8)[0, 0, 0, 0])


def test_frequencies_are_those_of_transformers():
    """Its own functions in float64; one part in 10^13 is 10^-7 of a radian at a million tokens."""
    factors = {}
    for case in read_json(FOLDER / "rope.json"):
        rope = case["rope_parameters"]
        attributes = {
            "model_type": "llama",
            "hidden_size": 2 * case["head_dim"],
            "max_position_embeddings": 131_072,
        }
        config = model_config(SIZES | attributes | {"rope_parameters": rope}, "it")
        found = rope_frequencies(
            case["head_dim"], config.rope_theta, config.rope_scaling, case["length"]
        )
        assert_allclose(found[case["dims"]], case["frequencies"], rtol=1e-13, err_msg=str(rope))
        factors[case["size"]] = config.rope_scaling
    for size, scaling in factors.items():
        assert attention_factor(scaling) == pytest.approx(size, rel=1e-6), scaling


def test_phi3_of_128k():
    """The original length stands beside the rotary embedding, and the factor is what the longest
    one is of it.
    """
    lists = {key: tuple(value) for key, value in LISTS.items()}
    for name in ("longrope", "su", "yarn"):
        config = model_config(PHI35_MINI | {"rope_scaling": {**LISTS, "type": name}}, "it")
        assert config.rope_scaling == RopeScaling(
            kind="longrope", factor=32.0, original_length=4096, **lists
        )
    expected = math.sqrt(1 + math.log(32) / math.log(4096))
    assert attention_factor(config.rope_scaling) == pytest.approx(expected, rel=1e-6)


def test_where_the_original_length_is_looked_for():
    """A Phi-3 has 4096 of its own unless it stands beside the rotary embedding; others take the
    nearer one last.
    """
    rope = {
        **LISTS,
        "rope_type": "longrope",
        "original_max_position_embeddings": 512,
        "factor": 2.0,
    }
    silent = {
        name: value
        for name, value in PHI35_MINI.items()
        if name != "original_max_position_embeddings"
    }
    llama = {
        "model_type": "llama",
        "hidden_size": 3072,
        **{name: PHI35_MINI[name] for name in SIZES},
    }
    lengths = [
        model_config(attributes | {"rope_scaling": rope}, "it").rope_scaling.original_length
        for attributes in (
            silent,
            PHI35_MINI,
            llama,
            llama | {"original_max_position_embeddings": 256},
        )
    ]
    assert lengths == [4096, 4096, 512, 256]
    gemma = llama | {
        "model_type": "gemma3_text",
        "head_dim": 96,
        "original_max_position_embeddings": 256,
    }
    nested = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    found = model_config(gemma | {"rope_parameters": nested, "num_hidden_layers": 6}, "it").layers()
    assert [layer.rope_scaling.original_length for layer in found][-2:] == [8192, 512], (
        "there it is never beside it"
    )


def test_a_scaling_is_written_as_it_was_read_by_every_family_that_rotates():
    """`write_attributes` checks that it reads back; Muse Glimmer is left out, some of whose
    layers rotate nothing.
    """
    for name, family in FAMILIES.items():
        rotates = (
            family.layer_attributes >= {"rope_theta", "rope_scaling"}
            and "longrope" in family.rope_kinds
        )
        if rotates and name != "muse_glimmer_text":
            written = write_attributes(with_longrope(name), family, "float32")
            assert written["max_position_embeddings"] == 33, name
            assert json.loads(json.dumps(written)) == written, f"{name}: lists, as JSON has them"


def with_longrope(name):
    """Returns a small model of a family with LongRoPE in all layers."""
    family = FAMILIES[name]
    sizes = dict.fromkeys((*SIZES, "num_key_value_heads"), 2) | {
        "hidden_size": 64,
        "model_type": name,
    }
    more = {
        "head_dim": 8,
        "position_embedding_type": "rope",
        "n_routed_experts": 2,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "attn_layer_indices": [0, 1],
    }
    if family.layer_types:
        more["layer_types"] = ["full_attention"] * 2
    known = {name: value for name, value in more.items() if name in family.known_attributes()}
    base = model_config(sizes | known, "it")
    pairs = range((base.rope_head_dim or int(base.head_dim * base.rotary_fraction)) // 2)
    lists = {
        "short_factor": tuple(1.0 + i / 2 for i in pairs),
        "long_factor": tuple(2.0 + 29 * i for i in pairs),
    }
    scaling = RopeScaling(
        kind="longrope", factor=3.3, original_length=10, attention_factor=1.1, **lists
    )
    blocks = {
        field: tuple({**changes, "rope_scaling": scaling} for changes in getattr(base, field))
        for field in ("first_blocks", "pattern")
    }
    return jaxtp.ModelConfig(**{**vars(base), **blocks, "rope_scaling": scaling})


MANY = [1.0] * 1_000_000
HOSTILE = {
    "a million": (MANY, "short_factor", "1,000,000 numbers", "48"),
    "none": ([], "short_factor", "0 numbers"),
    "one too few": (LISTS["short_factor"][1:], "47 numbers"),
    "missing": (None, "short_factor", "missing"),
    "a text": ("1.0" * 48, "short_factor", "'1.01."),
    "an object": ({str(i): 1.0 for i in range(48)}, "short_factor"),
    "texts": ([1.0] * 47 + ["1.0"], "short_factor[47]", "'1.0'"),
    "nested": ([[1.0] * 48], "short_factor[0]"),
    "NaN": ([math.nan] * 48, "short_factor[0]", "nan"),
    "infinite": ([1.0, math.inf], "short_factor[1]", "inf"),
    "zero": ([0.0] * 48, "short_factor[0]", "0.0"),
    "negative": ([-1.0] * 48, "short_factor[0]", "-1.0"),
    "huge": ([10**400], "short_factor[0]"),
    "tiny": ([1e-320] * 48, "inf radians per position"),
}


def test_hostile_lists_are_refused_in_one_short_message():
    refusals = {}
    for name, (value, *words) in HOSTILE.items():
        rope = {**LISTS, "rope_type": "longrope", "short_factor": value}
        refusals[name] = (
            partial(model_config, PHI35_MINI | {"rope_scaling": rope}, "it"),
            words,
        )
    assert_all_refused(refusals)
