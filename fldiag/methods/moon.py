"""MOON."""

from fldiag.method import Method, method
from fldiag.parts.contrast import ModelContrast
from fldiag.sections import NonNegative, Positive


@method("moon", source="Li et al., CVPR 2021, Eq. 3", neutral={"mu": 0.0}, equals="fedavg")
def moon(mu: NonNegative = 0.1, tau: Positive = 0.5) -> Method:
    """Model-contrastive learning: representations near the received model's, away from the client's previous one.

    Objective:   L_l + mu mean_x -log(e^{cos(z,zg)/tau} / (e^{cos(z,zg)/tau} + e^{cos(z,zp)/tau}))
    State:       the client's last uploaded model (at first w_g of round 0)
    Server:      as FedAvg.
    Cost:        1.67 P a step (two more forwards), uplink 1x, three stored models.
    Paper vs code: FedSOL's configuration file has tau = 1; FedAlign's previous models probably alias the server's tensors, so
    that a client not sampled before would hold the present average; here it holds w_g of round 0.
    Values:      mu = 0.1 from {0.1, 0.5}, tau = 0.5 from {0.5, 1} (FedSOL); mu = 1, tau = 0.5 with a projection head (FedAlign).
    """
    return Method(ModelContrast(mu, tau))
