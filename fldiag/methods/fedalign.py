"""FedAlign."""

from typing import Literal

from fldiag.method import Method, method
from fldiag.parts.alignment import Clip, LipschitzAlignment
from fldiag.sections import Fraction, NonNegative


@method(
    "fedalign",
    source="Mendieta et al., CVPR 2022 (local learning matters)",
    neutral={"mu": 0.0, "clip": 0.0},
    equals="fedavg",
    needs=("stages",),
)
def fedalign(
    mu: NonNegative = 0.45,
    omega_s: Fraction = 0.25,
    lip_scale: Literal["ce", "raw"] = "ce",
    clip: NonNegative = 10.0,
) -> Method:
    """Distillation of the last stage's Lipschitz constant into a slim copy of that stage.

    Objective:   CE + mu L_Lip (lip_scale = raw), or CE + mu (CE / L_Lip) L_Lip with the bracket constant (ce)
    L_Lip:       mean_x (K_S - K_F)^2; K = spectral norm of X = pool(a) b^T / HW, from what enters the last stage (a,
                 averaged to the positions of b) to what leaves it (b), by 10 power iterations from the vector of ones
    K_F, K_S:    of the last stage (constant) and of its first fraction omega_s of channels (shared weights, statistics
                 of the batch); the gradient reaches the last stage only
    Gradient:    clipped to the norm clip (0: not), before weight decay
    Server:      as FedAvg; the full network is evaluated.
    Cost:        1.02 P a step, uplink 1x. Needs a residual network.
    Values:      mu = 0.45, omega_s = 0.25, clip = 10.
    Paper vs code: the paper writes raw, the released code does ce; the clipping is in the code only, and so is Nesterov
    momentum that is never reset: the code hands one buffer from client to client of a worker, which is not reproduced.
    Nearest to it is a buffer of each client's own (train.nesterov, train.keep_momentum).
    """
    return Method(LipschitzAlignment(mu, omega_s, lip_scale), Clip(clip))
