"""Tensor-parallel training of transformer models in JAX that you can trust.

Each name of `__all__` is imported when it is first used: `import jaxtp` itself takes milliseconds, and a command, or a
script that needs the layers alone, does not wait for Orbax or pydantic.
"""

import re
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jaxtp import entry as _entry  # noqa: F401 (first: it ends Ctrl-C while the others are imported)

if TYPE_CHECKING:
    from jaxtp.audit.audit import Audit as Audit
    from jaxtp.audit.audit import AuditError as AuditError
    from jaxtp.audit.audit import audit as audit
    from jaxtp.explain.explanation import explain as explain
    from jaxtp.generate.engine import Generator as Generator
    from jaxtp.generate.loading import open_tokenizer as open_tokenizer
    from jaxtp.generate.request import Result as Result
    from jaxtp.generate.settings import GenerationSettings as GenerationSettings
    from jaxtp.hf.adapters import add_adapters as add_adapters
    from jaxtp.hf.adapters import merge_adapters as merge_adapters
    from jaxtp.hf.attributes import read_config as read_config
    from jaxtp.hf.folder import HFError as HFError
    from jaxtp.hf.load import load_hf as load_hf
    from jaxtp.hf.peft import save_peft as save_peft
    from jaxtp.hf.peft_load import load_peft as load_peft
    from jaxtp.hf.runs import load_run as load_run
    from jaxtp.hf.save import save_hf as save_hf
    from jaxtp.layers.attention import AttentionConfig as AttentionConfig
    from jaxtp.layers.attention import CausalSelfAttention as CausalSelfAttention
    from jaxtp.layers.branch import Branch as Branch
    from jaxtp.layers.branch import BranchConfig as BranchConfig
    from jaxtp.layers.branch import PositionwiseBranch as PositionwiseBranch
    from jaxtp.layers.embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from jaxtp.layers.embedding import VocabParallelHead as VocabParallelHead
    from jaxtp.layers.embedding import vocab_parallel_logits as vocab_parallel_logits
    from jaxtp.layers.experts import ExpertsConfig as ExpertsConfig
    from jaxtp.layers.experts import MixtureOfExperts as MixtureOfExperts
    from jaxtp.layers.linear import ColumnParallelLinear as ColumnParallelLinear
    from jaxtp.layers.linear import RowParallelLinear as RowParallelLinear
    from jaxtp.layers.lora import LoraConfig as LoraConfig
    from jaxtp.layers.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from jaxtp.layers.mlp import MLP as MLP
    from jaxtp.layers.mlp import MLPConfig as MLPConfig
    from jaxtp.layers.norm import Norm as Norm
    from jaxtp.layers.norm import NormConfig as NormConfig
    from jaxtp.layers.parameter import Precision as Precision
    from jaxtp.mesh import DP as DP
    from jaxtp.mesh import FSDP as FSDP
    from jaxtp.mesh import TP as TP
    from jaxtp.mesh import MeshError as MeshError
    from jaxtp.mesh import make_mesh as make_mesh
    from jaxtp.models.config import BlockConfig as BlockConfig
    from jaxtp.models.config import ModelConfig as ModelConfig
    from jaxtp.models.decoder import Decoder as Decoder
    from jaxtp.models.decoder import DecoderBlock as DecoderBlock
    from jaxtp.parallel.layouts import Replicate as Replicate
    from jaxtp.parallel.layouts import Shard as Shard
    from jaxtp.parallel.parallelize import parallelize as parallelize
    from jaxtp.parallel.plan import PlanError as PlanError
    from jaxtp.parallel.styles import Colwise as Colwise
    from jaxtp.parallel.styles import ContextParallel as ContextParallel
    from jaxtp.parallel.styles import PrepareInput as PrepareInput
    from jaxtp.parallel.styles import PrepareInputOutput as PrepareInputOutput
    from jaxtp.parallel.styles import PrepareOutput as PrepareOutput
    from jaxtp.parallel.styles import Rowwise as Rowwise
    from jaxtp.parallel.styles import SequenceParallel as SequenceParallel
    from jaxtp.propose.proposal import Proposal as Proposal
    from jaxtp.propose.propose import propose_plan as propose_plan

    __version__: str

with open(__file__, encoding="utf-8") as _source:
    _IMPORTS = re.findall(r"^    from (\S+) import \w+ as (\w+)$", _source.read(), re.MULTILINE)
_MODULE_OF = {name: module for module, name in _IMPORTS}
"""The module of each public name, read from the imports above: they are stated once, for type checkers and for us."""

__all__ = sorted(_MODULE_OF)


class _Package(ModuleType):
    """Keeps `audit` and `explain` functions: Python would set them to the packages of these names, once imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _MODULE_OF or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


if not TYPE_CHECKING:  # which would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Imports a name of `__all__`, or reads the version, where it is first used."""
        if name == "__version__":
            value = import_module("importlib.metadata").version(__name__)
        elif name in _MODULE_OF:
            value = getattr(import_module(_MODULE_OF[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Returns the names that the package has, imported or not."""
    return sorted({*globals(), *__all__, "__version__"})
