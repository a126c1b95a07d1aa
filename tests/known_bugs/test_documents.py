"""What other systems made of documents and conversations: several in a row, their ends, labels
and tokens.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpora import (
    BEGIN,
    CHAT_TOKENIZER,
    conversation,
    jsonl,
    prepared,
    spelled,
    write_chat_tokenizer,
)
from deltas import long_memory
from flax import nnx
from support import new_decoder, random_weights, without_mesh
from variants import small_model

from jaxtp.checkpoint.logical import named_variables
from jaxtp.data.documents import InMemory
from jaxtp.data.packing import Packed
from jaxtp.data.samples import RowSettings, make_rows
from jaxtp.guards.self_check import relative_errors
from jaxtp.layers import gated_delta
from jaxtp.layers.kernels import select as kernels
from jaxtp.layers.positions import segment_mask, segment_positions
from jaxtp.models import decoder
from jaxtp.tools.evaluate.inputs import Document
from jaxtp.tools.evaluate.measure import Scorer, measure

T = 12
V = 19
MODEL = small_model(
    vocab_size=V, num_heads=2, head_dim=8, d_ff=8, learned_positions=T, rope_theta=None
)
WRONG = 1e-3


@cache
def model(config=MODEL):
    build = lambda: new_decoder(config)
    return nnx.merge(*without_mesh(build, long_memory(random_weights(build))))


def row_of(*lengths):
    """Documents in one row, and its segments; every token is another one."""
    row = Packed(
        InMemory(np.arange(sum(lengths), dtype=np.uint8), np.array(lengths), "test"), T, V
    )[0]
    return row["inputs"], row["segments"]


def document_errors(config=MODEL):
    """How far the logits of each document in a row are from those of the document alone, at the
    beginning of a row.
    """
    inputs, segments = row_of(5, 4, 2)
    rows = [inputs]
    kinds = [segments]
    for segment in (1, 2, 3):
        own = inputs[segments == segment]
        rows.append(np.pad(own, (0, T - len(own))))
        kinds.append(np.arange(T) < len(own))
    graph, state = nnx.split(model(config))
    run = jax.jit(lambda state, ids, segments: nnx.merge(graph, state)(ids, segments=segments))
    packed, *alone = np.asarray(run(state, np.stack(rows), np.stack(kinds)))
    pairs = [(packed[segments == i + 1], one[kinds[i + 1]]) for i, one in enumerate(alone)]
    return [np.abs(in_row - one).max() for in_row, one in pairs]


@pytest.mark.wide
def test_nanovlm_201_positions_begin_anew_with_each_document(monkeypatch):
    """https://github.com/huggingface/nanoVLM/issues/201: the documents of a row shared its
    positions, so that all but the first stood where they never do alone. Here positions are those
    in the document.
    """
    assert max(document_errors()) < 1e-5
    along = lambda segments: jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    monkeypatch.setattr(decoder, "segment_positions", along)
    first, *others = document_errors()
    assert first < 1e-5
    assert min(others) > WRONG


def no_documents(segments):
    """The mask of rows without any."""
    return jnp.ones((*segments.shape, segments.shape[1]), bool)[:, None]


def test_nanovlm_204_a_document_does_not_see_the_one_before_it(monkeypatch):
    """https://github.com/huggingface/nanoVLM/pull/204: new positions alone did not keep a document
    from attending to the one before it in its row. Here attention ends where the document begins.
    """
    assert max(document_errors()) < 1e-5
    monkeypatch.setattr(kernels, "segment_mask", no_documents)
    first, *others = document_errors()
    assert first < 1e-5
    assert min(others) > WRONG


DELTA = replace(
    MODEL,
    learned_positions=None,
    delta_value_heads=2,
    delta_key_heads=2,
    delta_key_dim=8,
    delta_value_dim=8,
)


@pytest.mark.wide
def test_torchtitan_3984_a_state_begins_anew_with_each_document(monkeypatch):
    """https://github.com/pytorch/torchtitan/pull/3984: the mask of documents reached the attention
    layers only; states and convolutions of Gated DeltaNet ran across documents. Here both begin
    anew, each by itself.
    """
    assert max(document_errors(DELTA)) < 1e-5
    rule = gated_delta.delta_rule
    heads = gated_delta.convolved_heads
    planted = {
        "delta_rule": lambda tokens, *state, **others: rule(
            tokens._replace(starts=None), *state, **others
        ),
        "convolved_heads": lambda key_dim, value_dim, tokens, positions, *taps: heads(
            key_dim, value_dim, tokens, jnp.broadcast_to(jnp.arange(T), positions.shape), *taps
        ),
    }
    for name, wrong in planted.items():
        with monkeypatch.context() as patch:
            patch.setattr(gated_delta, name, wrong)
            first, *others = document_errors(DELTA)
        assert first < 1e-5
        assert min(others) > WRONG


@pytest.mark.wide
def test_nemo_rl_1672_sinks_are_trained_where_documents_are_packed(monkeypatch):
    """https://github.com/NVIDIA-NeMo/RL/issues/1672: attention to packed documents took the sinks
    and did not use them, so that they were never trained. Here they are, and the check of a run's
    kernels looks at their gradient.
    """
    config = replace(MODEL, attention_sinks=True, rope_theta=2.0, learned_positions=None)
    graph, state = nnx.split(model(config))
    ids = np.arange(T, dtype=np.int32)[None]

    def gradient():
        loss = lambda state: jnp.sum(
            jnp.sin(nnx.merge(graph, state)(ids, segments=np.ones_like(ids)))
        )
        return named_variables(jax.jit(jax.grad(loss))(state))["blocks.attention.sinks"][...]

    def worst(run):
        use = kernels.Use(head_dim=8, sinks=True, dtype="float32", length=32, packed=True)
        return max(relative_errors(run, use, 2, 1))

    right = kernels.KERNELS["xla"]

    def dropped(q, k, v, segments_BT, *, sinks, **settings):
        return right.run(q, k, v, segments_BT, **settings)

    assert np.all(gradient() != 0)
    assert worst(kernels.KERNELS["blockwise"].run) < 1e-5
    assert worst(dropped) > WRONG
    monkeypatch.setitem(kernels.KERNELS, "xla", replace(right, run=dropped))
    assert np.all(gradient() == 0)


def test_ms_swift_9904_documents_of_one_token_are_documents():
    """https://github.com/modelscope/ms-swift/pull/9904: documents were told apart where positions
    fall, so that one of one token was joined with the next. Here neighbours differ in the number of
    their segment.
    """
    inputs, segments = row_of(1, 1, 3, 1)
    segments = segments[None]
    positions = np.asarray(segment_positions(jnp.asarray(segments)))[0]
    used = segments[0] > 0
    begins = np.flatnonzero(used & (positions == 0))
    assert sorted(np.diff([*begins, used.sum()])) == [1, 1, 1, 3]
    assert used.sum() - np.sum(np.diff(positions[used]) < 0) - 1 > 3, (
        "where positions fall there are fewer"
    )
    sees = np.asarray(segment_mask(jnp.asarray(segments)))[0, 0]
    assert [int(sees[i][used].sum()) for i in begins] == np.diff([*begins, used.sum()]).tolist()
    assert sorted(inputs[begins].tolist()) == [0, 1, 2, 5]


class Texts:
    """Documents to evaluate."""

    def __init__(self, *texts):
        self.texts = texts
        self.name = "texts"
        self.num_documents = len(texts)

    def documents(self):
        for text in self.texts:
            yield Document(np.array(text, np.int32), 1, len(text))


@cache
def scorer(batch_size):
    return Scorer(model(), batch_size)


def nats(*texts, batch_size=2, score=None):
    return measure(score or scorer(batch_size), [Texts(*texts)], T, T, lambda _: None).nats


SHORT = [3, 1, 4]
LONG = [1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.mark.wide
def test_mlx_lm_1855_a_document_scores_the_same_beside_a_longer_one():
    """https://github.com/ml-explore/mlx-lm/pull/1855: the score of a document that was not the
    longest of its batch had the log-probability of a token of padding in it. Here what fills a row
    has no label.
    """
    apart = nats(SHORT) + nats(LONG)
    assert nats(SHORT, LONG) == pytest.approx(apart, rel=1e-6)
    assert nats([*SHORT, 0], LONG) != pytest.approx(apart, rel=WRONG), "with one token of padding"


def test_levanter_860_documents_score_the_same_packed(monkeypatch):
    """https://github.com/marin-community/levanter/issues/860: the scores of an evaluation fell to
    those of chance where documents were packed into rows. Here they are those of each document
    alone.
    """
    texts = SHORT, [7, 7, 2, 1], LONG, [2, 8]
    apart = sum(nats(text) for text in texts)
    assert nats(*texts) == pytest.approx(apart, rel=1e-6)
    monkeypatch.setattr(kernels, "segment_mask", no_documents)
    assert nats(*texts, score=Scorer(model(), 2)) != pytest.approx(apart, rel=WRONG)


def test_trl_6357_a_document_ends_in_a_label_though_rows_are_filled_with_its_id():
    """https://github.com/huggingface/trl/pull/6357: tokens of padding were told by their id, which
    was that of the end, so that no model learned to stop. Here they are told by their place, and
    the end of a document is a label.
    """
    end = 0
    texts = ([5, 6, 7, 0], [8, 9, 0])
    documents = InMemory(
        np.array([*texts[0], *texts[1]], np.uint8), np.array([len(text) for text in texts]), "test"
    )
    (row,) = make_rows(documents, RowSettings(T, V))
    assert row["inputs"][-1] == end
    assert row["segments"][-1] == 0
    assert np.sum(row["labels"] == end) == len(texts)
    assert np.sum(row["labels"] >= 0) == sum(len(text) - 1 for text in texts)


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    """The documents of a conversation of two answers, whose template begins it, with a tokenizer
    that begins texts.
    """
    folder = tmp_path_factory.mktemp("conversation")
    write_chat_tokenizer(folder)
    rows = jsonl(folder / "a.jsonl", [conversation("why?", "because", "and now?", "no")])
    flags = [f"--tokenizer={folder}", "--messages=messages", "--held-out=0"]
    return prepared(folder / "d", rows, *flags).splits["train"]


def labels_of(documents):
    """What there is loss on, by document."""
    for row in make_rows(documents, RowSettings(64, CHAT_TOKENIZER.get_vocab_size())):
        for segment in range(1, row["segments"].max() + 1):
            labels = row["labels"][row["segments"] == segment]
            yield spelled(labels[labels >= 0])


def test_open_r1_462_a_conversation_begins_once(talk):
    """https://github.com/huggingface/open-r1/pull/462: the template began the text, and then the
    tokenizer did once more. Here a rendered text is read as it is, and other texts begin as the
    tokenizer has it.
    """
    for index in range(talk.num_documents):
        ids = talk.document(index).tolist()
        assert ids.count(BEGIN) == 1
        assert CHAT_TOKENIZER.encode(spelled(ids)).ids.count(BEGIN) == 2, "as it is where both do"


def test_mlx_vlm_970_later_questions_are_no_labels(talk):
    """https://github.com/Blaizzy/mlx-vlm/pull/970: only what comes before the first answer was left
    out of the loss, so that a model was trained on all later questions. Here there is loss on
    answers alone.
    """
    assert sorted(labels_of(talk)) == ["because<|stop|>\n", "no<|stop|>\n"]
    cut = talk.prompt_length(0)
    later = talk.document(talk.num_documents - 1)[cut:]
    assert "and now?" in spelled(later), "as where the first answer alone is looked for"


def test_trl_1623_the_end_of_a_text_is_learned(tmp_path):
    """https://github.com/huggingface/trl/issues/1623: nothing ended the texts that a model was
    tuned on, which then did not stop. Here each document ends in the tokenizer's end token, and
    there is loss on it.
    """
    write_chat_tokenizer(tmp_path)
    jsonl(tmp_path / "a.jsonl", ["one", "and two"])
    ended = {}
    for flags in ((), ("--no-eos",)):
        command = [
            tmp_path / f"d{len(flags)}",
            tmp_path / "a.jsonl",
            f"--tokenizer={tmp_path}",
            "--held-out=0",
            *flags,
        ]
        ended[flags] = sorted(labels_of(prepared(*command).splits["train"]))
    assert ended[()] == ["and two<|end|>", "one<|end|>"]
    assert ended[("--no-eos",)] == ["and two", "one"]
