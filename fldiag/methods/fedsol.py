"""FedSOL."""

from collections.abc import Callable
from typing import Literal

from fldiag.config import NonNegative, Positive
from fldiag.errors import FldiagError
from fldiag.method import Method, Part, method
from fldiag.parts.contrast import ModelContrast
from fldiag.parts.control import ControlVariates, DynamicRegulariser
from fldiag.parts.perturbation import ProximalPerturbation
from fldiag.parts.proximal import kl
from fldiag.parts.server import MeanGradientCorrection, NormalisedMean
from fldiag.parts.withheld import Withheld


@method("fedsol", source="Lee et al., CVPR 2024, Algorithm 1", neutral={"rho": 0.0}, equals="fedavg")
def fedsol(rho: NonNegative = 1.5, loss: Literal["kl", "l2", "scaffold", "fednova", "feddyn", "moon"] = "kl",
           tau: Positive = 3.0, tau_moon: Positive = 0.5, part: Literal["auto", "full", "body", "head"] = "auto",
           strength: Literal["adaptive", "fixed"] = "adaptive", lambda_norm: Literal["layer", "tensor", "dim0"] = "layer",
           gp_floor: NonNegative | None = None, official_eps: bool = False) -> Method:
    """Stabilised orthogonal learning: the local gradient where the proximal loss is raised.

    Local step:  g_p = grad L_p(w_k; w_g),  e = rho Lambda g_p / (||g_p|| + 1e-12),  g_u = grad L_l(w_k + e)
    Lambda:      strength "adaptive": |w_k - w_g| / ||w_k - w_g|| per layer, or "fixed": 1
    part:        what is perturbed: the full net, its body or its head ("auto": the head with kl, else the full net)
    L_p:         loss kl: mean KL(softmax(f(x; w_g)/tau) || softmax(f(x; w)/tau));  l2 (FedProx's): ||w - w_g||^2 / 2
                 scaffold: <c - c_k, w>;  fednova: <d - d_k, w>, d_k = (w_g - w_k) / (lr a_k) of the client's last round, d
                 their mean over the data;  feddyn: <h_k, w> + ||w - w_g||^2 / 2;  moon: the contrast, at temperature tau_moon
    Server:      as FedAvg; with scaffold, fednova, feddyn and moon states, uploads and server are that method's.
    Cost:        1.33 P a step with the head (1 P and the received model's forward, which is taken once a round where inputs
                 are not augmented), full or body 2.33 P; l2, scaffold, fednova, feddyn 1 P, moon 2.67 P. Uplink 1x (scaffold 2x).
    Values:      rho = 2.0 from {0.1, 0.5, 1, 2}; head, adaptive, rho = 1.5 gives the headline number. Other losses: rho = 2.0.
    Paper vs code: the released code normalises Lambda along the first axis of each tensor (lambda_norm =
    "dim0") and perturbs along rounding noise in the first step of a round (official_eps; here no
    perturbation while ||g_p|| < gp_floor, by default 1e-6 in float32 and 1e-12 in float64). The paper counts 1.33 P for the
    head without the received model; here both passes share the body's features. The paper averages uniformly
    (train.aggregate = "uniform"), the code by examples. g_p of the other methods is not printed; d_k, d are a reconstruction.
    """
    if loss == "moon" and part == "head":
        raise FldiagError("part = 'head' with loss = 'moon' perturbs nothing: the contrast does not depend on the head",
                          "set method.part to 'full' or 'body'", usage=True)
    base = BASES.get(loss, lambda tau: ())(tau_moon)
    withheld = [Withheld(part) for part in base[:1]]
    where = part if part != "auto" else "head" if loss == "kl" else "full"
    floor = 0.0 if official_eps else gp_floor
    return Method(ProximalPerturbation(kl(tau) if loss == "kl" else next(iter(withheld), None), rho, where, strength, lambda_norm,
                                       floor), *withheld, *base[1:])


#: The parts of the method that a loss comes from, first the one whose term is L_p (at any scale: g_p is normalised).
BASES: dict[str, Callable[[float], tuple[Part, ...]]] = {
    "scaffold": lambda tau: (ControlVariates(1.0),),
    "fednova": lambda tau: (MeanGradientCorrection(update=True), NormalisedMean()),
    "feddyn": lambda tau: (DynamicRegulariser(1.0),),
    "moon": lambda tau: (ModelContrast(1.0, tau),),
}
