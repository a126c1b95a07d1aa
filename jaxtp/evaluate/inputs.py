"""The documents that a model is measured on: checked before anything is computed, then streamed."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxtp.config import nearest_file
from jaxtp.data.manifest import MANIFEST, TRAIN, VALIDATION
from jaxtp.data.store import Dataset, Split, open_dataset
from jaxtp.data.tokenizer import Tokenizer, load_tokenizer
from jaxtp.entry import UserError
from jaxtp.evaluate.config import EvaluateConfig
from jaxtp.generate.loading import Source as Model
from jaxtp.prepare import formats
from jaxtp.prepare.batches import BATCH_BYTES, BATCH_DOCUMENTS
from jaxtp.prepare.config import PrepareConfig
from jaxtp.prepare.errors import Document as Read
from jaxtp.prepare.errors import Problem
from jaxtp.prepare.formats import Fields
from jaxtp.prepare.sources import find_sources


class InputError(UserError):
    """Documents that are missing, unreadable, or of another model."""


@dataclass(frozen=True)
class Document:
    """A document as the model reads it."""

    tokens: NDArray[np.int32]

    first: int
    """Index of the first token that counts: after its prompt, and never the first."""

    num_bytes: int
    """Bytes, as UTF-8, of the text of the tokens that count."""

    size: int
    """Bytes that it takes of `Input.size`."""


class Input(ABC):
    """Documents from one place.

    Attributes:
      name: the place.
      num_documents: number of documents that are read.
      size: bytes of their text, about, for the progress.
    """

    name: str
    num_documents: int
    size: int

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Yields the documents, in order."""


def open_inputs(config: EvaluateConfig, model: Model) -> list[Input]:
    """Returns what the command line names; of files every byte is read once, so that what is wrong is found now.

    Raises:
      ValueError: something is missing, unreadable, empty, or of another tokenizer (`InputError`, `DatasetError`,
        `PrepareError`).
    """
    found: list[Input] = [_dataset(folder, config, model) for folder in config.data]
    for name in config.text:
        found += _files(name, config, model)
    return found


class DatasetInput(Input):
    """Documents of a split of a dataset.

    Args:
      split: the split.
      tokenizer: the tokenizer of the dataset.
      name: its name.
      model: the model.
      limit: number of documents at most.
    """

    def __init__(self, split: Split, tokenizer: Tokenizer, name: str, model: Model, limit: int | None):
        self.name = name
        self.num_documents = min(split.num_documents, limit or split.num_documents)
        self.size = split.num_text_bytes * self.num_documents // split.num_documents
        self._split, self._tokenizer, self._model = split, tokenizer, model

    def documents(self) -> Iterator[Document]:
        """Yields the documents."""
        split, tokenizer = self._split, self._tokenizer
        bytes_per_token = split.num_text_bytes / split.num_tokens
        for index in range(self.num_documents):
            tokens = split.document(index).astype(np.int32)
            check_ids(tokens, self._model, split.place(index))
            first = max(split.prompt_length(index), 1)
            text = tokens[max(first, len(tokenizer.info.prefix)) :]
            yield Document(tokens, first, tokenizer.num_bytes(text), round(len(tokens) * bytes_per_token))


class TextInput(Input):
    """Documents of one file.

    Args:
      source: the file.
      fields: the column of a row that is a document.
      model: the model.
      limit: number of documents at most.

    Raises:
      InputError: something in the file cannot be read.
    """

    def __init__(self, source: formats.Source, fields: Fields, model: Model, limit: int | None):
        self.name = source.path
        self._source, self._fields, self._model, self._limit = source, fields, model, limit
        sizes = [len(text.encode()) for text in self._texts()]
        self.num_documents, self.size = len(sizes), sum(sizes)

    def documents(self) -> Iterator[Document]:
        """Yields the documents; some MB of them are made into tokens at a time, on all cores."""
        tokenizer, prefix = self._model.tokenizer, np.array(self._model.prefix, np.int32)
        for texts in _grouped(self._texts()):
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                tokens = np.concatenate([prefix, ids.astype(np.int32)])
                check_ids(tokens, self._model, self.name)
                size = len(text.encode())
                unseen = 0 if len(prefix) else tokenizer.num_bytes(ids[:1])
                yield Document(tokens, max(len(prefix), 1), max(size - unseen, 0), size)

    def _texts(self) -> Iterator[str]:
        return itertools.islice(self._all(), self._limit)

    def _all(self) -> Iterator[str]:
        for event in formats.read(self._source, 0, self._fields):
            if isinstance(event, Read):
                yield event.turns[0].text
            elif isinstance(event, Problem) and not event.harmless:
                raise InputError(event.message)


def check_ids(tokens: NDArray[np.int32], model: Model, place: str) -> None:
    """Checks that a model has all of some tokens.

    Raises:
      InputError: it has not.
    """
    if len(tokens) and (largest := int(tokens.max())) >= model.config.vocab_size:
        raise InputError(
            f"{place}: the token {largest} is beyond the {model.config.vocab_size:,} of {model.name}: its tokenizer "
            "has more tokens than the model"
        )


def _grouped(texts: Iterator[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= BATCH_BYTES or len(group) == BATCH_DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _dataset(folder: Path, config: EvaluateConfig, model: Model) -> Input:
    if not (folder / MANIFEST).exists() and folder.is_file():
        raise InputError(f"--data {folder} is a file: --text {folder} reads it, jaxtp prepare makes a dataset")
    if not folder.exists():
        raise InputError(f"--data {folder}: no such folder{nearest_file(folder)}")
    dataset = open_dataset(folder)
    _require_tokenizer(dataset, config, model)
    splits = {name: split for name, split in dataset.splits.items() if split.num_documents}
    if not splits:
        raise InputError(f"--data {folder}: a dataset without documents")
    name = (VALIDATION if VALIDATION in splits else TRAIN) if config.split == "auto" else config.split
    if name not in splits:
        raise InputError(f"--data {folder} has no documents for {name}; it has some for {', '.join(splits)}")
    return DatasetInput(splits[name], load_tokenizer(folder), str(folder), model, config.limit)


def _require_tokenizer(dataset: Dataset, config: EvaluateConfig, model: Model) -> None:
    ours, theirs = model.tokenizer.info, dataset.tokenizer
    if ours.sha256 == theirs.sha256:
        return
    made = "from bytes" if theirs.sha256 is None else f"by another tokenizer ({theirs.sha256[:12]})"
    needed = "bytes" if ours.sha256 is None else f"that of {model.name} ({ours.sha256[:12]})"
    prepare = "without --tokenizer" if ours.sha256 is None else f"with --tokenizer {config.tokenizer or config.model}"
    raise InputError(
        f"--data {dataset.folder} was made {made}, and the model reads {needed}: its tokens mean something else. "
        f"Prepare the documents again {prepare}, or give their files by --text"
    )


def _files(name: str, config: EvaluateConfig, model: Model) -> list[Input]:
    if (Path(name) / MANIFEST).is_file():
        raise InputError(f"--text {name} is a dataset of jaxtp prepare: --data {name} reads it")
    most = config.max_document_bytes
    reading = PrepareConfig(inputs=(name,), field=config.field, max_document_bytes=most, max_window_bytes=2**31)
    files = [TextInput(source, reading.fields, model, config.limit) for source in find_sources(reading)]
    found: list[Input] = [file for file in files if file.num_documents]
    if not found:
        raise InputError(f"--text {name}: no document in it that is not empty")
    return found
