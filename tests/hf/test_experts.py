"""Mixtures of experts in Hugging Face format: a tensor for each expert or one for all, and layers without experts."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_reference import EXPERTS, FOLDER
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from structures import examples, is_one_clear_message
from support import sweep, sweep_of

import jaxtp
from jaxtp.checkpoint.logical import named_variables
from jaxtp.hf.config_json import choose_family, model_config, write_attributes
from jaxtp.hf.families import FAMILIES
from jaxtp.hf.safetensors import read_header, with_scales, write_file
from jaxtp.layers.lora import LoraConfig
from jaxtp.tools.convert.__main__ import main

NAMES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2"), 6),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), 8),
    "qwen3_moe_dense": ("mlp", ("gate_proj", "up_proj", "down_proj"), 5),
}
"""Module of the experts, names of gate, up and down, and number of experts."""
TYPES = {name: json.loads((FOLDER / name / "config.json").read_text())["model_type"] for name in EXPERTS}
LAYERS = {"mixtral": (0, 1), "qwen3_moe": (0, 1), "qwen3_moe_dense": (3,)}
"""With experts."""
MESHES = [{}, {"fsdp": 2, "tp": 2}, {"tp": 4}, {"fsdp": 2, "cp": 2, "tp": 2}]
IDS = np.arange(32).reshape(2, 16) * 5 % 97


def separate(name, layer, kernel, expert):
    module, kernels, _ = NAMES[name]
    return f"model.layers.{layer}.{module}.experts.{expert}.{kernels[kernel]}.weight"


def stack(tensors, name, layer, gate_up=True, down=True):
    """Stacks a layer's experts as transformers 5 does, in place."""
    experts, after = range(NAMES[name][2]), f"model.layers.{layer}.mlp.experts"
    gates, ups, downs = (
        [tensors.pop(separate(name, layer, kernel, expert)) for expert in experts] if wanted else None
        for kernel, wanted in enumerate((gate_up, gate_up, down))
    )
    if gate_up:
        tensors[f"{after}.gate_up_proj"] = np.concatenate([np.stack(gates), np.stack(ups)], axis=1)
    if down:
        tensors[f"{after}.down_proj"] = np.stack(downs)


def stacked(name):
    """Tensors of a reference as transformers 5 has them in memory."""
    tensors = load_file(FOLDER / name / "model.safetensors")
    for layer in LAYERS[name]:
        stack(tensors, name, layer)
    return {key.replace("block_sparse_moe", "mlp"): tensor for key, tensor in tensors.items()}


def folder_of(name, tensors, folder, **attributes):
    folder.mkdir()
    found = json.loads((FOLDER / name / "config_v4.json").read_text()) | attributes
    (folder / "config.json").write_text(json.dumps(found))
    save_file(tensors, folder / "model.safetensors")
    return folder


def load_on(folder, **mesh):
    with jax.set_mesh(jaxtp.make_mesh(**mesh)):
        return jaxtp.load_hf(folder)


