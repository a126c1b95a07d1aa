"""What the activations of a training step take on a device, in bytes: modelled.

Counted are the arrays that XLA's compiler for GPUs was seen to hold for dense Llama shapes
(`scripts/estimate_accuracy.py`), in the sizes that they have on one device.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from jaxtp.layers.lora import TARGETS
from jaxtp.layers.sequence import is_split
from jaxtp.mesh import DP, FSDP, TP
from jaxtp.models.config import ModelConfig
from jaxtp.train.config import TrainConfig

FLOAT32 = 4


@dataclass(frozen=True)
class Local:
    """The sizes of a step's arrays on one device."""

    model: ModelConfig
    rows: int
    """Sequences of a micro-batch."""
    length: int
    """Tokens in each."""
    between: int
    """Tokens of each between layers: fewer under sequence parallelism."""
    heads: int
    kv_heads: int
    d_ff: int
    vocabulary: int

    @property
    def compute(self) -> int:
        """Bytes of an element of an activation."""
        return jnp.dtype(self.model.precision.compute).itemsize

    @property
    def hidden(self) -> int:
        """Elements of the input of a column layer."""
        return self.rows * self.length * self.model.d_model

    @property
    def residual(self) -> int:
        """Elements of the residual stream."""
        return self.rows * self.between * self.model.d_model

    @property
    def queries(self) -> int:
        """Elements of all queries."""
        return self.rows * self.length * self.heads * self.model.head_dim

    @property
    def keys(self) -> int:
        """Elements of all keys, or values."""
        return self.rows * self.length * self.kv_heads * self.model.head_dim

    @property
    def features(self) -> int:
        """Elements of one of the MLP's hidden activations."""
        return self.rows * self.length * self.d_ff

    @property
    def scores(self) -> int:
        """Elements of the attention scores, which only XLA's attention has whole."""
        return self.rows * self.heads * self.length**2 if self.model.attention == "xla" else 0

    @property
    def inner(self) -> int:
        """Elements of `x @ A` of all adapters of a block."""
        lora = self.model.lora
        return self.rows * self.length * lora.rank * len(lora.adapted(*TARGETS))

    @property
    def frozen(self) -> bool:
        """Adapters are trained, and nothing else has a gradient."""
        return self.model.lora.rank > 0

    @property
    def block_weights(self) -> int:
        """Elements of a block's weights, gathered over fsdp."""
        qkv_out = 2 * (self.heads + self.kv_heads) * self.model.head_dim
        return self.model.d_model * (qkv_out + 3 * self.d_ff)


def local_sizes(config: TrainConfig, sizes: Mapping[str, int]) -> Local:
    """Of a run on a mesh that can hold it."""
    model, length, tp = config.model, config.data.sequence_length, sizes[TP]
    return Local(
        model=model,
        rows=config.data.global_batch_size // (sizes[DP] * sizes[FSDP] * config.train.accumulation),
        length=length,
        between=length // tp if is_split(model.sequence_parallel, length, tp) else length,
        heads=model.num_heads // tp,
        kv_heads=max(1, model.num_kv_heads // tp),
        d_ff=model.d_ff // tp,
        vocabulary=-(-model.vocab_size // tp),
    )


def kept_bytes(local: Local) -> int:
    """What all blocks keep for the backward pass, by remat policy; see `models/remat.py`."""
    c = local.compute
    kept = {
        "offload": 0,  # on the host
        "full": c * local.residual,
        # Beside the block's input what attention adds; what the MLP adds is not needed again.
        "save_gathered": c * (2 * local.residual + 2 * local.hidden),
        "save_dots": c * (2 * local.residual + local.queries + 2 * local.keys + 2 * local.features + local.inner),
        "none": _everything(local),
    }[local.model.remat]
    return local.model.num_layers * kept + _copied_scores(local)


def _everything(local: Local) -> int:
    """Of one block without remat.

    Float32 are the scores before and after the softmax, each norm's input and, for the gradient of its scale, result,
    and queries and keys before their rotation. In the compute dtype: the block's input and the sum after attention, the
    inputs of both column layers, six arrays of the MLP's width (gate and up, sigmoid, silu, its derivative, the
    product), the rotated queries, keys and values, and the adapters' inner products.
    """
    norms = 2 if local.frozen else 4
    float32 = 2 * local.scores + norms * local.residual + local.queries + local.keys
    compute = 2 * local.residual + 2 * local.hidden + 6 * local.features + local.queries + local.keys + local.inner
    return FLOAT32 * float32 + local.compute * compute


def _copied_scores(local: Local) -> int:
    """Without remat, where a device has several kv heads, the backward loop reads one stack of scores in another
    layout than the forward loop has written it in: XLA copies it, of all layers."""
    copied = local.model.remat == "none" and local.kv_heads > 1
    return FLOAT32 * local.model.num_layers * local.scores if copied else 0


def score_bytes_of_block(local: Local) -> int:
    """Scores in one block's backward pass: two arrays of them in float32, two in the compute dtype.

    The scores or their gradient, and a constant of their shape that the mask selects (XLA takes it out of the loop over
    the blocks); the softmax, in the layouts of two products.
    """
    return local.scores * 2 * (FLOAT32 + local.compute)


def block_bytes(local: Local) -> int:
    """Activations that one block's backward pass works on, scores apart: about six of each of the two widths."""
    return 6 * local.compute * (local.features + local.hidden)


def loss_bytes(local: Local, gathered: bool) -> int:
    """The head and the logits of a chunk.

    Of the table's size two float32 arrays (the gradient's sum, and what a chunk adds to it) and one in the compute
    dtype; the logits of a chunk and their gradient in float32. A frozen head has no gradient: its table is there in
    float32 only if it is gathered over fsdp, for it is stored so otherwise.
    """
    table = local.vocabulary * local.model.d_model
    whole = int(gathered) if local.frozen else 2
    logits = local.rows * min(local.model.loss_chunk, local.length) * local.vocabulary
    return (whole * FLOAT32 + local.compute) * table + 2 * FLOAT32 * logits
