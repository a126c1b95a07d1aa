"""Training that begins with a model in Hugging Face format: all of it, or adapters beside it."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from hf_reference import FOLDER
from numpy.random import default_rng
from numpy.testing import assert_allclose
from run_comparisons import assert_same_records
from runs import TEXT, records
from support import assert_refused, swept
from tables import read_json, read_table, write_json
from variants import small_model

import jaxtp
from jaxtp import Decoder, add_adapters, load_run
from jaxtp.checkpoint.storage import open_checkpoint
from jaxtp.generate.__main__ import main as generate
from jaxtp.hf.safetensors import read_header
from jaxtp.layers import FrozenParam
from jaxtp.layers.lora import LoraConfig
from jaxtp.tools.convert.__main__ import main as convert
from jaxtp.train.__main__ import main

TABLES = read_table(__file__)

MODEL = small_model(vocab_size=256, num_layers=2, head_dim=6, d_ff=32)
SHORT = [
    "--data.sequence-length=32",
    "--data.global-batch-size=8",
    "--train.log-every=1",
    "--train.steps=3",
    "--optimizer.warmup-steps=2",
    "--eval.batches=2",
    "--eval.every=0",
]
LORA = [
    "--model.lora.rank=4",
    "--optimizer.learning-rate=0.05",
    "--optimizer.warmup-steps=0",
    "--optimizer.schedule=constant",
]
IDS = np.arange(12, dtype=np.int32).reshape(1, 12)


def decoder(seed=5):
    return jax.jit(lambda: Decoder(MODEL, rngs=nnx.Rngs(seed)))()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Returns flags of a short run on a text."""
    text = tmp_path_factory.mktemp("data") / "text.txt"
    text.write_text(TEXT)
    return [*SHORT, f"--data.path={text}"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns a folder of a small model."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    jaxtp.hf.save(decoder(), folder)
    return folder


@pytest.fixture
def command(tmp_path, data, model):
    """Returns flags of a short run that begins with the model."""
    return [*data, f"--model.from-hf={model}", f"--run.dir={tmp_path}/run"]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, data, model):
    """Returns the folder of a run of the whole model, which began with a folder that is gone."""
    root = tmp_path_factory.mktemp("whole")
    copied = shutil.copytree(model, root / "copied")
    (copied / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert main([*data, "--mesh=dp=1", f"--model.from-hf={copied}", f"--run.dir={root}/run"]) == 0
    shutil.rmtree(copied)
    return root / "run"


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory, data, model):
    """Returns the folder of a run of adapters of six steps."""
    run = tmp_path_factory.mktemp("adapters") / "run"
    flags = [f"--model.from-hf={model}", f"--run.dir={run}", "--train.steps=6"]
    assert main([*data, "--mesh=tp=2", *LORA, *flags]) == 0
    return run


@pytest.mark.journey
def test_adapters_alone_are_stored_and_a_run_goes_on_beside_the_same_model_only(
    tmp_path, command, model, whole_run, adapter_run, capsys
):
    losses = records(adapter_run)
    assert losses[1] == pytest.approx(records(whole_run)[1], rel=1e-6), (
        "an adapter begins as nothing"
    )
    assert losses[6] < losses[1]
    names = [name for name in open_checkpoint(adapter_run).arrays if name.startswith("model.")]
    assert len(names) == 14
    assert all("loras" in name for name in names)

    short = shutil.copytree(model, tmp_path / "short")
    attributes = read_json(short / "config.json")
    write_json(short / "config.json", attributes | {"max_position_embeddings": 16})
    capsys.readouterr()
    assert main([*command, *LORA, "--mesh=tp=2", f"--model.from-hf={short}"]) == 0
    output = capsys.readouterr().out
    assert f"weights from {short}" in output
    assert "sequences of 32 tokens, but the model was made for 16 " in output
    again = [*command, *LORA, "--mesh=dp=2,fsdp=2,tp=2", "--train.steps=6"]
    assert main(again) == 0, "the same model, elsewhere"
    assert_same_records(tmp_path / "run", adapter_run, "loss", rtol=1e-4)

    other = tmp_path / "other"
    jaxtp.hf.save(decoder(6), other)
    assert_refused(
        main,
        [*again, f"--model.from-hf={other}", "--train.steps=7"],
        f"the model in {other} has other values",
        capsys,
    )


