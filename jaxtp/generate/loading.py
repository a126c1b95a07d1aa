"""Opens a training run, a checkpoint, or a Hugging Face folder for inference.

The configuration, tokenizer and chat template are read first, the weights later.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxtp.checkpoint.logical import logical_size
from jaxtp.checkpoint.storage import finished_checkpoints, open_checkpoint
from jaxtp.config.entry import Interrupt, UserError, say
from jaxtp.config.python_object import load_object
from jaxtp.config.schema import (
    FolderOrUrl,
    Keys,
    OptionalFolder,
    Reference,
    missing_model,
    nearest_file,
)
from jaxtp.data.chat_template import ChatError, ChatTemplate
from jaxtp.data.copies import local
from jaxtp.data.corpus import PREFIX
from jaxtp.data.manifest import BYTES, MANIFEST, TOKENIZER
from jaxtp.data.prepare.conversations import Conversations
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
    read_tokenizer,
    tokenizer_file,
)
from jaxtp.data.tokenizer_files import (
    GENERATION,
    MODEL_CONFIG,
    chat_template,
    context,
    end_ids,
    special_tokens,
    template_arguments,
    template_day,
)
from jaxtp.distributed.devices import build_mesh, request_virtual_devices
from jaxtp.distributed.environment import enable_compilation_cache
from jaxtp.hf import peft
from jaxtp.hf.config_json import check_adaptable, dtype_of, stored_dtype
from jaxtp.hf.loading import Progress, import_config, load_folder
from jaxtp.hf.model_folder import CONFIG, Folder, explain_gguf, open_folder
from jaxtp.hf.peft import PeftFolder, open_peft
from jaxtp.hf.runs import (
    family_of_run,
    hf_files_of,
    load_merged,
    merge_peft,
    run_model_config,
)
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.parameter import DType
from jaxtp.mesh import TP, describe_mesh, mesh_sizes
from jaxtp.models.config import ModelConfig, padded_sizes, validate_model, violations
from jaxtp.models.decoder import Decoder

T = TypeVar("T")
R = TypeVar("R")

PROGRESS_SECONDS = 5.0


class SourceError(UserError):
    """A path has no readable model, or a model without a tokenizer."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Settings that override a model's files."""

    tokenizer: FolderOrUrl | None = None
    """The tokenizer.json, or its folder, if it has moved since the model was trained."""

    base: OptionalFolder = None
    """For a run that trained adapters: the base model, if it has moved."""

    build: Reference | None = None
    """For a run with a Decoder of your own: the function or settings of its --model.build. The
    Python file is imported."""

    adapters: OptionalFolder = None
    """Adapters in PEFT's format to merge into the model, in float32 before the cast to --dtype."""

    ignore_config: Keys = ()
    """Unknown attributes of config.json to ignore, because they do not affect the model's outputs.
    Can be given several times."""

    special_tokens: bool = False
    """Text that spells a special token, such as <|im_start|>, becomes that token; by default it
    stays text. A chat template's own special tokens are always tokens, and so are all special
    tokens in tasks of lm-evaluation-harness."""

    dtype: DType | None = None
    """Dtype of weights and computation; by default float32 on CPUs, and on GPUs the model's own.
    CPUs multiply 16-bit numbers ten times slower. The model's own is the run's compute dtype, or
    the dtype in config.json (float32 if it names none). float16 is for GPUs without bfloat16;
    values above 65,504, which some models reach, overflow in it."""


@dataclass(frozen=True, kw_only=True)
class InferenceMeshConfig:
    """Number of devices along each axis."""

    dp: int = 1
    """Copies of the model; dp and fsdp split the batch."""

    fsdp: int = 1
    """Shards of each parameter. Generation gathers them once, so each device holds weights split
    over tp only."""

    cp: int = 1
    """Parts of each sequence, for long texts in evaluation. Generation needs 1: cp cannot split a
    KV cache."""

    tp: int | None = None
    """Shards of each matrix product and of the heads; by default as many GPUs as the model's heads
    allow, and 1 on a CPU."""


