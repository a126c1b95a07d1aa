"""The settings of a decoder, the blocks that they come to, and the meshes that can hold it.

A decoder is composed: stacks of blocks, each stack a pattern of blocks that repeats, each block a sum of residual
branches (`layers/branch.py`). The blocks at one place of a pattern are stacked and run by one scan; what the pattern
does not divide is a stack of its own. The settings of a layer stand in the layer's file and a model inherits them, so
that YAML stays flat: `model.num_kv_heads`.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, count, groupby, islice
from typing import Annotated, Any

import tyro
from flax import nnx
from pydantic import AfterValidator, Field

from jaxtp.config import ConfigError, Count, Keys, Positive, UserPath, allowed, changed, to_plain, validate
from jaxtp.hints import Problem, explained, not_divisible
from jaxtp.layers.attention import AttentionConfig, CausalSelfAttention
from jaxtp.layers.branch import Branch, Small, like
from jaxtp.layers.costs import Share
from jaxtp.layers.experts import ExpertsConfig, MixtureOfExperts
from jaxtp.layers.lora import LoraConfig, Target
from jaxtp.layers.loss import CHUNK_SIZE
from jaxtp.layers.mlp import MLP
from jaxtp.layers.norm import NormConfig
from jaxtp.layers.parameter import Precision
from jaxtp.layers.remat import RematPolicy
from jaxtp.layers.rings import Overlap
from jaxtp.mesh import CP, STORAGE, parts, product_of, settings_of

_Ignored = Annotated[Keys, tyro.conf.arg(aliases=["--ignore-config"], metavar="KEY")]
"""Keys, whose flag is called as in commands without this section."""


class Changes(dict[str, Any]):
    """Settings in which a block differs from the model's; nobody changes them, so that they have a hash."""

    def __init__(self, given: Mapping[str, Any] | Iterable[tuple[str, Any]]):
        super().__init__({name: _plain(value) for name, value in dict(given).items()})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self))


def _plain(value: Any) -> Any:
    """Returns a section of settings as a mapping, so that both spellings are equal."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


BlockChanges = Annotated[dict[str, Any], AfterValidator(Changes)]
MAX_DESCRIBED = 128
"""Blocks that a pattern can have: each kind is compiled by itself."""
_Described = Annotated[tuple[BlockChanges, ...], Field(max_length=MAX_DESCRIBED), tyro.conf.Fixed]

BLOCKS = "blocks"
"""Path of the decoder's parameters that are stacked."""

_MAX_UNFIT = 4
"""Kinds of blocks whose problems are told: those of the others are seen when these are gone."""
_OF_ALL_BLOCKS = {"attention", "grouped"}
"""Kernels: chosen for all blocks."""
_MIN_D_MODEL, _MIN_VOCAB, _MAX_TURNS = 64, 96, 2
_NOT_ARCHITECTURE = {
    *(
        "from_hf",
        "ignore_config",
        "attention",
        "grouped",
        "dropout",
        "remat",
        "scan_layers",
        "sequence_parallel",
        "overlap",
    ),
    "loss_chunk",
    "precision",
}


@dataclass(frozen=True, kw_only=True)
class BlockConfig(NormConfig, ExpertsConfig, AttentionConfig):
    """One kind of decoder block: attention and an MLP, or experts in its place, each a branch with its norms."""


