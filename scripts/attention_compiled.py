"""Compares compiled fused attention with XLA's attention, for an H100 that need not be present.

    python scripts/attention_compiled.py

1. Attention of one layer, forward and backward, as on a device of Llama 3 8B at tp 8 (4 query
   heads, 1 kv head of 128, bfloat16, one row); then with the heads of gpt-oss, with sinks, and of
   DeepSeek V3, whose values are narrower than its keys. Columns: temporaries; the largest array, in
   elements per pair of positions (scores of 4 heads, T x T, would be 4); calls of Triton kernels;
   tensor-core instructions in the PTX of each kernel (forward, gradients of queries, gradients of
   keys).
2. Shared memory of the kernels for each head width and dtype, with documents, a window, a softcap
   and sinks. An H100 has 227 KB of shared memory, an A100 163 KB, an L40S 99 KB.
3. As 1, with the sequence split over 8 devices in zigzag order: queries of two chunks, and all
   keys. The device index is a runtime value.

In 1 and 3 a kernel that spills registers fails to compile; in float32 the widest spills a few.
Nothing is executed. Needs the extra estimate-gpu.
"""

import argparse
import itertools
import math
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

os.environ["JAX_PLATFORMS"] = "cpu"  # else the plugin looks for a GPU

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtp.analysis.tables import columns
from jaxtp.layers.kernels.fused_attention import fused_attention
from jaxtp.layers.parameter import DType
from jaxtp.layers.positions import Part, segment_mask
from jaxtp.mesh import mesh_of, mesh_shape
from jaxtp.tools.estimate.compiler import ABSENT_GPU, topology

LENGTHS = (4096, 8192, 32768)
PARTS = (32768, 131072)
DEVICES = 8
HEADS = 4
KV_HEADS = 1
KERNELS = ("attention_forward", "attention_queries", "attention_keys")
_NO_SPILLS = "xla_gpu_fail_ptx_compilation_on_register_spilling"
_DUMP = {"xla_dump_hlo_as_text": True, "xla_gpu_dump_llvmir": True, "xla_dump_emitter_re": "ptx"}
_SHARED = re.compile(r"(attention_\w+) grid.*?shared_memory: (\d+) bytes")
_TENSOR_CORE = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b")
_ARRAY = re.compile(r"\b(?:f64|f32|bf16|f16|s32|u32|s8|u8|pred)\[([\d,]+)\]")


@dataclass(frozen=True)
class Heads:
    """Heads of attention."""

    width: int
    values: int
    sinks: bool = False

    def __str__(self) -> str:
        values = "" if self.values == self.width else f", values of {self.values}"
        return f"{self.width}{values}{', sinks' if self.sinks else ''}"


USUAL = Heads(128, 128)
GPT_OSS = Heads(64, 64, sinks=True)
DEEPSEEK = Heads(192, 128)
NEWER = {
    "fused, gpt-oss": (fused_attention, GPT_OSS),
    "fused, gpt-oss in windows": (partial(fused_attention, window=128), GPT_OSS),
    "fused, DeepSeek": (fused_attention, DEEPSEEK),
}


@dataclass(frozen=True)
class Program:
    """Measurements of a compiled program."""

    temporaries: int
    """Bytes."""

    largest: int
    """Elements of the largest array."""

    shared: dict[str, int]
    """Bytes of shared memory of each Triton kernel."""

    tensor_core: dict[str, int]
    """Tensor-core instructions in the PTX of each Triton kernel."""

    calls: int
    """Custom calls of Triton kernels."""


def xla(q: Array, k: Array, v: Array, segments: Array | None, *, scale: float) -> Array:
    mask = None if segments is None else segment_mask(segments)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=scale, is_causal=True, implementation="xla"
    )


def zigzag(place: Array, size: int, devices: int) -> Part:
    """Returns the attention part of device `place`.

    It has two chunks of queries in zigzag order, and all keys.
    """
    chunk = jnp.arange(size, dtype=jnp.int32)
    return Part(
        jnp.concatenate([place * size + chunk, (2 * devices - 1 - place) * size + chunk]), 0
    )


def h100() -> Mesh:
    return mesh_of(mesh_shape(), topology("h100", 1, 1).devices())