def problems_of_generation(config: InferenceMeshConfig) -> Iterator[str]:
    """Yields why a mesh cannot generate text."""
    if config.cp != 1:
        yield (
            f"--mesh.cp {config.cp}: a KV cache cannot be split over cp; give its devices to tp: "
            f"--mesh.tp {config.cp}"
        )


def request_devices(config: InferenceMeshConfig) -> None:
    """Requests virtual devices if there is no GPU; call it before any other JAX function."""
    request_virtual_devices(math.prod(max(size or 1, 1) for size in asdict(config).values()))


def inference_mesh(config: InferenceMeshConfig, model: ModelConfig) -> Mesh:
    """Returns the mesh, with the default tp filled in.

    Raises:
      ConfigError: the model does not fit it; the message names the nearest working sizes.
      MeshError: there are too few devices.
    """
    tp = _default_tp(config, model) if config.tp is None else config.tp
    mesh = build_mesh(asdict(config) | {TP: tp})
    validate_model(model, mesh_sizes(mesh), fixed=True)
    return mesh


def _default_tp(config: InferenceMeshConfig, model: ModelConfig) -> int:
    sizes = asdict(config)
    other_sizes = [size for axis, size in sizes.items() if axis != TP]
    if -1 in other_sizes or jax.default_backend() == "cpu":
        return 1
    devices = jax.device_count() // math.prod(max(size, 1) for size in other_sizes)
    for tp in range(devices, 1, -1):
        if not padded_sizes(model, tp) and not any(violations(model, sizes | {TP: tp})):
            return tp
    return 1


@dataclass(frozen=True, kw_only=True)
class ChatSource:
    """A chat template on disk, if there is one, and what it reads beside messages."""

    name: str
    """Its folder or file in messages."""
    text: str | None = None
    """The template, in Jinja."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts of the special tokens that the template may use, such as bos_token."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The template's arguments in the run's data."""
    day: str | None = None
    """The day that the template wrote into the run's data."""

    def template(self) -> ChatTemplate:
        """Returns the template; raises `ChatError` if it is missing or unusable."""
        if self.text is None:
            raise ChatError(f"{self.name} has no chat template; give one by --template FILE")
        name = f"the chat template of {self.name}"
        return ChatTemplate(self.text, name, self.special_tokens, self.day)

    def conversations(
        self, tokenizer: Tokenizer, config: PrepareConfig, *, trusts_answers: bool = True
    ) -> Conversations:
        """Returns the template for a tokenizer; raises `ChatError` or `TokenizerError`."""
        arguments = {**self.arguments, **config.template_arguments}
        settings = replace(config, template_arguments=arguments)
        return Conversations(settings, tokenizer, self.template(), trusts_answers=trusts_answers)


def chat_source(folders: Sequence[Path], name: str) -> ChatSource:
    """Returns the chat template of the first folder that has one; raises `TokenizerError`."""
    with_template = (folder for folder in folders if chat_template(folder) is not None)
    folder = next(with_template, folders[0] if folders else None)
    if folder is None:
        return ChatSource(name=name)
    return ChatSource(
        name=name,
        text=chat_template(folder),
        special_tokens=special_tokens(folder),
        arguments=template_arguments(folder),
        day=template_day(folder),
    )


@dataclass(frozen=True)
class ModelSource:
    """A model on disk, without its weights."""

    name: str
    config: ModelConfig
    """The configuration for inference."""
    tokenizer: Tokenizer
    stored: "StoredModel"
    end_ids: frozenset[int]
    """Tokens that end a text."""
    prefix: tuple[int, ...]
    """Tokens that the model expects before a text."""
    chat: ChatSource = ChatSource(name="the model")
    context: int | None = None
    """Maximum number of tokens of prompt and text together; None if unknown."""
    trained_length: int | None = None
    """Sequence length of a run that started from random weights."""


