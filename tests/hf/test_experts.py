"""Mixtures of experts in Hugging Face format: a tensor for each expert or one for all, and layers without experts."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from hf_folders import (
    assert_all_refused,
    assert_same,
    float8,
    load_on,
    random_model,
    read_tensors,
    reference_attributes,
    reference_tensors,
    values,
    write_model,
    write_tensors,
)
from hf_reference import EXPERTS, FOLDER
from hypothesis import given
from hypothesis import strategies as st
from structures import examples
from support import sweep
from tables import read_table

import jaxtp
from jaxtp.hf.config_json import choose_family, model_config, write_attributes
from jaxtp.hf.families import FAMILIES
from jaxtp.hf.safetensors import read_header, with_scales
from jaxtp.tools.convert.__main__ import main

NAMES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2"), 6),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), 8),
    "qwen3_moe_dense": ("mlp", ("gate_proj", "up_proj", "down_proj"), 5),
}
"""Module of the experts, names of gate, up and down, and number of experts."""
TYPES = {name: reference_attributes(name)["model_type"] for name in EXPERTS}
LAYERS = {"mixtral": (0, 1), "qwen3_moe": (0, 1), "qwen3_moe_dense": (3,)}
"""With experts."""
MESHES = {"mixtral": {"fsdp": 2, "tp": 2}, "qwen3_moe": {"fsdp": 2, "cp": 2, "tp": 2}, "qwen3_moe_dense": {"tp": 4}}


def separate(name, layer, kernel, expert):
    module, kernels, _ = NAMES[name]
    return f"model.layers.{layer}.{module}.experts.{expert}.{kernels[kernel]}.weight"


def stack(tensors, name, layer, gate_up=True, down=True):
    """Stacks a layer's experts as transformers 5 does, in place."""
    experts, after = range(NAMES[name][2]), f"model.layers.{layer}.mlp.experts"

    def take(kernel):
        return np.stack([tensors.pop(separate(name, layer, kernel, expert)) for expert in experts])

    if gate_up:
        tensors[f"{after}.gate_up_proj"] = np.concatenate([take(0), take(1)], axis=1)
    if down:
        tensors[f"{after}.down_proj"] = take(2)


def stacked(name):
    """Returns the tensors of a reference as transformers 5 has them in memory."""
    tensors = reference_tensors(name)
    for layer in LAYERS[name]:
        stack(tensors, name, layer)
    return {key.replace("block_sparse_moe", "mlp"): tensor for key, tensor in tensors.items()}


def older_folder(name, tensors, folder, **attributes):
    """Writes tensors beside a reference's attributes as older versions of transformers have them."""
    return write_model(folder, reference_attributes(name, "config_v4.json") | attributes, tensors)


@pytest.mark.parametrize("name", sweep(EXPERTS, "mixtral"))
def test_experts_are_written_and_read_stacked(name, tmp_path):
    read = []
    model = load_on(FOLDER / name, **MESHES[name])
    jaxtp.save_hf(model, tmp_path / "out", family=TYPES[name], experts="stacked", max_shard_size="20KB")
    written = read_tensors(tmp_path / "out")
    assert_same(written, stacked(name))
    with jax.set_mesh(jaxtp.make_mesh(**MESHES[name])):
        again = jaxtp.load_hf(tmp_path / "out", progress=lambda done, total: read.append((done, total)))
    assert_same(values(again), values(model))
    num_bytes = sum(array.nbytes for array in written.values())
    assert read[-1] == (num_bytes, num_bytes), "every byte once"


@pytest.mark.parametrize("layout", ["separate", "stacked"])
def test_experts_wider_than_a_tile(layout, tmp_path):
    sizes = {"d_model": 80, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "d_ff": 144, "num_experts": 4}
    model = random_model(jaxtp.ModelConfig(vocab_size=8, num_layers=1, **sizes))
    jaxtp.save_hf(model, tmp_path / "out", experts=layout)
    assert_same(values(jaxtp.load_hf(tmp_path / "out")), values(model))


BOTH = [  # gate and up, down, the router, and the mesh
    (True, False, True, {"fsdp": 2, "tp": 2}),
    (False, True, True, {"tp": 4}),
    (True, True, False, {}),
]


