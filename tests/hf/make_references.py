"""Makes the reference models that `copy_references.py` has none of: `python tests/hf/make_references.py [NAME ...]`.

It needs torch (2.15; 2.13 for `OWN_SIZES` and `FAMILIES`) and transformers 5.23, which the tests do not. Weights are
random and well away from their defaults; all is computed in float64, but for the rotary frequencies of all but
`FAMILIES`, which transformers has in float32. gemma2_untied, gemma3_bias, olmo2_tied_bias and phi3_short were compared
once and are not stored. The name `rope` makes rope.json, frequencies of transformers in float64.
"""

import contextlib
import copy
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

sys.path.insert(0, str(Path(__file__).parent.parent))
from hf_reference import FOLDER, SIZE, pack

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
AWKWARD = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2e-3,
    "pad_token_id": None,  # torch computes no gradient for the row of a token that is padding
    "eos_token_id": 1,
    "bos_token_id": 2,
}
"""Sizes that neither tp nor a pattern of layers divides, and an epsilon that can be told from another."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FULL, SLIDING = "full_attention", "sliding_attention"
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.2, 2.5, 9.0, 31.0]}
MODELS = {
    "mistral": ("Mistral", {"head_dim": 12, "sliding_window": 7}, {"rope_theta": 1e4, "rope_type": "default"}),
    "llama_linear": (
        "Llama",
        {"head_dim": 8, "mlp_bias": True},
        {"rope_theta": 5e3, "rope_type": "linear", "factor": 2.5},
    ),
    "llama_yarn": ("Llama", {"head_dim": 16}, {"rope_theta": 1e4, **YARN}),
    "qwen2_window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0, "hidden_size": 64},
        {"rope_theta": 1e5, **YARN, "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 0.9, "truncate": False},
    ),
    "qwen3_bias": ("Qwen3", {"head_dim": 8, "attention_bias": True}, {"rope_theta": 1e6, "rope_type": "default"}),
}
OWN_SIZES = {
    "gemma2": (
        "Gemma2",
        {
            **AWKWARD,
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
        {"rope_theta": 1e4, "rope_type": "default"},
    ),
    "gemma2_untied": (
        "Gemma2",
        {
            **AWKWARD,
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, SLIDING],
            "sliding_window": 4,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        {"rope_theta": 3e3, "rope_type": "linear", "factor": 2.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **AWKWARD,
            "intermediate_size": 24,
            "num_hidden_layers": 7,
            "sliding_window": 5,
            "query_pre_attn_scalar": 20,
        },
        {
            FULL: {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
            SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
        },
    ),
    "gemma3_bias": (
        "Gemma3Text",
        {
            **AWKWARD,
            "intermediate_size": 24,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 3,
            "sliding_window": 6,
            "query_pre_attn_scalar": 9,
            "attention_bias": True,
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": False,
        },
        {FULL: {"rope_theta": 5e4, "rope_type": "default"}, SLIDING: {"rope_theta": 50.0, "rope_type": "default"}},
    ),
    "olmo2": (
        "Olmo2",
        {**AWKWARD, "hidden_size": 64, "head_dim": None, "num_hidden_layers": 2},
        {"rope_theta": 5e5, "rope_type": "default"},
    ),
    "olmo2_tied_bias": (
        "Olmo2",
        {
            **AWKWARD,
            "num_key_value_heads": 8,
            "num_hidden_layers": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        {"rope_theta": 5e5, **YARN},
    ),
    "phi3": (
        "Phi3",
        {**AWKWARD, "num_hidden_layers": 2, "sliding_window": 7, "original_max_position_embeddings": 128},
        {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0},
    ),
    "phi3_short": (
        "Phi3",
        {
            **AWKWARD,
            "hidden_size": 64,
            "head_dim": None,
            "num_hidden_layers": 2,
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
        },
        {"rope_theta": 1e4, **LONGROPE, "partial_rotary_factor": 1.0},
    ),
    "phi3_long": (
        "Phi3",
        {
            **AWKWARD,
            "hidden_size": 64,
            "head_dim": None,
            "num_hidden_layers": 2,
            "original_max_position_embeddings": 7,  # below the prompt, so that no sequence here is short
        },
        {"rope_theta": 1e4, **LONGROPE, "partial_rotary_factor": 1.0},
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": 97,
            "n_positions": 29,
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 8,
            "n_inner": 56,
            "layer_norm_epsilon": 2e-3,
            "bos_token_id": 96,
            "eos_token_id": 96,
        },
        None,
    ),
    "gpt2_scaled": (
        "GPT2",
        {
            "vocab_size": 97,
            "n_positions": 24,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 8,
            "activation_function": "gelu",
            "scale_attn_by_inverse_layer_idx": True,
            "tie_word_embeddings": False,
            "bos_token_id": 96,
            "eos_token_id": 96,
        },
        None,
    ),
    "gpt2_unscaled": (
        "GPT2",
        {
            "vocab_size": 97,
            "n_positions": 24,
            "n_embd": 48,
            "n_layer": 2,
            "n_head": 8,
            "n_inner": 56,
            "activation_function": "relu",
            "scale_attn_weights": False,
            "bos_token_id": 96,
            "eos_token_id": 96,
        },
        None,
    ),
    "mixtral": (
        "Mixtral",
        {
            **AWKWARD,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
        },
        {"rope_theta": 1e4, "rope_type": "default"},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **AWKWARD,
            "num_hidden_layers": 2,
            "moe_intermediate_size": 20,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
        {"rope_theta": 1e6, "rope_type": "default"},
    ),
    "qwen3_moe_dense": (
        "Qwen3Moe",
        {
            **AWKWARD,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
        },
        {"rope_theta": 1e4, "rope_type": "default"},
    ),
}
TINY = {
    "vocab_size": 71,
    "hidden_size": 32,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
RMS, LAYER, EPSILON = {"rms_norm_eps": 2e-3}, {"layer_norm_eps": 2e-3}, {"layer_norm_epsilon": 2e-3}
WIDE, TIED, UNTIED = {"head_dim": 12}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
WINDOW = {"sliding_window": 7}
ALTERNATING = {**WINDOW, "layer_types": [SLIDING, FULL]}
ROPE = {"rope_theta": 100.0, "rope_type": "default"}
PARTIAL = {**ROPE, "partial_rotary_factor": 0.5}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
TEMPERED = {"rope_theta": 100.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
TEMPERED |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
ALPHA = {"rope_theta": 50.0, "rope_type": "dynamic", "factor": 1.0, "alpha": 9.0}
PHI4 = {"rope_theta": 100.0, "partial_rotary_factor": 0.75, "rope_type": "longrope"}
PHI4 |= {"short_factor": [1.0, 1.2, 1.7], "long_factor": [1.3, 3.0, 9.0]}
SHORT = {"original_max_position_embeddings": 7, "max_position_embeddings": 28}
PHIMOE = {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": 32}
OLMO3 = {FULL: {"rope_theta": 5e5, **YARN}, SLIDING: {"rope_theta": 5e5, "rope_type": "default"}}
GEMMA3_ROPE = {FULL: {"rope_theta": 5e3, "rope_type": "linear", "factor": 8.0}, SLIDING: ROPE}
GEMMA4_ROPE = {FULL: {"rope_theta": 300.0, "rope_type": "proportional", "partial_rotary_factor": 0.25}, SLIDING: ROPE}
GEMMA3 = {**WIDE, **RMS, **ALTERNATING, "query_pre_attn_scalar": 20}
GEMMA4 = {**RMS, **WINDOW, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1}
GEMMA4 |= {"num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL], "hidden_size_per_layer_input": 0}
GEMMA4 |= {"final_logit_softcapping": 5.0, "attention_k_eq_v": True}
GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12}
VAULT = {**WIDE, **RMS, **WINDOW, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0}
MUSE = {**WIDE, **RMS, **WINDOW, "num_hidden_layers": 3, "post_norm_eps": 0.02, "final_logit_softcapping": 5.0}
MUSE |= {"qk_scale_factor": 2.1, "output_multiplier": 0.7}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 1.7}
GRANITE4 = {**RMS, **GRANITE, "shared_intermediate_size": 20, "layer_types": [FULL, FULL], "mamba_n_heads": 4}
CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 12}
OLMOE = {**RMS, "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 12}
ERNIE = {**RMS, "moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 12}
FIRST = {**RMS, **CHOSEN, "n_routed_experts": 6, "first_k_dense_replace": 1}
GLM = {**FIRST, "n_shared_experts": 1, "attention_bias": True}
DOTS = {**FIRST, "n_shared_experts": 2, "n_group": 3, "topk_group": 2}
LATENT = {**CHOSEN, "num_key_value_heads": 4, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6}
LATENT |= {"v_head_dim": 10, "q_lora_rank": 24, "n_routed_experts": 6, "first_k_dense_replace": 1}
DEEPSEEK2 = {**LATENT, **RMS, "n_shared_experts": 2, "routed_scaling_factor": 1.7}
LITE = {**DEEPSEEK2, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
LIMITED = {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}
DEEPSEEK3 = {**LATENT, **RMS, "n_shared_experts": 1, "n_group": 3, "topk_group": 2}
DEEPSEEK = {"rope_theta": 100.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
DEEPSEEK |= {"beta_fast": 2.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 3.0}
FLASH = {**LATENT, **RMS, "n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]}
FLASH = {name: value for name, value in FLASH.items() if name != "first_k_dense_replace"}
MISTRAL4 = {**LATENT, **RMS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
QWEN = {**RMS, **CHOSEN, "num_experts": 5, "shared_expert_intermediate_size": 20}
GPT_OSS = {**RMS, **WIDE, **LOCAL, "swiglu_limit": 0.7, "max_position_embeddings": 128}
GPT_OSS_ROPE = {"rope_theta": 100.0, **YARN, "beta_fast": 2.0, "truncate": False}
FAMILIES = {
    "gemma": ("Gemma", {**WIDE, **RMS}, ROPE),
    "gemma4_31b": ("Gemma4Text", GEMMA4, GEMMA4_ROPE),
    "gemma4_values": ("Gemma4Text", {**GEMMA4, **UNTIED, "attention_k_eq_v": False}, GEMMA4_ROPE),
    "gemma4_26b": ("Gemma4Text", {**GEMMA4, **GEMMA4_MOE}, GEMMA4_ROPE),
    "gemma4_12b": ("Gemma4UnifiedText", GEMMA4, GEMMA4_ROPE),
    "vaultgemma": ("VaultGemma", VAULT, ROPE),
    "ministral3": ("Ministral3", {**WIDE, **RMS}, TEMPERED),
    "ministral": ("Ministral", {**WIDE, **RMS, **ALTERNATING}, ROPE),
    "olmo": ("Olmo", {"clip_qkv": 0.8}, ROPE),
    "olmo3": ("Olmo3", {**RMS, **ALTERNATING}, OLMO3),
    "olmoe": ("Olmoe", {**OLMOE, "clip_qkv": 1.3}, ROPE),
    "flex_olmo": ("FlexOlmo", {**OLMOE, "norm_topk_prob": True}, ROPE),
    "smollm3": ("SmolLM3", {**RMS, **TIED, "no_rope_layers": [1, 0]}, ROPE),
    "granite": ("Granite", {**RMS, **TIED, **GRANITE}, ROPE),
    "granitemoe": ("GraniteMoe", {**RMS, **TIED, **GRANITE, **LOCAL}, ROPE),
    "granite4": (
        "GraniteMoeHybrid",
        {**GRANITE4, **TIED, "num_local_experts": 0, "position_embedding_type": "rope"},
        ROPE,
    ),
    "granite4_moe": ("GraniteMoeHybrid", {**GRANITE4, **LOCAL, "position_embedding_type": "nope"}, ROPE),
    "phi": ("Phi", LAYER, PARTIAL),
    "phi_qk_norm": ("Phi", {**LAYER, "qk_layernorm": True}, PARTIAL),
    "phi4_mini": ("Phi3", {**RMS, **TIED, "original_max_position_embeddings": 32}, PHI4),
    "phi4_mini_long": ("Phi3", {**RMS, **TIED, **SHORT}, PHI4),
    "phimoe": (
        "Phimoe",
        {**RMS, **LOCAL, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3},
        {"rope_theta": 100.0, **PHIMOE},
    ),
    "glm": ("Glm", {**RMS, "head_dim": 8}, PARTIAL),
    "glm4": ("Glm4", {**RMS, "head_dim": 8}, PARTIAL),
    "glm4_moe": ("Glm4Moe", {**GLM, **WIDE, "routed_scaling_factor": 2.5}, PARTIAL),
    "glm4_moe_qk_norm": ("Glm4Moe", {**GLM, "head_dim": 8, "use_qk_norm": True}, PARTIAL),
    "minimax_m2": ("MiniMaxM2", {**RMS, **LOCAL, "head_dim": 8}, PARTIAL),
    "cohere": ("Cohere", {**LAYER, "logit_scale": 0.6}, ROPE),
    "cohere_qk_norm": ("Cohere", {**LAYER, "logit_scale": 0.6, "use_qk_norm": True}, ROPE),
    "cohere2": ("Cohere2", {**LAYER, **ALTERNATING, "logit_scale": 0.6}, ROPE),
    "exaone4": ("Exaone4", {**RMS, **ALTERNATING}, ROPE),
    "exaone4_full": ("Exaone4", {**RMS, **TIED, "layer_types": [FULL, FULL], "sliding_window": None}, ROPE),
    "seed_oss": ("SeedOss", {**WIDE, **RMS}, ROPE),
    "arcee": ("Arcee", RMS, {"rope_theta": 100.0, **YARN}),
    "apertus": ("Apertus", RMS, {"rope_theta": 100.0, "rope_type": "llama3", **LLAMA3}),
    "nemotron": ("Nemotron", {**WIDE, "norm_eps": 2e-3}, PARTIAL),
    "qwen2_moe": ("Qwen2Moe", QWEN, ROPE),
    "qwen2_moe_dense": ("Qwen2Moe", {**QWEN, "mlp_only_layers": [0], "norm_topk_prob": True, "qkv_bias": False}, ROPE),
    "starcoder2": ("Starcoder2", {**WINDOW, "norm_epsilon": 2e-3}, ROPE),
    "stablelm": ("StableLm", {**LAYER, "use_qkv_bias": True}, PARTIAL),
    "stablelm_12b": ("StableLm", {**LAYER, "use_parallel_residual": True, "qk_layernorm": True}, PARTIAL),
    "ernie4_5": ("Ernie4_5", {**WIDE, **RMS}, ROPE),
    "ernie4_5_bias": ("Ernie4_5", {**WIDE, **RMS, **UNTIED, "use_bias": True}, ROPE),
    "ernie4_5_moe": ("Ernie4_5_Moe", ERNIE, ROPE),
    "ernie4_5_moe_bias": ("Ernie4_5_Moe", {**ERNIE, **UNTIED, "use_bias": True, "moe_layer_start_index": 0}, ROPE),
    "hunyuan": ("HunYuanDenseV1", {**WIDE, **RMS, **TIED}, ALPHA),
    "dots1": ("Dots1", {**DOTS, "norm_topk_prob": True, "routed_scaling_factor": 2.5}, ROPE),
    "dots1_window": ("Dots1", {**DOTS, **WINDOW, "max_window_layers": 1}, ROPE),
    "gpt_neox": ("GPTNeoX", LAYER, PARTIAL),
    "gpt_neox_sequential": ("GPTNeoX", {**LAYER, "use_parallel_residual": False}, PARTIAL),
    "gpt_neo": ("GPTNeo", {**EPSILON, "attention_types": [[["global", "local"], 1]], "window_size": 7}, None),
    "gpt_oss": ("GptOss", {**GPT_OSS, **WINDOW}, GPT_OSS_ROPE),
    "gpt_oss_mxfp4": ("GptOss", {**GPT_OSS, **TIED, "intermediate_size": 64, "attention_bias": False}, GPT_OSS_ROPE),
    "gpt_bigcode": ("GPTBigCode", {**EPSILON, "n_inner": 28, "max_position_embeddings": 29}, None),
}
"""Families whose sizes are `TINY`."""
EYE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 8, "vision_use_head": False, **EYE}
PIXTRAL = {"model_type": "pixtral", "image_size": 8, "head_dim": 8, **EYE}
GEMMA4_EYE = {"head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 16, **EYE}
UNIFIED_EYE = {"mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16, "patch_size": 4}
EAR = {"audio_embed_dim": 16}
MUSE_EYE = {"pos_emb_height": 4, "pos_emb_width": 4, **EYE}
IMAGE = 70
"""No id of text, and the padding of those that need one."""
SEES = {
    "gemma3_mm": ("Gemma3", {"model_type": "gemma3_text", **GEMMA3}, GEMMA3_ROPE),
    "gemma4_mm": ("Gemma4", {"model_type": "gemma4_text", **GEMMA4, **GEMMA4_MOE, "pad_token_id": IMAGE}, GEMMA4_ROPE),
    "gemma4_unified_mm": (
        "Gemma4Unified",
        {"model_type": "gemma4_unified_text", **GEMMA4, "pad_token_id": IMAGE},
        GEMMA4_ROPE,
    ),
    "mistral3": ("Mistral3", {"model_type": "mistral", **WIDE, **RMS, "sliding_window": None}, ROPE),
    "mistral3_ministral3": ("Mistral3", {"model_type": "ministral3", **WIDE, **RMS, **TIED}, TEMPERED),
    "muse_glimmer": ("MuseGlimmer", {"model_type": "muse_glimmer_text", **MUSE}, ROPE),
    "mistral3_mistral4": ("Mistral3", {"model_type": "mistral4", **MISTRAL4}, TEMPERED),
}
AROUND = {
    "gemma3_mm": {"vision_config": SIGLIP, "mm_tokens_per_image": 4, "image_token_index": IMAGE},
    "gemma4_mm": {"vision_config": GEMMA4_EYE, "image_token_id": IMAGE},
    "gemma4_unified_mm": {"vision_config": UNIFIED_EYE, "audio_config": EAR, "image_token_id": IMAGE},
    "mistral3": {"vision_config": PIXTRAL, "image_token_index": IMAGE, **UNTIED},
    "mistral3_ministral3": {"vision_config": PIXTRAL, "image_token_index": IMAGE, **TIED},
    "mistral3_mistral4": {"vision_config": PIXTRAL, "image_token_index": IMAGE, **UNTIED},
    "muse_glimmer": {"vision_config": MUSE_EYE, "image_token_id": IMAGE, "projector_hidden_size": 16},
}
AROUND["muse_glimmer"] |= {"video_token_id": IMAGE - 1, "out_hidden_size": 64}
FAMILIES |= {
    name: (kind, {"text_config": {**TINY, **text, "rope_parameters": rope}, **AROUND[name]}, None)
    for name, (kind, text, rope) in SEES.items()
}
FAMILIES |= {
    "deepseek_v2": ("DeepseekV2", {**DEEPSEEK2, **LIMITED}, DEEPSEEK),
    "deepseek_v2_lite": ("DeepseekV2", LITE, DEEPSEEK),
    "deepseek_v3": ("DeepseekV3", {**DEEPSEEK3, "q_lora_rank": None, "routed_scaling_factor": 1.7}, ROPE),
    "deepseek_v3_yarn": ("DeepseekV3", {**DEEPSEEK3, "rope_interleave": False}, DEEPSEEK),
    "glm4_moe_lite": ("Glm4MoeLite", FLASH, ROPE),
    "mistral4": ("Mistral4", MISTRAL4, TEMPERED),
}
LINEAR = "linear_attention"
QUARTER = {**ROPE, "partial_rotary_factor": 0.25}
MROPE = {**QUARTER, "mrope_interleaved": True, "mrope_section": [1, 1, 0]}
DELTA = {**RMS, "head_dim": 16}


def delta(key_heads, value_heads, key_dim, value_dim, taps, *layer_types):
    heads = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads}
    widths = {"linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim, "linear_conv_kernel_dim": taps}
    return {**DELTA, **heads, **widths, "layer_types": list(layer_types), "num_hidden_layers": len(layer_types)}


NEXT = {**delta(2, 6, 6, 7, 4, LINEAR, LINEAR, FULL), **CHOSEN, "num_experts": 5}
NEXT |= {"shared_expert_intermediate_size": 20, "mlp_only_layers": [1], "norm_topk_prob": False}
MIXED = {**delta(2, 4, 8, 6, 4, FULL, LINEAR), **CHOSEN, "num_experts": 5, "shared_expert_intermediate_size": 20}
QWEN_EYE = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
QWEN_EYE |= {"spatial_merge_size": 1, "temporal_patch_size": 1, "out_hidden_size": 32, "num_position_embeddings": 16}
SEEN = {"image_token_id": IMAGE, "video_token_id": IMAGE - 1, "vision_config": QWEN_EYE}
DENSE_TEXT = {**delta(4, 4, 8, 8, 2, LINEAR, FULL), **TIED}
FAMILIES |= {
    "qwen3_5": ("Qwen3_5Text", {**delta(3, 6, 8, 4, 3, LINEAR, FULL, LINEAR), **TIED}, MROPE),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**MIXED, "attention_bias": True}, QUARTER),
    "qwen3_5_mm": ("Qwen3_5", {"text_config": {**TINY, **DENSE_TEXT, "rope_parameters": MROPE}, **SEEN, **TIED}, None),
    "qwen3_5_moe_mm": ("Qwen3_5Moe", {"text_config": {**TINY, **MIXED, "rope_parameters": MROPE}, **SEEN}, None),
    "qwen3_next": ("Qwen3Next", NEXT, QUARTER),
}
PREDICTS = {"mtp.fc.weight": (32, 64), "mtp.norm.weight": (32,), "mtp.layers.0.mlp.up_proj.weight": (28, 32)}
"""Some tensors of the heads that published files of `qwen3_next` and `_mm` have beside the model."""
PUBLISHED = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "output_gate_type": "swish"}
PUBLISHED |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "full_attention_interval": 4}
"""What the text models of Qwen3.5 to 3.8 on the Hub have too."""
REMOTE = {
    f"deepseek_{version.lower()}": {
        "auto_map": {
            "AutoConfig": f"configuration_deepseek.Deepseek{version}Config",
            "AutoModel": f"modeling_deepseek.Deepseek{version}Model",
            "AutoModelForCausalLM": f"modeling_deepseek.Deepseek{version}ForCausalLM",
        },
        **{"aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "moe_layer_freq": 1, "scoring_func": scores},
        **more,
    }
    for version, scores, more in (
        ("V2", "softmax", {"norm_topk_prob": False}),
        ("V3", "sigmoid", {"topk_method": "noaux_tc"}),
    )
}
"""What the files of these families on the Hub have too."""
ADDED = ["Gemma", "Gemma2", "Gemma3Text", "Gemma3", "VaultGemma", "Nemotron"]
ADDED += ["Qwen3Next", "Qwen3_5Text", "Qwen3_5MoeText", "Qwen3_5", "Qwen3_5Moe"]
"""Whose norms store what is added to 1."""
BARE = ["gpt2_unscaled"]
"""Stored as OpenAI's are: no prefix in the names, and masks beside the weights."""
IN_BLOCKS = ["gpt_oss_mxfp4"]
"""Whose experts are stored as OpenAI's are: in MXFP4."""
QUANTIZED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
}
QUANTIZED["modules_to_not_convert"] += ["model.embed_tokens", "lm_head"]
ROPES = {
    "linear": [{"factor": 4.0}, {"factor": 0.5}],
    "llama3": [
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"factor": 32.0, "low_freq_factor": 1.5, "high_freq_factor": 7.0},
    ],
    "yarn": [
        {"factor": 4.0},
        {"factor": None},
        {"factor": 1.0},
        {"factor": 0.5},
        {"factor": 16.0, "truncate": False},
        {"factor": 16.0, "beta_fast": 20.0, "beta_slow": 3.0},
        {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
        {"factor": 40.0, "mscale": 1.0},
        {"factor": 0.5, "mscale": 1.0, "mscale_all_dim": 0.707},
        {"factor": 4.0, "attention_factor": 0.83},
    ],
    "longrope": [{}, {"factor": 8.0}, {"factor": 0.5}, {"factor": 1.0}, {"attention_factor": 1.19}],
}
"""Scalings of rotary frequencies; longrope's lists are made for each width of a head."""
SHAPES = [(64, 1e4), (80, 5e5), (128, 1e6)]
"""Widths of heads, and bases."""
ORIGINAL, LONGEST = 8192, 131_072
TRAINED = ["gemma2", "gemma3", "olmo2", "phi3", "gpt2"]
"""Of which there are updates too."""
BATCH, LENGTH = 2, 24
UPDATES, ROWS = 3, 4
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1, "clip": 1.0}
"""Without rotation a bias of the keys changes nothing: with an epsilon of 1e-8, what rounding leaves of its gradient
would be the update."""


