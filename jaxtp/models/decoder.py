"""The decoder: embedding, stacks of blocks under scans, final norm, head."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxtp.collectives import batch_spec, check_divides, constrain, token_spec
from jaxtp.config import ConfigError
from jaxtp.layers import remat
from jaxtp.layers.activations import Context, activation_spec, dropout, segment_positions, sequence_dim
from jaxtp.layers.balance import Balance, Routing, balance, balance_costs, moved_bias, no_balance
from jaxtp.layers.branch import Branch, Memory
from jaxtp.layers.cache import NewTokens
from jaxtp.layers.context import Sequences
from jaxtp.layers.costs import GATHERS_AGAIN, Cost, Kept, Share, Streamed, itemsize, within
from jaxtp.layers.embedding import LearnedPositions, VocabParallelEmbedding, VocabParallelHead, vocab_parallel_logits
from jaxtp.layers.experts import MixtureOfExperts
from jaxtp.layers.loss import loss_costs, vocab_parallel_cross_entropy, vocab_parallel_token_losses
from jaxtp.layers.norm import Norm
from jaxtp.layers.parameter import spec_of
from jaxtp.mesh import current_mesh, mesh_sizes
from jaxtp.models.config import BlockConfig, ModelConfig, Stack, checked

BlockMemory = Mapping[str, Memory]
"""The memory of a block, by branch."""

Routings = list[Routing | None]
"""Measures of the router of each kind of block, stacked over its layers; None of a block without experts."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossTerms:
    """The terms of a training loss, of a batch or a part of one: sums, which add up."""

    loss: Array
    """Cross-entropy in nats, with the z-loss of the logits."""

    count: Array
    """Number of labels that count."""

    balance: Balance | None
    """The balance of experts; None of a model that has none."""

    def objective(self, balance_loss: float, router_z_loss: float) -> Array:
        """Returns the sum that training lowers, with the weights of what experts add to it."""
        if self.balance is None:
            return self.loss
        return self.loss + balance_loss * self.balance.balance_loss + router_z_loss * self.balance.router_z_loss


class DecoderBlock(nnx.Module):
    """Residual branches, attention and an MLP: `x + branch(norm(x))` for each, in order.

    The norm stands before the branch, after it (`x + norm(branch(x))`), or both. Shapes: `[B, T, D] -> [B, T, D]`. A
    branch is the attribute of its name; its norms are `attention_norm` and, after it, `attention_after_norm`.
    """

    def __init__(self, config: ModelConfig, block: BlockConfig | None = None, *, rngs: nnx.Rngs):
        self.config, block = config, block or config.block()
        branches = config.branches(block, rngs)
        self.names = tuple(branches)
        if silent := [type(branch).__name__ for branch in branches.values() if type(branch).costs is Branch.costs]:
            raise TypeError(f"{', '.join(silent)}: a branch declares what it costs; write costs (layers/costs.py)")
        norm = partial(
            Norm, config.d_model, block, sequence_parallel=config.sequence_parallel, precision=config.precision
        )
        for name, branch in branches.items():
            setattr(self, f"{name}_norm", None if block.norm_placement == "after" else norm())
            setattr(self, name, branch)
            setattr(self, f"{name}_after_norm", None if block.norm_placement == "before" else norm())

    def __call__(self, x_BTD: Array, dropout_keys: Array | None = None, sequences: Sequences = Sequences()) -> Array:
        """Runs the block on `[B, T, D]`; keys, one for each row, turn dropout on."""
        return self.routed(x_BTD, dropout_keys, sequences)[0]

    def routed(
        self, x_BTD: Array, dropout_keys: Array | None = None, sequences: Sequences = Sequences()
    ) -> tuple[Array, Routing | None]:
        """Returns what the block gives, and what its router measured, if it has one."""
        count, routing = len(self.names), None
        keys = (None,) * count if dropout_keys is None else split_keys(dropout_keys, count)
        x_BTD = checkpoint_name(x_BTD, remat.BLOCK_INPUT)
        for i, (name, branch, before, after) in enumerate(self._branches()):
            with jax.named_scope(name):
                y_BTD = branch(x_BTD if before is None else before(x_BTD), sequences)
                if isinstance(y_BTD, tuple):
                    y_BTD, routing = y_BTD
                x_BTD = x_BTD + self._dropout(y_BTD if after is None else after(y_BTD), keys[i], sequences)
        return x_BTD, routing

    def memory(self, num_rows: int, num_slots: int) -> BlockMemory:
        """Returns the empty memory of each branch; see `Branch.memory`."""
        return {name: branch.memory(num_rows, num_slots) for name, branch, *_ in self._branches()}

    def extend(self, x_BTD: Array, memory: BlockMemory, new: NewTokens) -> tuple[Array, BlockMemory]:
        """Runs the block on tokens that come after those of a memory; see `Branch.extend`."""
        memory = dict(memory)
        for name, branch, before, after in self._branches():
            with jax.named_scope(name):
                y_BTD = x_BTD if before is None else before(x_BTD)
                y_BTD, memory[name] = branch.extend(y_BTD, memory[name], new)
                x_BTD = x_BTD + (y_BTD if after is None else after(y_BTD))
        return x_BTD, memory

    def costs(self, share: Share) -> Iterator[Cost]:
        """Yields what the block costs: its branches and norms, a sum for each, and what it keeps of its input."""
        residual = share.between(self.config.sequence_parallel) * self.config.d_model
        size, last = residual * itemsize(self.config.precision.compute), self.names[-1]
        yield Kept(size * {"none": len(self.names), "offload": 0}.get(share.remat, 1))
        for name, branch, before, after in self._branches():
            if before is not None:
                yield from within(name, before.costs(share, again=share.remat in GATHERS_AGAIN))
            if after is not None:  # the sum that it is added to is read by the next norm
                yield from within(name, after.costs(share, again=name != last and share.remat != "none"))
            yield from within(name, branch.costs(share, read=name != last or after is not None))
            yield Streamed(3 * size)

    def _branches(self) -> Iterator[tuple[str, Branch, Norm | None, Norm | None]]:
        for name in self.names:
            yield name, getattr(self, name), getattr(self, f"{name}_norm"), getattr(self, f"{name}_after_norm")

    def _dropout(self, y_BTD: Array, keys: Array | None, sequences: Sequences) -> Array:
        spec = activation_spec(sequence_dim(self.config.sequence_parallel, y_BTD.shape))
        return dropout(y_BTD, self.config.dropout, keys, spec, sequences.positions(y_BTD.shape[1]))


