"""FLOPs of a run, and the utilization of its devices."""

import math

import jax
from jax.sharding import Mesh

from jaxtp.analysis.hardware import of_kind
from jaxtp.analysis.layer_costs import Workload
from jaxtp.analysis.step_costs import active_parameters, costs_of
from jaxtp.mesh import mesh_shape
from jaxtp.models.config import ModelConfig
from jaxtp.train.state import Blueprint, MakeModel, parameter_count
from jaxtp.train.step import StepSettings
from jaxtp.train.task import Shapes


def flops_per_token(config: ModelConfig, parameters: int, sequence_length: int) -> float:
    """Returns `6 (N - V D) + 6 L S (heads * head_dim)`, where N is `parameters`.

    All utilizations use this definition: Kaplan et al., arXiv 2001.08361, with attention as in
    Megatron-LM, arXiv 2104.04473, halved for causality.

    For a layer of Gated DeltaNet, 18 (value heads * K V), three products with its states, replace
    the term of attention. Embedding lookups, recomputation and unused experts do not count; a tied
    table counts as the product of the head. Frozen parameters count 4 instead of 6.
    """
    rows = config.learned_positions or 0
    if not config.tie_embeddings:
        rows += config.vocab_size
    lookup = rows * config.d_model
    share = Workload(sizes=mesh_shape(), rows=1, length=max(1, sequence_length), once=True)
    costs = costs_of(config, share)
    attention = sum(product.counted * product.flops for product in costs.attention) / share.length
    used = active_parameters(config, parameters) - lookup
    trained = costs.adapters if config.lora.rank else used
    return 6.0 * trained + 4.0 * (used - trained) + (attention if sequence_length else 0.0)


def peak_flops(device: jax.Device) -> float:
    """Returns the dense bfloat16 peak in FLOP/s; NaN if unknown, as on CPUs."""
    hardware = of_kind(device.device_kind)
    return math.nan if hardware is None else hardware.flops


def row_flops(
    settings: StepSettings, blueprint: Blueprint, make_model: MakeModel, batch: Shapes
) -> float:
    """Returns the FLOPs of a row of a batch: `flops_per_token`, or `row_work` for a user's loss.

    They are NaN if the loss cannot be traced on one device. Call it without a mesh in context.

    Args:
      make_model: makes the model, not split over a mesh.
    """
    if settings.objective.has_formulas:
        length = batch["inputs"].shape[1]
        return length * flops_per_token(blueprint.config, parameter_count(blueprint), length)
    from jaxtp.train.user_step import row_work

    # The loss may need the run's mesh, and a missing metric must not end the run.
    try:
        return row_work(settings, make_model, batch)[0]
    except Exception:
        return math.nan


def utilization(mesh: Mesh, flops_per_second: float) -> dict[str, float]:
    """Returns `mfu`, given the FLOP/s of all devices; empty if the devices' peak is unknown."""
    mfu = flops_per_second / mesh.size / peak_flops(mesh.devices.flat[0])
    return {"mfu": mfu} if math.isfinite(mfu) else {}


def describe_peak(device: jax.Device) -> str | None:
    """Explains why no MFU is logged; None on CPUs, or if it is logged."""
    if device.platform == "cpu" or not math.isnan(peak_flops(device)):
        return None
    return (
        f"of {device.device_kind!r} not known: no mfu is logged (jaxtp/analysis/hardware.toml "
        "lists known devices)"
    )
