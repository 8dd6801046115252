"""Paths: parabolas that touch the loss, barriers of closed forms, and each end with its own batch-norm statistics."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fldiag
from fldiag import FldiagError
from fldiag.diagnostics.paths import BARRIERS, LINES, draw, summary
from fldiag.problem.problem import Problem
from fldiag.results.table import number, only


class Point(nn.Module):
    """Its weights are its outputs."""

    def __init__(self, *w):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, x):
        return self.w.expand(len(x), -1)


def points(loss, *places, n=7):
    """The loss (outputs, y) -> mean around several weights."""
    data = torch.zeros(n, 1), torch.linspace(-1, 1, n, dtype=torch.float64)
    return [
        Problem(Point(*w), loss, data, name=f"m{i}", dtype=torch.float64)
        for i, w in enumerate(places)
    ]


def ring(z, y):
    """A valley on the unit circle; the examples differ by their scale."""
    return ((1 + 0.5 * y) * (z.square().sum(1) - 1).square()).mean()


H = torch.tensor([5.0, 3.0, -1.0], dtype=torch.float64)


def quadratic(z, y):
    return (0.5 * (z.square() * H).sum(1) * (1 + y)).mean()


def normed(seed, hidden=4, n=60):
    """A network with batch-norm whose statistics are its own."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(hidden)
    norm.running_mean.normal_()
    net = nn.Sequential(nn.Linear(6, hidden), norm, nn.Tanh(), nn.Linear(hidden, 3))
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))
    return Problem(
        net, cross_entropy, (x, x[:, :3].argmax(1)), name=f"m{seed}", dtype=torch.float64
    )


def values(frame, metric, index=1):
    part = only(frame, metric=metric, index=index).sort_values("x")
    return part["value"].to_numpy(float)


@pytest.mark.parametrize("directions", ["eigen", "random"])
def test_the_parabola_is_a_quadratic_loss_and_touches_any_other(directions):
    options = {"directions": directions, "points": 9}
    if directions == "eigen":
        frame = fldiag.diagnose(points(quadratic, (1.0, 2.0, 0.5)), "paths", span=2.0, **options)
        for i, (h, w) in enumerate(((5.0, 1.0), (3.0, 2.0)), start=1):
            assert values(frame, "loss", i) == pytest.approx(values(frame, "parabola", i))
            assert number(frame, "curvature", index=i) == pytest.approx(h)
            assert abs(number(frame, "slope", index=i)) == pytest.approx(h * w)
        assert only(frame, metric="loss")["x"].min() == -2
    problem = normed(0)
    frame = fldiag.diagnose(problem, "paths", span=1e-3, **options)
    for i in (1, 2):
        loss, bowl = values(frame, "loss", i), values(frame, "parabola", i)
        assert loss[4] == bowl[4] == problem.loss()[0]
        assert np.abs(loss - bowl).max() < 1e-6 < np.abs(loss - loss[4]).max()  # third order


def test_the_barrier_of_a_ring_its_place_and_its_error_over_examples():
    frame = fldiag.diagnose(points(ring, (-1.0, 0.0), (1.0, 0.0)), "paths", points=5)
    row = only(frame, metric="barrier").iloc[0]
    # at the centre (r² - 1)² is 1, at the ends 0
    scale = 1 + 0.5 * torch.linspace(-1, 1, 7, dtype=torch.float64)
    assert (row.value, row.x) == (pytest.approx(1.0), 0.5)
    assert row.stderr == pytest.approx(float(scale.std()) / 7**0.5)
    assert values(frame, "loss") == pytest.approx([0, 0.5625, 1, 0.5625, 0])
    assert (row.run, row.run_b, number(frame, "distance")) == ("m0", "m1", 2)


