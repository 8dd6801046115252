"""Stochastic depth."""

from typing import Literal

from fldiag.method import Method, method
from fldiag.sections import Fraction


@method(
    "stochdepth",
    source="Huang et al., ECCV 2016, Eq. 2-5; as a federated method in Mendieta et al., CVPR 2022",
    neutral={"keep_last": 1.0},
    equals="fedavg",
    model=("keep_last", "keep_rule"),
    needs=("stages",),
)
def stochdepth(
    keep_last: Fraction = 0.9,
    keep_rule: Literal["code", "paper"] = "code",
) -> Method:
    """Stochastic depth: clients train residual networks that drop blocks at random.

    Local step:  block l of L is relu(F(x) + I(x)) with probability p_l, else relu(I(x)); one draw a minibatch and block
    Depth rule:  p_l = 1 - (l-1)/(L-1) (1 - keep_last) (keep_rule = code) or 1 - l/L (1 - keep_last) (paper)
    Evaluation:  relu(p_l F(x) + I(x)); both values are handed to the model's options of the same name
    Server:      as FedAvg.
    Cost:        0.95 P a step at keep_last = 0.9 (the mean of p_l), uplink 1x. Needs a residual network.
    Values:      keep_last = 0.9 (FedAlign).
    Paper vs code: the two rules; the released code's own default is keep_last = 0.5.
    """
    return Method()
