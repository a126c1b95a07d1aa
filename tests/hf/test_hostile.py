"""Damaged and hostile folders: one clear message each, nothing run, nothing outside of the folder opened."""

import json
import os
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_reference import FOLDER
from hypothesis import given
from hypothesis import strategies as st
from structures import VALUES, changed, examples, gives_one_of, is_one_clear_message

import jaxtp
from jaxtp.data.tokenizer_files import TokenizerError, chat_template, read
from jaxtp.generate.__main__ import main as generate
from jaxtp.hf.model_folder import Folder, open_folder
from jaxtp.hf.runs import copy_hf_files
from jaxtp.hf.safetensors import DTYPES, HFError, read_header, write_file
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
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def shapes():
    found = {TABLE: (8, 4), "model.norm.weight": (4,), "lm_head.weight": (8, 4)}
    for layer in range(2):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        found |= {
            f"model.layers.{layer}.{norm}.weight": (4,) for norm in ("input_layernorm", "post_attention_layernorm")
        }
        found |= {f"{attention}.q_proj.weight": (4, 4), f"{attention}.o_proj.weight": (4, 4)}
        found |= {f"{attention}.k_proj.weight": (2, 4), f"{attention}.v_proj.weight": (2, 4)}
        found |= {f"{mlp}.gate_proj.weight": (6, 4), f"{mlp}.up_proj.weight": (6, 4), f"{mlp}.down_proj.weight": (4, 6)}
    return found


def tensors(dtype=np.float32):
    return {name: np.full(shape, 0.5, dtype) for name, shape in shapes().items()}


def write(path, arrays):
    spelled = {dtype: name for name, dtype in DTYPES.items()}
    write_file(path, {n: (spelled[a.dtype], a.shape) for n, a in arrays.items()}, arrays.__getitem__)


def write_config(folder, **changes):
    kept = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


@pytest.fixture
def whole(tmp_path):
    """A folder with nothing wrong."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_config(folder)
    write(folder / "model.safetensors", tensors())
    return folder


def split(folder):
    """The same in two files with an index; returns the index."""
    (folder / "model.safetensors").unlink()
    names = list(shapes())
    index = {"weight_map": {name: FIRST if i < 9 else SECOND for i, name in enumerate(names)}}
    for file in (FIRST, SECOND):
        write(folder / file, {name: array for name, array in tensors().items() if index["weight_map"][name] == file})
    (folder / INDEX).write_text(json.dumps(index))
    return index


def edit_index(folder, **weight_map):
    index = split(folder)
    index["weight_map"] |= weight_map
    (folder / INDEX).write_text(json.dumps(index))


def edit_header(folder, change, *, length=None):
    """Rewrites the header by a function of it, or of its text."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = change(json.loads(data[8 : 8 + size]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data[8 + size :])


def entry(**changes):
    def change(header):
        header[Q] |= changes
        return header

    return lambda folder: edit_header(folder, change)


def config(**changes):
    return lambda folder: write_config(folder, **changes)


def raw(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def weights(**changes):
    def change(folder):
        arrays = tensors() | {name.replace("__", "."): array for name, array in changes.items()}
        write(folder / "model.safetensors", {n: a for n, a in arrays.items() if a is not None})

    return change


def poisoned(name, value, dtype=np.float32):
    def change(folder):
        arrays = tensors(dtype)
        arrays[name][-1, 1] = value
        write(folder / "model.safetensors", arrays)

    return change


def cut(num_bytes):
    def change(folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:num_bytes])

    return change


def longer(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"1234")


def link(name, target):
    def change(folder):
        (folder / name).unlink(missing_ok=True)
        outside = folder.parent / "outside"
        outside.write_text("secret")
        (folder / name).symlink_to(target)

    return change


