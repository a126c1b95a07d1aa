"""What a decoder is made of, and which meshes can hold it."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from pydantic import Field

from jaxtp.config import ConfigError, Count, Keys, Positive, UserPath, allowed, changed, to_plain, validate
from jaxtp.layers.attention import Implementation
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.precision import Precision
from jaxtp.layers.qk_norm import QKNormKind
from jaxtp.layers.rope import RopeScaling
from jaxtp.mesh import FSDP, TP
from jaxtp.models.hints import Problem, explained, not_divisible
from jaxtp.models.remat import RematPolicy

_Ignored = Annotated[Keys, tyro.conf.arg(aliases=["--ignore-config"], metavar="KEY")]
"""The flag is called what commands without this section call it too."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder with rotary grouped-query attention and a gated MLP: the Llama architecture."""

    from_hf: UserPath | None = None
    """Folder of a model in Hugging Face format, to begin with its weights; the sizes below are then its own."""

    ignore_config: _Ignored = ()
    """Attributes of that model's config.json to pass over: such as are not understood, and that you know to say nothing
    of what it computes. Can be given several times."""

    vocab_size: Count = 256
    """Token ids, 0 to vocab_size - 1. Any size: what tp does not divide is padded inside the layers."""

    d_model: Count = 128
    """Width of the residual stream. Divisible by mesh.fsdp."""

    num_layers: Count = 4
    """Decoder blocks, stacked and run by one scan."""

    num_heads: Count = 8
    """Query heads. Divisible by mesh.tp and by num_kv_heads."""

    num_kv_heads: Count = 8
    """Key and value heads. Divides mesh.tp or is divisible by it."""

    head_dim: Annotated[int, Field(ge=2, multiple_of=2), allowed("even")] = 16
    """Width of a head; need not be d_model / num_heads."""

    d_ff: Count = 384
    """Hidden width of the MLP. Divisible by mesh.tp."""

    rope_theta: Positive = 10_000.0
    """Base of the rotary frequencies."""

    rope_scaling: RopeScaling = RopeScaling()
    """How rotary frequencies are lowered for long contexts."""

    sliding_window: Count | None = None
    """Positions that each one sees, itself and those before it; by default all. The same in every layer."""

    norm_eps: Positive = 1e-5
    """Added to the mean square in every RMSNorm."""

    tie_embeddings: bool = False
    """Use the embedding table as the output head."""

    qk_norm: QKNormKind = "none"
    """RMS normalisation of queries and keys: of each head, or of the whole projection."""

    attention_bias: bool = False
    """Biases on the query, key and value projections."""

    attention_out_bias: bool = False
    """A bias on the attention's output projection."""

    mlp_bias: bool = False
    """Biases on the MLP's projections."""

    attention: Implementation = "xla"
    """Kernel: xla runs everywhere; cudnn needs an NVIDIA GPU and a 16-bit compute dtype."""

    dropout: Annotated[float, Field(ge=0, lt=1), allowed("from 0 to below 1")] = 0.0
    """Probability with which an element of an attention's or MLP's output is zeroed in training."""

    remat: RematPolicy = "full"
    """What a block's forward pass keeps for its backward pass: none keeps all, save_dots the results of products,
    save_gathered the inputs and outputs of parallel layers, full only the block's input, offload that on the host."""

    scan_layers: bool = True
    """Run the blocks by one scan, compiled once; false writes them out, which compiles for longer."""

    sequence_parallel: bool | None = None
    """Between blocks, split activations over tp along the sequence. By default wherever tp > 1 divides the sequence."""

    loss_chunk: Count = 1024
    """Positions of the sequence whose logits exist at a time."""

    precision: Precision = Precision()
    """Dtypes of parameters, compute and gradient reductions."""

    lora: LoraConfig = LoraConfig()
    """Adapters to train instead of the model's own parameters."""


