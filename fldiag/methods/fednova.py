"""FedNova."""

from typing import Literal

from fldiag.method import Method, method
from fldiag.parts.server import MeanGradientCorrection, NormalisedMean


@method("fednova", source="Wang et al., NeurIPS 2020, Eq. 4 and 6")
def fednova(ccvr: Literal["off", "fixed", "official"] = "off") -> Method:
    """Normalised averaging: clients that take more steps do not count more.

    Client:      a_k = K_k; with momentum r it is (K_k - r (1 - r^K_k) / (1 - r)) / (1 - r)
    Server:      w_g := w_g + tau_eff sum_k p_k (w_k - w_g) / a_k,  tau_eff = sum_k p_k a_k
    Cost:        1 P a step, uplink 1x and a scalar.
    Paper vs code: FedSOL's configuration adds g + d - d_k with d_k = (w_g - w_k) / (lr a_k) but never updates d (ccvr =
    "official"); "fixed" updates it by d := (1 - q) d + sum_S (n_k / n) d_k, q the sampled share of the data. FedProj's code
    trains with Adam and keeps the formula of momentum 0.9; here a_k = K_k with Adam.
    """
    return Method(
        NormalisedMean(), *([] if ccvr == "off" else [MeanGradientCorrection(ccvr == "fixed")])
    )
