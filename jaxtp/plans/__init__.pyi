from jaxtp.plans.styles import Colwise as Colwise
from jaxtp.plans.styles import ContextParallel as ContextParallel
from jaxtp.plans.styles import PrepareInput as PrepareInput
from jaxtp.plans.styles import PrepareInputOutput as PrepareInputOutput
from jaxtp.plans.styles import PrepareOutput as PrepareOutput
from jaxtp.plans.styles import Replicate as Replicate
from jaxtp.plans.styles import Rowwise as Rowwise
from jaxtp.plans.styles import SequenceParallel as SequenceParallel
from jaxtp.plans.styles import Shard as Shard

__all__: list[str]
