"""config.json as it is found: bookkeeping is skipped, an attribute that could change the model
is refused by name.
"""

import contextlib
import functools
import itertools
import struct
from functools import partial

import pytest
from hf_folders import assert_all_refused
from hypothesis import given
from hypothesis import strategies as st
from structures import VALUES, changed, examples, gives_one_of
from tables import read_table, write_json

import jaxtp
from jaxtp.data.tokenizer_files import TokenizerError, chat_template, end_token, special_tokens
from jaxtp.generate.__main__ import main as generate
from jaxtp.hf.config_json import model_config, write_attributes
from jaxtp.hf.families import FAMILIES
from jaxtp.hf.model_folder import positive
from jaxtp.tools.check.__main__ import main as check
from jaxtp.tools.convert.__main__ import main as convert
from jaxtp.tools.estimate.__main__ import main as estimate
from jaxtp.train.__main__ import main as train

TABLES = read_table(__file__)

PUBLISHED = read_table(__file__, "published")
SMOLLM2 = PUBLISHED["smollm2"]


def read(attributes, *ignored):
    return model_config(attributes, "config.json", ignored)


def layer_values(config, field):
    """Returns the values of a field by layer: `rope_scaling.factor`, or whether a layer
    `rotates`.
    """
    if field == "rotates":
        return [layer.rope_theta is not None for layer in config.layers()]
    return [functools.reduce(getattr, field.split("."), layer) for layer in config.layers()]


def differences(case):
    """Yields the fields of a row of read_attributes.yaml that are not as they should be."""
    attributes = case.get("only", PUBLISHED[case["model"]] | case.get("with", {}))
    config = read(
        {name: value for name, value in attributes.items() if name not in case.get("without", ())}
    )
    for field, expected in case.get("fields", {}).items():
        found = functools.reduce(getattr, field.split("."), config)
        if found != (pytest.approx(expected) if isinstance(expected, float) else expected):
            yield f"{field} = {found}, not {expected}"
    by_layer = {
        field: list(itertools.islice(itertools.cycle(cycle), config.num_layers))
        for field, cycle in case.get("cycle", {}).items()
    }
    for field, runs in case.get("runs", {}).items():
        by_layer[field] = [value for value, count in runs for _ in range(count)]
    for field, expected in by_layer.items():
        found = layer_values(config, field)
        if found != expected:
            yield f"{field} = {found}, not {expected}"


def test_published_attributes_and_what_transformers_assumes_without_them():
    found = {str(case): list(differences(case)) for case in read_table(__file__, "read_attributes")}
    assert not {case: problems for case, problems in found.items() if problems}


def test_unsupported_attributes_are_refused_by_name():
    assert_all_refused(
        {
            f"{model} {changes}": (partial(read, PUBLISHED[model] | changes), words)
            for model, rows in read_table(__file__, "refused_attributes").items()
            for changes, *words in rows
        }
    )


def test_attributes_without_effect_are_skipped():
    config = read(SMOLLM2)
    assert not [
        name
        for name, value in TABLES["bookkeeping"].items()
        if read(SMOLLM2 | {name: value}) != config
    ]
    assert read(SMOLLM2 | {"quantization_config": {}}) == config
    lite = PUBLISHED["lite"]
    assert read(lite) == read(lite | {"n_group": None, "topk_group": 2})


@pytest.mark.parametrize("name", ["logit_scale", "use_sparse", "auto_map", "a b"])
def test_an_unknown_attribute_is_refused_unless_it_is_ignored(name):
    found = SMOLLM2 | {name: {"AutoModelForCausalLM": "x.X"}}
    quoted = f"'{name}'" if " " in name else name
    with pytest.raises(jaxtp.errors.HFError, match=f"--ignore-config {quoted}$"):
        read(found)
    assert read(found, name) == read(SMOLLM2)


def test_attributes_that_change_the_model_cannot_be_ignored():
    refusals = {}
    for name, value in TABLES["changing"].items():
        attributes = SMOLLM2 | {name: value}
        refusals[f"{name} read"] = (
            partial(read, attributes),
            [f"{name} = ", "change the model"],
        )
        refusals[f"{name} ignored"] = (
            partial(read, attributes, name),
            [f"--ignore-config {name}"],
        )
    for name in ("hidden_size", "model_type", "rope_scaling", "architectures"):
        refusals[name] = (
            partial(read, SMOLLM2, name),
            [f"--ignore-config {name}", "change the model"],
        )
    refusals["misspelt"] = (
        partial(read, SMOLLM2, "pad_tokn_id"),
        ["pad_tokn_id", "pad_token_id"],
    )
    assert_all_refused(refusals)


def test_layers_that_differ_are_few_stacks():
    """A pattern that repeats, or runs of equal blocks: each is compiled once."""
    gemma = PUBLISHED["gemma3"]
    assert len(list(read(gemma | {"num_hidden_layers": 7}).kinds())) == 3
    assert read(gemma).pattern == read(gemma | {"num_hidden_layers": 62}).pattern
    mixture = PUBLISHED["qwen3_moe"] | {"mlp_only_layers": [0]}
    assert [layers for _, layers, _ in read(mixture).kinds()] == [range(1), range(1, 48)]