def load_model(source: ModelSource, mesh: Mesh) -> Decoder:
    """Loads the weights; prints the model's name and size, and the mesh."""
    device = mesh.devices.flat[0]
    enable_compilation_cache(device.platform)
    model = source.stored.load(source.config, mesh)
    size = logical_size(nnx.state(model))
    kind = "CPU device" if device.platform == "cpu" else device.device_kind
    print_status(
        f"model   {source.name}: {size:,} parameters, {source.config.precision.compute}\n"
        f"mesh    {describe_mesh(mesh_sizes(mesh))} = {mesh.size} "
        f"{kind}{'s' if mesh.size > 1 else ''}"
    )
    return model


def print_status(text: str) -> None:
    """Prints a line on standard error, in the first process only."""
    if jax.process_index() == 0:
        say(text)


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint, or a model in Hugging Face's format, and adapters to merge into it."""

    folder: Path
    config: ModelConfig
    dtype: DType
    """Dtype of the parameters."""
    family: str | None
    """`model_type`, if the folder names it."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """The checkpoint's info; empty in Hugging Face's format."""
    base: Path | None = None
    adapters: PeftFolder | None = None
    opened: Folder | None = None
    """In Hugging Face's format."""

    @property
    def is_run(self) -> bool:
        """Whether it is a checkpoint of a run."""
        return self.opened is None

    def load(self, config: ModelConfig, mesh: Mesh, progress: Progress | None = None) -> Decoder:
        """Loads the weights as in `config`; merges adapters in float32 and rounds once."""
        unmerged = config if self.adapters is None else self.config
        if self.opened is None:
            model = load_merged(self.folder, self.info, unmerged, mesh, self.base)
        else:
            with jax.set_mesh(mesh):
                model = load_folder(self.opened, unmerged, mesh, progress)
        return model if self.adapters is None else merge_peft(model, self.adapters, config, mesh)


def open_stored(path: Path, options: SourceConfig) -> StoredModel:
    """Opens a Hugging Face folder, a checkpoint, or the newest of a run.

    Also opens `options.adapters`.

    Args:
      path: the model's folder.
      options: settings that override its files.

    Raises:
      ValueError: the model is damaged or unsupported (a subclass, e.g. `CheckpointError`,
        `HFError`).
    """
    path = local(path)
    options = replace(options, base=local(options.base), adapters=local(options.adapters))
    stored = _open_hf(path, options) if (path / CONFIG).is_file() else _open_run(path, options)
    if options.adapters is None:
        return stored
    if stored.config.lora.rank:
        raise SourceError(
            f"--adapters {options.adapters}: {path} has adapters already; merge them first by "
            f"`jaxtp convert export {path} DIR --merged`, and add others to DIR"
        )
    return replace(stored, adapters=open_peft(options.adapters, stored.config, stored.family))


def _open_hf(path: Path, options: SourceConfig) -> StoredModel:
    if options.build is not None:
        raise SourceError(
            f"--build names the Decoder of a run, and {path} is a model in Hugging Face's format"
        )
    opened = open_folder(path)
    config = import_config(opened, None, {}, options.ignore_config)
    if options.adapters is not None:
        check_adaptable(opened.attributes)
    family = str(opened.attributes["model_type"])
    return StoredModel(path, config, dtype_of(opened), family, opened=opened)


def _open_run(path: Path, options: SourceConfig) -> StoredModel:
    if options.ignore_config:
        raise SourceError(
            f"--ignore-config is for models in Hugging Face's format, and {path} is a run"
        )
    checkpoint = open_checkpoint(path)
    folder = checkpoint.folder
    info = checkpoint.info
    build = None if options.build is None else load_object(options.build, "--build")
    config = run_model_config(folder, info, build)
    family = family_of_run(folder)
    return StoredModel(folder, config, config.precision.param, family, info, options.base)


class Status:
    """Prints a line on standard error every few seconds."""

    def __init__(self) -> None:
        self._printed = time.monotonic()

    def __call__(self, text: str) -> None:
        """Prints the text if the last line is old enough."""
        now = time.monotonic()
        if now - self._printed >= PROGRESS_SECONDS:
            self._printed = now
            print_status(text)