def values(model):
    return {path: np.asarray(variable[...]) for path, variable in named_variables(nnx.state(model)).items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


@pytest.mark.parametrize(("name", "mesh"), sweep_of([EXPERTS, MESHES], ("qwen3_moe_dense", MESHES[2])), ids=str)
def test_stacked_out_and_in(name, mesh, tmp_path):
    read = []
    model = load_on(FOLDER / name, **mesh)
    jaxtp.save_hf(model, tmp_path / "out", family=TYPES[name], experts="stacked", max_shard_size="20KB")
    written = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        written |= load_file(file)
    assert_same(written, stacked(name))
    with jax.set_mesh(jaxtp.make_mesh(**mesh)):
        again = jaxtp.load_hf(tmp_path / "out", progress=lambda done, total: read.append((done, total)))
    assert_same(values(again), values(model))
    num_bytes = sum(array.nbytes for array in written.values())
    assert read[-1] == (num_bytes, num_bytes), "every byte once"


@pytest.mark.parametrize("layout", ["separate", "stacked"])
def test_experts_wider_than_a_tile(layout, tmp_path):
    sizes = {"d_model": 80, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "d_ff": 144, "num_experts": 4}
    model = jaxtp.Decoder(jaxtp.ModelConfig(vocab_size=8, num_layers=1, **sizes), rngs=nnx.Rngs(0))
    jaxtp.save_hf(model, tmp_path / "out", experts=layout)
    assert_same(values(jaxtp.load_hf(tmp_path / "out")), values(model))


@pytest.mark.parametrize(("gate_up", "down", "router"), [(True, False, True), (False, True, True), (True, True, False)])
@pytest.mark.parametrize("mesh", sweep(MESHES, MESHES[1]), ids=str)
def test_both_layouts_in_one_folder(gate_up, down, router, mesh, tmp_path):
    """Layers differ, kernels of a layer, and the router from its experts."""
    tensors = load_file(FOLDER / "mixtral/model.safetensors")
    stack(tensors, "mixtral", 1, gate_up, down)
    if router:
        name = "model.layers.1.block_sparse_moe.gate.weight"
        tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)
    mixed = load_on(folder_of("mixtral", tensors, tmp_path / "mixed"), **mesh)
    assert_same(values(mixed), values(load_on(FOLDER / "mixtral", **mesh)))


@pytest.mark.parametrize(("tp", "shape"), [(2, (2, 3, 20, 24)), (4, (2, 3, 40, 6))])
def test_each_device_has_whole_experts_or_a_part_of_each(tp, shape):
    gate = load_on(FOLDER / "mixtral", fsdp=2, tp=tp).blocks.mlp.gate[...]
    assert {shard.data.shape for shard in gate.addressable_shards} == {shape}


@pytest.mark.wide
def test_the_command_has_the_flag(tmp_path):
    assert main(["import", str(FOLDER / "qwen3_moe"), str(tmp_path / "run")]) == 0
    for layout, flags in (("separate", []), ("stacked", ["--experts", "stacked"])):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / layout), *flags]) == 0
    assert_same(
        load_file(tmp_path / "separate/model.safetensors"), load_file(FOLDER / "qwen3_moe" / "model.safetensors")
    )
    assert_same(load_file(tmp_path / "stacked/model.safetensors"), stacked("qwen3_moe"))


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


def gone(tensors):
    for kernel in range(3):
        for expert in range(6):
            tensors.pop(separate("mixtral", 0, kernel, expert))


def stacked_with(change):
    def edit(tensors):
        stack(tensors, "mixtral", 0)
        change(tensors)

    return edit


