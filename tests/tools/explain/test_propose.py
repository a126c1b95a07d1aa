"""Proposed plans: the pairs that are found, what is shared, what is left whole, and what is said
about it.
"""

import itertools
from functools import partial

import flax_models as models
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tools.explain.nets import net, over_sum, seeded

from jaxtp.analysis.propose import propose_plan
from jaxtp.mesh import MeshError, mesh_shape
from jaxtp.plans.plan import PlanError
from jaxtp.plans.styles import (
    Colwise,
    ContextParallel,
    PrepareInput,
    PrepareOutput,
    Replicate,
    Rowwise,
)

X = jax.ShapeDtypeStruct((8, 6, 16), jnp.float32)
IDS = jax.ShapeDtypeStruct((8, 6), jnp.int32)
SHARED_INPUT = PrepareInput(Replicate(), Replicate())
COL = Colwise()
ROW = Rowwise()
PAIR = {"up": COL, "down": ROW}
ACTIVATION = 8 * 6 * 16 * 4
"""Bytes of `X`."""
ALL_REDUCE = 2 * 3 / 4 * ACTIVATION
"""Bytes that each of four devices sends in an all-reduce of it."""
mlp = seeded(models.FeedForward)


def propose(make, *inputs, tp=4, cp=1, **options):
    """The plan for a model that `make(rngs=...)` makes, with nothing printed."""
    mesh = {"tp": tp, "cp": cp}
    return propose_plan(seeded(make), *(inputs or (X,)), mesh=mesh, report=None, **options)


def reason(proposal, module):
    (found,) = [reason for reason in proposal.reasons if reason.module == module]
    return found


def sequence(*widths):
    return lambda rngs: nnx.Sequential(
        *(nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(widths))
    )


def rnn(cell):
    return lambda rngs: nnx.RNN(cell(16, 16, rngs=rngs), rngs=rngs)


def megatron(prefix=""):
    columns = ["attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"]
    plan = {
        "attention": SHARED_INPUT,
        "feed_forward": SHARED_INPUT,
        **dict.fromkeys(columns, COL),
        "attention.wo": ROW,
        "feed_forward.w2": ROW,
    }
    return {prefix + path: style for path, style in plan.items()}


def test_megatron_s_pattern_is_found_with_its_cost():
    """Two all-reduces forward and two backward, in the order of the model."""
    block = propose(models.LlamaBlock)
    assert block == megatron()
    assert [path for path in block if "." not in path] == ["attention", "feed_forward"]
    assert block.bytes == 4 * ALL_REDUCE
    assert propose(models.Llama, IDS) == megatron("layers.*.")
    stacked = propose(models.Stack)
    assert stacked.keys() == {"blocks.mlp", "blocks.mlp.w1", "blocks.mlp.w2", "blocks.mlp.w3"}
    assert stacked.bytes == 3 * 2 * ALL_REDUCE


def test_a_device_sends_its_part_of_the_batch():
    plan = propose_plan(mlp, X, mesh={"dp": 2, "fsdp": 2, "tp": 2}, report=None)
    assert plan.bytes == 2 * 1 / 2 * ACTIVATION / 4


class ParallelBlock(models.LlamaBlock):
    def __call__(self, x):
        h = self.attention_norm(x)
        return x + self.attention(h) + self.feed_forward(h)


def test_an_array_that_several_modules_read_is_shared_where_it_is_made():
    plan = propose(ParallelBlock)
    assert plan["attention_norm"] == PrepareOutput(Replicate(), Replicate())
    assert not {"attention", "feed_forward"} & plan.keys()
    assert reason(plan, "attention_norm").bytes == ALL_REDUCE


def test_an_array_that_nobody_can_share_is_reduced_by_each():
    def run(m, x):
        h = over_sum(m.first(x))
        return m.down(m.up(h) * m.gate(h))

    plan = propose(net(run, **dict.fromkeys(("first", "up", "gate", "down"), (16, 16))))
    assert plan == PAIR | {"gate": COL}
    assert plan.bytes == 3 * ALL_REDUCE


class Cross(nnx.Module):
    """Attention of an array to another one, which is its second argument, or has a name."""

    def __init__(self, rngs, named=False):
        self.a = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.named = named

    def __call__(self, x):
        memory = over_sum(self.first(x) * 2.0)
        return self.a(x, inputs_k=memory) if self.named else self.a(x, memory)


def test_a_keyword_and_a_second_argument_are_shared():
    layouts = (None, Replicate())
    assert propose(Cross)["a"] == PrepareInput(layouts, layouts)
    named = {"inputs_k": Replicate()}
    assert propose(partial(Cross, named=True))["a"] == PrepareInput(None, None, named, named)


