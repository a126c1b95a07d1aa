"""Distillation from a teacher's likeliest tokens, against dense formulas on whole logits."""

import functools
import math
from dataclasses import replace

import accounts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpora import prepared
from flax import nnx
from gradients import loss_and_gradients
from numpy.random import default_rng
from run_comparisons import assert_same_records
from runs import SMALL, TEXT, records
from support import assert_close, assert_refused, swept
from tables import read_table
from variants import small_model

import jaxtp
from jaxtp.config.schema import ConfigError
from jaxtp.mesh import as_mesh
from jaxtp.models.decoder import create_decoder
from jaxtp.tools.score.__main__ import main as score
from jaxtp.train.__main__ import main
from jaxtp.train.config import TrainConfig
from jaxtp.train.distillation import Distillation, with_other_tokens
from jaxtp.train.loss import Objective
from jaxtp.train.step import StepSettings, loss_and_grads

TABLES = read_table(__file__)

B = 8
T = 8
V = 37
D = 16
MODEL = small_model(
    vocab_size=V, d_model=D, num_heads=8, num_kv_heads=8, logit_softcap=4.0, loss_chunk=6
)


class Shallow(jaxtp.Decoder):
    """Without blocks, to compile fast."""

    def hidden(self, ids_BT, dropout_keys=None, sequences=None):
        return self.norm(self.embed(ids_BT, sequences))


EXPERTS = replace(MODEL, num_experts=4, experts_per_token=2, sequence_parallel=True)
MODELS = {
    "shallow": lambda: Shallow(MODEL, rngs=nnx.Rngs(0)),
    "decoder": lambda: create_decoder(MODEL, rngs=nnx.Rngs(0)),
    "experts": lambda: create_decoder(EXPERTS, rngs=nnx.Rngs(0)),
}
LOSSES = {
    "forward": Distillation(),
    "reverse": Distillation(direction="reverse"),
    "mixed": Distillation(cross_entropy=0.3),
    "hot": Distillation(temperature=2.5),
    "all": Distillation(direction="reverse", temperature=0.7, cross_entropy=0.4),
}
MESHES = TABLES["meshes"]
"""Each with a loss and a model; dp=2,cp=2 is a zigzag."""


def batch_of(k, temperature=1.0):
    """Returns a packed batch, with the scores of a random teacher and its logits."""
    random = default_rng(0)
    logits = 2 * random.normal(size=(B, T, V)).astype(np.float32)
    tokens = random.integers(0, V, (B, T + 1), np.int32)
    labels = np.where(random.random((B, T)) < 0.2, -100, tokens[:, 1:])
    segments = 1 + (np.arange(T) >= random.integers(1, T, (B, 1))).astype(np.int32)
    ids = np.argsort(-logits, axis=-1)[..., :k].astype(np.int32)
    log_probs = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits / temperature)), ids, axis=-1
    )
    valid = (labels != -100)[..., None]
    scores = {"top_ids": np.where(valid, ids, 0), "top_log_probs": np.where(valid, log_probs, 0)}
    return {"inputs": tokens[:, :-1], "labels": labels, "segments": segments} | scores, logits


def dense(loss, teacher_logits):
    """Returns the loss as a formula on whole logits, in which the tokens that are not among the
    k are added up.
    """

    def run(model, batch, key):
        labels = batch["labels"]
        logits = model(batch["inputs"], segments=batch["segments"])
        valid = labels != -100
        among = (batch["top_ids"][..., None] == jnp.arange(V)).any(axis=2)

        def log_probs(logits):
            whole = jax.nn.log_softmax(logits / loss.temperature)
            rest = jax.nn.logsumexp(whole, axis=-1, where=~among, keepdims=True)
            return jnp.concatenate(
                [jnp.where(among, whole, 0), jnp.where(among.all(-1, keepdims=True), 0, rest)], -1
            )

        counts = jnp.pad(
            among, ((0, 0), (0, 0), (0, 1)), constant_values=batch["top_ids"].shape[-1] < V
        )
        p = log_probs(jnp.asarray(teacher_logits))
        q = log_probs(logits)
        first, second = (p, q) if loss.direction == "forward" else (q, p)
        kl = jnp.sum(jnp.exp(first) * (first - second), axis=-1, where=counts)
        one_hot = labels[..., None] == jnp.arange(V)
        cross_entropy = -jnp.sum(jax.nn.log_softmax(logits), axis=-1, where=one_hot)
        each = (
            1 - loss.cross_entropy
        ) * loss.temperature**2 * kl + loss.cross_entropy * cross_entropy
        return tuple(jnp.sum(x, where=valid) for x in (each, jnp.ones_like(each)))

    return run


def results(loss, batch, model="shallow", accumulation=1, mesh="tp=1"):
    """Returns loss, weight, metrics and gradients."""
    settings = StepSettings(objective=Objective(loss), accumulation=accumulation)
    return loss_and_gradients(MODELS[model], batch, settings, as_mesh(mesh, "a test"))


