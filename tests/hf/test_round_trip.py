"""Import then export, bit by bit, from any mesh; never a half-written folder; families chosen
and refused by name.
"""

import itertools
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from hf_folders import (
    load_on,
    random_model,
    read_tensors,
    reference_attributes,
    stored_tensors,
    write_model,
)
from hf_reference import COPIED, FOLDER, MADE, NEWER, model_types
from support import swept
from tables import read_json, read_table, with_tuples

import jaxtp
from jaxtp import hf
from jaxtp.hf.config_json import choose_family, family_of, write_attributes
from jaxtp.hf.families import ALIASES, FAMILIES, WRAPPERS
from jaxtp.hf.model_folder import INDEX, open_folder, read_attributes
from jaxtp.hf.safetensors import DTYPES, read_header
from jaxtp.hf.tensor_map import full_names
from jaxtp.layers.rope import RopeScaling

TABLES = read_table(__file__)

SMALL = jaxtp.ModelConfig(
    vocab_size=11, d_model=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=12
)

MESHES = TABLES["meshes"]
READ = [name for name in NEWER if model_types(name) <= {*FAMILIES, *WRAPPERS, *ALIASES}]
# An export has 16 bits instead of MXFP4; Apertus has float64 scalars, which are constants.
WHOLE = [name for name in COPIED + MADE + READ if not name.endswith(("mxfp4", "apertus"))]
BY_TYPES = {frozenset(model_types(name)): name for name in reversed(WHOLE)}
"""The first model of each family; its others differ in settings."""
CASES = [
    case
    for case in zip(WHOLE, itertools.cycle(MESHES), strict=False)
    if case[0] in BY_TYPES.values()
]
# families of equal sizes share compiled programs
CASES.sort(key=lambda case: MESHES.index(case[1]))
FIRST = [case for case in CASES if case[0] == "phi3"]


def in_dtype(source, target, dtype):
    """Writes the same model with its weights in another dtype."""
    arrays = {name: array.astype(DTYPES[dtype]) for name, array in read_tensors(source).items()}
    return write_model(target, read_attributes(source), arrays)


def is_ignored(name, family):
    """Returns whether a tensor is in files of older versions, and nothing reads it."""
    return re.sub(r"\.\d+\.", ".{layer}.", name) in family.ignored_tensors


@swept("case", CASES, *FIRST)
def test_an_export_equals_what_was_imported_bit_by_bit(case, tmp_path):
    name, mesh = case
    source = in_dtype(FOLDER / name, tmp_path / "source", "F32") if name in NEWER else FOLDER / name
    model = load_on(source, **mesh)
    family = family_of(read_attributes(source), name)
    whole = {"family": family.model_type} if family.wrapper is None else {"like": source}
    hf.save(model, tmp_path / "out", **whole, max_shard_size="20KB")
    expected = stored_tensors(source)
    found = stored_tensors(tmp_path / "out")
    if family.wrapper is None:
        expected = full_names(expected, family)
    # written as pairs: other values at the same places
    if read_attributes(source).get("rope_interleave") is False:
        expected, found = (
            {name: tensor[:2] for name, tensor in each.items()} for each in (expected, found)
        )
    differing = [name for name in expected | found if expected.get(name) != found.get(name)]
    assert not [name for name in differing if not is_ignored(name, family)]
    assert hf.read_config(tmp_path / "out") == hf.read_config(source)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    index = read_json(tmp_path / "out" / INDEX)
    assert index["weight_map"].keys() == found.keys()
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "source"}


@pytest.mark.wide
def test_settings_of_other_models_are_written_and_read_back():
    """`write_attributes` refuses settings that would be read otherwise."""
    for name in {*WHOLE} - {*BY_TYPES.values()}:
        family = family_of(read_attributes(FOLDER / name), name)
        assert write_attributes(hf.read_config(FOLDER / name), family, "float32"), name


PARAMS = {"BF16": "bfloat16", "F16": "float32"}


@swept("dtype", PARAMS, "BF16")
def test_sixteen_bits(dtype, tmp_path):
    source = in_dtype(FOLDER / "llama_linear", tmp_path / "source", dtype)
    model = load_on(source, fsdp=2, tp=2)
    assert model.config.precision.param == PARAMS[dtype]
    assert all(leaf.dtype == PARAMS[dtype] for leaf in jax.tree.leaves(nnx.state(model)))
    hf.save(model, tmp_path / "out", dtype="float16" if dtype == "F16" else None)
    assert stored_tensors(tmp_path / "out") == stored_tensors(source)


