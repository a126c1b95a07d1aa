"""How commands start and end: closed pipes, full disks, Ctrl-C."""

import ast
import errno
import gc
import io
import linecache
import os
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from functools import partial
from pathlib import Path

import jax
import pytest
from flax import nnx
from runs import full_disk

from jaxtp.checkpoint.__main__ import main as checkpoint
from jaxtp.config import entry
from jaxtp.config.entry import NumericsError, UserError
from jaxtp.config.files import write_json
from jaxtp.config.python_object import user_code
from jaxtp.config.schema import ConfigError
from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.errors import AuditError
from jaxtp.generate.__main__ import main as generate
from jaxtp.tools.convert.__main__ import main as convert
from jaxtp.train.__main__ import main as train

JAXTP = Path(__file__).parent.parent.parent / "jaxtp"
MAINS = sorted(JAXTP.rglob("__main__.py"))


def test_every_command_ends_in_the_one_way():
    for path in MAINS:
        ending = path.read_text().rpartition('if __name__ == "__main__":\n')[2].strip()
        assert ending == "entry.run(PROGRAM, main)", path


def test_the_documented_programs_start_before_their_imports():
    for program in ("", "jaxtp train"):
        name = program.replace("jaxtp ", "")
        text = (JAXTP / name / "__main__.py").read_text()
        first = ast.unparse(ast.parse(text).body[1])
        start = f"start({program!r})" if program else "start()"
        assert first.endswith(f"    from jaxtp.config.entry import start\n    {start}"), program


def test_a_full_disk_under_standard_output_is_a_mistake(capsys):
    with open("/dev/full", "w") as full:
        output = entry.text_output(full.fileno(), io.TextIOWrapper(io.BytesIO(), "utf-8"))

        def action():
            output.write("numbers")
            output.flush()

        assert entry.attempt("program", action) == 2
        # what is left in the buffer is silent, as it must be when the interpreter ends
        output.flush()
    assert capsys.readouterr().err == "program: error: standard output: No space left on device\n"


LONG = "a" * 300


def test_a_name_that_no_file_can_have_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for main, flags in (
        (checkpoint, f"inspect {LONG}"),
        (convert, f"export {LONG} out"),
        (convert, f"import {LONG} out"),
        (generate, f"--model {LONG} --prompt a"),
        (train, f"--data.path {LONG}"),
        (train, f"--run.dir {LONG}"),
        (prepare, f"{LONG} --out out"),
    ):
        assert main(flags.split()) == 2
        error = capsys.readouterr().err
        assert "File name too long" in error or "no such folder" in error, flags
        assert error.count("\n") == 1, flags


def test_errors_of_standard_output_keep_their_class():
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(BrokenPipeError) as raised:
        entry.Output(writing, "w", closefd=False).write(b"numbers")
    assert raised.value.filename == entry.STANDARD_OUTPUT
    os.close(writing)


def test_errors_of_files_are_one_line(tmp_path, capsys):
    path = tmp_path / "report.json"
    with full_disk(10):
        assert entry.attempt("program", partial(path.write_text, "x" * 100)) == 2
    assert capsys.readouterr().err == "program: error: File too large\n"
    (tmp_path / "loop").symlink_to("loop")
    for name in ("x" * 300, "loop/model"):
        assert entry.attempt("program", (tmp_path / name).stat) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"program: error: {tmp_path}")
        assert said.count("\n") == 1


def test_a_full_disk_under_a_report_names_its_flag():
    with pytest.raises(
        ConfigError, match="--json /dev/full: No space left on device; name another file"
    ):
        write_json("--json", Path("/dev/full"), {"numbers": [1, 2]})


def raising(error):
    def action():
        raise error

    return action


def test_a_users_mistake_is_one_line_and_other_errors_are_not_hidden(capsys):
    assert entry.attempt("program", raising(ConfigError("mesh.tp = 0: should be 1 or more"))) == 2
    assert capsys.readouterr().err == "program: error: mesh.tp = 0: should be 1 or more\n"
    for error in (
        OSError(errno.EIO, "Input/output error"),
        BrokenPipeError(errno.EPIPE, "of a socket"),
        ValueError("an error of the program"),
    ):
        with pytest.raises(type(error)):
            entry.attempt("program", raising(error))


