"""FedGAMMA."""

from fldiag.method import Method, method
from fldiag.parts.control import ControlVariates
from fldiag.parts.perturbation import Sharpness
from fldiag.sections import NonNegative, Positive


@method(
    "fedgamma",
    source="Dai et al., IEEE TNNLS 2023, Algorithm 1",
    neutral={"rho": 0.0},
    equals="scaffold",
)
def fedgamma(rho: NonNegative = 0.1, server_lr: Positive = 1.0) -> Method:
    """SCAFFOLD with sharpness-aware gradients.

    Local step:  g_u = grad L_l(w_k + e) - c_k + c,  e = rho g_l / (||g_l|| + 1e-7)
    Client:      as SCAFFOLD
    Server:      as SCAFFOLD (server_lr scales its step)
    Cost:        2 P a step, uplink 2x, downlink 2x.
    Values:      rho = 0.1 (FedTOGA, ResNet-18), 0.01.
    """
    return Method(Sharpness(rho, guard=1e-7), ControlVariates(server_lr))
