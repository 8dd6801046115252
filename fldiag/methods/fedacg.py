"""FedACG."""

from fldiag.method import Method, method
from fldiag.parts.server import LookAhead
from fldiag.sections import NonNegative, Unit


@method(
    "fedacg",
    source="Kim et al., CVPR 2024, Algorithm 1",
    neutral={"beta": 0.0, "mu": 0.0},
    equals="fedavg",
)
def fedacg(beta: Unit = 0.85, mu: NonNegative = 0.001) -> Method:
    """Accelerated client gradient: clients start at the look-ahead point of the server's momentum.

    Sent:        a = w_g + beta m
    Local step:  g_u = g_l + 2 mu (w_k - a)
    Server:      m := beta m + sum_k p_k (w_k - a),  w_g := sum_k p_k w_k
    Cost:        1 P a step, uplink 1x, downlink 1x (a instead of w_g).
    Values:      beta = 0.85 from {0.8, 0.85, 0.9}, mu = 1e-3 (released code).
    Paper vs code: the paper's term is mu/2 ||w - a||^2, the code's mu ||w - a||^2 (here the code's).
    """
    return Method(LookAhead(beta, mu))
