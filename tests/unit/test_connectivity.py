"""Straight paths between models: closed forms, planted barriers, and the clients of a run."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fldiag
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem
from fldiag.results.select import number, only


class Point(nn.Module):
    """Its weights are its outputs."""

    def __init__(self, *w):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, x):
        return self.w.expand(len(x), -1)


def points(loss, *places, n=7):
    """The loss (outputs, y) -> mean around several weights."""
    y = torch.linspace(-1, 1, n, dtype=torch.float64)
    return [
        Problem(Point(*w), loss, (torch.zeros(n, 1), y), name=f"m{i}", dtype=torch.float64)
        for i, w in enumerate(places)
    ]


def ring(z, y):
    """A valley on the unit circle; the examples differ by their scale."""
    return ((1 + 0.5 * y) * (z.square().sum(1) - 1).square()).mean()


def bowl(z, y):
    return 0.5 * z.square().sum(1).mean()


def normed(seed, hidden=4, n=60, **options):
    """A network with batch-norm whose statistics are its own."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(hidden)
    norm.running_mean.normal_()
    net = nn.Sequential(nn.Linear(6, hidden), norm, nn.ReLU(), nn.Linear(hidden, 3))
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))
    return Problem(net, cross_entropy, (x, x[:, :3].argmax(1)), name=str(seed), **options)


def test_the_barrier_of_a_ring_its_place_and_its_error_over_examples():
    frame = fldiag.diagnose(points(ring, (-1.0, 0.0), (1.0, 0.0)), "connectivity", points=5)
    row = only(frame, metric="barrier").iloc[0]
    # at the centre (r² - 1)² is 1, at the ends 0
    scale = 1 + 0.5 * torch.linspace(-1, 1, 7, dtype=torch.float64)
    assert row.value == pytest.approx(1.0) and row.x == 0.5
    assert row.stderr == pytest.approx(float(scale.std()) / 7**0.5)
    losses = only(frame, metric="loss")
    assert losses["value"].to_numpy(float) == pytest.approx(((2 * losses.x - 1) ** 2 - 1) ** 2)
    assert (row.run, row.run_b) == ("m0", "m1") and number(frame, "distance") == 2
    assert number(frame, "midpoint") == pytest.approx(1.0)


def test_a_convex_loss_has_no_barrier_and_a_midpoint_below_the_mean():
    w = [(1.0, 0.0, 2.0), (0.0, -1.0, 0.5), (-1.0, 1.0, 0.0)]
    frame = fldiag.diagnose(points(bowl, *w), "connectivity", points=3)
    assert only(frame, metric="barrier")["value"].tolist() == [0.0] * 3
    squares = only(frame, metric="distance")["value"].to_numpy(float) ** 2
    assert only(frame, metric="midpoint")["value"].to_numpy(float) == pytest.approx(-squares / 8)
    assert only(frame, metric="distance")["index"].tolist() == [1, 2, 3]
    first = fldiag.diagnose(points(bowl, *w), "connectivity", points=3, pairs="first")
    assert set(only(first, metric="barrier")["run"]) == {"m0"}


def test_batch_norm_goes_along_the_path():
    a, b = (normed(s, dtype=torch.float64) for s in (0, 1))
    frame = fldiag.diagnose([a, b], "connectivity", points=3)
    middle = copy.deepcopy(a.module).double().eval()
    states = [p.layout.views(p.w) | p.buffers for p in (a, b)]
    mean = {n: (t + states[1][n]) / 2 if t.is_floating_point() else t for n, t in states[0].items()}
    middle.load_state_dict(mean)
    x, y = a.read(0, a.n)
    losses = only(frame, metric="loss")["value"].tolist()
    with torch.no_grad():
        expected = float(cross_entropy(middle(x), y))
    assert losses == pytest.approx([a.loss()[0], expected, b.loss()[0]], rel=1e-9)
    accuracies = only(frame, metric="accuracy")["value"].tolist()
    assert accuracies[::2] == [a.scores().accuracy, b.scores().accuracy]


def test_models_that_cannot_be_connected():
    a = normed(0)
    with pytest.raises(FldiagError, match="different architectures"):
        fldiag.diagnose([a, normed(0, hidden=5)], "connectivity")
    with pytest.raises(FldiagError, match="different examples"):
        fldiag.diagnose([a, normed(1, n=50)], "connectivity")
    with pytest.raises(FldiagError, match="at least two models"):
        fldiag.diagnose(a, "connectivity")
    with pytest.raises(FldiagError, match="an odd number"):
        fldiag.diagnose([a, normed(1)], "connectivity", points=4)


def test_clients_of_a_round(tmp_path):
    config = fldiag.Config.load(
        "digits",
        rounds=2,
        model__name="mlp",
        model__hidden=[8],
        clients__total=6,
        clients__per_round=3,
        train__epochs=1,
        checkpoint__clients="sampled",
    )
    run = fldiag.train(config, out=tmp_path / "run", device="cpu")
    frame = fldiag.diagnose(run, "connectivity", samples=60, points=3, device="cpu", round=1)
    ids = run.checkpoint(1).client_ids
    assert only(frame, metric="model_loss")["client"].tolist() == list(ids)
    assert set(frame["round"].dropna()) == {1}
    pairs = only(frame, metric="barrier")[["client", "client_b"]].to_numpy()
    assert [tuple(p) for p in pairs] == list(itertools.combinations(ids, 2))
    one = fldiag.diagnose(run.checkpoint(1), "spectrum", samples=60, client=ids[1], device="cpu")
    assert only(frame, metric="model_loss")["value"].iloc[1] == number(one, "loss")


@pytest.mark.parametrize("top, panels", [(0.0, 1), (1.0, 3)])
def test_of_many_pairs_the_barriers_have_a_panel(top, panels):
    def wave(z, y):
        return (z.square().sum(1) + top * torch.sin(7 * z[:, 0])).mean()

    many = points(wave, (-1.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.0, -1.0), (0.3, 2.0))
    frame = fldiag.diagnose(many, "connectivity", points=9)
    assert len(fldiag.draw(frame).axes) == panels  # paths; barriers and their colours