@pytest.mark.parametrize("case", sweep(BOTH, BOTH[0]), ids=str)
def test_both_layouts_in_one_folder(case, tmp_path):
    """Layers differ, kernels of a layer, and the router from its experts."""
    gate_up, down, router, mesh = case
    tensors = reference_tensors("mixtral")
    stack(tensors, "mixtral", 1, gate_up, down)
    if router:
        name = "model.layers.1.block_sparse_moe.gate.weight"
        tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)
    mixed = load_on(older_folder("mixtral", tensors, tmp_path / "mixed"), **mesh)
    expected = load_on(FOLDER / "mixtral", **mesh)
    assert_same(values(mixed), values(expected))
    if mesh == BOTH[0][-1]:
        gate = mixed.blocks.mlp.gate[...]
        assert {shard.data.shape for shard in gate.addressable_shards} == {(2, 3, 20, 24)}, "whole experts"


def test_a_device_has_a_part_of_each_expert_where_tp_does_not_divide_their_number():
    gate = load_on(FOLDER / "mixtral", tp=4).blocks.mlp.gate[...]
    assert {shard.data.shape for shard in gate.addressable_shards} == {(2, 6, 40, 6)}


@pytest.mark.wide
def test_the_export_command_has_the_flag(tmp_path):
    assert main(["import", str(FOLDER / "qwen3_moe"), str(tmp_path / "run")]) == 0
    for layout, flags in (("separate", []), ("stacked", ["--experts", "stacked"])):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / layout), *flags]) == 0
    assert_same(read_tensors(tmp_path / "separate"), reference_tensors("qwen3_moe"))
    assert_same(read_tensors(tmp_path / "stacked"), stacked("qwen3_moe"))


def test_the_plan_tells_how_experts_are_split(capsys):
    assert main(["plan", str(FOLDER / "mixtral")]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[3:]}
    assert rows["layers.*.mlp.experts.gate_up_proj"] == ["packed_colwise", "grouped_gemm", "differs"]
    assert rows["layers.*.mlp.gate"] == ["-", "replicated"]
    assert main(["plan", str(FOLDER / "gpt_oss_mxfp4")]) == 0
    rows = {line.split()[0]: line.split()[1:3] for line in capsys.readouterr().out.splitlines()[3:]}
    assert rows["layers.*.mlp.experts.gate_up_proj"] == ["-", "grouped_gemm"]
    assert rows["layers.*.self_attn.sinks"] == ["-", "colwise"]


FIRST = separate("mixtral", 0, 0, 0)
STACKED = "model.layers.0.mlp.experts.gate_up_proj"


def without(name):
    return lambda tensors: tensors.pop(name)


def with_another(name, shape, dtype=np.float32):
    return lambda tensors: tensors.update({name: np.ones(shape, dtype)})


def without_experts(tensors):
    for kernel in range(3):
        for expert in range(6):
            tensors.pop(separate("mixtral", 0, kernel, expert))


def stacked_with(change):
    def edit(tensors):
        stack(tensors, "mixtral", 0)
        change(tensors)

    return edit


def stack_both(tensors):
    for layer in (0, 1):
        stack(tensors, "mixtral", layer)


def not_finite(tensors):
    tensors[FIRST] = np.full_like(tensors[FIRST], np.nan)


def unchanged(tensors):
    pass


FAR = "model.layers.0.block_sparse_moe.experts.999999999.w1.weight"
ROUTERS = [f"model.layers.1.{module}.gate.weight" for module in ("block_sparse_moe", "mlp")]
BAD = {
    "an expert missing": (without(separate("mixtral", 1, 2, 3)), {}, "missing", separate("mixtral", 1, 2, 3)),
    "the last expert missing": (without(separate("mixtral", 1, 0, 5)), {}, separate("mixtral", 1, 0, 5)),
    "all experts of a layer missing": (without_experts, {}, separate("mixtral", 0, 2, 0), "15 more"),
    "a router missing": (without(ROUTERS[0]), {}, "missing", ROUTERS[0]),
    "all of it stacked too": (with_another(STACKED, (6, 48, 40)), {}, FIRST, STACKED),
    "one of it stacked too": (
        stacked_with(with_another(separate("mixtral", 0, 1, 4), (24, 40))),
        {},
        separate("mixtral", 0, 1, 4),
        STACKED,
    ),
    "two routers": (with_another(ROUTERS[1], (6, 40)), {}, *ROUTERS),
    "an expert of another shape": (with_another(FIRST, (40, 24)), {}, FIRST, "40x24", "24x40"),
    "a stack of another shape": (stacked_with(with_another(STACKED, (6, 40, 48))), {}, STACKED, "6x40x48", "6x48x40"),
    "a stack of fewer experts": (stacked_with(with_another(STACKED, (5, 48, 40))), {}, STACKED, "5x48x40", "6x48x40"),
    "an expert too many": (
        with_another(separate("mixtral", 1, 0, 6), (24, 40)),
        {},
        "num_local_experts = 6",
        "7 experts",
    ),
    "fewer than are said": (unchanged, {"num_local_experts": 8}, "num_local_experts = 8", "6 experts"),
    "experts by the billion": (unchanged, {"num_local_experts": 2**31 - 1}, "2147483647", "6 experts"),
    "a stack by the billion": (stack_both, {"num_local_experts": 2**31 - 1}, STACKED, "2147483647x48x40"),
    "one more, a billion on": (with_another(FAR, (24, 40)), {"num_local_experts": 10**9}, "1000000000", "999999999"),
    "names of Qwen": (
        with_another("model.layers.0.mlp.experts.0.gate_proj.weight", (24, 40)),
        {},
        "unexpected",
        "model.layers.0.mlp.experts.0.gate_proj.weight",
    ),
    "an expert that is not finite": (not_finite, {}, FIRST, "not finite"),
}
BLOCKS, SCALES = (f"model.layers.1.mlp.experts.down_proj_{name}" for name in ("blocks", "scales"))
DOWN = BLOCKS.removesuffix("_blocks")


