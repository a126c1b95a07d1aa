"""A Decoder of one's own: the example of the guide, and others, on meshes, in runs and from their folders."""

import dataclasses
import functools
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx
from runs import TEXT, contents, records
from support import assert_close, by_name, random_weights, state_on_mesh, sweep_of

import jaxtp
from jaxtp.analysis.layer_costs import has_formulas
from jaxtp.analysis.step_costs import described
from jaxtp.checkpoint.io_errors import CheckpointError
from jaxtp.config.python_object import load_object
from jaxtp.config.schema import ConfigError
from jaxtp.generate.__main__ import main as generate
from jaxtp.generate.request import GenerationError
from jaxtp.hf.runs import own_or_decoder, remedy_of_command, remedy_of_train
from jaxtp.mesh import make_mesh, mesh_shape
from jaxtp.models.decoder import create_decoder
from jaxtp.models.own_decoder import builder, decoder_settings
from jaxtp.tools.check.__main__ import verdicts
from jaxtp.tools.check.parity import initial_arrays
from jaxtp.tools.check.shrink import Case, shrink
from jaxtp.tools.convert.__main__ import main as convert
from jaxtp.tools.evaluate.__main__ import main as evaluate
from jaxtp.train.__main__ import main
from jaxtp.train.config import DataConfig, LoopConfig, TrainConfig
from jaxtp.train.state import plan_state
from jaxtp.train.step import loss_and_grads
from jaxtp.train.task import load_task, with_references

FILE = Path(__file__).parent.parent.parent / "scripts/examples/own_decoder.py"
SIZES = {
    "vocab_size": 256,
    "d_model": 16,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "d_ff": 24,
}
B, T = 8, 8
MESHES = {"tp": {"tp": 2}, "both": {"fsdp": 2, "tp": 2}, "cp": {"cp": 2}, "zigzag": {"cp": 2, "tp": 4}}


@pytest.fixture(scope="module")
def example():
    return sys.modules[load_object(f"{FILE}:build", "a test").__module__]


class Probed(jaxtp.Decoder):
    """Has a Flax layer, which declares no spec, and one that declares fsdp."""

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.probe = nnx.Linear(config.d_model, 3, rngs=rngs)
        self.split = nnx.Linear(
            config.d_model, 4, rngs=rngs, kernel_metadata={"out_sharding": ("fsdp", None)}, use_bias=False
        )


def probed_loss(model, batch, key):
    sequences = model.sequences(batch["inputs"])
    x = model.hidden(batch["inputs"], sequences=sequences)
    labels = sequences.local_tokens(batch["labels"])
    total, count = model.loss_of_hidden(x, labels)
    of_each = lambda layer, n: -jnp.take_along_axis(jax.nn.log_softmax(layer(x)), labels[..., None] % n, -1)[..., 0]
    others = jnp.where(labels == -100, 0, of_each(model.probe, 3) + of_each(model.split, 4))
    return total + others.sum(), count


class WithArray(jaxtp.Decoder):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.table = nnx.data(jax.random.normal(rngs.params(), (4,)))


def test_an_array_that_no_checkpoint_would_have_is_refused():
    settings = jaxtp.ModelConfig(decoder=WithArray, **SIZES)
    with pytest.raises(ConfigError, match=r"model.table is an array of a jaxtp.Decoder, an attribute and no variable"):
        plan_state(settings, optax.sgd(0.1), make_mesh())


class FlaxGate(jaxtp.PositionwiseBranch):
    """A branch of a Flax layer alone."""

    def __init__(self, width, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x_BTD, sequences=None):
        return jnp.tanh(self.linear(x_BTD))


@dataclass(frozen=True, kw_only=True)
class FlaxConfig(jaxtp.ModelConfig):
    def branches(self, block, rngs):
        return super().branches(block, rngs) | {"flax": FlaxGate(self.d_model, rngs)}


def gradients(build, loss, sizes, accumulation=1, length=T):
    """Returns loss, count, metrics and gradients."""
    mesh = make_mesh(**sizes)
    config = TrainConfig(train=LoopConfig(accumulation=accumulation))
    with jax.set_mesh(make_mesh()):
        weights = random_weights(build)
    graph, state = state_on_mesh(build, weights, mesh)
    tokens = jax.random.randint(jax.random.key(0), (B, length + 1), 0, 256)
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:].at[0, :3].set(-100)}

    @jax.jit
    def run(state):
        terms, _, grads = loss_and_grads(nnx.merge(graph, state), batch, config, jax.random.key(0), loss)
        return terms, grads

    with jax.set_mesh(mesh):
        terms, grads = run(state)
    metrics = {name: total for name, (total, _) in terms.metrics.items()}
    return {"loss": terms.loss, "count": terms.count, **metrics} | by_name(grads, mesh)


