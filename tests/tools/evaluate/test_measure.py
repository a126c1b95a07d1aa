"""Losses of documents against references that transformers made, on meshes and in batches."""

import signal

import hf_reference
import numpy as np
import pytest
from flax import nnx
from hf_reference import FOLDER
from support import swept, use_mesh

import jaxtp
from jaxtp.config.entry import InterruptError, NumericsError
from jaxtp.tools.evaluate.inputs import Document, InputError
from jaxtp.tools.evaluate.measure import Scorer, Totals, measure, power_of_two

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

    def __init__(self, ids, name="rows"):
        self.ids = ids
        self.name = name
        self.num_documents = len(ids)

    def documents(self):
        for row in self.ids:
            yield Document(row.astype(np.int32), 1, 3 * (len(row) - 1))


def scorer(name, mesh, batch_size=2, norm=None):
    """Returns the scorer of a model on a mesh, whose last norm has this scale."""
    dp, fsdp, cp, tp = mesh
    with use_mesh(dp, fsdp, tp, cp=cp):
        model = jaxtp.load_hf(FOLDER / name)
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
    whole = measured(scorer(name, mesh), [Rows(ids)], length).whole()
    assert whole.tokens == ids.size - len(ids)
    assert whole.loss == pytest.approx(float(reference["loss64"]), rel=1e-5)
    logits = reference["logits"][:, :-1]
    assert abs(whole.num_correct - (logits.argmax(-1) == ids[:, 1:]).sum()) <= 1, "but for a tie"


@pytest.mark.wide
def test_numbers_are_the_same_for_every_batch_size_and_mesh():
    ids = hf_reference.load("qwen3")["input_ids"]
    inputs = [Rows(ids, "a"), Rows(ids[:, :7], "b"), Rows(ids[:1, :1], "b")]
    several = []
    for mesh, batch_size in [(ONE, 5), (OVER_CP, 3)]:
        found = measured(scorer("qwen3", mesh, batch_size), inputs, 12, stride=8)
        parts = {**found.by_source(), **found.by_length()}
        counts = {key: (part.documents, part.tokens, part.num_bytes) for key, part in parts.items()}
        several.append((counts, [part.nats for part in parts.values()]))
    (counts, losses), (other_counts, other_losses) = several
    assert counts == other_counts
    assert losses == pytest.approx(other_losses, rel=1e-6)
    assert found.by_length()[1].tokens == 0
    assert sum(part.documents for part in found.by_source().values()) == found.whole().documents


@pytest.mark.wide
def test_overlapping_windows_have_the_loss_of_each_window():
    """The loss of each window by itself, from the model's whole logits."""
    ids = hf_reference.load("llama_gqa")["input_ids"][:2].astype(np.int32)
    logits_of = nnx.jit(lambda model, ids: model(ids))
    model = jaxtp.load_hf(FOLDER / "llama_gqa")
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
        assert found.whole().nats == pytest.approx(total, rel=1e-6)


def test_documents_without_a_token_to_predict_are_refused():
    with pytest.raises(InputError, match="no document has more than one"):
        measured(scorer("qwen3", ONE), [Rows(np.zeros((3, 1), np.int32))], 8)


def test_a_loss_that_is_not_finite_is_an_error():
    spoilt = scorer("qwen3", ONE, norm=np.nan)
    with pytest.raises(NumericsError, match="rows: the loss of a token is not finite"):
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


def test_numbers_of_totals():
    numbers = Totals(
        documents=2, tokens=4, num_bytes=8, nats=8 * np.log(2), num_correct=1
    ).numbers()
    assert [numbers[name] for name in ("perplexity", "bits_per_byte", "accuracy")] == pytest.approx(
        [4, 1, 0.25]
    )
    assert Totals(tokens=1, nats=1e4).numbers()["perplexity"] is None, "it overflows"
    assert Totals(tokens=1, nats=1.0).numbers()["bits_per_byte"] is None
    assert [power_of_two(number) for number in (0, 1, 2, 3, 4, 1023, 1024)] == [
        0,
        1,
        2,
        2,
        4,
        512,
        1024,
    ]
