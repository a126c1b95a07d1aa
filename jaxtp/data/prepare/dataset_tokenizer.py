"""A dataset's tokenizer, with its BOS and EOS tokens."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

import numpy as np

from jaxtp.config.files import sha256, write_atomically
from jaxtp.data.added_tokens import with_tokens
from jaxtp.data.documents import Tokens
from jaxtp.data.manifest import TOKENIZER
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.prepare.readers import Turn
from jaxtp.data.prepare.session import Job, State, damaged_error
from jaxtp.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    IsolatedTokenizer,
    Tokenizer,
    read_tokenizer,
    tokenizer_file,
)
from jaxtp.data.tokenizer_files import TokenizerError, end_token


def named_tokenizer(config: PrepareConfig) -> Tokenizer:
    """Returns the configured tokenizer."""
    if config.tokenizer is None:
        return ByteTokenizer()
    file = tokenizer_file(config.tokenizer)
    eos: str | int | None = config.eos
    if eos is None and not config.no_eos:
        # If it is None, the tokenizer searches for a well-known name.
        eos = end_token(file.parent)
    content = read_tokenizer(file)
    if config.add_tokens:
        content = with_tokens(content, config.add_tokens, str(file)).tokenizer
    tokenizer = IsolatedTokenizer(content, str(file), eos=eos, special_tokens=config.special_tokens)
    if config.no_eos:
        tokenizer.info = replace(tokenizer.info, eos_id=None)
    elif tokenizer.info.eos_id is None:
        raise TokenizerError(
            f"{file}: which token ends a document? Name it by --eos TOKEN, or give --no-eos"
        )
    if config.bos == "none":
        tokenizer.info = replace(tokenizer.info, prefix=())
    return tokenizer


def write_tokenizer(job: Job, state: State) -> None:
    """Writes the tokenizer's file, or checks that it is the one that made the tokens so far."""
    path = job.out / TOKENIZER
    if state.tokenizer is None:
        if isinstance(job.tokenizer, HuggingFaceTokenizer):
            write_atomically(path, job.tokenizer.content)
        state.tokenizer = job.tokenizer.info
        state.save(job.out)
    elif state.tokenizer.sha256 is not None and not (
        path.exists() and sha256(path) == state.tokenizer.sha256
    ):
        raise damaged_error(path, "it is not the tokenizer that made the tokens so far")


class DocumentEncoder:
    """Makes the tokens of documents, with those that start and end them."""

    def __init__(self, job: Job):
        self._job = job
        info = job.tokenizer.info
        has_ends = job.conversations is None  # else the template writes prefix and end
        self._prefix = np.array(info.prefix if has_ends else (), info.dtype)
        self._end = np.array(list(info.end_ids) if has_ends else (), info.dtype)

    def encode(self, turns: Sequence[Turn]) -> Iterator[Sequence[Tokens]]:
        """Yields the tokens of the prompt, if there is one, and of the text of each turn."""
        if self._job.conversations is not None:
            return iter(self._job.conversations.encode(turns))
        parts = chain.from_iterable(turn[:2] for turn in turns)
        texts = [part for part in parts if part is not None]
        parts_per_turn = 1 + self._job.config.has_prompts
        encoded = iter(self._job.tokenizer.encode_batch(texts))
        return (list(islice(encoded, parts_per_turn)) for _ in turns)

    def document(self, ids: Sequence[Tokens]) -> tuple[list[Tokens], int]:
        """Returns the parts of a document's tokens, and the number of tokens in its prompt.

        The list is empty if the tokenizer drops the whole text, such as white space.
        """
        if not any(map(len, (*ids, self._end))):
            return [], 0
        prefix = self._prefix
        if self._job.config.special_tokens:
            first_ids = np.concatenate(ids)[: len(prefix)]
            if np.array_equal(first_ids, prefix):
                prefix = prefix[:0]  # the text spells it
        num_prompt = len(prefix) + len(ids[0]) if self._job.config.has_prompts else 0
        return [prefix, *ids, self._end], num_prompt


def describe(tokenizer: Tokenizer, ends: Container[int] | None = None) -> Iterator[str]:
    """Yields descriptions of the tokens that start and end documents; none for bytes.

    Args:
      ends: the tokens that a template writes at the end, if there is one.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokens = [f"{tokenizer.spelling(token)} ({token})" for token in tokenizer.info.prefix]
        if tokens:
            yield f"begin with {' '.join(tokens)}"
        end = tokenizer.info.eos_id
        if end is not None and (ends is None or end in ends):
            yield f"end with {tokenizer.spelling(end)} ({end})"
