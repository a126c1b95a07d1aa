"""Adapters in PEFT's format read for a model; those that are damaged, hostile, of another kind
or another model.
"""

import itertools
import math
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx
from hf_folders import (
    assert_all_refused,
    assert_same,
    changed_tensors,
    move_adapters,
    planted,
    random_model,
    read_tensors,
    rewritten,
    values,
    write_tensors,
)
from hf_reference import FOLDER
from hypothesis import given
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from structures import changed, examples, gives_one_of
from support import by_name, swept, use_mesh
from tables import read_json, read_table, write_json

import jaxtp
from jaxtp import ModelConfig, add_adapters, hf, make_mesh, merge_adapters
from jaxtp.hf.peft import PeftFolder, load_adapters, open_peft, with_peft
from jaxtp.layers.lora import LoraConfig

TABLES = read_table(__file__)

WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"
MODEL = ModelConfig(
    vocab_size=8, d_model=4, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=2, d_ff=6
)
FEATURES = TABLES["features"]
CONFIG = TABLES["config"]


def factor_name(module, factor):
    return f"base_model.model.{module}.lora_{factor}.weight"


def module(target, layer):
    part = "mlp" if 6 in FEATURES[target] else "self_attn"
    return f"model.layers.{layer}.{part}.{target}"


def random_factors(shapes, dtype=np.float32):
    """Returns random A and B by name, of `{module: (shape of A, shape of B)}`."""
    random = default_rng(0)
    arrays = {}
    for each, both in shapes.items():
        for factor, shape in zip("AB", both, strict=True):
            arrays[factor_name(each, factor)] = random.normal(size=shape).astype(dtype)
    return arrays


def tensors(ranks, dtype=np.float32):
    """Returns random A and B by name, of `{(target, layer): rank}`."""
    shapes = {}
    for (target, layer), rank in ranks.items():
        inner, outer = FEATURES[target]
        shapes[module(target, layer)] = ((rank, inner), (outer, rank))
    return random_factors(shapes, dtype)


def everywhere(*targets, layers=range(3)):
    """Returns the rank of each target in each layer."""
    return dict.fromkeys(itertools.product(targets, layers), 2)


PLAIN = everywhere("q_proj", "down_proj")


def write(folder, arrays, **attributes):
    folder.mkdir(exist_ok=True)
    kept = {key: value for key, value in (CONFIG | attributes).items() if value != "absent"}
    write_json(folder / SETTINGS, kept)
    write_tensors(folder / WEIGHTS, arrays)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    hf.save(random_model(MODEL), folder)
    return folder


@pytest.fixture
def whole(tmp_path):
    """A folder with nothing wrong."""
    return write(tmp_path / "adapters", tensors(PLAIN))


KINDS = TABLES["kinds"]


@swept("kind", KINDS)
def test_adapters_are_what_they_add_to_the_kernels(kind, base, tmp_path):
    """`W + scale * (B @ A)^T`, wherever there is one. They are written as they were read: layers
    without an adapter have none again.
    """
    layers, attributes, notes, mesh = KINDS[kind]
    ranks = {}
    for target, own in layers.items():
        ranks |= everywhere(target, layers=own)
    arrays = tensors(ranks, np.float16 if kind == "list" else np.float32)
    found = open_peft(write(tmp_path / "adapters", arrays, **attributes), MODEL)
    assert [note[: len(begin)] for note, begin in zip(found.notes, notes, strict=True)] == notes
    with use_mesh(**mesh):
        adapted = with_peft(hf.load(base), found, jax.sharding.get_mesh())
        merged = merge_adapters(adapted)
        hf.save(merged, tmp_path / "merged")
        if kind in ("rslora", "some layers"):
            attributes, found_arrays = written(adapted, tmp_path / "out", base=base)
            assert attributes["base_model_name_or_path"] == str(base)
            assert_same(found_arrays, arrays)
            assert open_peft(tmp_path / "out", MODEL).lora == found.lora
    kernels = [model.blocks.mlp.down.kernel[...] for model in (adapted, merged)]
    assert kernels[0].sharding == kernels[1].sharding
    expected = read_tensors(base)
    scale = 6 / 2**0.5 if kind == "rslora" else 3
    for target, layer in ranks:
        a, b = factors_in(arrays, module(target, layer))
        expected[f"{module(target, layer)}.weight"] += scale * (b @ a)
    for name, tensor in read_tensors(tmp_path / "merged").items():
        assert_allclose(tensor, expected[name], atol=2e-5, err_msg=name)


