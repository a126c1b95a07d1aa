"""Families of models in Hugging Face format: each a table of names, transposes and attributes."""

from collections.abc import Mapping

from jaxtp.models.families.family import Family
from jaxtp.models.families.llama import LLAMA
from jaxtp.models.families.mistral import MISTRAL
from jaxtp.models.families.qwen2 import QWEN2
from jaxtp.models.families.qwen3 import QWEN3

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
"""By `model_type`; of those that can hold a model, the first is the one that it is exported as."""
