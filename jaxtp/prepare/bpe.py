"""Trains a byte-level BPE tokenizer on the inputs."""

from collections.abc import Iterator
from typing import Any

from jaxtp.data.manifest import TRAIN
from jaxtp.interrupt import Interrupt
from jaxtp.prepare.batches import Batch, Entry, ahead, batches, fraction, split_of
from jaxtp.prepare.config import PrepareConfig
from jaxtp.prepare.errors import PrepareError
from jaxtp.prepare.formats import Source
from jaxtp.prepare.report import Report
from jaxtp.prepare.sources import Position

END_TOKEN = "<|endoftext|>"


def train(vocab_size: int, sources: list[Source], config: PrepareConfig, report: Report, interrupt: Interrupt) -> bytes:
    """Trains on a sample of the documents; the same inputs give the same file.

    Returns:
      The content of a `tokenizer.json`. It encodes any text, and decodes to the same bytes.

    Raises:
      PrepareError: there is nothing to train on, or something cannot be read and `on_error` is stop.
      InterruptError: Ctrl-C, which waits until the library is through.
    """
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[config.eos or END_TOKEN],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(sources, config, report, interrupt), trainer)
    interrupt.check()
    return str(tokenizer.to_str()).encode()


def _texts(sources: list[Source], config: PrepareConfig, report: Report, interrupt: Interrupt) -> Iterator[str]:
    """Yields the texts of the sample. Compressed files count as they lie on disk, so the sample of them is larger."""
    share = config.bpe_sample / max(1, sum(source.size for source in sources))
    chosen = 0
    for batch in ahead(batches(sources, Position(0, 0), config.fields, config.on_error), interrupt):
        for entry in _sample(batch, config.held_out, share):
            chosen += sum(entry.sizes)
            for turn in entry.turns:
                yield from filter(None, (turn.text, turn.prompt))
        report.moved(batch.done, f"reading {chosen:,} bytes of text to train the tokenizer on")
    if not chosen:
        raise PrepareError("nothing to train a tokenizer on: the inputs, without the held-out part, have no text")
    report.line(f"training a BPE tokenizer of {config.train_bpe:,} on {chosen:,} bytes of text")


def _sample(batch: Batch, held_out: float, share: float) -> Iterator[Entry]:
    """Yields the documents to train on: of those not held out, with fractions `held_out` to 1, the first `share`."""
    for entry in batch.entries:
        in_sample = fraction(entry.digest) - held_out < share * (1 - held_out)
        if split_of(entry.digest, held_out) == TRAIN and in_sample:
            yield entry


def _library() -> Any:
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: F401 (attributes of the module)
    except ImportError:
        raise PrepareError("--train-bpe needs the library tokenizers: pip install 'jaxtp[data]'") from None
    return tokenizers
