"""Adapters in PEFT's format read for a model; those that are damaged, hostile, of another kind or another model."""

import json
import math

import jax
import numpy as np
import pytest
from flax import nnx
from hf_reference import FOLDER
from hypothesis import given
from hypothesis import strategies as st
from structures import changed, examples, gives_one_of, is_one_clear_message
from support import sweep, sweep_of

import jaxtp
from jaxtp.checkpoint.logical import named_variables
from jaxtp.hf.peft import PeftFolder, load_peft, open_peft, with_peft
from jaxtp.hf.safetensors import DTYPES, read_header, write_file
from jaxtp.layers.lora import LoraConfig

MODEL = jaxtp.ModelConfig(vocab_size=8, d_model=4, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=2, d_ff=6)
FEATURES = {"q_proj": (4, 4), "k_proj": (4, 2), "v_proj": (4, 2), "o_proj": (4, 4)}
FEATURES |= {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4)}
CONFIG = {
    **{"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "bias": "none"},
    **{"use_rslora": False, "use_dora": False, "lora_dropout": 0.0, "modules_to_save": None, "loftq_config": {}},
    **{"base_model_name_or_path": "someone/something", "rank_pattern": {}, "megatron_core": "megatron.core"},
}
A, B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{factor}.weight" for factor in "AB")


def module(target, layer):
    return f"model.layers.{layer}.{'mlp' if target in list(FEATURES)[4:] else 'self_attn'}.{target}"


def tensors(ranks, dtype=np.float32, features=FEATURES):
    """Random A and B by name, of `{(target, layer): rank}`."""
    random, found = np.random.default_rng(0), {}
    for (target, layer), rank in ranks.items():
        inner, outer = features[target]
        for factor, shape in (("A", (rank, inner)), ("B", (outer, rank))):
            name = f"base_model.model.{module(target, layer)}.lora_{factor}.weight"
            found[name] = random.normal(size=shape).astype(dtype)
    return found


def everywhere(*targets, rank=2, layers=range(3)):
    return {(target, layer): rank for target in targets for layer in layers}


def write(folder, arrays, **attributes):
    folder.mkdir(exist_ok=True)
    kept = {key: value for key, value in (CONFIG | attributes).items() if value is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(kept))
    spelled = {dtype: name for name, dtype in DTYPES.items()}
    layout = {name: (spelled[array.dtype], array.shape) for name, array in arrays.items()}
    write_file(folder / "adapter_model.safetensors", layout, arrays.__getitem__)
    return folder


def stored(path):
    return {name: tensor.read() for name, tensor in read_header(path).items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    jaxtp.save_hf(jaxtp.Decoder(MODEL, rngs=nnx.Rngs(1)), folder)
    return folder


@pytest.fixture
def whole(tmp_path):
    """A folder with nothing wrong."""
    return write(tmp_path / "adapters", tensors(everywhere("q_proj", "down_proj")))


MESHES = [{"fsdp": 2, "tp": 2}, {"tp": 4}, {"cp": 2, "fsdp": 2}]
KINDS = {  # ranks, attributes, the scale of each module, and what is noted
    "list": (everywhere("q_proj", "down_proj"), {}, lambda target, layer: 3, ()),
    "rslora": (everywhere("q_proj"), {"target_modules": ["q_proj"], "use_rslora": True}, lambda *_: 6 / 2**0.5, ()),
    "an expression": ({("up_proj", 1): 2}, {"target_modules": "(a+)+$"}, lambda *_: 3, ("1 of 3 modules",)),
    "some layers": (
        everywhere("v_proj", "o_proj", layers=[0, 2]),
        {"target_modules": ["v_proj", "o_proj"], "layers_to_transform": [0, 2], "lora_dropout": 0.1},
        lambda *_: 3,
        ("lora_dropout = 0.1 is not applied", "4 of 6 modules"),
    ),
    "some excluded": (
        {**everywhere("q_proj"), **everywhere("k_proj", layers=[1])},
        {
            "target_modules": ["self_attn.q_proj", "k_proj"],
            "exclude_modules": ["model.layers.0.self_attn.k_proj", "layers.2.self_attn.k_proj"],
        },
        lambda *_: 3,
        ("4 of 6 modules",),
    ),
}


@pytest.mark.parametrize(
    ("kind", "sizes"),
    sweep_of([KINDS, MESHES], *((kind, MESHES[0]) for kind in ("rslora", "some excluded"))),
    ids=str,
)
def test_adapters_are_what_they_add_to_the_kernels(kind, sizes, base, tmp_path):
    """`W + scale * (B @ A)^T`, wherever there is one."""
    ranks, attributes, scale, notes = KINDS[kind]
    arrays = tensors(ranks, np.float16 if kind == "list" else np.float32)
    found = open_peft(write(tmp_path / "adapters", arrays, **attributes), MODEL)
    assert [note for note, begun in zip(found.notes, notes, strict=True) if not note.startswith(begun)] == []
    assert found.untrainable is None
    with jax.set_mesh(jaxtp.make_mesh(**sizes)):
        model = jaxtp.load_hf(base)
        merged = jaxtp.merge_adapters(with_peft(model, found, jax.sharding.get_mesh()))
        jaxtp.save_hf(model, tmp_path / "before")
        jaxtp.save_hf(merged, tmp_path / "after")
    before, after = (stored(tmp_path / at / "model.safetensors") for at in ("before", "after"))
    for name, tensor in after.items():
        expected = before[name]
        for target, layer in ranks:
            if name == f"{module(target, layer)}.weight":
                a, b = (arrays[f"base_model.model.{module(target, layer)}.lora_{f}.weight"] for f in "AB")
                expected = expected + scale(target, layer) * (b.astype(np.float32) @ a.astype(np.float32))
        np.testing.assert_allclose(tensor, expected, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["rslora", "some layers"])
def test_out_again_as_they_came(kind, base, tmp_path):
    """Layers without an adapter have none again."""
    ranks, attributes, *_ = KINDS[kind]
    arrays = tensors(ranks)
    model = load_peft(jaxtp.load_hf(base), write(tmp_path / "in", arrays, **attributes))
    jaxtp.save_peft(model, tmp_path / "out")
    again = open_peft(tmp_path / "out", MODEL)
    assert again.lora == model.config.lora
    out = stored(tmp_path / "out/adapter_model.safetensors")
    assert out.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(out[name], array)


QKV, GATE_UP = "attention.qkv.kernels", "mlp.gate_up.kernels"
TOGETHER = {"gpt2": {"transformer.h.{}.attn.c_attn": QKV}}
TOGETHER["phi3"] = {"model.layers.{}.self_attn.qkv_proj": QKV, "model.layers.{}.mlp.gate_up_proj": GATE_UP}


@pytest.mark.parametrize("name", sweep(list(TOGETHER), "gpt2"))
def test_projections_in_one_share_their_a(name, tmp_path):
    """They are added to kernels, and not trained."""
    model, random = jaxtp.load_hf(FOLDER / name), np.random.default_rng(0)
    before = {path: variable[...] for path, variable in named_variables(nnx.state(model)).items()}
    arrays, added = {}, {}
    for at, kernels in TOGETHER[name].items():
        paths = [path for path in before if kernels in path]
        ends = np.cumsum([before[path].shape[-1] for path in paths])
        for layer in range(model.config.num_layers):
            a, b = (random.normal(size=s).astype(np.float32) for s in ((2, model.config.d_model), (ends[-1], 2)))
            stem = f"base_model.model.{at.format(layer)}.lora_"
            arrays |= {f"{stem}A.weight": a, f"{stem}B.weight": b}
            parts = zip(paths, np.split(b, ends[:-1]), strict=True)
            added |= {(path, layer): 3 * (part @ a).T for path, part in parts}
    folder = write(tmp_path / "adapters", arrays, target_modules=[at.split(".")[-1] for at in TOGETHER[name]])
    found = open_peft(folder, model.config, name)
    merged = named_variables(nnx.state(jaxtp.merge_adapters(with_peft(model, found, None))))
    for (path, layer), array in added.items():
        np.testing.assert_allclose(merged[path][...][layer], before[path][layer] + array, atol=1e-5)
    with pytest.raises(jaxtp.HFError, match=r"fuses several projections with one adapter.*export MODEL OUT --adapters"):
        load_peft(model, folder, family=name)


def attributes(**given):
    return lambda folder: write(folder, tensors(everywhere("q_proj", "down_proj")), **given)


def arrays(**given):
    """Other tensors, by what is left of their names."""

    def change(folder):
        found = tensors(everywhere("q_proj", "down_proj"))
        found |= {f"base_model.model.{name.replace('__', '.')}": array for name, array in given.items()}
        write(folder, {name: array for name, array in found.items() if array is not None})

    return change


def raw(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def link(name, to):
    def change(folder):
        (folder / name).rename(folder.parent / "elsewhere")
        (folder / name).symlink_to(to)

    return change


def pickled(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def poisoned(folder):
    found = tensors(everywhere("q_proj", "down_proj"))
    found[B][1, 0] = math.nan
    write(folder, found)


ZEROS = np.zeros((2, 4), np.float32)
Q = "model__layers__0__self_attn__q_proj"
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
REFUSED = {
    "no folder": (lambda folder: folder.rename(folder.parent / "adapter"), "no such folder; did you mean"),
    "no configuration": (lambda folder: (folder / SETTINGS).unlink(), "no adapter_config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no adapter_model.safetensors is there"),
    "a pickle": (pickled, "adapter_model.bin is a pickle, .* save_pretrained.folder. of peft"),
    "a link out of the folder": (link(SETTINGS, "/etc/passwd"), "is a link to /etc/passwd, outside of the folder"),
    "weights out of the folder": (link(WEIGHTS, "../elsewhere"), "outside of the folder"),
    "a device": (link(WEIGHTS, "/dev/zero"), "outside of the folder"),
    "a link to nothing": (link(WEIGHTS, "nothing"), "is a broken link"),
    "cut off": (raw(WEIGHTS, lambda content: content[:-8]), "cut off"),
    "no header": (raw(WEIGHTS, lambda content: b"\xff" * 8 + content[8:]), "cut off, or not safetensors"),
    "not finite": (poisoned, r"q_proj.lora_B.weight has elements that are not finite"),
    "key twice": (raw(SETTINGS, lambda content: content.replace(b'"r": 2', b'"r": 2, "r": 2')), "'r' occurs twice"),
    "deep": (raw(SETTINGS, lambda _: b'{"a":' + b"[" * 10**5), "nested too deeply|not JSON"),
    "no object": (raw(SETTINGS, lambda _: b"[]"), "is a list, not an object"),
    "rank 0": (attributes(r=0), "r = 0: should be a whole number from 1"),
    "another rank": (attributes(r=10**9), r"q_proj.lora_A.weight has the shape 2x4, and r = 1000000000"),
    "a rank of text": (attributes(r="2"), "r = '2': should be a whole number"),
    "no rank": (attributes(r=...), "r = missing"),
    "no alpha": (attributes(lora_alpha=0), "lora_alpha = 0: should be a number above 0"),
    "another kind": (attributes(peft_type="IA3"), "peft_type = 'IA3' is not supported, only 'LORA'"),
    "DoRA": (attributes(use_dora=True), "use_dora = True is not supported"),
    "biases": (attributes(bias="lora_only"), "bias = 'lora_only' is not supported"),
    "whole modules": (attributes(modules_to_save=["lm_head"]), r"modules_to_save = \['lm_head'\] is not supported"),
    "tokens": (attributes(trainable_token_indices=[1]), "trainable_token_indices = "),
    "parameters": (attributes(target_parameters=["mlp.experts.gate_up_proj"]), "target_parameters = "),
    "layers again": (attributes(layer_replication=[[0, 2]]), "layer_replication = "),
    "kernels changed": (attributes(init_lora_weights="pissa"), "init_lora_weights = 'pissa' .* changes the kernels"),
    "unknown": (attributes(from_the_future=3), "from_the_future = 3 is not supported"),
    "names of numbers": (attributes(target_modules=[3]), r"target_modules = \[3\]: should be a list of names"),
    "several ranks": (attributes(rank_pattern={"q_proj": 4}), "rank_pattern = .* is not supported"),
    "dropout of text": (attributes(lora_dropout="a"), "lora_dropout = .a.: should be a number above 0"),
    "layers of text": (attributes(layers_to_transform=["a"]), "should be layer numbers"),
    "several scales": (attributes(alpha_pattern={"q_proj": 2}), "alpha_pattern = .* is not supported"),
    "missing": (arrays(**{f"{Q}__lora_B__weight": None}), "missing: .*q_proj.lora_B.weight"),
    "a layer missing": (
        arrays(**{f"{Q}__lora_{factor}__weight": None for factor in "AB"}),
        "missing: .*layers.0.self_attn.q_proj.lora_A.weight, which target_modules require; they were made for someone",
    ),
    "left over": (
        arrays(**{f"{Q.replace('q_', 'o_')}__lora_{f}__weight": s for f, s in (("A", ZEROS), ("B", ZEROS.T))}),
        "unexpected: .*o_proj.lora_A.weight, which target_modules do not name",
    ),
    "layer 99": (
        arrays(model__layers__99__self_attn__q_proj__lora_A__weight=ZEROS),
        "is in layer 99, and the model has 3 layers",
    ),
    "a head": (
        arrays(lm_head__lora_A__weight=ZEROS),
        "adapters of lm_head are not supported in a llama, only of self",
    ),
    "an embedding": (arrays(model__embed_tokens__lora_embedding_A=ZEROS), "lora_embedding_A is not supported"),
    "another model": (
        lambda folder: write(
            folder, tensors(everywhere("q_proj", "down_proj"), features=FEATURES | {"q_proj": (8, 4)})
        ),
        "q_proj.lora_A.weight is 2x8, and this model needs 2x4; they were made for someone/something",
    ),
    "a scalar": (arrays(**{f"{Q}__lora_A__weight": np.float32(1).reshape(())}), "has the shape a scalar"),
    "nothing in it": (lambda folder: write(folder, {}), "holds no adapters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, base, whole):
    """In one message, before anything but an array is read, and at once."""
    change, message = REFUSED[name]
    change(whole)
    with pytest.raises(jaxtp.HFError, match=message) as raised:
        load_peft(jaxtp.load_hf(base) if name == "not finite" else jaxtp.Decoder(MODEL, rngs=nnx.Rngs(0)), whole)
    assert is_one_clear_message(raised.value)
    assert str(whole) in str(raised.value)


def test_what_says_nothing_is_passed_over(whole):
    """What PEFT writes by default, and what a later one may."""
    write(whole, tensors(everywhere("q_proj", "down_proj")), new=None, other=False, listed=[], auto_mapping={"a": 1})
    assert open_peft(whole, MODEL).lora == LoraConfig(rank=2, alpha=6, targets=("q_proj", "down_proj"))


def test_a_model_has_one_set_of_adapters(base, whole):
    model = load_peft(jaxtp.load_hf(base), whole)
    assert {path.split(".")[-1] for path in named_variables(nnx.state(model, nnx.LoRAParam))} == {"a", "b"}
    with pytest.raises(jaxtp.HFError, match="has adapters already"):
        load_peft(model, whole)


def test_projections_of_experts_have_none(whole):
    config = jaxtp.ModelConfig(**{**vars(MODEL), "num_experts": 2, "experts_per_token": 1})
    with pytest.raises(jaxtp.HFError, match="down_proj"):
        open_peft(whole, config, "qwen3_moe")


@given(values=changed(CONFIG), data=st.data())
@examples(60)
def test_any_configuration_is_read_or_refused(whole, values, data):
    (whole / SETTINGS).write_text(json.dumps(values))
    gives_one_of(PeftFolder, jaxtp.HFError, lambda: open_peft(whole, MODEL))
