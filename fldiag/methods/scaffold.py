"""SCAFFOLD."""

from fldiag.method import Method, method
from fldiag.parts.control import ControlVariates
from fldiag.sections import Positive


@method("scaffold", source="Karimireddy et al., ICML 2020, Algorithm 1 (option II)")
def scaffold(server_lr: Positive = 1.0) -> Method:
    """Control variates against client drift.

    Local step:  g_u = g_l - c_k + c
    Client:      c_k^+ = c_k - c + (w_g - w_k) / (a_k lr),  a_k = K_k (plain SGD) or the momentum-weighted
                 number of steps (K_k - r (1 - r^K_k) / (1 - r)) / (1 - r)
    Server:      w_g := w_g + server_lr sum_k p_k (w_k - w_g);  c := c + (1/N) sum_{k in S} (c_k^+ - c_k)
    Cost:        1 P a step, uplink 2x, downlink 2x.
    Paper vs code: with momentum FedSOL's code divides by a_k, as here (the paper's local steps have none; the mean of the
    gradients is then approximate); FL-Simulator divides by the number of steps of the first client, not rounded up.
    """
    return Method(ControlVariates(server_lr))
