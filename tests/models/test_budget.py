"""A block, and a whole step, move what they must and compute what is declared, counted in the
jaxpr."""

from collections import Counter
from dataclasses import replace

import accounts
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support import sizes_of, swept
from tables import read_table
from variants import variant, variants

import jaxtp
from jaxtp.analysis.census import count_collectives
from jaxtp.analysis.collective import ALL_GATHER
from jaxtp.analysis.step_costs import step_costs
from jaxtp.layers import DecoderBlock, remat
from jaxtp.layers.linear import COLUMN
from jaxtp.layers.lora import freeze
from jaxtp.layers.loss import LOSS
from jaxtp.layers.parameter import GRADIENTS
from jaxtp.mesh import mesh_of, mesh_sizes
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import stored_arrays

POLICIES = ["none", "save_dots", "save_gathered", "save_reduced", "full"]
SETTINGS = read_table(__file__)
PLAIN = variant(jaxtp.ModelConfig(), SETTINGS["plain"])
MODELS = {
    kind: variants(PLAIN, SETTINGS[kind]) for kind in ("dense", "experts", "ulysses", "gather")
}
MESHES = SETTINGS["meshes"]
EVERY_POLICY = ["biases and tied"]
DEFAULT = ["gather, few kv heads"]


def rotated():
    """Returns kinds, models, meshes and policies: of each model one mesh and policy, of one all
    policies."""
    cases = []
    for kind, models in MODELS.items():
        for index, name in enumerate(models):
            policies = POLICIES if name in EVERY_POLICY else [POLICIES[index % len(POLICIES)]]
            for turn, policy in enumerate(policies):
                cases.append((kind, name, MESHES[kind][(index + turn) % len(MESHES[kind])], policy))
    return cases


@swept("case", rotated(), *(case for case in rotated() if case[1] in DEFAULT))
def test_a_step_moves_and_multiplies_what_is_declared(case):
    kind, name, mesh, policy = case
    config = replace(MODELS[kind][name], remat=policy)
    context = kind if kind in ("ulysses", "gather") else "auto"
    found = accounts.account_of(config, mesh, accumulation=2, context=context)
    budget = found.costs.budget
    exact = {place for place in {*found.sent, *budget} if not is_bounded(place, config)}
    assert {place: found.sent.get(place) for place in exact} == pytest.approx(
        {p: budget.get(p) for p in exact}
    )
    assert all(sent <= budget[place] * (1 + 1e-9) for place, sent in found.sent.items())
    if "halo" in name:  # the first chunk has no halo, which the formula multiplies too
        assert 0.95 * found.costs.flops < found.flops < found.costs.flops
    else:
        assert found.flops == found.costs.flops


def is_bounded(place, config):
    """Returns whether the budget of a place is an upper bound: frozen embeddings have no gradient,
    and devices that share a kv head share its norm.
    """
    module, _ = place
    frozen_embedding = config.lora.rank > 0 and module == "vocab_parallel_embedding"
    return frozen_embedding or (
        config.qk_norm in ("head", "projection") and module == "attention/attend"
    )


VOLUMES = SETTINGS["blocks"]
NO_SPLIT = {"sequence_parallel": False}
DELTA = VOLUMES["gated delta"]["model"]
KINDS = {"all-reduces": set(), "rings": {"permute"}, "sequence": {"all-gather", "reduce-scatter"}}
B = 8
T = 16
NUM_WEIGHTS = 9  # q, k, v, out, gate, up, down and two norm scales
NUM_ADAPTERS = 7  # of each, one of A and B is divided over fsdp


def block_collectives(mesh, policy, length=T, **changes):
    """Returns the collectives of one block's forward and backward pass, and how often each runs."""
    config = variant(PLAIN, {"remat": policy, **changes})
    mesh = mesh_of(sizes_of(mesh))
    with jax.set_mesh(mesh):
        abstract = nnx.eval_shape(lambda: DecoderBlock(config, rngs=nnx.Rngs(0)))
        if config.lora.rank:
            freeze(abstract)  # as the decoder does with all of its blocks
        graph, params, frozen = nnx.split(abstract, nnx.Param, ...)
        block = jax.checkpoint(
            lambda x, *states: nnx.merge(graph, *states)(x), policy=remat.policy(policy)
        )
        x = jax.ShapeDtypeStruct((B, length, config.d_model), jnp.float32)
        jaxpr = jax.make_jaxpr(
            jax.value_and_grad(lambda *args: block(*args).sum(), argnums=(0, 1))
        )(x, params, frozen)
    return count_collectives(jaxpr, mesh_sizes(mesh))


