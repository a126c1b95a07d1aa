"""Damaged and hostile folders: one clear message each, nothing run, nothing outside of the folder opened."""

import functools
import json
import os
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_folders import assert_all_refused, read_tensors, reference_attributes, reference_tensors, write_model
from hf_folders import write_tensors as write
from hypothesis import given
from hypothesis import strategies as st
from structures import VALUES, changed, examples, gives_one_of, is_one_clear_message

import jaxtp
from jaxtp.data.tokenizer_files import TokenizerError, chat_template, read
from jaxtp.generate.__main__ import main as generate
from jaxtp.hf.model_folder import Folder, open_folder
from jaxtp.hf.runs import copy_hf_files
from jaxtp.hf.safetensors import HFError, read_header
from jaxtp.tools.convert.__main__ import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}
TABLE = "model.embed_tokens.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
WEIGHTS = "model.safetensors"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
LAYER = {
    **{"input_layernorm": (4,), "post_attention_layernorm": (4,)},
    **{"self_attn.q_proj": (4, 4), "self_attn.o_proj": (4, 4), "self_attn.k_proj": (2, 4), "self_attn.v_proj": (2, 4)},
    **{"mlp.gate_proj": (6, 4), "mlp.up_proj": (6, 4), "mlp.down_proj": (4, 6)},
}
SHAPES = {TABLE: (8, 4), "model.norm.weight": (4,), "lm_head.weight": (8, 4)} | {
    f"model.layers.{layer}.{name}.weight": shape for layer in range(2) for name, shape in LAYER.items()
}


def tensors(dtype=np.float32):
    return {name: np.full(shape, 0.5, dtype) for name, shape in SHAPES.items()}


def write_config(folder, **changes):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def write_whole(folder):
    """Writes a folder with nothing wrong."""
    return write_model(folder, CONFIG, tensors())


@pytest.fixture
def whole(tmp_path):
    return write_whole(tmp_path / "model")


def split(folder):
    """Writes the same in two files with an index; returns the index."""
    (folder / WEIGHTS).unlink()
    index = {"weight_map": {name: FIRST if i < 9 else SECOND for i, name in enumerate(SHAPES)}}
    for file in (FIRST, SECOND):
        write(folder / file, {name: array for name, array in tensors().items() if index["weight_map"][name] == file})
    (folder / INDEX).write_text(json.dumps(index))
    return index


# What follows returns changes of a whole folder.


def in_turn(*changes):
    def change(folder):
        for each in changes:
            each(folder)

    return change


def index(**weight_map):
    def change(folder):
        found = split(folder)
        found["weight_map"] |= weight_map
        (folder / INDEX).write_text(json.dumps(found))

    return change


def header(edit, *, length=None):
    """Rewrites the header by a function of it, or of its text."""

    def change(folder):
        path = folder / WEIGHTS
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        edited = edit(json.loads(data[8 : 8 + size]))
        text = edited if isinstance(edited, bytes) else json.dumps(edited).encode()
        begin = struct.pack("<Q", len(text) if length is None else length)
        path.write_bytes(begin + text + data[8 + size :])

    return change


def entry(**changes):
    """Changes what the header says of one tensor."""
    return header(lambda found: found | {Q: found[Q] | changes})


def config(**changes):
    return lambda folder: write_config(folder, **changes)


def content(name, written):
    return lambda folder: (folder / name).write_bytes(written)


def without(name):
    return lambda folder: (folder / name).unlink()


def weights(**changes):
    arrays = {name.replace("__", "."): array for name, array in changes.items()}
    return lambda folder: write(folder / WEIGHTS, tensors() | arrays)


def poisoned(name, value, dtype=np.float32):
    def change(folder):
        arrays = tensors(dtype)
        arrays[name][-1, 1] = value
        write(folder / WEIGHTS, arrays)

    return change


def cut(num_bytes):
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:num_bytes])


def longer(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"1234")


def link(name, target):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        (folder.parent / "outside").write_text("secret")
        (folder / name).symlink_to(target)

    return change


def pipe(folder):
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)  # opening it would wait for ever


def directory(name):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


def duplicate(found):
    text = json.dumps(found)
    return (text[:-1] + f', "{Q}": {json.dumps(found[Q])}}}').encode()


def pickled(name):
    return in_turn(without(WEIGHTS), content(name, b"\x80\x04cos\nsystem\n"))


