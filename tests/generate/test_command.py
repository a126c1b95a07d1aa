"""`jaxtp generate` on runs that `jaxtp train` made, and what it refuses."""

import io
import json
import logging
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from corpora import write_bpe
from made_once import TINY_MODEL, TINY_RUN, made_once, words_of
from runs import TEXT, mesh
from support import assert_refused, sweep, use_mesh
from tables import assert_errors, raised_by, read_json, read_table

import jaxtp
from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.generate import __main__ as command
from jaxtp.generate.__main__ import main
from jaxtp.generate.loading import open_source
from jaxtp.generate.request import Piece, Result
from jaxtp.train.__main__ import main as train

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}{% if "
    "add_generation_prompt %}<bot>{% endif %}"
)
PROMPT = "line 12: the quick"


def make_token_run(folder):
    """Makes a run on tokens of BPE, and its dataset next to it."""
    (folder / "lines.txt").write_text(TEXT)
    data = folder / "data"
    tokenizer = write_bpe(folder / "t", TEXT.splitlines())
    command = [str(folder / "lines.txt"), f"--tokenizer={tokenizer}", f"--out={data}"]
    assert prepare(command) == 0
    places = {"--model.vocab-size": 301, "--data.path": data, "--run.dir": folder / "run"}
    assert train(words_of(TINY_MODEL | TINY_RUN | places)) == 0


@pytest.fixture
def token_run(tmp_path_factory):
    return made_once(tmp_path_factory, "token_run", make_token_run) / "run"


@pytest.fixture
def run(request):
    """The run that a test's parameter names; on bytes if it has none."""
    return request.getfixturevalue(getattr(request, "param", "tiny_run"))


@pytest.fixture
def generate(capsys):
    """Runs the command, which has to succeed; returns its output."""

    def generate(model, *flags):
        capsys.readouterr()
        assert main([f"--model={model}", *map(str, flags)]) == 0
        return capsys.readouterr()

    return generate


@pytest.mark.parametrize("run", sweep(["tiny_run", "token_run"], "tiny_run"), indirect=True)
def test_a_run_continues_a_text(run, generate):
    found = generate(run, f"--prompt={PROMPT}", "--max-tokens=4")
    with use_mesh():
        generator = jaxtp.generate.Generator(jaxtp.load_run(run), open_source(run).tokenizer)
    (expected,) = generator.generate([PROMPT], jaxtp.generate.Settings(max_tokens=4))
    assert found.out == expected.text + "\n"
    for part in (f"{run}, step 4", "= 1 CPU device\n", "prefill ", "decode  3 tokens"):
        assert part in found.err


@pytest.mark.wide
def test_another_mesh_and_a_stop_text(run, generate):
    flags = [f"--prompt={PROMPT}", "--max-tokens=10"]
    text = generate(run, *flags).out
    stop = text.rstrip("\n")[6:8]
    assert (
        generate(run, *flags, *mesh(1, 2, 2), f"--stop={stop}").out
        == text.partition(stop)[0] + "\n"
    )


@pytest.mark.journey
def test_files_of_prompts_and_json(token_run, generate, tmp_path):
    prompts = ["x", "line 1", "line 2: the quick"]
    (tmp_path / "p.txt").write_text("line 1\n\nline 2: the quick\r\n")
    (tmp_path / "p.jsonl").write_text('{"q": "line 1"}\n{"q": "line 2: the quick", "other": 1}\n')
    of_text = ["--prompt-file", tmp_path / "p.txt"]
    of_records = ["--prompt-file", tmp_path / "p.jsonl", "--field=q"]
    flags = ["--max-tokens=4", "--temperature=1", "--seed=4", "--prompt=x"]

    def records(*more):
        return [
            json.loads(line)
            for line in generate(token_run, *flags, "--json=-", *more).out.splitlines()
        ]

    found = records(*of_records)
    assert [(record["index"], record["prompt"]) for record in found] == list(enumerate(prompts))
    for record in found:
        assert len(record["ids"]) == len(record["logprobs"])
        assert (record["finish"] == "length") == (len(record["ids"]) == 4)
    assert [each["ids"] for each in records("--batch-size", 1, *of_records)] == [
        each["ids"] for each in found
    ]
    found = records(*of_text)
    numbered = zip([0, 1, 3], prompts, strict=True)  # a blank line is counted
    assert [(record["index"], record["prompt"]) for record in found] == list(numbered)
    as_text = generate(token_run, *flags, *of_text).out
    assert as_text == "".join(
        f"--- {r['index']}: {json.dumps(r['prompt'])}\n{r['text']}\n" for r in found
    )
    as_text = generate(token_run, *flags, "--samples=2", "--json", tmp_path / "s.jsonl").out
    samples = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [(record["index"], record["sample"]) for record in samples] == [(0, 0), (0, 1)]
    assert as_text == "".join(
        f'--- 0, sample {i}: "x"\n{each["text"]}\n' for i, each in enumerate(samples)
    )


