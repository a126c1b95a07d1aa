"""A Decoder of one's own: the example of the guide, and others, on meshes, in runs and from
their folders.
"""

import functools
import json
import re
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx
from gradients import loss_and_gradients
from numpy.random import default_rng
from run_comparisons import assert_same_records
from runs import TEXT, contents
from support import (
    assert_close,
    assert_refused,
    new_decoder,
    swept,
    use_mesh,
)
from tables import read_table

import jaxtp
from jaxtp import Decoder, LoraConfig, ModelConfig, Trainer, load_run
from jaxtp.analysis.layer_costs import has_formulas
from jaxtp.analysis.step_costs import described
from jaxtp.checkpoint.io_errors import CheckpointError
from jaxtp.config.python_object import load_object
from jaxtp.config.schema import ConfigError
from jaxtp.generate.__main__ import main as generate
from jaxtp.generate.request import GenerationError
from jaxtp.layers import PositionwiseBranch
from jaxtp.mesh import make_mesh, mesh_shape
from jaxtp.models.config import OriginConfig
from jaxtp.models.decoder import create_decoder
from jaxtp.models.own_decoder import builder, decoder_settings
from jaxtp.tools.check.__main__ import verdicts
from jaxtp.tools.check.parity import initial_arrays
from jaxtp.tools.check.shrink import Case, shrink
from jaxtp.tools.convert.__main__ import main as convert
from jaxtp.tools.evaluate.__main__ import main as evaluate
from jaxtp.train.__main__ import main
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.loss import NextToken, Objective
from jaxtp.train.parts import Parts, load_parts
from jaxtp.train.state import plan_state
from jaxtp.train.step import StepSettings, loss_and_grads
from jaxtp.train.task import Task, with_references

TABLES = read_table(__file__)

FILE = Path(__file__).parents[2] / "scripts/examples/own_decoder.py"
SIZES = TABLES["sizes"]
CONFIG = ModelConfig(**SIZES)
B = 8
T = 8
example = sys.modules[load_object(f"{FILE}:build", "a test").__module__]


class Probed(Decoder):
    """Has a Flax layer, which declares no spec, and one that declares fsdp."""

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.probe = nnx.Linear(config.d_model, 3, rngs=rngs)
        self.split = nnx.Linear(
            config.d_model,
            4,
            rngs=rngs,
            kernel_metadata={"out_sharding": ("fsdp", None)},
            use_bias=False,
        )


def probed_loss(model, batch, key):
    sequences = model.sequences(batch["inputs"])
    x = model.hidden(batch["inputs"], sequences=sequences)
    labels = sequences.local_tokens(batch["labels"])
    total, count = model.loss_of_hidden(x, labels)
    losses = optax.softmax_cross_entropy_with_integer_labels
    others = losses(model.probe(x), labels % 3) + losses(model.split(x), labels % 4)
    return total + jnp.sum(others, where=labels != -100), count


class WithArray(Decoder):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.table = nnx.data(jax.random.normal(rngs.params(), (4,)))


def test_an_array_that_no_checkpoint_would_have_is_refused():
    settings = ModelConfig(decoder=WithArray, **SIZES)
    with pytest.raises(
        ConfigError,
        match=r"model.table is an array of a jaxtp.Decoder, but an attribute and not a variable",
    ):
        plan_state(settings, optax.sgd(0.1), make_mesh())


