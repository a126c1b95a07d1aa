"""GPT-2 (Radford et al. 2019): learned positions, LayerNorms, biases, a plain MLP.

The file stores kernels as `[in, out]`, like jaxtp, and fuses q, k and v.
"""

from collections.abc import Iterator

from jaxtp.hf.families.family import ACTIVATIONS, COMMON_REQUIRED, Attribute, Family, Rope, Tensor

_LAYER = "transformer.h.{layer}."


def _columns(ours: str, theirs: str, parts: int) -> Iterator[Tensor]:
    for i in range(parts):
        yield Tensor(f"{ours}.kernels.{i}", f"{_LAYER}{theirs}.weight")
        yield Tensor(f"{ours}.biases.{i}", f"{_LAYER}{theirs}.bias")


def _rows(ours: str, theirs: str) -> Iterator[Tensor]:
    yield Tensor(f"{ours}.kernel", f"{_LAYER}{theirs}.weight")
    yield Tensor(f"{ours}.bias", f"{_LAYER}{theirs}.bias")


def _norm(ours: str, theirs: str) -> Iterator[Tensor]:
    yield Tensor(f"{ours}.scale", f"{theirs}.weight")
    yield Tensor(f"{ours}.bias", f"{theirs}.bias")


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    tensors=(
        Tensor("embedding.embedding", "transformer.wte.weight"),
        Tensor("positions.table", "transformer.wpe.weight"),
        *_norm("blocks.attention_norm", f"{_LAYER}ln_1"),
        *_columns("blocks.attention.qkv", "attn.c_attn", 3),
        *_rows("blocks.attention.out", "attn.c_proj"),
        *_norm("blocks.mlp_norm", f"{_LAYER}ln_2"),
        *_columns("blocks.mlp.up", "mlp.c_fc", 1),
        *_rows("blocks.mlp.down", "mlp.c_proj"),
        *_norm("norm", "transformer.ln_f"),
        Tensor("head.kernel", "lm_head.weight"),
    ),
    attributes=(
        Attribute("vocab_size", ("vocab_size",), int),
        Attribute("n_positions", ("learned_positions",), int, 1024),
        Attribute("n_embd", ("d_model",), int),
        Attribute("n_inner", ("d_ff",), int, other="n_embd", times=4),
        Attribute("n_layer", ("num_layers",), int),
        Attribute("n_head", ("num_heads", "num_kv_heads"), int),
        Attribute("layer_norm_epsilon", ("norm_eps",), float, 1e-5),
        Attribute("tie_word_embeddings", ("tie_embeddings",), bool, True),
        Attribute("activation_function", ("activation",), ACTIVATIONS, "gelu_new"),
        Attribute("scale_attn_weights", ("query_scale",), {True: None, False: 1.0}, True),
    ),
    prefix="transformer.",
    ignored_tensors=(f"{_LAYER}attn.bias", f"{_LAYER}attn.masked_bias"),  # masks
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    rope=Rope.NEVER,
    head_dim=False,
    scale_by_layer="scale_attn_by_inverse_layer_idx",
    always={
        "norm": "layer",
        "mlp": "plain",
        "rope_theta": None,
        **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), True),
    },
    required={
        name: value for name, value in COMMON_REQUIRED.items() if name not in ("hidden_act", "attention_dropout")
    },
    ignored_attributes=frozenset(
        {
            *("resid_pdrop", "embd_pdrop", "attn_pdrop", "reorder_and_upcast_attn", "n_ctx"),
            *("n_special", "predict_special_tokens", "output_past"),
            *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
            *("summary_first_dropout", "summary_last_dropout"),
        }
    ),
)
