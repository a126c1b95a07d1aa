"""Memory and FLOPs of a step with a user's model and loss, from its trace."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from runs import records

from jaxtp import Trainer, explain
from jaxtp.checkpoint.__main__ import main as inspect_checkpoint
from jaxtp.config.schema import ConfigError
from jaxtp.mesh import abstract_mesh, mesh_of, mesh_shape
from jaxtp.models.config import OriginConfig
from jaxtp.plans import Colwise, Rowwise
from jaxtp.train import evaluation, log, loop, memory_check, performance, setup
from jaxtp.train.config import LoopConfig, TrainConfig
from jaxtp.train.parts import load_parts
from jaxtp.train.setup import Plan
from jaxtp.train.state import bytes_per_device
from jaxtp.train.task import Task
from jaxtp.train.user_step import row_work, trace_step

ROWS = 16
WIDTH = 8
HIDDEN = 32
BATCH = {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)}


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, remat: bool = False):
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)
        self.remat = remat

    def __call__(self, x):
        def body(model, x):
            return model.down(jnp.tanh(model.up(x)))

        return nnx.remat(body)(self, x) if self.remat else body(self, x)


def loss(model, batch, key):
    return jnp.sum(model(batch["x"]) ** 2), jnp.asarray(len(batch["x"]), jnp.float32)


TASK = Task(
    model=Mlp,
    loss=loss,
    optimizer=optax.adafactor(1e-3),
    plan={"up": Colwise(), "down": Rowwise()},
)
REMAT = replace(TASK, model=lambda rngs: Mlp(rngs, remat=True))
CONFIG = TrainConfig(origin=OriginConfig(build="mine:Mlp"))


def planned(task, accumulation=1):
    config = replace(CONFIG, train=LoopConfig(accumulation=accumulation))
    config, parts = load_parts(config, replace(task, batches=batches))
    return Plan(config=config, parts=parts, shapes=BATCH)


def traced(task, sizes, accumulation=1):
    plan = planned(task, accumulation)
    blueprint, _ = plan.state_on(abstract_mesh(sizes))
    return blueprint, *trace_step(plan.step_settings, blueprint, BATCH)


def work_of(task):
    """Returns the arguments of `row_work`."""
    plan = planned(task)
    return plan.step_settings, plan.parts.model.maker(plan.config.model), BATCH


def test_the_account_on_an_abstract_mesh_is_that_of_devices():
    sizes = mesh_shape(fsdp=2, tp=2)
    blueprint, memory, work = traced(TASK, sizes)
    plan = planned(TASK)
    on_devices, _ = plan.state_on(mesh_of(sizes))
    assert memory.state == bytes_per_device(blueprint) == bytes_per_device(on_devices)
    assert trace_step(plan.step_settings, on_devices, BATCH) == (memory, work)
    assert memory.gradients == memory.parameters == 4 * 2 * WIDTH * HIDDEN / 4
    assert memory.batch == 4 * ROWS * WIDTH / 2
    call = lambda model, batch: loss(model, batch, None)[0]
    whole = explain(lambda: Mlp(nnx.Rngs(0)), BATCH, plan=TASK.plan, mesh=sizes, call=call)
    assert (work.saved, sum(product.flops for product in work.products)) == (
        whole.saved,
        whole.flops,
    )


def test_micro_batches_share_activations_and_add_a_sum_of_gradients():
    sizes = mesh_shape(fsdp=2)
    _, once, work = traced(TASK, sizes)
    _, twice, half = traced(TASK, sizes, accumulation=2)
    assert twice.gradients == 2 * once.gradients
    assert twice.activations < once.activations
    assert 2 * sum(p.flops for p in half.products) == sum(p.flops for p in work.products)


@pytest.mark.wide
def test_recomputation_costs_work_but_is_no_use():
    # The first layer has no gradient of its input.
    expected = 2 * WIDTH * HIDDEN * (3 + 2)
    for task in (TASK, REMAT):
        settings, make_model, _ = work_of(task)
        flops = performance.row_flops(settings, None, make_model, BATCH)
        assert row_work(*work_of(task))[0] == flops == expected
    _, memory, work = traced(TASK, mesh_shape())
    _, leaner, again = traced(REMAT, mesh_shape())
    assert (
        sum(p.flops for p in again.products)
        == sum(p.flops for p in work.products) + 2 * ROWS * WIDTH * HIDDEN
    )
    assert [p.flops for p in again.products if p.recomputed] == [2 * ROWS * WIDTH * HIDDEN]
    assert leaner.activations < memory.activations


def batches(step):
    return {"x": np.random.default_rng(step).normal(size=(ROWS, WIDTH)).astype(np.float32)}


SETTINGS = {"mesh": "fsdp=2,tp=2", "train.steps": 1}
WITH_BATCHES = replace(TASK, batches=batches)


def test_a_step_that_exceeds_a_device_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    _, memory, _ = traced(TASK, mesh_shape(fsdp=2, tp=2))
    monkeypatch.setattr(memory_check, "bytes_limit", lambda device: memory.total - 1)
    with pytest.raises(
        ConfigError, match=r"a step takes .* on each device.*--train.allow-oversize"
    ):
        Trainer(**vars(WITH_BATCHES), folder=run, settings=SETTINGS).__enter__()
    assert not run.exists()
    monkeypatch.setattr(memory_check, "bytes_limit", lambda device: memory.total)
    with Trainer(**vars(WITH_BATCHES), folder=run, settings=SETTINGS) as trainer:
        assert trainer.run_to_end()
    assert " KB of state, exact; the rest modelled)" in capsys.readouterr().out
    assert inspect_checkpoint(["inspect", str(run)]) == 0
    shown = capsys.readouterr().out
    assert '"columns": {"x": "float32[8]"}' in shown
    assert "d_model" not in shown, "a setting of the decoder"


def test_a_run_logs_mfu_where_the_peak_is_known(tmp_path, monkeypatch):
    """A CPU has none; this one pretends."""
    for module in (setup, loop, evaluation, log):
        monkeypatch.setattr(module, "platform_of", lambda device: "pretended")
    monkeypatch.setattr(performance, "peak_flops", lambda device: 1e9)
    settings = SETTINGS | {"launch.self_check": False}
    with Trainer(**vars(WITH_BATCHES), folder=tmp_path, settings=settings) as trainer:
        assert trainer.run_to_end()
    flops = row_work(*work_of(TASK))[0]
    expected = {
        step: flops * rate / 4 / 1e9 for step, rate in records(tmp_path, "rows_per_second").items()
    }
    assert records(tmp_path, "mfu") == pytest.approx(expected)


def test_a_loss_that_needs_the_mesh_of_the_run_has_no_mfu():
    def of_mesh(model, batch, key):
        assert jax.sharding.get_abstract_mesh().size == 8
        return loss(model, batch, key)

    task = replace(TASK, loss=of_mesh)
    settings, make_model, _ = work_of(task)
    assert np.isnan(performance.row_flops(settings, None, make_model, BATCH))
