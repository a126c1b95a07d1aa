"""`jaxtp report`: pages and pictures of runs."""

import html
import json
import re
import shutil
import subprocess

import pytest
from tables import read_table, write_json

from jaxtp.tools.report.__main__ import main as report
from jaxtp.tools.report.curves import draw, panels_of

pytest.importorskip("matplotlib")
CHROMIUM = shutil.which("chromium")


def picture(folder, records, **options):
    """The panels of a picture of some records, by title."""
    from matplotlib.figure import Figure

    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    figure = Figure()
    draw(panels_of([folder], **options), figure, names_runs=False)
    return {panel.get_title(): panel for panel in figure.axes}


OWN_METRICS = {"loss": 0.6, "rewards/margins": 0.1, "temperature": 1.0, "rows_per_second": 5.0}
OTHERS = {"lost_to_start": 0.1, "step_seconds": 0.2, "grad_norm/blocks": 1.0, "nothing": None}
OWN = [
    {"step": 0, "eval_loss": 0.7, "eval_rewards/margins": 0.0},
    *({"step": step, "rows": step} | OWN_METRICS | OTHERS for step in (10, 20)),
    {"step": 20, "eval_loss": 0.5, "eval_rewards/margins": 0.3},
]


def test_a_picture_has_the_metrics_of_a_loss_and_validation_in_their_panels(tmp_path):
    (one_step,) = picture(tmp_path, [{"step": 1, "loss": 0.5}])["loss"].lines
    assert one_step.get_marker() == ".", "a line of one point would not be seen"
    panels = picture(tmp_path, OWN)
    assert list(panels) == ["loss", "rewards/margins", "temperature", "speed"]
    assert panels["speed"].get_ylabel() == "rows per second"
    assert not panels["loss"].get_ylabel(), "the unit of a user's loss is not known"
    for name, validation in (("loss", [0.7, 0.5]), ("rewards/margins", [0.0, 0.3])):
        training, evaluated = panels[name].lines
        assert (training.get_label(), evaluated.get_label()) == ("training", "validation")
        assert list(evaluated.get_xdata()) == [0, 20]
        assert list(evaluated.get_ydata()) == validation
    (over_rows,) = picture(tmp_path, OWN, x="rows", metrics=["loss"]).values()
    assert list(over_rows.lines[1].get_xdata()) == [20]


def test_the_loss_of_tokens_has_a_unit(tmp_path):
    panels = picture(tmp_path, [{"step": 0, "eval_loss": 2.0, "eval_perplexity": 7.4}])
    assert panels["loss"].get_ylabel() == "nats per token"


@pytest.fixture
def run(tiny_run, tmp_path):
    """A copy of a run, whose samples of text look like HTML."""
    run = tmp_path / "a <b> run"
    shutil.copytree(tiny_run, run)
    samples = [{"step": 2, "text": "<script>alert(1)</script>"}, {"step": 2, "text": "x"}]
    lines = [json.dumps(sample) for sample in (*samples, *samples)]
    (run / "samples.jsonl").write_text("\n".join([*lines, "cut sh", "[]"]))
    return run


def text_of(page):
    """The text of a page, without its tags."""
    without_svg = re.sub(r"<(svg|style).*?</\1>", "", page.read_text(), flags=re.DOTALL)
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", without_svg).split()))


