"""Trains a byte-level BPE tokenizer on inputs of `jaxtp prepare`, which then reads them with it.

    python scripts/train_bpe.py jaxtp README.md --include '*.py' --size 1024 --out data/bpe
    jaxtp prepare jaxtp README.md --include '*.py' --tokenizer data/bpe --out data/own

The inputs, and flags that choose files, fields and held-out documents, are those of `jaxtp
prepare`. Held-out documents are not learnt from. Documents end with <|endoftext|>.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxtp.config import entry
from jaxtp.config.files import write_atomically
from jaxtp.config.schema import ConfigError
from jaxtp.data.manifest import TOKENIZER
from jaxtp.data.prepare.__main__ import COMMAND
from jaxtp.data.prepare.batches import batches, fraction, threshold
from jaxtp.data.prepare.prepare_config import PrepareConfig, check
from jaxtp.data.prepare.readers import Position, PrepareError
from jaxtp.data.prepare.sources import find_sources

END = "<|endoftext|>"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--size", type=int, required=True, help="vocabulary size, 257 or more")
    parser.add_argument(
        "--sample",
        type=int,
        default=2**28,
        help="approximate bytes of text, chosen by a hash of each document (default: 256 MiB)",
    )
    options, words = parser.parse_known_args(argv)
    if options.size < 257:
        parser.error("--size: 256 bytes and the end token need 257 or more")
    return entry.attempt("train_bpe.py", lambda: write_tokenizer(words, options))


def write_tokenizer(words: Sequence[str], options: argparse.Namespace) -> None:
    config, _ = COMMAND.load(words)
    others = (config.verify, config.show, config.tokenizer, config.messages, config.eos)
    if any(others) or config.preference:
        raise ConfigError(
            "--verify, --show, --tokenizer, --messages, --preference and --eos are for jaxtp "
            "prepare, which takes the trained tokenizer by --tokenizer"
        )
    check(config)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sampled_texts(config, options.sample), trainer)
    config.out.mkdir(parents=True, exist_ok=True)
    path = config.out / TOKENIZER
    write_atomically(path, str(tokenizer.to_str()).encode())
    print(f"{path}: a vocabulary of {tokenizer.get_vocab_size():,}")


def sampled_texts(config: PrepareConfig, sample: int) -> Iterator[str]:
    """Yields training texts. Files count by their size on disk, so packed ones yield more text."""
    sources = find_sources(config)
    held_out = threshold(sources, config.fields, config)
    share = sample / max(1, sum(source.size for source in sources))
    chosen = 0
    for batch in batches(sources, config.fields, Position(0, 0), config.on_error):
        for document in batch.entries:
            if 0 <= fraction(document.digest) - held_out < share * (1 - held_out):
                chosen += sum(document.sizes)
                for turn in document.turns:
                    yield from filter(None, (turn.text, turn.prompt))
    if not chosen:
        raise PrepareError(
            "nothing to train a tokenizer on: the inputs, without the held-out part, have no text"
        )
    print(f"training on {chosen:,} bytes of text", flush=True)


if __name__ == "__main__":
    sys.exit(main())
