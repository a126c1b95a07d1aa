"""Training steps that other systems got wrong: losses, norms, updates, schedules, evaluations and
what is reported.

Two programs serve most of it: a step on one device, and one that divides the batch, the heads, the
experts and a vocabulary that is odd, and accumulates. One kv head is shared by the devices along
tp.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.random import default_rng
from numpy.testing import assert_array_equal
from support import assert_close, by_name, decoder, mesh_by_size, random_weights, state_on_mesh
from tables import read_table
from variants import small_model

from jaxtp.checkpoint.logical import named_variables
from jaxtp.collectives import ATTENDED
from jaxtp.data.documents import InMemory
from jaxtp.data.mixture import validation_samples
from jaxtp.data.rows import Concatenated
from jaxtp.layers import remat
from jaxtp.mesh import make_mesh
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.evaluation import evaluation_metrics
from jaxtp.train.loss import NextToken, Terms
from jaxtp.train.parts import step_settings
from jaxtp.train.performance import flops_per_token
from jaxtp.train.state import TrainState, decoder_maker, parameters, plan_state
from jaxtp.train.step import fetch, make_train_step

TABLES = read_table(__file__)

B = 4
T = 8
V = 19
STEPS = 10
MODEL = small_model(
    vocab_size=V, num_kv_heads=1, d_ff=8, rope_theta=2.0, num_experts=4, experts_per_token=2
)
SETTINGS = OptimizerConfig(learning_rate=1e-2, warmup_steps=2)
ONE = (1, 1, 1, 1)
MANY = (2, 1, 2, 2)
"""Devices along dp, fsdp and tp, and micro-batches."""
WRONG = 1e-2


def build():
    return TrainState(decoder_maker(MODEL), optimizers.build(SETTINGS, STEPS), seed=0)


@cache
def weights():
    """Away from what they are at first, for a state on any mesh."""
    found = random_weights(build, scale=0.3)
    # a step takes the state's arrays
    return {name: np.asarray(array) for name, array in found.items()}


class Run:
    """A training step on a mesh."""

    def __init__(self, *sizes):
        *devices, accumulation = sizes
        self.mesh = mesh_by_size(*devices)
        self.plan = plan_state(MODEL, optimizers.build(SETTINGS, STEPS), self.mesh)
        loop = LoopConfig(steps=STEPS, accumulation=accumulation, non_finite="skip")
        settings = step_settings(TrainConfig(optimizer=SETTINGS, train=loop))
        self._step = make_train_step(settings, self.plan, with_grads=True)

    def state(self):
        return state_on_mesh(build, weights(), self.mesh)[1]

    def __call__(self, state, batch):
        """The state after a step, its numbers and the gradients."""
        with jax.set_mesh(self.mesh):
            state, output = self._step(state, batch)
        return state, fetch(output), output.grads


run = cache(Run)


def batch():
    """Rows of which the first has one label, and the others seven or eight."""
    tokens = default_rng(0).integers(0, V, (B, T + 1)).astype(np.int32)
    labels = tokens[:, 1:].copy()
    labels[0, 1:] = labels[2, 0] = -100
    return {"inputs": tokens[:, :-1], "labels": labels}


@cache
def gradients(sizes, row=None):
    """Loss, norm and gradients of the first step, of all labels or of those of one row; and how
    many there are.
    """
    given = batch()
    if row is not None:
        given["labels"][np.arange(B) != row] = -100
    program = run(*sizes)
    _, scalars, grads = program(program.state(), given)
    return SimpleNamespace(
        count=np.sum(given["labels"] >= 0),
        grads=grads,
        named=by_name(grads, program.mesh),
        **scalars,
    )


@pytest.mark.wide
def test_transformers_34191_micro_batches_weigh_as_many_tokens_as_they_have():
    """https://github.com/huggingface/transformers/pull/34191: with gradient accumulation the loss
    was the mean of the micro-batches' means, so that a token in a short row weighed more. Here sums
    are added up and divided once.
    """
    whole = gradients(ONE)
    accumulated = gradients(MANY)
    rows = [gradients(ONE, row) for row in range(B)]
    assert accumulated.loss == pytest.approx(whole.loss, rel=1e-5)
    assert_close(accumulated.named, whole.named)
    assert sum(row.count * row.loss for row in rows) / whole.count == pytest.approx(
        whole.loss, rel=1e-5
    )
    assert np.mean([row.loss for row in rows]) != pytest.approx(whole.loss, rel=WRONG), (
        "the mean of the means"
    )


def local_squares(grads, mesh):
    """The sum of squares of the parts that each device along tp has of the gradients."""
    devices = mesh.devices.reshape(2, 2)[0]
    parts = Counter()
    for array in jax.tree.leaves(grads):
        for shard in array.addressable_shards:
            parts[shard.device] += np.sum(np.square(np.float64(shard.data)))
    return np.array([parts[device] for device in devices])


@pytest.mark.wide
def test_transformer_engine_715_what_devices_hold_copies_of_counts_once_in_the_norm():
    """https://github.com/ROCm/TransformerEngine/pull/715: weights that are equal along tp were
    counted once for each device in the gradient's norm. Here the norm is that of one device;
    clipping divides by it.
    """
    whole = gradients(ONE)
    divided = gradients(MANY)
    plain = np.sqrt(sum(np.sum(np.square(np.float64(array))) for array in whole.named.values()))
    assert whole.grad_norm == pytest.approx(plain, rel=1e-5)
    assert divided.grad_norm == pytest.approx(plain, rel=1e-5)
    counted_twice = np.sqrt(local_squares(divided.grads, run(*MANY).mesh).sum())
    assert counted_twice > plain * (1 + WRONG)


@pytest.mark.wide
def test_deepspeed_8478_each_expert_counts_once_in_the_norm():
    """https://github.com/deepspeedai/DeepSpeed/pull/8478: devices that hold different experts
    averaged the norms of their own parts. Here the norm is of all experts, wherever they are.
    """
    divided = gradients(MANY)
    experts = {
        name: array for name, array in divided.named.items() if name.startswith("blocks.mlp.")
    }
    assert {array.shape[1] for name, array in experts.items() if "router" not in name} == {
        MODEL.num_experts
    }
    assert divided.grad_norm == pytest.approx(gradients(ONE).grad_norm, rel=1e-5)
    averaged = np.sqrt(local_squares(divided.grads, run(*MANY).mesh)).mean()
    assert averaged < divided.grad_norm * (1 - WRONG)


@pytest.mark.wide
def test_torchtitan_2574_fewer_kv_heads_than_devices():
    """https://github.com/pytorch/torchtitan/issues/2574: a model whose kv heads tp does not divide
    stopped in a reshape without a word of why. Here devices share the head, and its gradient is the
    sum of theirs.
    """
    whole, divided = (gradients(sizes).named for sizes in (ONE, MANY))
    for name in ("blocks.attention.qkv.kernels.1", "blocks.attention.qkv.kernels.2"):
        assert whole[name].shape == (1, MODEL.d_model, MODEL.head_dim)
        assert_close({name: divided[name]}, {name: whole[name]})


@pytest.mark.wide
def test_accelerate_2926_the_schedule_goes_one_step_with_each_update():
    """https://github.com/huggingface/accelerate/issues/2926: the schedule went on by one step for
    each process. Here the rate is that of the update, however many devices and micro-batches take
    part in it.
    """
    schedule = optimizers.learning_rate(SETTINGS, STEPS)
    for sizes in (ONE, MANY):
        program = run(*sizes)
        state = program.state()
        rates = []
        for _ in range(4):
            state, scalars, _ = program(state, batch())
            rates.append(scalars["learning_rate"])
        assert rates == pytest.approx([float(schedule(update)) for update in range(4)], rel=1e-6)
    assert float(schedule(3)) != pytest.approx(float(schedule(2 * 3)), rel=WRONG), (
        "as two processes had it"
    )


@pytest.mark.wide
def test_habitat_lab_2226_a_gradient_that_is_not_finite_changes_nothing():
    """https://github.com/facebookresearch/habitat-lab/issues/2226: clipping passed a NaN on to the
    optimizer, which wrote it into every weight. Here such a step leaves weights and moments as they
    are, and is counted.
    """
    program = run(*MANY)
    state = program.state()
    head = state["model"]["head"]["kernel"]
    state["model"]["head"]["kernel"] = head.replace(head[...].at[3, 0].set(jnp.nan))
    before = by_name(state, program.mesh)
    after, scalars, grads = program(state, batch())
    assert scalars["skipped"] == 1
    assert not any(np.isfinite(array).all() for array in by_name(grads, program.mesh).values()), (
        "it would reach all"
    )
    found = by_name(after, program.mesh)
    for name in before.keys() - {"skipped"}:
        assert_array_equal(found[name], before[name], err_msg=name)


@pytest.mark.wide
def test_fast_llm_542_norms_and_biases_do_not_decay(monkeypatch):
    """https://github.com/ServiceNow/Fast-LLM/issues/542: after a change of how they are made, norms
    and biases were decayed as matrices are. Here what decays is told by name, in whichever stack a
    layer is.
    """
    pattern = ({}, TABLES["experts"], TABLES["states"])
    model = replace(MODEL, **TABLES["biased"], norm="layer", pattern=pattern, num_layers=3)
    plan = plan_state(model, optimizers.build(SETTINGS, STEPS), make_mesh())
    names = parameters(plan)
    vectors = {
        name for name in names if any(word in name for word in ("norm", "bias", "conv", "decay"))
    }
    assert len(vectors) > 30
    assert not optimizers.is_matrix("blocks.mlp.experts.router_scale")
    assert decaying(names) == names.keys() - vectors
    monkeypatch.setattr(optimizers, "is_matrix", lambda path: True)
    assert decaying(names) == names.keys(), "as where no rule says which"


def decaying(names):
    """The parameters that an update without a gradient changes."""
    chain = optimizers.build(replace(SETTINGS, warmup_steps=0), STEPS)
    ones = dict.fromkeys(names, np.ones(1, np.float32))
    zeros = dict.fromkeys(names, np.zeros(1, np.float32))
    updates = jax.jit(lambda: chain.update(zeros, chain.init(ones), ones)[0])()
    return {name for name, update in updates.items() if np.any(update)}


def test_transformers_41898_an_evaluation_is_the_mean_over_tokens():
    """https://github.com/huggingface/transformers/issues/41898: the loss was the mean of the
    batches', though the last one was smaller. Here sums are divided by the number of labels, and
    what fills the last batch has none.
    """
    tokens = np.arange(5 * T, dtype=np.uint16)
    rows = Concatenated(InMemory(tokens, np.array([len(tokens)]), "test"), T, len(tokens))
    validation = validation_samples([rows], [1.0], batches=9, batch_size=2)
    assert len(validation) == 6
    results = []
    for labels in np.split(np.stack([validation[i]["labels"] for i in range(6)]), 3):
        counted = labels[labels >= 0]
        results.append(Terms(np.sum(counted**2.0), counted.size))
    expected = np.mean(np.arange(1, len(tokens)) ** 2.0)
    assert evaluation_metrics(results, NextToken())["eval_loss"] == pytest.approx(expected)
    assert np.mean([terms.loss / terms.weight for terms in results]) != pytest.approx(
        expected, rel=WRONG
    )


def utilised(length, **changes):
    """Operations of a token, and those of the products of its weights alone."""
    model = replace(MODEL, num_experts=0, **changes)
    plan = plan_state(model, optimizers.build(SETTINGS, STEPS), make_mesh())
    named = named_variables(plan.abstract["model"])
    matrices = sum(v.size for name, v in named.items() if not name.startswith("embedding"))
    return flops_per_token(model, sum(v.size for v in named.values()), length), 6.0 * matrices


def test_tt_metal_50114_a_lookup_is_no_product():
    """https://github.com/tenstorrent/tt-metal/pull/50114: the embedding counted in the utilisation
    as the head does, though nothing is multiplied. Here it counts where it is the head too.
    """
    found, matrices = utilised(0)
    assert found == pytest.approx(matrices)
    tied, without_head = utilised(0, tie_embeddings=True)
    assert tied == pytest.approx(without_head + 6 * V * MODEL.d_model)


def test_maxtext_1972_half_of_causal_attention_counts():
    """https://github.com/AI-Hypercomputer/maxtext/issues/1972: products with keys that a causal
    query does not see were counted as useful work. Here half of them count.
    """
    length = 256
    found, matrices = utilised(length)
    heads = MODEL.num_heads * MODEL.head_dim
    assert found - matrices == pytest.approx(12 * length * heads / 2, rel=0.01)


def test_torchtitan_4300_keys_outside_of_a_window_do_not_count():
    """https://github.com/pytorch/torchtitan/pull/4300: attention in a window was counted as that to
    all keys, and the utilisation came to more than 100%. Here a query's window counts.
    """
    length = 256
    window = 16
    whole, matrices = utilised(length)
    found, _ = utilised(length, sliding_window=window)
    assert found - matrices < (whole - matrices) / 4
    assert found - matrices == pytest.approx(
        12 * window * MODEL.num_heads * MODEL.head_dim, rel=0.05
    )


def kept_of_blocks():
    """The activations that autodiff keeps of two blocks of a whole model under `remat: full`, as
    shapes.
    """
    model = replace(MODEL, num_layers=2, num_experts=0, attention="blockwise", remat="full")
    graph, abstract = nnx.split(nnx.eval_shape(decoder(model)))
    ids = jnp.zeros((3, 11), jnp.int32)

    def backward(params):
        return jax.vjp(lambda params: nnx.merge(graph, params).loss(ids, ids)[0], params)[1]

    arrays = jax.tree.leaves(jax.eval_shape(backward, abstract))
    return [array.shape for array in arrays if array.shape[:2] == (2, 3)]


def test_automodel_3677_full_remat_covers_attention(monkeypatch):
    """https://github.com/NVIDIA-NeMo/Automodel/issues/3677: activation checkpointing left attention
    out. The loss was the same, and only a measurement of memory, 16% more, showed it. Here `full`
    keeps the input of each block, and nothing of its attention.
    """
    assert kept_of_blocks() == [(2, 3, 11, MODEL.d_model)]
    monkeypatch.setitem(remat._SAVED_NAMES, "full", (ATTENDED,))
    assert len(kept_of_blocks()) > 1, "with what attention keeps"
