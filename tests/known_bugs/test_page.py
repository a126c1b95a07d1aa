"""The page of known bugs: each entry links the thread of a test, and each test has its entry."""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
LINK = re.compile(r"https://github\.com/[\w.-]+/([\w.-]+)/(?:issues|pull)/(\d+)")
ENTRY = re.compile(r"- \[[\w .-]+#(\d+)\]\((https://[\w./-]+/\1)\): [A-Z].*\.")
SECTION = re.compile(r"^Tests: \[(test_\w+\.py)\]\(\1\)\n\n((?:- .*\n)+)", re.MULTILINE)


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


def test_every_test_has_an_entry_with_its_link_and_every_entry_a_test():
    sections = dict(SECTION.findall((FOLDER / "README.md").read_text()))
    files = {path for path in FOLDER.glob("test_*.py") if path != Path(__file__)}
    assert sections.keys() == {path.name for path in files}
    for path in files:
        entries = [(line, ENTRY.fullmatch(line)) for line in sections[path.name].splitlines()]
        assert not [line for line, entry in entries if entry is None]
        assert sorted(entry[2] for _, entry in entries) == threads_of(path)
