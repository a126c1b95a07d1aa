"""The defaults of a run that begins with a trained model."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import SMOL_LM, TEXT, records, smol_lm

from jaxtp.checkpoint import storage
from jaxtp.config.schema import ConfigError, from_yaml, to_plain
from jaxtp.data.manifest import TokenizerInfo
from jaxtp.hf.config_json import stored_dtype
from jaxtp.mesh import MeshError, fitting_meshes, mesh_shape, mesh_sizes
from jaxtp.models.config import ModelConfig
from jaxtp.tools.convert.__main__ import main as convert
from jaxtp.train import defaults, init_source, pretrained
from jaxtp.train.__main__ import COMMAND as TRAIN
from jaxtp.train.__main__ import main
from jaxtp.train.config import DataConfig, MeshConfig, RunConfig, TrainConfig, training_of
from jaxtp.train.defaults import DeviceInfo, missing_bytes, resolve_defaults
from jaxtp.train.resume import check_resumable
from jaxtp.train.validation import open_mesh, violations_on

GPUS = DeviceInfo(count=8, per_process=8, bfloat16=True, kind="GPUs")
CPU = DeviceInfo(count=1, per_process=1, bfloat16=False, kind="virtual CPU devices")


@pytest.fixture
def model(tmp_path):
    return smol_lm(tmp_path / "model")


@pytest.fixture
def ask(tmp_path, model):
    """What flags come to for a run that begins with the model, and why."""

    def resolved(*flags, place=GPUS, begins=("--model.from-hf", str(model))):
        if not flags:  # parsing takes longer than all the rest
            begun = ModelConfig(from_hf=model) if begins else ModelConfig()
            return resolve_defaults(TrainConfig(run=RunConfig(dir=tmp_path / "run"), model=begun), {"run.dir"}, place)
        argv = ["--run.dir", str(tmp_path / "run"), *begins, *flags]
        return TRAIN.load(argv, partial(resolve_defaults, devices=place))

    return resolved


def test_a_trained_model_gets_the_defaults_of_fine_tuning(ask, model):
    config, notes = ask()
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (1e-5, 12)
    assert (config.data.sequence_length, config.model.precision.compute) == (1024, "bfloat16")
    assert config.model.num_heads == 9
    assert not list(violations_on(config, vars(config.mesh)))
    assert config.mesh.dp * config.mesh.fsdp * config.mesh.tp == 8
    assert any(note == "optimizer.learning_rate = 1e-05: usual for all weights of a trained model" for note in notes)
    assert {note.partition(" = ")[0] for note in notes} == {
        *("optimizer.learning_rate", "optimizer.warmup_steps", "data.sequence_length"),
        *("model.precision.compute", "mesh"),
    }


LLAMA_31_8B = {
    **{
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 128256,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
    },
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    **{"num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": False},
    **{"attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16"},
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    },
}
QWEN_3_8B = {
    **{"model_type": "qwen3", "hidden_act": "silu", "vocab_size": 151936, "rms_norm_eps": 1e-06, "rope_theta": 1000000},
    **{"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36},
    **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": False},
    **{"attention_bias": False, "torch_dtype": "bfloat16", "rope_scaling": None, "sliding_window": None},
    **{"use_sliding_window": False, "max_window_layers": 36},
}
GPT_OSS = {"model_type": "gpt_oss", "max_position_embeddings": 131072}
GLM_47_FLASH = {
    **{"model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240},
    **{"num_hidden_layers": 47, "num_attention_heads": 20, "max_position_embeddings": 202752, "rope_theta": 1000000},
}
QWEN_35 = {
    **{"vocab_size": 248320, "head_dim": 256, "rms_norm_eps": 1e-06, "hidden_act": "silu", "attention_bias": False},
    **{
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_conv_kernel_dim": 4,
    },
    **{"full_attention_interval": 4, "max_position_embeddings": 262144, "tie_word_embeddings": False},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
}
QWEN_35_27B = QWEN_35 | {
    **{"model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64},
    **{"num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48},
}
QWEN_35_35B_A3B = QWEN_35 | {
    **{"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16},
    **{"num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
}
LLAMA_31_70B = LLAMA_31_8B | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}


@pytest.mark.parametrize(
    ("recipe", "attributes"),
    [
        ("chat_llama31_8b", LLAMA_31_8B),
        ("chat_qwen3_8b", QWEN_3_8B),
        ("distill_llama31_8b_from_70b", LLAMA_31_8B),
        ("dpo_llama31_8b", LLAMA_31_8B),
        ("dpo_lora_llama31_8b", LLAMA_31_8B),
        ("finetune_llama31_8b", LLAMA_31_8B),
        ("finetune_qwen3_8b", QWEN_3_8B),
        ("lora_llama31_70b", LLAMA_31_70B | {"num_hidden_layers": 80}),
        ("gpt_oss_20b", GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}),
        ("lora_gpt_oss_120b", GPT_OSS),
        ("glm47_flash", GLM_47_FLASH),
        ("qwen35_27b", {"model_type": "qwen3_5", "text_config": QWEN_35_27B}),
        ("lora_qwen35_35b_a3b_32k", {"model_type": "qwen3_5_moe", "text_config": QWEN_35_35B_A3B}),
    ],
)
def test_a_recipe_has_the_sizes_of_its_model_and_leaves_no_default_open(recipe, attributes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(attributes))
    file = Path(__file__).parents[2] / f"configs/{recipe}.yaml"
    alone = from_yaml(TrainConfig, file)
    flags = ["--config", str(file), "--model.from-hf", str(tmp_path)]
    config, notes = TRAIN.load(flags, partial(resolve_defaults, devices=GPUS))
    assert notes == []
    assert training_of(config) == dataclasses.replace(alone, model=dataclasses.replace(alone.model, from_hf=tmp_path))


H100S = DeviceInfo(count=8, per_process=8, bfloat16=True, kind="h100", platform="cuda")


@pytest.mark.parametrize(
    ("length", "param", "memory"),
    [
        pytest.param(1024, "float32", 63.7e9, marks=pytest.mark.wide),
        (2048, "float32", 44.5e9),
        (4096, "float32", 63.7e9),
        pytest.param(8192, "float32", 63.7e9, marks=pytest.mark.wide),
        (8192, "bfloat16", 63.7e9),
    ],
)
def test_a_default_mesh_fits_the_memory_if_one_does(tmp_path, length, param, memory):
    """By the account of an estimate: of 70B with adapters it said that a mesh fits, and below that it does not."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_70B | {"num_hidden_layers": 80}))
    flags = [f"--model.from-hf={tmp_path}", "--model.lora.rank=16", f"--data.sequence-length={length}"]
    devices = dataclasses.replace(H100S, memory=memory)
    config, notes = TRAIN.load([*flags, f"--model.precision.param={param}"], partial(resolve_defaults, devices=devices))
    able = [sizes for sizes in fitting_meshes(8) if sizes["cp"] == 1 and not any(violations_on(config, sizes))]
    lacks = {tuple(sizes.values()): missing_bytes(config, sizes, devices) for sizes in able}
    assert lacks[tuple(config.mesh.sizes.values())] == min(lacks.values())
    told = [note for note in notes if note.startswith("mesh = ") and "the mesh that lacks the least memory" in note]
    assert bool(told) == (min(lacks.values()) > 0)
    if length == 2048:
        assert 0 in lacks.values()
        assert lacks[1, 4, 1, 2] > 0, "which moves the least of those that divide the weights the most"


