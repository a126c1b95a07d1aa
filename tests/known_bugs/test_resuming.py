"""Runs that other systems resumed wrong: their data, checkpoints cut short, tables that are
padded or tied.
"""

import shutil
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_array_equal
from support import batches, by_name, local_batches
from variants import small_model

from jaxtp.checkpoint.logical import named_variables
from jaxtp.checkpoint.manager import Checkpoints, restore_newest
from jaxtp.data.documents import InMemory
from jaxtp.data.samples import RowSettings, make_rows, shuffled
from jaxtp.mesh import make_mesh
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import OptimizerConfig
from jaxtp.train.state import plan_state

T = 2
ROWS = 24
DOCUMENTS = InMemory(np.arange(T * ROWS, dtype=np.uint8), np.full(ROWS, T), "test")
"""As many rows, each told by its first token."""


def samples(seed=0):
    return shuffled([make_rows(DOCUMENTS, RowSettings(T, 256))], [1.0], seed)


def read(source, indices):
    return [int(source[index]["inputs"][0]) // T for index in indices]


def rows_of(batches):
    """Returns the numbers of the rows in some batches."""
    firsts = [np.asarray(batch["inputs"])[:, 0] // T for batch in batches]
    return np.concatenate(firsts).tolist()


def test_torchtitan_816_a_run_goes_on_where_it_was_over_fewer_devices():
    """https://github.com/pytorch/torchtitan/pull/816: the place in the data was kept for each
    process, and with fewer of them the places of the others were dropped. Here it is one index,
    that of the next sample.
    """
    seen = []
    start = 0
    for devices, count in ((4, 2), (2, 3), (1, 2), (4, 1)):
        mesh = make_mesh(dp=devices)
        seen += rows_of(batches(samples(), mesh, global_batch_size=4, start=start, count=count))
        start += 4 * count
    assert seen == read(samples(), range(start))
    by_process = [read(samples(), range(process, ROWS, 4)) for process in range(4)]
    left = [row for rows in by_process[:2] for row in rows[2:]]
    assert sorted(left) != sorted(read(samples(), range(8, ROWS))), (
        "what two of four processes have left"
    )


def test_llm_c_792_all_processes_shuffle_alike():
    """https://github.com/karpathy/llm.c/issues/792: each process shuffles by a seed of its own, so
    that several can read the same rows, and nobody others. Here they take parts of one order.
    """

    def epoch(seeds):
        found = []
        for process, seed in enumerate(seeds):
            rows = [2 * process, 2 * process + 1]
            found += rows_of(local_batches(samples(seed), rows, 8, start=0, count=ROWS // 8))
        return sorted(found)

    assert epoch([0, 0, 0, 0]) == list(range(ROWS))
    assert epoch([0, 1, 2, 3]) != list(range(ROWS)), "a seed for each process"


def test_torchtitan_2864_a_later_epoch_is_in_the_order_that_it_would_have_had():
    """https://github.com/pytorch/torchtitan/issues/2864: an epoch was shuffled from the order of
    the one before it, and after a resume from that of the data. Here its order follows from the
    seed and its number alone.
    """
    whole = read(samples(), range(3 * ROWS))
    epochs = np.split(np.array(whole), 3)
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    first = 2 * ROWS + 5
    assert read(samples(), range(first, 3 * ROWS)) == whole[first:], "asked for nothing before"


def test_torchtitan_3908_a_second_resume_goes_on_where_the_first_ended(tmp_path):
    """https://github.com/pytorch/torchtitan/pull/3908: the state of the data was restored by the
    first resume, and the second began with the data from the beginning. Here each resume reads the
    index of the next sample.
    """
    plan = planned()
    seen = []
    starts = []
    for _ in range(3):
        with Checkpoints(tmp_path) as checkpoints:
            found = restore_newest(
                checkpoints, plan.abstract, plan.mesh, lambda info: None, pytest.fail
            )
            step, state, info = found or (0, plan.create(seed=0), {"next_sample": 0})
            starts.append(info["next_sample"])
            seen += rows_of(
                batches(samples(), plan.mesh, global_batch_size=4, start=starts[-1], count=2)
            )
            checkpoints.save(step + 2, state, plan.mesh, {"next_sample": starts[-1] + 8})
    assert starts == [0, 8, 16]
    assert seen == read(samples(), range(24))
    again = [*read(samples(), range(16)), *read(samples(), range(8))]
    assert seen != again, "from the beginning"


ODD = small_model(vocab_size=21, tie_embeddings=True)
TABLE = "model.embedding.embedding"


@cache
def planned(**sizes):
    return plan_state(ODD, optimizers.build(OptimizerConfig(), 10), make_mesh(**sizes))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints of two steps, written over tp 2, where 21 ids are padded to 22; and what they
    hold.
    """
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    plan = planned(tp=2)
    held = {}
    with Checkpoints(folder) as checkpoints:
        state = plan.create(seed=0)
        for step in (1, 2):
            held[step] = by_name(state, plan.mesh)
            checkpoints.save(step, state, plan.mesh, {"next_sample": 8 * step})
            table = state["model"]["embedding"]["embedding"]
            state["model"]["embedding"]["embedding"] = table.replace(2 * table[...])
    return folder, held


def restored(folder, plan):
    with Checkpoints(folder) as checkpoints:
        return checkpoints.restore(2, plan.abstract, plan.mesh)


@pytest.mark.wide
def test_torchtitan_1136_a_vocabulary_that_nothing_divides_comes_back_whole(written):
    """https://github.com/pytorch/torchtitan/issues/1136: with a vocabulary that the devices did not
    divide, a resumed run had another loss. Here a checkpoint has no padding, and every mesh makes
    its own.
    """
    folder, held = written
    plan = planned(tp=4)
    state = restored(folder, plan)
    found = by_name(state, plan.mesh)
    assert found[TABLE].shape == (21, 16)
    for name, array in held[2].items():
        assert_array_equal(found[name], array, err_msg=name)
    table = np.asarray(state["model"]["embedding"]["embedding"][...])
    assert len(table) == 24
    assert not table[21:].any()


@pytest.mark.wide
def test_automodel_2511_a_tied_head_is_the_table(written):
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2511: the head of a tied model was an array of
    its own that training moved and no checkpoint held. Here there is one array, and both its uses
    make its gradient.
    """
    folder, held = written
    assert [
        name for name in held[2] if name.startswith("model.") and 21 in held[2][name].shape
    ] == [TABLE]
    plan = planned()
    graph, params = nnx.split(nnx.merge(plan.graph, restored(folder, plan)).model)
    ids = np.full((1, 4), 3, np.int32)
    gradient = jax.jit(jax.grad(lambda params: nnx.merge(graph, params).loss(ids, ids + 2)[0]))(
        params
    )
    table = np.asarray(named_variables(gradient)["embedding.embedding"][...])
    assert np.abs(table[3]).max() > 1e-4, "as an embedding"
    assert np.abs(table[np.arange(21) != 3]).min() > 0, "and as a head"


@pytest.mark.parametrize("damage", ["cut short", "empty", "not finished"])
def test_metaseq_53_a_checkpoint_that_was_not_written_whole_is_passed_over(
    written, tmp_path, damage
):
    """https://github.com/facebookresearch/metaseq/issues/53: a run that failed while it wrote left
    its newest checkpoint with files of no bytes. Here the next run goes on from the one before, and
    says why.
    """
    folder, held = written
    shutil.copytree(folder, tmp_path / "checkpoints")
    newest = tmp_path / "checkpoints/2"
    if damage == "not finished":
        shutil.rmtree(newest / "info")
    else:
        for path in newest.glob("state/**/d/*"):
            path.write_bytes(
                path.read_bytes()[: path.stat().st_size // 2] if damage == "cut short" else b""
            )
    plan = planned(tp=2)
    warnings = []
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        step, state, info = restore_newest(
            checkpoints, plan.abstract, plan.mesh, lambda info: None, warnings.append
        )
    assert (step, info["next_sample"]) == (1, 8)
    assert "damaged" in warnings[0]
    assert_array_equal(by_name(state, plan.mesh)[TABLE], held[1][TABLE])
    assert not np.array_equal(held[1][TABLE], held[2][TABLE])
