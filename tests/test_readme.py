"""What the README promises runs."""

import io
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from flax import nnx

import jaxtp
from jaxtp.__main__ import main as commands
from jaxtp.bench.__main__ import main as bench
from jaxtp.check.__main__ import main as check
from jaxtp.checkpoint.__main__ import main as checkpoint
from jaxtp.convert.__main__ import main as convert
from jaxtp.estimate.__main__ import main as estimate
from jaxtp.evaluate.__main__ import main as evaluate
from jaxtp.explain.__main__ import main as explain
from jaxtp.generate.__main__ import main as generate
from jaxtp.launch.__main__ import main as launch
from jaxtp.prepare.__main__ import main as prepare
from jaxtp.train.__main__ import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDES = sorted(ROOT.glob("jaxtp/*/README.md"))
PAGES = "\n".join([README, *(guide.read_text() for guide in GUIDES)])
COMMANDS = list(
    dict.fromkeys(
        line
        for block in re.findall(r"```sh\n(.*?)```", PAGES, re.DOTALL)
        for line in block.splitlines()
        if line.strip()
    )
)
TRAIN = [shlex.split(line)[2:] for line in COMMANDS if line.startswith("jaxtp train")]
SCRIPTS = [line for line in COMMANDS if line.startswith("python scripts/")]
CHECKPOINT = [shlex.split(line)[2:] for line in COMMANDS if line.startswith("jaxtp checkpoint")]
PREPARE = [shlex.split(line)[2:] for line in COMMANDS if line.startswith("jaxtp prepare")]
GENERATE = [shlex.split(line)[2:] for line in COMMANDS if line.startswith("jaxtp generate")]
CHECK = [shlex.split(line)[2:] for line in COMMANDS if line.startswith("jaxtp check ")]
ESTIMATE = [shlex.split(line)[2:] for line in COMMANDS if line.startswith("jaxtp estimate")]
CONVERT = [shlex.split(line)[2:] for line in COMMANDS if line.startswith("jaxtp convert")]
EVALUATE = [shlex.split(line)[2:] for line in COMMANDS if line.startswith("jaxtp evaluate")]
EXPLAIN = [shlex.split(line)[2:] for line in COMMANDS if line.startswith("jaxtp explain")]
BENCH = [shlex.split(line)[2:] for line in COMMANDS if line.startswith("jaxtp bench")]
LAUNCH = [shlex.split(line)[2:] for line in COMMANDS if line.startswith("jaxtp launch")]
TUNING = [flags for flags in TRAIN if "--model.from-hf" in flags]
OWN = [flags for flags in TRAIN if flags not in TUNING]
SHORT = [
    "--optimizer.warmup-steps",
    "1",
    "--eval.batches",
    "1",
    "--model.num-layers",
    "1",
    "--data.global-batch-size",
    "4",
]


def shortened(flags, tmp_path, steps):
    """The command as written, for a few steps of a smaller model."""
    flags = [flag for i, flag in enumerate(flags) if "--run.init-from" not in flags[max(i - 1, 0) : i + 1]]
    for name, value in {"--run.dir": str(tmp_path), "--train.steps": str(steps)}.items():
        flags[flags.index(name) + 1] = value
    return [*flags, *SHORT]


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """What the README's command prepares."""
    folder = tmp_path_factory.mktemp("data") / "own"
    (*flags, out), _ = PREPARE
    assert out == "data/own"
    assert prepare([*(str(ROOT / flag) if (ROOT / flag).exists() else flag for flag in flags), str(folder)]) == 0
    return folder


@pytest.mark.journey
@pytest.mark.parametrize("flags", OWN, ids=" ".join)
def test_training_command(flags, tmp_path, dataset):
    flags = [str(dataset) if flag == "data/own" else flag for flag in flags]
    assert main(shortened(flags, tmp_path, 2)) == 0


