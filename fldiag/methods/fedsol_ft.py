"""FedSOL with fine-tuning."""

from typing import Literal

from fldiag.method import Method, method
from fldiag.methods.fedsol import Rho, fedsol
from fldiag.parts.personal import Epochs, FineTune, Rate
from fldiag.sections import Positive, Rule


@method(
    "fedsol_ft",
    source="Lee et al., CVPR 2024, Algorithm 1 and Table 9",
    neutral={"rho": 0.0},
    equals="fedavg_ft",
)
def fedsol_ft(
    loss: Literal["kl", "l2"] = "kl",
    rho: Rho = None,
    tau: Positive = 3.0,
    part: Literal["auto", "full", "body", "head"] = "auto",
    strength: Literal["adaptive", "fixed"] = "adaptive",
    lambda_norm: Rule = "layer",
    tune_epochs: Epochs = (0, 1, 5),
    tune_lr: Rate = "decayed",
) -> Method:
    """FedSOL, after which every client fine-tunes the final model on its own data with plain cross entropy.

    Local step:  as FedSOL (loss, rho, tau, part, strength and lambda_norm are its own)
    Server:      as FedAvg.
    Personal:    no perturbation: w_k := w_g, then e epochs of w_k := w_k - lr g_l(w_k) for each e of tune_epochs, with
                 fresh momentum and tune_lr "decayed": lr * lr_decay ** rounds, or "initial": lr.
    Cost:        1.33 P a step with the head, as FedSOL; uplink 1x.
    Values:      as FedSOL; e = 1 and 5.
    """
    return Method(
        *fedsol(rho=rho, loss=loss, tau=tau, part=part, strength=strength, lambda_norm=lambda_norm),
        FineTune(tune_epochs, tune_lr),
    )
