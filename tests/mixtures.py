"""A plain float64 mixture of experts without the package's code, and the layer to compare with
it.
"""

from functools import cache

import accounts
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.random import default_rng
from support import by_name, sizes_of, state_on_mesh, use_mesh

from jaxtp.collectives import batch_spec
from jaxtp.layers.balance import balance
from jaxtp.layers.context import Sequences
from jaxtp.layers.experts import MixtureOfExperts
from jaxtp.layers.linear import LayerContext
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import mesh_of

B = 8
T = 8
D = 16
E = 6
F = 8
LORA = LoraConfig(rank=3, alpha=5.0)
NOT_TIED = 1e-5
"""Minimum gap between the last chosen score and the next, relative to it, unless they are equal."""

ROUTING = ("times_chosen", "probabilities", "squared_normaliser", "entropy", "computed")


# The mathematics, without anything of the package.
def choose(scores, k):
    """Returns the k experts with the highest scores; ties go to the first: `[N, E] -> [N, k]`."""
    return np.argsort(-np.asarray(scores), axis=1, kind="stable")[:, :k]


def one_of(chosen, number):
    """Returns whether each of `number` is among a token's chosen: `[N, k] -> [N, number]`."""
    return (chosen[:, :, None] == np.arange(number)).any(axis=1)


def scores_of(logits, config):
    """Returns the scores, and their shares of the sum."""
    if config.router_scores == "sigmoid":
        scores = 1 / (1 + jnp.exp(-logits))
        return scores, scores / jnp.sum(scores, axis=-1, keepdims=True)
    scores = jnp.exp(logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    return scores, scores


def in_groups(scores, config):
    """Returns NumPy scores `[N, E]`, -inf outside of each token's groups, and the scores of the
    groups `[N, G]`.
    """
    grouped = scores.reshape(len(scores), config.expert_groups, -1)
    highest = -np.sort(-grouped, axis=2)
    of_groups = highest[:, :, 0] if config.group_score == "max" else highest[:, :, :2].sum(axis=2)
    inside = one_of(choose(of_groups, config.groups_per_token), config.expert_groups)
    return np.where(inside[:, :, None], grouped, -np.inf).reshape(scores.shape), of_groups


def is_near_tie(scores, k):
    """Returns whether rounding may change which k are the highest, which no two equal scores
    are.
    """
    ordered = -np.sort(-scores, axis=1)
    last, following = (ordered[:, [i]] for i in (k - 1, min(k, scores.shape[1] - 1)))
    gap = (last - following) / np.maximum(np.abs(last), 1e-30)
    return ((gap > 1e-9) & (gap < NOT_TIED)).any()


def activated(gate, up, config):
    if config.swiglu_limit is not None:
        gate = jnp.minimum(gate, config.swiglu_limit)
        up = jnp.clip(up, -config.swiglu_limit, config.swiglu_limit) + 1
    if config.activation == "relu2":
        return jnp.maximum(gate, 0) ** 2 * up
    slope = 1.702 if config.activation == "quick_gelu" else 1.0
    return gate / (1 + jnp.exp(-slope * gate)) * up


def projected(x, weights, kernel, bias, lora):
    """Returns a projection with its bias and its adapter, if it has them; of all experts, if the
    kernel has them.
    """
    y = x @ weights[kernel]
    if f"{lora}.a" in weights:
        y += LORA.scale * (x @ weights[f"{lora}.a"] @ weights[f"{lora}.b"])
    return y + weights[bias][..., None, :] if bias in weights else y


def mlp(x, weights, config, gate, up, down):
    """Returns an MLP, from its kernel's, bias' and adapter's names of each projection."""
    if config.mlp == "gated":
        hidden = activated(projected(x, weights, *gate), projected(x, weights, *up), config)
    else:
        hidden = activated(projected(x, weights, *up), 1, config)
    return projected(hidden, weights, *down)


def shared_experts(x, weights, config):
    names = ("shared.{}.kernels.{}", "shared.{}.biases.{}", "shared.{}.loras.{}")
    of = lambda layer, i: [name.format(layer, i) for name in names]
    gate, up = (
        (of("gate_up", 0), of("gate_up", 1)) if config.mlp == "gated" else (None, of("up", 0))
    )
    y = mlp(
        x,
        weights,
        config,
        gate,
        up,
        ("shared.down.kernel", "shared.down.bias", "shared.down.loras.0"),
    )
    return y / (1 + jnp.exp(-x @ weights["shared_gate"])) if config.shared_experts_gate else y


def mixture(weights, x, counts, config, experts):
    """Returns outputs for tokens `x [N, D]`, and per-token terms of the sums; `counts` is False
    for padding.
    """
    logits = x @ weights["router"] + weights.get("router_bias", 0)
    normaliser = jax.nn.logsumexp(logits, axis=1)
    scores, of_all = scores_of(logits, config)
    chosen = one_of(experts, config.num_experts) & counts[:, None]
    shares = jnp.where(chosen, scores, 0.0)
    if config.normalize_experts:
        divisor = jnp.maximum(jnp.sum(shares, axis=1), config.normalize_floor)
        shares = shares / jnp.where(counts, divisor, 1.0)[:, None]
    names = [(name, f"{name}_bias", f"{name}_lora") for name in ("gate", "up", "down")]
    y = config.experts_scale * jnp.einsum("ne,end->nd", shares, mlp(x, weights, config, *names))
    if config.shared_experts:
        y += shared_experts(x, weights, config)
    sums = {
        "times_chosen": jnp.asarray(chosen, x.dtype),
        "probabilities": jnp.where(counts[:, None], of_all, 0.0),
        "squared_normaliser": jnp.where(counts, normaliser**2, 0.0),
        "entropy": jnp.where(counts, -jnp.sum(of_all * jnp.log(of_all), axis=1), 0.0),
        "computed": jnp.asarray(chosen.sum(axis=1), x.dtype),
    }
    return y, sums


def probe(y, sums):
    """Returns a scalar that depends on all outputs and sums, each with its own weight."""
    random = default_rng(7)
    outputs = (y, sums["probabilities"], sums["squared_normaliser"])
    return sum(jnp.sum(x * random.standard_normal(x.shape).astype(np.float32)) for x in outputs)


@cache
def reference_program(config, shape):
    """Returns the mixture with its gradients; weights, inputs and chosen experts are arguments."""

    def scalar(weights, x, counts, experts):
        y, sums = mixture(weights, x.reshape(-1, shape[-1]), counts.reshape(-1), config, experts)
        sums = {
            name: array.reshape(*shape[:2], *array.shape[1:]).sum(axis=1)
            for name, array in sums.items()
        }
        y = y.reshape(shape)
        return probe(y, sums), {"output": y, **sums}

    return jax.jit(jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True))


