"""Builds models with equal weights with and without a mesh, and compares results."""

import itertools
import zlib
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.random import default_rng
from tables import read_table

import jaxtp
from jaxtp.checkpoint.logical import named_variables, replace_arrays
from jaxtp.collectives import batch_spec, constrain
from jaxtp.data.batches import Position, token_batches
from jaxtp.data.loader import on_mesh
from jaxtp.generate.decode_model import DecodeModel
from jaxtp.layers.cache import NewTokens
from jaxtp.layers.parameter import PARAMETERS
from jaxtp.mesh import mesh_shape
from jaxtp.tools.check.parity import on_host, place

MESHES = [tuple(mesh) for mesh in read_table(__file__)]
TOLERANCE = 1e-5  # relative L2 norm per tensor, float32


def sizes_of(mesh):
    """Returns axis sizes of a mesh (dp, fsdp, tp) or (dp, fsdp, cp, tp)."""
    dp, fsdp, *cp, tp = mesh
    return mesh_shape(dp=dp, fsdp=fsdp, cp=cp[0] if cp else 1, tp=tp)


def new_decoder(config):
    return jaxtp.Decoder(config, rngs=nnx.Rngs(0))


def decoder(config):
    """Returns a function that builds a decoder."""
    return lambda: new_decoder(config)


def mesh_by_size(dp=1, fsdp=1, tp=1, *, cp=1, devices=None):
    return jaxtp.make_mesh(dp=dp, fsdp=fsdp, cp=cp, tp=tp, devices=devices)


def use_mesh(*sizes, **by_axis):
    """Puts a mesh of these axis sizes in context, for a `with` block."""
    return jax.set_mesh(mesh_by_size(*sizes, **by_axis))


def random_weights(build, scale=0.1):
    """Returns the arrays of `build()` without a mesh, by name; changes each parameter from its
    initial value.
    """
    named = named_variables(jax.jit(lambda: nnx.state(build()))())
    return {
        name: moved(name, variable[...], scale)
        if isinstance(variable, PARAMETERS)
        else variable[...]
        for name, variable in named.items()
    }


def moved(name, array, scale):
    noise = default_rng([0, zlib.crc32(name.encode())]).standard_normal(array.shape)
    return (np.asarray(array, np.float64) + scale * noise).astype(array.dtype)


def state_on_mesh(build, weights, mesh):
    """Returns `graph, state` of `build()` on a mesh, with these weights."""
    with jax.set_mesh(mesh):
        abstract = nnx.eval_shape(build)
    return filled(abstract, weights, mesh)


def without_mesh(build, weights):
    """Returns `graph, state` of `build()` without a mesh, with these weights."""
    return filled(nnx.eval_shape(build), weights)


def filled(abstract, weights, mesh=None):
    """Returns `graph, state` of an abstract model with these weights by name; on the mesh that it
    was made on, if any.

    To initialise a model instead, its whole program would be compiled.
    """
    graph, state = nnx.split(abstract)
    if mesh is None:
        return graph, replace_arrays(
            state, {name: jnp.asarray(array) for name, array in weights.items()}
        )
    return graph, place(weights, state, mesh)


by_name = on_host


@nnx.jit
def outputs_of(model, *inputs, **options):
    return model(*inputs, **options)


def cached_and_whole(graph, state, ids, cut):
    """Returns the hidden states of rows read in two parts with a KV cache, and read at once."""

    @jax.jit
    def run(state, first, second):
        model = nnx.merge(graph, state)
        rows, length = ids.shape
        reader = DecodeModel(model, model.in_order())
        found, caches = continue_rows(
            reader, first, reader.empty(rows, length), jnp.zeros(rows, jnp.int32)
        )
        rest, _ = continue_rows(reader, second, caches, jnp.full(rows, cut))
        return jnp.concatenate([found, rest], axis=1), model.hidden(
            jnp.concatenate([first, second], axis=1)
        )

    return run(state, ids[:, :cut], ids[:, cut:])


def continue_rows(reader, ids_BT, caches, lengths_B):
    """Reads the next tokens of rows with `lengths_B` tokens."""
    positions_BT = constrain(lengths_B[:, None] + jnp.arange(ids_BT.shape[1]), batch_spec(None))
    return reader(ids_BT, caches, NewTokens(positions_BT))


def sweep(cases, *first):
    """Returns parameters of one argument; cases not in `first` are in the wide tier."""
    return in_tiers(cases, first, (), pytest.mark.wide)


def in_tiers(cases, first, tier_of_first, tier):
    assert all(case in cases for case in first), "a case of `first` is not among the cases"
    return [pytest.param(case, marks=tier_of_first if case in first else tier) for case in cases]


def swept(name, cases, *first):
    """Parametrizes a test over `cases`; those not in `first` run only in the wide tier."""
    return pytest.mark.parametrize(name, sweep(cases, *first), ids=_id)


def _id(case):
    """Returns the text of a case, or None if that contains the repr of an object."""
    text = str(case)
    return None if "<" in text else text


def sweep_of(lists, *first):
    """Returns parameters of a test with several arguments: all combinations, with tiers as in
    `sweep`.
    """
    swept_cases = sweep(list(itertools.product(*lists)), *first)
    return [pytest.param(*param.values[0], marks=param.marks) for param in swept_cases]


def journeys(cases, *first):
    """Returns parameters of a journey with one argument; cases not in `first` are in the slow
    tier.
    """
    return in_tiers(cases, first, pytest.mark.journey, pytest.mark.slow)


def relative_error(actual, expected):
    """Returns the L2 norm of the difference, relative to the norm of `expected`."""
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    norm = np.linalg.norm(expected)
    return np.linalg.norm(actual - expected) / norm if norm else np.linalg.norm(actual)


def assert_close(actual, expected, tolerance=TOLERANCE):
    """Compares two dicts of arrays, tensor by tensor."""
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    worst = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not worst, worst


@contextmanager
def compilations(kind="backend_compile_duration"):
    """Yields a list of the programs that are compiled inside, or loaded from the compilation
    cache; with the kind jaxpr_trace_duration, of the functions that are traced.
    """
    names = []

    def listen(event, _, **about):
        if event.endswith(kind):
            names.append(about.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def batches(samples, mesh, *, global_batch_size, start, count):
    """Yields batches of token rows on a mesh, from sample `start`."""
    source = token_batches(samples, global_batch_size)
    return (batch for batch, _ in on_mesh(source, mesh, Position(0, start), count))


def local_batches(samples, rows, global_batch_size, start, count):
    """Yields some rows of each batch on the host."""
    source = token_batches(samples, global_batch_size)
    return (columns for columns, _ in source.read(rows, Position(0, start), count))


def task_flags(file, **parts):
    """Returns the flags that name parts of a task in a file: `loss="mean_loss"`."""
    settings = {
        "model": "model.build",
        "plan": "model.plan",
        "loss": "train.loss",
        "batches": "data.batches",
    }
    return [
        f"--{settings.get(part, f'{part}.build')}={file}:{name}" for part, name in parts.items()
    ]


def assert_refused(main, words, message, capsys):
    """Runs a command line with a mistake, and looks for its error."""
    assert main(words) == 2
    assert message in capsys.readouterr().err
