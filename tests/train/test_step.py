"""The training step: the textbook's update, accumulation, memory; `tests/tools/check` has its parity over meshes."""

import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from runs import TEXT, records
from support import assert_close, by_name, random_weights, relative_error, state_on_mesh, sweep

import jaxtp
from jaxtp.checkpoint.logical import named_variables
from jaxtp.config.schema import ConfigError
from jaxtp.mesh import make_mesh
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.state import TrainState, bytes_per_device, plan_state
from jaxtp.train.step import (
    Scalars,
    _norm,
    _norm_by_one_sum,
    _norms,
    fetch,
    loss_and_grads,
    make_eval_step,
    make_train_step,
)

B, T, STEPS = 8, 5, 3
SETTINGS = OptimizerConfig(learning_rate=1e-2, warmup_steps=1)
PLAIN = jaxtp.ModelConfig(vocab_size=32, d_model=16, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=4, d_ff=24)
PLAIN_BYTES = dataclasses.replace(PLAIN, vocab_size=256)
MODELS = {
    "llama": PLAIN,
    "odd": dataclasses.replace(
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
    ),
}


def initial_state(model, mesh):
    """Weights well away from their initial values, at which some gradients are little more than rounding noise."""
    build = lambda: TrainState(model, optimizers.build(SETTINGS, 10), seed=0)
    return state_on_mesh(build, random_weights(build, scale=0.3), mesh)[1]


def run_of(**loop):
    return TrainConfig(optimizer=SETTINGS, train=LoopConfig(steps=10, **loop))


def train(model, mesh, length=T, **loop):
    """Losses, gradient norms and the state after three updates, without padding."""
    mesh = make_mesh(*mesh)
    plan = plan_state(model, optimizers.build(SETTINGS, 10), mesh)
    step = make_train_step(run_of(**loop), plan)
    state, scalars = initial_state(model, mesh), []
    with jax.set_mesh(mesh):
        for i in range(STEPS):
            tokens = jax.random.randint(jax.random.key(i), (B, length + 1), 0, model.vocab_size)
            labels = tokens[:, 1:].at[0, :2].set(-100)
            state, values = step(state, {"inputs": tokens[:, :-1], "labels": labels})
            scalars.append([fetch(values)[name] for name in ("loss", "grad_norm", "learning_rate")])
    return np.array(scalars), by_name(state, mesh)


@pytest.mark.wide
@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 2), (2, 1, 2)], ids=str)
def test_accumulation_equals_the_whole_batch(mesh):
    """Masked labels lie in the first row alone, so a mean of the micro-batches' means would differ."""
    expected_scalars, expected_state = train(PLAIN, (1, 1, 1), z_loss=1e-3)
    scalars, state = train(PLAIN, mesh, accumulation=4, z_loss=1e-3)
    np.testing.assert_allclose(scalars, expected_scalars, rtol=1e-5)
    assert_close(state, expected_state)


@pytest.mark.wide
def test_micro_batches_of_bfloat16_parameters_add_up_in_the_reduction_dtype():
    """In bfloat16 a sum of 256 loses the last digits of each of its terms: 2% here."""
    low = dataclasses.replace(PLAIN, num_layers=1, precision=jaxtp.Precision(param="bfloat16"))
    tokens = jax.random.randint(jax.random.key(0), (512, 3), 0, PLAIN.vocab_size)
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    with jax.set_mesh(make_mesh(dp=2, tp=2)):
        graph, params = nnx.split(jaxtp.Decoder(low, rngs=nnx.Rngs(0)))

        @partial(jax.jit, static_argnums=0)
        def gradients(accumulation):
            model = nnx.merge(graph, params, copy=True)
            config = TrainConfig(model=low, train=LoopConfig(accumulation=accumulation))
            return loss_and_grads(model, batch, config, jax.random.key(0))[2]

        whole, added = (by_name(gradients(accumulation), jax.sharding.get_mesh()) for accumulation in (1, 256))
    assert {array.dtype for array in added.values()} == {np.dtype("bfloat16")}
    assert_close(added, whole, tolerance=2**-7)  # of bfloat16, a unit in the last place