CASES = {
    "example": lambda example: (lambda: example.build(nnx.Rngs(0), **SIZES), example.loss),
    "flax head": lambda _: (lambda: Probed(jaxtp.ModelConfig(**SIZES), rngs=nnx.Rngs(0)), probed_loss),
    "flax branch": lambda _: (lambda: jaxtp.Decoder(FlaxConfig(**SIZES), rngs=nnx.Rngs(0)), None),
}


@pytest.mark.parametrize(("name", "mesh"), sweep_of([CASES, MESHES], ("example", "both")))
def test_gradients_on_a_mesh_are_those_of_one_device(name, mesh, example):
    build, loss = CASES[name](example)
    sizes = MESHES[mesh]
    if mesh == "zigzag":  # cp does not divide the one query head of a device
        with jax.set_mesh(make_mesh(**sizes)):
            assert nnx.eval_shape(build).sequences(jnp.zeros((B, T), jnp.int32)).zigzag
    assert_close(gradients(build, loss, sizes, accumulation=2), gradients(build, loss, {}))


def settings_of(*words, **settings):
    folder, *rest = words
    flags = {"model.build": f"{FILE}:build", "train.loss": f"{FILE}:loss", "run.dir": folder / "run"}
    flags |= {"data.path": folder / "text.txt", "data.sequence_length": 16, "data.global_batch_size": 4}
    flags |= {"eval.batches": 1, "train.steps": 3, "train.log_every": 1} | settings
    (folder / "text.txt").write_text(TEXT)
    (folder / "run.yaml").write_text(yaml.safe_dump({"model": {"arguments": SIZES}}))
    pairs = [word for name, value in flags.items() for word in (f"--{name}".replace("_", "-"), str(value))]
    return ["--config", str(folder / "run.yaml"), *pairs, *rest]


NUMBERS = ("loss", "grad_norm", "param_norm", "second")


