"""The model for decoding: a few tokens at a time, with a KV cache.

Training scans over stacked weights of equal layers. Decoding reads every weight once per token, so
slicing a stack, casting, or gathering over fsdp would take as long as the matrix product.
`to_decode_model` therefore gives each layer separate arrays, in the compute dtype, split over tp
only, each shared head whole; fsdp and cp split the batch, like dp. The kernels of a column layer
are joined, so that one product reads them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, ShapeDtypeStruct
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtp.checkpoint.logical import (
    Variable,
    logical_spec,
    named_variables,
    pad_array,
    replace_arrays,
    to_logical,
)
from jaxtp.collectives import device_view
from jaxtp.hf.adapters import merged_variables
from jaxtp.hf.tensor_map import split_path
from jaxtp.layers.cache import LAYER_SPEC, KVCaches, NewTokens
from jaxtp.layers.linear import ColumnParallelLinear
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.parameter import PARAMETERS, DType, is_variable, padding_of, spec_of
from jaxtp.mesh import (
    AXES,
    CP,
    FSDP,
    TP,
    Sizes,
    axes_of,
    batch_parts,
    make_mesh,
    mesh_shape,
    mesh_sizes,
    parts,
)
from jaxtp.models.config import BLOCKS, ModelConfig
from jaxtp.models.decoder import Decoder, DecoderBlock, EmbeddingAndHead, create_decoder


class DecodeModel(EmbeddingAndHead):
    """A decoder with one module per layer that continues from a KV cache."""

    def __init__(self, model: EmbeddingAndHead, blocks: Iterable[DecoderBlock]):
        self.config = model.config
        self.embedding = model.embedding
        self.positions = model.positions
        self.norm = model.norm
        self.head = model.head
        self.blocks = nnx.List(blocks)

    def empty(self, num_rows: int, num_slots: int) -> KVCaches:
        """Returns an empty KV cache of rows of up to `num_slots` tokens; call it in `jax.jit`."""
        return tuple(block.init_cache(num_rows, num_slots) for block in self.blocks)

    def __call__(self, ids_BT: Array, caches: KVCaches, new: NewTokens) -> tuple[Array, KVCaches]:
        """Returns the final hidden states `[B, T, D]` and the updated KV cache.

        The hidden states of padding are undefined.

        Args:
          ids_BT: the tokens; padding may be any ids below V.
          new: row and position of each token.
        """
        x_BTD = self.embed(ids_BT, positions_BT=new.positions)
        updated = []
        for block, block_cache in zip(self.blocks, caches, strict=True):
            x_BTD, block_cache = block.decode(x_BTD, block_cache, new)
            updated.append(block_cache)
        return self.norm(x_BTD), tuple(updated)


def decode_mesh(mesh: Mesh) -> Mesh:
    """Returns the mesh with fsdp and cp moved to dp, in the same device order."""
    sizes = mesh_shape(dp=mesh.size // mesh.shape[TP], tp=mesh.shape[TP])
    return Mesh(mesh.devices.reshape(*sizes.values()), AXES, axis_types=mesh.axis_types)


def weight_bytes(model: Decoder, sizes: Sizes) -> int:
    """Returns the decode model's weight bytes per device."""
    sizes = {**sizes, FSDP: 1, CP: 1}
    itemsize = jnp.dtype(model.config.precision.compute).itemsize
    num_elements = 0
    for variable in named_variables(nnx.state(model, PARAMETERS)).values():
        copies = math.prod(times for _, _, times in _shared(variable, sizes[TP]))
        num_shards = math.prod(parts(sizes, axes_of(axes)) for axes in spec_of(variable))
        num_elements += math.prod(variable.shape) * copies // num_shards
    return itemsize * num_elements


def has_states(model: DecodeModel, mesh: Mesh) -> bool:
    """Returns whether a layer caches a state, whose size does not depend on the row's length.

    A state cannot be cut back to fewer tokens.
    """
    rows = batch_parts(mesh_sizes(mesh))
    return cache_bytes(model, mesh, rows, 2) < 2 * cache_bytes(model, mesh, rows, 1)


