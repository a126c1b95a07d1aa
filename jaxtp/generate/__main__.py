"""`jaxtp generate`: its settings, and the command itself.

Generated text goes to standard output, everything else to standard error.
"""

import json
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from dataclasses import field as dataclass_field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, TextIO

from jaxtp.checkpoint import silence_orbax
from jaxtp.config import entry
from jaxtp.config.affects import REPEATED, Argument
from jaxtp.config.command_line import Command
from jaxtp.config.console import is_terminal
from jaxtp.config.entry import Interrupt, shown
from jaxtp.config.files import require_writable, writing
from jaxtp.config.hints import closest
from jaxtp.config.schema import (
    ConfigError,
    Count,
    Day,
    OptionalFile,
    OptionalFolder,
    nearest_file,
)
from jaxtp.data.chat_template import ASSISTANT, ChatError, Message
from jaxtp.data.prepare.conversations import Conversations
from jaxtp.data.prepare.messages import RESERVED, read_tools
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.prepare.readers import Row
from jaxtp.data.tokenizer_files import read_template
from jaxtp.generate.chat import Chat
from jaxtp.generate.engine import Generator
from jaxtp.generate.loading import (
    InferenceMeshConfig,
    ModelSource,
    SourceConfig,
    Status,
    inference_mesh,
    load_model,
    open_source,
    print_status,
    problems_of_generation,
    request_devices,
)
from jaxtp.generate.request import (
    GenerationError,
    Ids,
    Prompt,
    Result,
    encode_prompts,
    limits_of,
)
from jaxtp.generate.sampling import Settings, settings_problems

PROGRAM = "jaxtp generate"
DESCRIPTION = """\
Continues texts with a model: a run of jaxtp train, or a folder in Hugging Face's format.

jaxtp generate --model runs/a --prompt "def main(" --prompt "import " --max-tokens 64

A single text is printed while it is generated, several texts when each is complete;
--json FILE writes an object for each. Without --temperature the most likely token is taken;
--top-p, --top-k and --min-p remove unlikely tokens. The same --seed gives the same texts on any
mesh and in any batch, except for rounding.

jaxtp generate --model DIR --chat --temperature 0.7 --max-tokens 1000

chats with a model that has a chat template; /quit ends the chat. --messages FIELD --prompt-file
FILE.jsonl answers the conversation in that field of each line.

--mesh tp=2 splits the model and its KV cache over devices, virtual ones on a CPU. The speed of
reading prompts (prefill) and generating (decode) is printed at the end, on standard error.
"""
# Value of --json for standard output
STDOUT = Path("-")
# Maximum size of a prompt file
MAX_BYTES = 2**30
_DEFAULT_FIELD = "prompt"

Asked = Sequence[str | list[Message] | None]
"""Texts or conversations; None for a blank line."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(SourceConfig):
    """The model, the prompts, sampling and devices."""

    model: OptionalFolder = None
    """Folder of a run of jaxtp train, of one of its checkpoints, or of a model in Hugging Face's
    format."""

    prompt: Annotated[tuple[str, ...], REPEATED] = ()
    """Text to continue; can be given several times."""

    prompt_file: OptionalFile = None
    """File of texts to continue: one per line, or JSONL if it ends in .jsonl. Blank lines are
    skipped but counted: without --prompt, line n has the index n - 1."""

    field: str = _DEFAULT_FIELD
    """Field of the text in JSONL."""

    messages: Annotated[str | None, Argument("FIELD")] = None
    """Field of the conversation in JSONL, such as messages, as jaxtp prepare --messages reads it; a
    row may have tools, documents and chat_template_kwargs. Answers at the end of a conversation are
    left out, and the model gives its own."""

    chat: bool = False
    """Chat with the model: each line is answered, /reset starts again, Ctrl-C stops an answer,
    /quit or Ctrl-D ends the chat."""

    system: str | None = None
    """System message of a chat."""

    tools: OptionalFile = None
    """JSON file with a list of tools, for a chat, and for rows of --messages without tools."""

    tools_field: Annotated[str | None, Argument("FIELD")] = None
    """Field of the tools in rows of --messages, if it is not tools or functions."""

    template: OptionalFile = None
    """Chat template in Jinja, instead of the model's."""

    template_arguments: dict[str, object] = dataclass_field(default_factory=dict)
    """Arguments of the chat template, such as --template-arguments.enable-thinking false. They
    override the arguments that the run's dataset records."""

    date: Day | None = None
    """The day that a chat template with a date writes (strftime_now); by default the day that it
    wrote into the run's data, else today."""

    beyond_context: bool = False
    """Allow prompts and texts longer than the model's context (max_position_embeddings in its
    config.json), which may make no sense. By default such a prompt is refused, and a text ends
    there."""

    batch_size: Count = 8
    """Prompts continued together, rounded up to a multiple of mesh.dp * mesh.fsdp."""

    json: OptionalFile = None
    """File for one JSON object per line and prompt: text, ids, logprobs, and why the text ended; -
    writes them to standard output, instead of the texts."""

    sampling: Annotated[Settings, Argument(name="")] = Settings()
    mesh: InferenceMeshConfig = InferenceMeshConfig()


