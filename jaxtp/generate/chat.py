"""`jaxtp generate --chat`: each line is a command or a text to answer."""

import difflib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np

from jaxtp.config.entry import UserError, say
from jaxtp.config.files import write_atomically, writing
from jaxtp.config.interrupt import Interrupt
from jaxtp.config.reading import shown
from jaxtp.config.schema import expand
from jaxtp.data.chat_template import (
    ASSISTANT,
    ChatError,
    ChatTemplate,
    Message,
    SpecialTokens,
    rendered_tokenizer,
    without_noncharacters,
)
from jaxtp.data.tokenizer import Tokenizer
from jaxtp.generate.engine import Generator
from jaxtp.generate.prompts import is_jsonl
from jaxtp.generate.request import Finish, GenerationError
from jaxtp.generate.sampling import GenerationSettings

with suppress(ImportError):
    import readline  # noqa: F401 (input() then edits lines, and accepts lines of more than 4,096 characters)

WAYS_OUT = "remove the last turn by /undo, or start again by /reset"
GREETING = "(/help lists the commands, Ctrl-C stops an answer, /quit or Ctrl-D ends the chat)"


class CommandError(UserError):
    """A command is invalid."""


class ConversationEncoder:
    """Encodes a conversation: special tokens become tokens in the template but text in messages.

    Earlier answers keep their generated ids so that the KV cache can be reused, up to the first answer that the
    template changes, e.g. by removing its reasoning.

    Args:
      special_tokens: special tokens spelled in messages, except the model's answers, become tokens too.

    Raises:
      TokenizerError: the tokenizer's special tokens cannot be distinguished from text.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, special_tokens: bool = False):
        self._tokenizer, self._template = tokenizer, template
        self._rendered = rendered_tokenizer(tokenizer)
        self._user_tokens = SpecialTokens(self._rendered.tokens, keep=special_tokens)
        self._model_tokens = SpecialTokens(self._rendered.tokens)
        self._last: tuple[str, list[int]] = "", []
        self._known: list[tuple[str, list[int]]] = [("", [])]
        """Beginnings of the conversation that end with an answer, as text and as ids; the first is empty."""

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids up to the model's answer.

        Raises:
          ChatError: the template refuses it, or a message contains a Unicode noncharacter.
        """
        escaped = [
            (self._model_tokens if message["role"] == ASSISTANT else self._user_tokens).escape(message)
            for message in messages
        ]
        marked = self._user_tokens.mark(self._template.render(escaped))
        while not self._continues(marked, self._known[-1][0]):
            self._known.pop()
        text, ids = self._known[-1]
        ((rest, _),) = self._rendered.encode_batch([(marked.removeprefix(text), "")])
        self._last = marked, [*ids, *rest.tolist()]
        return self._last[1]

    def add_answer(self, answer: str, ids: Sequence[int]) -> None:
        """Stores the last answer's generated ids."""
        whole = self._tokenizer.decode(np.array(ids, np.int64)).decode(errors="replace") if ids else ""
        if whole == answer:  # the ids may go beyond the text, which ends before a stop text
            text, before = self._last
            self._known.append((text + answer, [*before, *ids]))

    def _continues(self, marked: str, known: str) -> bool:
        rest = marked.removeprefix(known)
        return marked.startswith(known) and (len(self._known) == 1 or self._rendered.begins_afresh(rest))


def read_text() -> str | None:
    """Reads text from standard input, joining lines that end in a backslash; None at the end.

    Raises:
      ChatError: the input is not UTF-8.
    """
    lines: list[str] = []
    while sys.stdin is not None:
        try:
            line = input("> " if is_interactive() and sys.stdout.isatty() else "")
            line.encode()  # in a locale other than UTF-8, Python passes other bytes as surrogates
        except UnicodeError:
            raise ChatError("the input is not UTF-8") from None
        except (EOFError, OSError):  # OSError: the terminal is gone
            break
        if line.endswith("\\") and not line.endswith("\\\\"):
            lines.append(line[:-1])
            continue
        text = "\n".join([*lines, line])
        if text.strip():
            return text
        lines = []
    return "\n".join(lines) or None


def is_interactive() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def initial_messages(system: str | None) -> list[Message]:
    """Returns the messages before the first turn."""
    return [] if system is None else [{"role": "system", "content": system}]


