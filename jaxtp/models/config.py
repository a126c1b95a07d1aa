"""Decoder settings, the blocks they describe, and the meshes that can hold the model.

A decoder has stacks of blocks; each stack repeats a pattern; each block sums residual branches
(`layers/branch.py`). Blocks at the same place of a pattern are stacked, with one scan over the
repeats. A model inherits its layers' settings, so YAML stays flat: `model.num_kv_heads`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, count, islice
from typing import Annotated, Any, TypeVar

from flax import nnx
from jax.sharding import AbstractMesh
from pydantic import AfterValidator, Field

from jaxtp.config.affects import (
    ARCHITECTURE,
    COST,
    ONLY_IN_FILES,
    SHORT_HELP,
    STEP,
    Argument,
    ArgumentsOf,
    affects,
)
from jaxtp.config.hints import (
    Problem,
    Switch,
    by_dotted_path,
    dotted,
    explained,
    mesh_settings,
    product_text,
    without_effect,
)
from jaxtp.config.schema import (
    ConfigError,
    Count,
    FolderOrUrl,
    Keys,
    Positive,
    Reference,
    Settings,
    as_base,
    check_values,
    leaves,
    nested,
    replace_nested,
    to_plain,
    validate,
)
from jaxtp.layers.attention import CausalSelfAttention
from jaxtp.layers.branch import Branch
from jaxtp.layers.context import LocalShape
from jaxtp.layers.convolution import ShortConvolution
from jaxtp.layers.embedding import CHUNK_SIZE
from jaxtp.layers.experts import ExpertsBesideMLP, MixtureOfExperts
from jaxtp.layers.forms import BLOCK
from jaxtp.layers.gated_delta import GatedDeltaNet, KimiDeltaAttention
from jaxtp.layers.latent_attention import LatentAttention
from jaxtp.layers.linear import (
    ColumnParallelLinear,
    LayerContext,
    RowParallelLinear,
    matmul_obstacle,
)
from jaxtp.layers.lora import (
    LLAMA_TARGETS,
    OLD_TARGETS,
    TARGETS,
    LoraConfig,
    has_whole_blocks,
)
from jaxtp.layers.mamba2 import Mamba2
from jaxtp.layers.mlp import MLP
from jaxtp.layers.norm import NormKind
from jaxtp.layers.overlap import Overlap
from jaxtp.layers.parameter import DType, PaddedDim, Precision, logical_shape, spec_of
from jaxtp.layers.remat import RematPolicy
from jaxtp.mesh import AXES, CP, STORAGE, abstract_mesh, as_only, axes_of, parts
from jaxtp.models.block import BlockConfig, adapter_kernels, base_kernels, padded_dims
from jaxtp.models.block_rules import block_problems, storage_problems

_Ignored = Annotated[Keys, Argument("KEY", other_flag="--ignore-config")]
"""Keys whose flag can also be `--ignore-config`, the only spelling in commands without a model
section."""


class Changes(dict[str, Any]):
    """Settings in which a block differs from the model's; hashable, so never mutate them."""

    def __init__(self, changes: Mapping[str, Any] | Iterable[tuple[str, Any]]):
        super().__init__({name: _plain(value) for name, value in dict(changes).items()})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self))


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


BlockChanges = Annotated[dict[str, Any], AfterValidator(Changes)]
MAX_LISTED_BLOCKS = 128  # blocks in a list: each kind of block is compiled by itself
_BlockList = Annotated[tuple[BlockChanges, ...], Field(max_length=MAX_LISTED_BLOCKS), ONLY_IN_FILES]

BLOCKS = "blocks"  # path of the decoder's parameters that are stacked

T = TypeVar("T")

_MAX_PERIOD = 32  # blocks of a pattern that is found in a list
_MAX_UNFIT = 4  # kinds of blocks whose problems are listed at once
_MODEL_WIDE = {"attention", "grouped"}  # settings that all blocks share