class CloseChoiceError(Exception):
    """Rounding could choose another token or expert."""


class InDouble(torch.overrides.TorchFunctionMode):
    """Computes in float64 where transformers asks for float32: in norms, softmaxes, angles and losses.

    Refuses choices of experts that differ by less than a margin."""

    def __init__(self, margin=5e-5):
        super().__init__()
        self.margin = margin

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        if function in (torch.topk, torch.Tensor.topk):
            count = arguments[1] if len(arguments) > 1 else keywords["k"]
            best = arguments[0].sort(descending=True).values
            if count < best.shape[-1] and (best[..., count - 1] - best[..., count]).min() < self.margin:
                raise CloseChoiceError
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wide = lambda value: torch.float64 if value is torch.float32 else value
        return function(*map(wide, arguments), **{name: wide(value) for name, value in (keywords or {}).items()})


def rope_cases():
    """Frequencies of some dims, and the factor of queries and keys, as transformers' own functions have them."""
    for kind, settings in ROPES.items():
        for setting, (head_dim, theta) in itertools.product(settings, SHAPES[: 2 if kind == "longrope" else 3]):
            rope = {"rope_type": kind, "rope_theta": theta, **setting}
            if kind != "linear":
                rope["original_max_position_embeddings"] = ORIGINAL
            if kind == "longrope":
                rope["short_factor"] = [round(1 + 0.03 * i, 2) for i in range(head_dim // 2)]
                rope["long_factor"] = [round(1.2**i, 1) for i in range(head_dim // 2)]
            sizes = {"head_dim": head_dim, "num_attention_heads": 2, "hidden_size": 2 * head_dim}
            config = transformers.LlamaConfig(
                **sizes, max_position_embeddings=LONGEST, rope_parameters=json.loads(json.dumps(rope))
            )
            for length in (ORIGINAL, ORIGINAL + 1) if kind == "longrope" else (LONGEST,):
                with InDouble():
                    found, size = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
                assert found.dtype == torch.float64
                dims = list(range(0, head_dim // 2, 5))
                yield {
                    "rope_parameters": rope,
                    "head_dim": head_dim,
                    "length": length,
                    "dims": dims,
                    "frequencies": found[dims].tolist(),
                    "size": float(size),
                }


def make(name, seed):
    kind, settings, rope = (MODELS | OWN_SIZES | FAMILIES)[name]
    wraps = "text_config" in settings
    sizes = {} if name in OWN_SIZES or wraps else TINY if name in FAMILIES else SIZES
    settings = {key: value for key, value in {**sizes, **settings}.items() if (key, value) != ("head_dim", None)}
    rope = {} if rope is None else {"rope_parameters": rope}
    config = getattr(transformers, f"{kind}Config")(**json.loads(json.dumps({**settings, **rope})))
    config._attn_implementation = config._experts_implementation = "eager"
    config.dtype = torch.float32
    head = "ForConditionalGeneration" if wraps else "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    with InDouble() if name in FAMILIES else contextlib.nullcontext():
        model = getattr(transformers, kind.removesuffix("Text") + head)(config).eval()
    folder = FOLDER / name
    for each in itertools.count(seed, 1000):
        generator = torch.Generator().manual_seed(each)
        randomize(model, kind, generator, name in FAMILIES)
        blocks = in_blocks(model, generator) if name in IN_BLOCKS else {}
        model.save_pretrained(folder)
        wide = copy.deepcopy(model)
        if name not in FAMILIES:  # LongRoPE has its frequencies from here on
            wide(torch.zeros((1, LENGTH), dtype=torch.long), use_cache=False)
        try:
            found = reference(wide.double(), generator, 64 if name in FAMILIES else SIZE)
        except CloseChoiceError:
            continue
        if name not in FAMILIES or found["grad_norms"].min() > 5e-3:  # of smaller ones little but rounding is left
            break
    (folder / "generation_config.json").unlink(missing_ok=True)
    if blocks:
        write_blocks(folder, blocks)
    config = json.loads((folder / "config.json").read_text())
    before = older_family(config) if name in FAMILIES else older(config, settings)
    (folder / "config_v4.json").write_text(json.dumps(before, indent=2))
    if name in BARE:
        write_bare(folder / "model.safetensors", config)
    if name in ("qwen3_next", "qwen3_5_mm", "qwen3_5_moe_mm"):
        write_published(folder / "model.safetensors", generator, stacked=name.endswith("_moe_mm"))
    if name in FAMILIES:
        write_short(folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)
    np.savez_compressed(folder / "reference.npz", **found)
    if name in TRAINED:
        (FOLDER / f"{name}_adamw").mkdir(exist_ok=True)
        np.savez_compressed(FOLDER / f"{name}_adamw" / "reference.npz", **updates(wide, generator, **ADAMW))


def randomize(model, kind, generator, short):
    """Those of `FAMILIES` are rounded to bfloat16, and have buffers that are not as made either."""
    buffers = [(p, b) for p, b in model.named_buffers() if p.endswith(("e_score_correction_bias", "layer_scalar"))]
    for path, parameter in [*model.named_parameters(), *buffers]:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = scale(kind, path, parameter) * noise + centre(kind, path)
        if short:
            parameter.data = parameter.data.bfloat16().float()


def in_blocks(model, generator):
    """Gives the experts random MXFP4 weights, which transformers reads; returns the tensors of a file."""
    tensors = {}
    for path, parameter in model.named_parameters():
        if path.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = parameter.shape
            blocks, scales = (
                torch.randint(*limits, (experts, outputs, inputs // 32, *width), generator=generator, dtype=torch.uint8)
                for limits, width in (((0, 256), (16,)), ((122, 126), ()))
            )
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            tensors |= {f"{path}_blocks": blocks, f"{path}_scales": scales}
    return tensors


def write_blocks(folder, blocks):
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = {name: tensor for name, tensor in load_file(path).items() if f"{name}_blocks" not in blocks}
    save_file(tensors | blocks, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZED}, indent=2))


def write_short(path):
    """Matrices as bfloat16; not vectors, so that it is no model that computes in bfloat16."""
    tensors = load_file(path)
    matrix = max(tensor.ndim for tensor in tensors.values()) if all(t.ndim > 1 for t in tensors.values()) else 1
    short = {
        name: tensor.bfloat16() if tensor.ndim > matrix and tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    save_file(short, path, metadata={"format": "pt"})


def scale(kind, path, parameter):
    if "e_score_correction_bias" in path:
        return 0.2
    if parameter.ndim < 2 or "norm" in path or path.split(".")[-2] in ("embed_tokens", "embed_in", "wte", "wpe"):
        return 0.4
    stored_in_out = kind == "GPT2" and "lm_head" not in path
    return 1.5 * parameter.shape[0 if stored_in_out else -1] ** -0.5


def centre(kind, path):
    """Of a scale where it is stored as such; some norms store what is added to 1."""
    if path.endswith("A_log"):
        return -1.5  # a state that lasts for tens of tokens
    scales = path.endswith("weight") and ("norm" in path or ".ln_" in path)
    added = kind in ADDED or (kind == "MuseGlimmer" and ".layers." in path)
    added &= "linear_attn.norm" not in path
    return 1.0 if (scales and not added) or path.endswith(("layer_scalar", "router.scale", "expert_scale")) else 0.0


def write_published(path, generator, *, stacked):
    """With heads that predict further tokens; experts `stacked` as on the Hub, or one by one."""
    tensors = load_file(path)
    while stacked and (name := next((name for name in tensors if ".experts.0." in name), None)):
        before = name.partition("experts.")[0] + "experts."
        experts = {end: stack(tensors, before, end) for end in ("gate_proj", "up_proj", "down_proj")}
        tensors[f"{before}gate_up_proj"] = torch.cat([experts["gate_proj"], experts["up_proj"]], dim=1)
        tensors[f"{before}down_proj"] = experts["down_proj"]
    heads = {name: torch.randn(shape, generator=generator).bfloat16().float() for name, shape in PREDICTS.items()}
    save_file(tensors | heads, path, metadata={"format": "pt"})


def stack(tensors, before, end):
    """Takes out the kernels of a layer's experts."""
    numbered = (f"{before}{i}.{end}.weight" for i in itertools.count())
    return torch.stack([tensors.pop(name) for name in itertools.takewhile(tensors.__contains__, numbered)])


def write_bare(path, config):
    mask = torch.ones(config["n_positions"], config["n_positions"]).tril()[None, None]
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    for layer in range(config["n_layer"]):
        tensors[f"h.{layer}.attn.bias"] = mask.clone()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, path, metadata={"format": "pt"})


def older(config, settings):
    """As versions before 5 spell it."""
    rope = config.pop("rope_parameters", None)
    if config["model_type"] == "gpt2":
        config["n_ctx"] = config["n_positions"]
    elif config["model_type"] == "gemma3_text":
        config["rope_theta"], config["rope_local_base_freq"] = (
            rope[kind].pop("rope_theta") for kind in (FULL, SLIDING)
        )
        config["rope_scaling"] = None if rope[FULL]["rope_type"] == "default" else rope[FULL]
        if "layer_types" not in settings:
            config["sliding_window_pattern"] = settings.get("sliding_window_pattern", 6)
    else:
        config["rope_theta"] = rope.pop("rope_theta")
        if config["model_type"] == "phi3":
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
            config["attention_bias"] = False
            rope.pop("original_max_position_embeddings", None)
        config["rope_scaling"] = None if rope["rope_type"] == "default" else {"type": rope.pop("rope_type"), **rope}
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "gemma2":
        config["hidden_act"] = config["hidden_activation"]
    if config["model_type"] == "qwen3_moe":
        config["num_experts"], config["max_window_layers"] = config.pop("num_local_experts"), 0
    if config["model_type"].startswith("gemma"):
        config["cache_implementation"] = "hybrid"
    if "layer_types" not in settings:
        config.pop("layer_types", None)
    config.pop("_sliding_window_pattern", None)
    return {**config, "transformers_version": "4.46.0"}


def older_family(config):
    """As the Hub has it; families that came with version 5 are spelled as it does."""
    if "text_config" in config:
        text = older_family({"dtype": None, **config["text_config"]})
        return {**config, "text_config": {key: value for key, value in text.items() if key != "torch_dtype"}}
    config, kind = dict(config), config["model_type"]
    if kind.startswith("gemma4"):
        other = next(iter(config.pop("per_layer_config").values()))
        config["global_head_dim"] = other["head_dim"]
        config["num_global_key_value_heads"] = other.get("num_key_value_heads")
    if kind == "gpt_neox":
        rope = config.pop("rope_parameters")
        config |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope["partial_rotary_factor"]}
    if kind.startswith("qwen3_5"):
        return {**config, **PUBLISHED, "partial_rotary_factor": 0.25, "torch_dtype": config.pop("dtype")}
    if kind == "qwen3_next":
        config |= {"use_sliding_window": False, "full_attention_interval": 3}
        del config["layer_types"]
    if kind.startswith(("gemma4", "gpt_neo", "gpt_bigcode", "muse_glimmer", "ministral3")):
        return {**config, "torch_dtype": config.pop("dtype")}
    if kind in ("glm4_moe_lite", "mistral4"):
        return {**config, "torch_dtype": config.pop("dtype")}
    rope = config["rope_parameters"]
    if kind in REMOTE:
        config = {name: value for name, value in config.items() if name not in ("head_dim", "qk_head_dim")} | REMOTE[
            kind
        ]
    if kind == "gemma":
        config |= {"hidden_act": "gelu", "hidden_activation": None}
    elif kind == "granitemoehybrid":
        config["layer_types"] = ["attention"] * config["num_hidden_layers"]
    elif kind == "gpt_oss":
        config |= {"experts_per_token": config["num_experts_per_tok"], "initial_context_length": 32}
    elif kind == "minimax_m2":
        config["rotary_dim"] = int(config["head_dim"] * rope.pop("partial_rotary_factor"))
    elif kind == "olmo3":
        config["rope_parameters"] = rope = rope[FULL]
    if kind != "phi3" and "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config = older(config, config)
    if kind in ("olmo3", "gpt_oss"):
        config["rope_scaling"]["rope_type"] = config["rope_scaling"].pop("type")
    return config


def reference(model, generator, size):
    vocab = IMAGE - 1 if hasattr(model.config, "text_config") else model.config.vocab_size
    ids = torch.randint(vocab, (BATCH, LENGTH), generator=generator)
    masked = ids.clone()
    masked[0, 3:9], masked[1, 15:] = -100, -100
    found = {"input_ids": ids.numpy(), "labels_masked": masked.numpy()}
    for suffix, labels in (("_masked", masked), ("", ids)):
        logits, loss, grads = computed(model, ids, labels)
        found[f"loss{suffix}64"] = loss
        found[f"grad_norm{suffix}64"] = norm(grads)
    found["logits"] = logits.detach().numpy().astype(np.float32)
    return found | pack(grads, "grad", size) | greedy(model, ids[:1, :8])


def computed(model, ids, labels):
    model.zero_grad()
    with InDouble():
        output = model(ids, labels=labels, use_cache=False)
        output.loss.backward()
    assert output.loss.dtype == output.logits.dtype == torch.float64
    grads = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return output.logits, output.loss.item(), grads


def norm(grads):
    return np.sqrt(sum(np.sum(grad**2) for grad in grads.values()))


def greedy(model, prompt):
    ids = prompt
    for _ in range(12):
        with InDouble():
            logits = model(ids, use_cache=False).logits[:, -1:]
        best = logits.topk(2).values.flatten()
        if best[0] - best[1] < 1e-3:
            raise CloseChoiceError
        ids = torch.cat((ids, logits.argmax(-1)), dim=1)
    return {"gen_prompt": prompt.numpy(), "gen_tokens": ids[:, prompt.shape[1] :].numpy()}


def updates(model, generator, lr, betas, eps, weight_decay, clip):
    """AdamW of PyTorch, with a constant rate and decay of all that has two dims."""
    batches = torch.randint(model.config.vocab_size, (UPDATES, ROWS, LENGTH), generator=generator)
    parameters = list(model.parameters())
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)
    losses, norms = [], []
    for ids in batches:
        _, loss, grads = computed(model, ids, ids)
        losses.append(loss)
        norms.append(norm(grads))
        for parameter in parameters:
            parameter.grad *= min(1.0, clip / norms[-1])
        optimizer.step()
    _, after, _ = computed(model, batches[0], batches[0])
    final = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    return {
        "batches": batches.numpy().astype(np.int32),
        "losses64": np.array(losses),
        "grad_norms64": np.array(norms),
        "loss_batch0_after64": after,
        **{"lr": lr, "betas": np.array(betas), "eps": eps, "weight_decay": weight_decay, "clip": clip},
    } | pack(final, "final")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "rope" in sys.argv[1:] or not sys.argv[1:]:
        cases = ",\n".join(json.dumps(case) for case in rope_cases())
        (FOLDER / "rope.json").write_text(f"[\n{cases}\n]\n")
    for seed, name in enumerate([*MODELS, *OWN_SIZES, *FAMILIES]):
        if name in sys.argv[1:] or not sys.argv[1:]:
            make(name, seed)
