"""StarCoder 1 and 2.

StarCoder 1 is like GPT-2 with one key/value head (arXiv 2305.06161), StarCoder 2 is Llama with
LayerNorms and biases (arXiv 2402.19173).
"""

from dataclasses import replace

from jaxtp.hf.families.family import (
    ACTIVATIONS,
    ATTENTION,
    COMMON,
    NORMS,
    OUTER,
    WINDOW,
    Attribute,
    Family,
    block_tensors,
    sizes,
    with_biases,
    with_defaults,
)
from jaxtp.hf.families.gpt2 import GPT2, TRANSPOSED

_FP32 = {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"}

STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    tensors=(
        *(OUTER + NORMS + ATTENTION),
        *with_biases(
            *block_tensors(
                {"mlp.up.kernels.0": "mlp.c_fc.weight", "mlp.down.kernel": "mlp.c_proj.weight"},
                transposed=True,
            ),
        ),
    ),
    attributes=(
        *sizes(1e-5, eps_name="norm_epsilon", tied=True, kv_heads=2),
        Attribute(
            "use_bias",
            "attention_bias",
            bool,
            True,
            also=("attention_out_bias", "mlp_bias"),
        ),
        Attribute("hidden_act", "activation", ACTIVATIONS, "gelu_pytorch_tanh"),
    ),
    layer_attributes=COMMON | WINDOW,
    default_window=None,
    always={"norm": "layer", "mlp": "plain"},
    required={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
    ignored_attributes=_FP32
    | {
        "attention_dropout",
        "activation_function",
        "layer_norm_epsilon",
    },
)

# There is one key/value head, so n_head does not set num_kv_heads.
_ATTRIBUTES = tuple(replace(attribute, also=()) for attribute in GPT2.attributes)

GPT_BIGCODE = replace(
    GPT2,
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    tensors=TRANSPOSED,
    attributes=with_defaults(_ATTRIBUTES, activation_function="gelu_pytorch_tanh"),
    always={**GPT2.always, "num_kv_heads": 1},
    required={"multi_query": True},
    layer_attributes=frozenset(),
    ignored_attributes=GPT2.ignored_attributes
    | _FP32
    | {
        "num_key_value_heads",
        "intermediate_size",
        "inference_runner",
        "validate_runner_input",
        "max_batch_size",
        "pad_key_length",
        "pre_allocate_kv_cache",
    },
)
