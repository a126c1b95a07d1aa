"""Bugs of context parallelism in other packages, planted here: what checks a mesh notices each.

Each test is named after the issue that reported it. Without the bug the same check passes.
"""

import ast
import dataclasses
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import random_weights, relative_error, state_on_mesh, without_mesh

import jaxtp
from jaxtp.check.parity import on_host
from jaxtp.collectives import axis_size, batch_spec, device_view, token_spec
from jaxtp.layers import context, parameter
from jaxtp.layers.activations import Part
from jaxtp.layers.context import Sequences
from jaxtp.layers.kernels import KERNELS
from jaxtp.mesh import CP, mesh_of, sized
from jaxtp.models.decoder import Decoder

B, T, N, K, H = 2, 16, 4, 2, 4
WRONG = 1e-3
RIGHT = 1e-5
SEGMENTS = np.array([[1] * 5 + [2] * 6 + [3] * 3 + [0] * 2, [1] * 7 + [0] * 9], np.int32)
"""Documents that cross the middle of a row, and a row whose second half is padding."""
PARTS = ("output", "dq", "dk", "dv")
run = partial(KERNELS["xla"].run, scale=0.6, softcap=None)


@cache
def arrays():
    random = np.random.default_rng(0)
    q, k, v, do = (random.standard_normal((B, T, heads, H)).astype(np.float32) for heads in (N, K, K, N))
    return q, k, v, do


def attended(cp, method, window=None, segments=SEGMENTS, kernel=run):
    """What attention gives over cp, and its gradients, in natural order."""
    with jax.set_mesh(mesh_of(sized(cp=cp))):
        sequences = Sequences(zigzag=cp > 1 and method == "gather" and window is None)
        order = sequences.positions(T)

        def body(q, k, v, segments):
            given = dataclasses.replace(sequences, segments=segments)
            return given.attend(partial(kernel, window=window), method, window, q, k, v)

        specs = (*[token_spec(None, None)] * 3, batch_spec(None))
        view = device_view(body, "attend", specs, token_spec(None, None))

        @jax.jit
        def both(q, k, v, do):
            q, k, v, do = (x[:, order] for x in (q, k, v, do))
            y, pull = jax.vjp(lambda q, k, v: view(q, k, v, jnp.asarray(segments)), q, k, v)
            return tuple(sequences.natural(x) for x in (y, *pull(do)))

        return dict(zip(PARTS, map(np.asarray, both(*arrays())), strict=True))


@cache
def expected(window):
    return attended(1, "gather", window)


def off(method, window=None, **given):
    """How far each part over cp 2 is from one device; a NaN is infinitely far."""
    found = attended(2, method, window, **given)
    errors = {part: relative_error(found[part], expected(window)[part]) for part in PARTS}
    return {part: float("inf") if np.isnan(error) else error for part, error in errors.items()}


@pytest.mark.parametrize(("method", "window"), [("gather", None), ("gather", 3), ("ulysses", None)])
def test_without_a_bug_attention_is_right(method, window):
    assert max(off(method, window).values()) < RIGHT


@jax.custom_vjp
def gathered(x):
    return jax.lax.all_gather(x, CP, axis=1, tiled=True)


def own_part_alone(length, grad):
    return (jax.lax.dynamic_slice_in_dim(grad, jax.lax.axis_index(CP) * length, length, 1),)


gathered.defvjp(lambda x: (gathered(x), x.shape[1]), own_part_alone)


def test_te_1557_dq_dk_dv(monkeypatch):
    """Gradients of keys and values leave out what the queries of other devices add."""
    monkeypatch.setattr(context, "all_gather", lambda x, *_, **__: gathered(x))
    errors = off("gather")
    assert errors["output"] < RIGHT
    assert errors["dq"] < RIGHT
    assert min(errors["dk"], errors["dv"]) > WRONG


