"""Optax's transformations on sharded and padded models: equal to one device, also resumed on
another mesh.
"""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from numpy.random import default_rng
from numpy.testing import assert_allclose
from support import assert_close, by_name, compilations, swept, use_mesh
from tables import read_table
from variants import small_model

from jaxtp.checkpoint.logical import logical_spec, named_variables
from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.config.schema import ConfigError
from jaxtp.layers.parameter import PaddedDim, parameter, spec_of
from jaxtp.mesh import make_mesh, mesh_sizes
from jaxtp.train.config import DataConfig, LoopConfig, TrainConfig
from jaxtp.train.optimizer import by_path, current_learning_rate
from jaxtp.train.parts import step_settings
from jaxtp.train.sharded_optimizer import Optimizer
from jaxtp.train.state import plan_state
from jaxtp.train.step import fetch, make_train_step

# Over tp 2 and 4 the vocabulary, heads and d_ff are padded.
DECODER = small_model(num_heads=9, num_kv_heads=3, head_dim=8, d_ff=26, rope_theta=2.0)


class Plain(nnx.Module):
    """Matrices that each axis of a mesh splits, vectors and a scalar, in plain Flax."""

    def __init__(self, rngs, hidden):
        dim = PaddedDim((hidden,))
        draw = lambda *shape: jax.random.normal(rngs.params(), shape) / shape[0] ** 0.5
        shapes = {
            "up": ((8, hidden), ("fsdp", "tp"), -1),
            "bias": ((hidden,), ("tp",), -1),
            "stack": ((2, 8, hidden), (None, "fsdp", "tp"), -1),  # of two layers
            "down": ((hidden, 8), ("tp", "fsdp"), -2),
        }
        for name, (shape, spec, padded) in shapes.items():
            setattr(
                self,
                name,
                parameter(name, draw(*shape), PartitionSpec(*spec), padding=((padded, dim),)),
            )
        self.square = parameter("square", draw(8, 8), PartitionSpec("tp"))
        self.gain = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        stacked = jnp.einsum("bd,ldf->bf", x, self.stack[...])
        hidden = jnp.tanh(x @ self.up[...] + stacked + self.bias[...]) @ self.down[...]
        return self.gain[...] * jnp.tanh(hidden) @ self.square[...]


PADDED = 11
"""A width that tp 2 and 4 pad."""
DIVISIBLE = 12


def mean_square(model, arrays):
    return jnp.mean(jnp.square(model(arrays[0]) - arrays[1]))


def batch_of(step):
    return default_rng(step).standard_normal((2, 16, 8), np.float32)


def last_two_dims(params):
    numbers = optax.contrib.MuonDimensionNumbers
    return jax.tree.map(lambda p: numbers(p.ndim - 2, p.ndim - 1) if p.ndim > 1 else None, params)


R = 1e-2
TRANSFORMATIONS = {
    # a step of R is half of a decoder's weights: rounding would grow to 1e-5
    "adamw": optax.adamw(R / 10),
    "adafactor": optax.adafactor(R, min_dim_size_to_factor=8, weight_decay_rate=1e-3),
    "momentum": optax.sgd(R, momentum=0.9, nesterov=True),
    "lion": optax.lion(R),
    "lamb": optax.lamb(R),
    "sm3": optax.masked(optax.sm3(R), lambda params: jax.tree.map(lambda p: p.ndim > 0, params)),
    "prodigy": optax.contrib.prodigy(1.0, estim_lr0=1e-3),
    "muon": optax.contrib.muon(R, muon_weight_dimension_numbers=last_two_dims),
    "galore": optax.contrib.galore(R, rank=4),
    "schedule_free": optax.contrib.schedule_free_adamw(R),
    "lbfgs": optax.lbfgs(R, memory_size=3, linesearch=None),
    "multi_steps": optax.MultiSteps(optax.adamw(R), 2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(R), 3),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.adam(R)),
    "inject": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(R, 0.0, 10)),
    "plateau": optax.chain(
        optax.adam(R), optax.contrib.reduce_on_plateau(accumulation_size=3, patience=1)
    ),
    "polyak": optax.polyak_sgd(),
    "mechanize": optax.contrib.mechanize(optax.adamw(R)),
    "frozen": by_path({"*bias|*.scale|gain": optax.set_to_zero(), "*": optax.adamw(R)}),
    "groups": optax.multi_transform(
        {"bias": optax.adam(R)}, lambda params: dict.fromkeys(params, "bias")
    ),
    # takes no extra arguments
    "sam": optax.GradientTransformation(*optax.contrib.sam(optax.sgd(R), optax.sgd(0.05))),
    "flatten": optax.flatten(optax.adam(R)),
}
TOLERANCE = {"lbfgs": 1e-4}  # it stores differences of gradients


