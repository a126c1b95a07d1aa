"""Adapters in PEFT's format read for a model; those that are damaged, hostile, of another kind or another model."""

import contextlib
import dataclasses
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

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
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


@pytest.mark.parametrize(
    ("rename", "found"),
    [
        (lambda name: f"module.{name}", "'module.'"),
        (lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."), "'_orig_mod.'"),
        (lambda name: name.replace(".layers.0.", ".layers.0._orig_mod."), "'_orig_mod.'"),
    ],
    ids=["parallel", "compiled", "a compiled layer"],
)
def test_the_wrappers_of_pytorch_are_left_out_of_names(rename, found, tmp_path):
    arrays = tensors(everywhere("q_proj", "down_proj"))
    renamed = write(tmp_path / "in", {rename(name): array for name, array in arrays.items()})
    opened = open_peft(renamed, MODEL)
    assert {*opened.tensors} == {*arrays}
    (note,) = opened.notes
    assert note.startswith(f"{found} in the names of tensors is left out")


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
    """As long as they do, they are written as they came; then as one adapter of the sum of their ranks."""
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
    targets = [at.split(".{}.")[1] for at in TOGETHER[name]]
    adapted = load_peft(model, write(tmp_path / "adapters", arrays, target_modules=targets), family=name)
    merged = named_variables(nnx.state(jaxtp.merge_adapters(adapted)))
    for (path, layer), array in added.items():
        np.testing.assert_allclose(merged[path][...][layer], before[path][layer] + array, atol=1e-5)
    assert written(adapted, tmp_path / "same", family=name)[1] == exactly(arrays)
    train(adapted)
    attributes, _ = written(adapted, tmp_path / "trained", family=name)
    assert attributes["rank_pattern"][targets[0]] == 2 * 3
    assert exactly(factors_of(load_peft(model, tmp_path / "trained", family=name))) == exactly(factors_of(adapted))


PARTS = [("q_proj", "v_proj", "o_proj"), ("k_proj", "up_proj"), ("up_proj", "gate_proj", "v_proj", "q_proj")]


@pytest.mark.parametrize("targets", sweep(PARTS, PARTS[0]), ids=str)
def test_some_projections_of_a_tensor_are_trained(targets, tmp_path):
    """The others have zeros: in B if one is trained, else in A too, and stay without an adapter."""
    model = jaxtp.load_hf(FOLDER / "phi3")
    adapted = jaxtp.add_adapters(model, LoraConfig(rank=2, targets=targets))
    train(adapted)
    attributes, _ = written(adapted, tmp_path / "out", family="phi3")
    again = load_peft(model, tmp_path / "out", family="phi3")
    if attributes.get("rank_pattern"):
        assert {*again.config.lora.targets} == {*targets}
        assert exactly(factors_of(again)) == exactly(factors_of(adapted))
    merged = (named_variables(nnx.state(jaxtp.merge_adapters(each))) for each in (adapted, again))
    for (path, expected), found in zip(next(merged).items(), next(merged).values(), strict=True):
        np.testing.assert_array_equal(found[...], expected[...], err_msg=path)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_adapters_of_the_text_in_a_multimodal_model(prefix, base, tmp_path):
    arrays = tensors(everywhere("q_proj", "down_proj"))
    renamed = {name.replace(".model.layers", f".{prefix}layers"): array for name, array in arrays.items()}
    both = [load_peft(jaxtp.load_hf(base), write(tmp_path / str(i), each)) for i, each in enumerate((arrays, renamed))]
    assert exactly(factors_of(both[0])) == exactly(factors_of(both[1]))
    for family, before in (("llama", "model."), ("mistral3", "model.language_model.")):
        _, found = written(both[1], tmp_path / family, family=family)
        assert found == exactly(
            {name.replace(".model.layers", f".{before}layers"): array for name, array in arrays.items()}
        )
    with pytest.raises(jaxtp.HFError, match=r"layers.0.* and .*layers.0.* are the same adapter; remove one"):
        open_peft(write(tmp_path / "twice", arrays | renamed), MODEL)


def written(model, folder, **options):
    """The configuration and the tensors of `save_peft`."""
    jaxtp.save_peft(model, folder, **options)
    return json.loads((folder / SETTINGS).read_text()), exactly(stored(folder / WEIGHTS))


def exactly(arrays):
    return {name: (array.shape, np.asarray(array).tobytes()) for name, array in arrays.items()}


def factors_of(model):
    return {path: variable[...] for path, variable in named_variables(nnx.state(model, nnx.LoRAParam)).items()}


def train(model):
    """Gives each factor other values."""
    random = np.random.default_rng(1)
    changed = jax.tree.map(lambda a: a + random.normal(size=a.shape).astype(a.dtype), nnx.state(model, nnx.LoRAParam))
    nnx.update(model, changed)


E, R, D, F = 3, 2, 4, 6
MIXTRAL = jaxtp.ModelConfig(**{**vars(MODEL), "num_layers": 2, "num_experts": E, "experts_per_token": 2})
"""Of which a PEFT file has these tensors, as PEFT 0.21 writes them with transformers 5, and with transformers 4."""
STACKED = {
    "self_attn.q_proj": ((R, D), (4, R)),
    "mlp.experts.base_layer": ((E * R, D), (2 * F, R * E)),
    "mlp.experts": ((E * R, F), (D, R * E)),
}
SEPARATE = {"self_attn.q_proj": STACKED["self_attn.q_proj"]} | {
    f"block_sparse_moe.experts.{expert}.{name}": shapes
    for expert in range(E)
    for name, shapes in {"w1": ((R, D), (F, R)), "w3": ((R, D), (F, R)), "w2": ((R, F), (D, R))}.items()
}
EXPERTS = {
    "stacked": (
        STACKED,
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "peft_version": "0.21.2",
        },
    ),
    "separate": (SEPARATE, {"target_modules": ["q_proj", "w1", "w3", "w2"]}),
}


