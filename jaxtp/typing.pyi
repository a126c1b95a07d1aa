from jaxtp.analysis.audit import Audit as Audit
from jaxtp.analysis.audit import Holding as Holding
from jaxtp.analysis.collective import Collective as Collective
from jaxtp.analysis.propose import Proposal as Proposal
from jaxtp.analysis.propose import Reason as Reason
from jaxtp.config.hints import Problem as Problem
from jaxtp.tools.explain.explanation import Explanation as Explanation
from jaxtp.tools.explain.explanation import ModuleRow as ModuleRow
from jaxtp.tools.explain.explanation import SplitParameter as SplitParameter
from jaxtp.train.config import OptimizerConfig as OptimizerConfig
from jaxtp.train.config import TrainConfig as TrainConfig

__all__: list[str]
