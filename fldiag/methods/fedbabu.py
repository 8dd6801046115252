"""FedBABU."""

from typing import Literal

from fldiag.method import Method, method
from fldiag.parts.personal import Epochs, FineTune, FrozenHead, Rate


@method(
    "fedbabu",
    source="Oh et al., ICLR 2022, Algorithm 1",
    neutral={"frozen": "none"},
    equals="fedavg",
)
def fedbabu(
    frozen: Literal["head", "none"] = "head",
    tune_epochs: Epochs = (0, 1, 5),
    tune_lr: Rate = "decayed",
) -> Method:
    """The head stays at its random initialisation: only the body is trained and averaged.

    Local step:  body := body - lr g_l on the body; the head is frozen (frozen = "head") or not ("none")
    Server:      as FedAvg, on the body.
    Personal:    everything is trained: w_k := w_g, then e epochs of local steps for each e of tune_epochs, with fresh
                 momentum and tune_lr "decayed": lr * lr_decay ** rounds, or "initial": lr.
    Cost:        1 P a step, uplink 1x (the head never changes and need not be sent; it is counted here).
    Values:      e = 1 and 5.
    """
    return Method(*([FrozenHead()] if frozen == "head" else []), FineTune(tune_epochs, tune_lr))
