"""FedTOGA."""

from typing import Literal

from fldiag.method import Method, method
from fldiag.parts.control import DynamicRegulariser
from fldiag.parts.momentum import DualCorrection, GlobalPerturbation, GlobalUpdate, GradientMemory
from fldiag.sections import NonNegative


@method(
    "fedtoga",
    source="Li et al., FedTOGA; formulas reconstructed from prose, ablation and public code",
    neutral={"kappa": 0.0, "beta_dual": 0.0},
    equals="fedspeed",
    version=2,
)
def fedtoga(
    rho: NonNegative = 0.1,
    kappa: NonNegative = 1.0,
    beta_dual: NonNegative = 0.9,
    lam: NonNegative = 0.1,
    mode: Literal["global", "neighbour", "fusion"] = "global",
    registered: Literal["gradient", "corrected"] = "gradient",
    delta_scale: Literal["steps", "steps_lr"] = "steps",
) -> Method:
    """Global sharpness awareness: the last global update corrects the perturbation and the dual variable.

    Local step:  by mode, q = g_l + kappa Delta (global), gt + kappa Delta (neighbour: gt the gradient of the step
                 before, no first gradient) or g_l + gt + kappa Delta (fusion);  e = rho q / (||q|| + 1e-7)
                 g_u = grad L_l(w_k + e) + lam (w_k - w_g + h_k) + beta_dual Delta
    Server:      w_g as FedDyn;  Delta := -mean_S (w_k - w_g) / K_k, K_k the client's local steps (delta_scale = steps),
                 also divided by lr (steps_lr)
    Cost:        2 P a step (neighbour: 1 P), uplink 1x, downlink 2x.
    Values:      kappa = 1 {1, 2, 4}, beta_dual = 0.9 {0.8, 0.85, 0.9}, lam = 0.1 {0.01, 0.1, 0.2}, rho = 0.1.
    Ablation:    kappa = beta_dual = 0 is FedSpeed, and rho = 0 then FedDyn.
    Paper vs code: public code always uses fusion with kappa = 1 and registers the gradient with its corrections,
    after clipping (registered = "corrected": before clipping); one client passes h_k - w_g instead of Delta (not reproduced).
    Both omit the division by lr (delta_scale). K there is that of the first client or of the average size.
    Version 2:   K_k counts steps; in version 1 they were weighted by the momentum (the same without it).
    """
    memory = [] if mode == "global" else [GradientMemory()]  # nothing reads it in that mode
    before, after = (memory, []) if registered == "gradient" else ([], memory)
    return Method(
        GlobalPerturbation(rho, kappa, mode),
        *before,
        DynamicRegulariser(lam),
        DualCorrection(beta_dual),
        *after,
        GlobalUpdate("plain", delta_scale == "steps_lr"),
    )