def padding_sees_nothing(q, k, v, segments, *, scale, window, softcap, part=None):
    """A softmax over nothing, where a token of padding sees neither documents nor itself."""
    at = jnp.arange(q.shape[1]) if part is None else part.queries
    own, every = jnp.take(segments, at, axis=1), segments
    sees = (own[:, :, None] == every[:, None]) & (every[:, None] > 0) & (at[:, None] >= jnp.arange(every.shape[1]))
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.where(sees[:, None], scale * jnp.einsum("btnh,bsnh->bnts", q, k), -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def test_megatron_1764_nan_where_a_rank_sees_only_padding():
    assert off("gather", kernel=partial(padding_sees_nothing, scale=0.6, softcap=None))["output"] == float("inf")
    only_padding = attended(2, "gather", segments=np.zeros((B, T), np.int32))
    assert all(np.isfinite(part).all() for part in only_padding.values())
    halo = attended(2, "gather", 3, segments=np.zeros((B, T), np.int32))
    assert all(np.isfinite(part).all() for part in halo.values()), "the first device has nothing before it"


def without_documents(q, k, v, segments, **settings):
    return run(q, k, v, None, **settings)


@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_maxtext_4476_packed_documents_do_not_leak(method):
    assert off(method, kernel=without_documents)["output"] > WRONG


@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_te_1930_segments_are_those_of_the_whole_row(method):
    """As if each device took its own part of the segments for the row's."""

    def of_the_first_part(q, k, v, segments, **settings):
        return run(q, k, v, jnp.tile(segments[:, : T // 2], 2), **settings)

    assert off(method, kernel=of_the_first_part)["output"] > WRONG


def test_accelerate_4177_windows_under_cp(monkeypatch):
    """Positions are counted from the beginning of a device's part, so that its window ends there."""
    monkeypatch.setattr(context, "Part", lambda queries, first: Part(queries - queries[0], first - queries[0]))
    assert off("gather", 3)["output"] > WRONG


@pytest.mark.parametrize("window", [3, 6])
def test_automodel_3157_keys_of_others_are_not_ones_own_again(monkeypatch, window):
    """A ring that sends nothing on reads its own keys and values in each turn."""
    monkeypatch.setattr(context, "permute", lambda x, *_: x)
    assert off("gather", window)["output"] > WRONG


def test_zigzag_chunks_are_put_back_in_order(monkeypatch):
    monkeypatch.setattr(context, "to_natural", lambda x, *_: x)
    assert off("gather")["output"] > WRONG


# A whole model: its loss and gradients over cp 2, against one device.
MODEL = jaxtp.ModelConfig(
    vocab_size=29, d_model=16, num_layers=1, num_heads=N, num_kv_heads=K, head_dim=4, d_ff=24, loss_chunk=T
)


def build():
    return jaxtp.Decoder(MODEL, rngs=nnx.Rngs(0))


@cache
def weights():
    return random_weights(build)


def batch():
    tokens = np.random.default_rng(1).integers(0, MODEL.vocab_size, (B, T + 1), np.int32)
    return tokens[:, :-1], np.where(SEGMENTS > 0, tokens[:, 1:], -100)


def trained(graph, state):
    def mean(state, ids, labels):
        total, count = nnx.merge(graph, state).loss(ids, labels, segments_BT=jnp.asarray(SEGMENTS), context="gather")
        return total / count

    return jax.jit(jax.value_and_grad(mean))(state, *batch())


@cache
def on_one_device():
    loss, grads = trained(*without_mesh(build, weights()))
    return float(loss), {".".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(grads)}


def model_off():
    """How far the loss and the worst gradient are from one device."""
    mesh = mesh_of(sized(cp=2))
    graph, state = state_on_mesh(build, weights(), mesh)
    with jax.set_mesh(mesh):
        loss, grads = trained(graph, state)
        found = on_host(grads, mesh)
    expected_loss, expected_grads = on_one_device()
    errors = {name: relative_error(found[name], expected_grads[name]) for name in expected_grads}
    return abs(float(loss) / expected_loss - 1), errors


def test_without_a_bug_a_model_is_right():
    loss, gradients = model_off()
    assert max(loss, *gradients.values()) < RIGHT


def test_verl_4250_labels_are_shifted_before_the_split(monkeypatch):
    """Labels of each part by itself: the last of a part is not the first token of the next."""
    loss_of_hidden = Decoder.loss_of_hidden

    def shifted_after(self, x, labels, **settings):
        last = device_view(lambda y: y.at[:, -1].set(y[:, 0]), "shift", (token_spec(),), token_spec())
        return loss_of_hidden(self, x, last(labels), **settings)

    monkeypatch.setattr(Decoder, "loss_of_hidden", shifted_after)
    loss, gradients = model_off()
    assert loss > WRONG
    assert max(gradients.values()) > WRONG


def test_torchtitan_757_gradients_are_not_divided_by_cp(monkeypatch):
    """Gradients of weights are means over the devices along cp, as over those along dp."""
    load = parameter.load_weight

    @jax.custom_vjp
    def divided(x):
        return x

    divided.defvjp(lambda x: (x, None), lambda _, grad: (grad / axis_size(CP),))
    monkeypatch.setattr(parameter, "load_weight", lambda shard, *args, **kwargs: load(divided(shard), *args, **kwargs))
    loss, gradients = model_off()
    assert loss < RIGHT
    assert gradients["blocks.mlp.down.kernel"] == pytest.approx(0.5, abs=1e-4)


def test_positions_are_those_in_the_whole_row(monkeypatch):
    """Not counted from the beginning of each part."""
    monkeypatch.setattr(Sequences, "own_positions", lambda self, length: jnp.arange(length // axis_size(CP)))
    loss, _ = model_off()
    assert loss > WRONG / 10


def keywords(tree):
    """Names of the arguments in all calls of a program."""
    return {word.arg for call in ast.walk(tree) if isinstance(call, ast.Call) for word in call.keywords}


def test_jax_32484_log_sum_exp_of_cudnn_is_never_differentiated():
    """`return_residual` of `jax.nn.dot_product_attention` has no gradient there, and no test on a CPU would see it."""
    files = list((Path(jaxtp.__file__).parent).rglob("*.py"))
    assert len(files) > 100
    users = [path.name for path in files if "return_residual" in keywords(ast.parse(path.read_text()))]
    assert not users
    planted = "jax.nn.dot_product_attention(q, k, v, implementation='cudnn', return_residual=True)"
    assert "return_residual" in keywords(ast.parse(planted))