def cache_bytes(model: DecodeModel, mesh: Mesh, num_rows: int, num_slots: int) -> int:
    """Returns the KV cache's bytes per device."""
    sharding = NamedSharding(mesh, LAYER_SPEC)
    with jax.set_mesh(mesh):
        caches = jax.eval_shape(lambda: model.empty(num_rows, num_slots))
    num_bytes = 0
    for array in jax.tree.leaves(caches):
        # The last four dims are the dims of a layer.
        shard = (*array.shape[:-4], *sharding.shard_shape(array.shape[-4:]))
        num_bytes += math.prod(shard) * array.dtype.itemsize
    return num_bytes


def join_columns(model: DecodeModel) -> DecodeModel:
    """Joins the kernels of each column layer of an abstract model, in place, and returns it.

    Real kernels are joined on each device (`decode_weights`).
    """
    for _, layer in nnx.iter_modules(model.blocks):
        if type(layer) is ColumnParallelLinear:
            joined = jnp.concatenate([kernel[...] for kernel in layer.kernels], axis=-1)
            layer.kernels = nnx.List([layer.kernels[0].replace(joined)])
    return model


def to_decode_model(model: Decoder, mesh: Mesh, *, donate: bool = False) -> DecodeModel:
    """Returns a model in the layout for decoding, with any adapters merged.

    Args:
      mesh: `decode_mesh` of the model's mesh.
      donate: deletes the model's arrays one by one, so that memory holds the weights only once.
    """
    config = model.config

    def unstacked() -> DecodeModel:
        # tp cannot split a single token.
        plain = replace(
            config,
            lora=LoraConfig(),
            precision=replace(config.precision, matmul="compute"),
            sequence_parallel=None,
        )
        decoder = model if plain == config else create_decoder(plain, rngs=nnx.Rngs(0))
        return join_columns(DecodeModel(decoder, decoder.in_order()))

    # Under a mesh, the specs of stacks would be refused.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        graph, abstract = nnx.split(nnx.eval_shape(unstacked))

    def target(variable: Variable) -> Variable:
        dtype = variable.dtype
        if isinstance(variable, PARAMETERS):
            dtype = jnp.dtype(config.precision.compute)
        spec = spec_of(variable)
        array = ShapeDtypeStruct(variable.shape, dtype, sharding=NamedSharding(mesh, spec))
        return variable.replace(array, out_sharding=spec)

    targets = jax.tree.map(target, abstract, is_leaf=is_variable)
    weights = decode_weights(
        model, named_variables(targets), config.precision.compute, mesh, donate=donate
    )
    return nnx.merge(graph, replace_arrays(targets, dict(weights)))


def decode_weights(
    model: Decoder,
    targets: Mapping[str, Variable],
    dtype: DType,
    mesh: Mesh,
    *,
    donate: bool = False,
) -> Iterator[tuple[str, Array]]:
    """Yields a decoder's arrays by path in a decode model, one stacked parameter at a time.

    Adapters, if there are any, are merged, and kernels that the decode model joins are joined.

    Args:
      targets: the decode model's variables, abstract or real; the arrays of real ones are deleted
        just before.
      dtype: of merged kernels.
      mesh: the decode model's, which may have other devices or another tp than the model's.
      donate: deletes the model's arrays.
    """
    names_of = partial(_names_in_layers, model.config)
    originals = named_variables(nnx.state(model))
    # Kernels to join, each by layer of the model
    kernels: list[list[Array]] = []
    for path, variable in merged_variables(model, dtype):
        names = names_of(path)
        module, _, index = path.rpartition(".kernels.")
        if names[0] not in targets and module:
            names = names_of(f"{module}.kernels.0")
        # A parameter that decoding does not use, such as a user's second head
        if names[0] not in targets:
            continue
        old = [targets[name].get_raw_value() for name in names]
        for array in old:
            if isinstance(array, Array):
                array.delete()
        array = _moved(variable, model_mesh(model), mesh)
        sharding = old[0].sharding
        shared = _shared(variable, mesh_sizes(sharding.mesh)[TP])
        num_layers = None if split_path(path)[0] is None else len(names)
        unstack = _unstack(num_layers, old[0].dtype, sharding, shared)
        kernels.append(unstack(array))
        if donate:
            originals[path][...].delete()
        after = f"{module}.kernels.{int(index) + 1}" if module else ""
        if after in originals and names_of(after)[0] not in targets:
            continue
        for name, parts_of_layer in zip(names, zip(*kernels, strict=True), strict=True):
            yield name, _join(parts_of_layer, mesh)
        kernels.clear()


