"""FedLESAM-S."""

from typing import Literal

from fldiag.method import Method, method
from fldiag.parts.control import ControlVariates
from fldiag.parts.memory import GlobalDrift
from fldiag.sections import NonNegative


@method(
    "fedlesam_s",
    source="Fan et al., ICML 2024, Algorithm 1",
    neutral={"rho": 0.0},
    equals="scaffold",
)
def fedlesam_s(rho: NonNegative = 0.1, estimate: Literal["client", "server"] = "client") -> Method:
    """FedLESAM with control variates: the perturbation fixed for the round, and SCAFFOLD's correction.

    Local step:  g_u = grad L_l(w_k + e),  e = rho (w_old,k - w_g) / ||w_old,k - w_g||, w_old,k the model this client received
                 at its last participation (e = 0 at the first)
    Corrected:   g_u - c_k + c
    Server:      as SCAFFOLD.
    Cost:        1 P a step, uplink 2x, downlink 2x.
    Values:      rho = 0.1 (FedTOGA); 0.5 in the authors' README.
    Paper vs code: the released code takes the last global update for every client (estimate = "server"), indexes the
    flat vector by tensor number, scales by a sum of absolute values and multiplies c - c_k by 0.1; the last three are not
    reproduced.
    """
    return Method(GlobalDrift(rho, estimate), ControlVariates(1.0))