class Ends(nnx.Module):
    """Both ends of a decoder: from ids to the residual stream, and from there to logits."""

    config: ModelConfig
    embedding: VocabParallelEmbedding
    positions: LearnedPositions | None
    norm: Norm
    head: VocabParallelHead | None

    def embed(self, ids_BT: Array, sequences: Sequences = Sequences(), positions_BT: Array | None = None) -> Array:
        """Returns the residual stream `[B, T, D]` before the first block; positions count within a document."""
        x_BTD = self.embedding(sequences.own(ids_BT))
        if self.positions is None:
            return x_BTD
        if positions_BT is None:
            if ids_BT.shape[1] > self.positions.num_positions:
                raise ConfigError(
                    f"a sequence of {ids_BT.shape[1]} tokens is longer than the "
                    f"{self.positions.num_positions} positions of the model (model.learned_positions)"
                )
            from_start = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
            segments_BT = sequences.segments
            positions_BT = sequences.own(from_start if segments_BT is None else segment_positions(segments_BT))
        return x_BTD + self.positions(positions_BT)

    def logits_of_hidden(self, x_BTD: Array) -> Array:
        """Returns logits `[B, T, V]` from final hidden states `[B, T, D]`, of any positions."""
        return vocab_parallel_logits(
            x_BTD,
            jnp.asarray(self._head_table[...]),
            self.config.vocab_size,
            softcap=self.config.logit_softcap,
            **self._shared,
        )

    def logits_at(self, x_BTD: Array, at_BR: Array) -> Array:
        """Returns logits `[B * R, V]` from the final hidden states at R places of each sequence; -1 is no place."""
        # A sum: a look-up along T, which sequence parallelism splits, would gather the whole of x.
        is_there = at_BR[..., None] == jnp.arange(x_BTD.shape[1])
        found_BRD = jnp.sum(jnp.where(is_there[..., None], x_BTD[:, None], 0), axis=2)
        rows_1D = constrain(found_BRD.reshape(-1, 1, x_BTD.shape[2]), batch_spec(None, None))
        return self.logits_of_hidden(rows_1D)[:, 0]

    @property
    def _shared(self) -> dict[str, Any]:
        return {"sequence_parallel": self.config.sequence_parallel, "precision": self.config.precision}

    @property
    def _head_table(self) -> nnx.Param[Array]:
        return self.embedding.embedding if self.head is None else self.head.kernel


