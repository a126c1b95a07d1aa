"""Losses of documents against references that transformers made, on meshes and in batches."""

import signal
from dataclasses import replace

import hf_reference
import numpy as np
import pytest
from flax import nnx
from hf_reference import FOLDER
from support import swept, use_mesh

import jaxtp
from jaxtp.config.entry import InterruptError, NumericsError
from jaxtp.tools.evaluate.inputs import ConfigError, Document
from jaxtp.tools.evaluate.measure import Measured, Scorer, measure

ONE = (1, 1, 1, 1)
OVER_CP = (1, 1, 2, 2)
MESHES = {
    "llama_gqa": (1, 2, 1, 2),
    "gemma2": OVER_CP,
    "qwen2_window": (2, 1, 1, 4),
    "gpt2": ONE,
    "mixtral": (1, 2, 4, 1),
}


class Rows:
    """The rows of a reference, as documents."""

    def __init__(self, ids):
        self.ids = ids
        self.num_documents = len(ids)

    def documents(self):
        for row in self.ids:
            yield Document(row.astype(np.int32), 1, 3 * (len(row) - 1))


def scorer(name, mesh, batch_size=2, norm=None):
    """Returns the scorer of a model on a mesh, whose last norm has this scale."""
    dp, fsdp, cp, tp = mesh
    with use_mesh(dp, fsdp, tp, cp=cp):
        model = jaxtp.hf.load(FOLDER / name)
        if norm is not None:
            model.norm.scale[...] = norm
        return Scorer(model, batch_size)


def measured(scorer, inputs, length, stride=None):
    return measure(scorer, inputs, length, stride or length, lambda measured: None)


@swept("name", MESHES, "llama_gqa")
def test_the_loss_is_that_of_transformers(name):
    mesh = MESHES[name]
    reference = hf_reference.load(name)
    ids = reference["input_ids"]
    several = name != "gpt2"  # which has vectors for no more positions
    length = -(-ids.shape[1] // mesh[2]) * mesh[2] * (1 + several)
    whole = measured(scorer(name, mesh), [Rows(ids)], length)
    assert whole.tokens == ids.size - len(ids)
    assert whole.loss == pytest.approx(float(reference["loss64"]), rel=1e-5)
    logits = reference["logits"][:, :-1]
    assert abs(whole.num_correct - (logits.argmax(-1) == ids[:, 1:]).sum()) <= 1, "but for a tie"


@pytest.mark.wide
def test_numbers_are_the_same_for_every_batch_size_and_mesh():
    ids = hf_reference.load("qwen3")["input_ids"]
    inputs = [Rows(ids), Rows(ids[:, :7]), Rows(ids[:1, :1])]
    first, other = (
        measured(scorer("qwen3", mesh, batch_size), inputs, 12, stride=8)
        for mesh, batch_size in [(ONE, 5), (OVER_CP, 3)]
    )
    assert first.nats == pytest.approx(other.nats, rel=1e-6)
    assert replace(first, nats=0.0) == replace(other, nats=0.0)
    assert first.documents == 2 * len(ids) + 1
    assert first.tokens == ids.size - len(ids) + 6 * len(ids), "none in the document of one token"


@pytest.mark.wide
def test_overlapping_windows_have_the_loss_of_each_window():
    """The loss of each window by itself, from the model's whole logits."""
    ids = hf_reference.load("llama_gqa")["input_ids"][:2].astype(np.int32)
    logits_of = nnx.jit(lambda model, ids: model(ids))
    model = jaxtp.hf.load(FOLDER / "llama_gqa")
    for stride in (8, 3):
        total = 0.0
        for row in ids:
            done = 1
            for begin in range(0, len(row), stride):
                labels = row[begin + 1 : begin + 9]
                count = len(labels)
                read = np.zeros((1, 8), np.int32)
                read[0, :count] = row[begin : begin + count]
                logits = np.float64(logits_of(model, read))[0, :count]
                losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(count), labels]
                end = begin + count + 1
                total += losses[count - (end - done) :].sum()
                done = end
        found = measured(scorer("llama_gqa", ONE), [Rows(ids)], 8, stride=stride)
        assert found.nats == pytest.approx(total, rel=1e-6)


def test_documents_without_a_token_to_predict_are_refused():
    with pytest.raises(ConfigError, match="no document has more than one"):
        measured(scorer("qwen3", ONE), [Rows(np.zeros((3, 1), np.int32))], 8)


def test_a_loss_that_is_not_finite_is_an_error():
    spoilt = scorer("qwen3", ONE, norm=np.nan)
    with pytest.raises(NumericsError, match="the loss of a token is not finite"):
        measured(spoilt, [Rows(np.zeros((3, 4), np.int32))], 8)


def test_an_interrupt_waits_for_the_batch():
    done = []

    def progress(*_):
        done.append(1)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(InterruptError):
        measure(scorer("qwen3", ONE, 1), [Rows(np.ones((3, 9), np.int32))], 8, 8, progress)
    assert len(done) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_numbers_of_sums():
    numbers = Measured(
        documents=2, tokens=4, num_bytes=8, nats=8 * np.log(2), num_correct=1
    ).numbers()
    assert [numbers[name] for name in ("perplexity", "bits_per_byte", "accuracy")] == pytest.approx(
        [4, 1, 0.25]
    )
    assert Measured(tokens=1, nats=1e4).numbers()["perplexity"] is None, "it overflows"
    assert Measured(tokens=1, nats=1.0).numbers()["bits_per_byte"] is None