class Chat:
    """A conversation on standard input and output; notes go to standard error."""

    def __init__(
        self,
        generator: Generator,
        encoder: ConversationEncoder,
        settings: GenerationSettings,
        system: str | None = None,
    ):
        self._generator, self._encoder, self._settings = generator, encoder, settings
        self._initial = initial_messages(system)
        self._messages = self._initial
        self._ended = False
        self._interrupt = Interrupt(signal.SIGINT)
        self._interactive = is_interactive()
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/help": ("lists the commands", self._help),
            "/reset": ("starts again, with the same system message", self._reset),
            "/undo": ("removes the last text and its answer", self._undo),
            "/save": ("FILE.jsonl: writes the conversation to a new file, for jaxtp prepare", self._save),
            "/quit": ("ends the chat", self._quit),
        }

    def run(self) -> None:
        """Answers texts and runs commands until standard input ends; Ctrl-C stops an answer.

        Raises:
          UserError: a text or command was refused; a terminal prints the error and continues.
        """
        self._note(GREETING)
        while not self._ended:
            try:
                text = read_text()
                if text is None:
                    return
                self._handle(text)
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                say("\n(Ctrl-D ends the chat)")
            except UserError as error:
                if not self._interactive:
                    raise
                say(f"{error}")

    def check_interrupt(self) -> None:
        """Raises `KeyboardInterrupt` to stop an answer; call it after each chunk of a long prompt."""
        self._interrupt.check()

    def _handle(self, text: str) -> None:
        """Only a single line can be a command, so code may begin with a slash."""
        if "\n" not in text and text.startswith("/"):
            if not text.startswith("//"):
                return self._run_command(text)
            text = text[1:]
        return self._turn([*self._messages, {"role": "user", "content": text}])

    def _run_command(self, line: str) -> None:
        name, _, argument = line.strip().partition(" ")
        if name not in self._commands:
            close = difflib.get_close_matches(name, self._commands, n=1)
            hint = f"did you mean {close[0]}?" if close else f"commands are {', '.join(self._commands)}"
            raise CommandError(f"{shown(name, 40)} is not a command; {hint} (//text sends /text)")
        if argument and name != "/save":
            raise CommandError(f"{name} takes no argument, and {shown(argument, 40)} follows")
        self._commands[name][1](argument.strip())

    def _turn(self, messages: list[Message]) -> None:
        try:
            ids = self._encoder.encode(messages)
            if problem := self._generator.limits.problem(ids, WAYS_OUT):
                raise GenerationError(f"the conversation {problem}")
            text, answer, finish = self._answer(ids)
        except UserError as error:
            if not self._interactive:
                raise
            return say(f"not answered, and forgotten: {error}")
        if finish is None and not answer:
            return say("(interrupted before the answer began; the text is forgotten)")
        self._encoder.add_answer(text, answer)
        self._messages = [*messages, {"role": ASSISTANT, "content": without_noncharacters(text)}]
        return self._report(len(ids) + len(answer), finish)

    def _answer(self, ids: list[int]) -> tuple[str, list[int], Finish | None]:
        texts: list[str] = []
        answer: list[int] = []
        finish: Finish | None = None
        pieces = self._generator.stream([ids], self._settings, keep=True)
        # The first Ctrl-C stops where the generator's cache stays usable; a second stops at once.
        self._interrupt = Interrupt(signal.SIGINT)
        with closing(pieces), self._interrupt:  # type: ignore[type-var]  # a generator
            try:
                for piece in pieces:
                    texts.append(piece.text)
                    answer += [] if piece.token is None else [piece.token]
                    finish = None if piece.result is None else piece.result.finish
                    print(piece.text, end="", flush=True)
                    if finish is None:
                        self.check_interrupt()
            except KeyboardInterrupt:
                pass
        print(flush=True)
        return "".join(texts), answer, finish

    def _report(self, num_tokens: int, finish: Finish | None) -> None:
        context, max_tokens = self._generator.limits.context, self._settings.max_tokens
        if finish is None:
            self._note("(interrupted)")
        elif finish == "length":
            self._note(f"(cut at --max-tokens {max_tokens})")
        elif finish == "context":
            say(f"the answer is cut: the model's context of {context:,} tokens is full; {WAYS_OUT}")
        if context is not None and finish != "context" and context - num_tokens < min(max_tokens, context // 2):
            say(
                f"about {max(context - num_tokens, 0):,} of {context:,} tokens are left, and an answer may take "
                f"{max_tokens:,} (--max-tokens); {WAYS_OUT}"
            )

    def _help(self, _: str) -> None:
        lines = {name: text for name, (text, _) in self._commands.items()}
        lines |= {"//text": "sends the text /text", "text\\": "continues on the next line"}
        say("\n".join(f"{name:6}  {text}" for name, text in lines.items()))

    def _quit(self, _: str) -> None:
        self._ended = True

    def _reset(self, _: str) -> None:
        self._messages = self._initial
        self._note("(the conversation starts again)")

    def _undo(self, _: str) -> None:
        self._require_turn("/undo")
        *self._messages, last, _answer = self._messages
        self._note(f"(removed: {last['content'][:60]!r})")

    def _save(self, name: str) -> None:
        if not name:
            raise CommandError("/save needs a file: /save FILE.jsonl")
        path = expand(Path(name))
        if not is_jsonl(path):
            hint = f"; did you mean {path.with_suffix('.jsonl')}?" if path.name else ""
            raise CommandError(f"/save {name}: jaxtp prepare needs a name that ends in .jsonl{hint}")
        if os.path.lexists(path):
            raise CommandError(f"/save {path}: exists already; name another file")
        self._require_turn("/save")
        line = json.dumps({"messages": self._messages}, ensure_ascii=False) + "\n"
        with writing("/save", path):
            write_atomically(path, line.encode())
        self._note(f"({len(self._messages):,} messages in {path})")

    def _require_turn(self, name: str) -> None:
        if len(self._messages) == len(self._initial):
            raise CommandError(f"{name}: there is no answer yet")

    def _note(self, text: str) -> None:
        if self._interactive:
            say(text)
