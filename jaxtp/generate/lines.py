"""Texts that a user enters: on a terminal, where lines can be edited and called back, or through a pipe."""

import sys

from jaxtp.data.template import ChatError

MAX_TEXT = 2**24
"""Number of characters that a text must stay below."""

_PROMPT, _FURTHER = "> ", ". "


class Lines:
    """Reads texts from standard input: a line each, or several, of which each but the last ends in a backslash.

    On a terminal with the library readline, arrow keys edit a line and call back those before it, and what is pasted is
    one text, however many lines it has.
    """

    def __init__(self) -> None:
        self.terminal = sys.stdin is not None and sys.stdin.isatty()
        """Whether somebody sits before it."""
        self._edited = self.terminal and _has_readline()

    def read(self) -> str | None:
        """Returns the next text that is not blank; None at the end. On a terminal, Ctrl-C discards what is unfinished.

        Raises:
          ChatError: it is not UTF-8, or too long.
        """
        before: list[str] = []
        while True:
            try:
                line = self._line(_FURTHER if before else _PROMPT)
                (line or "").encode()  # where the locale is none of UTF-8, Python lets other bytes pass
            except UnicodeError:
                raise ChatError("what was entered is not UTF-8") from None
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                print("\n(Ctrl-D ends the chat)", file=sys.stderr)
                before = []
                continue
            if sum(map(len, before)) + len(line or "") >= MAX_TEXT:
                raise ChatError(f"a text has {MAX_TEXT:,} characters or more, which is too many")
            if line is not None and (len(line) - len(line.rstrip("\\"))) % 2:
                before.append(line[:-1])
                continue
            text = "\n".join([*before, *([] if line is None else [line])])
            if text.strip():
                return text
            if line is None:
                return None
            before = []

    def _line(self, prompt: str) -> str | None:
        """Returns the next line; None at the end, also where there is no input, or no terminal any more."""
        if sys.stdin is None:  # closed by who started this
            return None
        if self._edited:
            try:
                return input(prompt)
            except EOFError:
                print(file=sys.stderr)
                return None
        if self.terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline(MAX_TEXT)
        except OSError:  # the terminal is gone
            return None
        if not line:
            print(end="\n" if self.terminal else "", file=sys.stderr)
            return None
        return line.removesuffix("\n")


def _has_readline() -> bool:
    """Returns whether lines are edited by readline, which takes both ends of a terminal."""
    if not (sys.stdin is sys.__stdin__ and sys.stdout is not None and sys.stdout.isatty()):
        return False
    try:
        import readline
    except ImportError:
        return False
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    return True