@dataclass(frozen=True)
class Stack:
    """Blocks in the order of a pattern, which repeats."""

    pattern: tuple[BlockConfig, ...]
    """The blocks of a turn."""

    repeats: int
    """Number of turns: the blocks at one place of the pattern are stacked, and run by one scan."""


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """Where a model comes from, and its sizes: what comes first in `--help`."""

    from_hf: UserPath | None = None
    """Folder of a model in Hugging Face format, to begin with its weights; the sizes below are then its own."""

    ignore_config: _Ignored = ()
    """Attributes of that model's config.json to pass over: such as are not understood, and that you know to say nothing
    of what it computes. Can be given several times."""

    vocab_size: Count = 256
    """Token ids, 0 to vocab_size - 1. Any size: what tp does not divide is padded inside the layers."""

    d_model: Count = 128
    """Width of the residual stream. Divisible by mesh.fsdp * mesh.cp."""

    num_layers: Count = 4
    """Decoder blocks, stacked and run by one scan."""

    first_blocks: _Described = ()
    """In a YAML file: a mapping for each of the first blocks, of the settings in which it differs from the model's."""

    pattern: _Described = ()
    """In a YAML file: mappings of settings for blocks that repeat after the first ones, such as
    [{sliding_window: 4096}, {}] for blocks that see a window and all positions in turn."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(BlockConfig, DecoderSizes):
    """A decoder composed from blocks. Their settings hold for all, but for what `first_blocks` or `pattern` change; the
    defaults are Llama's."""

    learned_positions: Count | None = None
    """Positions that have a learned vector, which is added to the embedding; a sequence can be no longer."""

    embedding_scale: Positive | None = None
    """Multiplies the embedding, rounded to the compute dtype; by default nothing does."""

    logit_softcap: Positive | None = None
    """Logits are squashed to below this by c * tanh(logit / c)."""

    tie_embeddings: bool = False
    """Use the embedding table as the output head."""

    dropout: Annotated[float, Field(ge=0, lt=1), allowed("from 0 to below 1")] = 0.0
    """Probability with which an element of an attention's or MLP's output is zeroed in training."""

    remat: RematPolicy = "full"
    """Activations that a block keeps for its backward pass: none keeps all, save_dots the results of products,
    save_gathered the inputs and outputs of parallel layers, save_reduced the outputs of row layers, full only the
    block's input, offload that on the host."""

    scan_layers: bool = True
    """Run the blocks by one scan, compiled once; false writes them out, which compiles for longer."""

    sequence_parallel: bool | None = None
    """Between blocks, split activations over tp along the sequence. By default wherever tp > 1 divides the sequence."""

    overlap: Overlap = "none"
    """Communication of sequence parallelism in the blocks: none gathers an input before its products and scatters their
    sum after them; ring sends a part around the devices of tp while another is multiplied, and up to half as much
    again."""

    loss_chunk: Count = CHUNK_SIZE
    """Tokens on a device whose logits exist at a time."""

    precision: Precision = Precision()
    """Dtypes of parameters, compute and gradient reductions."""

    lora: LoraConfig = LoraConfig()
    """Adapters to train instead of the model's own parameters."""

    def __post_init__(self) -> None:
        for name in ("first_blocks", "pattern"):
            if isinstance(given := getattr(self, name), list | tuple):
                hashable = (Changes(changes) if isinstance(changes, Mapping) else changes for changes in given)
                object.__setattr__(self, name, tuple(hashable))

    def stacks(self) -> tuple[Stack, ...]:
        """Returns the blocks, first to last: what the pattern does not divide is a stack of its own.

        Raises:
          ConfigError: a block has a setting that is none, or a value that cannot be.
        """
        return _stacks(self)

    @property
    def most_experts(self) -> int:
        """Most experts that a block has; 0 where none has any."""
        return max(block.num_experts for block in self.block_kinds())

    def kinds(self) -> Iterator[tuple[str, range, BlockConfig]]:
        """Yields for blocks that are stacked the path of their parameters, the numbers of their layers, and their
        settings."""
        stacks = self.stacks()
        one, first, kind = len(stacks) == len(stacks[0].pattern) == 1, 0, count()
        for stack in stacks:
            last = first + stack.repeats * len(stack.pattern)
            for place, block in enumerate(stack.pattern, start=first):
                path = BLOCKS if one else f"{BLOCKS}.{next(kind)}"
                yield path, range(place, last, len(stack.pattern)), block
            first = last

    def layers(self) -> Iterator[BlockConfig]:
        """Yields the settings of every block, first to last."""
        for stack in self.stacks():
            for _ in range(stack.repeats):
                yield from stack.pattern

    def block(self) -> BlockConfig:
        """Returns the settings of a block that nothing changes, as the class that the model inherits them from."""
        bases = (base for base in type(self).__mro__ if not issubclass(base, ModelConfig))
        kind: type[BlockConfig] = next(base for base in bases if issubclass(base, BlockConfig))
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})

    def branches(self, block: BlockConfig, rngs: nnx.Rngs) -> dict[str, Branch]:
        """Returns the residual branches of a block, in the order in which they are added."""
        shared: dict[str, Any] = {
            "sequence_parallel": self.sequence_parallel,
            "precision": self.precision,
            "rngs": rngs,
        }
        projections: dict[str, Any] = {"overlap": self.overlap, "lora": self.lora, **shared}
        plus_one = block.norm == "rms_plus_one"
        attention = partial(CausalSelfAttention, norm_eps=block.norm_eps, norm_plus_one=plus_one)
        return {
            "attention": attention(self.d_model, block, **projections),
            "mlp": (
                MixtureOfExperts(self.d_model, block, **shared)
                if block.num_experts
                else MLP(self.d_model, block, **projections)
            ),
        }

    def zigzag(self, share: Share) -> bool:
        """Returns whether devices along cp hold tokens in the order zigzag: if a layer needs it."""
        return any(block.zigzag(share) for block in self.block_kinds())

    def describe_block(self) -> str:
        """Returns the sizes of a block in a line."""
        heads = f"{self.num_heads} heads ({self.num_kv_heads} kv) of {self.head_dim}"
        others = len(self.block_kinds()) - 1
        differing = f", and {others} other {'kind' if others == 1 else 'kinds'} of block" if others else ""
        experts = (
            f" in each of {self.num_experts} experts, {self.experts_per_token} a token" if self.num_experts else ""
        )
        return f"d_model {self.d_model}, {heads}, d_ff {self.d_ff}{experts}{differing}"

    def described(self) -> Mapping[str, BlockConfig]:
        """Returns the settings of the blocks that differ from the model's, by their places: `model.pattern[0]`.

        Raises:
          ConfigError: one has a setting that is none, or a value that cannot be.
        """
        return _described(self)

    def block_kinds(self) -> tuple[BlockConfig, ...]:
        """Returns the settings of every kind of block, each once."""
        return tuple(dict.fromkeys(block for stack in self.stacks() for block in stack.pattern))


