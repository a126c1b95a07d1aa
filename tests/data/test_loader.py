import numpy as np
import pytest

import jaxtp
from jaxtp.data.loader import Sequences, abstract_batch, batches, shuffled_samples

LENGTH = 4
TOKENS = np.arange(101, dtype=np.uint8)  # 25 sequences of 4 + 1, each told by its first token


def load(mesh=(1, 1, 1), *, start=0, count=10, batch=8, seed=0):
    samples = shuffled_samples(TOKENS, LENGTH, seed)
    return list(batches(samples, jaxtp.make_mesh(*mesh), global_batch_size=batch, start=start, count=count))


def first_tokens(loaded):
    return np.concatenate([np.asarray(batch["inputs"])[:, 0] for batch in loaded])


def test_sequences_cover_every_token_and_overlap_by_one():
    sequences = Sequences(TOKENS, LENGTH)
    assert len(sequences) == 25
    assert [list(s) for s in (sequences[0], sequences[1])] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert sequences[24][-1] == 100


def test_labels_are_the_next_tokens():
    for batch in load(count=2):
        np.testing.assert_array_equal(np.asarray(batch["labels"]), np.asarray(batch["inputs"]) + 1)


def test_each_epoch_is_every_sequence_once_in_its_own_order():
    order = first_tokens(load(count=25, batch=2))
    epochs = order.reshape(2, 25)
    assert all(sorted(epoch) == list(range(0, 100, 4)) for epoch in epochs)
    assert list(epochs[0]) != list(epochs[1])


@pytest.mark.parametrize("mesh", [(1, 1, 8), (2, 2, 2), (8, 1, 1)], ids=str)
def test_the_order_does_not_depend_on_the_mesh(mesh):
    np.testing.assert_array_equal(first_tokens(load(mesh)), first_tokens(load()))


@pytest.mark.parametrize("batch", [2, 4, 8])
@pytest.mark.parametrize("start", [0, 16, 48])
def test_resuming_anywhere_with_any_batch_size_leaves_no_gap(start, batch):
    whole = first_tokens(load(count=10))
    np.testing.assert_array_equal(
        first_tokens(load(start=start, count=(80 - start) // batch, batch=batch)), whole[start:]
    )


def test_another_seed_is_another_order():
    assert list(first_tokens(load(seed=1))) != list(first_tokens(load(seed=0)))


def test_batches_are_born_split_as_their_description_says():
    mesh = jaxtp.make_mesh(2, 2, 2)
    (batch,) = load((2, 2, 2), count=1)
    for name, described in abstract_batch(mesh, 8, LENGTH).items():
        assert (batch[name].shape, batch[name].dtype) == (described.shape, described.dtype)
        assert batch[name].sharding == described.sharding
        assert batch[name].addressable_shards[0].data.shape == (2, LENGTH)
