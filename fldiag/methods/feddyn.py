"""FedDyn."""

from fldiag.method import Method, method
from fldiag.parts.control import DynamicRegulariser
from fldiag.sections import NonNegative


@method("feddyn", source="Acar et al., ICLR 2021, Algorithm 1")
def feddyn(lam: NonNegative = 0.1) -> Method:
    """Dynamic regularisation: the clients' optima are aligned with the global one.

    Local step:  g_u = g_l + lam (w_k - w_g + h_k)
    Client:      h_k := h_k + (w_k - w_g)          (gradient memory of the paper: -lam h_k)
    Server:      w_g := sum_k p_k w_k + H,  H = (1/N) sum over all clients of h_j
    Cost:        1 P a step, uplink 1x (the server follows h itself).
    Values:      lam = 0.1 (FedSOL's code), 0.01 or 0.1 (FedTOGA).
    Paper vs code: FedSOL's code averages w_k by examples and the memories by 1/N; FL-Simulator averages both equally
    (train.aggregate = "uniform") and adds lam w to the weight decay (train.clip_before_quadratic).
    Note: lam -> 0 gives FedAvg's local steps, but the server still adds H.
    """
    return Method(DynamicRegulariser(lam))
