import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtp.data.documents import InMemory
from jaxtp.data.packing import LongDocumentError, Packed, best_fit
from jaxtp.data.rows import Concatenated, TokenError

VOCAB = 2**20
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)
SOME = [7, 2, 9, 1, 3, 3, 3, 1, 25]


def documents(lengths, prompts=None):
    """Every token is another one."""
    tokens = np.arange(sum(lengths), dtype=np.uint32)
    return InMemory(tokens, np.array(lengths), "test", None if prompts is None else np.array(prompts))


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
    ends = set(np.cumsum(lengths) - 1)
    labels = []
    for row in packed:
        used = row["segments"] > 0
        assert np.all(np.diff(np.flatnonzero(used)) == 1), "padding comes last"
        assert not row["inputs"][~used].any()
        assert np.all(row["labels"][~used] == -100)
        for tokens, following in pieces(row):
            np.testing.assert_array_equal(following, np.where(np.isin(tokens, list(ends)), -100, tokens + 1))
            labels += [label for label in following if label != -100]
    every = set(range(sum(lengths)))
    assert sorted(labels) == sorted(every - {0} - {end + 1 for end in ends})
    inputs = inputs_of(packed)
    assert len(inputs) == len(set(inputs))
    # A row without a label has but the last tokens of documents.
    left_out = every - set(inputs)
    assert left_out <= ends
    assert packed.num_unlabelled == -(-len(left_out) // length)
    if len(packed):
        assert packed.padding == pytest.approx(1 - len(inputs) / (len(packed) * length))
    assert packed.num_split == sum(size > length for size in lengths)


@given(LENGTHS, st.integers(1, 50))
@settings(deadline=None)
def test_a_document_that_fits_is_never_cut(lengths, length):
    begins = np.cumsum([0, *lengths[:-1]]).tolist()
    found = {int(tokens[0]): len(tokens) for row in pack(lengths, length) for tokens, _ in pieces(row)}
    # A document of one token may be left out.
    whole = {begin: size for begin, size in zip(begins, lengths, strict=True) if size <= length}
    assert {begin: found.get(begin, 1) for begin in whole} == whole


@given(LENGTHS, st.integers(1, 50))
@settings(deadline=None)
def test_concatenated_rows_hold_every_token_once(lengths, length):
    rows = Concatenated(documents(lengths), length, VOCAB)
    total = sum(lengths)
    assert rows.num_unlabelled == (total % length == 1 or length == 1)
    none = [np.zeros(0, np.int32)]
    inputs = np.concatenate([*none, *(row["inputs"] for row in rows)])
    labels = np.concatenate([*none, *(row["labels"] for row in rows)])
    kept = total - rows.num_unlabelled
    assert inputs[:kept].tolist() == list(range(kept))
    assert labels[: total - 1].tolist() == list(range(1, total))
    assert np.all(labels[total - 1 :] == -100)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=40))
@settings(deadline=None)
def test_best_fit_places_all_and_wastes_less_than_half(histogram):
    """Best fit decreasing needs at most 11/9 of the fewest rows, and one more."""
    room = len(histogram) - 1
    histogram = np.array(histogram)
    rows = best_fit(histogram, room)
    placed = np.zeros(room + 1, int)
    for pattern, repeats in rows:
        assert repeats > 0
        assert 0 < sum(pattern) <= room
        np.add.at(placed, list(pattern), repeats)
    assert placed[1:].tolist() == histogram[1:].tolist()
    least = -(-int(np.dot(histogram, np.arange(room + 1))) // room)
    assert sum(repeats for _, repeats in rows) <= 2 * least


def test_best_fit_is_the_textbook_s_one_document_at_a_time():
    random = np.random.default_rng(0)
    for _ in range(50):
        room = int(random.integers(2, 30))
        sizes = random.integers(1, room + 1, 200)
        bins = []
        for size in sorted(sizes, reverse=True):
            fitting = [i for i, filled in enumerate(bins) if filled + size <= room]
            best = max(fitting, key=lambda i: bins[i], default=None)
            if best is None:
                bins.append(size)
            else:
                bins[best] += size
        rows = best_fit(np.bincount(sizes, minlength=room + 1), room)
        assert sorted(sum(pattern) for pattern, repeats in rows for _ in range(repeats)) == sorted(bins)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=60), st.integers(1, 50))
