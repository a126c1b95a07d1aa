# %% [markdown]
# # Tensor parallelism, from a matrix to a training run
#
# A freight train does not fit into the garage of a smart car. You own eight such garages. What
# now?
#
# 1. Park different *wagons* in each garage. (Pipeline parallelism; not in this package.)
# 2. Take every wagon apart, keep an eighth of its parts in each garage, and put one wagon
#    together at a time, wherever it is needed. (FSDP: fully sharded data parallelism.)
# 3. Cut every wagon *lengthwise*. Each garage has a slice of each wagon, and no wagon is ever put
#    together: the slices work side by side, and call out a few numbers to each other. (Tensor
#    parallelism.)
#
# The train is a language model, a garage is the memory of a GPU, and this page is about the third
# way. You need Python, NumPy and two minutes of your laptop; no GPU. Every number that the text
# promises is asserted in a cell.
#
# Install the package with `pip install -e '.[plot]'`. Then run this page as a notebook, in an
# editor that knows cells (`# %%`), or by `python scripts/tutorial/tensor_parallelism.py`, which
# only prints.

# %%
import tempfile
from functools import partial
from pathlib import Path

import blackboard
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.collectives import device_view
from jaxtp.layers import HeadConfig
from jaxtp.losses import vocab_parallel_cross_entropy
from jaxtp.plans import Colwise, Rowwise

mesh = jaxtp.make_mesh(fsdp=2, tp=4)  # first of all: it makes eight virtual devices of your CPU
random = np.random.default_rng(0)

# A parameter of a training run with Adam takes 16 bytes: itself, its gradient and two moments, each
# of 4 bytes. Here are 8 billion of them, and a GPU of 80 GB.
train = 8e9 * 16 / 1e9
print(f"the train {train:.0f} GB, the garage 80 GB, an eighth of the train {train / 8:.0f} GB")
assert train / 8 < 80 < train

# %% [markdown]
# ## A matrix in one piece, in columns, in rows
#
# Nearly all parameters of a model are in matrices that multiply: `Y = X W`. There are two ways to
# cut `W` for four devices.

# %%
blackboard.three_ways()

# %% [markdown]
# **Columns**: device i computes some columns of `Y`, and needs all of `X`. Nobody waits for
# anybody. **Rows**: device i needs some columns of `X` only, and computes a *summand* of all of
# `Y`. Somebody has to add up four summands, and devices have to talk.
#
# In NumPy, with a list in place of devices:

# %%
TP = 4
X = random.normal(size=(8, 16)).astype(np.float32)  # 8 tokens, 16 features
W = random.normal(size=(16, 32)).astype(np.float32)


def difference(found, expected):
    """Returns the largest difference, as a part of the largest number."""
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())


columns = [X @ part for part in np.split(W, TP, axis=1)]
by_columns = np.concatenate(columns, axis=1)

inputs = np.split(X, TP, axis=1)
summands = [x @ part for x, part in zip(inputs, np.split(W, TP, axis=0), strict=True)]
by_rows = sum(summands)

print("columns, on each device:", columns[0].shape, " put together:", by_columns.shape)
print("summands, on each device:", summands[0].shape, " added up:", by_rows.shape)
assert difference(by_columns, X @ W) < 1e-6
assert difference(by_rows, X @ W) < 1e-6

# %% [markdown]
# ## Two chefs
#
# Two chefs who each cook the whole menu for half of the guests are *data parallel*. Both need the
# whole cookbook.
#
# Two chefs who cook one soup for all guests are *tensor parallel*: each has half of the cookbook.
# First each prepares other ingredients, from the same order (columns). Then each cooks a pot from
# his own ingredients alone (rows). At last they pour the pots together (the sum). They meet once.
#
# The soup is the MLP of a transformer block, `Y = relu(X A) B`: `A` in columns, `B` in rows.

# %%
A = random.normal(size=(16, 64)).astype(np.float32) / 4
B = random.normal(size=(64, 16)).astype(np.float32) / 8


