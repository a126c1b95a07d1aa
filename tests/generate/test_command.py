"""`jaxtp generate` on runs that `jaxtp train` made, and what it refuses."""

import io
import json
import logging
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from runs import SMALL, TEXT, mesh
from support import sweep

import jaxtp
from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.data.tokenizer import ByteTokenizer
from jaxtp.generate.__main__ import main
from jaxtp.generate.loading import open_source
from jaxtp.generate.programs import Programs
from jaxtp.generate.request import Piece, Result
from jaxtp.train.__main__ import main as train

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A run on bytes, one on tokens, and the dataset of those."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines()))
    dataset = ["--train-bpe", "300", "--held-out", "0.1", "--out", str(folder / "data")]
    assert prepare([str(folder / "lines.jsonl"), *dataset]) == 0
    model = ["--model.vocab-size", "301", "--model.num-kv-heads", "2", *mesh(1, 1, 1)]  # one, to be compiled once
    for run, data in {"bytes": "text.txt", "tokens": "data"}.items():
        flags = ["--data.path", str(folder / data), "--run.dir", str(folder / run), "--train.steps", "10"]
        assert train([*SMALL, *model, *flags, "--optimizer.learning-rate", "0.02"]) == 0
    return folder


def generate(capsys, *flags):
    capsys.readouterr()
    assert main([str(flag) for flag in flags]) == 0
    return capsys.readouterr()


def uncached(folder, prompt, count):
    """Greedy ids, each from reading everything again by the model as training knows it."""
    source = open_source(folder)
    model = source.load(jaxtp.make_mesh())
    ids = source.tokenizer.encode_batch([prompt])[0].tolist()
    graph, state = nnx.split(model)
    read = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids)[0])
    for _ in range(count):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(jnp.argmax(read(state, padded)[len(ids) - 1, : source.tokenizer.info.vocab_size])))
    return source.tokenizer.decode(np.array(ids[-count:])).decode(errors="replace")


@pytest.mark.parametrize("run", sweep(["bytes", "tokens"], "bytes"))
def test_a_run_goes_on_with_a_text(places, run, capsys):
    flags = ["--model", places / run, "--prompt", "line 12: the quick", "--max-tokens", 10]
    found = generate(capsys, *flags)
    with jax.set_mesh(jaxtp.make_mesh()):
        assert found.out == uncached(places / run, "line 12: the quick", 10) + "\n"
    assert f"model   {places / run}, step 10: " in found.err
    assert "mesh    dp 1 x fsdp 1 x cp 1 x tp 1 = 1 CPU device\n" in found.err
    assert "prefill " in found.err
    assert "decode  9 tokens in " in found.err


@pytest.mark.wide
def test_on_another_mesh_and_in_sixteen_bits(places, capsys):
    flags = ["--model", places / "bytes", "--prompt", "line 12: the quick", "--max-tokens", 10]
    expected = generate(capsys, *flags).out
    assert [generate(capsys, *flags, *mesh(*sizes)).out for sizes in ((1, 1, 4), (2, 2, 2))] == [expected, expected]
    assert generate(capsys, *flags, "--dtype", "bfloat16").err.splitlines()[0].endswith("parameters, bfloat16")


