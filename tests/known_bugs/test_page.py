"""The page of known bugs: each row names a test that is there, each test has its row, and both link the same thread."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LINK = re.compile(r"https://github\.com/([\w.-]+)/([\w.-]+)/(?:issues|pull)/(\d+)")
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| `(test_\w+)` \|$")
SECTION = re.compile(
    r"^In \[(test_\w+\.py)\]\(\1\)\.\n\n\| where .*\n\|---\|---\|---\|---\|\n((?:\|.*\n)+)", re.MULTILINE
)


@cache
def docstrings():
    """Docstring of each test of the folder but this file's, by file and name."""
    found = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        if path != Path(__file__):
            functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
            named = [function for function in functions if function.name.startswith("test_")]
            found |= {(path.name, function.name): ast.get_docstring(function) or "" for function in named}
    return found


@cache
def rows():
    """Cells of each row, by the same; a line of the table that is no row stops the test."""
    text = (FOLDER / "README.md").read_text()
    found = [(file, line) for file, table in SECTION.findall(text) for line in table.splitlines()]
    assert len(found) == len(re.findall(r"^\|", text, re.MULTILINE)) - 2 * len(SECTION.findall(text))
    matches = [(file, ROW.fullmatch(line)) for file, line in found]
    assert all(match for _, match in matches), [
        line for (_, line), (_, match) in zip(found, matches, strict=True) if not match
    ]
    return {(file, match[4]): match.group(1, 2, 3) for file, match in matches}, len(matches)


def test_every_test_has_a_row_and_every_row_a_test():
    table, count = rows()
    assert table.keys() == docstrings().keys()
    assert len(table) == count >= 20, "a test has one row"


@pytest.mark.parametrize("place", docstrings(), ids=lambda place: place[1])
def test_the_link_of_a_row_is_that_of_its_test(place):
    docstring = docstrings()[place]
    where, there, here = rows()[0][place]
    (link,) = LINK.finditer(docstring)
    assert [match[0] for match in LINK.finditer(there)] == [link[0]]
    assert not LINK.search(where + here)
    _, repository, number = link.groups()
    assert number in place[1].split("_"), "its name has the number"
    assert re.sub(r"\W", "", repository).lower() in place[1].replace("_", "")