@pytest.mark.wide
def test_a_run_resumes_on_another_mesh_and_is_used_from_its_folder(tmp_path, capsys, example):
    (tmp_path / "whole").mkdir()
    constant = {"optimizer.schedule": "constant", "optimizer.warmup_steps": 1}
    assert main(settings_of(tmp_path / "whole", **constant)) == 0
    assert main(settings_of(tmp_path, "--mesh.tp", "2", **constant | {"train.steps": 2})) == 0
    out = capsys.readouterr().out
    assert f"by {FILE}:build" in out
    assert "xla attention" in out, "it is described as a decoder is"
    assert f"jaxtp generate --model {tmp_path / 'run'} --build {FILE}:build --prompt" in out
    again = ["--config", str(tmp_path / "run/config.yaml"), "--mesh.tp", "1", "--mesh.fsdp", "2", "--mesh.cp", "2"]
    assert main([*again, "--train.steps", "3", "--train.callbacks", f"{FILE}:sample"]) == 0
    for name in NUMBERS:
        expected, resumed = (list(records(folder / "run", name).values()) for folder in (tmp_path / "whole", tmp_path))
        np.testing.assert_allclose(resumed, expected, rtol=1e-5, err_msg=name)

    before = contents(tmp_path / "run")
    prompt = ["--model", str(tmp_path / "run"), "--prompt", "line 1", "--max-tokens", "4"]
    assert generate(prompt) == 2
    refused = "names; this command takes only a jaxtp.Decoder. If it is one, and you trust that code, give --build"
    assert f"{refused} {FILE}:build" in capsys.readouterr().err
    assert generate([*prompt, "--build", f"{FILE}:build", "--json", "-"]) == 0
    text = json.loads(capsys.readouterr().out)
    with jax.set_mesh(make_mesh(tp=2)):
        model = jaxtp.load_run(tmp_path / "run", build=example.build)
        ids = list(b"line 1")
        for _ in range(4):
            ids.append(int(model(jnp.array([ids]))[0, -1].argmax()))
    assert type(model).__name__ == "GatedDecoder"
    assert text["ids"] == ids[6:]
    (tmp_path / "few.txt").write_text(TEXT[:100])
    data = ["--text", str(tmp_path / "few.txt"), "--sequence-length", "16", "--json", "-"]
    assert evaluate(["--model", str(tmp_path / "run"), "--build", f"{FILE}:build", *data]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["all"]["loss"] < 6
    assert contents(tmp_path / "run") == before


def trained(tmp_path, task, mesh="tp=2", **settings):
    """Returns the records of a run of two steps."""
    (tmp_path / "text.txt").write_text(TEXT)
    data = {"data.path": tmp_path / "text.txt", "data.sequence_length": 16, "data.global_batch_size": 4}
    more = {"eval.every": 0, "eval.batches": 1, "train.log_every": 1, "checkpoint.every": 0}
    with jaxtp.Trainer(task, mesh=mesh, folder=tmp_path / "run", steps=2, settings=data | more | settings) as trainer:
        for step in trainer:
            assert np.isfinite(step.metrics["loss"])
    return records(tmp_path / "run", "param_norm")


@pytest.mark.wide
def test_python_takes_its_settings_and_files_name_them(tmp_path, example):
    """The settings, the function, and a function without a name train the same model by jaxtp's loss."""
    config = example.GatedConfig(**SIZES, second_weight=0.5)
    build = lambda rngs: jaxtp.Decoder(config, rngs=rngs)
    found = []
    for index, model in enumerate((config, build)):
        (tmp_path / str(index)).mkdir()
        found.append(trained(tmp_path / str(index), jaxtp.Task(model=model)))
    assert found[0] == found[1]
    written = yaml.safe_load((tmp_path / "0/run/config.yaml").read_text())["model"]
    assert written["build"] == f"{FILE}:GatedConfig"
    assert written["arguments"] == {name: SIZES[name] for name in SIZES if name != "vocab_size"} | {
        "second_weight": 0.5
    }
    assert jaxtp.load_run(tmp_path / "0/run", build=example.GatedConfig).config.second_weight == 0.5


def test_a_whole_configuration_takes_its_settings(example):
    config = with_references(TrainConfig(model=example.GatedConfig(**SIZES)), jaxtp.Task())
    assert config.model.build == f"{FILE}:GatedConfig"
    assert load_task(config).model is None, "the settings are there already"


def test_the_weights_are_those_of_the_function():
    """Also where it changes them after the class has made them."""

    def build(rngs):
        model = Probed(jaxtp.ModelConfig(**SIZES), rngs=rngs)
        model.probe.bias[...] = jnp.full(3, 7.0)
        return model

    settings = decoder_settings(build, jaxtp.ModelConfig(build="mine.py:build"))
    with jax.set_mesh(make_mesh()):
        made = create_decoder(settings, rngs=nnx.Rngs(0))
        other = create_decoder(dataclasses.replace(settings, remat="none"), rngs=nnx.Rngs(0))
    assert type(made) is type(other) is Probed
    assert [float(model.probe.bias[0]) for model in (made, other)] == [7, 0]


def test_a_class_with_some_arguments_gets_the_others_and_random_numbers():
    for function in (nnx.Linear, functools.partial(nnx.Linear, 4), functools.partial(nnx.Linear, out_features=5)):
        sizes = {"out_features": 3} | ({"in_features": 4} if not getattr(function, "args", ()) else {})
        config = jaxtp.ModelConfig(build="mine.py:build", arguments=sizes)
        assert builder(function, config)(nnx.Rngs(0)).kernel.shape == (4, 3)
    with pytest.raises(ConfigError, match=r"'depth'; model\.arguments can give out_features, use_bias"):
        builder(functools.partial(nnx.Linear, 4), jaxtp.ModelConfig(arguments={"out_features": 3, "depth": 1}))


class Late(jaxtp.Decoder):
    def __init__(self, config, width, *, rngs):
        super().__init__(config, rngs=rngs)
        self.second = nnx.Linear(config.d_model, width, rngs=rngs)


def late(rngs):
    return Late(jaxtp.ModelConfig(**SIZES), 3, rngs=rngs)


def with_more(rngs):
    model = jaxtp.Decoder(jaxtp.ModelConfig(**SIZES), rngs=rngs)
    model.second = nnx.Linear(16, 2, rngs=rngs)
    return model


def adapted(rngs):
    return jaxtp.Decoder(jaxtp.ModelConfig(**SIZES, lora=jaxtp.LoraConfig(rank=2)), rngs=rngs)


def plain(rngs):
    return jaxtp.Decoder(jaxtp.ModelConfig(**SIZES), rngs=rngs)


CONTRACT = "its __init__ should make all of it from its config"
REFUSED = {
    "other arguments": (late, {}, rf"Late\(config, rngs=rngs\) fails: .*'width'.*{CONTRACT}"),
    "made later": (with_more, {}, rf"Decoder\(config, rngs=rngs\) differ in second.bias, second.kernel.*{CONTRACT}"),
    "adapters": (adapted, {}, r"takes weights by --run.init-from, and has no adapters"),
    "settings": (plain, {"model.d_model": 32}, r"model.d_model=32: the model is your own"),
    "precision": (plain, {"model.precision.compute": "bfloat16"}, r"compute=bfloat16: the model is your own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_made(name, tmp_path):
    build, settings, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        trained(tmp_path, jaxtp.Task(model=build), **settings)
    assert not (tmp_path / "run").exists()


def test_a_mesh_that_does_not_fit_is_refused_with_its_sizes(tmp_path):
    build = lambda rngs: jaxtp.Decoder(jaxtp.ModelConfig(**SIZES | {"d_model": 15}), rngs=rngs)
    with pytest.raises(ConfigError, match=r"model.d_model=15 is not divisible by mesh.fsdp"):
        trained(tmp_path, jaxtp.Task(model=build), mesh="fsdp=2")


class Rescaled(jaxtp.Decoder):
    def embed(self, *arguments, **more):
        return 2 * super().embed(*arguments, **more)


def test_generation_refuses_what_it_would_not_call():
    model = Rescaled(jaxtp.ModelConfig(**SIZES), rngs=nnx.Rngs(0))
    with pytest.raises(GenerationError, match="Rescaled has its own embed, which decoding would not call"):
        jaxtp.Generator(model, jaxtp.open_tokenizer)


class Other(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)


@pytest.mark.parametrize(
    ("build", "word"),
    [
        ("mine.py:Net", "mine.py:Net"),
        ("my file.py:Net", "'my file.py:Net'"),
        ("__main__:Net", "FILE.py:Net"),
        ("<lambda>", "FILE.py:NAME"),
    ],
)
def test_a_refusal_of_code_names_flags_that_can_work(build, word):
    """And the arguments that the run's folder would give to the code."""
    model = {"build": build, "arguments": {"command": "touch PWNED"}}
    info = {"config": {"model": model, "train": {"loss": "mine.py:loss"}, "data": None}}
    command = remedy_of_command(Path("run"), info, has_build=True)
    assert f"takes only a jaxtp.Decoder. If it is one, and you trust that code, give --build {word}; in" in command
    train = remedy_of_train(info)
    assert train.endswith(f"name it: --model.build {word} --train.loss mine.py:loss")
    with pytest.raises(CheckpointError, match=r"with the arguments \{'command': 'touch PWNED'\}, and jaxtp runs no"):
        own_or_decoder(Path("run"), info, remedy=train)


def test_a_model_that_is_no_decoder_has_none_of_its_commands(tmp_path, capsys):
    """They say what returns it instead."""

    def loss(model, batch, key):
        return model.linear(batch["x"]).sum(), batch["x"].size

    rows = lambda step: {"x": np.ones((4, 2), np.float32)}
    run = tmp_path / "run"
    with jaxtp.Trainer(jaxtp.Task(model=Other, loss=loss, batches=rows), folder=run, steps=1) as trainer:
        trainer.run_to_end()
    with pytest.raises(CheckpointError, match=r"name it: jaxtp\.load_run\('.*', build='.*:Other'\)$"):
        jaxtp.load_run(run)
    assert convert(["export", str(run), str(tmp_path / "hf")]) == 2
    error = capsys.readouterr().err
    assert "this command takes only jaxtp's own decoder. In Python, jaxtp.load_run(" in error
    assert "--build" not in error
    assert main(["--run.init-from", str(run), "--run.dir", str(tmp_path / "next")]) == 2
    named = r"--model\.build \S+:Other --train\.loss \S+ --data\.batches \S+$"
    assert re.search(rf"if you trust that code, name it: {named}", capsys.readouterr().err.strip())
    source = ["--model", str(run), "--build", f"{__file__}:Other"]
    for command in (generate, evaluate):
        assert command([*source, *(["--prompt", "a"] if command is generate else ["--text", __file__])]) == 2
        assert re.search(
            r"is no jaxtp\.Decoder, .*; in Python, jaxtp\.load_run\('.*checkpoints/1', build='.*:Other'\) returns it",
            capsys.readouterr().err,
        )
    assert jaxtp.load_run(run, build=Other).linear.kernel.shape == (2, 2)


@pytest.mark.wide
@pytest.mark.parametrize(
    "case", [Case(mesh_shape(tp=2), True), Case(mesh_shape(fsdp=2, cp=2), False, "gather")], ids=str
)
def test_the_check_and_the_budget_take_it(case, example):
    """The check makes it with other sizes, and its own layers send what their trace does."""
    model = decoder_settings(example.build, jaxtp.ModelConfig(build="mine.py:build", arguments=SIZES))
    data = DataConfig(sequence_length=16, global_batch_size=16)
    small = shrink(TrainConfig(model=dataclasses.replace(model, d_model=64), data=data), [case])
    (verdict,) = verdicts(small, [case])
    assert verdict.passed, (verdict.errors, verdict.problems)
    assert "model.second.kernel" in initial_arrays(small)
    assert not has_formulas(described(model).blocks.attention)
