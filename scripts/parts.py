"""Reads the kernels of a compiled step by part, and their time at the peaks of the hardware.

    jaxtp estimate --config configs/llama3_8b.yaml --hardware h100x8 --write best.yaml
    python scripts/parts.py best.yaml h100

Compiles the step of a run for GPUs that need not be present, as `jaxtp estimate --tier 3` does, and
prints a table of its parts and a line about the step; other flags are those of `jaxtp train`. The
script of another checkout tells how its step differs. `step_beside_plain.py --absent` prints both
too; `gpu_acceptance.py` takes numbers of them. Needs the extra estimate-gpu.

- GB sent: what a device sends in a step, in rings; exposed: the part of it that the schedule does
  not overlap with a matrix product. Copies are kernels that only copy, transpose or convert.
- Each operation of a compiled program outside of fusions is a kernel, which reads its operands and
  writes its results once. The name of an operation gives its part; a fusion with a product is in
  the product's part.
- `/ least` divides by the least: the account of remat none, in which logits and scores are computed
  once, masked scores not at all, and each product, and each fused pass between products, reads and
  writes its arrays once. Casts of weights and sums of gradients are not in it. The last rows have
  what a device sends, by axes of the mesh.
- Milliseconds of a part at the peaks of the data sheet: `products` of all kernels with products,
  computing or moving, whichever takes longer; `others` of all other kernels, moving; `copies` of
  the others that only copy, transpose or convert; `links` of what the device sends. Products in 32
  bits take twice the time of 16 bits, and in 8 bits half.
- Products in the kernels of cuDNN, cuBLAS and jaxtp count. Causal attention counts as half, also
  with windows and documents. Experts count with all rows that the device reserves, unless their
  kernels are XLA's.
"""

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import jax

from jaxtp.analysis import hlo
from jaxtp.analysis.collective import bytes_by_axes
from jaxtp.analysis.hardware import GB, Hardware, find
from jaxtp.analysis.hlo import Computation, Instruction, Module, walk
from jaxtp.analysis.layer_costs import itemsize
from jaxtp.analysis.schedule import (
    CALLS,
    START,
    Scheduled,
    inside,
    operation_of,
    read_schedule,
    result_of_start,
)
from jaxtp.analysis.step_costs import LOGIT_PASSES, StepCosts
from jaxtp.analysis.tables import columns
from jaxtp.config.entry import UserError
from jaxtp.config.schema import replace_nested
from jaxtp.layers.float8 import SCALES
from jaxtp.mesh import mesh_of
from jaxtp.tools.estimate.compiler import ABSENT_GPU, TARGET_CONFIGS, topology, trace
from jaxtp.tools.estimate.roofline import link_speed
from jaxtp.tools.estimate.search import Setting, describe_model, estimate, target
from jaxtp.train.__main__ import COMMAND as TRAIN
from jaxtp.train.config import training_of
from jaxtp.train.memory import costs_of_step
from jaxtp.train.step import compiler_options
from jaxtp.train.validation import chosen_kernels

Part = dict[str, float]
_VALUES = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
_NO_KERNELS = (
    CALLS - {"fusion"} | _VALUES | {"after-all", "opt-barrier", "partition-id", "replica-id"}
)
_SLICES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that read a part of their first operand or update it in place, with the operand that
is the update."""
_MOVES = _VALUES | {
    *("copy", "transpose", "reshape", "convert", "concatenate", "pad", "reverse"),
    *("slice", "dynamic-slice", "dynamic-update-slice"),
}
AMOUNTS = (
    "kernels",
    "flops",
    "flops_16",
    "product_bytes",
    "other_bytes",
    "copied_bytes",
    "unknown",
)
"""Measures of a program on one device: the number of kernels; the FLOPs of products, and the 16-bit
FLOPs that take as long (half for 8 bits, twice for 32); the bytes of operands and results of
kernels with products, of kernels without products, and of the latter that only copy, transpose or
convert; the number of products with unknown FLOPs."""
COLLECTIVES = "collectives"
OTHER = "other"
PARTS = {
    "scales": SCALES,  # kernels that read operands once more, for their scales in float8
    "optimizer": "optimizer|adam|(grad|param)_norm",
    "embedding, loss": r"embed|cross_entropy|logits|\bloss|head\b",
    "norms": "norm",
    "attention": "attend|dot_product|fmha|flash|attention_(forward|queries|keys)|delta",
    "MLP": r"\bmlp|experts|moe|feed_forward|ffn",
    "projections": "attention|linear|proj|dense",
}
"""Parts of a step, by the first pattern that is in the name of one of a kernel's operations."""
LINK_SECONDS = "seconds_of_links"
SECONDS = ("seconds_of_products", "seconds_of_others", "seconds_of_copies", LINK_SECONDS)
# Passes over float32 logits that a loss needs: read forward and backward, and a gradient in 16 bits
LOGITS = 2.5
_PART_HEADER = (
    *("part", "kernels", "TFLOP", "/ least", "GB", "/ least"),
    *("products", "others", "copies", "links"),
)


