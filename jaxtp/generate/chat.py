"""A chat: each text that is entered is answered, with the conversation before it in mind, or is a command."""

import difflib
import json
import os
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxtp.config import expand
from jaxtp.data.chat_tokenizer import without_noncharacters
from jaxtp.data.template import ASSISTANT, Message
from jaxtp.entry import UserError, say
from jaxtp.files import write_atomically, writing
from jaxtp.generate.engine import Generator, Speed
from jaxtp.generate.lines import Lines
from jaxtp.generate.listener import Listener
from jaxtp.generate.prompts import is_jsonl
from jaxtp.generate.request import Finish
from jaxtp.generate.scheduler import GenerationError, Timing
from jaxtp.generate.settings import GenerationSettings
from jaxtp.interrupt import Interrupt
from jaxtp.reading import shown

SEEDS = 2**31
"""Number of seeds that a setting can have."""

WAYS_OUT = "take the last turn back by /undo, or begin anew by /reset"
GREETING = "(/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat)"


class CommandError(UserError):
    """A line that begins with a slash, and is no command or none that can be carried out."""


@dataclass(frozen=True)
class Command:
    """A command of a chat."""

    help: str
    """Says what it does."""

    action: Callable[[str], None]
    """Does it, with what comes after the name."""

    argument: str = ""
    """Name of its argument, if it has one."""


@dataclass(frozen=True)
class Answer:
    """An answer, as far as it came."""

    text: str
    ids: tuple[int, ...]

    finish: Finish | None
    """None: it was interrupted."""


def opening(system: str | None) -> list[Message]:
    """Returns the messages before the first turn: the system message, if there is one."""
    return [] if system is None else [{"role": "system", "content": system}]