CHAINS = {
    "16 64 16": "col row",
    "16 64 32 64 16": "col row col row",
    # Of three, two can be split: without a gradient of its input the first pair moves least, unless
    # it makes much.
    "16 64 64 16": "col row -",
    "16 64 256 16": "- col row",
    "16 64 64 64 64 16": "col row - col row",
}


@pytest.mark.parametrize("widths", CHAINS)
def test_most_layers_of_a_chain_are_split_and_least_is_moved(widths):
    proposal = propose(sequence(*map(int, widths.split())))
    names = {"col": COL, "row": ROW}
    styles = enumerate(CHAINS[widths].split())
    assert proposal == {f"layers.{index}": names[name] for index, name in styles if name in names}
    assert proposal.bytes == sum(reason.bytes for reason in proposal.reasons)


WHOLE = {
    "makes 6 features, which tp 4 does not divide": (sequence(16, 6), "layers.0"),
    "a split saves 1,560 bytes": (sequence(64, 8), "layers.0", X.update(shape=(8, 600, 64))),
    "becomes a dim of 2": (partial(models.Attention, kv_heads=2), "wk"),
    "divided into 3": (rnn(nnx.GRUCell), "cell.dense_h"),
    "column and a row": (rnn(nnx.LSTMCell), "cell.hi"),
    "splits its submodules": (
        partial(nnx.Conv, 16, 16, (3,), feature_group_count=16),
        "the model itself",
    ),
}


@pytest.mark.parametrize("why", WHOLE)
def test_the_reason_for_no_split_is_said(why):
    make, module, *inputs = WHOLE[why]
    proposal = propose(make, *inputs)
    assert proposal == {}
    assert proposal.bytes == 0
    assert why in reason(proposal, module).why
    assert str(proposal).startswith(
        "no plan for mesh dp 1 x fsdp 1 x cp 1 x tp 4: nothing in this model is worth"
    )


def test_layers_that_move_more_together_are_left():
    """One column layer for four row layers: each would all-reduce what it makes."""

    def run(m, x):
        h = m.first(x)
        return [over_sum(layer(h)) for layer in (m.a, m.b, m.c, m.d)]

    proposal = propose(net(run, **dict.fromkeys(("first", "a", "b", "c", "d"), (16, 16))))
    assert proposal == {}
    assert "no less than layer by layer" in reason(proposal, "first").why


class Twice(nnx.Module):
    def __init__(self, rngs):
        self.first = self.second = models.FeedForward(rngs)

    def __call__(self, x):
        return self.second(self.first(x) / 2)


class TwiceAndWhole(Twice):
    """One of its layers also runs on an array that is not split."""

    def __call__(self, x):
        return super().__call__(x) + self.first.w2(jnp.tile(x, 2))


def test_a_shared_layer_is_split_once_or_not_at_all():
    assert propose(Twice).keys() == {"first", "first.w1", "first.w2", "first.w3"}
    proposal = propose(TwiceAndWhole)
    assert proposal == {}
    assert "also called on an array that is not split" in reason(proposal, "first.w1").why


def test_tied_parameters_are_left_whole():
    def tied(rngs):
        model = sequence(16, 16, 16)(rngs)
        model.layers[1].kernel = model.layers[0].kernel
        return model

    proposal = propose(tied)
    assert proposal == {}
    assert "shares a parameter" in reason(proposal, "layers.*").why


