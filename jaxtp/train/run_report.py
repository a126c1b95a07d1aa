"""Console output of a run: a summary, then a progress bar, or lines without a terminal."""

import math
import platform
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import jax
from flax import nnx

import jaxtp
from jaxtp.checkpoint.logical import logical_size
from jaxtp.config.console import Display, duration, size_text
from jaxtp.data.samples import Data
from jaxtp.layers.context import LocalShape
from jaxtp.layers.kernels import grouped
from jaxtp.layers.kernels.select import KernelName, pick_scan
from jaxtp.mesh import (
    BATCH,
    CP,
    SEQUENCE,
    TP,
    Sizes,
    batch_parts,
    describe_mesh,
    mesh_sizes,
)
from jaxtp.models.block import BlockConfig
from jaxtp.models.config import BLOCKS, ModelConfig, matmul_layers, padded_sizes
from jaxtp.train.config import DataConfig, LoopConfig
from jaxtp.train.run_data import ROWS
from jaxtp.train.sharded_optimizer import replicated_bytes
from jaxtp.train.state import Blueprint, bytes_per_device, parameter_count, total_bytes
from jaxtp.train.validation import attention_blocks

if TYPE_CHECKING:
    from jaxtp.train.setup import RunPlan

_MAX_KINDS_OF_HEADS = 4  # Maximum number of kinds of heads that the summary lists


class Report(Display):
    """The console of a run, on process 0.

    If the output is a pipe whose reader exits, the run saves and stops, as after SIGTERM.
    """

    def __init__(self, own_metrics: Sequence[str] = ()):
        # Names of the metrics of a user's loss, which a step's line shows
        self._own_metrics = own_metrics
        unread = partial(signal.raise_signal, signal.SIGTERM)
        super().__init__("step {done}/{total}", quiet=jax.process_index() != 0, unread=unread)
        self.logged: dict[str, float] = {}
        """The last values that a user's callbacks logged, which the progress bar shows."""

    def step(
        self, step: int, values: Mapping[str, float], rate: str, until_evaluation: float | None
    ) -> None:
        """Updates the progress bar.

        Args:
          until_evaluation: seconds; None if only the last step is evaluated.
        """
        texts = [_losses(values), rate, *self._own(values), *_described(self.logged)]
        if until_evaluation is not None:
            texts.append(f"evaluation in {duration(until_evaluation)}")
        self.move(step, *texts)

    def _own(self, values: Mapping[str, float]) -> list[str]:
        # Formats the metrics of a user's loss.
        return _described({name: values[name] for name in self._own_metrics if name in values})

    def log(
        self, record: dict[str, float | int], total: int, unit: str, *, is_first: bool = False
    ) -> None:
        """Prints a line for a logged step, unless there is a progress bar."""
        if self.has_bar:
            return
        left = ""
        # A process's first step includes compilation.
        if not is_first:
            seconds = (total - record["step"]) * record["step_seconds"]
            left = f"  {duration(seconds)} left"
        rate = record[f"{unit}_per_second"]
        losses = "  ".join([_losses(record), *self._own(record)])
        self.line(f"step {record['step']}/{total}  {losses}  {rate:,.0f} {unit}/s{left}")


def summary(plan: "RunPlan", progress: tuple[int, int]) -> str:
    """Describes a run: versions, mesh, sizes and bytes.

    Args:
      progress: numbers of finished steps, and of sequences read.
    """
    config = plan.config
    blueprint = plan.blueprint
    model = plan.parts.model.describe(blueprint, config)
    mesh = blueprint.mesh
    device = mesh.devices.flat[0]
    sizes = mesh_sizes(mesh)
    kind = "virtual CPU devices"
    peak = None
    if device.platform != "cpu":
        from jaxtp.train.performance import describe_peak

        kind = device.device_kind
        peak = describe_peak(device)
    python = platform.python_version()
    per_device = size_text(bytes_per_device(blueprint), binary=True)
    total = size_text(total_bytes(blueprint), binary=True)
    rows: dict[str, object] = {
        "jaxtp": f"{jaxtp.__version__} with jax {jax.__version__}, Python {python}",
        "mesh": f"{describe_mesh(sizes)} = {mesh.size} {kind}",
        "model": model["model"],
        "state": f"{per_device} of parameters and optimizer on each device, of {total} in all"
        + _describe_replicated(blueprint),
        **model,
        "loss": describe_loss(config.train),
        "optim": _named(config.optimizer.build),
        **_data_rows(plan, sizes, progress),
        "folder": config.run.dir,
        "peak": peak,
        **plan.notes,
    }
    return "".join(f"{name:<8}{text}\n" for name, text in rows.items() if text)


