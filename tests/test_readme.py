"""Runs the commands of the README, the recipes and the guides.

Each page runs separately, from its first command to its last, in a folder with the files that it
assumes: the repository's configurations and scripts, texts, conversations, and tiny models.
"""

import dataclasses
import io
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from corpora import write_bpe
from flax import nnx
from pages import BLOCK, CHECK_OF_ONE_MESH, PAGES, README, blocks, checks, lines_of

import jaxtp
from jaxtp.__main__ import commands
from jaxtp.__main__ import main as run_command
from jaxtp.config.schema import from_yaml, read_values
from jaxtp.layers.parameter import Precision
from jaxtp.train.config import TrainConfig

ROOT = Path(__file__).parent.parent
MAP = [ROOT / f"jaxtp/{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "EVIDENCE")]
FOLLOWED = [page for page in PAGES if "```sh\n" in page.read_text()]

FILE = re.compile(r"# (\w+\.py)\n")
"""First line of an example that is a file."""
SET_UP = ".venv/bin/pip install"
WORDS = [line.split() for line in (ROOT / "LICENSE").read_text().splitlines() if line.strip()]
MODELS = {
    "llama": "tiny",
    "Llama-3.1-8B": "finetune_llama31_8b",
    "Llama-3.1-8B-Instruct": "finetune_llama31_8b",
    "Llama-3.2-1B": "pretrain_1b",
    "Qwen3-8B": "finetune_qwen3_8b",
    "Qwen3-30B-A3B": "qwen3_30b_a3b",
    "Mistral-Small-3.1-24B": "finetune_mistral_small_24b",
}
"""Models that pages name, with their special configuration values."""
SIZES = {
    "vocab_size": 1024,
    "d_model": 16,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "d_ff": 16,
}
TEMPLATE = (
    "{{ tools | map(attribute='function.name') | join if tools }}{% for m in messages %}"
    "{{ m.role }}: {{ m.content or '' }}{{ m.tool_calls | tojson if m.tool_calls }}\n{% endfor %}"
)
SHORTER = {
    "generate": ["--max-tokens", "4"],
    "bench": ["--rounds", "3", "--in-a-row", "2", "--message-bytes", "1024", "1048576"],
}
SHORTER_RUN = ["--optimizer.warmup-steps", "1", "--eval.batches", "1"]


def value_of(words, name):
    return words[words.index(name) + 1] if name in words else None


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Datasets by command, and tiny models by name; each is made once."""
    return tmp_path_factory.mktemp("library")


class Reader:
    """Runs the commands of a page in its own folder."""

    def __init__(self, library, capsys):
        self.library = library
        self.capsys = capsys
        self.steps = {}
        """The actual step, by run folder and step on the page."""

    def prepared(self, words):
        """Runs `jaxtp prepare`, or copies the dataset that the same command made for another
        page.
        """
        out = value_of(words, "--out")
        kept = self.library / re.sub(r"\W+", "_", " ".join(words))
        if kept.exists():
            shutil.copytree(kept, out)
        else:
            assert run_command(["prepare", *words]) == 0
            shutil.copytree(out, kept)

    def shortened(self, words):
        """Returns the flags of a run with fewer steps of a smaller model."""
        folder = value_of(words, "--run.dir")
        config = value_of(words, "--config")
        flags = [*words, *([] if "--model.build" in words else SHORTER_RUN)]
        if config is not None:
            values = read_values(Path(config))
            folder = folder or values["run"]["dir"]
            axes = dict.fromkeys(("dp", "fsdp", "cp", "tp"), 1) | values["mesh"]
            flags += ["--data.sequence-length", "64", "--train.accumulation", "1"]
            flags += ["--data.global-batch-size", str(axes["dp"] * axes["fsdp"])]
            flags += [f"--model.{name.replace('_', '-')}={size}" for name, size in SIZES.items()]
            if "num_experts" in values["model"]:
                flags += ["--model.num-experts=4", "--model.experts-per-token=2"]
        elif not {"--model.from-hf", "--run.init-from", "--model.build"} & set(words):
            flags += ["--model.num-layers", "1", "--data.global-batch-size", "4"]
        said = int(value_of(words, "--train.steps") or 400)
        steps = 2 + len(self.steps)
        self.steps[folder or "runs/tiny", said] = steps
        return [*flags, "--train.steps", str(steps)]

    def follow(self, line, shown):
        """Runs a command of the page; `shown` is the output on the page."""
        if SET_UP in line:
            return
        words = shlex.split(line)
        if words[0] == "python":
            self.run_script(words[1:])
            return
        assert words[0] == "jaxtp", line
        name, *rest = words[1:]
        rest = [self.here(word) for word in rest]
        if name == "prepare" and "--out" in rest:
            self.prepared(rest)
            return
        if name == "launch" and "train" in rest:
            at = rest.index("--") + 1
            rest = [*rest[:at], *rest[at : at + 2], *self.shortened(rest[at + 2 :])]
        flags = self.shortened(rest) if name == "train" else [*rest, *SHORTER.get(name, [])]
        if name == "check" and "--config" in rest:  # it runs in a test of its own
            with pytest.raises(SystemExit, match=r"^0$"):
                run_command([name, *rest, "--print-config"])
            return
        self.capsys.readouterr()
        code = run_command([name, *flags])
        said = self.capsys.readouterr()
        assert code == (1 if rest[0] == "diff" else 0), f"{line}\n{said.err}"
        self.compare(name, flags == rest, said.out, shown)

    def here(self, word):
        """Replaces a checkpoint's step on the page by the actual step."""
        found = re.fullmatch(r"(.*)/checkpoints/(\d+)", word)
        return f"{found[1]}/checkpoints/{self.steps[found[1], int(found[2])]}" if found else word

    def compare(self, name, whole, said, shown):
        """Compares the deterministic part of the output with the page."""
        if name == "check":
            assert re.search(r"all \d+ equal one device", said)
        if whole and (name == "explain" or (name == "estimate" and "tokens/s" in shown)):
            # The residuals of a step differ between versions of JAX.
            shown, said = (
                re.sub(r"saves [\d,]+ bytes", "saves bytes", text) for text in (shown, said)
            )
            missing = set(shown.splitlines()) - {"...", ""} - set(said.splitlines())
            assert not missing, f"the page shows lines that it does not print: {missing}"

    def run_script(self, words):
        script, *flags = words
        # a file of the page; it needs a process of its own, with devices for its mesh
        if "/" not in script:
            done = subprocess.run(
                [sys.executable, script, *flags], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            return
        if "/examples/" in script:
            flags += ["--steps", "10"]
        flags += SHORTER.get(Path(script).stem, [])
        if script.endswith("compiled_step.py"):
            return  # in a test of its own
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(Path(script).parent.resolve()))
            patch.setattr("sys.argv", [script, *flags])
            code = 0
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                code = end.code
            assert not code, script


@pytest.fixture(scope="module")
def tiny_models(library):
    """Folders in Hugging Face format, with a tokenizer and a chat template."""
    lines = [" ".join(words) for words in WORDS]
    tokenizer = write_bpe(library / "t", [*lines, README.read_text()], SIZES["vocab_size"])
    for name, recipe in MODELS.items():
        special = from_yaml(TrainConfig, ROOT / f"configs/{recipe}.yaml").model
        experts = {"num_experts": 4, "experts_per_token": 2} if special.num_experts else {}
        config = dataclasses.replace(special, **SIZES, **experts, precision=Precision())
        model = jaxtp.Decoder(config, rngs=nnx.Rngs(0))
        jaxtp.hf.save(model, library / "models" / name, tokenizer_from=tokenizer)
        (library / "models" / name / "chat_template.jinja").write_text(TEMPLATE)
    return library / "models"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def furnish(place, tiny_models):
    """Creates the files that the pages assume."""
    for name in ("configs", "scripts", "jaxtp", "README.md", "LICENSE"):
        (place / name).symlink_to(ROOT / name)
    shutil.copytree(tiny_models, place / "models")
    for folder in ("texts", "books"):
        (place / folder).mkdir()
        for index, words in enumerate(WORDS):
            (place / folder / f"{index}.txt").write_text(" ".join(words))
    said = [" ".join(words) for words in WORDS]
    chats = [
        [{"role": "user", "content": line}, {"role": "assistant", "content": "It says so."}]
        for line in said[:60]
    ]
    write_rows(place / "chats.jsonl", [{"messages": messages} for messages in chats])
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    tools = [{"type": "function", "function": {"name": "look"}}]
    calls = [
        {"messages": [{"role": "user", "content": f"Look at {n}."}, call], "tools": tools}
        for n in range(60)
    ]
    write_rows(place / "calls.jsonl", calls)
    answers = [
        {"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": f" {n}"} for n in range(60)
    ]
    write_rows(place / "pairs.jsonl", answers)
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (place / "corpus").mkdir()
    texts = [f"{index} {line}" for index, line in enumerate(5 * said)]
    parquet.write_table(pyarrow.table({"text": texts}), place / "corpus/a.parquet")


@pytest.mark.journey
@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_can_be_followed(page, library, tiny_models, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    furnish(tmp_path, tiny_models)
    monkeypatch.chdir(tmp_path)
    found = blocks(page)
    reader = Reader(library, capsys)
    for (kind, text), below in zip(found, [*found[1:], ("", "")], strict=True):
        if file := kind == "python" and FILE.match(text):
            Path(file[1]).write_text(text)
        lines = [line for line in text.splitlines() if line.strip() and kind == "sh"]
        for line in lines:
            monkeypatch.setattr("sys.stdin", io.StringIO("well?\n"))
            reader.follow(line, below[1] if line is lines[-1] and below[0] == "" else "")


@pytest.mark.slow
def test_meshes_are_checked_as_a_page_says(tmp_path, monkeypatch, capsys):
    """Commands with one mesh run in tests/tools/check/test_command.py."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    of_several_meshes = [line for line in checks() if not CHECK_OF_ONE_MESH.fullmatch(line)]
    assert of_several_meshes
    for line in of_several_meshes:
        assert run_command(shlex.split(line)[1:]) == 0, line
        assert re.search(r"all \d+ equal one device", capsys.readouterr().out), line


@pytest.mark.journey
@pytest.mark.parametrize(
    "example",
    [
        text
        for page in PAGES
        for kind, text in blocks(page)
        if kind == "python" and not FILE.match(text)
    ],
    ids=lambda text: "",
)
def test_an_example_prints_what_it_says(example, capsys):
    exec(example, {})
    (comment,) = re.findall(r"print\(.*?# (.*)", example)
    assert capsys.readouterr().out.strip() == comment
    assert len([line for line in example.splitlines() if line.strip()]) <= 11


@pytest.mark.slow
def test_what_a_step_moves_is_what_the_page_says_at_a_small_size_too(capsys):
    runpy.run_path(str(ROOT / "scripts/compiled_step.py"))["main"](["--small", "--repeats", "1"])
    traffic, shares, _compiling = capsys.readouterr().out.split("\n\n")[2::2]
    for *_, budget, explicit, constrained, _ratio in [
        line.split() for line in traffic.splitlines() if " all " in line
    ]:
        assert explicit == budget
        assert float(explicit) < float(constrained)
    rows = {line.split("  ")[0]: line.split()[-5:] for line in shares.splitlines()}
    _, temporaries, reused, _, flops = map(float, rows["tp 8"])
    assert temporaries <= 1.25
    assert reused >= 0.99
    assert flops <= 1.02


def test_the_numbers_of_recipes_are_those_of_their_files():
    """The table of recipes agrees with the head of each file."""
    rows = re.findall(
        r"^\| \[.*?\| \[(\w+\.yaml)\].*?\| ([\d.]+) \| ([\d, to]+) \|$",
        PAGES[1].read_text(),
        re.M,
    )
    assert len(rows) == 21
    for file, gigabytes, speed in rows:
        said = " ".join(
            (ROOT / "configs" / file).read_text().partition("\nrun:")[0].replace("#", "").split()
        )
        if file == "finetune_llama31_8b.yaml":
            continue  # the row tells of two files
        assert f"{gigabytes} GB on " in said
        assert f"{speed} tokens/s, modelled" in said


def test_the_set_up_commands():
    install, test = (line for line in lines_of(README) if SET_UP in line)
    assert install.endswith(".venv/bin/pip install -e . && .venv/bin/python -m jaxtp.train")
    assert test == ".venv/bin/pip install -e '.[dev]' && .venv/bin/python -m pytest"


@pytest.mark.journey
def test_a_script_in_the_folder_that_holds_the_clone_imports_the_package(tmp_path):
    """`git clone` makes a folder with the package's name, which Python could import as a
    namespace package.
    """
    (tmp_path / "jaxtp").symlink_to(ROOT)
    (tmp_path / "mine.py").write_text("import jaxtp\nprint(jaxtp.Decoder.__name__)")
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "Decoder\n", (
        f"{done.stderr}\nof an older install? {SET_UP} -e . installs it again"
    )


def test_every_command_of_the_pages_is_one_that_is_followed():
    """A line of another kind would not be run."""
    for page in FOLLOWED:
        files = [f"python {match[1]}" for _, text in blocks(page) if (match := FILE.match(text))]
        for line in lines_of(page):
            if SET_UP not in line:
                assert line.startswith(("jaxtp ", "python scripts/", *files)), line
                assert not re.search(r"[|;&$<>]", line), line


def test_the_commands_and_the_guides_are_listed():
    """In the README, or in the index of the guides."""
    assert set(re.findall(r"`jaxtp (\w+)`", README.read_text())) >= set(commands())
    index = ROOT / "jaxtp/guides/README.md"
    listed = {
        (page.parent / target).resolve()
        for page in (README, index)
        for target in re.findall(r"\]\(([^)#]+)", page.read_text())
    }
    assert set(PAGES[1:]) <= listed
    named = set(re.findall(r"\bjaxtp ([a-z]+) -", "".join(map(Path.read_text, PAGES))))
    assert named <= {*commands()}


def anchors(page):
    heads = re.findall(r"^#+ (.*)", re.sub(BLOCK, "", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_somewhere():
    for page in (*PAGES, *MAP, *ROOT.glob("tests/**/README.md")):
        text = page.read_text()
        links = re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", text)
        images = re.findall(r"src(?:set)?=\"(.+?)()\"", text)
        for target, anchor in links + images:
            if target.startswith("https://"):
                continue
            place = page.parent / target if target else page
            assert place.exists(), f"{page}: {target}"
            if anchor:
                assert anchor in anchors(place), f"{page}: {target}#{anchor}"


def test_pages_are_short():
    """In words of `wc -w`, without the history of changes and the page that a script makes."""
    pages = {*PAGES, *MAP, *ROOT.glob("tests/**/README.md")} - {ROOT / "jaxtp/CHANGELOG.md"}
    words = {page: len(page.read_text().split()) for page in pages}
    assert sum(words.values()) <= 30_000
    assert [page for page in words if page.parent.name == "guides" and words[page] > 1_200] == []
    assert len(README.read_text().splitlines()) <= 150


def test_the_map_knows_every_room():
    text = MAP[0].read_text()
    for folder in ROOT.glob("jaxtp/*/__init__.py"):
        assert f"`{folder.parent.name}`" in text, folder
    for module in ROOT.glob("jaxtp/*.py"):
        assert module.stem.startswith("__") or f"`{module.stem}`" in text, module
