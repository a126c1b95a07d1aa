"""A classifier of sequences: jaxtp's decoder with a head on the mean of its hidden states.

    python scripts/examples/classifier.py --mesh fsdp=2,tp=4

The classes are formats of files: Python, Markdown and YAML.
"""

from pathlib import Path

import numpy as np
import optax
import tyro
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P
from own_loss import CONFIG

import jaxtp

ROOT = Path(__file__).parents[2]
FILES = [
    sorted(ROOT.glob(pattern)) for pattern in ("scripts/examples/*.py", "*.md", "configs/*.yaml")
]
TEXTS = [np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8) for files in FILES]


class Classifier(jaxtp.Decoder):
    def __init__(self, config: jaxtp.ModelConfig = CONFIG, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        split = {"out_sharding": P("fsdp", None)}
        self.classes = nnx.Linear(config.d_model, len(TEXTS), kernel_metadata=split, rngs=rngs)


def loss(
    model: Classifier, batch: dict[str, Array], key: Array
) -> tuple[Array, int, dict[str, Array]]:
    logits = model.classes(model.hidden(batch["tokens"]).mean(1))
    labels = batch["labels"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.sum(), len(labels), {"accuracy": (logits.argmax(-1) == labels).sum()}


def batches(step: int, size: int = 32, length: int = 64) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    labels = random.integers(len(TEXTS), size=size, dtype=np.int32)
    starts = [random.integers(len(TEXTS[label]) - length) for label in labels]
    rows = [
        TEXTS[label][start : start + length] for label, start in zip(labels, starts, strict=True)
    ]
    return {"tokens": np.stack(rows).astype(np.int32), "labels": labels}


def main(mesh: str = "fsdp=2,tp=4", steps: int = 60, folder: str = "runs/classifier") -> None:
    with jaxtp.Trainer(TASK, mesh=mesh, steps=steps, folder=folder) as trainer:
        for step in trainer:
            if step.index % 10 in (0, 1):
                trainer.line(f"accuracy {step.metrics['accuracy']:.2f}")


build = Classifier
TASK = jaxtp.Task(model=build, loss=loss, batches=batches)
if __name__ == "__main__":
    tyro.cli(main)
