"""Console output of a run: a summary, then a progress bar, or lines without a terminal."""

import math
import platform
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
from flax import nnx

import jaxtp
from jaxtp.checkpoint.logical import logical_size
from jaxtp.config.console import Display, size_text
from jaxtp.data.samples import Data
from jaxtp.layers.kernels import grouped
from jaxtp.layers.kernels.select import architecture_of, pick_scan
from jaxtp.layers.parameter import logical_shape, spec_of
from jaxtp.layers.sequence_parallel import is_split
from jaxtp.mesh import BATCH, CP, SEQUENCE, TP, axes_of, batch_parts, describe_mesh, mesh_sizes
from jaxtp.models.config import BLOCKS, ModelConfig, matmul_layers, padded_sizes
from jaxtp.train.config import LoopConfig, TrainConfig
from jaxtp.train.run_data import ROWS, RunData
from jaxtp.train.state import Blueprint, bytes_per_device, parameter_count, parameters, total_bytes
from jaxtp.train.validation import attention_blocks, chosen_kernels, multiplies_all, share_of

_AROUND_METRICS = 60  # Characters of a bar without its text: the step, the bar and the time left


class Report(Display):
    """The console of a run; silent on all processes but the first.

    If a pipe's reader exits, the run saves and stops, as after SIGTERM.
    """

    def __init__(self) -> None:
        self.own_metrics: tuple[str, ...] = ()
        """Names of the metrics of a user's loss, which the line of a step has."""
        unread = partial(signal.raise_signal, signal.SIGTERM)
        super().__init__("step {done}/{total}", quiet=jax.process_index() != 0, unread=unread)

    def step(self, step: int, values: Mapping[str, float], rate: str) -> None:
        """Updates the progress bar."""
        begin = _losses(values)
        end = f"  {rate}"
        room = shutil.get_terminal_size().columns - _AROUND_METRICS - len(begin) - len(end)
        self.move(step, f"{begin}{_fitting(self._own(values, short=True), room)}{end}")

    def _own(self, values: Mapping[str, float], *, short: bool = False) -> list[str]:
        # Formats the metrics of a user's loss. `short` drops a prefix (rewards/margins), unless
        # two metrics would get the same name.
        texts = []
        for name in self.own_metrics:
            last = name.rpartition("/")[2]
            is_unique = sum(other.rpartition("/")[2] == last for other in self.own_metrics) == 1
            if name in values:
                texts.append(f"  {last if short and is_unique else name} {values[name]:.4g}")
        return texts

    def log(
        self, record: dict[str, float | int], total: int, unit: str, *, is_first: bool = False
    ) -> None:
        """Prints a logged step if there is no progress bar."""
        if self.has_bar:
            return
        # A process's first step includes compilation.
        left = (
            ""
            if is_first
            else f"  {_duration((total - record['step']) * record['step_seconds'])} left"
        )
        rate = record[f"{unit}_per_second"]
        losses = "".join([_losses(record), *self._own(record)])
        self.line(f"step {record['step']}/{total}  {losses}  {rate:,.0f} {unit}/s{left}")


def next_steps(config: TrainConfig, saved: Path, *, decoder: bool, pairs: bool) -> list[str]:
    """Returns the checkpoint's location, and how to use it; pairs have no evaluation."""
    if not decoder:
        from jaxtp.models.own_decoder import call_of_load

        load = call_of_load(config.run.dir, config.model.build)
        return [f"saved in {saved}; next, in Python:", f"  model = {load}"]
    from jaxtp.data.tokenizer_files import TEMPLATE

    trained_on = config.data.path or next(map(Path, config.data.mixture), Path(shlex.__file__))
    data = config.data.validation or trained_on
    run = shlex.quote(str(config.run.dir))
    text = shlex.quote(str(data))
    build = config.model.build and f" --build {shlex.quote(config.model.build)}"
    prompt = "--chat" if (trained_on / TEMPLATE).is_file() else "--prompt 'def '"
    export = f"{config.run.dir}-{'peft' if config.model.lora.rank else 'hf'}"
    then = "" if build else f"; jaxtp convert export {run} {shlex.quote(export)}"
    evaluate = (
        f"  jaxtp evaluate --model {run}{build or ''} "
        f"--{'data' if data.is_dir() else 'text'} {text}"
    )
    return [
        f"saved in {saved}; next:",
        *([] if pairs else [evaluate]),
        f"  jaxtp generate --model {run}{build or ''} {prompt}{then}",
    ]


