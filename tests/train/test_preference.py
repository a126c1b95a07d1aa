"""DPO against TRL's DPOTrainer in float64 (`scripts/make_preference_references.py`), on meshes,
packed and unpacked.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf.test_references import by_their_names
from hf_reference import FOLDER, sketch
from numpy.testing import assert_allclose
from run_comparisons import assert_same_records
from runs import OF_ANY_MODEL, records
from support import (
    assert_close,
    by_name,
    decoder,
    new_decoder,
    random_weights,
    state_on_mesh,
    swept,
    use_mesh,
)
from tables import read_table
from variants import small_model

from jaxtp import Decoder, LoraConfig, hf, without_adapters
from jaxtp.config.entry import UserError
from jaxtp.config.schema import ConfigError
from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.losses import DPO, SimPO, token_log_probs
from jaxtp.mesh import make_mesh
from jaxtp.train import preference
from jaxtp.train.__main__ import main as train
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.model_source import ModelSource
from jaxtp.train.parts import load_parts
from jaxtp.train.setup import Plan
from jaxtp.train.task import Task

MODEL = "llama_linear"
SCALE = 0.9
TOLERANCE = 1e-5
METRICS = [
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
]
VARIANTS = {
    "sigmoid": DPO(),
    "label_smoothing": DPO(beta=0.3, label_smoothing=0.2),
    "length_normalized": DPO(beta=2.0, length_normalized=True),
    "hinge": DPO(beta=0.5, loss="hinge"),
    "ipo": DPO(beta=0.4, loss="ipo"),
    "sft_weight": DPO(sft_weight=0.7),
}
"""As in `scripts/make_preference_references.py`."""


@cache
def reference():
    with np.load(Path(__file__).parent / "preference.npz") as stored:
        return dict(stored)


def pairs_in_rows(packed):
    """Returns the pairs of the references, three in a row or one; the rest is padding."""
    columns = {
        name: np.zeros((8, 64), np.int32) for name in ("inputs", "labels", "segments", "pairs")
    }
    columns["labels"] -= 100
    used = np.zeros(8, int)
    numbers = np.zeros(8, int)
    for i, (prompt, chosen, _) in enumerate(reference()["lengths"]):
        row = i // 3 if packed else i
        ids = reference()[f"ids_{i}"]
        numbers[row] += 1
        for sign, answer in ((1, ids[prompt : prompt + chosen]), (-1, ids[prompt + chosen :])):
            tokens = np.concatenate([ids[:prompt], answer])
            at = slice(used[row], used[row] + len(tokens))
            columns["inputs"][row, at] = tokens
            columns["labels"][row, at][prompt - 1 : -1] = answer
            columns["segments"][row, at] = 2 * numbers[row] - (sign > 0)
            columns["pairs"][row, at] = sign * numbers[row]
            used[row] = at.stop
    return columns


@jax.jit
def log_probs_of(model, columns):
    """Returns what `jaxtp score` stores."""
    return token_log_probs(
        model, columns["inputs"], columns["labels"], segments=columns["segments"]
    )


@cache
def scored(packed):
    graph, state = nnx.split(hf.load(FOLDER / MODEL))
    columns = pairs_in_rows(packed)
    scaled = nnx.merge(graph, jax.tree.map(lambda array: SCALE * array, state))
    return columns | {"log_probs": np.asarray(log_probs_of(scaled, columns))}


def means(loss, model, columns):
    total, count, metrics = loss(
        model, {name: jnp.asarray(each) for name, each in columns.items()}, None
    )
    return total / count, {name: value / weight for name, (value, weight) in metrics.items()} | {
        "count": count
    }


@swept("case", read_table(__file__))
def test_loss_metrics_and_gradients_are_those_of_trl(case):
    name, sizes, packed = case
    known = reference()
    columns = scored(packed)
    with use_mesh(**sizes):
        model = hf.load(FOLDER / MODEL)
        graph, state = nnx.split(model)
        run = lambda state: means(VARIANTS[name], nnx.merge(graph, state), columns)
        (loss, metrics), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(state)
    assert loss == pytest.approx(known[f"{name}/loss"], rel=TOLERANCE)
    assert metrics.pop("count") == len(known["lengths"])
    assert metrics == pytest.approx(
        dict(zip(METRICS, known[f"{name}/metrics"], strict=True)), rel=TOLERANCE
    )
    grads = by_their_names(grads, model.config, MODEL)
    names, *found = (known[f"{name}/grad_{part}"] for part in ("names", "sketches", "norms"))
    errors = {
        each: np.linalg.norm(sketch(each, grads[each], sketched.size) - sketched) / norm
        for each, sketched, norm in zip(names, *found, strict=True)
    }
    assert errors.keys() == grads.keys()
    assert max(errors.values()) < TOLERANCE, errors


def test_simpo_has_no_reference():
    columns = pairs_in_rows(True)
    log_probs = np.float64(log_probs_of(hf.load(FOLDER / MODEL), columns))
    differences = []
    for numbers, labels, row in zip(columns["pairs"], columns["labels"], log_probs, strict=True):
        for number in range(1, numbers.max() + 1):
            chosen, rejected = (
                row[(numbers == sign * number) & (labels != -100)].mean() for sign in (1, -1)
            )
            differences.append(3 * (chosen - rejected))
    with use_mesh(fsdp=2, tp=2):
        graph, state = nnx.split(hf.load(FOLDER / MODEL))
        run = lambda state: means(SimPO(beta=3, gamma=0.7), nnx.merge(graph, state), columns)
        loss, metrics = jax.jit(run)(state)
    assert loss == pytest.approx(np.log1p(np.exp(0.7 - np.array(differences))).mean(), rel=1e-5)
    assert metrics["rewards/margins"] == pytest.approx(np.mean(differences), rel=1e-4)
    assert metrics["count"] == len(differences) == len(reference()["lengths"])


@pytest.fixture
def stored(monkeypatch):
    """The batch, whose log-probabilities the model is taken to give."""
    columns = scored(True)
    model = hf.load(FOLDER / MODEL)
    found = jnp.asarray(log_probs_of(model, columns))
    monkeypatch.setattr(preference, "token_log_probs", lambda *_, segments: found)
    return columns


WRONG = [
    (abs, "row 0: .* of .* labels are in no pair; `pairs` must be 1 for"),
    (lambda pairs: 40 * pairs, "labels are in no pair"),
    (lambda pairs: pairs[:, :-1], r"pairs is \[8, 63\], and labels is \[8, 64\]"),
]


def test_a_wrong_column_is_refused(stored):
    for change, message in WRONG:
        with pytest.raises(UserError, match=message):
            means(DPO(), None, stored | {"pairs": change(stored["pairs"])})


def test_an_answer_alone_does_not_count(stored):
    """In a step, where values are unknown."""
    pairs = stored["pairs"]
    labels = stored["labels"]
    alone = stored | {"labels": np.where(pairs == -1, -100, labels)}
    without = stored | {"labels": np.where(abs(pairs) == 1, -100, labels)}

    @jax.jit
    def run(*batches):
        return [means(DPO(sft_weight=1.0), None, columns) for columns in batches]

    (found, metrics), (known, expected) = run(alone, without)
    assert metrics["count"] == expected["count"] == 3
    assert_allclose(found, known, rtol=1e-6)


def test_settings_are_refused():
    messages = {
        "loss = 'sigmoyd': should be 'sigmoid', 'ipo' or 'hinge'": {"loss": "sigmoyd"},
        "beta = 0.0: should be greater than 0": {"beta": 0.0},
        "beta = nan": {"beta": float("nan")},
        "label_smoothing = 0.5: should be less than 0.5": {"label_smoothing": 0.5},
        "label_smoothing=0.1 is for loss='sigmoid', not 'hinge'": {
            "label_smoothing": 0.1,
            "loss": "hinge",
        },
        "sft_weight = -1.0: should be greater than or equal to 0": {"sft_weight": -1.0},
    }
    for message, settings in messages.items():
        with pytest.raises(ConfigError, match=message):
            DPO(**settings)


SMALL_MODEL = small_model(vocab_size=64, num_heads=2)
ADAPTED = replace(SMALL_MODEL, lora=LoraConfig(rank=2), remat="none")


def test_a_model_without_adapters_needs_scores():
    with pytest.raises(
        ConfigError, match="needs a reference: a column log_probs, as `jaxtp score` makes"
    ):
        means(DPO(), new_decoder(SMALL_MODEL), pairs_in_rows(True))


@pytest.mark.wide
def test_the_reference_of_adapters_is_the_base():
    """And its gradient is that of scores."""
    build = decoder(ADAPTED)
    mesh = make_mesh()
    graph, state = state_on_mesh(build, random_weights(build), mesh)
    columns = pairs_in_rows(True)
    run = lambda state, columns: means(DPO(), nnx.merge(graph, state), columns)

    @jax.jit
    def both(state):
        base = without_adapters(nnx.merge(graph, state))
        scores = columns | {"log_probs": log_probs_of(base, columns)}
        return [jax.value_and_grad(run, has_aux=True)(state, each) for each in (columns, scores)]

    (found, grads), (known, expected) = both(state)
    assert abs(found[1]["rewards/margins"]) > 1e-4
    assert_allclose(*(jax.tree.leaves(each) for each in (found, known)), rtol=1e-5)
    assert_close(by_name(grads, mesh), by_name(expected, mesh))


def temporaries(config, task, batch):
    """Bytes that a step takes besides state and batch."""
    config, parts = load_parts(config, task)
    plan = Plan(config=config, parts=parts, shapes=batch)
    with jax.set_mesh(make_mesh()):
        return plan.trace_on(make_mesh()).lower().compile().memory_analysis().temp_size_in_bytes


@pytest.mark.wide
def test_a_scored_step_takes_the_memory_of_fine_tuning():
    loss = DPO()
    model = replace(SMALL_MODEL, loss_chunk=64)
    config = TrainConfig(model=model, data=DataConfig(sequence_length=512, global_batch_size=4))
    batch = jax.eval_shape(lambda: loss.example_batch(4, 512, config))
    batch["segments"] = batch["inputs"]
    tokens = {name: batch[name] for name in ("inputs", "labels", "segments")}
    plain = temporaries(config, Task(), tokens)
    paired = temporaries(config, Task(loss=loss), batch)
    # Of these, 5 are what the cross-entropy in one pass saves. Logits would be 64.
    assert paired - plain < 16 * 4 * 4 * 512, "floats of a token"


def test_a_run_ends_with_commands_that_take_its_data():
    """`jaxtp evaluate` refuses pairs."""
    for pairs in (False, True):
        lines = ModelSource().next_steps(TrainConfig(), pairs=pairs)
        assert ("jaxtp evaluate" in "".join(lines)) is not pairs


@pytest.mark.journey
def test_a_run_with_adapters_resumes(tmp_path):
    """From texts; margins rise."""
    hf.save(Decoder(replace(SMALL_MODEL, vocab_size=256), rngs=nnx.Rngs(5)), tmp_path / "model")
    pairs = [
        {"prompt": f"{i} + {i}?", "chosen": f" {2 * i}.", "rejected": f" {i}, no!"}
        for i in range(64)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    flags = ["--preference", f"--out={tmp_path}/data", "--held-out=0.1"]
    assert prepare([str(tmp_path / "pairs.jsonl"), *flags]) == 0
    command = [
        *OF_ANY_MODEL,
        "--mesh=fsdp=2,tp=2",
        f"--model.from-hf={tmp_path}/model",
        f"--data.path={tmp_path}/data",
        "--model.lora.rank=4",
        "--train.loss=jaxtp.losses:DPO",
        "--train.loss-arguments.beta=0.2",
        "--data.packing=documents",
        "--data.sequence-length=64",
        "--optimizer.learning-rate=0.02",
        "--optimizer.schedule=constant",
        "--train.steps=16",
        "--run.dir",
    ]
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    assert train([*command, str(whole)]) == 0
    assert train([*command, str(resumed), "--train.steps=8"]) == 0
    assert train([*command, str(resumed)]) == 0
    assert_same_records(resumed, whole, "loss", "grad_norm", *METRICS)
    margins = records(whole, "rewards/margins")
    assert margins[1] == pytest.approx(0, abs=1e-6)
    assert 0 < margins[8] < margins[16]
