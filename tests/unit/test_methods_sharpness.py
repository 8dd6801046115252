"""FedSAM and FedASAM, and what holds for every perturbation: the gradient taken there, the weights kept."""

import pytest
import torch
from helpers import classification, close, config, federation, play, quadratics, trace
from torch import nn

UNEQUAL = (20, 13, 7)
FULL = {"part": "full", "strength": "fixed"}


def far(a, b):
    return float((a - b).abs().max())


def one(x):
    """Norm of each row."""
    return torch.linalg.vector_norm(x, dim=-1)


def traced(method, options, data, *, raw=False, rounds=1, **more):
    made = federation(config(method, options, **more), data)
    spy = trace(made, raw=raw)
    play(made, rounds)
    return made, spy


@pytest.mark.parametrize("stack", ["off", "on"])
def test_T_SAM_2_length_of_the_perturbation(stack):
    data = classification(UNEQUAL)
    _, sam = traced("fedsam", {"rho": 0.3}, data, stack=stack)
    assert all(far(one(e), 0.3) <= 1e-9 for e in sam.e)
    _, asam = traced("fedasam", {"rho": 0.3}, data, stack=stack)
    assert all(far(one(e / w.abs()), 0.3) <= 1e-9 for e, w in zip(asam.e, asam.w, strict=True))
    assert all(far(one(e), 0.3) > 1e-3 for e in asam.e)


def test_T_SAM_3_where_every_weight_is_one_the_adaptive_ball_is_the_ball():
    data = classification(UNEQUAL)
    signs = torch.where(torch.arange(110) % 3 == 0, 1.0, -1.0).double()
    first = []
    for method in ("fedsam", "fedasam"):
        made = federation(config(method, {"rho": 0.4}), data)
        made.w = signs[: made.w.numel()].clone()
        spy = trace(made)
        play(made)
        first.append((spy.e[0], spy.g[0]))
    close(first[0][0], first[1][0], terms=110)  # of the norm
    assert far(first[0][1], first[1][1]) <= 1e-12
    assert far(first[0][0], 0 * signs[0]) > 1e-3


@pytest.mark.parametrize("adaptive", [False, True])
def test_T_SAM_4_gradient_on_a_quadratic(adaptive):
    """g_u = g + rho A g / ||g||, and with T = |w|: g + rho A T^2 g / ||T g||."""
    q = quadratics()
    made = federation(
        q.config("fedasam" if adaptive else "fedsam", {"rho": 0.7}, lr=0.05, epochs=4), q.data
    )
    spy = trace(made)
    play(made)
    for w, g_u, [k] in zip(spy.w, spy.g, spy.ids, strict=True):
        g, t = q.gradient(k, w[0]), w[0].abs() if adaptive else torch.ones(4, dtype=torch.float64)
        assert far(g_u[0], g + 0.7 * q.A[k] @ (t * t * g) / (t * g).norm()) <= 1e-10


@pytest.mark.parametrize(
    ("method", "options"),
    [("fedsam", {"rho": 0.5}), ("fedasam", {}), ("fedsol", {**FULL, "rho": 1.0}), ("fedsol", {})],
)
def test_T_SAM_5_the_step_starts_from_the_bits_it_had(method, options):
    _, spy = traced(
        method, options, classification(UNEQUAL), momentum=0.0, weight_decay=0.0, per_round=1
    )
    for s in range(len(spy.w) - 1):
        assert torch.equal(spy.w[s + 1], spy.w[s].sub(spy.g[s], alpha=0.1))
    assert any(e.any() for e in spy.e)


def normed(seed=5):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
        )


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedsam", {}),
        ("fedasam", {}),
        ("fedsol", FULL),
        ("fedsol", {"part": "body"}),
        ("fedsol", {"part": "head"}),
    ],
)
def test_running_statistics_see_a_minibatch_once_a_step_and_unperturbed(method, options):
    data = classification((16, 16))
    chosen = {"total": 2, "epochs": 1, "batch_size": 16, "lr": 0.5}
    plain, other = (
        federation(config(m, o, **chosen), data, module=normed())
        for m, o in (("fedavg", {}), (method, options))
    )
    play(plain)
    play(other)
    for name, buffer in plain.buffers.items():
        torch.testing.assert_close(other.buffers[name], buffer, rtol=1e-12, atol=0)
    assert int(other.buffers["2.num_batches_tracked"]) == 1
