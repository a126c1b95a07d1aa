"""The training step: the textbook's update, accumulation, memory; `tests/tools/check` has its parity over meshes."""

import dataclasses
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import assert_close, by_name, random_weights, state_on_mesh, sweep

import jaxtp
from jaxtp.checkpoint.logical import named_variables
from jaxtp.mesh import make_mesh
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.state import TrainState, bytes_per_device, plan_state
from jaxtp.train.step import Scalars, fetch, loss_and_grads, make_eval_step, make_train_step

B = 8
T = 5
STEPS = 3
SETTINGS = OptimizerConfig(learning_rate=1e-2, warmup_steps=1)
PLAIN = jaxtp.ModelConfig(vocab_size=32, d_model=16, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=4, d_ff=24)
ODD = dataclasses.replace(
    PLAIN,
    vocab_size=19,
    num_kv_heads=2,
    head_dim=12,
    rope_theta=2.0,  # all dims turn: in one that hardly does, a key bias has no gradient but rounding noise
    tie_embeddings=True,
    attention_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
    loss_chunk=2,
    remat="none",
)
MODELS = {"llama": PLAIN, "odd": ODD}
HALF = jaxtp.Precision(param="bfloat16")


def plan_of(model, **sizes):
    return plan_state(model, optimizers.build(SETTINGS, 10), make_mesh(**sizes))


def initial_state(model, mesh):
    """Weights well away from their initial values, at which some gradients are little more than rounding noise."""
    build = lambda: TrainState(model, optimizers.build(SETTINGS, 10), seed=0)
    return state_on_mesh(build, random_weights(build, scale=0.3), mesh)[1]


def run_of(**loop):
    return TrainConfig(optimizer=SETTINGS, train=LoopConfig(steps=10, **loop))


def batch_of(model, step):
    """Returns tokens of which the first row has few labels, so that a mean of micro-batches' means would differ."""
    tokens = np.random.default_rng(step).integers(0, model.vocab_size, (B, T + 1), np.int32)
    labels = tokens[:, 1:].copy()
    labels[0, :2] = -100
    return {"inputs": tokens[:, :-1], "labels": labels}


def train(model, sizes, **loop):
    """Returns losses, gradient norms and learning rates of three updates, and the state after them."""
    plan = plan_of(model, **sizes)
    step = make_train_step(run_of(**loop), plan)
    state = initial_state(model, plan.mesh)
    scalars = []
    with jax.set_mesh(plan.mesh):
        for i in range(STEPS):
            state, values = step(state, batch_of(model, i))
            scalars.append([fetch(values)[name] for name in ("loss", "grad_norm", "learning_rate")])
    return np.array(scalars), by_name(state, plan.mesh)


@cache
def on_one_device(name):
    return train(MODELS[name], {})


@pytest.mark.wide
def test_accumulation_equals_the_whole_batch():
    expected_scalars, expected_state = train(PLAIN, {}, z_loss=1e-3)
    for sizes in ({"fsdp": 2, "tp": 2}, {"dp": 2, "tp": 2}):
        scalars, state = train(PLAIN, sizes, accumulation=4, z_loss=1e-3)
        np.testing.assert_allclose(scalars, expected_scalars, rtol=1e-5)
        assert_close(state, expected_state)


