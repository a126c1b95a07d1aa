"""A dataset's tokenizer, named or trained on the inputs, with its BOS and EOS tokens."""

from collections.abc import Iterator
from dataclasses import replace

from jaxtp.config.files import sha256, write_atomically
from jaxtp.data.manifest import TOKENIZER
from jaxtp.data.prepare.batches import batches, fraction
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.prepare.readers import Position, PrepareError
from jaxtp.data.prepare.session import Job, State, damaged_error
from jaxtp.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    IsolatedTokenizer,
    Tokenizer,
    read_tokenizer,
    tokenizer_file,
)
from jaxtp.data.tokenizer_files import end_token

_END_TOKEN = "<|endoftext|>"


def named_tokenizer(config: PrepareConfig) -> Tokenizer | None:
    """Returns the configured tokenizer; None if it is yet to be trained."""
    if config.train_bpe is not None:
        return None
    if config.tokenizer is None:
        return ByteTokenizer()
    file = tokenizer_file(config.tokenizer)
    return _with_special_tokens(read_tokenizer(file), str(file), config)


def open_tokenizer(job: Job, state: State) -> Tokenizer:
    """Opens or trains the dataset's tokenizer and writes its file."""
    path = job.out / TOKENIZER
    config = job.config
    if state.tokenizer is None and config.tokenizer is not None:
        write_atomically(path, read_tokenizer(tokenizer_file(config.tokenizer)))
    elif state.tokenizer is None and job.tokenizer is None:
        write_atomically(path, _train_bpe(job))
    tokenizer = job.tokenizer or _with_special_tokens(read_tokenizer(path), str(path), config)
    if state.tokenizer is None:
        state.tokenizer = tokenizer.info
        state.save(job.out)
    elif state.tokenizer.sha256 is not None and not (
        path.exists() and sha256(path) == state.tokenizer.sha256
    ):
        raise damaged_error(path, "it is not the tokenizer that made the tokens so far")
    return tokenizer


def describe(tokenizer: Tokenizer) -> Iterator[str]:
    """Yields descriptions of the tokens that start and end documents; none for bytes."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokens = [f"{tokenizer.spelling(token)} ({token})" for token in tokenizer.info.prefix]
        if tokens:
            yield f"begin with {' '.join(tokens)}"
        end = tokenizer.info.eos_id
        if end is not None:
            yield f"end with {tokenizer.spelling(end)} ({end})"


def _with_special_tokens(content: bytes, name: str, config: PrepareConfig) -> HuggingFaceTokenizer:
    eos: str | int | None = config.eos or _END_TOKEN
    if config.eos is None and config.tokenizer is not None and not config.no_eos:
        # If it is None, the tokenizer searches for a well-known name.
        eos = end_token(tokenizer_file(config.tokenizer).parent)
    special = config.special_tokens
    tokenizer = IsolatedTokenizer(
        content, name, eos=eos, has_eos=not config.no_eos, special_tokens=special
    )
    if config.tokenizer is not None and config.bos == "auto":
        tokenizer.info = replace(tokenizer.info, prefix=tokenizer.prefix)
    return tokenizer


def _train_bpe(job: Job) -> bytes:
    try:
        from tokenizers import Tokenizer as Library
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise PrepareError(
            "--train-bpe needs the library tokenizers: pip install 'jaxtp[data]'"
        ) from None
    assert job.config.train_bpe is not None
    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=job.config.train_bpe,
        special_tokens=[job.config.eos or _END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sampled_texts(job), trainer)
    return str(tokenizer.to_str()).encode()


def _sampled_texts(job: Job) -> Iterator[str]:
    """Yields training texts. Files count by their size on disk, so packed ones yield more text."""
    config = job.config
    share = config.bpe_sample / max(1, sum(source.size for source in job.sources))
    chosen = 0
    for batch in batches(job.sources, job.fields, Position(0, 0), config.on_error):
        for entry in batch.entries:
            if 0 <= fraction(entry.digest) - config.held_out < share * (1 - config.held_out):
                chosen += sum(entry.sizes)
                for turn in entry.turns:
                    yield from filter(None, (turn.text, turn.prompt))
    if not chosen:
        raise PrepareError(
            "nothing to train a tokenizer on: the inputs, without the held-out part, have no text"
        )
    print(
        f"training a BPE tokenizer of {config.train_bpe:,} on {chosen:,} bytes of text", flush=True
    )