def test_published_attributes_are_written_as_they_were():
    """But for some that say nothing."""
    gpt_oss = read(PUBLISHED["gpt_oss_20b"])
    assert (
        read({"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}) == gpt_oss
    )
    assert rewritten_attributes(gpt_oss, PUBLISHED["gpt_oss_20b"]) == []
    falcon = PUBLISHED["falcon_h1"]
    assert rewritten_attributes(read(falcon), falcon) == []
    qwen = PUBLISHED["qwen3_next"]
    assert rewritten_attributes(read(qwen), qwen) == ["intermediate_size"]  # of no layer
    written = write_attributes(read(qwen), FAMILIES["qwen3_next"], "bfloat16")
    assert (
        written["layer_types"]
        == PUBLISHED["qwen3_5_text"]["layer_types"] + written["layer_types"][:8]
    )


def rewritten_attributes(config, published):
    """Returns the names of published attributes that are written in another way."""
    written = write_attributes(config, FAMILIES[published["model_type"]], "bfloat16")
    return [name for name in written.keys() & published.keys() if written[name] != published[name]]


def test_a_multimodal_qwen_describes_its_text_model():
    text = PUBLISHED["qwen3_5_text"]
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {"depth": 27},
        "video_token_id": 248057,
        "vision_end_token_id": 248054,
    }
    config = read(whole)
    assert config == read(text | {"output_gate_type": "swish", "layer_types": None})
    tied = whole | {"text_config": text | {"tie_word_embeddings": True}}
    assert not read(tied).tie_embeddings, "transformers reads the attribute beside text_config"
    full = read(text | {"layer_types": ["full_attention"] * 40})
    assert (
        write_attributes(full, FAMILIES["qwen3_5_moe_text"], "float32")["full_attention_interval"]
        == 1
    )


COMMANDS = {
    "train": (train, "--model.from-hf {} --run.dir {}"),
    "check": (check, "--model.from-hf {}"),
    "estimate": (estimate, "--model.from-hf {}"),
    "generate": (generate, "--model {} --prompt x"),
    "import": (convert, "import {} {}"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_ignore_config_and_has_it(command, tmp_path, capsys):
    main, words = COMMANDS[command]
    folder = tmp_path / "model"
    folder.mkdir()
    write_json(folder / "config.json", SMOLLM2 | {"twist": 1, "turn": 2, "hidden_act": "gelu"})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    given = words.format(folder, tmp_path / "run").split()

    def error(*ignored):
        with contextlib.suppress(SystemExit):
            main([*given, *(f"--ignore-config={name}" for name in ignored)])
        return capsys.readouterr().err

    first = error()
    second = error("twist")
    assert "--ignore-config twist" in first
    assert "--ignore-config turn" in first
    assert "--ignore-config twist" not in second
    assert "--ignore-config turn" in second
    assert "--ignore-config" not in error("twist", "turn")


def test_numbers_of_attributes_are_positive_and_finite():
    values = [10**400, -(10**400), float("inf"), float("nan"), True, "1", None, [], 0]
    assert_all_refused(
        {repr(value): (partial(positive, "factor", value), ["factor"]) for value in values}
    )


SIZES = {name: value for name, value in PUBLISHED["small"].items() if name != "model_type"}
LAYER_TYPES = ["full_attention", "sliding_attention"]
ROPE = [
    "factor",
    "original_max_position_embeddings",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "rope_theta",
    "low_freq_factor",
    "high_freq_factor",
    "truncate",
    "short_factor",
    "long_factor",
    "rope_type",
    *LAYER_TYPES,
]
KINDS = st.sampled_from(["linear", "llama3", "yarn", "longrope", "su", "default"])
ROPES = st.dictionaries(
    st.sampled_from(ROPE),
    VALUES | st.floats(0.5, 8) | st.lists(VALUES | st.floats(0.5, 8), max_size=40) | KINDS,
)
LAYERS = st.lists(st.sampled_from(LAYER_TYPES), min_size=28, max_size=31) | st.lists(
    st.integers(-1, 40), max_size=3
)


@st.composite
def of_family(draw):
    """Draws attributes that a family knows, beside those of a small model."""
    kind = draw(st.sampled_from(sorted(FAMILIES)))
    base = PUBLISHED["gpt2"] if kind == "gpt2" else SIZES
    known = sorted(FAMILIES[kind].known_attributes())
    drawn = st.dictionaries(
        st.sampled_from(known), VALUES | st.integers(0, 40) | LAYERS | ROPES, max_size=6
    )
    ropes = {
        name: draw(ROPES)
        for name in draw(st.sets(st.sampled_from(["rope_scaling", "rope_parameters"])))
    }
    return {"model_type": kind} | base | ropes | draw(drawn)


@examples(40)
@given(changed(SMOLLM2) | of_family())
def test_any_structure_as_config_json(tmp_path, attributes):
    write_json(tmp_path / "config.json", attributes)
    gives_one_of(jaxtp.ModelConfig, jaxtp.errors.HFError, lambda: jaxtp.hf.read_config(tmp_path))


@examples(40)
@given(st.one_of(changed(TABLES["beside"]), VALUES))
def test_any_structure_beside_a_tokenizer(tmp_path, described):
    write_json(tmp_path / "tokenizer_config.json", described)
    write_json(tmp_path / "generation_config.json", described)
    gives_one_of(str | int | None, TokenizerError, lambda: end_token(tmp_path))
    gives_one_of(dict, TokenizerError, lambda: special_tokens(tmp_path))
    gives_one_of(str | None, TokenizerError, lambda: chat_template(tmp_path))
