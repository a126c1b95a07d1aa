"""Damaged and hostile folders: one clear message each, nothing run, nothing outside of the
folder opened.
"""

import json
import struct
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from hf_folders import assert_all_refused, planted, read_tensors, rewritten, write_model
from hf_folders import write_tensors as write
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from structures import VALUES, changed, examples, gives_one_of, is_one_clear_message, plant
from support import assert_refused, use_mesh
from tables import raised_by, read_table, write_json

import jaxtp
from jaxtp import hf
from jaxtp.data.tokenizer_files import TokenizerError, chat_template, special_tokens
from jaxtp.generate.__main__ import main as generate
from jaxtp.hf.model_folder import Folder, open_folder
from jaxtp.hf.runs import copy_hf_files, load_adapted, run_model_config
from jaxtp.hf.safetensors import HFError, read_header
from jaxtp.tools.convert.__main__ import main

TABLES = read_table(__file__)

CONFIG = TABLES["config"]
TABLE = "model.embed_tokens.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
WEIGHTS = "model.safetensors"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
LAYER = {
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (4,)),
    **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (4, 4)),
    **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (2, 4)),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (6, 4)),
    "mlp.down_proj": (4, 6),
}
SHAPES = {TABLE: (8, 4), "model.norm.weight": (4,), "lm_head.weight": (8, 4)} | {
    f"model.layers.{layer}.{name}.weight": shape
    for layer in range(2)
    for name, shape in LAYER.items()
}


def tensors(dtype=np.float32):
    return {name: np.full(shape, 0.5, dtype) for name, shape in SHAPES.items()}


def write_config(folder, changes=()):
    write_json(folder / "config.json", CONFIG | dict(changes))


def write_whole(folder):
    """Writes a folder with nothing wrong."""
    return write_model(folder, CONFIG, tensors())


@pytest.fixture
def whole(tmp_path):
    return write_whole(tmp_path / "model")


def split(folder):
    """Writes the same in two files with an index; returns the file of each tensor."""
    (folder / WEIGHTS).unlink()
    listed = {name: FIRST if i < 9 else SECOND for i, name in enumerate(SHAPES)}
    for file in (FIRST, SECOND):
        write(folder / file, listed_in(file, listed))
    write_index(folder, listed)
    return listed


def listed_in(file, listed):
    return {name: array for name, array in tensors().items() if listed[name] == file}


def write_index(folder, listed):
    write_json(folder / INDEX, {"weight_map": listed})


# What follows returns changes of a whole folder.


def in_turn(*changes):
    def change(folder):
        for each in changes:
            each(folder)

    return change


def listing(changes):
    """Changes the index of a folder of two files."""
    return lambda folder: write_index(folder, split(folder) | changes)


def data(change):
    return rewritten(WEIGHTS, change)


def header(edit):
    """Changes the header by a function of its objects."""

    def change(content):
        (size,) = struct.unpack("<Q", content[:8])
        text = json.dumps(edit(json.loads(content[8 : 8 + size]))).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + size :]

    return data(change)


def entry(changes):
    """Changes what the header says of one tensor."""
    return header(lambda found: found | {Q: found[Q] | changes})


def config(changes):
    return lambda folder: write_config(folder, changes)


def content(name, written):
    return lambda folder: (folder / name).write_bytes(written)


def without(name):
    return lambda folder: (folder / name).unlink()


def weights(arrays):
    return lambda folder: write(folder / WEIGHTS, tensors() | arrays)


def poisoned(name, value, dtype=np.float32):
    def change(folder):
        arrays = tensors(dtype)
        arrays[name][-1, 1] = value
        write(folder / WEIGHTS, arrays)

    return change


def pickled(name):
    return in_turn(without(WEIGHTS), content(name, b"\x80\x04cos\nsystem\n"))


