"""Sequences divided over devices (cp) that other systems got wrong, planted here: what checks a
mesh notices each.

Each test first asks the same of the code as it is.
"""

import ast
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from numpy.random import default_rng
from planted import errors_of, gathered_without_sum, plant_weights, with_gradient
from support import decoder, random_weights, state_on_mesh, use_mesh, without_mesh
from variants import small_model

import jaxtp
from jaxtp.collectives import axis_size, batch_spec, device_view, token_spec
from jaxtp.layers import context
from jaxtp.layers.attention import CausalSelfAttention
from jaxtp.layers.context import Sequences
from jaxtp.layers.kernels.select import KERNELS
from jaxtp.layers.positions import Part
from jaxtp.mesh import CP, mesh_of, mesh_shape
from jaxtp.models.decoder import Decoder
from jaxtp.tools.check.parity import on_host

pytestmark = pytest.mark.wide

B = 2
T = 16
N = 4
K = 2
H = 4
WRONG = 1e-3
RIGHT = 1e-5
SEGMENTS = np.array([[1] * 5 + [2] * 6 + [3] * 3 + [0] * 2, [1] * 7 + [0] * 9], np.int32)
"""Documents that cross the middle of a row, and a row whose second half is padding."""
PARTS = ("output", "dq", "dk", "dv", "d sinks")
run = partial(KERNELS["xla"].run, scale=0.6, softcap=None)
SINKS = np.linspace(-1, 2, N).astype(np.float32)


@cache
def arrays():
    random = default_rng(0)
    shapes = [(B, T, heads, H) for heads in (N, K, K, N)]
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def attended(cp, method, window=None, segments=SEGMENTS, kernel=run):
    """What attention gives over cp, and its gradients, in natural order."""
    with use_mesh(cp=cp):
        sequences = Sequences(zigzag=cp > 1 and method == "gather" and window is None)
        order = sequences.positions(T)

        def body(q, k, v, sinks, segments):
            given = replace(sequences, segments=segments)
            own = partial(kernel, window=window, sinks=context.of_heads(sinks, method))
            return given.attend(own, method, window, q, k, v)

        specs = (*[token_spec(None, None)] * 3, PartitionSpec(), batch_spec(None))
        view = device_view(body, "attend", specs, token_spec(None, None))

        @jax.jit
        def both(q, k, v, do):
            q, k, v, do = (x[:, order] for x in (q, k, v, do))
            y, pull = jax.vjp(
                lambda q, k, v, sinks: view(q, k, v, sinks, jnp.asarray(segments)), q, k, v, SINKS
            )
            *grads, d_sinks = pull(do)
            return (*(sequences.natural(x) for x in (y, *grads)), d_sinks)

        return dict(zip(PARTS, map(np.asarray, both(*arrays())), strict=True))


@cache
def expected(window):
    return attended(1, "gather", window)


def off(method, window=None, **given):
    """How far each part over cp 2 is from one device; a NaN is infinitely far."""
    return errors_of(attended(2, method, window, **given), expected(window))


@cache
def without_a_bug(method, window=None):
    """Whether attention is right as it is; to be asked before a bug is planted."""
    return max(off(method, window).values()) < RIGHT


def test_transformer_engine_1557_gradients_of_keys_and_values_are_summed(monkeypatch):
    """https://github.com/NVIDIA/TransformerEngine/issues/1557: gradients of queries, keys and
    values were wrong over cp. Here those of keys and values have in them what the queries of other
    devices add.
    """
    assert without_a_bug("gather")
    monkeypatch.setattr(context, "all_gather", lambda x, *_, **__: gathered_without_sum(CP)(x))
    errors = off("gather")
    assert errors["output"] < RIGHT
    assert errors["dq"] < RIGHT
    assert min(errors["dk"], errors["dv"]) > WRONG


