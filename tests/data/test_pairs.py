"""Rows of preference data: each pair in one row, whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from jaxtp.data.corpus import CorpusError
from jaxtp.data.documents import InMemory
from jaxtp.data.packing import LongDocumentError, Packed
from jaxtp.data.rows import IGNORE
from jaxtp.data.samples import RowSettings, make_rows

VOCAB = 2**20
PAIRS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40)


class Pairs(InMemory):
    """Every token is another one."""

    has_pairs = True

    def __init__(self, pairs, prompts=None):
        lengths = np.array(pairs).reshape(-1)
        prompts = np.arange(len(lengths)) // 2 % 5 if prompts is None else np.repeat(prompts, 2)
        super().__init__(np.arange(lengths.sum(), dtype=np.uint32), lengths, "test", prompts)


def documents_in(row):
    """Returns where the documents of a row are: chosen, rejected, chosen, ..."""
    numbers = range(1, row["pairs"].max() + 1)
    return [row["pairs"] == sign * number for number in numbers for sign in (1, -1)]


def expected_labels(source, document):
    labels = np.append(source.document(document)[1:].astype(np.int64), IGNORE)
    labels[: max(source.prompt_length(document) - 1, 0)] = IGNORE
    return labels


@given(PAIRS, st.integers(60, 90))
@settings(deadline=None)
def test_each_pair_is_whole_in_one_row_and_prompts_have_no_loss(pairs, length):
    source = Pairs(pairs)
    first = np.cumsum([0, *np.array(pairs).reshape(-1)]).tolist()
    packed = Packed(source, length, VOCAB)
    found = []
    for row in packed:
        used = row["segments"] > 0
        assert used[: used.sum()].all()
        assert not row["inputs"][~used].any()
        assert (row["labels"][~used] == IGNORE).all()
        for segment, where in enumerate(documents_in(row), 1):
            assert_array_equal(where, row["segments"] == segment)
            document = first.index(row["inputs"][where][0])
            assert_array_equal(row["inputs"][where], source.document(document))
            assert_array_equal(row["labels"][where], expected_labels(source, document))
            found.append(document)
    assert [document + 1 for document in found[::2]] == found[1::2]
    assert not any(document % 2 for document in found[::2])
    left_out = set(range(2 * len(pairs))).difference(found)
    assert len(found) + len(left_out) == 2 * len(pairs)
    assert all((expected_labels(source, document) == IGNORE).all() for document in left_out)
    if found:
        placed = sum(len(source.document(document)) for document in found)
        assert packed.padding == pytest.approx(1 - placed / (len(packed) * length))


def test_blocks_of_pairs_are_packed_among_themselves(monkeypatch):
    """Of two pairs: one block more would change the rows, and so the identity, of a run that is
    there.
    """
    monkeypatch.setattr("jaxtp.data.packing.BLOCK", 2)
    packed = Packed(Pairs([(3, 3), (3, 3), (2, 2)], prompts=[0] * 3), 10, VOCAB)
    assert [int(row["pairs"].max()) for row in packed] == [1, 1, 1]


def test_a_longer_pair_is_left_out_or_refused(monkeypatch):
    monkeypatch.setattr("jaxtp.data.packing.BLOCK", 2)
    source = Pairs([(3, 3), (8, 3), (5, 5), (1, 9), (30, 1)])
    dropped = Packed(source, 10, VOCAB, "drop")
    assert (len(dropped), dropped.num_dropped, dropped.num_split) == (3, 2, 0)
    assert sorted(int(row["inputs"][0]) for row in dropped) == [0, 17, 27]
    for long in ("split", "stop"):
        with pytest.raises(
            LongDocumentError, match=r"document 2: chosen .* 11 tokens, .*length=10.* drop leaves"
        ):
            Packed(source, 10, VOCAB, long)


def test_a_row_of_pairs_without_a_label_is_left_out(monkeypatch):
    monkeypatch.setattr("jaxtp.data.packing.BLOCK", 2)
    source = Pairs([(4, 4), (4, 6), (5, 5), (5, 5)], prompts=[4, 4, 5, 3])
    packed = Packed(source, 10, VOCAB)
    assert [int(row["inputs"][0]) for row in packed] == [8, 28]
    assert packed.num_unlabelled == 2


def test_concatenated_rows_are_refused():
    with pytest.raises(
        CorpusError, match=r"concatenated does not know .*; pairs need --data.packing documents"
    ):
        make_rows(Pairs([(2, 2)]), RowSettings(4, VOCAB, "concatenated"))