def gap(found):
    for name in found:
        if name not in ("__metadata__", TABLE):
            found[name]["data_offsets"] = [offset + 4 for offset in found[name]["data_offsets"]]
    return found


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060552\n"
YARN = {"type": "yarn", "factor": 2, "twist": [[]] * 10**4}
TIED = config({"tie_word_embeddings": True})
LONGER = data(lambda found: found + b"1234")
FIRST_LAYER, OTHER_LAYER = (f"layers.{layer}.self_attn.q_proj".encode() for layer in range(2))
BAD = {  # of config.json, of safetensors, and of the index
    "not UTF-8": (content("config.json", b'{"a": "\xff\xfe"}'), "not JSON"),
    "nested too deeply": (content("config.json", b"[" * 200_000), "config.json"),
    "an endless number": (config({"rms_norm_eps": 10**400}), "401 digits"),
    "an endless part": (config({"rope_scaling": YARN}), "twist", "yarn"),
    "ten thousand unknown": (config({f"x_{i}": i for i in range(10_000)}), "x_0 = 0", "9990 more"),
    "header cut off": (data(lambda found: found[:40]), "header", "40"),
    "data cut off": (data(lambda found: found[:-8]), "cut off"),
    "data too long": (LONGER, "not fully covered"),
    "huge header": (
        data(lambda found: struct.pack("<Q", 2**63) + found[8:]),
        "9,223,372,036,854,775,808",
    ),
    "header is not JSON": (
        data(lambda found: found[:8] + b"garbage" + found[15:]),
        "header",
        "JSON",
    ),
    "header is a list": (header(lambda found: []), "header", "sequence"),
    "a tensor twice": (
        data(lambda found: found.replace(OTHER_LAYER, FIRST_LAYER)),
        "invalid offset",
    ),
    "a gap": (in_turn(header(gap), LONGER), "invalid offset"),
    "shape of many dims": (entry({"shape": [1] * 98 + [4, 4]}), Q, "100 dims"),
    "a name that moves the cursor": (
        header(lambda found: found | {"\x1b[2J\n" * 1000: found[Q] | {"data_offsets": [5, 4]}}),
        r"\x1b[2J\n",
    ),
    "tensor missing": (weights({Q: None}), "missing", Q),
    "tied to another head": (
        in_turn(TIED, poisoned("lm_head.weight", 7.0)),
        "tie_word_embeddings",
        TABLE,
    ),
    "tied to a smaller head": (
        in_turn(TIED, weights({"lm_head.weight": np.ones((7, 4), np.float32)})),
        "wrong shape: lm_head.weight",
        "7x4",
    ),
    "not fetched": (content(WEIGHTS, POINTER), "269,060,552", f"lfs pull --include {WEIGHTS}"),
    "shard is a folder": (
        in_turn(listing({"extra": "sub.safetensors"}), planted("sub.safetensors", "folder")),
        "a folder",
    ),
    "half a character": (listing({"extra": "\ud800.safetensors"}), "surrogate"),
    "a name too long": (listing({"extra": f"{'x' * 300}.safetensors"}), "File name too long"),
}
READERS = {
    "contents": lambda text: content("config.json", text.encode()),
    "attributes": config,
    "entries": entry,
    "listed": listing,
    "indices": lambda text: in_turn(split, content(INDEX, text.encode())),
    "without": without,
    "of two without": lambda file: in_turn(split, without(file)),
    "of two planted": lambda change: in_turn(split, planted(*change)),
    "pickled": pickled,
    "poisoned": lambda change: poisoned(*change),
    "with a tensor": lambda change: weights({change[0]: np.ones(change[1], np.float32)}),
}
"""How a change is described in each list of test_hostile.yaml."""


def hostile():
    """Yields the name of each case, its change of a folder, and words of the message."""
    for case, (change, *words) in BAD.items():
        yield case, change, words
    for kind, change_of in READERS.items():
        for described, *words in TABLES[kind]:
            yield str(described), change_of(described), words
    for name, kind, word in TABLES["planted"]:
        yield f"{name}: {kind}", planted(name, kind), [word]


def test_a_damaged_or_hostile_folder_is_refused_in_one_message(tmp_path):
    """Which names the folder, and tells nothing of the files outside of it."""
    refusals = {}
    for number, (case, change, words) in enumerate(hostile()):
        (tmp_path / str(number)).mkdir()
        folder = write_whole(tmp_path / str(number) / "model")
        change(folder)
        refusals[case] = partial(hf.load, folder), [*words, str(folder)]
    assert_all_refused(refusals)


