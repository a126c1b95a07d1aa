"""Parallel layers that other systems got wrong: outputs, gradients and random numbers against plain
formulas.

Each test plants the bug, or what comes of it, and so shows that its check would see it.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import latents
import numpy as np
import pytest
from accounts import equations
from flax import nnx
from layer_programs import LayerProgram, in_float64
from numpy.random import default_rng
from numpy.testing import assert_array_equal
from planted import cut_evenly, errors_of, plant_weights, with_gradient
from support import by_name, random_weights, relative_error, state_on_mesh, swept, use_mesh
from variants import small_model

from jaxtp import ColumnParallelLinear, Precision, RowParallelLinear
from jaxtp.checkpoint.logical import named_variables
from jaxtp.collectives import (
    WeightDtypes,
    WeightLayout,
    all_reduce,
    axis_index,
    axis_size,
    batch_spec,
    device_view,
    load_weight,
    vary,
)
from jaxtp.layers import DecoderBlock, HeadConfig, LayerContext, latent_attention, loss, transport
from jaxtp.layers.float8 import enter_float8
from jaxtp.layers.gated_delta import GatedDeltaConfig, GatedDeltaNet
from jaxtp.layers.latent_attention import LatentAttention, LatentAttentionConfig
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.positions import dropout
from jaxtp.mesh import SEQUENCE, STORAGE, TP, axes_of, make_mesh
from jaxtp.train.config import OptimizerConfig
from jaxtp.train.optimizer import build as build_optimizer
from jaxtp.train.state import plan_state

RIGHT = 1e-5
WRONG = 1e-2
B = 2
T = 4
F = 8
D = 6
RANK = 2
SCALE = 3.0
SMALL = small_model(vocab_size=8)


def row_layer():
    """With all that the devices along tp have in common: a bias, and the second factor of an
    adapter.
    """
    adapter = LoraConfig(rank=RANK, alpha=SCALE * RANK)
    context = LayerContext(sequence_parallel=True, lora=adapter)
    return RowParallelLinear(F, D, context, use_bias=True, target="o_proj", rngs=nnx.Rngs(0))


def found_on(tp, layer, weights, x, g):
    """Returns output and gradients of a layer over tp, where `g` is the gradient at the output."""
    return LayerProgram(layer, weights, (1, 1, tp))(np.float32(x), np.float32(g))


def reference(layer, formula, features):
    """Returns weights, an input, a gradient at the output, and output and gradients of a formula
    in float64.
    """
    weights = random_weights(layer, scale=0.5)
    random = default_rng(0)
    x = random.standard_normal((B, T, features))
    g = random.standard_normal((B, T, D))
    return weights, x, g, in_float64(formula, weights, x, g)


def errors_over_tp(layer, given):
    """How far output and gradients over tp 4 are from a reference."""
    *arrays, expected = given
    return errors_of(found_on(4, layer, *arrays), expected)


@cache
def row_reference():
    def formula(weights, x):
        return (
            x @ weights["kernel"]
            + SCALE * x @ weights["loras.0.a"] @ weights["loras.0.b"]
            + weights["bias"]
        )

    return reference(row_layer, formula, F)


def row_errors():
    """How far a row layer is from its formula, the sequence split between layers."""
    return errors_over_tp(row_layer, row_reference())


right_row = cache(row_errors)
"""The same as the layer is; to be asked before anything is planted."""


def of_first_device(grad):
    return jnp.where(axis_index(TP) == 0, grad, 0)


def is_vector(shape):
    return len(shape) == 1


def test_text_generation_inference_1036_a_row_layer_adds_its_bias_once(monkeypatch):
    """https://github.com/huggingface/text-generation-inference/issues/1036: each device added the
    bias to its summand, so that the sum had it tp times. Here it is added once, after the sum.
    """
    assert max(right_row().values()) < RIGHT
    plant_weights(monkeypatch, lambda bias: bias * axis_size(TP), is_vector)
    assert row_errors()["y"] > WRONG


def test_torchtitan_4332_the_gradient_of_a_row_layers_bias_is_whole(monkeypatch):
    """https://github.com/pytorch/torchtitan/pull/4332: the bias was divided by tp before the sum,
    by an operation with a gradient, and so was its gradient. Here that is the sum over all tokens.
    """
    assert right_row()["bias"] < RIGHT
    plant_weights(monkeypatch, with_gradient(lambda grad: grad / axis_size(TP)), is_vector)
    errors = row_errors()
    assert errors["y"] < RIGHT
    assert abs(errors["bias"] - 0.75) < RIGHT


def test_mcore_bridge_173_gradients_of_adapters_are_summed_over_the_sequence(monkeypatch):
    """https://github.com/modelscope/mcore-bridge/pull/173: where tp splits the sequence, the factor
    of an adapter that all devices hold got the gradient of one device's tokens. Here it gets that
    of all tokens.
    """
    assert max(right_row().values()) < RIGHT
    plant_weights(monkeypatch, with_gradient(of_first_device), lambda shape: shape == (RANK, D))
    errors = row_errors()
    assert errors["y"] < RIGHT
    assert errors["loras.0.b"] > WRONG


LATENT = LatentAttentionConfig(
    num_heads=4,
    num_kv_heads=4,
    kv_rank=4,
    query_rank=4,
    head_dim=4,
    rope_head_dim=2,
    value_head_dim=3,
    rope_theta=2.0,
)


def latent_layer(split):
    context = LayerContext(sequence_parallel=split)
    return LatentAttention(D, LATENT, context, rngs=nnx.Rngs(0))


@cache
def latent_reference():
    formula = lambda weights, x: latents.attention(x, np.ones((B, T), np.int32), weights, LATENT, 0)
    return reference(partial(latent_layer, True), formula, D)


def latent_errors(split):
    """How far latent attention is from its formula; `split`: the sequence is divided, too."""
    return errors_over_tp(partial(latent_layer, split), latent_reference())


right_latent = cache(latent_errors)


def planted_gradient(monkeypatch, columns, change):
    """Has the gradient of what enters the heads changed on each device, before it is summed."""
    enter = latent_attention.enter_parallel
    planted = with_gradient(lambda grad: grad.at[..., columns].set(change(grad[..., columns])))
    monkeypatch.setattr(latent_attention, "enter_parallel", lambda *args: planted(enter(*args)))


@swept("split", [False, True])
def test_torchtitan_1373_the_gradient_of_a_latent_is_summed_once(split, monkeypatch):
    """https://github.com/pytorch/torchtitan/pull/1373: each device had the gradient of latents from
    its own heads, and down projections and norms got that. Here it is summed over all heads, and
    not for each device again.
    """
    assert max(right_latent(split).values()) < RIGHT
    change = of_first_device if split else lambda grad: vary(all_reduce(grad, TP), TP)
    planted_gradient(monkeypatch, slice(None), change)
    errors = latent_errors(split)
    assert errors["y"] < RIGHT
    down = [errors[f"{name}_down.kernel"] for name in ("query", "latent")]
    assert min(*down, errors["latent_norm.scale"]) > WRONG


def test_megatron_lm_37_the_gradient_of_a_shared_key_is_of_all_heads(monkeypatch):
    """https://github.com/bigcode-project/Megatron-LM/pull/37: the gradient of keys that all heads
    share was not summed over tp. Here the key of latent attention, whose gradient enters another
    sum than the latent's, has that of all.
    """
    assert max(right_latent(True).values()) < RIGHT
    shared = slice(LATENT.kv_rank, LATENT.kv_rank + LATENT.rope_head_dim)
    planted_gradient(monkeypatch, shared, of_first_device)
    errors = latent_errors(True)
    assert errors["latent_down.kernel"] > WRONG
    assert max(errors["y"], errors["query_down.kernel"], errors["latent_norm.scale"]) < RIGHT


DELTA = GatedDeltaConfig(delta_value_heads=8, delta_key_heads=4, delta_key_dim=4, delta_value_dim=3)


@pytest.mark.wide
def test_megatron_lm_1989_each_part_of_a_projection_is_split_by_heads():
    """https://github.com/NVIDIA/Megatron-LM/pull/1989: the queries, keys, values, gates and
    strengths of Gated DeltaNet were columns of one matrix, which tp cut evenly, so that a device
    took others for them. Here each is split alone.
    """
    layer = lambda: GatedDeltaNet(D, DELTA, rngs=nnx.Rngs(0))
    weights = random_weights(layer, scale=0.5)
    _, x, g, _ = latent_reference()
    names = [f"in_proj.kernels.{i}" for i in range(6)]
    cut = cut_evenly(weights, names, 4)
    expected = found_on(1, layer, weights, x, g)
    assert max(errors_of(found_on(4, layer, weights, x, g), expected).values()) < RIGHT
    wrong = found_on(4, layer, weights | cut, x, g)
    assert relative_error(wrong["y"], expected["y"]) > WRONG


V = 5
"""Ids of a vocabulary that tp 4 pads to 8."""


SOFTCAP = 3.0


def head_errors():
    """How far the loss over tp 4 and its gradient are from float64; all logits are strongly
    negative.
    """
    random = default_rng(1)
    x = np.abs(random.standard_normal((B, T, D)))
    table = -2 * np.abs(random.standard_normal((V, D)))
    labels = random.integers(0, V, (B, T))

    def plain(x, table):
        logits = SOFTCAP * jnp.tanh(x @ table.T / SOFTCAP)
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1))

    def ours(x, table):
        padded = jnp.pad(table, ((0, -V % 4), (0, 0)))
        head = HeadConfig(V, softcap=SOFTCAP)
        return loss.vocab_parallel_cross_entropy(x, padded, jnp.asarray(labels), head)[0]

    with jax.enable_x64(True):
        expected = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(x, table)
    with use_mesh(tp=4):
        run = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))
        found = run(np.float32(x), np.float32(table))
    return jax.tree.leaves(jax.tree.map(relative_error, found, expected))


@pytest.mark.wide
def test_unsloth_10616_padded_ids_have_no_probability_where_logits_are_capped(monkeypatch):
    """https://github.com/unslothai/unsloth/pull/10616: logits beyond the vocabulary were -inf, and
    the cap, which came after, made them finite, so that they had probability. Here they are left
    out after the cap.
    """
    assert max(head_errors()) < RIGHT
    where = jnp.where
    monkeypatch.setattr(
        jnp, "where", lambda c, a, b: where(c, a, -SOFTCAP if np.isneginf(b).all() else b)
    )
    assert max(head_errors()) > WRONG


@pytest.mark.wide
def test_torchtitan_3822_the_gradient_of_log_probabilities_is_not_summed_over_tp_twice(monkeypatch):
    """https://github.com/pytorch/torchtitan/pull/3822: the backward pass of a gather over tp, whose
    result every device used alike, summed their equal gradients, so those of log-probabilities were
    tp times too large. Here they are those of one device.
    """
    random = default_rng(1)
    x, table = (np.float32(random.standard_normal(shape)) for shape in ((B, T, D), (2 * V - 2, D)))
    labels = jnp.asarray(random.integers(0, 2 * V - 2, (B, T), np.int32))

    def log_probs(x, table):
        found = loss.vocab_parallel_statistics(x, (table, HeadConfig(2 * V - 2), None), labels)
        return jnp.sum(found.label_logit - found.log_normaliser)

    expected = jax.jit(jax.grad(log_probs, (0, 1)))(x, table)

    def times():
        with use_mesh(tp=4):
            grads = jax.jit(jax.grad(lambda *arrays: log_probs(*arrays), (0, 1)))(x, table)
        return [float(np.vdot(a, b) / np.vdot(b, b)) for a, b in zip(grads, expected, strict=True)]

    assert times() == pytest.approx([1, 1], abs=RIGHT)
    summed = jax.custom_vjp(lambda x: all_reduce(x, TP))
    summed.defvjp(
        lambda x: (all_reduce(x, TP), None),
        lambda _, grad: (vary(all_reduce(vary(grad, TP), TP), TP),),
    )
    monkeypatch.setattr(loss, "all_reduce", lambda x, axis: summed(x))
    assert times() == pytest.approx([4, 4], abs=RIGHT)


def masks(spec, seeds=range(4), **sizes):
    """What dropout leaves of ones on a mesh; each row has the key of its seed."""

    @jax.jit
    def run(seeds):
        keys = jax.vmap(jax.random.key)(seeds)
        return dropout(jnp.ones((4, 8, 16)), 0.5, keys, spec, jnp.arange(8)) > 0

    with use_mesh(**sizes):
        return np.asarray(run(np.array(seeds)))


EIGHT = {"dp": 2, "tp": 2, "cp": 2}


@pytest.mark.wide
def test_transformers_31412_dropout_differs_between_devices_of_the_batch():
    """https://github.com/huggingface/transformers/issues/31412: with one seed, all devices dropped
    the same elements of their rows. Here each row has a key of its own, and its mask is the same on
    every mesh.
    """
    on_mesh = masks(batch_spec(), **EIGHT)
    assert_array_equal(on_mesh, masks(batch_spec()))
    assert least_difference(on_mesh) > 0.3
    assert least_difference(masks(batch_spec(), [0, 1, 0, 1], **EIGHT)) == 0, (
        "two devices with the same keys"
    )


def least_difference(parts):
    return min(np.mean(parts[i] != parts[j]) for i in range(4) for j in range(i))


def test_megatron_lm_1256_dropout_differs_between_the_parts_of_a_sequence():
    """https://github.com/NVIDIA/Megatron-LM/issues/1256: with sequence parallelism a context that
    was to give each device random numbers of its own was not entered. Here each position has its
    own, however it is split.
    """
    split = masks(batch_spec(SEQUENCE, None), **EIGHT)
    assert_array_equal(split, masks(batch_spec()))
    assert least_difference(np.split(split, 4, axis=1)) > 0.3


def test_pytorch_168058_initial_weights_do_not_depend_on_the_devices():
    """https://github.com/pytorch/pytorch/issues/168058: a tensor's random values depended on how
    many devices it was split over, and in which dim. Here each weight is the same to the bit on
    every mesh, and no two parts are alike.
    """
    optimizer = build_optimizer(OptimizerConfig(), 10)
    meshes = (make_mesh(), make_mesh(fsdp=2, tp=2))
    found, expected = (
        by_name(plan_state(SMALL, optimizer, mesh).create(seed=3)["model"], mesh) for mesh in meshes
    )
    for name, array in expected.items():
        assert_array_equal(found[name], array, err_msg=name)
        if array.ndim > 1 and "scale" not in name:
            one, other = np.split(array, 2, axis=-1)
            assert not np.array_equal(one, other), f"{name}: as from one key on both devices"


def summed_gradient(reduce):
    """The gradient of a norm's scale over fsdp 2 x tp 2, each device with a quarter of the
    tokens, in bfloat16.
    """
    tokens = jnp.array([[1, 2**-10], [2**-10, 2**-10]], jnp.bfloat16)
    layout = WeightLayout(storage_dim=0, used_by_all_tp=True)

    def scaled(scale, x):
        return load_weight(scale, WeightDtypes("bfloat16", reduce, "bfloat16"), layout)[:1] * x

    def total(scale):
        view = device_view(
            scaled, "scale", (jax.P(STORAGE), batch_spec(SEQUENCE)), batch_spec(SEQUENCE)
        )
        return view(scale, tokens).astype(jnp.float32).sum()

    with use_mesh(fsdp=2, tp=2):
        return float(jax.jit(jax.grad(total))(jnp.ones(2))[0])


def test_pytorch_190626_gradients_are_summed_over_tp_in_the_dtype_of_reduction():
    """https://github.com/pytorch/pytorch/issues/190626: gradients of parameters that all devices
    along tp hold were summed over tp in bfloat16, although the dtype of reductions was float32.
    Here both sums, over tp and over fsdp, are in that dtype: small parts are not lost beside a
    large one.
    """
    assert summed_gradient("float32") == 1 + 3 * 2**-10
    assert summed_gradient("bfloat16") == 1, "the small parts are lost"


def column_in_float8():
    precision = Precision(matmul="float8", matmul_least=1)
    context = LayerContext(sequence_parallel=True, precision=precision)
    return ColumnParallelLinear(D, F, context, rngs=nnx.Rngs(0))


def gathered_in_float8():
    """The error of a column layer over tp 4, the sequence split before it, relative to one
    device.
    """
    weights = random_weights(column_in_float8)
    x = default_rng(0).standard_normal((B, T, D))
    g = np.ones((B, T, F))
    found = (found_on(tp, column_in_float8, weights, x, g)["y"] for tp in (4, 1))
    return relative_error(*found)


def test_transformer_engine_74_devices_read_gathered_float8_by_its_own_scales(monkeypatch):
    """https://github.com/NVIDIA/TransformerEngine/pull/74: without `reduce_amax` each device of tp
    had another scale, although sequence parallelism gathers the tensor after the cast to float8.
    Here the scales of tokens are gathered with their numbers.
    """
    assert gathered_in_float8() < RIGHT

    def by_the_readers_scale(x, sequence):
        entered = enter_float8(x, sequence)
        scales = [x.array.scale] * axis_size(TP)
        return entered._replace(array=entered.array._replace(scale=jnp.concatenate(scales, axis=1)))

    monkeypatch.setattr(transport, "enter_float8", by_the_readers_scale)
    assert gathered_in_float8() > WRONG


def without_unsplit(spec, mesh):
    """Without axes of one device, over which a `device_view` does not split."""
    axes = (tuple(axis for axis in axes_of(entry) if mesh.shape[axis] > 1) for entry in spec)
    return jax.P(*(found or None for found in axes))


def declared_and_used(mesh):
    """How each weight of a block is stored on a mesh, and as what the block's `shard_map`s take
    it.
    """
    build = lambda: DecoderBlock(SMALL, rngs=nnx.Rngs(0))
    graph, state = state_on_mesh(build, random_weights(build), mesh)
    named = named_variables(state)
    stored = {
        name: without_unsplit(variable[...].sharding.spec, mesh) for name, variable in named.items()
    }
    with jax.set_mesh(mesh):
        run = jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))
        jaxpr = run(state, jnp.ones((2, 4, 16))).jaxpr
    names = dict(zip(jaxpr.invars, named, strict=False))
    used = {}
    for equation in equations(jaxpr):
        if equation.primitive.name == "shard_map":
            specs = zip(equation.invars, equation.params["in_specs"], strict=True)
            used |= {names[variable]: spec for variable, spec in specs if variable in names}
    return stored, used


def test_marin_4455_a_layer_takes_a_weight_as_it_is_stored():
    """https://github.com/marin-community/marin/issues/4455: specs of a `shard_map` differed from
    how its arrays were split. Older versions of JAX moved the arrays at every call without a word,
    and newer ones refuse them. Here the spec stands on the parameter, and both the array and the
    `shard_map` have it.
    """
    stored, used = declared_and_used(make_mesh(fsdp=2, tp=2))
    assert len(used) > 5
    assert used == stored
    split = [name for name, spec in used.items() if any(spec)]
    assert len({used[name] for name in split}) > 1, "some are split, in several ways"
    assert used != stored | {split[0]: jax.P()}, "one that is stored whole"
