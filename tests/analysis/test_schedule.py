"""Reading a compiled program's schedule: what moves, and what is computed meanwhile."""

import pytest

from jaxtp.analysis.schedule import Scheduled, read_schedule

SIZES = {"dp": 1, "fsdp": 2, "tp": 4}
TP = "replica_groups={{0,1,2,3},{4,5,6,7}}"
FSDP = "replica_groups={{0,4},{1,5},{2,6},{3,7}}"
LOOP = 'condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}'
KERNEL = (
    'custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", backend_config={ir = '
    '"ML\\EFR\\00func\\00"}'
)
BOTH = "(bf16[8,4]{1,0}, /*index=1*/bf16[8]{0})"
TEXT = f"""HloModule jit_step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {{
  ROOT %add = f32[] add(%a, %b)
}}

%work (p: f32[8]) -> f32[8] {{
  ROOT %more = f32[8]{{0}} add(%p, %p)
}}

%product (p: f32[8]) -> f32[] {{
  ROOT %dot = f32[] dot(%p, %p), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
}}

%wrapped (p0: f32[8,4]) -> f32[4,4] {{
  ROOT %scattered = f32[4,4]{{1,0}} reduce-scatter(%p0), {FSDP}, dimensions={{0}}, to_apply=%sum
}}

%body (carry: (s32[], bf16[2,4])) -> (s32[], bf16[2,4]) {{
  %carry = (s32[], bf16[2,4]{{1,0}}) parameter(0)
  %x = bf16[2,4]{{1,0}} get-tuple-element(%carry), index=1
  %gather-start.1 = (bf16[2,4]{{1,0}}, bf16[8,4]{{1,0}}) all-gather-start(%x), {TP}, dimensions={{0}}
  %first = f32[8]{{0}} fusion(%x), kind=kLoop, calls=%work
  %second = f32[8]{{0}} fusion(%first), kind=kLoop, calls=%product
  %gather-done.1 = bf16[8,4]{{1,0}} all-gather-done(%gather-start.1)
  %gather-start.10 = ((bf16[2,4]{{1,0}}, bf16[2]{{0}}), {BOTH}) all-gather-start(%x, %y), {TP}, dimensions={{0}}
  %free = bf16[2,4]{{1,0}} bitcast(%x)
  %gather-done.10 = {BOTH} all-gather-done(%gather-start.10)
  ROOT %out = (s32[], bf16[2,4]{{1,0}}) tuple(%i, %x)
}}

%condition (carry: (s32[], bf16[2,4])) -> pred[] {{
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (p: f32[8,4]) -> f32[4,4] {{
  %p = f32[8,4]{{1,0}} parameter(0)
  %loop = (s32[], bf16[2,4]{{1,0}}) while(%carry), {LOOP}
  %scatter-start = ((f32[8,4]{{1,0}}), f32[4,4]{{1,0}}) async-start(%p), calls=%wrapped
  %between = f32[8]{{0}} fusion(%p), kind=kLoop, calls=%work
  %scatter-done = f32[4,4]{{1,0}} async-done(%scatter-start)
  %norm-start = f32[5]{{0}} all-reduce-start(%q), replica_groups={{}}, to_apply=%sum
  %norm-done = f32[5]{{0}} all-reduce-done(%norm-start)
  %alone = f32[5]{{0}} all-reduce(%q), replica_groups={{{{0}},{{1}},{{2}},{{3}},{{4}},{{5}},{{6}},{{7}}}}, to_apply=%sum
  ROOT %whole = f32[16]{{0}} all-reduce(%r), {TP}, to_apply=%sum
}}
"""  # noqa: E501


def test_everything_that_moves_is_there_with_what_is_computed_beside_it():
    beside_a_product = 3 * 2 * (8 * 4)
    gathers = beside_a_product + 3 * 2 * (8 * 4 + 8)
    found = read_schedule(TEXT, SIZES)
    assert list(found) == sorted(found, key=lambda one: -one.bytes), "the most bytes come first"
    assert set(found) == {
        Scheduled(
            "all-gather",
            ("tp",),
            4,
            gathers,
            count=6,
            overlapped=3,
            computing=6,
            hidden_bytes=beside_a_product,
        ),
        Scheduled("reduce-scatter", ("fsdp",), 2, 4 * 8 * 4, count=1, overlapped=1, computing=1),
        Scheduled("all-reduce", ("fsdp", "tp"), 8, 20, count=1, overlapped=0, computing=0),
        Scheduled("all-reduce", ("tp",), 4, 64, count=1, overlapped=0, computing=0),
    }


def test_groups_of_different_sizes_along_an_axis_are_kept_apart():
    """A ring of 2 sends half of a message, one of 4 three quarters."""
    pairs = TEXT.replace(
        f"all-reduce(%r), {TP}", "all-reduce(%r), replica_groups={{0,1},{2,3},{4,5},{6,7}}"
    )
    more = pairs.replace(
        "  ROOT %whole",
        f"  %four = f32[16]{{0}} all-reduce(%r), {TP}, to_apply=%sum\n  ROOT %whole",
    )
    found = [
        one for one in read_schedule(more, SIZES) if (one.kind, one.axes) == ("all-reduce", ("tp",))
    ]
    assert {one.group: (one.count, one.bytes, one.bytes_sent) for one in found} == {
        2: (1, 64, 64),
        4: (1, 64, 96),
    }
    assert {Scheduled(**one.record()) for one in found} == set(found)


@pytest.mark.parametrize(
    ("beside", "hides"),
    [
        (KERNEL, False),
        (KERNEL.replace("func", "load\\00dot"), True),
        (KERNEL.replace("func", "wgmma"), True),
        (KERNEL.replace("func", "dot_product"), False),
        ('custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"', True),
        ('custom-call(%x), custom_call_target="__cublas$lt$matmul"', True),
        ("while(%carry), condition=%condition, body=%product", True),
        ("while(%carry), condition=%condition, body=%work", False),
    ],
)
def test_kernels_with_products_hide_what_moves(beside, hides):
    text = TEXT.replace("f32[8]{0} fusion(%p), kind=kLoop, calls=%work", f"f32[8]{{0}} {beside}")
    (scatter,) = (one for one in read_schedule(text, SIZES) if one.kind == "reduce-scatter")
    assert scatter.hidden_bytes == (scatter.bytes if hides else 0)
