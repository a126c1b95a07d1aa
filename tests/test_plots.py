"""`scripts/plot_estimate.py`: pictures of estimates."""

import json
from pathlib import Path

import plot_estimate
import pytest
from support import assert_refused

from jaxtp.tools.estimate.__main__ import main as estimate

ROOT = Path(__file__).parent.parent


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
