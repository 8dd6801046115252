"""FedRCL."""

from fldiag.method import Method, method
from fldiag.parts.relaxation import RelaxedContrast
from fldiag.sections import NonNegative, Positive


@method(
    "fedrcl",
    source="Seo et al., CVPR 2024 (relaxed contrastive learning for federated learning)",
    neutral={"attract": 0.0, "penalty": 0.0},
    equals="fedavg",
)
def fedrcl(
    attract: NonNegative = 1.0,
    penalty: NonNegative = 1.0,
    tau: Positive = 0.05,
    threshold: float = 0.7,
) -> Method:
    """Relaxed contrastive learning: same-class representations attract, unless all of them are too close already.

    Objective:   CE + mean over levels of mean_x (attract A + penalty R), s = cosine similarity inside the minibatch
                 A = -log(e^{s_p/tau} / (e^{s_p/tau} + sum_n e^{s_n/tau})): s_p of the least similar example of the same
                 class (the anchor, s = 1, among them), s_n of the two most similar examples of other classes
                 R = -log(e^{1/tau} / (e^{1/tau} + e^{s/tau})): s of the least similar other example of the same
                 class, -1 where that is below threshold
    Levels:      the stages of a residual network (before their ReLU, averaged over positions), else what the head sees
    Server:      as FedAvg.
    Cost:        1 P a step (and the similarities in a minibatch), uplink 1x.
    Values:      attract = penalty = 1, tau = 0.05, threshold = 0.7, with train.clip = 10.
    Paper vs code: the released code also runs the received model forward, whose outputs have no weight.
    """
    return Method(RelaxedContrast(attract, penalty, tau, threshold))