def of_experts(spelling, layers=range(2)):
    """Random tensors, and the attributes beside them."""
    shapes, attributes = EXPERTS[spelling]
    random = np.random.default_rng(0)
    arrays = {
        f"base_model.model.model.layers.{layer}.{module}.lora_{factor}.weight": random.normal(size=shape)
        for layer in layers
        for module, both in shapes.items()
        for factor, shape in zip("AB", both, strict=True)
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}, attributes


def added_by(arrays, layer):
    """What PEFT adds to the gate, up and down kernels of all experts, `[E, in, out]`, by its `get_delta_weight`."""

    def factors(module):
        return (arrays[f"base_model.model.model.layers.{layer}.{module}.lora_{factor}.weight"] for factor in "AB")

    def stacked(module):
        a, b = factors(module)
        return 3 * np.einsum("ore,eri->eio", b.reshape(len(b), R, E), a.reshape(E, R, -1))

    def separate(name):
        each = (factors(f"block_sparse_moe.experts.{expert}.{name}") for expert in range(E))
        return 3 * np.stack([(b @ a).T for a, b in each])

    if any("base_layer" in name for name in arrays):
        return [*np.split(stacked("mlp.experts.base_layer"), 2, axis=-1), stacked("mlp.experts")]
    return [separate(name) for name in ("w1", "w3", "w2")]


