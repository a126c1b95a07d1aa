"""Reading a compiled program's schedule: what moves, and what is computed meanwhile."""

import jax
import jax.numpy as jnp
import pytest

from jaxtp.analysis.schedule import Scheduled, read_parts, read_schedule

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


PARTS_TEXT = """HloModule jit_step, is_scheduled=true

%dot (p0: bf16[2,4], p1: bf16[3,4,8], p2: s32[]) -> bf16[2,8] {
  %p0 = bf16[2,4]{1,0} parameter(0)
  %p1 = bf16[3,4,8]{2,1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %layer = bf16[1,4,8]{2,1,0} dynamic-slice(%p1, %p2, %p2, %p2), dynamic_slice_sizes={1,4,8}
  %w = bf16[4,8]{1,0} bitcast(%layer)
  ROOT %y = bf16[2,8]{1,0} dot(%p0, %w), lhs_contracting_dims={1}, metadata={op_name="jit(step)/jvp(mlp)/dot_general"}
}

%swap (p0: bf16[2,8]) -> f32[8,2] {
  %p0 = bf16[2,8]{1,0} parameter(0)
  %swapped = bf16[8,2]{1,0} transpose(%p0), dimensions={1,0}
  ROOT %wide = f32[8,2]{1,0} convert(%swapped)
}

%stack (p0: f32[3,8,2], p1: f32[8,2], p2: s32[]) -> f32[3,8,2] {
  %p0 = f32[3,8,2]{2,1,0} parameter(0)
  %p1 = f32[8,2]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %squares = f32[8,2]{1,0} multiply(%p1, %p1)
  %one = f32[1,8,2]{2,1,0} bitcast(%squares)
  ROOT %stacked = f32[3,8,2]{2,1,0} dynamic-update-slice(%p0, %one, %p2, %p2, %p2)
}

%body (carry: (s32[], bf16[2,4], bf16[3,4,8], f32[3,8,2])) -> (s32[], bf16[2,4], bf16[3,4,8], f32[3,8,2]) {
  %carry = (s32[], bf16[2,4]{1,0}, bf16[3,4,8]{2,1,0}, f32[3,8,2]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = bf16[2,4]{1,0} get-tuple-element(%carry), index=1
  %kernels = bf16[3,4,8]{2,1,0} get-tuple-element(%carry), index=2
  %saved = f32[3,8,2]{2,1,0} get-tuple-element(%carry), index=3
  %product = bf16[2,8]{1,0} fusion(%x, %kernels, %i), kind=kCustom, calls=%dot
  %copied = f32[8,2]{1,0} fusion(%product), kind=kInput, calls=%swap, metadata={op_name="jit(step)/mlp/norm/convert"}
  %more = f32[3,8,2]{2,1,0} fusion(%saved, %copied, %i), kind=kLoop, calls=%stack
  ROOT %out = (s32[], bf16[2,4]{1,0}, bf16[3,4,8]{2,1,0}, f32[3,8,2]{2,1,0}) tuple(%i, %x, %kernels, %more)
}

%condition (carry: (s32[])) -> pred[] {
  ROOT %less = pred[] parameter(0)
}

ENTRY %main (p: f32[8]) -> f32[16] {
  %p = f32[8]{0} parameter(0)
  %loop = (s32[]) while(%carry), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %gather-start = (f32[8]{0}, f32[16]{0}) all-gather-start(%p), replica_groups={{0,1}}, dimensions={0}
  ROOT %gather-done = f32[16]{0} all-gather-done(%gather-start)
}
"""  # noqa: E501


def test_kernels_are_counted_by_the_part_of_the_step():
    """A layer of a stack is read and written alone; a fusion's products name its part."""
    product = (2 * 4 + 4 * 8 + 2 * 8) * 2 + 4
    copied = (2 + 4) * 16
    stacked = 2 * 4 * 16 + 4
    flops = 3 * 2 * 2 * 8 * 4
    expected = {
        "MLP": {"kernels": 3, "flops": flops, "flops_16": flops, "product_bytes": 3 * product},
        "norms": {"kernels": 3, "other_bytes": 3 * copied, "copied_bytes": 3 * copied},
        "other": {"kernels": 3, "other_bytes": 3 * stacked},
        "collectives": {"kernels": 1, "other_bytes": 4 * (8 + 16)},
    }
    parts = read_parts(PARTS_TEXT)
    found = {
        name: {key: amount for key, amount in part.items() if amount}
        for name, part in parts.items()
    }
    assert {name: part for name, part in found.items() if part} == expected
    in_float8 = read_parts(PARTS_TEXT.replace("bf16", "f8e5m2"))["MLP"]
    assert (in_float8["flops"], in_float8["flops_16"]) == (flops, flops / 2)

    def planted(kernel):
        """The parts with one more kernel."""
        text = f"  %mine = {kernel}\n  ROOT %gather-done"
        return read_parts(PARTS_TEXT.replace("  ROOT %gather-done", text))["other"]

    assert planted(f"f32[8]{{0}} {KERNEL.replace('func', 'dot')}")["unknown"] == 1
    cublas = planted('(f32[8]{0}, s8[64]{0}) custom-call(%p), custom_call_target="__cublas$gemm"')
    assert cublas["product_bytes"] == 2 * 8 * 4, "its workspace is not traffic"


def test_asynchronous_kernels_read_and_write_what_others_do():
    """A fusion that updates a slice of a stack, and a copy, as XLA of jax 0.12 starts them."""
    stack = "f32[3,8,2]{2,1,0}"
    copy = "  %copied.1 = f32[8]{0} copy(%p)\n  %gather-start"
    plain = PARTS_TEXT.replace("  %gather-start", copy)
    started = f"(({stack}, f32[8,2]{{1,0}}, s32[]), {stack}, u32[]) fusion-start(%saved"
    more = plain.replace(f"%more = {stack} fusion(%saved", f"%more-start = {started}")
    more = more.replace("  ROOT %out", f"  %more = {stack} fusion-done(%more-start)\n  ROOT %out")
    more = more.replace("f32[8]{0} copy(%p)", "(f32[8]{0}, f32[8]{0}, u32[]) copy-start(%p)")
    assert more.count("-start(") == plain.count("-start(") + 2
    assert read_parts(more) == read_parts(plain)


def test_the_flops_and_bytes_of_a_compiled_program():
    def layer(x, w):
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ w), None

    x = jnp.ones((8, 16))
    w = jnp.ones((3, 16, 16))
    parts = read_parts(
        jax.jit(lambda x, w: jax.lax.scan(layer, x, w)[0]).lower(x, w).compile().as_text()
    )
    assert parts["MLP"]["flops"] == 3 * 2 * 8 * 16 * 16
    moved = parts["MLP"]["product_bytes"] + parts["MLP"]["other_bytes"]
    assert moved >= 3 * 4 * (2 * 8 * 16 + 16 * 16)
    assert sum(part["flops"] for part in parts.values()) == parts["MLP"]["flops"]