def test_the_command_prints_the_message_and_writes_nothing(whole, tmp_path, capsys):
    poisoned(Q, np.nan)(whole)
    with pytest.raises(HFError) as refused:
        hf.load(whole)
    assert main(["import", str(whole), str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == f"jaxtp convert: error: {refused.value}\n"
    assert not (tmp_path / "run").exists()


def test_a_whole_folder_loads(whole):
    """So that each case fails for its own reason; also with what older versions stored beside
    the weights.
    """
    hf.load(whole)
    weights({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(1, np.float32)})(whole)
    TIED(whole)
    assert hf.load(whole).head is None
    split(whole)
    write_config(whole)
    assert hf.load(whole).head is not None


def test_the_index_decides_which_copy_is_read(whole, capsys):
    listed = split(whole)
    write(
        whole / FIRST,
        listed_in(FIRST, listed)
        | {"model.layers.1.mlp.down_proj.weight": np.ones((4, 6), np.float32)},
    )
    write(whole / WEIGHTS, {each: array + 1 for each, array in tensors().items()})
    assert all(np.max(leaf) <= 0.5 for leaf in jax.tree.leaves(hf.load(whole)))
    said = capsys.readouterr().err
    assert f"not read: {WEIGHTS}" in said
    assert "this copy is not read" in said
    (whole / FIRST).unlink()
    (whole / SECOND).unlink()
    assert all(np.max(leaf) == 1.5 for leaf in jax.tree.leaves(hf.load(whole)))
    assert f"{INDEX} is not read" in capsys.readouterr().err


WRAPPERS = {
    "'_orig_mod.'": lambda name: f"_orig_mod.{name}",
    "'module.'": lambda name: f"module.{name}",
    "'_orig_mod.' and 'module.'": lambda name: f"module._orig_mod.{name}",
    "'_orig_mod.', of layers": lambda name: name.replace("layers.0.", "layers.0._orig_mod."),
    "'_checkpoint_wrapped": lambda name: name.replace(".mlp.", ".mlp._checkpoint_wrapped_module."),
}
"""Names of tensors as PyTorch's wrappers make them, and what a note says of them, before a
comma.
"""


def test_names_with_the_wrappers_of_pytorch(whole):
    for kind, rename in WRAPPERS.items():
        write(whole / WEIGHTS, {rename(name): array for name, array in tensors().items()})
        folder = open_folder(whole)
        assert any(kind.partition(",")[0] in note for note in folder.notes), kind
        assert {*folder.tensors} == {*SHAPES}, kind
        assert all(name == tensor.name for name, tensor in folder.tensors.items()), kind


def test_a_gguf_file_is_named(tmp_path, capsys):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for path in (file, tmp_path):
        assert_refused(generate, [f"--model={path}", "--prompt=a"], "model.gguf is GGUF", capsys)


@pytest.mark.wide
@examples(20)
@given(
    place=st.lists(st.sampled_from((FIRST, SECOND)), min_size=len(SHAPES), max_size=len(SHAPES)),
    copies=st.sets(st.sampled_from(sorted(SHAPES))),
    stray=st.booleans(),
    kind=st.sampled_from([None, *WRAPPERS]),
)
def test_any_copies_and_wrappers(place, copies, stray, kind, tmp_path_factory):
    """Each tensor is read from the file that the index lists, under its plain name, and each
    copy is mentioned.
    """
    folder = tmp_path_factory.mktemp("model")
    rename = WRAPPERS.get(kind, str)
    listed = dict(zip(SHAPES, place, strict=True))
    for file in (FIRST, SECOND):
        own = listed_in(file, listed)
        others = {name: tensors()[name] + 1 for name in copies - {*own} if file in listed.values()}
        write(folder / file, {rename(name): array for name, array in (own | others).items()})
    if stray:
        write(folder / WEIGHTS, {name: array + 1 for name, array in tensors().items()})
    write_config(folder)
    write_index(folder, {rename(name): file for name, file in listed.items()})
    opened = open_folder(folder)
    assert {*opened.tensors} == {*SHAPES}
    for name, tensor in opened.tensors.items():
        assert_array_equal(tensor.read(), tensors()[name])
    has_copies = bool(copies) and len(set(place)) == 2
    assert any("this copy is not read" in note for note in opened.notes) == has_copies
    unread = [note.partition("; not read: ")[2] for note in opened.notes]
    assert any(WEIGHTS in names.split(", ") for names in unread) == stray


def test_a_snapshot_of_the_hub_links_to_its_blobs(whole, tmp_path):
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    blobs = tmp_path / "models--a--b/blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for file in whole.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert open_folder(snapshot).tensors.keys() == SHAPES.keys()


def test_a_folder_that_its_mesh_or_options_do_not_fit_is_refused(whole):
    for axis in ("fsdp", "cp"):
        with (
            use_mesh(**{axis: 3}),
            pytest.raises(HFError, match=rf"{axis} can be 1, 2"),
        ):
            hf.load(whole)
    for name in ("norm_eps", "remta", "lora"):
        with pytest.raises(
            HFError, match=rf"{name}: jaxtp.hf.load takes .*remat.* the architecture"
        ):
            hf.load(whole, **{name: 1e-3})


def test_weights_may_lie_on_another_disk(whole, tmp_path):
    """Safetensors are read wherever a link leads; a tokenizer, which is copied, is not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (whole / WEIGHTS).rename(disk / "weights")
    (whole / WEIGHTS).symlink_to(disk / "weights")
    assert read_tensors(whole).keys() == SHAPES.keys()
    (disk / "secret").write_text("{}")
    (whole / "tokenizer_config.json").symlink_to(disk / "secret")
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(HFError, match="outside of the folder"):
        copy_hf_files(whole, run)
    assert not list(run.iterdir())


def test_a_checkpoint_that_does_not_name_its_model_or_base_is_refused():
    run = Path("run")
    own = {"config": {"model": {}}}
    assert "does not name the base model" in raised_by(load_adapted, run, {}, None)
    assert "does not record its model" in raised_by(run_model_config, run, {})
    assert "needs no code" in raised_by(run_model_config, run, own, dict)


LONG = {
    "nested too deeply": b'{"a": ' + b"[" * 100_000,
    "10,000 digits": b'{"eos_token_id": %s}' % (b"9" * 10_000),
}


def test_hostile_files_beside_a_tokenizer_are_refused(tmp_path):
    (tmp_path / "victim").write_text('{"eos_token": "secret"}')
    for case, message in TABLES["beside"].items():
        folder = tmp_path / case
        folder.mkdir()
        for name, action in (
            ("tokenizer_config.json", special_tokens),
            ("chat_template.jinja", chat_template),
        ):
            plant(folder / name, case)
            assert_unreadable(folder, action, message)
    for message, written in LONG.items():
        (tmp_path / "tokenizer_config.json").write_bytes(written)
        assert_unreadable(tmp_path, special_tokens, message)


def assert_unreadable(folder, action, message):
    with pytest.raises(TokenizerError, match=message) as caught:
        action(folder)
    assert is_one_clear_message(caught.value)


def test_values_that_are_no_template_are_none(tmp_path):
    listed = [{"name": ["default"], "template": "x"}]
    for template in (listed, [{"name": {}}, 3, None], {"default": "x"}, 7, [], None):
        write_json(tmp_path / "tokenizer_config.json", {"chat_template": template})
        assert chat_template(tmp_path) is None, template


SHARDED = {"metadata": {"total_size": 24}, "weight_map": {"a": FIRST}}


@examples(60)
@given(header=changed(TABLES["header"]), index=changed(SHARDED))
def test_any_structure_as_a_header_and_an_index(header, index, tmp_path):
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(32))
    gives_one_of(dict, HFError, lambda: read_header(tmp_path / "x.safetensors"))
    write(tmp_path / FIRST, {"a": np.ones((2, 3), np.float32)})
    write_config(tmp_path)
    write_json(tmp_path / INDEX, index)
    gives_one_of(Folder, HFError, lambda: open_folder(tmp_path))


@pytest.mark.wide
@examples(20)
@given(changes=st.dictionaries(st.sampled_from(sorted(CONFIG)), VALUES, min_size=1, max_size=3))
def test_many_configurations_of_a_whole_folder(changes, tmp_path):
    write_model(tmp_path, CONFIG | changes, tensors())
    gives_one_of(jaxtp.Decoder, HFError, lambda: hf.load(tmp_path))
