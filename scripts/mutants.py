"""Changes one place of the core at a time, and looks for a test that fails.

It measures what the tests notice:

    python -m pytest --cov jaxtp --cov-context test --cov-report= \
        -m "not journey and not slow and not cluster"
    python scripts/mutants.py --coverage .coverage --count 240 --out runs/mutants.txt

The first command records which cases reach which line. For each mutant of a line the second runs
those cases until one fails. A mutant that no case notices survives: it needs a test, or an
explanation. Cases in other processes do not see a mutant, and are not run.

Needs `pip install pytest-cov`. The results of an interrupted run are kept, and the same command
continues.
"""

import argparse
import ast
import collections
import importlib
import importlib.machinery
import itertools
import json
import os
import random
import signal
import sqlite3
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = ("collectives.py", "layers", "train/step.py", "data/packing.py", "checkpoint")
LIBRARIES = ("jax", "flax.nnx", "optax", "orbax.checkpoint", "grain", "pytest")
"""They are imported once, before the forks. None of them starts a thread when it is imported.

Not hypothesis: pytest warns of a plugin that was imported before it, and warnings are errors."""
TIERS = "not journey and not slow and not cluster"
MAX_CASES = 60
"""Cases that are run for one mutant, of those that reach its line."""
MAX_SECONDS = 480
"""A mutant that takes longer probably never ends, which CI's time limits would notice."""

BINARY = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
AXES = {"TP": "FSDP", "FSDP": "TP", "CP": "TP", "DP": "FSDP"}
UNCHANGED = (
    ast.Raise,
    ast.Assert,
    ast.JoinedStr,
    ast.AnnAssign,
    ast.arguments,
    ast.ImportFrom,
    ast.Import,
)
"""Messages, annotations and imports: a change there is not a change of behaviour."""


@dataclass(frozen=True)
class Mutant:
    """One change of one node of a file."""

    file: str
    line: int
    change: str
    node: int
    """Index of the node in the order of `ast.walk`."""
    option: int
    """Index among the changes of this node."""

    @property
    def name(self):
        return f"{self.file}:{self.line} {self.change}"


def unchanged_nodes(tree):
    """Returns the ids of nodes that stay: messages, annotations, docstrings and decorators."""
    kept = set()
    for node in ast.walk(tree):
        stays = []
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or isinstance(node, UNCHANGED):
            stays = [node]
        elif isinstance(node, ast.FunctionDef):
            stays = [*node.decorator_list, *filter(None, [node.returns])]
        elif isinstance(node, ast.ClassDef):
            stays = node.decorator_list
        for root in stays:
            kept.update(id(inner) for inner in ast.walk(root))
    return kept


def changes(node):
    """Yields (what changes, function that changes the node in place) for each change of a node."""
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        other = BINARY[type(node.op)]
        yield (
            f"{type(node.op).__name__} becomes {other.__name__}",
            lambda n: setattr(n, "op", other()),
        )
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other_comparison = COMPARISONS[type(node.ops[0])]
        yield (
            f"{type(node.ops[0]).__name__} becomes {other_comparison.__name__}",
            lambda n: n.ops.__setitem__(0, other_comparison()),
        )
    if isinstance(node, ast.BoolOp):
        other_word = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield (
            f"{type(node.op).__name__} becomes {other_word.__name__}",
            lambda n: setattr(n, "op", other_word()),
        )
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} becomes {not node.value}", lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield f"{node.value} becomes {node.value + 1}", lambda n: setattr(n, "value", n.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield (
            f"{node.value} becomes {2 * node.value + 1}",
            lambda n: setattr(n, "value", 2 * n.value + 1),
        )
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield (
            "the condition is negated",
            lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test)),
        )
    if isinstance(node, ast.Name) and node.id in AXES and isinstance(node.ctx, ast.Load):
        yield f"{node.id} becomes {AXES[node.id]}", lambda n: setattr(n, "id", AXES[n.id])
    if isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg:
        yield f"the argument {node.keywords[-1].arg} is left out", lambda n: n.keywords.pop()
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "the statement is left out", lambda n: setattr(n, "value", ast.Constant(None))


def mutants_of(file):
    """Returns every mutant of a file."""
    tree = ast.parse(file.read_text())
    kept = unchanged_nodes(tree)
    name = file.relative_to(ROOT).as_posix()
    found = []
    for index, node in enumerate(ast.walk(tree)):
        if id(node) in kept or not hasattr(node, "lineno"):
            continue
        for option, (change, _) in enumerate(changes(node)):
            found.append(Mutant(name, node.lineno, change, index, option))
    return found


def mutants_in(place):
    """Returns every mutant of a file of the package, or of a folder."""
    path = ROOT / "jaxtp" / place
    files = [path] if path.suffix else sorted(path.rglob("*.py"))
    return list(itertools.chain.from_iterable(map(mutants_of, files)))


