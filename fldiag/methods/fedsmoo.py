"""FedSMOO."""

from fldiag.method import Method, method
from fldiag.parts.control import DynamicRegulariser
from fldiag.parts.memory import ConsensusPerturbation
from fldiag.sections import NonNegative


@method(
    "fedsmoo", source="Sun et al., ICML 2023, Algorithm 1", neutral={"rho": 0.0}, equals="feddyn"
)
def fedsmoo(rho: NonNegative = 0.1, lam: NonNegative = 0.1) -> Method:
    """Dynamic regularisation of the weights and of the perturbation: clients agree on one.

    Local step:  q = g_l - mu_k - s,  e = rho q / (||q|| + 1e-7),  mu_k := mu_k + (e - s)
                 g_u = grad L_l(w_k + e) + lam (w_k - w_g + h_k)
    Server:      s := rho mubar / ||mubar||, mubar = mean_S mu_k;  w_g as FedDyn
    Cost:        2 P a step, uplink 2x, downlink 2x.
    Values:      rho = 0.1, lam = 0.1.
    Paper vs code: s is that of the released code in that it leaves out the last perturbations of the clients; the code
    divides by ||mubar|| + 1e-7, here ||s|| is rho exactly, or 0 when mubar is 0.
    """
    return Method(ConsensusPerturbation(rho), DynamicRegulariser(lam))
