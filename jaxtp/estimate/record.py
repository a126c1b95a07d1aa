"""An estimate for machines: every number as plain values, and the best setting as the configuration of a run."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import jaxtp
from jaxtp.config import changed, to_yaml
from jaxtp.estimate.alternatives import Alternative
from jaxtp.estimate.config import EstimateConfig
from jaxtp.estimate.reasons import device_hours
from jaxtp.estimate.report import MODELLED, PROVENANCE_OF_MEMORY, provenance_of_moves
from jaxtp.estimate.search import Model, Search, Setting, Target, spans_hosts
from jaxtp.hardware import GB
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import Memory


def record(
    config: TrainConfig,
    where: Target,
    model: Model,
    found: Search,
    configured: Setting | None,
    alternatives: Sequence[Alternative],
    words: Sequence[str],
) -> dict[str, Any]:
    """Returns everything that tier 1 found, as plain values; sizes in bytes, times in seconds."""
    return {
        "jaxtp": jaxtp.__version__,
        "jax": jax.__version__,
        "hardware": dataclasses.asdict(where.hardware),
        "devices": where.devices,
        "bytes_for_jax": where.room,
        "parameters": model.parameters,
        "flops_per_token": model.flops_per_token,
        "tokens": config.data.global_batch_size * config.data.sequence_length,
        "steps": config.train.steps,
        "device_hours": list(device_hours(found.settings[0])),
        "words": list(words),
        "provenance": {
            "bytes_per_device": {
                kind.name: PROVENANCE_OF_MEMORY.get(kind.name, MODELLED) for kind in dataclasses.fields(Memory)
            },
            "collectives": provenance_of_moves(config),
            "flops_per_device": provenance_of_moves(config),
            "seconds": MODELLED,
            "tokens_per_second": MODELLED,
        },
        "meshes": [setting_record(setting) for setting in found.settings],
        "refused": dict(found.refused),
        "configured": None if configured is None else setting_record(configured),
        "alternatives": [{"change": other.change, **setting_record(other.setting)} for other in alternatives],
    }


def setting_record(setting: Setting) -> dict[str, Any]:
    """Returns a setting as plain values; `tokens_per_second` is in the middle of its range."""
    time = setting.time
    return {
        **setting.sizes,
        "fits": setting.fits,
        "fits_surely": setting.fits_surely,
        "update_is_modelled": setting.update_is_modelled,
        "remat": setting.config.model.remat,
        "accumulation": setting.config.train.accumulation,
        "micro_batch_size": setting.rows,
        "bytes_per_device": dataclasses.asdict(setting.memory) | {"total": setting.memory.total},
        "bytes_to_spare": setting.spare,
        "collectives": [
            {
                "module": one.module,
                "kind": one.kind,
                "axes": list(one.axes),
                "devices": one.group,
                "count": times,
                "bytes_sent": times * one.bytes_sent,
            }
            for one, times in setting.costs.traffic.items()
        ],
        "flops_per_device": setting.costs.flops,
        "padding": setting.costs.padding,
        "seconds": {
            "products": time.products,
            "attention": time.attention,
            "elementwise": time.elementwise,
            "update": time.update,
            "communication": {"+".join(axes): seconds for axes, seconds in time.communication.items()},
            "serial": time.serial,
            "overlapped": time.overlapped,
        },
        "tokens_per_second": setting.tokens_per_second,
        "tokens_per_second_range": list(setting.tokens_per_second_range),
        "mfu_range": list(setting.mfu_range),
    }


_RANDOM = (
    "# The weights begin random; of a model to fine-tune they come with --model.from-hf DIR or --run.init-from RUN.\n"
)


_WRITTEN = "# The best of jaxtp estimate for"


def is_written(text: str) -> bool:
    """Returns whether a configuration is one of `as_configuration`, by its beginning."""
    return any(line.startswith(_WRITTEN) for line in text.splitlines()[:4])


def _across_hosts(best: Setting) -> TrainConfig:
    """Returns the configuration of a setting, which says so where its tp groups span several hosts."""
    spans = spans_hosts(best.sizes, best.target.hardware.domain)
    return changed(best.config, {"mesh.tp_across_hosts": True}) if spans else best.config


def as_configuration(best: Setting, file: Path, asked: EstimateConfig) -> str:
    """Returns a setting as YAML that `train` takes, and that begins with the command and with what it came from.

    Args:
      best: the setting.
      file: where it will be.
      asked: the estimate that it is the best of.
    """
    slow, fast = best.tokens_per_second_range
    memory = f"{best.memory.total / GB:,.1f} GB on each device"
    share = asked.memory_fraction
    variable = "" if share == EstimateConfig().memory_fraction else f"XLA_PYTHON_CLIENT_MEM_FRACTION={share} "
    random = best.config.model.from_hf is None and best.config.run.init_from is None
    return (
        f"# {variable}jaxtp train --config {file}\n#\n"
        f"{_RANDOM if random else ''}"
        f"{_WRITTEN} {asked.hardware}: {memory}, of\n"
        f"# {best.target.room / GB:,.1f} for JAX, and {slow:,.0f} to {fast:,.0f} tokens/s, modelled.\n\n"
        f"{to_yaml(_across_hosts(best))}"
    )
