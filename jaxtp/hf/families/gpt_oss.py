"""gpt-oss (arXiv 2508.10925).

It has attention sinks, windows in every other layer, and experts with biases, often in MXFP4.
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ATTENTION_BIAS,
    BODY,
    COMMON,
    WINDOW,
    Attribute,
    Family,
    block_tensors,
    sizes,
    with_defaults,
)

_GATE_UP_BLOCKS = {
    "mlp.gate": "mlp.experts.gate_up_proj_blocks",
    "mlp.up": "mlp.experts.gate_up_proj_blocks",
}
_GATE_UP = {
    "mlp.gate": "mlp.experts.gate_up_proj",
    "mlp.up": "mlp.experts.gate_up_proj",
}
_GATE_UP_BIASES = {
    "mlp.gate_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.up_bias": "mlp.experts.gate_up_proj_bias",
}

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    tensors=(
        *BODY,
        *block_tensors({"attention.sinks": "self_attn.sinks"}),
        *block_tensors({"mlp.router": "mlp.router.weight"}, transposed=True),
        *block_tensors({"mlp.router_bias": "mlp.router.bias"}),
        *block_tensors(_GATE_UP_BLOCKS, transposed=True, layout="mxfp4", chunks="d_ff"),
        *block_tensors(
            {"mlp.down": "mlp.experts.down_proj_blocks"}, transposed=True, layout="mxfp4"
        ),
        *block_tensors(_GATE_UP, chunks="d_ff"),
        *block_tensors({"mlp.down": "mlp.experts.down_proj"}),
        *block_tensors(_GATE_UP_BIASES, chunks="d_ff"),
        *block_tensors({"mlp.down_bias": "mlp.experts.down_proj_bias"}),
    ),
    attributes=(
        *with_defaults(
            sizes(1e-5, kv_heads=8),
            vocab_size=201_088,
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=36,
            num_attention_heads=64,
        ),
        replace(ATTENTION_BIAS, default=True),
        Attribute("num_local_experts", "num_experts", int, 128, alias="num_experts"),
        Attribute("num_experts_per_tok", "experts_per_token", int, 4, alias="experts_per_token"),
        Attribute("swiglu_limit", "swiglu_limit", float, 7.0),
    ),
    layer_attributes=COMMON | WINDOW | {"layer_types"},
    default_window=128,
    rope_theta=150_000.0,
    default_rope={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    default_head_dim=64,
    # A softmax over a token's experts is one over all experts, normalised.
    always={
        "activation": "quick_gelu",
        "attention_sinks": True,
        "router_bias": True,
        "experts_bias": True,
    },
    required={"swiglu_alpha": 1.702},
    # Only OpenAI's code reads it; its value is also in rope_scaling.
    ignored_attributes={"initial_context_length"},
    quantization={"fp8", "mxfp4"},
)
