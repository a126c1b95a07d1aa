"""The pages of the documentation, their code blocks and their commands."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "configs/README.md",
    *sorted(ROOT.glob("jaxtp/guides/*.md")),
    *sorted(ROOT.glob("jaxtp/*/**/README.md")),
]
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


def checks():
    """Returns the commands of the pages that check a configuration."""
    lines = [line for page in PAGES for line in lines_of(page)]
    return sorted(line for line in set(lines) if line.startswith("jaxtp check --config "))


def checked_meshes():
    """Maps each configuration that a page checks on a single mesh to that mesh."""
    matches = filter(None, map(CHECK_OF_ONE_MESH.fullmatch, checks()))
    return dict(match.groups() for match in matches)