def compile_with_gradients(
    attend: Callable[..., Array],
    length: int,
    heads: Heads,
    dtype: str,
    *,
    packed: bool,
    devices: int = 1,
    may_spill: bool = False,
) -> Program:
    """Compiles attention with its gradients inside `shard_map`, as a layer runs it.

    `devices` split the sequence.
    """

    def step(segments: Array | None, place: Array, do: Array, *inputs: Array) -> tuple[Array, ...]:
        def run(q: Array, k: Array, v: Array, *sinks: Array) -> Array:
            known = {} if devices == 1 else {"part": zigzag(place, q.shape[1] // 2, devices)}
            known |= {"sinks": sinks[0]} if sinks else {}
            return attend(q, k, v, segments, scale=heads.width**-0.5, **known)

        o, backward = jax.vjp(run, *inputs)
        return o, *backward(do)

    mesh = h100()
    array = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    queries = (1, length // devices, HEADS)
    keys = (1, length, KV_HEADS)
    shapes = (
        (*queries, heads.values),
        (*queries, heads.width),
        (*keys, heads.width),
        (*keys, heads.values),
    )
    inputs = [
        *(array(shape, dtype) for shape in shapes),
        *([array((HEADS,), "float32")] if heads.sinks else []),
    ]
    segments = array((1, length), "int32") if packed else None
    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as folder:
        program = jax.jit(jax.shard_map(step, in_specs=P(), out_specs=P()))
        lowered = program.lower(segments, array((), "int32"), *inputs)
        options = {**ABSENT_GPU, **_DUMP, _NO_SPILLS: not may_spill, "xla_dump_to": folder}
        compiled = lowered.compile(compiler_options=options)
        (thunks,) = (path.read_text() for path in Path(folder).glob("*thunk_sequence.txt"))
        ptx = "".join(path.read_text() for path in Path(folder).glob("*.ptx"))
    entries = {part.split("(", 1)[0]: part for part in ptx.split(".entry ")[1:]}
    text = compiled.as_text()
    return Program(
        temporaries=compiled.memory_analysis().temp_size_in_bytes,
        largest=max(math.prod(map(int, dims.split(","))) for dims in _ARRAY.findall(text)),
        shared={name: int(size) for name, size in _SHARED.findall(thunks)},
        tensor_core={
            name: len(_TENSOR_CORE.findall(entries[name])) for name in KERNELS if name in entries
        },
        calls=text.count('custom_call_target="__gpu$xla.gpu.triton"'),
    )


def over_lengths(
    lengths: tuple[int, ...],
    attentions: dict[str, tuple[Callable[..., Array], Heads]],
    devices: int = 1,
) -> str:
    """Returns table 1, or table 3 with several `devices`; T is the sequence length."""
    rows = []
    for length, packed in itertools.product(lengths, (False, True)):
        for name, (attend, heads) in attentions.items():
            one = compile_with_gradients(
                attend, length, heads, "bfloat16", packed=packed, devices=devices
            )
            cells = (f"{one.temporaries:,}", f"{one.largest / length**2:.4f}", str(one.calls))
            in_ptx = " ".join(str(count) for count in one.tensor_core.values()) or "-"
            rows.append((f"{length:,}", "yes" if packed else "no", name, *cells, in_ptx))
            print(*rows[-1], flush=True)
    header = (
        "tokens",
        "packed",
        "attention",
        "temporaries, bytes",
        "largest / T x T",
        "calls",
        "tensor-core",
    )
    return columns(header, rows)


def over_widths() -> str:
    """Returns table 2."""
    rows = []
    for dtype in get_args(DType):
        widths = (16, 32, 64, 80, 128, 256)
        for heads in (*(Heads(width, width, sinks=True) for width in widths), GPT_OSS, DEEPSEEK):
            attend = partial(
                fused_attention, window=128 if heads is GPT_OSS else 1000, softcap=50.0
            )
            one = compile_with_gradients(attend, 2048, heads, dtype, packed=True, may_spill=True)
            rows.append(
                (dtype, str(heads), *(f"{one.shared[kernel] / 1024:.1f}" for kernel in KERNELS))
            )
            print(*rows[-1], flush=True)
    return columns(("dtype", "heads", "forward, KB", "queries, KB", "keys, KB"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    tables = [
        f"jax {jax.__version__}, for {h100().devices.flat[0].device_kind}",
        over_lengths(LENGTHS, {"fused": (fused_attention, USUAL), "xla": (xla, USUAL), **NEWER}),
        over_widths(),
        f"parts of {DEVICES} devices\n"
        + over_lengths(PARTS, {"fused": (fused_attention, USUAL), **NEWER}, DEVICES),
    ]
    print("\n" + "\n\n".join(tables))


if __name__ == "__main__":
    main()
