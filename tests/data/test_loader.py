"""Batches of samples: their order and their division, whatever the mesh, the batch size or the number of processes."""

import json
import sys
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import batches, local_batches

import jaxtp
from jaxtp.data.corpus import BYTE_TOKENIZER, Corpus, Source
from jaxtp.data.documents import InMemory
from jaxtp.data.loader import abstract_batch, local_rows
from jaxtp.data.samples import Data, RowSettings, make_rows, shuffled
from jaxtp.tools.launch.__main__ import main as launch

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
        lengths = draw(st.lists(st.integers(2, 20), min_size=1, max_size=25))
        tokens = np.arange(first, first + sum(lengths), dtype=np.uint16)
        first += sum(lengths)
        documents = InMemory(tokens, np.array(lengths), name)
        sources.append(Source(name, draw(st.sampled_from([0.5, 1.0, 3.0])), documents, documents))
    return Corpus(tuple(sources), BYTE_TOKENIZER, "test")


class Counted:
    """Samples that tell which of them are read."""

    def __init__(self, samples):
        self.samples, self.read = samples, Counter({0: -1})  # the first is also read for its columns

    def __len__(self):
        return sys.maxsize

    def __getitem__(self, index):
        self.read[index] += 1
        return self.samples[index]


SIZES = [(1, 8, 1), (8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 4, 2), (1, 2, 4), (1, 1, 8)]


@given(st.sampled_from(SIZES), st.permutations(range(8)), st.sampled_from([8, 16]))
@settings(max_examples=12)
def test_in_whatever_order_devices_lie_on_the_mesh_each_has_its_rows_and_each_row_is_read_once(sizes, order, size):
    mesh = jaxtp.make_mesh(*sizes, devices=[jax.devices()[index] for index in order])
    counted = Counted(samples())
    (batch,) = batches(counted, mesh, global_batch_size=size, start=3, count=1)
    expected = np.stack([samples()[3 + row]["inputs"] for row in range(size)])
    for shard in batch["inputs"].addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[shard.index])
    assert {shard.device for shard in batch["inputs"].addressable_shards} == set(mesh.devices.flat)
    assert counted.read == Counter(range(3, 3 + size))


STARTS = st.lists(
    st.tuples(st.sampled_from(SIZES), st.permutations(range(8)), st.sampled_from([1, 2, 4]), st.sampled_from([8, 16])),
    min_size=2,
    max_size=3,
)
"""Mesh, order of its devices, number of processes and size of a batch of each start of a run."""


@given(corpora(), st.integers(1, 24), st.sampled_from(["documents", "concatenated"]), STARTS, st.integers(0, 40))
@settings(max_examples=3)
def test_no_sample_is_lost_or_repeated_when_a_run_goes_on_with_other_hosts(corpus, length, packing, starts, first):
    """Each process reads what its devices hold, once; those of a step are the next samples, whoever took the last."""
    length = min(length, *(source.train.num_tokens for source in corpus.sources))
    data = Data(corpus, RowSettings(length, 2**16, packing), seed=1)
    next_sample, seen, steps = first, {}, 2
    for sizes, order, processes, size in starts:
        mesh = jaxtp.make_mesh(*sizes, devices=[jax.devices()[index] for index in order])
        sharding = jax.sharding.NamedSharding(mesh, abstract_batch(mesh, size, length)["inputs"].sharding.spec)
        parts = sharding.devices_indices_map((size, length))
        taken = Counter()
        for process in range(processes):
            held = [part for device, part in parts.items() if device.id * processes // 8 == process]
            rows = local_rows(held, size)
            assert set(rows) == {row for part in held for row in range(size)[part[0]]}
            counted = Counted(data.train)
            for step, local in enumerate(local_batches(counted, rows, size, next_sample, steps)):
                for row, tokens in zip(rows, local["inputs"], strict=True):
                    index = next_sample + step * size + row
                    assert seen.setdefault(index, tokens.tolist()) == tokens.tolist()
            assert set((+counted.read).values()) == {1}
            taken |= counted.read  # tp may spread over processes: then several read a row
        assert sorted(taken) == list(range(next_sample, next_sample + steps * size))
        next_sample += steps * size
    assert seen == {index: data.train[index]["inputs"].tolist() for index in range(first, next_sample)}


TWO_PROCESSES = """
import json
from collections import Counter
from jaxtp.distributed.joining import join_processes
join_processes()
import grain, jax, numpy as np, jaxtp
from jaxtp.data.batches import Position, token_batches
from jaxtp.data.loader import on_mesh

class Source:
    read = Counter()
    def __len__(self):
        return 100
    def __getitem__(self, index):
        Source.read[int(index)] += 1
        return {"inputs": np.full(4, index, np.int32)}

found = []
for sizes, order in json.loads(%r):
    Source.read = Counter({0: -1})  # the first is also read for its columns
    mesh = jaxtp.make_mesh(*sizes, devices=[jax.devices()[index] for index in order])
    total = 0
    samples = grain.MapDataset.source(Source())
    for step, (batch, _) in enumerate(on_mesh(token_batches(samples, 8), mesh, Position(0, 5), 2)):
        expected = 5 + 8 * step + np.repeat(np.arange(8)[:, None], 4, axis=1)
        for shard in batch["inputs"].addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])
        total += int(jax.jit(lambda x: x.sum())(batch["inputs"]))
    Source.read = +Source.read
    assert set(Source.read.values()) == {1}
    found.append([total, sorted(index - 5 for index in Source.read if index < 13)])
with open(f"{jax.process_index()}.json", "w") as file:
    json.dump(found, file)
"""
MESHES = [
    ((1, 8, 1), (0, 1, 2, 3, 4, 5, 6, 7), [0, 1, 2, 3], [4, 5, 6, 7]),
    ((2, 4, 1), (0, 4, 1, 5, 2, 6, 3, 7), [0, 2, 4, 6], [1, 3, 5, 7]),
    ((2, 4, 1), (6, 2, 3, 7, 0, 4, 5, 1), [1, 2, 4, 7], [0, 3, 5, 6]),
    ((2, 2, 2), (0, 4, 1, 5, 2, 6, 3, 7), list(range(8)), list(range(8))),
    ((1, 4, 2), (0, 1, 2, 4, 3, 5, 6, 7), [0, 1, 2, 3, 4, 5], [2, 3, 4, 5, 6, 7]),
]
"""Sizes, the order of the devices (each process has four), and the rows that each process needs of eight."""


@pytest.mark.journey
def test_two_processes_read_what_their_devices_hold_however_these_lie_on_the_mesh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = TWO_PROCESSES % json.dumps([mesh[:2] for mesh in MESHES])
    assert launch(["--processes", "2", "--devices", "4", "--", "-c", code]) == 0
    total = 4 * sum(range(5, 21))
    for process in range(2):
        found = json.loads((tmp_path / f"{process}.json").read_text())
        assert found == [[total, mesh[2 + process]] for mesh in MESHES]


def ends_of(documents):
    return np.cumsum(np.concatenate([*documents.lengths()])).tolist()


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
        # A row without a label is left out: it has but last tokens, of documents or of all.
        left_out = set(range(total)).difference(found.tolist())
        ends = {total - 1} if packing == "concatenated" else {end - 1 for end in ends_of(source.train)}
        assert left_out <= ends
        assert len(found) + len(left_out) == total
