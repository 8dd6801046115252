"""FedProj: the projection against its quadratic programme, its memory, when it projects, and what is sent."""

import numpy as np
import pytest
import torch
from helpers import classification, close, config, play
from scipy.optimize import minimize
from test_methods_distill_server import PUBLIC, build, mean_of_clients

from fldiag.parts.projection import endless, project
from fldiag.training import train
from fldiag.training.setup import Setup

rng = np.random.default_rng(0)
G, H = (
    torch.from_numpy(rng.normal(size=(40, 6)) * rng.uniform(0.01, 3, size=(40, 1)))
    for _ in range(2)
)


def inner(a, b):
    return (a * b).sum(-1)


def test_T_PROJ_4_it_is_the_nearest_gradient_without_conflict():
    for g, h, ours in zip(G[:12], H[:12], project(G, H)[:12], strict=True):
        found = minimize(
            lambda v, g=g: 0.5 * ((v - g.numpy()) ** 2).sum(),
            np.zeros(6),
            jac=lambda v, g=g: v - g.numpy(),
            constraints={
                "type": "ineq",
                "fun": lambda v, h=h: v @ h.numpy(),
                "jac": lambda v, h=h: h.numpy(),
            },
            method="SLSQP",
            options={"ftol": 1e-14},
        )
        np.testing.assert_allclose(ours, found.x, atol=1e-6)
        multiplier = float(
            inner(ours - g, h) / inner(h, h)
        )  # KKT: g' = g + lambda h, lambda >= 0, lambda <g', h> = 0
        assert multiplier >= 0
        close(ours, g + multiplier * h, terms=6)
        close(
            multiplier * inner(ours, h),
            torch.zeros((), dtype=g.dtype),
            terms=6,
            size=multiplier * ours.norm() * h.norm(),
        )


def test_scale_small_norms_and_the_clamp():
    torch.testing.assert_close(project(G, 1e3 * H), project(G, H), rtol=1e-12, atol=1e-14)
    small = inner(H, H) <= 0.5
    assert 0 < int(small.sum()) < 40
    assert torch.equal(
        project(G, H, min_norm_sq=0.5), torch.where(small[:, None], G, project(G, H))
    )
    coefficient = (inner(G, H) / inner(H, H)).clamp(-0.3, 0)
    close(project(G, H, clamp=0.3), G - coefficient[:, None] * H, terms=6)


def test_minibatches_of_the_memory_run_through_it_again_and_again():
    stream = endless(7, 3, torch.Generator().manual_seed(0))
    for _ in range(3):
        epoch = torch.cat([next(stream), next(stream)])
        assert len(set(epoch.tolist())) == 6
        assert set(epoch.tolist()) < set(range(7))


def test_the_memory_is_drawn_anew_each_round_and_holds_the_teachers_logits():
    made = build("fedproj", {"memory_size": 9})
    part, memories = made.setup.method.parts[0], []
    assert made.state == {}
    for t in (1, 2, 3):
        [(seen, _)] = play(made)
        memories.append(part.memory(0, t, 23))
        assert torch.allclose(
            made.state["teacher"], mean_of_clients(made, seen)[memories[-1]], atol=1e-13
        )
    assert made.state["teacher"].shape == (9, 3)
    assert len({tuple(sorted(m.tolist())) for m in memories}) == 3
    assert all(len(set(m.tolist())) == 9 for m in memories)
    whole = build("fedproj", {"memory_size": -1}).setup.method.parts[0]
    assert sorted(whole.memory(0, 1, 23).tolist()) == list(range(23))


@pytest.mark.parametrize(
    ("options", "present"),
    [
        ({}, [1, 2, 3, 4]),
        ({"first_round": 2, "last_round": 3}, [2, 3]),
        ({"memory_size": 0}, []),
        ({"proj_rate": 0.0}, []),
    ],
)
def test_projection_is_on_in_the_rounds_asked_for(options, present):
    """The teacher's logits are sent in these rounds only; the first round of all has none."""
    made = build("fedproj", {"epochs": 0, **options})
    plain = build("fedavg")
    for t in range(5):
        assert ("teacher" in made.state) == (t in present)
        plain.w = made.w.clone()
        [(seen, _)], [(other, _)] = play(made), play(plain)
        assert torch.equal(seen.rows, other.rows) == (t not in present)


@pytest.mark.parametrize(("size", "precision", "item"), [(-1, "fp64", 8), (10, "fp32", 4)])
def test_bytes_count_the_logits_on_the_memory(size, precision, item, tmp_path):
    data, parts = classification()
    chosen = config("fedproj", {"memory_size": size}, precision=precision)
    run = train.train(
        chosen, out=tmp_path, setup=Setup(chosen, dataset=data, parts=parts, public=PUBLIC)
    )
    frame = run.metrics.set_index(["metric", "round"])["value"]
    vector = item * sum(v.numel() for v in run.checkpoint().state.values())
    assert frame["uplink", 1] == frame["uplink", 2] == vector
    assert frame["downlink", 1] == vector
    assert frame["downlink", 2] == vector + item * 3 * (23 if size < 0 else size)
