"""A block, and a whole step, move what they must and nothing else, counted in the jaxpr."""

import dataclasses
import itertools
from collections import Counter

import accounts
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support import sizes_of, sweep, sweep_of

import jaxtp
from jaxtp.analysis.census import count_collectives
from jaxtp.analysis.collective import ALL_GATHER
from jaxtp.analysis.step_costs import step_costs
from jaxtp.layers import remat
from jaxtp.layers.linear import COLUMN
from jaxtp.layers.lora import LoraConfig, freeze
from jaxtp.layers.loss import LOSS
from jaxtp.layers.parameter import GRADIENTS
from jaxtp.mesh import mesh_of, mesh_sizes
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import stored_arrays

B, T = 8, 16
CONFIG = {"d_model": 64, "d_ff": 96, "num_heads": 8, "num_kv_heads": 8, "head_dim": 8}
NUM_WEIGHTS = 9  # q, k, v, out, gate, up, down and two norm scales


def block_collectives(mesh, policy, length=T, **config):
    """Collectives of one block's forward and backward pass."""
    config = jaxtp.ModelConfig(**CONFIG, remat=policy, **config)
    mesh = mesh_of(sizes_of(mesh))
    with jax.set_mesh(mesh):
        abstract = nnx.eval_shape(lambda: jaxtp.DecoderBlock(config, rngs=nnx.Rngs(0)))
        if config.lora.rank:
            freeze(abstract)  # as the decoder does with all of its blocks
        graph, params, frozen = nnx.split(abstract, nnx.Param, ...)
        block = jax.checkpoint(lambda x, *states: nnx.merge(graph, *states)(x), policy=remat.policy(policy))
        x = jax.ShapeDtypeStruct((B, length, config.d_model), jnp.float32)
        jaxpr = jax.make_jaxpr(jax.value_and_grad(lambda *args: block(*args).sum(), argnums=(0, 1)))(x, params, frozen)
    return count_collectives(jaxpr, mesh_sizes(mesh))


def kinds(collectives, axes):
    counts = Counter()
    for collective, times in collectives.items():
        if collective.axes == axes:
            counts[collective.kind] += times
    return dict(counts)


