"""Mixtures of experts in Hugging Face format: a tensor for each expert or one for all, and
layers without experts.
"""

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
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from structures import examples
from support import swept, use_mesh
from tables import read_json, read_table, with_tuples
from variants import small_model

from jaxtp import ModelConfig, Precision, hf
from jaxtp.checkpoint.logical import named_arrays
from jaxtp.hf.config_json import choose_family, model_config, write_attributes
from jaxtp.hf.families import FAMILIES
from jaxtp.hf.runs import load_frozen
from jaxtp.hf.safetensors import read_header, with_scales
from jaxtp.layers.forms import MXFP4
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import mesh_of, mesh_shape
from jaxtp.models.decoder import abstract_decoder, create_decoder
from jaxtp.tools.convert.__main__ import main

TABLES = read_table(__file__)

NAMES = TABLES["names"]
"""Module of the experts, names of gate, up and down, and number of experts."""
TYPES = {name: reference_attributes(name)["model_type"] for name in EXPERTS}
LAYERS = {"mixtral": (0, 1), "qwen3_moe": (0, 1), "qwen3_moe_dense": (3,)}
"""With experts."""
MESHES = TABLES["meshes"]


def separate(name, layer, kernel, expert):
    module, kernels, _ = NAMES[name]
    return f"model.layers.{layer}.{module}.experts.{expert}.{kernels[kernel]}.weight"


def stack(tensors, name, layer, gate_up=True, down=True):
    """Stacks a layer's experts as transformers 5 does, in place."""
    experts = range(NAMES[name][2])
    after = f"model.layers.{layer}.mlp.experts"

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
    """Writes tensors beside a reference's attributes as older versions of transformers have
    them.
    """
    return write_model(folder, reference_attributes(name, "config_v4.json") | attributes, tensors)


@swept("name", EXPERTS, "mixtral")
def test_experts_are_written_and_read_stacked(name, tmp_path):
    read = []
    model = load_on(FOLDER / name, **MESHES[name])
    hf.save(model, tmp_path / "out", family=TYPES[name], experts="stacked", max_shard_size="20KB")
    written = read_tensors(tmp_path / "out")
    assert_same(written, stacked(name))
    with use_mesh(**MESHES[name]):
        again = hf.load(tmp_path / "out", progress=lambda done, total: read.append((done, total)))
    assert_same(values(again), values(model))
    num_bytes = sum(array.nbytes for array in written.values())
    assert read[-1] == (num_bytes, num_bytes), "every byte once"


@pytest.mark.parametrize("layout", ["separate", "stacked"])
def test_experts_wider_than_a_tile(layout, tmp_path):
    sizes = TABLES["wide"]
    model = random_model(ModelConfig(vocab_size=8, num_layers=1, **sizes))
    hf.save(model, tmp_path / "out", experts=layout)
    assert_same(values(hf.load(tmp_path / "out")), values(model))


MIXED = TABLES["mixed"]


@swept("stacked", MIXED, "gate, up and router")
def test_both_layouts_in_one_folder(stacked, tmp_path):
    """Layers differ, kernels of a layer, and the router from its experts."""
    gate_up, down, router, mesh = MIXED[stacked]
    tensors = reference_tensors("mixtral")
    stack(tensors, "mixtral", 1, gate_up, down)
    if router:
        name = "model.layers.1.block_sparse_moe.gate.weight"
        tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)
    mixed = load_on(older_folder("mixtral", tensors, tmp_path / "mixed"), **mesh)
    assert_same(values(mixed), values(load_on(FOLDER / "mixtral", **mesh)))


def test_a_device_has_a_part_of_each_expert_where_tp_does_not_divide_their_number():
    gate = load_on(FOLDER / "mixtral", tp=4).blocks.mlp.gate[...]
    assert {shard.data.shape for shard in gate.addressable_shards} == {(2, 6, 40, 6)}


@pytest.mark.wide
def test_the_export_command_has_the_flag(tmp_path):
    assert main(["import", str(FOLDER / "qwen3_moe"), str(tmp_path / "run")]) == 0
    assert (
        main(["export", str(tmp_path / "run"), str(tmp_path / "stacked"), "--experts=stacked"]) == 0
    )
    assert_same(read_tensors(tmp_path / "stacked"), stacked("qwen3_moe"))


BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
SCALES = BLOCKS.replace("blocks", "scales")
FIRST = separate("mixtral", 0, 0, 0)
LARGE = {
    SCALES: np.full((5, 32, 2), 254, np.uint8),
    BLOCKS: np.full((5, 32, 2, 16), 0x77, np.uint8),
}
NOT_FINITE = {
    "an expert": ("mixtral", FIRST, {FIRST: np.full((24, 40), np.nan, np.float32)}),
    "a scale": ("gpt_oss_mxfp4", BLOCKS, {SCALES: np.full((5, 32, 2), 255, np.uint8)}),
    "numbers that overflow": ("gpt_oss_mxfp4", BLOCKS, LARGE),
}


@pytest.mark.wide
def test_wrong_tensors_are_named(tmp_path):
    refusals = {}
    for name, rows in read_table(__file__, "wrong_tensors").items():
        for number, row in enumerate(rows):
            folder = wrong_folder(name, row, tmp_path / f"{name} {number}")
            words = [row["says"]] if isinstance(row["says"], str) else row["says"]
            refusals[str(row)] = partial(hf.load, folder), words
    for case, (name, named, changed) in NOT_FINITE.items():
        folder = older_folder(name, reference_tensors(name) | changed, tmp_path / case)
        refusals[case] = partial(hf.load, folder), [named, "not finite"]
    assert_all_refused(refusals)


def wrong_folder(name, row, folder):
    """Writes a reference as a row of wrong_tensors.yaml changes it."""
    tensors = reference_tensors(name)
    for layer in row.get("stack", ()):
        stack(tensors, name, layer)
    return older_folder(name, changed_tensors(tensors, row), folder, **row.get("with", {}))


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
        **(
            {}
            if window is None
            else {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
        ),
    }
    config = model_config(attributes, "it")
    expected = [i not in (dense or []) and (i + 1) % step == 0 for i in range(count)]
    assert [bool(block.num_experts) for block in config.layers()] == expected
    assert [block.d_ff for block in config.layers()] == [
        100 if sparse else 6144 for sparse in expected
    ]
    if any(expected):
        assert config.normalize_experts == normalised
        written = write_attributes(config, FAMILIES["qwen3_moe"], "float32")
        assert list(model_config(written, "it").layers()) == list(config.layers())


