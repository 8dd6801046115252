"""FedYogi."""

from fldiag.method import Method, method
from fldiag.parts.server import AdaptiveServer
from fldiag.sections import NonNegative, Positive, Unit


@method("fedyogi", source="Reddi et al., ICLR 2021, Algorithm 2")
def fedyogi(
    server_lr: Positive = 0.1,
    beta1: Unit = 0.9,
    beta2: Unit = 0.99,
    tau: Positive = 0.01,
    v0: NonNegative = 0.0,
) -> Method:
    """Yogi on the server, with the mean client update as its gradient.

    Server:      Delta = sum_k p_k (w_k - w_g),  m := beta1 m + (1 - beta1) Delta
                 v := v - (1 - beta2) Delta^2 sign(v - Delta^2),  w_g := w_g + server_lr m / (sqrt(v) + tau)
    Cost:        1 P a step, uplink 1x.
    Values:      tau = 0.01, v0 = 0, server_lr = 0.1 (FedTOGA's code base); original tau = 1e-3, v0 = tau^2. No bias correction.
    """
    return Method(AdaptiveServer("yogi", server_lr, beta1, beta2, tau, v0))
