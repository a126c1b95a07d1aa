"""Training that begins with a model in Hugging Face format: all of it, or adapters beside it."""

import dataclasses
import io
import json
import shutil
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from flax import nnx
from hf_reference import FOLDER, TRAINED
from runs import SMALL, TEXT, mesh, records

import jaxtp
import jaxtp.hf.runs as hf_runs
from jaxtp.checkpoint.logical import named_variables
from jaxtp.checkpoint.storage import open_checkpoint
from jaxtp.generate.__main__ import main as generate
from jaxtp.hf.runs import load_merged
from jaxtp.hf.safetensors import read_header
from jaxtp.layers.lora import LoraConfig
from jaxtp.tools.convert.__main__ import main as convert
from jaxtp.train.__main__ import main

MODEL = jaxtp.ModelConfig(vocab_size=256, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, d_ff=64)
SHORT = [*SMALL[SMALL.index("--data.sequence-length") :], "--eval.every", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of a small model."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    jaxtp.save_hf(jaxtp.Decoder(MODEL, rngs=nnx.Rngs(5)), folder)
    return folder


@pytest.fixture
def command(tmp_path, model):
    (tmp_path / "text.txt").write_text(TEXT)
    data = ["--data.path", str(tmp_path / "text.txt"), "--train.steps", "3"]
    return [*SHORT, *data, "--model.from-hf", str(model), "--run.dir", str(tmp_path / "run")]


SIZES = [
    *("--model.d-model", "32", "--model.num-layers", "2", "--model.d-ff", "64"),
    *("--model.num-heads", "4", "--model.num-kv-heads", "2", "--model.head-dim", "6"),
]
LORA = ["--model.lora.rank", "4", "--optimizer.learning-rate", "0.05", "--optimizer.warmup-steps", "0"]


@pytest.mark.journey
def test_it_begins_where_the_model_is(tmp_path, command, model, capsys):
    short = shutil.copytree(model, tmp_path / "short")
    attributes = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(attributes | {"max_position_embeddings": 16}))
    assert main([*command, *mesh(1, 2, 2), *LORA, "--model.from-hf", str(short)]) == 0
    output = capsys.readouterr().out
    assert f"weights from {short}" in output
    assert "length  sequences of 32 tokens, but the model was made for 16 " in output
    assert main([*command, *mesh(1, 1, 1), "--run.dir", str(tmp_path / "whole")]) == 0
    first, whole = records(tmp_path / "run"), records(tmp_path / "whole")
    assert first[1] == pytest.approx(whole[1], rel=1e-6), "an adapter begins as nothing"
    assert first[3] < first[1]
    resolved = (tmp_path / "run/config.yaml").read_text()
    assert "head_dim: 6\n" in resolved


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "phi3" else pytest.mark.wide) for name in TRAINED]
)
def test_every_family(name, tmp_path, command):
    """In, trained beside adapters, generated from, and out as the same family."""
    config = dataclasses.replace(jaxtp.read_config(FOLDER / name), vocab_size=256)
    family = json.loads((FOLDER / name / "config.json").read_text())["model_type"]
    jaxtp.save_hf(jaxtp.Decoder(config, rngs=nnx.Rngs(5)), tmp_path / "model", family=family)
    flags = ["--model.from-hf", str(tmp_path / "model"), "--data.sequence-length", "16", *mesh(1, 2, 2), *LORA]
    assert main([*command, *flags]) == 0
    assert main([*command, *flags, "--train.steps", "4"]) == 0, "it goes on"
    losses = records(tmp_path / "run")
    assert losses[4] < losses[1]
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    assert generate(["--model", run, "--prompt", "line", "--max-tokens", "4", "--mesh.tp", "2"]) == 0
    assert convert(["export", run, out, "--merged"]) == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == family
    ids = np.arange(16, dtype=np.int32).reshape(1, 16)
    merged = jaxtp.merge_adapters(jaxtp.load_run(run))
    np.testing.assert_allclose(jaxtp.load_hf(out)(ids), merged(ids), atol=1e-5)
    whole = ["--run.dir", str(tmp_path / "whole"), "--model.lora.rank", "0", "--optimizer.learning-rate", "1e-3"]
    assert main([*command, *flags, *whole]) == 0
    assert convert(["export", str(tmp_path / "whole"), str(tmp_path / "trained")]) == 0
    assert convert(["import", str(tmp_path / "trained"), str(tmp_path / "again")]) == 0


