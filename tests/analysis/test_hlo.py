"""Reading HLO text: groups of devices in every spelling, loops, callers' names."""

import pytest
from tables import read_table

from jaxtp.analysis.hlo import HloError, count_collectives_in_hlo, count_flops_in_hlo

TABLES = read_table(__file__)

SIZES = {"dp": 1, "fsdp": 2, "tp": 4}


def module(attributes, kind="all-reduce", shape="f32[8,4]{1,0}"):
    return f"""HloModule jit_step

%sum (a: f32[], b: f32[]) -> f32[] {{
  ROOT %add = f32[] add(%a, %b)
}}

ENTRY %main_spmd (param: f32[8,4]) -> f32[8,4] {{
  %param = f32[8,4]{{1,0}} parameter(0)
  ROOT %out = {shape} {kind}(%param), {attributes}, to_apply=%sum, metadata={{op_name="jit(step)/mlp/psum"}}
}}
"""  # noqa: E501


def only(text):
    ((collective, times),) = count_collectives_in_hlo(text, SIZES).items()
    return collective, times


@pytest.mark.parametrize(
    ("kind", "spelled"),
    [("all-reduce", TABLES["groups"]), ("collective-permute", TABLES["permutations"])],
)
def test_axes_are_recovered_from_device_ids(kind, spelled):
    found = {}
    for attributes in spelled:
        collective, _ = only(module(attributes, kind))
        assert collective.kind == kind.removeprefix("collective-")
        found[attributes] = f"{' '.join(collective.axes)} {collective.group}"
    assert found == spelled


def test_what_moves():
    collective, times = only(module("replica_groups={{0,1,2,3},{4,5,6,7}}"))
    assert (collective.shape, collective.dtype, collective.module) == ((8, 4), "float32", "mlp")
    assert times == 1
    assert collective.bytes_sent == 2 * 3 / 4 * 8 * 4 * 4


def test_reduce_scatter_counts_its_operand():
    text = module(
        "replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={1}", "reduce-scatter", "bf16[8,1]{1,0}"
    )
    collective, _ = only(text)
    assert (collective.shape, collective.dtype) == ((8, 4), "bfloat16")


def test_every_array_of_a_tuple_counts():
    counts = count_collectives_in_hlo(
        module("replica_groups={{0,1,2,3},{4,5,6,7}}", shape="(f32[8,4]{1,0}, /*index=1*/s32[])"),
        SIZES,
    )
    assert {(c.shape, c.dtype) for c in counts} == {((8, 4), "float32"), ((), "int32")}


def test_groups_of_one_device_are_nothing():
    assert not count_collectives_in_hlo(
        module("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"), SIZES
    )


LOOP = """HloModule jit_step

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%p), index=1
  %moved = f32[4]{0} call(%x), to_apply=%layer, metadata={op_name="jit(step)/while/body/mlp/shard_map"}
  %i = s32[] get-tuple-element(%p), index=0
  %by = s32[] constant(1)
  %next = s32[] add(%i, %by)
  ROOT %t = (s32[], f32[4]{0}) tuple(%next, %moved)
}

%layer (x: f32[4]) -> f32[4] {
  %x.1 = f32[4]{0} parameter(0)
  ROOT %g = f32[4]{0} all-gather(%x.1), replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="all_gather"}
}

%condition (p.1: (s32[], f32[4])) -> pred[] {
  %p.1 = (s32[], f32[4]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (x.2: f32[4]) -> (s32[], f32[4]) {
  %x.2 = f32[4]{0} parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], f32[4]{0}) tuple(%zero, %x.2)
  ROOT %w = (s32[], f32[4]{0}) while(%init), condition=%condition, body=%body, metadata={op_name="jit(step)/while"}KNOWN
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("old", "new", "turns"),
    TABLES["turns"],
)
def test_loops_count_their_turns_and_callers_name_the_module(old, new, turns):
    collective, times = only(LOOP.replace(old, new).replace("KNOWN", ""))
    assert (times, collective.counted, collective.module) == (turns, "", "mlp")


@pytest.mark.parametrize(
    ("old", "new"),
    TABLES["no counter"],
)
def test_a_loop_without_a_counter_has_no_count(old, new):
    collective, times = only(LOOP.replace(old, new).replace("KNOWN", ""))
    assert (times, collective.counted) == (1, "a turn")


def test_a_condition_runs_once_more_than_its_loop():
    text = LOOP.replace(
        "  ROOT %lt", "  %c = f32[4]{0} call(%x.9), to_apply=%layer\n  ROOT %lt"
    ).replace("KNOWN", "")
    assert sum(count_collectives_in_hlo(text, SIZES).values()) == 5 + 6


def test_a_branch_counts_as_what_it_moves_at_most():
    text = LOOP.replace(
        "call(%x), to_apply=%layer", "conditional(%q, %x, %x), branch_computations={%layer, %layer}"
    )
    collective, times = only(text.replace("KNOWN", ""))
    assert (times, collective.counted) == (10, "at most")


def test_flops_of_products():
    text = """HloModule jit_step

%body (p: (s32[], f32[4,8,16])) -> (s32[], f32[4,8,16]) {
  %p = (s32[], f32[4,8,16]{2,1,0}) parameter(0)
  %x = f32[4,8,16]{2,1,0} get-tuple-element(%p), index=1
  %w = bf16[4,16,32]{2,1,0} constant(0)
  %i = s32[] get-tuple-element(%p), index=0
  %by = s32[] constant(1)
  %next = s32[] add(%i, %by)
  %y = f32[4,8,32]{2,1,0} dot(%x, %w), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}
  ROOT %t = (s32[], f32[4,8,16]{2,1,0}) tuple(%next, %x)
}