def relu(hidden):
    return np.maximum(hidden, 0)


first_columns = np.split(A, TP, axis=1)
second_rows = np.split(B, TP, axis=0)

hidden = [relu(X @ a) for a in first_columns]  # nobody talks
pots = [h @ b for h, b in zip(hidden, second_rows, strict=True)]  # nobody talks
Y = sum(pots)  # the one collective of the forward pass: an all-reduce
print(f"{TP} pots, each {pots[0].shape}; one soup {Y.shape}")
assert difference(Y, relu(X @ A) @ B) < 1e-6

# %% [markdown]
# The backward pass starts from `G`, the gradient of `Y`, which every device has. The gradients of
# `A` and `B` come out in the same pieces as `A` and `B`, without a word. The gradient of `X` is a
# sum again: each device used all of `X`, so each knows a part of the blame.

# %%
G = random.normal(size=Y.shape).astype(np.float32)

second_grad = [h.T @ G for h in hidden]
hidden_grad = [(G @ b.T) * (h > 0) for h, b in zip(hidden, second_rows, strict=True)]
first_grad = [X.T @ g for g in hidden_grad]
input_grad = sum(g @ a.T for g, a in zip(hidden_grad, first_columns, strict=True))  # an all-reduce

whole_hidden = relu(X @ A)
whole_grad = (G @ B.T) * (whole_hidden > 0)
assert difference(np.concatenate(first_grad, axis=1), X.T @ whole_grad) < 1e-6
assert difference(np.concatenate(second_grad, axis=0), whole_hidden.T @ G) < 1e-6
assert difference(input_grad, whole_grad @ A.T) < 1e-6
print("one sum forward, one sum backward, and every gradient is that of one device")

# %% [markdown]
# ## What is a DeviceMesh?
#
# A grid of devices whose directions have names. JAX has it as `jax.sharding.Mesh`, PyTorch as
# `DeviceMesh`. A name lets you say *which* devices hold other pieces: neighbours along `tp` have
# slices of one wagon, neighbours along `fsdp` see other rows of the batch. `make_mesh` always has
# four axes: `dp`, `fsdp`, `cp` and `tp`. Those that you do not name have size 1.

# %%
blackboard.mesh_grid(mesh)

# %% [markdown]
# A `PartitionSpec` has an entry for each dimension of an array: the mesh axes that cut it.
# `P("fsdp", "tp")` cuts the rows of `W` in two and its columns in four. To you it stays one array
# of 16 x 32; each device has a piece.

# %%
on_mesh = jax.device_put(W, NamedSharding(mesh, P("fsdp", "tp")))
print("the array", on_mesh.shape)
for shard in on_mesh.addressable_shards[:3]:
    rows, cols = shard.index
    place = f"rows {rows.start}:{rows.stop}, columns {cols.start}:{cols.stop}"
    print(f"device {shard.device.id} has {place}, an array {shard.data.shape}")
assert {shard.data.shape for shard in on_mesh.addressable_shards} == {(8, 8)}

# %% [markdown]
# ## The same with the layers
#
# `ColumnParallelLinear` and `RowParallelLinear` are the two ways to cut, with the sum and its
# gradient inside. They take and return whole arrays: there are no ranks in your code. Here they
# get the weights from above, and give the same numbers.

# %%
with jax.set_mesh(mesh):
    up = jaxtp.ColumnParallelLinear(16, 64, rngs=nnx.Rngs(0))
    down = jaxtp.RowParallelLinear(64, 16, rngs=nnx.Rngs(0))
    for parameter, array in ((up.kernels[0], A), (down.kernel, B)):
        parameter[...] = jax.device_put(array, parameter[...].sharding)

    def weighted_sum(layers, x):
        first, second = layers
        y = second(jax.nn.relu(first(x)))
        return (y * G).sum(), y

    gradient = nnx.value_and_grad(weighted_sum, argnums=(0, 1), has_aux=True)
    (_, y), (_, found_grad) = gradient(nnx.List([up, down]), jnp.asarray(X))

