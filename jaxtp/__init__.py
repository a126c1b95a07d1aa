"""Tensor-parallel training of transformer models in JAX that you can trust."""

from importlib.metadata import version as _version

from jaxtp import entry as _entry  # noqa: F401 (first: it ends Ctrl-C while the others are imported)
from jaxtp.audit.audit import Audit, AuditError, audit
from jaxtp.explain.explanation import explain
from jaxtp.generate.engine import Generator
from jaxtp.generate.loading import open_tokenizer
from jaxtp.generate.request import Result
from jaxtp.generate.settings import GenerationSettings
from jaxtp.hf.adapters import add_adapters, merge_adapters
from jaxtp.hf.attributes import read_config
from jaxtp.hf.folder import HFError
from jaxtp.hf.load import load_hf
from jaxtp.hf.peft import save_peft
from jaxtp.hf.runs import load_run
from jaxtp.hf.save import save_hf
from jaxtp.layers.attention import AttentionConfig, CausalSelfAttention
from jaxtp.layers.embedding import VocabParallelEmbedding, VocabParallelHead, vocab_parallel_logits
from jaxtp.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.loss import vocab_parallel_cross_entropy
from jaxtp.layers.mlp import MLP, MLPConfig
from jaxtp.layers.norm import Norm, NormConfig
from jaxtp.layers.parameter import Precision
from jaxtp.mesh import DP, FSDP, TP, MeshError, make_mesh
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder, DecoderBlock
from jaxtp.parallel.parallelize import parallelize
from jaxtp.parallel.plan import PlanError
from jaxtp.parallel.styles import (
    Colwise,
    PrepareInput,
    PrepareInputOutput,
    PrepareOutput,
    Replicate,
    Rowwise,
    SequenceParallel,
    Shard,
)
from jaxtp.propose.proposal import Proposal
from jaxtp.propose.propose import propose_plan

__version__ = _version("jaxtp")

__all__ = [
    "DP",
    "FSDP",
    "MLP",
    "TP",
    "AttentionConfig",
    "Audit",
    "AuditError",
    "CausalSelfAttention",
    "ColumnParallelLinear",
    "Colwise",
    "Decoder",
    "DecoderBlock",
    "GenerationSettings",
    "Generator",
    "HFError",
    "LoraConfig",
    "MLPConfig",
    "MeshError",
    "ModelConfig",
    "Norm",
    "NormConfig",
    "PlanError",
    "Precision",
    "PrepareInput",
    "PrepareInputOutput",
    "PrepareOutput",
    "Proposal",
    "Replicate",
    "Result",
    "RowParallelLinear",
    "Rowwise",
    "SequenceParallel",
    "Shard",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "add_adapters",
    "audit",
    "explain",
    "load_hf",
    "load_run",
    "make_mesh",
    "merge_adapters",
    "open_tokenizer",
    "parallelize",
    "propose_plan",
    "read_config",
    "save_hf",
    "save_peft",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_logits",
]