@pytest.mark.journey
def test_generating_from_the_run_on_own_data_and_measuring_it(tmp_path, dataset, capsys):
    (trained,) = (flags for flags in OWN if "runs/own" in flags)
    flags = [str(dataset) if flag == "data/own" else flag for flag in trained]
    assert main(shortened(flags, tmp_path, 2)) == 0
    capsys.readouterr()
    command, *_ = GENERATE
    assert generate([str(tmp_path) if word == "runs/own" else word for word in command]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith('--- 0: "def main("\n')
    assert "decode  126 tokens in " in captured.err
    here = {"runs/own": tmp_path, "data/own": dataset, "runs/license.json": tmp_path / "license.json"}
    for command in EVALUATE:
        assert evaluate([str(here.get(word, word)) for word in command]) == 0
        table = capsys.readouterr().out.splitlines()
        shown = next(block for block in PAGES.split("```") if block.lstrip("\n ").startswith("documents"))
        assert table[0].split() == shown.splitlines()[1].split()
        assert [line.split()[0] for line in table[1:]][-1] == "all"
    assert json.loads((tmp_path / "license.json").read_text())["stride"] == 64


@pytest.mark.slow
def test_script_and_its_bounds(capsys):
    """The bounds hold at a small size too."""
    command = SCRIPTS[-1]
    runpy.run_path(str(ROOT / shlex.split(command)[1]))["main"](["--small", "--repeats", "1"])
    traffic, shares, compiling = capsys.readouterr().out.split("\n\n")[2::2]
    for *_, budget, explicit, constrained, _ratio in [line.split() for line in traffic.splitlines() if " all " in line]:
        assert explicit == budget
        assert float(explicit) < float(constrained)
    rows = {line.split("  ")[0]: line.split()[-5:] for line in shares.splitlines()}
    _, temporaries, reused, _, flops = map(float, rows["tp 8"])
    assert temporaries <= 1.25
    assert reused >= 0.99
    assert flops <= 1.02
    assert float(compiling.split()[-1]) < 1.3


def test_tables_are_the_stored_results():
    """Each line of a table that opens like the script's is one of its raw output."""
    results = {path: path.read_text().splitlines() for path in ROOT.glob("scripts/results/*.txt")}
    for path, lines in results.items():
        headers = {line for line in lines if line.startswith("mesh ")}
        if not headers:
            continue
        tables = [block.strip().splitlines() for block in README.split("```")[1::2]]
        tables = [table for table in tables if table[0] in headers]
        assert tables, path
        assert {line for table in tables for line in table} <= set(lines)


@pytest.mark.journey
@pytest.mark.parametrize("flags", CHECK, ids=" ".join)
def test_check_command(flags, tmp_path, capsys):
    flags = [str(tmp_path / "check.json") if flag == "runs/check.json" else flag for flag in flags]
    assert check(flags) == 0
    assert re.search(r"all \d+ equal one device", capsys.readouterr().out)
    assert (tmp_path / "check.json").exists() == ("--json" in flags)


@pytest.mark.journey
@pytest.mark.parametrize("flags", ESTIMATE, ids=" ".join)
def test_estimate_command(flags, tmp_path, capsys):
    """It prints what the page shows below it, and draws."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plot.png"
    assert estimate([str(picture) if flag == "runs/llama3_8b.png" else flag for flag in flags]) == 0
    assert picture.exists() == ("--plot" in flags)
    assert not picture.exists() or picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.splitlines()
    blocks = PAGES.split("```")[1::2]
    shown = blocks[blocks.index(f"sh\njaxtp estimate {shlex.join(flags)}\n") + 1]
    assert shown.startswith("\non      8 x h100")
    assert set(shown.splitlines()) - {"..."} <= set(printed)


@pytest.mark.journey
@pytest.mark.parametrize("flags", BENCH, ids=" ".join)
def test_bench_command(flags, tmp_path, capsys):
    """What it writes is read where the README says, and it says that it measured no hardware."""
    out = tmp_path / "hardware.yaml"
    flags = [str(out) if flag == "runs/hardware.yaml" else flag for flag in flags]
    assert bench([*flags, "--rounds", "3", "--in-a-row", "2", "--message-bytes", "1024", "1048576"]) == 0
    assert "their times mean nothing for hardware" in capsys.readouterr().out
    assert "jaxtp estimate --hardware runs/hardware.yamlx8" in README
    assert estimate(["--hardware", f"{out}x8"]) == 0


@pytest.mark.journey
def test_the_commands_that_go_on_from_each_other(tmp_path, capsys):
    first, second = (flags for flags in OWN if "runs/a" in flags and "--run.init-from" not in flags)
    assert main(shortened(first, tmp_path, 2)) == 0
    assert main(shortened(second, tmp_path, 3)) == 0
    assert "resumed from the checkpoint at step 2" in capsys.readouterr().out
    (third,) = (flags for flags in TRAIN if "--run.init-from" in flags)
    assert main([*shortened(third, tmp_path / "d", 2), "--run.init-from", str(tmp_path)]) == 0
    assert "weights from" in capsys.readouterr().out
    steps = {"runs/a/checkpoints/60": tmp_path / "checkpoints/2", "runs/a/checkpoints/80": tmp_path / "checkpoints/3"}
    here = {name: str(path) for name, path in (steps | {"runs/a": tmp_path, "runs/d": tmp_path / "d"}).items()}
    codes = [checkpoint([here.get(word, word) for word in command]) for command in CHECKPOINT]
    assert codes == [0, 0, 1], "inspect, verify, and a diff that finds differences"
    plot = next(shlex.split(line) for line in SCRIPTS if "plot_run" in line)
    flags = [here.get(word, word.replace("runs/plot.png", str(tmp_path / "plot.png"))) for word in plot[2:]]
    assert runpy.run_path(str(ROOT / plot[1]))["main"](flags) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.journey
def test_fine_tuning_a_model_and_generating_from_it(tmp_path, dataset, monkeypatch, capsys):
    """The commands as they are, in the order of the pages, on a tiny model, in a folder of their own."""
    sizes = {"vocab_size": 1024, "d_model": 16, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
    model = jaxtp.Decoder(jaxtp.ModelConfig(**sizes, d_ff=16), rngs=nnx.Rngs(0))
    jaxtp.save_hf(model, tmp_path / "models/llama", tokenizer_from=dataset)
    (tmp_path / "models/llama/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    (tmp_path / "prompts.txt").write_text("def main(\nimport \n")
    monkeypatch.setattr("sys.stdin", io.StringIO("well?\n/save chats.jsonl\n"))
    for name in ("jaxtp", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    assert prepare(PREPARE[1]) == 0
    for flags in (shlex.split(line)[2:] for line in COMMANDS):
        if flags in TUNING:
            assert main([*flags, "--train.steps", "2", "--optimizer.warmup-steps", "1", "--eval.batches", "1"]) == 0
        elif flags in GENERATE[1:]:
            assert generate([*flags, "--max-tokens", "4"]) == 0
        elif flags in CONVERT:
            assert convert(flags) == 0
    assert "\nweights from models/llama; adapters from models/adapters\n" in capsys.readouterr().out
    for whole in ("models/tuned", "models/merged", "models/whole"):
        assert jaxtp.read_config(whole) == jaxtp.read_config("models/llama")
    assert len(json.loads(Path("chats.jsonl").read_text())["messages"]) == 2
    for adapters in ("models/adapters", "models/further"):
        assert json.loads(Path(f"{adapters}/adapter_config.json").read_text())["r"] == 8
    assert all((folder / "tokenizer.json").exists() for folder in Path("models").iterdir())


@pytest.mark.journey
@pytest.mark.parametrize("flags", EXPLAIN, ids=" ".join)
def test_explain_command(flags, tmp_path, capsys):
    assert explain([str(tmp_path / "vit.png") if flag == "runs/vit.png" else flag for flag in flags]) == 0
    printed = capsys.readouterr().out.splitlines()
    block = next(block for block in README.split("```")[1::2] if "bytes of parameters on a device" in block)
    shown = [line for line in block.strip().splitlines() if line not in ("", "...")]
    assert set(shown) <= set(printed), "the README shows what it prints"


@pytest.mark.journey
@pytest.mark.parametrize("command", [line for line in SCRIPTS if "/examples/" in line])
def test_example_command(command, monkeypatch, capsys):
    _, script, *flags = shlex.split(command)
    monkeypatch.syspath_prepend(str(ROOT / "scripts/examples"))
    monkeypatch.setattr("sys.argv", [script, *flags, "--steps", "10"])
    runpy.run_path(str(ROOT / script), run_name="__main__")
    assert "step 10/10  loss " in capsys.readouterr().out


def test_set_up_commands_are_what_ci_runs():
    install, test = (line for line in COMMANDS if "pip install" in line)
    assert install.endswith(".venv/bin/pip install -e . && .venv/bin/python -m jaxtp.train")
    assert test == ".venv/bin/pip install -e '.[dev]' && .venv/bin/python -m pytest"
    assert 'pip" install -qq -e ".[dev]"' in (ROOT / ".ci/run").read_text()
    kinds = (TRAIN, CHECK, SCRIPTS, CHECKPOINT, PREPARE, GENERATE, CONVERT, ESTIMATE, EVALUATE, EXPLAIN, BENCH, LAUNCH)
    assert len(COMMANDS) == sum(map(len, kinds)) + 2


@pytest.mark.journey
@pytest.mark.parametrize("flags", LAUNCH, ids=" ".join)
def test_launch_command(flags, tmp_path, capsys):
    at = flags.index("--") + 1
    module, run = flags[at : at + 2], flags[at + 2 :]
    assert launch(["--logs", str(tmp_path / "logs"), *flags[:at], *module, *shortened(run, tmp_path / "run", 2)]) == 0
    assert "step 2/2  loss" in capsys.readouterr().out


@pytest.mark.journey
@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL))
def test_example_prints_what_it_says(example, capsys):
    exec(example, {})
    (comment,) = re.findall(r"print\(.*?# (.*)", example)
    assert capsys.readouterr().out.strip() == comment
    assert len([line for line in example.splitlines() if line.strip()]) <= 11


def test_the_tree_is_the_tree():
    tree = README.split("## The tree")[1]
    for name in re.findall(r"^ *([a-z_]+(?:/|\.py))", tree, re.MULTILINE):
        assert (ROOT / name).exists() or (ROOT / "jaxtp" / name).exists(), name
    for folder in ROOT.glob("jaxtp/*/__init__.py"):
        assert f"  {folder.parent.name}/" in tree


def test_the_commands_are_listed(capsys):
    assert commands([]) == 0
    listed = capsys.readouterr().out
    assert set(re.findall(r"python -m (jaxtp\.\w+)", PAGES)) <= set(re.findall(r"python -m (jaxtp\.\w+) ", listed))


def test_links_lead_somewhere():
    for readme in (ROOT / "README.md", ROOT / "jaxtp/README.md", *GUIDES):
        for target in re.findall(r"\]\(([^)#]+)\)", readme.read_text()):
            assert target.startswith("https://") or (readme.parent / target).exists(), target