def padding_sees_nothing(q, k, v, segments, *, part=None, window, sinks):
    """A softmax over nothing, where a token of padding sees neither documents nor itself."""
    at = jnp.arange(q.shape[1]) if part is None else part.queries
    own = jnp.take(segments, at, axis=1)
    sees = (own[:, :, None] == segments[:, None]) & (segments[:, None] > 0)
    sees &= at[:, None] >= jnp.arange(segments.shape[1])
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    scores = jnp.where(sees[:, None], jnp.einsum("btnh,bsnh->bnts", q, k), -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def test_megatron_lm_1764_a_device_that_sees_only_padding_gives_no_nan():
    """https://github.com/NVIDIA/Megatron-LM/issues/1764: where all tokens of a device were masked,
    its attention was NaN. Here a query that sees nothing gives zero.
    """
    assert without_a_bug("gather")
    assert without_a_bug("gather", 3)
    assert off("gather", kernel=padding_sees_nothing)["output"] == float("inf")
    for window in (None, 3):  # with a window, the first device has nothing before it
        only_padding = attended(2, "gather", window, segments=np.zeros((B, T), np.int32))
        assert all(np.isfinite(part).all() for part in only_padding.values())


def without_documents(q, k, v, segments, **settings):
    return run(q, k, v, None, **settings)


def test_maxtext_4476_packed_documents_do_not_leak():
    """https://github.com/AI-Hypercomputer/maxtext/issues/4476: a fast kernel attended across the
    documents of a packed row without a word. Here every kernel and method keeps them apart.
    """
    assert without_a_bug("gather")
    assert off("gather", kernel=without_documents)["output"] > WRONG


def test_automodel_2999_segments_are_those_of_the_whole_row():
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2999: over cp some models passed over where the
    documents of packed rows begin and end. Here a device knows those of the whole row, and not of
    its own part alone.
    """
    assert without_a_bug("ulysses")

    def of_the_first_part(q, k, v, segments, **settings):
        return run(q, k, v, jnp.tile(segments[:, : T // 2], 2), **settings)

    assert off("ulysses", kernel=of_the_first_part)["output"] > WRONG


def test_accelerate_4177_a_window_goes_on_in_the_part_of_another_device(monkeypatch):
    """https://github.com/huggingface/accelerate/pull/4177: over cp the masks of layers with windows
    were dropped, so that they saw everything, and such models are now refused. Here a window ends
    where it would on one device.
    """
    assert without_a_bug("gather", 3)
    monkeypatch.setattr(
        context, "Part", lambda queries, first: Part(queries - queries[0], first - queries[0])
    )
    assert off("gather", 3)["output"] > WRONG


def test_diffusers_14265_keys_of_others_are_not_ones_own_again(monkeypatch):
    """https://github.com/huggingface/diffusers/issues/14265: the backward pass of a ring read the
    keys and values of its first turn in all turns. Here what comes from a neighbour is the
    neighbour's.
    """
    assert without_a_bug("gather", 3)
    monkeypatch.setattr(context, "permute", lambda x, *_: x)
    assert off("gather", 3)["output"] > WRONG


def test_ms_swift_10071_parts_are_put_back_in_the_order_in_which_they_were_taken(monkeypatch):
    """https://github.com/modelscope/ms-swift/pull/10071: parts of sequences were put together in
    zigzag order though they had been cut in another, so that numbers of tokens stood at the wrong
    ones. Here one function knows the order.
    """
    assert without_a_bug("gather")
    monkeypatch.setattr(context, "to_natural", lambda x, *_: x)
    assert off("gather")["output"] > WRONG


def without_sinks(q, k, v, segments, *, sinks, **settings):
    return run(q, k, v, segments, sinks=jnp.full_like(sinks, -jnp.inf), **settings)


def test_prime_rl_3397_sinks_are_not_dropped_over_cp(monkeypatch):
    """https://github.com/PrimeIntellect-ai/prime-rl/pull/3397: over cp another function did
    attention, which took the sinks and did not use them. Here every method has them, and sums their
    gradient over cp once.
    """
    for method in ("gather", "ulysses"):
        assert without_a_bug(method)
        errors = off(method, kernel=without_sinks)
        assert min(errors["output"], errors["d sinks"]) > WRONG
    assert model_without_a_bug()
    load = CausalSelfAttention._load_sinks
    summed_again = with_gradient(lambda grad: grad * axis_size(CP))
    monkeypatch.setattr(
        CausalSelfAttention, "_load_sinks", lambda self, *args: summed_again(load(self, *args))
    )
    loss, gradients = model_off()
    assert loss < RIGHT
    assert {name for name, error in gradients.items() if error > WRONG} == {NAME_OF_SINKS}


def test_verl_4551_sinks_are_those_of_the_heads_of_a_device(monkeypatch):
    """https://github.com/verl-project/verl/pull/4551: with ulysses a device attends with a part of
    the heads, and had the sinks of all. Here it has those of its heads; those of other heads would
    be no error where kernels take any.
    """
    assert without_a_bug("ulysses")
    monkeypatch.setattr(context, "of_heads", lambda x, method: x[: x.size // 2])
    errors = off("ulysses")
    assert min(errors["output"], errors["d sinks"]) > WRONG


# A whole model: its loss and gradients over cp 2, against one device.
MODEL = small_model(vocab_size=29, num_heads=N, num_kv_heads=K, loss_chunk=T, attention_sinks=True)
NAME_OF_SINKS = "blocks.attention.sinks"


build = decoder(MODEL)


@cache
def weights():
    return random_weights(build)


def batch():
    tokens = default_rng(1).integers(0, MODEL.vocab_size, (B, T + 1), np.int32)
    return tokens[:, :-1], np.where(SEGMENTS > 0, tokens[:, 1:], -100)


def trained(graph, state):
    def mean(state, ids, labels):
        total, count = nnx.merge(graph, state).loss(ids, labels, segments=jnp.asarray(SEGMENTS))
        return total / count

    return jax.jit(jax.value_and_grad(mean))(state, *batch())


@cache
def on_one_device():
    loss, grads = trained(*without_mesh(build, weights()))
    return float(loss), {
        ".".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(grads)
    }


def model_off():
    """How far the loss and each gradient are from one device."""
    mesh = mesh_of(mesh_shape(cp=2))
    graph, state = state_on_mesh(build, weights(), mesh)
    with jax.set_mesh(mesh):
        loss, grads = trained(graph, state)
        found = on_host(grads, mesh)
    expected_loss, expected_grads = on_one_device()
    return abs(float(loss) / expected_loss - 1), errors_of(found, expected_grads)


@cache
def model_without_a_bug():
    loss, gradients = model_off()
    return max(loss, *gradients.values()) < RIGHT


def test_verl_4250_labels_are_shifted_before_the_split(monkeypatch):
    """https://github.com/verl-project/verl/pull/4250: labels were shifted in each part by itself,
    and the last of a part was its own first token. Here labels are made with the row, before it is
    divided.
    """
    assert model_without_a_bug()
    loss_of_hidden = Decoder.loss_of_hidden

    def shifted_after(self, x, labels, **settings):
        last = device_view(
            lambda y: y.at[:, -1].set(y[:, 0]), "shift", (token_spec(),), token_spec()
        )
        return loss_of_hidden(self, x, last(labels), **settings)

    monkeypatch.setattr(Decoder, "loss_of_hidden", shifted_after)
    loss, gradients = model_off()
    assert loss > WRONG
    assert max(gradients.values()) > WRONG


def test_megatron_lm_673_gradients_are_not_divided_by_cp(monkeypatch):
    """https://github.com/NVIDIA/Megatron-LM/issues/673: the loss was scaled by cp beside a gradient
    that was divided by it, or not, so that norms depended on cp. Here gradients are summed, and
    divided by the number of tokens once.
    """
    assert model_without_a_bug()
    plant_weights(monkeypatch, with_gradient(lambda grad: grad / axis_size(CP)))
    loss, gradients = model_off()
    assert loss < RIGHT
    assert gradients["blocks.mlp.down.kernel"] == pytest.approx(0.5, abs=1e-4)


def test_megatron_lm_4075_positions_are_those_in_the_whole_row(monkeypatch):
    """https://github.com/NVIDIA/Megatron-LM/pull/4075: where a device has a part of a packed
    sequence, rotary positions could be counted from zero again. Here they are those in the row, or
    in the document.
    """
    assert model_without_a_bug()
    monkeypatch.setattr(
        Sequences, "local_positions", lambda self, length: jnp.arange(length // axis_size(CP))
    )
    loss, _ = model_off()
    assert loss > WRONG / 10


def keywords(tree):
    """Names of the arguments in all calls of a program."""
    return {
        word.arg for call in ast.walk(tree) if isinstance(call, ast.Call) for word in call.keywords
    }


def test_jax_32484_the_log_sum_exp_of_cudnn_is_never_differentiated():
    """https://github.com/jax-ml/jax/issues/32484: what was added there, to merge parts of
    attention, has no gradient in cuDNN's implementation, and no test on a CPU would see it. Here
    nothing asks for it.
    """
    texts = [path.read_text() for path in Path(jaxtp.__file__).parent.rglob("*.py")]
    assert len(texts) > 100
    assert not any(
        "return_residual" in keywords(ast.parse(text))
        for text in texts
        if "return_residual" in text
    )
    planted = "jax.nn.dot_product_attention(q, k, v, implementation='cudnn', return_residual=True)"
    assert "return_residual" in keywords(ast.parse(planted))
