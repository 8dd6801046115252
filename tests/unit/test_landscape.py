"""Landscapes: exact centre, curvature along eigenvectors, directions, and resuming bit for bit."""

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fldiag
from fldiag.diagnostics.landscape import axis, landscape
from fldiag.errors import FldiagError
from fldiag.landscape import directions as rules
from fldiag.problem.eigenpairs import eigenpairs
from fldiag.problem.problem import Problem
from fldiag.results.provenance import digest, provenance
from fldiag.results.table import check


def problem(scale=1.0, bend=nn.ReLU, **options):
    torch.manual_seed(2)
    x, y = torch.randn(30, 2, 5, 5), torch.arange(30) % 3
    net = nn.Sequential(nn.Conv2d(2, 4, 3), bend(), nn.Flatten(), nn.Linear(36, 3))
    with torch.no_grad():
        for t in net.parameters():
            t.mul_(scale)
    options.setdefault("name", "a")
    return Problem(net, cross_entropy, (x, y), **options)


def surface(frame):
    """The losses as an array with y along axis 0."""
    return (
        frame[frame.metric == "loss"]
        .pivot(index="y", columns="x", values="value")
        .to_numpy(dtype=float)
    )


# -- grid and values


@pytest.mark.parametrize("span", [1.0, 0.3, 7e-3])
@pytest.mark.parametrize("points", [3, 41, 99])
def test_axis_is_symmetric_with_zero_in_the_middle(points, span):
    a = axis(points, span)
    assert len(a) == points and a[points // 2] == 0.0 and a[-1] == span
    assert (a == -a[::-1]).all() and np.allclose(a, np.linspace(-span, span, points), atol=1e-15)


@pytest.mark.parametrize("how", ["eigen", "random"])
def test_T_L_1_centre_is_the_loss_bit_for_bit(how):
    p = problem()
    frame = check(landscape(p, directions=how, points=3))
    centre = frame[(frame.metric == "loss") & (frame.x == 0) & (frame.y == 0)]
    assert (centre.value.item(), centre.stderr.item()) == p.loss()


def test_every_point_is_the_loss_at_its_coordinates():
    p = problem(dtype=torch.float64)
    d = rules.random(p, seed=0)
    frame = landscape(p, directions="random", points=5, span=0.7)
    losses = frame[frame.metric == "loss"]
    assert sorted(zip(losses.x, losses.y, strict=True)) == sorted(
        itertools.product(axis(5, 0.7), repeat=2)
    )
    for row in losses.sample(8, random_state=0).itertuples():
        value, stderr = p.loss(p.w + row.x * d.d1 + row.y * d.d2)
        assert (row.value, row.stderr) == (
            pytest.approx(value, rel=1e-12),
            pytest.approx(stderr, rel=1e-9),
        )
    assert not np.allclose(
        surface(frame), surface(frame).T
    )  # x and y are not exchanged by accident


def test_T_L_2_second_difference_along_each_axis_is_the_eigenvalue():
    p, h = problem(dtype=torch.float64, bend=nn.Tanh), 1e-3  # no kinks within the step
    frame = landscape(p, points=3, span=h, tol=1e-8)
    z, values = surface(frame), frame[frame.metric == "eigenvalue"].value.to_numpy()
    assert len(values) == 5
    assert (z[1, 0] - 2 * z[1, 1] + z[1, 2]) / h**2 == pytest.approx(values[0], rel=1e-4)
    assert (z[0, 1] - 2 * z[1, 1] + z[2, 1]) / h**2 == pytest.approx(values[1], rel=1e-4)
    assert (z[2, 2] - z[2, 0] - z[0, 2] + z[0, 0]) / (4 * h**2) == pytest.approx(
        0, abs=1e-4 * values[0]
    )


def test_table_with_spectrum_rows():
    p = problem(labels={"method": "fedavg", "round": 7})
    frame = check(landscape(p, points=3))
    assert frame.metric.value_counts().to_dict() == {
        "loss": 9,
        "eigenvalue": 5,
        "eigenvalue_ratio": 1,
        "accuracy": 1,
    }
    assert set(frame.run) == {"a"} and set(frame["round"]) == {7} and set(frame.n_examples) == {30}
    eigen = frame[frame.metric == "eigenvalue"]
    assert eigen.value.tolist() == eigenpairs(p, 5).values.tolist() and eigen.residual.notna().all()
    assert frame[frame.metric == "eigenvalue_ratio"]["index"].item() == 5


def test_an_overflowing_corner_is_recorded_not_hidden():
    p = problem(labels={})
    frame = landscape(p, directions="random", points=3, span=1e30)
    z = surface(frame)
    assert not np.isfinite(z).all() and z[1, 1] == p.loss()[0]


def test_wrong_use_is_explained():
    for points in (4, 40):
        with pytest.raises(FldiagError, match="odd number"):
            landscape(problem(), points=points)
    with pytest.raises(FldiagError, match="three checkpoints"):
        landscape(problem(), directions="plane", points=3)
    one = Problem(
        nn.Linear(1, 1, bias=False),
        lambda z, y: z.square().mean(),
        (torch.ones(2, 1), torch.ones(2)),
    )
    with pytest.raises(FldiagError, match="one parameter"):
        landscape(one, points=3)
    with pytest.raises(FldiagError, match="one eigenvector"):
        rules.eigen(problem(), k=5, tol=1e-3, max_products=1, seed=0)


# -- directions


def test_random_directions_have_the_filter_norms_of_the_weights_and_no_biases():
    p = problem()
    d = rules.random(p, seed=3)
    for direction in (d.d1, d.d2):
        for name, t in p.layout.views(direction).items():
            weights = p.layout.views(p.w.double())[name]
            if t.ndim < 2:
                assert not t.any()
            else:
                assert torch.allclose(t.flatten(1).norm(dim=1), weights.flatten(1).norm(dim=1))
    assert abs(float(d.d1 @ d.d2)) < 0.5 * float(d.d1.norm() * d.d2.norm())
    assert torch.equal(d.d1, rules.random(p, seed=3).d1) and not torch.equal(
        d.d1, rules.random(p, seed=4).d1
    )


def test_random_directions_scale_with_the_weights():
    small, large = rules.random(problem(), seed=0), rules.random(problem(10.0), seed=0)
    assert torch.allclose(10 * small.d1, large.d1, rtol=1e-5)


def test_plane_passes_through_its_points():
    p = problem(dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    a, b = (p.w + 0.3 * torch.randn(p.w.shape, dtype=torch.float64, generator=g) for _ in range(2))
    d = rules.plane(p, [a, p.layout.views(b)])
    assert torch.allclose(
        torch.stack([d.d1, d.d2]) @ torch.stack([d.d1, d.d2]).T, torch.eye(2).double(), atol=1e-12
    )
    frame = check(landscape([p, p.at(a), p.at(b)], directions="plane", points=3))
    given = frame[frame.metric == "point"].set_index("index")
    for i, w in enumerate((p.w, a, b)):
        assert torch.allclose(p.w + given.x[i] * d.d1 + given.y[i] * d.d2, w, atol=1e-12)
        assert given.value[i] == pytest.approx(p.loss(w)[0], rel=1e-12)
    assert frame.x.max() >= 1.2 * given.x.abs().max() and surface(frame)[1, 1] == p.loss()[0]


def test_points_have_their_own_buffers_if_they_bring_them_and_say_so():
    def normed(seed):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).train()
        for _ in range(20):
            net((seed + 1) * torch.randn(40, 4) + seed)
        return net.eval()

    nets = [normed(i) for i in range(3)]
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    p = Problem(nets[0], cross_entropy, (x, y))
    weights = [torch.cat([t.detach().flatten() for t in n.parameters()]) for n in nets]
    own = [float(cross_entropy(n(x), y)) for n in nets]
    fixed = [p.loss(w)[0] for w in weights]
    assert min(abs(a - b) for a, b in zip(own[1:], fixed[1:], strict=True)) > 0.01
    for through, expected, kinds in (
        ([n.state_dict() for n in nets[1:]], own, ["own"] * 3),
        (weights[1:], fixed, ["own", "fixed", "fixed"]),
        ([nets[1].state_dict(), weights[2]], [*own[:2], fixed[2]], ["own", "own", "fixed"]),
    ):
        given = pd.DataFrame(rules.plane(p, through).rows)
        assert (
            given.value.tolist() == pytest.approx(expected, rel=1e-5)
            and given.buffers.tolist() == kinds
        )
    assert "buffers" not in pd.DataFrame(
        rules.plane(problem(), [problem().w + 1, problem(2.0).w]).rows
    )


def test_points_on_a_line_span_no_plane():
    p = problem()
    step = torch.ones_like(p.w)
    for through in ([p.w + step, p.w - 2 * step], [p.w, p.w + step], [p.w + step, p.w]):
        with pytest.raises(FldiagError, match="one line"):
            rules.plane(p, through)


# -- progress


def test_progress_counts_the_points():
    shares, texts = [], []
    fldiag.diagnose(
        problem(),
        "landscape",
        progress=lambda done, total, text: (shares.append(done / total), texts.append(text)),
        directions="random",
        points=5,
    )
    assert shares == sorted(shares)
    assert list(dict.fromkeys(texts))[-13:] == [
        *(f"points {i} to {i + 1}" for i in range(1, 25, 2)),
        "points 25 to 25",
    ]


# -- provenance


def test_digests_separate_what_differs_and_join_what_is_equal():
    t = torch.arange(4.0)
    things = [
        t,
        t.double(),
        t.reshape(2, 2),
        t.bfloat16(),
        t.numpy().tolist(),
        "0",
        0,
        0.0,
        None,
        False,
        [],
        {},
        [[1], 2],
        [1, [2]],
        {"a": 1},
        b"a",
        "a",
    ]
    assert len({digest(x) for x in things}) == len(things)
    assert digest({"a": 1, "b": t}) == digest({"b": t.clone(), "a": 1}) and digest(t) == digest(
        t.numpy()
    )
    assert digest("a", "b") != digest("ab") and len(digest()) == 64
    with pytest.raises(FldiagError, match="cannot digest"):
        digest(object())


def test_provenance_names_versions_precision_and_place():
    found = provenance(dtype=torch.float64, device="cpu", seed=3, slice="train")
    assert (
        found["torch"] == torch.__version__ and found["dtype"] == "float64" and found["seed"] == 3
    )
    assert (
        found["device"] == found["device_name"] == "cpu"
        and found["threads"] == torch.get_num_threads()
    )
    assert found["slice"] == "train" and found["fldiag"]
