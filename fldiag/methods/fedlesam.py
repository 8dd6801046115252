"""FedLESAM."""

from typing import Literal

from fldiag.method import Method, method
from fldiag.parts.memory import GlobalDrift
from fldiag.sections import NonNegative


@method(
    "fedlesam", source="Fan et al., ICML 2024, Algorithm 1", neutral={"rho": 0.0}, equals="fedavg"
)
def fedlesam(rho: NonNegative = 0.01, estimate: Literal["client", "server"] = "client") -> Method:
    """Locally estimated global perturbation: one gradient a step, at a point fixed for the round.

    Local step:  g_u = grad L_l(w_k + e),  e = rho (w_old,k - w_g) / ||w_old,k - w_g||, w_old,k the model this client received
                 at its last participation (e = 0 at the first)
    Server:      as FedAvg.
    Cost:        1 P a step, uplink 1x.
    Values:      rho = 0.01 (FedTOGA); 0.5 in the authors' README.
    Paper vs code: the released code takes the last global update for every client (estimate = "server"), indexes the
    flat vector by tensor number and scales by a sum of absolute values; the last two are not reproduced.
    """
    return Method(GlobalDrift(rho, estimate))