BAD = {
    "an expert missing": (without(separate("mixtral", 1, 2, 3)), {}, r"missing: \S+\.1\.\S+\.experts\.3\.w2\.weight$"),
    "the last expert missing": (
        without(separate("mixtral", 1, 0, 5)),
        {},
        r"missing: \S+\.layers\.1\.\S+\.experts\.5\.w1\.weight$",
    ),
    "all experts of a layer missing": (
        gone,
        {},
        r"missing: \S+\.layers\.0\.\S+\.experts\.0\.w2\.weight, .* and 15 more$",
    ),
    "a router missing": (
        without("model.layers.0.block_sparse_moe.gate.weight"),
        {},
        r"missing: model\.layers\.0\.block_sparse_moe\.gate\.weight$",
    ),
    "all of it stacked too": (
        with_another(STACKED, (6, 48, 40)),
        {},
        f"{FIRST} and {STACKED} are the same parameter; remove one of them$",
    ),
    "one of it stacked too": (
        stacked_with(with_another(separate("mixtral", 0, 1, 4), (24, 40))),
        {},
        f"{separate('mixtral', 0, 1, 4)} and {STACKED} are the same parameter",
    ),
    "two routers": (
        with_another("model.layers.1.mlp.gate.weight", (6, 40)),
        {},
        "model.layers.1.block_sparse_moe.gate.weight and model.layers.1.mlp.gate.weight are the same parameter",
    ),
    "an expert of another shape": (
        with_another(FIRST, (40, 24)),
        {},
        f"wrong shape: {FIRST} is 40x24, not 24x40$",
    ),
    "a stack of another shape": (
        stacked_with(with_another(STACKED, (6, 40, 48))),
        {},
        f"wrong shape: {STACKED} is 6x40x48, not 6x48x40$",
    ),
    "a stack of fewer experts": (
        stacked_with(with_another(STACKED, (5, 48, 40))),
        {},
        f"wrong shape: {STACKED} is 5x48x40, not 6x48x40$",
    ),
    "an expert too many": (
        with_another(separate("mixtral", 1, 0, 6), (24, 40)),
        {},
        "num_local_experts = 6, and the file has tensors of 7 experts, up to number 6$",
    ),
    "fewer experts than are said": (
        lambda tensors: None,
        {"num_local_experts": 8},
        "num_local_experts = 8, and the file has tensors of 6 experts, up to number 5$",
    ),
    "experts by the billion": (
        lambda tensors: None,
        {"num_local_experts": 2**31 - 1},
        "num_local_experts = 2147483647, and the file has tensors of 6 experts",
    ),
    "a stack by the billion": (
        lambda tensors: [stack(tensors, "mixtral", layer) for layer in (0, 1)],
        {"num_local_experts": 2**31 - 1},
        f"wrong shape: .*{STACKED} is 6x48x40, not 2147483647x48x40",
    ),
    "one more, a billion on": (
        with_another("model.layers.0.block_sparse_moe.experts.999999999.w1.weight", (24, 40)),
        {"num_local_experts": 10**9},
        "num_local_experts = 1000000000, and the file has tensors of 7 experts, up to number 999999999$",
    ),
    "names of Qwen": (
        with_another("model.layers.0.mlp.experts.0.gate_proj.weight", (24, 40)),
        {},
        r"unexpected: model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight$",
    ),
    "an expert that is not finite": (
        lambda tensors: tensors[FIRST].fill(np.nan),
        {},
        f"{FIRST} has elements that are not finite, from row 0 on$",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(case, tmp_path):
    change, attributes, message = BAD[case]
    tensors = load_file(FOLDER / "mixtral/model.safetensors")
    change(tensors)
    with pytest.raises(jaxtp.HFError, match=message) as caught:
        jaxtp.load_hf(folder_of("mixtral", tensors, tmp_path / "bad", **attributes))
    assert is_one_clear_message(caught.value)


SIZES = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
QWEN = SIZES | {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "max_window_layers": 48,
    "sliding_window": None,
    "use_sliding_window": False,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}
MIXTRAL = SIZES | {"model_type": "mixtral", "router_jitter_noise": 0.0, "router_aux_loss_coef": 0.02}


def test_what_transformers_assumes():
    mixtral = model_config(SIZES | {"model_type": "mixtral"}, "it")
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.normalize_experts) == (8, 2, True)
    assert (mixtral.rope_theta, mixtral.norm_eps, mixtral.sliding_window, mixtral.d_ff) == (1e6, 1e-5, None, 6144)
    assert (mixtral.qk_norm, mixtral.head_dim, mixtral.tie_embeddings) == ("none", 64, False)
    few = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    qwen = model_config(few | {"model_type": "qwen3_moe"}, "it")
    assert (qwen.num_experts, qwen.experts_per_token, qwen.normalize_experts, qwen.d_ff) == (128, 8, False, 768)
    assert (qwen.rope_theta, qwen.norm_eps, qwen.num_kv_heads, qwen.head_dim) == (1e4, 1e-6, 4, 64)
    assert (qwen.qk_norm, qwen.attention_bias, qwen.sliding_window, qwen.pattern) == ("head", False, None, ())


def test_a_message_has_the_name_that_the_folder_has():
    with pytest.raises(jaxtp.HFError, match="num_local_experts = 0: should be a whole number"):
        model_config(SIZES | {"model_type": "qwen3_moe", "num_local_experts": 0}, "it")


def test_both_names_of_the_number_of_experts():
    """transformers 5 writes num_local_experts for both families."""
    for name, one, other in (("mixtral", 1, 2), ("qwen3_moe", 2, 1)):
        attributes = SIZES | {"model_type": name}
        numbers = {"num_local_experts": 16, "num_experts": 16}
        assert model_config(attributes | numbers, "it").num_experts == 16
        for key in numbers:
            assert model_config(attributes | {key: 16}, "it").num_experts == 16
        with pytest.raises(jaxtp.HFError, match="are two names of one attribute"):
            model_config(attributes | {"num_local_experts": one, "num_experts": other}, "it")


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, [(range(48), 128)]),
        ({"mlp_only_layers": [0]}, [(range(1), 0), (range(1, 48), 128)]),
        ({"mlp_only_layers": [99]}, [(range(48), 128)]),
        ({"decoder_sparse_step": 2}, [(range(0, 48, 2), 0), (range(1, 48, 2), 128)]),
        ({"decoder_sparse_step": 49}, [(range(48), 0)]),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, [(range(48), 128)]),
    ],
    ids=str,
)
def test_layers_with_experts_are_few_stacks(changes, kinds):
    config = model_config(QWEN | changes, "it")
    assert [(layers, block.num_experts) for _, layers, block in config.kinds()] == kinds
    assert {block.d_ff for block in config.block_kinds() if block.num_experts} <= {768}
    assert {block.d_ff for block in config.block_kinds() if not block.num_experts} <= {6144}
    assert {block.sliding_window for block in config.layers()} == {changes.get("sliding_window")}


