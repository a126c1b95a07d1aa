"""Small models in plain Flax, written for one device, without jaxtp, and the usual plan for one
of them.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtp.plans import Colwise, PrepareInput, Replicate, Rowwise, SequenceParallel, Shard

V = 32
T = 8
D = 16
F = 32
N = 8
K = 8
H = 4


def rope(x):
    """Rotates pairs of `[B, T, N, H]` by their position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    one = x[..., :half]
    two = x[..., half:]
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


class Attention(nnx.Module):
    """Llama's attention, with separate wq, wk and wv."""

    def __init__(self, rngs, *, kv_heads=K, use_bias=False):
        linear = partial(nnx.Linear, use_bias=use_bias, rngs=rngs)
        self.wq = linear(D, N * H)
        self.wk = linear(D, kv_heads * H)
        self.wv = linear(D, kv_heads * H)
        self.wo = linear(N * H, D)

    def __call__(self, x):
        q, k, v = (layer(x).reshape(*x.shape[:2], -1, H) for layer in (self.wq, self.wk, self.wv))
        y = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
        return self.wo(y.reshape(*x.shape[:2], -1))


class FeedForward(nnx.Module):
    def __init__(self, rngs, *, use_bias=False):
        linear = partial(nnx.Linear, use_bias=use_bias, rngs=rngs)
        self.w1 = linear(D, F)
        self.w2 = linear(F, D)
        self.w3 = linear(D, F)

    def __call__(self, x):
        return self.w2(jax.nn.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nnx.Module):
    def __init__(self, rngs, *, kv_heads=K, use_bias=False):
        self.attention_norm = nnx.RMSNorm(D, rngs=rngs)
        self.attention = Attention(rngs, kv_heads=kv_heads, use_bias=use_bias)
        self.ffn_norm = nnx.RMSNorm(D, rngs=rngs)
        self.feed_forward = FeedForward(rngs, use_bias=use_bias)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nnx.Module):
    """A Llama with the names of the usual PyTorch tutorial."""

    def __init__(self, rngs, *, num_layers=2):
        self.tok_embeddings = nnx.Embed(V, D, rngs=rngs)
        self.layers = nnx.List([LlamaBlock(rngs) for _ in range(num_layers)])
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.output = nnx.Linear(D, V, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


LLAMA_PLAN = {
    "tok_embeddings": Rowwise(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.attention_norm": SequenceParallel(),
    "layers.*.attention": PrepareInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    "layers.*.attention.w{q,k,v}": Colwise(),
    "layers.*.attention.wo": Rowwise(output_layouts=Shard(1)),
    "layers.*.ffn_norm": SequenceParallel(),
    "layers.*.feed_forward": PrepareInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    "layers.*.feed_forward.w{1,3}": Colwise(),
    "layers.*.feed_forward.w2": Rowwise(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": Colwise(input_layouts=Shard(1), output_layouts=Replicate()),
}
"""The plan of that tutorial: `parallelize_module` of the model, then of each block, with paths
from the model.
"""


class Perceptron(nnx.Module):
    """Layers in a named list, a dict and an nnx.Sequential."""

    def __init__(self, rngs):
        self.norms = nnx.Dict(
            {"first": nnx.LayerNorm(D, rngs=rngs), "last": nnx.LayerNorm(D, rngs=rngs)}
        )
        self.body = nnx.Sequential(
            nnx.Linear(D, F, rngs=rngs), nnx.gelu, nnx.Linear(F, D, rngs=rngs)
        )
        self.more = nnx.List([nnx.Linear(D, F, rngs=rngs), nnx.Linear(F, D, rngs=rngs)])

    def __call__(self, x):
        x = x + self.body(self.norms["first"](x))
        up, down = self.more
        return self.norms["last"](x + down(nnx.tanh(up(x))))


class TiedLanguageModel(nnx.Module):
    """A language model with learned positions, whose head is the token embedding."""

    def __init__(self, rngs):
        self.tokens = nnx.Embed(V, D, rngs=rngs)
        self.positions = nnx.Embed(T, D, rngs=rngs)
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.hidden = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, ids):
        x = self.tokens(ids) + self.positions(jnp.arange(ids.shape[1]))
        return self.tokens.attend(self.norm(x + nnx.silu(self.hidden(x))))


class Noisy(nnx.Module):
    """Dropout after both products."""

    def __init__(self, rngs):
        self.up = nnx.Linear(D, F, rngs=rngs)
        self.down = nnx.Linear(F, D, rngs=rngs)
        self.dropouts = nnx.List([nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.25, rngs=rngs)])

    def __call__(self, x):
        return x + self.dropouts[1](self.down(self.dropouts[0](nnx.relu(self.up(x)))))


class ConvNet(nnx.Module):
    """Two convolutions, batch and group norms, on `[B, 8, 8, 3]`."""

    def __init__(self, rngs):
        self.widen = nnx.Conv(3, F, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(F, rngs=rngs)
        self.narrow = nnx.Conv(F, D, (3, 3), strides=2, padding="CIRCULAR", rngs=rngs)
        self.groups = nnx.GroupNorm(D, num_groups=4, rngs=rngs)
        self.head = nnx.Linear(D, 5, rngs=rngs)

    def __call__(self, images):
        x = self.narrow(nnx.relu(self.norm(self.widen(images))))
        return self.head(self.groups(x).mean(axis=(1, 2)))


class Universal(nnx.Module):
    """One block with two names, called three times; two linear layers share a kernel."""

    def __init__(self, rngs):
        self.first = FeedForward(rngs)
        self.again = self.first
        self.one = nnx.Linear(D, D, rngs=rngs)
        self.two = nnx.Linear(D, D, rngs=rngs)
        self.two.kernel = self.one.kernel

    def __call__(self, x):
        x = self.again(x + self.first(x))
        return self.two(nnx.tanh(self.one(x + self.first(x))))


class Stack(nnx.Module):
    """Blocks made by nnx.vmap and run by nnx.scan, each with a parameter of its own."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.gain = nnx.Param(1 + jax.random.normal(rngs.params(), (D,)) / 10)
            self.norm = nnx.LayerNorm(D, rngs=rngs)
            self.mlp = FeedForward(rngs, use_bias=True)

        def __call__(self, x):
            return x + self.gain[...] * self.mlp(self.norm(x))

    def __init__(self, rngs, num_layers=3):
        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Stack.Block(rngs)

        self.blocks = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, block):
            return block(x)

        return run(x, self.blocks)


class Encoder(nnx.Module):
    """nnx.MultiHeadAttention, with norms of queries and keys, and a mask."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            N, D, qkv_features=N * H, normalize_qk=True, decode=False, dropout_rate=0.0, rngs=rngs
        )

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        return x + self.attention(self.norm(x), mask=mask)


class General(nnx.Module):
    """nnx.LinearGeneral over several dims, and the products of attention by nnx.Einsum."""

    def __init__(self, rngs):
        self.heads = nnx.LinearGeneral(D, (N, H), rngs=rngs)
        self.merge = nnx.LinearGeneral((N, H), D, axis=(-2, -1), rngs=rngs)
        self.up = nnx.Einsum("btd,dnf->bntf", (D, N, H), (N, H), rngs=rngs)
        self.down = nnx.Einsum("bntf,nfd->btd", (N, H, D), (D,), rngs=rngs)
        self.mix = nnx.Einsum("...td,ts->...sd", (T, T), rngs=rngs)

    def __call__(self, x):
        x = x + self.merge(nnx.tanh(self.heads(x)))
        return self.mix(x + self.down(nnx.tanh(self.up(x))))


class Homemade(nnx.Module):
    """Plain parameters, not layers: a norm, positions, a table of kernels."""

    class Norm(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(D))

        def __call__(self, x):
            return (
                x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * self.scale[...]
            )

    def __init__(self, rngs):
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (T, D)) / 4)
        self.norm = Homemade.Norm()
        self.kernels = nnx.List(
            [nnx.Param(jax.random.normal(rngs.params(), (D, D)) / 4) for _ in range(2)]
        )
        self.bias = nnx.Param(jnp.zeros(5))
        self.out = nnx.Linear(D, 5, rngs=rngs)

    def __call__(self, x):
        x = self.norm(x + self.positions[...])
        for kernel in self.kernels:
            x = nnx.tanh(x @ kernel[...])
        return self.out(x) + self.bias[...]


class Grouped(nnx.Module):
    """Convolutions over a sequence that no plan can split: grouped, masked and transposed."""

    def __init__(self, rngs):
        mask = np.tril(np.ones((D, D)))[None]
        self.depthwise = nnx.Conv(D, D, 3, feature_group_count=D, rngs=rngs)
        self.masked = nnx.Conv(D, D, 1, mask=mask, rngs=rngs)
        self.back = nnx.ConvTranspose(D, 4, 2, strides=2, rngs=rngs)

    def __call__(self, x):
        return self.back(nnx.tanh(self.masked(self.depthwise(x))))
