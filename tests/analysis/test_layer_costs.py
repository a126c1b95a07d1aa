"""Formulas of costs, against the choices of layers that depend on them and against traced
programs.
"""

import dataclasses
import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from support import swept
from tables import read_table
from variants import small_model

import jaxtp
from jaxtp.analysis import step_costs as costs
from jaxtp.analysis.layer_costs import (
    Workload,
    collectives_of,
    context_costs,
    embedding_costs,
    has_formulas,
)
from jaxtp.analysis.step_costs import step_costs
from jaxtp.config.schema import ConfigError
from jaxtp.layers import DecoderBlock
from jaxtp.layers.context import ContextAttention
from jaxtp.mesh import mesh_shape


def bytes_sent(costs, work):
    return sum(
        one.count * one.collective.bytes_sent
        for cost in costs
        for one in collectives_of(cost, work)
    )


DTYPES = st.sampled_from(["float32", "bfloat16"])


@settings(max_examples=100)
@given(
    sizes=st.fixed_dictionaries(
        {"dp": st.just(2), **dict.fromkeys(("fsdp", "cp", "tp"), st.integers(1, 16))}
    ),
    rows=st.integers(1, 8),
    length=st.integers(1, 64),
    vocab_size=st.integers(1, 1000),
    features=st.integers(1, 64),
    precision=st.builds(jaxtp.Precision, compute=DTYPES, reduce=DTYPES),
    split=st.sampled_from([None, False]),
)
def test_the_cheaper_way_is_chosen(sizes, rows, length, vocab_size, features, precision, split):
    embedding = SimpleNamespace(
        vocab_size=vocab_size,
        features=features,
        precision=precision,
        sequence_parallel=split,
        token_rows=None,
    )
    shape = Workload(sizes=sizes, rows=rows, length=length * sizes["cp"])
    gathered, exchanged = (
        bytes_sent(embedding_costs(embedding, shape, exchanges=way), shape) for way in (False, True)
    )
    if not math.isclose(gathered, exchanged):  # sums of equal terms in another order
        assert jaxtp.VocabParallelEmbedding.exchanges(embedding, shape) == (exchanged < gathered)


@settings(max_examples=150)
@given(
    cp=st.integers(1, 16),
    queries=st.integers(1, 64),
    keys=st.integers(1, 64),
    chunk=st.integers(1, 64),
    window=st.one_of(st.none(), st.integers(1, 2048)),
    zigzag=st.booleans(),
)
def test_the_method_of_attention_that_moves_less_is_chosen(
    cp, queries, keys, chunk, window, zigzag
):
    attention = ContextAttention(queries=queries * cp, keys=keys, window=window)
    shape = Workload(sizes=mesh_shape(cp=cp), rows=3, length=2 * cp * chunk, zigzag=zigzag)
    ulysses, gather = (
        bytes_sent(context_costs(attention, way, 2, shape), shape) for way in ("ulysses", "gather")
    )
    method, why = attention.method(shape)
    assert method == ("ulysses" if ulysses <= gather else "gather")
    if cp > 1:
        ratio = ulysses / max(gather, 1) if method == "ulysses" else gather / ulysses
        assert why.startswith(f"it moves {ratio:.2f} x")


@cache
def overridden(kind):
    """Returns a subclass of a branch with a forward pass of its own."""
    forward = lambda self, *args, **kwargs: kind.__call__(self, *args, **kwargs)
    return type(kind.__name__, (kind,), {"__call__": forward})


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithoutFormulas(jaxtp.ModelConfig):
    """A decoder of the same branches, but that their forward passes are their own."""

    def branches(self, block, rngs):
        branches = super().branches(block, rngs)
        for branch in branches.values():
            branch.__class__ = overridden(type(branch))
        return branches


def both_costs(config, sizes, **rows):
    """Returns the costs of a step by formulas, and read from traced branches."""
    traced = WithoutFormulas(**vars(config))
    return [step_costs(each, sizes, **rows) for each in (config, traced)]


MODEL = small_model(
    d_model=32,
    d_ff=50,
    num_heads=8,
    head_dim=8,
    attention="xla",
    attention_bias=True,
    rope_theta=None,
    qk_norm="head",
)
DELTA = {"delta_value_heads": 6, "delta_key_heads": 3, "delta_key_dim": 8, "delta_value_dim": 6}
CASES = read_table(__file__)


@swept("name", CASES, "pieces")
def test_formulas_are_what_the_trace_of_a_layer_counts(name):
    axes, accumulation, changes = CASES[name]
    config = replace(MODEL, **changes)
    rows = {"batch_size": 16, "sequence_length": 16, "accumulation": accumulation}
    formulas, traced = both_costs(config, mesh_shape(**axes), **rows)
    assert traced.flops == formulas.flops
    for place in formulas.budget.keys() | traced.budget.keys():
        assert traced.budget.get(place, 0) == pytest.approx(formulas.budget.get(place, 0)), place
    assert traced.padding == pytest.approx(formulas.padding, abs=0.01)
    # Where everything is saved, formulas and residuals are both estimates
    if config.remat != "none":
        assert traced.saved == pytest.approx(formulas.saved, rel=0.1)


def test_formulas_are_not_inherited_by_another_forward_pass():
    for model, expected in ((MODEL, True), (WithoutFormulas(**vars(MODEL)), False)):
        block = nnx.eval_shape(lambda model=model: DecoderBlock(model, rngs=nnx.Rngs(0)))
        assert {has_formulas(branch) for _, branch, *_ in block.branches()} == {expected}


KERNELS = replace(
    MODEL, d_model=128, head_dim=64, attention_bias=False, qk_norm="none", attention="fused"
)
EXPERTS = {"d_ff": 64, "num_experts": 4, "experts_per_token": 2}
OF_KERNELS = {
    "attention": {"remat": "full"},
    "attention, dots": {"remat": "save_dots"},
    "grouped products": {"remat": "save_gathered", "grouped": "pallas", **EXPERTS},
    "products of all rows": {"remat": "none", "grouped": "xla", **EXPERTS},
    "states": {"remat": "save_dots", **DELTA},
}


@swept("name", OF_KERNELS, "attention, dots")
def test_flops_of_kernels_are_read_from_the_traced_program(name):
    config = replace(KERNELS, **OF_KERNELS[name])
    rows = {"batch_size": 4, "sequence_length": 256, "platform": "cuda 9.0"}
    formulas, traced = both_costs(config, mesh_shape(dp=2), **rows)
    assert traced.flops == formulas.flops


def test_equal_blocks_are_priced_once(monkeypatch):
    windows = ({"sliding_window": 4}, {"sliding_window": 4}, {})
    config = replace(MODEL, num_layers=6, pattern=windows)
    priced = []
    block_costs = costs.block_costs
    monkeypatch.setattr(
        costs, "block_costs", lambda block, work: priced.append(block) or block_costs(block, work)
    )
    step_costs(config, mesh_shape(tp=2), batch_size=2, sequence_length=8)
    assert len(priced) == 2


@pytest.mark.parametrize(
    ("batch_size", "length", "accumulation"), [(0, 8, 1), (4, 8, 2), (4, 0, 1), (8, 1, 2)]
)
def test_a_device_without_a_token_is_one_error(batch_size, length, accumulation):
    given = {"batch_size": batch_size, "sequence_length": length, "accumulation": accumulation}
    with pytest.raises(ConfigError, match=r"accumulation = \d+, .*cp = 2"):
        step_costs(jaxtp.ModelConfig(), mesh_shape(fsdp=4, cp=2), **given)