@pytest.mark.journey
def test_adapters_alone_are_stored_and_a_run_goes_on_with_them(tmp_path, command):
    assert main([*command, *mesh(1, 1, 2), *LORA, "--train.steps", "6", "--optimizer.schedule", "constant"]) == 0
    whole = records(tmp_path / "run")
    names = open_checkpoint(tmp_path / "run").arrays
    assert all("loras" in name for name in names if name.startswith("model."))
    assert sum(name.startswith("model.") for name in names) == 14
    again = [*command, *LORA, "--optimizer.schedule", "constant", "--run.dir", str(tmp_path / "again")]
    assert main([*again, *mesh(1, 1, 2), "--train.steps", "3"]) == 0
    assert main([*again, *mesh(2, 2, 2), "--train.steps", "6"]) == 0
    joined = records(tmp_path / "again")
    np.testing.assert_allclose(list(joined.values()), list(whole.values()), rtol=1e-4)


@pytest.mark.journey
def test_adapters_beside_a_model_in_bfloat16(tmp_path, command, capsys):
    """It stays in bfloat16, adapters are in float32, and a whole model in float32 is rounded nowhere."""
    base = tmp_path / "base"
    jaxtp.save_hf(jaxtp.Decoder(MODEL, rngs=nnx.Rngs(5)), base, dtype="bfloat16")
    run, flags = str(tmp_path / "run"), [*command, *mesh(1, 1, 2), *LORA, "--model.from-hf", str(base)]
    assert main(flags) == 0
    assert f"model.precision.param = bfloat16: the frozen weights as {base} has them" in capsys.readouterr().out
    assert main([*flags, "--train.steps", "4"]) == 0
    assert "changed since: model." not in capsys.readouterr().out
    arrays = open_checkpoint(tmp_path / "run").arrays
    assert {array.dtype.name for name, array in arrays.items() if name.startswith("model.")} == {"float32"}
    adapted = jaxtp.load_run(run)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(adapted, jaxtp.FrozenParam))} == {"bfloat16"}
    assert convert(["export", run, str(tmp_path / "half"), "--merged"]) == 0
    assert convert(["export", run, str(tmp_path / "whole"), "--merged", "--dtype", "float32"]) == 0
    half, whole = (read_header(tmp_path / out / "model.safetensors") for out in ("half", "whole"))
    assert {tensor.dtype for tensor in half.values()} == {"BF16"}
    kernel = jaxtp.merge_adapters(adapted, dtype="float32").blocks.mlp.down.kernel[...][0].T
    name = "model.layers.0.mlp.down_proj.weight"
    np.testing.assert_allclose(whole[name].read(), kernel, rtol=1e-6)
    np.testing.assert_array_equal(half[name].read(), kernel.astype("bfloat16"))
    assert (whole[name].read() != half[name].read().astype(np.float32)).any()


@pytest.mark.journey
def test_adapters_beside_a_model_in_8_bits(tmp_path, command, model, capsys, monkeypatch):
    """Loaded kernel by kernel, resumed on another mesh, also without 8 bits, and exported with the original weights."""
    loaded, load = [], hf_runs.load_state

    def recorded(*args, **named):
        graph, state = load(*args, **named)
        loaded.append(len(named_variables(state)))
        return graph, state

    monkeypatch.setattr(hf_runs, "load_state", recorded)
    run, flags = tmp_path / "run", [*command, *LORA, "--model.lora.base", "float8"]
    assert main([*flags, *mesh(1, 2, 1)]) == 0
    assert "the others frozen in float32, their kernels in float8" in capsys.readouterr().out
    assert loaded[1:] == 7 * [1], "one kernel at a time"
    assert main([*flags, *mesh(1, 1, 2), "--train.steps", "6"]) == 0
    assert "changed since: model." not in capsys.readouterr().out
    plain = [*command, *LORA, *mesh(1, 1, 1), "--run.dir", str(tmp_path / "plain"), "--train.steps", "6"]
    assert main(plain) == 0
    losses, exact = records(run), records(tmp_path / "plain")
    assert losses[6] < losses[1]
    np.testing.assert_allclose(list(losses.values()), list(exact.values()), rtol=0.01)
    assert losses[1] != exact[1]
    bases = [open_checkpoint(tmp_path / name).info["base"] for name in ("run", "plain")]
    assert bases[0] == bases[1], "of the original weights"
    adapted = jaxtp.load_run(run)
    kernel = adapted.blocks.mlp.down.kernel[...]
    np.testing.assert_array_equal(kernel, jaxtp.load_hf(model).blocks.mlp.down.kernel[...])
    assert convert(["export", str(run), str(tmp_path / "merged"), "--merged"]) == 0
    ids = np.arange(12).reshape(1, 12)
    np.testing.assert_allclose(jaxtp.load_hf(tmp_path / "merged")(ids), adapted(ids), atol=1e-4)


