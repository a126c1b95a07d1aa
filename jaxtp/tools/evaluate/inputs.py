"""The documents to measure on: checked before any computation, then streamed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from jaxtp.config.schema import ConfigError, nearest_file
from jaxtp.data.copies import local
from jaxtp.data.manifest import MANIFEST, TRAIN, VALIDATION
from jaxtp.data.prepare.batches import batches
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.prepare.readers import Fields, Position, Source
from jaxtp.data.prepare.sources import find_sources
from jaxtp.data.store import Dataset, Split, open_dataset
from jaxtp.data.tokenizer import Tokenizer, load_tokenizer
from jaxtp.generate.loading import ModelSource
from jaxtp.generate.request import Ids
from jaxtp.tools.evaluate.evaluation_settings import EvaluateConfig


@dataclass(frozen=True)
class Document:
    """A tokenized document."""

    tokens: Ids
    first: int  # Index of the first counted token: after the prompt, and at least 1
    num_bytes: int  # Bytes of the counted tokens' text as UTF-8


@dataclass(frozen=True)
class Input:
    """Documents from one source."""

    name: str
    num_documents: int
    documents: Callable[[], Iterator[Document]]
    """Yields the documents in order."""


def open_inputs(config: EvaluateConfig, path: Path, model: ModelSource) -> list[Input]:
    """Opens the datasets and files for the model in `path`.

    Reads files once in full, to find errors early.

    Raises:
      ValueError: an input is missing, unreadable, empty, or for another tokenizer.
    """
    inputs = [_open_dataset(folder, config, path, model) for folder in config.data]
    for name in config.text:
        inputs += _open_files(name, config, model)
    return inputs


def _open_dataset(folder: Path, config: EvaluateConfig, path: Path, model: ModelSource) -> Input:
    opened = local(folder)
    if opened.is_file():
        raise ConfigError(
            f"--data {folder} is a file: read it by --text {folder}, or make a dataset by "
            "jaxtp prepare"
        )
    if not opened.exists():
        raise ConfigError(f"--data {folder}: no such folder{nearest_file(folder)}")
    dataset = open_dataset(opened)
    require_tokenizer(dataset, config.tokenizer or path, model)
    splits = {name: split for name, split in dataset.splits.items() if split.num_documents}
    if not splits:
        raise ConfigError(f"--data {folder}: a dataset without documents")
    name: str = config.split
    if name == "auto":
        name = VALIDATION if VALIDATION in splits else TRAIN
    if name not in splits:
        raise ConfigError(
            f"--data {folder} has no documents in its {name} split; it has some in "
            f"{', '.join(splits)}"
        )
    split = splits[name]
    if split.has_pairs:
        raise ConfigError(
            f"--data {folder} has pairs of answers, which only a loss of jaxtp train evaluates"
        )
    count = min(split.num_documents, config.limit or split.num_documents)
    documents = partial(_documents_of_split, split, count, load_tokenizer(opened), model)
    return Input(str(folder), count, documents)


def _documents_of_split(
    split: Split, count: int, tokenizer: Tokenizer, model: ModelSource
) -> Iterator[Document]:
    for index in range(count):
        tokens = split.document(index).astype(np.int32)
        check_ids(tokens, model, split.location(index))
        first = max(split.prompt_length(index), 1)
        first_byte = max(first, len(tokenizer.info.prefix))
        yield Document(tokens, first, len(tokenizer.decode(tokens[first_byte:])))


def require_tokenizer(dataset: Dataset, tokenizer: Path, model: ModelSource) -> None:
    """Raises `ConfigError` if a dataset was not made with the model's; `tokenizer` is its path."""
    expected = model.tokenizer.info
    actual = dataset.tokenizer
    if expected.sha256 != actual.sha256:
        flag = "without --tokenizer" if expected.sha256 is None else f"with --tokenizer {tokenizer}"
        raise ConfigError(
            f"{dataset.folder} was made with tokenizer {actual.name[:12]}, and {model.name} has "
            f"{expected.name[:12]}, whose ids mean other tokens; prepare the documents again {flag}"
        )


def _open_files(name: str, config: EvaluateConfig, model: ModelSource) -> list[Input]:
    if (Path(name) / MANIFEST).is_file():
        raise ConfigError(f"--text {name} is a dataset of jaxtp prepare: read it by --data {name}")
    prepare = PrepareConfig(inputs=(name,), field=config.field)
    fields = replace(prepare.fields, only_texts=True)
    inputs = []
    for source in find_sources(prepare):
        read = partial(_read_texts, source, fields, config.limit)
        if count := sum(map(len, read())):
            documents = partial(_documents_of_texts, read, source.path, model)
            inputs.append(Input(source.path, count, documents))
    if not inputs:
        raise ConfigError(f"--text {name}: all documents are empty")
    return inputs


def _read_texts(source: Source, fields: Fields, limit: int | None) -> Iterator[list[str]]:
    count = 0
    for batch in batches([source], fields, Position(0, 0), on_error="stop"):
        texts = [entry.turns[0].text for entry in batch.entries]
        if limit is not None:
            texts = texts[: limit - count]
        yield texts
        count += len(texts)
        if count == limit:
            return


def _documents_of_texts(
    read: Callable[[], Iterator[list[str]]], name: str, model: ModelSource
) -> Iterator[Document]:
    tokenizer = model.tokenizer
    prefix = np.array(model.prefix, np.int32)
    for texts in read():
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            tokens = np.concatenate([prefix, ids.astype(np.int32)])
            check_ids(tokens, model, name)
            # The first token is not predicted.
            uncounted = 0 if len(prefix) else len(tokenizer.decode(ids[:1]))
            yield Document(tokens, max(len(prefix), 1), max(len(text.encode()) - uncounted, 0))


def check_ids(tokens: Ids, model: ModelSource, place: str) -> None:
    """Raises `ConfigError` if a token is not in the model's vocabulary."""
    size = model.config.vocab_size
    largest = tokens.max(initial=0)
    if largest >= size:
        raise ConfigError(
            f"{place}: the token {largest} is beyond the {size:,} of {model.name}: its tokenizer "
            "has more tokens than the model"
        )
