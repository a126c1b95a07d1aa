"""Settings of `jaxtp prepare`."""

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Annotated, Literal

from pydantic import Field

from jaxtp.config.affects import POSITIONAL, REPEATED, Argument
from jaxtp.config.schema import (
    ConfigError,
    Day,
    FolderOrUrl,
    NonNegative,
    OptionalFile,
    OptionalFolder,
    to_plain,
)
from jaxtp.data.prepare.messages import RESERVED, TEMPLATE_FIELDS
from jaxtp.data.prepare.readers import Fields

Count = Annotated[int, Field(ge=1, lt=2**40)]
Patterns = Annotated[tuple[str, ...], REPEATED, Argument("PATTERN")]

TEXT_FIELD = "text"
PROMPT_FIELD = "prompt"
CHOSEN = "chosen"
REJECTED = "rejected"
FIRST = (
    "inputs",
    "out",
    "tokenizer",
    "field",
    "messages",
    "preference",
    "template",
    "include",
    "held_out",
    "dedup",
    "on_error",
    "overwrite",
    "json",
    "verify",
    "show",
)
"""Settings at the top of the help."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Settings of `jaxtp prepare`."""

    inputs: Annotated[tuple[str, ...], POSITIONAL, Argument("INPUT")] = ()
    """Text, .jsonl, .json and .parquet files (all but Parquet also as .gz and .zst), folders of
    them, and Hugging Face datasets: hf:NAME:SPLIT, or hf:FOLDER[:SPLIT] from save_to_disk. A .json
    file named here holds a list of objects, or an object in each line."""

    out: OptionalFolder = None
    """Folder for the dataset, or its URL; after an interruption, the same command resumes."""

    tokenizer: FolderOrUrl | None = None
    """A tokenizer.json of Hugging Face, or a folder with one, such as the model to tune; by default
    each byte is a token."""

    add_tokens: Annotated[tuple[str, ...], Argument("TOKEN")] = ()
    """New special tokens for the tokenizer, such as '<|im_start|>' '<|im_end|>' of --template for a
    base model without them; give the same to jaxtp train as --model.add-tokens."""

    eos: Annotated[str | None, Argument("TOKEN")] = None
    """Token that ends each document. By default the eos_token in the tokenizer_config.json next to
    tokenizer.json, the first eos_token_id in config.json or generation_config.json there, or a
    well-known name."""

    no_eos: bool = False
    """Writes no end token after documents."""

    bos: Literal["auto", "none"] = "auto"
    """Start of each document: with auto, the tokens that tokenizer.json puts before a text, such as
    Llama's BOS; with none, no token. Bytes have no such token."""

    special_tokens: bool = False
    """Converts text that spells a special token, such as <|im_start|>, to this token; by default it
    stays text."""

    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """Format of all input files. By default the suffix decides; files with other suffixes are
    text."""

    field: str = TEXT_FIELD
    """Field of a JSONL or Parquet row that holds the document."""

    prompt_field: str | None = None
    """Field of a row that holds the prompt for --completion-field; a prompt has no loss. With
    --preference, the field of the prompt, by default prompt."""

    completion_field: str | None = None
    """Field of a row that holds the completion; a document is the prompt in --prompt-field and the
    completion. Both may be lists of messages; then the answers in the completion are learned."""

    messages: Annotated[str | None, Argument("FIELD")] = None
    """Field of a row that holds a conversation, such as messages, or conversations for ShareGPT's
    rows; or instruction for Alpaca's rows. By default the fields of the first row tell the layout,
    if it has no text. A conversation is a list of messages with role and
    content, or from and value (ShareGPT). In Alpaca's rows, instruction and input are the question,
    and output is the answer. Each answer of the assistant becomes a document; its prompt is
    everything before it, as the chat template writes it. Only answers have a loss, and the
    beginning of a conversation with n answers is read n times."""

    preference: bool = False
    """Reads pairs of answers, for losses such as jaxtp.losses:DPO, from the fields prompt, chosen
    and rejected; the default if the first row has the last two and no other layout. They are texts,
    or lists of messages for the chat template (with --template FILE, texts are messages too).
    Without a prompt, chosen and rejected are whole conversations that differ in the last message,
    or texts with the same beginning."""

    template: OptionalFile = None
    """Chat template for --messages, in Jinja; by default the template next to the tokenizer
    (chat_template.jinja, or in tokenizer_config.json)."""

    tools: OptionalFile = None
    """JSON file with a list of tools, for conversations without tools of their own. The dataset
    records them, and jaxtp generate --chat gives them to the template too."""

    tools_field: Annotated[str | None, Argument("FIELD")] = None
    """Field of a row that holds the tools of its conversation, if it is not tools or functions."""

    template_arguments: dict[str, object] = dataclass_field(default_factory=dict)
    """Arguments of the chat template, such as --template-arguments.enable-thinking false. A row's
    field chat_template_kwargs overrides them. jaxtp generate --chat uses the same arguments."""

    answers: Literal["all", "last"] = "all"
    """Answers of a conversation that become documents: all of them, or the last one."""

    date: Day | None = None
    """Day that a chat template writes, if it writes the date (strftime_now); by default the day on
    which the preparation starts. The dataset records it."""

    media_as_text: bool = False
    """Reads conversations with images, audio or video as text, with words such as <image> in their
    places; by default such conversations are unreadable input."""

    include: Patterns = ()
    """Files to read in folders, such as '*.py'; by default all files. A pattern matches the name
    or, if it has a /, the path in the folder. Can be repeated."""

    exclude: Patterns = ()
    """Files and folders to leave out in folders, such as site-packages. Can be repeated."""

    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Fraction of the documents for validation, chosen by a hash of their text. Of up to 1,000
    documents, the nearest number is held out; of more, each is chosen independently."""

    dedup: bool = False
    """Leaves out documents that equal an earlier document, byte for byte; takes about 100 bytes of
    memory per document."""

    on_error: Literal["stop", "skip"] = "stop"
    """On unreadable input: stop ends with its file and line; skip counts it and continues."""

    max_document_bytes: Count = 2**26
    """Maximum size of a document, of a line of JSONL, or of a conversation's answers with their
    prompts. A document and its tokens take about eleven times this size in memory, and more than a
    hundred times with a tokenizer that does not split texts as GPT-2's does."""

    shard_tokens: Count = 2**26
    """Tokens after which a shard is full; no document is split over two shards."""

    save_seconds: NonNegative = 5.0
    """Seconds between saves of the progress, from which an interrupted command resumes."""

    overwrite: bool = False
    """Starts over if --out holds another dataset, which is deleted before anything is read."""

    json: OptionalFile = None
    """JSON file for the content of dataset.json, or for the result of --verify."""

    verify: OptionalFolder = None
    """Dataset to compare with its checksums, instead of making a dataset; exit code 1 if it is
    damaged."""

    show: Count | None = None
    """Shows the documents of the first N rows or files as they are trained, with marks around
    what is learned, and writes nothing; or the first N documents or pairs of a dataset, if the
    input is its folder."""

    show_tokens: bool = False
    """Shows each token in a line of its own, with --show."""

    @property
    def has_prompts(self) -> bool:
        """Whether documents start with a prompt, which has no loss."""
        return self.prompt_field is not None or self.messages is not None or self.preference

    @property
    def prompt_name(self) -> str:
        """The field of the prompt of a pair."""
        return self.prompt_field or PROMPT_FIELD

    @property
    def fields(self) -> Fields:
        """The columns that make a document."""
        tools = () if self.tools_field is None else (self.tools_field,)
        if self.preference:
            system = () if self.messages is None else ("system", *TEMPLATE_FIELDS)
            pair = (REJECTED, *tools)
            if self.prompt_field is None:
                return Fields(CHOSEN, optional=(PROMPT_FIELD, *system), required=pair)
            return Fields(CHOSEN, optional=system, required=(self.prompt_field, *pair))
        if self.completion_field is not None:
            names: tuple[str, ...] = ()
            if self.messages is not None:
                names = ("system", *TEMPLATE_FIELDS)
            return Fields(self.completion_field, self.prompt_field, names, required=tools)
        if self.messages == "instruction":
            texts = ("input", "system", "history")
            return Fields("output", "instruction", (*texts, *TEMPLATE_FIELDS), required=tools)
        if self.messages is not None:
            return Fields(self.messages, optional=("system", *TEMPLATE_FIELDS), required=tools)
        return Fields(self.field)