def pipeline(
    batches: Iterable[T], program: Callable[[T], R], *signals: signal.Signals
) -> Iterator[tuple[T, R]]:
    """Yields each batch with its result, while the devices compute the next one.

    After one of the signals it raises an `InterruptError`.
    """
    pending: tuple[T, R] | None = None
    # Exiting during a computation may crash, so signals and errors wait for its end.
    with Interrupt(*signals) as interrupt:
        try:
            for batch in batches:
                # Virtual CPU devices can deadlock with several programs in flight.
                previous = jax.block_until_ready(pending)
                pending = batch, program(batch)
                if previous is not None:
                    yield previous
                interrupt.check()
            if pending is not None:
                yield pending
        finally:
            jax.block_until_ready(pending)


def open_source(path: Path, options: SourceConfig = SourceConfig()) -> ModelSource:
    """Opens the model at a path.

    Raises:
      SourceError: there is no model, or it has no tokenizer.
      ValueError: as `open_stored`.
    """
    name = str(path)
    options = replace(options, tokenizer=local(options.tokenizer, is_small=True))
    path = local(path)
    if problem := _model_problem(path):
        raise SourceError(f"--model {path}: {problem}")
    return source_of(open_stored(path, options), name, options)


def source_of(stored: StoredModel, name: str, options: SourceConfig) -> ModelSource:
    """Returns a model as `open_source` does, with its path or URL; of a run, only the info is
    read."""
    if stored.is_run:
        source, folders = _source_of_run(stored, name, options)
    else:
        source = replace(_source_of_folder(stored, options), name=name)
        folders = [stored.folder]
    if stored.adapters is not None:
        source = replace(source, name=f"{source.name} with {stored.adapters.path}")
    chat = chat_source(folders, source.name)
    _attach(source.tokenizer, lambda: chat, options.special_tokens)
    return replace(source, context=_context(folders, source.config), chat=chat)


def _model_problem(path: Path) -> str:
    # Unlike `Path.is_dir`, `os.path.isdir` accepts names of any length.
    if not os.path.exists(path):
        return f"no such folder{missing_model(path)}"
    if not os.path.isdir(path):
        return explain_gguf(path) or f"not a folder{nearest_file(path)}"
    if (path / CONFIG).is_file() or finished_checkpoints(path):
        return ""
    if (path / peft.CONFIG).is_file():
        return (
            "adapters in PEFT's format, without a model; give the model by --model and these by "
            f"--adapters {path}"
        )
    return explain_gguf(path) or (
        "neither a run with a finished checkpoint nor a model in Hugging Face's format "
        "(config.json)"
    )


def _source_of_run(
    stored: StoredModel, name: str, options: SourceConfig
) -> tuple[ModelSource, list[Path]]:
    """Returns a run's model, and the folders that may have a chat template."""
    corpus = stored.info.get("corpus", {})
    data = stored.info.get("config", {}).get("data", {})
    hf_files = hf_files_of(stored.folder)
    # A mixture maps its datasets to their weights.
    datasets = (data.get("path"), *(data.get("mixture") or {}))
    candidates = (options.tokenizer, *datasets, hf_files)
    first = next((path for path in candidates if path is not None), None)
    location = local(first, is_small=True)
    tokenizer = _tokenizer_of_run(stored.folder, corpus.get("tokenizer"), location, options)
    folders = [folder for folder in (location, hf_files) if folder is not None and folder.is_dir()]
    dtype = options.dtype or _default_dtype(stored.config.precision.compute)
    source = ModelSource(
        name=f"{name}, step {stored.folder.name}",
        config=inference_config(stored.config, dtype),
        tokenizer=tokenizer,
        stored=stored,
        end_ids=tokenizer.info.end_ids.union(*map(_end_ids, folders)),
        prefix=tuple(corpus.get(PREFIX, ())),
        trained_length=data.get("sequence_length") if hf_files is None else None,
    )
    return source, folders