class Decoder(Ends):
    """A causal language model.

    Args:
      config: its sizes.
      rngs: source of the `params` key; the same key gives the same weights on every mesh.

    The parameters of blocks are stacked by their place in a pattern: each has a leading dim, which is not split. Where
    all blocks are of one kind they are `blocks`, else `blocks.0`, `blocks.1`, ..., stack by stack.

    Raises:
      ConfigError: a value of the configuration cannot be, or does not fit the others and the mesh.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config = checked(config, mesh_sizes(current_mesh()))
        self.embedding = VocabParallelEmbedding(
            config.vocab_size,
            config.d_model,
            scale=config.embedding_scale,
            **self._shared,
            rngs=rngs,
        )
        self.positions = (
            None
            if config.learned_positions is None
            else LearnedPositions(config.learned_positions, config.d_model, **self._shared, rngs=rngs)
        )
        self.stacks = config.stacks()
        kinds = [_stacked(config, block, stack.repeats, rngs) for stack in self.stacks for block in stack.pattern]
        self.blocks: Any = kinds[0] if len(kinds) == 1 else nnx.List(kinds)
        self.norm = Norm(config.d_model, config, **self._shared)
        self.head = (
            None
            if config.tie_embeddings
            else VocabParallelHead(config.vocab_size, config.d_model, precision=config.precision, rngs=rngs)
        )

    @property
    def _of_loss(self) -> dict[str, Any]:
        return self._shared | {
            "vocab_size": self.config.vocab_size,
            "table_spec": spec_of(self._head_table),
            "chunk_size": self.config.loss_chunk,
            "softcap": self.config.logit_softcap,
        }

    def __call__(self, ids_BT: Array, segments_BT: Array | None = None, *, context: Context = "auto") -> Array:
        """Returns logits `[B, T, V]` of the token after each position; `ids_BT` are integers below V.

        `segments_BT` tell apart the documents of a row (`layers/activations.py`): none sees another. `context` is the
        method of attention over cp (`layers/context.py`).
        """
        sequences = self.sequences(ids_BT, segments_BT, context)
        return self.logits_of_hidden(sequences.natural(self.hidden(ids_BT, sequences=sequences)))

    def sequences(self, ids_BT: Array, segments_BT: Array | None = None, context: Context = "auto") -> Sequences:
        """Returns what the layers have to know of the rows of a batch.

        Raises:
          ConfigError: there is no such method.
          ValueError: cp does not divide T.
        """
        if not isinstance(context, str) or context not in get_args(Context):
            raise ConfigError(f"context={context!r}: attention over cp is by {', '.join(get_args(Context))}")
        check_divides("sequences over cp", ids_BT.shape, token_spec())
        rows, length = ids_BT.shape
        share = Share(sizes=mesh_sizes(current_mesh()), rows=rows, length=length, context=context)
        return Sequences(segments=segments_BT, context=context, zigzag=self.config.zigzag(share))

    def loss(
        self,
        ids_BT: Array,
        labels_BT: Array,
        *,
        segments_BT: Array | None = None,
        z_loss: float = 0.0,
        dropout_keys: Array | None = None,
        context: Context = "auto",
    ) -> tuple[Array, Array]:
        """Returns the summed cross-entropy in nats and the number of labels that count (not -100), as float32 scalars.

        The logits are never whole: see `layers.loss`.

        Args:
          ids_BT: `[B, T]` integers below V.
          labels_BT: `labels_BT[b, t]` is the token that follows `ids_BT[b, t]`, or -100.
          segments_BT: tell apart the documents of a row.
          z_loss: weight of the squared log-normaliser.
          dropout_keys: one for each row, `[B]`, turn dropout on, for training.
          context: method of attention over cp (`layers/context.py`).
        """
        shared: dict[str, Any] = {"z_loss": z_loss, "dropout_keys": dropout_keys}
        terms = self.loss_terms(ids_BT, labels_BT, self.sequences(ids_BT, segments_BT, context), **shared)[0]
        return terms.loss, terms.count

    def loss_terms(
        self,
        ids_BT: Array,
        labels_BT: Array,
        sequences: Sequences,
        *,
        z_loss: float = 0.0,
        dropout_keys: Array | None = None,
        experts: Sequence[Array | None] | None = None,
    ) -> tuple[LossTerms, Routings]:
        """Returns the terms of the loss, and what routers measured; arguments as of `loss`, and

        Args:
          ids_BT: ids.
          labels_BT: labels.
          sequences: facts about the rows.
          z_loss: weight.
          dropout_keys: for each row.
          experts: for each kind of block the experts of each token, `[B, layers, T, k]`, in place of a choice.
        """
        x_BTD, routings = self.routed(ids_BT, dropout_keys, sequences, experts)
        loss, count = self.loss_of_hidden(x_BTD, sequences.own(labels_BT), z_loss=z_loss)
        with_experts = [routing for routing in routings if routing is not None]
        if not with_experts:
            return LossTerms(loss, count, None), routings
        per_token = [block.experts_per_token for _, _, block in self.config.kinds() if block.num_experts]
        return LossTerms(loss, count, balance(with_experts, labels_BT, per_token)), routings

    def no_terms(self) -> LossTerms:
        """Returns the terms of no tokens."""
        zero = jnp.zeros((), jnp.float32)
        kinds = [(len(layers), block.num_experts) for _, layers, block in self.config.kinds() if block.num_experts]
        return LossTerms(zero, zero, no_balance(kinds) if kinds else None)

    def move_selection_biases(self, balance: Balance, rate: float) -> None:
        """Moves each expert's bias against its load, once per update, where a router has one; see `moved_bias`."""
        branches = (vars(block).get("mlp") for _, blocks in self.stacked() for block in blocks)
        routers = [branch for branch in branches if isinstance(branch, MixtureOfExperts)]
        for router, times_chosen in zip(routers, balance.times_chosen, strict=True):
            if router.config.selection_bias:
                bias = router.selection_bias
                bias[...] = moved_bias(bias[...], times_chosen, rate)

    def loss_of_hidden(self, x_BTD: Array, labels_BT: Array, *, z_loss: float = 0.0) -> tuple[Array, Array]:
        """Returns what `loss` does, from the final hidden states `[B, T, D]` and labels in the same order."""
        return vocab_parallel_cross_entropy(
            x_BTD,
            jnp.asarray(self._head_table[...]),
            labels_BT,
            z_loss=z_loss,
            **self._of_loss,
        )

    def token_losses(
        self, ids_BT: Array, labels_BT: Array, *, segments_BT: Array | None = None, context: Context = "auto"
    ) -> tuple[Array, Array]:
        """Returns the cross-entropy of each label in nats, and whether no other token is likelier; both `[B, T]`.

        They are 0 and False where a label is -100. For evaluations: made for no gradient; arguments as of `loss`.
        """
        sequences = self.sequences(ids_BT, segments_BT, context)
        found = self.token_losses_of_hidden(self.hidden(ids_BT, sequences=sequences), sequences.own(labels_BT))
        losses_BT, likeliest_BT = (sequences.natural(each) for each in found)
        return losses_BT, likeliest_BT

    def token_losses_of_hidden(self, x_BTD: Array, labels_BT: Array) -> tuple[Array, Array]:
        """Returns what `token_losses` does, from the final hidden states and labels, and in the order of these."""
        return vocab_parallel_token_losses(x_BTD, jnp.asarray(self._head_table[...]), labels_BT, **self._of_loss)

    def hidden(self, ids_BT: Array, dropout_keys: Array | None = None, sequences: Sequences | None = None) -> Array:
        """Returns the final, normalised hidden states `[B, T, D]`, in the order in which devices hold tokens."""
        return self.routed(ids_BT, dropout_keys, sequences or self.sequences(ids_BT))[0]

    def routed(
        self,
        ids_BT: Array,
        dropout_keys: Array | None,
        sequences: Sequences,
        experts: Sequence[Array | None] | None = None,
    ) -> tuple[Array, Routings]:
        """Returns the hidden states, and what routers measured on the way; see `loss_terms`."""
        config = self.config
        keys = None if dropout_keys is None else split_keys(dropout_keys, config.num_layers)
        x_BTD, done = self.embed(ids_BT, sequences), 0
        routings: Routings = []
        for stack, blocks in self.stacked():
            count = stack.repeats * len(blocks)
            own = None if keys is None else keys[done : done + count]
            given = [None] * len(blocks) if experts is None else experts[len(routings) : len(routings) + len(blocks)]
            by_layer = [None if each is None else jnp.swapaxes(each, 0, 1) for each in given]
            x_BTD, found = _run(config, stack, blocks, x_BTD, own, sequences, by_layer)
            routings += found
            done += count
        return self.norm(x_BTD), routings

    def stacked(self) -> Iterator[tuple[Stack, list[DecoderBlock]]]:
        """Yields each stack, and its blocks: those at one place of its pattern are stacked."""
        kinds = iter([self.blocks] if isinstance(self.blocks, DecoderBlock) else self.blocks)
        for stack in self.stacks:
            yield stack, [next(kinds) for _ in stack.pattern]

    def in_order(self) -> Iterator[DecoderBlock]:
        """Yields every block by itself, first to last."""
        for stack, blocks in self.stacked():
            for turn in range(stack.repeats):
                yield from (layer(block, turn) for block in blocks)

    def costs(self, share: Share) -> Iterator[Cost]:
        """Yields what is outside of the blocks: embedding, final norm, head and loss."""
        config = self.config
        yield from self.embedding.costs(share)
        yield from () if self.positions is None else self.positions.costs(share)
        yield from self.norm.costs(share, inside=False)
        sizes = config.vocab_size, config.d_model, config.loss_chunk
        tied = config.tie_embeddings
        yield from loss_costs(share, *sizes, config.precision, config.sequence_parallel, tied=tied)
        yield from balance_costs(share, [block.num_experts for block in config.layers() if block.num_experts])