@examples(40)
@given(
    count=st.integers(1, 12),
    step=st.integers(1, 4),
    dense=st.none() | st.lists(st.integers(0, 13), max_size=4),
    normalised=st.booleans(),
    window=st.none() | st.integers(1, 9),
)
def test_which_layers_have_experts(count, step, dense, normalised, window):
    attributes = QWEN | {
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


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            QWEN | {"num_experts_per_tok": 129},
            "num_experts_per_tok = 129: should be at most num_experts = 128$",
        ),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok = 9: .* at most num_local_experts = 8$"),
        (MIXTRAL | {"router_jitter_noise": 0.01}, "router_jitter_noise = 0.01 is not supported, only 0.0"),
        (
            MIXTRAL | {"num_local_experts": 0},
            "num_local_experts = 0: should be a whole number from 1 to",
        ),
        (MIXTRAL | {"norm_topk_prob": False}, "norm_topk_prob = False of a mixtral is unknown"),
        (QWEN | {"norm_topk_prob": 1}, "norm_topk_prob = 1: should be true or false$"),
        (QWEN | {"decoder_sparse_step": 0}, "decoder_sparse_step = 0: should be a whole number"),
        (QWEN | {"mlp_only_layers": 3}, "mlp_only_layers = 3: should be a list of layer numbers"),
        (QWEN | {"mlp_only_layers": [True]}, "mlp_only_layers = .True.: should be a list of layer numbers"),
        (QWEN | {"mlp_only_layers": [-1]}, "mlp_only_layers = .-1.: should be a list of layer numbers"),
        (QWEN | {"moe_intermediate_size": None}, "moe_intermediate_size = missing: should be a whole number"),
        (QWEN | {"decoder_sparse_step": 2, "num_hidden_layers": 2**31 - 1}, "at most 1,024 are supported$"),
        (
            QWEN | {"shared_expert_intermediate_size": 5},
            "shared_expert_intermediate_size = 5 of a qwen3_moe is unknown",
        ),
        (
            QWEN | {"use_sliding_window": True, "sliding_window": 5},
            "max_window_layers = 48 and use_sliding_window = True: some versions of transformers .* set max_window_",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:40],
)
def test_what_cannot_be(attributes, message):
    with pytest.raises(jaxtp.HFError, match=message) as caught:
        model_config(attributes, "it")
    assert is_one_clear_message(caught.value)