@dataclass(frozen=True)
class Stack:
    """A repeated pattern of blocks."""

    pattern: tuple[BlockConfig, ...]
    """The blocks of one turn of the scan."""

    repeats: int
    """Number of turns; the params of blocks at the same place of the pattern are stacked along
    them."""


@dataclass(frozen=True, kw_only=True)
class OriginConfig(Settings):
    """The source of a run's model, the first settings in `--help`."""

    from_hf: Annotated[FolderOrUrl | None, STEP, SHORT_HELP] = None
    """Folder, or its URL, of a model in Hugging Face format to start from. Its config.json sets the
    sizes of the model."""

    ignore_config: Annotated[_Ignored, STEP] = ()
    """Attributes of that model's config.json that jaxtp does not know, to ignore if they do not
    change the model's results. Can be given several times."""

    add_tokens: Annotated[tuple[str, ...], STEP, Argument("TOKEN")] = ()
    """New tokens for that model, as in --add-tokens of jaxtp prepare. Their rows of the embedding
    and of the head start as the mean of all others."""

    build: Annotated[Reference | None, STEP, SHORT_HELP] = None
    """Model of your own: a function that returns a Flax NNX model or a Decoder of your own, its
    class, or a subclass of ModelConfig. The settings below then have no effect, except for
    arguments and plan."""

    arguments: Annotated[BlockChanges, STEP, ArgumentsOf("build")] = Changes({})
    """Arguments of the function model.build, such as --model.arguments.depth 4. Its parameter rngs
    gets nnx.Rngs(run.seed)."""

    plan: Annotated[Reference | None, COST] = None
    """Plan that splits the model of model.build: a dict from patterns of module paths to styles. By
    default its own PartitionSpecs, or else the plan that jaxtp.propose_plan returns."""