print("A is cut by", up.kernels[0][...].sharding.spec, "and B by", down.kernel[...].sharding.spec)
forward_error = difference(y, Y)
backward_error = difference(found_grad, input_grad)
print(f"difference from NumPy: forward {forward_error:.0e}, backward {backward_error:.0e}")
assert forward_error < 1e-6
assert backward_error < 1e-6

# %% [markdown]
# ## Count what moves
#
# Do not believe a page that says "two collectives". Count them: `explain` traces the forward and
# backward pass of a model and lists every collective, by module. Nothing is computed, and the
# devices need not exist. Two MLPs, one after the other:


# %%
class MLPs(nnx.Module):
    def __init__(self, count):
        config = jaxtp.MLPConfig(d_ff=256, mlp="plain", activation="relu")
        rngs = nnx.Rngs(0)
        self.mlps = nnx.List([jaxtp.MLP(64, config, rngs=rngs) for _ in range(count)])

    def __call__(self, x):
        for mlp in self.mlps:
            x = x + mlp(x)
        return x


batch = jax.ShapeDtypeStruct((8, 16, 64), "float32")  # only shapes: 8 rows of 16 tokens
explanation = jaxtp.explain(partial(MLPs, 2), batch, mesh="tp=4")
print(explanation)

# %%
modules = ["mlps.0.up", "mlps.0.down", "mlps.1.up", "mlps.1.down"]
blackboard.lanes(explanation.record(), modules, ["columns", "rows", "columns", "rows"])

# %% [markdown]
# Forward there is a sum after each row layer. Backward there is a sum before each column layer,
# *but one*: the first MLP's is missing. Its sum would be the gradient of the model's input, and
# nobody asks for the gradient of data. Autodiff is lazy in the right way. In a whole model the
# first layer follows the embedding, which has to learn, and the sum is back.
#
# An all-reduce of n bytes over t devices sends 2 (t - 1) / t n from each device: once around to
# add up, once around to hand out.

# %%
collectives = explanation.record()["collectives"]
assert {collective["collective"] for collective in collectives} == {"all-reduce"}
passes = [collective["pass"] for collective in collectives]
assert (passes.count("forward"), passes.count("backward")) == (2, 1)
size = 8 * 16 * 64 * 4  # bytes of an activation in float32
assert explanation.sent("tp") == 3 * 2 * (3 / 4) * size
print(f"3 all-reduces of {size:,} bytes: {explanation.sent('tp'):,.0f} bytes from each device")

# %% [markdown]
# ## Why columns, then rows?
#
# Between the two matrices is a function that is not linear, and the relu of a sum is not the sum
# of relus. If the chefs had to season before they pour together, they would have to meet twice.

# %%
wrong = sum(relu(x @ a) for x, a in zip(inputs, np.split(A, TP, axis=0), strict=True))
print(f"rows first, and no sum before the relu: wrong by {difference(wrong, relu(X @ A)):.0%}")
assert difference(wrong, relu(X @ A)) > 0.1

# %% [markdown]
# So every other order has to move the hidden features, which are four times as many as the
# features of `X`, or cannot use that they are cut. Let `explain` try all four orders on a model
# of plain Flax. A plan says how to cut each module; `compiled=True` also counts what the compiler
# adds where pieces do not fit together. The first `Linear` stays whole: it makes someone ask for
# the gradient of its output.


# %%
def plain_mlp():
    rngs = nnx.Rngs(0)
    linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
    return nnx.Sequential(linear(64, 64), linear(64, 256), nnx.relu, linear(256, 64))


tokens = jax.ShapeDtypeStruct((128, 64), "float32")
sent = {}
for first in (Colwise(), Rowwise()):
    for second in (Rowwise(), Colwise()):
        plan = {"layers.1": first, "layers.3": second}
        tried = jaxtp.explain(plain_mlp, tokens, plan=plan, mesh="tp=4", compiled=True)
        names = [type(style).__name__.removesuffix("wise") for style in (first, second)]
        sent[", ".join(names)] = tried.sent("tp")