def summary(
    config: TrainConfig,
    data: RunData,
    blueprint: Blueprint,
    notes: Mapping[str, str | None],
    progress: tuple[int, int],
) -> str:
    """Describes the run: versions, mesh, sizes and bytes.

    Args:
      notes: further lines by name (at most 8 characters); None omits a line.
      progress: steps done, and sequences read.
    """
    mesh = blueprint.mesh
    device = mesh.devices.flat[0]
    sizes = mesh_sizes(mesh)
    kind = "virtual CPU devices"
    peak = None
    if device.platform != "cpu":
        from jaxtp.train.performance import describe_peak

        kind = device.device_kind
        peak = describe_peak(device)
    if blueprint.is_decoder:
        model = _model_rows(config, blueprint)
    else:
        build = f"{config.model.build}({_arguments(config.model.arguments)})"
        model = {"model": f"{parameter_count(blueprint):,} parameters: {build}"}
    rows = {
        "jaxtp": f"{jaxtp.__version__} with jax {jax.__version__}, Python "
        f"{platform.python_version()}",
        "mesh": f"{describe_mesh(sizes)} = {mesh.size} {kind}",
        "model": model.pop("model"),
        "state": f"{size_text(bytes_per_device(blueprint), binary=True)} of parameters and "
        f"optimizer on each device, of {size_text(total_bytes(blueprint), binary=True)} in all",
        "context": model.pop("context", None),
        "experts": model.pop("experts", None),
        "kernels": model.pop("kernels", None),
        "loss": describe_loss(config.train),
        "optim": _named(config.optimizer.build),
        **_data_rows(config, data, sizes, progress),
        "folder": str(config.run.dir),
        **model,
        "peak": peak,
        **notes,
    }
    lines = [f"{name:<8}{text}" for name, text in rows.items() if text is not None]
    return "\n".join([*lines, ""])


def _named(reference: str | None) -> str | None:
    return None if reference is None or reference.startswith("<") else reference


def describe_loss(train: LoopConfig) -> str | None:
    """Returns the name and the arguments of a user's loss."""
    arguments = f"({_arguments(train.loss_arguments)})" if train.loss_arguments else ""
    return (name := _named(train.loss)) and f"{name}{arguments}"


def _model_rows(config: TrainConfig, blueprint: Blueprint) -> dict[str, str | None]:
    model = config.model
    mesh = blueprint.mesh
    device = mesh.devices.flat[0]
    sizes = mesh_sizes(mesh)
    active = ""
    padding = None
    if model.most_experts or padded_sizes(model, sizes[TP]):
        from jaxtp.analysis.step_costs import describe_active, describe_padding

        active = describe_active(model, parameter_count(blueprint))
        padding = describe_padding(model, sizes)
    return {
        "model": f"{parameter_count(blueprint):,} parameters"
        f"{active}{_describe_trained(blueprint)}: "
        f"{model.num_layers} layers, {model.describe_block()}, vocabulary {model.vocab_size}; "
        f"{model.precision.compute} compute{f', by {model.build}' if model.build else ''}",
        "context": describe_context(config, sizes),
        "experts": describe_experts(model, sizes[TP]),
        "kernels": describe_kernels(config, sizes, architecture_of(device)),
        "matmul": describe_matmul(model),
        "overlap": describe_overlap(config, sizes),
        "padding": padding,
    }


