"""Scores rows on the mesh, and writes the scores so that a killed command resumes.

Rows are scored in their order, in batches. Process 0 writes each score to the place of its token.
Every few seconds it syncs the files, then replaces the journal, which counts the finished rows;
resuming computes the later ones again.
"""

import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from jaxtp.config.console import size_text
from jaxtp.config.entry import Interrupt, InterruptError, NumericsError
from jaxtp.config.files import (
    locked,
    open_directly,
    require_empty,
    sha256,
    sync_file,
    write_atomically,
)
from jaxtp.config.schema import differences
from jaxtp.data.batches import Position, token_batches
from jaxtp.data.documents import Documents
from jaxtp.data.loader import Batch, on_mesh
from jaxtp.data.manifest import shard_file
from jaxtp.data.rows import IGNORE, SEGMENTS, Rows
from jaxtp.data.scores import (
    JOURNAL,
    LOG_PROBS,
    SCORES,
    TOP_IDS,
    TOP_LOG_PROBS,
    Journal,
    Record,
    ScoresError,
    open_scores,
    read_journal,
)
from jaxtp.distributed.agreement import all_gather_json, raise_everywhere
from jaxtp.generate.decode_model import model_mesh
from jaxtp.generate.loading import Status, print_status
from jaxtp.mesh import batch_parts, mesh_sizes
from jaxtp.models.decoder import Decoder
from jaxtp.models.log_probs import token_log_probs, top_log_probs

SAVE_SECONDS = 15.0  # Seconds between saves of the journal
Scores = Mapping[str, NDArray[np.generic]]  # Scores of a batch `[B, T, ...]`, by suffix


@dataclass(frozen=True)
class Job:
    """The folder for the scores, the rows to score, and the command's arguments."""

    out: Path
    record: Record
    documents: Mapping[str, Documents]
    rows: Mapping[str, Rows]
    arguments: tuple[str, ...]


def score(job: Job, model: Decoder, batch_size: int) -> None:
    """Scores all rows. All processes must call it.

    Raises:
      ScoresError: the folder holds something else.
      NumericsError: a score is not finite.
    """
    mesh = model_mesh(model)
    parts = batch_parts(mesh_sizes(mesh))
    size = math.ceil(batch_size / parts) * parts
    program = _program(model, job.record)
    with ExitStack() as stack:
        with raise_everywhere():
            writer: _Writer | None = None
            if jax.process_index() == 0:
                stack.enter_context(locked(job.out))
                writer = _Writer(job)
                stack.callback(writer.close)
        first_rows: dict[str, int] | None = all_gather_json(writer and writer.finished_rows)[0]
        if first_rows is None:
            print_status(f"{job.out} has these scores already")
            return
        progress = _Progress(job, sum(first_rows.values()))
        try:
            for name, rows in job.rows.items():
                for first, scores in _scores(program, mesh, rows, size, first_rows[name]):
                    _check_finite(scores)
                    if writer is not None:
                        writer.write(name, first, scores)
                    progress.add(min(size, len(rows) - first))
        except InterruptError:
            if writer is not None:
                writer.save()
            raise
        with raise_everywhere():
            if writer is not None:
                writer.finish()


class _Progress:
    """Prints the share of finished rows, and the tokens per second."""

    def __init__(self, job: Job, finished: int):
        self._length = job.record.sequence_length
        self._total = sum(map(len, job.rows.values()))
        self._finished_before = finished
        self._finished = finished
        self._start = time.monotonic()
        self._status = Status()
        resumed = f"; {finished:,} of them are done" if finished else ""
        print_status(f"data    {self._total:,} rows of {self._length:,} tokens{resumed}")

    def add(self, rows: int) -> None:
        self._finished += rows
        tokens = (self._finished - self._finished_before) * self._length
        rate = tokens / (time.monotonic() - self._start)
        self._status(f"{self._finished / self._total:.0%}  {rate:,.0f} tokens/s")


def _program(model: Decoder, record: Record) -> Callable[[Batch], dict[str, Array]]:
    graph, state = nnx.split(model)

    def scores(
        state: nnx.State, ids_BT: Array, labels_BT: Array, segments_BT: Array | None
    ) -> dict[str, Array]:
        merged: Decoder = nnx.merge(graph, state, copy=True)
        t = record.temperature
        if record.top_k is None:
            log_probs_BT = token_log_probs(merged, ids_BT, labels_BT, segments_BT, temperature=t)
            assert isinstance(log_probs_BT, Array)
            return {LOG_PROBS: log_probs_BT}
        values_BTK, ids_BTK = top_log_probs(
            merged, ids_BT, record.top_k, segments_BT, temperature=t
        )
        has_label = (labels_BT != IGNORE)[..., None]
        return {
            TOP_IDS: jnp.where(has_label, ids_BTK, 0),
            TOP_LOG_PROBS: jnp.where(has_label, values_BTK, 0),
        }

    # Replicated, so that process 0 can read all scores.
    run = jax.jit(scores, out_shardings=NamedSharding(model_mesh(model), P()))
    return lambda batch: run(state, batch["inputs"], batch["labels"], batch.get(SEGMENTS))


