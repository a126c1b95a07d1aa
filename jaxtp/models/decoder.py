"""The decoder: embedding, stacks of blocks under scans, final norm, head."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import islice, repeat
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import (
    batch_spec,
    check_divides,
    constrain,
    device_view,
    enter_parallel,
    leave_parallel,
    token_spec,
)
from jaxtp.config.schema import ConfigError
from jaxtp.layers import remat
from jaxtp.layers.balance import Balance, Routing, balance, updated_selection_bias
from jaxtp.layers.branch import Branch, KVCache
from jaxtp.layers.cache import NewTokens
from jaxtp.layers.context import Context, LocalShape, Sequences
from jaxtp.layers.embedding import (
    HeadConfig,
    LearnedPositions,
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_logits,
)
from jaxtp.layers.experts import ExpertsBesideMLP, MixtureOfExperts
from jaxtp.layers.forms import FORMS
from jaxtp.layers.lora import freeze, store_kernels
from jaxtp.layers.loss import Projection, vocab_parallel_cross_entropy
from jaxtp.layers.norm import Norm, rms_normalise, scaled
from jaxtp.layers.parameter import parameter, spec_of
from jaxtp.layers.positions import dropout, segment_positions
from jaxtp.layers.transport import activation_spec, sequence_dim
from jaxtp.mesh import CP, TP, current_mesh, mesh_sizes
from jaxtp.models.block import STATES, BlockConfig, base_kernels
from jaxtp.models.config import ModelConfig, Stack, validate_model

BlockCache = Mapping[str, KVCache]  # the cache of a block, by branch

JOINED = "joined_branches"

Routings = list[Routing | None]
"""Router statistics of each kind of block, stacked over its layers; None for a block without
experts."""


class LayerScale(nnx.Variable[Array]):
    """The factor of a block's result.

    Checkpoints save it, but no optimizer sees it, because it is not an `nnx.Param`.
    """


class DecoderBlock(nnx.Module):
    """Residual branches in order: `x + branch(norm(x))`, `x + norm(branch(x))`, or with both norms.

    With norm_placement parallel all branches read the block's input, and share a gather and a
    reduction over tp where they can; so do attention and the states beside it. Branches and norms
    are attributes, such as `attention`, `attention_norm` and `attention_after_norm`; a norm that
    branches share is the first one's.
    """

    def __init__(self, config: ModelConfig, block: BlockConfig | None = None, *, rngs: nnx.Rngs):
        self.config = config
        block = block or config.block()
        branches = config.branches(block, rngs)
        self.names = tuple(branches)
        placement = block.norm_placement
        self.parallel = placement in ("parallel", "parallel_two")
        self.scales = tuple(map(block.scales, self.names))
        norm = partial(Norm, config.d_model, context=config.layer_context)
        for name, branch in branches.items():
            shares = name == STATES or (placement == "parallel" and name != self.names[0])
            has_own_norms = isinstance(branch, ExpertsBesideMLP)
            norm_before = not shares and not has_own_norms and placement != "after"
            norm_after = placement in ("after", "both")
            setattr(self, f"{name}_norm", norm(block) if norm_before else None)
            setattr(self, name, branch)
            setattr(self, f"{name}_after_norm", norm(block.after()) if norm_after else None)
        layer_scale = None
        if block.layer_scale:
            initial = jnp.ones((), jnp.float32)
            layer_scale = parameter("layer scale", initial, P(), kind=LayerScale)
        self.layer_scale = layer_scale

    def __call__(
        self, x_BTD: Array, dropout_keys: Array | None = None, sequences: Sequences = Sequences()
    ) -> Array:
        """Runs the block on `[B, T, D]`; keys `[B]` turn dropout on."""
        return self.with_routing(x_BTD, dropout_keys, sequences)[0]

    def with_routing(
        self, x_BTD: Array, dropout_keys: Array | None = None, sequences: Sequences = Sequences()
    ) -> tuple[Array, Routing | None]:
        """Returns the output and any router statistics."""
        routing = None
        keys: dict[str, Array] = {}
        if dropout_keys is not None:
            branch_keys = split_keys(dropout_keys, len(self.names))
            keys = dict(zip(self.names, branch_keys, strict=True))

        def run(name: str, branch: Branch, y_BTD: Array) -> Array:
            nonlocal routing
            y_BTD = branch(y_BTD, sequences)
            if isinstance(y_BTD, tuple):
                y_BTD, routing = y_BTD
            return y_BTD

        def drop(name: str, y_BTD: Array) -> Array:
            spec = activation_spec(sequence_dim(self.config.sequence_parallel, y_BTD.shape))
            positions = sequences.positions(y_BTD.shape[1])
            return dropout(y_BTD, self.config.dropout, keys.get(name), spec, positions)

        x_BTD = self._run(checkpoint_name(x_BTD, remat.BLOCK_INPUT), run, drop)
        return x_BTD, routing

    def init_cache(self, num_rows: int, num_slots: int) -> BlockCache:
        """See `Branch`."""
        cache = {}
        for name, branch, *_ in self.branches():
            cache[name] = branch.init_cache(num_rows, num_slots)
        return cache

    def decode(self, x_BTD: Array, cache: BlockCache, new: NewTokens) -> tuple[Array, BlockCache]:
        """See `Branch`."""
        cache = dict(cache)

        def run(name: str, branch: Branch, y_BTD: Array) -> Array:
            y_BTD, cache[name] = branch.decode(y_BTD, cache[name], new)
            return y_BTD

        return self._run(x_BTD, run, lambda _, y_BTD: y_BTD), cache

    def branches(self) -> Iterator[tuple[str, Branch, Norm | None, Norm | None]]:
        """Yields (name, branch, norm before, norm after)."""
        for name in self.names:
            before = getattr(self, f"{name}_norm")
            after = getattr(self, f"{name}_after_norm")
            yield name, getattr(self, name), before, after

    def _run(
        self,
        x_BTD: Array,
        run: Callable[[str, Branch, Array], Array],
        drop: Callable[[str, Array], Array],
    ) -> Array:
        """Adds the branches to the residual stream.

        `run` calls a branch; `drop` applies dropout to its output.
        """
        split_dim = sequence_dim(self.config.sequence_parallel, x_BTD.shape)
        activation = activation_spec(split_dim)
        gathered = token_spec(TP)
        enter = device_view(
            partial(enter_parallel, split_dim=split_dim), JOINED, (activation,), gathered
        )
        leave = device_view(
            partial(leave_parallel, split_dim=split_dim), JOINED, (gathered,), activation
        )
        input_BTD = read_BTD = gathered_BTD = x_BTD
        summands: list[Array] = []

        def with_summands(x_BTD: Array) -> Array:
            if not summands:
                return x_BTD
            summand = reduce(operator.add, summands)
            summands.clear()
            return x_BTD + leave(summand)

        for (name, branch, before, after), (entering, leaving) in zip(
            self.branches(), self.scales, strict=True
        ):
            # Parallel branches read the block's input, and may share the first one's norm.
            if not self.parallel and name != STATES:
                x_BTD = with_summands(x_BTD)
                input_BTD = x_BTD
                read_BTD = x_BTD
            with jax.named_scope(name):
                if before is not None:
                    read_BTD = before(input_BTD).astype(self.config.precision.compute)
                if branch.caller_communicates:
                    if not summands:
                        gathered_BTD = enter(read_BTD)
                    y_BTD = run(name, branch, scaled(gathered_BTD, entering))
                    summands.append(scaled(y_BTD, leaving))
                    continue
                y_BTD = run(name, branch, scaled(read_BTD, entering))
                if after is not None:
                    y_BTD = after(y_BTD)
                x_BTD = x_BTD + scaled(drop(name, y_BTD), leaving)
        x_BTD = with_summands(x_BTD)
        if self.layer_scale is None:
            return x_BTD
        return scaled(x_BTD, self.layer_scale[...])


class EmbeddingAndHead(nnx.Module):
    """Both ends of a decoder: ids to residual stream to logits."""

    config: ModelConfig
    embedding: VocabParallelEmbedding
    positions: LearnedPositions | None
    norm: Norm
    head: VocabParallelHead | None

    def embed(
        self, ids_BT: Array, sequences: Sequences = Sequences(), positions_BT: Array | None = None
    ) -> Array:
        """Returns the residual stream; positions count within a document."""
        x_BTD = self.embedding(sequences.local_tokens(ids_BT))
        if self.config.residual_float32:
            x_BTD = x_BTD.astype(jnp.float32)
        if self.config.embedding_norm:
            x_BTD = rms_normalise(x_BTD, self.config.norm_eps)
        if self.positions is None:
            return x_BTD
        if positions_BT is None:
            if ids_BT.shape[1] > self.positions.num_positions:
                raise ConfigError(
                    f"a sequence of {ids_BT.shape[1]} tokens is longer than the "
                    f"{self.positions.num_positions} positions of the model "
                    "(model.learned_positions)"
                )
            positions_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
            if sequences.segments is not None:
                positions_BT = segment_positions(sequences.segments)
            positions_BT = sequences.local_tokens(positions_BT)
        return x_BTD + self.positions(positions_BT)

    def logits_of_hidden(self, x_BTD: Array) -> Array:
        """Returns logits `[B, T, V]`."""
        return vocab_parallel_logits(x_BTD, *self.projection())

    def logits_at(self, x_BTD: Array, at_BR: Array) -> Array:
        """Returns logits `[B * R, V]` at R positions of each sequence.

        Ignore those at -1, no position.
        """
        # A masked sum: indexing along T, which sequence parallelism splits, would gather all of x.
        selected_BRT = at_BR[..., None] == jnp.arange(x_BTD.shape[1])
        x_BRD = jnp.sum(jnp.where(selected_BRT[..., None], x_BTD[:, None], 0), axis=2)
        x_N1D = constrain(x_BRD.reshape(-1, 1, x_BTD.shape[2]), batch_spec(None, None))
        # cp splits a dim of its size: each device computes all of these logits.
        copies_NTD = jnp.repeat(x_N1D, mesh_sizes(current_mesh())[CP], axis=1)
        return self.logits_of_hidden(copies_NTD)[:, 0]

    def projection(self, temperature: float = 1.0) -> Projection:
        """Returns what makes logits of hidden states, divided by a temperature."""
        config = self.config
        table, spec = self.embedding.with_rows(self.embedding.embedding)
        bias = None
        if self.head is not None:
            if self.head.kernel is not None:
                table, spec = self.head.with_rows(self.head.kernel)
            bias = self.head.bias
        head = HeadConfig(
            config.vocab_size,
            config.layer_context,
            scale=config.logit_scale,
            softcap=config.logit_softcap,
            temperature=temperature,
            chunk_size=config.loss_chunk,
            table_spec=spec,
        )
        if bias is None:
            return table, head, None
        head = replace(head, bias_spec=spec_of(bias))
        return table, head, jnp.asarray(bias[...])


class Decoder(EmbeddingAndHead):
    """A causal language model; the same key gives the same weights on every mesh.

    Params of blocks at the same place of a pattern are stacked on an unsplit leading dim: `blocks`
    if all blocks are equal, otherwise `blocks.0`, `blocks.1`, ..., stack by stack.

    Construct it under `jax.set_mesh(jaxtp.make_mesh(...))`. Without a mesh it is on one device, and
    warns if there are several.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        mesh = current_mesh()
        if mesh is None:
            _warn_of_idle_devices(rngs)
        validate_model(config, mesh_sizes(mesh))
        self.config = config
        vocab_size = config.vocab_size
        width = config.d_model
        context = config.layer_context
        self.embedding = VocabParallelEmbedding(
            vocab_size, width, context, scale=config.embedding_scale, lora=config.lora, rngs=rngs
        )
        positions = None
        if config.learned_positions is not None:
            positions = LearnedPositions(config.learned_positions, width, context, rngs=rngs)
        self.positions = positions
        self.stacks = config.stacks()
        kinds = [
            _create_blocks(config, block, len(layers), rngs) for _, layers, block in config.kinds()
        ]
        self.blocks: Any = kinds[0] if len(kinds) == 1 else nnx.List(kinds)
        self.norm = Norm(width, replace(config, norm=config.final_norm or config.norm), context)
        tied = config.tie_embeddings
        head = None
        if not tied or config.head_bias:
            head = VocabParallelHead(
                vocab_size,
                width,
                context,
                tied=tied,
                use_bias=config.head_bias,
                lora=config.lora,
                rngs=rngs,
            )
        self.head = head
        if config.lora.rank:
            freeze(self)
        if config.lora.base != "full":
            for kind, (_, _, block) in zip(kinds, config.kinds(), strict=True):
                kernels = base_kernels(block, config.lora.base)
                store_kernels(kind, kernels, FORMS[config.lora.base])

    def __call__(
        self, ids_BT: Array, /, *, segments: Array | None = None, context: Context = "auto"
    ) -> Array:
        """Returns next-token logits `[B, T, V]`.

        `segments` `[B, T]` mark documents (`layers/positions.py`), `context` is attention's method
        over cp.
        """
        sequences = self.sequences(ids_BT, segments=segments, context=context)
        return self.logits_of_hidden(sequences.natural(self.hidden(ids_BT, sequences=sequences)))

    def sequences(
        self, ids_BT: Array, /, *, segments: Array | None = None, context: Context = "auto"
    ) -> Sequences:
        """Returns the `Sequences` of a batch."""
        if not isinstance(context, str) or context not in get_args(Context):
            raise ConfigError(
                f"context={context!r}: attention over cp takes {', '.join(get_args(Context))}"
            )
        check_divides("sequences over cp", ids_BT.shape, token_spec())
        rows, length = ids_BT.shape
        shape = LocalShape(
            sizes=mesh_sizes(current_mesh()), rows=rows, length=length, context=context
        )
        return Sequences(segments=segments, context=context, zigzag=self.config.zigzag(shape))

    def loss(
        self,
        ids_BT: Array,
        labels_BT: Array,
        /,
        *,
        segments: Array | None = None,
        z_loss: float = 0.0,
        dropout_keys: Array | None = None,
        context: Context = "auto",
    ) -> tuple[Array, Array]:
        """Returns the summed cross-entropy in nats and the number of labels that are not -100.

        Both are float32 scalars. `labels_BT[b, t]` is the token after `ids_BT[b, t]`, or -100.
        `z_loss` is the weight of the squared log-normaliser; `dropout_keys` `[B]` turn dropout on;
        for the others see `__call__`.
        """
        sequences = self.sequences(ids_BT, segments=segments, context=context)
        x_BTD, _ = self.with_routing(ids_BT, dropout_keys, sequences)
        return self.loss_of_hidden(x_BTD, sequences.local_tokens(labels_BT), z_loss=z_loss)

    def balance_of(self, routings: Routings, labels_BT: Array) -> Balance | None:
        """Returns the statistics of all routers; None without experts."""
        with_experts = [routing for routing in routings if routing is not None]
        if not with_experts:
            return None
        blocks = [block for _, _, block in self.config.kinds()]
        per_token = [block.experts_per_token for block in blocks if block.num_experts]
        return balance(with_experts, labels_BT, per_token)

    def move_selection_biases(self, balance: Balance, rate: float) -> None:
        """Moves selection biases against the load, once per update."""
        routers = []
        for _, blocks in self.stacked():
            for block in blocks:
                branch = vars(block).get("mlp")
                if isinstance(branch, ExpertsBesideMLP):
                    branch = branch.experts
                if isinstance(branch, MixtureOfExperts):
                    routers.append(branch)
        for router, times_chosen in zip(routers, balance.times_chosen, strict=True):
            if router.config.selection_bias:
                bias = router.selection_bias
                bias[...] = updated_selection_bias(bias[...], times_chosen, rate)

    def loss_of_hidden(
        self, x_BTD: Array, labels_BT: Array, *, z_loss: float = 0.0
    ) -> tuple[Array, Array]:
        """Returns `loss` for final hidden states and labels, in the same order."""
        table_VD, head, bias_V = self.projection()
        return vocab_parallel_cross_entropy(x_BTD, table_VD, labels_BT, head, bias_V, z_loss=z_loss)

    def hidden(
        self, ids_BT: Array, dropout_keys: Array | None = None, sequences: Sequences | None = None
    ) -> Array:
        """Returns the final, normalised hidden states `[B, T, D]`.

        Tokens are in the order of `Sequences.positions`, which over cp may differ from the batch's.
        `sequences.local_tokens(labels)` puts the labels of a loss in the same order, and
        `sequences.natural(...)` restores the batch's.
        """
        return self.with_routing(ids_BT, dropout_keys, sequences or self.sequences(ids_BT))[0]

    def with_routing(
        self,
        ids_BT: Array,
        dropout_keys: Array | None,
        sequences: Sequences,
        experts: Sequence[Array | None] | None = None,
    ) -> tuple[Array, Routings]:
        """Returns the hidden states and the router statistics.

        `experts` replaces the routers' choices: `[B, layers, T, k]` per kind of block.
        """
        keys = None
        if dropout_keys is not None:
            keys = split_keys(dropout_keys, self.config.num_layers)
        x_BTD = self.embed(ids_BT, sequences)
        first = 0
        routings: Routings = []
        choices = repeat(None) if experts is None else iter(experts)
        for stack, blocks in self.stacked():
            last = first + stack.repeats * len(blocks)
            stack_keys = None if keys is None else keys[first:last]
            chosen = list(islice(choices, len(blocks)))
            # `[B, layers, T, k] -> [layers, B, T, k]`
            by_layer = jax.tree.map(lambda choice: jnp.swapaxes(choice, 0, 1), chosen)
            x_BTD, stack_routings = _run_stack(
                stack, blocks, x_BTD, stack_keys, sequences, by_layer
            )
            routings += stack_routings
            first = last
        return self.norm(x_BTD), routings

    def stacked(self) -> Iterator[tuple[Stack, list[DecoderBlock]]]:
        """Yields each stack with its stacked blocks."""
        kinds = iter([self.blocks] if isinstance(self.blocks, DecoderBlock) else self.blocks)
        for stack in self.stacks:
            yield stack, list(islice(kinds, len(stack.pattern)))

    def in_order(self) -> Iterator[DecoderBlock]:
        """Yields every block, in order."""
        for stack, blocks in self.stacked():
            for turn in range(stack.repeats):
                for block in blocks:
                    yield layer(block, turn)