_SAMPLING = ("max_tokens", "samples", "seed", "temperature", "top_p", "top_k", "stop")
SHOWN_FIRST = ("model", "prompt", "prompt_file", "chat", "adapters", "dtype", "batch_size", "json")
COMMAND = Command(
    program=PROGRAM,
    schema=GenerateConfig,
    description=DESCRIPTION,
    short_help=(*SHOWN_FIRST, *(f"sampling.{name}" for name in _SAMPLING)),
)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, 2 for a user error, 130 for Ctrl-C."""
    silence_orbax()
    return entry.attempt(PROGRAM, lambda: _generate(COMMAND.load(argv)[0]))


def _generate(config: GenerateConfig) -> None:
    spell = lambda name, value: f"--{name.replace('_', '-')} {value}"  # noqa: E731
    problems = [*_conflicts(config), *settings_problems(config.sampling, spell)]
    if problems or config.model is None:
        raise ConfigError("; ".join(problems))
    if config.json != STDOUT:
        require_writable("--json", config.json)
    prompts: Asked = config.prompt
    rows: list[Row | None] = []
    if config.prompt_file is not None and config.messages is not None:
        fields = {"--messages": config.messages}
        if config.tools_field is not None:
            fields["--tools-field"] = config.tools_field
        rows = _read_rows(config.prompt_file, fields)
    elif config.prompt_file is not None:
        prompts = [*config.prompt, *read_prompts(config.prompt_file, config.field)]
    request_devices(config.mesh)
    source = open_source(config.model, config)
    context = None if config.beyond_context else source.context
    limits = limits_of(source.config, context)
    end_ids = source.end_ids
    encoded: Sequence[Prompt | None] = prompts
    if config.chat or rows:
        conversations = _open_conversations(config, source)
        end_ids = end_ids.union(conversations.ends)
    chat = None
    if config.chat:
        chat = Chat(conversations, config.sampling, config.system)
        if problem := limits.problem(chat.encode("a")):
            raise GenerationError(f"an empty conversation {problem}")
    if rows:
        prompts, encoded = _encode_rows(rows, conversations, config)
    encoded = encode_prompts(
        encoded, source.tokenizer, source.prefix, limits, partial(_prompt_name, config)
    )
    generator = Generator(
        load_model(source, inference_mesh(config.mesh, source.config)),
        source.tokenizer,
        end_ids=end_ids,
        batch_size=config.batch_size,
        context=context,
        donate=True,
    )
    if chat is not None:
        chat.run(generator)
        speed = chat.speed
    else:
        _continue_prompts(generator, prompts, encoded, config)
        speed = generator.speed
    print_status("\n".join(speed.lines()))


def _conflicts(config: GenerateConfig) -> Iterator[str]:
    if config.model is None:
        yield "name the model by --model DIR"
    has_prompts = bool(config.prompt) or config.prompt_file is not None
    has_fields = config.prompt_file is not None and _is_jsonl(config.prompt_file)
    if not has_prompts and not config.chat and config.messages is None:
        yield "give texts by --prompt TEXT or --prompt-file FILE, or chat with the model by --chat"
    if config.chat and (has_prompts or config.json is not None):
        yield (
            "--chat reads standard input and prints text; leave --prompt, --prompt-file and "
            "--json out"
        )
    if config.chat and config.sampling.samples > 1:
        yield f"--samples {config.sampling.samples}: a chat has one answer; leave it out"
    if config.system is not None and not config.chat:
        yield "--system needs --chat"
    for name in ("tools", "template", "template_arguments", "date"):
        if getattr(config, name) and not config.chat and config.messages is None:
            yield f"--{name.replace('_', '-')} is for chat templates; it needs --chat or --messages"
    if config.messages is not None and (config.chat or config.prompt or not has_fields):
        yield (
            f"--messages {config.messages} reads conversations of --prompt-file FILE.jsonl; give "
            "that, and leave --prompt and --chat out"
        )
    if config.tools_field is not None and config.messages is None:
        yield f"--tools-field {config.tools_field} needs --messages FIELD"
    for name in RESERVED:
        if name in config.template_arguments:
            yield f"--template-arguments.{name}: no argument has this name; a row has {name}"
    yield from problems_of_generation(config.mesh)
    if config.field != _DEFAULT_FIELD and not has_fields:
        yield f"--field {config.field} needs --prompt-file FILE.jsonl"


def _is_jsonl(path: Path) -> bool:
    return path.suffix in (".jsonl", ".ndjson")


def read_prompts(path: Path, field: str) -> list[str | None]:
    """Returns the prompt on each line; None for a blank line.

    Args:
      field: the JSONL field with the text.

    Raises:
      ConfigError: the file is unreadable or has no prompts; the message names the line.
    """
    if not _is_jsonl(path):
        return _read_lines(path)
    texts: list[str | None] = []
    for number, row in enumerate(_read_rows(path, {"--field": field}), 1):
        if row is None:
            texts.append(None)
            continue
        text = row[field]
        if not isinstance(text, str):
            raise ConfigError(
                f"{path}, line {number}: {field} = {json.dumps(text)[:60]}: should be text, or a "
                f"conversation for --messages {field}"
            )
        texts.append(text)
    return texts


def _read_lines(path: Path) -> list[str | None]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(
                f"{path}: larger than {MAX_BYTES // 2**20:,} MiB, the limit for a prompt file; "
                "split it"
            )
        # `splitlines` would also split at U+2028 within a text.
        lines = content.decode().split("\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}{nearest_file(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start:,})") from None
    texts = [line.removesuffix("\r") if line.strip() else None for line in lines]
    if not any(texts):
        raise ConfigError(f"{path}: no prompts in it")
    return texts


def _read_rows(path: Path, fields: Mapping[str, str]) -> list[Row | None]:
    rows: list[Row | None] = []
    for number, line in enumerate(_read_lines(path), 1):
        where = f"{path}, line {number}"
        rows.append(None if line is None else _row(where, line, fields))
    return rows


def _row(where: str, line: str, fields: Mapping[str, str]) -> Row:
    """Returns an object that has some fields, by the flags that name them.

    Raises `ConfigError`.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        field = json.dumps(next(iter(fields.values())))
        raise ConfigError(
            f"{where}: expected an object such as {{{field}: ...}}, found {line[:60]}"
        )
    for flag, field in fields.items():
        if field in row:
            continue
        hint = f"it has {', '.join(row) or 'none'}"
        close = closest(field, row, cutoff=0.5)
        if close:
            hint = f"did you mean {flag} {close}?"
        raise ConfigError(f"{where}: no field {field!r}; {hint}")
    return row