_MAY_CHANGE = {
    "out",
    "tokenizer",
    "bos",
    "template",
    "on_error",
    "save_seconds",
    "overwrite",
    "verify",
    "show",
    "show_tokens",
    "json",
    "max_document_bytes",
}
"""Settings that a resumed command may change. Tokenizer and template are compared by content."""


def arguments(config: PrepareConfig) -> dict[str, object]:
    """Returns the settings that determine the dataset."""
    return {key: value for key, value in to_plain(config).items() if key not in _MAY_CHANGE}


def check(config: PrepareConfig, *, has_layout: bool = True) -> None:
    """Raises `ConfigError` listing all contradictions between settings.

    Args:
      has_layout: whether the settings have the layout of the rows; otherwise it may yet be found.
    """
    problems = list(_contradictions(config, has_layout))
    if problems:
        raise ConfigError("; ".join(problems))


def _contradictions(config: PrepareConfig, has_layout: bool) -> Iterator[str]:
    if config.verify is not None:
        if config.inputs or config.out is not None or config.show is not None:
            yield "--verify DIR reads a dataset and does nothing else: give no inputs and no --out"
        return
    if "" in config.inputs:
        yield "an INPUT is empty, like an unset variable; give a file or a folder"
    if not config.inputs:
        yield "name at least one INPUT: a file or a folder"
    if config.show_tokens and config.show is None:
        yield "--show-tokens goes with --show N"
    if config.show is not None and config.json is not None:
        yield "--show writes no file; leave --json out"
    if config.out is None and config.show is None:
        yield "name the folder of the dataset by --out DIR"
    named = config.eos is not None or config.special_tokens or config.add_tokens
    if config.tokenizer is None and named:
        yield "bytes have no special tokens; --eos, --special-tokens, --add-tokens need --tokenizer"
    if config.eos is not None and config.no_eos:
        yield "--eos and --no-eos contradict each other"
    if config.eos == "":
        yield "--eos is empty"
    if config.preference:
        yield from _contradictions_of_pairs(config)
    elif (config.prompt_field is None) != (config.completion_field is None):
        yield "--prompt-field and --completion-field go together"
    elif config.prompt_field is not None and config.field != TEXT_FIELD:
        yield (
            "--field is for documents without a prompt; give either --field, or --prompt-field and "
            "--completion-field"
        )
    may_use_template = config.messages is not None or config.preference or not has_layout
    for name in ("template", "template_arguments", "tools", "tools_field"):
        if getattr(config, name) and not may_use_template:
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} is for conversations; give --messages FIELD too"
    for name in RESERVED:
        if name in config.template_arguments:
            yield f"--template-arguments.{name}: a row has {name}, and no argument names them"
    if config.messages is not None and config.bos != "auto":
        yield "--bos is for documents; the chat template determines how a conversation starts"
    # Prompts and completions of messages have both settings.
    if config.messages in (None, config.completion_field) or config.preference:
        return
    if config.prompt_field is not None or config.field != TEXT_FIELD:
        yield (
            "--messages is a row's only field; leave --field, --prompt-field and "
            "--completion-field out"
        )


def _contradictions_of_pairs(config: PrepareConfig) -> Iterator[str]:
    settings = []
    if config.messages not in (None, CHOSEN):
        settings.append("--messages")
    if config.field != TEXT_FIELD:
        settings.append("--field")
    if config.completion_field is not None:
        settings.append("--completion-field")
    if settings:
        yield (
            "--preference reads prompt (or --prompt-field NAME), chosen and rejected; leave "
            f"{', '.join(settings)} out"
        )
