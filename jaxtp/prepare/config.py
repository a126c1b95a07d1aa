"""The command line of `jaxtp prepare`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro
from pydantic import Field

from jaxtp.config import ConfigError, NonNegative, Switch, UserPath, allowed, to_plain
from jaxtp.prepare.formats import Fields

Count = Annotated[int, Field(ge=1, lt=2**40), allowed("1 or more")]
Patterns = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="PATTERN")]

MIN_VOCAB_SIZE = 257
"""256 bytes and the end token."""
TEXT_FIELD = "text"
FIRST = (
    "inputs",
    "out",
    "tokenizer",
    "train_bpe",
    "field",
    "messages",
    "template",
    "include",
    "held_out",
    "dedup",
    "on_error",
    "overwrite",
    "json",
    "verify",
)
"""Settings that the help shows first."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """The inputs, how they become tokens, and where those go."""

    inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT", help_behavior_hint="")] = ()
    """Text, .jsonl and .parquet files, all but the last also as .gz and .zst; folders of them, or of source files; of
    Hugging Face datasets hf:FOLDER[:SPLIT] as save_to_disk wrote it, or hf:NAME:SPLIT."""

    out: Annotated[UserPath | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the dataset. The same command again goes on where it was interrupted."""

    tokenizer: Annotated[UserPath | None, tyro.conf.arg(metavar="PATH")] = None
    """A tokenizer.json of Hugging Face, or a folder that has one, such as that of the model to tune; by default a token
    is a byte."""

    train_bpe: Annotated[int | None, Field(ge=MIN_VOCAB_SIZE, le=2**20), tyro.conf.arg(metavar="SIZE")] = None
    """Trains a byte-level BPE tokenizer with this vocabulary (257 or more) on the inputs, without the held-out part."""

    bpe_sample: Count = 2**28
    """Bytes of text that --train-bpe learns from, about, chosen by a hash of each document."""

    eos: Annotated[str | None, tyro.conf.arg(metavar="TOKEN")] = None
    """The token that ends each document. By default the eos_token of the tokenizer_config.json beside tokenizer.json,
    or the first eos_token_id of the config.json or generation_config.json there, or one of the names in use; and
    <|endoftext|> of a tokenizer trained here."""

    no_eos: Switch = False
    """Documents end in no token of their own."""

    bos: Literal["auto", "none"] = "auto"
    """auto: each document begins with the token (or tokens) that the tokenizer.json itself puts before a text, as
    Llama's does; none: with its text. Bytes and tokenizers trained here have no such token."""

    special_tokens: Switch = False
    """Text that spells a special token, such as <|im_start|>, becomes that token; otherwise it stays text."""

    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """Format of all input files; by default as the suffix says, and text where it says nothing."""

    field: str = TEXT_FIELD
    """Field of a JSONL or Parquet row that is a document."""

    prompt_field: str | None = None
    """With --completion-field: a document is prompt and completion, and the dataset knows where the prompt ends."""

    completion_field: str | None = None
    """See --prompt-field."""

    messages: Annotated[str | None, tyro.conf.arg(metavar="FIELD")] = None
    """Field of a JSONL or Parquet row that is a conversation: a list of messages, each with role and content. Each
    answer of the assistant becomes a document, with all that comes before it, as the chat template writes it, for its
    prompt: the loss is on answers only, and the beginning of a conversation of n answers is read n times."""

    template: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE")] = None
    """Chat template of --messages, in Jinja; by default the one that lies beside the tokenizer (chat_template.jinja, or
    in tokenizer_config.json)."""

    include: Patterns = ()
    """Files to read in folders, such as '*.py'; all, if not given. It is the name that matches, or the path in the
    folder where the pattern has a /. Can be given several times."""

    exclude: Patterns = ()
    """Files and folders to leave out in folders, such as site-packages. Can be given several times."""

    held_out: Annotated[float, Field(ge=0, lt=1), allowed("from 0 to below 1")] = 0.01
    """Share of the documents for validation: those that a hash of their text picks, whatever else there is."""

    dedup: Switch = False
    """Leaves out documents that were there before, to the byte; takes about 100 bytes of memory for each document."""

    on_error: Literal["stop", "skip"] = "stop"
    """Handling of what cannot be read: stop says what and where, skip counts it and goes on."""

    max_document_bytes: Count = 2**26
    """A larger document, or line of JSONL, cannot be read, nor a conversation whose answers, with all that is before
    each, come to more: it is held in memory, with ten times as much for its tokens."""

    max_window_bytes: Annotated[int, Field(ge=2**10, le=2**31), allowed("2**10 to 2**31")] = 2**27
    """A .zst file cannot be read that takes more memory to unpack; those made by zstd --long=31 take 2**31."""

    shard_tokens: Count = 2**26
    """Tokens after which a shard is full; a document is never split over two."""

    save_seconds: NonNegative = 5.0
    """Seconds between the points from which an interrupted command goes on."""

    overwrite: Switch = False
    """Starts afresh where --out holds another dataset, which is deleted before anything is read."""

    json: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write the numbers of the dataset to, for machines: those of its dataset.json, or what --verify found."""

    verify: Annotated[UserPath | None, tyro.conf.arg(metavar="DIR")] = None
    """Dataset to compare with its checksums, instead of making one; exit code 1 if it is damaged. Alone on the line."""

    @property
    def has_prompts(self) -> bool:
        """Whether documents begin with a prompt, which the loss leaves out."""
        return self.prompt_field is not None or self.messages is not None

    @property
    def fields(self) -> Fields:
        """The columns of a row that make a document."""
        if self.messages is not None:
            return Fields(self.messages)
        if self.completion_field is None:
            return Fields(self.field)
        return Fields(self.completion_field, self.prompt_field)


_NOT_OF_THE_RESULT = {
    *("out", "tokenizer", "bos", "template", "on_error", "save_seconds", "overwrite", "verify", "json"),
    *("max_document_bytes", "max_window_bytes"),
}
"""Settings that may change when a command is resumed. Tokenizer and template are compared by what is in them."""


def arguments(config: PrepareConfig) -> dict[str, Any]:
    """Returns the settings that decide what the dataset holds, as plain values."""
    return {key: value for key, value in to_plain(config).items() if key not in _NOT_OF_THE_RESULT}


def check(config: PrepareConfig) -> None:
    """Checks the settings against each other.

    Raises:
      ConfigError: with every contradiction.
    """
    problems = [*_contradictions(config), *_contradictions_of_chat(config)]
    if problems:
        raise ConfigError("; ".join(problems))


def _contradictions(config: PrepareConfig) -> Iterator[str]:
    if config.verify is not None:
        if config.inputs or config.out is not None:
            yield "--verify DIR reads a dataset and does nothing else: give no inputs and no --out"
        return
    if "" in config.inputs:
        yield "an INPUT is empty, as of a variable that is not set; give a file or a folder"
    if not config.inputs:
        yield "name at least one INPUT: a file or a folder"
    if config.out is None:
        yield "name the folder of the dataset by --out DIR"
    if config.tokenizer is not None and config.train_bpe is not None:
        yield "--tokenizer and --train-bpe are two tokenizers; give one"
    if config.tokenizer is None and config.train_bpe is None and (config.eos is not None or config.special_tokens):
        yield "bytes have no special tokens; --eos and --special-tokens go with --tokenizer or --train-bpe"
    if config.eos is not None and config.no_eos:
        yield "--eos and --no-eos contradict each other"
    if config.eos == "":
        yield "--eos is empty"
    if (config.prompt_field is None) != (config.completion_field is None):
        yield "--prompt-field and --completion-field go together"
    elif config.prompt_field is not None and config.field != TEXT_FIELD:
        yield "--field is for documents without a prompt; give it or --prompt-field and --completion-field"


def _contradictions_of_chat(config: PrepareConfig) -> Iterator[str]:
    if config.messages is None:
        if config.template is not None:
            yield "--template is of conversations; give --messages FIELD too"
        return
    if config.prompt_field is not None or config.field != TEXT_FIELD:
        yield "--messages is a row's only field; leave --field, --prompt-field and --completion-field out"
    if config.train_bpe is not None:
        yield "--messages needs the tokenizer that the chat template is made for: --tokenizer instead of --train-bpe"
    if config.bos != "auto":
        yield "--bos is of documents; what a conversation begins with is in the chat template"