def _named(reference: str | None) -> str | None:
    return None if reference is None or reference.startswith("<") else reference


def describe_loss(train: LoopConfig) -> str | None:
    """Returns the name and the arguments of a user's loss."""
    name = _named(train.loss)
    if name is None or not train.loss_arguments:
        return name
    return f"{name}({arguments_text(train.loss_arguments)})"


def arguments_text(values: Mapping[str, object]) -> str:
    """Returns the arguments of a call."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def describe_decoder(blueprint: Blueprint, build: str | None) -> str:
    """Describes the sizes of a decoder in one line; `build` names the function that makes it."""
    model = blueprint.config
    count = parameter_count(blueprint)
    parameters = f"{count:,} parameters"
    if model.most_experts:
        from jaxtp.analysis.step_costs import describe_active

        parameters += describe_active(model, count)
    builder = f", by {build}" if build else ""
    return (
        f"{parameters}{_describe_trained(blueprint)}: {model.num_layers} layers, "
        f"{describe_block(model)}, vocabulary {model.vocab_size}; "
        f"{model.precision.compute} compute{builder}"
    )


def describe_block(model: ModelConfig) -> str:
    """Returns the sizes of a block in one line."""
    counts = Counter(map(_describe_heads, model.layers()))
    heads = [*counts][:1]
    if 1 < len(counts) <= _MAX_KINDS_OF_HEADS:
        heads = [f"{description} in {layers}" for description, layers in counts.items()]
        heads[0] += f" of {model.num_layers} layers"
    text = f"d_model {model.d_model}, {', '.join(heads)}, d_ff {model.d_ff}"
    if model.num_experts:
        text += f" in each of {model.num_experts} experts, {model.experts_per_token} a token"
    num_others = len(model.block_kinds()) - 1
    if num_others:
        text += f", and {num_others} other {'kind' if num_others == 1 else 'kinds'} of block"
    return text


def _describe_heads(block: BlockConfig) -> str:
    if block.parts == "mlp":
        return "only an MLP"
    states = (
        f"{block.delta_value_heads} heads with states ({block.delta_key_heads} key) of "
        f"{block.delta_key_dim} x {block.delta_value_dim}"
    )
    if block.has_states and not block.has_attention:
        return states
    if block.short_conv:
        return f"convolutions of {block.short_conv} tokens"
    keys = f"keys and values from {block.kv_rank}" if block.kv_rank else f"{block.num_kv_heads} kv"
    heads = f"{block.num_heads} heads ({keys}) of {block.head_dim}"
    return f"{heads} beside {states}" if block.has_states else heads


def describe_padding(model: ModelConfig, sizes: Sizes) -> str | None:
    """Describes the sizes that tp pads; None without padding."""
    if not padded_sizes(model, sizes[TP]):
        return None
    from jaxtp.analysis import step_costs

    return step_costs.describe_padding(model, sizes)


def _data_rows(plan: "RunPlan", sizes: Sizes, progress: tuple[int, int]) -> Mapping[str, object]:
    data = plan.data
    settings = plan.config.data
    batch = settings.global_batch_size
    steps = plan.config.train.steps
    accumulation = plan.config.train.accumulation
    per_device = batch // (batch_parts(sizes) * accumulation)
    split = f"{describe_mesh(sizes, BATCH)} x accumulation {accumulation} x {per_device} per device"
    if data.tokens is None:
        columns = data.train.shapes.items()
        arrays = ", ".join(f"{name} {a.dtype}{list(a.shape[1:])}" for name, a in columns)
        length = f"{steps:,} x {batch:,} = {steps * batch:,} rows"
        if data.num_rows:
            length += f", {steps * batch / data.num_rows:.2g} epochs of {data.num_rows:,}"
        return {
            "data": f"{settings.batches}: rows of {arrays}",
            "batch": f"{batch} {ROWS} = {split}",
            "steps": length,
            "eval": data.describe_validation(settings.validation_batches),
        }
    corpus = data.tokens.corpus
    scores = data.tokens.scores
    loss = "" if corpus.loss_tokens is None else f", {corpus.loss_tokens:,} of them with loss"
    length = describe_steps(settings, steps, data.tokens, *progress)
    warmup = plan.config.optimizer.warmup_steps
    if warmup > steps and plan.config.optimizer.build is None:
        length += (
            f"; the warm-up of {warmup} steps (optimizer.warmup_steps) is cut to these {steps}"
        )
    return {
        "data": f"{corpus.description}: {corpus.train_tokens:,} {corpus.unit} to train on{loss}, "
        f"{corpus.validation_tokens:,} held out, sha256 {corpus.identity[:12]}",
        "rows": _describe_rows(data.tokens),
        "scores": scores and scores.describe(),
        "batch": f"{batch} sequences of {settings.sequence_length} {corpus.unit} = {split}",
        "steps": length,
        "eval": corpus.not_evaluated(),
    }


def describe_kernels(
    model: ModelConfig, attention_kernels: Mapping[KernelName, str], platform: str
) -> str:
    """Describes the kernels of attention (`chosen_kernels`), of layers with states and experts."""
    attention = " and ".join(f"{name} attention ({why})" for name, why in attention_kernels.items())
    delta = describe_delta(model, platform)
    experts = describe_grouped(model, platform)
    return "; ".join(filter(None, [attention, *delta, *experts]))


def describe_delta(model: ModelConfig, platform: str) -> Iterator[str]:
    """Yields the implementations that compute the states of each kind of layer."""
    blocks = [block for block in model.block_kinds() if block.has_states]
    if any(block.delta_kind == "mamba2" for block in blocks):
        yield "xla states of Mamba-2"
    blocks = [block for block in blocks if block.delta_kind == "gated_delta"]
    for width, rank in dict.fromkeys(
        (block.delta_key_dim, block.delta_gate_rank) for block in blocks
    ):
        scan, why = pick_scan(width, platform)
        layer = "Kimi Delta Attention" if rank else "Gated DeltaNet"
        yield f"{'pallas' if scan else 'xla'} states of {layer} ({why})"


def describe_grouped(model: ModelConfig, platform: str) -> Iterator[str]:
    """Yields the method of products with experts.

    Also yields a warning if an accelerator multiplies every row by every expert.
    """
    experts = model.most_experts
    if not experts:
        return
    method, why = grouped.pick_method(model.grouped, platform)
    yield f"{method} products of experts ({why})"
    if platform != "cpu" and grouped.is_dense(method, platform):
        yield (
            f"WARNING: it multiplies every row by every expert, with {experts} times the work and "
            "the memory of the rows"
        )


def describe_experts(model: ModelConfig, tp: int) -> str | None:
    """Describes how tp divides the experts; None without experts."""
    divided: dict[str, None] = {}
    for block in model.block_kinds():
        count = block.num_experts
        if count and block.over_tp(tp):
            divided[f"{count // tp} of {count} on each device, whole"] = None
        elif count:
            width = f"{-(-block.d_ff // tp)} of the width {block.d_ff} of each"
            divided[f"all {count} on each device, {width}"] = None
    return f"over tp {tp}: {' and '.join(divided)}" if divided else None


def describe_matmul(model: ModelConfig) -> str | None:
    """Lists the projections that `precision.matmul` applies to, and the exceptions with reasons.

    It is None if `precision.matmul` is off.
    """
    matmul = model.precision.matmul
    if matmul == "compute":
        return None
    from jaxtp.plans.plan import patterns_for

    layers = matmul_layers(model)
    reasons = {pattern: layers[path] for path, pattern in patterns_for(layers).items()}
    patterns = defaultdict[str | None, list[str]](list)
    for pattern, reason in reasons.items():
        patterns[reason].append(pattern.removeprefix(f"{BLOCKS}."))
    applied = ", ".join(patterns.pop(None))
    text = f"{matmul} products in {applied}; {model.precision.compute} in gradients of weights"
    exceptions = [f"{', '.join(paths)} ({reason})" for reason, paths in patterns.items()]
    return ", ".join([text, "the head", *exceptions])


def describe_context(model: ModelConfig, share: LocalShape) -> str | None:
    """Describes how cp splits attention and other mixers; None if cp is 1."""
    if share.sizes[CP] == 1:
        return None
    methods: dict[str, bool] = {}
    attending = attention_blocks(model)
    for block in attending:
        attention = block.context_attention(share.tp)
        method, why = attention.method(share)
        window = attention.window
        where = "" if window is None else f" within a window of {window:,}"
        methods[f"{method}{where} ({why})"] = attention.uneven(share)
    chunks = "a chunk on each device"
    if model.zigzag(share):
        chunks = "two chunks of each on a device, for even work"
    elif any(methods.values()):
        chunks += (
            "; WARNING: uneven work: the last device does the most, because 2 * cp does not "
            f"divide sequences of {share.length:,}"
        )
    layers = []
    if methods:
        layers.append(f"attention by {' and '.join(methods)}")
    if any(block.has_states for block in model.block_kinds()):
        layers.append("layers with states by their chunks' maps of states")
    if any(block.short_conv for block in model.block_kinds()):
        layers.append("short convolutions by the tokens before each chunk")
    return f"sequences over cp {share.sizes[CP]}, {chunks}; {', '.join(layers)}"


def describe_overlap(model: ModelConfig, share: LocalShape) -> str | None:
    """Describes the overlap of communication and products; None if off."""
    mesh = share.sizes
    tp = share.tp
    if model.overlap == "none":
        return None
    if tp > 1 and share.is_split(model.sequence_parallel):
        but = "" if model.precision.matmul == "compute" else ", but not in float8"
        return f"rings of tp {tp}: a part of a sequence moves while another part is multiplied{but}"
    why = "there is no tp"
    if tp > 1:
        parts = describe_mesh(mesh, [axis for axis in SEQUENCE if mesh[axis] > 1])
        why = f"{parts} does not divide sequences of {share.length}, which tp leaves whole"
    return f"model.overlap=ring does nothing here: {why}"


def _describe_rows(data: Data) -> str:
    rows = data.train_rows
    count = sum(map(len, rows))
    split = sum(source.num_split for source in rows)
    padding = sum(source.padding * len(source) for source in rows) / count
    text = f"{count:,} sequences, {padding:.2%} padding"
    unlabelled = sum(source.num_unlabelled for source in rows)
    if unlabelled:
        text += f", {unlabelled:,} more without a label left out"
    dropped = sum(source.num_dropped for source in rows)
    if data.corpus.has_pairs:
        pairs = sum(source.train.num_documents // 2 for source in data.corpus.sources) - dropped
        return f"{text}, pairs: {pairs:,}, {dropped:,} left out"
    if split:
        text += f", {split:,} longer documents split"
    if dropped:
        text += f", {dropped:,} longer documents left out"
    if split and data.corpus.loss_tokens is not None:
        text += (
            ", whose later parts have no prompt before them (data.long_documents=drop leaves "
            "them out)"
        )
    return text


def describe_steps(settings: DataConfig, steps: int, data: Data, finished: int, read: int) -> str:
    """Describes the number of steps of a run that has finished some, and read `read` rows."""
    batch = settings.global_batch_size
    left = max(steps - finished, 0)
    samples = read + left * batch
    tokens = batch * settings.sequence_length
    total = f"{samples * settings.sequence_length:,} {data.corpus.unit}"
    length = f"{steps:,} x {tokens:,} = {total}"
    # The steps so far may have had another batch size.
    if samples != steps * batch:
        length = f"{steps:,}: {finished:,} done, {left:,} left, of {tokens:,} each; {total} in all"
    for source, epochs in zip(data.corpus.sources, data.epochs(samples), strict=True):
        length += f", {epochs:{',.0f' if epochs >= 10 else '.2g'}} epochs"
        if settings.mixture:
            length += f" of {source.name}"
    return length


def _describe_replicated(blueprint: Blueprint) -> str:
    replicated = replicated_bytes(blueprint.sharded)
    total = sum(replicated.values())
    if total < bytes_per_device(blueprint) / 100:
        return ""
    largest = sorted(replicated, key=replicated.__getitem__, reverse=True)[:3]
    return (
        f"; {size_text(total, binary=True)} of it is replicated, although parameters are split: "
        f"{', '.join(largest)}{', ...' if len(replicated) > len(largest) else ''}"
    )


def _describe_trained(blueprint: Blueprint) -> str:
    model = blueprint.config
    if not model.lora.rank:
        return ""
    adapters = logical_size(nnx.filter_state(blueprint.abstract["model"], nnx.Param))
    base = model.lora.base
    kernels = "" if base == "full" else f", their kernels in {base}"
    return (
        f", {adapters:,} of them trained in {model.lora.dtype}, the others frozen in "
        f"{model.precision.param}{kernels}"
    )


def _losses(values: Mapping[str, float]) -> str:
    loss = values["loss"]
    text = "no loss" if math.isnan(loss) else f"loss {loss:.4f}"
    if "balance_loss" in values:
        text += f"  balance {values['balance_loss']:.2f}"
    return text


def _described(values: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in values.items()]
