"""Reference models in Hugging Face format, with what they compute in float64; `tests/hf/references/README.md` has more.

Gradients are kept as sketches: a fixed random signed sum of their elements into `SIZE` buckets. The sketch of a
difference is the difference of the sketches, and has its L2 norm, but for a few per cent.
"""

import zlib
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "hf/references"
SIZE = 512
COPIED = ["llama_gqa", "llama_kv2", "llama31_rope", "llama_tied_bias", "qwen2", "qwen3"]
TRAINED = ["gemma2", "gemma3", "olmo2", "phi3", "gpt2"]
MADE = ["mistral", "llama_linear", "llama_yarn", "qwen2_window", "qwen3_bias", *TRAINED]
EXPERTS = ["mixtral", "qwen3_moe", "qwen3_moe_dense"]
MADE += ["gpt2_scaled", "gpt2_unscaled", "phi3_long", *EXPERTS]
"""Those of `TRAINED` have updates too."""
LOGITS, LOSS, GRAD_NORM, GRADIENT = 5e-5, 5e-6, 2e-6, 1e-5
"""Tolerances: largest difference; the same; relative; relative L2 norm of each tensor."""


def sketch(name, array):
    """`[SIZE]` float64."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    buckets = random.integers(SIZE, size=array.size)
    signs = random.choice([-1.0, 1.0], size=array.size)
    return np.bincount(buckets, signs * np.asarray(array, np.float64).ravel(), SIZE)


def pack(arrays, prefix):
    """Sketches and norms of arrays by name, to be stored."""
    sketches = {f"{prefix}/{name}": sketch(name, array).astype(np.float32) for name, array in arrays.items()}
    norms = {f"{prefix}_norm/{name}": np.linalg.norm(np.float64(array)) for name, array in arrays.items()}
    return sketches | norms


def sketched_errors(arrays, stored, prefix):
    """The relative L2 error of each array, by name; the names are those that are stored."""
    names = {key.removeprefix(f"{prefix}/") for key in stored if key.startswith(f"{prefix}/")}
    assert arrays.keys() == names
    return {
        name: np.linalg.norm(sketch(name, arrays[name]) - stored[f"{prefix}/{name}"]) / stored[f"{prefix}_norm/{name}"]
        for name in names
    }


def load(name):
    """What a model computes, as a dict of arrays."""
    with np.load(FOLDER / name / "reference.npz") as stored:
        return dict(stored)