@lru_cache(maxsize=256)
def _described(config: ModelConfig) -> Mapping[str, BlockConfig]:
    places = (("first_blocks", config.first_blocks), ("pattern", config.pattern))
    given = {f"model.{name}[{i}]": changes for name, found in places for i, changes in enumerate(found)}
    return {place: _changed_block(config, place, changes) for place, changes in given.items()}


def _changed_block(config: ModelConfig, place: str, changes: BlockChanges) -> BlockConfig:
    block = config.block()
    own = {field.name for field in dataclasses.fields(block)} - _OF_ALL_BLOCKS
    if shared := [name for name in changes if name in vars(config) and name not in own]:
        instead = ", ".join(f"model.{name}" for name in shared)
        raise ConfigError(f"{place}: {', '.join(shared)} cannot differ between blocks; set {instead} for all of them")
    return validate(type(block), {**dataclasses.asdict(block), **changes}, source=place)


@lru_cache(maxsize=256)
def _stacks(config: ModelConfig) -> tuple[Stack, ...]:
    described = list(config.described().values())
    first, pattern = described[: len(config.first_blocks)], described[len(config.first_blocks) :]
    if len(set(pattern)) < 2:
        pattern = pattern[:1] or [config.block()]
    turns, rest = divmod(config.num_layers - len(first), len(pattern))
    repeated = [Stack(tuple(pattern), turns)] if turns > 0 else []
    return (*_runs(first), *repeated, *_runs(pattern[:rest]))


def _runs(blocks: Sequence[BlockConfig]) -> Iterator[Stack]:
    """Yields a stack for each run of equal blocks."""
    for block, equal in groupby(blocks):
        yield Stack((block,), len(list(equal)))


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
    config = validate(type(config), dataclasses.asdict(config), source=type(config).__name__)
    if problems := list(violations(config, mesh, fixed=fixed)):
        raise ConfigError("the model does not fit the mesh:\n" + "\n".join(f"  {problem}" for problem in problems))
    return config


def padded_sizes(config: ModelConfig, tp: int) -> dict[str, tuple[int, int]]:
    """Returns the sizes that tp devices pad: what each is, and what it is padded to, by name."""
    found = (size for block in config.block_kinds() for size in block.padding(tp))
    return {name: (size, padded) for name, size, padded in found if padded != size}


