"""`scripts/plot_run.py`: curves of runs."""

import importlib
import json
from pathlib import Path

import pytest


@pytest.fixture
def plot_run(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "scripts"))
    return importlib.import_module("plot_run")


def picture(script, folder, records, **options):
    """The panels of a picture of some records, by title."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    script.draw([folder], figure, **options)
    return {panel.get_title(): panel for panel in figure.axes}


OWN_METRICS = {"loss": 0.6, "rewards/margins": 0.1, "temperature": 1.0, "rows_per_second": 5.0}
OTHERS = {"lost_to_start": 0.1, "step_seconds": 0.2, "grad_norm/blocks": 1.0, "nothing": None}
OWN = [
    {"step": 0, "eval_loss": 0.7, "eval_rewards/margins": 0.0},
    *({"step": step, "rows": step} | OWN_METRICS | OTHERS for step in (10, 20)),
    {"step": 20, "eval_loss": 0.5, "eval_rewards/margins": 0.3},
]


@pytest.mark.wide
def test_a_picture_has_the_metrics_of_a_loss_and_validation_in_their_panels(plot_run, tmp_path):
    panels = picture(plot_run, tmp_path, OWN)
    (one_step,) = picture(plot_run, tmp_path, [{"step": 1, "loss": 0.5}])["loss"].lines
    assert one_step.get_marker() == ".", "a line of one point would not be seen"
    assert list(panels) == ["loss", "rewards/margins", "temperature", "speed"]
    assert panels["speed"].get_ylabel() == "rows per second"
    assert not panels["loss"].get_ylabel(), "the unit of a user's loss is not known"
    for name, validation in (("loss", [0.7, 0.5]), ("rewards/margins", [0.0, 0.3])):
        training, evaluated = panels[name].lines
        assert (training.get_label(), evaluated.get_label()) == ("training", "validation")
        assert list(evaluated.get_xdata()) == [0, 20]
        assert list(evaluated.get_ydata()) == validation
    (over_rows,) = picture(plot_run, tmp_path, OWN, x="rows", metrics=["loss"]).values()
    assert list(over_rows.lines[1].get_xdata()) == [20]


def test_the_loss_of_tokens_has_a_unit(plot_run, tmp_path):
    panels = picture(plot_run, tmp_path, [{"step": 0, "eval_loss": 2.0, "eval_perplexity": 7.4}])
    assert panels["loss"].get_ylabel() == "nats per token"


@pytest.mark.wide
def test_a_plot_leaves_out_lines_that_are_no_records(plot_run, tmp_path):
    pytest.importorskip("matplotlib")
    huge = f'{{"step": 3, "loss": 1{"0" * 400}}}'
    wrong = [
        "5",
        "[]",
        '{"step": 2, "loss": "high"}',
        '{"step": 2, "loss": [1]}',
        "[" * 100_000,
        huge,
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(['{"step": 1, "loss": 0.5}', *wrong, ""]))
    out = tmp_path / "plot.png"
    assert plot_run.main([str(tmp_path), "--metrics=loss", f"--out={out}"]) == 0
    assert out.is_file()