def expected(weights, x, counts, config):
    """Returns the results of all experts for all tokens in float64, weighted by what the router
    chose.
    """
    with jax.enable_x64(True):
        weights = {name: np.asarray(array, np.float64) for name, array in weights.items()}
        x = np.asarray(x, np.float64)
        logits = x.reshape(-1, D) @ weights["router"] + weights.get("router_bias", 0)
        preferred = np.asarray(scores_of(logits, config)[0]) + weights.pop("selection_bias", 0.0)
        limited, of_groups = in_groups(preferred, config)
        unclear = is_near_tie(preferred, config.experts_per_token) or is_near_tie(
            of_groups, config.groups_per_token
        )
        assert not unclear, "rounding may choose another expert; take another seed"
        experts = choose(limited, config.experts_per_token)
        (_, parts), (grads, grad_x) = reference_program(config, x.shape)(
            weights, x, np.asarray(counts), experts
        )
        return {
            name: np.asarray(array) for name, array in {**parts, "input": grad_x, **grads}.items()
        }


# The layer.
def build(config, sequence_parallel=None, lora=LoraConfig()):
    context = LayerContext(sequence_parallel=sequence_parallel, lora=lora)
    return MixtureOfExperts(D, config, context, rngs=nnx.Rngs(0))


@cache
def program(config, mesh, sequence_parallel, packed, lora=LoraConfig()):
    """Returns a function of weights, inputs and segments that runs the layer on a mesh."""
    on = mesh_of(sizes_of(mesh))
    make = lambda: build(config, sequence_parallel, lora)

    @jax.jit
    def run(graph, state, x, segments):
        params, rest = nnx.split_state(state, nnx.Param, ...)

        def scalar(params, x):
            y, routing = nnx.merge(graph, params, rest)(
                x, Sequences(segments=segments if packed else None)
            )
            sums = {name: getattr(routing, name).sum(axis=1) for name in ROUTING}
            return probe(y, sums), {"output": y, **sums}

        return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(params, x)

    def layer(weights, x, segments):
        graph, state = state_on_mesh(make, weights, on)
        with jax.set_mesh(on):
            (_, parts), (grads, grad_x) = run(graph, state, *on_devices(on, x, segments))
            return {**parts, "input": grad_x, **by_name(grads, on)}

    return layer


