"""Reading with a cache: a decoder's layers one by one, each with a memory of the tokens before.

Training runs equal layers by a scan over their stacked weights. To read a token every weight is multiplied once, and a
slice of a stack, a cast or a gather over fsdp would take as long as the product. `laid_out` gives each layer arrays of
its own, in the compute dtype, whole on every device but for tp: a program of these reads every weight once and as it
is. Devices along fsdp then divide the rows, as those along dp do. The layers are those of training; only their arrays
differ.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.collectives import axis_size, batch_spec, constrain
from jaxtp.config import ConfigError
from jaxtp.layers.cache import Memories, NewTokens
from jaxtp.layers.parameter import spec_of
from jaxtp.mesh import AXES, CP, DP, FSDP, axes_of, mesh_sizes, parts
from jaxtp.models.decoder import Decoder, DecoderBlock, Ends


class Reader(Ends):
    """A decoder that reads tokens after those of a memory.

    Args:
      model: its ends.
      blocks: its blocks, first to last; by default slices of the model's stacks.
    """

    def __init__(self, model: Ends, blocks: Iterable[DecoderBlock] | None = None):
        self.config = model.config
        self.embedding, self.positions, self.norm, self.head = model.embedding, model.positions, model.norm, model.head
        if blocks is None:
            assert isinstance(model, Decoder)
            blocks = model.in_order()
        self.blocks = nnx.List(blocks)

    def empty(self, num_rows: int, num_slots: int) -> Memories:
        """Returns the memory of rows of up to `num_slots` tokens, of which there are none; call it under `jax.jit`."""
        return tuple(block.memory(num_rows, num_slots) for block in self.blocks)

    def __call__(self, ids_BT: Array, memories: Memories, new: NewTokens) -> tuple[Array, Memories]:
        """Reads tokens.

        Args:
          ids_BT: the tokens; padding may be any ids below V.
          memories: the tokens before.
          new: the places of the tokens.

        Returns:
          Their final hidden states `[B, T, D]`, of which those of padding mean nothing, and the memory with the tokens.
        """
        if (cp := axis_size(CP)) > 1:
            raise ConfigError(f"a cache is not divided over cp, and the mesh has cp={cp}; use cp=1 and more tp")
        x_BTD, after = self.embed(ids_BT, positions_BT=new.positions), []
        for block, memory in zip(self.blocks, memories, strict=True):
            x_BTD, memory = block.extend(x_BTD, memory, new)
            after.append(memory)
        return self.norm(x_BTD), tuple(after)

    def continue_rows(self, ids_BT: Array, memories: Memories, lengths_B: Array) -> tuple[Array, Memories]:
        """Reads the next tokens of each row, which has `lengths_B` tokens; see `__call__`."""
        positions_BT = constrain(lengths_B[:, None] + jnp.arange(ids_BT.shape[1]), batch_spec(None))
        return self(ids_BT, memories, NewTokens(positions_BT))


def reading_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes of a mesh with the devices of fsdp along dp: each has whole weights, but for tp."""
    return {**sizes, DP: sizes[DP] * sizes[FSDP], FSDP: 1}


def reading_mesh(mesh: Mesh) -> Mesh:
    """Returns the mesh of `reading_sizes`, of the same devices in the same order."""
    sizes = reading_sizes(mesh_sizes(mesh))
    return Mesh(mesh.devices.reshape(*(sizes[axis] for axis in AXES)), AXES, axis_types=mesh.axis_types)


def reading_bytes(model: Decoder, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of weights on each device of a mesh of some sizes, laid out for reading."""
    split = {**reading_sizes(sizes), CP: 1}
    itemsize = jnp.dtype(model.config.precision.compute).itemsize
    weights = (variable for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)))
    shards = (
        math.prod(variable.shape) // math.prod(parts(split, axes_of(axes)) for axes in spec_of(variable))
        for variable in weights
    )
    return itemsize * sum(shards)


def laid_out(model: Decoder, mesh: Mesh | None, *, donate: bool = False) -> Reader:
    """Returns a model laid out for reading.

    Args:
      model: the model, on another mesh of the same devices.
      mesh: the `reading_mesh` of it; None for a model without a mesh.
      donate: deletes the model's arrays one by one, so that there is memory for them once.
    """

    def placed(variable: nnx.Variable[Any], count: int | None = None) -> list[nnx.Variable[Any]]:
        """Returns a variable, or those of `count` layers of which it is the stack."""
        array: Array = variable[...]
        # A stack's layers are not split: their specs are those of the dims that are left.
        spec = PartitionSpec(*tuple(spec_of(variable))[0 if count is None else 1 :])
        sharding = None if mesh is None else NamedSharding(mesh, spec)
        is_weight = isinstance(variable, nnx.Param)
        dtype = jnp.dtype(model.config.precision.compute) if is_weight else array.dtype
        given = _layers(count, dtype, sharding)(array)
        if donate:
            array.delete()
        return [variable.replace(one, out_sharding=spec) for one in given]

    def in_layers(blocks: DecoderBlock, count: int) -> list[DecoderBlock]:
        graph, state = nnx.split(blocks)
        paths, variables = zip(*nnx.to_flat_state(state), strict=True)
        by_layer = zip(*(placed(variable, count) for variable in variables), strict=True)
        return [nnx.merge(graph, nnx.from_flat_state(list(zip(paths, layer, strict=True)))) for layer in by_layer]

    blocks: list[DecoderBlock] = []
    for stack, kinds in model.stacked():
        turns = zip(*(in_layers(kind, stack.repeats) for kind in kinds), strict=True)
        blocks += [block for turn in turns for block in turn]
    reader = Reader(model, ())
    graph, state = nnx.split(reader)
    ends = [(path, placed(variable)[0]) for path, variable in nnx.to_flat_state(state)]
    return Reader(nnx.merge(graph, nnx.from_flat_state(ends)), blocks)


@cache
def _layers(count: int | None, dtype: Any, sharding: NamedSharding | None) -> Callable[[Array], list[Array]]:
    """Returns the program that gives the layers of a stack, or an array as it is, in a dtype and split by a sharding.

    It is made once: arrays of one shape, and the models that are laid out later, have it without another trace.
    """

    def layers(array: Array) -> list[Array]:
        return [array[index].astype(dtype) for index in range(count)] if count else [array.astype(dtype)]

    return jax.jit(layers, out_shardings=sharding)
