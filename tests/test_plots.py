"""`scripts/plot_run.py` and `scripts/plot_estimate.py`: pictures of runs and of estimates."""

import json
from pathlib import Path

import plot_estimate
import plot_run
import pytest
from support import assert_refused

from jaxtp.tools.estimate.__main__ import main as estimate

ROOT = Path(__file__).parent.parent


def picture(folder, records, **options):
    """The panels of a picture of some records, by title."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    plot_run.draw([folder], figure, **options)
    return {panel.get_title(): panel for panel in figure.axes}


OWN_METRICS = {"loss": 0.6, "rewards/margins": 0.1, "temperature": 1.0, "rows_per_second": 5.0}
OTHERS = {"lost_to_start": 0.1, "step_seconds": 0.2, "grad_norm/blocks": 1.0, "nothing": None}
OWN = [
    {"step": 0, "eval_loss": 0.7, "eval_rewards/margins": 0.0},
    *({"step": step, "rows": step} | OWN_METRICS | OTHERS for step in (10, 20)),
    {"step": 20, "eval_loss": 0.5, "eval_rewards/margins": 0.3},
]


@pytest.mark.wide
def test_a_picture_has_the_metrics_of_a_loss_and_validation_in_their_panels(tmp_path):
    panels = picture(tmp_path, OWN)
    (one_step,) = picture(tmp_path, [{"step": 1, "loss": 0.5}])["loss"].lines
    assert one_step.get_marker() == ".", "a line of one point would not be seen"
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


@pytest.mark.wide
def test_the_colors_and_lines_of_an_estimate_are_explained(tmp_path, capsys):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    file = tmp_path / "estimate.json"
    words = ["--hardware=h100x2", "--mesh", "tp=2", "fsdp=2", "--as-configured", f"--json={file}"]
    assert estimate([f"--config={ROOT}/configs/tiny.yaml", *words]) == 0
    plot_estimate.draw(json.loads(file.read_text()), figure)
    colors = {}
    for panel, unit in zip(figure.axes, ("GB", "seconds"), strict=True):
        assert panel.get_title()
        assert panel.get_ylabel() == unit
        for bars in panel.containers:
            colors[bars.get_label()] = bars.patches[0].get_facecolor()
        ticks = "; ".join(text.get_text() for text in panel.get_xticklabels())
        assert ticks.count("\nbest") == 1
    assert len(set(colors.values())) == len(colors), "a color is one part"
    assert any(text.get_text().startswith("limit ") for text in figure.axes[0].texts)
    out = tmp_path / "estimate.png"
    assert plot_estimate.main([str(file), f"--out={out}"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    words = [str(file), "--out=plot.xyz"]
    assert_refused(plot_estimate.main, words, "--out plot.xyz: pictures are ", capsys)