GIVEN = {
    "optimizer": {"learning_rate": 5e-3, "warmup_steps": 20},
    "data": {"sequence_length": 128},
    "model": {"precision": {"compute": "float32"}},
    "mesh": {"tp": 3, "fsdp": -1},
}
FLAGS = [
    *("--optimizer.learning_rate=5e-3", "--optimizer.warmup-steps", "20", "--data.sequence-length", "128"),
    *("--model.precision.compute", "float32", "--mesh.tp", "3", "--mesh.fsdp", "-1"),
]


@pytest.mark.parametrize("by_file", [False, True])
def test_what_is_given_stays_even_where_it_is_the_default_of_other_runs(ask, tmp_path, by_file):
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(GIVEN))
    flags = ["--config", str(tmp_path / "own.yaml")] if by_file else FLAGS
    config, notes = ask(*flags, place=DeviceInfo(6, 6, bfloat16=True, kind="GPUs"))
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (5e-3, 20)
    assert (config.data.sequence_length, config.model.precision.compute) == (128, "float32")
    assert (config.mesh.tp, config.mesh.fsdp) == (3, -1)
    assert [note.partition(" = ")[0] for note in notes] == []


def test_a_mesh_that_is_given_and_does_not_fit_is_refused_for_itself(model):
    model = ModelConfig(from_hf=model)
    fsdp, _ = resolve_defaults(
        TrainConfig(model=model, mesh=MeshConfig(fsdp=5)), {"mesh.fsdp", "data.global_batch_size"}, GPUS
    )
    assert {line.partition(" is not")[0] for line in violations_on(fsdp, vars(fsdp.mesh))} == {
        *("model.d_model=576", "data.global_batch_size=16"),
    }
    config, _ = resolve_defaults(
        TrainConfig(model=model, mesh=MeshConfig(tp=4, allow_padding=False)), {"mesh.tp"}, GPUS
    )
    (heads, kv_heads) = violations_on(config, vars(config.mesh), devices=8)
    assert heads == "mesh.tp=4 pads 9 query heads to 12, and mesh.allow_padding is false; tp can be 1, 3"
    assert "mesh.tp=4" in kv_heads