TOTALS = ("GB sent", "exposed", "peak GiB", "kernels", "GB through memory", "ms of copies")


def read_parts(text: str) -> dict[str, Part]:
    """Returns the kernels of a compiled program by part of the step.

    The parts are `PARTS`, `OTHER` and `COLLECTIVES`.

    Raises:
      HloError: a data-dependent trip count.
    """
    module, entry = hlo.parse_module(text)
    totals = {name: dict.fromkeys(AMOUNTS, 0.0) for name in (*PARTS, OTHER, COLLECTIVES)}
    fused: set[str] = set()
    for instruction in chain.from_iterable(module.values()):
        if instruction.opcode == "fusion":
            fused.update(instruction.callees)
    for computation, kernel, scope, times, counted in walk(module, entry):
        if computation in fused or kernel.opcode in _NO_KERNELS or kernel.opcode.endswith("-done"):
            continue
        hlo.check_counted(kernel, counted)
        name, amounts = _kernel(kernel, computation, scope, module)
        for key, amount in amounts.items():
            totals[name][key] += times * amount
    return totals


def part_of(*names: str) -> str:
    """Returns the part of a kernel with operations of these names."""
    for name in names:
        for part, pattern in PARTS.items():
            if re.search(pattern, name):
                return part
    return OTHER


def _kernel(kernel: Instruction, computation: str, scope: str, module: Module) -> tuple[str, Part]:
    around = module[computation]
    if operation := operation_of(kernel, module):
        types = (*hlo.operand_types(around, kernel), operation.type)
        return COLLECTIVES, {"kernels": 1, "other_bytes": sum(map(type_bytes, types))}
    if kernel.opcode.endswith(START):
        opcode = kernel.opcode.removesuffix(START)
        kernel = replace(kernel, opcode=opcode, type=result_of_start(kernel.type))
    operations = [(around, kernel)]
    if kernel.opcode == "fusion":
        fused = walk(module, kernel.callees[0])
        operations += [(module[name], inner) for name, inner, *_ in fused]
    products = [(callee, inner) for callee, inner in operations if hlo.is_product(inner)]
    names = [inner.op_name for _, inner in (*products, *operations)]
    names = list(filter(None, names)) or [scope]
    part = part_of(*(re.sub(r"\bjit\([^()]*\)", "", name) for name in names))
    if kernel.opcode == "custom-call":  # its workspace is not traffic
        kernel = replace(kernel, type=re.sub(r"\b[su]8\[\d+\]", "", kernel.type))
    size = _traffic(kernel, around, module)
    if not products:
        copied = size * _only_moves(kernel, module)
        return part, {"kernels": 1, "other_bytes": size, "copied_bytes": copied}
    amounts = dict.fromkeys(AMOUNTS, 0.0) | {"kernels": 1, "product_bytes": size}
    for callee, product in products:
        operands = hlo.operand_types(callee, product)[:2]
        # An array of 8 elements has as many bytes as an element has bits.
        bits = [type_bytes(re.sub(r"\[.*", "[8]", operand)) for operand in operands]
        flops = hlo.product_flops(callee, product)
        if flops is None:
            amounts["unknown"] += 1
        else:
            amounts["flops"] += flops
            amounts["flops_16"] += flops * max(bits, default=16) / 16
    return part, amounts


def _only_moves(instruction: Instruction, module: Module) -> bool:
    if instruction.opcode == "fusion":
        return all(_only_moves(inner, module) for inner in inside(instruction, module))
    # A scalar, such as the index of a slice
    scalar = "[]" in instruction.type and instruction.opcode != "reduce"
    return instruction.opcode in _MOVES or scalar