def test_a_page_shows_runs_side_by_side_and_loads_nothing(run, tiny_run, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert report([str(run), str(tiny_run), f"--out={page}"]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    text = text_of(page)
    assert text.count("step 4 of 4") == 2
    assert f"jaxtp train --config '{run}/config.yaml' --run.dir '{run}'" in text
    assert f"jaxtp train --config {tiny_run}/config.yaml " in text
    assert "model.d_model 16 16 128" in text
    assert text.count("not read; --verify compares them with their checksums") == 4
    assert "eval_loss" in text
    written = page.read_text()
    assert "a &lt;b&gt; run" in written
    assert written.count("&lt;script&gt;alert(1)") == 1
    assert "<script" not in written
    assert not re.search(r"(src|href)=\"(?!#)", re.sub(r"xlink:href=\"#", "", written))


def test_a_damaged_checkpoint_is_named(run, tmp_path):
    page = tmp_path / "report.html"
    (run / "checkpoints/2/info/metadata").write_text("{}")
    assert report([str(run), "--verify", f"--out={page}"]) == 0
    text = text_of(page)
    assert re.search(r" 2 \S+ .B unknown .*damaged", text)
    assert text.count("equal their checksums") == 1


DAMAGED = {
    "metrics.jsonl": [
        '{"step": Infinity, "loss": 1.0}',
        '{"step": NaN, "loss": 1.0}',
        '{"eval_loss": 1.0}',
        '{"step": 9, "goodput": 0.5, "step_seconds": 0.0, "own$\\\\x$": 2.0}',
    ],
    "samples.jsonl": [
        "[" * 100_000,
        '{"step": "x", "text": "a"}',
        '{"step": null, "text": "b"}',
        '{"step": 3, "text": 4}',
        '{"step": 3, "text": "half \\ud800"}',
    ],
}


def test_lines_that_no_run_wrote_are_left_out(run, tmp_path):
    for name, lines in DAMAGED.items():
        with (run / name).open("a") as file:
            file.write("".join(f"\n{line}" for line in lines))
    page = tmp_path / "report.html"
    assert report([str(run), f"--out={page}"]) == 0
    text = text_of(page)
    assert "step 9 of 4" in text
    assert "half ?" in text
    assert "own$\\x$" in page.read_text()


def test_the_estimate_of_the_mesh_stands_beside_the_measured_time(tiny_run, tmp_path):
    estimate = tmp_path / "estimate.json"
    seconds = {"products": 0.5, "communication": {"tp": 0.25}, "serial": 0.75, "overlapped": 0.5}
    sizes = {"dp": 1, "fsdp": 1, "cp": 1, "tp": 1}
    setting = {**sizes, "bytes_per_device": {"parameters": 3 * 10**9}, "seconds": seconds}
    write_json(estimate, {"meshes": [{**setting, "tp": 2}, setting]})
    page = tmp_path / "report.html"
    words = [str(tiny_run), f"--estimate={estimate}", f"--out={page}"]
    assert report(words) == 0
    assert "memory: parameters 3.0 GB" in text_of(page)
    assert "time: over tp 0.25 s" in text_of(page)
    write_json(estimate, {"meshes": []})
    assert report(words) == 0
    assert "is not among the meshes of the estimate" in text_of(page)
    write_json(estimate, {"meshes": 3})
    assert report(words) == 2


def test_a_picture_has_the_curves_alone(tiny_run, tmp_path):
    picture = tmp_path / "curves.svg"
    assert report([str(tiny_run), "--metrics", "loss", f"--out={picture}"]) == 0
    assert picture.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("words", "says"),
    read_table(__file__),
)
def test_a_mistake_is_one_line(words, says, tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert report([word.replace("RUN", str(tiny_run)) for word in words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1


@pytest.mark.journey
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [400, 1400])
def test_a_browser_shows_a_page_without_a_horizontal_bar(width, run, tiny_run, tmp_path):
    page = tmp_path / "report.html"
    assert report([str(run), str(tiny_run), f"--out={page}"]) == 0
    # A window has at least 500 pixels, a frame has any number.
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    content = html.escape(policy.sub("", page.read_text()), quote=True)
    measured = "document.title = frames[0].document.documentElement.scrollWidth"
    frame = f'<iframe style="width:{width}px" srcdoc="{content}" onload="{measured}"></iframe>'
    page.write_text(f"{frame}<title></title>")
    shown = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{page}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert int(re.search(r"<title>(\d+)", shown.stdout)[1]) <= width