@pytest.mark.parametrize(
    ("spelling", "sizes"), sweep_of([EXPERTS, [None, {"fsdp": 2, "tp": 2}, {"tp": 3}]], ("stacked", None)), ids=str
)
def test_adapters_of_experts(spelling, sizes, tmp_path):
    """What they add, and out again byte by byte; in the other spelling, they are the same function."""
    arrays, attributes = of_experts(spelling)
    write(tmp_path / "in", arrays, **attributes)
    with contextlib.nullcontext() if sizes is None else jax.set_mesh(jaxtp.make_mesh(**sizes)):
        model = jaxtp.Decoder(MIXTRAL, rngs=nnx.Rngs(0))
        adapted = load_peft(model, tmp_path / "in", family="mixtral")
        attributes, found = written(adapted, tmp_path / "out", family="mixtral", experts=spelling)
        assert found == exactly(arrays)
        assert attributes["target_modules"] == EXPERTS[spelling][1]["target_modules"]
        assert attributes.get("target_parameters") == EXPERTS[spelling][1].get("target_parameters")
        assert "rank_pattern" not in attributes
        merged = jaxtp.merge_adapters(adapted)
        other = "separate" if spelling == "stacked" else "stacked"
        jaxtp.save_peft(adapted, tmp_path / "other", family="mixtral", experts=other)
        again = jaxtp.merge_adapters(load_peft(model, tmp_path / "other", family="mixtral"))
    sides = {"gate": (D, F), "up": (D, F), "down": (F, D)}
    for i, (name, shape) in enumerate(sides.items()):
        before, after, same = (
            np.asarray(getattr(each.blocks.mlp, name)[...])[:, :, : shape[0], : shape[1]]  # without padding
            for each in (model, merged, again)
        )
        np.testing.assert_allclose(after, before + [added_by(arrays, layer)[i] for layer in range(2)], atol=2e-5)
        np.testing.assert_allclose(same, after, atol=2e-6)


@pytest.mark.parametrize("rslora", sweep([False, True], False))
def test_experts_of_which_gate_and_up_differ(rslora, tmp_path):
    """PEFT's A for both has both ranks, and its B is block-diagonal."""
    lora = LoraConfig(rank=R, alpha=6.0, rslora=rslora, targets=("gate_proj", "up_proj"))
    model = jaxtp.Decoder(MIXTRAL, rngs=nnx.Rngs(0))
    adapted = jaxtp.add_adapters(model, lora)
    train(adapted)
    attributes, _ = written(adapted, tmp_path / "out", family="mixtral")
    assert attributes["target_modules"] == []
    assert attributes["target_parameters"] == ["mlp.experts.gate_up_proj"]
    assert attributes["rank_pattern"] == {"mlp.experts.gate_up_proj": 2 * R}
    assert attributes["alpha_pattern"] == {"mlp.experts.gate_up_proj": pytest.approx(6.0 * (2**0.5 if rslora else 2))}
    mlp, out = adapted.blocks.mlp, stored(tmp_path / "out" / WEIGHTS)
    a, b = (out[f"base_model.model.model.layers.1.mlp.experts.lora_{factor}.weight"] for factor in "AB")
    a, b = a.reshape(E, 2 * R, D), b.reshape(2 * F, 2 * R, E)
    np.testing.assert_array_equal(a[:, :R], mlp.gate_lora.a[...][1].swapaxes(1, 2))
    np.testing.assert_array_equal(b[F:, R:], mlp.up_lora.b[...][1].T)
    assert not b[F:, :R].any()
    assert not b[:F, R:].any()
    assert exactly(factors_of(load_peft(model, tmp_path / "out", family="mixtral"))) == exactly(factors_of(adapted))


def test_experts_whose_joined_adapter_was_trained_on_keep_its_rank(tmp_path):
    """B is no longer block-diagonal: both have all of A."""
    shapes = {"mlp.experts": ((E * 2 * R, D), (2 * F, 2 * R * E))}
    arrays = {
        f"base_model.model.model.layers.{layer}.{module}.lora_{factor}.weight": np.ones(shape, np.float32)
        for layer in range(2)
        for module, both in shapes.items()
        for factor, shape in zip("AB", both, strict=True)
    }
    patterns = {f"{name}_pattern": {r".*\.gate_up_proj": 2 * value} for name, value in (("rank", R), ("alpha", 6))}
    only = {"target_modules": [], "target_parameters": ["gate_up_proj"], "peft_version": "0.21.2"}
    found = open_peft(write(tmp_path / "in", arrays, **only, **patterns), MIXTRAL, "mixtral")
    assert found.lora == LoraConfig(rank=2 * R, alpha=12, targets=("gate_proj", "up_proj"))