def _traffic(kernel: Instruction, around: Computation, module: Module) -> float:
    # Bytes read and written. Of an array that is sliced or updated in place, only the slice counts.
    sizes = list(map(type_bytes, hlo.operand_types(around, kernel)))
    if kernel.opcode == "fusion":
        fused = module[kernel.callees[0]]
        read = sum(_read(fused, i, size, module) for i, size in enumerate(sizes))
        return read + _written(fused, hlo.root_of(fused))
    if kernel.opcode in _UPDATES:
        return 2 * sizes[_UPDATES[kernel.opcode]]
    written = type_bytes(kernel.type)
    return written + (written if kernel.opcode in _SLICES else sum(sizes))


def _read(fused: Computation, parameter: int, size: float, module: Module) -> float:
    # Bytes that a fusion reads of a parameter of that size.
    names: set[str] = set()
    total = 0.0
    for reader in fused:
        if reader.opcode == "parameter" and reader.text.startswith(f"{parameter})"):
            names.add(reader.name)
        positions = [i for i, (name, _) in enumerate(reader.operands) if name in names]
        if not positions or (positions == [0] and reader.opcode in _UPDATES):
            continue
        if reader.opcode == "bitcast":
            names.add(reader.name)
        elif reader.opcode == "fusion":
            callee = module[reader.callees[0]]
            total += sum(_read(callee, i, size, module) for i in positions)
        elif positions == [0] and reader.opcode in _SLICES:
            total += type_bytes(reader.type)
        else:
            return size
    return min(total, size)


def _written(fused: Computation, result: Instruction) -> float:
    if result.opcode == "parameter":
        return 0.0
    operands = [hlo.named(fused, name) for name, _ in result.operands]
    if result.opcode in ("tuple", "bitcast"):
        return sum(_written(fused, operand) for operand in operands)
    written = None
    if result.opcode in _UPDATES:
        written = operands[_UPDATES[result.opcode]]
    return type_bytes((written or result).type)


def type_bytes(type_: str) -> float:
    """Returns the bytes of all arrays of a type."""
    total = 0.0
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", type_):
        bits = re.search(r"\d+", dtype.replace("pred", "s8"))
        if bits:
            total += math.prod(map(int, re.findall(r"\d+", dims))) * int(bits[0]) / 8
    return total


def roofline(
    setting: Setting, parts: Mapping[str, Part], collectives: Sequence[Scheduled]
) -> dict[str, Part]:
    """Returns the step's parts with seconds at the hardware's peaks, their sum `all`, and links.

    A part also has the minimum of FLOPs and bytes, without recomputation.
    """
    hardware = setting.target.hardware
    work = setting.relative_work
    without_remat = replace_nested(setting.config, {"model.remat": "none"})
    costs = costs_of_step(without_remat, setting.sizes, hardware.architecture, once=True)
    zeros = dict.fromkeys((*AMOUNTS, *SECONDS, "bytes_sent", "least_flops", "least_bytes"), 0.0)
    timed = {name: zeros | part | _seconds(part, hardware) for name, part in parts.items()}
    for name, flops, size in _minimum_amounts(setting, costs):
        timed[name]["least_flops"] += work * flops
        timed[name]["least_bytes"] += work * size
    required = bytes_by_axes(costs.traffic)
    links = dict[str, Part]()
    for axes, size in bytes_by_axes(dict.fromkeys(collectives, 1)).items():
        seconds = size / link_speed(hardware, setting.sizes, axes) * hardware.link_efficiency
        links[f"sent over {'+'.join(axes)}"] = zeros | {
            "bytes_sent": size,
            "least_bytes": work * required.get(axes, 0.0),
            LINK_SECONDS: seconds,
        }
        timed[COLLECTIVES][LINK_SECONDS] += seconds
    total = dict(zeros)
    for part in timed.values():
        for key in total:
            total[key] += part[key]
    return timed | {"all": total} | links


def _seconds(part: Part, hardware: Hardware) -> Part:
    memory_speed = hardware.bandwidth
    return {
        "seconds_of_products": max(
            part["flops_16"] / hardware.flops, part["product_bytes"] / memory_speed
        ),
        "seconds_of_others": part["other_bytes"] / memory_speed,
        "seconds_of_copies": part["copied_bytes"] / memory_speed,
    }


