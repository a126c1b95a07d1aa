"""Tensor-parallel training of transformer models in JAX that you can trust.

Each name in `__all__` is imported at its first use. So `import jaxtp` takes milliseconds, and a
script that needs only the layers does not wait for Orbax or pydantic.
"""

import re
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_type_hints

from jaxtp.config import entry as _entry

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
    from jaxtp.parallelize.parallelize import parallelize as parallelize
    from jaxtp.parallelize.plan import PlanError as PlanError
    from jaxtp.parallelize.styles import Colwise as Colwise
    from jaxtp.parallelize.styles import Compute as Compute
    from jaxtp.parallelize.styles import ContextParallel as ContextParallel
    from jaxtp.parallelize.styles import PrepareInput as PrepareInput
    from jaxtp.parallelize.styles import PrepareInputOutput as PrepareInputOutput
    from jaxtp.parallelize.styles import PrepareOutput as PrepareOutput
    from jaxtp.parallelize.styles import Replicate as Replicate
    from jaxtp.parallelize.styles import Rowwise as Rowwise
    from jaxtp.parallelize.styles import SequenceParallel as SequenceParallel
    from jaxtp.parallelize.styles import Shard as Shard
    from jaxtp.tools.explain.explanation import explain as explain
    from jaxtp.train.distillation import Distillation as Distillation
    from jaxtp.train.optimizer import by_path as by_path
    from jaxtp.train.own_model import load_run as load_run
    from jaxtp.train.preference import DPO as DPO
    from jaxtp.train.task import Task as Task
    from jaxtp.train.trainer import Trainer as Trainer

    __version__: str

with open(__file__, encoding="utf-8") as _source:
    _IMPORTS = re.findall(r"(?m)^    from (.+) import (\w+) as \2$", _source.read())
_MODULE_OF = {name: module for module, name in _IMPORTS}
"""The module of each public name, parsed from the imports above, which only type checkers
evaluate."""

__all__ = sorted(_MODULE_OF)


class _Package(ModuleType):
    """Keeps `jaxtp.parallelize` a function: importing the package of that name would replace it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _MODULE_OF or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


class _InitSignature:
    """Shows the signature of `__init__` where a metaclass, such as NNX's, defines `__call__`."""

    def __get__(self, instance: object, owner: Any) -> object:
        if instance is not None:  # makes `inspect` read the instance's `__call__`
            return None
        inspect = import_module("inspect")
        parameters = [*inspect.signature(owner.__init__).parameters.values()]
        return inspect.Signature(() if owner.__init__ is object.__init__ else parameters[1:])


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Imports a name in `__all__`, or reads the version, at its first use."""
        if name == "__version__":
            value = import_module("importlib.metadata").version(__name__)
        elif name in _MODULE_OF:
            value = getattr(_entry.import_fast(_MODULE_OF[name]), name)
            if isinstance(value, type) and type(value).__call__ is not type.__call__:
                value.__signature__ = _InitSignature()
            elif hasattr(value, "__dataclass_fields__") and isinstance(value, type):
                plain = get_type_hints(value.__init__)  # without `Annotated`
                value.__init__.__annotations__ = {**plain, "return": None}
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
