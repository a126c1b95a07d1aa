import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtp.data.documents import InMemory
from jaxtp.data.packing import LongDocumentError, Packed, best_fit
from jaxtp.data.rows import Concatenated, TokenError

VOCAB = 2**20
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def documents(lengths, first=0):
    """Every token is another one."""
    return InMemory(np.arange(first, first + sum(lengths), dtype=np.uint32), np.array(lengths), "test")


def with_prompts(lengths, prompts):
    return InMemory(np.arange(sum(lengths), dtype=np.uint32), np.array(lengths), "test", np.array(prompts))


def pieces(row):
    """The documents in a row: inputs and labels of each."""
    for segment in range(1, row["segments"].max() + 1):
        where = row["segments"] == segment
        yield row["inputs"][where], row["labels"][where]


@given(LENGTHS, st.integers(1, 50))
@settings(deadline=None)
def test_every_token_is_an_input_once_and_a_label_once(lengths, length):
    source = documents(lengths)
    packed = Packed(source, length, VOCAB)
    ends = set(np.cumsum(lengths) - 1)
    inputs, labels = [], []
    for row in packed:
        used = row["segments"] > 0
        assert np.all(np.diff(np.flatnonzero(used)) == 1), "padding comes last"
        assert not row["inputs"][~used].any()
        assert np.all(row["labels"][~used] == -100)
        for tokens, following in pieces(row):
            inputs += tokens.tolist()
            for token, label in zip(tokens, following, strict=True):
                assert label == (-100 if token in ends else token + 1)
            labels += [label for label in following if label != -100]
    begins = {0, *np.cumsum(lengths[:-1])} if len(lengths) > 1 else {0}
    assert sorted(labels) == sorted(set(range(sum(lengths))) - begins)
    assert len(inputs) == len(set(inputs))
    # A row without a label has but the last tokens of documents.
    left_out = set(range(sum(lengths))) - set(inputs)
    assert left_out <= ends
    assert packed.num_unlabelled == -(-len(left_out) // length)
    if len(packed):
        assert packed.padding == pytest.approx(1 - len(inputs) / (len(packed) * length))
    assert packed.num_split == sum(size > length for size in lengths)


@given(LENGTHS, st.integers(1, 50))
@settings(deadline=None)
def test_a_document_that_fits_is_never_cut(lengths, length):
    source = documents(lengths)
    begins = np.cumsum([0, *lengths[:-1]])
    whole = {int(begin): size for begin, size in zip(begins, lengths, strict=True) if size <= length}
    found = {int(tokens[0]): len(tokens) for row in Packed(source, length, VOCAB) for tokens, _ in pieces(row)}
    whole = {begin: size for begin, size in whole.items() if size > 1 or begin in found}  # one token may be left out
    assert {begin: found[begin] for begin in whole} == whole


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


def test_prompts_are_no_labels():
    source = with_prompts([10] * 10, [index % 5 for index in range(10)])
    for row in Packed(source, 7, VOCAB):  # documents of 10 are cut after 7
        for tokens, labels in pieces(row):
            for token, label in zip(tokens, labels, strict=True):
                document, position = divmod(int(token), 10)
                counts = position < 9 and position + 1 >= source.prompt_length(document)
                assert label == (token + 1 if counts else -100)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=60), st.integers(1, 50))
@settings(deadline=None)
def test_rows_without_a_label_are_left_out_and_no_label_is_lost(documents, length):
    lengths = [size for size, _ in documents]
    prompts = [min(prompt, size) for size, prompt in documents]
    packed = Packed(with_prompts(lengths, prompts), length, VOCAB)
    labels = [row["labels"][row["labels"] != -100] for row in packed]
    assert all(len(each) for each in labels)
    firsts = np.cumsum([0, *lengths[:-1]])
    wanted = [range(at + max(cut, 1), at + size) for at, size, cut in zip(firsts, lengths, prompts, strict=True)]
    assert sorted(label for each in labels for label in each.tolist()) == [label for each in wanted for label in each]


