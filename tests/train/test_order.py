"""The order of the samples is in the checkpoint: another one is refused or named, whatever it is
that changes it.
"""

import copy
from dataclasses import replace

import numpy as np
import pytest

from jaxtp.config import schema as configuration
from jaxtp.data import mixture, packing, rows, samples
from jaxtp.data.corpus import BYTE_TOKENIZER, LIBRARY, Corpus, Source
from jaxtp.data.documents import InMemory
from jaxtp.data.samples import HELD_OUT, MIXTURE, ORDER, ROWS, SHUFFLE, Data, RowSettings
from jaxtp.mesh import mesh_shape
from jaxtp.train.config import TrainConfig
from jaxtp.train.optimizer import learning_rate
from jaxtp.train.resume import check_resumable, learning_rate_change
from jaxtp.train.run_folder import RunFolderError, checkpoint_info

CONFIG = TrainConfig()
MESH = mesh_shape()


def data(kind="documents"):
    lengths = [7, 2, 9, 1, 3, 3, 3, 1, 25]
    documents = InMemory(np.arange(sum(lengths), dtype=np.uint8), np.array(lengths), "test")
    sources = (Source("a", 3.0, documents, documents), Source("b", 1.0, documents, documents))
    return Data(Corpus(sources, BYTE_TOKENIZER, "test"), RowSettings(10, 256, kind), seed=1)


@pytest.fixture(autouse=True)
def _nothing_is_remembered():
    yield
    samples.shuffle_description.cache_clear()


ALGORITHMS = {
    ROWS: (packing, "best_fit", lambda best_fit: lambda *args: best_fit(*args)[::-1]),
    SHUFFLE: (
        samples,
        "shuffled",
        lambda shuffled: lambda rows, weights, seed: shuffled(rows, weights, seed + 1),
    ),
    MIXTURE: (mixture, "schedule", lambda schedule: lambda counts: schedule(counts)[::-1]),
    HELD_OUT: (mixture, "validation_order", lambda order: lambda *args: order(*args)[::-1]),
}


def changed(patch, part):
    """Makes one part of the order another, as a new version of its package would."""
    samples.shuffle_description.cache_clear()
    module, name, other = ALGORITHMS[part]
    patch.setattr(module, name, other(getattr(module, name)))


def stored_by(description):
    return checkpoint_info(configuration.to_plain(CONFIG), copy.deepcopy(description), 8, MESH)


def lines_of(now, stored):
    """What a run says that goes on."""
    return check_resumable(configuration.to_plain(CONFIG), now, stored)


def refusal(now, stored, config=CONFIG):
    with pytest.raises(RunFolderError) as refused:
        check_resumable(configuration.to_plain(config), now, stored)
    return str(refused.value)


def test_the_learning_rate_that_other_steps_make_is_said():
    """A cosine over 60 steps is at its end, and one over 600 near its beginning."""
    before = configuration.replace_nested(TrainConfig(), {"train.steps": 60})
    stored = configuration.to_plain(before)
    then, now = (learning_rate(before.optimizer, steps) for steps in (60, 600))
    (line,) = learning_rate_change(before.optimizer, 600, stored, 59)
    assert f"{float(then(58)):.4g} at the last step, {float(now(59)):.4g} at the next" in line
    assert f"without the changes it would be {float(then(59)):.4g}" in line
    assert learning_rate_change(before.optimizer, 60, stored, 59) == []


def test_the_hashes_in_the_checkpoints_of_runs_under_way_stay():
    """Whoever changes a hash here refuses every run that is under way: the version beside the
    algorithm changes too.
    """
    assert {
        name: (part["algorithm"], part["sha256"][:16])
        for name, part in data().description[ORDER].items()
    } == {
        ROWS: ("best fit 2", "10dbb59970c19566"),
        SHUFFLE: (f"grain {samples.version('grain')}", "dfd844250ab4a349"),
        MIXTURE: ("Tijdeman 1", "2c24932e8e4ebc2f"),
        HELD_OUT: ("by weight 1", "ee9a61b0f6515da6"),
    }
    assert data("concatenated").description[ORDER][ROWS]["algorithm"] == rows.Concatenated.algorithm


def test_a_run_of_the_same_order_goes_on_without_a_word():
    """Also by another version of an algorithm, and with settings that are newer than LongRoPE
    and cp.
    """
    stored = stored_by(data().description)
    assert lines_of(data().description, stored) == []
    for part in stored["corpus"][ORDER].values():
        part["algorithm"] += "0"
    scaling = stored["config"]["model"]["rope_scaling"]
    newer = [name for name in scaling if name.endswith("_factor")]
    assert newer
    for name in newer:
        del scaling[name]
    del stored["config"]["mesh"]["cp"]
    assert lines_of(data().description, stored) == []


def test_another_python_has_another_library_and_the_message_says_so():
    """The default data of a run."""
    libraries = [f"{LIBRARY} 3.11.7, 612 files", f"{LIBRARY} 3.13.1, 630 files"]
    then, now = (
        data().description | {"source": library, "sha256": library} for library in libraries
    )
    assert f"each Python has its own default data: {' -> '.join(libraries)}" in refusal(
        now, stored_by(then)
    )


def test_a_checkpoint_of_another_loop_is_refused():
    assert "checkpoints of another loop" in refusal(
        data().description, {"next_sample": 8, "config": "mine.yaml"}
    )


PACKAGES = {
    ROWS: "jaxtp 0.0.1",
    SHUFFLE: f"grain {samples.version('grain')}",
    MIXTURE: "jaxtp 0.0.1",
}


@pytest.mark.parametrize("part", PACKAGES)
def test_another_order_is_refused_by_name(part, monkeypatch):
    stored = stored_by(data().description)
    stored["versions"] = {"jaxtp": "0.0.1"}
    changed(monkeypatch, part)
    now = data().description
    message = refusal(now, stored)
    parts = (stored["corpus"][ORDER][part], now[ORDER][part])
    was, is_now = (f"{each['algorithm']} ({each['sha256'][:12]})" for each in parts)
    assert f": {was} -> {is_now}; " in message
    assert f"{PACKAGES[part]} has the stored one" in message
    assert "--run.init-from" in message


def test_other_rows_of_evaluations_and_checkpoints_without_an_order_are_named(monkeypatch):
    stored = stored_by(data().description)
    (line,) = lines_of(data().description, stored_by(data().corpus.describe()))
    assert line.startswith("order of the samples: the checkpoint, by jaxtp ")
    changed(monkeypatch, HELD_OUT)
    (line,) = lines_of(data().description, stored)
    assert line.startswith("changed since: rows of evaluations: by weight 1 (")


def test_other_data_and_settings_are_refused_before_the_order_that_follows_from_them():
    stored = stored_by(data().description)
    stored["corpus"][ORDER][ROWS]["sha256"] = "cd"
    shorter = replace(CONFIG, data=replace(CONFIG.data, sequence_length=10))
    assert "data.sequence_length: 128 -> 10\n" in refusal(data().description, stored, shorter)
    stored["corpus"]["sha256"] = "ab"
    message = refusal(data().description, stored)
    assert "data: sha256: ab -> " in message
    assert ORDER not in message.partition("Resume it")[0]