@settings(deadline=None)
def test_prompts_are_no_labels_and_rows_without_a_label_are_left_out(documents, length):
    lengths = [size for size, _ in documents]
    prompts = [min(prompt, size) for size, prompt in documents]
    found = []
    for row in pack(lengths, length, prompts):
        has_label = row["labels"] != -100
        assert has_label.any()
        np.testing.assert_array_equal(row["labels"][has_label], row["inputs"][has_label] + 1)
        found += row["labels"][has_label].tolist()
    firsts = np.cumsum([0, *lengths[:-1]])
    wanted = [range(at + max(cut, 1), at + size) for at, size, cut in zip(firsts, lengths, prompts, strict=True)]
    assert sorted(found) == [label for each in wanted for label in each]


@pytest.mark.parametrize("block", [2, 2**17])
def test_rows_that_are_left_out_are_counted_and_change_the_plan(monkeypatch, block):
    monkeypatch.setattr("jaxtp.data.packing.BLOCK", block)
    lengths = [10, 10, 25, 10]
    packed = pack(lengths, prompts=[10, 9, 22, 10])
    assert [row["inputs"][0].tolist() for row in packed] == [10, 40]
    assert packed.num_unlabelled == 4
    assert packed.padding == pytest.approx(1 - 15 / 20)
    assert packed.identity != pack([10, 5], prompts=[9, 2]).identity
    with_labels = pack(lengths, prompts=[2, 2, 2, 2])
    assert (with_labels.num_unlabelled, len(with_labels)) == (0, 6)
    assert with_labels.identity == pack(lengths).identity
    empty = pack([4, 5], prompts=[4, 5])
    assert (len(empty), empty.num_unlabelled) == (0, 1)


def test_long_documents_are_cut_left_out_or_refused():
    lengths = [3, 12, 5, 30]
    assert pack(lengths).num_split == 2
    dropped = pack(lengths, long="drop")
    assert inputs_of(dropped) == [0, 1, 2, 15, 16, 17, 18, 19]
    assert (dropped.num_dropped, len(dropped)) == (2, 1)
    with pytest.raises(LongDocumentError, match=r"test, document 1: 12 tokens .* data.sequence_length=10; --data"):
        pack(lengths, long="stop")


@pytest.mark.parametrize("kind", [Packed, Concatenated])
def test_a_token_beyond_the_vocabulary_is_named_with_its_place(kind):
    with pytest.raises(TokenError, match=r"test, document 2: token 1[234] is beyond model.vocab_size=12"):
        list(kind(documents([5, 5, 5]), 4, 12))


def test_blocks_are_packed_among_themselves(monkeypatch):
    monkeypatch.setattr("jaxtp.data.packing.BLOCK", 4)
    packed = pack(SOME[:-1])
    assert inputs_of(packed) == list(range(29))
    assert [len(list(pieces(row))) for row in packed] == [1, 3, 4]


def test_where_every_document_is_left_out_the_plan_is_empty():
    alone = pack(SOME, 1, long="drop")
    assert (len(alone), alone.num_unlabelled) == (0, 2)
    assert len(pack([5, 6], 1, long="drop")) == 0


def test_the_identity_follows_from_the_plan(monkeypatch):
    def first_fit(histogram, room):
        return [((size,), int(count)) for size, count in enumerate(histogram) if count and size]

    identity = pack(SOME).identity
    in_checkpoints_of_0_1 = "b668c0f71ccabe30419d0561977f11be8d1a59e67a0501ad7f9dc5c7b4b25971"
    assert identity == pack(SOME).identity == in_checkpoints_of_0_1
    monkeypatch.setattr("jaxtp.data.packing.best_fit", first_fit)
    assert pack(SOME).identity != identity