@pytest.mark.parametrize("kind", ["block", "expert", "all"])
def test_stacked_float8_has_a_scale_of_each(kind, tmp_path):
    random = default_rng(0)
    plain = stacked("mixtral")
    scaled = {}
    for name in [name for name in plain if ".experts." in name]:
        block = {"block": (16, 24), "expert": plain[name].shape[1:], "all": None}[kind]
        codes, scale, plain[name] = float8(plain[name], block, random)
        scaled |= {
            name: codes,
            f"{name}_scale_inv": scale,
            f"{name}_activation_scale": np.float32([1]),
        }
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 24]}
    whole = older_folder("mixtral", plain, tmp_path / "float32")
    quantized = older_folder(
        "mixtral", plain | scaled, tmp_path / "float8", quantization_config=quantization
    )
    found = hf.load(quantized, precision=Precision())
    assert_same(values(found), values(hf.load(whole)))


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_mxfp4_numbers(tmp_path, monkeypatch):
    """Two in each byte, the low four bits first: a sign and one of eight numbers, times 2^(scale
    - 127).
    """
    rng = default_rng(0)
    grid = (5, 3, 2)
    blocks = rng.integers(256, size=(*grid, 16), dtype=np.uint8)
    scales = rng.integers(253, size=grid, dtype=np.uint8)
    write_tensors(
        tmp_path / "it",
        {"down_blocks": blocks, "down_scales": scales, "other": np.ones(2, np.float32)},
    )
    codes = np.stack([blocks % 16, blocks // 16], axis=-1).reshape(*grid, 32)
    expected = (
        np.where(codes < 8, 1, -1) * FP4[codes % 8] * 2.0 ** (scales.astype(int) - 127)[..., None]
    )
    tensors = with_scales(read_header(tmp_path / "it"), (128, 128))
    assert tensors.keys() == {"down_blocks", "other"}
    for first, last, num_bytes in ((0, 5, 1), (1, 3, 500), (4, 5, 2**24)):
        monkeypatch.setattr("jaxtp.hf.safetensors._BLOCK", num_bytes)
        read = {
            row: block.astype(np.float64)
            for row, block in tensors["down_blocks"].blocks(first, last)
        }
        assert next(iter(read)) == first
        assert_array_equal(
            np.concatenate(list(read.values())), expected.reshape(5, 3, 64)[first:last]
        )


@swept("mesh", TABLES["meshes of MXFP4"])
def test_mxfp4_is_written_as_bfloat16(mesh, tmp_path):
    model = load_on(FOLDER / "gpt_oss_mxfp4", **mesh)
    hf.save(model, tmp_path / "out", dtype="bfloat16")
    assert "quantization_config" not in read_json(tmp_path / "out/config.json")
    tensors = read_header(tmp_path / "out/model.safetensors")
    source = read_header(FOLDER / "gpt_oss_mxfp4/model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {"BF16"}
    assert {name.rpartition(".")[2] for name in tensors.keys() - source.keys()} == {
        "gate_up_proj",
        "down_proj",
    }
    with use_mesh(**mesh):
        again = hf.load(tmp_path / "out", precision=Precision())
    assert_same(values(again), values(model))


@swept("mesh", [{}, {"tp": 2}], {})
def test_a_base_in_mxfp4_is_the_model_of_the_file(mesh):
    folder = FOLDER / "gpt_oss_mxfp4"
    mesh = mesh_of(mesh_shape(**mesh))
    bases = {}
    with jax.set_mesh(mesh):
        for base in ("full", "mxfp4"):
            lora = LoraConfig(rank=2, base=base)
            config = replace(hf.read_config(folder), lora=lora)
            graph, abstract = abstract_decoder(config)
            frozen, described, _ = load_frozen(folder, config, mesh, abstract)
            shardings = nnx.get_named_sharding(nnx.filter_state(abstract, nnx.LoRAParam), mesh)
            new = jax.jit(lambda config=config: adapters_of(config), out_shardings=shardings)()
            of = jax.jit(lambda state, graph=graph: nnx.merge(graph, state)(IDS))
            logits = of(nnx.merge_state(frozen, new))
            bases[base] = logits, described, named_arrays(frozen)
    (logits, described, arrays), (logits4, described4, arrays4) = bases.values()
    assert described4 == described
    assert_allclose(logits4, logits, atol=1e-5)
    kernels = [name.removesuffix(".bits") for name in arrays4 if name.endswith(".bits")]
    assert len(kernels) == 6, "gate, up and down of both kinds of layers"
    for kernel in kernels:
        stored = MXFP4(arrays4.pop(f"{kernel}.bits"), arrays4.pop(f"{kernel}.scale"))
        assert_array_equal(in_float32(stored), arrays.pop(kernel))
        assert stored.bits.nbytes + stored.scale.nbytes == 17 / 32 * math.prod(stored.shape)
        assert stored.bits.sharding.is_fully_replicated == (mesh.size == 1)
    assert arrays4.keys() == arrays.keys()


IDS = np.arange(32).reshape(4, 8)
in_float32 = jax.jit(lambda stored: stored.astype("float32"))


def adapters_of(config):
    return nnx.state(create_decoder(config, rngs=nnx.Rngs(0)), nnx.LoRAParam)


TINY = small_model(num_layers=3, num_experts=4)
DENSE = {"num_experts": 0, "experts_per_token": 3, "normalize_experts": False}


def test_what_a_family_of_experts_cannot_represent_is_named():
    refusals = {}
    for lost, (family, changes) in TABLES["lost"].items():
        config = replace(TINY, **with_tuples(changes))
        action = partial(write_attributes, config, FAMILIES[family], "float32")
        refusals[lost] = action, [family, "cannot represent this model", lost]
    assert_all_refused(refusals)
    dense = replace(TINY, **DENSE)
    assert choose_family(dense, None).model_type == "llama", (
        "settings of experts mean nothing without them"
    )