@dataclass(frozen=True, kw_only=True)
class DecoderSizes(Settings):
    """Sizes of a decoder."""

    vocab_size: Count = 256
    """Number of token ids. It may have any size: layers pad it to a multiple of mesh.tp."""

    d_model: Count = 128
    """Width of the residual stream. Divisible by mesh.fsdp * mesh.cp."""

    num_layers: Count = 4
    """Decoder blocks, stacked and run by one scan."""

    first_blocks: _BlockList = ()
    """In a YAML file: for each of the first blocks a mapping of the settings that differ from the
    model's."""

    pattern: _BlockList = ()
    """In a YAML file: a mapping of settings for each block of a pattern, which repeats after the
    first blocks. [{sliding_window: 4096}, {}] alternates blocks with a window and blocks with full
    attention."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(BlockConfig, DecoderSizes):
    """Settings of a decoder, by default like Llama.

    `first_blocks` and `pattern` change the settings of single blocks.
    """

    decoder: Annotated[Callable[..., Any] | None, Field(exclude=True)] = None
    """Makes the decoder, called as `decoder(config, rngs=rngs)`; by default the class `Decoder`. No
    setting."""

    learned_positions: Count | None = None
    """Number of learned position embeddings, and the longest sequence; by default none are
    learned."""

    embedding_scale: Positive | None = None
    """Factor of the embedding, rounded to the compute dtype; by default 1."""

    embedding_norm: bool = False
    """Divide the embedding by its root mean square (Muse Glimmer)."""

    residual_float32: bool = False
    """Keep the residual stream in float32; branches compute in precision.compute (Mamba-2)."""

    final_norm: NormKind | None = None
    """Kind of the norm before the head; by default norm (Muse Glimmer has another)."""

    logit_scale: Positive = 1.0
    """Factor of the logits, before their cap."""

    logit_softcap: Positive | None = None
    """Caps logits: c * tanh(logit / c)."""

    tie_embeddings: bool = False
    """Use the embedding table as the output head."""

    head_bias: bool = False
    """A bias on the logits (Phi-2)."""

    dropout: Annotated[float, Field(ge=0, lt=1), STEP] = 0.0
    """Dropout rate of the outputs of attention and MLP in training."""

    remat: Annotated[RematPolicy, COST, SHORT_HELP] = "full"
    """Activations that the backward pass computes again to save memory, from none to all of a
    block. With full it computes all from the block's input, with offload from its input in host
    memory. In between, save_dots keeps the results of products, save_gathered the inputs and
    outputs of parallel layers, and save_reduced the outputs of row layers."""

    scan_layers: Annotated[bool, COST] = True
    """Run the blocks by one scan, compiled once; false unrolls the scan, which takes longer to
    compile."""

    sequence_parallel: Annotated[bool | None, COST] = None
    """Between blocks, split activations over tp along the sequence. By default wherever tp > 1
    divides the sequence."""

    overlap: Annotated[Overlap, COST] = "none"
    """Overlap of a block's products with the communication of sequence parallelism. none
    all-gathers before products and reduce-scatters after them. ring multiplies each part of the
    sequence as it arrives, except for products in float8; it sends up to 1/4 more."""

    loss_chunk: Annotated[Count, COST] = CHUNK_SIZE
    """Tokens per device whose logits the loss computes at a time."""

    precision: Annotated[Precision, STEP] = Precision()
    """Dtypes of parameters, compute and gradient reductions."""

    lora: LoraConfig = LoraConfig()
    """Adapters to train instead of the model's own parameters."""

    def stacks(self) -> tuple[Stack, ...]:
        """Returns the stacks; layers after the last whole turn form further stacks."""
        return _stacks(self)

    @property
    def trained_dtype(self) -> DType:
        """Dtype of the trained params and optimizer state."""
        if self.lora.rank:
            return self.lora.dtype
        return self.precision.param

    @property
    def most_experts(self) -> int:
        """Largest number of experts in a block."""
        return max(block.num_experts for block in self.block_kinds())

    def kinds(self) -> Iterator[tuple[str, range, BlockConfig]]:
        """Yields (params' path, layer numbers, settings) of stacked blocks."""
        stacks = self.stacks()
        if len(stacks) == len(stacks[0].pattern) == 1:
            yield BLOCKS, range(stacks[0].repeats), stacks[0].pattern[0]
            return
        first = 0
        kind = count()
        for stack in stacks:
            period = len(stack.pattern)
            last = first + stack.repeats * period
            for place, block in enumerate(stack.pattern, start=first):
                yield f"{BLOCKS}.{next(kind)}", range(place, last, period), block
            first = last

    def layers(self) -> Iterator[BlockConfig]:
        """Yields the settings of every block, in order."""
        for stack in self.stacks():
            for _ in range(stack.repeats):
                yield from stack.pattern

    def block(self) -> BlockConfig:
        """Returns the settings of a block without changes."""
        kinds = (base for base in type(self).__mro__ if issubclass(base, BlockConfig))
        return as_base(self, next(kind for kind in kinds if not issubclass(kind, ModelConfig)))

    @property
    def layer_context(self) -> LayerContext:
        """The settings that all parallel layers share."""
        return LayerContext(
            sequence_parallel=self.sequence_parallel,
            overlap=self.overlap,
            lora=self.lora,
            precision=self.precision,
        )

    def branches(self, block: BlockConfig, rngs: nnx.Rngs) -> dict[str, Branch]:
        """Returns a block's branches, in order."""
        context = self._context_of(block)
        mixer_context = self._context_of(block, beside=block.parts == "all")
        attention: Callable[..., Branch] = LatentAttention if block.kv_rank else CausalSelfAttention
        attention = partial(attention, norm=block)
        attention = ShortConvolution if block.short_conv else attention
        states: type[GatedDeltaNet] = Mamba2 if block.delta_kind == "mamba2" else GatedDeltaNet
        states = KimiDeltaAttention if block.delta_gate_rank else states
        mlp: Callable[..., Branch] = MixtureOfExperts if block.num_experts else MLP
        mlp = partial(ExpertsBesideMLP, norm=block) if block.dense_mlp else mlp
        branches: dict[str, Branch] = {}
        if block.has_attention or (block.short_conv and block.parts != "mlp"):
            branches["attention"] = attention(self.d_model, block, mixer_context, rngs=rngs)
        if block.has_states:
            branches[block.states] = states(
                self.d_model, block, mixer_context, norm=block, rngs=rngs
            )
        if block.parts != "mixer":
            branches["mlp"] = mlp(self.d_model, block, context, rngs=rngs)
        return branches

    def _context_of(self, block: BlockConfig, *, beside: bool = False) -> LayerContext:
        recomputed = self.remat not in ("none", "save_dots")
        # Rings need each layer's own collectives, experts and latents have collectives of their
        # own, and dropout acts on each branch.
        has_latents = block.kv_rank or block.delta_gate_rank
        separate = self.overlap == "ring" or block.num_experts or has_latents or self.dropout
        placements = ("before", "parallel", "parallel_two") if beside else ("parallel",)
        gathers_once = block.norm_placement in placements and not separate
        return replace(self.layer_context, caller_communicates=gathers_once, recomputed=recomputed)

    def zigzag(self, shape: LocalShape) -> bool:
        """Returns whether a layer needs zigzag order."""
        return any(block.zigzag(shape) for block in self.block_kinds())

    def listed_blocks(self) -> Mapping[str, BlockConfig]:
        """Returns the settings of blocks in `first_blocks` and `pattern`, by place.

        An example of a place is `model.pattern[0]`.
        """
        return _listed_blocks(self)

    def block_kinds(self) -> tuple[BlockConfig, ...]:
        """Returns the distinct block settings."""
        blocks = chain.from_iterable(stack.pattern for stack in self.stacks())
        return tuple(dict.fromkeys(blocks))


