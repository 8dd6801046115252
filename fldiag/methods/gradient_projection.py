"""Proximal gradient projection."""

from typing import Literal

from fldiag.method import Method, method
from fldiag.parts.projection import ProximalProjection
from fldiag.parts.proximal import KL, L2
from fldiag.sections import Positive


@method("gradient_projection", source="Lee et al., CVPR 2024, Eq. 3")
def gradient_projection(loss: Literal["l2", "kl"] = "kl", tau: Positive = 3.0) -> Method:
    """The local gradient without the part that opposes the proximal gradient.

    Local step:  g_u = g_l - (<g_l, g_p> / ||g_p||^2) g_p if <g_l, g_p> < 0, else g_l
    L_p:         loss = kl (tau) or l2, as in FedSOL
    Server:      as FedAvg.
    Cost:        2.33 P a step (kl; 2 P where inputs are not augmented: the received model's logits are then taken once a
                 round), 1 P (l2); uplink 1x.
    """
    return Method(ProximalProjection(KL(tau) if loss == "kl" else L2()))
