"""`train.spike`: a step that stands out of its window changes nothing, on every mesh and after a
resume.
"""

from types import SimpleNamespace

import numpy as np
import optax
import pytest
from runs import records
from small_net import batches, train

from jaxtp.config.entry import NumericsError
from jaxtp.guards.hook import FinishedStep
from jaxtp.guards.nonfinite import Spikes

WILD = {8, 9, 12}
SETTINGS = {
    "train.non_finite": "skip",
    "train.spike": "skip",
    "train.spike_window": 4,
    "train.log_every": 1,
    "checkpoint.every": 1,
}


def wild_batches(step):
    """Batches count from 0, and steps from 1."""
    batch = batches(step)
    return batch | {"x": batch["x"] * (30 if step + 1 in WILD else 1)}


def run(folder, mesh, steps=14, **settings):
    parts = {"batches": wild_batches, "optimizer": optax.adam(1e-3)}
    changes = {f"train.{name}": value for name, value in settings.items()}
    return train(folder, mesh, steps, SETTINGS | changes, **parts)


def unchanged(folder):
    """Steps after which the weights are as before."""
    norms = records(folder, "param_norm")
    return {step for step in range(2, 15) if norms[step] == norms[step - 1]}


@pytest.mark.journey
def test_spikes_are_skipped_alike_on_every_mesh_with_accumulation_and_after_a_resume(
    tmp_path, capsys
):
    run(tmp_path / "whole", "dp=1")
    out = capsys.readouterr().out
    for step in WILD:
        assert f"step {step}: a spike of train.spike_deviations=6: loss" in out
    assert "the update is skipped, 2 in a row of at most 10" in out
    assert unchanged(tmp_path / "whole") == WILD

    run(tmp_path / "split", "fsdp=2,tp=2", accumulation=2)
    assert unchanged(tmp_path / "split") == WILD

    for steps in (8, 14):
        run(tmp_path / "resumed", "dp=1", steps)
    for name in ("param_norm", "loss"):
        assert records(tmp_path / "resumed", name) == records(tmp_path / "whole", name)


def test_more_spikes_in_a_row_than_allowed_end_the_run(tmp_path):
    words = r"a spike\. The update was not applied(.|\n)*--train\.max-skipped 1"
    with pytest.raises(NumericsError, match=words):
        run(tmp_path, "dp=1", max_skipped=1)


def test_limits_leave_out_the_step_before_and_spikes():
    spikes = Spikes(2.0, 3, [])
    lines = []
    loop = SimpleNamespace(line=lines.append)
    losses = [1.0, 2.0, 3.0, 9.0, 4.0, 5.0]
    for index, loss in enumerate(losses, start=1):
        metrics = {"loss": loss, "grad_norm": 2 * loss}
        skipped = int(loss == 9)
        spikes.after_step(loop, FinishedStep(index, {}, metrics, 1.0, skipped, 0, None))
    assert np.isinf(spikes.limits(4)).all()
    # The window of step 7 has the steps 2, 3 and 5.
    expected = np.mean([2, 3, 4]) + 2 * np.std([2, 3, 4])
    np.testing.assert_allclose(spikes.limits(7), [expected, 2 * expected], rtol=1e-6)
    info = {}
    spikes.at_save(info)
    assert (Spikes(2.0, 3, info["spikes"]).limits(7) == spikes.limits(7)).all()
    assert len(lines) == 1
