"""Mixtures of experts that other systems got wrong, planted here: what checks a mixture notices
each.

Each test first asks the same of the code as it is.
"""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_reference import FOLDER
from mixtures import (
    B,
    D,
    E,
    F,
    T,
    balance_program,
    build,
    expected,
    expected_balance,
    program,
    work,
)
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from planted import errors_of, gathered_without_sum, plant_weights, with_gradient
from support import decoder, random_weights, relative_error
from tables import read_json

from jaxtp import collectives
from jaxtp.analysis.step_costs import step_costs
from jaxtp.collectives import MissingReductionError, axis_size
from jaxtp.hf.config_json import model_config
from jaxtp.layers import balance
from jaxtp.layers.experts import ExpertsConfig, dispatch, layer, router
from jaxtp.layers.kernels.grouped import grouped_matmul
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.parameter import Precision
from jaxtp.mesh import DP, SEQUENCE, TP, mesh_shape
from jaxtp.models.config import ModelConfig

pytestmark = pytest.mark.wide

CONFIG = ExpertsConfig(num_experts=E, d_ff=F)
ONE = (1, 1, 1, 1)
OVER_TP = (1, 2, 1, 2)
INSIDE = (2, 1, 1, 4)
WRONG = 1e-3
RIGHT = 1e-5
KERNELS = ("gate", "up", "down")


@cache
def weights(config=CONFIG):
    return random_weights(lambda: build(config), scale=0.3)


@cache
def rows():
    """Inputs, segments and labels; two rows end in padding, a third is nothing else."""
    random = default_rng(1)
    segments = np.ones((B, T), np.int32)
    for row, begin in ((2, 5), (4, 1), (7, 0)):
        segments[row, begin:] = 0
    labels = np.where((segments == 0) | (random.random((B, T)) < 0.3), -100, 1)
    return random.standard_normal((B, T, D)).astype(np.float32), segments, labels


@cache
def right(config=CONFIG):
    x, segments, _ = rows()
    return expected(weights(config), x, segments != 0, config)


def off(mesh, given=None, config=CONFIG, layer=program.__wrapped__):
    """How far each part of a layer on a mesh is from a loop over experts; a NaN is infinitely
    far.
    """
    x, segments, _ = rows()
    return errors(
        layer(config, mesh, None, True)(given or weights(config), x, segments), right(config)
    )


def balance_off(mesh):
    """The same of both losses of the balance, and of their gradients."""
    x, segments, labels = rows()
    found, _ = balance_program(CONFIG, mesh)(weights(), x[None], segments, labels)
    return errors(found, expected_balance(weights(), x[None], segments != 0, labels, CONFIG))


def errors(found, expected):
    # A device counts the rows of tokens that it got from others, so that only the sum of these
    # counts says something.
    sums = [
        {name: np.sum(each[name]) for name in each if name == "computed"}
        for each in (found, expected)
    ]
    return errors_of(found | sums[0], expected | sums[1])


def without_a_bug(mesh, config=CONFIG):
    """Whether a layer is right as it is; to be asked before a bug is planted."""
    return max(off(mesh, config=config, layer=program).values()) < RIGHT


@cache
def balanced_without_a_bug(mesh):
    return max(balance_off(mesh).values()) < RIGHT


def test_megatron_lm_5047_the_auxiliary_loss_does_not_depend_on_tp(monkeypatch):
    """https://github.com/NVIDIA/Megatron-LM/pull/5047: the gradient of the auxiliary loss depended
    on tp. Here the loss is that of whole sequences; made of each device's part, and left without a
    sum, it is an error of types.
    """
    assert balanced_without_a_bug(OVER_TP)
    reduce = collectives.all_reduce

    def of_parts(x, *axes):
        return x if axes == SEQUENCE else reduce(x, *axes, *SEQUENCE) / axis_size(*SEQUENCE)

    monkeypatch.setattr(balance, "all_reduce", of_parts)
    errors = balance_off(OVER_TP)
    assert errors["balance_loss"] > WRONG
    assert errors["router"] > WRONG
    monkeypatch.setattr(
        balance, "all_reduce", lambda x, *axes: x if axes == SEQUENCE else reduce(x, *axes)
    )
    # Jax 0.12 refuses it as well, and fails while it makes its message, where gradients are taken.
    said = "expert_balance: out_specs declares its result equal|Too few leaves for PyTreeDef"
    with pytest.raises(ValueError, match=said) as refused:
        balance_off(OVER_TP)
    if jax.__version__ < "0.12":
        assert isinstance(refused.value, MissingReductionError)
        assert "equal along tp, but" in str(refused.value)


