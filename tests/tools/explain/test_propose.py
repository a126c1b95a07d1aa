"""Proposed plans: the pairs that are found, what is shared, what is left whole, and what is said about it."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tools.explain.nets import net, over_sum, seeded

from jaxtp.analysis.propose import propose_plan
from jaxtp.mesh import MeshError, mesh_shape
from jaxtp.parallelize.plan import PlanError
from jaxtp.parallelize.styles import Colwise, ContextParallel, PrepareInput, PrepareOutput, Replicate, Rowwise

X = jax.ShapeDtypeStruct((8, 6, 16), jnp.float32)
IDS = jax.ShapeDtypeStruct((8, 6), jnp.int32)
SHARED_INPUT = PrepareInput(Replicate(), Replicate())
SHARED_OUTPUT = PrepareOutput(Replicate(), Replicate())
COL, ROW = Colwise(), Rowwise()


def propose(make, *inputs, tp=4, **kwargs):
    """The plan for a model that `make(rngs)` makes, with nothing printed."""
    return propose_plan(seeded(make), *(inputs or (X,)), mesh={"tp": tp}, report=None, **kwargs)


def reason(proposal, module):
    (found,) = [reason for reason in proposal.reasons if reason.module == module]
    return found


def sequence(*widths):
    return lambda rngs: nnx.Sequential(*(nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(widths)))


class Attention(nnx.Module):
    """Separate projections; kv heads may be fewer."""

    def __init__(self, rngs, heads=4, kv_heads=4):
        self.heads = heads
        self.kv_heads = kv_heads
        self.q = nnx.Linear(16, 16, rngs=rngs)
        self.o = nnx.Linear(16, 16, rngs=rngs)
        self.k, self.v = (nnx.Linear(16, 16 // heads * kv_heads, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        rows = x.shape[:2]
        q = self.q(x).reshape(*rows, self.heads, -1)
        k, v = (layer(x).reshape(*rows, self.kv_heads, -1) for layer in (self.k, self.v))
        return self.o(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


def gated(m, x):
    return m.down(m.up(x) * nnx.silu(m.gate(x)))


Mlp = net(gated, up=(16, 64), gate=(16, 64), down=(64, 16))
mlp = seeded(Mlp)


class Block(nnx.Module):
    def __init__(self, rngs, parallel=False):
        self.attention_norm, self.mlp_norm = (nnx.RMSNorm(16, rngs=rngs) for _ in range(2))
        self.attention = Attention(rngs)
        self.mlp = Mlp(rngs=rngs)
        self.parallel = parallel

    def __call__(self, x):
        h = self.attention_norm(x)
        if self.parallel:
            return x + self.attention(h) + self.mlp(h)
        x = x + self.attention(h)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """Embedding, blocks in a list or a scanned stack, head."""

    def __init__(self, rngs, vocabulary=64, stacked=False, tied=False):
        self.embed = nnx.Embed(vocabulary, 16, rngs=rngs)
        make = nnx.split_rngs(splits=3)(nnx.vmap(Block))
        self.blocks = make(rngs) if stacked else nnx.List([Block(rngs) for _ in range(3)])
        self.norm = nnx.RMSNorm(16, rngs=rngs)
        self.head = None if tied else nnx.Linear(16, vocabulary, use_bias=False, rngs=rngs)
        self.stacked = stacked

    def __call__(self, ids):
        x = self.embed(ids)
        if self.stacked:
            run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x = run(x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        decode = self.head or self.embed.attend
        return decode(self.norm(x))


def megatron(prefix):
    attention = {f"{prefix}attention": SHARED_INPUT, **{f"{prefix}attention.{name}": COL for name in "qkv"}}
    mlp = {f"{prefix}mlp": SHARED_INPUT, f"{prefix}mlp.up": COL, f"{prefix}mlp.gate": COL}
    return attention | {f"{prefix}attention.o": ROW} | mlp | {f"{prefix}mlp.down": ROW}


ACTIVATION = 8 * 6 * 16 * 4
"""Bytes of `X`."""
ALL_REDUCE = 2 * 3 / 4 * ACTIVATION
"""Bytes that each of four devices sends in an all-reduce of it."""


def test_megatron_s_pattern_is_found_with_its_cost():
    """Two all-reduces forward and two backward, in the order of the model."""
    block = propose(Block)
    assert block == megatron("")
    assert list(block) == list(megatron(""))
    assert block.bytes == 4 * ALL_REDUCE
    assert propose(Decoder, IDS) == megatron("blocks.*.")
    stacked = propose(partial(Decoder, stacked=True), IDS)
    assert stacked == megatron("blocks.")
    assert stacked.bytes == 3 * block.bytes


def test_a_device_sends_its_part_of_the_batch():
    mesh = {"dp": 2, "fsdp": 2, "tp": 2}
    plan = propose_plan(mlp, X, mesh=mesh, report=None)
    assert plan.bytes == 2 * 1 / 2 * ACTIVATION / 4


def test_an_array_that_several_modules_read_is_shared_where_it_is_made():
    plan = propose(partial(Block, parallel=True))
    assert plan["attention_norm"] == SHARED_OUTPUT
    assert "attention" not in plan
    assert "mlp" not in plan
    assert reason(plan, "attention_norm").bytes == ALL_REDUCE


def test_an_array_that_nobody_can_share_is_reduced_by_each():
    def run(m, x):
        h = over_sum(m.first(x))
        return m.down(m.up(h) * m.gate(h))

    plan = propose(net(run, **dict.fromkeys(("first", "up", "gate", "down"), (16, 16))))
    assert plan == {"up": COL, "gate": COL, "down": ROW}
    assert plan.bytes == 3 * ALL_REDUCE


def test_a_keyword_and_a_second_argument_are_shared():
    class Cross(nnx.Module):
        def __init__(self, rngs, named=False):
            self.a = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
            self.first, self.out = (nnx.Linear(16, 16, rngs=rngs) for _ in range(2))
            self.named = named

        def __call__(self, x):
            memory = over_sum(self.first(x) * 2.0)
            return self.a(x, inputs_k=memory) if self.named else self.a(x, memory)

    layouts = (None, Replicate())
    assert propose(Cross)["a"] == PrepareInput(layouts, layouts)
    named = {"inputs_k": Replicate()}
    assert propose(partial(Cross, named=True))["a"] == PrepareInput(None, None, named, named)


@pytest.mark.parametrize(
    ("widths", "plan"),
    [
        ((16, 64, 16), {"layers.0": COL, "layers.1": ROW}),
        ((16, 64, 32, 64, 16), {"layers.0": COL, "layers.1": ROW, "layers.2": COL, "layers.3": ROW}),
        # Of three, two can be split: without a gradient of its input the first pair moves least, unless it makes much.
        ((16, 64, 64, 16), {"layers.0": COL, "layers.1": ROW}),
        ((16, 64, 256, 16), {"layers.1": COL, "layers.2": ROW}),
        ((16, 64, 64, 64, 64, 16), {"layers.0": COL, "layers.1": ROW, "layers.3": COL, "layers.4": ROW}),
    ],
)
def test_most_layers_of_a_chain_are_split_and_least_is_moved(widths, plan):
    proposal = propose(sequence(*widths))
    assert proposal == plan
    assert proposal.bytes == sum(reason.bytes for reason in proposal.reasons)


@pytest.mark.parametrize(
    ("make", "inputs", "module", "why"),
    [
        (sequence(16, 6), (X,), "layers.0", "makes 6 features, which tp 4 does not divide"),
        (sequence(64, 8), (X.update(shape=(8, 600, 64)),), "layers.0", "a split saves 1,560 bytes"),
        (partial(Attention, kv_heads=2), (X,), "k", "becomes a dim of 2"),
        (lambda rngs: nnx.RNN(nnx.GRUCell(16, 16, rngs=rngs), rngs=rngs), (X,), "cell.dense_h", "divided into 3"),
        (lambda rngs: nnx.RNN(nnx.LSTMCell(16, 16, rngs=rngs), rngs=rngs), (X,), "cell.hi", "column and a row"),
        (
            lambda rngs: nnx.Conv(16, 16, (3,), feature_group_count=16, rngs=rngs),
            (X,),
            "the model itself",
            "splits its submodules",
        ),
    ],
)
def test_the_reason_for_no_split_is_said(make, inputs, module, why):
    proposal = propose(make, *inputs)
    assert proposal == {}
    assert proposal.bytes == 0
    assert why in reason(proposal, module).why
    assert str(proposal).startswith("no plan for mesh dp 1 x fsdp 1 x cp 1 x tp 4: nothing in this model is worth")


def test_layers_that_move_more_together_are_left():
    """One column layer for four row layers: each would all-reduce what it makes."""

    def run(m, x):
        h = m.first(x)
        return [over_sum(layer(h)) for layer in (m.a, m.b, m.c, m.d)]

    proposal = propose(net(run, **dict.fromkeys(("first", "a", "b", "c", "d"), (16, 16))))
    assert proposal == {}
    assert "no less than layer by layer" in reason(proposal, "first").why


def test_a_shared_layer_is_split_once_or_not_at_all():
    class Shared(nnx.Module):
        def __init__(self, rngs, whole=False):
            self.first = self.second = Mlp(rngs=rngs)
            self.whole = whole

        def __call__(self, x):
            return self.second(self.first(x) / 2) + (self.first.down(jnp.tile(x, 4)) if self.whole else 0)

    assert propose(Shared).keys() == {"first", "first.up", "first.gate", "first.down"}
    proposal = propose(partial(Shared, whole=True))
    assert proposal == {}
    assert "also called on an array that is not split" in reason(proposal, "first.up").why


def test_tied_parameters_are_left_whole():
    def tied(rngs):
        model = net(lambda m, x: m.b(nnx.relu(m.a(x))), a=(16, 16), b=(16, 16))(rngs=rngs)
        model.b.kernel = model.a.kernel
        return model

    proposal = propose(tied)
    assert proposal == {}
    assert "shares a parameter" in reason(proposal, "a").why


@pytest.mark.wide
def test_vocabularies_are_split_where_that_saves_more_than_it_moves():
    """64 x 16 floats against 8 x 6 positions: not; 4,096 x 16: yes; one table for both ends: by its rows."""
    assert {"embed", "head"}.isdisjoint(propose(Decoder, IDS))
    large = propose(partial(Decoder, vocabulary=4096), IDS)
    assert (large["embed"], large["head"]) == (ROW, COL)
    assert reason(large, "embed").bytes == ALL_REDUCE
    tied = propose(partial(Decoder, vocabulary=4096, tied=True), IDS)
    assert tied["embed"] == ROW
    assert reason(tied, "embed").bytes == 2 * ALL_REDUCE
    odd = propose(partial(Decoder, vocabulary=4097), IDS)
    assert {"embed", "head"}.isdisjoint(odd)


def test_patterns_match_no_layer_that_stays_whole():
    """One block of three has heads that tp does not divide: the others are named one by one."""

    def make(rngs):
        model = Decoder(rngs)
        model.blocks[1].attention = Attention(rngs, heads=2, kv_heads=2)
        return model

    plan = propose(make, IDS)
    assert {"blocks.0.attention.q", "blocks.2.attention.q", "blocks.*.mlp.up"} <= plan.keys()
    assert not {"blocks.*.attention.q", "blocks.1.attention.q"} & plan.keys()


def test_a_layer_on_each_head_is_gathered_for():
    def run(m, x):
        heads = m.head(m.up(x).reshape(8, 6, 4, 16))
        return m.down(heads.reshape(8, 6, 64))

    shapes = {"up": (16, 64), "down": (64, 16), "head": (16, 16), "unused": (16, 16)}
    proposal = propose(net(run, **shapes))
    assert proposal == {"up": COL, "down": ROW}
    assert proposal.bytes == 3 / 4 * 8 * 6 * 4 * (2 * 16 + 2 * 64)
    why = "gathers its input, which up splits, and runs on the whole array"
    assert reason(proposal, "head").why == why
    assert reason(proposal, "unused").why == "does not affect the result of this call"


def test_every_layer_has_a_reason():
    proposal = propose(Decoder, IDS)
    assert {"embed", "head", *megatron("blocks.*.")} == {reason.module for reason in proposal.reasons}
    text = str(proposal)
    for found in proposal.reasons:
        assert found.module in text
        assert found.why in text
    assert "stays split up to blocks.*.attention.o through reshape, dot_general, element-wise" in text
    assert "blocks.*.attention  PrepareInput(Replicate(), Replicate())" in text


def test_a_proposal_is_printed_and_takes_a_mesh_in_context(capsys):
    mesh = jax.make_mesh((1, 2, 4), ("dp", "fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        proposal = propose_plan(mlp, X)
    assert capsys.readouterr().out == f"{proposal}\n"
    assert proposal.sizes == mesh_shape(fsdp=2, tp=4)
    assert propose_plan(mlp, X, mesh=mesh, report=None) == proposal
    abstract = jax.sharding.AbstractMesh((2, 16), ("fsdp", "tp"))
    assert propose_plan(mlp, X, mesh=abstract, report=None) == proposal
    with pytest.raises(ValueError, match="dim 0 of shape"):
        propose_plan(mlp, X, mesh={"fsdp": 3, "tp": 2})


@pytest.mark.parametrize(
    ("mesh", "message"),
    [(None, "propose_plan needs a mesh"), ({"fsdp": 4}, "has 1 device"), ({"tp": 0}, "tp=0")],
)
def test_a_mesh_without_tp_is_refused(mesh, message):
    with pytest.raises(MeshError, match=message):
        propose_plan(mlp, X, mesh=mesh)


def test_over_cp_the_model_itself_takes_the_sequences():
    """Each device sends over tp what its tokens need."""
    alone, over_cp = (propose_plan(mlp, X, mesh={"cp": cp, "tp": 4}, report=None) for cp in (1, 2))
    assert over_cp == alone | {"": ContextParallel()}
    assert over_cp.bytes == alone.bytes / 2
    assert "sequences are divided over cp" in reason(over_cp, "the model itself").why
    with pytest.raises(ValueError, match="has no sequence: use cp=1"):
        propose_plan(mlp, jax.ShapeDtypeStruct((8, 16), jnp.float32), mesh={"cp": 2, "tp": 4})
    with pytest.raises(MeshError, match=r"it cannot be both Rowwise\(\) and, for cp=2, ContextParallel\(\)"):
        propose_plan(lambda: nnx.Embed(4096, 16, rngs=nnx.Rngs(0)), IDS, mesh={"cp": 2, "tp": 4})


@pytest.mark.parametrize("model", [{}, lambda: 3, None])
def test_a_model_that_is_none_is_refused(model):
    with pytest.raises(PlanError, match=r"nnx\.Module"):
        propose_plan(model, X, mesh={"tp": 2})


def test_a_plan_for_another_function_than_call():
    proposal = propose(Decoder, IDS, call=lambda model, ids: model.blocks[0].mlp(model.embed(ids)))
    assert proposal.keys() == {"blocks.0.mlp", "blocks.0.mlp.up", "blocks.0.mlp.gate", "blocks.0.mlp.down"}


def test_code_that_wants_arrays_gets_a_plan_without_shared_inputs():
    def strict(m, x):
        return gated(m, x) + jax.lax.reduce_max(x, (2,))[..., None]

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(16, 16, rngs=rngs)
            self.mlp = net(strict, up=(16, 64), gate=(16, 64), down=(64, 16))(rngs=rngs)

        def __call__(self, x):
            return self.mlp(jnp.sin(self.first(x)) / 2)

    proposal = propose(Model)
    assert proposal == {"mlp.up": COL, "mlp.gate": COL, "mlp.down": ROW}
    assert proposal.bytes == 3 * ALL_REDUCE
    assert "column layers do not share inputs" in reason(proposal, "the model itself").why
