"""A head that predicts the token after the next (MTP), trained for the weights of a tuned model.

    jaxtp train --model.from-hf models/Qwen3.5-4B --data.path data/tuning --run.dir runs/tuned
    python scripts/examples/prediction_head.py runs/tuned models/Qwen3.5-4B data/tuning
    jaxtp convert export runs/tuned models/tuned --heads runs/head.safetensors

The head is that of DeepSeek-V3 (arXiv 2412.19437), GLM-4.5 and Qwen 3.5: one more block reads the
hidden state of a token and the embedding of the next one, and the model's own head predicts the one
after it. The model is frozen. The head begins with random weights.
"""

import json
from dataclasses import fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import jaxtp

OF_QWEN = {
    "joined.": "mtp.fc.",
    "embedding_norm.": "mtp.pre_fc_norm_embedding.",
    "hidden_norm.": "mtp.pre_fc_norm_hidden.",
    "model.layers.0.": "mtp.layers.0.",
    "model.norm.": "mtp.norm.",
}
OF_DEEPSEEK = {
    "joined.": "eh_proj.",
    "embedding_norm.": "enorm.",
    "hidden_norm.": "hnorm.",
    "model.layers.0.": "",
    "model.norm.": "shared_head.norm.",
    "model.embed_tokens.": "embed_tokens.",
    "lm_head.": "shared_head.head.",
}
"""Where the tensors of the head stand in a folder, after the number of their layer."""


class LastBlock(jaxtp.Decoder):
    """A block and a norm, for states in place of tokens."""

    def __init__(self, config: jaxtp.ModelConfig, *, rngs: nnx.Rngs):
        defaults = {field.name: field.default for field in fields(config)}
        # Every fourth block of Qwen 3.5 has attention, also the last one.
        delta = {name: value for name, value in defaults.items() if name.startswith("delta_")}
        pattern = config.pattern[-1:]
        one = replace(config, num_layers=1, first_blocks=(), pattern=pattern, **delta)
        super().__init__(one, rngs=rngs)
        self.embedding = self.head = None

    def embed(self, x_BTD, sequences, positions_BT=None):
        return x_BTD


class PredictingDecoder(jaxtp.Decoder):
    def __init__(self, config: jaxtp.ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        jaxtp.freeze(self)
        width = config.d_model
        plain = replace(config, decoder=None)
        self.embedding_norm = jaxtp.Norm(width, plain, config.layer_context)
        self.hidden_norm = jaxtp.Norm(width, plain, config.layer_context)
        self.joined = nnx.Linear(
            2 * width,
            width,
            use_bias=False,
            kernel_metadata={"out_sharding": P("fsdp", None)},
            rngs=rngs,
        )
        self.last = LastBlock(plain, rngs=rngs)

    def predicted(self, hidden_BTD, next_BT, sequences):
        """Returns the states that predict the token after the next."""
        embedded_BTD = self.embedding_norm(self.embed(next_BT, sequences))
        both = jnp.concatenate([embedded_BTD, self.hidden_norm(hidden_BTD)], axis=-1)
        return self.last.hidden(self.joined(both), sequences=sequences)


def loss(model, batch, key):
    inputs, labels = batch["inputs"], batch["labels"]
    sequences = model.sequences(inputs, segments=batch.get("segments"))
    hidden_BTD = jax.lax.stop_gradient(model.hidden(inputs, sequences=sequences))
    next_BT = jnp.roll(inputs, -1, axis=1).at[:, -1].set(jnp.maximum(labels[:, -1], 0))
    # No label leaves its document.
    after_BT = jnp.roll(labels, -1, axis=1).at[:, -1].set(-100)
    after_BT = sequences.local_tokens(jnp.where(labels == -100, -100, after_BT))
    return model.loss_of_hidden(model.predicted(hidden_BTD, next_BT, sequences), after_BT)


def builder(folder: Path):
    """Returns the function that makes the model of a folder in Hugging Face's format."""
    config = jaxtp.hf.read_config(folder)
    return lambda rngs: PredictingDecoder(config, rngs=rngs)


def tensors(model: PredictingDecoder, folder: Path):
    """Yields the head's tensors, by their names in published folders of the model's family."""
    attributes = json.loads((folder / "config.json").read_text())
    text = attributes.get("text_config", attributes)
    names = OF_QWEN
    if not text["model_type"].startswith("qwen3"):
        layer = f"model.layers.{text['num_hidden_layers']}."
        names = {begin: layer + name for begin, name in OF_DEEPSEEK.items()}
    arrays = {"joined.weight": model.joined.kernel[...].T}
    arrays["embedding_norm.weight"] = model.embedding_norm.scale[...]
    arrays["hidden_norm.weight"] = model.hidden_norm.scale[...]
    # The family's names of a model of one layer
    model.last.embedding, model.last.head = model.embedding, model.head
    arrays |= jaxtp.hf.stream_weights(model.last, family=text["model_type"])
    for name, array in arrays.items():
        begin = next((begin for begin in names if name.startswith(begin)), None)
        if begin is not None:
            yield names[begin] + name.removeprefix(begin), array


def main(
    tuned: tyro.conf.Positional[Path],
    folder: tyro.conf.Positional[Path],
    data: tyro.conf.Positional[Path],
    mesh: str = "fsdp=2,tp=4",
    steps: int = 1000,
    run: Path = Path("runs/head"),
) -> None:
    settings = {"run.init_from": tuned, "data.path": data, "optimizer.learning_rate": 1e-3}
    with jaxtp.Trainer(
        model=builder(folder), loss=loss, mesh=mesh, steps=steps, folder=run, settings=settings
    ) as trainer:
        trainer.run_to_end()
        # save_file writes the memory of an array, which a transposed one has in another order.
        arrays = {
            name: np.ascontiguousarray(array) for name, array in tensors(trainer.model, folder)
        }
        save_file(arrays, run.with_suffix(".safetensors"))


if __name__ == "__main__":
    tyro.cli(main)