def _minimum_amounts(setting: Setting, costs: StepCosts) -> Iterator[tuple[str, float, float]]:
    """Yields the part of each operation, and its minimum of FLOPs and bytes."""
    model = setting.config.model
    trained = 0 if model.lora.rank else setting.memory.parameters
    gradients = trained * min(1.0, itemsize(model.precision.reduce) / costs.param_itemsize)
    # Gradients are also read for their norm.
    yield "optimizer", 0.0, 2 * (setting.memory.optimizer + trained + gradients)
    yield "embedding, loss", 0.0, costs.logits * LOGITS / LOGIT_PASSES
    for operation in costs.elementwise:
        yield part_of(operation.module), 0.0, operation.bytes
    for product in (*costs.products, *costs.attention, *costs.update):
        yield (
            part_of(f"{product.module}/{product.name}"),
            product.counted * product.flops,
            product.count * product.bytes,
        )


def part_table(parts: Mapping[str, Part]) -> str:
    """Formats a `roofline`."""

    def ratio(amount: float, minimum: float) -> str:
        return f"{amount / minimum:.2f}" if minimum else ""

    rows = []
    for name, part in parts.items():
        flops = part["flops"]
        size = part["product_bytes"] + part["other_bytes"] + part["bytes_sent"]
        amounts = (
            f"{part['kernels']:,.0f}",
            f"{flops / 1e12:,.2f}",
            ratio(flops, part["least_flops"]),
            f"{size / GB:,.2f}",
            ratio(size, part["least_bytes"]),
        )
        rows.append((name, *amounts, *(f"{1e3 * part[key]:,.2f}" for key in SECONDS)))
    return columns(_PART_HEADER, rows)


def peak_gib(compiled: jax.stages.Compiled) -> float:
    """Returns the GiB of a program's arguments, results and temporaries."""
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return (total - memory.alias_size_in_bytes) / 2**30


def totals(
    compiled: jax.stages.Compiled, parts: Mapping[str, Part], collectives: Sequence[Scheduled]
) -> tuple[str, ...]:
    """Returns the numbers of a step, under the header `TOTALS`; `parts` are its `roofline`."""
    step = parts["all"]
    sent = sum(one.bytes_sent for one in collectives)
    exposed = sum(one.bytes_sent * (1 - one.hidden_bytes / one.bytes) for one in collectives)
    return (
        f"{sent / GB:.1f}",
        f"{exposed / GB:.1f}",
        f"{peak_gib(compiled):.2f}",
        f"{step['kernels']:,.0f}",
        f"{(step['product_bytes'] + step['other_bytes']) / GB:.1f}",
        f"{1e3 * step['seconds_of_copies']:.1f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file", type=Path, help="configuration of a run, with the sizes of its mesh"
    )
    parser.add_argument("hardware", choices=list(TARGET_CONFIGS))
    arguments, words = parser.parse_known_args()
    jax.config.update("jax_platforms", "cpu")
    try:
        options, _ = TRAIN.load([f"--config={arguments.file}", *words])
    except UserError as error:
        parser.error(str(error))
    config = training_of(options)
    sizes = config.mesh.sizes
    devices = math.prod(sizes.values())
    if min(sizes.values()) < 1 or (devices > 8 and devices % 8):
        parser.error(f"the mesh {sizes} does not fill hosts of 8 devices")
    hardware = find(arguments.hardware)
    if "cudnn" in chosen_kernels(config, sizes, hardware.architecture):
        # It needs no library, and as little memory.
        config = replace_nested(config, {"model.attention": "fused"})
    gpus = topology(arguments.hardware, max(devices // 8, 1), min(devices, 8))
    mesh = mesh_of(sizes, gpus.devices())
    traced = trace(config, mesh)
    with jax.set_mesh(mesh):
        lowered = traced.lower()
    options = {**compiler_options(config.model, "cuda"), **ABSENT_GPU}
    compiled = lowered.compile(compiler_options=options)
    text = compiled.as_text()
    setting = estimate(config, target(hardware, devices), describe_model(config))
    collectives = read_schedule(text, sizes)
    parts = roofline(setting, read_parts(text), collectives)
    print(part_table(parts))
    print(f"\n{columns(TOTALS, [totals(compiled, parts, collectives)])}")
    if unknown := parts["all"]["unknown"]:
        print(f"Kernels that do not tell their FLOPs, counted as 0: {unknown:,.0f}")


if __name__ == "__main__":
    main()
