"""Small decoders with random weights on any mesh, generators of them, and their likeliest
tokens.
"""

from functools import cache, cached_property

import jax
import numpy as np
from flax import nnx
from support import new_decoder, random_weights, sizes_of, state_on_mesh, without_mesh

import jaxtp
from jaxtp.data.tokenizer import ByteTokenizer


def greedy_ids(logits, prompt, count, length):
    """Returns the likeliest of the first 256 tokens after a prompt, each from reading
    everything again.

    Args:
      logits: a function of `length` ids, of which some are padding.
    """
    ids = list(prompt)
    for _ in range(count):
        padded = np.zeros(length, np.int32)
        padded[: len(ids)] = ids
        last = np.asarray(logits(padded))[len(ids) - 1, :256]
        ids.append(int(np.argmax(last)))
    return tuple(ids[-count:])


class SmallDecoder:
    """A decoder whose weights are drawn once, with equal ones on each mesh.

    Args:
      change: is given the drawn weights by name, and returns those to use.
    """

    def __init__(self, config, scale=0.1, change=lambda weights: weights):
        self.config = config
        self._scale = scale
        self._change = change
        self.on = cache(self.on)

    def build(self):
        return new_decoder(self.config)

    @cached_property
    def weights(self):
        return self._change(random_weights(self.build, scale=self._scale))

    def on(self, mesh):
        """Returns the model on a mesh, by its sizes; None for no mesh."""
        if mesh is None:
            return nnx.merge(*without_mesh(self.build, self.weights))
        return nnx.merge(
            *state_on_mesh(self.build, self.weights, jaxtp.make_mesh(**sizes_of(mesh)))
        )

    def generator(self, mesh=None, tokenizer=None, *, chunk=16, **options):
        """Returns a generator of bytes, which reads prompts in short chunks."""
        return jaxtp.generate.Generator(
            self.on(mesh), tokenizer or ByteTokenizer(), chunk=chunk, **options
        )

    @cached_property
    def logits(self):
        """A compiled function of the ids of a row, which reads all of them."""
        graph, state = without_mesh(self.build, self.weights)
        whole = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids[None])[0])
        return lambda ids: whole(state, ids)