@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        (["--model.lora.rank", "8"], 2e-4),
        (["--optimizer.name", "lion"], 3.3e-6),
        (["--model.lora.rank", "8", "--optimizer.name", "lion"], 6.7e-5),
    ],
)
def test_the_rate_follows_what_is_trained_and_by_which_rule(ask, flags, rate):
    assert ask(*flags)[0].optimizer.learning_rate == rate


def test_a_dtype_that_the_devices_are_not_faster_in_is_not_the_default(ask):
    config, notes = ask(place=CPU)
    assert config.model.precision.compute == "float32"
    assert config.mesh.sizes == mesh_shape()
    assert not any("precision" in note for note in notes)


@pytest.mark.parametrize(
    ("attributes", "length"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": "many"}, 128),
        ({"torch_dtype": "float32"}, 1024),
    ],
)
def test_the_length_is_the_models_and_the_dtype_that_of_the_devices(ask, model, attributes, length):
    (model / "config.json").write_text(json.dumps(SMOL_LM | attributes))
    config, _ = ask()
    assert (config.data.sequence_length, config.model.precision.compute) == (length, "bfloat16")


@pytest.mark.parametrize(("length", "warns"), [(65, True), (64, False)])
def test_sequences_longer_than_those_of_the_model_are_noted(model, tmp_path, length, warns):
    (model / "config.json").write_text(json.dumps(SMOL_LM | {"max_position_embeddings": 64}))
    config = TrainConfig(data=DataConfig(sequence_length=length), model=ModelConfig(from_hf=model))
    note = init_source.resolve(config)[1].length_warning(config)
    assert (note is not None and "65 tokens, but the model was made for 64 (max_position_embeddings" in note) == warns
    gone = dataclasses.replace(config, model=ModelConfig(from_hf=tmp_path / "gone"))
    assert pretrained.HFSource(path=gone.model.from_hf, files=gone.model.from_hf).length_warning(gone) is None


def test_a_sequence_is_no_longer_than_the_learned_positions(ask, model):
    gpt2 = {"model_type": "gpt2", "vocab_size": 512, "n_positions": 96, "n_embd": 32, "n_head": 4, "n_layer": 2}
    (model / "config.json").write_text(json.dumps(gpt2))
    assert ask()[0].data.sequence_length == 96


