"""`jaxtp generate --chat`: answers each line of standard input."""

import re
import signal
import sys
from contextlib import closing, suppress

import numpy as np

from jaxtp.config.console import has_colour, styled
from jaxtp.config.entry import Interrupt, UserError, say, shown
from jaxtp.config.reading import truncate
from jaxtp.data.chat_template import ASSISTANT, ChatError, Message, without_noncharacters
from jaxtp.data.prepare.conversations import OPENED, THOUGHT, Conversations
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
_CHANNEL = r"<\|channel\|>(?:analysis|final)<\|message\|>"
_TAG = re.compile(f"{THOUGHT.pattern}|{_CHANNEL}", re.IGNORECASE)
_CLOSES = re.compile(r"[<\[]/|<\|end_|<channel|<\|channel\|>final", re.IGNORECASE)
"""Tags that open or close reasoning, including gpt-oss's, and how closing tags start."""
_LONGEST_TAG = 40
_NUM_OPENING = 32  # Tokens at the end of a prompt that may open the reasoning
_READS_REASONING = re.compile(r"\b(?:reasoning_content|thinking|reasoning)\b")
GREETING = "(/help prints the commands; Ctrl-C stops an answer, /quit or Ctrl-D ends the chat)"


class Chat:
    """A conversation on standard input and output; notes go to standard error.

    Args:
      system: the system message, if any.
    """

    def __init__(self, conversations: Conversations, settings: Settings, system: str | None = None):
        self._conversations = conversations
        self._settings = settings
        self._system: list[Message] = []
        if system is not None:
            self._system = [{"role": "system", "content": system}]
        self._messages = self._system
        self.speed = Speed()
        """Tokens and seconds of all answers together."""
        self._interactive = sys.stdin is not None and sys.stdin.isatty()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the conversation with a text; raises `ChatError`."""
        return self._conversations.chat([*self._messages, {"role": "user", "content": text}])

    def run(self, generator: Generator) -> None:
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
                    self._messages = self._system
                    self._note("(the conversation starts again)")
                elif text.startswith("/"):
                    raise ChatError(
                        f"{truncate(text, 40)} is not a command; commands are "
                        f"{', '.join(COMMANDS)}; a text that "
                        "begins with a slash needs a space before it"
                    )
                else:
                    self._answer(generator, text)
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

    def _answer(self, generator: Generator, question: str) -> None:
        ids = self.encode(question)
        if problem := generator.limits.problem(ids, "start again by /reset"):
            raise GenerationError(f"the conversation {problem}")
        end = generator.tokenizer.decode(np.asarray(ids[-_NUM_OPENING:]))
        answer = Answer(end.decode(errors="replace"))
        finish = None
        num_tokens = 0
        # The first Ctrl-C waits until the generator's cache is usable; a second stops at once.
        interrupt = Interrupt(signal.SIGINT)
        check = lambda *_: interrupt.check()  # noqa: E731
        pieces = generator.stream([ids], self._settings, keep=True, progress=check)
        with closing(pieces), interrupt, suppress(KeyboardInterrupt):  # type: ignore[type-var]  # a generator
            for piece in pieces:
                num_tokens += piece.token is not None
                answer.print(piece.text)
                if piece.result is None:
                    check()
                else:
                    finish = piece.result.finish
        self.speed.add(generator.speed)
        print(flush=True)
        if finish is None and answer.text:
            say("(interrupted)")
        elif finish is None:
            say("(interrupted before the answer began; the text is discarded)")
        if answer.text or finish is not None:
            message = answer.message(self._conversations.template.text)
            self._messages = [*self._messages, {"role": "user", "content": question}, message]
        cut = f"; cut at --max-tokens {self._settings.max_tokens}" if finish == "length" else ""
        if num_tokens:
            self._note(f"({_speed_text(generator.speed, num_tokens)}{cut})")
        if finish == "context":
            say("the answer is cut: the model's context is full; start again by /reset")

    def _note(self, text: str) -> None:
        if self._interactive:
            say(text)


def _speed_text(speed: Speed, num_tokens: int) -> str:
    """Returns the tokens of an answer, and their speed after the first one."""
    tokens = f"{num_tokens:,} token{'s' if num_tokens > 1 else ''}"
    if not speed.decode_seconds:
        return tokens
    return f"{tokens}, {speed.decode_tokens / speed.decode_seconds:,.1f} tokens/s"


class Answer:
    """An answer that is printed while it is generated; a terminal shows its reasoning dimmed.

    Reasoning comes first in an answer, between two tags. The prompt may already have the opening
    tag.

    Args:
      prompt: the end of the prompt.
    """

    def __init__(self, prompt: str):
        self.text = ""
        self._has_colour = has_colour(sys.stdout)
        opened = OPENED.search(prompt)
        self._is_reasoning = opened is not None and _opens(_TAG.findall(opened[0])[-1])
        self._closed: re.Match[str] | None = None
        """The tag after the reasoning."""

    def print(self, piece: str) -> None:
        """Prints the text that follows."""
        was_reasoning = self._is_reasoning
        start = max(len(self.text) - _LONGEST_TAG, 0)
        self.text += piece
        if self._closed is None and (was_reasoning or not self.text[:start].strip()):
            self._find_tags(start)
        text = shown(piece)
        if was_reasoning or self._is_reasoning:
            text = styled(text, "dim", self._has_colour)
        print(text, end="", flush=True)

    def _find_tags(self, start: int) -> None:
        for tag in _TAG.finditer(self.text, start):
            is_first = not self.text[: tag.start()].strip()
            if _opens(tag[0]):
                self._is_reasoning = self._is_reasoning or is_first
            elif self._is_reasoning or is_first:
                self._is_reasoning = False
                self._closed = tag
                return

    def message(self, template: str) -> Message:
        """Returns the answer as a message.

        The template decides whether to write the reasoning again. Some look for it in the content.
        """
        text = without_noncharacters(self.text)
        closed = self._closed
        is_channel = closed is not None and closed[0] == _FINAL
        if not (is_channel or _READS_REASONING.search(template)):
            return {"role": ASSISTANT, "content": text}
        if closed is not None:
            reasoning = text[: closed.start()]
            content = text[closed.end() :].lstrip("\n")
        elif self._is_reasoning:
            reasoning = text
            content = ""
        else:
            reasoning = ""
            content = text
        reasoning = _TAG.sub("", reasoning).strip()
        return {"role": ASSISTANT, "content": content, "reasoning_content": reasoning}


def _opens(tag: str) -> bool:
    return _CLOSES.match(tag) is None
