from jaxtp.layers.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from jaxtp.models.log_probs import hidden_log_probs as hidden_log_probs
from jaxtp.models.log_probs import token_log_probs as token_log_probs
from jaxtp.models.log_probs import top_log_probs as top_log_probs
from jaxtp.train.distillation import Distillation as Distillation
from jaxtp.train.preference import DPO as DPO
from jaxtp.train.preference import SimPO as SimPO
