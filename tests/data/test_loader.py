"""Batches of samples: their order and their division, whatever the mesh, the batch size or the
number of processes.
"""

import sys
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from support import batches, local_batches, mesh_by_size

import jaxtp
from jaxtp.data.corpus import BYTE_TOKENIZER, Corpus, Source
from jaxtp.data.documents import InMemory
from jaxtp.data.loader import abstract_batch, local_rows
from jaxtp.data.samples import Data, RowSettings, make_rows, shuffled

T = 4
# 25 rows, each told by its first token
DOCUMENTS = InMemory(np.arange(100, dtype=np.uint8), np.full(25, T), "test")


def samples(packing="documents"):
    return shuffled([make_rows(DOCUMENTS, RowSettings(T, 256, packing))], [1.0], seed=0)


def order(seed, epoch):
    """The first tokens of the rows of an epoch."""
    corpus = Corpus((Source("test", 1.0, DOCUMENTS, DOCUMENTS),), BYTE_TOKENIZER, "test")
    train = Data(corpus, RowSettings(T, 256), seed).train
    return [int(train[index]["inputs"][0]) for index in range(25 * epoch, 25 * (epoch + 1))]


def test_each_epoch_and_each_seed_has_its_own_order_of_all_rows():
    first = order(0, 0)
    second = order(0, 1)
    other = order(1, 0)
    assert sorted(first) == sorted(second) == sorted(other) == list(range(0, 100, T))
    assert first != second != other != first


@pytest.mark.parametrize("packing", ["documents", "concatenated"])
def test_batches_are_split_as_their_description_says(packing):
    mesh = jaxtp.make_mesh(dp=2, fsdp=2, tp=2)
    (batch,) = batches(samples(packing), mesh, global_batch_size=8, start=0, count=1)
    described = abstract_batch(mesh, 8, T, packed=packing == "documents")
    assert batch.keys() == described.keys()
    for name, expected in described.items():
        found = batch[name]
        assert found.sharding == expected.sharding
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.addressable_shards[0].data.shape == (2, T)


@st.composite
def corpora(draw):
    """One or two sources whose tokens tell them and their documents apart."""
    sources = []
    first = 0
    for name in ("a", "b")[: draw(st.integers(1, 2))]:
        lengths = draw(st.lists(st.integers(2, 20), min_size=1, max_size=25))
        tokens = np.arange(first, first + sum(lengths), dtype=np.uint16)
        first += sum(lengths)
        documents = InMemory(tokens, np.array(lengths), name)
        sources.append(Source(name, draw(st.sampled_from([0.5, 1.0, 3.0])), documents, documents))
    return Corpus(tuple(sources), BYTE_TOKENIZER, "test")


class Counted:
    """Samples that tell which of them are read."""

    def __init__(self, samples):
        self.samples = samples
        self.read = Counter({0: -1})  # the first is also read for its columns

    def __len__(self):
        return sys.maxsize

    def __getitem__(self, index):
        self.read[index] += 1
        return self.samples[index]


SIZES = [(1, 8, 1), (8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 4, 2), (1, 2, 4), (1, 1, 8)]


@given(st.sampled_from(SIZES), st.permutations(range(8)), st.sampled_from([8, 16]))
@settings(max_examples=6)
def test_every_order_of_devices_has_its_rows_and_each_row_is_read_once(sizes, order, size):
    mesh = mesh_by_size(*sizes, devices=[jax.devices()[index] for index in order])
    counted = Counted(samples())
    (batch,) = batches(counted, mesh, global_batch_size=size, start=3, count=1)
    expected = np.stack([samples()[3 + row]["inputs"] for row in range(size)])
    for shard in batch["inputs"].addressable_shards:
        assert_array_equal(shard.data, expected[shard.index])
    assert {shard.device for shard in batch["inputs"].addressable_shards} == set(mesh.devices.flat)
    assert counted.read == Counter(range(3, 3 + size))


STARTS = st.lists(
    st.tuples(
        st.sampled_from(SIZES),
        st.permutations(range(8)),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([8, 16]),
    ),
    min_size=2,
    max_size=2,
)
"""Mesh, order of its devices, number of processes and size of a batch of each start of a run."""

STEPS = 2


@given(
    corpora(),
    st.integers(1, 24),
    st.sampled_from(["documents", "concatenated"]),
    STARTS,
    st.integers(0, 40),
)
@settings(max_examples=3)
def test_no_sample_is_lost_or_repeated_when_a_run_resumes_on_other_hosts(
    corpus, length, packing, starts, first
):
    """Each process reads what its devices hold, once; those of a step are the next samples,
    whoever took the last.
    """
    length = min(length, *(source.train.num_tokens for source in corpus.sources))
    data = Data(corpus, RowSettings(length, 2**16, packing), seed=1)
    next_sample = first
    for sizes, order, processes, size in starts:
        mesh = mesh_by_size(*sizes, devices=[jax.devices()[index] for index in order])
        parts = abstract_batch(mesh, size, length)["inputs"].sharding.devices_indices_map(
            (size, length)
        )
        taken = set()
        for process in range(processes):
            held = [part for device, part in parts.items() if device.id * processes // 8 == process]
            rows = local_rows(held, size)
            assert set(rows) == {row for part in held for row in range(size)[part[0]]}
            counted = Counted(data.train)
            for step, local in enumerate(local_batches(counted, rows, size, next_sample, STEPS)):
                for row, tokens in zip(rows, local["inputs"], strict=True):
                    expected = data.train[next_sample + step * size + row]["inputs"]
                    assert_array_equal(tokens, expected)
            read = +counted.read
            assert set(read.values()) == {1}
            taken.update(read)  # tp may spread over processes: then several read a row
        assert taken == set(range(next_sample, next_sample + STEPS * size))
        next_sample += STEPS * size