blackboard.bars({"Sent by each device over tp, forward and backward, in bytes": sent})
assert min(sent, key=sent.get) == "Col, Row"
assert all(other >= 2 * sent["Col, Row"] for name, other in sent.items() if name != "Col, Row")

# %% [markdown]
# ## Attention: whole heads
#
# A head reads its own queries, keys and values, and nobody else's. So cut the three projections
# in columns *between heads*, and the output projection in rows. It is the MLP again: columns,
# something that is local, rows, one sum.

# %%
HEADS = 8
WIDTH = 4
LENGTH = 8
sequence = random.normal(size=(LENGTH, 32)).astype(np.float32)
queries, keys, values = random.normal(size=(3, 32, HEADS * WIDTH)).astype(np.float32) / 6
out = random.normal(size=(HEADS * WIDTH, 32)).astype(np.float32) / 6


def attention(x, wq, wk, wv):
    """Returns the result and the weights of some heads; the matrices have their columns."""
    q, k, v = ((x @ w).reshape(len(x), -1, WIDTH).swapaxes(0, 1) for w in (wq, wk, wv))
    scores = q @ k.swapaxes(1, 2) / np.sqrt(WIDTH)  # [heads, T, T]
    scores = np.where(np.tri(len(x)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v).swapaxes(0, 1).reshape(len(x), -1), weights


whole, weights = attention(sequence, queries, keys, values)
cut = [np.split(matrix, TP, axis=1) for matrix in (queries, keys, values)]
heads = [attention(sequence, *matrices)[0] for matrices in zip(*cut, strict=True)]
attended = sum(h @ rows for h, rows in zip(heads, np.split(out, TP, axis=0), strict=True))
assert difference(attended, whole @ out) < 1e-6
blackboard.heads(weights)

# %% [markdown]
# The layer does the same. It also pads heads that tp does not divide, and shares keys and values
# among devices if there are fewer of them.

# %%
config = jaxtp.AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=4, rope_theta=None)
with jax.set_mesh(mesh):
    layer = jaxtp.CausalSelfAttention(32, config, rngs=nnx.Rngs(0))
    kernels = [*layer.qkv.kernels, layer.out.kernel]
    for parameter, array in zip(kernels, (queries, keys, values, out), strict=True):
        parameter[...] = jax.device_put(array, parameter[...].sharding)
    rows = layer(jnp.stack([sequence, sequence]))  # a batch of two rows, for fsdp 2
print(f"difference from NumPy: {difference(rows[0], attended):.0e}")
assert difference(rows[0], attended) < 1e-6

# %% [markdown]
# A block therefore has **four collectives over tp: two forward, two backward**. This is the whole
# trick of [Megatron-LM](https://arxiv.org/abs/1909.08053).
#
# ![A block over fsdp 2 x tp 4](../results/block_light.svg)
#
# ## The loss: three numbers for a token
#
# The last matrix has a row for each word. Cut between words, each device has the logits of a part
# of the vocabulary. Gathering them would move 128,000 numbers for each token of Llama 3. But the
# cross-entropy is `log(sum(exp(logits))) - logits[label]`: a maximum, a sum and one logit are
# enough.

# %%
logits = random.normal(size=(LENGTH, 64)).astype(np.float32) * 2
labels = random.integers(0, 64, size=LENGTH)
parts = np.split(logits, TP, axis=1)
label_of = np.arange(LENGTH)

highest = np.max([part.max(1) for part in parts], axis=0)  # an all-reduce: one number a token
total = sum(np.exp(part - highest[:, None]).sum(1) for part in parts)  # another one
label_logit = np.zeros(LENGTH)
for device, part in enumerate(parts):  # the third one: only one device has the label
    place = labels - 16 * device
    is_here = (place >= 0) & (place < 16)
    label_logit += np.where(is_here, part[label_of, np.where(is_here, place, 0)], 0)