@pytest.fixture(scope="module", params=sweep(list(MODELS), "llama"))
def one_device(request):
    return MODELS[request.param], train(MODELS[request.param], (1, 1, 1))


def test_the_step_is_the_textbook_update(one_device):
    """Against Optax on a plain dict of arrays, with the gradient of the model without a mesh."""
    model, (scalars, state) = one_device
    mesh = make_mesh()
    plan_state(model, optimizers.build(SETTINGS, 10), mesh)
    before = by_name(initial_state(model, mesh), mesh)
    params = {name: a for name, a in before.items() if name.startswith("model.")}
    decay = {
        name: not name.rsplit(".", 2)[-2].startswith("bias") and not name.endswith(("bias", "scale")) for name in params
    }
    update = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            lambda count: jnp.asarray(scalars)[count, 2], b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=decay
        ),
    )
    graph, skeleton = nnx.split(nnx.eval_shape(lambda: jaxtp.Decoder(model, rngs=nnx.Rngs(0))))

    def loss(params, inputs, labels):
        named = {name.removeprefix("model."): a for name, a in params.items()}
        flat = [(path, v.replace(named[".".join(map(str, path))])) for path, v in nnx.to_flat_state(skeleton)]
        total, count = nnx.merge(graph, nnx.from_flat_state(flat)).loss(inputs, labels)
        return total / count

    @jax.jit
    def updated(grads, moments, params):
        changes, moments = update.update(grads, moments, params)
        return optax.apply_updates(params, changes), moments

    value_and_grad = jax.jit(jax.value_and_grad(loss))
    moments, norm = jax.jit(update.init)(params), jax.jit(optax.tree.norm)
    for i in range(STEPS):
        tokens = jax.random.randint(jax.random.key(i), (B, T + 1), 0, model.vocab_size)
        labels = tokens[:, 1:].at[0, :2].set(-100)
        value, grads = value_and_grad(params, tokens[:, :-1], labels)
        np.testing.assert_allclose([value, norm(grads)], scalars[i, :2], rtol=1e-5)
        params, moments = updated(grads, moments, params)
    assert_close({name: state[name] for name in params}, params)


@pytest.mark.parametrize("model", sweep(list(MODELS), "odd"))
def test_each_device_holds_an_eighth_at_tp_8(model):
    plan = plan_state(MODELS[model], optimizers.build(SETTINGS, 10), make_mesh(tp=8))
    leaves = jax.tree.leaves(plan.create(seed=0))
    first = jax.devices()[0]
    held = sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device == first)
    replicated = sum(leaf.nbytes for leaf in leaves if leaf.sharding.is_fully_replicated)
    total = sum(leaf.nbytes for leaf in leaves)
    assert held <= 1.02 * (total - replicated) / 8 + replicated
    assert held == bytes_per_device(plan)
    # What is replicated is what should be: norm scales, biases added after a reduction, counters.
    names = named_variables(plan.abstract)
    small = [v for name, v in names.items() if v.ndim == 0 or name.endswith(("scale", "out.bias", "down.bias"))]
    assert replicated == sum(v.size * v.dtype.itemsize for v in small)


@pytest.mark.wide
def test_evaluation_is_the_same_on_every_mesh():
    tokens = jax.random.randint(jax.random.key(9), (B, T + 1), 0, PLAIN.vocab_size)
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:].at[3].set(-100)}
    sums = []
    for mesh in ((1, 1, 1), (2, 2, 2)):
        plan = plan_state(PLAIN, optimizers.build(SETTINGS, 10), make_mesh(*mesh))
        with jax.set_mesh(plan.mesh):
            terms = make_eval_step(run_of(), plan)(plan.create(seed=0), batch)
            sums.append([float(terms.loss), float(terms.count)])
    assert relative_error(sums[1], sums[0]) < 1e-6
    assert sums[0][1] == (B - 1) * T