def mutated_code(mutant):
    """Returns the compiled module with its one change."""
    path = ROOT / mutant.file
    tree = ast.parse(path.read_text())
    node = list(ast.walk(tree))[mutant.node]
    _, change = list(changes(node))[mutant.option]
    change(node)
    return compile(ast.fix_missing_locations(tree), str(path), "exec")


class Coverage:
    """Which cases reach a line, by a file of coverage.py with contexts."""

    def __init__(self, file):
        self._rows = sqlite3.connect(file)

    def cases(self, file, line):
        """Returns the ids of the cases that reach a line; those of the file's own room first."""
        query = """select context.context, line_bits.numbits from line_bits
                   join file on file.id = line_bits.file_id
                   join context on context.id = line_bits.context_id
                   where file.path like ?"""
        reached = set()
        for context, bits in self._rows.execute(query, (f"%/{file}",)):
            byte = line // 8
            if byte < len(bits) and bits[byte] >> (line % 8) & 1:
                reached.add(context.partition("|")[0])
        room = f"tests/{file.split('/')[1].removesuffix('.py')}/"
        return sorted(reached - {""}, key=lambda case: (not case.startswith(room), case))


def import_changed(mutant):
    """Makes this process import the mutant instead of its file."""
    code = mutated_code(mutant)
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader, name):
        if Path(loader.path) == ROOT / mutant.file:
            return code
        return original(loader, name)

    importlib.machinery.SourceFileLoader.get_code = get_code


def run_cases(mutant, cases, log):
    """Runs cases in this process, and ends the process: with 0 if all pass."""
    if mutant is not None:
        import_changed(mutant)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import pytest

    settings = ["-n", "0", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:cov", "-m", TIERS]
    os._exit(int(pytest.main([*settings, *cases])))


def outcome(mutant, cases, log):
    """Runs cases in a process that is forked after the libraries are imported.

    Returns "noticed" if a case fails, "survived" if none does, or "endless". Without a mutant,
    which is None, no case should fail.
    """
    process = os.fork()
    if process == 0:
        os.setsid()
        run_cases(mutant, cases, log)
    ends = time.monotonic() + MAX_SECONDS
    while time.monotonic() < ends:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            # Else the cases are of another version of the tests than the coverage.
            assert b"ERROR: not found" not in log.read_bytes(), log
            return "noticed" if status else "survived"
        time.sleep(0.1)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "endless"


OUTCOMES = ("noticed", "endless", "survived", "not reached")


def room_of(file):
    name = file.removeprefix("jaxtp/")
    return name if name.endswith(CORE) else name.partition("/")[0]


def table(results):
    """Returns the lines of the table: counts by room, then each survivor."""
    counts = collections.defaultdict(collections.Counter)
    for result in results:
        counts[room_of(result["file"])][result["result"]] += 1
    lines = [f"{'room':20} {'mutants':>12}" + "".join(f"{name:>12}" for name in OUTCOMES)]
    for room, count in sorted(counts.items()):
        row = [count.total(), *(count[name] for name in OUTCOMES)]
        lines.append(f"{room:20} " + "".join(f"{number:12}" for number in row))
    left = [result for result in results if result["result"] != "noticed"]
    lines += ["", *(f"{result['result']:12} {result['name']}" for result in left)]
    return lines


def parsed_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--coverage", type=Path, default=Path(".coverage"), help="file of coverage.py with contexts"
    )
    parser.add_argument("--count", type=int, default=240, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main():
    arguments = parsed_arguments()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    drawn = []
    for name in CORE:
        drawn += random.Random(arguments.seed).sample(
            mutants_in(name), arguments.count // len(CORE)
        )
    reached = Coverage(arguments.coverage)
    journal = arguments.out.with_suffix(".jsonl")
    journal.touch()
    results = [json.loads(line) for line in journal.read_text().splitlines()]
    # By node and option: a line may have several places with the same change.
    done = {(result["file"], result["node"], result["option"]) for result in results}

    for library in LIBRARIES:
        importlib.import_module(library)
    log = journal.with_suffix(".log")
    control = list(
        itertools.chain.from_iterable(reached.cases(each.file, each.line)[:5] for each in drawn[:5])
    )
    if not control or outcome(None, control, log) != "survived":
        sys.exit(
            f"no case is recorded in {arguments.coverage}, or a case fails without a change: "
            f"see {log}"
        )
    for mutant in drawn:
        if (mutant.file, mutant.node, mutant.option) in done:
            continue
        cases = reached.cases(mutant.file, mutant.line)[:MAX_CASES]
        result = "not reached"
        if cases:
            result = outcome(mutant, cases, log)
        results.append(
            asdict(mutant) | {"name": mutant.name, "result": result, "cases": len(cases)}
        )
        with journal.open("a") as lines:
            lines.write(json.dumps(results[-1]) + "\n")
        print(f"{result:12} {mutant.name}", flush=True)
    arguments.out.write_text("\n".join(table(results)) + "\n")


if __name__ == "__main__":
    main()