@pytest.mark.parametrize("detached", [False, True])
def test_automodel_1412_the_auxiliary_loss_is_whole_and_has_a_gradient(monkeypatch, detached):
    """https://github.com/NVIDIA-NeMo/Automodel/pull/1412: the auxiliary loss was divided by the
    devices along dp, and nothing went back from it. Here it is whole on every mesh, and moves the
    router.
    """
    assert balanced_without_a_bug(INSIDE)
    reduce = collectives.all_reduce

    def planted(x, *axes):
        return (
            jax.lax.stop_gradient(reduce(x, *axes))
            if detached
            else reduce(x, *axes) / axis_size(DP)
        )

    monkeypatch.setattr(balance, "all_reduce", planted)
    errors = balance_off(INSIDE)
    assert (errors["balance_loss"] < RIGHT) == detached
    assert errors["router"] == pytest.approx(1.0 if detached else 0.5, abs=0.3)


def of_the_batch(routing):
    """What a router did as a loss of batches takes it: for all rows together."""
    means = lambda sums: jnp.broadcast_to(jnp.mean(sums, axis=1, keepdims=True), sums.shape)
    return jax.tree.map(means, routing)


def test_torchtitan_3000_the_balance_of_micro_batches_adds_up(monkeypatch):
    """https://github.com/pytorch/torchtitan/pull/3000: an auxiliary loss of a batch, a product of
    means, is another one for its micro-batches, so that accumulation is refused there. Here it is
    that of each sequence.
    """
    assert max(micro_batches_off().values()) < RIGHT
    replace = dataclasses.replace
    monkeypatch.setattr(
        balance, "replace", lambda routing, **none: of_the_batch(replace(routing, **none))
    )
    assert min(micro_batches_off().values()) > WRONG


def micro_batches_off():
    """How far the sums over two micro-batches are from the batch."""
    x, segments, labels = rows()
    run = balance_program(CONFIG, ONE)
    whole, _ = run(weights(), x[None], segments, labels)
    parts = [
        run(weights(), x[None, own], segments[own], labels[own])[0]
        for own in np.split(np.arange(B), 2)
    ]
    return {
        name: relative_error(sum(part[name] for part in parts), whole[name])
        for name in ("balance_loss", "router")
    }


def test_torchtitan_1805_gradients_of_tokens_are_summed_over_tp(monkeypatch):
    """https://github.com/pytorch/torchtitan/issues/1805: the backward pass of experts lacked a
    reduction over tp. Here a token's gradient has in it what the experts, or the parts of them, on
    other devices add.
    """
    assert without_a_bug(INSIDE)
    monkeypatch.setattr(layer, "enter_parallel", lambda x, _: gathered_without_sum(TP)(x))
    found = off(INSIDE)
    assert found["output"] < RIGHT
    assert found["input"] > WRONG


def test_pytorch_160285_gradients_of_experts_are_not_multiplied(monkeypatch):
    """https://github.com/pytorch/pytorch/issues/160285: gradients of experts were too large by the
    number of devices over which experts are divided. Here they are those of one device.
    """
    assert without_a_bug(OVER_TP)
    plant_weights(monkeypatch, with_gradient(lambda grad: grad * axis_size(TP)))
    found = off(OVER_TP)
    assert found["output"] < RIGHT
    assert [found[kernel] for kernel in KERNELS] == pytest.approx([1.0] * 3, abs=1e-4)


def test_megatron_bridge_1817_gate_and_up_are_not_mixed_up():
    """https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/1817: a projection that is gate and up in
    one was cut wrongly where tp divides it, and training came apart in time. Here a loop over
    experts that shares no code tells which is which.
    """
    assert without_a_bug(OVER_TP)
    swapped = {**weights(), "gate": weights()["up"], "up": weights()["gate"]}
    assert off(OVER_TP, given=swapped, layer=program)["output"] > WRONG


def beyond_is_nan(rows, kernels, sizes_E, method):
    """A product that leaves rows beyond the groups as memory was."""
    there = jnp.arange(len(rows)) < jnp.sum(sizes_E)
    return jnp.where(there[:, None], grouped_matmul(rows, kernels, sizes_E, method), jnp.nan)


