from jaxtp.analysis.audit import audit as audit
from jaxtp.analysis.propose import propose_plan as propose_plan
from jaxtp.hf.adapters import add_adapters as add_adapters
from jaxtp.hf.adapters import merge_adapters as merge_adapters
from jaxtp.layers.attention import AttentionConfig as AttentionConfig
from jaxtp.layers.attention import CausalSelfAttention as CausalSelfAttention
from jaxtp.layers.embedding import VocabParallelEmbedding as VocabParallelEmbedding
from jaxtp.layers.embedding import VocabParallelHead as VocabParallelHead
from jaxtp.layers.experts import ExpertsConfig as ExpertsConfig
from jaxtp.layers.experts import MixtureOfExperts as MixtureOfExperts
from jaxtp.layers.linear import ColumnParallelLinear as ColumnParallelLinear
from jaxtp.layers.linear import RowParallelLinear as RowParallelLinear
from jaxtp.layers.lora import LoraConfig as LoraConfig
from jaxtp.layers.lora import freeze as freeze
from jaxtp.layers.lora import without_adapters as without_adapters
from jaxtp.layers.mlp import MLP as MLP
from jaxtp.layers.mlp import MLPConfig as MLPConfig
from jaxtp.layers.norm import Norm as Norm
from jaxtp.layers.norm import NormConfig as NormConfig
from jaxtp.layers.parameter import Precision as Precision
from jaxtp.mesh import make_mesh as make_mesh
from jaxtp.models.config import ModelConfig as ModelConfig
from jaxtp.models.decoder import Decoder as Decoder
from jaxtp.plans.parallelize import parallelize as parallelize
from jaxtp.tools.explain.explanation import explain as explain
from jaxtp.train.optimizer import by_path as by_path
from jaxtp.train.own_model import load_run as load_run
from jaxtp.train.trainer import Trainer as Trainer

from . import errors as errors
from . import generate as generate
from . import hf as hf
from . import layers as layers
from . import losses as losses
from . import plans as plans
from . import typing as typing

__version__: str
