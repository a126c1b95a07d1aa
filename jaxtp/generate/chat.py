"""`jaxtp generate --chat`: answers each line of standard input."""

import signal
import sys
from collections.abc import Sequence
from contextlib import closing, suppress

from jaxtp.config.entry import Interrupt, UserError, say, shown
from jaxtp.config.reading import truncate
from jaxtp.data.chat_template import (
    ASSISTANT,
    ChatError,
    ChatTemplate,
    ChatTokenizer,
    Message,
    without_noncharacters,
)
from jaxtp.data.tokenizer import Tokenizer
from jaxtp.generate.engine import Generator, Speed
from jaxtp.generate.request import GenerationError
from jaxtp.generate.sampling import Settings

with suppress(ImportError):
    import readline  # noqa: F401 (input() then edits lines, and accepts lines of more than 4,096 characters)

COMMANDS = ("/help", "/reset", "/quit", "/exit")
HELP = """/help         prints these commands
/reset        starts again, with the same system message
/quit, /exit  ends the chat, as Ctrl-D does
Ctrl-C        stops an answer
A text that begins with a slash needs a space before it."""
_FINAL = "<|channel|>final<|message|>"
"""End of the reasoning in an answer of gpt-oss; later turns do not read the reasoning."""
GREETING = "(/help prints the commands; Ctrl-C stops an answer, /quit or Ctrl-D ends the chat)"


class ConversationEncoder:
    """Encodes a conversation: special tokens are tokens in the template, and text in messages.

    Args:
      special_tokens: also encode special tokens spelled in system and user messages as tokens.

    Raises:
      TokenizerError: the tokenizer's special tokens cannot be distinguished from text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        system: str | None = None,
        *,
        special_tokens: bool = False,
    ):
        self.system: list[Message] = []
        if system is not None:
            self.system = [{"role": "system", "content": system}]
        self._template = template
        self._tokens = ChatTokenizer(tokenizer)
        self._special_tokens = special_tokens

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids up to the model's answer.

        Raises `ChatError` for a refused message or a noncharacter.
        """
        escaped = []
        for message in messages:
            keep = self._special_tokens and message["role"] != ASSISTANT
            escaped.append(self._tokens.escape(message, keep=keep))
        marked = self._tokens.mark(self._template.render(escaped))
        ((ids, _),) = self._tokens.encode([(marked, "")])
        return ids.tolist()


class Chat:
    """A conversation on standard input and output; notes go to standard error."""

    def __init__(self, generator: Generator, encoder: ConversationEncoder, settings: Settings):
        self._generator = generator
        self._encoder = encoder
        self._settings = settings
        self._messages = encoder.system
        self.speed = Speed()
        """Tokens and seconds of all answers together."""
        self._interactive = sys.stdin is not None and sys.stdin.isatty()

    def run(self) -> None:
        """Answers texts until standard input or a command ends the chat; Ctrl-C stops an answer.

        Raises:
          UserError: a text was refused; a terminal prints the error and continues.
        """
        self._note(GREETING)
        while True:
            try:
                text = self._read_text()
                if text is None or text.rstrip() in ("/quit", "/exit"):
                    return
                if text.rstrip() == "/help":
                    say(HELP)
                elif text.rstrip() == "/reset":
                    self._messages = self._encoder.system
                    self._note("(the conversation starts again)")
                elif text.startswith("/"):
                    raise ChatError(
                        f"{truncate(text, 40)} is not a command; commands are "
                        f"{', '.join(COMMANDS)}; a text that "
                        "begins with a slash needs a space before it"
                    )
                else:
                    self._answer([*self._messages, {"role": "user", "content": text}])
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                say("\n(Ctrl-D ends the chat)")
            except UserError as error:
                if not self._interactive:
                    raise
                say(f"not answered: {error}")

    def _read_text(self) -> str | None:
        while sys.stdin is not None:
            try:
                line = input("> " if self._interactive and sys.stdout.isatty() else "")
                # In a locale other than UTF-8, Python passes other bytes as surrogates.
                line.encode()
            except UnicodeError:
                raise ChatError("the input is not UTF-8") from None
            except (EOFError, OSError):
                # OSError: the terminal is gone.
                break
            if line.strip():
                return line
        return None

    def _answer(self, messages: list[Message]) -> None:
        ids = self._encoder.encode(messages)
        if problem := self._generator.limits.problem(ids, "start again by /reset"):
            raise GenerationError(f"the conversation {problem}")
        text = ""
        finish = None
        num_tokens = 0
        # The first Ctrl-C waits until the generator's cache is usable; a second stops at once.
        interrupt = Interrupt(signal.SIGINT)
        check = lambda *_: interrupt.check()  # noqa: E731
        pieces = self._generator.stream([ids], self._settings, keep=True, progress=check)
        with closing(pieces), interrupt, suppress(KeyboardInterrupt):  # type: ignore[type-var]  # a generator
            for piece in pieces:
                text += piece.text
                num_tokens += piece.token is not None
                print(shown(piece.text), end="", flush=True)
                if piece.result is None:
                    check()
                else:
                    finish = piece.result.finish
        self.speed.add(self._generator.speed)
        print(flush=True)
        if finish is None and text:
            say("(interrupted)")
        elif finish is None:
            say("(interrupted before the answer began; the text is discarded)")
        if text or finish is not None:
            answer = without_noncharacters(text).rpartition(_FINAL)[2]
            self._messages = [*messages, {"role": ASSISTANT, "content": answer}]
        cut = f"; cut at --max-tokens {self._settings.max_tokens}" if finish == "length" else ""
        if num_tokens:
            self._note(f"({self._speed(num_tokens)}{cut})")
        if finish == "context":
            say("the answer is cut: the model's context is full; start again by /reset")

    def _speed(self, num_tokens: int) -> str:
        """Returns the tokens of the last answer, and their speed after the first one."""
        timing = self._generator.speed.timing
        tokens = f"{num_tokens:,} token{'s' if num_tokens > 1 else ''}"
        if not timing.decode_seconds:
            return tokens
        return f"{tokens}, {timing.decode_tokens / timing.decode_seconds:,.1f} tokens/s"

    def _note(self, text: str) -> None:
        if self._interactive:
            say(text)
