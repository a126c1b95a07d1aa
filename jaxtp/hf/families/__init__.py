"""Families of models in Hugging Face format: each a table of names, transposes and attributes."""

from collections.abc import Mapping

from jaxtp.hf.families.afmoe import AFMOE
from jaxtp.hf.families.apertus import APERTUS
from jaxtp.hf.families.cohere import COHERE, COHERE2
from jaxtp.hf.families.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    KIMI_K25_WRAPPER,
    KIMI_LINEAR,
    SARVAM_MLA,
    YOUTU,
)
from jaxtp.hf.families.dots import DOTS1
from jaxtp.hf.families.ernie import ERNIE4_5, ERNIE4_5_MOE
from jaxtp.hf.families.exaone import EXAONE
from jaxtp.hf.families.exaone4 import EXAONE4, EXAONE4_5_WRAPPER, EXAONE_MOE
from jaxtp.hf.families.falcon import FALCON_H1
from jaxtp.hf.families.family import Family, Wrapper
from jaxtp.hf.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_WRAPPER, VAULTGEMMA
from jaxtp.hf.families.gemma4 import GEMMA4, GEMMA4_UNIFIED, GEMMA4_UNIFIED_WRAPPER, GEMMA4_WRAPPER
from jaxtp.hf.families.glm import (
    GLM,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GLM4V_MOE_WRAPPER,
    GLM4V_WRAPPER,
    SARVAM_MOE,
    SOLAR_OPEN,
)
from jaxtp.hf.families.gpt2 import GPT2
from jaxtp.hf.families.gpt_neox import GPT_NEO, GPT_NEOX
from jaxtp.hf.families.gpt_oss import GPT_OSS
from jaxtp.hf.families.granite import BAMBA, GRANITE, GRANITEMOE, GRANITEMOEHYBRID
from jaxtp.hf.families.hunyuan import HUNYUAN, HY_V3
from jaxtp.hf.families.lfm2 import LFM2, LFM2_MOE, LFM3
from jaxtp.hf.families.llama import (
    ARCEE,
    CWM,
    IDEFICS3_WRAPPER,
    INTERNLM3,
    INTERNVL_WRAPPER,
    IQUESTCODER,
    LLAMA,
    LLAVA_WRAPPERS,
    SEED_OSS,
    SMOLLM3,
    SMOLVLM_WRAPPER,
)
from jaxtp.hf.families.mamba import MAMBA2
from jaxtp.hf.families.minimax import MINIMAX_M2
from jaxtp.hf.families.mistral import (
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    MISTRAL3_WRAPPER,
    MISTRAL4,
    MIXTRAL,
)
from jaxtp.hf.families.muse_glimmer import MUSE_GLIMMER, MUSE_GLIMMER_WRAPPER
from jaxtp.hf.families.nanochat import NANOCHAT
from jaxtp.hf.families.nemotron import NEMOTRON, NEMOTRON_H
from jaxtp.hf.families.olmo import FLEX_OLMO, OLMO, OLMO2, OLMO3, OLMOE
from jaxtp.hf.families.phi import PHI
from jaxtp.hf.families.phi3 import PHI3
from jaxtp.hf.families.qwen import (
    QWEN2,
    QWEN2_5_VL_WRAPPER,
    QWEN2_MOE,
    QWEN2_VL_WRAPPER,
    QWEN3,
    QWEN3_MOE,
    QWEN3_VL_MOE_WRAPPER,
    QWEN3_VL_WRAPPER,
)
from jaxtp.hf.families.qwen3_5 import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_WRAPPER,
    QWEN3_5_WRAPPER,
    QWEN3_NEXT,
)
from jaxtp.hf.families.stablelm import STABLELM
from jaxtp.hf.families.starcoder import GPT_BIGCODE, STARCODER2

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, OLMO2, PHI3, GPT2, MIXTRAL, QWEN3_MOE),
        *(MINISTRAL, MINISTRAL3, GPT_NEOX, GLM4, GLM4_MOE, COHERE),
        *(OLMO, OLMO3, OLMOE, FLEX_OLMO, SMOLLM3, SEED_OSS, ARCEE, APERTUS, EXAONE4, QWEN2_MOE),
        *(GRANITE, GRANITEMOE, GRANITEMOEHYBRID),
        *(PHI, GLM, MINIMAX_M2, COHERE2, NEMOTRON, HUNYUAN, STABLELM),
        *(GEMMA, VAULTGEMMA, GEMMA4, GEMMA4_UNIFIED, MUSE_GLIMMER),
        *(GPT_NEO, GPT_BIGCODE, STARCODER2, ERNIE4_5, ERNIE4_5_MOE, DOTS1),
        *(GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MISTRAL4),
        *(QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, KIMI_LINEAR),
        *(EXAONE, INTERNLM3, IQUESTCODER, CWM, SOLAR_OPEN, YOUTU),
        *(SARVAM_MOE, SARVAM_MLA, EXAONE_MOE, HY_V3, AFMOE, NANOCHAT),
        *(NEMOTRON_H, LFM2, LFM2_MOE, LFM3, BAMBA, MAMBA2, FALCON_H1),
    )
}
"""By `model_type`. An export uses the first family that can represent the model."""

WRAPPERS: Mapping[str, Wrapper] = {
    wrapper.model_type: wrapper
    for wrapper in (
        *(GEMMA3_WRAPPER, MISTRAL3_WRAPPER),
        *(GEMMA4_WRAPPER, GEMMA4_UNIFIED_WRAPPER, MUSE_GLIMMER_WRAPPER),
        *(QWEN3_5_WRAPPER, QWEN3_5_MOE_WRAPPER),
        *(QWEN3_VL_WRAPPER, QWEN2_5_VL_WRAPPER, QWEN2_VL_WRAPPER),
        *(GLM4V_WRAPPER, GLM4V_MOE_WRAPPER, INTERNVL_WRAPPER, *LLAVA_WRAPPERS),
        EXAONE4_5_WRAPPER,
        *(QWEN3_VL_MOE_WRAPPER, IDEFICS3_WRAPPER, SMOLVLM_WRAPPER, KIMI_K25_WRAPPER),
    )
}
"""Multimodal models by `model_type`."""

ALIASES: Mapping[str, str] = {
    "kimi_k2": "deepseek_v3",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "exaone4_5_text": "exaone4",
}
"""Models of another `model_type` that their configuration makes one of a family."""

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa", "deepseek_v4"), "sparse attention with an indexer"
    ),
    "zamba2": "attention that blocks share, with adapters in each use",
    "llama4": "chunked attention",
    "gemma3n": "embeddings and caches that layers share",
    "phimoe": "sparsemixer routing, which is random in training and has gradients of its own",
}
"""Models that are not read, by `model_type`, and what they need."""
