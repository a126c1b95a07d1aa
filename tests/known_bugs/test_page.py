"""The page of known bugs: each row links the thread of a test, and each test has its row."""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
LINK = re.compile(r"https://github\.com/[\w.-]+/([\w.-]+)/(?:issues|pull)/(\d+)")
ROW = re.compile(r"^\| \[[\w .-]+#(\d+)\]\((https://[\w./-]+/\1)\) \| [^|]+\. \|$")
SECTION = re.compile(
    r"^In \[(test_\w+\.py)\]\(\1\)\.\n\n\| thread \| bug \|\n\|---\|---\|\n((?:\|.*\n)+)",
    re.MULTILINE,
)


def threads_of(path):
    """Returns the links of a file's tests, each in a docstring of a test that is named after it."""
    links = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            (link,) = LINK.finditer(ast.get_docstring(node) or "")
            assert link[2] in node.name.split("_"), node.name
            assert re.sub(r"\W", "", link[1]).lower() in node.name.replace("_", ""), node.name
            links.append(link[0])
    return sorted(links)


def test_every_test_has_a_row_with_its_link_and_every_row_a_test():
    sections = dict(SECTION.findall((FOLDER / "README.md").read_text()))
    files = {path for path in FOLDER.glob("test_*.py") if path != Path(__file__)}
    assert sections.keys() == {path.name for path in files}
    for path in files:
        rows = [(line, ROW.match(line)) for line in sections[path.name].splitlines()]
        assert not [line for line, row in rows if row is None]
        assert sorted(row[2] for _, row in rows) == threads_of(path)