def test_each_device_gets_its_share_and_no_more():
    kernel = load_on(FOLDER / "llama_gqa", fsdp=2, tp=4).blocks.mlp.down.kernel[...]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 192 // 4, 96 // 2)}


@pytest.fixture(scope="module")
def small():
    return random_model(SMALL)


def test_an_export_leaves_no_half_of_a_folder_and_no_other_folder_changed(small, tmp_path):
    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hf.save(small, tmp_path / "out", progress=stop)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(jaxtp.errors.HFError, match="already exists"):
        hf.save(small, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_export_without_a_tokenizer_is_mentioned(small, tmp_path, capsys):
    hf.save(small, tmp_path / "out")
    assert "--tokenizer-from" in capsys.readouterr().err
    (tmp_path / "out/tokenizer.json").write_text("{}")
    hf.save(small, tmp_path / "with", tokenizer_from=tmp_path / "out")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_progress_counts_every_byte(name, tmp_path):
    """Once, also where a tensor is several parameters."""
    read = []
    written = []
    model = hf.load(FOLDER / name, progress=lambda *counts: read.append(counts))
    hf.save(model, tmp_path / "out", progress=lambda *counts: written.append(counts))
    total = sum(
        tensor.num_bytes for tensor in read_header(FOLDER / name / "model.safetensors").values()
    )
    assert read[-1] == written[-1] == (total, total)


FAMILY_FIELDS = read_table(__file__, "families")
NEVER_FIRST = {"gemma4_unified_text", "ernie4_5", "glm4_moe_lite", "exaone", "internlm3"}
NEVER_FIRST |= {"iquestcoder", "cwm", "solar_open", "sarvam_moe", "sarvam_mla"}
"""Families whose models another family can represent too."""


def of_fields(fields):
    """Returns a small model with fields of `families.yaml`."""
    if "rope_scaling" in fields:
        fields = fields | {"rope_scaling": RopeScaling(**fields["rope_scaling"])}
    return replace(SMALL, **with_tuples(fields))


@pytest.mark.wide
def test_the_family_follows_from_the_model():
    """And its attributes can be written, and read back: `choose_family` checks it."""
    assert FAMILY_FIELDS.keys() | NEVER_FIRST == FAMILIES.keys()
    chosen = {
        family: choose_family(of_fields(fields), None).model_type
        for family, fields in FAMILY_FIELDS.items()
    }
    assert not {family: other for family, other in chosen.items() if other != family}


def test_a_model_of_no_family_is_refused():
    for message, fields in TABLES["refused"].items():
        with pytest.raises(jaxtp.errors.HFError, match=message) as refused:
            choose_family(replace(SMALL, **fields), None)
        assert "experts" not in str(refused.value), (
            "families with experts are not the nearest of a dense model"
        )
    with pytest.raises(
        jaxtp.errors.HFError,
        match=r"a llama cannot represent this model .*sliding_window: 4 -> None",
    ):
        write_attributes(replace(SMALL, sliding_window=4), FAMILIES["llama"], "float32")


def test_shards_hold_what_fits(small, tmp_path):
    for size, files in ((10**9, 1), ("2KB", 3), (1, 21)):
        hf.save(small, tmp_path / str(size), max_shard_size=size)
        assert len(list((tmp_path / str(size)).glob("*.safetensors"))) == files
    with pytest.raises(jaxtp.errors.HFError, match="max_shard_size = '5 apples'"):
        hf.save(small, tmp_path / "other", max_shard_size="5 apples")


@pytest.mark.wide
def test_scalars_with_one_value(tmp_path):
    """An export writes them in the dtype of the others; an import needs none, and refuses other
    values.
    """
    model = hf.load(FOLDER / "apertus")
    name = "model.layers.1.mlp.act_fn.beta"
    hf.save(model, tmp_path / "out", dtype="bfloat16")
    tensors = open_folder(tmp_path / "out").tensors
    assert (tensors[name].dtype, tensors[name].shape, tensors[name].is_about(0.5)) == (
        "BF16",
        (),
        True,
    )
    assert hf.load(tmp_path / "out").config.precision.param == "bfloat16"
    arrays = {
        key: tensor.read()
        for key, tensor in open_folder(FOLDER / "apertus").tensors.items()
        if tensor.shape
    }
    attributes = reference_attributes("apertus")
    write_model(tmp_path / "without", attributes, arrays)
    write_model(tmp_path / "wrong", attributes, arrays | {name: np.float32(0.6)})
    assert hf.load(tmp_path / "without").config == model.config
    with pytest.raises(jaxtp.errors.HFError, match=rf"{name}, .* 0\.5$"):
        hf.load(tmp_path / "wrong")
