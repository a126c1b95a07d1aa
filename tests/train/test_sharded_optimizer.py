"""Optax's transformations on sharded and padded models: equal to one device, also resumed on another mesh."""

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
from support import assert_close, by_name, compilations, sweep

import jaxtp
from jaxtp.checkpoint.logical import logical_spec, named_variables
from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.config.schema import ConfigError
from jaxtp.layers.parameter import PaddedDim, parameter, spec_of
from jaxtp.mesh import make_mesh, mesh_sizes
from jaxtp.train.config import DataConfig, LoopConfig, TrainConfig
from jaxtp.train.optimizer import by_path, current_learning_rate
from jaxtp.train.sharded_optimizer import Optimizer
from jaxtp.train.state import plan_state
from jaxtp.train.step import fetch, make_train_step

DECODER = jaxtp.ModelConfig(  # over tp 2 and 4 the vocabulary, heads and d_ff are padded
    vocab_size=61, d_model=16, num_layers=1, num_heads=9, num_kv_heads=3, head_dim=8, d_ff=26, rope_theta=2.0
)


class Plain(nnx.Module):
    """Matrices that each axis of a mesh splits, vectors and a scalar, in plain Flax."""

    def __init__(self, rngs, hidden):
        draw = lambda *shape: jax.random.normal(rngs.params(), shape) / shape[0] ** 0.5
        dim = PaddedDim((hidden,))
        self.up = parameter("up", draw(8, hidden), PartitionSpec("fsdp", "tp"), padding=((-1, dim),))
        self.bias = parameter("bias", draw(hidden), PartitionSpec("tp"), padding=((-1, dim),))
        stack = draw(2, 8, hidden)  # of two layers
        self.stack = parameter("stack", stack, PartitionSpec(None, "fsdp", "tp"), padding=((-1, dim),))
        self.down = parameter("down", draw(hidden, 8), PartitionSpec("tp", "fsdp"), padding=((-2, dim),))
        self.square = parameter("square", draw(8, 8), PartitionSpec("tp"))
        self.gain = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        stacked = jnp.einsum("bd,ldf->bf", x, self.stack[...])
        hidden = jnp.tanh(x @ self.up[...] + stacked + self.bias[...]) @ self.down[...]
        return self.gain[...] * jnp.tanh(hidden) @ self.square[...]


def mean_square(model, arrays):
    return jnp.mean(jnp.square(model(arrays[0]) - arrays[1]))


MODELS = {"plain": lambda: Plain(nnx.Rngs(0), 12), "padded": lambda: Plain(nnx.Rngs(0), 11)}


def batch_of(step):
    return np.random.default_rng(step).standard_normal((2, 16, 8), np.float32)


def last_two_dims(params):
    numbers = optax.contrib.MuonDimensionNumbers
    return jax.tree.map(lambda p: numbers(p.ndim - 2, p.ndim - 1) if p.ndim > 1 else None, params)


R = 1e-2
TRANSFORMATIONS = {
    "adamw": optax.adamw(R / 10),  # a step of R is half of a decoder's weights: rounding would grow to 1e-5
    "adafactor": optax.adafactor(R, min_dim_size_to_factor=8, weight_decay_rate=1e-3),
    "momentum": optax.sgd(R, momentum=0.9, nesterov=True),
    "lion": optax.lion(R),
    "novograd": optax.novograd(R),
    "lamb": optax.lamb(R),
    "sm3": optax.masked(optax.sm3(R), lambda params: jax.tree.map(lambda p: p.ndim > 0, params)),
    "prodigy": optax.contrib.prodigy(1.0, estim_lr0=1e-3),
    "muon": optax.contrib.muon(
        R,
        muon_weight_dimension_numbers=last_two_dims,
    ),
    "galore": optax.contrib.galore(R, rank=4),
    "schedule_free": optax.contrib.schedule_free_adamw(R),
    "lbfgs": optax.lbfgs(R, memory_size=3, linesearch=None),
    "multi_steps": optax.MultiSteps(optax.adamw(R), 2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(R), 3),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.adam(R)),
    "inject": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(R, 0.0, 10)),
    "plateau": optax.chain(optax.adam(R), optax.contrib.reduce_on_plateau(accumulation_size=3, patience=1)),
    "polyak": optax.polyak_sgd(),
    "mechanize": optax.contrib.mechanize(optax.adamw(R)),
    "frozen": by_path({"*bias|*.scale|gain": optax.set_to_zero(), "*": optax.adamw(R)}),
    "groups": optax.multi_transform({"bias": optax.adam(R)}, lambda params: dict.fromkeys(params, "bias")),
    "sam": optax.GradientTransformation(*optax.contrib.sam(optax.sgd(R), optax.sgd(0.05))),  # takes no extra arguments
    "flatten": optax.flatten(optax.adam(R)),
}
TOLERANCE = {"lbfgs": 1e-4}  # it stores differences of gradients


