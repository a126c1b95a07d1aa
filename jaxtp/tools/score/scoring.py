"""Scores rows on the mesh, and writes the scores so that a killed command resumes.

Rows are scored in their order, in batches, and process 0 appends their scores to the split's file.
Every few seconds it syncs the files, then replaces `scores.json`, which counts the finished rows;
resuming drops later ones and computes them again.
"""

import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
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
from jaxtp.config.entry import InterruptError, NumericsError
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
from jaxtp.data.loader import Batch, on_mesh
from jaxtp.data.manifest import DatasetError
from jaxtp.data.rows import IGNORE, SEGMENTS, Rows
from jaxtp.data.scores import (
    LOG_PROBS,
    SCORES,
    TOP_IDS,
    TOP_LOG_PROBS,
    Record,
    read_record,
    scores_file,
)
from jaxtp.data.store import require_size, verify_sum
from jaxtp.distributed.agreement import all_gather_json, raise_everywhere
from jaxtp.generate.decode_model import model_mesh
from jaxtp.generate.loading import Status, pipeline, print_status
from jaxtp.mesh import batch_parts, mesh_sizes
from jaxtp.models.decoder import Decoder
from jaxtp.models.log_probs import token_log_probs, top_log_probs

SAVE_SECONDS = 15.0  # Seconds between saves
Scores = Mapping[str, NDArray[np.generic]]  # Columns `[B, T, ...]` of a batch


@dataclass(frozen=True)
class Job:
    """The folder for the scores, and the rows to score."""

    out: Path
    record: Record
    rows: Mapping[str, Rows]


def score(job: Job, model: Decoder, batch_size: int) -> None:
    """Scores all rows. All processes must call it.

    Raises:
      DatasetError: the folder holds something else.
      NumericsError: a score is not finite.
    """
    mesh = model_mesh(model)
    parts = batch_parts(mesh_sizes(mesh))
    size = math.ceil(batch_size / parts) * parts
    length = job.record.sequence_length
    program = _program(model, job.record)
    with ExitStack() as stack:
        with raise_everywhere():
            writer: _Writer | None = None
            if jax.process_index() == 0:
                stack.enter_context(locked(job.out))
                writer = _Writer(job, stack)
        first_rows: dict[str, int] | None = all_gather_json(writer and writer.finished)[0]
        if first_rows is None:
            print_status(f"{job.out} has these scores already, with the same checksums")
            return
        total = sum(map(len, job.rows.values()))
        finished = sum(first_rows.values())
        resumed = f"; {finished:,} of them are done" if finished else ""
        print_status(f"data    {total:,} rows of {length:,} tokens{resumed}")
        status = Status()
        start = time.monotonic()
        tokens = 0
        try:
            for name, rows in job.rows.items():
                for count, scores in _scores(program, mesh, rows, size, first_rows[name]):
                    _check_finite(scores)
                    if writer is not None:
                        writer.write(name, count, scores)
                    finished += count
                    tokens += count * length
                    rate = tokens / (time.monotonic() - start)
                    status(f"{finished / total:.0%}  {rate:,.0f} tokens/s")
        except InterruptError:
            if writer is not None:
                writer.save()
            raise
        with raise_everywhere():
            if writer is not None:
                writer.finish()