def factors_in(arrays, module):
    """Returns A and B of a module as float32."""
    return [np.float32(arrays[factor_name(module, factor)]) for factor in "AB"]


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod."])
def test_the_wrappers_of_pytorch_are_left_out_of_names(wrapper, tmp_path):
    arrays = tensors(PLAIN)
    opened = open_peft(
        write(tmp_path / "in", {f"{wrapper}{name}": array for name, array in arrays.items()}), MODEL
    )
    assert {*opened.tensors} == {*arrays}
    assert f"'{wrapper}'" in opened.notes[0]


def test_adapters_of_a_published_class_of_other_names_are_those_of_transformers(tmp_path):
    """EXAONE's own code has other names than transformers, which reads it as a Llama."""
    model = hf.load(FOLDER / "exaone")
    arrays = {"transformers": {}, "published": {}}
    for layer in range(2):
        for loaded, stored, inner, outer in TABLES["renamed"]:
            factors = random_factors({loaded: ((2, inner), (outer, 2))})
            for name, array in factors.items():
                name = name.replace(loaded, f"model.layers.{layer}.{loaded}")
                arrays["transformers"][name] = array
                name = name.replace(loaded, stored).replace("model.layers", "transformer.h")
                arrays["published"][name] = array
    adapted = []
    for at, (kind, tensors) in enumerate(arrays.items()):
        targets = [each[at].rpartition(".")[2] for each in TABLES["renamed"]]
        pattern = {targets[1]: 2}
        write(tmp_path / kind, tensors, target_modules=targets, rank_pattern=pattern)
        adapted.append(load_adapters(model, tmp_path / kind, family="exaone"))
    first, second = map(values, adapted)
    assert_same(first, second)
    hf.save_adapters(adapted[1], tmp_path / "out", family="exaone")
    assert_same(read_tensors(tmp_path / "out" / WEIGHTS), arrays["transformers"])


TOGETHER = TABLES["together"]


@swept("name", TOGETHER, "gpt2")
def test_projections_in_one_tensor_share_their_a(name, tmp_path):
    """As long as they do, they are written as they came; then as one adapter of the sum of their
    ranks.
    """
    model = hf.load(FOLDER / name)
    before = values(model)
    layers = range(model.config.num_layers)
    columns = {
        at: [path for path in before if kernels in path] for at, kernels in TOGETHER[name].items()
    }
    shapes = {
        at.format(layer): (
            (2, model.config.d_model),
            (sum(before[path].shape[-1] for path in paths), 2),
        )
        for (at, paths), layer in itertools.product(columns.items(), layers)
    }
    arrays = random_factors(shapes)
    targets = [at.split(".{}.")[1] for at in columns]
    adapted = load_adapters(
        model, write(tmp_path / "adapters", arrays, target_modules=targets), family=name
    )
    merged = values(merge_adapters(adapted))
    for (at, paths), layer in itertools.product(columns.items(), layers):
        a, b = factors_in(arrays, at.format(layer))
        joined = [
            np.concatenate([each[path][layer] for path in paths], axis=-1)
            for each in (before, merged)
        ]
        assert_allclose(joined[1], joined[0] + 3 * (b @ a).T, atol=1e-5)
    assert_same(written(adapted, tmp_path / "same", family=name)[1], arrays)
    move_adapters(adapted)
    attributes, _ = written(adapted, tmp_path / "trained", family=name)
    assert attributes["rank_pattern"][targets[0]] == 2 * 3
    assert attributes.get("fan_in_fan_out", False) == (name == "gpt2")
    assert_read_again(adapted, model, tmp_path / "trained", name)


@swept("targets", TABLES["parts"])
def test_some_projections_of_a_tensor_are_trained(targets, tmp_path):
    """The others have zeros: in B if one is trained, else in A too, and stay without an adapter."""
    model = hf.load(FOLDER / "phi3")
    adapted = move_adapters(add_adapters(model, LoraConfig(rank=2, targets=tuple(targets))))
    attributes, _ = written(adapted, tmp_path / "out", family="phi3")
    if attributes.get("rank_pattern"):
        assert_read_again(adapted, model, tmp_path / "out", "phi3")
    again = load_adapters(model, tmp_path / "out", family="phi3")
    assert_same(values(merge_adapters(again)), values(merge_adapters(adapted)))


