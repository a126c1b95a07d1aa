"""The settings of `jaxtp generate`, and the mesh to generate on."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, get_args

import jax
import tyro
from jax.sharding import Mesh

from jaxtp.config import ConfigError, Count, Keys, Switch, UserPath, flag
from jaxtp.generate.prompts import is_jsonl
from jaxtp.generate.settings import GenerationSettings, contradictions
from jaxtp.layers.parameter import DType
from jaxtp.mesh import TP, mesh_of, mesh_sizes, request_virtual_devices
from jaxtp.models.config import ModelConfig, checked, padded_sizes, violations

FIELD = "prompt"
FIRST = (
    "model",
    "prompt",
    "prompt_file",
    "chat",
    "adapters",
    "dtype",
    "batch_size",
    "json",
    "sampling.max_tokens",
    "sampling.seed",
    "sampling.temperature",
    "sampling.top_p",
    "sampling.top_k",
    "sampling.stop",
)
"""Settings that the help shows first."""
STDOUT = Path("-")
"""The file of --json that is standard output."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices along each axis."""

    dp: int = 1
    """Copies of the model; they and fsdp divide the batch."""

    fsdp: int = 1
    """Shards of each parameter of a model that is built; for reading they are gathered once, so that each device needs
    the memory of tp alone, and fsdp divides the batch as dp does."""

    cp: int = 1
    """Parts of each sequence in training. A text is written one token at a time from a cache that is not divided so:
    only 1 works here, whatever the model was trained with."""

    tp: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Shards of each matrix product and of the cache's heads; by default as many GPUs as the model's heads allow, and 1
    on a CPU."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """The model, and what replaces settings that it has or says itself."""

    model: Annotated[UserPath | None, tyro.conf.arg(metavar="DIR")] = None
    """A run of jaxtp train (its newest checkpoint) or one of its checkpoints; or a model in Hugging Face's format."""

    tokenizer: Annotated[UserPath | None, tyro.conf.arg(metavar="PATH")] = None
    """A tokenizer.json, or a folder that has one, if it is no longer where it was when the model was trained."""

    base: Annotated[UserPath | None, tyro.conf.arg(metavar="DIR")] = None
    """For a run that trained adapters: the model beside them, if it is no longer where the run found it."""

    adapters: Annotated[UserPath | None, tyro.conf.arg(metavar="DIR")] = None
    """Adapters in PEFT's format, to add to the model's kernels: in float32, before the cast to --dtype."""

    ignore_config: Keys = ()
    """Attributes of a config.json to pass over: such as are not understood, and that you know to say nothing of what
    the model computes. Can be given several times."""

    special_tokens: Switch = False
    """Text that spells a special token, such as <|im_start|>, is that token; by default it is text. In a chat the
    template's own are tokens in any case, and in tasks of lm-evaluation-harness all are."""

    dtype: DType | None = None
    """Dtype of weights and computation; by default float32 on CPUs, which multiply 16 bits ten times slower, and on
    GPUs a run's compute dtype, or that of the model in its config.json (float32 where it says none of these). float16
    is for GPUs without bfloat16; values above 65,504 are infinite in it, which some models reach."""


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(SourceConfig):
    """The model, the texts to continue, how tokens are chosen, and the devices."""

    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")] = ()
    """A text to continue. Can be given several times."""

    prompt_file: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE")] = None
    """A file of texts to continue: one on each line, or JSONL if its name says so. Blank lines are left out, and
    counted: without --prompt, the index of what is on line n is n - 1."""

    field: str = FIELD
    """Field that has the text in a line of JSONL."""

    chat: Switch = False
    """Talk to the model: each line that you enter is answered, /help lists commands, Ctrl-C stops an answer, Ctrl-D
    ends."""

    system: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """System message, which the model reads before a chat."""

    template: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE")] = None
    """Chat template in Jinja, instead of the model's own."""

    beyond_context: Switch = False
    """Accepts prompts and writes texts that are longer than the model was made for (max_position_embeddings in its
    config.json), and may make no sense. By default such a prompt is refused, and a text ends there."""

    batch_size: Count = 8
    """Prompts that are continued together, rounded up to a multiple of mesh.dp * mesh.fsdp."""

    json: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write an object for each prompt to, a line each: text, ids, logprobs, and why it ended; - for standard
    output, instead of the texts."""

    sampling: Annotated[GenerationSettings, tyro.conf.arg(name="")] = GenerationSettings()
    mesh: MeshConfig = MeshConfig()


def check(config: GenerateConfig) -> Path:
    """Checks settings against each other; returns the folder of the model.

    Raises:
      ConfigError: settings contradict each other; the message names all of them.
    """
    spelled = lambda name, value: f"{flag(GenerateConfig, ('sampling', name))} {value}"  # noqa: E731
    problems = [*_contradictions(config), *contradictions(config.sampling, spelled)]
    if problems or config.model is None:
        raise ConfigError("; ".join(problems))
    return config.model


def request_devices(config: MeshConfig) -> None:
    """Asks for as many virtual devices as the mesh takes, where there is no GPU; call it before any other JAX."""
    request_virtual_devices(math.prod(max(size or 1, 1) for size in asdict(config).values()))


def default_dtype(stored: str | None) -> DType:
    """Returns the dtype of weights and computation where none is asked for; call it after `request_devices`.

    Args:
      stored: the dtype that a run computes in, or that a model in Hugging Face's format has; None where it says none.
    """
    if jax.default_backend() == "cpu":
        return "float32"  # XLA for CPUs multiplies bfloat16 ten times slower
    return next((dtype for dtype in get_args(DType) if dtype == stored), "float32")


def open_mesh(config: MeshConfig, model: ModelConfig) -> Mesh:
    """Returns the mesh to generate on.

    Raises:
      ConfigError: the model does not fit it; the message has the nearest sizes that it fits.
      MeshError: there are not so many devices.
    """
    tp = _most_tp(config, model) if config.tp is None else config.tp
    mesh = mesh_of(asdict(config) | {TP: tp})
    checked(model, mesh_sizes(mesh), fixed=True)
    return mesh


def _most_tp(config: MeshConfig, model: ModelConfig) -> int:
    """Returns the largest tp that the model can use and that pads nothing, of the devices that other axes leave."""
    others = [size for axis, size in asdict(config).items() if axis != TP]
    all_taken = -1 in others or jax.default_backend() == "cpu"
    left = 1 if all_taken else jax.device_count() // math.prod(max(size, 1) for size in others)
    able = (tp for tp in range(left, 1, -1) if not padded_sizes(model, tp))
    return next((tp for tp in able if not list(violations(model, asdict(config) | {TP: tp}))), 1)


def _contradictions(config: GenerateConfig) -> Iterator[str]:
    if config.model is None:
        yield "name the model by --model DIR"
    given = bool(config.prompt) or config.prompt_file is not None
    if not given and not config.chat:
        yield "give texts to continue, by --prompt TEXT or --prompt-file FILE, or talk to the model with --chat"
    if config.chat and (given or config.json is not None):
        yield "--chat takes what you enter, and prints text; leave --prompt, --prompt-file and --json out"
    if not config.chat and (config.system is not None or config.template is not None):
        yield "--system and --template are of a chat; give --chat too"
    if (cp := config.mesh.cp) != 1:
        yield f"--mesh.cp {cp}: a cache is not divided over cp; leave it out; its devices can be tp's: --mesh.tp {cp}"
    if config.field != FIELD and not (config.prompt_file is not None and is_jsonl(config.prompt_file)):
        yield f"--field {config.field} is of JSONL, and there is no --prompt-file FILE.jsonl"