%condition (p.1: (s32[], f32[4])) -> pred[] {
  %p.1 = (s32[], f32[4,8,16]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (x.2: f32[4]) -> (s32[], f32[4]) {
  %zero = s32[] constant(0)
  %init = (s32[], f32[4,8,16]{2,1,0}) tuple(%zero, %x.2)
  ROOT %w.1 = (s32[], f32[4]{0}) while(%init), condition=%condition, body=%body
}
"""  # noqa: E501
    assert count_flops_in_hlo(text) == 3 * 2 * (4 * 8 * 32) * 16
    part = text.replace("dot(%x, %w)", "dot(%p#1, %w)")  # as jax 0.12 spells a part of a tuple
    assert count_flops_in_hlo(part) == count_flops_in_hlo(text)
    with pytest.raises(HloError, match="they depend on data"):
        count_flops_in_hlo(text.replace("%zero = s32[] constant(0)", "%zero = s32[] parameter(1)"))


def test_unknown_spellings_are_refused():
    for text, message in (
        ("not hlo", "no ENTRY"),
        (module("replica_groups=v9<0..8>"), "cannot tell which devices"),
    ):
        with pytest.raises(HloError, match=message):
            count_collectives_in_hlo(text, SIZES)


LAYER = "jit(step)/jvp()/while/body/closed_call/mlp/row_parallel_linear/shard_map"
GEMM = 'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'  # noqa: E501
COMPILED = f"""HloModule jit_step

%gemm (a: f8e4m3fn[8,4], b: f8e4m3fn[4,2]) -> bf16[8,2] {{
  %a = f8e4m3fn[8,4]{{1,0}} parameter(0)
  %b = f8e4m3fn[4,2]{{0,1}} parameter(1)
  ROOT %dot = bf16[8,2]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, \
metadata={{op_name="{LAYER}/float8/dot_general"}}
}}

ENTRY %main (x: f8e4m3fn[8,4], w: f8e4m3fn[4,2], h: f16[8,4], v: f16[4,2]) -> bf16[8,2] {{
  %x = f8e4m3fn[8,4]{{1,0}} parameter(0)
  %w = f8e4m3fn[4,2]{{0,1}} parameter(1)
  %h = f16[8,4]{{1,0}} parameter(2)
  %v = f16[4,2]{{1,0}} parameter(3)
  %lt = (bf16[8,2]{{1,0}}, s8[64]{{0}}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul$f8", {GEMM}, \
metadata={{op_name="{LAYER}/float8/dot_general"}}
  %16 = f16[8,2]{{1,0}} custom-call(%h, %v), custom_call_target="__cublas$lt$matmul", {GEMM}, \
metadata={{op_name="{LAYER.replace("jvp()", "transpose(jvp())")}/float8/dot_general"}}
  %weight = f16[8,2]{{1,0}} custom-call(%h, %v), custom_call_target="__cublas$lt$matmul", {GEMM}, \
metadata={{op_name="{LAYER}/dot_general"}}
  ROOT %fused = bf16[8,2]{{1,0}} fusion(%x, %w), kind=kCustom, calls=%gemm
}}
"""  # noqa: E501


def test_products_of_libraries_and_in_fusions_count():
    assert count_flops_in_hlo(COMPILED) == 4 * 2 * 8 * 2 * 4


TRITON = (
    'custom_call_target="__gpu$xla.gpu.triton", backend_config={ir = "\\00dot\\00", name = '
    '"NAME", num_stages = 2}'
)
MASKED = (
    'custom_call_target="__cudnn$NAME", backend_config={"cudnn_fmha_backend_config": '
    '{"mask_type": "CAUSAL"}}'
)
ONE = 2 * (3 * 64 * 8) * 16 * 32
"""FLOPs of a product of causal attention: half of the pairs."""


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        (MASKED.replace("NAME", "fmhaSoftmax"), 2 * ONE),
        (MASKED.replace("NAME", "fmhaSoftmax").replace("CAUSAL", "NO_MASK"), 4 * ONE),
        (MASKED.replace("NAME", "fmhaSoftmaxBackward"), 5 * ONE),
        (TRITON.replace("NAME", "attention_forward"), 2 * ONE),
        (TRITON.replace("NAME", "attention_keys"), 3 * ONE),
        (TRITON.replace("NAME", "grouped_product").replace("dot", "load"), 0),
    ],
)
def test_flops_of_kernels_are_told_by_their_names_and_shapes(call, flops):
    text = f"""HloModule jit_step

ENTRY %main (q: bf16[3,64,8,16], k: bf16[3,64,2,16]) -> bf16[3,64,8,16] {{
  %q = bf16[3,64,8,16]{{3,2,1,0}} parameter(0)
  %k = bf16[3,64,2,16]{{3,2,1,0}} parameter(1)
  ROOT %o = (bf16[3,64,8,16]{{3,2,1,0}}, f32[3,8,64]{{2,1,0}}) custom-call(%q, %k, /*index=2*/%k), {call}
}}
"""  # noqa: E501
    assert count_flops_in_hlo(text) == flops
    with pytest.raises(HloError, match="cannot tell what a product multiplies: o"):
        count_flops_in_hlo(text.replace(call, TRITON.replace("NAME", "mine")))