@pytest.mark.wide
def test_bfloat16_compute_stays_near_float32():
    low, _ = train(dataclasses.replace(PLAIN, precision=jaxtp.Precision(compute="bfloat16")), (1, 2, 4))
    high, _ = train(PLAIN, (1, 1, 1))
    np.testing.assert_allclose(low[:, 0], high[:, 0], rtol=5e-3)
    np.testing.assert_allclose(low[:, 1], high[:, 1], rtol=5e-2)


@pytest.mark.parametrize("norm", [_norm, _norm_by_one_sum])
def test_norms_of_bfloat16_are_summed_in_float32(norm):
    state = nnx.State({name: nnx.Param(jnp.ones(size, jnp.bfloat16)) for name, size in {"a": 256, "b": 1}.items()})
    assert float(_norms("norm", state, (), norm)["norm"]) == pytest.approx(257**0.5)  # 16 in bfloat16


def test_the_numbers_of_a_step_are_fetched_as_one_array():
    scalars = jax.jit(Scalars.of)({"loss": jnp.float32(1 / 3), "skipped": jnp.int32(2)})
    assert len(jax.tree.leaves(scalars)) == 1
    assert fetch(scalars) == {"loss": np.float32(1 / 3), "skipped": 2}
    assert scalars.flag == 0
    flagged = jax.jit(Scalars.of)({"stop": jnp.float32(7)}, jnp.array([0.0, 3.0]))
    assert len(jax.tree.leaves(flagged)) == 1
    assert (fetch(flagged), flagged.flag) == ({"stop": 7}, 3)


@pytest.mark.wide
@pytest.mark.parametrize("max_skipped", [0, 1])
def test_a_step_that_is_not_finite_changes_nothing(max_skipped):
    """Not even the moments; afterwards a healthy step goes through only if so many may be skipped."""
    mesh = make_mesh(fsdp=2, tp=2)
    plan = plan_state(PLAIN, optimizers.build(SETTINGS, 10), mesh)
    step = make_train_step(run_of(non_finite="skip", max_skipped=max_skipped), plan)
    tokens = jax.random.randint(jax.random.key(0), (B, T + 1), 0, PLAIN.vocab_size)
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}

    def with_scale(state, value):
        scale = state["model"]["norm"]["scale"]
        state["model"]["norm"]["scale"] = scale.replace(jax.device_put(scale[...] * 0 + value, scale[...].sharding))
        return state

    with jax.set_mesh(mesh):
        poisoned = with_scale(plan.create(seed=0), np.nan)
        before = by_name(poisoned, mesh)
        state, scalars = step(poisoned, batch)
        after = by_name(state, mesh)
        assert (fetch(scalars)["skipped"], int(after.pop("skipped"))) == (1, 1)
        del before["skipped"]
        for name, array in before.items():
            np.testing.assert_array_equal(after[name], array, err_msg=name)
        state["model"]["norm"]["scale"] = plan.create(seed=0)["model"]["norm"]["scale"]
        kernel = np.asarray(state["model"]["blocks"]["mlp"]["down"]["kernel"][...])
        for _ in range(2):  # the first one's learning rate is zero
            state, scalars = step(state, batch)
        assert np.isfinite(fetch(scalars)["loss"])
        assert fetch(scalars)["skipped"] == 1 - max_skipped
        changed = not np.array_equal(np.asarray(state["model"]["blocks"]["mlp"]["down"]["kernel"][...]), kernel)
        assert changed == bool(max_skipped)


