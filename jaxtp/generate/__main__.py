"""`jaxtp generate`: its settings, and the command itself.

Generated text goes to standard output, everything else to standard error.
"""

if __name__ == "__main__":
    from jaxtp.config.entry import start

    start("jaxtp generate")

import json
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
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
from jaxtp.data.chat_template import ChatError, ChatTemplate
from jaxtp.data.tokenizer_files import read_template
from jaxtp.generate.chat import Chat, ConversationEncoder
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
    request_devices,
)
from jaxtp.generate.request import GenerationError, Ids, Limits, Result, encode_prompts, limits_of
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

chats with a model that has a chat template; /quit ends the chat.

--mesh tp=2 splits the model and its KV cache over devices, virtual ones on a CPU. The speed of
reading prompts (prefill) and generating (decode) is printed at the end, on standard error.
"""
# Value of --json for standard output
STDOUT = Path("-")
# Maximum size of a prompt file
MAX_BYTES = 2**30
_DEFAULT_FIELD = "prompt"


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

    chat: bool = False
    """Chat with the model: each line is answered, /reset starts again, Ctrl-C stops an answer,
    /quit or Ctrl-D ends the chat."""

    system: str | None = None
    """System message of a chat."""

    template: OptionalFile = None
    """Chat template in Jinja, instead of the model's."""

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
    prompts: list[str | None] = list(config.prompt)
    if config.prompt_file is not None:
        prompts += read_prompts(config.prompt_file, config.field)
    request_devices(config.mesh)
    source = open_source(config.model, config)
    context = None if config.beyond_context else source.context
    limits = limits_of(source.config, context)
    encoder = _chat_encoder(config, source, limits) if config.chat else None
    encoded = encode_prompts(
        prompts, source.tokenizer, source.prefix, limits, partial(_prompt_name, config)
    )
    generator = Generator(
        load_model(source, inference_mesh(config.mesh, source.config)),
        source.tokenizer,
        end_ids=source.end_ids,
        batch_size=config.batch_size,
        context=context,
        donate=True,
    )
    if encoder is not None:
        chat = Chat(generator, encoder, config.sampling)
        chat.run()
        speed = chat.speed
    else:
        _continue_prompts(generator, prompts, encoded, config)
        speed = generator.speed
    print_status("\n".join(speed.lines()))


def _conflicts(config: GenerateConfig) -> Iterator[str]:
    if config.model is None:
        yield "name the model by --model DIR"
    has_prompts = bool(config.prompt) or config.prompt_file is not None
    if not has_prompts and not config.chat:
        yield "give texts by --prompt TEXT or --prompt-file FILE, or chat with the model by --chat"
    if config.chat and (has_prompts or config.json is not None):
        yield (
            "--chat reads standard input and prints text; leave --prompt, --prompt-file and "
            "--json out"
        )
    if config.chat and config.sampling.samples > 1:
        yield f"--samples {config.sampling.samples}: a chat has one answer; leave it out"
    if not config.chat and (config.system is not None or config.template is not None):
        yield "--system and --template need --chat"
    if not config.chat and config.date is not None:
        yield "--date is the day that a chat template writes; it needs --chat"
    cp = config.mesh.cp
    if cp != 1:
        yield (
            f"--mesh.cp {cp}: a KV cache cannot be split over cp; give its devices to tp: "
            f"--mesh.tp {cp}"
        )
    has_fields = config.prompt_file is not None and _is_jsonl(config.prompt_file)
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
    if not _is_jsonl(path):
        return texts
    return [
        None if line is None else _json_field(f"{path}, line {number}", line, field)
        for number, line in enumerate(texts, 1)
    ]


def _json_field(where: str, line: str, field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(
            f"{where}: expected an object such as {{{json.dumps(field)}: ...}}, found {line[:60]}"
        )
    if field not in record:
        hint = f"it has {', '.join(record) or 'none'}"
        close = closest(field, record, cutoff=0.5)
        if close:
            hint = f"did you mean --field {close}?"
        raise ConfigError(f"{where}: no field {field!r}; {hint}")
    if not isinstance(record[field], str):
        raise ConfigError(f"{where}: {field} = {json.dumps(record[field])[:60]}: should be text")
    return record[field]


def _prompt_name(config: GenerateConfig, index: int) -> str:
    line = index - len(config.prompt) + 1
    if line <= 0:
        return f"prompt {index}"
    return f"prompt {index} ({config.prompt_file}, line {line:,})"


def _chat_encoder(
    config: GenerateConfig, source: ModelSource, limits: Limits
) -> ConversationEncoder:
    text = source.template
    name = f"the chat template of {source.name}"
    if config.template is not None:
        text = read_template(config.template)
        name = str(config.template)
    if text is None:
        raise ChatError(
            f"{source.name} has no chat template; give one by --template FILE, or texts by "
            "--prompt TEXT"
        )
    template = ChatTemplate(text, name, source.special_tokens, config.date or source.template_day)
    encoder = ConversationEncoder(
        source.tokenizer, template, config.system, special_tokens=config.special_tokens
    )
    if problem := limits.problem(
        encoder.encode([*encoder.system, {"role": "user", "content": "a"}])
    ):
        raise GenerationError(f"an empty conversation {problem}")
    return encoder


def _continue_prompts(
    generator: Generator,
    prompts: Sequence[str | None],
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

    def __init__(self, prompts: Sequence[str | None], config: GenerateConfig):
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
            quoted = shown(json.dumps(prompt, ensure_ascii=False))
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