@functools.cache
def on_one_device(name, model):
    batch, _ = batch_of(5, LOSSES[name].temperature)
    return batch, results(LOSSES[name], batch, model)


FORMULAS = TABLES["formulas"]


@swept("case", FORMULAS, FORMULAS[0])
def test_the_loss_is_the_divergence_of_the_top_tokens_and_the_rest(case):
    """With all tokens it is the divergence of the vocabulary."""
    name, k = case
    loss = LOSSES[name]
    batch, logits = batch_of(k, loss.temperature)
    expected = results(dense(loss, logits), batch)
    found = results(loss, batch)
    assert_close({each: found[each] for each in expected}, expected, 1e-6)


def test_a_student_that_leaves_nothing_to_other_tokens_is_pulled_back():
    """The gradient of the logit of all other tokens, to which a teacher gives 0.1."""
    teacher = with_other_tokens(jnp.log(jnp.full(2, 0.45)))

    @jax.jit
    @jax.grad
    def gradient_of(logits):
        return jnp.sum(
            jnp.exp(teacher) * (teacher - with_other_tokens(jax.nn.log_softmax(logits)[:2]))
        )

    for logit, tolerance in ((-2.0, 1e-5), (-10.0, 1e-2), (-16.0, 1.0)):
        gradient = gradient_of(np.array([0, 0, logit], np.float32))[2]
        assert gradient < 0
        assert gradient == pytest.approx(
            math.exp(logit) / (2 + math.exp(logit)) - 0.1, rel=tolerance
        )


@swept("case", MESHES)
def test_a_mesh_gives_the_numbers_of_one_device(case):
    mesh, name, model = case
    batch, expected = on_one_device(name, model)
    assert_close(results(LOSSES[name], batch, model, 2, mesh), expected)


def test_no_array_has_the_logits_of_all_tokens():
    batch = Distillation(top_k=12).example_batch(4, 64, TrainConfig(model=MODEL))
    graph, state = nnx.split(nnx.eval_shape(MODELS["shallow"]))

    def run(state, batch):
        return loss_and_grads(
            nnx.merge(graph, state),
            batch,
            StepSettings(Objective(Distillation())),
            jax.random.key(0),
        )

    equations = accounts.equations(jax.make_jaxpr(run)(state, batch).jaxpr)
    shapes = [v.aval.shape for e in equations for v in e.outvars]
    assert max(math.prod(shape) for shape in shapes if shape[-1:] == (V,)) < 256 * V


def test_values_out_of_range_are_refused():
    messages = {
        "direction = 'backward': should be 'forward' or 'reverse'": {"direction": "backward"},
        "temperature = 0.0: should be greater than 0": {"temperature": 0.0},
        "temperature = inf": {"temperature": math.inf},
        "cross_entropy = 1.5: should be less than or equal to 1": {"cross_entropy": 1.5},
    }
    for message, values in messages.items():
        with pytest.raises(ConfigError, match=message):
            Distillation(**values)


@pytest.mark.journey
def test_a_student_learns_from_the_scores_of_a_teacher_and_resumes(tmp_path, capsys):
    rows = "".join(f'{{"text": "{line}"}}\n' for line in TEXT.splitlines()[:100])
    (tmp_path / "text.jsonl").write_text(rows)
    data = prepared(tmp_path / "data", tmp_path / "text.jsonl", "--held-out=0.1").folder
    scores = str(tmp_path / "scores")
    small = [*SMALL, "--model.num-layers=1", f"--data.path={data}", "--mesh=fsdp=2,tp=2"]
    assert main([*small, "--train.steps=30", f"--run.dir={tmp_path}/teacher"]) == 0
    teacher = [f"--model={tmp_path}/teacher", "--top-k=8", "--data.sequence-length=32"]
    assert score([str(data), *teacher, f"--out={scores}"]) == 0
    student = [
        *small,
        f"--data.scores={scores}",
        "--run.seed=1",
        "--train.steps=20",
        "--optimizer.schedule=constant",
        "--train.loss=jaxtp.losses:Distillation",
        "--train.loss-arguments.cross-entropy=0.1",
        "--run.dir",
    ]
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    refused = [*student, str(whole), "--train.loss-arguments.temperature=2"]
    assert_refused(main, refused, "temperature 1, and the loss needs scores at 2", capsys)
    assert main([*student, str(whole)]) == 0
    assert main([*student, str(resumed), "--train.steps=12"]) == 0
    assert main([*student, str(resumed)]) == 0
    assert_same_records(resumed, whole, "loss", "kl", "grad_norm")
    kl = records(whole, "kl")
    assert kl[20] < kl[1] / 2
    assert 0.2 < records(whole, "teacher_mass")[1] < 1