@pytest.mark.parametrize("steps", [(16, 24), "whole", None], ids=str)
def test_stacked_float8(steps, tmp_path):
    """A scale of each block, of each expert, or of all."""
    rng, tensors, small = np.random.default_rng(0), stacked("mixtral"), {}
    for name in [name for name in tensors if ".experts." in name]:
        experts, *shape = tensors[name].shape
        sizes = shape if steps == "whole" else steps or ()
        grid = (experts, *(-(-size // step) for size, step in zip(shape, sizes, strict=True))) if steps else ()
        scale = rng.uniform(0.001, 0.1, grid).astype(np.float32)
        whole = scale
        if steps:
            rows, columns = (np.arange(size) // step for size, step in zip(shape, sizes, strict=True))
            whole = scale[:, rows][..., columns]
        codes = np.clip(tensors[name] / whole, -400, 400).astype(jnp.float8_e4m3fn)
        tensors[name] = codes.astype(np.float32) * whole
        small |= {name: codes, f"{name}_scale_inv": scale, f"{name}_activation_scale": np.float32([1])}
    formats = {np.dtype(np.float32): "F32", np.dtype(jnp.float8_e4m3fn): "F8_E4M3"}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 24]}}
    folder = folder_of("mixtral", tensors, tmp_path / "float32")
    expected = values(jaxtp.load_hf(folder))
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    arrays = tensors | small
    header = {name: (formats[array.dtype], array.shape) for name, array in arrays.items()}
    write_file(folder / "model.safetensors", header, arrays.__getitem__)
    assert_same(values(jaxtp.load_hf(folder, precision=jaxtp.Precision())), expected)


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BLOCKS, SCALES = (f"model.layers.1.mlp.experts.down_proj_{name}" for name in ("blocks", "scales"))


@pytest.mark.parametrize("step", [1, 500, 2**24])
def test_mxfp4_numbers(step, tmp_path, monkeypatch):
    """Two in each byte, the low four bits first: a sign and one of eight numbers, times 2^(scale - 127)."""
    monkeypatch.setattr("jaxtp.hf.safetensors._BLOCK", step)
    rng, grid = np.random.default_rng(0), (5, 3, 2)
    blocks = rng.integers(256, size=(*grid, 16), dtype=np.uint8)
    scales = rng.integers(253, size=grid, dtype=np.uint8)
    save_file({"down_blocks": blocks, "down_scales": scales, "other": np.ones(2)}, tmp_path / "it")
    codes = np.stack([blocks % 16, blocks // 16], axis=-1).reshape(*grid, 32)
    expected = np.where(codes < 8, 1, -1) * FP4[codes % 8] * 2.0 ** (scales.astype(int) - 127)[..., None]
    tensors = with_scales(read_header(tmp_path / "it"), (128, 128))
    assert tensors.keys() == {"down_blocks", "other"}
    for first, last in ((0, 5), (1, 3), (4, 5)):
        read = {row: block.astype(np.float64) for row, block in tensors["down_blocks"].blocks(first, last)}
        assert next(iter(read)) == first
        np.testing.assert_array_equal(np.concatenate(list(read.values())), expected.reshape(5, 3, 64)[first:last])


@pytest.mark.parametrize("mesh", sweep([*MESHES, {"tp": 5}, {"tp": 3}], MESHES[1]), ids=str)
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


BAD_MXFP4 = {
    "no scales": (without(SCALES), f"{BLOCKS} is U8 .5, 32, 2, 16., and its scales are missing; MXFP4 has U8"),
    "no blocks": (without(BLOCKS), rf"missing: \S*down_proj; unexpected: {SCALES}$"),
    "fewer scales": (with_another(SCALES, (5, 32, 1), np.uint8), r"its scales are U8 \(5, 32, 1\)"),
    "scales of float32": (with_another(SCALES, (5, 32, 2)), r"its scales are F32 \(5, 32, 2\)"),
    "shorter blocks": (with_another(BLOCKS, (5, 32, 2, 8), np.uint8), rf"{BLOCKS} is U8 \(5, 32, 2, 8\)"),
    "blocks without groups": (with_another(BLOCKS, (5, 32, 16), np.uint8), rf"{BLOCKS} is U8 \(5, 32, 16\)"),
    "one expert fewer": (
        lambda tensors: tensors.update({name: tensors[name][:4] for name in (BLOCKS, SCALES)}),
        f"wrong shape: {BLOCKS} is 4x32x64, not 5x32x64$",
    ),
    "a scale that is NaN": (
        lambda tensors: tensors[SCALES].__setitem__((3, 0, 0), 255),
        f"{BLOCKS} has elements that are not finite",
    ),
    "numbers that overflow": (
        lambda tensors: (tensors[SCALES].fill(254), tensors[BLOCKS].fill(0x77)),
        f"{BLOCKS} has elements that are not finite",
    ),
    "in bfloat16 too": (
        with_another(BLOCKS.removesuffix("_blocks"), (5, 64, 32)),
        f"{BLOCKS} and {BLOCKS.removesuffix('_blocks')} are the same parameter",
    ),
}


@pytest.mark.parametrize("case", BAD_MXFP4)
def test_bad_mxfp4(case, tmp_path):
    change, message = BAD_MXFP4[case]
    tensors = load_file(FOLDER / "gpt_oss_mxfp4/model.safetensors")
    change(tensors)
    with pytest.raises(jaxtp.HFError, match=message) as caught:
        jaxtp.load_hf(folder_of("gpt_oss_mxfp4", tensors, tmp_path / "bad"))
    assert is_one_clear_message(caught.value)


TINY = jaxtp.ModelConfig(
    vocab_size=11, d_model=8, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=12, num_experts=4
)


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"selection_bias": True}, "selection_bias: True -> False"),
        ({"normalize_experts": False}, "normalize_experts: False -> True"),
        ({"pattern": ({}, {"num_experts": 0})}, "num_experts: "),
    ],
    ids=str,
)
def test_what_a_mixtral_cannot_be(changes, lost):
    with pytest.raises(jaxtp.HFError, match=f"a mixtral cannot represent this model .*{lost}"):
        write_attributes(dataclasses.replace(TINY, **changes), FAMILIES["mixtral"], "float32")