class Pair(nnx.Module):
    def __init__(self, name, model):
        self.model = MODELS[model]()
        self.optimizer = Optimizer(self.model, TRANSFORMATIONS[name])


class Pairs(nnx.Module):
    """Several transformations, each with a model of its own, in one program and one checkpoint."""

    def __init__(self, names, model):
        for name in names:
            setattr(self, name, Pair(name, model))


def planned(names, model, mesh):
    with jax.set_mesh(mesh):
        graph, abstract = nnx.split(nnx.eval_shape(lambda: Pairs(names, model)))
        return graph, abstract, nnx.get_named_sharding(abstract, mesh)


@cache
def step_of(names, model, mesh):
    graph, _, shardings = planned(names, model, mesh)

    def update_all(state, batch):
        pairs = nnx.merge(graph, state, copy=True)
        losses = {}
        for name in names:
            pair = getattr(pairs, name)
            losses[name], grads = nnx.value_and_grad(mean_square)(pair.model, batch)
            pair.optimizer.update(pair.model, grads, losses[name])
        return nnx.state(pairs), losses

    return jax.jit(update_all, out_shardings=(shardings, None))


def initial(names, model, mesh):
    with jax.set_mesh(mesh):
        shardings = planned(names, model, mesh)[2]
        return jax.jit(lambda: nnx.state(Pairs(names, model)), out_shardings=shardings)()


def advance(names, model, mesh, steps, state):
    """The state after some steps, and the losses of each step by name."""
    losses = []
    with jax.set_mesh(mesh), compilations() as programs:
        for i in steps:
            state, loss = step_of(names, model, mesh)(state, batch_of(i))
            losses.append({name: float(loss[name]) for name in names})
    # Otherwise a state that is restored or updated has another type than before.
    assert len([each for each in programs if "update_all" in each]) <= (0 in steps)
    return state, losses


NAMES = sorted(TRANSFORMATIONS)
CASES = [
    ("padded", {"tp": 2}, ("momentum",)),
    *(("padded", {"fsdp": 2, "tp": 2}, tuple(NAMES[first::4])) for first in range(2)),
    *(("padded", {"tp": 4}, tuple(NAMES[first::4])) for first in range(2, 4)),
]


@pytest.mark.parametrize("case", sweep(CASES, CASES[0]), ids=str)
def test_a_run_equals_one_device_and_resumes_there(tmp_path, case):
    model, sizes, names = case
    mesh = make_mesh(**sizes)
    one = make_mesh()
    expected, expected_losses = advance(names, model, one, range(4), initial(names, model, one))
    state, losses = advance(names, model, mesh, range(2), initial(names, model, mesh))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, mesh, {})
        checkpoints.wait()
        state = checkpoints.restore(2, planned(names, model, one)[1], one)
    state, more = advance(names, model, one, range(2, 4), state)
    for name in names:
        tolerance = TOLERANCE.get(name, 1e-5)
        assert_close(by_name(state[name], one), by_name(expected[name], one), tolerance)
        found = [loss[name] for loss in losses + more]
        np.testing.assert_allclose(found, [loss[name] for loss in expected_losses], rtol=1e-5, err_msg=name)


SPLIT = {  # elements per device of four, of `up` [8 / fsdp, 12 / tp]
    "adamw": {"0.mu.up": 24, "0.nu.up": 24, "0.mu.bias": 6, "0.mu.square": 32, "0.mu.gain": 1},
    "adafactor": {"0.v_row.up": 4, "0.v_col.up": 6},
    "sm3": {"inner_state.0.mu.up.0": 4, "inner_state.0.mu.up.1": 6},
    "galore": {"0.projector.up": 12, "0.base_optimizer_state.mu.up": 8},
    "lbfgs": {"0.diff_params_memory.up": 3 * 24},
    "multi_steps": {"acc_grads.up": 24, "inner_opt_state.0.mu.up": 24},
    "groups": {"inner_states.bias.inner_state.0.mu.up": 24},  # a group with the name of a parameter
    "frozen": {"inner_states.*.inner_state.0.mu.up": 24},
}


def test_states_are_split_like_their_parameters():
    _, abstract, shardings = planned(tuple(SPLIT), "plain", make_mesh(fsdp=2, tp=2))
    for name, expected in SPLIT.items():
        shards = named_variables(shardings[name]["optimizer"]["opt_state"])
        found = named_variables(abstract[name]["optimizer"]["opt_state"])
        sizes = {path: math.prod(shards[path].get_value().shard_shape(v.shape)) for path, v in found.items()}
        assert {path: sizes.get(path) for path in expected} == expected, (name, sizes)