def on_devices(mesh, *arrays):
    return [jax.device_put(array, jax.NamedSharding(mesh, batch_spec(None))) for array in arrays]


# Balance.
def balance_of(router, layers, counts, labels, chosen, config):
    """Returns the auxiliary loss and z-loss of routers with inputs `[L, B, T, D]`; each label
    counts its sequence's.
    """
    logits = layers @ router
    k = config.experts_per_token
    scores = jnp.where(counts[:, :, None], scores_of(logits, config)[1], 0.0)
    n = np.maximum(counts.sum(axis=1), 1)[:, None]
    share = scores.shape[-1] / (k * n) * chosen.sum(axis=2)  # [L, B, E]
    loss = jnp.sum(share * scores.sum(axis=2) / n, axis=2)
    squared = (
        jnp.sum(jnp.where(counts, jax.nn.logsumexp(logits, axis=3) ** 2, 0.0), axis=2) / n[:, 0]
    )
    of_labels = (labels != -100).sum(axis=1) / len(layers)
    return jnp.sum(of_labels * loss), jnp.sum(of_labels * squared)


def expected_balance(weights, layers, counts, labels, config):
    """Returns the losses, and gradients of their weighted sum, in float64."""
    counts = np.asarray(counts)
    router, layers = (np.asarray(array, np.float64) for array in (weights["router"], layers))
    experts = choose((layers @ router).reshape(-1, config.num_experts), config.experts_per_token)
    chosen = one_of(experts, config.num_experts).reshape(*layers.shape[:3], -1) & counts[:, :, None]

    def run(router, layers):
        loss, squared = balance_of(router, layers, counts, labels, chosen, config)
        return loss + 0.3 * squared, {"balance_loss": loss, "router_z_loss": squared}

    with jax.enable_x64(True):
        (_, losses), grads = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(
            router, layers
        )
    return {**losses, **dict(zip(("router", "input"), grads, strict=True))}


def balance_program(config, mesh, sequence_parallel=None):
    """Returns a function that gives the layer's losses, gradients and expert counts on a mesh."""
    on = mesh_of(sizes_of(mesh))
    make = lambda: build(config, sequence_parallel)

    @jax.jit
    def run(graph, state, layers, segments, labels):
        params, rest = nnx.split_state(state, nnx.Param, ...)

        def scalar(params, layers):
            layer = nnx.merge(graph, params, rest)
            routings = [layer(x, Sequences(segments=segments))[1] for x in layers]
            stacked = jax.tree.map(lambda *sums: jnp.stack(sums), *routings)
            found = balance([stacked], labels, [config.experts_per_token])
            return found.balance_loss + 0.3 * found.router_z_loss, found

        return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(params, layers)

    def balanced(weights, layers, segments, labels):
        graph, state = state_on_mesh(make, weights, on)
        with jax.set_mesh(on):
            segments, labels = on_devices(on, segments, labels)
            (_, found), (grads, grad_x) = run(graph, state, np.asarray(layers), segments, labels)
            assert float(found.dropped) == 0
            losses = {"balance_loss": found.balance_loss, "router_z_loss": found.router_z_loss}
            result = {**losses, "router": by_name(grads, on)["router"], "input": grad_x}
            return {name: np.asarray(a) for name, a in result.items()}, np.asarray(
                found.times_chosen[0]
            )

    return balanced


# Work.
WORK = 32, 32, 64
"""Rows, tokens of each and their width."""


def work(mesh, config):
    """Returns the equations of a device's program, forward and backward, and the size of the
    largest array that they make.
    """
    with use_mesh(**sizes_of(mesh)):
        make = lambda: MixtureOfExperts(
            WORK[2], config, LayerContext(sequence_parallel=None), rngs=nnx.Rngs(0)
        )
        graph, state = nnx.split(nnx.eval_shape(make))
        x = jax.ShapeDtypeStruct(WORK, jnp.float32)
        scalar = lambda state, x: nnx.merge(graph, state)(x)[0].sum()
        jaxpr = jax.make_jaxpr(jax.grad(scalar, argnums=(0, 1)))(state, x)
    views = [
        e.params["jaxpr"]
        for e in accounts.equations(jaxpr.jaxpr)
        if e.primitive.name == "shard_map"
    ]
    assert len(views) >= 2, "forward and backward"
    inside = [equation for view in views for equation in accounts.equations(view)]
    return inside, max(
        var.aval.size
        for equation in inside
        for var in equation.outvars
        if hasattr(var.aval, "size")
    )
