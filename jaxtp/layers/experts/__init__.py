"""Mixture of experts: each token uses the k experts with its highest router scores.

See Shazeer et al., arXiv 1701.06538. No token is dropped.

    router.py     scores all experts and chooses k for each token, with their gates, the weights of
                  the sum over the chosen experts
    placement.py  decides which experts a device holds, and which tokens it multiplies with them
    dispatch.py   makes a row of each choice, sorted by expert, and sums the rows of each token
    layer.py      has the parameters, and does these steps in order

All devices of a tp group have the same tokens after the gather of sequence parallelism, so a device
selects the rows of its own experts; where tp does not divide the number of experts, it computes its
part of the hidden features of every row. The reduction over tp, which a dense MLP has too, sums the
results. Hence a mixture sends as much over tp as a dense MLP, plus two floats per choice, without
all-to-all. Over the storage, fsdp and cp, it gathers its kernels, or its tokens if they take fewer
bytes.
"""

from jaxtp.layers.experts.dispatch import RARELY as RARELY
from jaxtp.layers.experts.experts_config import ExpertsConfig as ExpertsConfig
from jaxtp.layers.experts.layer import EXPERT_TARGETS as EXPERT_TARGETS
from jaxtp.layers.experts.layer import EXPERTS as EXPERTS
from jaxtp.layers.experts.layer import ExpertsBesideMLP as ExpertsBesideMLP
from jaxtp.layers.experts.layer import MixtureOfExperts as MixtureOfExperts
from jaxtp.layers.experts.placement import Placement as Placement
