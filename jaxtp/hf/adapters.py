"""Adds adapters to a decoder, and merges them into its kernels."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding

from jaxtp.checkpoint.logical import Variable, named_variables, replace_arrays, select_paths
from jaxtp.config.schema import ConfigError
from jaxtp.layers.lora import TARGETS, LoraConfig, Target, freeze_as
from jaxtp.layers.parameter import DType, spec_of
from jaxtp.mesh import current_mesh
from jaxtp.models.block import adapter_kernels
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder, abstract_decoder, create_decoder


@dataclass(frozen=True)
class Adapter:
    """An adapter of stacked layers."""

    target: Target
    lora: str
    """Dotted path. `.a` is `[L, in, rank]`, `.b` is `[L, rank, out]`; of experts `[L, E, in, rank]`
    and `[L, E, rank, out]`."""


def adapters(config: ModelConfig) -> dict[str, Adapter]:
    """Returns the adapters of a model by the dotted path of their kernel."""
    by_kernel: list[tuple[str, Adapter]] = []
    counts: Counter[str] = Counter()
    for stack, _, block in config.kinds():
        for target, kernel in adapter_kernels(block):
            if config.lora.adapted(target):
                path = f"{stack}.{kernel}"
                module, is_linear, _ = path.partition(".kernel")
                lora = f"{module}.loras.{counts[module]}" if is_linear else f"{module}_lora"
                by_kernel.append((path, Adapter(target, lora)))
                counts[module] += 1
    return dict(sorted(by_kernel, key=lambda entry: TARGETS.index(entry[1].target)))


ROWS = {"embedding.embedding": "embedding.token_rows", "head.kernel": "head.token_rows"}
"""Paths of tables, and of the rows that replace some of theirs."""


def initial_rows(weights: nnx.State, abstract: nnx.State, lora: LoraConfig) -> nnx.State:
    """Returns the rows of `lora.tokens` in a model's tables, as adapters begin to train them."""
    rows = select_paths(abstract, lambda path: path in ROWS.values())
    variables = named_variables(weights)
    arrays: dict[str, Array] = {}
    for table, path in ROWS.items():
        if path in named_variables(rows):
            array = variables[table][...]
            sharding = None
            if isinstance(array.sharding, NamedSharding):
                spec = spec_of(named_variables(rows)[path])
                sharding = NamedSharding(array.sharding.mesh, spec)
            take = jax.jit(_rows_at, static_argnums=(1, 2), out_shardings=sharding)
            arrays[path] = take(array, lora.tokens, lora.dtype)
    return replace_arrays(rows, arrays)


def _rows_at(table: Array, ids: tuple[int, ...], dtype: DType) -> Array:
    # Without ids all rows are trained.
    return (table[jnp.array(ids)] if ids else table).astype(dtype)


def tables_with_rows(model: Decoder, dtype: DType) -> dict[str, Variable]:
    """Returns the tables that have trained rows, with these rows, by path."""
    variables = named_variables(nnx.state(model))
    tables: dict[str, Variable] = {}
    for path, name in ROWS.items():
        if name in variables:
            table = variables[path][...]
            put = jax.jit(_put_rows, static_argnums=(2, 3), out_shardings=table.sharding)
            array = put(table, variables[name][...], model.config.lora.tokens, dtype)
            tables[path] = variables[path].replace(array)
    return tables


def _put_rows(table: Array, rows: Array, ids: tuple[int, ...], dtype: DType) -> Array:
    if not ids:
        return rows.astype(dtype)
    return table.astype(dtype).at[jnp.array(ids)].set(rows.astype(dtype))