@pytest.mark.journey
def test_a_chat_reads_what_was_said(run, generate, tmp_path, monkeypatch):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nand then?\n"))
    flags = [
        "--chat",
        "--template",
        tmp_path / "t.jinja",
        "--max-tokens=6",
        "--system=be brief",
    ]
    told = generate(run, *flags)
    conversation = "<system> be brief\n<user> hello\n<bot>"
    first = generate(run, "--max-tokens=6", f"--prompt={conversation}").out
    again = (
        conversation.removesuffix("<bot>")
        + f"<assistant> {first.removesuffix(chr(10))}\n<user> and then?\n<bot>"
    )
    second = generate(run, "--max-tokens=6", f"--prompt={again}").out
    assert told.out == first + second
    known = len(conversation.removesuffix("bot>"))
    assert f"; {known} more were in the cache" in told.err


class Writes(io.RawIOBase):
    """A file that remembers each write."""

    def __init__(self):
        self.parts = []

    def writable(self):
        return True

    def write(self, data):
        self.parts.append(bytes(data))
        return len(data)


@pytest.mark.journey
@pytest.mark.parametrize("form", [[], ["--json=-"]])
def test_each_text_is_written_at_once_in_the_order_of_prompts(
    form, run, tmp_path, monkeypatch, capsys
):
    """So that a killed command leaves whole lines, also where a text is longer than a buffer.
    Meanwhile standard error shows the progress.
    """
    prompts = ["line 1" * count for count in (1, 50, 2)]
    (tmp_path / "p.txt").write_text("\n".join(prompts))
    monkeypatch.setattr("jaxtp.generate.loading.PROGRESS_SECONDS", 0.0)
    writes = Writes()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(writes, 64)))
    flags = ["--model", run, "--prompt-file", tmp_path / "p.txt", "--max-tokens=2", *form]
    assert main([str(flag) for flag in flags]) == 0
    assert [
        prompt in part.decode() for prompt, part in zip(prompts, writes.parts, strict=True)
    ] == [True] * 3
    assert all(part.endswith(b"\n") for part in writes.parts)
    assert re.search(r"^[0-3] of 3 texts, [\d,]+ tokens/s$", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.journey
def test_a_terminal_does_not_obey_generated_texts(run, monkeypatch):
    """A pipe gets the text as it is."""
    bell = lambda *_, **__: iter(
        [Piece(0, 7, "\x1b\a\x7f", Result(0, "\x1b\a\x7f", (), (), "end", 1))]
    )
    monkeypatch.setattr(jaxtp.generate.Generator, "stream", bell)
    for form in ([], ["--prompt=y"], ["--json=-"]):
        written = []
        for is_terminal in (True, False):
            stdout = io.StringIO()
            stdout.isatty = lambda is_terminal=is_terminal: is_terminal
            monkeypatch.setattr(sys, "stdout", stdout)
            assert main([f"--model={run}", "--prompt=x", *form]) == 0
            written.append(stdout.getvalue())
        assert written[0].replace("\n", "").isprintable(), form
        assert "\x7f" in written[1], form


@pytest.mark.journey
def test_a_closed_pipe_ends_the_command_in_silence(run, tmp_path):
    (tmp_path / "p.txt").write_text("\n".join(f"line {index}" for index in range(50)))
    flags = ["--model", run, "--prompt-file", tmp_path / "p.txt", "--json=-", "--max-tokens=50"]
    command = [sys.executable, "-m", "jaxtp", "generate", *map(str, flags)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert json.loads(process.stdout.readline())["index"] == 0
        process.stdout.close()
        told = process.stderr.read().decode()
    assert process.returncode == -signal.SIGPIPE
    assert [line.split()[0] for line in told.splitlines()] == ["model", "mesh"]


@pytest.mark.journey
def test_a_chat_in_a_terminal(run, tmp_path):
    """Keys as they are typed, with what a terminal makes of them: signals, an end, lines that
    are called back.
    """
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    flags = ["--model", run, "--chat", "--template", tmp_path / "t.jinja", "--max-tokens=100000"]
    command = [sys.executable, "-m", "jaxtp", "generate", *map(str, flags)]
    terminal = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", *command]
    with subprocess.Popen(
        terminal, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        try:
            converse(process)
            process.stdin.close()
            assert process.wait() == 0
        finally:
            process.kill()


CONVERSATION = [
    # What is awaited in turn, and the keys that are pressed then.
    (b"(/help prints the commands", b""),
    (b"> ", b"hello\n"),
    (b"\r\n", b""),
    (b" ", b"\x03"),
    (b"interrupted", b""),
    (b"> ", b"half\x03"),
    (b"(Ctrl-D ends the chat)", b""),
    (b"> ", b"/qiut\n"),
    (b"commands are /help, /reset, /quit", b""),
    (b"> ", b"x" * 10_000 + b"\n"),
    (b"x" * 100 + b"\r\n", b""),
    # Of the answer, or of a line that says how far the text has been read.
    (b" ", b"\x03"),
    (b"interrupted", b""),
    (b"> ", b"\x04"),
    (b"compiled in", b""),
]


def converse(process):
    shown = b""
    for awaited, typed in CONVERSATION:
        # Python misses Ctrl-C between two waits for a key.
        again = b"\x03" if b"Ctrl-D" in awaited else b""
        while awaited not in shown:
            while not select.select([process.stdout], [], [], 5 if again else 100)[0]:
                assert again, (awaited, shown)
                process.stdin.write(again)
            part = process.stdout.read(1)
            assert part, shown
            shown += part
        shown = shown.partition(awaited)[2]
        process.stdin.write(typed)


@pytest.mark.wide
def test_a_run_that_has_moved_from_its_data(tmp_path, generate, capsys):
    before = tmp_path / "before"
    before.mkdir()
    make_token_run(before)
    flags = ["--prompt=line 12", "--max-tokens=4"]
    expected = generate(before / "run", *flags).out
    before.rename(tmp_path / "moved")
    data = tmp_path / "moved/data"
    given = [f"--model={tmp_path}/moved/run", *flags]
    for place in (data, data / "tokenizer.json"):
        assert generate(tmp_path / "moved/run", *flags, f"--tokenizer={place}").out == expected
    tokenizer = read_json(data / "tokenizer.json")
    (tmp_path / "other.json").write_text(json.dumps({**tokenizer, "version": "1.0"}, indent=3))
    refusals = {
        f"is no longer in {before / 'data'}": [],
        "--tokenizer PATH": [],
        "its sha256 differs": [f"--tokenizer={tmp_path}/other.json"],
        "not a tokenizer.json": [f"--tokenizer={tmp_path}/moved/lines.txt"],
    }
    for message, tokenizer_flags in refusals.items():
        assert_refused(main, [*given, *tokenizer_flags], message, capsys)


def test_refused_commands(run, byte_dataset, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "MAX_BYTES", 2**20)
    content = {
        "prompts.txt": "a",
        "lines.jsonl": '{"text": "a"}',
        "empty.txt": "\n \n",
        "bad.jinja": "{% for %}",
        "no.jinja": "{{ raise_exception('no') }}",
        "zero.txt": "\0" * (2**20 + 1),
    }
    names = {"folder": tmp_path, "run": run, "data": byte_dataset, "long": "r" * 5000}
    (tmp_path / "run").symlink_to(run)
    for name, text in content.items():
        (tmp_path / name).write_text(text)
        names[name.partition(".")[0]] = tmp_path / name
    names["text"] = names["prompts"]

    def error_of(row):
        words = shlex.split(row.get("flags", "").format(**names))
        model = row.get("model", str(run)).format(**names)
        words += ["--model", model] if model else []
        words += [] if row.get("alone") else ["--prompt=x"]
        code = main(words)
        said = capsys.readouterr()
        return (
            f"{code} {said.out}: {said.err}"
            if (code, said.out) != (2, "") or "Traceback" in said.err
            else said.err
        )

    assert_errors(read_table(__file__, "refused_commands"), error_of, names)


def test_a_bad_line_of_a_file_is_named(tmp_path):
    path = tmp_path / "p.jsonl"

    def error_of(row):
        path.write_text('{"prompt": "x"}\n' + row["line"] + "\n")
        return raised_by(command.read_prompts, path, "prompt")

    assert_errors(read_table(__file__, "bad_lines"), error_of)
    path.write_bytes(b"\xff")
    assert "not UTF-8 (byte 0)" in raised_by(command.read_prompts, path, "prompt")


def test_a_damaged_checkpoint_is_one_error(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    for path in (tmp_path / "run/checkpoints/4/state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-64])
    assert main([f"--model={tmp_path}/run", "--prompt=x"]) == 2
    error = capsys.readouterr().err
    assert "damaged" in error
    assert "Traceback" not in error


def test_a_run_is_loaded_in_python_without_a_warning(run, monkeypatch, caplog):
    """As in a process that no command has made quiet."""
    absl = logging.getLogger("absl")
    before = absl.level
    absl.setLevel(logging.WARNING)  # by the method, which forgets what was decided at another level
    monkeypatch.setattr(absl, "handlers", [caplog.handler])
    with use_mesh():
        jaxtp.load_run(run)
    absl.setLevel(before)
    assert caplog.messages == []
