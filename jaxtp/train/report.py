"""The output of a run: a summary at its start, then a progress bar, or plain lines where there is no terminal."""

import platform
import signal
from collections.abc import Mapping
from functools import partial

import jax
from flax import nnx
from jax.sharding import Mesh

import jaxtp
from jaxtp.checkpoint.logical import logical_size
from jaxtp.console import Display
from jaxtp.data.corpus import Corpus
from jaxtp.data.samples import Data
from jaxtp.layers.lora import trained
from jaxtp.layers.parameter import logical_shape, spec_of
from jaxtp.mesh import BATCH, TP, axes_of, batch_parts, describe_mesh, mesh_sizes, platform_of
from jaxtp.models.config import ModelConfig
from jaxtp.models.costs import describe_active, describe_padding
from jaxtp.train.config import TrainConfig, describe_context, describe_experts, describe_kernels, describe_overlap
from jaxtp.train.memory_check import describe_memory
from jaxtp.train.metrics import describe_peak
from jaxtp.train.optimizer import warmup_steps
from jaxtp.train.state import Blueprint, bytes_per_device, parameter_count, parameters, total_bytes
from jaxtp.train.verify import describe_verification


class Report(Display):
    """The console of a run; silent on all processes but the first.

    Use as a context manager: the progress bar lives inside it. A pipe that nobody reads any more stops the run as
    SIGTERM does: it saves first.
    """

    def __init__(self) -> None:
        counter, quiet = "step {task.completed:.0f}/{task.total:.0f}", jax.process_index() != 0
        super().__init__(counter, quiet=quiet, unread=partial(signal.raise_signal, signal.SIGTERM))

    def step(self, step: int, values: Mapping[str, float], tokens_per_second: float) -> None:
        """Moves the progress bar."""
        self.move(step, f"{_losses(values)}  {tokens_per_second:,.0f} tokens/s")

    def logged(self, record: dict[str, float | int], total: int) -> None:
        """Prints a plain line for a logged step, where there is no progress bar."""
        if self.has_bar:
            return
        left = (total - record["step"]) * record["step_seconds"]
        self.line(
            f"step {record['step']}/{total}  {_losses(record)}  "
            f"{record['tokens_per_second']:,.0f} tokens/s  {_duration(left)} left"
        )


def summary(config: TrainConfig, data: Data, blueprint: Blueprint) -> str:
    """Returns a description of the run: versions, mesh, sizes, bytes, and the sharding of each parameter."""
    mesh, tokens = blueprint.mesh, config.data.global_batch_size * config.data.sequence_length
    device = mesh.devices.flat[0]
    kind = "virtual CPU devices" if device.platform == "cpu" else device.device_kind
    rows = {
        "jaxtp": f"{jaxtp.__version__} with jax {jax.__version__}, Python {platform.python_version()}",
        "mesh": f"{describe_mesh(mesh_sizes(mesh))} = {mesh.size} {kind}",
        "model": f"{parameter_count(blueprint):,} parameters"
        f"{describe_active(config.model, parameter_count(blueprint))}{_describe_trained(blueprint)}: "
        f"{_describe_model(config.model)}",
        "state": f"{_mib(bytes_per_device(blueprint))} of parameters and optimizer on each device, "
        f"of {_mib(total_bytes(blueprint))} in all",
        "context": describe_context(config, mesh_sizes(mesh)),
        "experts": describe_experts(config.model, mesh_sizes(mesh)[TP]),
        "kernels": describe_kernels(config, mesh_sizes(mesh), platform_of(device)),
        "data": _describe_data(data.corpus),
        "rows": _describe_rows(data),
        "batch": _describe_batch(config, mesh, data.corpus.unit),
        "steps": f"{config.train.steps} of {tokens:,} = {tokens * config.train.steps:,} {data.corpus.unit}, "
        f"{_describe_epochs(data, config.train.steps * config.data.global_batch_size)}{_describe_cut(config)}",
        "folder": str(config.run.dir),
    }
    optional = {
        "overlap": describe_overlap(config, mesh_sizes(mesh)),
        "padding": describe_padding(config.model, mesh_sizes(mesh)),
        "memory": describe_memory(config, mesh),
        "peak": describe_peak(device),
        "verify": describe_verification(config, blueprint),
    }
    lines = [f"{name:<8}{text}" for name, text in (rows | optional).items() if text is not None]
    return "\n".join([*lines, "", *sharding_table(blueprint), ""])