@lru_cache(maxsize=256)
def _listed_blocks(config: ModelConfig) -> Mapping[str, BlockConfig]:
    blocks: dict[str, BlockConfig] = {}
    for name in ("first_blocks", "pattern"):
        for i, changes in enumerate(getattr(config, name)):
            place = f"model.{name}[{i}]"
            blocks[place] = _changed_block(config, place, changes)
    return blocks


def _changed_block(config: ModelConfig, place: str, changes: BlockChanges) -> BlockConfig:
    block = config.block()
    model_wide = vars(config).keys() - vars(block).keys() | _MODEL_WIDE
    shared = [name for name in changes if name in model_wide]
    if shared:
        instead = ", ".join(f"model.{name}" for name in shared)
        raise ConfigError(
            f"{place}: {', '.join(shared)} cannot differ between blocks; set {instead} for "
            "all of them"
        )
    values = {field.name: getattr(block, field.name) for field in dataclasses.fields(block)}
    return validate(type(block), values | changes, source=place)


@lru_cache(maxsize=256)
def _stacks(config: ModelConfig) -> tuple[Stack, ...]:
    described = list(config.listed_blocks().values())
    first = described[: len(config.first_blocks)]
    pattern = described[len(config.first_blocks) :]
    if len(set(pattern)) < 2:
        pattern = pattern[:1] or [config.block()]
    turns, remainder = divmod(config.num_layers - len(first), len(pattern))
    patterns = repeated_patterns(first)
    if turns > 0:
        patterns.append((pattern, turns))
    patterns += repeated_patterns(pattern[:remainder])
    return tuple(Stack(tuple(pattern), repeats) for pattern, repeats in patterns)