def test_pytorch_193633_nothing_reads_the_rows_beyond_all_experts(monkeypatch):
    """https://github.com/pytorch/pytorch/issues/193633: rows beyond the last group of a grouped
    product are left as memory was, and made NaNs. Here they may be anything.
    """
    monkeypatch.setattr(layer, "grouped_matmul", beyond_is_nan)
    assert max(off(OVER_TP).values()) < RIGHT
    of = dispatch.Rows.of

    def all_there(chosen, count):
        found = of(chosen, count)
        return dataclasses.replace(
            found, row_of_choice=jnp.minimum(found.row_of_choice, chosen.size - 1)
        )

    monkeypatch.setattr(dispatch.Rows, "of", all_there)
    assert off(OVER_TP)["output"] == float("inf")


MANY = ExpertsConfig(num_experts=24, d_ff=48, grouped="pallas")


def all_with_all(rows, kernels, sizes_E, method):
    ends = jnp.cumsum(sizes_E)
    at = jnp.arange(len(rows))[:, None]
    own = (at >= ends - sizes_E) & (at < ends)
    return jnp.einsum("mk,ekn,me->mn", rows, kernels, own.astype(rows.dtype))


def test_marin_7012_no_product_of_all_rows_with_all_experts(monkeypatch):
    """https://github.com/marin-community/marin/issues/7012: on GPUs XLA multiplied every row with
    every expert, 23 TFLOP/s of what a kernel makes 1,470 of. Here the largest array that a device
    makes tells, and GPUs get a kernel.
    """
    limit = MANY.num_experts * 32 * 32 * MANY.d_ff
    for mesh in (ONE, (1, 1, 1, 2)):
        _, largest = work(mesh, MANY)
        assert largest < limit // np.prod(mesh)
    inside, _ = work(ONE, dataclasses.replace(MANY, grouped="xla"))
    assert [e for e in inside if "ragged" in e.primitive.name]
    monkeypatch.setattr(layer, "grouped_matmul", all_with_all)
    _, largest = work(ONE, MANY)
    assert largest >= limit


def test_vllm_55514_ties_are_broken_by_the_lower_index(monkeypatch):
    """https://github.com/vllm-project/vllm/pull/55514: of experts with equal scores a fallback
    chose others than the kernel. Here the lower index goes first everywhere.
    """
    equal = {**weights(), "router": np.zeros((D, E), np.float32)}
    x, segments, _ = rows()
    output = expected(equal, x, segments != 0, CONFIG)["output"]
    off = lambda layer: relative_error(
        layer(CONFIG, ONE, None, True)(equal, x, segments)["output"], output
    )
    assert off(program) < RIGHT
    top_k = jax.lax.top_k

    def last_first(scores, k):
        best, index = top_k(scores[..., ::-1], k)
        return best, scores.shape[-1] - 1 - index

    monkeypatch.setattr(jax.lax, "top_k", last_first)
    assert off(program.__wrapped__) > WRONG


def test_megatron_lm_2121_padding_is_routed_nowhere(monkeypatch):
    """https://github.com/NVIDIA/Megatron-LM/pull/2121: tokens of padding took part in the balance
    of experts. Here they have no expert, take no place among rows and count for nothing.
    """
    assert without_a_bug(OVER_TP)
    route = router.Router.route

    def everyone(self, x, counts, given, *, record):
        return route(self, x, jnp.ones_like(counts), given, record=record)

    monkeypatch.setattr(router.Router, "route", everyone)
    found = off(OVER_TP)
    assert min(found["output"], found["times_chosen"], found["computed"]) > WRONG


@pytest.mark.parametrize("said", [True, False])
def test_torchtitan_1448_weights_of_experts_are_normalised_where_the_model_says_so(said):
    """https://github.com/pytorch/torchtitan/issues/1448: the weights of the chosen experts were not
    divided by their sum, as the converted model had it, and its gradients were far too large. Here
    the model's configuration says it.
    """
    attributes = read_json(FOLDER / "qwen3_moe/config.json") | {"norm_topk_prob": said}
    assert model_config(attributes, "it").normalize_experts == said
    configs = {
        value: dataclasses.replace(CONFIG, normalize_experts=value) for value in (True, False)
    }
    x, segments, _ = rows()
    found = program(configs[said], ONE, None, True)(weights(), x, segments)
    assert relative_error(found["output"], right(configs[said])["output"]) < RIGHT
    assert relative_error(found["output"], right(configs[not said])["output"]) > WRONG