@swept("name", ["gemma3", "gpt2"])
def test_a_family_is_trained_beside_adapters_and_exported_as_itself(name, tmp_path, command):
    config = replace(jaxtp.hf.read_config(FOLDER / name), vocab_size=256)
    family = read_json(FOLDER / name / "config.json")["model_type"]
    jaxtp.hf.save(Decoder(config, rngs=nnx.Rngs(5)), tmp_path / "model", family=family)
    flags = [
        f"--model.from-hf={tmp_path}/model",
        "--data.sequence-length=16",
        "--mesh=fsdp=2,tp=2",
        *LORA,
    ]
    assert main([*command, *flags]) == 0
    losses = records(tmp_path / "run")
    assert losses[3] < losses[1]
    assert convert(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--merged"]) == 0
    assert read_json(tmp_path / "out/config.json")["model_type"] == family


@nnx.jit
def outputs_of(model):
    return model(IDS)


@pytest.mark.journey
def test_adapters_beside_a_model_in_bfloat16(tmp_path, command, capsys):
    """It stays in bfloat16, and adapters are in float32."""
    base = tmp_path / "base"
    jaxtp.hf.save(decoder(), base, dtype="bfloat16")
    run = str(tmp_path / "run")
    flags = [*command, "--mesh=tp=2", *LORA, f"--model.from-hf={base}"]
    assert main(flags) == 0
    assert (
        f"model.precision.param = bfloat16: the frozen weights as {base} has them"
        in capsys.readouterr().out
    )
    assert main([*flags, "--train.steps=4"]) == 0
    assert "changed since: model." not in capsys.readouterr().out
    arrays = open_checkpoint(tmp_path / "run").arrays
    assert {array.dtype.name for name, array in arrays.items() if name.startswith("model.")} == {
        "float32"
    }
    adapted = load_run(run)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(adapted, FrozenParam))} == {
        "bfloat16"
    }


@pytest.mark.journey
def test_adapters_beside_a_model_in_8_bits(tmp_path, command, model, adapter_run, capsys):
    """Resumed on another mesh, and exported with the original weights."""
    run = tmp_path / "run"
    flags = [*command, *LORA, "--model.lora.base=float8"]
    assert main([*flags, "--mesh=fsdp=2"]) == 0
    assert "the others frozen in float32, their kernels in float8" in capsys.readouterr().out
    assert main([*flags, "--mesh=tp=2", "--train.steps=6"]) == 0
    assert "changed since: model." not in capsys.readouterr().out
    losses = records(run)
    assert losses[6] < losses[1] != records(adapter_run)[1]
    assert_same_records(run, adapter_run, "loss", rtol=0.02)
    bases = [open_checkpoint(folder).info["base"] for folder in (run, adapter_run)]
    assert bases[0] == bases[1], "of the original weights"
    adapted = load_run(run)
    assert convert(["export", str(run), str(tmp_path / "merged"), "--merged"]) == 0
    assert_allclose(outputs_of(jaxtp.hf.load(tmp_path / "merged")), outputs_of(adapted), atol=1e-4)


@pytest.mark.journey
def test_a_run_of_adapters_is_generated_from_and_exported(tmp_path, model, adapter_run, capsys):
    run = str(adapter_run)
    assert convert(["export", run, str(tmp_path / "adapters")]) == 0
    assert "no tokenizer is written" in capsys.readouterr().err
    assert read_json(tmp_path / "adapters/adapter_config.json")["base_model_name_or_path"] == str(
        model
    )
    assert convert(["export", run, str(tmp_path / "merged"), "--merged", "--mesh.tp=2"]) == 0
    merged = outputs_of(jaxtp.hf.load(tmp_path / "merged"))
    assert np.abs(merged - outputs_of(jaxtp.hf.load(model))).max() > 0.01, (
        "the adapters do something"
    )
    capsys.readouterr()
    prompt = ["--model", run, "--prompt=aaa", "--max-tokens=2"]
    assert generate([*prompt, "--mesh.tp=2"]) == 0
    assert "parameters, float32" in capsys.readouterr().err
    jaxtp.hf.save(decoder(6), tmp_path / "other")
    assert_refused(
        generate,
        [f"--model={tmp_path}/adapters", "--prompt=a"],
        "adapters in PEFT's format",
        capsys,
    )
    assert_refused(generate, [*prompt, f"--base={tmp_path}/moved"], "moved: no such folder", capsys)
    export = ["export", run, str(tmp_path / "z"), f"--base={tmp_path}/other"]
    assert_refused(convert, export, "has other values", capsys)


@pytest.mark.journey
def test_what_only_adapters_have_is_refused_of_other_runs(
    tmp_path, data, whole_run, adapter_run, capsys
):
    assert_refused(
        convert,
        ["export", str(whole_run), str(tmp_path / "out"), "--merged"],
        "leave --merged out",
        capsys,
    )
    begin = [f"--run.init-from={adapter_run}", f"--run.dir={tmp_path}/next"]
    assert_refused(main, [*data, *begin, "--mesh=tp=2"], "holds only adapters", capsys)


@pytest.mark.journey
def test_a_run_needs_the_folder_that_it_began_with_no_more(
    tmp_path, command, whole_run, monkeypatch, capsys
):
    """But it does not take another folder that does not exist for that one."""
    run = shutil.copytree(whole_run, tmp_path / "run")
    gone = whole_run.parent / "copied"
    assert main([f"--config={run}/config.yaml", f"--run.dir={run}", "--train.steps=4"]) == 0
    assert main([*command, f"--model.from-hf={gone}", "--train.steps=5"]) == 0
    assert_refused(main, [*command, "--model.from-hf=nowhere"], "nowhere: no such folder", capsys)
    assert convert(["export", str(run), str(tmp_path / "out")]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("aaa\n"))
    assert generate([f"--model={run}", "--chat", "--max-tokens", "2"]) == 0


