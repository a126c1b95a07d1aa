"""Reads documents in batches, each document with its hash, while the batch before is made into tokens.

A document's hash decides all that is decided about it: whether it is held out, was seen before, or is in the sample
that a tokenizer learns from. Its place among the others decides nothing.
"""

import hashlib
import itertools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import NamedTuple, TypeVar

from jaxtp.data.chat_tokenizer import without_marks
from jaxtp.data.manifest import TRAIN, VALIDATION
from jaxtp.interrupt import Interrupt
from jaxtp.prepare.errors import Document, PrepareError, Problem, Turn
from jaxtp.prepare.formats import Fields, Source
from jaxtp.prepare.sources import Position, read

BATCH_BYTES = 2**22
BATCH_DOCUMENTS = 2**13
_PATIENCE = 0.2
"""Seconds between looks for Ctrl-C."""

T = TypeVar("T")


class Entry(NamedTuple):
    """A document on its way into the dataset."""

    turns: tuple[Turn, ...]
    digest: bytes
    """The sha256 of prompts and texts."""
    sizes: tuple[int, ...]
    """Bytes of each turn as UTF-8, of prompt and text."""


@dataclass
class Batch:
    """Documents in the order of the inputs, and what was left out between them."""

    position: Position
    """Position in the inputs, after the batch."""
    done: int = 0
    """Bytes of the inputs that have been read, about."""
    entries: list[Entry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    size: int = 0
    """Bytes of its documents."""

    def is_full(self) -> bool:
        """Returns whether it keeps all cores busy."""
        return self.size >= BATCH_BYTES or len(self.entries) + len(self.problems) >= BATCH_DOCUMENTS


def batches(sources: list[Source], start: Position, fields: Fields, on_error: str) -> Iterator[Batch]:
    """Yields all documents from a position on.

    Raises:
      PrepareError: something cannot be read and `on_error` is stop; after the batch of all that comes before it.
    """
    before = [0]  # bytes of the sources before each
    for source in sources:
        before.append(before[-1] + source.size)
    batch = Batch(start)
    for event, position in read(sources, start, fields):
        if isinstance(event, Problem) and on_error == "stop" and not event.harmless:
            yield batch
            raise PrepareError(event.message)
        if isinstance(event, Problem):
            batch.problems.append(event)
        else:
            batch.entries.append(entry(event))
            batch.size += sum(batch.entries[-1].sizes)
        batch.position = position
        batch.done = before[position.source] + (event.done if position.item else 0)
        if batch.is_full():
            yield batch
            batch = Batch(position)
    yield batch


def entry(document: Document) -> Entry:
    """Hashes a document. The length of a prompt is hashed too: another boundary is another document."""
    whole, sizes = hashlib.sha256(), []
    for turn in document.turns:
        shown = without_marks if turn.rendered else str
        prompt, text = shown(turn.prompt or "").encode(), shown(turn.text).encode()
        if turn.prompt is not None:
            whole.update(len(prompt).to_bytes(8, "little") + prompt)
        whole.update(text)
        sizes.append(len(prompt) + len(text))
    return Entry(document.turns, whole.digest(), tuple(sizes))


def fraction(digest: bytes) -> float:
    """Returns a number from 0 to below 1 that depends on the text alone."""
    return int.from_bytes(digest[:6], "big") / 2**48


def split_of(digest: bytes, held_out: float) -> str:
    """Returns the split of a document."""
    return VALIDATION if fraction(digest) < held_out else TRAIN


def ahead(items: Iterator[T], interrupt: Interrupt) -> Iterator[T]:
    """Yields the same items, of which the next is made by a thread while one is used.

    The thread is a daemon: reading for long, as through what an interrupted command had read, holds up neither
    Ctrl-C nor the end of the process.

    Raises:
      InterruptError: Ctrl-C, after an item has been used or while the next one is made.
    """
    asked: Queue[bool] = Queue()
    made: Queue[tuple[Iterable[T], BaseException | None]] = Queue()
    threading.Thread(target=_make, args=(items, asked, made), name="read", daemon=True).start()
    try:
        asked.put(True)
        while True:
            try:
                item, error = made.get(timeout=_PATIENCE)
            except Empty:
                interrupt.check()
                continue
            if error is not None:
                raise error
            if not item:
                return
            asked.put(True)
            yield from item
            interrupt.check()
    finally:
        asked.put(False)


def _make(items: Iterator[T], asked: Queue[bool], made: Queue[tuple[Iterable[T], BaseException | None]]) -> None:
    """Makes an item whenever it is asked for: a list of it, or an empty one at the end."""
    while asked.get():
        try:
            made.put((list(itertools.islice(items, 1)), None))
        except BaseException as error:
            made.put(([], error))
