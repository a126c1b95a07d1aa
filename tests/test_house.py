"""The rules of the house, checked on its source."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxtp"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LEVELS = [
    {
        "mesh",
        "collectives",
        "command_line",
        "communication",
        "config",
        "console",
        "entry",
        "files",
        "hardware",
        "hardware_file",
        "hints",
        "interrupt",
        "launch",
        "reading",
    },
    {"layers", "parallel", "audit", "data"},
    {"models", "checkpoint", "propose"},
    {"hf"},
    {"train", "generate", "prepare"},
    {"check", "estimate", "convert", "explain", "bench", "evaluate"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
COLLECTIVES = {
    "psum",
    "pmax",
    "pmin",
    "pmean",
    "psum_scatter",
    "all_gather",
    "all_to_all",
    "ppermute",
    "pcast",
    "shard_map",
}


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jaxtp":
            yield from ([node.module.split(".")[1]] if "." in node.module else [alias.name for alias in node.names])


def calls(tree):
    return [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_source(path):
    tree = ast.parse(path.read_text())
    here = room(path)
    if here not in ("__init__", "__main__"):
        for other in set(imports(tree)) & LEVEL.keys():
            assert other == here or LEVEL[other] < LEVEL[here] or LEVEL[here] == 0, (
                f"{here} imports {other}: imports point down"
            )
    if here != "collectives":
        named = {f.attr for f in calls(tree) if isinstance(f, ast.Attribute)} & COLLECTIVES
        assert not named, f"{named}: only jaxtp.collectives names a collective"
    keywords = {k.arg for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords}
    assert "check_vma" not in keywords
    assert "return_residual" not in keywords, "the log-sum-exp of cuDNN's attention has no gradient"
    assert not re.search(r"jax\._src|jax\.experimental\.shard_map", path.read_text()), "public JAX only"
    if here != "launch":
        assert "environ" not in {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}, (
            "launch reads os.environ"
        )


def test_no_utils():
    assert not [path for path in SOURCES if path.stem in {"utils", "util", "helpers", "common"}]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_docstring_is_a_sentence_or_a_name(path):
    begun = re.findall(r'^\s*"""((?:Of|What)\b.*)', path.read_text(), re.MULTILINE)
    assert not begun