@pytest.fixture(scope="module")
def trained_adapters(tmp_path_factory, model):
    """A folder of adapters in PEFT's format: rsLoRA, in the second layer alone."""
    lora = LoraConfig(rank=2, alpha=4.0, rslora=True, targets=("q_proj", "down_proj"))
    adapted = add_adapters(jaxtp.hf.load(model), lora)

    def in_the_second_layer(array):
        made = default_rng(array.size).standard_normal(array.shape).astype(array.dtype)
        made[0] = 0
        return jax.device_put(made)

    nnx.update(adapted, jax.tree.map(in_the_second_layer, nnx.state(adapted, nnx.LoRAParam)))
    folder = tmp_path_factory.mktemp("adapters") / "adapters"
    jaxtp.hf.save_adapters(adapted, folder, base=model)
    return folder


def adapters_in(folder):
    return {
        name: tensor.read()
        for name, tensor in read_header(folder / "adapter_model.safetensors").items()
    }


@pytest.mark.journey
def test_adapters_are_trained_further(
    tmp_path, command, data, model, trained_adapters, whole_run, capsys
):
    """From PEFT's folder, on another mesh without it, and back into one."""
    adapters = shutil.copytree(trained_adapters, tmp_path / "adapters")
    flags = [*command, f"--model.lora.from-peft={adapters}", "--optimizer.learning-rate=0.01"]
    assert main([*flags, "--mesh=fsdp=2,tp=2"]) == 0
    printed = capsys.readouterr().out
    assert (
        f"weights from {model}; adapters from {adapters}; 2 of 4 modules have an adapter" in printed
    )
    shutil.rmtree(adapters)
    run = tmp_path / "run"
    assert main([*flags, "--mesh=dp=2", "--train.steps=4"]) == 0
    assert convert(["export", str(run), str(tmp_path / "out")]) == 0
    begun = adapters_in(trained_adapters)
    trained = adapters_in(tmp_path / "out")
    assert trained.keys() == begun.keys(), "the first layer still has none"
    assert all(np.abs(trained[name] - array).max() > 1e-3 for name, array in begun.items())
    described = read_json(tmp_path / "out/adapter_config.json")
    assert (described["r"], described["lora_alpha"], described["use_rslora"]) == (2, 4, True)
    assert_refused(
        generate,
        [f"--model={run}", f"--adapters={trained_adapters}", "--prompt=a"],
        "has adapters already",
        capsys,
    )
    begins = [f"--run.init-from={whole_run}", f"--model.lora.from-peft={trained_adapters}"]
    assert main([*data, *begins, "--mesh=tp=2", f"--run.dir={tmp_path}/again"]) == 0


def test_mistakes_with_models_and_adapters_are_refused(
    tmp_path, command, model, trained_adapters, capsys
):
    places = {name: str(tmp_path / name) for name in ("narrow", "with_tokenizer", "run")}
    places["adapters"] = str(trained_adapters)
    for name in ("narrow", "with_tokenizer"):
        shutil.copytree(model, places[name])
    config = tmp_path / "narrow/config.json"
    write_json(config, read_json(config) | {"hidden_size": 8})
    (tmp_path / "with_tokenizer/tokenizer.json").write_text("{}")
    beside_adapters = [*command, f"--model.lora.from-peft={trained_adapters}"]
    for begin, table in ((command, TABLES["models"]), (beside_adapters, TABLES["adapters"])):
        for flags, message in table.items():
            words = flags.format(**places).split()
            assert_refused(main, [*begin, "--mesh=tp=2", *words], message.format(**places), capsys)
            assert not (tmp_path / "run").exists(), flags


def test_a_recipe_of_another_model_is_one_short_line(command, model, capsys):
    recipe = Path(__file__).parents[2] / "configs/chat_qwen3_8b.yaml"
    assert main([f"--config={recipe}", f"--model.from-hf={model}"]) == 2
    error = capsys.readouterr().err
    assert "model.d_model=4096, but the model has 16, and 8 more; remove these" in error
    assert "jaxtp estimate --model.from-hf DIR --write FILE.yaml" in error
    assert len(error) - len(str(model)) < 250


def test_adapters_of_nothing_are_refused(tmp_path, capsys):
    for flags in (["--model.lora.rank=8"], [f"--model.lora.from-peft={tmp_path}"]):
        assert_refused(
            main,
            [*flags, f"--run.dir={tmp_path}/run"],
            "name its folder by --model.from-hf FOLDER or --run.init-from RUN",
            capsys,
        )