def units_over_tp(collectives, mesh):
    """Volume over tp in units of (tp-1)/tp x batch x sequence x d_model x bytes, as in the design."""
    dp, fsdp, tp = mesh
    activations = {c: times for c, times in collectives.items() if c.axes == ("tp",) and len(c.shape) == 3}
    sent = sum(c.bytes_sent * times for c, times in activations.items())
    return sent / ((tp - 1) / tp * (B // (dp * fsdp)) * T * CONFIG["d_model"] * 4)


# DESIGN: volume over tp of a layer, forward and backward, by remat policy.
ALL_REDUCE = {"none": 8, "save_dots": 8, "save_gathered": 8, "save_reduced": 8, "full": 10}
SEQUENCE_PARALLEL = {"none": 8, "save_dots": 10, "save_gathered": 8, "save_reduced": 10, "full": 11}
RING = {"none": 10, "save_dots": 10, "save_gathered": 10, "save_reduced": 10, "full": 11}


@pytest.mark.parametrize(
    ("mesh", "policy"),
    sweep_of([[(1, 1, 2), (1, 1, 8), (1, 2, 4), (2, 2, 2)], ALL_REDUCE], ((2, 2, 2), "full")),
    ids=str,
)
def test_all_reduce_tensor_parallelism(mesh, policy):
    found = block_collectives(mesh, policy, sequence_parallel=False)
    assert kinds(found, ("tp",)) == {"all-reduce": ALL_REDUCE[policy] / 2}
    assert units_over_tp(found, mesh) == ALL_REDUCE[policy]
    over_fsdp = {} if mesh[1] == 1 else {"all-gather": 2 * NUM_WEIGHTS, "reduce-scatter": NUM_WEIGHTS}
    assert kinds(found, ("fsdp",)) == over_fsdp
    assert kinds(found, ("dp",)) == ({} if mesh[0] == 1 else {"all-reduce": NUM_WEIGHTS})
    assert {c.axes for c in found} <= {("tp",), ("fsdp",), ("dp",)}


@pytest.mark.parametrize(
    ("mesh", "policy"),
    sweep_of([[(1, 1, 8), (2, 2, 2)], SEQUENCE_PARALLEL], ((1, 1, 8), "save_gathered")),
    ids=str,
)
def test_sequence_parallelism(mesh, policy):
    found = block_collectives(mesh, policy)  # on by itself: tp divides the sequence
    assert units_over_tp(found, mesh) == SEQUENCE_PARALLEL[policy]
    assert set(kinds(found, ("tp",))) <= {"all-gather", "reduce-scatter", "all-reduce"}
    norms = [c for c in found if "all-reduce" in c.kind and "tp" in c.axes]
    assert all(c.shape in {(CONFIG["d_model"],), (CONFIG["d_model"] // mesh[1],)} for c in norms)


@pytest.mark.parametrize(
    ("mesh", "policy"),
    sweep_of([[(1, 1, 8), (2, 2, 2)], RING], ((2, 2, 2), "full")),
    ids=str,
)
def test_rings(mesh, policy):
    found = block_collectives(mesh, policy, overlap="ring")
    assert units_over_tp(found, mesh) == RING[policy]
    assert {"permute"} <= set(kinds(found, ("tp",))) <= {"permute", "all-reduce"}, "one of the norms' gradients"


@pytest.mark.parametrize(
    ("mesh", "policy", "split"),
    sweep_of([[(1, 1, 8), (2, 2, 2)], SEQUENCE_PARALLEL, [None, False]], ((2, 2, 2), "full", None)),
    ids=str,
)
def test_parallel_branches_share_a_gather_and_a_reduction(mesh, policy, split):
    """Half of a block's volume, or less: nothing reads their sum, so it is never reduced again."""
    found = block_collectives(mesh, policy, norm_placement="parallel", sequence_parallel=split)
    gathers_again = policy not in ("none", "save_gathered")
    assert units_over_tp(found, mesh) == (4 if split is False else 4 + gathers_again)
    plain = block_collectives(mesh, policy, norm_placement="parallel", sequence_parallel=split, dropout=0.1)
    assert units_over_tp(plain, mesh) == 2 * units_over_tp(found, mesh)


GATED_DELTA = {"delta_value_heads": 8, "delta_key_heads": 4, "delta_key_dim": 8, "delta_value_dim": 10}


@pytest.mark.parametrize(
    ("mesh", "policy", "split"),
    sweep_of([[(1, 1, 8), (2, 2, 2)], SEQUENCE_PARALLEL, [None, False]], ((2, 2, 2), "full", None)),
    ids=str,
)
def test_gated_delta_net_moves_over_tp_what_attention_does(mesh, policy, split):
    """The two collectives of a branch, and parameters: taps of key heads that devices share, and scales' gradients."""
    found = block_collectives(mesh, policy, sequence_parallel=split, **GATED_DELTA)
    assert units_over_tp(found, mesh) == (ALL_REDUCE if split is False else SEQUENCE_PARALLEL)[policy]
    others = {c.shape for c in found if c.axes == ("tp",) and len(c.shape) != 3}
    taps = {(4, 8)} if mesh[2] > 4 else set()
    kernels = {(64, 8), (64 // mesh[1], 8)} if mesh[2] > 4 else set()
    assert others <= {(10,), (64,), (64 // mesh[1],)} | taps | kernels
    activations = [c for c in found if c.axes != ("tp",) and len(c.shape) > 2]
    assert not activations


@pytest.mark.wide
@pytest.mark.parametrize("policy", ALL_REDUCE)
def test_states_over_cp_move_bytes_that_do_not_depend_on_the_length(policy):
    short, long = (block_collectives((1, 1, 4, 2), policy, length, **GATED_DELTA) for length in (T, 16 * T))
    short, long = ({c: n for c, n in found.items() if "cp" in c.axes} for found in (short, long))
    assert short == long
    assert {"permute", "all-gather", "reduce-scatter"} <= {c.kind for c in short}


def test_nothing_over_fsdp_has_the_shape_of_an_activation():
    found = block_collectives((1, 2, 4), "none")
    rows = {c.shape[0] for c in found if c.axes == ("fsdp",)}
    assert B // 2 not in rows  # a weight's leading dim is 64, or a part of 96 or 64 over tp
    assert all(len(c.shape) <= 2 for c in found if c.axes == ("fsdp",))


@pytest.mark.wide
@pytest.mark.parametrize("overlap", ["none", "ring"])
@pytest.mark.parametrize("policy", SEQUENCE_PARALLEL)
def test_frozen_weights_are_gathered_again_too(policy, overlap):
    found = block_collectives((1, 2, 4), policy, lora=LoraConfig(rank=4), overlap=overlap)
    adapters = 7  # of each one of A and B is divided over fsdp
    assert kinds(found, ("fsdp",))["all-gather"] == 2 * (NUM_WEIGHTS + adapters)
    assert kinds(found, ("fsdp",))["reduce-scatter"] == adapters
    assert units_over_tp(found, (1, 2, 4)) == {"none": SEQUENCE_PARALLEL, "ring": RING}[overlap][policy]


V = 61
PLAIN = jaxtp.ModelConfig(vocab_size=64, num_layers=3, loss_chunk=5, **CONFIG)
BIASED = dataclasses.replace(
    PLAIN, vocab_size=V, tie_embeddings=True, attention_bias=True, attention_out_bias=True, mlp_bias=True
)
EXACT = {
    "llama": PLAIN,
    "bfloat16": dataclasses.replace(PLAIN, precision=jaxtp.Precision(compute="bfloat16")),
    "odd vocabulary": dataclasses.replace(PLAIN, vocab_size=V),
    "shared kv heads": dataclasses.replace(PLAIN, num_kv_heads=2),
    "biases and tied": BIASED,
    "layer norms": dataclasses.replace(BIASED, norm="layer", mlp="plain", rope_theta=None, learned_positions=T),
    "norms on both sides": dataclasses.replace(
        PLAIN, norm_placement="both", norm="rms_plus_one", pattern=({"sliding_window": 4}, {})
    ),
}
EXACT["learned activations"] = dataclasses.replace(PLAIN, d_ff=94, mlp="plain", activation="xielu")
EXACT["experts"] = dataclasses.replace(PLAIN, num_experts=4, experts_per_token=2)
EXACT["experts inside"] = dataclasses.replace(PLAIN, num_experts=6, experts_per_token=3, sequence_parallel=False)
EXACT["experts padded"] = dataclasses.replace(
    BIASED, d_ff=93, num_experts=3, shared_experts=61, shared_experts_gate=True, activation="silu"
)
EXACT["rings"] = dataclasses.replace(BIASED, num_kv_heads=2, overlap="ring")
LOW = jaxtp.Precision(compute="bfloat16", reduce="bfloat16")
EXACT["large vocabulary"] = dataclasses.replace(PLAIN, vocab_size=509, precision=LOW)
EXACT["large vocabulary, tied"] = dataclasses.replace(BIASED, vocab_size=509, sequence_parallel=False)
EXACT["written out"] = dataclasses.replace(BIASED, scan_layers=False)
EXACT["norms on both sides"] = dataclasses.replace(BIASED, norm="layer", norm_placement="both", tie_embeddings=False)
PIECES = {
    "attention_gate": True,
    "attention_sinks": True,
    "value_norm": True,
    "clip_qkv": 1.0,
    "query_temperature": 0.5,
    "rotary_fraction": 0.5,
}
EXACT["pieces"] = dataclasses.replace(
    BIASED, num_kv_heads=2, **PIECES, qk_norm="head_plain", norm="layer_no_bias", pattern=({"value_is_key": True}, {})
)
EXACT["biases that are fixed in part"] = dataclasses.replace(
    BIASED, num_kv_heads=2, rotary_fraction=0.5, norm="layer_plain"
)
EXACT["norms of heads with biases"] = dataclasses.replace(
    BIASED, norm="layer", qk_norm="head_bias", rotary_fraction=0.5
)
PARALLEL = dataclasses.replace(BIASED, norm="layer", norm_placement="parallel", head_bias=True, residual_scale=0.5)
EXACT["parallel"] = PARALLEL
EXACT["parallel, all-reduces"] = dataclasses.replace(PARALLEL, sequence_parallel=False, norm="rms", layer_scale=True)
EXACT["parallel, dropout"] = dataclasses.replace(PARALLEL, dropout=0.1, embedding_norm=True, logit_scale=0.5)
EXACT["parallel, two norms"] = dataclasses.replace(PARALLEL, norm_placement="parallel_two", tie_embeddings=False)
EXACT["ring of an MLP"] = dataclasses.replace(PLAIN, num_kv_heads=2, overlap="ring")
EXACT["parallel rings"] = dataclasses.replace(PARALLEL, overlap="ring", num_kv_heads=2)
EXACT["parallel experts"] = dataclasses.replace(PARALLEL, num_experts=4, mlp_bias=False, norm="rms")
DELTA = {
    **{"delta_value_heads": 6, "delta_key_heads": 3, "delta_key_dim": 8, "delta_value_dim": 10},
    "pattern": ({}, {"delta_value_heads": 0}),
}
EXACT["gated delta"] = dataclasses.replace(PLAIN, **DELTA)
EXACT["gated delta, rings"] = dataclasses.replace(BIASED, num_kv_heads=2, overlap="ring", **DELTA)
EXACT["gated delta, parallel"] = dataclasses.replace(PARALLEL, sequence_parallel=False, **DELTA)
EXACT["gated delta, experts"] = dataclasses.replace(EXACT["experts"], precision=LOW, **DELTA)
FLOAT8 = jaxtp.Precision(compute="bfloat16", matmul="float8", matmul_least=16)
EXACT["float8"] = dataclasses.replace(BIASED, num_kv_heads=2, precision=FLOAT8)
EXACT["float8, rings"] = dataclasses.replace(EXACT["float8"], overlap="ring", scan_layers=False)
EXACT["float8, all-reduces"] = dataclasses.replace(EXACT["float8"], sequence_parallel=False, norm_placement="both")
EXACT["float8, parallel"] = dataclasses.replace(PARALLEL, precision=FLOAT8)
EXACT["float8, some layers"] = dataclasses.replace(
    EXACT["gated delta"], precision=dataclasses.replace(FLOAT8, matmul_layers="*.mlp.*|*.attention.out")
)
EXACT["float8, latent"] = dataclasses.replace(
    PLAIN, precision=FLOAT8, kv_rank=16, rope_head_dim=4, value_head_dim=8, query_rank=16
)
EXACT["mxfp8"] = dataclasses.replace(
    EXACT["float8"], d_ff=256, head_dim=32, precision=dataclasses.replace(FLOAT8, matmul="mxfp8")
)
EXACT_FIRST = ["experts", "rings", "ring of an MLP", "pieces", "large vocabulary, tied", "parallel", "float8", "mxfp8"]
"""Together they have biases, shared kv heads, a padded vocabulary, both norms, and each way to move over tp."""

BOUNDED = {
    "head norms": dataclasses.replace(PLAIN, num_kv_heads=2, qk_norm="head"),
    "projection norms": dataclasses.replace(PLAIN, num_kv_heads=2, qk_norm="projection"),
    "norms with a scale for each head": dataclasses.replace(PLAIN, num_kv_heads=2, qk_norm="heads", norm="layer"),
}


@pytest.mark.parametrize(
    ("mesh", "policy", "sequence_parallel"),
    sweep_of(
        [[(1, 1, 8), (2, 2, 2)], ALL_REDUCE, [True, False]],
        ((2, 2, 2), "save_dots", False),
    ),
    ids=str,
)
def test_a_step_moves_its_budget(mesh, policy, sequence_parallel):
    config = dataclasses.replace(PLAIN, remat=policy, sequence_parallel=sequence_parallel)
    counted, budget = accounts.step_bytes(config, mesh)
    assert counted == pytest.approx(budget)


@pytest.mark.parametrize(
    "case",
    sweep([(name, policy) for name in EXACT for policy in ALL_REDUCE], *((name, "full") for name in EXACT_FIRST)),
    ids=str,
)
def test_the_budget_is_exact(case):
    name, policy = case
    config = dataclasses.replace(EXACT[name], remat=policy)
    counted, budget = accounts.step_bytes(config, (2, 2, 4), accumulation=2)
    assert counted == pytest.approx(budget)


WINDOWS = dataclasses.replace(PLAIN, sliding_window=3)
OVER_CP = {
    "ulysses": ("ulysses", PLAIN),
    "ulysses, copied kv heads": ("ulysses", dataclasses.replace(BIASED, num_kv_heads=1, attention_sinks=True)),
    "ulysses, adapters": ("ulysses", dataclasses.replace(PLAIN, lora=LoraConfig(rank=4))),
    "ulysses, adapters of queries": (
        "ulysses",
        dataclasses.replace(PLAIN, lora=LoraConfig(rank=4, targets=("q_proj",)), attention_gate=True),
    ),
    "ulysses, bfloat16": ("ulysses", dataclasses.replace(PLAIN, precision=LOW)),
    "gather": ("gather", PLAIN),
    "gather, few kv heads": ("gather", dataclasses.replace(BIASED, num_kv_heads=2, overlap="ring")),
    "gather, adapters": ("gather", dataclasses.replace(PLAIN, lora=LoraConfig(rank=4))),
    "halo": ("gather", WINDOWS),
    "halo of several chunks": ("gather", dataclasses.replace(BIASED, num_kv_heads=2, sliding_window=7)),
    "halo of zigzag chunks": (
        "gather",
        dataclasses.replace(BIASED, attention_sinks=True, pattern=({"sliding_window": 3}, {})),
    ),
}
OVER_CP["gather, float8"] = ("gather", EXACT["float8"])
OVER_CP["gather, states"] = ("gather", dataclasses.replace(PLAIN, **DELTA))
OVER_CP["halo of chunks, states"] = ("gather", dataclasses.replace(WINDOWS, precision=LOW, **DELTA))
"""Methods over cp, and models for them. Adapters' budget is an upper bound over tp, and exact over cp."""
CP_MESHES = [(2, 1, 4, 2), (1, 2, 2, 4), (1, 1, 4, 1)]


FIRST_OVER_CP = [
    ("ulysses", (2, 1, 4, 2), "full"),
    ("ulysses, copied kv heads", (1, 2, 2, 4), "save_dots"),
    ("gather", (1, 2, 2, 4), "full"),
    ("gather", (2, 1, 4, 2), "none"),
    ("halo of several chunks", (2, 1, 4, 2), "full"),
    ("halo of zigzag chunks", (1, 1, 4, 1), "full"),
]
EVERY_OVER_CP = [
    *FIRST_OVER_CP,
    *(
        (name, CP_MESHES[(i + j) % len(CP_MESHES)], policy)
        for i, name in enumerate(OVER_CP)
        for j, policy in enumerate(ALL_REDUCE)
        if (i + j) % 2
    ),
]


@pytest.mark.parametrize("case", sweep(list(dict.fromkeys(EVERY_OVER_CP)), FIRST_OVER_CP[-1]), ids=str)
def test_the_budget_is_exact_over_cp(case):
    name, mesh, policy = case
    context, model = OVER_CP[name]
    config = dataclasses.replace(model, remat=policy)
    if config.heads.on_device(mesh[-1])[0] % mesh[-2] and context == "ulysses":
        pytest.skip("cp does not divide the heads")
    accumulation = 1 if config.lora.rank else 2
    counted, budget = accounts.step_bytes(config, mesh, accumulation=accumulation, context=context)
    over_cp = {place for place in {*counted, *budget} if "cp" in place[1]} if config.lora.rank else {*counted, *budget}
    assert {place: counted.get(place) for place in over_cp} == pytest.approx({p: budget.get(p) for p in over_cp})
    assert any("attend" in module for module, _ in over_cp)


ATTENTION_OVER_CP = {"ulysses": {"all-to-all"}, "gather": {"all-gather", "reduce-scatter"}, "halo": {"permute"}}


@pytest.mark.wide
@pytest.mark.parametrize("name", ATTENTION_OVER_CP)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_attention_over_cp_moves_what_its_method_needs_and_nothing_else(name, policy):
    """In units of (cp-1)/cp * T/cp * H/tp elements for each sequence, as `layers/context.py` has it."""
    (context, model), cp, tp = OVER_CP[name], 4, 2
    model = dataclasses.replace(model, num_layers=1, num_kv_heads=4, remat=policy)
    every = accounts.step_collectives(model, sizes_of((1, 1, cp, tp)), context=context)
    found = {c: times for c, times in every.items() if c.module == "attention/attend"}
    assert {c.kind for c in found} == ATTENTION_OVER_CP[name]
    assert {c.axes for c in found} == {("cp",)}
    sent = sum(c.bytes_sent * times for c, times in found.items())
    unit = (cp - 1) / cp * (accounts.T // cp) * CONFIG["head_dim"] / tp * accounts.B * 4
    queries, keys, again = 8, 4, policy == "full"
    copied = keys * 2  # of the two kv heads of a device each is copied, so that cp divides them
    halo = 2 * keys // tp * CONFIG["head_dim"] * (WINDOWS.sliding_window - 1) * accounts.B * 4
    expected = {
        "ulysses": (2 + again) * 2 * (queries + copied) * unit,
        "gather": (2 + again) * 2 * keys * cp * unit,
        "halo": (2 + again) * halo,
    }[name]
    assert sent == pytest.approx(expected)
    activations = [c for c in every if c.axes == ("cp",) and len(c.shape) > 2 and c not in found]
    assert not activations, "between attention and attention nothing of a token moves over cp"


LATENT = {"kv_rank": 8, "rope_head_dim": 4, "value_head_dim": 8, "query_rank": 12}
SHARED = {"num_kv_heads": 2}


@pytest.mark.parametrize("sizes", sweep([SHARED, LATENT, DELTA], SHARED), ids=["shared", "latent", "delta"])
def test_a_base_in_8_bits_moves_half_the_bytes_of_bfloat16(sizes):
    """Over fsdp exactly the budget: 8 bits of each kernel, and its scales."""
    config = dataclasses.replace(PLAIN, remat="full", precision=LOW, **sizes)
    moved = {}
    for base in ("full", "float8"):
        lora = LoraConfig(rank=4, base=base)
        counted, budget = accounts.step_bytes(dataclasses.replace(config, lora=lora), (1, 4, 4))
        places = [place for place in counted if place[1] == ("fsdp",)]
        assert [counted[place] for place in places] == pytest.approx([budget[place] for place in places])
        moved[base] = sum(counted[place] for place in places)
    assert moved["float8"] < 0.8 * moved["full"], "the embedding, the adapters and scales are large in so small a model"


@pytest.mark.wide
@pytest.mark.parametrize("overlap", ["none", "ring"])
@pytest.mark.parametrize("base", ["full", "float8"])
@pytest.mark.parametrize("policy", ALL_REDUCE)
def test_the_budget_of_adapters_of_float8_layers_is_exact(policy, base, overlap):
    lora = LoraConfig(rank=4, base=base)
    config = dataclasses.replace(EXACT["float8"], remat=policy, lora=lora, overlap=overlap)
    counted, budget = accounts.step_bytes(config, (1, 2, 8))
    places = counted.keys() - {("vocab_parallel_embedding", ("tp",))}  # an upper bound: it has no gradient
    places = [place for place in places if place[1] in {("fsdp",), ("tp",)} and "bias" not in place[0]]
    assert {place: counted[place] for place in places} == pytest.approx({place: budget[place] for place in places})


def test_float8_layers_gather_half_the_bytes_of_bfloat16():
    """Activations over tp and kernels over fsdp, but for a scale of each token and output feature."""
    gathered = {}
    for matmul in ("compute", "float8"):
        precision = dataclasses.replace(FLOAT8, matmul=matmul)
        config = dataclasses.replace(PLAIN, d_model=1024, d_ff=2048, head_dim=128, precision=precision)
        costs = step_costs(config, sizes_of((1, 4, 2)), batch_size=B, sequence_length=T)
        for one, times in costs.traffic.items():
            if one.kind == ALL_GATHER and one.module.endswith(COLUMN):
                gathered[matmul, one.axes] = gathered.get((matmul, one.axes), 0) + times * one.bytes_sent
    for axes in (("fsdp",), ("tp",)):
        assert 0.5 <= gathered["float8", axes] / gathered["compute", axes] < 0.503


@pytest.mark.wide
@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=4)], ids=["all", "adapters"])
def test_gradients_of_micro_batches_are_summed_over_dp_once(lora):
    config, mesh = dataclasses.replace(PLAIN, lora=lora), (4, 1, 2)
    trained = [array for array in stored_arrays(TrainConfig(model=config)) if array.trained]
    held = sum(array.bytes_per_device(sizes_of(mesh)) for array in trained)
    counted, _ = accounts.step_bytes(config, mesh, accumulation=4)
    over_dp = {module: sent for (module, axes), sent in counted.items() if "dp" in axes}
    assert over_dp.pop(LOSS) == 4 * 2 * 3 / 4 * 8  # its sum and the number of labels, of each micro-batch
    assert over_dp == {GRADIENTS: 2 * 3 / 4 * held}


@pytest.mark.parametrize(
    ("name", "mesh", "policy"),
    sweep_of(
        [BOUNDED, [(1, 1, 8), (2, 2, 2)], ALL_REDUCE],
        ("head norms", (2, 2, 2), "save_dots"),
    ),
    ids=str,
)
def test_norms_of_queries_and_keys_stay_within_the_budget(name, mesh, policy):
    counted, budget = accounts.step_bytes(dataclasses.replace(BOUNDED[name], remat=policy), mesh)
    assert counted.keys() <= budget.keys()
    assert all(sent <= budget[place] * (1 + 1e-9) for place, sent in counted.items())


@pytest.mark.wide
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "all-reduce"])
def test_embedding_head_and_loss_move_what_the_design_says(sequence_parallel):
    """An all-reduce or its two halves for embedding and head; for the loss three all-reduces of a float per token."""
    tp, tokens = 8, accounts.B * accounts.T
    config = dataclasses.replace(PLAIN, sequence_parallel=sequence_parallel)
    counted, _ = accounts.step_bytes(config, (1, 1, tp))
    ring = (tp - 1) / tp
    assert counted["vocab_parallel_embedding", ("tp",)] == 2 * ring * tokens * config.d_model * 4
    head = 2 * ring * tokens * config.d_model * 4
    assert counted["vocab_parallel_cross_entropy", ("tp",)] == head + 3 * 2 * ring * tokens * 4


MIXTURE = dataclasses.replace(PLAIN, num_experts=6, experts_per_token=2)
MIXTURES = {
    "experts": MIXTURE,
    "some layers are dense": dataclasses.replace(MIXTURE, pattern=({"num_experts": 4}, {"num_experts": 0})),
    "written out": dataclasses.replace(MIXTURE, scan_layers=False, tie_embeddings=True),
    "shared": dataclasses.replace(MIXTURE, shared_experts=18, precision=LOW, router_scores="sigmoid"),
    "shared, plain, gated": dataclasses.replace(
        MIXTURE, mlp="plain", activation="relu2", shared_experts=96, shared_experts_gate=True
    ),
    "biased": dataclasses.replace(MIXTURE, selection_bias=True, num_kv_heads=2, precision=LOW),
}
MIXTURE_MESHES = [(2, 2, 1, 2), (1, 2, 1, 4), (1, 1, 2, 4), (2, 1, 2, 2), (1, 4, 2, 2), (2, 2, 4, 1)]
"""Whole experts on each device where tp is 2, and a part of each where it is 4."""
MIXTURE_CASES = [
    (list(MIXTURES)[(m + p + 2 * s) % len(MIXTURES)], mesh, policy, sequence_parallel)
    for m, mesh in enumerate(MIXTURE_MESHES)
    for p, policy in enumerate(ALL_REDUCE)
    for s, sequence_parallel in enumerate([None, False])
]
OF_GPT_OSS = {"router_bias": True, "experts_bias": True, "activation": "quick_gelu", "swiglu_limit": 7.0}
MIXTURES["gpt-oss"] = dataclasses.replace(MIXTURE, num_experts=8, d_ff=93, **OF_GPT_OSS)
MIXTURES["gpt-oss, whole"] = dataclasses.replace(MIXTURES["gpt-oss"], num_experts=6, precision=LOW)
MIXTURES["adapters"] = dataclasses.replace(MIXTURES["gpt-oss"], shared_experts=18, lora=LoraConfig(rank=3))
MIXTURES["adapters, whole"] = dataclasses.replace(
    MIXTURES["adapters"], num_experts=6, d_ff=96, mlp="plain", swiglu_limit=None
)
IN_8_BITS = LoraConfig(rank=3, base="float8")
MIXTURES["in 8 bits"] = dataclasses.replace(MIXTURES["adapters"], lora=IN_8_BITS, precision=LOW)
MIXTURES["in 8 bits, whole"] = dataclasses.replace(MIXTURES["adapters, whole"], lora=IN_8_BITS)
MIXTURE_CASES += [
    (name, mesh, policy, None if (i + j) % 2 else False)
    for i, name in enumerate(("gpt-oss", "gpt-oss, whole", "adapters", "adapters, whole", *list(MIXTURES)[-2:]))
    for j, (mesh, policy) in enumerate(zip(MIXTURE_MESHES, itertools.cycle(ALL_REDUCE), strict=False))
]
MIXTURES["with a dense MLP"] = dataclasses.replace(MIXTURE, dense_mlp=18, norm_placement="both")
MIXTURE_CASES += [
    ("with a dense MLP", mesh, policy, None if i % 2 else False)
    for i, (mesh, policy) in enumerate(zip(MIXTURE_MESHES, itertools.cycle(ALL_REDUCE), strict=False))
]


@pytest.mark.parametrize(
    "case",
    sweep(
        MIXTURE_CASES,
        ("biased", (1, 1, 2, 4), "save_dots", False),
        ("shared, plain, gated", (1, 2, 1, 4), "save_reduced", None),
        ("in 8 bits", (1, 2, 1, 4), "save_dots", None),
    ),
    ids=str,
)
def test_the_budget_of_experts_is_exact(case):
    name, mesh, policy, sequence_parallel = case
    config = dataclasses.replace(MIXTURES[name], remat=policy, sequence_parallel=sequence_parallel)
    counted, budget = accounts.step_bytes(config, mesh, accumulation=2 if policy == "full" else 1)
    embedding = ("vocab_parallel_embedding", ("tp",))
    if config.lora.rank and embedding in counted:  # an upper bound where embeddings have no gradient
        budget[embedding] = counted[embedding]
    assert counted == pytest.approx(budget)


@pytest.mark.parametrize(
    ("num_experts", "policy", "experts_per_token"),
    sweep_of([[8, 6], SEQUENCE_PARALLEL, [1, 4]], (6, "save_dots", 4)),
)
def test_experts_move_over_tp_what_a_dense_mlp_does(num_experts, policy, experts_per_token):
    """Whatever k is, with shared experts or without, and beside it two floats for each choice."""
    shared = 40 if experts_per_token == 4 else 0
    dense, mixture = (
        block_collectives(
            (1, 1, 8), policy, num_experts=count, experts_per_token=experts_per_token, shared_experts=shared
        )
        for count in (0, num_experts)
    )
    activations, of_experts = (
        {c: times for c, times in found.items() if c.axes == ("tp",) and c.shape[2:] == (CONFIG["d_model"],)}
        for found in (dense, mixture)
    )
    assert bytes_of(of_experts) == bytes_of(activations)
    of_tokens = {c: times for c, times in mixture.items() if c.axes == ("tp",) and len(c.shape) == 3}
    others = {c: times for c, times in of_tokens.items() if c not in of_experts}
    gathers = 2 if policy in {"save_dots", "save_reduced", "full"} else 1
    assert bytes_of(others) == (gathers + 1) * 7 / 8 * B * T * 2 * experts_per_token * 4


def bytes_of(collectives):
    return sum(collective.bytes_sent * times for collective, times in collectives.items())
