"""The pages of the documentation, their code blocks and their commands."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "configs/README.md", *sorted(ROOT.glob("jaxtp/*/**/README.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CHECK_OF_ONE_MESH = re.compile(r"jaxtp check --config configs/(\w+)\.yaml --mesh (\S+)")


def blocks(page):
    return BLOCK.findall(page.read_text())


def lines_of(page):
    return [
        line
        for kind, text in blocks(page)
        if kind == "sh"
        for line in text.splitlines()
        if line.strip()
    ]


def checked_meshes():
    """Returns the mesh that a page checks, for each configuration that it checks on one mesh."""
    lines = [line for page in PAGES for line in lines_of(page)]
    matches = filter(None, map(CHECK_OF_ONE_MESH.fullmatch, lines))
    return dict(match.groups() for match in matches)