def test_a_convex_loss_has_no_barrier_and_one_that_overflows_an_infinite_one():
    def bowl(z, y):
        return 0.5 * z.square().sum(1).mean()

    def log(z, y):
        return (1 / z[:, 0].abs()).mean()

    frame = fldiag.diagnose(points(bowl, (1.0, 2.0), (0.0, -1.0), (-1.0, 1.0)), "paths")
    assert only(frame, metric="barrier")["value"].tolist() == [0.0] * 3
    assert list(
        zip(*(only(frame, metric="barrier")[c] for c in ("run", "run_b")), strict=True)
    ) == [
        ("m0", "m1"),
        ("m0", "m2"),
        ("m1", "m2"),
    ]
    frame = fldiag.diagnose(points(log, (-1.0,), (1.0,)), "paths", points=3)
    assert number(frame, "barrier") == np.inf
    assert draw(frame).axes


def test_batch_norm_goes_along_the_path_and_a_model_is_no_way_from_itself():
    a, b = (normed(seed) for seed in (0, 1))
    frame = fldiag.diagnose([a, b], "paths", points=3)
    middle, states = copy.deepcopy(a.module), [p.state for p in (a, b)]
    mean = {n: (t + states[1][n]) / 2 if t.is_floating_point() else t for n, t in states[0].items()}
    middle.load_state_dict(mean)
    x, y = a.read(0, a.n)
    with torch.no_grad():
        expected = float(cross_entropy(middle(x), y))
    assert values(frame, "loss").tolist() == pytest.approx([a.loss()[0], expected, b.loss()[0]])
    assert values(frame, "accuracy")[::2].tolist() == [
        float(p.scores().right.mean()) for p in (a, b)
    ]
    assert set(only(frame, metric="barrier")["buffers"]) == {"interpolated"}
    itself = fldiag.diagnose([a, a.at(a.w, name="again")], "paths", points=5)
    assert number(itself, "barrier") == number(itself, "distance") == 0


def test_from_a_global_model_to_its_clients(tmp_path):
    config = fldiag.Config.load(
        "digits",
        rounds=1,
        model={"name": "mlp", "hidden": (8,)},
        clients={"total": 6, "per_round": 3},
        train__epochs=1,
        checkpoint__clients="sampled",
    )
    run = fldiag.train(config, out=tmp_path / "run", device="cpu")
    few = {"samples": 60, "device": "cpu"}
    frame = fldiag.diagnose(run, "paths", directions="clients", points=3, **few)
    ids = run.checkpoint(1).client_ids
    assert only(frame, metric="barrier")["client"].tolist() == list(ids)
    for i, k in enumerate(ids, start=1):
        for client, end in ((None, 0), (k, -1)):
            table = fldiag.diagnose(run, "spectrum", k=1, client=client, **few)
            assert values(frame, "loss", i)[end] == pytest.approx(number(table, "loss"))


@pytest.mark.parametrize(
    ("problems", "options", "says"),
    [
        ([normed(0), normed(0, hidden=5)], {}, "m0 and m0 are not of one architecture"),
        ([normed(0), normed(1, n=50)], {}, r"the same examples \(data, 60; data, 50\)"),
        ([normed(0)], {"directions": "models"}, "there is one model"),
        ([normed(0)], {"directions": "clients"}, "holds trained weights of clients"),
        ([normed(0)], {"points": 4}, "an odd number"),
    ],
)
def test_wrong_use_is_explained(problems, options, says):
    with pytest.raises(FldiagError, match=says):
        fldiag.diagnose(problems, "paths", **options)


def test_picture_and_summary_show_the_numbers():
    models = points(ring, (-1.0, 0.0), (1.0, 0.0), (0.0, 0.5))
    for options, columns, count, text in (
        ({}, BARRIERS, 3, "m1: barrier 1 ± 0.14"),
        ({"directions": "eigen"}, LINES, 6, "direction 1: curvature 8"),
    ):
        frame = fldiag.diagnose(models, "paths", points=5, **options)
        small = next(iter(summary(frame, options)))
        assert small.columns == columns and len(small.rows) == count
        fig = draw(frame)
        ax = next(ax for ax in fig.axes if ax.get_title() == "m0")
        legend = ax.get_legend().get_texts()
        assert legend[0].get_text() == text
        first = only(frame, run="m0", metric="loss", index=1).sort_values("x")
        assert ax.lines[0].get_ydata().tolist() == first["value"].tolist()