def _source_of_folder(stored: StoredModel, options: SourceConfig) -> ModelSource:
    path = stored.folder
    if options.tokenizer is None and not (path / TOKENIZER).is_file():
        raise SourceError(
            f"{path} has no {TOKENIZER}; give one by --tokenizer PATH, such as the dataset that it "
            "was trained on"
        )
    tokenizer = open_tokenizer(options.tokenizer or path, special_tokens=options.special_tokens)
    dtype = options.dtype or _default_dtype(stored_dtype(path))
    return ModelSource(
        name=str(path),
        config=inference_config(stored.config, dtype),
        tokenizer=tokenizer,
        stored=stored,
        end_ids=_end_ids(path) or tokenizer.info.end_ids,
        prefix=tokenizer.info.prefix,
    )


def _default_dtype(stored: str | None) -> DType:
    """Returns the compute dtype of a model stored in `stored`; call it after `request_devices`."""
    if jax.default_backend() == "cpu":
        # XLA's bfloat16 matmuls are ten times slower on CPUs.
        return "float32"
    return next((dtype for dtype in get_args(DType) if dtype == stored), "float32")


def inference_config(config: ModelConfig, compute: DType) -> ModelConfig:
    """Drops training settings, and stores weights in the compute dtype, so products cast none."""
    return replace(
        config,
        # The run's kernels may be for another device.
        attention="auto",
        grouped="auto",
        dropout=0.0,
        remat="none",
        sequence_parallel=None,
        lora=LoraConfig(),
        precision=replace(config.precision, param=compute, compute=compute, matmul="compute"),
    )


def _tokenizer_of_run(
    folder: Path, recorded: str | None, location: Path | None, options: SourceConfig
) -> Tokenizer:
    if recorded == BYTES:
        if options.tokenizer is not None:
            raise SourceError(f"{folder} was trained on bytes; leave --tokenizer out")
        return ByteTokenizer()
    if location is None:
        raise SourceError(f"{folder} does not record its tokenizer; give it by --tokenizer PATH")
    if not location.exists():
        raise SourceError(
            f"the tokenizer of {folder} is no longer in {location}; give it by --tokenizer PATH"
        )
    tokenizer = open_tokenizer(location, special_tokens=options.special_tokens)
    if recorded is not None and tokenizer.info.sha256 != recorded:
        raise SourceError(
            f"{location} is not the tokenizer that {folder} was trained with: its sha256 differs"
        )
    return tokenizer


def open_tokenizer(path: str | Path, *, special_tokens: bool = False) -> Tokenizer:
    """Returns the tokenizer of a dataset, of a `tokenizer.json`, or of its folder.

    Args:
      special_tokens: whether text can spell special tokens.

    Raises:
      DatasetError: the dataset is unfinished or damaged.
      TokenizerError: there is no tokenizer.
    """
    path = Path(path)
    tokenizer: Tokenizer
    if (path / MANIFEST).is_file():
        tokenizer = load_tokenizer(path, special_tokens=special_tokens)
        folder = path
    else:
        file = tokenizer_file(path)
        tokenizer = HuggingFaceTokenizer(
            read_tokenizer(file), str(file), special_tokens=special_tokens
        )
        folder = file.parent
    _attach(tokenizer, lambda: chat_source([folder], str(folder)), special_tokens)
    return tokenizer


def _attach(tokenizer: Tokenizer, source: Callable[[], ChatSource], special_tokens: bool) -> None:
    """Lets a tokenizer write conversations; reads the template on first use."""
    config = PrepareConfig(messages="messages", special_tokens=special_tokens)
    tokenizer.open_conversations = lambda: source().conversations(tokenizer, config)


def _end_ids(folder: Path) -> frozenset[int]:
    # config.json names only one end token; generation_config.json may name several.
    return frozenset(end_ids(folder / GENERATION) or end_ids(folder / MODEL_CONFIG))


def _context(folders: Sequence[Path], config: ModelConfig) -> int | None:
    lengths = (context(folder / MODEL_CONFIG) for folder in folders)
    length = next((length for length in lengths if length is not None), None)
    scaling = config.rope_scaling
    if length is None or scaling.kind == "none":
        return length
    original_length = length if scaling.kind == "linear" else scaling.original_length
    return max(length, int(original_length * scaling.factor))