@pytest.mark.parametrize("block", [2, 2**17])
def test_rows_that_are_left_out_are_counted_and_change_the_plan(monkeypatch, block):
    monkeypatch.setattr("jaxtp.data.packing.BLOCK", block)
    packed = Packed(with_prompts([10, 10, 25, 10], [10, 9, 22, 10]), 10, VOCAB)
    assert [row["inputs"][0].tolist() for row in packed] == [10, 40]
    assert packed.num_unlabelled == 4
    assert packed.padding == pytest.approx(1 - 15 / 20)
    assert packed.identity != Packed(with_prompts([10, 5], [9, 2]), 10, VOCAB).identity
    with_labels = Packed(with_prompts([10, 10, 25, 10], [2, 2, 2, 2]), 10, VOCAB)
    assert (with_labels.num_unlabelled, len(with_labels)) == (0, 6)
    assert with_labels.identity == Packed(documents([10, 10, 25, 10]), 10, VOCAB).identity


def test_documents_without_a_label_give_no_rows():
    packed = Packed(with_prompts([4, 5], [4, 5]), 10, VOCAB)
    assert (len(packed), packed.num_unlabelled) == (0, 1)


def test_long_documents():
    source = documents([3, 12, 5, 30])
    assert Packed(source, 10, VOCAB).num_split == 2
    dropped = Packed(source, 10, VOCAB, long="drop")
    assert sorted(token for row in dropped for tokens, _ in pieces(row) for token in tokens) == [
        0,
        1,
        2,
        *range(15, 20),
    ]
    assert (dropped.num_dropped, len(dropped)) == (2, 1)
    with pytest.raises(
        LongDocumentError, match=r"test, document 1: 12 tokens are more than data.sequence_length=10; --data"
    ):
        Packed(source, 10, VOCAB, long="stop")


@pytest.mark.parametrize("kind", [Packed, Concatenated])
def test_a_token_beyond_the_vocabulary_is_named_with_its_place(kind):
    rows = kind(documents([5, 5, 5]), 4, 12)
    with pytest.raises(TokenError, match=r"test, document 2: token 1[234] is beyond model.vocab_size=12"):
        list(rows)


def test_blocks_are_packed_among_themselves(monkeypatch):
    monkeypatch.setattr("jaxtp.data.packing.BLOCK", 4)
    lengths = [7, 2, 9, 1, 3, 3, 3, 1]
    packed = Packed(documents(lengths), 10, VOCAB)
    assert sorted(int(token) for row in packed for tokens, _ in pieces(row) for token in tokens) == list(range(29))
    assert [len(list(pieces(row))) for row in packed] == [1, 3, 4]


SOME = [7, 2, 9, 1, 3, 3, 3, 1, 25]


def test_where_every_document_is_left_out_the_plan_is_empty():
    alone = Packed(documents(SOME), 1, VOCAB, "drop")
    assert (len(alone), alone.num_unlabelled) == (0, 2)
    assert len(Packed(documents([5, 6]), 1, VOCAB, "drop")) == 0


def test_the_identity_is_that_of_the_plan(monkeypatch):
    def first_fit(histogram, room):
        return [((size,), int(count)) for size, count in enumerate(histogram) if count and size]

    ours = Packed(documents(SOME), 10, VOCAB).identity
    assert Packed(documents(SOME), 10, VOCAB).identity == ours
    monkeypatch.setattr("jaxtp.data.packing.best_fit", first_fit)
    assert Packed(documents(SOME), 10, VOCAB).identity != ours


def test_the_hash_of_a_plan_is_the_one_that_runs_of_0_1_have_in_their_checkpoints():
    expected = "b668c0f71ccabe30419d0561977f11be8d1a59e67a0501ad7f9dc5c7b4b25971"
    assert Packed(documents(SOME), 10, VOCAB).identity == expected
