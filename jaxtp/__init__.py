"""Tensor-parallel training of transformer models in JAX that you can trust."""

from importlib.metadata import version as _version

from jaxtp.generate.engine import Generator
from jaxtp.generate.row import Result
from jaxtp.generate.settings import GenerationSettings
from jaxtp.generate.tokenizer import open_tokenizer
from jaxtp.hf.adapters import add_adapters, merge_adapters
from jaxtp.hf.attributes import read_config
from jaxtp.hf.folder import HFError
from jaxtp.hf.load import load_hf
from jaxtp.hf.peft import save_peft
from jaxtp.hf.runs import load_run
from jaxtp.hf.save import save_hf
from jaxtp.layers.attention import CausalSelfAttention
from jaxtp.layers.embedding import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_logits
from jaxtp.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.loss import vocab_parallel_cross_entropy
from jaxtp.layers.mlp import SwiGLU
from jaxtp.layers.norm import RMSNorm
from jaxtp.layers.precision import Precision
from jaxtp.mesh import DP, FSDP, TP, MeshError, make_mesh
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder, DecoderBlock
from jaxtp.parallel.audit import Audit, AuditError, audit

__version__ = _version("jaxtp")

__all__ = [
    "DP",
    "FSDP",
    "TP",
    "Audit",
    "AuditError",
    "CausalSelfAttention",
    "ColumnParallelLinear",
    "Decoder",
    "DecoderBlock",
    "GenerationSettings",
    "Generator",
    "HFError",
    "LoraConfig",
    "MeshError",
    "ModelConfig",
    "Precision",
    "RMSNorm",
    "Result",
    "RowParallelLinear",
    "SwiGLU",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "add_adapters",
    "audit",
    "load_hf",
    "load_run",
    "make_mesh",
    "merge_adapters",
    "open_tokenizer",
    "read_config",
    "save_hf",
    "save_peft",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_logits",
]
