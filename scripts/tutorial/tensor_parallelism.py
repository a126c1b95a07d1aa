# %% [markdown]
# # Tensor parallelism, from a matrix to a training run
#
# A freight train does not fit into the garage of a smart car. You own eight such garages. What
# now?
#
# 1. Park different *wagons* in each garage. (Pipeline parallelism; not in this package.)
# 2. Take every wagon apart, keep an eighth of its parts in each garage, and put one wagon
#    together at a time. (FSDP: fully sharded data parallelism.)
# 3. Cut every wagon *lengthwise*. Each garage has a slice of each wagon, and no wagon is ever put
#    together: the slices work side by side, and exchange a few numbers. (Tensor parallelism.)
#
# The train is a language model, a garage is the memory of a GPU, and this page is about the third
# way. You need Python, pip and two minutes of your laptop, but no GPU. Every number that the text
# promises is asserted in a cell. Install the package with `pip install -e '.[plot]'`, then run this
# notebook, or `python scripts/tutorial/tensor_parallelism.py`, which only prints.

# %%
import re
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
# Nearly all parameters of a model are in products `Y = X W`. There are two ways to cut `W` for four
# devices.

# %%
blackboard.three_ways()

# %% [markdown]
# **Columns**: device i computes some columns of `Y`, and needs all of `X`. Nobody waits for
# anybody. **Rows**: device i needs only some columns of `X`, and computes a *summand* of all of
# `Y`. The four summands have to be added up, so the devices have to talk.
#
# In NumPy, with a list in place of devices:

# %%
TP = 4
X = random.normal(size=(8, 16)).astype(np.float32)  # 8 tokens, 16 features
W = random.normal(size=(16, 32)).astype(np.float32)


def difference(found, expected):
    """Returns the largest difference, relative to the largest number."""
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
# whole cookbook. Two chefs who cook one soup for all guests are *tensor parallel*: each has half of
# the cookbook. First each prepares different ingredients for the same menu (columns). Then each
# cooks a pot from his own ingredients alone (rows). Finally they pour the pots together (the sum).
# They meet once.
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
# `A` and `B` come out in the pieces of `A` and `B`, without communication. The gradient of `X` is a
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
# It is a grid of devices whose directions have names. JAX calls it `jax.sharding.Mesh`, PyTorch
# `DeviceMesh`. Neighbours along `tp` have different slices of one wagon, and neighbours along
# `fsdp` see different sequences of the batch. `make_mesh` has two more axes: devices along `dp`
# have copies of the whole model (data parallelism), and `cp` cuts each sequence into parts (context
# parallelism). An axis that you do not name has size 1.

# %%
blackboard.mesh_grid(mesh)

# %% [markdown]
# A `PartitionSpec` has an entry for each dimension of an array: the mesh axes that cut it. `None`,
# or no entry, means that the dimension is not cut; devices along an axis that is not named hold
# copies. `P("fsdp", "tp")` cuts the rows of `W` in two and its columns in four. To you it stays one
# array of 16 x 32.

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
# gradient inside. They take and return whole arrays, so your code never asks which device it runs
# on. With the weights from above they give the same numbers. A tuple of axes, such as
# `("fsdp", "cp")`, cuts one dimension by both: devices along `cp` would otherwise hold copies.

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
# backward pass of a model, and lists every collective by module, without devices. Here are two
# MLPs, one after the other:


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


batch = jax.ShapeDtypeStruct((8, 16, 64), "float32")  # only shapes: 8 sequences of 16 tokens
explanation = jaxtp.explain(partial(MLPs, 2), batch, mesh="tp=4")
print(explanation)

# %%
modules = ["mlps.0.up", "mlps.0.down", "mlps.1.up", "mlps.1.down"]
blackboard.lanes(explanation.record(), modules, ["columns", "rows", "columns", "rows"])

# %% [markdown]
# In the forward pass a sum follows each row layer. The backward pass runs the other way: there a
# sum follows each column layer, *except the first one*. That sum would be the gradient of the
# model's input, and nobody asks for the gradient of data. In a whole model the first block follows
# the embedding, which has to learn, and the sum is back.
#
# Such a sum, which every device gets, is an *all-reduce*. Devices pass parts of the array around a
# ring. With n bytes and t devices, t - 1 steps of n / t bytes add the parts up, and as many again
# hand the sum out.

# %%
size = 8 * 16 * 64 * 4  # bytes of an activation in float32
assert explanation.sent("tp") == 3 * 2 * (3 / 4) * size
print(f"3 all-reduces of {size:,} bytes: {explanation.sent('tp'):,.0f} bytes from each device")

