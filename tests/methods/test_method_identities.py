"""Methods that are other methods at some settings, beyond the neutral ones that each of them declares; weights of a mean."""

import pytest
import torch
from helpers import classification, config, final, needs

UNEQUAL, EQUAL = classification((20, 13, 7)), classification((14, 14, 14))
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
CLIP = {"clip": 0.05, "clip_before_quadratic": True}
ADAM = {"beta1": 0.0, "beta2": 1.0, "v0": 0.25, "tau": 0.1, "server_lr": 0.6}
ALONE = {
    "fedtoga": {"kappa": 0.0, "beta_dual": 0.0},
    "fedproj": {"gamma_wd": 0.0, "proj_rate": 0.0},
}
STRONG = {"epochs": 2, "lr": 0.01}
#: (A, its options, B, its options, data, settings of the training, largest difference of the weights)
IDENTITIES = [
    ("fedgamma", {"rho": 0.0}, "scaffold", {}, UNEQUAL, PLAIN, 0),
    ("fedlesam_s", {"rho": 0.0, "estimate": "server"}, "scaffold", {}, UNEQUAL, PLAIN, 0),
    ("fedlesam_d", {"rho": 0.0, "estimate": "server"}, "feddyn", {}, UNEQUAL, PLAIN, 0),
    ("fedspeed", {"rho": 0.0, "lam": 0.3}, "feddyn", {"lam": 0.3}, UNEQUAL, PLAIN, 0),
    ("fedtoga", {"rho": 0.6, **ALONE["fedtoga"]}, "fedspeed", {"rho": 0.6}, UNEQUAL, PLAIN, 0),
    ("fedtoga", {"rho": 0.0, **ALONE["fedtoga"]}, "feddyn", {}, UNEQUAL, PLAIN, 0),
    ("mofedsam", {"rho": 0.2, "alpha_cm": 1.0}, "fedsam", {"rho": 0.2}, UNEQUAL, PLAIN, 1e-6),
    ("mofedsam", {"rho": 0.0, "alpha_cm": 0.3}, "fedcm", {"alpha_cm": 0.3}, UNEQUAL, PLAIN, 0),
    (
        "strategy",
        {"id": "A5", "loss": "l2", "beta_prox": 0.7},
        "fedprox",
        {"mu": 0.7},
        UNEQUAL,
        CLIP,
        0,
    ),
    ("fednova", {}, "fedavg", {}, EQUAL, {}, 1e-12),
    ("scaffold", {}, "fedavg", {}, classification((20,)), {"total": 1}, 1e-10),
    ("fedadam", ADAM, "fedavg", {}, UNEQUAL, {}, 1e-12),
    ("fedyogi", ADAM, "fedavg", {}, UNEQUAL, {}, 1e-12),
    ("fedproj", {**ALONE["fedproj"], **STRONG}, "feddf", STRONG, UNEQUAL, {}, 0),
]


@pytest.mark.parametrize(("a", "options_a", "b", "options_b", "data", "train", "gap"), IDENTITIES)
def test_a_setting_is_another_method(a, options_a, b, options_b, data, train, gap):
    world = {**needs(a), "rounds": 2, **train}
    one, other = (final(config(m, o, **world), data) for m, o in ((a, options_a), (b, options_b)))
    assert float((one - other).abs().max()) <= gap
    if options_a:  # and it is not so by nature
        assert not torch.allclose(one, final(config(a, **world), data), rtol=1e-6)