@pytest.mark.parametrize("accumulation", sweep([1, 2], 1))
def test_a_loss_that_is_handed_in_replaces_the_decoders(accumulation):
    """With the same loss, the steps are the same."""
    mesh = make_mesh(1, 2, 2)
    plan = plan_state(PLAIN, optimizers.build(SETTINGS, 10), mesh)
    tokens = jax.random.randint(jax.random.key(0), (B, T + 1), 0, PLAIN.vocab_size)
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    loss = lambda model, batch, key: model.loss(batch["inputs"], batch["labels"])
    found = []
    for handed_in in (None, loss):
        config = run_of(accumulation=accumulation)
        step = make_train_step(config, plan, task=jaxtp.Task(loss=handed_in))
        evaluate = make_eval_step(config, plan, handed_in)
        with jax.set_mesh(mesh):
            state = initial_state(PLAIN, mesh)
            evaluated = [float(each) for each in jax.tree.leaves(evaluate(state, batch))]
            found.append([*evaluated, *fetch(step(state, batch)[1]).values()])
    np.testing.assert_allclose(*found, rtol=1e-6)


class Bigram(nnx.Module):
    """A model of another class: scores of the next byte by the byte before."""

    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (256, 256)), out_sharding=(None, None))


def loss_of_bigram(model, batch, key):
    counted = batch["labels"] >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model.table[...][batch["inputs"]], jnp.maximum(batch["labels"], 0)
    )
    return jnp.sum(jnp.where(counted, losses, 0.0)), jnp.sum(counted).astype(jnp.float32)


TASK = jaxtp.Task(model=Bigram, loss=loss_of_bigram)


def settings_of_bigram(tmp_path, **others):
    (tmp_path / "text.txt").write_text(TEXT)
    data = {"data.path": tmp_path / "text.txt", "data.sequence_length": 32, "data.global_batch_size": 8}
    optimizer = {"optimizer.learning_rate": 0.1, "optimizer.warmup_steps": 0}
    return {"mesh": "fsdp=2", "run.dir": tmp_path / "run", "train.steps": 30, **data, **optimizer, **others}


def test_a_run_takes_another_model_and_loss(tmp_path, capsys):
    with jaxtp.Trainer(TASK, settings=settings_of_bigram(tmp_path)) as trainer:
        assert trainer.run_to_end()
    out = capsys.readouterr().out
    # `jaxtp evaluate`, `generate` and `convert export` are for decoders.
    assert f"saved in {tmp_path / 'run/checkpoints/30'}; next, in Python:" in out
    load = out.splitlines()[-1].strip()
    assert load == f"model = jaxtp.load_run('{tmp_path / 'run'}', build='{__name__}:Bigram')"
    assert "65,536 parameters" in out
    assert "layers" not in out
    assert "attention" not in out
    losses = records(tmp_path / "run", "eval_loss")
    assert losses[30] < losses[0] - 1
    with jaxtp.Trainer(TASK, settings=settings_of_bigram(tmp_path)) as trainer:
        assert trainer.step == 30


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"data.global_batch_size": 7}, r"data\.global_batch_size=7 is not divisible"),
        ({"data.mixture": {"other": 1.0}}, r"data\.mixture exclude each other"),
        ({"model.d_model": 64}, r"model\.d_model=64: the model is your own"),
        ({"train.z_loss": 1e-4}, r"train\.z_loss=0\.0001: the loss is your own"),
        ({"model.build": "mine.py:build"}, r"model\.build is set, and the task has a model too"),
    ],
)
def test_settings_of_another_model_are_checked(tmp_path, setting, message):
    trainer = jaxtp.Trainer(TASK, settings=settings_of_bigram(tmp_path, **setting))
    with pytest.raises(ConfigError, match=message), trainer:
        pass


@pytest.mark.wide
def test_a_step_in_plain_jax_has_the_same_losses():
    """The script ends with 1 if the losses of the first or of the last step differ."""
    script = Path(__file__).parent.parent.parent / "scripts/step_beside_plain.py"
    sizes = "--layers 1 --rows 4 --length 32 --mesh fsdp=2,tp=2 --blocks 2 --steps 2"
    done = subprocess.run([sys.executable, script, *sizes.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "time / plain" in done.stdout
