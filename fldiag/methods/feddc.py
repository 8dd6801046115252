"""FedDC."""

from typing import Literal

from fldiag.method import Method, method
from fldiag.parts.control import DynamicRegulariser, GradientDrift
from fldiag.parts.personal import Rate
from fldiag.sections import NonNegative


@method("feddc", source="Gao et al., CVPR 2022, Algorithm 1")
def feddc(
    lam: NonNegative = 0.01,
    omega: Literal["equal", "n"] = "equal",
    rate: Rate = "decayed",
) -> Method:
    """Local drift decoupling and correction: FedDyn's drift variable with SCAFFOLD's gradient correction.

    Local step:  g_u = g_l + lam (w_k - w_g + h_k) + g - g_k
    Client:      h_k := h_k + (w_k - w_g);  g_k^+ = g_k - g - (w_k - w_g) / (K lr), K the local steps (with momentum
                 their weighted sum, as in FedNova, so that g_k has the size of one gradient, which it corrects)
    Server:      w_g := sum_k p_k w_k + (1/N) sum_j h_j;  g := g + (1/N) sum_S (g_k^+ - g_k)
    Cost:        1 P a step, uplink 2x, downlink 2x.
    Values:      lam = 0.01 (LeNet), 0.1 (ResNet-18).
    Paper vs code: the released code divides lam and g by omega_k = n_k N / n on the client and weighs g_k^+ - g_k by it
    (omega = "n"; the same where clients are of equal size), and divides by the lr of round 0 (rate = "initial").
    """
    by_size = omega == "n"
    return Method(DynamicRegulariser(lam, by_size), GradientDrift(by_size, rate == "initial"))