def shrunk(config: ModelConfig, small: Small) -> ModelConfig:
    """Returns a model of the same structure that virtual CPU devices can run: each kind of block is there."""
    pattern, first = max(1, len(config.pattern)), len(config.first_blocks)
    turns, rest = divmod(config.num_layers - first, pattern)
    every = (*config.first_blocks, *config.pattern)
    changes = [
        Changes({name: block.smaller(small).get(name, value) for name, value in own.items()})
        for own, block in zip(every, config.described().values(), strict=True)
    ]
    return dataclasses.replace(
        config,
        vocab_size=small.size(config.vocab_size, _MIN_VOCAB),
        d_model=like(0, small.shards, _MIN_D_MODEL),
        num_layers=first + pattern * min(turns, _MAX_TURNS) + rest,
        loss_chunk=small.positions(config.loss_chunk),
        first_blocks=tuple(changes[:first]),
        pattern=tuple(changes[first:]),
        learned_positions=config.learned_positions and small.positions(config.learned_positions),
        **config.smaller(small),
    )


def architecture(config: ModelConfig) -> dict[str, Any]:
    """Returns the fields that decide what the parameters are and mean, as plain values: equal for any run that can
    share a checkpoint."""
    return architecture_in(to_plain(config))


def architecture_in(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same of a configuration that is plain values already; where adapters began is no part of it."""
    found = {name: value for name, value in plain.items() if name not in _NOT_ARCHITECTURE}
    return found | {"lora": {name: value for name, value in plain["lora"].items() if name != "from"}}


def violations(config: ModelConfig, mesh: Mapping[str, int], *, fixed: bool = False) -> Iterator[str]:
    """Yields every reason why the model cannot run on the mesh, each with the nearest values that work.

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
    """Yields the same reasons, without suggestions."""
    first, pattern = len(config.first_blocks), len(config.pattern)
    if config.num_layers < first + pattern:
        given = f"{first} in model.first_blocks and {pattern} in model.pattern"
        yield Problem(
            f"model.num_layers={config.num_layers} is less than the blocks that are described: {given}; at least "
            f"{first + pattern} works"
        )
        return
    if config.selection_bias and not config.most_experts:
        yield Problem(
            "model.selection_bias=true is of experts, and there are none; add --model.num-experts, or leave it out"
        )
    places = {block: f"{place}: " for place, block in reversed([*config.described().items()])} | {config.block(): ""}
    by_kind = ((places[block], list(block.problems(mesh))) for block in config.block_kinds())
    unfit = list(islice((place_found for place_found in by_kind if place_found[1]), _MAX_UNFIT))
    for place, found in unfit:
        yield from (replace(problem, text=place + problem.text) for problem in found)
    if config.lora.rank:
        yield from {problem.text: problem for problem in unadapted(config, config.lora.targets)}.values()
    axes = [axis for axis in STORAGE if mesh[axis] > 1]
    shards, among = parts(mesh, axes), dict.fromkeys(settings_of(axes), config.d_model)
    yield from not_divisible("model.d_model", config.d_model, product_of(STORAGE, mesh), shards, among)
    can_be_built = not unfit and config.d_model % shards == 0
    if mesh[CP] > 1 and can_be_built and (unaware := _not_over_cp(config)):
        text = f"mesh.cp={mesh[CP]} divides each sequence, and {' and '.join(unaware)} cannot work on a part of one"
        yield Problem(text, among={f"mesh.{CP}": 1})


def unadapted(config: ModelConfig, targets: Collection[Target]) -> Iterator[Problem]:
    """Yields why blocks can have no adapters of those projections."""
    return chain.from_iterable(block.adapter_problems(targets) for block in config.block_kinds())


def adaptable(config: ModelConfig) -> tuple[Target, ...]:
    """Returns the targets of a model that every block can have adapters of: projections of experts have none."""
    return tuple(target for target in config.lora.targets if not any(unadapted(config, [target])))


@lru_cache(maxsize=32)
def _not_over_cp(config: ModelConfig) -> tuple[str, ...]:
    """Returns the kinds of branches that do not declare that they work over cp."""

    def kinds() -> Iterator[type[Branch]]:
        for block in config.block_kinds():
            yield from map(type, nnx.eval_shape(lambda block=block: config.branches(block, nnx.Rngs(0))).values())

    return tuple(sorted({kind.__name__ for kind in kinds() if not kind.over_cp}))


def _inside(section: str, changes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yields the changes of one section, without its name."""
    return ((name.removeprefix(f"{section}."), value) for name, value in changes.items() if name.startswith(section))
