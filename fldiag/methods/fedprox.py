"""FedProx."""

from fldiag.method import Method, method
from fldiag.parts.proximal import Proximal
from fldiag.sections import NonNegative


@method("fedprox", source="Li et al., MLSys 2020, Eq. 2", neutral={"mu": 0.0}, equals="fedavg")
def fedprox(mu: NonNegative = 1.0) -> Method:
    """A quadratic pull towards the received model.

    Objective:   L_l(w) + (mu/2) ||w - w_g||^2
    Local step:  g_u = g_l + mu (w_k - w_g)
    Server:      as FedAvg.
    Cost:        1 P a step, uplink 1x.
    Values:      mu = 1.0 from {0.1, 0.5, 1, 2} (FedSOL), 1e-4 (FedAlign, FedProj).
    Paper vs code: FedProj's released FedProx compares the live weights with themselves (its term is 0);
    FL-Simulator adds mu w to the weight decay, after clipping (train.clip_before_quadratic).
    """
    return Method(Proximal(mu))
