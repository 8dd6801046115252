"""FedSpeed."""

from fldiag.method import Method, method
from fldiag.parts.control import DynamicRegulariser
from fldiag.parts.perturbation import Sharpness
from fldiag.sections import NonNegative


@method(
    "fedspeed", source="Sun et al., ICLR 2023, Algorithm 1", neutral={"rho": 0.0}, equals="feddyn"
)
def fedspeed(rho: NonNegative = 0.1, lam: NonNegative = 0.1) -> Method:
    """Sharpness-aware gradients with FedDyn's dynamic regulariser.

    Local step:  g_u = grad L_l(w_k + e) + lam (w_k - w_g + h_k),  e = rho g_l / (||g_l|| + 1e-7)
    Client:      as FedDyn
    Server:      as FedDyn
    Cost:        2 P a step, uplink 1x.
    Values:      rho = 0.1, lam = 0.1.
    Paper vs code: the paper mixes both gradients and averages over the active clients; the released code, followed
    here, uses the perturbed gradient alone and averages h over all clients.
    """
    return Method(Sharpness(rho, guard=1e-7), DynamicRegulariser(lam))