@pytest.mark.wide
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_adapters_of_the_text_in_a_multimodal_model(prefix, base, tmp_path):
    arrays = tensors(PLAIN)
    renamed = {
        name.replace(".model.layers", f".{prefix}layers"): array for name, array in arrays.items()
    }
    model = load_adapters(hf.load(base), write(tmp_path / "renamed", renamed))
    for family, before in (("llama", "model."), ("mistral3", "model.language_model.")):
        _, found = written(model, tmp_path / family, family=family)
        expected = {
            name.replace(".model.layers", f".{before}layers"): array
            for name, array in arrays.items()
        }
        assert_same(found, expected)
    with pytest.raises(
        jaxtp.errors.HFError, match=r"layers.0.* and .*layers.0.* are the same adapter"
    ):
        open_peft(write(tmp_path / "twice", arrays | renamed), MODEL)


def written(model, folder, **options):
    """Returns the configuration and the tensors of `save_adapters`."""
    hf.save_adapters(model, folder, **options)
    return read_json(folder / SETTINGS), read_tensors(folder / WEIGHTS)


def assert_read_again(adapted, model, folder, family):
    """Compares adapters with those of a folder that they were saved in."""
    again = load_adapters(model, folder, family=family)
    assert {*again.config.lora.targets} == {*adapted.config.lora.targets}
    assert_same(values(again, nnx.LoRAParam), values(adapted, nnx.LoRAParam))