# %% [markdown]
# ## Why columns, then rows?
#
# Cut in columns, each device has some hidden features complete, and relu acts on each feature
# alone. So nothing has to be exchanged before the rows have been multiplied. Every other order
# moves the hidden features, which are four times as wide as `X`.
#
# Let `explain` try all four orders on a model of plain Flax. A plan says how to cut each module;
# `compiled=True` also counts what the compiler adds. The first `Linear` stays whole: because it has
# weights to train, the backward pass needs the gradient of its output.


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
# A head reads only its own queries, keys and values. So cut the three projections in columns
# *between heads*, and the output projection in rows. It is the MLP again.

# %%
HEADS = 8
WIDTH = 4
LENGTH = 8
sequence = random.normal(size=(LENGTH, 32)).astype(np.float32)
queries, keys, values = random.normal(size=(3, 32, HEADS * WIDTH)).astype(np.float32) / 6
out = random.normal(size=(HEADS * WIDTH, 32)).astype(np.float32) / 6


def attention(x, wq, wk, wv):
    """Returns the result and the weights of the heads whose columns the matrices hold."""
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
blackboard.heads(weights, TP)

# %% [markdown]
# `CausalSelfAttention` does the same. It adds heads of zeros where tp does not divide their number,
# and shares keys and values among devices if there are fewer heads of them than devices.
#
# A block therefore has **four collectives over tp: two forward, two backward**. This is the whole
# trick of [Megatron-LM](https://arxiv.org/abs/1909.08053).
#
# ![A block over fsdp 2 x tp 4](../results/block_light.svg)
#
# To see them, type `jaxtp explain --mesh fsdp=2,tp=4 --model.num-layers 1 --model.remat none
# --model.sequence-parallel false`. Without the last flag each sum comes in two halves, as you will
# see below. *Remat* saves memory: the backward pass computes activations again, and may have to
# repeat collectives.
#
# ## The loss: three numbers for a token
#
# The last matrix computes one logit for each token of the vocabulary. Cut by vocabulary it is a
# column layer (stored transposed), and each device has a part of the logits. To gather them would
# move 128,000 numbers for each token of Llama 3. But the cross-entropy is
# `log(sum(exp(logits))) - logits[label]`: a maximum, a sum and one logit are enough.
# `jaxtp.losses.vocab_parallel_cross_entropy` also computes the logits: no device ever has them all.

# %%
logits = random.normal(size=(LENGTH, 64)).astype(np.float32) * 2
labels = random.integers(0, 64, size=LENGTH)
parts = np.split(logits, TP, axis=1)
label_of = np.arange(LENGTH)

highest = np.max([part.max(1) for part in parts], axis=0)  # an all-reduce: one number a token
total = sum(np.exp(part - highest[:, None]).sum(1) for part in parts)  # a second one
label_logit = np.zeros(LENGTH)
for device, part in enumerate(parts):  # goes with the second one: only one device has the label
    part_size = part.shape[1]
    place = labels - part_size * device
    is_here = (place >= 0) & (place < part_size)
    label_logit += np.where(is_here, part[label_of, np.where(is_here, place, 0)], 0)
losses = np.log(total) + highest - label_logit

expected = np.log(np.exp(logits).sum(1)) - logits[label_of, labels]
assert difference(losses, expected) < 1e-6
blackboard.vocabulary(logits[0], labels[0], TP)

# %% [markdown]
# ## Sequence parallelism: the same bytes, less memory
#
# After an all-reduce every device along tp has the same activations: four copies, through norms and
# residuals, until the next column layer. An all-reduce is a *reduce-scatter* (each device gets a
# part of the sum) and an *all-gather* (all get all parts). So stop after the first half, keep a
# quarter of the tokens on each device, and do the second half where the next column layer needs it.
#
# The backward pass mirrors this: every collective has a partner there, its transpose.
#
# | place | forward | backward |
# |---|---|---|
# | into a column layer | nothing | all-reduce over tp |
# | out of a row layer | all-reduce over tp | nothing |
# | into a column layer, sequence parallel | all-gather over tp | reduce-scatter over tp |
# | out of a row layer, sequence parallel | reduce-scatter over tp | all-gather over tp |
# | a weight that fsdp cuts | all-gather over fsdp | reduce-scatter over fsdp |
# | a weight with copies along dp | nothing | all-reduce over dp |
#
# The fifth row is FSDP: each device gathers a matrix before its product, and again in the backward
# pass, because nobody keeps whole matrices. The reduce-scatter then leaves it the sum of the
# gradients for its own part. `explain` agrees with the table:


