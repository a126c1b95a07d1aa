"""The tokens that each document begins and ends with, and what says so."""

from collections.abc import Iterator
from dataclasses import replace

from jaxtp.data.tokenizer import HuggingFaceTokenizer, Tokenizer, tokenizer_file
from jaxtp.data.tokenizer_files import end_token
from jaxtp.prepare.bpe import END_TOKEN
from jaxtp.prepare.config import PrepareConfig


def with_marks(content: bytes, name: str, config: PrepareConfig) -> HuggingFaceTokenizer:
    """Returns a tokenizer whose `info` has the prefix and the end token that the command line asks for.

    Args:
      content: content of its file.
      name: its name in messages.
      config: the command line.

    Raises:
      TokenizerError: it or a file beside it cannot be used, or nothing tells which token ends a document.
    """
    eos, _ = _end(config)
    special = config.special_tokens
    tokenizer = HuggingFaceTokenizer(content, name, eos=eos, has_eos=not config.no_eos, special_tokens=special)
    if config.tokenizer is not None and config.bos == "auto":
        tokenizer.info = replace(tokenizer.info, prefix=tokenizer.prefix)
    return tokenizer


def described(tokenizer: Tokenizer, config: PrepareConfig) -> Iterator[str]:
    """Yields what a command says of them; nothing for bytes, which have none."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return
    info = tokenizer.info
    if config.messages is not None:
        end = "" if info.eos_id is None else f"; to generate ends at {_spelled(tokenizer, [info.eos_id])}"
        yield f"an answer each, after what comes before it, as the chat template writes them{end}"
        return
    if info.prefix:
        yield f"begin with {_spelled(tokenizer, info.prefix)}, as the tokenizer puts it"
    if info.eos_id is not None:
        yield f"end with {_spelled(tokenizer, [info.eos_id])}, {_end(config)[1]}"


def _end(config: PrepareConfig) -> tuple[str | int | None, str]:
    """Returns the end token by name or id, None if the tokenizer is to be searched for one; and what says so."""
    if config.no_eos:
        return None, ""
    if config.eos is not None:
        return config.eos, "as --eos says"
    if config.tokenizer is None:
        return END_TOKEN, "as in every tokenizer trained here"
    beside = end_token(tokenizer_file(config.tokenizer).parent)
    return (None, "known by its name") if beside is None else (beside[0], f"as {beside[1]} says")


def _spelled(tokenizer: HuggingFaceTokenizer, ids: list[int] | tuple[int, ...]) -> str:
    return " ".join(f"{tokenizer.spelled(token)} ({token})" for token in ids)
