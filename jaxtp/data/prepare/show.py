"""Shows documents as they are trained, and writes nothing."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import numpy as np

from jaxtp.config.console import has_colour, printable, styled
from jaxtp.config.entry import escaped
from jaxtp.config.schema import ConfigError, expand
from jaxtp.data.documents import Tokens
from jaxtp.data.manifest import MANIFEST
from jaxtp.data.prepare.dataset_tokenizer import DocumentEncoder
from jaxtp.data.prepare.preference import num_shared
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.prepare.readers import EMPTY_DOCUMENT, Event, PrepareError, read_source
from jaxtp.data.prepare.run import listed, open_job, remarks
from jaxtp.data.prepare.session import JOURNAL, Job
from jaxtp.data.store import Split, open_dataset
from jaxtp.data.tokenizer import Tokenizer, load_tokenizer

_MARKS = "⟦⟧"
"""Around what is learned, where there are no colours; in texts they are escaped."""
_PAIR = ("chosen", "rejected")


def show(config: PrepareConfig, count: int) -> None:
    """Prints the documents of the first `count` items of the inputs; raises `UserError`."""
    folders = [folder for folder in map(expand, map(Path, config.inputs)) if _is_dataset(folder)]
    if folders:
        settings = replace(config, inputs=(), show=None, show_tokens=False)
        if len(config.inputs) > 1 or settings != PrepareConfig():
            raise ConfigError(
                f"{folders[0]} is a dataset, which has its tokens already; give --show and this "
                "folder alone"
            )
        _show_dataset(folders[0], count, config.show_tokens)
    else:
        _show_inputs(open_job(Path(), config), count)


def _is_dataset(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (MANIFEST, JOURNAL))


def _show_dataset(folder: Path, count: int, with_tokens: bool) -> None:
    splits = open_dataset(folder).splits.values()
    picture = _Picture(load_tokenizer(folder), with_tokens)
    documents = chain.from_iterable(map(_documents, splits))
    has_pairs = any(split.has_pairs for split in splits)
    for place, tokens, num_prompt in islice(documents, count * (1 + has_pairs)):
        picture.show(place, tokens, num_prompt)


def _documents(split: Split) -> Iterator[tuple[str, Tokens, int]]:
    for index in range(split.num_documents):
        place = split.location(index)
        if split.has_pairs:
            place += f", {_PAIR[index % 2]}"
        yield place, split.document(index), split.prompt_length(index)


def _show_inputs(job: Job, count: int) -> None:
    conversations = job.conversations
    if conversations is not None:
        conversations.template.day = conversations.first_day()
    encoder = DocumentEncoder(job)
    picture = _Picture(job.tokenizer, job.config.show_tokens)
    left_out = Counter[str]()
    num_shown = 0
    for event in chain.from_iterable(read_source(source, 0, job.fields) for source in job.sources):
        if event.problem is not None:
            if job.config.on_error == "stop" and not event.problem.is_harmless:
                raise PrepareError(str(event.problem))
            print(f"{'left out':<12}{event.problem}\n")
            continue
        left_out.update(event.documents.left_out)
        if not event.documents.turns:
            continue
        documents = [encoder.document(ids) for ids in encoder.encode(event.documents.turns)]
        for place, (parts, num_prompt) in zip(_places(job, event), documents, strict=True):
            if parts:
                picture.show(place, np.concatenate(parts), num_prompt)
            else:
                print(f"{'left out':<12}{place}: {EMPTY_DOCUMENT}\n")
        num_shown += 1
        if num_shown == count:
            break
    if not num_shown:
        raise PrepareError(f"no document in {len(job.sources)} files")
    for line in remarks(job):
        print(line)
    if left_out:
        print(f"{'left out':<12}{listed(left_out)}")


def _places(job: Job, event: Event) -> Iterator[str]:
    num_turns = len(event.documents.turns)
    for number in range(num_turns):
        if job.config.preference:
            yield f"{event.place}, {_PAIR[number]}"
        elif num_turns > 1:
            yield f"{event.place}, answer {number + 1} of {num_turns}"
        else:
            yield event.place


class _Picture:
    """Prints tokens as text, with marks or a colour for those that are learned."""

    def __init__(self, tokenizer: Tokenizer, with_tokens: bool):
        self._tokenizer = tokenizer
        self._with_tokens = with_tokens
        self._has_colour = has_colour(sys.stdout)

    def show(self, place: str, tokens: Tokens, num_prompt: int) -> None:
        """Prints a document and the numbers of its tokens; raises `TokenizerError`."""
        # No token predicts the first one.
        start = max(num_prompt, 1)
        self._print(styled(f"== {place} ==", "bold", self._has_colour))
        if self._with_tokens:
            for index, token in enumerate(tokens.tolist()):
                _, text = self._parts(tokens[max(index - 1, 0) : index + 1], min(index, 1))
                quoted = repr(text)
                if index >= start:
                    quoted = self._learned(quoted)
                self._print(f"{token:>8}  {quoted}")
        else:
            before, learned = self._parts(tokens, start)
            self._print(f"{self._plain(before)}{self._learned(self._plain(learned))}")
        num_learned = max(len(tokens) - start, 0)
        prompt = f"{num_prompt:,} in the prompt, " if num_prompt else ""
        self._print(f"{'tokens':<12}{len(tokens):,}: {prompt}{num_learned:,} learned\n")

    def _print(self, text: str) -> None:
        print(printable(text, sys.stdout), flush=True)

    def _parts(self, tokens: Tokens, cut: int) -> tuple[str, str]:
        """Returns the text of the first `cut` tokens, and what the others add to it."""
        whole = self._tokenizer.decode(tokens, with_end=True)
        before = self._tokenizer.decode(tokens[:cut], with_end=True)
        # Decoders join tokens, so the others alone may have another text, and so may a part of a
        # character.
        shared = num_shared(before, whole)
        first, second = (
            part.decode(errors="backslashreplace") for part in (whole[:shared], whole[shared:])
        )
        return first, second

    def _plain(self, text: str) -> str:
        text = escaped(text)
        for mark in "" if self._has_colour else _MARKS:
            text = text.replace(mark, mark.encode("unicode_escape").decode())
        return text

    def _learned(self, text: str) -> str:
        if not self._has_colour:
            return text.join(_MARKS)
        # Pagers end colours at the end of a line.
        return "\n".join(styled(line, "green", self._has_colour) for line in text.split("\n"))
