"""`scripts/parts.py`: kernels of a compiled step by part, and the least that each part does."""

import re

import jax
import jax.numpy as jnp
import parts
import pytest
from variants import small_model

from jaxtp.analysis.hardware import find
from jaxtp.analysis.hlo import count_flops_in_hlo
from jaxtp.analysis.schedule import Scheduled, read_schedule
from jaxtp.mesh import mesh_of, mesh_shape
from jaxtp.tools.estimate.compiler import trace
from jaxtp.tools.estimate.search import Target, describe_model, estimate
from jaxtp.train.config import DataConfig, MeshConfig, TrainConfig

KERNEL = (
    'custom-call(%p), custom_call_target="__gpu$xla.gpu.triton", backend_config={ir = '
    '"ML\\EFR\\00dot\\00"}'
)
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
    found = {
        name: {key: amount for key, amount in part.items() if amount}
        for name, part in parts.read_parts(PARTS_TEXT).items()
    }
    assert {name: part for name, part in found.items() if part} == expected
    in_float8 = parts.read_parts(PARTS_TEXT.replace("bf16", "f8e5m2"))["MLP"]
    assert (in_float8["flops"], in_float8["flops_16"]) == (flops, flops / 2)

    def planted(kernel):
        text = f"  %mine = {kernel}\n  ROOT %gather-done"
        return parts.read_parts(PARTS_TEXT.replace("  ROOT %gather-done", text))["other"]

    assert planted(f"f32[8]{{0}} {KERNEL}")["unknown"] == 1
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
    assert parts.read_parts(more) == parts.read_parts(plain)


def test_the_flops_and_bytes_of_a_compiled_program():
    def layer(x, w):
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ w), None

    x = jnp.ones((8, 16))
    w = jnp.ones((3, 16, 16))
    text = jax.jit(lambda x, w: jax.lax.scan(layer, x, w)[0]).lower(x, w).compile().as_text()
    found = parts.read_parts(text)
    assert found["MLP"]["flops"] == 3 * 2 * 8 * 16 * 16
    moved = found["MLP"]["product_bytes"] + found["MLP"]["other_bytes"]
    assert moved >= 3 * 4 * (2 * 8 * 16 + 16 * 16)
    assert sum(part["flops"] for part in found.values()) == count_flops_in_hlo(text)


def tiny(mesh, **changes):
    """Returns a small run over a mesh."""
    sizes = {"vocab_size": 64, "d_model": 32, "num_layers": 2, "head_dim": 8, "d_ff": 64}
    return TrainConfig(
        model=small_model(**sizes, loss_chunk=8, attention="xla", **changes),
        data=DataConfig(sequence_length=32, global_batch_size=4),
        mesh=MeshConfig(**mesh),
    )


def estimated(config, devices):
    return estimate(config, Target(find("h100"), devices, 80e9), describe_model(config))


def test_a_part_takes_the_time_of_its_flops_or_bytes_at_the_peaks():
    found = parts.read_parts("ENTRY %main () -> f32[] {\n}")
    found["MLP"] = dict(zip(parts.AMOUNTS, (2, 2e12, 1e12, 1e9, 6.7e9, 3.35e9, 0), strict=True))
    moved = Scheduled("all-gather", ("tp",), 4, 4e9, count=3, overlapped=2, computing=7)
    timed = parts.roofline(estimated(tiny(mesh_shape(fsdp=2, tp=4)), 8), found, (moved,))
    rows = {name: [row[key] for key in parts.SECONDS] for name, row in timed.items()}
    in_mlp = [1e12 / 989.4e12, 2e-3, 1e-3, 0]
    moving = 3e9 / 450e9
    assert rows["MLP"] == pytest.approx(in_mlp, rel=1e-3)
    assert rows["collectives"] == pytest.approx([0, 0, 0, moving])
    assert rows["all"] == pytest.approx([*in_mlp[:3], moving], rel=1e-3)
    row = r"MLP +2 +2\.00 +[\d,.]+ +7\.70 +[\d,.]+ +1\.01 +2\.00 +1\.00 +0\.00\n"
    assert re.search(row, parts.part_table(timed))


@pytest.mark.wide
@pytest.mark.parametrize(("remat", "experts"), [("none", 0), ("full", 0), ("save_dots", 4)])
def test_a_compiled_part_does_no_less_than_the_least(remat, experts):
    """Without recomputation as much, but for masked scores of attention."""
    mesh = mesh_shape(fsdp=2, tp=2)
    config = tiny(mesh, remat=remat, num_experts=experts)
    with jax.set_mesh(mesh_of(mesh)):
        text = trace(config, mesh_of(mesh)).lower().compile().as_text()
    found = parts.roofline(estimated(config, 4), parts.read_parts(text), read_schedule(text, mesh))
    # A CPU's compiler drops the names of the products of attention.
    found["attention"]["flops"] += found["other"]["flops"]
    names = ("MLP", "projections", "attention", "embedding, loss", "all")
    mlp, projections, attention, loss, all_parts = (
        found[name]["flops"] / found[name]["least_flops"] for name in names
    )
    moving = [found[name] for name in ("sent over fsdp", "sent over tp") if name in found]
    sent = [part["bytes_sent"] / part["least_bytes"] for part in moving]
    assert min([mlp, projections, attention, all_parts, *sent]) >= 1
    assert loss == 1
    optimizer = found["optimizer"]
    assert optimizer["product_bytes"] + optimizer["other_bytes"] >= optimizer["least_bytes"]
    if (remat, experts) == ("none", 0):
        assert (mlp, projections, attention) == (1, 1, 2)
        assert sent == pytest.approx([1, 1], rel=3e-3)
    if (remat, experts) == ("full", 0):
        assert (mlp, projections) == (11 / 9, 4 / 3)