@pytest.mark.journey
def test_a_run_of_adapters_goes_on_beside_the_same_model_only(tmp_path, command, model, capsys):
    copied = shutil.copytree(model, tmp_path / "copied")
    command = [*command, *mesh(1, 1, 2), *LORA, "--model.from-hf", str(copied)]
    assert main(command) == 0
    assert main([*command, "--model.from-hf", str(model), "--train.steps", "4"]) == 0, "the same model, elsewhere"
    jaxtp.save_hf(jaxtp.Decoder(MODEL, rngs=nnx.Rngs(6)), tmp_path / "other")
    shutil.copy(tmp_path / "other/model.safetensors", copied)
    before = records(tmp_path / "run")
    assert main([*command, "--train.steps", "5"]) == 2
    assert f"the model in {copied} has other values" in capsys.readouterr().err
    assert records(tmp_path / "run") == before


@pytest.mark.journey
def test_a_run_of_adapters_is_generated_from_and_exported(tmp_path, command, model, capsys):
    flags = ["--optimizer.learning-rate", "0.5", "--run.dir", str(tmp_path / "run")]
    assert main([*command, *mesh(1, 1, 2), *LORA, *flags]) == 0
    assert convert(["export", str(tmp_path / "run"), str(tmp_path / "adapters")]) == 0
    assert "no tokenizer is written" in capsys.readouterr().err
    with jax.set_mesh(jaxtp.make_mesh(1, 2, 2)):
        assert jaxtp.load_run(tmp_path / "run").config.lora.rank == 4
    assert json.loads((tmp_path / "adapters/adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    merge = ["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merged"]
    assert convert([*merge, "--mesh.tp", "2"]) == 0
    merged = jaxtp.load_hf(tmp_path / "merged")
    stored = open_checkpoint(tmp_path / "run")
    adapted = load_merged(stored.folder, stored.info, MODEL, jaxtp.make_mesh())
    ids = np.arange(12).reshape(1, 12)
    np.testing.assert_allclose(merged(ids), adapted(ids), atol=1e-5)
    assert np.abs(np.asarray(merged(ids) - jaxtp.load_hf(model)(ids))).max() > 0.01, "the adapters do something"
    capsys.readouterr()
    generate_by = ["--model", str(tmp_path / "run"), "--prompt", "aaa", "--max-tokens", "4"]
    assert generate([*generate_by, "--mesh.tp", "2"]) == 0
    assert "parameters, float32" in capsys.readouterr().err
    assert generate(["--model", str(tmp_path / "adapters"), "--prompt", "a"]) == 2
    assert "adapters in PEFT's format, without a model" in capsys.readouterr().err
    jaxtp.save_hf(jaxtp.Decoder(MODEL, rngs=nnx.Rngs(6)), tmp_path / "other")
    assert convert(["export", str(tmp_path / "run"), str(tmp_path / "z"), "--base", str(tmp_path / "other")]) == 2
    assert "has other values" in capsys.readouterr().err
    model_is = tmp_path / "moved"
    assert generate([*generate_by, "--base", str(model_is)]) == 2
    assert f"--base {model_is}: no such folder" in capsys.readouterr().err


@pytest.mark.journey
def test_what_only_adapters_have_is_refused_of_other_runs(tmp_path, command, capsys):
    assert main([*command, *mesh(1, 1, 2)]) == 0
    assert convert(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--merged"]) == 2
    assert "has no adapters; leave --merged out" in capsys.readouterr().err
    lora = [*command, *mesh(1, 1, 2), *LORA, "--run.dir", str(tmp_path / "lora")]
    assert main(lora) == 0
    at = command.index("--model.from-hf")
    begin = [*command[:at], *command[at + 2 :], *SIZES, "--run.init-from", str(tmp_path / "lora")]
    assert main([*begin, *mesh(1, 1, 2), "--run.dir", str(tmp_path / "next")]) == 2
    assert "holds only adapters; merge them by `jaxtp convert export" in capsys.readouterr().err


@pytest.mark.journey
def test_a_run_needs_the_folder_that_it_began_with_no_more(tmp_path, command, model, capsys):
    copied = shutil.copytree(model, tmp_path / "copied")
    (copied / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    command = [*command, *mesh(1, 1, 2), "--model.from-hf", str(copied)]
    assert main(command) == 0
    shutil.rmtree(copied)
    assert main(["--config", str(tmp_path / "run/config.yaml"), "--train.steps", "4"]) == 0
    assert main([*command, "--train.steps", "5"]) == 2, "without its configuration the sizes are others"
    assert f"{copied}: no such folder" in capsys.readouterr().err
    assert convert(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/chat_template.jinja").exists()
    chat = ["--model", str(tmp_path / "run"), "--chat", "--max-tokens", "2"]
    monkeypatch_input = io.StringIO("aaa\n")
    with mock.patch("sys.stdin", monkeypatch_input):
        assert generate(chat) == 0


@pytest.mark.parametrize(
    "base", [pytest.param("full", marks=pytest.mark.slow), pytest.param("float8", marks=pytest.mark.wide)]
)
def test_adapters_of_a_run_of_ours(tmp_path, command, base):
    assert main([*command, *mesh(1, 1, 2), "--run.dir", str(tmp_path / "base")]) == 0
    at = command.index("--model.from-hf")
    flags = [*command[:at], *command[at + 2 :], *SIZES, *LORA, "--model.lora.base", base]
    assert main([*flags, "--run.init-from", str(tmp_path / "base"), *mesh(1, 2, 1)]) == 0
    assert main([*flags, "--run.init-from", str(tmp_path / "base"), *mesh(1, 1, 2), "--train.steps", "4"]) == 0


@pytest.fixture(scope="module")
def trained_adapters(tmp_path_factory, model):
    """A folder of adapters in PEFT's format: rsLoRA, in the second layer alone."""
    lora = LoraConfig(rank=2, alpha=4.0, rslora=True, targets=("q_proj", "down_proj"))
    adapted = jaxtp.add_adapters(jaxtp.load_hf(model), lora)
    random = jax.tree.map(
        lambda a: jax.random.normal(jax.random.key(a.size), a.shape), nnx.state(adapted, nnx.LoRAParam)
    )
    nnx.update(adapted, jax.tree.map(lambda a: a.at[0].set(0), random))
    folder = tmp_path_factory.mktemp("adapters")
    jaxtp.save_peft(adapted, folder / "adapters", base=model)
    return folder / "adapters"


@pytest.fixture
def adapters(tmp_path, trained_adapters):
    return shutil.copytree(trained_adapters, tmp_path / "adapters")


@pytest.mark.journey
def test_adapters_are_trained_further(tmp_path, command, model, adapters, capsys):
    """From PEFT's folder, on another mesh without it, and back into one."""
    flags = [*command, "--model.lora.from", str(adapters), "--optimizer.learning-rate", "0.01"]
    begun = stored(adapters)
    assert main([*flags, *mesh(1, 2, 2)]) == 0
    printed = capsys.readouterr().out
    assert f"weights from {model}; adapters from {adapters}; 2 of 4 modules have an adapter" in printed
    recorded = (tmp_path / "run/config.yaml").read_text()
    assert f"from: {adapters}\n" in recorded
    assert "rslora: true\n" in recorded
    shutil.move(adapters, tmp_path / "moved")
    assert main([*flags, *mesh(2, 1, 1), "--train.steps", "4"]) == 0
    assert main(["--config", str(tmp_path / "run/config.yaml"), *mesh(1, 1, 1), "--train.steps", "5"]) == 0
    losses = records(tmp_path / "run")
    assert losses[5] < losses[1]
    assert convert(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    trained, described = stored(tmp_path / "out"), json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert trained.keys() == begun.keys(), "the first layer still has none"
    assert all(np.abs(trained[name] - array).max() > 1e-3 for name, array in begun.items())
    assert (described["r"], described["lora_alpha"], described["use_rslora"]) == (2, 4, True)
    source = shutil.move(tmp_path / "moved", adapters)
    generated = ["--model", str(tmp_path / "run"), "--adapters", str(source), "--prompt", "a"]
    assert generate(generated) == 2
    assert "has adapters already; merge them first by" in capsys.readouterr().err
    at = command.index("--model.from-hf")
    whole = [*command[:at], *command[at + 2 :], "--run.init-from", str(tmp_path / "whole")]
    assert main([*command, *mesh(1, 1, 2), "--run.dir", str(tmp_path / "whole"), "--train.steps", "1"]) == 0
    begins = ["--model.lora.from", str(source), *mesh(1, 1, 2), "--run.dir", str(tmp_path / "again")]
    assert main([*whole, *begins]) == 0, "beside the model of a run"


def stored(folder):
    return {name: tensor.read() for name, tensor in read_header(folder / "adapter_model.safetensors").items()}


OTHER_ADAPTERS = {
    "another rank": ("--model.lora.rank 7", "model.lora.rank=7, but they have 2; remove these settings"),
    "another scale": ("--model.lora.alpha 16", "model.lora.alpha=16.0, but they have 4.0"),
    "other targets": ("--model.lora.targets q_proj", "targets=q_proj, but they have q_proj down_proj"),
    "no folder": ("--model.lora.from {0}x", "no such folder; did you mean {0}?"),
    "another model": ("--model.from-hf {1}", "q_proj.lora_A.weight is 2x32, and this model needs 2x16"),
    "float16": ("--model.precision.compute float16", "model.precision.compute=float16 cannot be trained in: gradients"),
}


@pytest.mark.parametrize("name", OTHER_ADAPTERS)
def test_mistakes_with_adapters(tmp_path, command, adapters, capsys, name):
    flags, message = OTHER_ADAPTERS[name]
    jaxtp.save_hf(jaxtp.Decoder(dataclasses.replace(MODEL, d_model=16), rngs=nnx.Rngs(5)), tmp_path / "other")
    places = str(adapters), str(tmp_path / "other")
    given = [*command, "--model.lora.from", str(adapters), *mesh(1, 1, 2), *flags.format(*places).split()]
    assert main(given) == 2
    assert message.format(*places) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


MISTAKES = {
    "another size": ("--model.d-model 64", "does not match: model.d_model=64, but it has 32"),
    "two beginnings": ("--run.init-from {run}", "--run.init-from and --model.from-hf are conflicting weight sources"),
    "no such model": ("--model.from-hf nowhere", "nowhere: no such folder"),
    "a name of the hub": (
        "--model.from-hf meta-llama/Llama-3.1-8B",
        "`hf download meta-llama/Llama-3.1-8B --local-dir models/Llama-3.1-8B` downloads it",
    ),
    "not on this mesh": (
        "--mesh.tp 8 --mesh.no-allow-padding",
        "mesh.tp=8 pads 4 query heads to 8, and mesh.allow_padding is false",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(tmp_path, command, capsys, name):
    flags, message = MISTAKES[name]
    base = tmp_path / "base"
    if "{run}" in flags:
        assert main([*command, *mesh(1, 1, 1), "--train.steps", "2", "--run.dir", str(base)]) == 0
    assert main([*command, *mesh(1, 1, 2), *flags.format(run=base).split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_recipe_of_another_model_is_one_short_line(command, model, capsys):
    recipe = Path(__file__).parents[2] / "configs/chat_qwen3_8b.yaml"
    assert main(["--config", str(recipe), "--model.from-hf", str(model)]) == 2
    error = capsys.readouterr().err
    assert f"{model} does not match: model.vocab_size=151936, but it has 256, and 8 more; remove these" in error
    assert "jaxtp estimate --model.from-hf DIR --write FILE.yaml" in error
    assert error.count("\n") == 1
    assert len(error) - len(str(model)) < 250


def test_adapters_of_nothing_are_refused(tmp_path, capsys):
    assert main(["--model.lora.rank", "8", "--run.dir", str(tmp_path / "run")]) == 2
    assert "name its folder by --model.from-hf FOLDER or --run.init-from RUN" in capsys.readouterr().err
    assert main(["--model.lora.from", str(tmp_path), "--run.dir", str(tmp_path / "run")]) == 2
    assert "name its folder by --model.from-hf FOLDER or --run.init-from RUN" in capsys.readouterr().err


def test_data_by_another_tokenizer_are_refused(tmp_path, command, model, capsys):
    other = tmp_path / "with_tokenizer"
    jaxtp.save_hf(jax.jit(lambda: jaxtp.Decoder(MODEL, rngs=nnx.Rngs(5)))(), other)
    (other / "tokenizer.json").write_text(json.dumps({}))
    assert main([*command, *mesh(1, 1, 2), "--model.from-hf", str(other)]) == 2
    assert f"prepare them with --tokenizer {other / 'tokenizer.json'}" in capsys.readouterr().err