def _prompt_name(config: GenerateConfig, index: int) -> str:
    line = index - len(config.prompt) + 1
    if line <= 0:
        return f"prompt {index}"
    return f"prompt {index} ({config.prompt_file}, line {line:,})"


def _open_conversations(config: GenerateConfig, source: ModelSource) -> Conversations:
    chat = replace(source.chat, day=config.date or source.chat.day)
    if config.template is not None:
        chat = replace(chat, text=read_template(config.template), name=str(config.template))
    arguments = dict(config.template_arguments)
    if config.tools is not None:
        arguments |= read_tools(config.tools)
    settings = PrepareConfig(
        messages=config.messages or "messages",
        special_tokens=config.special_tokens,
        template_arguments=arguments,
        media_as_text=config.chat,
        tools_field=config.tools_field,
    )
    # What the model wrote in a chat is text.
    return chat.conversations(source.tokenizer, settings, trusts_answers=not config.chat)


def _encode_rows(
    rows: Sequence[Row | None], conversations: Conversations, config: GenerateConfig
) -> tuple[Asked, list[list[int] | None]]:
    """Returns the conversation of each row, without answers at its end, and its ids."""
    prompts: list[list[Message] | None] = []
    encoded: list[list[int] | None] = []
    num_left_out = 0
    for index, row in enumerate(rows):
        messages = None
        ids = None
        if row is not None:
            try:
                messages, arguments = conversations.read(row)
                while messages and messages[-1]["role"] == ASSISTANT:
                    messages.pop()
                    num_left_out += 1
                ids = conversations.prompt(messages, arguments)
            except ChatError as error:
                raise ChatError(f"{_prompt_name(config, index)}: {error}") from None
        prompts.append(messages)
        encoded.append(ids)
    if num_left_out:
        print_status(
            f"left out {num_left_out:,} answer{'s' if num_left_out > 1 else ''} at the end of "
            "conversations; the model generates them"
        )
    return prompts, encoded


