"""What we export, read by transformers: the logits of every reference model, and of it with adapters that were merged;
of a mixture of experts, in both layouts.

    python scripts/export_to_transformers.py write FOLDER
    python scripts/export_to_transformers.py read FOLDER > scripts/results/export_to_transformers.txt

The first imports each model of tests/hf/references over fsdp 2 x tp 2 (virtual CPU devices), exports it as its own
family, once as it is and once with random adapters that were merged, and keeps the logits that it computes itself. The
second needs torch and transformers, and nothing of ours: another environment will do.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

REFERENCES = Path(__file__).parent.parent / "tests/hf/references"
LOGITS = "logits.npz"


def write(folder: Path) -> None:
    """Exports every reference, with the logits that it has here."""
    import jax
    from flax import nnx

    import jaxtp
    from jaxtp.layers.lora import TARGETS, LoraConfig, LoraParam

    jax.config.update("jax_num_cpu_devices", 4)
    for source in sorted(path.parent for path in REFERENCES.glob("*/config.json")):
        family = json.loads((source / "config.json").read_text())["model_type"]
        with np.load(source / "reference.npz") as reference:
            ids = reference["input_ids"].astype(np.int32)
        with jax.set_mesh(jaxtp.make_mesh(1, 2, 2)):
            model = jaxtp.load_hf(source)
            experts = any(block.num_experts for block in model.config.block_kinds())
            targets = TARGETS[:4] if experts else TARGETS  # experts have no adapters
            adapted = jaxtp.add_adapters(model, LoraConfig(rank=2, targets=targets))
            nnx.update(adapted, jax.tree.map(lambda array: array + 0.02, nnx.state(adapted, LoraParam)))
            exports = [("", model, "separate"), (", merged", jaxtp.merge_adapters(adapted), "separate")]
            for suffix, exported, layout in [*exports, *([(", stacked", model, "stacked")] if experts else [])]:
                name = source.name + suffix
                jaxtp.save_hf(exported, folder / name, family=family, experts=layout)
                graph, state = nnx.split(exported)
                logits = jax.jit(lambda state, ids, graph=graph: nnx.merge(graph, state)(ids))(state, ids)
                np.savez(folder / name / LOGITS, ids=ids, logits=np.asarray(logits))
        print(source.name, file=sys.stderr)


def compared(folder: Path) -> Iterator[tuple[str, ...]]:
    """Yields a row for each export: what transformers made of it."""
    import torch
    from transformers import AutoModelForCausalLM

    for export in sorted(path.parent for path in folder.glob(f"*/{LOGITS}")):
        found: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
            export, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        model, info = found
        with np.load(export / LOGITS) as kept, torch.no_grad():
            theirs = model(torch.from_numpy(kept["ids"].astype(np.int64)), use_cache=False).logits.numpy()
            error, size = np.abs(theirs - kept["logits"]).max(), np.abs(theirs).max()
        keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
        yield (
            export.name,
            type(model).__name__,
            f"{size:.1f}",
            f"{error:.1e}",
            str(sum(len(info[key]) for key in keys)),
        )


def read(folder: Path) -> None:
    """Prints how far the logits of transformers are from ours."""
    import torch
    import transformers

    print(f"transformers {transformers.__version__}, torch {torch.__version__}, float32\n")
    print(f"{'export':<28}{'class':<24}{'largest logit':>14}{'difference':>12}{'keys amiss':>12}")
    for name, kind, size, error, amiss in compared(folder):
        print(f"{name:<28}{kind:<24}{size:>14}{error:>12}{amiss:>12}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["write", "read"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    {"write": write, "read": read}[arguments.command](arguments.folder)
