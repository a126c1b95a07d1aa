"""Tensor-parallel training of transformer models in JAX that you can trust.

Each public name is imported at its first use. So `import jaxtp` takes milliseconds, and a script
that needs only the layers does not wait for Orbax or pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULES = {
    "AttentionConfig": "jaxtp.layers.attention",
    "Audit": "jaxtp.analysis.audit",
    "AuditError": "jaxtp.analysis.audit",
    "BlockConfig": "jaxtp.models.block",
    "Branch": "jaxtp.layers.branch",
    "BranchConfig": "jaxtp.layers.branch",
    "ByteTokenizer": "jaxtp.data.tokenizer",
    "CausalSelfAttention": "jaxtp.layers.attention",
    "ColumnParallelLinear": "jaxtp.layers.linear",
    "Colwise": "jaxtp.plans.styles",
    "ContextParallel": "jaxtp.plans.styles",
    "DP": "jaxtp.mesh",
    "DPO": "jaxtp.train.preference",
    "Decoder": "jaxtp.models.decoder",
    "DecoderBlock": "jaxtp.models.decoder",
    "Distillation": "jaxtp.train.distillation",
    "ExpertsConfig": "jaxtp.layers.experts",
    "FSDP": "jaxtp.mesh",
    "FrozenParam": "jaxtp.layers.parameter",
    "GenerationSettings": "jaxtp.generate.sampling",
    "Generator": "jaxtp.generate.engine",
    "HFError": "jaxtp.hf.model_folder",
    "HeadConfig": "jaxtp.layers.embedding",
    "LayerContext": "jaxtp.layers.linear",
    "LoraConfig": "jaxtp.layers.lora",
    "MLP": "jaxtp.layers.mlp",
    "MLPConfig": "jaxtp.layers.mlp",
    "MeshError": "jaxtp.mesh",
    "MixtureOfExperts": "jaxtp.layers.experts",
    "ModelConfig": "jaxtp.models.config",
    "Norm": "jaxtp.layers.norm",
    "NormConfig": "jaxtp.layers.norm",
    "PlanError": "jaxtp.plans.plan",
    "PositionwiseBranch": "jaxtp.layers.branch",
    "Precision": "jaxtp.layers.parameter",
    "PrepareInput": "jaxtp.plans.styles",
    "PrepareInputOutput": "jaxtp.plans.styles",
    "PrepareOutput": "jaxtp.plans.styles",
    "Proposal": "jaxtp.analysis.propose",
    "Replicate": "jaxtp.plans.styles",
    "Result": "jaxtp.generate.request",
    "RowParallelLinear": "jaxtp.layers.linear",
    "Rowwise": "jaxtp.plans.styles",
    "SequenceParallel": "jaxtp.plans.styles",
    "Shard": "jaxtp.plans.styles",
    "TP": "jaxtp.mesh",
    "Trainer": "jaxtp.train.trainer",
    "VocabParallelEmbedding": "jaxtp.layers.embedding",
    "VocabParallelHead": "jaxtp.layers.embedding",
    "add_adapters": "jaxtp.hf.adapters",
    "audit": "jaxtp.analysis.audit",
    "by_path": "jaxtp.train.optimizer",
    "explain": "jaxtp.tools.explain.explanation",
    "freeze": "jaxtp.layers.lora",
    "hidden_log_probs": "jaxtp.models.log_probs",
    "load_hf": "jaxtp.hf.load",
    "load_peft": "jaxtp.hf.peft",
    "load_run": "jaxtp.train.own_model",
    "make_mesh": "jaxtp.mesh",
    "merge_adapters": "jaxtp.hf.adapters",
    "open_tokenizer": "jaxtp.generate.loading",
    "parallelize": "jaxtp.plans.parallelize",
    "propose_plan": "jaxtp.analysis.propose",
    "read_config": "jaxtp.hf.config_json",
    "sample_text": "jaxtp.generate.sample_text",
    "save_hf": "jaxtp.hf.save",
    "save_peft": "jaxtp.hf.peft",
    "stream_weights": "jaxtp.hf.save",
    "token_log_probs": "jaxtp.models.log_probs",
    "top_log_probs": "jaxtp.models.log_probs",
    "vocab_parallel_cross_entropy": "jaxtp.layers.loss",
    "vocab_parallel_logits": "jaxtp.layers.embedding",
    "without_adapters": "jaxtp.layers.lora",
}
"""The module of each public name."""

__all__ = sorted(_MODULES)

if TYPE_CHECKING:
    from jaxtp.analysis.audit import Audit as Audit
    from jaxtp.analysis.audit import AuditError as AuditError
    from jaxtp.analysis.audit import audit as audit
    from jaxtp.analysis.propose import Proposal as Proposal
    from jaxtp.analysis.propose import propose_plan as propose_plan
    from jaxtp.data.tokenizer import ByteTokenizer as ByteTokenizer
    from jaxtp.generate.engine import Generator as Generator
    from jaxtp.generate.loading import open_tokenizer as open_tokenizer
    from jaxtp.generate.request import Result as Result
    from jaxtp.generate.sample_text import sample_text as sample_text
    from jaxtp.generate.sampling import GenerationSettings as GenerationSettings
    from jaxtp.hf.adapters import add_adapters as add_adapters
    from jaxtp.hf.adapters import merge_adapters as merge_adapters
    from jaxtp.hf.config_json import read_config as read_config
    from jaxtp.hf.load import load_hf as load_hf
    from jaxtp.hf.model_folder import HFError as HFError
    from jaxtp.hf.peft import load_peft as load_peft
    from jaxtp.hf.peft import save_peft as save_peft
    from jaxtp.hf.save import save_hf as save_hf
    from jaxtp.hf.save import stream_weights as stream_weights
    from jaxtp.layers.attention import AttentionConfig as AttentionConfig
    from jaxtp.layers.attention import CausalSelfAttention as CausalSelfAttention
    from jaxtp.layers.branch import Branch as Branch
    from jaxtp.layers.branch import BranchConfig as BranchConfig
    from jaxtp.layers.branch import PositionwiseBranch as PositionwiseBranch
    from jaxtp.layers.embedding import HeadConfig as HeadConfig
    from jaxtp.layers.embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from jaxtp.layers.embedding import VocabParallelHead as VocabParallelHead
    from jaxtp.layers.embedding import vocab_parallel_logits as vocab_parallel_logits
    from jaxtp.layers.experts import ExpertsConfig as ExpertsConfig
    from jaxtp.layers.experts import MixtureOfExperts as MixtureOfExperts
    from jaxtp.layers.linear import ColumnParallelLinear as ColumnParallelLinear
    from jaxtp.layers.linear import LayerContext as LayerContext
    from jaxtp.layers.linear import RowParallelLinear as RowParallelLinear
    from jaxtp.layers.lora import LoraConfig as LoraConfig
    from jaxtp.layers.lora import freeze as freeze
    from jaxtp.layers.lora import without_adapters as without_adapters
    from jaxtp.layers.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from jaxtp.layers.mlp import MLP as MLP
    from jaxtp.layers.mlp import MLPConfig as MLPConfig
    from jaxtp.layers.norm import Norm as Norm
    from jaxtp.layers.norm import NormConfig as NormConfig
    from jaxtp.layers.parameter import FrozenParam as FrozenParam
    from jaxtp.layers.parameter import Precision as Precision
    from jaxtp.mesh import DP as DP
    from jaxtp.mesh import FSDP as FSDP
    from jaxtp.mesh import TP as TP
    from jaxtp.mesh import MeshError as MeshError
    from jaxtp.mesh import make_mesh as make_mesh
    from jaxtp.models.block import BlockConfig as BlockConfig
    from jaxtp.models.config import ModelConfig as ModelConfig
    from jaxtp.models.decoder import Decoder as Decoder
    from jaxtp.models.decoder import DecoderBlock as DecoderBlock
    from jaxtp.models.log_probs import hidden_log_probs as hidden_log_probs
    from jaxtp.models.log_probs import token_log_probs as token_log_probs
    from jaxtp.models.log_probs import top_log_probs as top_log_probs
    from jaxtp.plans.parallelize import parallelize as parallelize
    from jaxtp.plans.plan import PlanError as PlanError
    from jaxtp.plans.styles import Colwise as Colwise
    from jaxtp.plans.styles import ContextParallel as ContextParallel
    from jaxtp.plans.styles import PrepareInput as PrepareInput
    from jaxtp.plans.styles import PrepareInputOutput as PrepareInputOutput
    from jaxtp.plans.styles import PrepareOutput as PrepareOutput
    from jaxtp.plans.styles import Replicate as Replicate
    from jaxtp.plans.styles import Rowwise as Rowwise
    from jaxtp.plans.styles import SequenceParallel as SequenceParallel
    from jaxtp.plans.styles import Shard as Shard
    from jaxtp.tools.explain.explanation import explain as explain
    from jaxtp.train.distillation import Distillation as Distillation
    from jaxtp.train.optimizer import by_path as by_path
    from jaxtp.train.own_model import load_run as load_run
    from jaxtp.train.preference import DPO as DPO
    from jaxtp.train.trainer import Trainer as Trainer

    __version__: str
else:  # Type checkers would accept any name.

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            value = import_module("importlib.metadata").version(__name__)
        elif name in _MODULES:
            value = getattr(import_module(_MODULES[name]), name)
        else:
            if name == "Task":
                raise AttributeError(
                    "jaxtp.Task is gone; jaxtp.Trainer takes its fields: "
                    "jaxtp.Trainer(model=..., loss=..., batches=..., optimizer=...)"
                )
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