def test_vllm_14027_the_router_is_float32(monkeypatch):
    """https://github.com/vllm-project/vllm/pull/14027: logits of the router were computed in
    bfloat16, in which close ones are equal. Here they are float32, whatever the layer computes in.
    """
    assert chosen_of_close_logits() == [3, 2]
    in_float32 = dataclasses.replace
    monkeypatch.setattr(
        router,
        "replace",
        lambda given, **new: given if "compute" in new else in_float32(given, **new),
    )
    assert chosen_of_close_logits() == [0, 1], "as where they are equal"


def chosen_of_close_logits():
    """The experts of a token by a layer that computes in bfloat16, where logits differ by 1 in
    1000.
    """
    config = ExpertsConfig(num_experts=4, d_ff=4)
    logits = 1 + np.arange(4, dtype=np.float32) / 1000
    token = np.ones((1, 1, 1))

    def chosen(kernel):
        weights = {"router": kernel}
        in_bfloat16 = router.Router(config, Precision(compute="bfloat16"), weights, is_split=False)
        return in_bfloat16.route(token, token[0], None, record=False)[0]

    return np.asarray(jax.jit(chosen)(jnp.asarray(logits[None]))).ravel().tolist()


WITH_BIASES = dataclasses.replace(CONFIG, experts_bias=True, router_bias=True)


def test_torchtitan_4245_biases_of_experts_count_once(monkeypatch):
    """https://github.com/pytorch/torchtitan/pull/4245: where tp divides experts inside, each device
    added the bias of the last projection before the sum over tp. Here one device adds it.
    """
    assert without_a_bug(INSIDE, WITH_BIASES)
    monkeypatch.setattr(layer, "on_first_device", lambda x: x)
    assert off(INSIDE, config=WITH_BIASES)["output"] > WRONG


def test_automodel_2591_the_bias_of_an_expert_weighs_what_its_output_does():
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2591: the bias of the last projection was added
    in full for each of a token's k experts, whatever their weights. Here biases of 1 add the sum of
    the weights, 1, to the output.
    """
    x, segments, _ = rows()
    run = program(WITH_BIASES, INSIDE, None, True)
    without, with_them = (
        run({**weights(WITH_BIASES), "down_bias": np.full((E, D), size, np.float32)}, x, segments)[
            "output"
        ]
        for size in (0, 1)
    )
    assert_allclose(np.asarray(with_them - without)[segments != 0], 1, atol=1e-5)
    assert WITH_BIASES.experts_per_token > 1, "what would be added for each"


def test_torchtitan_4154_all_devices_of_a_tp_group_count_for_the_selection_bias(monkeypatch):
    """https://github.com/pytorch/torchtitan/pull/4154: with tp, the choices that move selection
    biases were not summed over tp. Here they are those of all tokens.
    """
    x, segments, labels = rows()
    _, times = balance_program(CONFIG, OVER_TP)(weights(), x[None], segments, labels)
    assert_array_equal(times, right()["times_chosen"].sum(axis=0, keepdims=True))
    reduce = collectives.all_reduce
    first = lambda x, *axes: reduce(
        jnp.where(collectives.axis_index(TP) == 0, x, 0) if axes == SEQUENCE else x, *axes
    )
    monkeypatch.setattr(balance, "all_reduce", first)
    with pytest.raises(AssertionError):  # choices lack, as where nothing computed them
        balance_program(CONFIG, OVER_TP)(weights(), x[None], segments, labels)


def test_unsloth_6936_adapters_of_experts_are_trained(monkeypatch):
    """https://github.com/unslothai/unsloth/pull/6936: no name of a target matched the experts,
    which stayed frozen without a word. Here each expert has adapters, and their parameters are
    those that training counts.
    """
    lora = LoraConfig(rank=2, targets=("q_proj", "gate_proj", "up_proj", "down_proj"))
    sizes = {"num_layers": 2, "d_model": D, "num_heads": 4, "num_kv_heads": 4, "head_dim": 2}
    config = ModelConfig(**sizes, d_ff=F, num_experts=E, lora=lora)

    def trained():
        params = nnx.state(nnx.eval_shape(decoder(config)), nnx.Param)
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    of_queries = 2 * 2 * (D + 8)
    of_experts = 2 * 2 * E * 3 * (D + F)
    assert trained() == of_queries + of_experts
    assert step_costs(config, mesh_shape(), batch_size=2, sequence_length=8).adapters == trained()
    monkeypatch.setattr(layer, "EXPERT_TARGETS", dict.fromkeys(KERNELS, "o_proj"))
    assert trained() == of_queries
