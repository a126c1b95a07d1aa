from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from jaxtp.data.documents import InMemory
from jaxtp.data.packing import LongDocumentError, Packed, best_fit
from jaxtp.data.rows import IGNORE, Concatenated, TokenError

VOCAB = 2**20
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)
SOME = [7, 2, 9, 1, 3, 3, 3, 1, 25]


def documents(lengths, prompts=None):
    """Every token is another one."""
    tokens = np.arange(sum(lengths), dtype=np.uint32)
    return InMemory(
        tokens, np.array(lengths), "test", None if prompts is None else np.array(prompts)
    )


def pack(lengths, length=10, prompts=None, long="split"):
    return Packed(documents(lengths, prompts), length, VOCAB, long)


def inputs_of(packed):
    return sorted(int(token) for row in packed for tokens, _ in pieces(row) for token in tokens)


def pieces(row):
    """The documents in a row: inputs and labels of each."""
    for segment in range(1, row["segments"].max() + 1):
        where = row["segments"] == segment
        yield row["inputs"][where], row["labels"][where]


@given(LENGTHS, st.integers(1, 50))
@settings(deadline=None)
def test_every_token_is_an_input_once_and_a_label_once(lengths, length):
    packed = pack(lengths, length)
    ends = np.cumsum(lengths) - 1
    labels = []
    for row in packed:
        used = row["segments"] > 0
        assert used[: used.sum()].all(), "padding comes last"
        assert not row["inputs"][~used].any()
        assert (row["labels"][~used] == IGNORE).all()
        for tokens, following in pieces(row):
            assert_array_equal(following, np.where(np.isin(tokens, ends), IGNORE, tokens + 1))
            labels += following[following != IGNORE].tolist()
    every = set(range(sum(lengths)))
    assert sorted(labels) == sorted(every - {0, *(ends + 1)})
    inputs = inputs_of(packed)
    # A row without a label has but the last tokens of documents.
    left_out = sorted(every.difference(inputs))
    assert sorted(inputs + left_out) == sorted(every)
    assert np.isin(left_out, ends).all()
    assert packed.num_unlabelled == -(-len(left_out) // length)
    if inputs:
        assert packed.padding == pytest.approx(1 - len(inputs) / (len(packed) * length))
    assert packed.num_split == sum(size > length for size in lengths)


@given(LENGTHS, st.integers(1, 50))
@settings(deadline=None)
def test_a_document_that_fits_is_never_cut(lengths, length):
    found = {
        int(tokens[0]): len(tokens) for row in pack(lengths, length) for tokens, _ in pieces(row)
    }
    start = 0
    for size in lengths:
        # A document of one token may be left out.
        assert size > length or found.get(start, 1) == size
        start += size


@given(LENGTHS, st.integers(1, 50))
@settings(deadline=None)
def test_concatenated_rows_hold_every_token_once(lengths, length):
    rows = Concatenated(documents(lengths), length, VOCAB)
    total = sum(lengths)
    assert rows.num_unlabelled == (total % length == 1 or length == 1)
    kept = total - rows.num_unlabelled
    inputs = list(chain.from_iterable(row["inputs"].tolist() for row in rows))
    labels = list(chain.from_iterable(row["labels"].tolist() for row in rows))
    assert inputs[:kept] == list(range(kept))
    assert labels == [*range(1, total), *[IGNORE] * (len(labels) - total + 1)]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=200), st.integers(30, 40))
@settings(deadline=None)
def test_best_fit_is_the_textbook_s_one_document_at_a_time(sizes, room):
    """Best fit decreasing needs at most 11/9 of the fewest rows, and one more."""
    bins = []
    for size in sorted(sizes, reverse=True):
        fitting = [i for i, filled in enumerate(bins) if filled + size <= room]
        if fitting:
            bins[max(fitting, key=lambda i: bins[i])] += size
        else:
            bins.append(size)
    rows = []
    for pattern, repeats in best_fit(np.bincount(sizes, minlength=room + 1), room):
        rows += [pattern] * repeats
    assert sorted(map(sum, rows)) == sorted(bins)
    assert sorted(chain.from_iterable(rows)) == sorted(sizes)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=60),
    st.integers(1, 50),
)
@settings(deadline=None)
def test_prompts_are_no_labels_and_rows_without_a_label_are_left_out(documents, length):
    lengths = [size for size, _ in documents]
    prompts = [min(prompt, size) for size, prompt in documents]
    found = []
    for row in pack(lengths, length, prompts):
        has_label = row["labels"] != IGNORE
        assert has_label.any()
        assert_array_equal(row["labels"][has_label], row["inputs"][has_label] + 1)
        found += row["labels"][has_label].tolist()
    wanted = []
    start = 0
    for size, prompt in zip(lengths, prompts, strict=True):
        wanted += range(start + max(prompt, 1), start + size)
        start += size
    assert sorted(found) == wanted


@pytest.mark.parametrize("block", [2, 2**17])
def test_rows_that_are_left_out_are_counted_and_change_the_plan(monkeypatch, block):
    monkeypatch.setattr("jaxtp.data.packing.BLOCK", block)
    lengths = [10, 10, 25, 10]
    packed = pack(lengths, prompts=[10, 9, 22, 10])
    assert [row["inputs"][0].tolist() for row in packed] == [10, 40]
    assert packed.num_unlabelled == 4
    assert packed.padding == pytest.approx(1 - 15 / 20)
    with_labels = pack(lengths, prompts=[2, 2, 2, 2])
    assert (with_labels.num_unlabelled, len(with_labels)) == (0, 6)
    assert with_labels.identity == pack(lengths).identity != packed.identity


def test_long_documents_are_cut_left_out_or_refused():
    lengths = [3, 12, 5, 30]
    assert pack(lengths).num_split == 2
    dropped = pack(lengths, long="drop")
    assert inputs_of(dropped) == [0, 1, 2, 15, 16, 17, 18, 19]
    assert (dropped.num_dropped, len(dropped)) == (2, 1)
    with pytest.raises(
        LongDocumentError, match=r"test, document 1: 12 tokens .* data.sequence_length=10; --data"
    ):
        pack(lengths, long="stop")


@pytest.mark.parametrize("kind", [Packed, Concatenated])
def test_a_token_beyond_the_vocabulary_is_named_with_its_place(kind):
    with pytest.raises(
        TokenError, match=r"test, document 2: token 1[234] is beyond model.vocab_size=12"
    ):
        list(kind(documents([5, 5, 5]), 4, 12))


def test_blocks_are_packed_among_themselves(monkeypatch):
    monkeypatch.setattr("jaxtp.data.packing.BLOCK", 4)
    packed = pack(SOME[:-1])
    assert inputs_of(packed) == list(range(29))
    assert [len(list(pieces(row))) for row in packed] == [1, 3, 4]


def test_where_every_document_is_left_out_the_plan_is_empty():
    for plan in (
        pack(SOME, 1, long="drop"),
        pack([5, 6], 1, long="drop"),
        pack([4, 5], prompts=[4, 5]),
    ):
        assert len(plan) == 0


def test_the_identity_follows_from_the_plan(monkeypatch):
    def alone(histogram, room):
        return [((size,), int(count)) for size, count in enumerate(histogram) if count and size]

    identity = pack(SOME).identity
    in_checkpoints_of_0_1 = "b668c0f71ccabe30419d0561977f11be8d1a59e67a0501ad7f9dc5c7b4b25971"
    assert identity == pack(SOME).identity == in_checkpoints_of_0_1
    monkeypatch.setattr("jaxtp.data.packing.best_fit", alone)
    assert pack(SOME).identity != identity
