"""Families of models in Hugging Face format: each a table of names, transposes and attributes."""

from collections.abc import Mapping

from jaxtp.models.families.family import Family
from jaxtp.models.families.gemma import GEMMA2, GEMMA3
from jaxtp.models.families.gpt2 import GPT2
from jaxtp.models.families.llama import LLAMA
from jaxtp.models.families.mistral import MISTRAL
from jaxtp.models.families.mixtral import MIXTRAL
from jaxtp.models.families.olmo2 import OLMO2
from jaxtp.models.families.phi3 import PHI3
from jaxtp.models.families.qwen2 import QWEN2
from jaxtp.models.families.qwen3 import QWEN3
from jaxtp.models.families.qwen3_moe import QWEN3_MOE

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, OLMO2, PHI3, GPT2, MIXTRAL, QWEN3_MOE)
}
"""By `model_type`; of those that can hold a model, the first is the one that it is exported as."""