class Chat:
    """A conversation on standard input and output; all else that is said goes to standard error.

    Args:
      generator: generates the answers.
      listener: turns the conversation into ids.
      settings: settings for each answer.
      system: the system message.
    """

    def __init__(
        self, generator: Generator, listener: Listener, settings: GenerationSettings, system: str | None = None
    ):
        self.speed = Speed()
        """Speed of all turns together."""
        self._generator, self._listener, self._settings = generator, listener, settings
        self._opening = opening(system)
        self._messages = self._opening
        self._retries = 0
        self._interrupt = Interrupt(signal.SIGINT)
        self._lines = Lines()
        self._commands = {
            "/help": Command("lists the commands", self._help),
            "/reset": Command("begins anew, with the system message if there is one", self._reset),
            "/undo": Command("takes the last text and its answer back", self._undo),
            "/retry": Command("answers the last text again, with another seed", self._retry),
            "/save": Command("writes the conversation into a new file, for jaxtp prepare", self._save, " FILE.jsonl"),
        }

    def run(self) -> None:
        """Answers each text that is entered, and carries out commands, until there are no more.

        Ctrl-C stops an answer, and the conversation goes on with the part there is.

        Raises:
          UserError: a text cannot be answered, or a command not carried out; a terminal shows the error instead, and
            the conversation goes on as it was before.
        """
        if self._lines.terminal:
            say(GREETING)
        while True:
            try:
                text = self._lines.read()
                if text is None:
                    return
                self._take(text)
            except UserError as error:
                if not self._lines.terminal:
                    raise
                say(f"{error}")

    def check(self) -> None:
        """Raises `KeyboardInterrupt` if the answer is to be stopped; to be called after each part of a long prompt."""
        self._interrupt.check()

    def _take(self, text: str) -> None:
        """Takes a text; only one line can be a command, so that source code may begin with a slash."""
        if "\n" in text or not text.startswith("/"):
            return self._turn([*self._messages, {"role": "user", "content": text}])
        if text.startswith("//"):
            return self._turn([*self._messages, {"role": "user", "content": text[1:]}])
        name, _, argument = text.strip().partition(" ")
        command = self._commands.get(name)
        if command is None:
            close = difflib.get_close_matches(name, self._commands, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(self._commands)}"
            raise CommandError(f"{shown(name, 40)} is no command; {hint} (//text is the text /text)")
        if argument and not command.argument:
            raise CommandError(f"{name} {shown(argument, 40)}: it takes nothing; enter {name} alone")
        return command.action(argument.strip())

    def _turn(self, asked: list[Message], retries: int = 0) -> None:
        """Answers a conversation that ends with a text of the user's."""
        try:
            ids = self._listener.ids(asked)
            if problem := self._generator.limits.problem(ids, WAYS_OUT):
                raise GenerationError(f"the conversation {problem}")
            answer = self._answer(ids, retries)
        except UserError as error:
            if not self._lines.terminal:
                raise
            return say(f"not answered, and forgotten: {error}")
        if answer.finish is None and not answer.ids:
            return say("(interrupted before there was an answer; the text is forgotten)")
        self._listener.answered(answer.text, answer.ids)
        self._messages = [*asked, {"role": ASSISTANT, "content": without_noncharacters(answer.text)}]
        self._tell(len(ids) + len(answer.ids), answer)
        return None

    def _answer(self, ids: list[int], retries: int) -> Answer:
        """Prints an answer as it comes, and returns it."""
        settings = replace(self._settings, seed=(self._settings.seed + retries) % SEEDS) if retries else self._settings
        given: list[str] = []
        made: list[int] = []
        finish: Finish | None = None
        pieces = self._generator.stream([ids], settings, keep=True)
        # The signal is heeded where the generator can go on from its memory; a second one, at once.
        self._interrupt = Interrupt(signal.SIGINT)
        with closing(pieces), self._interrupt:  # type: ignore[type-var]  # a generator
            try:
                for piece in pieces:
                    given.append(piece.text)
                    made += [] if piece.token is None else [piece.token]
                    finish = None if piece.result is None else piece.result.finish
                    print(piece.text, end="", flush=True)
                    if finish is None:
                        self.check()
            except KeyboardInterrupt:
                pass
        print(flush=True)
        self.speed = _together(self.speed, self._generator.speed)
        return Answer("".join(given), tuple(made), finish)

    def _tell(self, used: int, answer: Answer) -> None:
        """Says what a turn took, and what is left of the context.

        Args:
          used: number of tokens of the conversation, with the answer.
          answer: the answer.
        """
        context, most = self._generator.limits.context, self._settings.max_tokens
        if self._lines.terminal:
            timing = self._generator.speed.timing
            rate = f", {timing.decode_tokens / timing.decode_seconds:,.0f} tokens/s" if timing.decode_tokens else ""
            cut = {None: "; interrupted", "length": f"; cut at --max-tokens {most}"}.get(answer.finish, "")
            say(
                f"(read {timing.prefill_tokens:,} tokens, kept {timing.kept_tokens:,}, made {len(answer.ids):,}{rate}; "
                f"{used:,} {'used' if context is None else f'of {context:,} used'}{cut})"
            )
        if context is None:
            return
        if answer.finish == "context":
            say(f"the answer is cut: the model's context of {context:,} tokens is full; {WAYS_OUT}")
        elif context - used < min(most, context // 2):  # whoever asks for most of a context wants what there is
            say(
                f"about {max(context - used, 0):,} tokens are left of {context:,}, and an answer may take {most:,} "
                f"(--max-tokens); {WAYS_OUT}"
            )

    def _help(self, _: str) -> None:
        names = {name + command.argument: command.help for name, command in self._commands.items()}
        names |= {"//text": "is the text /text", "text\\": "goes on in the next line"}
        width = max(map(len, names))
        say("\n".join(f"{name:{width}}  {text}" for name, text in names.items()))

    def _reset(self, _: str) -> None:
        self._messages = self._opening
        self._note("the conversation begins anew")

    def _undo(self, _: str) -> None:
        self._require_turn("/undo")
        *self._messages, asked, _answer = self._messages
        self._note(f"taken back: {asked['content'][:60]!r}")

    def _retry(self, _: str) -> None:
        self._require_turn("/retry")
        if self._settings.temperature == 0:
            raise CommandError("/retry: without --temperature the likeliest token is taken, whatever the seed")
        self._retries += 1  # of the whole chat, so that no seed comes again
        self._turn(list(self._messages[:-1]), self._retries)

    def _save(self, name: str) -> None:
        if not name:
            raise CommandError("/save needs a file: /save FILE.jsonl")
        path = expand(Path(name))
        if not is_jsonl(path):
            near = f"; did you mean {path.with_suffix('.jsonl')}?" if path.name else ""
            raise CommandError(f"/save {name}: jaxtp prepare knows conversations by a name that ends in .jsonl{near}")
        if os.path.lexists(path):
            raise CommandError(f"/save {path}: is there already; name another file")
        self._require_turn("/save")
        line = json.dumps({"messages": self._messages}, ensure_ascii=False) + "\n"
        with writing("/save", path):
            write_atomically(path, line.encode())
        self._note(f"{len(self._messages):,} messages in {path}")

    def _require_turn(self, name: str) -> None:
        if len(self._messages) == len(self._opening):
            raise CommandError(f"{name}: there is no answer yet")

    def _note(self, text: str) -> None:
        if self._lines.terminal:
            say(f"({text})")


def _together(before: Speed, turn: Speed) -> Speed:
    """Returns the speed of all turns: their tokens and seconds together, and the cache as it is now."""
    timing = {name: value + getattr(before.timing, name) for name, value in asdict(turn.timing).items()}
    return replace(
        turn,
        compile_seconds=before.compile_seconds + turn.compile_seconds,
        timing=Timing(**timing),
        cut_texts=before.cut_texts + turn.cut_texts,
    )
