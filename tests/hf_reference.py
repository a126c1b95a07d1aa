"""Reference models in Hugging Face format, with their float64 results; see
`tests/hf/references/README.md`.

Gradients are stored as sketches: fixed random signed sums of their elements in buckets, `SIZE` of
them or 64. The difference of two sketches has the L2 norm of the gradients' difference, to a few
per cent.
"""

import zlib
from pathlib import Path

import numpy as np
from numpy.random import default_rng
from tables import read_json

FOLDER = Path(__file__).parent / "hf/references"
SIZE = 512
COPIED = ["llama_gqa", "llama_kv2", "llama31_rope", "llama_tied_bias", "qwen2", "qwen3"]
TRAINED = ["gemma2", "gemma3", "olmo2", "phi3", "gpt2"]
MADE = ["mistral", "llama_linear", "llama_yarn", "qwen2_window", "qwen3_bias", *TRAINED]
EXPERTS = ["mixtral", "qwen3_moe", "qwen3_moe_dense"]
MADE += ["gpt2_scaled", "gpt2_unscaled", "phi3_long", *EXPERTS]
"""Models; those in `TRAINED` also have updates."""
LATER = ["internlm3", "iquestcoder", "cwm", "solar_open", "youtu", "sarvam_moe", "sarvam_mla"]
LATER += ["exaone_moe", "hy_v3", "afmoe", "nanochat"]
LATER += ["qwen3_vl", "qwen2_5_vl", "qwen2_vl", "glm4v", "glm4v_moe", "internvl"]
LATER += ["llava", "llava_next", "exaone4_5", "granite4_h", "nemotron_h"]
LATER += ["lfm2", "lfm2_moe", "qwen3_vl_moe", "idefics3", "smolvlm", "kimi_k25", "kimi_linear"]
LATER += ["nemotron_h_latent", "bamba", "mamba2", "lfm3", "falcon_h1"]
"""Models at the end, so that all others stay on their meshes."""
NEWER = {path.parent.name for path in FOLDER.glob("*/config.json")} - {*COPIED, *MADE, *LATER}
NEWER = [*sorted(NEWER), *LATER]
"""Models whose rotary frequencies are float64."""
LOGITS = 5e-5
LOSS = 5e-6
GRAD_NORM = 5e-6
GRADIENT = 2e-5
"""Tolerances: absolute for logits and loss, relative for the norm, relative L2 norm for each
gradient.
"""


def sketch(name, array, size=SIZE):
    """`[size]` float64."""
    random = default_rng(zlib.crc32(name.encode()))
    buckets = random.integers(size, size=array.size)
    signs = random.choice([-1.0, 1.0], size=array.size)
    return np.bincount(buckets, signs * np.asarray(array, np.float64).ravel(), size)


def pack(arrays, prefix, size=SIZE):
    """Returns names, sketches and norms of arrays; `load` has them by name."""
    sketches = np.stack([sketch(name, array, size) for name, array in arrays.items()])
    return {
        f"{prefix}_names": np.array(list(arrays)),
        f"{prefix}_sketches": sketches.astype(np.float32),
        f"{prefix}_norms": np.array(
            [np.linalg.norm(np.float64(array)) for array in arrays.values()]
        ),
    }


def sketched_errors(arrays, stored, prefix):
    """Returns the relative L2 error of each array by name; checks that the stored names are the
    same.
    """
    names = {key.removeprefix(f"{prefix}/") for key in stored if key.startswith(f"{prefix}/")}
    assert arrays.keys() == names
    sketches = {name: stored[f"{prefix}/{name}"] for name in names}
    return {
        name: np.linalg.norm(sketch(name, arrays[name], len(known)) - known)
        / stored[f"{prefix}_norm/{name}"]
        for name, known in sketches.items()
    }


def model_types(name):
    """Returns the model_type of a model, and that of its text model if it is multimodal."""
    attributes = read_json(FOLDER / name / "config.json")
    return {each["model_type"] for each in (attributes, attributes.get("text_config", attributes))}


def load(name):
    """Returns a model's results, as a dict of arrays."""
    with np.load(FOLDER / name / "reference.npz") as stored:
        found = dict(stored)
    for prefix in ("grad", "final"):
        if f"{prefix}_names" not in found:
            continue
        packed = [found.pop(f"{prefix}_{part}") for part in ("names", "sketches", "norms")]
        for each, sketched, norm in zip(*packed, strict=True):
            found |= {f"{prefix}/{each}": sketched, f"{prefix}_norm/{each}": norm}
    return found