def pipe(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")  # opening it would wait for ever


def duplicate(header):
    text = json.dumps(header)
    return (text[:-1] + f', "{Q}": {json.dumps(header[Q])}}}').encode()


def without_weights(*others):
    def change(folder):
        (folder / "model.safetensors").unlink()
        for name in others:
            (folder / name).write_bytes(b"\x80\x04cos\nsystem\n")

    return change


def indexed_then(action):
    def change(folder):
        split(folder)
        action(folder)

    return change


def gap(header):
    for name in header:
        if name not in ("__metadata__", TABLE):
            header[name]["data_offsets"] = [offset + 4 for offset in header[name]["data_offsets"]]
    return header


CASES = {
    # config.json
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config is not JSON": (raw("config.json", b"{'a': 1}"), "config.json is not JSON"),
    "config is not UTF-8": (raw("config.json", b'{"a": "\xff\xfe"}'), "config.json is not JSON"),
    "config is a list": (raw("config.json", b"[1, 2]"), "config.json is a list, not an object"),
    "config nested too deeply": (raw("config.json", b"[" * 200_000), "nested too deeply|is not JSON"),
    "config with a key twice": (raw("config.json", b'{"a": 1, "a": 2}'), "the key 'a' occurs twice"),
    "config is a link out": (link("config.json", "../outside"), "is a link to .*outside, outside of the folder"),
    "no model type": (config(model_type=...), "model_type is missing; supported are llama, mistral, qwen2, qwen3"),
    "unknown model type": (config(model_type="falcon"), "'falcon' is not supported; supported are llama, mistral"),
    "unknown attribute": (
        config(logit_softcap=30.0),
        "the attribute logit_softcap = 30.0 of a llama is unknown and may change the model; "
        ".* ignore it by --ignore-config logit_softcap$",
    ),
    "other activation": (
        config(hidden_act="gelu"),
        "hidden_act = 'gelu' is not supported, only 'silu': it is known to change the model",
    ),
    "code of its own": (
        config(auto_map={"AutoModelForCausalLM": "x.py"}),
        "auto_map = .*x.py.* is unknown .* by --ignore-config auto_map",
    ),
    "quantized": (config(quantization_config={"bits": 4}), "quantization_config = .*bits.* is not supported"),
    "not a language model": (config(architectures=["LlamaForTokenClassification"]), "only LlamaForCausalLM"),
    "size is text": (config(hidden_size="4"), "hidden_size = '4': should be a whole number"),
    "size is negative": (config(hidden_size=-4), "hidden_size = -4: should be a whole number"),
    "size is true": (config(num_attention_heads=True), "num_attention_heads = True: should be a whole number"),
    "size is missing": (config(vocab_size=...), "vocab_size = missing: should be a whole number"),
    "size is huge": (config(vocab_size=10**30), "vocab_size = 10+: should be a whole number"),
    "heads do not divide": (
        config(num_attention_heads=3),
        "hidden_size = 4 is not divisible by num_attention_heads = 3",
    ),
    "odd head": (config(head_dim=3), "head_dim = 3: should be a multiple of 2"),
    "kv heads do not divide": (config(num_attention_heads=4, head_dim=2, num_key_value_heads=3), "not divisible"),
    "eps is endless": (config(rms_norm_eps=10**400), "config.json .* an integer of 401 digits"),
    "eps is infinite": (config(rms_norm_eps=float("inf")), "rms_norm_eps = inf: should be a number above 0"),
    "unknown part is endless": (
        config(rope_scaling={"type": "linear", "factor": 2, "twist": [[]] * 10**4}),
        "twist of the rotary embedding 'linear' is unknown",
    ),
    "scales that are no numbers together": (
        config(
            max_position_embeddings=8,
            rope_scaling={"type": "yarn", "factor": 1e308, "mscale": 1e308, "mscale_all_dim": 1e308},
        ),
        "the attention factor from mscale and mscale_all_dim = nan: should be a number above 0",
    ),
    "truncate is a word": (
        config(max_position_embeddings=8, rope_scaling={"type": "yarn", "factor": 2.0, "truncate": "no"}),
        "truncate of the rotary embedding = 'no': should be true or false",
    ),
    "config is a device": (link("config.json", "/dev/zero"), "outside of the folder"),
    "config is not fetched": (
        raw("config.json", b"version https://git-lfs.github.com/spec/v1\n"),
        "Git LFS pointer to a file that has not been fetched; fetch it with `git -C .*/model lfs pull --include config",
    ),
    "ten thousand unknown attributes": (
        config(**{f"unknown_{i}": i for i in range(10_000)}),
        "the attribute unknown_0 = 0 .* and 9990 more$",
    ),
    "eps is NaN": (config(rms_norm_eps=float("nan")), "rms_norm_eps = nan: should be a number above 0"),
    "layers by the billion": (config(num_hidden_layers=2**31 - 1), "num_hidden_layers = 2147483647: at most 1,024"),
    "fewer layers": (config(num_hidden_layers=1), "num_hidden_layers = 1, and the file has tensors of 2 layers"),
    "unknown rotation": (
        config(rope_scaling={"type": "dynamic", "factor": 2}),
        "rope_type = 'dynamic' is not supported",
    ),
    "unknown part of a rotation": (
        config(rope_scaling={"type": "linear", "factor": 2, "twist": 1}),
        "twist of the rotary embedding 'linear' is unknown",
    ),
    "rotation without factor": (config(rope_scaling={"type": "linear"}), "factor of the rotary embedding = missing"),
    "two rotations": (config(rope_parameters={"rope_type": "default", "rope_theta": 5.0}), "rope_theta has two values"),
    # the safetensors file
    "no weights": (without_weights(), "neither model.safetensors nor model.safetensors.index.json"),
    "pickles alone": (
        without_weights("pytorch_model.bin"),
        "pytorch_model.bin is a pickle, .* convert it to safetensors",
    ),
    "GGUF alone": (
        without_weights("tiny.Q4_K_M.GGUF"),
        "tiny.Q4_K_M.GGUF is GGUF, which jaxtp does not read; .*gguf_file",
    ),
    "GGUF without a configuration": (
        lambda f: (without_weights("tiny.gguf")(f), (f / "config.json").unlink()),
        "tiny.gguf is GGUF, which jaxtp does not read",
    ),
    "two tensors but for a wrapper": (
        weights(**{f"_orig_mod.{Q}": np.ones((4, 4), np.float32)}),
        f"{Q} and _orig_mod.{Q} are the same tensor but for '_orig_mod.'; remove one",
    ),
    "empty file": (cut(0), "0 bytes, too short"),
    "header cut off": (cut(40), "a header of .* bytes in a file of 40; the file is cut off"),
    "data cut off": (cut(-8), "its data end at byte .* it is cut off"),
    "data too long": (longer, "4 bytes after the data of"),
    "huge header": (lambda f: edit_header(f, lambda h: h, length=2**63), "a header of 9,223,372,036,854,775,808 bytes"),
    "header is not JSON": (lambda f: edit_header(f, lambda h: b"garbage"), "its header is not JSON"),
    "header is a list": (lambda f: edit_header(f, lambda h: b"[]"), "its header is a list, not an object"),
    "tensor there twice": (lambda f: edit_header(f, duplicate), f"the key '{Q}' occurs twice"),
    "offsets out of range": (entry(data_offsets=[10**9, 10**9 + 64]), "its data end at byte 1,000,.* cut off"),
    "offsets reversed": (entry(data_offsets=[64, 0]), "are not a begin and an end"),
    "offsets negative": (entry(data_offsets=[-64, 0]), "are not a begin and an end"),
    "offsets overlap": (entry(data_offsets=[0, 64]), "its data overlap with the data of"),
    "a gap between tensors": (lambda f: (edit_header(f, gap), longer(f)), "its data leave a gap after the data of"),
    "offsets of another size": (entry(shape=[4, 8]), "64 bytes for a F32 of shape .*, which takes 128"),
    "shape is negative": (entry(shape=[-4, -4]), "is not a list of sizes"),
    "shape of many dims": (entry(shape=[1] * 10**5), "is not a list of sizes"),
    "unknown dtype": (entry(dtype="F31"), "unknown dtype F31"),
    "dtype is a list": (entry(dtype=["F32"]), r"unknown dtype \['F32'\]"),
    "shape is endless": (entry(shape=[10**400]), "its header .* an integer of 401 digits"),
    "a name that moves the cursor": (
        lambda f: edit_header(f, lambda h: h | {"\x1b[2J\n" * 1000: {}}),
        r"model.safetensors: (\\x1b\[2J\\n)+.*: should have dtype, shape",
    ),
    "entry without shape": (lambda f: edit_header(f, lambda h: h | {Q: {"dtype": "F32"}}), "should have dtype, shape"),
    "integers": (entry(dtype="I32"), f"not float32, bfloat16 or float16: {Q} is I32"),
    "another shape": (entry(shape=[2, 8]), f"wrong shape: {Q} is 2x8, not 4x4"),
    "tensor missing": (weights(**{Q.replace(".", "__"): None}), f"missing: {Q}"),
    "tensor left over": (weights(extra=np.ones(3, np.float32)), "unexpected: extra"),
    "NaN": (poisoned(TABLE, np.nan), f"{TABLE} has elements that are not finite"),
    "infinity": (poisoned(Q, -np.inf), f"{Q} has elements that are not finite"),
    "NaN in bfloat16": (poisoned(Q, np.nan, jnp.bfloat16), f"{Q} has elements that are not finite"),
    "tied to another head": (
        lambda f: (write_config(f, tie_word_embeddings=True), poisoned("lm_head.weight", 7.0)(f)),
        "tie_word_embeddings is true, but lm_head.weight and model.embed_tokens.weight differ",
    ),
    "tied to a smaller head": (
        lambda f: (write_config(f, tie_word_embeddings=True), weights(lm_head__weight=np.ones((7, 4), np.float32))(f)),
        "tie_word_embeddings is true, and lm_head.weight is F32 7x4",
    ),
    "weights are a link out": (link("model.safetensors", "../outside"), "6 bytes, too short for a safetensors file"),
    "weights are a link to a device": (link("model.safetensors", "/dev/zero"), "not a regular file"),
    "link to itself": (link("model.safetensors", "model.safetensors"), "symbolic links"),
    "link to nothing": (link("model.safetensors", "nothing"), "No such file"),
    "weights are not fetched": (
        raw("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 269060552\n"),
        "Git LFS pointer to a file of 269,060,552 bytes that has not been fetched; fetch it with `git -C .*/model lfs "
        "pull --include model.safetensors`",
    ),
    "weights are a folder": (
        lambda f: ((f / "model.safetensors").unlink(), (f / "model.safetensors").mkdir()),
        "a folder, not a file",
    ),
    "weights are a pipe": (pipe, "not a regular file"),
    # the index
    "index names a file above": (lambda f: edit_index(f, extra="../../x"), "'../../x' is not a safetensors file"),
    "index names weights above": (
        lambda f: edit_index(f, extra="../x.safetensors"),
        "'../x.safetensors' is not the name of a file",
    ),
    "index names an absolute path": (
        lambda f: edit_index(f, extra="/etc/x.safetensors"),
        "'/etc/x.safetensors' is not the name of a file",
    ),
    "index names a pickle": (lambda f: edit_index(f, extra="x.bin"), "'x.bin' is not a safetensors file"),
    "index names a folder": (
        lambda f: (edit_index(f, extra="sub.safetensors"), (f / "sub.safetensors").mkdir()),
        "a folder, not a file",
    ),
    "index is not one": (
        indexed_then(raw(INDEX, b'{"weight_map": [1]}')),
        "weight_map should map the name",
    ),
    "index is empty": (indexed_then(raw(INDEX, b'{"weight_map": {}}')), "weight_map is empty"),
    "index is missing": (indexed_then(lambda f: (f / INDEX).unlink()), "which maps tensors to files, is missing"),
    "shard is missing": (indexed_then(lambda f: (f / SECOND).unlink()), f"{SECOND}: No such file"),
    "shard is a link out": (indexed_then(link(SECOND, "../outside")), "6 bytes, too short for a safetensors file"),
    "index is a link out": (indexed_then(link(INDEX, "../outside")), "outside of the folder; copy the file into it"),
    "index names half a character": (lambda f: edit_index(f, extra="\ud800.safetensors"), "half of a surrogate pair"),
    "index names a null byte": (lambda f: edit_index(f, extra="a\0b.safetensors"), "is not the name of a file"),
    "index names what is too long": (lambda f: edit_index(f, extra=f"{'x' * 300}.safetensors"), "File name too long"),
    "tensor in another shard": (
        lambda f: edit_index(f, **{Q: SECOND}),
        f"{SECOND}: lacks {Q}, which model.safetensors.index.json lists there",
    ),
    "tensor not in the index": (
        indexed_then(raw(INDEX, json.dumps({"weight_map": {TABLE: FIRST}}).encode())),
        f"{FIRST}: holds .*, which model.safetensors.index.json does not list",
    ),
    "tensor in no shard": (lambda f: edit_index(f, extra=FIRST), "lacks extra"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_clear_message(name, whole, tmp_path, capsys):
    change, expected = CASES[name]
    change(whole)
    with pytest.raises(jaxtp.HFError, match=expected) as caught:
        jaxtp.load_hf(whole)
    message = str(caught.value)
    assert str(whole) in message
    assert "secret" not in message
    assert len(message) < 4000
    assert is_one_clear_message(caught.value)
    assert main(["import", str(whole), str(tmp_path / "run")]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"jaxtp convert: error: {message}\n"
    assert not (tmp_path / "run").exists()


def test_there_are_fifty():
    assert len(CASES) >= 50


def test_what_is_whole_loads(whole):
    """So that each case fails for its own reason; also with what older versions stored beside the weights."""
    jaxtp.load_hf(whole)
    weights(**{"model__layers__0__self_attn__rotary_emb__inv_freq": np.ones(1, np.float32)})(whole)
    jaxtp.load_hf(whole)
    write_config(whole, tie_word_embeddings=True)
    assert jaxtp.load_hf(whole).head is None
    split(whole)
    write_config(whole)
    assert jaxtp.load_hf(whole).head is not None


def test_the_index_decides_which_copy_is_read(whole, capsys):
    index = split(whole)
    name = next(name for name, file in index["weight_map"].items() if file == SECOND)
    first = {each: array for each, array in tensors().items() if index["weight_map"][each] == FIRST}
    write(whole / FIRST, first | {name: tensors()[name] + 1})
    write(whole / "model.safetensors", {each: array + 1 for each, array in tensors().items()})
    assert all(leaf.max() <= 0.5 for leaf in jax.tree.leaves(jaxtp.load_hf(whole)))
    said = capsys.readouterr().err
    assert f"{whole}: the weights are read as {INDEX} has them; not read: model.safetensors\n" in said
    assert f"{whole}: {INDEX} lists another file for {name} in {FIRST}; this copy is not read\n" in said
    (whole / FIRST).unlink()
    (whole / SECOND).unlink()
    assert all(leaf.max() == 1.5 for leaf in jax.tree.leaves(jaxtp.load_hf(whole)))
    assert f"{INDEX} is not read: none of the files that it lists is there" in capsys.readouterr().err


WRAPPERS = {
    "compiled": (lambda name: f"_orig_mod.{name}", "'_orig_mod.'"),
    "parallel": (lambda name: f"module.{name}", "'module.'"),
    "compiled and parallel": (lambda name: f"module._orig_mod.{name}", "'_orig_mod.' and 'module.'"),
    "layers compiled": (lambda name: name.replace("layers.0.", "layers.0._orig_mod."), "'_orig_mod.'"),
    "checkpointed": (lambda name: name.replace(".mlp.", ".mlp._checkpoint_wrapped_module."), "'_checkpoint_wrapped"),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_names_with_the_wrappers_of_pytorch(kind, whole, tmp_path, capsys):
    rename, found = WRAPPERS[kind]
    write(whole / "model.safetensors", {rename(name): array for name, array in tensors().items()})
    assert main(["import", str(whole), str(tmp_path / "run")]) == 0
    assert f"{found}" in capsys.readouterr().err
    assert {*open_folder(whole).tensors} == {*tensors()}
    assert all(name == tensor.name for name, tensor in open_folder(whole).tensors.items())


def test_a_gguf_file_is_named(tmp_path, capsys):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(HFError, match=r"model.gguf is GGUF, which jaxtp does not read"):
        jaxtp.load_hf(file)
    for path in (file, tmp_path):
        assert generate(["--model", str(path), "--prompt", "a"]) == 2
        assert "model.gguf is GGUF, which jaxtp does not read" in capsys.readouterr().err


@pytest.mark.wide
@examples(60)
@given(
    place=st.lists(st.sampled_from((FIRST, SECOND)), min_size=len(shapes()), max_size=len(shapes())),
    copies=st.sets(st.sampled_from(sorted(shapes()))),
    stray=st.booleans(),
    kind=st.sampled_from([None, *WRAPPERS]),
)
def test_any_copies_and_wrappers(place, copies, stray, kind, tmp_path_factory):
    """Each tensor is read from the file that the index lists, under its plain name, and each copy is mentioned."""
    folder = tmp_path_factory.mktemp("model")
    rename = WRAPPERS[kind][0] if kind else str
    listed = dict(zip(shapes(), place, strict=True))
    for file in (FIRST, SECOND):
        own = {name: array for name, array in tensors().items() if listed[name] == file}
        others = {name: tensors()[name] + 1 for name in copies - {*own} if file in listed.values()}
        write(folder / file, {rename(name): array for name, array in (own | others).items()})
    if stray:
        write(folder / "model.safetensors", {name: array + 1 for name, array in tensors().items()})
    write_config(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {rename(name): file for name, file in listed.items()}}))
    opened = open_folder(folder)
    assert {*opened.tensors} == {*shapes()}
    for name, tensor in opened.tensors.items():
        np.testing.assert_array_equal(tensor.read(), tensors()[name])
    has_copies = bool(copies) and len(set(place)) == 2
    assert any("this copy is not read" in note for note in opened.notes) == has_copies
    unread = [note.partition("; not read: ")[2] for note in opened.notes]
    assert any("model.safetensors" in names.split(", ") for names in unread) == stray


def test_a_snapshot_of_the_hub_links_to_its_blobs(whole, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for file in whole.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    jaxtp.load_hf(snapshot)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("phi3", {"model.layers.1.self_attn.qkv_proj.weight": (144, 39)}, "qkv_proj.weight is 144x39, not 144x40"),
        ("phi3", {"model.layers.1.mlp.gate_up_proj.weight": None}, "missing: model.layers.1.mlp.gate_up_proj.weight$"),
        ("phi3", {"model.layers.0.mlp.up_proj.weight": (56, 40)}, "unexpected: model.layers.0.mlp.up_proj.weight"),
        ("gpt2", {"transformer.h.2.attn.c_attn.weight": (144, 48)}, "c_attn.weight is 144x48, not 48x144"),
        ("gpt2", {"transformer.wpe.weight": (28, 48)}, "wpe.weight is 28x48, not 29x48"),
        ("gpt2", {"wte.weight": (97, 48)}, "unexpected: wte.weight"),
        ("gpt2", {"transformer.h.3.ln_1.bias": (48,)}, "num_hidden_layers = 3, and the file has tensors of 4 layers"),
        ("gemma3", {"model.layers.6.self_attn.q_norm.weight": (1,)}, "q_norm.weight is 1, not 12"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value[:10],
)
def test_tensors_of_other_families(name, change, message, tmp_path):
    stored = {n: tensor.read() for n, tensor in read_header(FOLDER / name / "model.safetensors").items()}
    stored |= {tensor: None if shape is None else np.ones(shape, np.float32) for tensor, shape in change.items()}
    write(tmp_path / "model.safetensors", {n: array for n, array in stored.items() if array is not None})
    (tmp_path / "config.json").write_bytes((FOLDER / name / "config.json").read_bytes())
    with pytest.raises(jaxtp.HFError, match=message) as caught:
        jaxtp.load_hf(tmp_path)
    assert is_one_clear_message(caught.value)


@pytest.mark.parametrize("axis", ["fsdp", "cp"])
def test_what_does_not_fit_the_mesh_is_said_before_anything_is_read(whole, axis):
    with jax.set_mesh(jaxtp.make_mesh(**{axis: 3})), pytest.raises(jaxtp.HFError, match=rf"{axis} can be 1, 2"):
        jaxtp.load_hf(whole)


def test_the_architecture_cannot_be_overridden(whole):
    with pytest.raises(jaxtp.HFError, match=r"norm_eps: .* determines the architecture"):
        jaxtp.load_hf(whole, norm_eps=1e-3)


def test_weights_may_lie_on_another_disk(whole, tmp_path):
    """Safetensors are read wherever a link leads; a tokenizer, which is copied, is not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (whole / "model.safetensors").rename(disk / "weights")
    (whole / "model.safetensors").symlink_to(disk / "weights")
    jaxtp.load_hf(whole)
    (disk / "secret").write_text("{}")
    (whole / "tokenizer_config.json").symlink_to(disk / "secret")
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(jaxtp.HFError, match="outside of the folder"):
        copy_hf_files(whole, run)
    assert not list(run.iterdir())


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.symlink_to("/dev/zero"), "outside of the folder"),
        (lambda path: path.symlink_to("../outside"), "outside of the folder"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.mkdir(), "a folder, not a file"),
        (lambda path: path.write_bytes(b'{"a": ' + b"[" * 100_000), "nested too deeply"),
        (lambda path: path.write_text(f'{{"eos_token_id": {"9" * 10_000}}}'), "an integer of 10,000 digits"),
    ],
)
def test_what_is_beside_a_tokenizer(name, make, message, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside").write_text('{"eos_token": "secret"}')
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


@pytest.mark.parametrize(
    "template", [[{"name": ["default"], "template": "x"}], [{"name": {}}, 3, None], {"default": "x"}, 7, [], None]
)
def test_a_template_that_is_none(template, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert chat_template(tmp_path) is None


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
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / INDEX).write_text(json.dumps(index))
    gives_one_of(Folder, jaxtp.HFError, lambda: open_folder(folder))


SHARDED = {"metadata": {"total_size": 24}, "weight_map": {"a": FIRST}}


@examples(60)
@given(header=changed(HEADER))
def test_any_structure_as_a_header(header, tmp_path):
    check_header(header, tmp_path / "x.safetensors")


@examples(30)
@given(index=changed(SHARDED))
def test_any_structure_as_an_index(index, tmp_path):
    check_index(index, tmp_path)


@pytest.mark.wide
@examples(500)
@given(header=changed(HEADER), index=changed(SHARDED))
def test_many_structures(header, index, tmp_path):
    check_header(header, tmp_path / "x.safetensors")
    check_index(index, tmp_path)


@pytest.mark.wide
@examples(60)
@given(changes=st.dictionaries(st.sampled_from(sorted(CONFIG)), VALUES, min_size=1, max_size=3))
def test_many_configurations_of_a_whole_folder(changes, tmp_path):
    write_config(tmp_path, **changes)
    write(tmp_path / "model.safetensors", tensors())
    gives_one_of(jaxtp.Decoder, jaxtp.HFError, lambda: jaxtp.load_hf(tmp_path))
