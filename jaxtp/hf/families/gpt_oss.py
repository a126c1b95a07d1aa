"""gpt-oss (arXiv 2508.10925).

It has attention sinks, windows in every other layer, and experts with biases, often in MXFP4.
"""

from jaxtp.hf.families import family as base

_MLP = "model.layers.{layer}.mlp."
_GATE_UP = f"{_MLP}experts.gate_up_proj"
_DOWN = f"{_MLP}experts.down_proj"

GPT_OSS = base.Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    tensors=(
        *(base.OUTER + base.NORMS + base.ATTENTION),
        base.Tensor("blocks.attention.sinks", "model.layers.{layer}.self_attn.sinks"),
        base.Tensor("blocks.mlp.router", f"{_MLP}router.weight", transposed=True),
        base.Tensor("blocks.mlp.router_bias", f"{_MLP}router.bias"),
        base.Tensor(
            "blocks.mlp.gate", f"{_GATE_UP}_blocks", transposed=True, layout="mxfp4", chunks="d_ff"
        ),
        base.Tensor(
            "blocks.mlp.up", f"{_GATE_UP}_blocks", transposed=True, layout="mxfp4", chunks="d_ff"
        ),
        base.Tensor("blocks.mlp.down", f"{_DOWN}_blocks", transposed=True, layout="mxfp4"),
        base.Tensor("blocks.mlp.gate", _GATE_UP, chunks="d_ff"),
        base.Tensor("blocks.mlp.up", _GATE_UP, chunks="d_ff"),
        base.Tensor("blocks.mlp.down", _DOWN),
        base.Tensor("blocks.mlp.gate_bias", f"{_GATE_UP}_bias", chunks="d_ff"),
        base.Tensor("blocks.mlp.up_bias", f"{_GATE_UP}_bias", chunks="d_ff"),
        base.Tensor("blocks.mlp.down_bias", f"{_DOWN}_bias"),
    ),
    attributes=(
        *base.with_defaults(
            base.sizes(1e-5),
            **{"vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880},
            **{"num_hidden_layers": 36, "num_attention_heads": 64},
        ),
        base.kv_heads(8),
        base.with_defaults([base.ATTENTION_BIAS], attention_bias=True)[0],
        base.Attribute("num_local_experts", ("num_experts",), int, 128, alias="num_experts"),
        base.Attribute(
            "num_experts_per_tok", ("experts_per_token",), int, 4, alias="experts_per_token"
        ),
        base.Attribute("swiglu_limit", ("swiglu_limit",), float, 7.0),
    ),
    layer_attributes=base.COMMON | base.WINDOW | {"layer_types"},
    default_window=128,
    rope_theta=150_000.0,
    default_rope={
        **{
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        **{"truncate": False, "original_max_position_embeddings": 4096},
    },
    default_head_dim=64,
    # A softmax over a token's experts is one over all experts, normalised.
    always={
        "activation": "quick_gelu",
        "attention_sinks": True,
        "router_bias": True,
        "experts_bias": True,
    },
    required=base.required(swiglu_alpha=1.702),
    # Only OpenAI's code reads it; its value is also in rope_scaling.
    ignored_attributes=base.ROUTER_LOSS | {"initial_context_length"},
    quantization=frozenset({"fp8", "mxfp4"}),
    tp_plan={"lm_head": "colwise_gather_output"},
)