def gap(found):
    for name in found:
        if name not in ("__metadata__", TABLE):
            found[name]["data_offsets"] = [offset + 4 for offset in found[name]["data_offsets"]]
    return found


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060552\n"
YARN = {"type": "yarn", "factor": 2, "twist": [[]] * 10**4}
TIED = config(tie_word_embeddings=True)
CONFIGURATIONS = {
    "missing": (without("config.json"), "no config.json"),
    "not JSON": (content("config.json", b"{'a': 1}"), "not JSON"),
    "not UTF-8": (content("config.json", b'{"a": "\xff\xfe"}'), "not JSON"),
    "a list": (content("config.json", b"[1, 2]"), "a list", "object"),
    "nested too deeply": (content("config.json", b"[" * 200_000), "config.json"),
    "a key twice": (content("config.json", b'{"a": 1, "a": 2}'), "'a'", "twice"),
    "a link out": (link("config.json", "../outside"), "outside of the folder"),
    "a device": (link("config.json", "/dev/zero"), "outside of the folder"),
    "not fetched": (content("config.json", POINTER), "Git LFS", "model lfs pull --include config.json"),
    "an endless number": (config(rms_norm_eps=10**400), "401 digits"),
    "an endless part": (config(rope_scaling=YARN), "twist", "yarn"),
    "an unknown attribute": (config(logit_softcap=30.0), "logit_softcap = 30.0", "--ignore-config logit_softcap"),
    "ten thousand unknown": (config(**{f"x_{i}": i for i in range(10_000)}), "x_0 = 0", "9990 more"),
    "code of its own": (config(auto_map={"AutoModelForCausalLM": "x.py"}), "auto_map", "x.py", "--ignore-config"),
    "kv heads do not divide": (config(num_attention_heads=4, head_dim=2, num_key_value_heads=3), "not divisible"),
    "fewer layers": (config(num_hidden_layers=1), "num_hidden_layers = 1", "2 layers"),
}
FILES = {
    "missing": (without(WEIGHTS), "model.safetensors", INDEX),
    "a pickle": (pickled("pytorch_model.bin"), "pytorch_model.bin", "pickle"),
    "GGUF": (pickled("tiny.Q4_K_M.GGUF"), "tiny.Q4_K_M.GGUF", "gguf_file"),
    "GGUF without config": (in_turn(pickled("tiny.gguf"), without("config.json")), "tiny.gguf", "GGUF"),
    "one name in a wrapper too": (weights(**{f"_orig_mod.{Q}": np.ones((4, 4), np.float32)}), Q, f"_orig_mod.{Q}"),
    "empty": (cut(0), "0 bytes"),
    "header cut off": (cut(40), "header", "40"),
    "data cut off": (cut(-8), "cut off"),
    "data too long": (longer, "4 bytes after"),
    "huge header": (header(lambda found: found, length=2**63), "9,223,372,036,854,775,808"),
    "header is not JSON": (header(lambda found: b"garbage"), "header", "not JSON"),
    "header is a list": (header(lambda found: b"[]"), "header", "a list"),
    "a tensor twice": (header(duplicate), Q, "twice"),
    "offsets out of range": (entry(data_offsets=[10**9, 10**9 + 64]), Q, "cut off"),
    "offsets reversed": (entry(data_offsets=[64, 0]), Q, "[64, 0]"),
    "offsets negative": (entry(data_offsets=[-64, 0]), Q, "[-64, 0]"),
    "offsets overlap": (entry(data_offsets=[0, 64]), "overlap"),
    "a gap": (in_turn(header(gap), longer), "gap"),
    "offsets of another size": (entry(shape=[4, 8]), Q, "64 bytes", "128"),
    "shape is negative": (entry(shape=[-4, -4]), Q, "[-4, -4]"),
    "shape of many dims": (entry(shape=[1] * 10**5), Q, "shape"),
    "shape is endless": (entry(shape=[10**400]), "401 digits"),
    "unknown dtype": (entry(dtype="F31"), Q, "F31"),
    "dtype is a list": (entry(dtype=["F32"]), Q, "['F32']"),
    "a name that moves the cursor": (header(lambda found: found | {"\x1b[2J\n" * 1000: {}}), r"\x1b[2J\n"),
    "entry without shape": (header(lambda found: found | {Q: {"dtype": "F32"}}), Q, "shape"),
    "integers": (entry(dtype="I32"), Q, "I32"),
    "another shape": (entry(shape=[2, 8]), Q, "2x8", "4x4"),
    "tensor missing": (weights(**{Q.replace(".", "__"): None}), "missing", Q),
    "tensor left over": (weights(extra=np.ones(3, np.float32)), "unexpected", "extra"),
    "NaN": (poisoned(TABLE, np.nan), TABLE, "not finite"),
    "infinity": (poisoned(Q, -np.inf), Q, "not finite"),
    "NaN in bfloat16": (poisoned(Q, np.nan, jnp.bfloat16), Q, "not finite"),
    "tied to another head": (in_turn(TIED, poisoned("lm_head.weight", 7.0)), "tie_word_embeddings", TABLE),
    "tied to a smaller head": (
        in_turn(TIED, weights(lm_head__weight=np.ones((7, 4), np.float32))),
        "tie_word_embeddings",
        "7x4",
    ),
    "a link out": (link(WEIGHTS, "../outside"), "6 bytes"),
    "a link to a device": (link(WEIGHTS, "/dev/zero"), "not a regular file"),
    "a link to itself": (link(WEIGHTS, WEIGHTS), "symbolic links"),
    "a link to nothing": (link(WEIGHTS, "nothing"), "No such file"),
    "not fetched": (content(WEIGHTS, POINTER), "269,060,552", f"lfs pull --include {WEIGHTS}"),
    "a folder": (directory(WEIGHTS), "a folder"),
    "a pipe": (pipe, "not a regular file"),
}
INDICES = {
    "a file above": (index(extra="../../x"), "'../../x'"),
    "weights above": (index(extra="../x.safetensors"), "'../x.safetensors'"),
    "an absolute path": (index(extra="/etc/x.safetensors"), "'/etc/x.safetensors'"),
    "a pickle": (index(extra="x.bin"), "'x.bin'"),
    "a folder": (in_turn(index(extra="sub.safetensors"), directory("sub.safetensors")), "a folder"),
    "a list": (in_turn(split, content(INDEX, b'{"weight_map": [1]}')), "weight_map"),
    "empty": (in_turn(split, content(INDEX, b'{"weight_map": {}}')), "weight_map is empty"),
    "missing": (in_turn(split, without(INDEX)), "missing"),
    "shard is missing": (in_turn(split, without(SECOND)), SECOND, "No such file"),
    "shard is a link out": (in_turn(split, link(SECOND, "../outside")), "6 bytes"),
    "a link out": (in_turn(split, link(INDEX, "../outside")), "outside of the folder"),
    "half a character": (index(extra="\ud800.safetensors"), "surrogate"),
    "a null byte": (index(extra="a\0b.safetensors"), "not the name of a file"),
    "a name too long": (index(extra=f"{'x' * 300}.safetensors"), "File name too long"),
    "another shard": (index(**{Q: SECOND}), SECOND, Q),
    "a tensor left out": (
        in_turn(split, content(INDEX, json.dumps({"weight_map": {TABLE: FIRST}}).encode())),
        FIRST,
        INDEX,
    ),
    "a tensor in no shard": (index(extra=FIRST), "lacks extra"),
}
HOSTILE = {"config.json": CONFIGURATIONS, "safetensors": FILES, "the index": INDICES}