def kinds(collectives, axis):
    counts = Counter()
    for collective, times in collectives.items():
        if collective.axes == (axis,):
            counts[collective.kind] += times
    return dict(counts)


def bytes_of(collectives):
    return sum(collective.bytes_sent * times for collective, times in collectives.items())


def units_over_tp(collectives, mesh):
    dp, fsdp, tp = mesh
    activations = {
        c: times for c, times in collectives.items() if c.axes == ("tp",) and len(c.shape) == 3
    }
    return bytes_of(activations) / ((tp - 1) / tp * (B // (dp * fsdp)) * T * PLAIN.d_model * 4)


@swept("way", VOLUMES, "sequence")
def test_volume_of_a_block_over_tp(way):
    mesh = [(2, 2, 2), (1, 1, 8)][[*VOLUMES].index(way) % 2]
    found = {
        policy: block_collectives(mesh, policy, **VOLUMES[way]["model"]) for policy in POLICIES
    }
    assert {policy: units_over_tp(each, mesh) for policy, each in found.items()} == {
        policy: VOLUMES[way][policy] for policy in POLICIES
    }
    for each in found.values():
        assert set(kinds(each, "tp")) - {"all-reduce"} <= KINDS.get(
            way, {"all-gather", "reduce-scatter", "permute"}
        )
        assert all(len(c.shape) <= 2 for c in each if c.axes != ("tp",)), (
            "over other axes no activation moves"
        )


@pytest.mark.wide
def test_weights_of_a_block_are_gathered_twice_and_gradients_reduced_once():
    found = block_collectives((2, 2, 2), "full", **NO_SPLIT)
    assert kinds(found, "fsdp") == {"all-gather": 2 * NUM_WEIGHTS, "reduce-scatter": NUM_WEIGHTS}
    assert kinds(found, "dp") == {"all-reduce": NUM_WEIGHTS}
    assert kinds(found, "tp") == {"all-reduce": VOLUMES["all-reduces"]["full"] / 2}
    assert {c.axes for c in found} == {("tp",), ("fsdp",), ("dp",)}
    frozen = kinds(block_collectives((1, 2, 4), "none", lora={"rank": 4}), "fsdp")
    gathered = 2 * (NUM_WEIGHTS + NUM_ADAPTERS)
    assert frozen == {
        "all-gather": gathered,
        "reduce-scatter": NUM_ADAPTERS,
        "all-reduce": NUM_ADAPTERS,
    }


@pytest.mark.wide
def test_dropout_keeps_parallel_branches_apart():
    found = [
        block_collectives((2, 2, 2), "full", norm_placement="parallel", dropout=rate)
        for rate in (0.0, 0.1)
    ]
    together, apart = (units_over_tp(each, (2, 2, 2)) for each in found)
    assert apart == 2 * together


@pytest.mark.wide
@pytest.mark.parametrize(("num_experts", "shared", "k"), [(6, 40, 4), (8, 0, 1)])
def test_experts_move_over_tp_what_a_dense_mlp_does(num_experts, shared, k):
    """And beside it two floats for each choice."""
    changes = {"experts_per_token": k, "shared_experts": shared}
    dense, mixture = (
        block_collectives((1, 1, 8), "save_dots", num_experts=count, **changes)
        for count in (0, num_experts)
    )
    activations, of_experts = (
        {
            c: times
            for c, times in found.items()
            if c.axes == ("tp",) and c.shape[2:] == (PLAIN.d_model,)
        }
        for found in (dense, mixture)
    )
    assert bytes_of(of_experts) == bytes_of(activations)
    of_tokens = {
        c: times for c, times in mixture.items() if c.axes == ("tp",) and len(c.shape) == 3
    }
    others = {c: times for c, times in of_tokens.items() if c not in of_experts}
    # They are gathered forward and, with this policy, backward again, and their gradient is summed.
    assert bytes_of(others) == (2 + 1) * 7 / 8 * B * T * 2 * k * 4


# Bytes that follow from the shapes.
@pytest.mark.wide
@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize(
    ("context", "name", "kinds"),
    [
        ("ulysses", "ulysses", {"all-to-all"}),
        ("gather", "gather", {"all-gather", "reduce-scatter"}),
        ("gather", "halo", {"permute"}),
    ],
)
def test_attention_over_cp_moves_what_its_method_needs_and_nothing_else(
    context, name, kinds, policy
):
    """In units of (cp-1)/cp * T/cp * H/tp elements for each sequence, as `layers/context.py` has
    it."""
    cp = 4
    tp = 2
    model = variant(MODELS[context][name], {"num_layers": 1, "remat": policy})
    sizes = sizes_of((1, 1, cp, tp))
    every = count_collectives(accounts.traced_step(model, sizes, context=context), sizes)
    found = {c: times for c, times in every.items() if c.module == "attention/attend"}
    assert {c.kind for c in found} == kinds
    assert {c.axes for c in found} == {("cp",)}
    unit = (cp - 1) / cp * (accounts.T // cp) * model.head_dim / tp * accounts.B * 4
    queries = 8
    keys = 4
    copied = keys * 2  # of the two kv heads of a device each is copied, so that cp divides them
    times = 3 if policy == "full" else 2
    expected = {
        "ulysses": 2 * (queries + copied) * unit,
        "gather": 2 * keys * cp * unit,
        "halo": 2 * keys // tp * model.head_dim * 2 * accounts.B * 4,
    }
    assert bytes_of(found) == pytest.approx(times * expected[name])
    activations = [c for c in every if c.axes == ("cp",) and len(c.shape) > 2 and c not in found]
    assert not activations, "between attention and attention nothing of a token moves over cp"


@pytest.mark.wide
def test_a_base_in_8_bits_moves_fewer_bytes_than_bfloat16():
    """The embedding, the adapters and scales are large in so small a model."""
    sizes = sizes_of((1, 4, 4))
    rows = {"batch_size": 16, "sequence_length": T}
    half = {"compute": "bfloat16", "reduce": "bfloat16"}
    for changes in ({"num_kv_heads": 2}, SETTINGS["dense"]["latent"], DELTA):
        model = variant(PLAIN, {"remat": "full", "precision": half, **changes})
        moved = {}
        for base in ("full", "float8"):
            costs = step_costs(variant(model, {"lora": {"rank": 4, "base": base}}), sizes, **rows)
            moved[base] = sum(sent for (_, axes), sent in costs.budget.items() if axes == ("fsdp",))
        assert moved["float8"] < 0.8 * moved["full"], changes


def test_float8_layers_gather_half_the_bytes_of_bfloat16():
    """Activations over tp and kernels over fsdp, but for a scale of each token and output
    feature."""
    gathered = Counter()
    for matmul in ("compute", "float8"):
        precision = {"compute": "bfloat16", "matmul": matmul, "matmul_least": 16}
        config = variant(
            PLAIN, {"d_model": 1024, "d_ff": 2048, "head_dim": 128, "precision": precision}
        )
        costs = step_costs(config, sizes_of((1, 4, 2)), batch_size=B, sequence_length=T)
        for one, times in costs.traffic.items():
            if one.kind == ALL_GATHER and one.module.endswith(COLUMN):
                gathered[matmul, one.axes] += times * one.bytes_sent
    for axes in (("fsdp",), ("tp",)):
        assert 0.5 <= gathered["float8", axes] / gathered["compute", axes] < 0.503


@swept("rank", [0, 4])
def test_gradients_of_micro_batches_are_summed_over_dp_once(rank):
    config = variant(PLAIN, {"lora": {"rank": rank}})
    mesh = (4, 1, 2)
    trained = [array for array in stored_arrays(TrainConfig(model=config)) if array.trained]
    held = sum(array.bytes_per_device(sizes_of(mesh)) for array in trained)
    sent = accounts.account_of(config, mesh, accumulation=4).sent
    over_dp = {module: sent for (module, axes), sent in sent.items() if "dp" in axes}
    # Its sum and the number of labels, of each micro-batch
    assert over_dp.pop(LOSS) == 4 * 2 * 3 / 4 * 8
    assert over_dp == {GRADIENTS: 2 * 3 / 4 * held}


@pytest.mark.wide
def test_embedding_head_and_loss_move_what_the_design_says():
    """An all-reduce or its two halves for embedding and head; for the loss three all-reduces of a
    float per token."""
    tp = 8
    tokens = accounts.B * accounts.T
    ring = (tp - 1) / tp
    features = 2 * ring * tokens * PLAIN.d_model * 4
    for changes in ({}, NO_SPLIT):
        sent = accounts.account_of(variant(PLAIN, changes), (1, 1, tp)).sent
        assert sent["vocab_parallel_embedding", ("tp",)] == features
        assert sent["vocab_parallel_cross_entropy", ("tp",)] == features + 3 * 2 * ring * tokens * 4
