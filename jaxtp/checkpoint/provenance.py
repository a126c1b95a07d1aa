"""The documents in the batch of a step, from the folder of a run and its data.

The order of the samples depends only on the data and the seed, so a step is known by its first
sample. This depends on the size of all batches before it, which may change when a run resumes: a
checkpoint has the positions where it did (`storage.starts_of`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxtp.checkpoint.storage import CONFIG, newest_with_info, starts_of
from jaxtp.config.entry import UserError
from jaxtp.config.schema import differences, read_values
from jaxtp.data.corpus import load_corpus
from jaxtp.data.manifest import Count, parse
from jaxtp.data.samples import HELD_OUT, ORDER, Data, LongDocuments, Packing, RowSettings


@dataclass(frozen=True)
class _Settings:
    """The settings of a run that determine its samples."""

    seed: int
    steps: int
    sequence_length: Count
    global_batch_size: int
    path: str | None
    mixture: dict[str, float]
    validation: str | None
    packing: Packing
    long_documents: LongDocuments
    batches: str | None = None


def rows_of_step(run: Path, step: int) -> dict[str, Any]:
    """Returns a record, in JSON, of the documents in the batch of a step, which may yet come.

    `rows` lists the pieces of each row: file and line of a document, its place in the data, and
    the first token and the end of the piece in it.

    Raises:
      UserError: there is no such run, step or data, or its data has no record of lines.
    """
    settings = _read_settings(run)
    if step > settings.steps:
        raise UserError(f"--step {step}: the last step of {run} is {settings.steps}")
    newest = newest_with_info(run)
    info: Mapping[str, Any] = {}
    saved = 0
    if newest is not None:
        info = newest[1]
        saved = int(newest[0].name)
    data = _open(run, settings, info)
    size = settings.global_batch_size
    starts = [*starts_of(info, saved, size), [saved, info.get("next_sample", 0)]]
    first, size = _samples_of(step, starts, size)
    rows = [list(_pieces(data, sample)) for sample in range(first, first + size)]
    return {"step": step, "first_sample": first, "data": data.corpus.description, "rows": rows}


def _read_settings(run: Path) -> _Settings:
    file = run / CONFIG
    if not file.exists():
        raise UserError(f"{run} has no {CONFIG}; name the folder of a run of jaxtp train")
    values: Any = read_values(file)
    merged = {**values.get("data", {}), **values.get("run", {}), **values.get("train", {})}
    settings = parse(_Settings, json.dumps(merged).encode())
    if settings.batches is not None:
        raise UserError(
            f"{run} read batches of its own (data.batches={settings.batches}), whose rows "
            "jaxtp does not know; datasets of jaxtp prepare keep the lines of their documents"
        )
    return settings


def _open(run: Path, settings: _Settings, info: Mapping[str, Any]) -> Data:
    path, validation = (name and Path(name) for name in (settings.path, settings.validation))
    corpus = load_corpus(path or None, settings.mixture, validation or None)
    # No token is read, so any vocabulary will do.
    rows = RowSettings(settings.sequence_length, 2**32, settings.packing, settings.long_documents)
    data = Data(corpus, rows, settings.seed)
    # The data may have moved.
    moved = {"source": None, "scores": None, ORDER: None}
    changed = differences(info.get("corpus", {}) | moved, {**data.description, **moved}, "data: ")
    order: Any = data.description[ORDER]
    for part, now in order.items():
        then = info.get("corpus", {}).get(ORDER, {}).get(part, now)
        if part != HELD_OUT and then["sha256"] != now["sha256"]:
            changed.append(f"order of {part}: {then['algorithm']} -> {now['algorithm']}")
    if info and changed:
        listed = "\n  ".join(changed)
        raise UserError(
            f"{corpus.description} is not the data of {run} (in its checkpoint -> now):\n  {listed}"
        )
    return data


def _samples_of(step: int, starts: Sequence[Sequence[int]], size: int) -> tuple[int, int]:
    # Returns the first sample of a step and the size of its batch; `size` holds after the last
    # start.
    for (before, first), (last, end) in pairwise(starts):
        if before < step <= last:
            size = (end - first) // (last - before)
            return first + (step - 1 - before) * size, size
    start, first = starts[-1]
    if step <= start:
        raise UserError(
            f"--step {step}: its batch is not known, because the size of batches changed before "
            f"step {starts[0][0]}, in an older version that did not record this; the nearest step "
            f"is {starts[0][0] + 1}"
        )
    return first + (step - 1 - start) * size, size


def _pieces(data: Data, sample: int) -> Iterator[dict[str, object]]:
    source, row = data.origin(sample)
    documents = data.corpus.sources[source].train
    for piece in data.train_rows[source].pieces(row):
        file, line = documents.origin(piece.document)
        yield {
            "file": file,
            "line": line,
            "document": documents.location(piece.document),
            "start": piece.start,
            "stop": piece.stop,
        }