def _scores(
    program: Callable[[Batch], dict[str, Array]], mesh: Mesh, rows: Rows, size: int, first_row: int
) -> Iterator[tuple[int, Scores]]:
    """Yields the first row of each batch, and its scores.

    The devices compute the next batch meanwhile.
    """
    if first_row == len(rows):
        return
    batches = token_batches(grain.MapDataset.source(rows), size, once=True)
    batches.with_weights = True  # pads the last batch
    pending: tuple[int, dict[str, Array]] | None = None
    # Exiting during a computation may crash, so Ctrl-C and errors wait for the batch.
    with Interrupt(signal.SIGINT, signal.SIGTERM) as interrupt, jax.set_mesh(mesh):
        try:
            for batch, after in on_mesh(batches, mesh, Position(0, first_row)):
                previous = pending
                pending = (after.sample - size, program(batch))
                if previous is not None:
                    yield jax.device_get(previous)
                interrupt.check()
            if pending is not None:
                yield jax.device_get(pending)
        finally:
            jax.block_until_ready(pending)


def _check_finite(scores: Scores) -> None:
    for suffix, array in scores.items():
        if suffix != TOP_IDS and not np.isfinite(array).all():
            raise NumericsError(
                "a log-probability is not finite: the weights are damaged, or --dtype float32 "
                "is needed"
            )


def finished_rows(job: Job) -> dict[str, int] | None:
    """Returns the number of finished rows of each split; None if the folder has all scores.

    Raises:
      ScoresError: the folder holds something else, or its disk is too small.
    """
    out = job.out
    finished: dict[str, int] | None = None
    if (out / SCORES).exists():
        record = open_scores(out).record
        splits = {}
        for name, split in record.splits.items():
            splits[name] = replace(split, shards=({},) * len(split.shards))  # without checksums
        record = replace(record, splits=splits)
    elif (journal := read_journal(out)) is not None:
        record = journal.record
        finished = {
            name: min(journal.rows.get(name, 0), len(rows)) for name, rows in job.rows.items()
        }
    else:
        require_empty(out, "scores")
        size = sum(_sizes(job).values())
        free = shutil.disk_usage(out).free
        if size > free:
            smaller = "" if job.record.top_k is None else "; a smaller --top-k needs less"
            raise ScoresError(
                f"{out}: the scores take {size_text(size)}, and {size_text(free)} are free{smaller}"
            )
        return dict.fromkeys(job.rows, 0)
    ignored = {"model": "", "dataset": ""}  # they may have moved
    if not job.record.model_sha256:  # the weights have not been read
        ignored["model_sha256"] = ""
    changes = differences(asdict(record) | ignored, asdict(job.record) | ignored)
    if changes:
        raise ScoresError(
            f"{out} holds scores that differ from this command (there -> here): "
            f"{'; '.join(changes)}; name another folder by --out DIR. Nothing was changed."
        )
    return finished


def _sizes(job: Job) -> dict[Path, int]:
    sizes = dict[Path, int]()
    for name, documents in job.documents.items():
        sizes |= job.record.sizes(job.out, name, documents.shard_sizes)
    return sizes


class _Writer:
    """Writes scores to the folder of a job; see the module.

    `finished_rows` has the number of finished rows of each split; None if all scores are there.
    """

    def __init__(self, job: Job):
        self._job = job
        self._files = dict[Path, IO[bytes]]()
        self._saved = time.monotonic()
        self.finished_rows = finished_rows(job)
        if self.finished_rows is None:
            (job.out / JOURNAL).unlink(missing_ok=True)  # after a kill in `finish`
            return
        if not (job.out / JOURNAL).exists():
            self.save()
        for path, size in _sizes(job).items():
            with open_directly(path, "ab") as file:  # sparse: tokens in no row have zeros
                if file.tell() != size and any(self.finished_rows.values()):
                    raise ScoresError(
                        f"{path}: damaged: {file.tell():,} bytes of {size:,}; delete {job.out} to "
                        "start over"
                    )
                file.truncate(size)
                sync_file(file)

    def write(self, split: str, first: int, scores: Scores) -> None:
        """Writes the scores of successive rows; saves from time to time."""
        rows = self._job.rows[split]
        assert self.finished_rows is not None
        end = min(first + len(next(iter(scores.values()))), len(rows))
        for index in range(first, end):
            for positions, shard, tokens in rows.places(index):
                for suffix, (dtype, _) in self._job.record.layout.items():
                    content = scores[suffix][index - first, positions].astype(dtype)
                    path = shard_file(self._job.out, split, shard, suffix)
                    if path not in self._files:
                        self._files[path] = open_directly(path, "r+b")
                    file = self._files[path]
                    file.seek(tokens.start * content[0].nbytes)
                    file.write(content.tobytes())
        self.finished_rows[split] = end
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Syncs the files, then replaces the journal."""
        for file in self._files.values():
            sync_file(file)
        self.close()
        journal = Journal(self._job.record, self._job.arguments, dict(self.finished_rows or {}))
        write_atomically(self._job.out / JOURNAL, json.dumps(asdict(journal)).encode())
        self._saved = time.monotonic()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def finish(self) -> None:
        self.save()
        out = self._job.out
        record = self._job.record
        print_status(f"sha256  of {len(_sizes(self._job)):,} files")
        splits = {}
        for name, split in record.splits.items():
            shards = []
            for shard in range(len(split.shards)):
                file = partial(shard_file, out, name, shard)
                shards.append({suffix: sha256(file(suffix)) for suffix in record.layout})
            splits[name] = replace(split, shards=tuple(shards))
        text = json.dumps(asdict(replace(record, splits=splits)), indent=1)
        write_atomically(out / SCORES, f"{text}\n".encode())
        (out / JOURNAL).unlink()
        print_status(f"saved in {out}; read them by --data.scores {out}")
