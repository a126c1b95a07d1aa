"""`jaxtp estimate` as its users meet it."""

import json
import math
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from support import sweep

from jaxtp.analysis.schedule import AMOUNTS, COLLECTIVES, OTHER, PARTS, Scheduled
from jaxtp.config.schema import from_yaml
from jaxtp.mesh import AXES, mesh_shape
from jaxtp.tools.estimate import __main__ as command
from jaxtp.tools.estimate.__main__ import is_written, main
from jaxtp.tools.estimate.compiler import SECONDS, Compiled, DoesNotFitError, Partitioned, TargetError, bytes_sent
from jaxtp.train.__main__ import COMMAND as TRAIN
from jaxtp.train.config import TrainConfig
from jaxtp.train.defaults import DeviceInfo, resolve_defaults

ROOT = Path(__file__).parent.parent.parent.parent
CPU = DeviceInfo(count=8, per_process=8, bfloat16=False, kind="virtual CPU devices")
TINY = ["--config", str(ROOT / "configs/tiny.yaml")]


SHIPPED = {"llama3_8b": "h100x8", "llama3_8b_float8": "h100x8", "llama3_70b": "h100x64", "llama3_405b": "h100x512"}


@pytest.mark.parametrize("config", sweep(list(SHIPPED), "llama3_70b"))
def test_shipped_configurations_are_answered(config, tmp_path, capsys):
    hardware = SHIPPED[config]
    file = tmp_path / "sub" / "estimate.json"
    code = main(["--config", str(ROOT / f"configs/{config}.yaml"), "--hardware", hardware, "--json", str(file)])
    record = json.loads(file.read_text())
    assert code == 0
    best, out = record["meshes"][0], capsys.readouterr().out
    assert best["fits"]
    assert math.prod(best[axis] for axis in AXES) == record["devices"]
    assert sum(size for kind, size in best["bytes_per_device"].items() if kind != "total") == pytest.approx(
        best["bytes_per_device"]["total"]
    )
    assert best["bytes_per_device"]["total"] <= record["bytes_for_jax"]
    low, high = best["tokens_per_second_range"]
    assert low <= best["tokens_per_second"] <= high
    assert {"kind", "axes", "bytes_sent", "count"} <= best["collectives"][0].keys()
    fitting = [mesh["tokens_per_second"] for mesh in record["meshes"] if mesh["fits_surely"]]
    assert fitting[1:] == sorted(fitting[1:], reverse=True)
    assert fitting[0] > 0.95 * max(fitting)
    assert record["configured"]["fits"]
    assert record["provenance"]["bytes_per_device"]["parameters"] == "exact"
    hours = r"[\d,.]+ to [\d,.]+"
    assert re.search(rf"^run +100,000 steps: {hours} hours, {hours} h100 hours$", out, re.MULTILINE)
    assert re.search(r"^memory +[\d.]+ of [\d.]+ GB for JAX: exact .*;\n +modelled ", out, re.MULTILINE)
    assert record["provenance"]["collectives"] == "exact"


NINE_TENTHS = "h100x8 --memory-fraction 0.9"
RECIPES = {
    "chat_llama31_8b": "h100x8",
    "chat_qwen3_8b": "h100x8",
    "distill_llama31_8b_from_70b": "h100x8",
    "dpo_llama31_8b": "h100x8",
    "dpo_lora_llama31_8b": "h100x8",
    "finetune_llama31_8b": "h100x8",
    "finetune_qwen3_8b": "h100x8",
    "glm47_flash": NINE_TENTHS,
    "gpt_oss_20b": NINE_TENTHS,
    "llama31_8b_128k": "h100x8",
    "llama31_8b_128k_16": "h100x16",
    "lora_gpt_oss_120b": "h100x8",
    "lora_llama31_70b": "h100x8",
    "lora_qwen35_35b_a3b_32k": "h100x8",
    "mixtral_8x7b": NINE_TENTHS,
    "pretrain_1b": "h100x1",
    "qwen35_27b": NINE_TENTHS,
    "qwen3_30b_a3b": NINE_TENTHS,
}


