"""FedAvgM."""

from fldiag.method import Method, method
from fldiag.parts.server import ServerMomentum
from fldiag.sections import Positive, Unit


@method(
    "fedavgm", source="Hsu et al., arXiv 1909.06335 (2019)", neutral={"beta": 0.0}, equals="fedavg"
)
def fedavgm(beta: Unit = 0.9, server_lr: Positive = 1.0) -> Method:
    """Server momentum on the averaged update.

    Server:      m := beta m + (w_g - sum_k p_k w_k),  w_g := w_g - server_lr m
    Cost:        1 P a step, uplink 1x.
    Values:      beta = 0.9; 0.7 in the FedNTD authors' configuration.
    """
    return Method(ServerMomentum(beta, server_lr))
