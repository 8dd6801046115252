"""FedNTD."""

from fldiag.method import Method, method
from fldiag.parts.proximal import NotTrueDistillation
from fldiag.sections import NonNegative, Positive


@method("fedntd", source="Lee et al., NeurIPS 2022, Eq. 4-6", neutral={"mu": 0.0}, equals="fedavg")
def fedntd(mu: NonNegative = 1.0, tau: Positive = 1.0) -> Method:
    """Not-true distillation: keep the received model's view of the classes that are not the label.

    Objective:   CE + mu tau^2 mean_x KL(softmax(zg_{not y} / tau) || softmax(z_{not y} / tau))
    Server:      as FedAvg.
    Cost:        1.33 P a step (one forward of the received model; once a round where inputs are not augmented), uplink 1x.
    Values:      mu = 1.0, tau = 1.0 from {0.5, 1} x {1, 3} (FedSOL).
    """
    return Method(NotTrueDistillation(mu, tau))