E = 3
R = 2
D = 4
F = 6
MIXTRAL = ModelConfig(**{**vars(MODEL), "num_layers": 2, "num_experts": E, "experts_per_token": 2})
"""Of which a PEFT file has these tensors, as PEFT 0.21 writes them with transformers 5, and with
transformers 4.
"""
STACKED = {
    "self_attn.q_proj": ((R, D), (4, R)),
    "mlp.experts.base_layer": ((E * R, D), (2 * F, R * E)),
    "mlp.experts": ((E * R, F), (D, R * E)),
}
SEPARATE = {"self_attn.q_proj": STACKED["self_attn.q_proj"]}
for expert in range(E):
    SEPARATE |= {
        f"block_sparse_moe.experts.{expert}.w1": ((R, D), (F, R)),
        f"block_sparse_moe.experts.{expert}.w3": ((R, D), (F, R)),
        f"block_sparse_moe.experts.{expert}.w2": ((R, F), (D, R)),
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


KERNELS = ["blocks.mlp.gate", "blocks.mlp.up", "blocks.mlp.down"]


def in_both_layers(shapes):
    """Returns random A and B by name, of their shapes in each layer."""
    modules = itertools.product(range(2), shapes)
    return random_factors(
        {f"model.layers.{layer}.{module}": shapes[module] for layer, module in modules}
    )


def of_experts(spelling):
    """Returns random tensors, and the attributes beside them."""
    shapes, attributes = EXPERTS[spelling]
    return in_both_layers(shapes), attributes


def added_by(arrays, layer):
    """Returns what PEFT's `get_delta_weight` adds to the gate, up and down kernels of all
    experts, `[E, in, out]`.
    """

    def factors(module):
        return factors_in(arrays, f"model.layers.{layer}.{module}")

    def stacked(module):
        a, b = factors(module)
        return 3 * np.einsum("ore,eri->eio", b.reshape(len(b), R, E), a.reshape(E, R, -1))

    def separate(name):
        each = (factors(f"block_sparse_moe.experts.{expert}.{name}") for expert in range(E))
        return 3 * np.stack([(b @ a).T for a, b in each])

    if any("base_layer" in name for name in arrays):
        return [*np.split(stacked("mlp.experts.base_layer"), 2, axis=-1), stacked("mlp.experts")]
    return [separate(name) for name in ("w1", "w3", "w2")]


@swept("case", TABLES["experts"])
def test_adapters_of_experts(case, tmp_path):
    """What they add, and out again byte by byte; in the other spelling, they are the same
    function.
    """
    spelling, sizes = case
    arrays, attributes = of_experts(spelling)
    write(tmp_path / "in", arrays, **attributes)
    mesh = make_mesh(**sizes)
    with jax.set_mesh(mesh):
        model = random_model(MIXTRAL)
        adapted = load_adapters(model, tmp_path / "in", family="mixtral")
        found_attributes, found = written(
            adapted, tmp_path / "out", family="mixtral", experts=spelling
        )
        assert_same(found, arrays)
        for name in ("target_modules", "target_parameters", "rank_pattern"):
            assert found_attributes.get(name) == attributes.get(name), name
        merged = merge_adapters(adapted)
        other = "separate" if spelling == "stacked" else "stacked"
        hf.save_adapters(adapted, tmp_path / "other", family="mixtral", experts=other)
        again = merge_adapters(load_adapters(model, tmp_path / "other", family="mixtral"))
    before, after, same = (by_name(nnx.state(each), mesh) for each in (model, merged, again))
    for layer in range(2):
        for name, added in zip(KERNELS, added_by(arrays, layer), strict=True):
            assert_allclose(after[name][layer], before[name][layer] + added, atol=2e-5)
            assert_allclose(same[name][layer], after[name][layer], atol=2e-6)


@pytest.mark.wide
def test_experts_of_which_gate_and_up_differ(tmp_path):
    """PEFT's A for both has both ranks, and its B is block-diagonal."""
    model = random_model(MIXTRAL)
    parameter = "mlp.experts.gate_up_proj"
    for rslora, scale in ((False, 2), (True, 2**0.5)):
        lora = LoraConfig(rank=R, alpha=6.0, rslora=rslora, targets=("gate_proj", "up_proj"))
        adapted = move_adapters(add_adapters(model, lora))
        attributes, out = written(adapted, tmp_path / f"out {rslora}", family="mixtral")
        assert (attributes["target_modules"], attributes["target_parameters"]) == ([], [parameter])
        assert attributes["rank_pattern"] == {parameter: 2 * R}
        assert attributes["alpha_pattern"] == {parameter: pytest.approx(6.0 * scale)}
    a, b = factors_in(out, "model.layers.1.mlp.experts")
    a = a.reshape(E, 2 * R, D)
    b = b.reshape(2 * F, 2 * R, E)
    mlp = adapted.blocks.mlp
    assert_array_equal(a[:, :R], mlp.gate_lora.a[...][1].swapaxes(1, 2))
    assert_array_equal(b[F:, R:], mlp.up_lora.b[...][1].T)
    assert not b[F:, :R].any()
    assert not b[:F, R:].any()
    assert_read_again(adapted, model, tmp_path / "out True", "mixtral")


def test_experts_whose_joined_adapter_was_trained_on_keep_its_rank(tmp_path):
    """B is no longer block-diagonal: both have all of A."""
    arrays = in_both_layers({"mlp.experts": ((E * 2 * R, D), (2 * F, 2 * R * E))})
    attributes = {
        "target_modules": [],
        "target_parameters": ["gate_up_proj"],
        "peft_version": "0.21.2",
        "rank_pattern": {r".*\.gate_up_proj": 2 * R},
        "alpha_pattern": {r".*\.gate_up_proj": 12},
    }
    found = open_peft(write(tmp_path / "in", arrays, **attributes), MIXTRAL, "mixtral")
    assert found.lora == LoraConfig(rank=2 * R, alpha=12, targets=("gate_proj", "up_proj"))


@pytest.mark.parametrize("width", [F, D // 2])
def test_a_and_b_that_peft_exchanged_before_0_19_are_refused(width, tmp_path):
    """PEFT took `[E, out, in]` for `[E, in, out]`. Where A and B have the same sides, the version
    decides.
    """
    arrays = in_both_layers(
        {
            "mlp.experts.base_layer": ((E * R, 2 * width), (D, R * E)),
            "mlp.experts": ((E * R, D), (width, R * E)),
        }
    )
    attributes = EXPERTS["stacked"][1] | {"target_modules": [], "peft_version": "0.18.1"}
    folder = write(tmp_path / "in", arrays, **attributes)
    with pytest.raises(
        jaxtp.errors.HFError, match=r"before 0\.19\.0, .* exchanged A and B.*merge_and_unload"
    ):
        open_peft(folder, replace(MIXTRAL, d_ff=width), "mixtral")


def test_some_experts_have_adapters(tmp_path, capsys):
    """By an expression; the others have zeros, and a note says how many have one."""
    arrays, _ = of_experts("separate")
    arrays = {
        name: array for name, array in arrays.items() if ".1.block_sparse_moe.experts.2." in name
    }
    folder = write(
        tmp_path / "in", arrays, target_modules=r".*\.1\.block_sparse_moe\.experts\.2\.w\d"
    )
    found = open_peft(folder, MIXTRAL, "mixtral")
    assert found.notes == ("3 of 18 modules have an adapter; the others are not trained",)
    model = with_peft(random_model(MIXTRAL), found, None)
    assert found.notes[0] in capsys.readouterr().err
    a = np.asarray(model.blocks.mlp.down_lora.a[...])
    assert a[1, 2].any()
    assert not a[0].any()
    assert not a[1, :2].any()


def test_an_export_says_which_adapters_peft_refuses(tmp_path, capsys):
    model = add_adapters(hf.load(FOLDER / "falcon_h1"), LoraConfig(rank=2))
    hf.save_adapters(model, tmp_path / "out", family="falcon_h1")
    assert "PEFT refuses adapters of out_proj in a falcon_h1" in capsys.readouterr().err


BAD = {
    "no folder": (lambda folder: folder.rename(folder.parent / "adapter"), "no such folder"),
    "no configuration": (lambda folder: (folder / SETTINGS).unlink(), "no adapter_config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no adapter_model.safetensors"),
    "a pickle": (
        lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
        "adapter_model.bin",
        "pickle",
    ),
    "cut off": (rewritten(WEIGHTS, lambda content: content[:-8]), "cut off"),
    "key twice": (
        rewritten(SETTINGS, lambda content: content.replace(b'"r": 2', b'"r": 2, "r": 2')),
        "'r'",
        "twice",
    ),
    "no object": (rewritten(SETTINGS, lambda _: b"[]"), "a list"),
}


def bad_folders(kind, arrays, **attributes):
    """Yields functions that write a folder of adapters of a kind of refused_adapters.yaml, and
    words of the message.
    """
    table = read_table(__file__, "refused_adapters")
    for changes, *words in table.get(kind, ()):
        yield partial(write, arrays=arrays, **{**attributes, **changes}), words
    for change, *words in table[f"{kind} tensors"]:
        changes = attributes | change.get("with", {})
        yield partial(write, arrays=changed_tensors(arrays, change), **changes), words


def test_unsupported_and_damaged_adapters_are_refused_in_one_message(tmp_path):
    """Which names the folder, before any array is read."""
    cases = [(MODEL, None, *case) for case in bad_folders("plain", tensors(PLAIN))]
    cases += [(MODEL, None, change, words) for change, *words in BAD.values()]
    for file, kind, *words in read_table(__file__, "refused_adapters")["planted"]:
        cases.append((MODEL, None, planted(file, kind), words))
    for kind, spelling in (("experts", "stacked"), ("separate", "separate")):
        arrays, attributes = of_experts(spelling)
        changes = bad_folders(kind, arrays, **attributes)
        cases += [(MIXTRAL, "mixtral", *case) for case in changes]
    refusals = {}
    for number, (model, family, change, words) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        folder = write(tmp_path / str(number) / "adapters", tensors(PLAIN))
        change(folder)
        action = partial(open_peft, folder, model, family)
        refusals[f"{words} {number}"] = action, [*words, str(folder)]
    assert_all_refused(refusals)


def test_adapters_that_are_not_finite_are_refused(base, whole):
    found = tensors(PLAIN)
    name = factor_name(module("q_proj", 0), "B")
    found[name][1, 0] = math.nan
    with pytest.raises(jaxtp.errors.HFError, match=f"{name} has elements that are not finite"):
        load_adapters(hf.load(base), write(whole, found))


def test_attributes_that_say_nothing_are_skipped(whole):
    """What PEFT writes by default, and what a later one may."""
    write(whole, tensors(PLAIN), new=None, other=False, listed=[], auto_mapping={"a": 1})
    assert open_peft(whole, MODEL).lora == LoraConfig(
        rank=2, alpha=6, targets=("q_proj", "down_proj")
    )


def test_a_model_has_one_set_of_adapters(base, whole):
    model = load_adapters(hf.load(base), whole)
    with pytest.raises(jaxtp.errors.HFError, match="has adapters already"):
        load_adapters(model, whole)


@given(values=changed(CONFIG))
@examples(20)
def test_any_configuration_is_read_or_refused(whole, values):
    write_json(whole / SETTINGS, values)
    gives_one_of(PeftFolder, jaxtp.errors.HFError, lambda: open_peft(whole, MODEL))


@given(values=changed(CONFIG | EXPERTS["stacked"][1] | {"alpha_pattern": {"gate_up_proj": 6}}))
@examples(10)
def test_any_configuration_of_experts_is_read_or_refused(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("adapters")
    write(folder, of_experts("stacked")[0])
    write_json(folder / SETTINGS, values)
    gives_one_of(PeftFolder, jaxtp.errors.HFError, lambda: open_peft(folder, MIXTRAL, "mixtral"))
