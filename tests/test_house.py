"""The rules of the house, checked on its source."""

import ast
import functools
import re
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "jaxtp"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LEVELS = [
    {"config"},
    {"mesh"},
    {"distributed"},
    {"collectives"},
    {"layers", "plans", "data"},
    {"models", "checkpoint"},
    {"hf", "analysis"},
    {"guards"},
    {"train", "generate"},
    {"tools"},
]
NAMESPACES = {"__init__", "__main__", "errors", "losses", "typing"}
"""Files that only list public names, and the command; the stub of a namespace may name any room."""
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
TERMINAL = {"config/console.py"}
"""It reads whether the terminal is a scheduler's log."""
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
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
VAGUE = re.compile(
    "each|found|others|most|least|there|here|these|those|it|them|theirs|ours|both|some|such"
    "|which|what|given|asked|wanted|taken|made|kept|known|held|done|one|ones|rest|of_.*"
)


@functools.cache
def trees():
    return {path: ast.parse(path.read_text()) for path in SOURCES}


@functools.cache
def nodes(path):
    """All nodes of a file: each rule reads them, and a walk takes as long as a parse."""
    return list(ast.walk(trees()[path]))


def relative(path):
    return path.relative_to(PACKAGE).as_posix()


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            package, _, module = node.module.partition(".")
            if package == "jaxtp":
                yield from (
                    [module.partition(".")[0]] if module else [alias.name for alias in node.names]
                )


def calls(path):
    return [node for node in nodes(path) if isinstance(node, ast.Call)]


def faults_of_imports(path):
    here = room(path)
    if here in NAMESPACES:
        return
    for other in set(imports(path)) & LEVEL.keys():
        if other != here and LEVEL[other] >= LEVEL[here]:
            yield f"imports {other}, but imports point down"
    if here in ("layers", "mesh", "collectives"):
        libraries = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
        if "pydantic" in libraries:
            yield "imports pydantic, but schemas are made in config"


def faults_of_names(path):
    attributes = {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)}
    called = {call.func.attr for call in calls(path) if isinstance(call.func, ast.Attribute)}
    keywords = {keyword.arg for call in calls(path) for keyword in call.keywords}
    if room(path) != "collectives" and called & COLLECTIVES:
        yield f"{called & COLLECTIVES}: only jaxtp.collectives names a collective"
    if "check_vma" in keywords:
        yield "check_vma: shard_map checks what varies"
    if "return_residual" in keywords:
        yield "return_residual: the log-sum-exp of cuDNN's attention has no gradient"
    if re.search(r"jax\._src|jax\.experimental\.shard_map", path.read_text()):
        yield "public JAX only"
    if "environ" in attributes and room(path) != "distributed" and relative(path) not in TERMINAL:
        yield "only distributed, and what asks about the terminal, read os.environ"


def faults_of_docstrings(path):
    """A docstring is a sentence or a name."""
    yield from re.findall(r'^\s*"""((?:Of|What)\b.*)', path.read_text(), re.MULTILINE)


def faults_of_assignments(path):
    """`a, b = x, y` is two statements on one line, unless it swaps."""
    for node in nodes(path):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
            continue
        values = sorted(map(ast.unparse, node.value.elts))
        for target in node.targets:
            if isinstance(target, ast.Tuple) and sorted(map(ast.unparse, target.elts)) != values:
                yield f"line {node.lineno}: one assignment a line: {ast.unparse(node)}"