@pytest.mark.wide
def test_micro_batches_of_bfloat16_parameters_add_up_in_the_reduction_dtype():
    """In bfloat16 a sum of 256 loses the last digits of each of its terms: 2% here."""
    low = dataclasses.replace(PLAIN, num_layers=1, precision=HALF)
    tokens = np.random.default_rng(0).integers(0, PLAIN.vocab_size, (512, 3), np.int32)
    batch = {"inputs": jnp.asarray(tokens[:, :-1]), "labels": jnp.asarray(tokens[:, 1:])}
    with jax.set_mesh(make_mesh(dp=2, tp=2)):
        graph, params = nnx.split(jaxtp.Decoder(low, rngs=nnx.Rngs(0)))

        @jax.jit
        def gradients():
            found = []
            for accumulation in (1, 256):
                model = nnx.merge(graph, params, copy=True)
                config = TrainConfig(model=low, train=LoopConfig(accumulation=accumulation))
                found.append(loss_and_grads(model, batch, config, jax.random.key(0))[2])
            return found

        whole, added = (by_name(grads, jax.sharding.get_mesh()) for grads in gradients())
    assert {array.dtype for array in added.values()} == {np.dtype("bfloat16")}
    assert_close(added, whole, tolerance=2**-7)  # of bfloat16, a unit in the last place


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.heavy), *sweep(["odd"])])
def test_the_step_is_the_textbook_update(name):
    """Against Optax on a plain dict of arrays, with the gradient of the model without a mesh."""
    model = MODELS[name]
    scalars, state = on_one_device(name)
    mesh = make_mesh()
    before = by_name(initial_state(model, mesh), mesh)
    params = {name: array for name, array in before.items() if name.startswith("model.")}
    rates = scalars[:, 2].astype(np.float32)
    is_bias = {name: name.rsplit(".", 2)[-2].startswith("bias") or name.endswith(("bias", "scale")) for name in params}
    decayed = {name: not bias for name, bias in is_bias.items()}
    adamw = optax.adamw(
        lambda count: jnp.asarray(rates)[count], b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decayed
    )
    update = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    graph, skeleton = nnx.split(nnx.eval_shape(lambda: jaxtp.Decoder(model, rngs=nnx.Rngs(0))))

    def loss(params, inputs, labels):
        flat = nnx.to_flat_state(skeleton)
        filled = [(path, each.replace(params[".".join(map(str, ("model", *path)))])) for path, each in flat]
        total, count = nnx.merge(graph, nnx.from_flat_state(filled)).loss(inputs, labels)
        return total / count

    @jax.jit
    def updated(params, moments, inputs, labels):
        value, grads = jax.value_and_grad(loss)(params, inputs, labels)
        changes, moments = update.update(grads, moments, params)
        return optax.apply_updates(params, changes), moments, [value, optax.tree.norm(grads)]

    moments = jax.jit(update.init)(params)
    for i in range(STEPS):
        params, moments, numbers = updated(params, moments, **batch_of(model, i))
        np.testing.assert_allclose(numbers, scalars[i, :2], rtol=1e-5)
    assert_close({name: state[name] for name in params}, params)


def test_each_device_holds_an_eighth_at_tp_8():
    plan = plan_of(ODD, tp=8)
    leaves = jax.tree.leaves(plan.create(seed=0))
    first = jax.devices()[0]
    held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards if shard.device == first)
    replicated = sum(leaf.nbytes for leaf in leaves if leaf.sharding.is_fully_replicated)
    total = sum(leaf.nbytes for leaf in leaves)
    assert held <= 1.02 * (total - replicated) / 8 + replicated
    assert held == bytes_per_device(plan)
    # What is replicated is what should be: norm scales, biases added after a reduction, counters.
    names = named_variables(plan.abstract)
    small = [v for name, v in names.items() if v.ndim == 0 or name.endswith(("scale", "out.bias", "down.bias"))]
    assert replicated == sum(v.size * v.dtype.itemsize for v in small)


@pytest.mark.wide
def test_bfloat16_compute_stays_near_float32():
    low, _ = train(dataclasses.replace(PLAIN, precision=jaxtp.Precision(compute="bfloat16")), {"tp": 4})
    high, _ = on_one_device("llama")
    np.testing.assert_allclose(low[:, 0], high[:, 0], rtol=5e-3)
    np.testing.assert_allclose(low[:, 1], high[:, 1], rtol=5e-2)