@pytest.mark.parametrize("config", sweep(list(RECIPES), "pretrain_1b"))
def test_a_recipe_is_the_best_setting_and_surely_fits(config, tmp_path):
    path, written, record = ROOT / f"configs/{config}.yaml", tmp_path / "new" / "best.yaml", tmp_path / "estimate.json"
    hardware = RECIPES[config]
    assert f"estimate --config configs/{config}.yaml --hardware {hardware}" in path.read_text()
    flags = ["--config", str(path), "--hardware", *hardware.split(), "--write", str(written), "--json", str(record)]
    assert main(flags) == 0
    assert from_yaml(TrainConfig, written) == from_yaml(TrainConfig, path)
    assert len(written.read_text().splitlines()) < 65
    assert json.loads(record.read_text())["meshes"][0]["fits_surely"]


SMALL = ["--model.num-layers=1", "--model.d-model=64", "--model.d-ff=128", "--hardware=h100x2", "--mesh=tp=2"]


def test_a_loss_scales_the_time_of_a_step_and_needs_no_data(tmp_path, capsys):
    file, found = tmp_path / "estimate.json", {}
    losses = {"usual": [], "dpo": ["--train.loss=jaxtp:DPO", "--train.loss-arguments.beta=0.2", "--data.path=absent"]}
    for name, flags in losses.items():
        assert main([*SMALL, "--model.lora.rank=4", *flags, f"--json={file}"]) == 0
        found[name] = json.loads(file.read_text())
    text, relative = capsys.readouterr().out, found["dpo"]["loss"]["relative"]
    assert "jaxtp:DPO(beta=0.2)" in text
    assert 1.3 < relative < 1.6, "a pass of the reference, by a forward and a backward pass without weight gradients"
    usual, dpo = (each["meshes"][0] for each in found.values())
    assert dpo["seconds"]["products"] == pytest.approx(relative * usual["seconds"]["products"])
    assert dpo["seconds"]["update"] == usual["seconds"]["update"]
    kept = dpo["bytes_per_device"]["activations"] - usual["bytes_per_device"]["activations"]
    assert kept < 0.1 * dpo["bytes_per_device"]["activations"], "the pass of the reference keeps nothing"
    assert dpo["bytes_per_device"]["batch"] == usual["bytes_per_device"]["batch"], "pairs for segments"


def test_what_an_estimate_of_a_loss_refuses(capsys):
    for flags, message in {
        "--train.loss jaxtp:DPO --tier 2": "--tier 3 compiles yours",
        "--train.loss jaxtp:DPO --train.loss-arguments.bet 1": "did you mean beta?",
        "--train.loss-arguments.beta 1": "need a loss: name it by --train.loss",
    }.items():
        assert main([*SMALL, *flags.split()]) == 2
        assert message in capsys.readouterr().err


