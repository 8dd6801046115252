"""MoFedSAM."""

from fldiag.method import Method, method
from fldiag.parts.momentum import ClientMomentum, GlobalUpdate
from fldiag.parts.perturbation import Sharpness
from fldiag.sections import Fraction, NonNegative, Positive


@method(
    "mofedsam", source="Qu et al., ICML 2022, Algorithm 2", neutral={"rho": 0.0}, equals="fedcm"
)
def mofedsam(
    rho: NonNegative = 0.1,
    alpha_cm: Fraction = 0.1,
    server_lr: Positive = 1.0,
) -> Method:
    """FedSAM with client momentum.

    Local step:  g_u = alpha_cm grad L_l(w_k + e) + (1 - alpha_cm) Delta,  e = rho g_l / (||g_l|| + 1e-7)
    Server:      Delta and w_g as FedCM (server_lr too), with K_k weighted by the momentum: Delta has the size of one gradient
    Cost:        2 P a step, uplink 1x, downlink 2x.
    Values:      rho = 0.1 (0.01 in FedTOGA), alpha_cm = 0.1 (0.05).
    """
    return Method(
        Sharpness(rho, guard=1e-7),
        ClientMomentum(alpha_cm),
        GlobalUpdate("effective", True, server_lr),
    )