def add_adapters(model: Decoder, lora: LoraConfig, *, seed: int = 0) -> Decoder:
    """Returns a copy of a model, sharing its arrays, with new adapters that initially add zero.

    The model must be on the mesh in context or on one device.

    Raises:
      ConfigError: the model has adapters, or `lora` has none.
    """
    if model.config.lora.rank:
        raise ConfigError(
            "the model has adapters already; add them to their kernels by merge_adapters first"
        )
    if not (lora.rank and lora.targets):
        raise ConfigError(
            f"lora.rank={lora.rank} and lora.targets={lora.targets} make no adapters; rank=8 "
            "is usual"
        )
    config = replace(model.config, lora=lora)
    graph, abstract = abstract_decoder(config)
    factors = nnx.filter_state(abstract, nnx.LoRAParam)

    def create() -> nnx.State:
        return nnx.state(create_decoder(config, rngs=nnx.Rngs(seed)), nnx.LoRAParam)

    shardings = None
    if current_mesh() is not None:
        shardings = nnx.get_named_sharding(factors, jax.sharding.get_mesh())
    created: nnx.State = jax.jit(create, out_shardings=shardings)()
    rows = initial_rows(nnx.state(model), abstract, lora)
    weights = freeze_as(nnx.state(model), abstract)
    return nnx.merge(graph, nnx.merge_state(weights, created, rows))


def merge_adapters(model: Decoder, *, dtype: DType | None = None) -> Decoder:
    """Returns a model with its adapters added to the kernels.

    Each sum is computed in float32 and rounded once to `dtype`, by default the frozen weights'
    dtype. Outputs may differ slightly: an unmerged adapter is added to the layer's output, in the
    compute dtype.
    """
    config = model.config
    dtype = dtype or config.precision.param
    plain = replace(config, lora=LoraConfig(), precision=replace(config.precision, param=dtype))
    graph, abstract = abstract_decoder(plain)
    arrays = {path: variable[...] for path, variable in merged_variables(model, dtype)}
    cast = {
        path: arrays[path].astype(variable.dtype)
        for path, variable in named_variables(abstract).items()
    }
    return nnx.merge(graph, replace_arrays(abstract, cast))


Factors = tuple[Array, Array, float]
"""A, B and the scale of an adapter."""


def factors_by_kernel(model: Decoder) -> dict[str, Factors]:
    """Returns a model's adapters by the path of their kernel.

    Raises `ConfigError` if it has kernels in fewer bits.
    """
    config = model.config
    if config.lora.base != "full":
        raise ConfigError(
            f"lora.base={config.lora.base}: adapters are merged into the original kernels, and "
            "this model has them in fewer bits; jaxtp.load_run(RUN) returns the originals with the "
            "run's adapters"
        )
    variables = named_variables(nnx.state(model, nnx.LoRAParam))
    factors: dict[str, Factors] = {}
    for kernel, adapter in adapters(config).items():
        a = variables[f"{adapter.lora}.a"][...]
        b = variables[f"{adapter.lora}.b"][...]
        factors[kernel] = a, b, config.lora.scale
    return factors


def merged_variables(model: Decoder, dtype: DType) -> Iterator[tuple[str, Variable]]:
    """Yields the variables by path, without adapters; each kernel is merged when it is yielded."""
    factors = factors_by_kernel(model)
    tables = tables_with_rows(model, dtype)
    for path, variable in named_variables(nnx.state(model)).items():
        if path in tables:
            yield path, tables[path]
        elif path in factors:
            kernel = variable[...]
            merge = jax.jit(_merge_layers, static_argnums=4, out_shardings=kernel.sharding)
            yield path, variable.replace(merge(kernel, *factors[path], dtype))
        elif not isinstance(variable, nnx.LoRAParam):
            yield path, variable


def _merge_layers(kernel: Array, a: Array, b: Array, scale: float, dtype: DType) -> Array:
    def merge(layer: tuple[Array, Array, Array]) -> Array:
        return merge_layer(*layer, scale, dtype)

    # One layer at a time, so that only one is in memory in float32.
    return jax.lax.map(merge, (kernel, a, b))


def merge_layer(kernel: Array, a: Array, b: Array, scale: float, dtype: DType) -> Array:
    """Adds an adapter to a layer's kernel in float32, and rounds once."""
    kernel, a, b = (array.astype(jnp.float32) for array in (kernel, a, b))
    return (kernel + scale * jnp.matmul(a, b, precision="highest")).astype(dtype)