def expressions_of(statement):
    """Yields the nodes of a statement, without the statements inside it."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from ast.walk(child)


def faults_of_statements(path):
    """A statement has at most one comprehension and one `a if b else c`: more need names."""
    for statement in nodes(path):
        if not isinstance(statement, ast.stmt):
            continue
        inside = list(expressions_of(statement))
        comprehensions = [node for node in inside if isinstance(node, COMPREHENSIONS)]
        if len(comprehensions) > 1 or any(len(node.generators) > 1 for node in comprehensions):
            yield f"line {statement.lineno}: give one of the comprehensions a name, or write a loop"
        if sum(isinstance(node, ast.IfExp) for node in inside) > 1:
            yield f"line {statement.lineno}: more than one conditional expression; use `if`"


@functools.cache
def functions_in(path):
    return [node for node in nodes(path) if isinstance(node, FUNCTIONS)]


@functools.cache
def local_names(function):
    names = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def faults_of_functions(path):
    """Nobody keeps more than 25 names in mind: a longer function is several steps."""
    for function in functions_in(path):
        count = len(local_names(function))
        if count > 25:
            yield f"line {function.lineno}: {function.name} has {count} names: name its steps"


def faults_of_variables(path):
    """A variable says what it holds: a noun, and neither a pronoun nor a participle."""
    for function in functions_in(path):
        for name in filter(VAGUE.fullmatch, local_names(function)):
            yield f"line {function.lineno}: {function.name} has a variable `{name}`: what is it?"


RULES = [
    faults_of_imports,
    faults_of_names,
    faults_of_docstrings,
    faults_of_assignments,
    faults_of_statements,
    faults_of_functions,
    faults_of_variables,
]


def test_every_file_follows_the_rules():
    faults = {(rule.__name__, relative(path)): [*rule(path)] for rule in RULES for path in SOURCES}
    assert {place: found for place, found in faults.items() if found} == {}


DECIDES = {
    "train/config.py": "declares the settings",
    "train/defaults.py": "chooses defaults",
    "train/validation.py": "refuses what does not fit",
    "train/init_source.py": "chooses the initial weights",
    "train/pretrained.py": "chooses them from a model",
    "train/task.py": "names a user's parts",
    "train/parts.py": "loads these parts",
    "train/model_source.py": "chooses the kind of model",
    "train/loss.py": "makes an example of a batch",
    "train/preference.py": "makes an example of a batch",
    "train/distillation.py": "makes an example of a batch",
    "train/run_data.py": "opens the data",
    "train/memory.py": "has the costs of settings",
    "train/setup.py": "makes the plan",
    "train/trainer.py": "takes the settings of a user",
    "train/session.py": "takes the settings of a user",
}
"""The files in which a function may take all settings; so may tools, which try other settings."""


def test_after_the_plan_no_function_takes_all_settings():
    found = {}
    for path in SOURCES:
        if relative(path) in DECIDES or room(path) == "tools":
            continue
        for function in functions_in(path):
            types = [
                node.annotation for node in ast.walk(function.args) if isinstance(node, ast.arg)
            ]
            if any("TrainConfig" in ast.unparse(annotation) for annotation in types if annotation):
                found[relative(path)] = function.name
    assert found == {}


def test_no_utils():
    assert not [path for path in SOURCES if path.stem in {"utils", "util", "helpers", "common"}]


# The shape of the package. A change that makes room lowers its budget; a feature that needs more
# raises one in its own commit, which says why.
BUDGETS = {
    "tokens of code": 364_600,
    "files": 294,
    "rooms": 15,
    "arrows between rooms": 81,
    "files that training imports": 104,
}
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCES
}


def imported(nodes):
    """The files that some statements import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            while name and name not in MODULES:
                name = name.rpartition(".")[0]
            if name:
                yield MODULES[name]


@functools.cache
def arrows():
    """The rooms that each room imports, also inside functions."""
    found = {}
    for path in SOURCES:
        if path.parent != PACKAGE or path.stem not in NAMESPACES:
            others = {room(other) for other in imported(nodes(path))}
            others -= {room(path), *NAMESPACES}
            found.setdefault(room(path), set()).update(others)
    return found


def imported_at_the_top(path, reached=frozenset()):
    """The files that a file imports as it is imported, and those that they import."""
    reached |= {path}
    for other in imported(trees()[path].body):
        if other not in reached:
            reached = imported_at_the_top(other, reached)
    return reached


def tokens_of_code(path):
    """The names, operators and numbers of a file, without its imports.

    Tokens measure the size of the package, because a budget of lines rewards statements that are
    joined.
    """
    lines_of_imports = set()
    for node in nodes(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines_of_imports.update(range(node.lineno, node.end_lineno + 1))
    counted = {tokenize.NAME, tokenize.OP, tokenize.NUMBER}
    count = 0
    # that surround a token: Python 3.12 and newer also yield the tokens inside of an f-string
    f_strings = 0
    with path.open() as source:
        for token in tokenize.generate_tokens(source.readline):
            f_strings += tokenize.tok_name[token.type] == "FSTRING_START"
            f_strings -= tokenize.tok_name[token.type] == "FSTRING_END"
            if token.type in counted and f_strings == 0 and token.start[0] not in lines_of_imports:
                count += 1
    return count


def test_budgets():
    trained = imported_at_the_top(PACKAGE / "train/__main__.py")
    measured = {
        "tokens of code": sum(tokens_of_code(path) for path in SOURCES),
        "files": len(SOURCES),
        "rooms": len(arrows()),
        "arrows between rooms": sum(map(len, arrows().values())),
        "files that training imports": len(trained),
    }
    assert {name: value for name, value in measured.items() if value > BUDGETS[name]} == {}
    assert arrows().keys() <= LEVEL.keys(), "every room has a level"
