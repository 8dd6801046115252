"""FedAvg."""

from fldiag.method import Method, method


@method("fedavg", source="McMahan et al., AISTATS 2017, Algorithm 1")
def fedavg() -> Method:
    """Local SGD, then the weighted mean.

    Local step:  w_k := w_k - lr g_l(w_k)
    Server:      w_g := sum_k p_k w_k,  p_k = n_k / sum n (or 1/m: train.aggregate = "uniform")
    Cost:        1 P a step, uplink 1x.
    """
    return Method()
