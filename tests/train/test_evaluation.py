"""The validation loss is that of the held-out rows, whatever the batch size and the mesh."""

import json

import numpy as np
import pytest
from runs import SMALL, mesh, records
from support import journeys

from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.train.__main__ import main as train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of very different lengths: a row that counts twice shows."""
    folder = tmp_path_factory.mktemp("data")
    for name in "ab":
        rows = [{"text": f"{name}{i} " * (1 + i % 23)} for i in range(90)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert prepare([str(folder / f"{name}.jsonl"), "--held-out", "0.2", "--out", str(folder / name)]) == 0
    (folder / "mixture.yaml").write_text(f"data: {{mixture: {{{folder / 'a'}: 3, {folder / 'b'}: 1}}}}\n")
    return folder


@pytest.mark.parametrize("source", journeys(["documents", "mixture"], "mixture"))
def test_the_loss_does_not_depend_on_the_batch_size(tmp_path, data, source):
    """The weights are those of the initialisation: the learning rate is too small to move them."""
    what = ["--config", str(data / "mixture.yaml")] if source == "mixture" else ["--data.path", str(data / "a")]
    losses = []
    for size, where in ((2, mesh(1, 1, 1)), (64, mesh(2, 1, 1)), (4, mesh(1, 1, 2, cp=2))):
        out = tmp_path / str(size)
        flags = ["--data.global-batch-size", str(size), "--eval.batches", "99", "--train.steps", "2", *where]
        rate = ["--optimizer.learning-rate", "1e-30"]
        assert train([*what, *SMALL, *flags, *rate, "--run.dir", str(out)]) == 0
        losses += records(out, "eval_loss").values()
    np.testing.assert_allclose(losses, losses[0], rtol=2e-6)
