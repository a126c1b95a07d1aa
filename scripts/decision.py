"""Traces the path of a decision: files and functions of jaxtp that a start enters until the state.

    python scripts/decision.py > scripts/results/decision.txt

Starts `configs/tiny.yaml` by `jaxtp train` and by `Trainer`, and the Flax model of
`scripts/examples/mixer.py` by `Trainer`. A trace ends when `Trainer.__enter__` returns: the
initial state is on the devices, and the step is not compiled. It counts code that is called in
the main thread; what runs during an import, bodies of classes, comprehensions and generated methods
do not count.
"""

import inspect
import io
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from types import CodeType, FrameType

import optax

import jaxtp
from jaxtp.train.__main__ import main as train

ROOT = Path(__file__).parents[1]
PACKAGE = Path(jaxtp.__file__).parent
EXAMPLES = ROOT / "scripts" / "examples"
TINY = ROOT / "configs" / "tiny.yaml"
MOST = 20  # Functions that the list of the most frequent has
DECISIONS = ("train/", "models/config.py", "models/block_rules.py")

Start = Callable[[Path], object]


class StateExists(BaseException):
    """The trace ends, and the run with it."""


def count_calls(start: Start, folder: Path) -> Counter[CodeType]:
    """Returns the calls of jaxtp's functions until the state exists."""
    calls: Counter[CodeType] = Counter()
    last = jaxtp.Trainer.__enter__.__code__
    imports = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal imports
        code = frame.f_code
        if code.co_name == "<module>":
            imports += {"call": 1, "return": -1}.get(event, 0)
        if event == "return" and code is last:
            sys.setprofile(None)
            raise StateExists
        is_function = code.co_flags & inspect.CO_NEWLOCALS and code.co_flags & inspect.CO_OPTIMIZED
        is_inner = code.co_name.startswith("<") and code.co_name != "<lambda>"
        is_of_jaxtp = code.co_filename.startswith(str(PACKAGE))
        if event == "call" and not imports and is_function and is_of_jaxtp and not is_inner:
            calls[code] += 1

    with redirect_stdout(io.StringIO()), suppress(StateExists):
        sys.setprofile(count)
        start(folder)
    return calls


def file_of(code: CodeType) -> str:
    """Returns the file of a function, in the package."""
    return str(Path(code.co_filename).relative_to(PACKAGE))


def report(title: str, calls: Counter[CodeType]) -> None:
    """Prints the files and functions by room, and which functions are called again."""
    files = Counter(map(file_of, calls))
    total = sum(calls.values())
    print(f"\n{title}: {len(files)} files, {len(calls)} functions, {total:,} calls")
    rooms = Counter(name.split("/")[0] for name in files)
    for room, count in rooms.most_common():
        inside = {name: n for name, n in files.items() if name.split("/")[0] == room}
        print(f"  {room}: {count} of the files, {sum(inside.values())} functions")
        for name, functions in sorted(inside.items(), key=lambda item: -item[1]):
            print(f"    {functions:4} {name}")
    print_calls("called most often", calls.most_common(MOST))
    decides = {code: n for code, n in calls.items() if file_of(code).startswith(DECISIONS)}
    again = [(code, count) for code, count in Counter(decides).most_common() if count > 1]
    print_calls("decided or checked more than once", again)


def print_calls(title: str, calls: Iterable[tuple[CodeType, int]]) -> None:
    """Prints functions and how often they are called."""
    print(f"  {title}:")
    for code, count in calls:
        print(f"    {count:5} {file_of(code)}: {code.co_qualname}")


def command(folder: Path) -> None:
    """Starts the tiny configuration by the command."""
    train(["--config", str(TINY), f"--run.dir={folder}"])


def trainer(folder: Path) -> None:
    """Starts the same run in Python."""
    settings = {"mesh.fsdp": 2, "mesh.tp": 4}
    jaxtp.Trainer(folder=folder, settings=settings).__enter__()


def flax_model(folder: Path) -> None:
    """Starts a model of Flax in Python."""
    import mixer

    jaxtp.Trainer(
        model=mixer.build,
        plan=mixer.PLAN,
        loss=mixer.loss,
        batches=mixer.batches,
        optimizer=optax.adamw(3e-3),
        mesh="fsdp=2,tp=4",
        folder=folder,
        steps=60,
    ).__enter__()


STARTS: dict[str, Start] = {
    "jaxtp train --config configs/tiny.yaml": command,
    "Trainer, the same run": trainer,
    "Trainer, scripts/examples/mixer.py": flax_model,
}


def main(name: str | None) -> None:
    if name is not None:
        with tempfile.TemporaryDirectory() as folder:
            calls = count_calls(STARTS[name], Path(folder) / "run")
        report(name, calls)
        return
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    print(f"commit {commit}, Python {sys.version.split()[0]}")
    # A process each, because what a process has cached would not be called again.
    for name in STARTS:
        subprocess.run([sys.executable, __file__, name], check=True)


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))
    main(*sys.argv[1:2] or [None])