def _names_in_layers(config: ModelConfig, path: str) -> list[str]:
    """Returns the paths in a decode model of a parameter, which may be stacked."""
    stack, general = split_path(path)
    for name, numbers, _ in config.kinds():
        if name == stack:
            return [general.replace(BLOCKS, f"{BLOCKS}.{number}", 1) for number in numbers]
    return [path]


def _join(kernels: Sequence[Array], mesh: Mesh) -> Array:
    """Joins each device's columns of several kernels, and deletes the kernels."""
    if len(kernels) == 1:
        return kernels[0]
    with jax.set_mesh(mesh):
        joined: Array = _joined(kernels)
    for kernel in kernels:
        kernel.delete()
    return joined


@jax.jit
def _joined(kernels: Sequence[Array]) -> Array:
    spec = P(None, TP)
    concatenate = partial(jnp.concatenate, axis=-1)
    joined: Array = device_view(concatenate, "join", (spec,), spec)(kernels)
    return joined


def _moved(variable: Variable, source: Mesh, mesh: Mesh) -> Array:
    """Returns an array for the devices and the tp of a mesh."""
    array: Array = variable[...]
    sizes = mesh_sizes(mesh)
    if [*source.devices.flat] == [*mesh.devices.flat] and mesh_sizes(source)[TP] == sizes[TP]:
        return array
    logical = to_logical(nnx.State({"array": variable}), source)["array"]
    array = jax.device_put(logical, NamedSharding(mesh, logical_spec(variable, sizes)))
    return pad_array(array, padding_of(variable), NamedSharding(mesh, spec_of(variable)))


SharedHeads = tuple[tuple[int, int, int], ...]
"""The dims with heads that devices share, each with the number of heads and of devices per head."""


def _shared(variable: Variable, tp: int) -> SharedHeads:
    counts = [(dim, split.shared_by(tp)) for dim, split in padding_of(variable)]
    return tuple((dim, tp // count, count) for dim, count in counts if count > 1)


# Cached so that arrays of equal shape, also of later models, are not traced again
@cache
def _unstack(
    num_layers: int | None,
    dtype: jnp.dtype,
    sharding: NamedSharding,
    shared: SharedHeads,
) -> Callable[[Array], list[Array]]:
    def layers(array: Array) -> list[Array]:
        for dim, num_heads, times in shared:
            heads = jnp.split(array, num_heads, axis=dim)
            copies = chain.from_iterable([head] * times for head in heads)
            array = jnp.concatenate(list(copies), axis=dim)
        if num_layers is None:
            return [array.astype(dtype)]
        return [array[index].astype(dtype) for index in range(num_layers)]

    return jax.jit(layers, out_shardings=sharding)


def model_mesh(model: EmbeddingAndHead) -> Mesh:
    """Returns the model's mesh, or a mesh of the one device that holds the model."""
    array = jnp.asarray(model.embedding.embedding[...])
    if isinstance(array.sharding, NamedSharding):
        return array.sharding.mesh  # type: ignore[return-value]
    return make_mesh(devices=list(array.devices()))