def _warn_of_idle_devices(rngs: nnx.Rngs) -> None:
    # A traced model, which may be abstract, has its devices elsewhere.
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(rngs)))
    if not is_traced and jax.device_count() > 1:
        warnings.warn(
            f"the Decoder is on one of {jax.device_count()} devices, because no mesh is in "
            "context: make it under jax.set_mesh(jaxtp.make_mesh(fsdp=-1)), or under "
            "jax.set_mesh(jaxtp.make_mesh()) for one device",
            stacklevel=1,
        )


def create_decoder(config: ModelConfig, *, rngs: nnx.Rngs) -> Decoder:
    """Returns the decoder that the settings describe."""
    return (config.decoder or Decoder)(config, rngs=rngs)


def abstract_decoder(config: ModelConfig) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    """Returns a decoder's graph definition and abstract state, without computing anything.

    Call it under the decoder's mesh, or without a mesh.
    """
    return nnx.split(nnx.eval_shape(lambda: create_decoder(config, rngs=nnx.Rngs(0))))


def layer(blocks: DecoderBlock, index: int) -> DecoderBlock:
    """Returns block `index` of stacked blocks."""
    graph, state = nnx.split(blocks)
    return nnx.merge(graph, jax.tree.map(operator.itemgetter(index), state))


def _run_stack(
    stack: Stack,
    blocks: list[DecoderBlock],
    x_BTD: Array,
    keys: Array | None,
    sequences: Sequences,
    experts: list[Array | None],
) -> tuple[Array, Routings]:
    """Runs a stack by one scan over turns.

    `keys` are per layer, `experts` per place of the pattern.
    """
    config = blocks[0].config

    @nnx.remat(policy=remat.policy(config.remat), prevent_cse=not config.scan_layers)
    def run(
        x_BTD: Array, block: DecoderBlock, keys: Array | None, sequences: Sequences
    ) -> tuple[Array, Routing | None]:
        return block.with_routing(x_BTD, keys, sequences)

    unroll = 1 if config.scan_layers else stack.repeats

    @nnx.scan(in_axes=(nnx.Carry, 0, 0, None, 0), out_axes=(nnx.Carry, 0), unroll=unroll)
    def turn(
        x_BTD: Array,
        blocks: list[DecoderBlock],
        keys: Array | None,
        sequences: Sequences,
        experts: list[Array | None],
    ) -> tuple[Array, Routings]:
        routings: Routings = []
        for i, block in enumerate(blocks):
            with_experts = replace(sequences, experts=experts[i])
            x_BTD, routing = run(x_BTD, block, None if keys is None else keys[i], with_experts)
            routings.append(routing)
        return x_BTD, routings

    if keys is not None:
        keys = keys.reshape(stack.repeats, len(blocks), *keys.shape[1:])
    return turn(x_BTD, blocks, keys, sequences, experts)


def _create_blocks(
    config: ModelConfig, block: BlockConfig, repeats: int, rngs: nnx.Rngs
) -> DecoderBlock:
    @nnx.split_rngs(splits=repeats)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def create(rngs: nnx.Rngs) -> DecoderBlock:
        return DecoderBlock(config, block, rngs=rngs)

    return create(rngs)


def split_keys(keys_B: Array, count: int) -> Array:
    """Splits each key for `count` uses: `[B] -> [count, B]`."""
    return jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(keys_B)
