"""FedSOL."""

from typing import Literal

from fldiag.config import NonNegative, Positive
from fldiag.method import Method, method
from fldiag.parts.perturbation import ProximalPerturbation
from fldiag.parts.proximal import kl


@method("fedsol", source="Lee et al., CVPR 2024, Algorithm 1", neutral={"rho": 0.0}, equals="fedavg")
def fedsol(rho: NonNegative = 1.5, loss: Literal["kl", "l2"] = "kl", tau: Positive = 3.0,
           part: Literal["full", "body", "head"] = "head", strength: Literal["adaptive", "fixed"] = "adaptive",
           lambda_norm: Literal["layer", "tensor", "dim0"] = "layer", gp_floor: NonNegative | None = None,
           official_eps: bool = False) -> Method:
    """Stabilised orthogonal learning: the local gradient where the proximal loss is raised.

    Local step:  g_p = grad L_p(w_k; w_g),  e = rho Lambda g_p / (||g_p|| + 1e-12),  g_u = grad L_l(w_k + e)
    Lambda:      strength "adaptive": |w_k - w_g| / ||w_k - w_g|| per layer, or "fixed": 1
    part:        what is perturbed: the full net, its body or its head
    L_p:         kl: mean KL(softmax(f(x; w_g)/tau) || softmax(f(x; w)/tau));  l2: ||w - w_g||^2 / 2
    Server:      as FedAvg.
    Cost:        full 2 P + 1/3 P (teacher), body 1.96 P + 1/3 P, head 1.33 P + 1/3 P; uplink 1x.
    Values:      rho = 2.0 from {0.1, 0.5, 1, 2}; head, adaptive, rho = 1.5 gives the headline number.
    Paper vs code: the released code normalises Lambda along the first axis of each tensor (lambda_norm =
    "dim0") and perturbs along rounding noise in the first step of a round (official_eps; here no
    perturbation while ||g_p|| < gp_floor, by default 1e-6 in float32 and 1e-12 in float64).
    """
    floor = 0.0 if official_eps else gp_floor
    return Method(ProximalPerturbation(kl(tau) if loss == "kl" else None, rho, part, strength, lambda_norm, floor))
