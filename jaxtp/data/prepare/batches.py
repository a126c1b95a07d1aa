"""Reads documents in hashed batches.

Only a document's hash decides whether it is held out, a duplicate, or in the sample of
`scripts/train_bpe.py`.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxtp.data.chat_template import without_marks
from jaxtp.data.manifest import TRAIN, VALIDATION
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.prepare.readers import (
    END,
    TEXT,
    BadInputError,
    Fields,
    Position,
    PrepareError,
    Source,
    Turn,
    read_source,
)

BATCH_BYTES = 2**22
BATCH_DOCUMENTS = 2**13
# With up to this many documents, the number of held-out documents is exact; with more, hashes alone
# come close to the share.
FEW = 1000


class Entry(NamedTuple):
    """A document on its way into the dataset."""

    turns: tuple[Turn, ...]
    digest: bytes  # sha256 of prompts and texts
    sizes: tuple[int, ...]  # Bytes of each turn, prompt and text, as UTF-8
    origin: Position  # index of the source, and number of the line or row


@dataclass
class Batch:
    """Documents in input order, and the problems between them."""

    position: Position  # after the batch
    bytes_read: int = 0  # approximate bytes of the inputs
    entries: list[Entry] = field(default_factory=list)
    problems: list[BadInputError] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Why answers are no documents."""


def batches(
    sources: Sequence[Source], fields: Fields, start: Position, on_error: str
) -> Iterator[Batch]:
    """Yields documents from `start`.

    With `on_error` "stop", raises the first problem, after yielding all documents before it.
    """
    end = 0  # bytes of the inputs up to the end of the source
    batch = Batch(start)
    size = 0
    for index, source in enumerate(sources):
        before = end
        end += source.size
        if index < start.source:
            continue
        first_item = start.item if index == start.source else 0
        for event in read_source(source, first_item, fields):
            if event.problem is None:
                batch.left_out += event.documents.left_out
                if event.documents.turns:
                    origin = Position(index, event.item)
                    batch.entries.append(_entry(event.documents.turns, origin))
                    size += sum(batch.entries[-1].sizes)
            elif on_error == "stop" and not event.problem.is_harmless:
                yield batch
                raise PrepareError(str(event.problem))
            else:
                batch.problems.append(event.problem)
            batch.position = Position(index, event.item)
            batch.bytes_read = before + event.bytes_read
            if event.item == END or source.format == TEXT:
                batch.position = Position(index + 1, 0)
                batch.bytes_read = end
            # Rows of which nothing is a document count too: a file may have no others.
            count = len(batch.entries) + len(batch.problems) + len(batch.left_out)
            if size >= BATCH_BYTES or count >= BATCH_DOCUMENTS:
                yield batch
                batch = Batch(batch.position)
                size = 0
    yield batch


def _entry(turns: tuple[Turn, ...], origin: Position) -> Entry:
    """Returns an entry; also hashes prompt lengths, so that a prompt differs from a text."""
    digest = hashlib.sha256()
    sizes = []
    for turn in turns:
        plain = without_marks if turn.is_rendered else str
        prompt = plain(turn.prompt or "").encode()
        text = plain(turn.text).encode()
        if turn.prompt is not None:
            digest.update(len(prompt).to_bytes(8, "little") + prompt)
        digest.update(text)
        sizes.append(len(prompt) + len(text))
    return Entry(turns, digest.digest(), tuple(sizes), origin)


def fraction(digest: bytes) -> float:
    """Maps a hash to a number in [0, 1)."""
    return int.from_bytes(digest[:6], "big") / 2**48


def split_of(digest: bytes, held_out: float) -> str:
    """Returns the split of a document."""
    return VALIDATION if fraction(digest) < held_out else TRAIN


def threshold(sources: Sequence[Source], fields: Fields, config: PrepareConfig) -> float:
    """Returns the `fraction` below which a document is held out.

    With many documents, or many unreadable ones, it is `--held-out`. With few documents, it is the
    threshold for which the number of distinct held-out documents is nearest to the share; at least
    one document remains for training.
    """
    if not config.held_out:
        return 0.0
    fractions: list[float] = []
    num_problems = 0
    for batch in batches(sources, fields, Position(0, 0), "skip"):
        fractions += [fraction(entry.digest) for entry in batch.entries]
        num_problems += sum(not problem.is_harmless for problem in batch.problems)
        if len(fractions) + num_problems > FEW:
            return config.held_out
    distinct = sorted(set(fractions))
    nearest = int(config.held_out * len(distinct) + 0.5)
    count = min(nearest, len(distinct) - 1)
    return distinct[count] if count > 0 else 0.0