def _describe_data(corpus: Corpus) -> str:
    """Returns a line on the data, with the number of tokens in the loss where that is not nearly all."""
    loss = "" if corpus.loss_tokens is None else f", {corpus.loss_tokens:,} of them with loss"
    return (
        f"{corpus.description}: {corpus.train_tokens:,} {corpus.unit} to train on{loss}, "
        f"{corpus.validation_tokens:,} held out, sha256 {corpus.identity[:12]}"
    )


def _describe_rows(data: Data) -> str:
    """Returns how many sequences the documents make, and how well they fill them."""
    rows = data.train_rows
    positions = sum(len(of_source) for of_source in rows)
    padding = sum(of_source.padding * len(of_source) for of_source in rows) / positions
    long = sum(of_source.num_split for of_source in rows), sum(of_source.num_dropped for of_source in rows)
    parts = [f"{positions:,} sequences, {padding:.2%} padding"]
    parts += [
        f"{count:,} longer documents {done}" for count, done in zip(long, ("split", "left out"), strict=True) if count
    ]
    if long[0] and data.corpus.loss_tokens is not None:
        parts.append("whose later parts have no prompt before them (data.long_documents=drop leaves them out)")
    return ", ".join(parts)


def _describe_epochs(data: Data, samples: int) -> str:
    """Returns the epochs of the run, for each source if there are several."""
    each = zip(data.corpus.sources, data.epochs(samples), strict=True)
    return ", ".join(f"{epochs:.2g} epochs" + (f" of {source.name}" if source.name else "") for source, epochs in each)


def _describe_cut(config: TrainConfig) -> str:
    """Returns a note on a warm-up that is cut because the run is shorter."""
    asked, fits = config.optimizer.warmup_steps, warmup_steps(config.optimizer, config.train.steps)
    return "" if asked == fits else f"; the warm-up of {asked} steps (optimizer.warmup_steps) is cut to these {fits}"


def _describe_batch(config: TrainConfig, mesh: Mesh, unit: str) -> str:
    sizes, accumulation, batch = mesh_sizes(mesh), config.train.accumulation, config.data.global_batch_size
    per_device = batch // (batch_parts(sizes) * accumulation)
    return (
        f"{batch} sequences of {config.data.sequence_length} {unit} = {describe_mesh(sizes, BATCH)} x "
        f"accumulation {accumulation} x {per_device} per device"
    )


def _describe_trained(blueprint: Blueprint) -> str:
    """Returns the number of trained parameters, where it is not that of all."""
    if not blueprint.config.lora.rank:
        return ""
    adapters = logical_size(nnx.filter_state(blueprint.abstract["model"], trained(blueprint.config.lora)))
    return f", {adapters:,} of them trained"


def _describe_model(model: ModelConfig) -> str:
    return (
        f"{model.num_layers} layers, {model.describe_block()}, vocabulary {model.vocab_size}; "
        f"{model.precision.compute} compute"
    )


def sharding_table(blueprint: Blueprint) -> list[str]:
    """Returns a line for each parameter: its shape, its sharding, and its shape on a device."""
    lines = [f"{'parameter':<34}{'shape':<20}{'split by':<28}per device"]
    for name, variable in parameters(blueprint).items():
        sharding = jax.sharding.NamedSharding(blueprint.mesh, spec_of(variable))
        shard = sharding.shard_shape(variable.shape)
        spec = [_split_by(entry, mesh_sizes(blueprint.mesh)) for entry in spec_of(variable)]
        split = ", ".join(map(str, spec)) if any(spec) else "replicated"
        lines.append(f"{name:<33} {_shape(logical_shape(variable)):<20}{split:<28}{_shape(shard)}")
    return lines


def _split_by(entry: str | tuple[str, ...] | None, sizes: Mapping[str, int]) -> str | None:
    """Returns the axes that one entry of a `PartitionSpec` names: of several those of more than one device."""
    axes = axes_of(entry)
    return " x ".join([axis for axis in axes if sizes[axis] > 1] or axes[:1]) or None


def _losses(values: Mapping[str, float]) -> str:
    """Returns the loss of a step, and the balance of its experts if there are any."""
    balance = f"  balance {values['balance_loss']:.2f}" if "balance_loss" in values else ""
    return f"loss {values['loss']:.4f}{balance}"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