def started(module, *flags, **streams):
    return subprocess.Popen(
        [sys.executable, "-m", module, *flags], stderr=subprocess.PIPE, text=True, **streams
    )


@pytest.mark.journey
@pytest.mark.parametrize("module", ["jaxtp", "jaxtp.train", "jaxtp.tools.launch"])
def test_a_closed_pipe_is_silent_and_a_full_disk_is_one_line(module):
    """Of the program, of a command, and of one that does not import JAX; all start in the one
    way.
    """
    flags = [] if module == "jaxtp" else ["--help"]
    name = module.replace(".tools", "").replace(".", " ")
    with started(module, *flags, stdout=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGPIPE
    with open("/dev/full", "w") as full, started(module, *flags, stdout=full) as process:
        assert process.stderr.read() == f"{name}: error: standard output: No space left on device\n"
    assert process.returncode == 2


def test_a_pause_leaves_the_garbage_collector_as_it_was():
    for was_enabled, switch in ((False, gc.disable), (True, gc.enable)):
        switch()
        with suppress(KeyError), entry.paused_collection():
            raise KeyError
        assert gc.isenabled() == was_enabled


SCRIPT = "import sys; from {} import {function}; sys.argv = ['jaxtp', 'train']; {function}()"


@pytest.mark.parametrize("name", ["script", "train"])
def test_ctrl_c_during_imports_is_one_line(name):
    """At the first library that is imported after `jaxtp.config.entry`; a traceback would come
    from there.
    """
    command = ["-m", f"jaxtp.{name}", "--help"]
    if name == "script":
        scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())[
            "project"
        ]["scripts"]
        module, _, function = scripts["jaxtp"].partition(":")
        command = ["-c", SCRIPT.format(module, function=function)]
        name = "train"
    with subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True) as process:
        wait_until_it_imports_a_library(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == f"\njaxtp {name}: interrupted\n"
    assert process.returncode == 130


def wait_until_it_imports_a_library(pid):
    while "-packages/" not in (maps := Path(f"/proc/{pid}/maps").read_text()):
        assert maps, "it has ended, and imported none"
        os.sched_yield()


@pytest.mark.journey
def test_output_that_was_never_open_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m jaxtp launch --help >&-",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


CELL = """
import jaxtp

def mine():
    jaxtp.make_mesh(
        tp=0)

mine()
"""


def test_a_notebook_shows_a_mistake_below_the_lines_of_the_user():
    """By the method of an exception that IPython calls; Python's own traceback stays whole."""
    name = "/tmp/ipykernel_1/2.py"
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(keepends=True), name)
    with pytest.raises(UserError) as raised:
        exec(compile(CELL, name, "exec"), {})
    raised.value.add_note("and a note")
    raised.value.__traceback__ = raised.tb.tb_next  # without this test
    *places, message, note = raised.value._render_traceback_()
    assert places == ["line 8: mine()", "line 5: jaxtp.make_mesh("]
    assert message == f"MeshError: {raised.value}"
    assert note == "and a note"


def test_errors_whose_message_suffices_say_so_to_ipython():
    for error in (UserError, NumericsError, AuditError):
        assert error("no more")._render_traceback_() == [f"{error.__name__}: no more"]


def test_errors_of_flax_and_jax_in_a_users_code_say_what_to_change():
    rngs = nnx.Rngs(0)
    for remedy, call in (
        ("make it an attribute of the model", lambda: rngs.params()),
        ("nothing can be loaded; load it outside", jax.sharding.get_mesh),
    ):
        with pytest.raises(ConfigError, match=remedy), user_code("build"):
            jax.eval_shape(call)


def test_a_signal_without_a_name_has_its_number():
    assert entry.signal_name(99) == "signal 99"
