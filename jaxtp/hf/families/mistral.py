"""Mistral and Mixtral.

Mistral is Llama with a sliding window (arXiv 2310.06825); Mixtral has experts in every layer (arXiv
2401.04088).

Ministral: Mistral with a window in some layers. Ministral 3: Mistral whose queries grow with their
position. Mistral 4: DeepSeek's attention and groups of experts, with softmax scores and such
queries.
"""

from dataclasses import replace

from jaxtp.hf.families.deepseek import DEEPSEEK_V3, LATENT_BODY
from jaxtp.hf.families.family import (
    BODY,
    COMMON,
    NEVER,
    ROUTER,
    SHARED_EXPERTS,
    STACKED_EXPERTS,
    WINDOW,
    Attribute,
    Family,
    Wrapper,
    first_dense,
    numbers_of_experts,
    replace_all,
    separate_experts,
    sizes,
    with_defaults,
)

SPARSE_EXPERTS = (
    replace(ROUTER, name="model.layers.{layer}.block_sparse_moe.gate.weight", layout="separate"),
    replace(ROUTER, layout="stacked"),
    *separate_experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
    *STACKED_EXPERTS,
)
"""Mixtral's experts, whose module has another name in files than in memory."""

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    attributes=sizes(kv_heads=8),
    layer_attributes=COMMON | WINDOW,
)


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    tensors=BODY + SPARSE_EXPERTS,
    attributes=(
        *sizes(1e-5, kv_heads=8),
        *numbers_of_experts("num_local_experts", 8, 2, "num_experts"),
    ),
    layer_attributes=COMMON | WINDOW,
    default_window=None,
    rope_theta=1e6,
    required={"router_jitter_noise": 0.0},
)

MINISTRAL = replace(
    MISTRAL,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    layer_attributes=MISTRAL.layer_attributes | {"layer_types"},
    window_period=NEVER,
    window_can_be_null=True,
)

MINISTRAL3 = replace(
    MISTRAL,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    attributes=sizes(1e-5, kv_heads=8),
    rope_attributes=(
        Attribute("llama_4_scaling_beta", "query_temperature", float, 0.0, can_be_zero=True),
    ),
    default_window=None,
    window_can_be_null=True,
    default_head_dim=128,
    default_rope={
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
)

MISTRAL4 = replace(
    DEEPSEEK_V3,
    model_type="mistral4",
    architecture="Mistral4ForCausalLM",
    # transformers has experts in one layout.
    tensors=(
        *LATENT_BODY,
        ROUTER,
        *replace_all(STACKED_EXPERTS, layout=None),
        *SHARED_EXPERTS,
    ),
    attributes=with_defaults(
        DEEPSEEK_V3.attributes,
        num_key_value_heads=32,
        q_lora_rank=1024,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        n_routed_experts=128,
        num_experts_per_tok=4,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
    ),
    rope_attributes=MINISTRAL3.rope_attributes,
    rope_kinds={"yarn"},
    rope_in_head=True,
    default_rope={
        **MINISTRAL3.default_rope,
        "rope_theta": 1e4,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
    },
    by_type=first_dense(2048, 1),
    default_dense_layers=0,
    later_layers=False,
    always={},
    required={"sliding_window": None},
    written={},
    remote_code=(),
)

MISTRAL3_WRAPPER = Wrapper(
    "mistral3", "Mistral3ForConditionalGeneration", text_types=("mistral", "ministral3", "mistral4")
)