def test_a_state_of_padded_parameters_is_split_as_evenly_as_its_shape_allows():
    mesh = make_mesh(fsdp=2, tp=2)
    _, abstract, _ = planned(("adamw",), "padded", mesh)
    moments = named_variables(abstract["adamw"]["optimizer"]["opt_state"][0].mu)
    for path, param in named_variables(abstract["adamw"]["model"]).items():
        assert spec_of(moments[path]) == logical_spec(param, mesh_sizes(mesh)), path
    assert moments["stack"].shape == (2, 8, 11)


def test_a_frozen_part_has_no_state_and_does_not_move():
    mesh = make_mesh(tp=2)
    state = initial(("frozen",), "plain", mesh)
    weights = by_name(state["frozen"]["model"], mesh)
    after = advance(("frozen",), "plain", mesh, range(2), state)[0]["frozen"]
    moved = by_name(after["model"], mesh)
    assert {name for name in weights if (weights[name] == moved[name]).all()} == {"bias", "gain"}
    assert not [path for path in named_variables(after["optimizer"]) if path.endswith((".bias", ".gain"))]


def test_patterns_of_by_path_are_refused():
    params = {"mlp.up.kernel": jnp.ones((2, 2)), "mlp.up.bias": jnp.ones(2), "norm.scale": jnp.ones(2)}
    zero = optax.set_to_zero()
    for patterns, message in {
        ("*.bais", "*"): r"by_path: the pattern '\*\.bais' matches no trained parameter; there are:\n  mlp.up.bias\n",
        ("mlp.*", "*.kernel", "*"): r"earlier patterns match everything that '\*\.kernel' matches",
        ("mlp.*",): "no pattern matches norm.scale; end with the pattern",
    }.items():
        with pytest.raises(ConfigError, match=message):
            by_path(dict.fromkeys(patterns, zero)).init(params)


def stateful(init, update):
    return optax.GradientTransformation(lambda params: init, lambda updates, state, params=None: update(updates, state))


REFUSED = {
    "a line search": (optax.lbfgs(), "value_fn"),
    "Sophia": (optax.contrib.sophia(R), "obj_fn must be provided"),
    "gradients of examples": (
        optax.contrib.differentially_private_aggregate(1.0, 0.1, key=jax.random.key(0)),
        "to have a batch dimension",
    ),
    "means": (optax.stateless(lambda g, _: jax.tree.map(jnp.mean, g)), r"update of bias is \(\), not \(12,\)"),
    "lookahead": (
        optax.lookahead(optax.sgd(R), 5, 0.5),
        "'fast'\nIt sees the parameters as a flat dict",
    ),
    "text": (stateful({"mode": "fast"}, lambda g, s: (g, s)), "state at mode is 'fast'"),
    "complex": (stateful({"z": 1j}, lambda g, s: (g, s)), "state at z is a complex64 array"),
    "another dtype": (stateful({"n": 0}, lambda g, s: (g, {"n": s["n"] + 0.5})), r"at n is float32\[\], not int32\[\]"),
    "a new entry": (stateful({}, lambda g, s: (g, {"n": 0})), r"at n is int32\[\], not absent"),
    "a rate": (1e-3, "the optimizer is 0.001: should be an Optax transformation"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore:.*has no attribute")
def test_what_cannot_be_had_is_refused_before_anything_is_allocated(what):
    transformation, message = REFUSED[what]
    with pytest.raises(ConfigError, match=message), jax.set_mesh(make_mesh(tp=2)):
        nnx.eval_shape(lambda: Optimizer(MODELS["plain"](), transformation))


INJECTED = optax.inject_hyperparams(optax.sgd)
RATES = [
    (optax.adamw(R), None),
    (INJECTED(R), R),
    (optax.MultiSteps(INJECTED(optax.linear_schedule(R, 0, 2)), 1), R / 2),
    (by_path({"a": INJECTED(R), "b": optax.sgd(R)}), R),
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


def test_the_training_step_passes_its_mean_loss_and_gradient():
    def update(updates, state, params=None, *, value, grad, **_):
        return jax.tree.map(jnp.zeros_like, updates), {"value": value, "norm": optax.tree.norm(grad)}

    empty = {"value": 0.0, "norm": 0.0}
    mesh = make_mesh(fsdp=2)
    blueprint = plan_state(DECODER, optax.GradientTransformationExtraArgs(lambda params: empty, update), mesh)
    config = TrainConfig(model=DECODER, data=DataConfig(sequence_length=8), train=LoopConfig(steps=2))
    ids = np.random.default_rng(0).integers(DECODER.vocab_size, size=(8, 9))
    with jax.set_mesh(mesh):
        state, scalars = make_train_step(config, blueprint)(
            blueprint.create(0), {"inputs": ids[:, :-1], "labels": ids[:, 1:]}
        )
    found = state["optimizer"]["opt_state"]
    metrics = fetch(scalars)
    assert float(found["value"][...]) == pytest.approx(metrics["loss"])
    assert float(found["norm"][...]) == pytest.approx(metrics["grad_norm"])