def _arguments(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _data_rows(
    config: TrainConfig, data: RunData, sizes: Mapping[str, int], progress: tuple[int, int]
) -> dict[str, str | None]:
    batch = config.data.global_batch_size
    steps = config.train.steps
    if data.tokens is None:
        arrays = ", ".join(
            f"{name} {each.dtype}{list(each.shape[1:])}" for name, each in data.train.shapes.items()
        )
        epoch = (
            data.num_rows and f", {steps * batch / data.num_rows:.2g} epochs of {data.num_rows:,}"
        )
        return {
            "data": f"{config.data.batches}: rows of {arrays}",
            "batch": _describe_batch(config, sizes, ROWS),
            "steps": f"{steps:,} of {batch:,} = {steps * batch:,} rows{epoch or ''}",
            "eval": data.describe_validation(config.data.validation_batches),
        }
    corpus = data.tokens.corpus
    loss = "" if corpus.loss_tokens is None else f", {corpus.loss_tokens:,} of them with loss"
    return {
        "data": f"{corpus.description}: {corpus.train_tokens:,} {corpus.unit} to train on{loss}, "
        f"{corpus.validation_tokens:,} held out, sha256 {corpus.identity[:12]}",
        "rows": _describe_rows(data.tokens),
        "scores": None if data.tokens.scores is None else data.tokens.scores.describe(),
        "batch": _describe_batch(
            config, sizes, f"sequences of {config.data.sequence_length} {corpus.unit}"
        ),
        "steps": describe_steps(config, data.tokens, *progress),
        "eval": corpus.not_evaluated(),
    }


def describe_kernels(config: TrainConfig, mesh: Mapping[str, int], platform: str) -> str:
    """Describes the kernels of attention, Gated DeltaNet and experts."""
    attention = [
        f"{name} attention ({why})" for name, why in chosen_kernels(config, mesh, platform).items()
    ]
    others = *describe_delta(config.model, platform), *describe_grouped(config.model, platform)
    return "; ".join([*([" and ".join(attention)] if attention else []), *others])


def describe_delta(model: ModelConfig, platform: str) -> Iterator[str]:
    """Yields what computes the states of Gated DeltaNet."""
    for width in dict.fromkeys(
        block.delta_key_dim for block in model.block_kinds() if block.delta_value_heads
    ):
        scan, why = pick_scan(width, platform)
        yield f"{'pallas' if scan else 'xla'} states of Gated DeltaNet ({why})"


def describe_grouped(model: ModelConfig, platform: str) -> Iterator[str]:
    """Yields how experts multiply.

    Warns if an accelerator multiplies every row with every expert.
    """
    if not (experts := model.most_experts):
        return
    method, why = grouped.pick_method(model.grouped, platform)
    yield f"{method} products of experts ({why})"
    if platform != "cpu" and multiplies_all(model, platform):
        yield (
            f"WARNING: it multiplies every row by every expert, {experts} times the work and the "
            "memory of rows"
        )


def describe_experts(model: ModelConfig, tp: int) -> str | None:
    """Returns how the summary says that experts are divided; None without experts."""
    blocks = [block for block in model.block_kinds() if block.num_experts]
    divided = dict.fromkeys(
        f"{block.num_experts // tp} of {block.num_experts} on each device, whole"
        if block.over_tp(tp)
        else f"all {block.num_experts} on each device, {-(-block.d_ff // tp)} of the width "
        f"{block.d_ff} of each"
        for block in blocks
    )
    return f"over tp {tp}: {' and '.join(divided)}" if divided else None


def describe_matmul(model: ModelConfig) -> str | None:
    """Lists the projections that `precision.matmul` applies to, and the others by reason.

    It is None if it is off.
    """
    if (matmul := model.precision.matmul) == "compute":
        return None
    from jaxtp.parallelize.plan import patterns_for

    layers = matmul_layers(model)
    named = dict[str | None, list[str]]()
    for pattern, why in {
        pattern: layers[path] for path, pattern in patterns_for(layers).items()
    }.items():
        named.setdefault(why, []).append(pattern.removeprefix(f"{BLOCKS}."))
    taken = ", ".join(named.pop(None))
    compute = model.precision.compute
    rest = "".join(f", {', '.join(paths)} ({why})" for why, paths in named.items())
    return f"{matmul} products in {taken}; {compute} in gradients of weights, the head{rest}"


def describe_context(config: TrainConfig, mesh: Mapping[str, int]) -> str | None:
    """Describes attention and Gated DeltaNet over cp; None if cp is 1."""
    if mesh[CP] == 1:
        return None
    share = share_of(config, mesh)
    found = {}
    attending = attention_blocks(config.model)
    for block in attending:
        attention = block.context_attention(mesh[TP])
        method, why = attention.method(share)
        where = "" if attention.window is None else f" within a window of {attention.window:,}"
        found[f"{method}{where} ({why})"] = attention.uneven(share)
    chunks = "a chunk on each device"
    if config.model.zigzag(share):
        chunks = "two chunks of each on a device, for even work"
    elif any(found.values()):
        chunks += (
            "; WARNING: the last has the most to do, as 2 * cp does not divide sequences of "
            f"{share.length:,}"
        )
    layers = [f"attention by {' and '.join(found)}"] if found else []
    if len(attending) < len(config.model.block_kinds()):
        layers.append("Gated DeltaNet by its chunks' maps of states")
    return f"sequences over cp {mesh[CP]}, {chunks}; {', '.join(layers)}"


def describe_overlap(config: TrainConfig, mesh: Mapping[str, int]) -> str | None:
    """Describes the overlap of communication and products; None if off."""
    length = config.data.sequence_length
    tp = mesh[TP]
    if config.model.overlap == "none":
        return None
    if tp > 1 and is_split(config.model.sequence_parallel, length, mesh):
        return f"rings of tp {tp}: a part of a sequence moves while another is multiplied"
    parts_of = describe_mesh(mesh, [axis for axis in SEQUENCE if mesh[axis] > 1])
    why = (
        "there is no tp"
        if tp == 1
        else f"{parts_of} does not divide sequences of {length}, which tp leaves whole"
    )
    return f"model.overlap=ring does nothing here: {why}"


def _describe_rows(data: Data) -> str:
    rows = data.train_rows
    count = sum(map(len, rows))
    split = sum(of_source.num_split for of_source in rows)
    padding = sum(of_source.padding * len(of_source) for of_source in rows) / count
    text = f"{count:,} sequences, {padding:.2%} padding"
    if unlabelled := sum(of_source.num_unlabelled for of_source in rows):
        text += f", {unlabelled:,} more without a label left out"
    dropped = sum(of_source.num_dropped for of_source in rows)
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


def describe_steps(config: TrainConfig, data: Data, done: int, read: int) -> str:
    """Returns the summary's account of the steps, after some that are done and have read rows."""
    batch = config.data.global_batch_size
    steps = config.train.steps
    left = max(steps - done, 0)
    samples = read + left * batch
    tokens = batch * config.data.sequence_length  # steps so far: maybe another batch
    total = f"{samples * config.data.sequence_length:,} {data.corpus.unit}"
    length = f"{steps:,} of {tokens:,} = {total}"
    if samples != steps * batch:
        length = f"{steps:,}: {done:,} done, {left:,} left, of {tokens:,} each; {total} in all"
    for source, epochs in zip(data.corpus.sources, data.epochs(samples), strict=True):
        length += (
            f", {epochs:{',.0f' if epochs >= 10 else '.2g'}} "
            f"epochs{f' of {source.name}' if source.name else ''}"
        )
    if (warmup := config.optimizer.warmup_steps) > steps:
        length += (
            f"; the warm-up of {warmup} steps (optimizer.warmup_steps) is cut to these {steps}"
        )
    return length


def _describe_batch(config: TrainConfig, sizes: Mapping[str, int], rows: str) -> str:
    accumulation = config.train.accumulation
    batch = config.data.global_batch_size
    per_device = batch // (batch_parts(sizes) * accumulation)
    return (
        f"{batch} {rows} = {describe_mesh(sizes, BATCH)} x accumulation {accumulation} x "
        f"{per_device} per device"
    )


def _describe_trained(blueprint: Blueprint) -> str:
    model = blueprint.config
    if not model.lora.rank:
        return ""
    adapters = logical_size(nnx.filter_state(blueprint.abstract["model"], nnx.Param))
    frozen = model.precision.param + (
        ", their kernels in float8" if model.lora.base == "float8" else ""
    )
    return f", {adapters:,} of them trained in {model.lora.dtype}, the others frozen in {frozen}"


def sharding_table(blueprint: Blueprint) -> list[str]:
    """Returns shape, sharding, and shape per device, a line for each parameter.

    Equal parameters of a user's model share a line.
    """
    sizes = mesh_sizes(blueprint.mesh)
    rows = {}
    for name, variable in parameters(blueprint).items():
        shard = jax.sharding.NamedSharding(blueprint.mesh, spec_of(variable)).shard_shape(
            variable.shape
        )
        named = map(axes_of, spec_of(variable))
        spec = [
            " x ".join([axis for axis in axes if sizes[axis] > 1] or axes[:1]) or None
            for axes in named
        ]
        whole = "x".join(map(str, logical_shape(variable)))
        split = ", ".join(map(str, spec)) if any(spec) else "replicated"
        rows[name] = f"{whole:<20}{split:<28}{'x'.join(map(str, shard))}"
    if not blueprint.is_decoder:
        from jaxtp.parallelize.plan import patterns_for

        rows = {pattern: rows[name] for name, pattern in patterns_for(rows).items()}
    width = max(33, *map(len, rows)) + 1
    lines = [f"{name:<{width}}{row}" for name, row in rows.items()]
    return [f"{'parameter':<{width}}{'shape':<20}{'split by':<28}per device", *lines]


def _fitting(texts: Sequence[str], room: int) -> str:
    """Joins the first texts that fit into `room` characters."""
    joined = ""
    for text in texts:
        if len(joined) + len(text) > room:
            break
        joined += text
    return joined


def _losses(values: Mapping[str, float]) -> str:
    balance = f"  balance {values['balance_loss']:.2f}" if "balance_loss" in values else ""
    loss = values["loss"]
    return f"{'no loss' if math.isnan(loss) else f'loss {loss:.4f}'}{balance}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