def checked(config: ModelConfig, mesh: Mapping[str, int], *, fixed: bool = False) -> ModelConfig:
    """Returns the configuration if a decoder can be made of it, also one that was built in Python, where no type or
    range is looked at.

    Args:
      config: the model.
      mesh: devices along each axis.
      fixed: as `violations`.

    Raises:
      ConfigError: with every value that cannot be, or that does not fit the others and the mesh.
    """
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"a decoder is made of a ModelConfig, not of {str(config)[:100]!r}")
    config = validate(ModelConfig, dataclasses.asdict(config), source="ModelConfig")
    if problems := list(violations(config, mesh, fixed=fixed)):
        raise ConfigError("the model does not fit the mesh:\n" + "\n".join(f"  {problem}" for problem in problems))
    return config


_NOT_ARCHITECTURE = (
    *(
        "from_hf",
        "ignore_config",
        "attention",
        "dropout",
        "remat",
        "scan_layers",
        "sequence_parallel",
        "loss_chunk",
        "precision",
    ),
)


def architecture(config: ModelConfig) -> dict[str, Any]:
    """The fields that decide what the parameters are and mean, as plain values: equal for any run that can share a
    checkpoint."""
    return {name: value for name, value in to_plain(config).items() if name not in _NOT_ARCHITECTURE}


def violations(config: ModelConfig, mesh: Mapping[str, int], *, fixed: bool = False) -> Iterator[str]:
    """Every reason why the model cannot run on the mesh, each with the nearest values that work.

    Args:
      config: the model.
      mesh: devices along each axis.
      fixed: its sizes are those of weights that are there, so that only other meshes are suggested; a model of
        `from_hf` is fixed anyway.
    """

    def problems(changes: Mapping[str, int]) -> Iterator[Problem]:
        model = changed(config, dict(_inside("model", changes)))
        return model_problems(model, {**mesh, **dict(_inside("mesh", changes))})

    return explained(problems, fixed=fixed or config.from_hf is not None)


def model_problems(config: ModelConfig, mesh: Mapping[str, int]) -> Iterator[Problem]:
    """The same reasons, without suggestions."""
    tp, heads, kv_heads = mesh[TP], config.num_heads, config.num_kv_heads
    by_tp = {f"mesh.{TP}": heads}
    if heads % kv_heads:
        yield Problem(
            f"model.num_heads={heads} is not divisible by model.num_kv_heads={kv_heads}",
            among={"model.num_kv_heads": heads},
        )
    yield from not_divisible("model.num_heads", heads, "mesh.tp", tp, by_tp)
    if kv_heads % tp and tp % kv_heads:
        yield Problem(f"model.num_kv_heads={kv_heads} neither divides mesh.tp={tp} nor is divisible by it", among=by_tp)
    elif kv_heads * config.head_dim % tp:
        width = kv_heads * config.head_dim
        yield Problem(f"model.num_kv_heads * model.head_dim = {width} is not divisible by mesh.tp={tp}", among=by_tp)
    yield from not_divisible("model.d_ff", config.d_ff, "mesh.tp", tp, by_tp)
    yield from map(Problem, _rope_violations(config))
    yield from not_divisible("model.d_model", config.d_model, "mesh.fsdp", mesh[FSDP], {f"mesh.{FSDP}": config.d_model})


def _inside(section: str, changes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """The changes of one section, without its name."""
    return ((name.removeprefix(f"{section}."), value) for name, value in changes.items() if name.startswith(section))


def _rope_violations(config: ModelConfig) -> Iterator[str]:
    scaling = config.rope_scaling
    if scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield (
            f"model.rope_scaling.high_freq_factor={scaling.high_freq_factor} is not above "
            f"low_freq_factor={scaling.low_freq_factor}; 4 and 1 are usual"
        )
    if scaling.kind == "yarn" and config.rope_theta <= 1:
        yield f"model.rope_theta={config.rope_theta} is not above 1, which yarn needs; 10000 is usual"
