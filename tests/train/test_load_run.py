"""`jaxtp.load_run` of a user's model: on other meshes and on none, and what it refuses."""

from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np
import pytest
import small_net
from flax import nnx
from numpy.testing import assert_allclose
from small_net import PLAN, Net, Normalised, batches, trainer_of
from support import outputs_of, use_mesh

import jaxtp
from jaxtp.config.entry import UserError
from jaxtp.models.own_decoder import call_of_load
from jaxtp.plans import Colwise


class WithFeatures(Normalised):
    """Has features that are plain arrays, and no variables."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.features = jax.random.normal(jax.random.key(5), (32, 10))

    def __call__(self, x):
        return super().__call__(x) @ self.features.T


def in_build(rngs):
    return jaxtp.parallelize(WithFeatures(rngs=rngs), PLAN)


def resized(rngs):
    """Returns the model with narrower layers."""
    model = WithFeatures(rngs=rngs)
    model.up = nnx.Linear(16, 8, rngs=rngs)
    model.down = nnx.Linear(8, 10, rngs=rngs)
    return model


def narrow(rngs):
    return nnx.Dict(up=nnx.Linear(16, 8, rngs=rngs))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the folder of a run over two devices, and outputs of its model."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with trainer_of(folder, "tp=2", 1, {"run.seed": 5}, model=WithFeatures, plan=PLAN) as trainer:
        assert trainer.run_to_end()
        model = trainer.model
        model.eval()
        return folder, np.asarray(outputs_of(model, batches(7)["x"]))


BY_NAME = {"build": f"{__file__}:WithFeatures"}


@pytest.mark.parametrize(
    ("mesh", "given"),
    [
        pytest.param(None, BY_NAME, marks=pytest.mark.wide),
        ({"tp": 4}, {"build": WithFeatures, "plan": f"{small_net.FILE}:PLAN"}),
        pytest.param({"dp": 2, "fsdp": 2}, {"build": WithFeatures}, marks=pytest.mark.wide),
        pytest.param({"tp": 2}, {"build": in_build}, marks=pytest.mark.wide),
    ],
)
def test_a_trained_model_is_loaded_on_another_mesh_and_on_none(trained, mesh, given):
    """With its statistics and its plain arrays, which no checkpoint has."""
    folder, expected = trained
    loaded = jaxtp.load_run(folder, **given, mesh=mesh)
    with nullcontext() if mesh is None else use_mesh(**mesh):
        model = jaxtp.load_run(folder, **given)
        shardings = [
            [leaf.sharding for leaf in jax.tree.leaves(nnx.state(each, nnx.Param))]
            for each in (loaded, model)
        ]
        assert shardings[0] == shardings[1]
        model.eval()
        assert_allclose(outputs_of(model, batches(7)["x"]), expected, rtol=1e-5, atol=1e-5)
        assert mesh or type(model.up) is nnx.Linear, "plain Flax"
        assert mesh != {"tp": 4} or model.up.kernel.sharding.spec[1] == "tp", "as in the plan"


MISTAKES = {
    "no build": (
        {},
        r"no code that a folder names; .* jaxtp\.load_run\('.*', build='.*:WithFeatures'\)$",
    ),
    "fewer variables": (
        {"build": Net},
        r"WithFeatures, .* another model, without model\.norm\.bias; .*norm\.var",
    ),
    "other layers": (
        {"build": narrow},
        r"another model, without model\.down\.bias; .*; and 2 more$",
    ),
    "another size": (
        {"build": resized},
        r"holds another model: .*down.kernel is \(32, 10\), not \(8, 10\)",
    ),
    "no file": ({"build": "nowhere.py:Net"}, "build nowhere.py: no such file"),
    "no function": (
        {"build": 3},
        "build must be a function, a class, settings, or FILE.py:NAME, not 3",
    ),
    "arguments": ({"build": lambda width: None}, "missing a required argument: 'width'"),
    "a pattern": (
        {"build": WithFeatures, "plan": {"sideways": Colwise()}},
        "'sideways' matches no module",
    ),
    "no plan": (
        {"build": WithFeatures, "plan": f"{small_net.FILE}:ROWS"},
        "plan must be a dict of styles, or FILE.py:NAME, not 32",
    ),
    "a base": (
        {"build": WithFeatures, "base": "base"},
        "base is for the base model of a decoder's adapters",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_model_that_cannot_be_loaded_is_one_error(trained, name):
    given, message = MISTAKES[name]
    with pytest.raises(UserError, match=message):
        jaxtp.load_run(trained[0], **given)


def test_over_cp_a_model_is_loaded_only_with_a_plan(trained):
    with (
        use_mesh(cp=2),
        pytest.raises(UserError, match="no plan names the module that takes them"),
    ):
        jaxtp.load_run(trained[0], build=WithFeatures)


def test_a_message_has_the_call_that_loads_a_run():
    given = {
        "mine.py:Net": "'mine.py:Net'",
        "package.module:Net": "'package.module:Net'",
        "__main__:Net": "Net",
        "<lambda>": "...",
        "<Net.<locals>.<lambda>>": "...",
    }
    calls = {build: call_of_load(Path("runs/a"), build) for build in given}
    assert calls == {
        build: f"jaxtp.load_run('runs/a', build={word})" for build, word in given.items()
    }
