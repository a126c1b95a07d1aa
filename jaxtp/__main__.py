"""`jaxtp`: the commands of the package."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxtp import entry


def commands() -> Iterator[tuple[str, str]]:
    """Yields each command, and the first line of its package's docstring."""
    for folder in sorted(Path(__file__).parent.iterdir()):
        if (folder / "__main__.py").is_file():
            documented = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
            yield f"jaxtp {folder.name}", documented.partition("\n")[0]


def main(argv: Sequence[str]) -> int:
    """Prints them; returns the exit code."""
    for command, description in commands():
        print(f"{command:<20}{description}")
    print("\nEach has --help.")
    return 0


if __name__ == "__main__":
    entry.run("jaxtp", main)