@pytest.mark.parametrize("file", HOSTILE)
def test_a_damaged_or_hostile_folder_is_refused_in_one_message(file, tmp_path):
    """Which names the folder, and tells nothing of the files outside of it."""
    refusals = {}
    for number, (case, (change, *words)) in enumerate(HOSTILE[file].items()):
        (tmp_path / str(number)).mkdir()
        folder = write_whole(tmp_path / str(number) / "model")
        change(folder)
        refusals[case] = functools.partial(jaxtp.load_hf, folder), [*words, str(folder)]
    assert_all_refused(refusals)


def test_the_command_prints_the_message_and_writes_nothing(whole, tmp_path, capsys):
    poisoned(Q, np.nan)(whole)
    with pytest.raises(HFError) as refused:
        jaxtp.load_hf(whole)
    assert main(["import", str(whole), str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == f"jaxtp convert: error: {refused.value}\n"
    assert not (tmp_path / "run").exists()


def test_a_whole_folder_loads(whole):
    """So that each case fails for its own reason; also with what older versions stored beside the weights."""
    jaxtp.load_hf(whole)
    weights(**{"model__layers__0__self_attn__rotary_emb__inv_freq": np.ones(1, np.float32)})(whole)
    TIED(whole)
    assert jaxtp.load_hf(whole).head is None
    split(whole)
    write_config(whole)
    assert jaxtp.load_hf(whole).head is not None


def test_the_index_decides_which_copy_is_read(whole, capsys):
    index = split(whole)
    name = next(name for name, file in index["weight_map"].items() if file == SECOND)
    first = {each: array for each, array in tensors().items() if index["weight_map"][each] == FIRST}
    write(whole / FIRST, first | {name: tensors()[name] + 1})
    write(whole / WEIGHTS, {each: array + 1 for each, array in tensors().items()})
    assert all(np.max(leaf) <= 0.5 for leaf in jax.tree.leaves(jaxtp.load_hf(whole)))
    said = capsys.readouterr().err.splitlines()
    assert any(INDEX in line and f"not read: {WEIGHTS}" in line for line in said)
    assert any(name in line and FIRST in line and "this copy is not read" in line for line in said)
    (whole / FIRST).unlink()
    (whole / SECOND).unlink()
    assert all(np.max(leaf) == 1.5 for leaf in jax.tree.leaves(jaxtp.load_hf(whole)))
    assert f"{INDEX} is not read" in capsys.readouterr().err


WRAPPERS = {
    "compiled": (lambda name: f"_orig_mod.{name}", "'_orig_mod.'"),
    "parallel": (lambda name: f"module.{name}", "'module.'"),
    "compiled and parallel": (lambda name: f"module._orig_mod.{name}", "'_orig_mod.' and 'module.'"),
    "layers compiled": (lambda name: name.replace("layers.0.", "layers.0._orig_mod."), "'_orig_mod.'"),
    "checkpointed": (lambda name: name.replace(".mlp.", ".mlp._checkpoint_wrapped_module."), "'_checkpoint_wrapped"),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_names_with_the_wrappers_of_pytorch(kind, whole):
    rename, found = WRAPPERS[kind]
    write(whole / WEIGHTS, {rename(name): array for name, array in tensors().items()})
    folder = open_folder(whole)
    assert any(found in note for note in folder.notes)
    assert {*folder.tensors} == {*SHAPES}
    assert all(name == tensor.name for name, tensor in folder.tensors.items())


def test_notes_on_a_folder_are_printed_by_an_import(whole, tmp_path, capsys):
    write(whole / WEIGHTS, {f"module.{name}": array for name, array in tensors().items()})
    assert main(["import", str(whole), str(tmp_path / "run")]) == 0
    assert "'module.'" in capsys.readouterr().err


def test_a_gguf_file_is_named(tmp_path, capsys):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(HFError, match=r"model.gguf is GGUF"):
        jaxtp.load_hf(file)
    for path in (file, tmp_path):
        assert generate(["--model", str(path), "--prompt", "a"]) == 2
        assert "model.gguf is GGUF" in capsys.readouterr().err


@pytest.mark.wide
@examples(20)
@given(
    place=st.lists(st.sampled_from((FIRST, SECOND)), min_size=len(SHAPES), max_size=len(SHAPES)),
    copies=st.sets(st.sampled_from(sorted(SHAPES))),
    stray=st.booleans(),
    kind=st.sampled_from([None, *WRAPPERS]),
)
def test_any_copies_and_wrappers(place, copies, stray, kind, tmp_path_factory):
    """Each tensor is read from the file that the index lists, under its plain name, and each copy is mentioned."""
    folder = tmp_path_factory.mktemp("model")
    rename = WRAPPERS[kind][0] if kind else str
    listed = dict(zip(SHAPES, place, strict=True))
    for file in (FIRST, SECOND):
        own = {name: array for name, array in tensors().items() if listed[name] == file}
        others = {name: tensors()[name] + 1 for name in copies - {*own} if file in listed.values()}
        write(folder / file, {rename(name): array for name, array in (own | others).items()})
    if stray:
        write(folder / WEIGHTS, {name: array + 1 for name, array in tensors().items()})
    write_config(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {rename(name): file for name, file in listed.items()}}))
    opened = open_folder(folder)
    assert {*opened.tensors} == {*SHAPES}
    for name, tensor in opened.tensors.items():
        np.testing.assert_array_equal(tensor.read(), tensors()[name])
    has_copies = bool(copies) and len(set(place)) == 2
    assert any("this copy is not read" in note for note in opened.notes) == has_copies
    unread = [note.partition("; not read: ")[2] for note in opened.notes]
    assert any(WEIGHTS in names.split(", ") for names in unread) == stray


def test_a_snapshot_of_the_hub_links_to_its_blobs(whole, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for file in whole.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert open_folder(snapshot).tensors.keys() == SHAPES.keys()


OTHERS = [
    ("phi3", {"model.layers.1.self_attn.qkv_proj.weight": (144, 39)}, "qkv_proj.weight", "144x39", "144x40"),
    ("phi3", {"model.layers.1.mlp.gate_up_proj.weight": None}, "missing", "model.layers.1.mlp.gate_up_proj.weight"),
    ("phi3", {"model.layers.0.mlp.up_proj.weight": (56, 40)}, "unexpected", "model.layers.0.mlp.up_proj.weight"),
    ("gpt2", {"transformer.h.2.attn.c_attn.weight": (144, 48)}, "c_attn.weight", "144x48", "48x144"),
    ("gpt2", {"transformer.wpe.weight": (28, 48)}, "wpe.weight", "28x48", "29x48"),
    ("gpt2", {"wte.weight": (97, 48)}, "unexpected", "wte.weight"),
    ("gpt2", {"transformer.h.3.ln_1.bias": (48,)}, "num_hidden_layers = 3", "4 layers"),
    ("gemma3", {"model.layers.6.self_attn.q_norm.weight": (1,)}, "q_norm.weight", "12"),
]


def test_wrong_tensors_of_other_families_are_named(tmp_path):
    refusals = {}
    for number, (name, change, *words) in enumerate(OTHERS):
        shapes = {tensor: None if shape is None else np.ones(shape, np.float32) for tensor, shape in change.items()}
        stored = reference_tensors(name) | shapes
        folder = write_model(tmp_path / str(number), reference_attributes(name), stored)
        refusals[str(change)] = functools.partial(jaxtp.load_hf, folder), words
    assert_all_refused(refusals)


def test_a_folder_that_its_mesh_or_options_do_not_fit_is_refused(whole):
    for axis in ("fsdp", "cp"):
        with jax.set_mesh(jaxtp.make_mesh(**{axis: 3})), pytest.raises(HFError, match=rf"{axis} can be 1, 2"):
            jaxtp.load_hf(whole)
    with pytest.raises(HFError, match=r"norm_eps: .* determines the architecture"):
        jaxtp.load_hf(whole, norm_eps=1e-3)


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


BESIDE = {
    "a device": (lambda path: path.symlink_to("/dev/zero"), "outside of the folder"),
    "a link out": (lambda path: path.symlink_to("../outside"), "outside of the folder"),
    "a pipe": (os.mkfifo, "not a regular file"),
    "a folder": (lambda path: path.mkdir(), "a folder, not a file"),
    "deep": (lambda path: path.write_bytes(b'{"a": ' + b"[" * 100_000), "nested too deeply"),
    "endless": (lambda path: path.write_text(f'{{"eos_token_id": {"9" * 10_000}}}'), "10,000 digits"),
}


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json", "generation_config.json"])
def test_hostile_files_beside_a_tokenizer_are_refused(name, tmp_path):
    (tmp_path / "outside").write_text('{"eos_token": "secret"}')
    for case, (make, message) in BESIDE.items():
        folder = tmp_path / case
        folder.mkdir()
        make(folder / name)
        with pytest.raises(TokenizerError, match=message) as caught:
            read(folder / name)
        assert is_one_clear_message(caught.value)


@pytest.mark.parametrize("target", ["/dev/zero", "../outside", "nothing"])
def test_a_template_is_in_its_folder(target, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside").write_text("secret")
    (folder / "chat_template.jinja").symlink_to(target)
    with pytest.raises(TokenizerError, match=r"outside of the folder|is a broken link"):
        chat_template(folder)


def test_values_that_are_no_template_are_none(tmp_path):
    listed = [{"name": ["default"], "template": "x"}]
    for template in (listed, [{"name": {}}, 3, None], {"default": "x"}, 7, [], None):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert chat_template(tmp_path) is None, template


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def check_header(header, path):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(32))
    gives_one_of(dict, HFError, lambda: read_header(path))


def check_index(index, folder):
    write(folder / FIRST, {"a": np.ones((2, 3), np.float32)})
    write_config(folder)
    (folder / INDEX).write_text(json.dumps(index))
    gives_one_of(Folder, HFError, lambda: open_folder(folder))


SHARDED = {"metadata": {"total_size": 24}, "weight_map": {"a": FIRST}}


@examples(20)
@given(header=changed(HEADER), index=changed(SHARDED))
def test_any_structure_as_a_header_and_an_index(header, index, tmp_path):
    check_header(header, tmp_path / "x.safetensors")
    check_index(index, tmp_path)


@pytest.mark.wide
@examples(200)
@given(header=changed(HEADER), index=changed(SHARDED))
def test_many_structures(header, index, tmp_path):
    check_header(header, tmp_path / "x.safetensors")
    check_index(index, tmp_path)


@pytest.mark.wide
@examples(20)
@given(changes=st.dictionaries(st.sampled_from(sorted(CONFIG)), VALUES, min_size=1, max_size=3))
def test_many_configurations_of_a_whole_folder(changes, tmp_path):
    write_model(tmp_path, CONFIG | changes, tensors())
    gives_one_of(jaxtp.Decoder, HFError, lambda: jaxtp.load_hf(tmp_path))
