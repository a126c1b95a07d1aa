"""What an evaluation reads: every held-out row once, whatever the batch size, the sources or the
processes.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support import local_batches

from jaxtp.data.corpus import BYTE_TOKENIZER, Corpus, Source
from jaxtp.data.documents import InMemory
from jaxtp.data.mixture import validation_samples
from jaxtp.data.samples import Data, RowSettings, make_rows

T = 4


def documents(first, count):
    """Each a row of its own, told by its tokens."""
    return InMemory(
        np.arange(first, first + T * count, dtype=np.uint16), np.full(count, T), f"from {first}"
    )


def rows(first, count, packing="documents"):
    return make_rows(documents(first, count), RowSettings(T, 2**16, packing))


def firsts(samples):
    """The first token of each row that counts."""
    read = [samples[index] for index in range(len(samples))]
    return [int(row["inputs"][0]) for row in read if (row["labels"] >= 0).any()]


@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from([0.1, 1.0, 7.0])), min_size=1, max_size=3
    ),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(["documents", "concatenated"]),
)
@settings(deadline=None, max_examples=6)
def test_each_row_once_and_no_more_batches_than_there_are_rows_for(sources, batches, size, packing):
    made = [rows(1000 * i, count, packing) for i, (count, _) in enumerate(sources)]
    weights = [weight for _, weight in sources]
    total = sum(count for count, _ in sources)
    samples = validation_samples(made, weights, batches=batches, batch_size=size)
    read = firsts(samples)
    assert len(set(read)) == len(read) == min(total, batches * size)
    assert len(samples) == min(-(-total // size), batches) * size
    everything = validation_samples(made, weights, batches=total, batch_size=1)
    assert firsts(everything)[: len(read)] == read, (
        "the same rows in the same order, whatever the batch size"
    )


@given(st.lists(st.sampled_from([0.5, 1.0, 3.0, 8.0]), min_size=2, max_size=4), st.integers(1, 40))
@settings(deadline=None, max_examples=6)
def test_sources_that_have_rows_left_are_read_by_weight(weights, count):
    made = [rows(1000 * i, 40) for i in range(len(weights))]
    read = np.array(firsts(validation_samples(made, weights, batches=count, batch_size=1))) // 1000
    share = np.asarray(weights) / sum(weights) * count
    assert np.abs(np.bincount(read, minlength=len(weights)) - share).max() < len(weights)


@given(st.integers(1, 20), st.sampled_from([(8, 1), (4, 2), (8, 4)]))
@settings(deadline=None, max_examples=5)
def test_processes_together_read_the_rows_of_one(count, split):
    size, processes = split
    samples = validation_samples([rows(0, count)], [1.0], batches=9, batch_size=size)
    share = size // processes
    steps = len(samples) // size
    parts = [
        list(local_batches(samples, range(p * share, (p + 1) * share), size, 0, steps))
        for p in range(processes)
    ]
    for name in ("inputs", "labels", "segments"):
        joined = [row for step in range(steps) for part in parts for row in part[step][name]]
        assert_array_equal(joined, [samples[index][name] for index in range(len(samples))])


def test_documents_that_several_sources_are_evaluated_on_count_once():
    shared = documents(5000, 6)
    sources = tuple(
        Source(name, 1.0, documents(first, 9), shared)
        for name, first in {"a": 0, "b": 1000}.items()
    )
    data = Data(Corpus(sources, BYTE_TOKENIZER, "test"), RowSettings(T, 2**16), seed=0)
    assert sorted(firsts(data.validation(8, 4))) == list(range(5000, 5000 + 6 * T, T))