@pytest.mark.journey
def test_files_of_prompts_and_objects(places, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("line 1\n\nline 2: the quick\r\n")
    (tmp_path / "p.jsonl").write_text('{"q": "line 1"}\n{"q": "line 2: the quick", "other": 1}\n')
    flags = ["--model", places / "tokens", "--max-tokens", 4, "--temperature", 1, "--seed", 4]
    as_text = generate(capsys, *flags, "--prompt", "x", "--prompt-file", tmp_path / "p.txt").out
    as_json = generate(
        capsys, *flags, "--json", "-", "--prompt", "x", "--prompt-file", tmp_path / "p.jsonl", "--field", "q"
    )
    records = [json.loads(line) for line in as_json.out.splitlines()]
    prompts = ["x", "line 1", "line 2: the quick"]
    assert [record["prompt"] for record in records] == prompts
    assert all(len(record["ids"]) == len(record["logprobs"]) <= 4 for record in records)
    assert {(record["finish"], len(record["ids"]) == 4) for record in records} <= {("length", True), ("end", False)}
    assert any(record["ids"] for record in records)
    assert [record["index"] for record in records] == [0, 1, 2]
    found = generate(capsys, *flags, "--json", "-", "--prompt", "x", "--prompt-file", tmp_path / "p.txt").out
    with_a_gap = [json.loads(line) for line in found.splitlines()]
    assert [record["index"] for record in with_a_gap] == [0, 1, 3], "a blank line is counted"
    assert [record["prompt"] for record in with_a_gap] == prompts
    assert as_text == "".join(f"--- {r['index']}: {json.dumps(r['prompt'])}\n{r['text']}\n" for r in with_a_gap)
    sampled = generate(capsys, *flags, "--samples", 2, "--json", tmp_path / "s.jsonl", "--prompt", "x")
    samples = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [(record["index"], record["sample"]) for record in samples] == [(0, 0), (0, 1)]
    assert sampled.out == "".join(f'--- 0, sample {i}: "x"\n{each["text"]}\n' for i, each in enumerate(samples))
    again = generate(capsys, *flags, "--json", "-", "--batch-size", 1, *(f for p in prompts for f in ("--prompt", p)))
    assert [json.loads(line)["ids"] for line in again.out.splitlines()] == [record["ids"] for record in records]


@pytest.mark.journey
def test_a_stop_text(places, capsys):
    flags = ["--model", places / "bytes", "--prompt", "line 12: the quick", "--max-tokens", 10]
    text = generate(capsys, *flags).out.rstrip("\n")
    assert generate(capsys, *flags, "--stop", text[2:4]).out == text.split(text[2:4])[0] + "\n"


def chat(monkeypatch, capsys, entered, *flags):
    monkeypatch.setattr(sys, "stdin", io.StringIO(entered))
    capsys.readouterr()
    code = main([str(flag) for flag in flags])
    return code, capsys.readouterr()


@pytest.mark.journey
def test_a_chat_knows_what_was_said(places, tmp_path, monkeypatch, capsys):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    flags = ["--model", places / "bytes", "--chat", "--template", tmp_path / "t.jinja", "--max-tokens", 6]
    code, told = chat(monkeypatch, capsys, "hello\n\nand then?\n", *flags, "--system", "be brief")
    assert code == 0
    conversation = "<system> be brief\n<user> hello\n<bot>"
    first = generate(capsys, "--model", places / "bytes", "--max-tokens", 6, "--prompt", conversation).out
    again = conversation.removesuffix("<bot>") + f"<assistant> {first.removesuffix(chr(10))}\n<user> and then?\n<bot>"
    second = generate(capsys, "--model", places / "bytes", "--max-tokens", 6, "--prompt", again).out
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
@pytest.mark.parametrize("form", [[], ["--json", "-"]])
def test_texts_are_written_whole_in_the_order_of_their_prompts(form, places, tmp_path, monkeypatch, capsys):
    """However much longer than what is buffered; meanwhile standard error says how far it is."""
    prompts = ["line 1" * count for count in (1, 50, 2)]
    (tmp_path / "p.txt").write_text("\n".join(prompts))
    monkeypatch.setattr("jaxtp.generate.loading.PROGRESS_SECONDS", 0.0)
    writes = Writes()
    stdout = io.TextIOWrapper(io.BufferedWriter(writes, 64))
    stdout._CHUNK_SIZE = 64
    monkeypatch.setattr(sys, "stdout", stdout)
    flags = ["--model", places / "bytes", "--prompt-file", tmp_path / "p.txt", "--max-tokens", 2, *form]
    assert main([str(flag) for flag in flags]) == 0
    assert [prompt in part.decode() for prompt, part in zip(prompts, writes.parts, strict=True)] == [True] * 3
    assert all(part.endswith(b"\n") for part in writes.parts)
    assert re.search(r"^[0-3] of 3 texts, [\d,]+ tokens/s$", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.journey
@pytest.mark.parametrize("form", [[], ["--prompt", "y"], ["--json", "-"]])
def test_a_terminal_does_not_obey_generated_texts(form, places, monkeypatch):
    """A pipe gets what the model wrote."""
    bell = lambda *_, **__: iter([Piece(0, 7, "\x1b\a\x7f", Result(0, "\x1b\a\x7f", (), (), "end", 1))])
    monkeypatch.setattr(jaxtp.Generator, "stream", bell)
    written = {}
    for is_terminal in (True, False):
        stdout = io.StringIO()
        stdout.isatty = lambda is_terminal=is_terminal: is_terminal
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["--model", str(places / "bytes"), "--prompt", "x", *form]) == 0
        written[is_terminal] = stdout.getvalue()
    assert written[True].replace("\n", "").isprintable()
    assert "\x7f" in written[False]


def spawned(*flags, **streams):
    return subprocess.Popen([sys.executable, "-m", "jaxtp.generate", *map(str, flags)], **streams)


@pytest.mark.journey
def test_what_a_killed_command_has_written_is_whole_lines(places, tmp_path):
    prompts = [f"line {index}" for index in range(200)]
    (tmp_path / "p.txt").write_text("\n".join(prompts))
    flags = ["--model", places / "bytes", "--prompt-file", tmp_path / "p.txt", "--json", "-", "--max-tokens", 100]
    with (tmp_path / "out.jsonl").open("wb") as out, spawned(*flags, stdout=out, stderr=subprocess.PIPE) as process:
        while (tmp_path / "out.jsonl").read_bytes().count(b"\n") < 3:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.001)
        process.kill()
    written = (tmp_path / "out.jsonl").read_text()
    assert written.endswith("\n")
    records = [json.loads(line) for line in written.splitlines()]
    assert 3 <= len(records) < len(prompts)
    assert [record["prompt"] for record in records] == prompts[: len(records)]


