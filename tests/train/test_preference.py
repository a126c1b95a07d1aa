"""DPO against TRL's DPOTrainer in float64 (`make_preference_references.py`), on meshes, packed and unpacked."""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf.test_references import by_their_names
from hf_reference import FOLDER, sketch
from support import sweep

import jaxtp
from jaxtp.config.entry import UserError
from jaxtp.config.schema import ConfigError
from jaxtp.mesh import make_mesh
from jaxtp.train.config import TrainConfig

MODEL, SCALE = "llama_linear", 0.9
TOLERANCE = 1e-5
METRICS = ["rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen"]
METRICS += ["logps/rejected"]
VARIANTS = {
    "sigmoid": jaxtp.DPO(),
    "label_smoothing": jaxtp.DPO(beta=0.3, label_smoothing=0.2),
    "length_normalized": jaxtp.DPO(beta=2.0, length_normalized=True),
    "hinge": jaxtp.DPO(beta=0.5, loss="hinge"),
    "ipo": jaxtp.DPO(beta=0.4, loss="ipo"),
    "sft_weight": jaxtp.DPO(sft_weight=0.7),
}
"""As in `make_preference_references.py`."""
MESHES = {
    "one device": {},
    "tp 2": {"tp": 2},
    "tp 4": {"tp": 4},
    "fsdp 2 x tp 2": {"fsdp": 2, "tp": 2},
    "dp 2 x tp 2": {"dp": 2, "tp": 2},
    "cp 2 x tp 2": {"cp": 2, "tp": 2},
    "fsdp 4": {"fsdp": 4},
}
CASES = [("sigmoid", mesh, packed) for mesh in MESHES for packed in (True, False)]
CASES += [(name, *case) for name in VARIANTS for case in (("one device", True), ("cp 2 x tp 2", False))][2:]


@cache
def reference():
    with np.load(Path(__file__).parent / "preference.npz") as stored:
        return dict(stored)


def pairs_in_rows(packed, rows=8, length=64):
    """Returns the pairs of the references, three in a row or one; the rest is padding."""
    columns = {name: np.zeros((rows, length), np.int32) for name in ("inputs", "labels", "segments", "pairs")}
    columns["labels"] -= 100
    used, numbers = np.zeros(rows, int), np.zeros(rows, int)
    for i, (prompt, chosen, _) in enumerate(reference()["lengths"]):
        row, ids = i // 3 if packed else i, reference()[f"ids_{i}"]
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


def log_probs_of(model, columns):
    """Returns what `jaxtp score` stores."""
    return jax.jit(jaxtp.token_log_probs)(model, *(columns[name] for name in ("inputs", "labels", "segments")))


@cache
def scored(packed):
    graph, state = nnx.split(jaxtp.load_hf(FOLDER / MODEL))
    columns = pairs_in_rows(packed)
    scaled = nnx.merge(graph, jax.tree.map(lambda array: SCALE * array, state))
    return columns | {"log_probs": np.asarray(log_probs_of(scaled, columns))}


def means(loss, model, columns):
    total, count, metrics = loss(model, {name: jnp.asarray(each) for name, each in columns.items()}, None)
    return total / count, {name: value / weight for name, (value, weight) in metrics.items()} | {"count": count}


@pytest.mark.parametrize("case", sweep(CASES, ("sigmoid", "cp 2 x tp 2", True)), ids=str)
def test_loss_metrics_and_gradients_are_those_of_trl(case):
    name, mesh, packed = case
    known, columns = reference(), scored(packed)
    with jax.set_mesh(make_mesh(**MESHES[mesh])):
        model = jaxtp.load_hf(FOLDER / MODEL)
        graph, state = nnx.split(model)
        run = lambda state: means(VARIANTS[name], nnx.merge(graph, state), columns)
        (loss, metrics), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(state)
    assert loss == pytest.approx(known[f"{name}/loss"], rel=TOLERANCE)
    assert metrics.pop("count") == len(known["lengths"])
    assert metrics == pytest.approx(dict(zip(METRICS, known[f"{name}/metrics"], strict=True)), rel=TOLERANCE)
    grads = by_their_names(grads, model.config, MODEL)
    names, *found = (known[f"{name}/grad_{part}"] for part in ("names", "sketches", "norms"))
    errors = {
        each: np.linalg.norm(sketch(each, grads[each], sketched.size) - sketched) / norm
        for each, sketched, norm in zip(names, *found, strict=True)
    }
    assert errors.keys() == grads.keys()
    assert max(errors.values()) < TOLERANCE, errors


def test_every_variant_has_the_loss_of_trl():
    graph, state = nnx.split(jaxtp.load_hf(FOLDER / MODEL))
    run = lambda state: {name: means(each, nnx.merge(graph, state), scored(True))[0] for name, each in VARIANTS.items()}
    known = {name: float(reference()[f"{name}/loss"]) for name in VARIANTS}
    assert jax.jit(run)(state) == pytest.approx(known, rel=TOLERANCE)