def abstract_decoder(config: ModelConfig) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    """Returns how to build a decoder from its arrays, and their shapes, dtypes and splits; nothing is computed.

    Call it where the decoder is to be: under its mesh, or without one.
    """
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    return graph, abstract


def layer(blocks: DecoderBlock, index: int) -> DecoderBlock:
    """Returns one block of stacked ones."""
    graph, state = nnx.split(blocks)
    block: DecoderBlock = nnx.merge(graph, jax.tree.map(lambda stacked: stacked[index], state))
    return block


def _run(
    config: ModelConfig,
    stack: Stack,
    blocks: list[DecoderBlock],
    x_BTD: Array,
    keys: Array | None,
    sequences: Sequences,
    experts: list[Array | None],
) -> tuple[Array, Routings]:
    """Runs a stack by one scan over its turns, or written out; each block keeps what the policy of remat says."""

    @nnx.remat(policy=remat.policy(config.remat), prevent_cse=not config.scan_layers)
    def run(
        x_BTD: Array, block: DecoderBlock, keys: Array | None, sequences: Sequences
    ) -> tuple[Array, Routing | None]:
        return block.routed(x_BTD, keys, sequences)

    if not config.scan_layers:
        found: list[list[Any]] = [[] for _ in blocks]
        for index in range(stack.repeats * len(blocks)):
            number, place = divmod(index, len(blocks))
            given = replace(sequences, experts=None if (each := experts[place]) is None else each[number])
            x_BTD, routing = run(x_BTD, layer(blocks[place], number), None if keys is None else keys[index], given)
            found[place].append(routing)
        return x_BTD, [None if each[0] is None else jax.tree.map(lambda *a: jnp.stack(a), *each) for each in found]

    @nnx.scan(in_axes=(nnx.Carry, 0, 0, None, 0), out_axes=(nnx.Carry, 0))
    def turn(
        x_BTD: Array,
        blocks: list[DecoderBlock],
        keys: Array | None,
        sequences: Sequences,
        experts: list[Array | None],
    ) -> tuple[Array, Routings]:
        routings: Routings = []
        for i, block in enumerate(blocks):
            given = replace(sequences, experts=experts[i])
            x_BTD, routing = run(x_BTD, block, None if keys is None else keys[i], given)
            routings.append(routing)
        return x_BTD, routings

    by_turn = None if keys is None else keys.reshape(stack.repeats, len(blocks), *keys.shape[1:])
    result: tuple[Array, Routings] = turn(x_BTD, blocks, by_turn, sequences, experts)
    return result


def _stacked(config: ModelConfig, block: BlockConfig, repeats: int, rngs: nnx.Rngs) -> DecoderBlock:
    """Returns blocks of one kind whose parameters have a leading dim."""

    @nnx.split_rngs(splits=repeats)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def create(rngs: nnx.Rngs) -> DecoderBlock:
        return DecoderBlock(config, block, rngs=rngs)

    stacked: DecoderBlock = create(rngs)
    return stacked


def split_keys(keys_B: Array, count: int) -> Array:
    """Returns other keys for each of so many uses: `[B] -> [count, B]`."""
    return jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(keys_B)
