"""What a decoder is made of, and which meshes can hold it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from jaxtp.config import ConfigError, Count, UserPath, allowed, to_plain, validate
from jaxtp.layers.attention import Implementation
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.precision import Precision
from jaxtp.layers.qk_norm import QKNormKind
from jaxtp.layers.rope import RopeScaling
from jaxtp.mesh import FSDP, TP
from jaxtp.models.remat import RematPolicy

MAX_SUGGESTED = 1024


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder with rotary grouped-query attention and a gated MLP: the Llama architecture."""

    from_hf: UserPath | None = None
    """Folder of a model in Hugging Face format, to begin with its weights; the sizes below are then its own."""

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

    rope_theta: Annotated[float, Field(gt=0), allowed("above 0")] = 10_000.0
    """Base of the rotary frequencies."""

    rope_scaling: RopeScaling = RopeScaling()
    """How rotary frequencies are lowered for long contexts."""

    sliding_window: Count | None = None
    """Positions that each one sees, itself and those before it; by default all. The same in every layer."""

    norm_eps: Annotated[float, Field(gt=0), allowed("above 0")] = 1e-5
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


def checked(config: ModelConfig, mesh: Mapping[str, int]) -> ModelConfig:
    """Returns the configuration if a decoder can be made of it, also one that was built in Python, where no type or
    range is looked at.

    Args:
      config: the model.
      mesh: devices along each axis.

    Raises:
      ConfigError: with every value that cannot be, or that does not fit the others and the mesh.
    """
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"a decoder is made of a ModelConfig, not of {str(config)[:100]!r}")
    config = validate(ModelConfig, dataclasses.asdict(config), source="ModelConfig")
    if problems := list(violations(config, mesh)):
        raise ConfigError("the model does not fit the mesh:\n" + "\n".join(f"  {problem}" for problem in problems))
    return config


_NOT_ARCHITECTURE = (
    *("from_hf", "attention", "dropout", "remat", "scan_layers", "sequence_parallel", "loss_chunk", "precision"),
)


def architecture(config: ModelConfig) -> dict[str, Any]:
    """The fields that decide what the parameters are and mean, as plain values: equal for any run that can share a
    checkpoint."""
    return {name: value for name, value in to_plain(config).items() if name not in _NOT_ARCHITECTURE}


def violations(config: ModelConfig, mesh: Mapping[str, int]) -> Iterator[str]:
    """Every reason why the model cannot run on the mesh, each with the nearest values that work.

    Args:
      config: the model.
      mesh: devices along each axis.
    """
    tp, fsdp = mesh[TP], mesh[FSDP]
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % kv_heads:
        yield (
            f"model.num_heads={heads} is not divisible by model.num_kv_heads={kv_heads}; "
            f"num_kv_heads can be {_listed(_divisors(heads))}"
        )
    yield from not_divisible("model.num_heads", heads, "mesh.tp", tp)
    if kv_heads % tp and tp % kv_heads:
        fits = _values(lambda t: heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0))
        yield (
            f"model.num_kv_heads={kv_heads} neither divides mesh.tp={tp} nor is divisible by it; "
            f"tp can be {_listed(fits)}"
        )
    elif kv_heads * config.head_dim % tp:
        fits = _values(lambda t: heads % t == 0 and kv_heads * config.head_dim % t == 0)
        yield (
            f"model.num_kv_heads * model.head_dim = {kv_heads * config.head_dim} is not divisible by mesh.tp={tp}; "
            f"tp can be {_listed(fits)}"
        )
    yield from not_divisible("model.d_ff", config.d_ff, "mesh.tp", tp)
    yield from _rope_violations(config)
    yield from not_divisible("model.d_model", config.d_model, "mesh.fsdp", fsdp)


def _rope_violations(config: ModelConfig) -> Iterator[str]:
    scaling = config.rope_scaling
    if scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield (
            f"model.rope_scaling.high_freq_factor={scaling.high_freq_factor} is not above "
            f"low_freq_factor={scaling.low_freq_factor}; 4 and 1 are usual"
        )
    if scaling.kind == "yarn" and config.rope_theta <= 1:
        yield f"model.rope_theta={config.rope_theta} is not above 1, which yarn needs; 10000 is usual"


def not_divisible(name: str, value: int, by_name: str, by: int) -> Iterator[str]:
    """A violation if `value` is not divisible by `by`: the divisors that work, and the nearest multiples."""
    if value % by:
        multiples = sorted({max(value // by * by, by), -(-value // by) * by})
        yield (
            f"{name}={value} is not divisible by {by_name}={by}; {by_name.split('mesh.')[-1]} can be "
            f"{_listed(_divisors(value))}, or {name.split('.')[-1]} {' or '.join(map(str, multiples))}"
        )


def _divisors(value: int) -> list[int]:
    return [d for d in range(1, min(value, MAX_SUGGESTED) + 1) if value % d == 0]


def _values(fits: Callable[[int], bool]) -> list[int]:
    return [t for t in range(1, MAX_SUGGESTED + 1) if fits(t)]


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))
