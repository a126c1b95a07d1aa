"""A Decoder of one's own: gated attention, a head for the token after the next, and a loss of both.

jaxtp train --model.build scripts/examples/own_decoder.py:build \
    --train.loss scripts/examples/own_decoder.py:loss \
    --train.callbacks scripts/examples/own_decoder.py:sample
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

import jaxtp


class GatedAttention(jaxtp.CausalSelfAttention):
    """Each head's result is multiplied by a gate of the layer's input."""

    def __init__(self, d_model, config, context, *, norm, rngs):
        super().__init__(d_model, config, context, norm=norm, rngs=rngs)
        self.gate = jaxtp.ColumnParallelLinear(d_model, config.heads, context, rngs=rngs)

    def output(self, heads_BTF, x_BTD):
        return super().output(heads_BTF * jax.nn.sigmoid(self.gate(x_BTD)), x_BTD)


@dataclass(frozen=True, kw_only=True)
class GatedConfig(jaxtp.ModelConfig):
    second_weight: float = 0.3

    def branches(self, block, rngs):
        attention = GatedAttention(self.d_model, block, self.layer_context, norm=block, rngs=rngs)
        return super().branches(block, rngs) | {"attention": attention}


class GatedDecoder(jaxtp.Decoder):
    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.second = jaxtp.VocabParallelHead(
            config.vocab_size, config.d_model, config.layer_context, rngs=rngs
        )


def build(rngs, **settings):
    return GatedDecoder(GatedConfig(**settings), rngs=rngs)


def loss(model, batch, key):
    config = model.config
    labels = batch["labels"]
    sequences = model.sequences(batch["inputs"], segments=batch.get("segments"))
    hidden = model.hidden(batch["inputs"], sequences=sequences)
    # Over cp, hidden states have another order than the batch, and `local_tokens` gives the labels
    # the same.
    total, count = model.loss_of_hidden(hidden, sequences.local_tokens(labels))
    after = jnp.roll(labels, -1, axis=1).at[:, -1].set(-100)
    # No label leaves its document.
    after = sequences.local_tokens(jnp.where(labels == -100, -100, after))
    head = jaxtp.layers.HeadConfig(config.vocab_size, config.layer_context)
    second, number = jaxtp.losses.vocab_parallel_cross_entropy(
        hidden, model.second.kernel[...], after, head
    )
    return total + config.second_weight * second, count, {"second": (second, number)}


sample = jaxtp.generate.sample_text("def ", every=100)