# %%
def decoder(width, remat="none", **settings):
    sizes = {"vocab_size": 256, "d_model": width, "num_layers": 2, "d_ff": 3 * width}
    of_heads = {"num_heads": 8, "num_kv_heads": 8, "head_dim": width // 8}
    config = jaxtp.ModelConfig(**sizes, **of_heads, remat=remat, **settings)
    return jaxtp.Decoder(config, rngs=nnx.Rngs(0))


def total_loss(model, ids):
    return model.loss(ids, ids)[0]


def explain_decoder(mesh, sequences, width=64, **settings):
    ids = jax.ShapeDtypeStruct((sequences, 32), "int32")
    build = partial(decoder, width, **settings)
    return jaxtp.explain(build, ids, mesh=mesh, call=total_loss)


def moves(explanation, module):
    """Returns the collectives of a module in their order, such as `forward all-gather`."""
    found = [c for c in explanation.record()["collectives"] if c["module"] == module]
    return [f"{collective['pass']} {collective['collective']}" for collective in found]


whole = explain_decoder("tp=4", 8, sequence_parallel=False)
split = explain_decoder("tp=4", 8, sequence_parallel=True)
stored = explain_decoder("fsdp=8", 8)
copied = explain_decoder("dp=8", 8)

COLUMN = "blocks.mlp.gate_up"
ROW = "blocks.mlp.down"
assert moves(whole, COLUMN) == ["backward all-reduce"]
assert moves(whole, ROW) == ["forward all-reduce"]
assert moves(split, COLUMN) == ["forward all-gather", "backward reduce-scatter"]
assert moves(split, ROW) == ["forward reduce-scatter", "backward all-gather"]
assert moves(stored, ROW) == [
    "forward all-gather",
    "backward all-gather",
    "backward reduce-scatter",
]
assert moves(copied, ROW) == ["backward all-reduce"]

blackboard.bars(
    {
        "Sent over tp, bytes": {"without": whole.sent("tp"), "with": split.sent("tp")},
        "Kept for the backward pass": {"without": whole.saved, "with": split.saved},
    },
    "sequence parallelism",
)
assert abs(split.sent("tp") / whole.sent("tp") - 1) < 0.01
assert 0.69 < split.saved / whole.saved < 0.7

# %% [markdown]
# The extra bytes, less than one percent, are gradients of the norms, whose weights now see
# different tokens on each device. Memory falls by 30%, not by 75%: a column layer keeps its
# gathered input and its own columns, and only what lies between the layers is a quarter as long.
# With remat, sequence parallelism sends up to a quarter more, because it may gather again
# ([`layers/remat.py`](../../jaxtp/layers/remat.py) has a table).
#
# `explain` lists the three numbers of the loss, which is in no layer, under `the model itself`:

# %%
remat_sent = []  # with remat that keeps only the results of products
for on in (False, True):
    explained = explain_decoder("tp=4", 8, remat="save_dots", sequence_parallel=on)
    remat_sent.append(explained.sent("tp"))
assert 1.2 < remat_sent[1] / remat_sent[0] < 1.25

of_loss = 0
for collective in whole.record()["collectives"]:
    if collective["module"] == "the model itself" and collective["pass"] == "forward":
        print(f"{collective['collective']}: {collective['bytes_sent']:,.0f} bytes")
        of_loss += collective["bytes_sent"]
assert of_loss == 3 * 4 * (8 * 32) * 2 * (3 / 4)  # 3 floats of 4 bytes for each of 8 x 32 tokens

# %% [markdown]
# ## fsdp beside tp: where the lines cross
#
# FSDP moves *weights*, however many tokens there are. Tensor parallelism moves *activations*,
# however many weights there are. So with few tokens tp sends less, and with many fsdp does.

# %%
counts = [8, 32, 128]
num_tokens = [32 * sequences for sequences in counts]
curves = {}
for mesh_name, marker in (("fsdp=8", "o-"), ("tp=8", "s-"), ("fsdp=4,tp=2", "^--")):
    explained = [explain_decoder(mesh_name, sequences, 256) for sequences in counts]
    curves[mesh_name] = (num_tokens, [e.sent("fsdp") + e.sent("tp") for e in explained], marker)
blackboard.curves(curves, x="tokens in a batch", y="bytes sent by each device", logarithmic=True)
over_fsdp, over_tp, over_both = (sent for _, sent, _ in curves.values())
crossing = num_tokens[0] * over_fsdp[-1] / over_tp[0]
print(f"the lines of this model, of width 256, cross at {crossing:,.0f} tokens")
assert over_tp[0] < over_fsdp[0]
assert over_tp[-1] > over_fsdp[-1]
assert abs(crossing / (4.5 * 256) - 1) < 0.25
assert over_both[1] < 0.6 * min(over_fsdp[1], over_tp[1])  # at 1,024 tokens

# Llama 3 8B, by hand: its weights are gathered twice, in 2 bytes, and reduced in 4.
of_llama = 13 * 4096**2 * (2 + 2 + 4) / (8 * 4096 * 2)
assert round(of_llama, -3) == 27_000

# %% [markdown]
# By hand: a block of width D has some 12 D² parameters. fsdp gathers them twice and reduces their
# gradient once, 36 D² numbers. Four all-reduces of T tokens send 8 T D numbers, because each sends
# its array twice (both counts leave out (t - 1) / t). They are equal where **T = 4.5 D**, which is
# 1,152 tokens here. Llama 3 8B has 13 D² in a block, and reduces gradients in float32, twice as
# wide as everything else: T = 6.5 D is about 27,000 tokens. If a batch is computed in parts
# (micro-batches), count the tokens of one part: fsdp gathers the weights again for each. Most
# batches have more tokens. Then why use tp at all?
#
# - On a mesh of both, fsdp gathers only this device's tp slice of each weight, and tp sums only
#   this group's sequences. Near the crossing, fsdp 4 x tp 2 sends little more than half of what
#   either pure mesh sends.
# - fsdp needs a sequence for each device. With tp one sequence is enough.
# - fsdp needs room for one whole layer, and one whole sequence, on each device. When that alone is
#   too big, only tp or cp makes it smaller.
#
# A product has to wait for a sum of tp, while weights of fsdp can travel ahead of time. So where
# both are used, tp goes inside a host, where links are fast, and is the last axis of `make_mesh`.

# %% [markdown]
# ## Prepare the model, then hit train
#
# Other libraries have something like `prepare(model)`. What is that in JAX?
#
# 1. **Prepare** is `parallelize(build, plan)` under a mesh: it compiles the *initialisation*, so
#    that each piece of a parameter is born on its device. No device ever holds the whole model.
# 2. **Train** is one function, a step, that `jit` compiles *once* into a program that all devices
#    run. An array's sharding says how it is cut.
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
# `jaxtp.Trainer` is this loop with all that a long run needs, and `jaxtp train` the same from a
# terminal.
#
# ## A planted bug, and who finds it
#
# Everybody makes these two mistakes once. The first is to forget the sum. Here you cannot. All
# layers are made with `device_view`, which runs a function on the pieces of each device. JAX knows
# that the result differs between devices, but `out_specs=P()` says it is the same on all:

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
# No type can see the second mistake. Here is a row layer with a bias, written by a tired person:

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
    verdict = blackboard.jaxtp_command(
        f"check {flags} --mesh tp=2", keep="mesh|FAIL|first|worst|equal"
    )
assert "first difference: down" in verdict
assert "worst gradient down.bias" in verdict

# %% [markdown]
# `check` names the layer and the parameter. Each device adds the bias to its own summand, so it is
# added tp times, here twice. A new bias is zero, so the loss of the first step would be right;
# therefore `check` first adds noise to every parameter. The fix is to add the bias after the
# `psum`.
#
# ## A real model: will it fit, and how fast?
#
# What you counted for a toy, `estimate` counts for a real model, on hardware that you do not have.
# In its table, remat `save_dots` keeps the results of products, and `full` only the input of each
# block. Micro-batches `2 of 4` means that each device computes 4 sequences at a time, twice. MFU
# (model FLOPs utilization) is the share of the hardware's peak speed that goes into the model, and
# `computing` is the share of a step in which devices compute, if they never send meanwhile.

# %%
words = "estimate --config configs/llama3_8b.yaml --hardware h100x8"
table = blackboard.jaxtp_command(words, keep="^mesh|^fsdp|^dp|^tp|^best|^memory|^step")
assert "best    fsdp 8 " in table
assert "does not fit" in table
speeds = re.findall(r"^(\w+ \d.*?)  .*?([\d,]+) to", table, re.MULTILINE)
fastest, _ = max(speeds, key=lambda row: int(row[1].replace(",", "")))
assert fastest == "fsdp 4 x tp 2"

# %% [markdown]
# Read it with what you know now. Llama 3 8B has 65,536 tokens in a batch, above the 27,000 where
# the lines cross, so `tp 8` loses. fsdp 4 x tp 2 sends less than fsdp 8 and is the fastest in the
# table; `best` names fsdp 8 because, of meshes within 5% of the fastest, the simplest wins. With
# `dp` alone every garage has the whole train: it does not fit.
#
# Then ask about your own run: `jaxtp explain --config FILE --mesh fsdp=2,tp=4` lists what moves,
# and `jaxtp check --config FILE` compares meshes with one device. To read the code, begin with the
# five files that [the map](../../jaxtp/README.md) names. You have seen the idea of each.
#
# **To try.** Change `TP`, the number of pieces in NumPy, to 2, then to 3: who complains, and why?
# Put the bias of `TiredRow` where it belongs, remove the two asserts below `check`, and run the
# cell again. Draw the collectives of a block with sequence parallelism from memory, then let
# `jaxtp explain --mesh tp=4 --model.num-layers 1 --model.remat none` list them.