def fewer_experts(tensors):
    tensors |= {name: tensors[name][:4] for name in (BLOCKS, SCALES)}


def with_codes(scale, code=None):
    """Sets one scale, or all numbers and scales."""

    def change(tensors):
        tensors[SCALES][(3, 0, 0) if code is None else ...] = scale
        if code is not None:
            tensors[BLOCKS][...] = code

    return change


BAD_MXFP4 = {
    "no scales": (without(SCALES), {}, BLOCKS, "(5, 32, 2, 16)", "missing"),
    "no blocks": (without(BLOCKS), {}, "missing", SCALES),
    "fewer scales": (with_another(SCALES, (5, 32, 1), np.uint8), {}, "U8 (5, 32, 1)"),
    "scales of float32": (with_another(SCALES, (5, 32, 2)), {}, "F32 (5, 32, 2)"),
    "shorter blocks": (with_another(BLOCKS, (5, 32, 2, 8), np.uint8), {}, BLOCKS, "(5, 32, 2, 8)"),
    "blocks without groups": (with_another(BLOCKS, (5, 32, 16), np.uint8), {}, BLOCKS, "(5, 32, 16)"),
    "one expert fewer": (fewer_experts, {}, BLOCKS, "4x32x64", "5x32x64"),
    "a scale that is NaN": (with_codes(255), {}, BLOCKS, "not finite"),
    "numbers that overflow": (with_codes(254, 0x77), {}, BLOCKS, "not finite"),
    "in bfloat16 too": (with_another(DOWN, (5, 64, 32)), {}, BLOCKS, DOWN),
}


@pytest.mark.parametrize(("name", "cases"), [("mixtral", BAD), ("gpt_oss_mxfp4", BAD_MXFP4)], ids=["mixtral", "mxfp4"])
def test_wrong_tensors_of_experts_are_named(name, cases, tmp_path):
    refusals = {}
    for number, (case, (change, attributes, *words)) in enumerate(cases.items()):
        tensors = reference_tensors(name)
        change(tensors)
        folder = older_folder(name, tensors, tmp_path / str(number), **attributes)
        refusals[case] = functools.partial(jaxtp.load_hf, folder), words
    assert_all_refused(refusals)


@examples(15)
@given(
    count=st.integers(1, 12),
    step=st.integers(1, 4),
    dense=st.none() | st.lists(st.integers(0, 13), max_size=4),
    normalised=st.booleans(),
    window=st.none() | st.integers(1, 9),
)
def test_which_layers_have_experts(count, step, dense, normalised, window):
    attributes = read_table(__file__, "published")["qwen3_moe"] | {
        "num_hidden_layers": count,
        "decoder_sparse_step": step,
        "mlp_only_layers": dense,
        "norm_topk_prob": normalised,
        "moe_intermediate_size": 100,
        **({} if window is None else {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}),
    }
    config = model_config(attributes, "it")
    expected = [i not in (dense or []) and (i + 1) % step == 0 for i in range(count)]
    assert [bool(block.num_experts) for block in config.layers()] == expected
    assert [block.d_ff for block in config.layers()] == [100 if sparse else 6144 for sparse in expected]
    if any(expected):
        assert config.normalize_experts == normalised
        written = write_attributes(config, FAMILIES["qwen3_moe"], "float32")
        assert list(model_config(written, "it").layers()) == list(config.layers())


