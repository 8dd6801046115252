"""FedASAM."""

from fldiag.method import Method, method
from fldiag.parts.perturbation import Sharpness
from fldiag.sections import NonNegative


@method(
    "fedasam",
    source="Caldarola et al., ECCV 2022; ASAM: Kwon et al., ICML 2021, Eq. 8",
    neutral={"rho": 0.0},
    equals="fedavg",
)
def fedasam(rho: NonNegative = 1.0) -> Method:
    """Adaptive sharpness-aware local steps: the ball follows the size of each weight.

    Local step:  e = rho w^2 g_l / (|| |w| g_l || + 1e-12),  g_u = grad L_l(w_k + e)
    Server:      as FedAvg.
    Cost:        2 P a step, uplink 1x.
    Paper vs code: no constant is added to |w|, as in FedSOL's code (Kwon et al. add one).
    Values:      rho = 1.0 from {0.1, 0.5, 1, 2} (FedSOL; its config files hold 0.5).
    """
    return Method(Sharpness(rho, adaptive=True))