def _program(model: Decoder, record: Record) -> Callable[[Batch], dict[str, Array]]:
    graph, state = nnx.split(model)

    def scores(
        state: nnx.State, ids_BT: Array, labels_BT: Array, segments_BT: Array | None
    ) -> dict[str, Array]:
        merged: Decoder = nnx.merge(graph, state, copy=True)
        t = record.temperature
        if record.top_k is None:
            log_probs_BT = token_log_probs(
                merged, ids_BT, labels_BT, segments=segments_BT, temperature=t
            )
            assert isinstance(log_probs_BT, Array)
            return {LOG_PROBS: log_probs_BT}
        values_BTK, ids_BTK = top_log_probs(
            merged, ids_BT, record.top_k, segments=segments_BT, temperature=t
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
    """Yields the number of rows of each batch, without padding, and its scores."""
    batches = token_batches(grain.MapDataset.source(rows), size, once=True)
    batches.with_weights = True  # pads the last batch
    on_devices = on_mesh(batches, mesh, Position(0, first_row))
    signals = (signal.SIGINT, signal.SIGTERM)
    with jax.set_mesh(mesh):
        for (_, after), scores in pipeline(on_devices, lambda pair: program(pair[0]), *signals):
            yield size - max(after.sample - len(rows), 0), jax.device_get(scores)


def _check_finite(scores: Scores) -> None:
    for name, array in scores.items():
        if name != TOP_IDS and not np.isfinite(array).all():
            raise NumericsError(
                "a log-probability is not finite: the weights are damaged, or --dtype float32 "
                "is needed"
            )


def begin(job: Job) -> Record:
    """Returns the record of the scores that are in the folder of a job, or its own.

    Raises:
      DatasetError: the folder holds something else, or its disk is too small.
    """
    out = job.out
    record = read_record(out)
    if record is None:
        require_empty(out, "scores")
        size = sum(job.record.num_bytes(len(rows)) for rows in job.rows.values())
        free = shutil.disk_usage(out).free
        if size > free:
            smaller = "" if job.record.top_k is None else "; a smaller --top-k needs less"
            raise DatasetError(
                f"{out}: the scores take {size_text(size)}, and {size_text(free)} are free{smaller}"
            )
        return job.record
    # Folders may have moved.
    ignored: dict[str, object] = {"model": "", "dataset": "", "finished": {}, "sha256": {}}
    if not job.record.model_sha256:  # the weights have not been read
        ignored["model_sha256"] = ""
    changes = differences(asdict(record) | ignored, asdict(job.record) | ignored)
    if changes:
        raise DatasetError(
            f"{out} holds scores that differ from this command (there -> here): "
            f"{'; '.join(changes)}; name another folder by --out DIR. Nothing was changed."
        )
    return record


class _Writer:
    """Writes scores to the folder of a job; see the module.

    `finished` has the number of finished rows of each split; None if all scores are there, and
    their files are as `scores.json` says.
    """

    def __init__(self, job: Job, stack: ExitStack):
        self._job = job
        self._record = begin(job)
        self._files: dict[str, IO[bytes]] = {}
        self.finished: dict[str, int] | None = None
        if self._record.sha256:
            self._verify()
            return
        self.finished = {
            name: min(self._record.finished.get(name, 0), len(rows))
            for name, rows in job.rows.items()
        }
        self._saved = time.monotonic()
        if not (job.out / SCORES).exists():
            self.save()
        for name, rows in self.finished.items():
            path = scores_file(job.out, name)
            file = self._files[name] = stack.enter_context(open_directly(path, "ab"))
            size = self._record.num_bytes(rows)
            if file.tell() < size:
                raise DatasetError(
                    f"{path}: damaged: {file.tell():,} bytes of {size:,}; delete {job.out} to "
                    "start over"
                )
            file.truncate(size)

    def _verify(self) -> None:
        """Raises `DatasetError` if a finished file is not as `scores.json` says."""
        for name, checksum in self._record.sha256.items():
            path = scores_file(self._job.out, name)
            try:
                require_size(path, self._record.num_bytes(len(self._job.rows[name])))
                for problem in verify_sum(path, checksum):
                    raise DatasetError(problem)
            except DatasetError as error:
                raise DatasetError(f"{error}; delete {self._job.out} to score again") from None

    def write(self, split: str, count: int, scores: Scores) -> None:
        """Writes the scores of the next `count` rows; saves from time to time."""
        assert self.finished is not None
        block = np.empty((count, self._record.sequence_length), self._record.fields)
        for name, column in scores.items():
            block[name] = column[:count]
        self._files[split].write(block.tobytes())
        self.finished[split] += count
        if time.monotonic() - self._saved >= SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Syncs the files, then replaces the record."""
        for file in self._files.values():
            sync_file(file)
        self._record = replace(self._record, finished=dict(self.finished or {}))
        text = json.dumps(asdict(self._record), indent=1)
        write_atomically(self._job.out / SCORES, f"{text}\n".encode())
        self._saved = time.monotonic()

    def finish(self) -> None:
        self.save()
        out = self._job.out
        print_status("sha256  of the files")
        sums = {name: sha256(scores_file(out, name)) for name in self._files}
        self._record = replace(self._record, sha256=sums)
        self.save()
        print_status(f"saved in {out}; read them by --data.scores {out}")
