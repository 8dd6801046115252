"""Strategies of FedSOL's ablation."""

from typing import Literal

from fldiag.config import NonNegative, Positive
from fldiag.method import Method, method
from fldiag.parts.proximal import kl
from fldiag.parts.strategy import Strategy


@method("strategy", source="Lee et al., CVPR 2024, Table 10", neutral={"beta_prox": 0.0, "rho": 0.0}, equals="fedavg")
def strategy(id: Literal["A0", "A1", "A2", "A3", "A4", "A5", "A6"] = "A1", beta_prox: NonNegative = 1.0, rho: NonNegative = 1.5,
             loss: Literal["kl", "l2"] = "kl", tau: Positive = 3.0, part: Literal["full", "body", "head"] = "head",
             strength: Literal["adaptive", "fixed"] = "adaptive") -> Method:
    """Ways to combine the local and the proximal loss, by the points where their gradients are taken.

    Local step:  by id, with eps_p = rho Lambda g_p / ||g_p||, eps_c = rho Lambda (g_p + g_l) / ||g_p + g_l||, b = beta_prox
                 A0: grad L_l(w)                                    (FedAvg)
                 A1: grad L_l(w + eps_p)                            (FedSOL)
                 A2: grad L_l(w)         + b grad L_p(w + eps_p)
                 A3: grad L_l(w + eps_p) + b grad L_p(w + eps_p)
                 A4: grad L_l(w + eps_c) + b grad L_p(w + eps_c)    (SAM of the sum)
                 A5: grad L_l(w)         + b grad L_p(w)            (FedProx with l2)
                 A6: grad L_l(w + eps_p) + b grad L_p(w)
    L_p, Lambda: loss (kl at temperature tau, or l2), part and strength as in FedSOL
    Server:      as FedAvg.
    Cost:        1.33 P a step for A1 with the head, as FedSOL; each further gradient up to 1 P more. Uplink 1x.
    Values:      not printed for this table; beta_prox = 1 and FedSOL's rho are an assumption.
    """
    return Method(Strategy(id, beta_prox, kl(tau) if loss == "kl" else None, rho, part, strength))