def repeated_patterns(items: Sequence[T]) -> list[tuple[Sequence[T], int]]:
    """Splits a list into patterns with the fewest items, each with the number of its repeats.

    Each item of a pattern is a kind of block that is compiled by itself.
    """
    # Of the items from each index on: how many are in patterns; the first pattern, its repeats
    splits: dict[int, tuple[int, Sequence[T], int]] = {len(items): (0, (), 0)}
    for start in reversed(range(len(items))):
        later = items[start:]
        choices = []
        for period in range(1, min(len(later) // 2, _MAX_PERIOD) + 1):
            pattern = later[:period]
            turns = range(period, len(later) + 1, period)
            end = next(turn for turn in turns if later[turn : turn + period] != pattern)
            choices.append((period + splits[start + end][0], pattern, end // period))
        choices.append((1 + splits[start + 1][0], later[:1], 1))
        splits[start] = min(choices, key=lambda choice: (choice[0], choice[2] == 1))
    patterns = []
    start = 0
    while start < len(items):
        _, pattern, repeats = splits[start]
        patterns.append((pattern, repeats))
        start += repeats * len(pattern)
    return patterns


def validate_model(config: ModelConfig, mesh: Mapping[str, int], *, fixed: bool = False) -> None:
    """Raises a ConfigError that lists the values that do not fit the mesh."""
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"a Decoder takes a ModelConfig, not {str(config)[:100]!r}")
    # The constructor has checked them, unless a subclass has another `__post_init__`.
    check_values(config)
    problems = list(violations(config, mesh, fixed=fixed))
    if problems:
        raise ConfigError("\n  ".join(["the model does not fit the mesh:", *problems]))


def padded_sizes(config: ModelConfig, tp: int) -> dict[str, tuple[int, int]]:
    """Returns (size, padded size) of each size that tp pads, by name."""
    sizes = [*chain.from_iterable(padded_dims(block, tp) for block in config.block_kinds())]
    if any(block.short_conv for block in config.block_kinds()):
        sizes.append(("channels", config.d_model, PaddedDim((config.d_model,)).padded(tp)))
    return {name: (size, padded) for name, size, padded in sizes if padded != size}


def architecture(config: ModelConfig) -> dict[str, Any]:
    """Returns the settings that must equal those in a checkpoint."""
    settings = (
        (keys, value)
        for keys, value in leaves(to_plain(config))
        if affects(ModelConfig, dotted(keys), ARCHITECTURE).architecture
    )
    return nested(settings)


def upgrade_settings(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Adds defaults that have changed to a checkpoint's model settings.

    Before 0.2 `lora.dtype` was `precision.param`; before 0.3 `lora.targets` had none of latent
    attention, `lora.from_peft` was `lora.from`, and `precision` had `matmul_layers`.
    """
    if not {"lora", "precision"} <= plain.keys():
        return dict(plain)
    lora = {"dtype": plain["precision"].get("param", LoraConfig.dtype), **plain["lora"]}
    if "from" in lora:
        lora["from_peft"] = lora.pop("from")
    old_targets = (OLD_TARGETS,) if "kv_rank" in plain else (OLD_TARGETS, LLAMA_TARGETS)
    if tuple(lora.get("targets", ())) in old_targets:
        lora["targets"] = [*TARGETS]
    precision = {**plain["precision"]}
    # Another pattern than this one left layers out, so such a model is refused.
    if precision.get("matmul_layers") == "*":
        del precision["matmul_layers"]
    return {**plain, "lora": lora, "precision": precision}


def violations(
    config: ModelConfig, mesh: Mapping[str, int], *, fixed: bool = False
) -> Iterator[str]:
    """Yields every reason why the model cannot run on the mesh, with the nearest values that work.

    `fixed`: weights exist, so only other meshes are suggested.
    """

    def problems(changes: Mapping[str, int]) -> Iterator[Problem]:
        model = replace_nested(config, _in_section("model", changes))
        return model_problems(model, {**mesh, **_in_section("mesh", changes)})

    return explained(problems, fixed=fixed)


def model_problems(config: ModelConfig, mesh: Mapping[str, int]) -> Iterator[Problem]:
    """Yields the reasons of `violations`, without suggestions."""
    if problem := _too_few_layers(config):
        yield problem
        return
    yield from map(Problem, without_effect(config, _switches(config), "model."))
    unfit = _unfit_blocks(config, mesh)
    yield from unfit
    yield from _lora_problems(config)
    yield from storage_problems("model.d_model", config.d_model, mesh)
    if config.precision.matmul != "compute" and not unfit:
        yield from _matmul_problems(config)
    if config.lora.base == "mxfp4" and not unfit and config.d_model % parts(mesh, STORAGE) == 0:
        yield from _mxfp4_problems(config, mesh)
    if mesh[CP] > 1 and not unfit and config.d_model % parts(mesh, STORAGE) == 0:
        yield from _context_problems(config, mesh[CP])


def _too_few_layers(config: ModelConfig) -> Problem | None:
    """A model has at least the layers that its settings list."""
    first = len(config.first_blocks)
    pattern = len(config.pattern)
    if config.num_layers >= first + pattern:
        return None
    return Problem(
        f"model.num_layers={config.num_layers} is less than the listed blocks: {first} in "
        f"model.first_blocks and {pattern} in model.pattern; at least {first + pattern} works"
    )


def _switches(config: ModelConfig) -> Iterator[Switch]:
    experts = ["selection_bias", "shared_experts", "router_bias", "experts_bias", "experts_rank"]
    yield "model.num_experts", config.most_experts, experts
    has_delta = any(block.delta_value_heads for block in config.block_kinds())
    delta = ["delta_key_heads", "delta_key_dim", "delta_value_dim", "delta_conv"]
    delta += ["delta_gate_rank", "delta_kind"]
    yield "model.delta_value_heads", has_delta, delta
    has_gate = any(block.attention_gate for block in config.block_kinds())
    yield "model.attention_gate", has_gate, ["gate_per_head"]
    has_mamba = any(block.delta_kind == "mamba2" for block in config.block_kinds())
    mamba = ("bias", "out_bias", "conv_bias", "norm", "min_step", "max_step", "scales")
    yield "model.delta_kind=mamba2", has_mamba, [f"mamba_{name}" for name in mamba]
    lora = ["lora.alpha", "lora.rslora", "lora.base", "lora.tokens", "lora.tables"]
    # Runs of 0.1 have other defaults.
    if config.lora.targets != LLAMA_TARGETS:
        lora.append("lora.targets")
    if config.lora.dtype != config.precision.param:
        lora.append("lora.dtype")
    yield "model.lora.rank", config.lora.rank, lora


def _unfit_blocks(config: ModelConfig, mesh: Mapping[str, int]) -> list[Problem]:
    """Each kind of block fits the mesh."""
    places = {config.block(): ""}
    for place, block in config.listed_blocks().items():
        places.setdefault(block, f"{place}: ")
    by_kind = (_block_problems(places[block], block, mesh) for block in config.block_kinds())
    return list(chain.from_iterable(islice(filter(None, by_kind), _MAX_UNFIT)))


def _block_problems(place: str, block: BlockConfig, mesh: Mapping[str, int]) -> list[Problem]:
    return [replace(problem, text=place + problem.text) for problem in block_problems(block, mesh)]


def _context_problems(config: ModelConfig, cp: int) -> Iterator[Problem]:
    """Each branch can split sequences over cp."""
    branches = _branches(config).values()
    if unaware := sorted({type(branch).__name__ for branch in branches if not branch.over_cp}):
        yield Problem(
            f"mesh.cp={cp} splits each sequence, which is not supported by {' and '.join(unaware)}",
            among={f"mesh.{CP}": 1},
        )


def _lora_problems(config: ModelConfig) -> Iterator[Problem]:
    """Adapters have targets in the model."""
    lora = config.lora
    if max(lora.tokens, default=0) >= config.vocab_size or len({*lora.tokens}) < len(lora.tokens):
        yield Problem(
            f"model.lora.tokens={' '.join(map(str, lora.tokens))}: should be different ids, and at "
            f"most {config.vocab_size - 1} with model.vocab_size={config.vocab_size}"
        )
    if lora.tokens and lora.tables:
        yield Problem("model.lora.tables=True trains the rows of all tokens; leave lora.tokens out")
    # These targets mean all that there are.
    if lora.rank and lora.targets not in (TARGETS, LLAMA_TARGETS):
        kernels = chain.from_iterable(adapter_kernels(block) for block in config.block_kinds())
        adaptable = {target for target, _ in kernels}
        if missing := [target for target in lora.targets if target not in adaptable]:
            possible = [target for target in TARGETS if target in adaptable]
            yield Problem(
                f"model.lora.targets: no block has {', '.join(missing)}; it can be "
                f"{', '.join(possible)}"
            )


def _mxfp4_problems(config: ModelConfig, mesh: Mapping[str, int]) -> Iterator[Problem]:
    """Each device has whole blocks of the kernels in four bits."""
    if config.precision.matmul != "compute":
        yield Problem(
            f"model.lora.base=mxfp4 has no products in {config.precision.matmul}; use "
            "model.precision.matmul=compute, or model.lora.base=float8"
        )
    branches = _branches(config, tuple(mesh[axis] for axis in AXES))
    for stack, _, block in config.kinds():
        for path in base_kernels(block, "mxfp4"):
            branch, _, name = path.partition(".")
            layer = branches[f"{stack}.{branch}"]
            kernel = by_dotted_path(nnx.to_flat_state(nnx.state(layer)))[name]
            split = mesh_settings(axes_of(spec_of(kernel)[-2]), mesh)
            if not has_whole_blocks(kernel, math.prod(split.values())):
                inputs = logical_shape(kernel)[-2]
                yield Problem(
                    f"model.lora.base=mxfp4: {stack}.{path} has {inputs} input features over "
                    f"{product_text(split) or 'one device'}, not a multiple of {BLOCK} on each; "
                    "model.lora.base=float8 takes any number",
                    dict.fromkeys(split, max(1, inputs // BLOCK)),
                )
                return


def matmul_layers(config: ModelConfig) -> dict[str, str | None]:
    """Returns why `precision.matmul` does not apply to projections in blocks, by path.

    The reason is None where `precision.matmul` applies.
    """
    obstacles: dict[str, str | None] = {}
    for root, branch in _branches(config).items():
        for path, layer in nnx.iter_modules(branch):
            name = dotted((root, *path))
            if isinstance(layer, MixtureOfExperts):
                obstacles[name] = "experts have grouped products"
            elif isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                is_shared = layer.precision.matmul == "compute"
                obstacles[name] = "shared experts" if is_shared else matmul_obstacle(layer)
    return obstacles


def _matmul_problems(config: ModelConfig) -> Iterator[Problem]:
    """Products in 8 bits apply to a layer."""
    precision = config.precision
    setting = "model.precision.matmul"
    layers = matmul_layers(config)
    if None not in layers.values():
        reasons = "; ".join({why: f"{path}: {why}" for path, why in layers.items()}.values())
        smaller = f", or a smaller {setting}_least" if "matmul_least" in reasons else ""
        yield Problem(
            f"{setting}={precision.matmul} applies to no layer ({reasons}); use "
            f"{setting}=compute{smaller}"
        )


@lru_cache(maxsize=32)
def _branches(config: ModelConfig, sizes: tuple[int, ...] = ()) -> Mapping[str, Branch]:
    by_kind: dict[BlockConfig, dict[str, Branch]] = {}
    # Not on the mesh in context, which may differ and not divide the sizes.
    mesh = AbstractMesh((), ())
    if sizes:
        mesh = abstract_mesh(dict(zip(AXES, sizes, strict=True)))
    with as_only(mesh):
        for block in config.block_kinds():
            by_kind[block] = nnx.eval_shape(lambda block=block: config.branches(block, nnx.Rngs(0)))
    branches: dict[str, Branch] = {}
    for path, _, block in config.kinds():
        for name, branch in by_kind[block].items():
            branches[f"{path}.{name}"] = branch
    return branches


def _in_section(section: str, changes: Mapping[str, int]) -> dict[str, int]:
    return {
        name.removeprefix(f"{section}."): value
        for name, value in changes.items()
        if name.startswith(section)
    }