class Ends(nnx.Module):
    def __init__(self, rngs, vocabulary, tied=False):
        self.embed = nnx.Embed(vocabulary, 16, rngs=rngs)
        self.head = None if tied else nnx.Linear(16, vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        decode = self.head or self.embed.attend
        return decode(over_sum(self.embed(ids)))


def test_vocabularies_are_split_where_that_saves_more_than_it_moves():
    """64 x 16 floats against 8 x 6 positions: not; 4,096 x 16: yes; one table for both ends: by
    its rows.
    """
    for whole in (64, 4097):
        assert propose(partial(Ends, vocabulary=whole), IDS) == {}
    large = propose(partial(Ends, vocabulary=4096), IDS)
    assert large == {"embed": ROW, "head": COL}
    assert reason(large, "embed").bytes == ALL_REDUCE
    tied = propose(partial(Ends, vocabulary=4096, tied=True), IDS)
    assert tied == {"embed": ROW}
    assert tied.bytes == 2 * ALL_REDUCE


def test_patterns_match_no_layer_that_stays_whole():
    """One block of three has heads that tp does not divide: the others are named one by one."""

    def make(rngs):
        model = models.Llama(rngs, num_layers=3)
        model.layers[1].attention = models.Attention(rngs, kv_heads=2)
        return model

    plan = propose(make, IDS)
    assert {
        "layers.0.attention.wk",
        "layers.2.attention.wk",
        "layers.*.feed_forward.w1",
    } <= plan.keys()
    assert not {"layers.*.attention.wk", "layers.1.attention.wk"} & plan.keys()


def test_a_layer_on_each_head_is_gathered_for():
    def run(m, x):
        heads = m.head(m.up(x).reshape(8, 6, 4, 16))
        return m.down(heads.reshape(8, 6, 64))

    proposal = propose(net(run, up=(16, 64), down=(64, 16), head=(16, 16), unused=(16, 16)))
    assert proposal == PAIR
    assert proposal.bytes == 3 / 4 * 8 * 6 * 4 * (2 * 16 + 2 * 64)
    why = "gathers its input, which up splits, and runs on the whole array"
    assert reason(proposal, "head").why == why
    assert reason(proposal, "unused").why == "does not affect the result of this call"


def test_every_layer_has_a_reason():
    proposal = propose(models.Llama, IDS)
    assert {reason.module for reason in proposal.reasons} == {
        "tok_embeddings",
        "output",
        *megatron("layers.*."),
    }
    text = str(proposal)
    for found in proposal.reasons:
        assert found.module in text
        assert found.why in text
    assert "stays split up to layers.*.attention.wo" in text
    assert "layers.*.attention  PrepareInput(Replicate(), Replicate())" in text


def test_a_proposal_is_printed_and_takes_a_mesh_in_context(capsys):
    mesh = jax.make_mesh(
        (1, 2, 4), ("dp", "fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    with jax.set_mesh(mesh):
        proposal = propose_plan(mlp, X)
    assert capsys.readouterr().out == f"{proposal}\n"
    assert proposal.sizes == mesh_shape(fsdp=2, tp=4)
    for same in (mesh, jax.sharding.AbstractMesh((2, 16), ("fsdp", "tp")), "fsdp=2,tp=4"):
        assert propose_plan(mlp, X, mesh=same, report=None) == proposal
    with pytest.raises(ValueError, match="dim 0 of shape"):
        propose_plan(mlp, X, mesh={"fsdp": 3, "tp": 2})


def test_a_mesh_without_tp_and_what_is_no_model_are_refused():
    for mesh, message in (
        (None, "propose_plan needs a mesh"),
        ({"fsdp": 4}, "has 1 device"),
        ({"tp": 0}, "tp=0"),
    ):
        with pytest.raises(MeshError, match=message):
            propose_plan(mlp, X, mesh=mesh)
    for model in ({}, lambda: 3, None):
        with pytest.raises(PlanError, match=r"nnx\.Module"):
            propose_plan(model, X, mesh={"tp": 2})


def test_over_cp_the_model_itself_takes_the_sequences():
    """Each device sends over tp what its tokens need."""
    alone, over_cp = (propose(models.FeedForward, cp=cp) for cp in (1, 2))
    assert over_cp == alone | {"": ContextParallel()}
    assert over_cp.bytes == alone.bytes / 2
    assert "sequences are divided over cp" in reason(over_cp, "the model itself").why
    with pytest.raises(ValueError, match="has no sequence: use cp=1"):
        propose(models.FeedForward, X.update(shape=(8, 16)), cp=2)
    with pytest.raises(
        MeshError, match=r"it cannot be both Rowwise\(\) and, for cp=2, ContextParallel\(\)"
    ):
        propose(partial(nnx.Embed, 4096, 16), IDS, cp=2)


def test_a_plan_for_another_function_than_call():
    proposal = propose(
        models.Llama,
        IDS,
        call=lambda model, ids: model.layers[0].feed_forward(model.tok_embeddings(ids)),
    )
    layer = "layers.0.feed_forward"
    assert proposal.keys() == {layer, f"{layer}.w1", f"{layer}.w2", f"{layer}.w3"}


class WantsArrays(models.FeedForward):
    def __call__(self, x):
        return super().__call__(x) + jax.lax.reduce_max(x, (2,))[..., None]


class BeforeIt(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.mlp = WantsArrays(rngs)

    def __call__(self, x):
        return self.mlp(jnp.sin(self.first(x)) / 2)


def test_code_that_wants_arrays_gets_a_plan_without_shared_inputs():
    proposal = propose(BeforeIt)
    assert proposal == {"mlp.w1": COL, "mlp.w3": COL, "mlp.w2": ROW}
    assert proposal.bytes == 3 * ALL_REDUCE
    assert "column layers do not share inputs" in reason(proposal, "the model itself").why