@pytest.mark.parametrize("kind", ["block", "expert", "all"])
def test_stacked_float8_has_a_scale_of_each(kind, tmp_path):
    random, plain, scaled = np.random.default_rng(0), stacked("mixtral"), {}
    for name in [name for name in plain if ".experts." in name]:
        block = {"block": (16, 24), "expert": plain[name].shape[1:], "all": None}[kind]
        codes, scale, plain[name] = float8(plain[name], block, random)
        scaled |= {name: codes, f"{name}_scale_inv": scale, f"{name}_activation_scale": np.float32([1])}
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 24]}
    whole = older_folder("mixtral", plain, tmp_path / "float32")
    quantized = older_folder("mixtral", plain | scaled, tmp_path / "float8", quantization_config=quantization)
    found = jaxtp.load_hf(quantized, precision=jaxtp.Precision())
    assert_same(values(found), values(jaxtp.load_hf(whole)))


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.mark.parametrize("block_bytes", [1, 500, 2**24])
def test_mxfp4_numbers(block_bytes, tmp_path):
    """Two in each byte, the low four bits first: a sign and one of eight numbers, times 2^(scale - 127)."""
    rng, grid = np.random.default_rng(0), (5, 3, 2)
    blocks = rng.integers(256, size=(*grid, 16), dtype=np.uint8)
    scales = rng.integers(253, size=grid, dtype=np.uint8)
    write_tensors(tmp_path / "it", {"down_blocks": blocks, "down_scales": scales, "other": np.ones(2, np.float32)})
    codes = np.stack([blocks % 16, blocks // 16], axis=-1).reshape(*grid, 32)
    expected = np.where(codes < 8, 1, -1) * FP4[codes % 8] * 2.0 ** (scales.astype(int) - 127)[..., None]
    tensors = with_scales(read_header(tmp_path / "it"), (128, 128))
    assert tensors.keys() == {"down_blocks", "other"}
    for first, last in ((0, 5), (1, 3), (4, 5)):
        read = {row: block.astype(np.float64) for row, block in tensors["down_blocks"].blocks(first, last, block_bytes)}
        assert next(iter(read)) == first
        np.testing.assert_array_equal(np.concatenate(list(read.values())), expected.reshape(5, 3, 64)[first:last])


MESHES_OF_MXFP4 = [{"fsdp": 2, "tp": 2}, {"tp": 5}, {"tp": 3}, {"fsdp": 2, "cp": 2, "tp": 2}]


@pytest.mark.parametrize("mesh", sweep(MESHES_OF_MXFP4, MESHES_OF_MXFP4[0]), ids=str)
def test_mxfp4_is_written_as_bfloat16(mesh, tmp_path):
    model = load_on(FOLDER / "gpt_oss_mxfp4", **mesh)
    jaxtp.save_hf(model, tmp_path / "out", dtype="bfloat16")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    tensors, source = (read_header(each / "model.safetensors") for each in (tmp_path / "out", FOLDER / "gpt_oss_mxfp4"))
    assert {tensor.dtype for tensor in tensors.values()} == {"BF16"}
    assert tensors.keys() - source.keys() == {
        f"model.layers.{i}.mlp.experts.{name}_proj" for i in (0, 1) for name in ("gate_up", "down")
    }
    with jax.set_mesh(jaxtp.make_mesh(**mesh)):
        again = jaxtp.load_hf(tmp_path / "out", precision=jaxtp.Precision())
    assert_same(values(again), values(model))


TINY = jaxtp.ModelConfig(
    vocab_size=11, d_model=8, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=12, num_experts=4
)
LOST = {
    "selection_bias": ("mixtral", {"selection_bias": True}, "selection_bias: True -> False"),
    "of qwen": ("qwen3_moe", {"selection_bias": True, "qk_norm": "head"}, "selection_bias: Tr"),
    "normalize_experts": ("mixtral", {"normalize_experts": False}, "normalize_experts: False -> True"),
    "some without": ("mixtral", {"pattern": ({}, {"num_experts": 0})}, "num_experts: "),
    "all without": ("mixtral", {"num_experts": 0, "experts_per_token": 3}, "num_local_experts = 0"),
}


def test_what_a_family_of_experts_cannot_represent_is_named():
    refusals = {}
    for case, (family, changes, lost) in LOST.items():
        config = dataclasses.replace(TINY, **changes)
        action = functools.partial(write_attributes, config, FAMILIES[family], "float32")
        refusals[case] = action, [family, "cannot represent this model", lost]
    assert_all_refused(refusals)
    dense = dataclasses.replace(TINY, num_experts=0, experts_per_token=3, normalize_experts=False)
    assert choose_family(dense, None).model_type == "llama", "settings of experts mean nothing without them"