losses = np.log(total) + highest - label_logit

expected = np.log(np.exp(logits).sum(1)) - logits[label_of, labels]
assert difference(losses, expected) < 1e-6
blackboard.vocabulary(logits[0], labels[0])

# %% [markdown]
# `vocab_parallel_cross_entropy` is fused with the last matrix: whole logits exist nowhere, not
# even on one device.

# %%
features = random.normal(size=(2, LENGTH, 16)).astype(np.float32)
table = random.normal(size=(64, 16)).astype(np.float32)
ids = random.integers(0, 64, size=(2, LENGTH))
with jax.set_mesh(mesh):
    summed, count = vocab_parallel_cross_entropy(features, table, ids, HeadConfig(64))
picture = features @ table.T
picked = np.take_along_axis(picture, ids[..., None], axis=-1)[..., 0]
expected = (np.log(np.exp(picture).sum(-1)) - picked).sum()
print(f"summed over {int(count)} tokens {float(summed):.4f}, in NumPy {expected:.4f}")
assert difference(summed, expected) < 1e-6

# %% [markdown]
# ## Sequence parallelism: the same bytes, less memory
#
# After each all-reduce every device of a tp group has the same activations: four copies of one
# thing, through norms and residuals, until the next column layer. An all-reduce is a
# *reduce-scatter* (each gets a part of the sum) and an *all-gather* (all get all parts). So stop
# after the first half, keep a quarter of the tokens each, and do the second half just before it
# is needed.


# %%
def decoder(width, **settings):
    sizes = {"vocab_size": 256, "d_model": width, "num_layers": 2, "d_ff": 3 * width}
    of_heads = {"num_heads": 8, "num_kv_heads": 8, "head_dim": width // 8}
    config = jaxtp.ModelConfig(**sizes, **of_heads, remat="none", **settings)
    return jaxtp.Decoder(config, rngs=nnx.Rngs(0))


def total_loss(model, ids):
    return model.loss(ids, ids)[0]


def explain_decoder(mesh, rows, width=64, **settings):
    ids = jax.ShapeDtypeStruct((rows, 32), "int32")
    build = partial(decoder, width, **settings)
    return jaxtp.explain(build, ids, mesh=mesh, call=total_loss)


whole = explain_decoder("tp=4", rows=8, sequence_parallel=False)
split = explain_decoder("tp=4", rows=8, sequence_parallel=True)
blackboard.bars(
    {
        "Sent over tp, bytes": {"all-reduce": whole.sent("tp"), "sequence": split.sent("tp")},
        "Kept for the backward pass": {"all-reduce": whole.saved, "sequence": split.saved},
    }
)
assert abs(split.sent("tp") / whole.sent("tp") - 1) < 0.01
assert split.saved < 0.75 * whole.saved

# %% [markdown]
# What is sent more, less than one percent, are gradients of the norms: their weights now see
# other tokens on each device. `ModelConfig` turns sequence parallelism on by itself where tp
# divides the sequence. The three numbers of the loss are in this count, too:

# %%
of_loss = 0
for collective in whole.record()["collectives"]:
    if collective["module"] == "the model itself" and collective["pass"] == "forward":
        print(f"{collective['collective']}: {collective['bytes_sent']:,.0f} bytes")
        of_loss += collective["bytes_sent"]
assert of_loss == 3 * 4 * (8 * 32) * 2 * (3 / 4)  # 3 floats of 4 bytes for each of 8 x 32 tokens

# %% [markdown]
# ## fsdp beside tp: where the lines cross
#
# FSDP moves *weights*, whatever the batch. Tensor parallelism moves *activations*, whatever the
# number of weights. So with few tokens tp sends less, and with many fsdp does.

# %%
row_counts = [8, 32, 128, 512]
over_fsdp = [explain_decoder("fsdp=8", rows, 256).sent("fsdp") for rows in row_counts]
over_tp = [explain_decoder("tp=8", rows, 256).sent("tp") for rows in row_counts]
num_tokens = [32 * rows for rows in row_counts]
blackboard.curves(
    {
        "fsdp 8: weights": (num_tokens, over_fsdp, "o-"),
        "tp 8: activations": (num_tokens, over_tp, "s-"),
    },
    x="tokens in a batch",
    y="bytes sent by each device",
    logarithmic=True,
)
crossing = num_tokens[0] * over_fsdp[-1] / over_tp[0]
print(f"the lines of this model, of width 256, cross at {crossing:,.0f} tokens")
assert over_tp[0] < over_fsdp[0]
assert over_tp[-1] > over_fsdp[-1]
assert abs(crossing / (4.5 * 256) - 1) < 0.25

# %% [markdown]
# By hand: a block of width D has some 12 D² parameters. fsdp gathers them twice and reduces their
# gradient once, 36 D² numbers. Four all-reduces of T tokens are 8 T D numbers. They are equal
# where **T = 4.5 D**, which is 1,152 tokens here. For Llama 3 8B, with D = 4096, it is 18,432
# tokens, and its batch has more. Then why use tp at all?
#
# - A batch has to have a row for each device of fsdp. Tensor parallelism needs no more rows, and
#   works with one.
# - fsdp puts one wagon together at a time. tp never does: activations and logits shrink, too.
# - tp belongs where links are fast, inside one host: its sums stand between two products that
#   wait. The weights of fsdp can travel ahead of time, also between hosts.
#
# So real meshes have both: tp inside a host, fsdp outside. That is why tp is the last axis of
# `make_mesh`.

# %% [markdown]
# ## Prepare the model, then hit train
#
# In other libraries you call something like `prepare(model)`, and hit train. What is that in JAX?
#
# 1. **Prepare** is `parallelize(build, plan)` under a mesh: it compiles the *initialisation*, so
#    that each piece of a parameter is born on its device. No device ever holds the whole model.
# 2. **Train** is one function, a step, that `jit` compiles *once* into a program that all devices
#    run. How an array is cut stands in its sharding, and collectives are part of the program: no
#    ranks, no wrapper around the optimizer, no hooks.
#
# The model below is plain Flax, written for one device. It learns the same on one and on eight.


# %%
def mlp():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Linear(16, 64, rngs=rngs), nnx.gelu, nnx.Linear(64, 16, rngs=rngs))