def test_the_best_setting_is_written_for_training(tmp_path, monkeypatch, capsys):
    """What depends on the devices is in it even at its default: training with it chooses nothing itself."""
    monkeypatch.chdir(tmp_path)  # a run in the default folder, as of the README's first command, would keep its dtype
    file = tmp_path / "best.yaml"
    flags = ["--hardware", "h100x8", "--mesh", "fsdp=2,tp=4", "dp=8", "--data.sequence-length", "64"]
    assert main([*flags, "--memory-fraction", "0.9", "--write", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"{file}: for jaxtp train --config {file}\n" in out
    several = tmp_path / "several.yaml"
    assert main(["--hardware", "2xh100x2", "--mesh", "dp=4", "--as-configured", "--write", str(several)]) == 0
    each = "# Each host starts this, by a scheduler or jaxtp launch (jaxtp/distributed/README.md):"
    assert several.read_text().startswith(f"{each}\n# jaxtp train --config {several}\n")
    assert is_written(several.read_text())
    text = file.read_text()
    assert text.startswith(f"# XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 jaxtp train --config {file}\n#\n")
    assert "\n# The best of jaxtp estimate for h100x8: " in text
    head = text.partition("\n\n")[0]
    missing = head.partition("# Still to be filled in:\n")[2]
    assert re.findall(r"^#   (\S+): ", missing, re.MULTILINE) == ["data.path", "model.from_hf", "run.dir"]
    written = yaml.safe_load(text)
    assert set(written["data"]) == {"sequence_length", "global_batch_size"}
    assert not {"run", "optimizer", "eval", "metrics"} & set(written)
    remat, accumulation, rows = re.search(r"^dp 8 +(\w+) +(\d+) of (\d+)", out, re.MULTILINE).groups()
    config, notes = TRAIN.load(["--config", str(file)], partial(resolve_defaults, devices=CPU))
    assert notes == []
    assert config.mesh.sizes == mesh_shape(dp=8)
    assert (config.model.remat, config.train.accumulation) == (remat, int(accumulation))
    assert config.data.global_batch_size == 8 * int(accumulation) * int(rows)
    assert (config.data.sequence_length, config.model.precision.compute) == (64, "bfloat16")


def test_what_is_written_names_what_is_missing_alone(tmp_path):
    file = tmp_path / "best.yaml"
    flags = ["--hardware", "h100x1", "--mesh", "tp=1", "--data.path", "data/x", "--run.dir", "runs/x"]
    assert main([*flags, "--model.precision.compute", "float32", "--write", str(file)]) == 0
    assert "data.path:" not in file.read_text().partition("\n\n")[0]
    values = yaml.safe_load(file.read_text())
    assert (values["run"], values["data"]["path"]) == ({"dir": "runs/x"}, "data/x")
    assert values["model"]["precision"] == {"compute": "float32"}, "a default here, and another one on GPUs"


def test_one_mesh_and_its_settings_as_they_are(tmp_path, capsys):
    file = tmp_path / "estimate.json"
    flags = ["--hardware", "h100x8", "--mesh", "fsdp=2,tp=4", "--as-configured", "--json", str(file)]
    assert main([*TINY, *flags]) == 0
    record = json.loads(file.read_text())
    (mesh,) = record["meshes"]
    state = 3 * 4 * record["parameters"]  # weights and two moments in float32; all are written by one process
    assert record["save_host_bytes"] == pytest.approx(2 * state, rel=1e-4)
    assert (mesh["dp"], mesh["fsdp"], mesh["tp"], mesh["remat"], mesh["accumulation"]) == (1, 2, 4, "full", 1)
    out = capsys.readouterr().out
    assert "fsdp 2 x tp 4" in out
    assert "\nsettings tried: 1; meshes: 1\n" in out
    assert "head and logits" in out
    assert main([*TINY, *flags, "--model.precision.matmul", "float8", "--model.precision.matmul-least", "16"]) == 0
    out = capsys.readouterr().out
    assert " 1,979 TFLOP/s in float8, " in out
    assert " x as fast as --model.precision.matmul compute: modelled, not measured\n" in out


@pytest.mark.journey
def test_compiled_too(tmp_path, capsys):
    file = tmp_path / "estimate.json"
    assert main([*TINY, "--hardware", "a100x8", "--mesh", "fsdp=2,tp=4", "--tier", "2", "--json", str(file)]) == 0
    tier_2 = json.loads(file.read_text())["tier_2"]
    assert tier_2["equal_to_tier_1"]
    assert tier_2["planned"]
    assert "moves what tier 1 says, in kind, axes and bytes, and nothing else" in capsys.readouterr().out


@pytest.fixture
def without_compiling(monkeypatch):
    """Tier 2 finds what tier 1 says; there is a compiler for tier 3, whether or not one is installed."""
    monkeypatch.setattr(command, "topology", lambda *args, **kwargs: None)
    planned = lambda best: bytes_sent(best.costs.traffic)
    quick = lambda best: Partitioned(planned(best), planned(best), (), (), 1.0, (), False)
    monkeypatch.setattr(command, "compile_partitioned", quick)


FLAGS = [*TINY, "--hardware", "h100x8", "--mesh", "fsdp=2,tp=4", "--tier", "3"]


@pytest.mark.usefixtures("without_compiling")
def test_what_tier_3_cannot_do_takes_nothing_back(tmp_path, monkeypatch, capsys):
    def missing(*args, **kwargs):
        raise TargetError("the compiler is not installed: pip install 'jaxtp[estimate-gpu]'")

    def crashed(*args, **kwargs):
        raise TargetError("the compiler crashed")

    monkeypatch.setattr(command, "compile_for", crashed)
    file = tmp_path / "estimate.json"
    assert main([*FLAGS, "--json", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.err.endswith("the compiler crashed\n")
    assert captured.out.index("to spare") < captured.out.index("moves what tier 1 says")
    record = json.loads(file.read_text())
    assert record["meshes"][0]["fits"]
    assert record["tier_2"]["equal_to_tier_1"]
    assert "crashed" in record["tier_3"]["error"]
    monkeypatch.setattr(command, "topology", missing)
    assert main(FLAGS) == 2
    captured = capsys.readouterr()
    needed = "the compiler is not installed: pip install 'jaxtp[estimate-gpu]'; --tier 2 needs none\n"
    assert captured.err == f"jaxtp estimate: error: --tier 3: {needed}"
    assert captured.out == "", "a missing extra is found before the work"


@pytest.mark.usefixtures("without_compiling")
@pytest.mark.parametrize(("peak", "verdict"), [(1e9, "fits"), (64e9, "does not fit")])
def test_tier_3_beside_tier_1(peak, verdict, tmp_path, monkeypatch, capsys):
    asked = []

    def compiled(*args, **kwargs):
        asked.append((*args[1:], kwargs))
        sizes = {"argument_bytes": 1, "temp_bytes": 2, "peak_bytes": int(peak)}
        moved = Scheduled("all-gather", ("tp",), 4, 4 * 10**9, count=3, overlapped=2, computing=7)
        read = {"flops": 2e12, "in_float8": 0, "not_in_float8": {}}
        amounts = dict.fromkeys((*PARTS, OTHER, COLLECTIVES), (0,) * len(AMOUNTS))
        amounts |= {"MLP": (2, 2e12, 1e12, 1e9, 6.7e9, 3.35e9, 0), "collectives": (3, 0, 0, 0, 0, 0, 1)}
        parts = {name: dict(zip(AMOUNTS, values, strict=True)) for name, values in amounts.items()}
        return Compiled(**sizes, **read, parts=parts, collectives=(moved,), seconds=5.0, notes=("a note",))

    monkeypatch.setattr(command, "compile_for", compiled)
    file = tmp_path / "estimate.json"
    assert main([*FLAGS, "--json", str(file)]) == (0 if verdict == "fits" else 1)
    sizes = mesh_shape(fsdp=2, tp=4)
    assert asked == [(sizes, "h100", {"hosts": 1, "devices_per_host": 8, "timeout_s": 300.0})]
    tier_3 = json.loads(file.read_text())["tier_3"]
    assert tier_3["fits"] == (verdict == "fits")
    numbers = {"bytes": 4 * 10**9, "count": 3, "overlapped": 2, "computing": 7, "hidden_bytes": 0}
    assert tier_3["collectives"] == [{"kind": "all-gather", "axes": ["tp"], "group": 4, **numbers}]
    rows = {name: [row[key] for key in SECONDS] for name, row in tier_3["parts"].items()}
    assert tier_3["parts"]["sent over tp"]["bytes_sent"] == 3e9
    assert rows["MLP"] == pytest.approx([1e12 / 989.4e12, 2e-3, 1e-3, 0], rel=1e-3)
    assert rows["collectives"] == pytest.approx([0, 0, 0, 3e9 / 450e9])
    assert rows["all"] == pytest.approx([sum(each) for each in zip(rows["MLP"], rows["collectives"], strict=True)])
    out = capsys.readouterr().out
    assert f"of 63.70 for JAX: {verdict}; tier 1: " in out
    assert re.search(r"MLP +2 +2\.00 +[\d,.]+ +7\.70 +[\d,.]+ +1\.01 +2\.00 +1\.00 +0\.00\n", out)
    assert "do not tell their FLOPs: 1)" in out
    assert "(a note)" in out


@pytest.mark.usefixtures("without_compiling")
def test_a_compiler_that_says_it_does_not_fit(tmp_path, monkeypatch, capsys):
    def refusing(*args, **kwargs):
        raise DoesNotFitError("the compiler says that it does not fit: 90 of 80 GB")

    monkeypatch.setattr(command, "compile_for", refusing)
    file = tmp_path / "estimate.json"
    assert main([*FLAGS, "--json", str(file)]) == 1
    assert "does not fit: 90 of 80 GB" in capsys.readouterr().out
    assert not json.loads(file.read_text())["tier_3"]["fits"]


def test_an_update_that_is_not_modelled_makes_nothing_sure(tmp_path, capsys):
    file = tmp_path / "estimate.json"
    flags = ["--hardware", "h100x8", "--mesh", "fsdp=2,tp=4", "tp=8", "--optimizer.name", "adafactor"]
    assert main([*TINY, *flags, "--json", str(file)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "surely" not in out
    assert "without the update by adafactor: its time, memory and communication are not modelled" in out
    assert "not sure: the update by adafactor is not modelled" in out
    meshes = json.loads(file.read_text())["meshes"]
    assert not any(mesh["fits_surely"] or mesh["update_is_modelled"] for mesh in meshes)


def test_the_update_by_muon_is_modelled(tmp_path, capsys):
    file = tmp_path / "estimate.json"
    flags = ["--hardware", "h100x8", "--mesh", "fsdp=2,tp=4", "--optimizer.name", "muon", "--json", str(file)]
    assert main([*TINY, *flags]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "not modelled" not in out
    (mesh,) = json.loads(file.read_text())["meshes"]
    assert mesh["update_is_modelled"]
    (moved,) = {c["kind"] for c in mesh["collectives"] if c["module"] == "optimizer/muon"}
    assert moved == "all-to-all"


def test_generating(tmp_path, capsys):
    file = tmp_path / "estimate.json"
    assert main([*TINY, "--hardware", "h100x8", "--generate", "16", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["generation"][0]["bytes_per_device"]["cache"] > 0
    assert "generating 16 rows of 128 tokens" in capsys.readouterr().out


def test_nothing_fits(tmp_path, capsys):
    own = tmp_path / "small.yaml"
    own.write_text("like: rtx4090\nmemory: 9.0e+9")
    file = tmp_path / "best.yaml"
    flags = ["--hardware", f"{own}x2", "--write", str(file)]
    assert main(["--config", str(ROOT / "configs/llama3_8b.yaml"), *flags]) == 1
    out = capsys.readouterr().out
    assert f"--write {file}: not written, because nothing fits\n" in out
    assert not file.exists()
    assert "does not fit" in out
    assert "nothing fits; the least is " in out
    assert " x small: " in out


def test_a_file_that_it_did_not_write_is_kept(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    flags = ["--hardware", "h100x8", "--mesh", "fsdp=8"]
    assert main([*TINY, *flags, "--write", str(file)]) == 0
    assert main([*TINY, *flags, "--write", str(file)]) == 0, "its own"
    assert main([*TINY, *flags, "--write", str(file), "--json", str(file)]) == 2
    assert "name two files" in capsys.readouterr().err
    file.write_text("model:\n  num_layers: 3\n")
    assert main([*flags, "--config", str(file), "--write", str(file)]) == 2
    assert "it exists, and no earlier --write made it" in capsys.readouterr().err
    assert file.read_text() == "model:\n  num_layers: 3\n"


@pytest.mark.journey
def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.png"
    assert main([*TINY, "--hardware", "h100x8", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_picture_says_what_its_colors_and_lines_mean(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    monkeypatch.setattr(command, "write_picture", lambda flag, path, draw: draw(figure))
    assert main([*TINY, "--hardware", "h100x8", "--mesh", "tp=8", "fsdp=4,tp=2"]) == 0
    memory, time = figure.axes
    colors = {}
    for panel in (memory, time):
        assert panel.get_title()
        assert panel.get_ylabel() in ("GB", "seconds")
        for bars in panel.containers:
            colors[bars.get_label()] = bars.patches[0].get_facecolor()
        ticks = [text.get_text() for text in panel.get_xticklabels()]
        assert sum(tick.endswith("\nbest") for tick in ticks) == 1
    assert len(set(colors.values())) == len(colors), "a color is one part"
    assert any(text.get_text().startswith("limit ") for text in memory.texts)


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert "Will it fit" in out
    assert "--hardware h100x8" in out
    with pytest.raises(SystemExit):
        main(["--help-all"])
    assert "bandwidth (bytes/s)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hardware h1000x8", "hardware 'h1000' is not known; did you mean h100"),
        ("--hardware h100", "how many devices? Such as h100x8"),
        ("--hardware h100x", "--hardware h100x: how many devices? Such as h100x8"),
        ("--hardware h100x-3", "--hardware h100x-3: '-3' is no number of devices; such as h100x8"),
        ("--hardware h100x8 --mesh tp=4", "is 4 devices, and --hardware h100x8 is 8"),
        ("--hardware h100x9999999967", "--hardware h100x9999999967: from 1 to 1,048,576 devices"),
        ("--hardware h100x0", "--hardware h100x0: from 1 to 1,048,576 devices"),
        (f"--hardware h100x1{'0' * 5000}", "--hardware h100x10000000000000000000...: from 1 to 1,048,576 devices"),
        ("--hardware h100x8 --mesh tp=2147483647", "is 2,147,483,647 devices, and --hardware h100x8 is 8\n"),
        ("--hardware h100x8 --mesh pp=8", "'pp' is not an axis; they are dp, fsdp, cp, tp"),
        ("--hardware h100x3 --mesh fsdp=3", "model.d_model=128 is not divisible by mesh.fsdp=3; fsdp can be 1, 2"),
        ("--hardware h100x8 --json /proc/nothing/x.json", "--json /proc/nothing/x.json: No such file"),
        ("--hardware h100x8 --write /proc/nothing/x.yaml", "--write /proc/nothing/x.yaml: No such file"),
        ("--hardware h100x8 --plot plot.xyz", "--plot plot.xyz: pictures are "),
        ("--hardware h100x8 --memory-fraction 2", "--memory-fraction 2: should be"),
        ("--hardware mi300xx8 --model.attention cudnn", "it runs on cuda, not on rocm; use auto (blockwise or xla)"),
        ("--hardware v5ex8 --model.attention cudnn", "it runs on cuda, not on tpu; use auto (blockwise or xla)"),
        (
            "--hardware h100x8 --model.attention cudnn --model.precision.compute float32",
            "it computes in 16 bits, and model.precision",
        ),
        (
            "--hardware h100x8 --model.attention cudnn",
            "packed documents (data.packing=documents) would give it a [T, T] mask; use auto (fused",
        ),
        (
            "--hardware a100x8 --model.precision.matmul float8 --model.precision.matmul-least 16",
            "model.precision.matmul=float8: a100 has no such products; --model.precision.matmul compute works, or",
        ),
        ("--config nothing.yaml", "nothing.yaml: No such file"),
    ],
)
def test_mistakes(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(flags.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("jaxtp estimate: error: ")
    assert not list(tmp_path.iterdir()), "no file is left behind"


@pytest.mark.journey
def test_a_reader_that_leaves_ends_it_without_a_word():
    """As `| head` does."""
    words = [sys.executable, "-m", "jaxtp", "estimate", *TINY, "--hardware", "h100x8", "--mesh", "tp=8"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == -signal.SIGPIPE
