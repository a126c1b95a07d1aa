"""Folders in Hugging Face format, for tests: written, read, and compared bit by bit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hf_reference import FOLDER

import jaxtp
from jaxtp.checkpoint.logical import named_variables
from jaxtp.hf.model_folder import open_folder
from jaxtp.hf.safetensors import DTYPES, read_header, write_file

STORED_AS = {dtype: name for name, dtype in DTYPES.items()} | {
    np.dtype(np.int64): "I64",
    np.dtype(np.uint8): "U8",
    np.dtype(jnp.float8_e4m3fn): "F8_E4M3",
}
"""The format's name of each dtype."""


def write_tensors(file, arrays):
    """Writes arrays as one safetensors file; `None` stands for no tensor."""
    kept = {name: np.asarray(array) for name, array in arrays.items() if array is not None}
    layout = {name: (STORED_AS[array.dtype], array.shape) for name, array in kept.items()}
    write_file(file, layout, kept.__getitem__)


def read_tensors(file):
    """Returns the arrays of a safetensors file, or of the model of a folder, by name."""
    tensors = open_folder(file).tensors if file.is_dir() else read_header(file)
    return {name: tensor.read() for name, tensor in tensors.items()}


def stored_tensors(folder):
    """Returns dtype, shape and bytes of each tensor of a folder, also of those of other dtypes than weights have."""
    tensors = open_folder(folder).tensors
    return {name: (tensor.dtype, tensor.shape, tensor.data().tobytes()) for name, tensor in tensors.items()}


def reference_tensors(name):
    """Returns the arrays of a reference model by name."""
    return read_tensors(FOLDER / name / "model.safetensors")


def reference_attributes(name, file="config.json"):
    return json.loads((FOLDER / name / file).read_text())


def write_model(folder, attributes, arrays):
    """Writes a folder of config.json and model.safetensors; returns it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(attributes))
    write_tensors(folder / "model.safetensors", arrays)
    return folder


def load_on(folder, **mesh):
    """Loads a model on a mesh of these axis sizes."""
    with jax.set_mesh(jaxtp.make_mesh(**mesh)):
        return jaxtp.load_hf(folder)


def values(model, kind=nnx.Variable):
    """Returns the arrays of a model, or of its variables of one kind, by path."""
    named = named_variables(nnx.state(model, kind))
    return {path: np.asarray(variable[...]) for path, variable in named.items()}


def assert_same(found, expected):
    """Compares two dicts of arrays: names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    differing = [name for name, array in found.items() if not is_same(array, expected[name])]
    assert not differing


def is_same(one, other):
    one = np.asarray(one)
    other = np.asarray(other)
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def moved(state, seed=0, scale=0.1):
    """Returns a state with random noise added to each array, of the same dtypes and shardings."""
    random = np.random.default_rng(seed)

    def add_noise(array):
        noise = scale * random.standard_normal(array.shape)
        changed = (np.asarray(array, np.float64) + noise).astype(array.dtype)
        return jax.device_put(changed, array.sharding)

    return jax.tree.map(add_noise, state)


def move_adapters(model, scale=0.1):
    """Adds noise to the adapters of a model, of which B begins as zeros; returns the model."""
    nnx.update(model, moved(nnx.state(model, nnx.LoRAParam), scale=scale))
    return model
