"""FedSAM."""

from fldiag.method import Method, method
from fldiag.parts.perturbation import Sharpness
from fldiag.sections import NonNegative


@method(
    "fedsam",
    source="Qu et al., ICML 2022; SAM: Foret et al., ICLR 2021, Eq. 2",
    neutral={"rho": 0.0},
    equals="fedavg",
)
def fedsam(rho: NonNegative = 0.1) -> Method:
    """Sharpness-aware local steps.

    Local step:  e = rho g_l / (||g_l|| + 1e-12),  g_u = grad L_l(w_k + e) on the same minibatch
    Server:      as FedAvg.
    Cost:        2 P a step, uplink 1x.
    Paper vs code: FL-Simulator's guard is 1e-7, and it adds and subtracts e (here w_k keeps its bits).
    Values:      rho = 0.1 from {0.1, 0.5, 1, 2} (FedSOL; its config files hold 0.5), 0.01 (FedTOGA).
    """
    return Method(Sharpness(rho))