@pytest.mark.journey
def test_a_reader_that_has_enough_ends_the_command_in_silence(places, tmp_path):
    (tmp_path / "p.txt").write_text("\n".join(f"line {index}" for index in range(50)))
    flags = ["--model", places / "bytes", "--prompt-file", tmp_path / "p.txt", "--json", "-", "--max-tokens", 50]
    with spawned(*flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert json.loads(process.stdout.readline())["index"] == 0
        process.stdout.close()
        told = process.stderr.read().decode()
    assert process.returncode == -signal.SIGPIPE
    assert [line.split()[0] for line in told.splitlines()] == ["model", "mesh"]


@pytest.mark.journey
def test_a_chat_in_a_terminal(places, tmp_path):
    """Keys as they are typed, with what a terminal makes of them: signals, an end, lines that are called back."""
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    flags = ["--model", places / "bytes", "--chat", "--template", tmp_path / "t.jinja", "--max-tokens", 100_000]
    command = [sys.executable, "-m", "jaxtp.generate", *map(str, flags)]
    terminal = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", *command]
    with subprocess.Popen(terminal, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            code = in_terminal(process)
        finally:
            process.kill()
    assert code == 0


def in_terminal(process):
    """Talks to it, and returns its exit code."""
    shown = b""

    def see(text, again=b""):
        """Waits for a text, and presses a key once more where it takes long; returns what comes before the text."""
        nonlocal shown
        while text not in shown:
            while not select.select([process.stdout], [], [], 5 if again else 100)[0]:
                assert again, (text, shown)
                process.stdin.write(again)
            part = process.stdout.read(1)
            assert part, shown
            shown += part
        before, _, shown = shown.partition(text)
        return before.decode(errors="replace")

    see(b"(/help prints the commands")
    see(b"> ")
    process.stdin.write(b"hello\n")
    see(b"\r\n")
    see(b" ")
    process.stdin.write(b"\x03")
    assert "interrupted" in see(b"> ")
    process.stdin.write(b"half\x03")
    see(b"(Ctrl-D ends the chat)", again=b"\x03")  # Python misses it between two waits for a key
    see(b"> ")
    process.stdin.write(b"/qiut\n")
    see(b"commands are /help, /reset, /quit")
    see(b"> ")
    process.stdin.write(b"x" * 10_000 + b"\n")
    see(b"x" * 100 + b"\r\n")
    see(b" ")  # of the answer, or of a line that says how far the text has been read
    process.stdin.write(b"\x03")
    see(b"interrupted")
    see(b"> ")
    process.stdin.write(b"\x04")
    see(b"compiled in")
    process.stdin.close()
    return process.wait()


@pytest.mark.wide
def test_an_answer_that_is_stopped_leaves_the_generator_as_it_was(places, monkeypatch):
    """Between two tokens, and within a program, where what the devices hold is lost."""
    source = open_source(places / "bytes")
    generator = jaxtp.Generator(source.load(jaxtp.make_mesh()), source.tokenizer)
    settings = jaxtp.GenerationSettings(max_tokens=8)
    (expected,) = generator.generate(["line 12: the quick"], settings)
    going_on = lambda: [*generator.stream(["line 12: the quick"], settings, keep=True)][-1].result
    pieces = generator.stream(["line 12: the"], settings, keep=True)
    assert [next(pieces).result for _ in range(3)] == [None] * 3
    pieces.close()
    assert going_on().ids == expected.ids
    assert generator.speed.timing.kept_tokens >= len("line 12: the")

    def interrupted(self, *_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as within:
        within.setattr(Programs, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            going_on()
    assert going_on().ids == expected.ids
    assert generator.speed.timing.kept_tokens == 0


def test_an_interrupt_ends_an_answer_and_not_the_chat(places, tmp_path, monkeypatch, capsys):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    made = []

    def interrupted_once(self, prompts, settings, **_):
        made.append(bytes(prompts[0]).decode())
        yield Piece(0, 5, "some", None)
        if len(made) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(jaxtp.Generator, "stream", interrupted_once)
    flags = ["--model", places / "bytes", "--chat", "--template", tmp_path / "t.jinja"]
    code, told = chat(monkeypatch, capsys, "a\nb\n", *flags)
    assert (code, told.out) == (0, "some\nsome\n")
    assert made[1] == "<user> a\n<assistant> some\n<user> b\n<bot>"


@pytest.mark.wide
def test_a_run_that_has_moved_from_its_data(places, tmp_path, capsys):
    shutil.copytree(places, tmp_path / "moved")
    run, data = tmp_path / "moved/tokens", tmp_path / "moved/data"
    flags = ["--prompt", "line 12", "--max-tokens", 4]
    expected = generate(capsys, "--model", run, *flags).out
    places.joinpath("data").rename(places / "away")
    try:
        assert main(["--model", str(run), *map(str, flags)]) == 2
        error = capsys.readouterr().err
        assert f"is no longer in {places / 'data'}; give it by --tokenizer PATH" in error
        for place in (data, data / "tokenizer.json"):
            assert generate(capsys, "--model", run, *flags, "--tokenizer", place).out == expected
    finally:
        places.joinpath("away").rename(places / "data")


PROMPT = ["--prompt", "x"]
REFUSED = {
    "nothing": ([], "name the model by --model DIR; give texts by --prompt TEXT or --prompt-file FILE"),
    "no such folder": (["--model", "{runs}/byte", *PROMPT], "byte: no such folder; did you mean {runs}/bytes?"),
    "a name of the hub": (
        ["--model", "meta-llama/Llama-3.1-8B", *PROMPT],
        "`hf download meta-llama/Llama-3.1-8B --local-dir models/Llama-3.1-8B` downloads it",
    ),
    "a date without a chat": (["--model", "{runs}/bytes", "--date", "2026-01-31", *PROMPT], "it needs --chat"),
    "a long name": (["--model", "{runs}/" + "r" * 5000, *PROMPT], "r: no such folder"),
    "a file": (["--model", "{runs}/text.txt", *PROMPT], "text.txt: not a folder"),
    "no model": (
        ["--model", "{runs}/data", *PROMPT],
        "neither a run with a finished checkpoint nor a model in Hugging Face",
    ),
    "no such file": (["--model", "{runs}/bytes", "--prompt-file", "{runs}/txt.txt"], "did you mean {runs}/text.txt?"),
    "no field": (
        ["--model", "{runs}/bytes", "--prompt-file", "{runs}/lines.jsonl"],
        "line 1: no field 'prompt'; it has",
    ),
    "field of text": (["--model", "{runs}/bytes", *PROMPT, "--field", "q"], "--field q needs --prompt-file FILE.jsonl"),
    "empty file": (["--model", "{runs}/bytes", "--prompt-file", "{empty}"], "no prompts in it"),
    "empty prompt": (["--model", "{runs}/bytes", "--prompt", ""], "prompt 0 is empty"),
    "width": (
        ["--model", "{runs}/bytes", *PROMPT, "--mesh.fsdp", "3"],
        "not divisible by mesh.fsdp=3; fsdp can be 1, 2",
    ),
    "cp": (
        ["--model", "{runs}/nowhere", *PROMPT, "--mesh.cp", "2"],
        "--mesh.cp 2: a KV cache cannot be split over cp; give its devices to tp: --mesh.tp 2",
    ),
    "devices": (["--model", "{runs}/bytes", *PROMPT, "--mesh.tp", "8", "--mesh.dp", "4"], "needs 32 devices"),
    "many devices": (
        ["--model", "{runs}/bytes", *PROMPT, "--mesh.tp", "1000000000"],
        "the limit of virtual CPU devices is 1024",
    ),
    "chat and prompt": (["--model", "{runs}/bytes", *PROMPT, "--chat"], "leave --prompt, --prompt-file and --json out"),
    "chat and samples": (["--model", "{runs}/bytes", "--chat", "--samples", "2"], "--samples 2: a chat has one answer"),
    "system": (["--model", "{runs}/bytes", *PROMPT, "--system", "be brief"], "--system and --template need --chat"),
    "no template": (["--model", "{runs}/bytes", "--chat"], "has no chat template; give one by --template FILE"),
    "template": (["--model", "{runs}/bytes", "--chat", "--template", "{bad}"], "bad.jinja: not a chat template: "),
    "a template that refuses": (
        ["--model", "{runs}/bytes", "--chat", "--template", "{no}"],
        "refuses this conversation: no",
    ),
    "no such template": (["--model", "{runs}/bytes", "--chat", "--template", "no.jinja"], "no.jinja: No such file"),
    "tokenizer of bytes": (["--model", "{runs}/bytes", *PROMPT, "--tokenizer", "{runs}/data"], "was trained on bytes"),
    "another tokenizer": (["--model", "{runs}/tokens", *PROMPT, "--tokenizer", "{other}"], "its sha256 differs"),
    "no tokenizer": (["--model", "{runs}/tokens", *PROMPT, "--tokenizer", "{runs}/text.txt"], "not a tokenizer.json"),
    "no effect": (["--model", "{runs}/bytes", *PROMPT, "--top-p", "0.5"], "--top-p 0.5 has no effect at temperature 0"),
    "value": (["--model", "{runs}/bytes", *PROMPT, "--top-p", "1.5"], "--top-p 1.5: should be less than or equal to 1"),
    "tokens": (["--model", "{runs}/bytes", *PROMPT, "--max-tokens", "0"], "--max-tokens 0: should be greater than or"),
    "many tokens": (
        ["--model", "{runs}/bytes", *PROMPT, "--max_tokens", str(10**12)],
        "--max-tokens 1000000000000: sh",
    ),
    "settings": (
        ["--model", "{runs}/bytes", *PROMPT, "--top-p", "0.5", "--top-k", "3", "--stop", ""],
        "--top-k 3, --top-p 0.5 have no effect at temperature 0, which takes the most likely token; set a "
        "temperature; --stop '' would end every text at once; remove it",
    ),
    "rows": (["--model", "{runs}/bytes", *PROMPT, "--batch-size", "0"], "--batch-size 0: should be greater than or"),
    "cache": (["--model", "{runs}/bytes", *PROMPT, "--max-tokens", "2000000000"], "GiB on each device, which has "),
    "endless file": (
        ["--model", "{runs}/bytes", "--prompt-file", "{zero}"],
        "larger than 1 MiB, the limit for a prompt file",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, places, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxtp.generate.__main__.MAX_BYTES", 2**20)
    flags, message = REFUSED[name]
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "bad.jinja").write_text("{% for %}")
    (tmp_path / "no.jinja").write_text("{{ raise_exception('no') }}")
    tokenizer = json.loads((places / "data/tokenizer.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps({**tokenizer, "version": "1.0"}, indent=3))
    names = {"runs": places, "empty": tmp_path / "empty.txt", "bad": tmp_path / "bad.jinja"}
    names["zero"] = tmp_path / "zero"
    names["zero"].write_bytes(bytes(2**20 + 1))
    names["no"] = tmp_path / "no.jinja"
    names["other"] = tmp_path / "other.json"
    assert main([flag.format(**names) for flag in flags]) == 2
    captured = capsys.readouterr()
    assert message.format(**names) in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2: not JSON"),
        ("[1]", 'expected an object such as {"prompt": ...}, found [1]'),
        ('{"promt": "x"}', "no field 'prompt'; did you mean --field promt?"),
        ('{"prompt": 3}', "prompt = 3: should be text"),
    ],
)
def test_a_bad_line_is_named(places, tmp_path, capsys, line, message):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n' + line + "\n")
    assert main(["--model", str(places / "bytes"), "--prompt-file", str(tmp_path / "p.jsonl")]) == 2
    assert message in capsys.readouterr().err


def test_speculation_with_states_is_refused_before_the_weights_are_read(monkeypatch, capsys):
    source = SimpleNamespace(config=jaxtp.ModelConfig(delta_value_heads=4), context=None)
    monkeypatch.setattr("jaxtp.generate.__main__.open_source", lambda *_: source)
    assert main(["--model", "runs/a", *PROMPT, "--speculate", "2"]) == 2
    assert "--speculate 2: a model with recurrent states (Gated DeltaNet)" in capsys.readouterr().err


def test_a_damaged_checkpoint(places, tmp_path, capsys):
    shutil.copytree(places / "bytes", tmp_path / "run")
    for path in (tmp_path / "run/checkpoints/10/state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-64])
    assert main(["--model", str(tmp_path / "run"), *PROMPT]) == 2
    error = capsys.readouterr().err
    assert "damaged" in error
    assert "Traceback" not in error


def test_help_says_what_each_flag_does(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help-all"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert all(
        flag in out for flag in ("--model DIR", "--temperature FLOAT", "--mesh.tp INT", "--chat", "--max-tokens")
    )


def test_a_run_is_loaded_in_python_without_a_warning(places, monkeypatch, caplog):
    """As in a process that no command has made quiet."""
    absl = logging.getLogger("absl")
    before = absl.level
    absl.setLevel(logging.WARNING)  # by the method, which forgets what was decided at another level
    monkeypatch.setattr(absl, "handlers", [caplog.handler])
    with jax.set_mesh(jaxtp.make_mesh()):
        jaxtp.load_run(places / "bytes")
    absl.setLevel(before)
    assert caplog.messages == []


def test_bytes_need_no_tokenizer_file(places):
    assert isinstance(open_source(places / "bytes").tokenizer, ByteTokenizer)
