"""A plain float64 mixture of experts without the package's code, and the layer to compare with it."""

from functools import cache

import accounts
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from support import by_name, sizes_of, state_on_mesh

from jaxtp.collectives import batch_spec
from jaxtp.layers.balance import balance
from jaxtp.layers.context import Sequences
from jaxtp.layers.experts import MixtureOfExperts
from jaxtp.layers.linear import LayerContext
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import mesh_of

B, T, D, E, F = 8, 8, 16, 6, 8
LORA = LoraConfig(rank=3, alpha=5.0)
NOT_TIED = 1e-5
"""Minimum gap between the last chosen score and the next, relative to it, unless they are equal."""

ROUTING = ("times_chosen", "scores", "squared_normaliser", "entropy", "computed")


# The mathematics, without anything of the package.
def choose(scores, k):
    """Returns the k experts with the highest scores; ties go to the first: `[N, E] -> [N, k]`."""
    return np.argsort(-np.asarray(scores), axis=1, kind="stable")[:, :k]


def scores_of(logits, config):
    """Returns the scores, and their shares of the sum."""
    if config.router_scores == "sigmoid":
        scores = 1 / (1 + jnp.exp(-logits))
        return scores, scores / jnp.sum(scores, axis=-1, keepdims=True)
    scores = jnp.exp(logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    return scores, scores


def in_groups(scores, config):
    """Returns NumPy scores `[N, E]`, -inf outside of each token's groups, and the scores of the groups `[N, G]`."""
    limited = np.full_like(scores, -np.inf)
    of_groups = np.zeros((len(scores), config.expert_groups))
    size = config.num_experts // config.expert_groups
    for token, row in enumerate(scores):
        for group in range(config.expert_groups):
            best = sorted(row[group * size : (group + 1) * size])[::-1]
            of_groups[token, group] = best[0] if config.group_score == "max" else sum(best[:2])
        for group in choose(of_groups[token : token + 1], config.groups_per_token)[0]:
            limited[token, group * size : (group + 1) * size] = row[group * size : (group + 1) * size]
    return limited, of_groups


def is_near_tie(scores, k):
    """Returns whether rounding may change which k are the highest, which no two equal scores are."""
    ordered = -np.sort(-scores, axis=1)
    last, following = (ordered[:, [i]] for i in (k - 1, min(k, scores.shape[1] - 1)))
    gap = (last - following) / np.maximum(np.abs(last), 1e-30)
    return ((gap > 1e-9) & (gap < NOT_TIED)).any()


def activated(products, config):
    first, *others = products
    if config.swiglu_limit is not None:
        first, others = (
            jnp.minimum(first, config.swiglu_limit),
            [jnp.clip(others[0], -config.swiglu_limit, config.swiglu_limit) + 1],
        )
    slope = 1.702 if config.activation == "quick_gelu" else 1.0
    first = jnp.maximum(first, 0) ** 2 if config.activation == "relu2" else first / (1 + jnp.exp(-slope * first))
    return first * others[0] if config.mlp == "gated" else first


def projected(x, weights, kernel, bias, lora, expert=...):
    """Returns a projection with its bias and its adapter, if it has them."""
    y = x @ weights[kernel][expert]
    if f"{lora}.a" in weights:
        y += LORA.scale * (x @ weights[f"{lora}.a"][expert] @ weights[f"{lora}.b"][expert])
    return y + weights[bias][expert] if bias in weights else y


def mixture(weights, x, counts, config, experts):
    """Returns outputs for tokens `x [N, D]`, and per-token terms of the sums; `counts` is False for padding."""
    logits = x @ weights["router"] + weights.get("router_bias", 0)
    normaliser = jnp.log(jnp.sum(jnp.exp(logits), axis=1))
    scores, of_all = scores_of(logits, config)
    chosen = (np.asarray(experts)[:, :, None] == np.arange(config.num_experts)).any(axis=1) & counts[:, None]
    shares = jnp.where(chosen, scores, 0.0)
    if config.normalize_experts:
        divisor = jnp.maximum(jnp.sum(shares, axis=1), config.normalize_floor)
        shares = shares / jnp.where(counts, divisor, 1.0)[:, None]
    y = jnp.zeros_like(x)
    for e in range(config.num_experts):
        one = lambda x, name, e=e: projected(x, weights, name, f"{name}_bias", f"{name}_lora", e)
        products = [one(x, name) for name in ("gate", "up") if name in weights]
        y += config.experts_scale * shares[:, e : e + 1] * one(activated(products, config), "down")
    if config.shared_experts:
        names = ("shared.gate_up.{}.0", "shared.gate_up.{}.1", "shared.up.{}.0")
        parts = ("kernels", "biases", "loras")
        products = [projected(x, weights, *map(n.format, parts)) for n in names if n.format("kernels") in weights]
        gate = 1 / (1 + jnp.exp(-x @ weights["shared_gate"])) if config.shared_experts_gate else 1.0
        down = ("shared.down.kernel", "shared.down.bias", "shared.down.loras.0")
        y += gate * projected(activated(products, config), weights, *down)
    sums = {
        "times_chosen": jnp.asarray(chosen, x.dtype),
        "scores": jnp.where(counts[:, None], of_all, 0.0),
        "squared_normaliser": jnp.where(counts, normaliser**2, 0.0),
        "entropy": jnp.where(counts, -jnp.sum(of_all * jnp.log(of_all), axis=1), 0.0),
        "computed": jnp.asarray(chosen.sum(axis=1), x.dtype),
    }
    return y, sums


def probe(y, sums):
    """Returns a scalar that depends on all outputs and sums, each with its own weight."""
    random = np.random.default_rng(7)
    total = jnp.sum(y * random.standard_normal(y.shape).astype(np.float32))
    for name in ("scores", "squared_normaliser"):
        total += jnp.sum(sums[name] * random.standard_normal(sums[name].shape).astype(np.float32))
    return total


def expected(weights, x, counts, config):
    """Returns the results of a float64 loop over experts."""
    with jax.enable_x64(True):
        weights = {name: jnp.asarray(np.asarray(array), jnp.float64) for name, array in weights.items()}
        flat, counts = jnp.asarray(np.asarray(x), jnp.float64).reshape(-1, D), np.asarray(counts).reshape(-1)
        scores, _ = scores_of(flat @ weights["router"] + weights.get("router_bias", 0), config)
        preferred = np.asarray(scores) + np.asarray(weights.get("selection_bias", 0.0))
        limited, of_groups = in_groups(preferred, config)
        experts = choose(limited, config.experts_per_token)
        unclear = is_near_tie(preferred, config.experts_per_token) or is_near_tie(of_groups, config.groups_per_token)
        assert not unclear, "rounding may choose another expert; take another seed"

        def run(weights, flat):
            y, sums = mixture(weights, flat, counts, config, experts)
            sums = {name: array.reshape(*x.shape[:2], *array.shape[1:]).sum(axis=1) for name, array in sums.items()}
            return probe(y.reshape(x.shape), sums), (y, sums)

        trained = {name: array for name, array in weights.items() if name != "selection_bias"}
        (_, (y, sums)), (grads, grad_x) = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(trained, flat)
        parts = {"output": y.reshape(x.shape), "input": grad_x.reshape(x.shape), **sums, **grads}
        return {name: np.asarray(array) for name, array in parts.items()}


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
            y, routing = nnx.merge(graph, params, rest)(x, Sequences(segments=segments if packed else None))
            sums = {name: getattr(routing, name).sum(axis=1) for name in ROUTING}
            return probe(y, sums), (y, sums)

        return jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(params, x)

    def layer(weights, x, segments):
        graph, state = state_on_mesh(make, weights, on)
        with jax.set_mesh(on):
            x, segments = (jax.device_put(a, jax.NamedSharding(on, batch_spec(None))) for a in (x, segments))
            (_, (y, sums)), (grads, grad_x) = run(graph, state, x, segments)
            return {"output": y, "input": grad_x, **sums, **by_name(grads, on)}

    return layer


# Balance.
def balance_of(router, layers, counts, labels, chosen, config):
    """Returns the auxiliary loss and z-loss of routers with inputs `[L, B, T, D]`; each label counts its sequence's."""
    logits, k = layers @ router, config.experts_per_token
    scores = jnp.where(counts[:, :, None], scores_of(logits, config)[1], 0.0)
    n = np.maximum(counts.sum(axis=1), 1)[:, None]
    share = scores.shape[-1] / (k * n) * chosen.sum(axis=2)  # [L, B, E]
    loss = jnp.sum(share * scores.sum(axis=2) / n, axis=2)
    squared = jnp.sum(jnp.where(counts, jax.nn.logsumexp(logits, axis=3) ** 2, 0.0), axis=2) / n[:, 0]
    of_labels = (labels != -100).sum(axis=1) / len(layers)
    return jnp.sum(of_labels * loss), jnp.sum(of_labels * squared)


def expected_balance(weights, layers, counts, labels, config):
    """Returns the losses, and gradients of their weighted sum, in float64."""
    k, counts = config.experts_per_token, np.asarray(counts)
    with jax.enable_x64(True):
        router, layers = (jnp.asarray(np.asarray(a), jnp.float64) for a in (weights["router"], layers))
        experts = choose(np.asarray(layers @ router).reshape(-1, config.num_experts), k)
        chosen = (experts[:, :, None] == np.arange(config.num_experts)).any(axis=1)
        chosen = chosen.reshape(*layers.shape[:3], -1) & counts[:, :, None]

        def run(router, layers):
            loss, squared = balance_of(router, layers, counts, labels, chosen, config)
            return loss + 0.3 * squared, (loss, squared)

        (_, sums), grads = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(router, layers)
        names = ("balance_loss", "router_z_loss", "router", "input")
        return {name: np.asarray(array) for name, array in zip(names, (*sums, *grads), strict=True)}


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
            segments, labels = (jax.device_put(a, jax.NamedSharding(on, batch_spec(None))) for a in (segments, labels))
            (_, found), (grads, grad_x) = run(graph, state, jnp.asarray(layers), segments, labels)
            losses = {"balance_loss": found.balance_loss, "router_z_loss": found.router_z_loss}
            result = {**losses, "router": by_name(grads, on)["router"], "input": grad_x}
            assert float(found.dropped) == 0
            return {name: np.asarray(a) for name, a in result.items()}, np.asarray(found.times_chosen[0])

    return balanced


# Work.
def work(mesh, config, width=64, batch=32, length=32):
    """Returns the equations of a device's program, forward and backward, and the size of the largest array that
    they make."""
    with jax.set_mesh(mesh_of(sizes_of(mesh))):
        make = lambda: MixtureOfExperts(width, config, LayerContext(sequence_parallel=None), rngs=nnx.Rngs(0))
        graph, state = nnx.split(nnx.eval_shape(make))
        x = jax.ShapeDtypeStruct((batch, length, width), jnp.float32)
        scalar = lambda state, x: nnx.merge(graph, state)(x)[0].sum()
        jaxpr = jax.make_jaxpr(jax.grad(scalar, argnums=(0, 1)))(state, x)
    views = [e.params["jaxpr"] for e in accounts.equations(jaxpr.jaxpr) if e.primitive.name == "shard_map"]
    assert len(views) >= 2, "forward and backward"
    inside = [equation for view in views for equation in accounts.equations(view)]
    return inside, max(var.aval.size for equation in inside for var in equation.outvars if hasattr(var.aval, "size"))
