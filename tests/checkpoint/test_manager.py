import dataclasses

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from support import by_name

import jaxtp
from jaxtp.checkpoint.logical import abstract_logical
from jaxtp.checkpoint.manager import CheckpointError, Checkpoints
from jaxtp.train import optimizer
from jaxtp.train.config import OptimizerConfig
from jaxtp.train.state import plan_state

MODEL = jaxtp.ModelConfig(
    vocab_size=19,
    d_model=16,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    d_ff=24,
    attention_bias=True,
)
MESHES = [(1, 1, 1), (1, 1, 8), (2, 2, 2), (1, 2, 4), (8, 1, 1)]


def blueprint(mesh, model=MODEL):
    return plan_state(model, optimizer.build(OptimizerConfig(), 10), jaxtp.make_mesh(*mesh))


def random_state(plan):
    """Every array random, padding zero, so that nothing can hide behind a zero moment."""
    state = plan.create(seed=0)
    leaves, tree = jax.tree.flatten(state)
    with jax.set_mesh(plan.mesh):
        nonzero = [
            leaf if leaf.ndim == 0 else jax.device_put(leaf + (leaf == 0) * 0.5 * np.cos(i), leaf.sharding)
            for i, leaf in enumerate(leaves)
        ]
    return jax.tree.unflatten(tree, nonzero)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint written on (2, 2, 2), where 19 tokens are padded to 20, and what it holds."""
    folder = tmp_path_factory.mktemp("checkpoints")
    plan = blueprint((2, 2, 2))
    state = random_state(plan)
    checkpoints = Checkpoints(folder)
    checkpoints.save(3, state, plan.mesh, {"next_sample": 48})
    checkpoints.close()
    return folder, by_name(state, plan.mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_restored_on_any_mesh(written, mesh):
    folder, expected = written
    plan = blueprint(mesh)
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest_step() == 3
    assert checkpoints.info(3) == {"next_sample": 48}
    state = checkpoints.restore(3, plan.abstract, plan.mesh)
    checkpoints.close()
    actual = by_name(state, plan.mesh)
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(plan.shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_arrays_on_disk_have_logical_shapes(written):
    folder, _ = written
    manager = ocp.CheckpointManager(
        folder, item_names=("state",), item_handlers={"state": ocp.StandardCheckpointHandler()}
    )
    assert manager.item_metadata(3)["state"].tree["model.embedding.embedding"].shape == (19, 16)
    manager.close()


@pytest.mark.parametrize(("mesh", "vocab"), [((1, 1, 8), 19), ((1, 2, 4), 19), ((2, 2, 2), 21)])
def test_an_unpadded_table_is_still_split_over_every_device_that_held_it(mesh, vocab):
    plan = blueprint(mesh, dataclasses.replace(MODEL, vocab_size=vocab))
    table = abstract_logical(plan.abstract, plan.mesh)["model.embedding.embedding"]
    assert table.shape == (vocab, 16)
    assert table.sharding.shard_shape(table.shape) == (vocab, 16 // (mesh[1] * mesh[2]))


def test_padding_is_zero_after_a_restore(written):
    folder, _ = written
    plan = blueprint((1, 1, 8))
    checkpoints = Checkpoints(folder)
    state = checkpoints.restore(3, plan.abstract, plan.mesh)
    checkpoints.close()
    table = np.asarray(nnx.merge(plan.graph, state).model.embedding.embedding[...])
    assert table.shape == (24, 16)
    assert not table[19:].any()


def test_another_models_checkpoint_is_refused(written):
    folder, _ = written
    plan = blueprint((1, 1, 1), dataclasses.replace(MODEL, tie_embeddings=True))
    checkpoints = Checkpoints(folder)
    with pytest.raises(CheckpointError, match="does not hold this model's state; name another"):
        checkpoints.restore(3, plan.abstract, plan.mesh)
    checkpoints.close()


def test_only_the_newest_are_kept(tmp_path):
    plan = blueprint((1, 1, 2))
    state = plan.create(seed=0)
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state, plan.mesh, {})
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["2", "3"]
