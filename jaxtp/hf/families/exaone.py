"""EXAONE 3.0, 3.5 and Deep: Llama's block under GPT-2's names (arXiv 2412.04862)."""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ATTENTION_BIAS,
    MLP_BIAS,
    Family,
    block_tensors,
    only,
    sizes,
    tensors,
    with_biases,
)

_ALIASES = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon"}
"""Names of attributes in published files."""
_BLOCK = "transformer.h.{layer}."

EXAONE = Family(
    model_type="exaone",
    architecture="LlamaForCausalLM",
    tensors=(
        *tensors(
            {
                "embedding.embedding": "transformer.wte.weight",
                "norm.scale": "transformer.ln_f.weight",
                "head.kernel": "lm_head.weight",
            }
        ),
        *block_tensors(
            {"attention_norm.scale": "ln_1.weight", "mlp_norm.scale": "ln_2.weight"}, _BLOCK
        ),
        *with_biases(
            *block_tensors(
                {
                    "attention.qkv.kernels.0": "attn.attention.q_proj.weight",
                    "attention.qkv.kernels.1": "attn.attention.k_proj.weight",
                    "attention.qkv.kernels.2": "attn.attention.v_proj.weight",
                    "attention.out.kernel": "attn.attention.out_proj.weight",
                    "mlp.gate_up.kernels.0": "mlp.c_fc_0.weight",
                    "mlp.gate_up.kernels.1": "mlp.c_fc_1.weight",
                    "mlp.down.kernel": "mlp.c_proj.weight",
                },
                _BLOCK,
                transposed=True,
            )
        ),
    ),
    attributes=(
        *(
            replace(attribute, alias=_ALIASES.get(attribute.name))
            for attribute in sizes(1e-5, kv_heads=8)
        ),
        replace(only("hidden_act", "silu", default="silu"), alias="activation_function"),
        ATTENTION_BIAS,
        MLP_BIAS,
    ),
    prefix="transformer.",
    renamed={
        "wte": "embed_tokens",
        "ln_f": "norm",
        "transformer.h": "transformer.layers",
        "transformer": "model",
        "attn.attention": "self_attn",
        "out_proj": "o_proj",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "c_fc_0": "gate_proj",
        "c_fc_1": "up_proj",
        "c_proj": "down_proj",
    },
    remote_code=("modeling_exaone.ExaoneForCausalLM",),
    rope_theta=500_000.0,
)