class Pair(nnx.Module):
    def __init__(self, transformation, hidden):
        self.model = Plain(nnx.Rngs(0), hidden)
        self.optimizer = Optimizer(self.model, transformation)


class Pairs(nnx.Module):
    """Several transformations, each with a model of its own, in one program and one checkpoint."""

    def __init__(self, names, hidden):
        for name in names:
            setattr(self, name, Pair(TRANSFORMATIONS[name], hidden))


def planned(names, mesh, hidden=PADDED):
    with jax.set_mesh(mesh):
        graph, abstract = nnx.split(nnx.eval_shape(lambda: Pairs(names, hidden)))
        return graph, abstract, nnx.get_named_sharding(abstract, mesh)


@cache
def step_of(names, mesh):
    graph, _, shardings = planned(names, mesh)

    def update_all(state, batch):
        pairs = nnx.merge(graph, state, copy=True)
        losses = {}
        for name in names:
            pair = getattr(pairs, name)
            losses[name], grads = nnx.value_and_grad(mean_square)(pair.model, batch)
            pair.optimizer.update(pair.model, grads, losses[name])
        return nnx.state(pairs), losses

    return jax.jit(update_all, out_shardings=(shardings, None))


def initial(names, mesh):
    with jax.set_mesh(mesh):
        shardings = planned(names, mesh)[2]
        return jax.jit(lambda: nnx.state(Pairs(names, PADDED)), out_shardings=shardings)()


def advance(names, mesh, steps, state):
    """The state after some steps, and the losses of each step by name."""
    losses = []
    with jax.set_mesh(mesh), compilations() as programs:
        for i in steps:
            state, loss = step_of(names, mesh)(state, batch_of(i))
            losses.append([float(loss[name]) for name in names])
    # Otherwise a state that is restored or updated has another type than before.
    assert len([each for each in programs if "update_all" in each]) <= (0 in steps)
    return state, losses


NAMES = sorted(TRANSFORMATIONS)
QUARTERS = [tuple(NAMES[first::4]) for first in range(4)]
CASES = [
    ({"tp": 2}, ("momentum",)),
    *(({"fsdp": 2, "tp": 2}, names) for names in QUARTERS[:2]),
    *(({"tp": 4}, names) for names in QUARTERS[2:]),
]


@swept("case", CASES, CASES[0])
def test_a_run_equals_one_device_and_resumes_there(tmp_path, case):
    sizes, names = case
    mesh = make_mesh(**sizes)
    one = make_mesh()
    expected, expected_losses = advance(names, one, range(4), initial(names, one))
    state, losses = advance(names, mesh, range(2), initial(names, mesh))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, mesh, {})
        checkpoints.wait()
        state = checkpoints.restore(2, planned(names, one)[1], one)
    state, more = advance(names, one, range(2, 4), state)
    assert_allclose(losses + more, expected_losses, rtol=1e-5, err_msg=str(names))
    for name in names:
        assert_close(
            by_name(state[name], one), by_name(expected[name], one), TOLERANCE.get(name, 1e-5)
        )


SPLIT = read_table(__file__)


@pytest.mark.wide
def test_states_are_split_like_their_parameters():
    _, abstract, shardings = planned(tuple(SPLIT), make_mesh(fsdp=2, tp=2), DIVISIBLE)
    for name, expected in SPLIT.items():
        shards = named_variables(shardings[name]["optimizer"]["opt_state"])
        found = named_variables(abstract[name]["optimizer"]["opt_state"])
        sizes = {
            path: math.prod(shards[path].get_value().shard_shape(v.shape))
            for path, v in found.items()
        }
        assert {path: sizes.get(path) for path in expected} == expected, (name, sizes)


def test_a_state_of_padded_parameters_is_split_as_evenly_as_its_shape_allows():
    mesh = make_mesh(fsdp=2, tp=2)
    _, abstract, _ = planned(("adamw",), mesh)
    moments = named_variables(abstract["adamw"]["optimizer"]["opt_state"][0].mu)
    for path, param in named_variables(abstract["adamw"]["model"]).items():
        assert spec_of(moments[path]) == logical_spec(param, mesh_sizes(mesh)), path