def _continue_prompts(
    generator: Generator,
    prompts: Asked,
    encoded: Sequence[Ids | None],
    config: GenerateConfig,
) -> None:
    results = _Results(prompts, config)
    streams = len(prompts) * config.sampling.samples == 1 and config.json != STDOUT
    started = time.monotonic()
    status = Status()
    with ExitStack() as stack:
        # The first Ctrl-C waits for the call to end: exiting during a call may crash.
        interrupt = stack.enter_context(Interrupt(signal.SIGINT))
        if config.json is not None and config.json != STDOUT:
            with writing("--json", config.json):
                results.file = stack.enter_context(config.json.open("w", encoding="utf-8"))

        def progress(num_read: int, num_tokens: int) -> None:
            interrupt.check()
            if num_read < num_tokens:
                status(f"read {num_read:,} of {num_tokens:,} prompt tokens")

        pieces = generator.stream(encoded, config.sampling, progress=progress)
        for num_tokens, piece in enumerate(pieces, 1):
            if streams:
                print(shown(piece.text), end="" if piece.result is None else "\n", flush=True)
            if piece.result is not None:
                results.add(piece.result)
            if results.count == 0:
                # Progress starts some seconds after the first text.
                status = Status()
            elif results.total > 1 and not is_terminal(sys.stdout):
                rate = num_tokens / (time.monotonic() - started)
                status(f"{results.count:,} of {results.total:,} texts, {rate:,.0f} tokens/s")
            interrupt.check()


class _Results:
    """Writes results in the order of the prompts: each once all earlier ones are written.

    A single text is not printed here: `_continue_prompts` streams its pieces.
    """

    def __init__(self, prompts: Asked, config: GenerateConfig):
        self._prompts = prompts
        self._config = config
        self._samples = config.sampling.samples
        present = [index for index, prompt in enumerate(prompts) if prompt is not None]
        self._remaining = deque(product(present, range(self._samples)))
        self._waiting: dict[tuple[int, int], Result] = {}
        self.total = len(self._remaining)
        self.count = 0
        self.file = sys.stdout if config.json == STDOUT else None

    def add(self, result: Result) -> None:
        self.count += 1
        self._waiting[result.index, result.sample] = result
        while self._remaining and self._remaining[0] in self._waiting:
            self._write(self._waiting.pop(self._remaining.popleft()))

    def _write(self, result: Result) -> None:
        prompt = self._prompts[result.index]
        to_stdout = self._config.json == STDOUT
        if len(self._prompts) * self._samples > 1 and not to_stdout:
            name = f"{result.index}"
            if self._samples > 1:
                name += f", sample {result.sample}"
            last = prompt[-1]["content"] if isinstance(prompt, list) and prompt else prompt
            quoted = shown(json.dumps(last, ensure_ascii=False))
            _write_line(sys.stdout, f"--- {name}: {quoted}\n{shown(result.text)}")
        if self.file is None or self._config.json is None:
            return
        line = json.dumps({"prompt": prompt, **asdict(result)}, ensure_ascii=False)
        if to_stdout:
            _write_line(self.file, shown(line))
            return
        with writing("--json", self._config.json):
            _write_line(self.file, line)


def _write_line(file: TextIO, text: str) -> None:
    """Writes in one call: a killed process leaves whole lines."""
    file.write(f"{text}\n")
    file.flush()


if __name__ == "__main__":
    entry.run(PROGRAM, main)