def train_on(mesh):
    with jax.set_mesh(mesh):
        model = jaxtp.parallelize(mlp, {"layers.0": Colwise(), "layers.2": Rowwise()})
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            def loss(model):
                return ((model(x) - jnp.sin(3 * x)) ** 2).mean()

            value, gradient = nnx.value_and_grad(loss)(model)
            optimizer.update(model, gradient)
            return value

        batches = np.random.default_rng(1).normal(size=(60, 32, 16)).astype(np.float32)
        return [float(step(model, optimizer, x)) for x in batches]


one = train_on(jaxtp.make_mesh())
eight = train_on(mesh)
steps = range(1, len(one) + 1)
blackboard.curves(
    {"one device": (steps, one, "-"), "fsdp 2 x tp 4": (steps, eight, ":")}, x="step", y="loss"
)
assert one[-1] < 0.7 * one[0]
assert difference(eight, np.array(one)) < 1e-4

# %% [markdown]
# `jaxtp.Trainer` is this loop with all that a long run needs: it resumes on any mesh, evaluates,
# checks and logs. `jaxtp train` is the same from a terminal.
#
# ## A planted bug, and who finds it
#
# Two mistakes that everybody makes once. The first is to forget the sum. Here you cannot.
# `device_view` runs a function on the pieces of each device; all layers are made with it. JAX
# knows that the result differs between devices, and the spec says that it does not:

# %%
specs = (P(None, "tp"), P("tp", None))
row_product = device_view(lambda x, w: x @ w, "row_product", in_specs=specs, out_specs=P())
try:
    with jax.set_mesh(mesh):
        row_product(X, W)
    raise AssertionError("a missing sum was not noticed")
