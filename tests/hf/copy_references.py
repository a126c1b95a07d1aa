"""Copies what the tests need of a folder of reference models: `python tests/hf/copy_references.py FOLDER`.

The folder has, for each model, config.json as transformers 5 and config_v4.json as older versions write it, its
safetensors, grads.safetensors with the gradient of each tensor, and reference.npz; and `llama_gqa_adamw`, ten updates.
Weights are copied as they are; gradients and updated weights are sketched (tests/hf_reference.py), and float64 logits
rounded to float32, which is a fiftieth of what is tolerated.
"""

import shutil
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from hf_reference import COPIED, FOLDER, pack

from jaxtp.hf.safetensors import read_header

KEPT = ("input_ids", "labels_masked", "loss64", "loss_masked64", "grad_norm64", "grad_norm_masked64", "gen_prompt")


def tensors(path):
    return {name: tensor.read() for name, tensor in read_header(path).items()}


def copy_model(source, target):
    target.mkdir(parents=True, exist_ok=True)
    for file in [*source.glob("config*.json"), *source.glob("model*.safetensors"), *source.glob("*.index.json")]:
        shutil.copyfile(file, target / file.name)
    with np.load(source / "reference.npz") as reference:
        kept = {name: reference[name] for name in (*KEPT, "gen_tokens")}
        logits = reference["logits64"].astype(np.float32)
    grads = pack(tensors(source / "grads.safetensors"), "grad")
    np.savez_compressed(target / "reference.npz", logits=logits, **kept, **grads)


def copy_updates(source, target):
    target.mkdir(parents=True, exist_ok=True)
    with np.load(source / "trace.npz") as trace:
        np.savez_compressed(target / "reference.npz", **trace, **pack(tensors(source / "final.safetensors"), "final"))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for name in COPIED:
        copy_model(root / name, FOLDER / name)
    copy_updates(root / "llama_gqa_adamw", FOLDER / "llama_gqa_adamw")
