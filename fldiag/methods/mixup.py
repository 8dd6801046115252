"""Mixup."""

from fldiag.method import Method, method
from fldiag.parts.augmentation import MixedExamples
from fldiag.sections import NonNegative


@method(
    "mixup",
    source="Zhang et al., ICLR 2018; as a federated method in Mendieta et al., CVPR 2022",
    neutral={"g": 0.0},
    equals="fedavg",
)
def mixup(g: NonNegative = 0.1) -> Method:
    """Mixup: clients train on convex combinations of their own examples.

    Local step:  a ~ Beta(g, g) and a permutation pi, drawn once a minibatch;  x~ = a x + (1 - a) x_pi
    Objective:   a CE(f(x~), y) + (1 - a) CE(f(x~), y_pi)
    Server:      as FedAvg.
    Cost:        1 P a step, uplink 1x.
    Values:      g = 0.1 (FedAlign). g = 0 mixes nothing.
    """
    return Method(MixedExamples(g))
