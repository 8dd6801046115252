"""FedCM."""

from fldiag.method import Method, method
from fldiag.parts.momentum import ClientMomentum, GlobalUpdate
from fldiag.sections import Fraction, Positive


@method(
    "fedcm",
    source="Xu et al., arXiv 2106.10874 (2021), Algorithm 1",
    neutral={"alpha_cm": 1.0},
    equals="fedavg",
)
def fedcm(alpha_cm: Fraction = 0.1, server_lr: Positive = 1.0) -> Method:
    """Client-level momentum: every local gradient is mixed with the last global update.

    Local step:  g_u = alpha_cm g_l + (1 - alpha_cm) Delta
    Server:      Delta := -mean_S (w_k - w_g) / (K_k lr);  w_g := w_g + server_lr sum_k p_k (w_k - w_g)
    Cost:        1 P a step, uplink 1x, downlink 2x.
    Values:      alpha_cm = 0.1 from {0.01, 0.05, 0.1}.
    Paper vs code: the released code takes K from the first client's size; here each client's own number of steps
    (with momentum their weighted sum, as in FedNova, so that Delta has the size of one gradient, with which it is mixed).
    """
    return Method(ClientMomentum(alpha_cm), GlobalUpdate("effective", True, server_lr))
