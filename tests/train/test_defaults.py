"""The defaults of a run that begins with a trained model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import SMOL_LM, TEXT, records, smol_lm
from support import swept
from tables import read_table, write_json

from jaxtp.checkpoint import storage
from jaxtp.config.schema import ConfigError, from_yaml, replace_nested, to_plain
from jaxtp.data.manifest import TokenizerInfo
from jaxtp.mesh import MeshError, fitting_meshes, mesh_shape, mesh_sizes
from jaxtp.models.config import ModelConfig, OriginConfig
from jaxtp.tools.convert.__main__ import main as convert
from jaxtp.train import defaults, pretrained
from jaxtp.train.__main__ import COMMAND as TRAIN
from jaxtp.train.__main__ import main
from jaxtp.train.config import MeshConfig, RunConfig, TrainConfig, training_of
from jaxtp.train.defaults import Decider, DeviceInfo, decide, missing_bytes
from jaxtp.train.model_source import ModelSource
from jaxtp.train.resume import check_resumable
from jaxtp.train.validation import violations_on


def gpus(count):
    return DeviceInfo(count, per_process=min(count, 8), bfloat16=True, kind="GPUs")


def cpus(count):
    return DeviceInfo(count, per_process=count, bfloat16=False, kind="virtual CPU devices")


PUBLISHED = read_table(__file__, "recipes")


@pytest.fixture
def model(tmp_path):
    return smol_lm(tmp_path / "model")


@pytest.fixture
def ask(tmp_path, model):
    """Returns what flags come to for a run that begins with the model, and why."""

    def resolved(*flags, place=gpus(8), begins=(f"--model.from-hf={model}",)):
        if not flags:  # parsing takes longer than all the rest
            origin = OriginConfig(from_hf=model if begins else None)
            config = TrainConfig(run=RunConfig(dir=tmp_path / "run"), origin=origin)
            return Decider(place)(config, {"run.dir"})
        argv = [f"--run.dir={tmp_path}/run", *begins, *flags]
        return TRAIN.load(argv, Decider(place))

    return resolved


def names_of(notes):
    return {note.partition(" = ")[0] for note in notes}


def test_a_trained_model_gets_the_defaults_of_fine_tuning(ask, tmp_path, capsys):
    config, notes = ask()
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (1e-5, 12)
    assert (config.data.sequence_length, config.model.precision.compute) == (1024, "bfloat16")
    assert config.model.num_heads == 9
    assert not list(violations_on(config, vars(config.mesh)))
    rate = "optimizer.learning_rate = 1e-05: usual for all weights of a trained model"
    assert rate in notes
    chosen = {"optimizer.learning_rate", "optimizer.warmup_steps", "data.sequence_length"}
    assert names_of(notes) == chosen | {"model.precision.compute", "mesh"}
    with pytest.raises(SystemExit):
        ask("--print-config")
    printed = capsys.readouterr().out
    assert printed.startswith(f"# {rate}\n")
    (tmp_path / "printed.yaml").write_text(printed)
    assert from_yaml(TrainConfig, tmp_path / "printed.yaml") == config


@pytest.mark.parametrize("recipe", PUBLISHED["recipes"])
def test_a_recipe_has_the_sizes_of_its_model_and_leaves_no_default_open(recipe, tmp_path):
    write_json(tmp_path / "config.json", PUBLISHED["recipes"][recipe])
    file = Path(__file__).parents[2] / f"configs/{recipe}.yaml"
    alone = from_yaml(TrainConfig, file)
    flags = [f"--config={file}", f"--model.from-hf={tmp_path}"]
    config, notes = TRAIN.load(flags, Decider(gpus(8)))
    assert notes == []
    assert training_of(config) == replace(alone, origin=OriginConfig(from_hf=tmp_path))


@swept("memory", [20e9, 44.5e9])
def test_a_default_mesh_lacks_the_least_memory(tmp_path, memory):
    """By the account of an estimate: of 70B with adapters it said that a mesh fits, and below
    that it does not.
    """
    write_json(tmp_path / "config.json", PUBLISHED["models"]["llama31_70b"])
    flags = [f"--model.from-hf={tmp_path}", "--model.lora.rank=16", "--data.sequence-length=2048"]
    devices = replace(gpus(8), kind="h100", platform="cuda", memory=memory)
    config, _ = TRAIN.load(flags, Decider(devices))
    able = [
        sizes
        for sizes in fitting_meshes(8)
        if sizes["cp"] == 1 and not any(violations_on(config, sizes))
    ]
    least = min(missing_bytes(config, sizes, devices) for sizes in able)
    assert missing_bytes(config, config.mesh.sizes, devices) == least
    assert (least == 0) == (memory == 44.5e9)


GIVEN = """
optimizer: {learning_rate: 5.0e-3, warmup_steps: 20}
data: {sequence_length: 128}
model: {precision: {compute: float32}}
mesh: {tp: 3, fsdp: -1}
"""


def test_what_is_given_stays_even_where_it_is_the_default_of_other_runs(ask, tmp_path):
    (tmp_path / "own.yaml").write_text(GIVEN)
    config, notes = ask(f"--config={tmp_path}/own.yaml", place=gpus(6))
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (5e-3, 20)
    assert (config.data.sequence_length, config.model.precision.compute) == (128, "float32")
    assert (config.mesh.tp, config.mesh.fsdp) == (3, -1)
    assert notes == []


def test_the_rate_follows_what_is_trained_and_by_which_rule(ask):
    rates = {
        "--model.lora.rank=8": 2e-4,
        "--optimizer.name=lion": 3.3e-6,
        "--model.lora.rank=8 --optimizer.name=lion": 6.7e-5,
    }
    assert {flags: ask(*flags.split())[0].optimizer.learning_rate for flags in rates} == rates


GPT2 = PUBLISHED["gpt2"]


@pytest.mark.parametrize(
    ("attributes", "length"),
    [
        (SMOL_LM | {"max_position_embeddings": 512}, 512),
        (SMOL_LM | {"max_position_embeddings": "many"}, 128),
        (GPT2, 96),
    ],
)
def test_the_length_is_the_models_and_the_dtype_that_of_the_devices(ask, model, attributes, length):
    write_json(model / "config.json", attributes)
    config, _ = ask()
    assert (config.data.sequence_length, config.model.precision.compute) == (length, "bfloat16")


def write_weights(folder, dtypes):
    """Writes an empty tensor of each dtype."""
    names = {
        f"tensor{i}": {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]}
        for i, dtype in enumerate(dtypes)
    }
    header = json.dumps(names).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize(
    ("stored", "param"),
    PUBLISHED["stored"],
    ids=str,
)
def test_weights_that_adapters_leave_frozen_have_the_dtype_of_their_files(
    ask, model, stored, param
):
    if stored is not None:
        write_weights(model, stored)
    config, notes = ask("--model.lora.rank=8")
    assert (config.model.precision.param, config.model.lora.dtype) == (param, "float32")
    reason = (
        f"model.precision.param = {param}: the frozen weights as {model} has them; adapters "
        "in float32"
    )
    assert (reason in notes) == (param != "float32")


def test_weights_in_16_bits_are_trained_in_float32(ask):
    for flags in ((), ("--model.lora.rank=8", "--model.precision.param=float32")):
        assert ask(*flags)[0].model.precision.param == "float32"


@given(
    heads=st.integers(1, 24),
    shared=st.integers(1, 4),
    d_model=st.integers(1, 40),
    devices=st.sampled_from([1, 2, 3, 4, 6, 7, 8, 16, 72]),
    fixed=st.fixed_dictionaries(
        {}, optional={axis: st.integers(1, 4) for axis in ("dp", "fsdp", "tp")}
    ),
)
@settings(max_examples=10)
def test_a_chosen_mesh_fits_the_model_the_devices_and_what_is_given(
    heads, shared, d_model, devices, fixed
):
    model = ModelConfig(
        num_heads=heads * shared, num_kv_heads=heads, d_model=d_model * 8, d_ff=heads * shared * 8
    )
    config = TrainConfig(model=model, mesh=MeshConfig(**fixed))
    place = DeviceInfo(devices, devices, bfloat16=True, kind="GPUs")
    explicit = {f"mesh.{axis}" for axis in fixed} | {"data.global_batch_size"}
    fitted = decide(config, explicit, place).config
    sizes = vars(fitted.mesh)
    assert fixed.items() <= sizes.items()
    if not fixed or fitted.mesh != config.mesh:
        assert not list(violations_on(fitted, sizes)), "one device holds any model"
        assert sizes["dp"] * sizes["fsdp"] * sizes["tp"] <= devices


def test_the_batch_grows_where_there_are_more_devices_than_rows(ask):
    config, _ = ask(place=gpus(64))
    assert config.data.global_batch_size == 64
    assert not list(violations_on(config, vars(config.mesh)))


def test_a_run_that_begins_with_a_model_has_a_folder_of_its_own(tmp_path):
    folders = {
        "models/llama": "runs/llama-tuned",
        "hub/models--a--llama/snapshots/0123": "runs/models--a--llama-tuned",
    }
    for where, run in folders.items():
        (tmp_path / where).parent.mkdir(parents=True)
        config = TrainConfig(origin=OriginConfig(from_hf=smol_lm(tmp_path / where)))
        assert decide(config, set(), gpus(8)).config.run.dir == Path(run)
        assert decide(config, {"run.dir"}, gpus(8)).config.run.dir == TrainConfig().run.dir


BEFORE = PUBLISHED["before"]


def test_a_run_whose_newest_checkpoint_is_damaged_keeps_what_the_one_before_it_has(
    tmp_path, monkeypatch, ask
):
    for step in (10, 20):
        (tmp_path / f"run/checkpoints/{step}/state").mkdir(parents=True)
    damage = storage.DamagedError("damaged")

    def read(folder):
        if folder.name == "20":
            raise damage
        return BEFORE

    monkeypatch.setattr(storage, "read_info", read)
    assert ask()[0].optimizer.learning_rate == 0.25
    damage = storage.CheckpointError("cannot be read, which may pass")
    with pytest.raises(storage.CheckpointError, match="may pass"):
        ask()


@pytest.mark.parametrize("recorded", [{}, {"dtype": "float32"}], ids=["0.2", "0.3"])
def test_a_run_of_adapters_goes_on_in_the_dtypes_that_it_has(monkeypatch, ask, recorded):
    """Until 0.2 adapters had the dtype of the weights beside them."""
    model = {
        "precision": {"compute": "float32", "param": "bfloat16"},
        "lora": {"rank": 8, **recorded},
    }
    before = BEFORE | {"config": BEFORE["config"] | {"model": model}}
    monkeypatch.setattr(defaults, "newest_with_info", lambda run: (Path("10"), before))
    config, _ = ask("--model.lora.rank=8")
    assert config.model.precision.param == "bfloat16"
    assert config.model.lora.dtype == recorded.get("dtype", "bfloat16")
    config = replace_nested(config, {"train.loss": "jaxtp.losses:DPO"})
    plain = to_plain(config)
    if not recorded:
        lora = plain["model"]["lora"]
        del lora["dtype"]
        lora["from"] = lora.pop("from_peft")
        plain["train"]["loss"] = "jaxtp:DPO"
    assert check_resumable(to_plain(config), {}, BEFORE | {"config": plain}) == []


def test_a_run_that_begins_with_a_run_needs_another_folder_and_the_same_tokens(tmp_path):
    run = RunConfig(dir=tmp_path)
    info = {"corpus": {"tokenizer": "0123"}}
    source = pretrained.RunSource(
        path=tmp_path, files=None, checkpoint=tmp_path / "1", info=info, model=ModelConfig()
    )
    with pytest.raises(
        ConfigError, match=r"is the run in run.dir=.* itself; leave --run.init-from"
    ):
        source.check(TrainConfig(run=run))
    source.check_tokenizer(TokenizerInfo("huggingface", "0123", 256, None))
    with pytest.raises(ConfigError, match=r"with tokenizer 0123, but .* with tokenizer bytes"):
        source.check_tokenizer(TokenizerInfo("bytes", None, 256, None))


def test_bytes_are_not_the_tokens_of_a_model_with_a_tokenizer_of_another_kind(model):
    source = pretrained.HFSource(path=model, files=model, model=ModelConfig())
    source.check_tokenizer(TokenizerInfo("bytes", None, 256, None))
    (model / "tokenizer.model").write_bytes(b"a")
    with pytest.raises(ConfigError, match=r"the data are bytes, and .* has its own tokenizer"):
        source.check_tokenizer(TokenizerInfo("bytes", None, 256, None))


def test_a_run_of_ours_fits_the_devices_that_are_there(ask):
    for flags in ((), ("--model.num-heads=6", "--model.num-kv-heads=6", "--model.d-ff=96")):
        config, notes = ask(*flags, place=gpus(2), begins=())
        assert config.mesh.dp * config.mesh.fsdp * config.mesh.tp == 2
        assert names_of(notes) == {"model.precision.compute", "mesh"}
        assert config.optimizer == TrainConfig().optimizer
    assert ask(begins=(), place=cpus(8)) == (TrainConfig(run=config.run), []), (
        "where the defaults fit they stay"
    )


WHOLE_MESH = ("--mesh.dp=1", "--mesh.fsdp=2", "--mesh.tp=4")


def test_a_run_on_gpus_computes_in_bfloat16_unless_told_otherwise(ask):
    config, notes = ask(*WHOLE_MESH, begins=())
    assert config.model.precision.compute == "bfloat16"
    assert names_of(notes) == {"model.precision.compute"}
    old_gpus = replace(gpus(8), bfloat16=False)
    for flags, place in ((("--model.precision.compute=float32",), gpus(8)), ((), old_gpus)):
        config, notes = ask(*WHOLE_MESH, *flags, place=place, begins=())
        assert (config.model.precision.compute, notes) == ("float32", [])


def test_a_run_of_ours_that_goes_on_computes_in_the_dtype_that_it_has(ask, monkeypatch):
    monkeypatch.setattr(defaults, "newest_with_info", lambda run: (Path("10"), BEFORE))
    config, notes = ask(*WHOLE_MESH, begins=())
    assert (config.model.precision.compute, notes) == ("float32", [])
    assert config.optimizer == TrainConfig().optimizer, "and nothing else of it"


def test_a_run_that_goes_on_keeps_what_it_has(ask, monkeypatch):
    begun, _ = ask(place=cpus(1))
    plain = to_plain(begun)
    plain["optimizer"] |= {"learning_rate": 5e-3, "warmup_steps": 20}
    info = BEFORE | {"config": plain, "mesh": {"dp": 1, "fsdp": 2, "tp": 3}}
    monkeypatch.setattr(defaults, "newest_with_info", lambda run: (Path("10"), info))
    config, notes = ask("--train.steps=1000")
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (5e-3, 20)
    assert config.model.precision.compute == "float32", "whatever the devices are now"
    assert config.mesh.sizes == mesh_shape(fsdp=2, tp=3)
    assert all(" has it" in note for note in notes)
    config, _ = ask("--mesh.tp=1", "--optimizer.learning-rate=1e-6", place=gpus(1))
    assert (config.optimizer.learning_rate, config.mesh.fsdp) == (1e-6, 1), (
        "fewer devices than before"
    )


@pytest.mark.wide
def test_fine_tuning_without_a_flag_does_not_undo_what_a_model_has_learned(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    one = ["--data.path=text.txt", "--eval.every=0", "--data.sequence-length=32", "--mesh=dp=1"]
    sizes = [
        "--model.num-heads=9",
        "--model.num-kv-heads=3",
        "--model.d-model=36",
        "--model.num-layers=1",
    ]
    assert main([*one, *sizes, "--train.steps=40", "--run.dir=base"]) == 0
    assert convert(["export", "base", "model"]) == 0
    before = records("base", "eval_loss")[40]
    for model, begins, rate in (
        ("model", "--model.from-hf=model", 1e-5),
        ("base", "--run.init-from=base", 5e-4),
    ):
        assert main([*one, begins, "--train.steps=9"]) == 0
        assert f"default optimizer.learning_rate = {rate}" in capsys.readouterr().out
        assert records(f"runs/{model}-tuned", "eval_loss")[9] < before + 0.01


@pytest.mark.parametrize(("sizes", "expected"), [({}, 1), ({"tp": 2}, 2), ({"fsdp": -1}, 16)])
def test_spare_virtual_devices_do_not_count_unless_an_axis_takes_them(monkeypatch, sizes, expected):
    """Else a default mesh would use them all, and be slower."""
    monkeypatch.setattr(defaults, "is_number_configured", lambda: False)
    assert defaults.probe_devices(mesh_shape(**sizes)).count == expected


def test_an_axis_of_minus_one_takes_all_remaining_devices():
    config, _ = TRAIN.load(["--mesh=fsdp=-1,tp=4"], Decider())
    assert mesh_sizes(ModelSource().open_mesh(training_of(config))) == mesh_shape(fsdp=4, tp=4)
    config, _ = TRAIN.load(["--mesh=fsdp=-1,tp=3"], Decider())
    with pytest.raises(MeshError, match=r"16 devices cannot be divided by 3"):
        ModelSource().open_mesh(training_of(config))
