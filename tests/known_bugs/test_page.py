"""The page of known bugs: each row names a test that is there, each test has its row, and both
link the same thread.
"""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
LINK = re.compile(r"https://github\.com/([\w.-]+)/([\w.-]+)/(?:issues|pull)/(\d+)")
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| `(test_\w+)` \|$")
SECTION = re.compile(
    r"^In \[(test_\w+\.py)\]\(\1\)\.\n\n\| where .*\n\|---\|---\|---\|---\|\n((?:\|.*\n)+)",
    re.MULTILINE,
)


def docstrings():
    """Docstring of each test of the folder but this file's, by file and name."""
    found = {}
    for path in FOLDER.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if (
                path != Path(__file__)
                and isinstance(node, ast.FunctionDef)
                and node.name.startswith("test_")
            ):
                found[path.name, node.name] = ast.get_docstring(node) or ""
    return found


def test_every_test_has_a_row_with_its_link_and_every_row_a_test():
    text = (FOLDER / "README.md").read_text()
    sections = SECTION.findall(text)
    lines = [(file, line) for file, table in sections for line in table.splitlines()]
    assert len(lines) == len(re.findall(r"^\|", text, re.MULTILINE)) - 2 * len(sections)
    matches = {(file, line): ROW.fullmatch(line) for file, line in lines}
    assert not [line for (_, line), match in matches.items() if match is None]
    rows = {(file, match[4]): match.group(1, 2, 3) for (file, _), match in matches.items()}
    tests = docstrings()
    assert rows.keys() == tests.keys()
    assert len(rows) == len(lines) >= 20, "a test has one row"
    wrong = [
        place for place, cells in rows.items() if not links_agree(place[1], tests[place], *cells)
    ]
    assert wrong == []


def links_agree(name, docstring, where, there, here):
    """Whether the only link of a row is that of its test, whose name has the repository and the
    number.
    """
    links = list(LINK.finditer(docstring))
    if len(links) != 1 or [match[0] for match in LINK.finditer(where + there + here)] != [
        links[0][0]
    ]:
        return False
    _, repository, number = links[0].groups()
    project = re.sub(r"\W", "", repository).lower()
    return (
        bool(LINK.search(there)) and number in name.split("_") and project in name.replace("_", "")
    )
