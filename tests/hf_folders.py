"""Folders in Hugging Face format, for tests: written, read, and compared bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hf_reference import FOLDER
from numpy.random import default_rng
from structures import is_one_clear_message, plant
from support import decoder, filled, use_mesh
from tables import read_json, write_json

import jaxtp
from jaxtp.checkpoint.logical import named_variables
from jaxtp.errors import HFError
from jaxtp.hf.model_folder import open_folder
from jaxtp.hf.safetensors import DTYPES, read_header, write_file
from jaxtp.layers.parameter import logical_shape
from jaxtp.mesh import current_mesh

STORED_AS = {dtype: name for name, dtype in DTYPES.items()} | {
    np.dtype(np.int64): "I64",
    np.dtype(np.uint8): "U8",
    np.dtype(np.float64): "F64",
    np.dtype(jnp.float8_e4m3fn): "F8_E4M3",
}
"""The format's name of each dtype."""
NUMPY = {name: dtype for dtype, name in STORED_AS.items()}


def write_tensors(file, arrays):
    """Writes arrays as one safetensors file; `None` stands for no tensor."""
    kept = {name: np.asarray(array) for name, array in arrays.items() if array is not None}
    layout = {name: (STORED_AS[array.dtype], array.shape) for name, array in kept.items()}
    write_file(file, layout, kept.__getitem__)


def read_tensors(file):
    """Returns the arrays of a safetensors file, or of the model of a folder, by name."""
    tensors = open_folder(file).tensors if file.is_dir() else read_header(file)
    return {
        name: tensor.data().view(NUMPY[tensor.dtype]).reshape(tensor.shape)
        for name, tensor in tensors.items()
    }


def stored_tensors(folder):
    """Returns dtype, shape and bytes of each tensor of a folder, also of those of other dtypes
    than weights have.
    """
    tensors = open_folder(folder).tensors
    return {
        name: (tensor.dtype, tensor.shape, tensor.data().tobytes())
        for name, tensor in tensors.items()
    }


def reference_tensors(name):
    """Returns the arrays of a reference model by name."""
    return read_tensors(FOLDER / name / "model.safetensors")


def reference_attributes(name, file="config.json"):
    return read_json(FOLDER / name / file)


def write_model(folder, attributes, arrays):
    """Writes a folder of config.json and model.safetensors; returns it."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", attributes)
    write_tensors(folder / "model.safetensors", arrays)
    return folder


def changed_tensors(arrays, change):
    """Returns arrays without those whose names have the part `drop`, and with ones of the shapes
    in `add` by name.
    """
    kept = {
        name: array for name, array in arrays.items() if change.get("drop", "no part") not in name
    }
    added = {
        name: np.ones(shape, change.get("dtype", "float32"))
        for name, shape in change.get("add", {}).items()
    }
    return kept | added


def rewritten(name, change):
    """Returns a change of a folder: the content of a file by a function of what it is."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def planted(name, kind):
    """Returns a change of a folder: what `structures.plant` puts in the place of a file. The other
    file of a link has a secret.
    """

    def change(folder):
        (folder.parent / "victim").write_text("secret")
        plant(folder / name, kind)

    return change


def load_on(folder, **mesh):
    """Loads a model on a mesh of these axis sizes."""
    with use_mesh(**mesh):
        return jaxtp.hf.load(folder)


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


def moved(state, scale=0.1):
    """Returns a state with random noise added to each array, of the same dtypes and shardings."""
    random = default_rng(0)

    def add_noise(array):
        noise = scale * random.standard_normal(array.shape)
        changed = (np.asarray(array, np.float64) + noise).astype(array.dtype)
        return jax.device_put(changed, array.sharding)

    return jax.tree.map(add_noise, state)


def move_adapters(model, scale=0.1):
    """Adds noise to the adapters of a model, of which B begins as zeros; returns the model."""
    nnx.update(model, moved(nnx.state(model, nnx.LoRAParam), scale=scale))
    return model


def refusal_problem(action, words):
    """Returns what is wrong with how an action is refused, or None: it should name all `words`,
    clearly, and tell no `secret` of the files that tests write outside of a folder.
    """
    try:
        action()
    except HFError as error:
        if "secret" in str(error) or len(str(error)) > 4000 or not is_one_clear_message(error):
            return f"not one clear message: {str(error)[:300]!r}"
        lacking = [word for word in words if word not in str(error)]
        return f"{lacking} not in {str(error)[:300]!r}" if lacking else None
    return "it is not refused"


def assert_all_refused(refusals):
    """Checks `{case: (action, words)}` by `refusal_problem`; reports all failures."""
    problems = {case: refusal_problem(action, words) for case, (action, words) in refusals.items()}
    assert not {case: problem for case, problem in problems.items() if problem is not None}


def random_model(config):
    """Returns a model with random weights on the mesh in context, or one device."""
    abstract = nnx.eval_shape(decoder(config))
    random = default_rng(0)
    weights = {
        path: (0.2 * random.standard_normal(logical_shape(variable))).astype(variable.dtype)
        for path, variable in named_variables(nnx.state(abstract)).items()
    }
    mesh = None if current_mesh() is None else jax.sharding.get_mesh()
    return nnx.merge(*filled(abstract, weights, mesh))


def float8(array, block, random):
    """Returns codes, random scales, and their product, of the matrices of an array; `block` is the
    shape of what has a scale of its own, or None if all have one.
    """
    *experts, height, width = array.shape
    if block is None:
        scale = np.asarray(random.uniform(0.001, 0.1), np.float32)
        whole = scale
    else:
        grid = (*experts, -(-height // block[0]), -(-width // block[1]))
        scale = random.uniform(0.001, 0.1, grid).astype(np.float32)
        whole = scale[..., np.arange(height) // block[0], :][..., np.arange(width) // block[1]]
    codes = np.clip(array / whole, -400, 400).astype(jnp.float8_e4m3fn)
    return codes, scale, codes.astype(np.float32) * whole