def test_a_frozen_part_has_no_state_and_does_not_move():
    mesh = make_mesh(tp=2)
    state = initial(("frozen",), mesh)
    weights = by_name(state["frozen"]["model"], mesh)
    after = advance(("frozen",), mesh, range(2), state)[0]["frozen"]
    moved = by_name(after["model"], mesh)
    assert {name for name in weights if (weights[name] == moved[name]).all()} == {"bias", "gain"}
    assert not [
        path for path in named_variables(after["optimizer"]) if path.endswith((".bias", ".gain"))
    ]


def test_patterns_of_by_path_are_refused():
    params = {
        "mlp.up.kernel": jnp.ones((2, 2)),
        "mlp.up.bias": jnp.ones(2),
        "norm.scale": jnp.ones(2),
    }
    zero = optax.set_to_zero()
    for patterns, message in {
        (
            "*.bais",
            "*",
        ): r"by_path: the pattern '\*\.bais' matches no trained parameter; there are:\n  "
        r"mlp.up.bias\n",
        ("mlp.*", "*.kernel", "*"): r"earlier patterns match everything that '\*\.kernel' matches",
        ("mlp.*",): "no pattern matches norm.scale; end with the pattern",
    }.items():
        with pytest.raises(ConfigError, match=message):
            by_path(dict.fromkeys(patterns, zero)).init(params)


def stateful(init, update):
    return optax.GradientTransformation(
        lambda params: init, lambda updates, state, params=None: update(updates, state)
    )


REFUSED = {
    "a line search": (optax.lbfgs(), "value_fn"),
    "means": (
        optax.stateless(lambda g, _: jax.tree.map(jnp.mean, g)),
        r"update of bias is \(\), not \(12,\)",
    ),
    "lookahead": (
        optax.lookahead(optax.sgd(R), 5, 0.5),
        "'fast'\nIt sees the parameters as a flat dict",
    ),
    "text": (stateful({"mode": "fast"}, lambda g, s: (g, s)), "state at mode is 'fast'"),
    "another dtype": (
        stateful({"n": 0}, lambda g, s: (g, {"n": s["n"] + 0.5})),
        r"at n is float32\[\], not int32\[\]",
    ),
    "a new entry": (stateful({}, lambda g, s: (g, {"n": 0})), r"at n is int32\[\], not absent"),
    "a rate": (1e-3, r"the optimizer must be an Optax transformation, .* not 0\.001"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore:.*has no attribute")
def test_what_cannot_be_had_is_refused_before_anything_is_allocated(what):
    transformation, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message), use_mesh(tp=2):
        nnx.eval_shape(lambda: Pair(transformation, DIVISIBLE))


INJECTED = optax.inject_hyperparams(optax.sgd)
RATES = [
    (optax.adamw(R), None),
    (INJECTED(R), R),
    (optax.MultiSteps(INJECTED(optax.linear_schedule(R, 0, 2)), 1), R / 2),
    (by_path({"a": INJECTED(R), "b": INJECTED(R)}), None),  # which of them?
]


def test_the_learning_rate_of_the_last_update_is_found_in_the_state():
    params = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}

    def rate_after_two_updates(rule):
        state = rule.init(params)
        for _ in range(2):
            _, state = rule.update(params, state, params)
        return current_learning_rate(state)

    found = jax.jit(lambda: [rate_after_two_updates(rule) for rule, _ in RATES])()
    assert found == [rate and pytest.approx(rate) for _, rate in RATES]


@pytest.mark.wide
def test_the_training_step_passes_its_mean_loss_and_gradient():
    def update(updates, state, params=None, *, value, grad, **_):
        return jax.tree.map(jnp.zeros_like, updates), {
            "value": value,
            "norm": optax.tree.norm(grad),
        }

    empty = {"value": 0.0, "norm": 0.0}
    mesh = make_mesh(fsdp=2)
    blueprint = plan_state(
        DECODER, optax.GradientTransformationExtraArgs(lambda params: empty, update), mesh
    )
    config = TrainConfig(
        model=DECODER, data=DataConfig(sequence_length=8), train=LoopConfig(steps=2)
    )
    ids = default_rng(0).integers(DECODER.vocab_size, size=(8, 9))
    batch = {"inputs": ids[:, :-1], "labels": ids[:, 1:]}
    with jax.set_mesh(mesh):
        state, output = make_train_step(step_settings(config), blueprint)(
            blueprint.create(0), batch
        )
    found = by_name(state["optimizer"]["opt_state"], mesh)
    metrics = fetch(output)
    assert found == pytest.approx({"value": metrics["loss"], "norm": metrics["grad_norm"]})