def test_a_state_that_no_run_could_train_or_save_is_refused():
    holding = lambda array: lambda rngs: nnx.Dict(table=nnx.Param(array))
    for settings, build, message in (
        (
            replace(CONFIG, lora=LoraConfig(rank=2, targets=())),
            None,
            "targets=nothing: the model has no such projection",
        ),
        (CONFIG, holding(jnp.zeros(2, "complex64")), "table is complex64, .* real numbers"),
        (CONFIG, holding(jnp.zeros(0)), "table has no elements"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan_state(settings, optax.sgd(0.1), make_mesh(), build)


def test_a_flax_layer_in_a_decoder_drops_others_in_each_step():
    model = new_decoder(CONFIG)
    model.norm = nnx.Sequential(model.norm, nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    batch = dict.fromkeys(("inputs", "labels"), jnp.ones((B, T), int))

    @nnx.jit
    def loss(model, key):
        return loss_and_grads(model, batch, StepSettings(), key)[0].loss

    assert loss(model, jax.random.key(0)) != loss(model, jax.random.key(1))


class FlaxGate(PositionwiseBranch):
    """A branch of a Flax layer alone."""

    def __init__(self, width, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x_BTD, sequences=None):
        return jnp.tanh(self.linear(x_BTD))


@dataclass(frozen=True, kw_only=True)
class FlaxConfig(ModelConfig):
    def branches(self, block, rngs):
        return super().branches(block, rngs) | {"flax": FlaxGate(self.d_model, rngs)}


def gradients(build, loss, sizes, accumulation=1):
    """Returns loss, count, metrics and gradients."""
    settings = StepSettings(Objective(loss) if loss else NextToken(), accumulation)
    tokens = default_rng(0).integers(0, 256, (B, T + 1), np.int32)
    tokens[0, 1:4] = -100
    batch = {"inputs": abs(tokens[:, :-1]), "labels": tokens[:, 1:]}
    return loss_and_gradients(build, batch, settings, make_mesh(**sizes))


OWN = {
    "example": (lambda: example.build(nnx.Rngs(0), **SIZES), example.loss),
    "flax head": (lambda: Probed(CONFIG, rngs=nnx.Rngs(0)), probed_loss),
    "flax branch": (lambda: new_decoder(FlaxConfig(**SIZES)), None),
}


@functools.cache
def on_one_device(name):
    return gradients(*OWN[name], {})


ZIGZAG = {"cp": 2, "tp": 4}  # cp does not divide the one query head of a device
MESHES = [
    ("example", {"fsdp": 2, "tp": 2}),
    ("example", ZIGZAG),
    ("flax head", {"fsdp": 2, "tp": 2}),
    ("flax head", {"cp": 2}),
    ("flax branch", ZIGZAG),
]


@swept("case", MESHES)
def test_gradients_on_a_mesh_are_those_of_one_device(case):
    name, sizes = case
    build, loss = OWN[name]
    if sizes == ZIGZAG:
        with use_mesh(**sizes):
            assert nnx.eval_shape(build).sequences(jnp.zeros((B, T), jnp.int32)).zigzag
    assert_close(gradients(build, loss, sizes, accumulation=2), on_one_device(name))


def command(folder, *more, steps=3):
    """Returns the flags of a run of the example."""
    (folder / "text.txt").write_text(TEXT)
    (folder / "run.yaml").write_text(yaml.safe_dump({"model": {"arguments": SIZES}}))
    settings = {
        "config": folder / "run.yaml",
        "model.build": f"{FILE}:build",
        "train.loss": f"{FILE}:loss",
        "run.dir": folder / "run",
        "data.path": folder / "text.txt",
        "data.sequence-length": 16,
        "data.global-batch-size": 4,
        "eval.batches": 1,
        "train.steps": steps,
        "train.log-every": 1,
        "optimizer.schedule": "constant",
        "optimizer.warmup-steps": 1,
    }
    return [*(f"--{name}={value}" for name, value in settings.items()), *more]


@pytest.mark.wide
def test_a_run_resumes_on_another_mesh_and_is_used_from_its_folder(tmp_path, capsys):
    whole = tmp_path / "whole"
    assert main(command(tmp_path, f"--run.dir={whole}")) == 0
    assert main(command(tmp_path, "--mesh.tp=2", steps=2)) == 0
    out = capsys.readouterr().out
    run = tmp_path / "run"
    assert "xla attention" in out, "it is described as a decoder is"
    assert f"jaxtp generate --model {run} --build {FILE}:build --prompt" in out
    other = ["--mesh.tp=1", "--mesh.cp=2", "--train.steps=3", f"--train.callbacks={FILE}:sample"]
    again = [f"--config={run}/config.yaml", *other]
    assert_refused(main, again, "if you trust it, add --allow-code", capsys)
    assert main([*again, "--allow-code"]) == 0
    assert_same_records(run, whole, "loss", "grad_norm", "param_norm", "second", rtol=1e-5)

    before = contents(run)
    prompt = [f"--model={run}", "--prompt=line 1", "--max-tokens=1"]
    assert_refused(
        generate,
        prompt,
        "jaxtp runs no code that a folder names; if you trust that code, name it: by --model.build "
        "of jaxtp train, by --build of other commands",
        capsys,
    )
    assert generate([*prompt, "--build", f"{FILE}:build", "--json=-"]) == 0
    generated = json.loads(capsys.readouterr().out)["ids"]
    with use_mesh(tp=2):
        model = load_run(run, build=example.build)
        scores = nnx.jit(lambda model, ids: model(ids))(model, jnp.array([list(b"line 1")]))
    assert type(model).__name__ == "GatedDecoder"
    assert generated == [scores[0, -1].argmax()]
    assert contents(run) == before


def trainer_of(folder, task, **settings):
    """Returns a trainer of one step."""
    (folder / "text.txt").write_text(TEXT)
    data = {
        "data.path": folder / "text.txt",
        "data.sequence_length": 16,
        "data.global_batch_size": 4,
    }
    more = {
        "mesh": "tp=2",
        "eval.every": 0,
        "eval.batches": 1,
        "checkpoint.every": 0,
        "train.steps": 1,
    }
    return Trainer(**vars(task), settings=data | more | {"run.dir": folder / "run"} | settings)


@pytest.mark.wide
def test_a_run_of_settings_records_them_and_is_loaded_by_their_class(tmp_path):
    with trainer_of(
        tmp_path, Task(model=example.GatedConfig(**SIZES, second_weight=0.5))
    ) as trainer:
        assert trainer.run_to_end()
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["model"]
    assert written["build"] == f"{FILE}:GatedConfig"
    arguments = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    assert written["arguments"] == arguments | {"second_weight": 0.5}
    load = partial(load_run, tmp_path / "run", build=example.GatedConfig)
    assert load().config.second_weight == 0.5
    with pytest.raises(ConfigError, match="a plan splits a model of your own"):
        load(plan={})


def test_a_whole_configuration_takes_its_settings():
    config = with_references(TrainConfig(model=example.GatedConfig(**SIZES)), Task())
    assert config.origin.build == f"{FILE}:GatedConfig"
    assert load_parts(config) == (config, Parts()), "the settings are there already"


def test_the_weights_are_those_of_the_function():
    """Also where it changes them after the class has made them."""

    def build(rngs):
        model = Probed(CONFIG, rngs=rngs)
        model.probe.bias[...] = jnp.full(3, 7.0)
        return model

    settings = decoder_settings(build, OriginConfig(build="mine.py:build"))
    with use_mesh():
        made = create_decoder(settings, rngs=nnx.Rngs(0))
    assert type(made) is Probed
    assert made.probe.bias[0] == 7


def test_a_class_with_some_arguments_gets_the_others_and_random_numbers():
    with_input = partial(nnx.Linear, 4)
    sizes = {"out_features": 3}
    model = builder(with_input, OriginConfig(arguments=sizes))(nnx.Rngs(0))
    assert model.kernel.shape == (4, 3)
    with pytest.raises(
        ConfigError, match=r"'depth'; model\.arguments can give out_features, use_bias"
    ):
        builder(with_input, OriginConfig(arguments=sizes | {"depth": 1}))


def with_more(rngs):
    model = Decoder(CONFIG, rngs=rngs)
    model.second = nnx.Linear(16, 2, rngs=rngs)
    return model


def plain(rngs, **changes):
    return Decoder(replace(CONFIG, **changes), rngs=rngs)


CONTRACT = "its __init__ should make all of it from its config"
adapted = partial(plain, lora=LoraConfig(rank=2))
REFUSED = {
    "made later": (
        with_more,
        {},
        rf"Decoder\(config, rngs=rngs\) differ in second.bias, second.kernel.*{CONTRACT}",
    ),
    "adapters": (adapted, {}, r"takes weights by --run.init-from, and has no adapters"),
    "a mesh": (
        partial(plain, d_model=15),
        {"mesh": "fsdp=2"},
        r"d_model=15 is not divisible by mesh.fsdp",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_decoder_of_ones_own_is_refused_before_anything_is_made(name, tmp_path):
    build, settings, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        trainer_of(tmp_path, Task(model=build), **settings).__enter__()
    assert not (tmp_path / "run").exists()


class Rescaled(Decoder):
    def embed(self, *arguments, **more):
        return 2 * super().embed(*arguments, **more)


def test_generation_refuses_what_it_would_not_call():
    model = Rescaled(CONFIG, rngs=nnx.Rngs(0))
    with pytest.raises(
        GenerationError, match="Rescaled has its own embed, which decoding would not call"
    ):
        jaxtp.generate.Generator(model, jaxtp.generate.open_tokenizer)


class Bigram(nnx.Module):
    """A model of another class: scores of the next byte by the byte before."""

    def __init__(self, rngs):
        self.table = nnx.Param(
            jax.random.normal(rngs.params(), (256, 256)), out_sharding=(None, None)
        )


def loss_of_bigram(model, batch, key):
    labels = batch["labels"]
    scores = model.table[...][batch["inputs"]]
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.maximum(labels, 0))
    return jnp.sum(losses, where=labels >= 0), jnp.sum(labels >= 0).astype(jnp.float32)


BIGRAM = Task(model=Bigram, loss=loss_of_bigram)


@pytest.mark.wide
def test_a_model_that_is_no_decoder_is_trained_on_tokens_and_has_no_commands(tmp_path, capsys):
    """They say what returns it instead."""
    with trainer_of(tmp_path, BIGRAM, mesh="fsdp=2") as trainer:
        assert trainer.run_to_end()
    run = tmp_path / "run"
    out = capsys.readouterr().out
    assert (
        out.splitlines()[-1].strip()
        == f"model = jaxtp.load_run('{run}', build='{__name__}:Bigram')"
    )
    assert "attention" not in out
    assert load_run(run, build=Bigram).table.shape == (256, 256)
    with pytest.raises(
        CheckpointError, match=rf"name it: .* jaxtp\.load_run\('{run}.*', build='.*:Bigram'\)$"
    ):
        load_run(run)
    source = [f"--model={run}", "--build", f"{__file__}:Bigram"]
    here = rf"in Python, jaxtp\.load_run\('{run}.*', build='.*:Bigram'\)"
    refusals = [
        (
            convert,
            ["export", str(run), str(tmp_path / "hf")],
            rf"name it: .* jaxtp\.load_run\('{run}.*', build='.*:Bigram'\)$",
        ),
        (
            main,
            [f"--run.init-from={run}"],
            r"a model of \S+:Bigram, .* name it: by --model\.build of jaxtp train",
        ),
        (generate, [*source, "--prompt=a"], rf"is not a jaxtp\.Decoder.*; {here} returns it"),
        (evaluate, [*source, "--text", __file__], rf"is not a jaxtp\.Decoder.*; {here} returns it"),
    ]
    for tool, flags, message in refusals:
        assert tool(flags) == 2
        error = capsys.readouterr().err
        assert re.search(message, error.strip()), error


def test_settings_without_effect_on_a_model_of_ones_own_are_refused(tmp_path):
    for setting, (value, message) in TABLES["without effect"].items():
        with pytest.raises(ConfigError) as error:
            trainer_of(tmp_path, BIGRAM, **{"mesh": "fsdp=2", setting: value}).__enter__()
        assert message in str(error.value), setting


@pytest.mark.wide
def test_the_check_and_the_budget_take_it():
    """The check makes it with other sizes, and its own layers send what their trace does."""
    model = decoder_settings(example.build, OriginConfig(build="mine.py:build", arguments=SIZES))
    data = DataConfig(sequence_length=16, global_batch_size=16)
    cases = [Case(mesh_shape(cp=2, tp=2), False, "gather")]
    small = shrink(TrainConfig(model=replace(model, d_model=64), data=data), cases)
    (verdict,) = verdicts(small, cases)
    assert verdict.passed, (verdict.errors, verdict.problems)
    assert "model.second.kernel" in initial_arrays(small)
    assert not has_formulas(described(model).blocks.attention)