except ValueError as error:
    print("refused:", error)

# %% [markdown]
# The second mistake no type can see. A row layer with a bias, written by a tired person:

# %%
BUGGY = """
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxtp

BATCH = ("dp", "fsdp")


class TiredRow(nnx.Module):
    def __init__(self, rngs):
        kernel = jax.random.normal(rngs.params(), (32, 16)) / 6
        self.kernel = nnx.Param(kernel, out_sharding=("tp", None))
        self.bias = nnx.Param(jnp.zeros(16), out_sharding=(None,))

    def __call__(self, x):
        if jax.sharding.get_abstract_mesh().empty:
            return x @ self.kernel[...] + self.bias[...]
        return jax.shard_map(
            lambda x, kernel, bias: jax.lax.psum(x @ kernel + bias, "tp"),
            in_specs=(P(BATCH, "tp"), P("tp"), P()),
            out_specs=P(BATCH),
        )(x, self.kernel[...], self.bias[...])


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = jaxtp.ColumnParallelLinear(16, 32, rngs=rngs)
        self.down = TiredRow(rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


def loss(model, batch, key):
    return ((model(batch["x"]) - batch["y"]) ** 2).sum(), len(batch["x"])


def batches(step):
    x, y = np.random.default_rng(step).normal(size=(2, 16, 16)).astype("float32")
    return {"x": x, "y": y}
"""
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "tired.py")
    file.write_text(BUGGY)
    flags = f"--model.build {file}:Model --train.loss {file}:loss --data.batches {file}:batches"
    verdict = blackboard.jaxtp_command(f"check {flags} --mesh tp=2", keep="mesh|FAIL|first|worst")
assert "first difference: down" in verdict
assert "worst gradient down.bias" in verdict

# %% [markdown]
# `check` names the layer and the parameter. Each of the devices adds the bias to its own summand,
# so it is added twice, or as often as tp has devices. A new bias is zero, so that the loss of the
# first step would be right: `check` adds noise to every parameter first. The mend is to add the
# bias after the `psum`.
#
# ## A real model: will it fit, and how fast?
#
# What you counted for a toy, `estimate` counts for a real model, on hardware that you do not
# have: every mesh, its memory, and the time of its products and collectives.

# %%
words = "estimate --config configs/llama3_8b.yaml --hardware h100x8"
table = blackboard.jaxtp_command(words, keep="^mesh|^fsdp|^dp|^tp|^best|^memory|^step")
assert "best    fsdp" in table
assert "does not fit" in table

# %% [markdown]
# Read it with what you know now. Llama 3 8B has 65,536 tokens in a batch, above the 18,000 where
# the lines cross, so fsdp 8 and fsdp 4 x tp 2 win by speed, and `tp 8` spends more of its time in
# sums. With `dp` alone every garage has the whole train: it does not fit.
#
# Then ask about your own run: `jaxtp explain --config FILE --mesh fsdp=2,tp=4` lists what moves,
# and `jaxtp check --config FILE` compares meshes with one device.
#
# ## Five files to read now
#
# You have seen each of their ideas. Together they are a small evening.
#
# 1. [`mesh.py`](../../jaxtp/mesh.py): the axes, and the grid of devices
# 2. [`collectives.py`](../../jaxtp/collectives.py): what moves, forward and backward, in one
#    table
# 3. [`layers/linear.py`](../../jaxtp/layers/linear.py): columns and rows
# 4. [`models/decoder.py`](../../jaxtp/models/decoder.py): a model that reads like ordinary JAX
# 5. [`train/step.py`](../../jaxtp/train/step.py): from a batch to the update
#
# **To try.** Change `TP` to 2, then to 3: who complains, and why? Put the bias of `TiredRow`
# where it belongs and run `check` again. Draw the collectives of a block with sequence
# parallelism from memory, then let `explain` draw them.
