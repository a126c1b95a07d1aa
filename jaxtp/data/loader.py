"""Shuffled batches on the mesh, with the global sample index as the only state.

Sample `i` of a run is the same sequence whatever the mesh, the number of processes or the batch size: epoch
`i // len` in its own order. A batch is a range of samples, so a run resumes from the index of its next sample.
"""

from collections.abc import Iterator, Sequence
from typing import SupportsIndex

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from jaxtp.collectives import batch_spec
from jaxtp.data.corpus import Tokens

Batch = dict[str, jax.Array]
"""`inputs` and `labels`, `[B, T]` int32, split over (dp, fsdp); labels are the inputs one position later."""


class Sequences(Sequence[NDArray[np.int32]]):
    """Tokens cut into sequences of `length + 1`, each sharing one token with the next: no token is lost."""

    def __init__(self, tokens: Tokens, length: int):
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: SupportsIndex) -> NDArray[np.int32]:  # type: ignore[override]
        start = int(index) * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int32)

    def __repr__(self) -> str:
        return f"Sequences({len(self)} x {self._length + 1} tokens)"  # Grain prints its sources in errors


def shuffled_samples(tokens: Tokens, sequence_length: int, seed: int) -> grain.MapDataset[NDArray[np.int32]]:
    """All sequences, endlessly, each epoch in an order of its own that depends on `seed` alone."""
    return grain.MapDataset.source(Sequences(tokens, sequence_length)).seed(seed).shuffle().repeat()


def batches(
    samples: grain.MapDataset[NDArray[np.int32]],
    mesh: Mesh,
    *,
    global_batch_size: int,
    start: int,
    count: int,
) -> Iterator[Batch]:
    """Batches on the mesh, read ahead by Grain's threads; each process reads its own rows.

    Args:
      samples: sequences `[T + 1]`, by global sample index.
      mesh: where the batch goes.
      global_batch_size: B, sequences in a batch over all processes.
      start: global index of the first sample.
      count: batches to give.
    """
    sequence_length = len(samples[0]) - 1
    sharding = NamedSharding(mesh, batch_spec(None))
    shape = (global_batch_size, sequence_length)
    rows = _local_rows(sharding, shape)

    def read(batch: int) -> NDArray[np.int32]:
        first = start + int(batch) * global_batch_size
        return np.stack([samples[first + row] for row in rows])

    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    for local in grain.MapDataset.range(count).map(read).to_iter_dataset(options):
        yield {
            "inputs": jax.make_array_from_process_local_data(sharding, local[:, :-1], shape),
            "labels": jax.make_array_from_process_local_data(sharding, local[:, 1:], shape),
        }


def abstract_batch(mesh: Mesh, global_batch_size: int, sequence_length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtype and sharding of a batch, to compile a step with."""
    sharding = NamedSharding(mesh, batch_spec(None))
    tokens = jax.ShapeDtypeStruct((global_batch_size, sequence_length), np.int32, sharding=sharding)
    return {"inputs": tokens, "labels": tokens}


def _local_rows(sharding: NamedSharding, shape: tuple[int, int]) -> range:
    """The rows of a batch that this process's devices hold; contiguous, because tp varies fastest in the mesh."""
    slices = [index[0] for index in sharding.addressable_devices_indices_map(shape).values() if index is not None]
    return range(min(s.start or 0 for s in slices), max(s.stop or shape[0] for s in slices))
