"""Windows and their rows: what is counted, and with how much before it."""

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxtp.data.corpus import InMemory
from jaxtp.data.packing import Packed
from jaxtp.data.rows import IGNORE, SEGMENTS
from jaxtp.tools.evaluate.measure import Window, batches, row_length, rows, spans

LENGTHS = st.integers(1, 40).flatmap(
    lambda length: st.tuples(st.just(length), st.integers(1, length))
)
DOCUMENTS = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def made(lengths):
    """Documents of so many tokens, each token another one."""
    ends = np.cumsum(lengths)
    return [
        np.arange(end - length, end, dtype=np.int32)
        for end, length in zip(ends, lengths, strict=True)
    ]


def windows(documents, length, stride):
    return [
        Window(tokens[begin:end], counted)
        for tokens in documents
        for begin, end, counted in spans(len(tokens), 1, length, stride)
    ]


@given(st.integers(0, 200), st.integers(0, 80), LENGTHS)
def test_every_token_after_the_prompt_counts_once(num_tokens, first, sizes):
    length, stride = sizes
    seen = []
    for begin, end, counted in spans(num_tokens, first, length, stride):
        assert 1 <= counted < end - begin <= length + 1
        for index in range(end - counted, end):
            assert index - begin >= min(index, length - stride + 1), (
                "tokens before it, all or so many"
            )
            seen.append(index)
    assert seen == list(range(max(first, 1), num_tokens))


@given(DOCUMENTS, LENGTHS, st.sampled_from([1, 2, 4]), st.integers(1, 5))
def test_rows_hold_every_window_once(lengths, sizes, multiple, batch_size):
    length = sizes[0] * multiple
    stride = sizes[1]
    found = []
    made_rows = rows(windows(made(lengths), length, stride), length, multiple)
    shapes = set()
    for batch in batches(made_rows, 2 * batch_size, 2):
        assert all(array.shape == batch["inputs"].shape for array in batch.values())
        count, size = batch["inputs"].shape
        assert (count % 2, size % multiple) == (0, 0)
        assert count <= 2 * batch_size
        assert size <= length
        shapes.add((count, size))
        counted = batch["labels"] != IGNORE
        assert np.array_equal(batch["labels"][counted], batch["inputs"][counted] + 1), (
            "what follows in the document"
        )
        found += batch["labels"][counted].tolist()
        inside = (batch[SEGMENTS][:, 1:] == batch[SEGMENTS][:, :-1]) & (batch[SEGMENTS][:, 1:] > 0)
        assert (np.diff(batch["inputs"])[inside] == 1).all(), "a segment is one window"
    assert len(shapes) == len({size for _, size in shapes}), "a program for each length"
    assert sorted(found) == [int(token) for tokens in made(lengths) for token in tokens[1:]]


@given(DOCUMENTS, st.integers(1, 40))
def test_windows_without_overlap_are_what_training_reads(lengths, length):
    """Each label with the tokens before it that it is predicted from."""

    def read(inputs, labels, segments):
        for at in np.flatnonzero(labels != IGNORE).tolist():
            begin = at
            while begin and segments[begin - 1] == segments[at]:
                begin -= 1
            yield int(labels[at]), inputs[begin : at + 1].tolist()

    shorter = [tokens.astype(np.uint8) for tokens in made([min(each, 20) for each in lengths])]
    sizes = np.array([len(tokens) for tokens in shorter], np.int64)
    documents = InMemory(np.concatenate(shorter), sizes, "here")
    trained = [pair for row in Packed(documents, length, 256) for pair in read(*row.values())]
    read_here = windows([tokens.astype(np.int32) for tokens in shorter], length, length)
    with mock.patch("jaxtp.tools.evaluate.measure.POOL_TOKENS", 50):
        ours = [
            pair
            for row in rows(read_here, length)
            for pair in read(row["inputs"], row["labels"], row[SEGMENTS])
        ]
    assert sorted(ours) == sorted(trained)


def test_rows_have_few_lengths():
    lengths = {row_length(size, 999, 3) for size in range(1, 1000)}
    assert len(lengths) == 5
    assert not any(length % 3 for length in lengths)
    assert row_length(7, 10) == 10