def test_not_every_family_has_a_selection_bias():
    for name in ("mixtral", "qwen3_moe"):
        config = dataclasses.replace(TINY, selection_bias=True, qk_norm="none" if name == "mixtral" else "head")
        with pytest.raises(jaxtp.HFError, match=f"a {name} cannot represent this model .*: model.selection_bias: Tr"):
            write_attributes(config, FAMILIES[name], "float32")


def test_settings_of_experts_mean_nothing_without_them():
    config = dataclasses.replace(TINY, num_experts=0, experts_per_token=3, normalize_experts=False)
    assert choose_family(config, None).model_type == "llama"
    with pytest.raises(jaxtp.HFError, match=r"a mixtral cannot represent this model: .* num_local_experts = 0: should"):
        write_attributes(config, FAMILIES["mixtral"], "float32")


@pytest.mark.wide
def test_adapters_beside_attention(tmp_path):
    model = jaxtp.load_hf(FOLDER / "mixtral")
    adapted = jaxtp.add_adapters(model, LoraConfig(rank=2, targets=("q_proj", "o_proj")))
    nnx.update(adapted, jax.tree.map(lambda array: array + 0.02, nnx.state(adapted, nnx.LoRAParam)))
    jaxtp.save_peft(adapted, tmp_path / "adapters", base=FOLDER / "mixtral")
    merged = jaxtp.merge_adapters(adapted)
    one, other = (nnx.jit(lambda model: model(IDS))(model) for model in (merged, adapted))
    np.testing.assert_allclose(one, other, atol=2e-5)
    jaxtp.save_hf(merged, tmp_path / "merged")
    by_default = jaxtp.add_adapters(model, LoraConfig(rank=2)).blocks.mlp
    assert [getattr(by_default, f"{name}_lora").a.shape[1] for name in ("gate", "up", "down")] == [6, 6, 6]
    names = load_file(tmp_path / "adapters/adapter_model.safetensors")
    assert len(names) == 2 * 2 * 2
    base, after = (load_file(where / "model.safetensors") for where in (FOLDER / "mixtral", tmp_path / "merged"))
    changed = {name.split(".")[-2] for name in base if not np.array_equal(base[name], after[name])}
    assert (base.keys(), changed) == (after.keys(), {"q_proj", "o_proj"})