@pytest.mark.parametrize("width", sweep([F, D // 2], F))
def test_a_and_b_are_exchanged_before_peft_0_19(width, tmp_path):
    """PEFT took `[E, out, in]` for `[E, in, out]`: `delta[e, out, in] = B[in, r, e] A[e, r, out]`. Where A and B have
    the same sides, the version decides.
    """
    random, config = np.random.default_rng(0), dataclasses.replace(MIXTRAL, d_ff=width)
    sides = {"experts.base_layer": (D, 2 * width), "experts": (width, D)}
    arrays = {
        f"base_model.model.model.layers.{layer}.mlp.{module}.lora_{factor}.weight": random.normal(size=shape)
        for layer in range(2)
        for module, (inputs, outputs) in sides.items()
        for factor, shape in (("A", (E * R, outputs)), ("B", (inputs, R * E)))
    }
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    model = jaxtp.Decoder(config, rngs=nnx.Rngs(0))
    attributes = EXPERTS["stacked"][1] | {"target_modules": [], "peft_version": "0.18.1"}
    adapted = load_peft(model, write(tmp_path / "in", arrays, **attributes), family="mixtral")
    merged, mlp = jaxtp.merge_adapters(adapted).blocks.mlp, model.blocks.mlp
    added = {
        name: np.asarray(getattr(merged, name)[...] - getattr(mlp, name)[...])[1] for name in ("gate", "up", "down")
    }
    for module, found in (
        ("experts.base_layer", np.concatenate([added["gate"], added["up"]], axis=-1)),
        ("experts", added["down"]),
    ):
        a, b = (arrays[f"base_model.model.model.layers.1.mlp.{module}.lora_{factor}.weight"] for factor in "AB")
        expected = 3 * np.einsum("ire,ero->eio", b.reshape(len(b), R, E), a.reshape(E, R, -1))
        np.testing.assert_allclose(found, expected, atol=2e-5)
    jaxtp.save_peft(adapted, tmp_path / "out", family="mixtral")
    again = load_peft(model, tmp_path / "out", family="mixtral")
    assert exactly(factors_of(again)) == exactly(factors_of(adapted))


def test_some_experts_have_adapters(tmp_path):
    """By an expression; the others have zeros, and a note says how many have one."""
    arrays, _ = of_experts("separate")
    arrays = {name: array for name, array in arrays.items() if ".1.block_sparse_moe.experts.2." in name}
    folder = write(tmp_path / "in", arrays, target_modules=r".*\.1\.block_sparse_moe\.experts\.2\.w\d")
    found = open_peft(folder, MIXTRAL, "mixtral")
    assert found.notes == ("3 of 18 modules have an adapter; the others are not trained",)
    model = with_peft(jaxtp.Decoder(MIXTRAL, rngs=nnx.Rngs(0)), found, None)
    a = np.asarray(model.blocks.mlp.down_lora.a[...])
    assert a[1, 2].any()
    assert not a[0].any()
    assert not a[1, :2].any()


def experts(spelling, *, drop=(), add=None, **attributes):
    """A folder of a mixture's adapters, changed."""

    def change(folder):
        arrays, own = of_experts(spelling)
        arrays = {name: array for name, array in arrays.items() if not any(part in name for part in drop)}
        write(folder, arrays | (add or {}), **{**own, **attributes})

    return change


A_OF_EXPERTS = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
NO_EXPERTS = {
    "experts skipped": (
        experts("stacked", drop=["experts"], target_modules=["q_proj", "w1", "w2", "w3"], target_parameters=...),
        r"missing: .*experts.0.w1.lora_A.weight, which target_modules require",
    ),
    "down skipped": (
        experts("stacked", drop=["experts.lora"]),
        r"missing: .*layers.0.mlp.experts.lora_A.weight, which target_parameters require",
    ),
    "an expert missing": (
        experts("separate", drop=["layers.1.block_sparse_moe.experts.2.w3"]),
        r"missing: .*layers.1.block_sparse_moe.experts.2.w3.lora_A.weight, which target_modules require",
    ),
    "an expert too many": (
        experts(
            "separate",
            add={A_OF_EXPERTS.replace("mlp.experts", "block_sparse_moe.experts.9.w2"): np.ones((R, F), np.float32)},
        ),
        r"experts.9.w2 are not supported in a mixtral, only of .*block_sparse_moe.experts.\*.w2",
    ),
    "another number of experts": (
        experts("stacked", add={A_OF_EXPERTS: np.ones((4 * R, F), np.float32)}),
        r"experts.lora_A.weight has the shape 8x6, and r = 2 for each of 3 experts",
    ),
    "no parameters named": (experts("stacked", target_parameters=...), r"adapters of .*experts.base_layer are not"),
    "a parameter that there is not": (
        experts("stacked", target_parameters=["gate_up_proj", "down_proj", "mlp.gate.weight"]),
        "target_parameters name mlp.gate.weight, which is no parameter here",
    ),
    "parameters of no list": (experts("stacked", target_parameters="gate_up_proj"), "should be a list of names"),
    "several scales": (
        experts("stacked", alpha_pattern={"down_proj": 7}),
        "down_proj has rank 2 and scale 3.5, unlike .*q_proj.* with 2 and 3; jaxtp has one rank",
    ),
    "an expression": (
        experts("stacked", rank_pattern={"(a+)+": 7}),
        r"rank_pattern: '\(a\+\)\+' is not evaluated, only names",
    ),
    "patterns in a list": (experts("stacked", rank_pattern=["a"]), r"rank_pattern = \['a'\]: should be an object"),
    "a pattern of text": (experts("stacked", rank_pattern={"a": "b"}), "rank_pattern = 'b': should be a whole number"),
}


@pytest.mark.parametrize("name", NO_EXPERTS)
def test_experts_refused(name, tmp_path):
    """Such as adapters that PEFT did not make, since it found no modules of these names in transformers 5."""
    change, message = NO_EXPERTS[name]
    change(tmp_path / "adapters")
    with pytest.raises(jaxtp.HFError, match=message) as raised:
        open_peft(tmp_path / "adapters", MIXTRAL, "mixtral")
    assert is_one_clear_message(raised.value)


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
    "parameters": (attributes(target_parameters=["mlp.experts.gate_up_proj"]), "target_parameters name mlp.experts"),
    "layers again": (attributes(layer_replication=[[0, 2]]), "layer_replication = "),
    "kernels changed": (attributes(init_lora_weights="pissa"), "init_lora_weights = 'pissa' .* changes the kernels"),
    "unknown": (attributes(from_the_future=3), "from_the_future = 3 is not supported"),
    "names of numbers": (attributes(target_modules=[3]), r"target_modules = \[3\]: should be a list of names"),
    "several ranks": (attributes(rank_pattern={"q_proj": 4}), "q_proj.lora_A.weight has the shape 2x4, and r = 4"),
    "dropout of text": (attributes(lora_dropout="a"), "lora_dropout = .a.: should be a number above 0"),
    "layers of text": (attributes(layers_to_transform=["a"]), "should be layer numbers"),
    "several scales": (attributes(alpha_pattern={"q_proj": 2}), "has rank 2 and scale 3, unlike .*q_proj.* one rank"),
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
    "a vision tower": (
        arrays(model__visual__blocks__0__attn__qkv__lora_A__weight=ZEROS),
        "adapters of model.visual.blocks.0.attn.qkv are not supported in a llama, only of self",
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


@given(values=changed(CONFIG), data=st.data())
@examples(60)
def test_any_configuration_is_read_or_refused(whole, values, data):
    (whole / SETTINGS).write_text(json.dumps(values))
    gives_one_of(PeftFolder, jaxtp.HFError, lambda: open_peft(whole, MODEL))


@given(values=changed(CONFIG | EXPERTS["stacked"][1] | {"alpha_pattern": {"gate_up_proj": 6}}), data=st.data())
@examples(30)
def test_any_configuration_of_experts_is_read_or_refused(tmp_path_factory, values, data):
    folder = tmp_path_factory.mktemp("adapters")
    write(folder, of_experts("stacked")[0])
    (folder / SETTINGS).write_text(json.dumps(values))
    gives_one_of(PeftFolder, jaxtp.HFError, lambda: open_peft(folder, MIXTRAL, "mixtral"))
