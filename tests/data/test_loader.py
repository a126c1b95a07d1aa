"""Batches of samples: their order and their division, whatever the mesh, the batch size or the number of processes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxtp
from jaxtp.data.corpus import BYTE_TOKENIZER, Corpus, Source
from jaxtp.data.documents import InMemory
from jaxtp.data.loader import abstract_batch, batches, local_batches
from jaxtp.data.samples import Data, RowSettings, make_rows, shuffled

T = 4
DOCUMENTS = InMemory(np.arange(100, dtype=np.uint8), np.full(25, T), "test")  # 25 rows, each told by its first token


def samples(seed=0, packing="documents"):
    return shuffled([make_rows(DOCUMENTS, RowSettings(T, 256, packing))], [1.0], seed)


def load(mesh=(1, 1, 1), *, start=0, count=10, batch=8, seed=0):
    return list(batches(samples(seed), jaxtp.make_mesh(*mesh), global_batch_size=batch, start=start, count=count))


def first_tokens(loaded):
    return np.concatenate([np.asarray(batch["inputs"])[:, 0] for batch in loaded])


def test_each_epoch_is_every_row_once_in_its_own_order():
    epochs = first_tokens(load(count=25, batch=2)).reshape(2, 25)
    assert all(sorted(epoch) == list(range(0, 100, T)) for epoch in epochs)
    assert list(epochs[0]) != list(epochs[1])


def test_another_seed_is_another_order():
    assert list(first_tokens(load(seed=1))) != list(first_tokens(load(seed=0)))


@pytest.mark.parametrize("mesh", [(1, 1, 8), (2, 2, 2), (8, 1, 1)], ids=str)
def test_the_order_does_not_depend_on_the_mesh(mesh):
    np.testing.assert_array_equal(first_tokens(load(mesh)), first_tokens(load()))


@pytest.mark.parametrize("packed", [True, False])
def test_batches_are_split_as_their_description_says(packed):
    mesh = jaxtp.make_mesh(2, 2, 2)
    source = samples(packing="documents" if packed else "concatenated")
    (batch,) = batches(source, mesh, global_batch_size=8, start=0, count=1)
    described = abstract_batch(mesh, 8, T, packed=packed)
    assert batch.keys() == described.keys()
    for name, expected in described.items():
        assert (batch[name].shape, batch[name].dtype) == (expected.shape, expected.dtype)
        assert batch[name].sharding == expected.sharding
        assert batch[name].addressable_shards[0].data.shape == (2, T)


@st.composite
def corpora(draw):
    """One or two sources whose tokens tell them and their documents apart."""
    sources, first = [], 0
    for name in ("a", "b")[: draw(st.integers(1, 2))]:
        lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=25))
        tokens = np.arange(first, first + sum(lengths), dtype=np.uint16)
        first += sum(lengths)
        documents = InMemory(tokens, np.array(lengths), name)
        sources.append(Source(name, draw(st.sampled_from([0.5, 1.0, 3.0])), documents, documents))
    return Corpus(tuple(sources), BYTE_TOKENIZER, "test")


@given(
    corpora(),
    st.integers(1, 24),
    st.sampled_from(["documents", "concatenated"]),
    st.integers(0, 40),
    st.sampled_from([(8, 1), (4, 2), (8, 4), (8, 8)]),
)
@settings(deadline=None, max_examples=10)
def test_any_batch_size_process_count_and_resumption_point_read_the_same_samples(corpus, length, packing, start, split):
    """Every process reads its own rows; joined, they are the samples from the resumption point on, in order."""
    batch, processes = split  # rows in a batch over all processes, and how many these are
    length = min(length, *(source.train.num_tokens for source in corpus.sources))
    data = Data(corpus, RowSettings(length, 2**16, packing), seed=1)
    expected = [data.train[index] for index in range(start, start + 2 * batch)]
    share = batch // processes
    parts = [
        list(local_batches(data.train, range(p * share, (p + 1) * share), batch, start, 2)) for p in range(processes)
    ]
    joined = [row for step in range(2) for part in parts for row in part[step]["inputs"]]
    np.testing.assert_array_equal(joined, [row["inputs"] for row in expected])


@given(corpora(), st.integers(1, 24), st.sampled_from(["documents", "concatenated"]))
@settings(deadline=None, max_examples=15)
def test_an_epoch_holds_every_token_of_every_document_once(corpus, length, packing):
    source = corpus.sources[0]
    length = min(length, source.train.num_tokens)
    alone = Data(Corpus((source,), BYTE_TOKENIZER, "test"), RowSettings(length, 2**16, packing), seed=1)
    rows, total = len(alone.train_rows[0]), source.train.num_tokens
    assert alone.epochs(rows) == [1.0]
    for epoch in range(2):
        read = [alone.train[index] for index in range(epoch * rows, (epoch + 1) * rows)]
        if packing == "documents":
            found = np.concatenate([row["inputs"][row["segments"] > 0] for row in read])
        else:  # tokens count up from 0: the padding of the last row are zeros that follow the last token
            used = [
                row["inputs"][: int(np.argmax(row["inputs"])) + 1] if total - 1 in row["inputs"] else row["inputs"]
                for row in read
            ]
            found = np.concatenate(used)
        assert sorted(found.tolist()) == list(range(total))