def test_the_numbers_of_a_step_are_fetched_as_one_array():
    scalars = jax.jit(Scalars.of)({"loss": jnp.float32(1 / 3), "skipped": jnp.int32(2)})
    assert len(jax.tree.leaves(scalars)) == 1
    assert fetch(scalars) == {"loss": np.float32(1 / 3), "skipped": 2}
    assert scalars.flag == 0
    flagged = jax.jit(Scalars.of)({"stop": jnp.float32(7)}, np.array([0.0, 3.0]))
    assert len(jax.tree.leaves(flagged)) == 1
    assert (fetch(flagged), flagged.flag) == ({"stop": 7}, 3)


@pytest.mark.wide
@pytest.mark.parametrize("max_skipped", [0, 1])
def test_a_step_that_is_not_finite_changes_nothing(max_skipped):
    """Not even the moments; afterwards a healthy step goes through only if so many may be skipped."""
    plan = plan_of(PLAIN, fsdp=2, tp=2)
    step = make_train_step(run_of(non_finite="skip", max_skipped=max_skipped), plan)
    batch = batch_of(PLAIN, 0)
    with jax.set_mesh(plan.mesh):
        state = plan.create(seed=0)
        scale = state["model"]["norm"]["scale"]
        healthy = np.asarray(scale[...])
        poison = jax.device_put(np.full_like(healthy, np.nan), scale[...].sharding)
        state["model"]["norm"]["scale"] = scale.replace(poison)
        before = by_name(state, plan.mesh)
        state, scalars = step(state, batch)
        after = by_name(state, plan.mesh)
        assert fetch(scalars)["skipped"] == after.pop("skipped") == 1
        for name, array in after.items():
            np.testing.assert_array_equal(array, before[name], err_msg=name)
        state["model"]["norm"]["scale"] = scale.replace(jax.device_put(healthy, scale[...].sharding))
        for _ in range(2):  # the first one's learning rate is zero
            state, scalars = step(state, batch)
        assert np.isfinite(fetch(scalars)["loss"])
        assert fetch(scalars)["skipped"] == 1 - max_skipped
        kernel = "model.blocks.mlp.down.kernel"
        assert (by_name(state, plan.mesh)[kernel] != before[kernel]).any() == bool(max_skipped)


@pytest.mark.wide
def test_a_loss_that_is_handed_in_replaces_the_decoders():
    """With the same loss, the steps are the same; norms of bfloat16 are summed in float32 in both."""
    low = dataclasses.replace(PLAIN, num_layers=1, num_heads=2, num_kv_heads=2, precision=HALF)
    plan = plan_state(low, optax.sgd(0.1), make_mesh(tp=2))
    batch = batch_of(low, 0)
    config = run_of(accumulation=2)
    handed_in = lambda model, batch, key: model.loss(batch["inputs"], batch["labels"])
    found = []
    for loss in (None, handed_in):
        step = make_train_step(config, plan, task=jaxtp.Task(loss=loss))
        with jax.set_mesh(plan.mesh):
            state, scalars = step(plan.create(0), batch)
        numbers = fetch(scalars)
        found.append([*numbers.values()])
        arrays = [array for name, array in by_name(state, plan.mesh).items() if name.startswith("model.")]
        norms = [np.linalg.norm(array.astype(np.float64)) for array in arrays]
        assert numbers["param_norm"] == pytest.approx(np.linalg.norm(norms), rel=1e-6)
    np.testing.assert_allclose(*found, rtol=1e-6)
    with jax.set_mesh(plan.mesh):
        total, count = jax.tree.leaves(make_eval_step(config, plan, handed_in)(plan.create(0), batch))
    assert count == B * T - 2
    assert total / count == pytest.approx(numbers["loss"], rel=1e-6)


@pytest.mark.wide
def test_a_step_in_plain_jax_has_the_same_losses():
    """The script ends with 1 if the losses of the first or of the last step differ."""
    script = Path(__file__).parent.parent.parent / "scripts/step_beside_plain.py"
    sizes = "--layers 1 --rows 4 --length 32 --mesh fsdp=2,tp=2 --blocks 2 --steps 2"
    done = subprocess.run([sys.executable, script, *sizes.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "time / plain" in done.stdout