def test_without_a_dtype_in_its_configuration_a_model_has_that_of_its_weights(model):
    (model / "config.json").write_text(json.dumps(SMOL_LM | {"torch_dtype": None}))
    header = json.dumps({"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    assert stored_dtype(model) == "bfloat16"


def write_weights(folder, dtypes):
    """Writes a tensor of each dtype."""
    names = {f"tensor{i}": {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]} for i, dtype in enumerate(dtypes)}
    header = json.dumps(names).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize(
    ("stored", "param"),
    [
        (["F32"], "float32"),
        (["BF16"], "bfloat16"),
        (["F16"], "float16"),
        (["BF16", "F16"], "float32"),
        (None, "bfloat16"),  # no weights, as for an estimate: config.json says it
    ],
    ids=str,
)
def test_weights_that_adapters_leave_frozen_have_the_dtype_of_their_files(ask, model, stored, param):
    if stored is not None:
        write_weights(model, stored)
    config, notes = ask("--model.lora.rank", "8")
    assert (config.model.precision.param, config.model.lora.dtype) == (param, "float32")
    assert not [line for line in violations_on(config, vars(config.mesh)) if "float16" in line]
    reason = f"model.precision.param = {param}: the frozen weights as {model} has them; adapters in float32"
    assert (reason in notes) == (param != "float32")
    asked = ask("--model.lora.rank", "8", "--model.precision.param", "float32")[0]
    assert asked.model.precision.param == "float32"
    assert ask()[0].model.precision.param == "float32", "which is trained"


@given(
    heads=st.integers(1, 24),
    shared=st.integers(1, 4),
    d_model=st.integers(1, 40),
    devices=st.sampled_from([1, 2, 3, 4, 6, 7, 8, 16, 72]),
    hosts=st.sampled_from([1, 2]),
    fixed=st.fixed_dictionaries({}, optional={axis: st.integers(1, 4) for axis in ("dp", "fsdp", "tp")}),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_chosen_mesh_fits_the_model_the_devices_and_what_is_given(heads, shared, d_model, devices, hosts, fixed):
    model = ModelConfig(num_heads=heads * shared, num_kv_heads=heads, d_model=d_model * 8, d_ff=heads * shared * 8)
    config = TrainConfig(model=model, mesh=MeshConfig(**fixed))
    place = DeviceInfo(devices * hosts, devices, bfloat16=True, kind="GPUs")
    fitted, _ = resolve_defaults(config, {f"mesh.{axis}" for axis in fixed} | {"data.global_batch_size"}, place)
    sizes = vars(fitted.mesh)
    assert fixed.items() <= sizes.items()
    if fitted.mesh != config.mesh:
        assert not list(violations_on(fitted, sizes))
        count = sizes["dp"] * sizes["fsdp"] * sizes["tp"]
        assert count == place.count if hosts > 1 else count <= place.count
    elif not fixed:
        assert hosts > 1 or not list(violations_on(fitted, sizes)), "one device holds any model"


def test_the_batch_grows_where_there_are_more_devices_than_rows(ask):
    config, _ = ask(place=DeviceInfo(count=64, per_process=8, bfloat16=True, kind="GPUs"))
    assert config.data.global_batch_size == 64
    assert not list(violations_on(config, vars(config.mesh)))


@pytest.mark.parametrize(
    ("where", "run"),
    [
        ("models/llama", "runs/llama-tuned"),
        ("hub/models--a--llama/snapshots/0123", "runs/models--a--llama-tuned"),
    ],
)
def test_a_run_that_begins_with_a_model_has_a_folder_of_its_own(tmp_path, where, run):
    (tmp_path / where).parent.mkdir(parents=True)
    config = TrainConfig(model=ModelConfig(from_hf=smol_lm(tmp_path / where)))
    assert resolve_defaults(config, set(), GPUS)[0].run.dir == Path(run)
    assert resolve_defaults(config, {"run.dir"}, GPUS)[0].run.dir == TrainConfig().run.dir


def test_a_run_that_begins_with_a_link_to_itself_is_one_error(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(storage.CheckpointError, match="no finished checkpoint there"):
        resolve_defaults(TrainConfig(run=RunConfig(init_from=tmp_path / "loop")), set(), GPUS)


BEFORE = {
    "config": {
        "optimizer": {"learning_rate": 0.25, "warmup_steps": 3},
        "data": {"sequence_length": 64, "global_batch_size": 8},
        "model": {"precision": {"compute": "float32"}},
    },
    "mesh": {"dp": 1, "fsdp": 1, "tp": 1},
    "corpus": {},
    "next_sample": 0,
}


def test_a_run_whose_newest_checkpoint_is_damaged_keeps_what_the_one_before_it_has(tmp_path, monkeypatch, ask):
    (tmp_path / "run/checkpoints/20/state").mkdir(parents=True)
    (tmp_path / "run/checkpoints/10/state").mkdir(parents=True)

    def read(folder):
        if folder.name == "20":
            raise storage.DamagedError("damaged")
        return BEFORE

    monkeypatch.setattr(storage, "read_info", read)
    assert ask()[0].optimizer.learning_rate == 0.25


@pytest.mark.parametrize("recorded", [{}, {"dtype": "float32"}], ids=["0.2", "0.3"])
def test_a_run_of_adapters_goes_on_in_the_dtypes_that_it_has(tmp_path, monkeypatch, ask, recorded):
    """Until 0.2 adapters had the dtype of the weights beside them."""
    model = {"precision": {"compute": "float32", "param": "bfloat16"}, "lora": {"rank": 8, **recorded}}
    before = BEFORE | {"config": BEFORE["config"] | {"model": model}}
    monkeypatch.setattr(defaults, "newest_info", lambda run: before)
    config, _ = ask("--model.lora.rank", "8")
    assert config.model.precision.param == "bfloat16"
    assert config.model.lora.dtype == recorded.get("dtype", "bfloat16")
    plain = to_plain(config)
    if not recorded:
        del plain["model"]["lora"]["dtype"]
    assert check_resumable(config, {}, BEFORE | {"config": plain}) == []


def test_a_run_that_cannot_be_read_now_is_not_taken_for_a_new_one(tmp_path, monkeypatch, ask):
    (tmp_path / "run/checkpoints/20/state").mkdir(parents=True)

    def fail(folder):
        raise storage.CheckpointError("cannot be read, which may pass")

    monkeypatch.setattr(storage, "read_info", fail)
    with pytest.raises(storage.CheckpointError, match="may pass"):
        ask()


def run_source(path, checkpoint, **stored):
    return pretrained.RunSource(path=path, files=None, checkpoint=checkpoint, info=stored, model=ModelConfig())


def test_a_run_does_not_begin_with_itself(tmp_path):
    run = RunConfig(dir=tmp_path / "a", init_from=tmp_path / "a")
    with pytest.raises(ConfigError, match=r"is the run in run.dir=.* itself; name another folder"):
        run_source(run.init_from, run.init_from / "checkpoints/60").check(TrainConfig(run=run))


def test_a_run_goes_on_with_the_tokens_that_the_one_before_was_trained_on(tmp_path):
    source = run_source(tmp_path, tmp_path, corpus={"tokenizer": "0123"})
    source.check_tokenizer(TokenizerInfo("huggingface", "0123", 256, None))
    with pytest.raises(ConfigError, match=r"with tokenizer 0123, but this dataset was prepared with tokenizer bytes"):
        source.check_tokenizer(TokenizerInfo("bytes", None, 256, None))


def test_bytes_are_not_the_tokens_of_a_model_with_a_tokenizer_of_another_kind(model):
    source = pretrained.HFSource(path=model, files=model)
    source.check_tokenizer(TokenizerInfo("bytes", None, 256, None))
    (model / "tokenizer.model").write_bytes(b"a")
    with pytest.raises(ConfigError, match=r"the data are bytes, and .* has its own tokenizer"):
        source.check_tokenizer(TokenizerInfo("bytes", None, 256, None))


def test_a_run_of_ours_fits_the_devices_that_are_there(ask):
    for flags in ((), ("--model.num-heads", "6", "--model.num-kv-heads", "6", "--model.d-ff", "96")):
        config, notes = ask(*flags, place=DeviceInfo(2, 2, bfloat16=True, kind="GPUs"), begins=())
        assert config.mesh.dp * config.mesh.fsdp * config.mesh.tp == 2
        assert [note.partition(" = ")[0] for note in notes] == ["model.precision.compute", "mesh"]
        assert config.optimizer == TrainConfig().optimizer
    eight_cpus = dataclasses.replace(CPU, count=8, per_process=8)
    assert ask(begins=(), place=eight_cpus) == (TrainConfig(run=config.run), []), "where the defaults fit they stay"


def test_a_run_on_gpus_computes_in_bfloat16_unless_told_otherwise(ask):
    whole_mesh = ("--mesh.dp", "1", "--mesh.fsdp", "2", "--mesh.tp", "4")
    config, notes = ask(*whole_mesh, begins=())
    assert vars(config.model.precision) == vars(TrainConfig().model.precision) | {"compute": "bfloat16"}
    assert notes == ["model.precision.compute = bfloat16: products are faster in it than in float32, on GPUs"]
    as_asked = ask(*whole_mesh, "--model.precision.compute", "float32", begins=())
    assert (as_asked[0].model.precision, as_asked[1]) == (TrainConfig().model.precision, [])
    old_gpus = dataclasses.replace(GPUS, bfloat16=False)
    assert resolve_defaults(TrainConfig(), set(), old_gpus) == (TrainConfig(), [])


@pytest.mark.parametrize(("dtype", "place"), [("float32", GPUS), ("bfloat16", CPU)])
def test_a_run_of_ours_that_goes_on_computes_in_the_dtype_that_it_has(dtype, place, monkeypatch):
    before = {"config": {**BEFORE["config"], "model": {"precision": {"compute": dtype}}}, "mesh": BEFORE["mesh"]}
    monkeypatch.setattr(defaults, "newest_info", lambda run: before)
    config, notes = resolve_defaults(
        TrainConfig(mesh=MeshConfig(dp=1, fsdp=1, tp=1)), {"mesh.dp", "mesh.fsdp", "mesh.tp"}, place
    )
    assert config.model.precision.compute == dtype
    assert config.optimizer == TrainConfig().optimizer, "and nothing else of it"
    assert notes == (
        [] if dtype == "float32" else [f"model.precision.compute = {dtype}: as the run in runs/tiny has it"]
    )


def test_printing_the_configuration_says_why_and_reads_back(ask, tmp_path, capsys):
    with pytest.raises(SystemExit):
        ask("--print-config")
    out = capsys.readouterr().out
    assert out.startswith("# optimizer.learning_rate = 1e-05: usual for all weights of a trained model\n")
    (tmp_path / "printed.yaml").write_text(out)
    assert from_yaml(TrainConfig, tmp_path / "printed.yaml") == ask()[0]


def test_a_run_that_goes_on_keeps_what_it_has(ask, model, monkeypatch):
    begun, _ = ask(place=CPU)
    old = {"learning_rate": 5e-3, "warmup_steps": 20}
    plain = to_plain(begun)
    info = {"config": plain | {"optimizer": plain["optimizer"] | old}, "mesh": {"dp": 1, "fsdp": 2, "tp": 3}}
    monkeypatch.setattr(defaults, "newest_info", lambda run: info)
    config, notes = ask("--train.steps", "1000", place=GPUS)
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (5e-3, 20)
    assert config.model.precision.compute == "float32", "whatever the devices are now"
    assert config.mesh.sizes == mesh_shape(fsdp=2, tp=3)
    assert all(" has it" in note for note in notes)
    config, _ = ask("--mesh.tp", "1", "--optimizer.learning-rate", "1e-6", place=DeviceInfo(1, 1, True, "GPUs"))
    assert (config.optimizer.learning_rate, config.mesh.fsdp) == (1e-6, 1), "fewer devices than before"


@pytest.mark.wide
def test_fine_tuning_without_a_flag_does_not_undo_what_a_model_has_learned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    one = ["--data.path", "text.txt", "--eval.every", "0", "--mesh.dp", "1", "--mesh.fsdp", "1", "--mesh.tp", "1"]
    sizes = ["--model.num-heads", "9", "--model.num-kv-heads", "3", "--model.d-model", "36", "--model.num-layers", "1"]
    assert main([*one, *sizes, "--train.steps", "80", "--data.sequence-length", "32", "--run.dir", "base"]) == 0
    assert convert(["export", "base", "model"]) == 0
    before = records("base", "eval_loss")[80]
    for begins, rate in (("--model.from-hf", 1e-5), ("--run.init-from", 5e-4)):
        model = "model" if rate == 1e-5 else "base"
        assert main([*one, begins, model, "--data.sequence-length", "32", "--train.steps", "20"]) == 0
        assert f"default optimizer.learning_rate = {rate}" in capsys.readouterr().out
        assert from_yaml(TrainConfig, f"runs/{model}-tuned/config.yaml").optimizer.learning_rate == rate
        assert records(f"runs/{model}-tuned", "eval_loss")[20] < before + 0.01


@pytest.mark.parametrize(("sizes", "expected"), [({}, 1), ({"tp": 2}, 2), ({"fsdp": -1}, 16)])
def test_spare_virtual_devices_do_not_count_unless_an_axis_takes_them(monkeypatch, sizes, expected):
    """Else a default mesh would use them all, and be slower."""
    monkeypatch.setattr(defaults, "is_number_configured", lambda: False)
    assert defaults.probe_devices(mesh_shape(**sizes)).count == expected


def test_an_axis_of_minus_one_takes_all_remaining_devices():
    config, _ = TRAIN.load(["--mesh", "fsdp=-1,tp=4"], resolve_defaults)
    assert mesh_sizes(open_mesh(training_of(config))) == mesh_shape(fsdp=4, tp=4)
    config, _ = TRAIN.load(["--mesh", "fsdp=-1,tp=3"], resolve_defaults)
    with pytest.raises(MeshError, match=r"16 devices cannot be divided by 3; meshes that fit: "):
        open_mesh(training_of(config))
