"""Paths and mixtures of models: closed forms, planted barriers, and independent implementations."""

import copy
import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import fldiag
from fldiag import models
from fldiag.diagnostics.connectivity.picture import layers_if_any
from fldiag.diagnostics.connectivity.summary import summary
from fldiag.errors import FldiagError
from fldiag.landscape.alignment import match
from fldiag.landscape.interpolation import highest
from fldiag.landscape.mixtures import Mixtures, RunningStatistics, bend_path
from fldiag.models.units import Units
from fldiag.params import Layout, flatten
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


def net(seed, name="mlp", shape=(1, 4, 4), **options):
    made = models.build(name, shape, 3, options).eval()
    torch.manual_seed(seed)
    for m in made.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()
    return made


def asked(net, n=60, **options):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, 4, 4, generator=g)
    return Problem(
        net,
        cross_entropy,
        (x, (x.sum((1, 2, 3)) > 0).long() + (x[:, 0, 0, 0] > 1).long()),
        **options,
    )


def trained(seed, steps=60):
    made = net(seed, hidden=[12, 8])
    p = asked(made)
    x, y = p.read(0, p.n)
    rule = torch.optim.Adam(made.parameters(), lr=0.02)
    for _ in range(steps):
        rule.zero_grad()
        cross_entropy(made(x), y).backward()
        rule.step()
    return made.eval()


# -- barriers


def test_the_straight_barrier_of_a_ring_its_place_and_its_error_over_examples():
    a, b = points(ring, (-1.0, 0.0), (1.0, 0.0))
    frame = fldiag.diagnose([a, b], "connectivity", points=5, curve=0)
    row = only(frame, metric="barrier").iloc[0]
    scale = 1 + 0.5 * torch.linspace(
        -1, 1, 7, dtype=torch.float64
    )  # at the centre (r² - 1)² is 1, at the ends 0
    assert row.value == pytest.approx(1.0) and row.x == 0.5 and row.residual < 0.05
    assert row.stderr == pytest.approx(float(scale.std()) / 7**0.5)
    losses = only(frame, metric="loss")
    assert losses["value"].to_numpy(float) == pytest.approx(((2 * losses.x - 1) ** 2 - 1) ** 2)
    assert (
        (row.run, row.run_b) == ("m0", "m1") and number(frame, "distance") == 2 and len(losses) > 5
    )


def test_an_asymmetric_barrier_is_found_between_the_points():
    def loss(z, y):  # excess 4 t^3 (1 - t), largest at t = 3/4
        t = (z[:, 0] + 1) / 2
        return (4 * t**3 * (1 - t) + t + 0 * y).mean()

    frame = fldiag.diagnose(points(loss, (-1.0,), (1.0,)), "connectivity", points=3, curve=0)
    row = only(frame, metric="barrier").iloc[0]
    assert (
        row.value == pytest.approx(27 / 64, rel=0.02)
        and row.value + row.residual >= 27 / 64
        and row.x == pytest.approx(0.75, abs=0.1)
    )


def test_a_convex_loss_has_no_barrier_and_mixtures_below_the_mixture_of_losses():
    def bowl(z, y):
        return 0.5 * z.square().sum(1).mean()

    w = [(1.0, 0.0, 2.0), (0.0, -1.0, 0.5), (-1.0, 1.0, 0.0), (0.3, 0.2, 0.1)]
    frame = fldiag.diagnose(points(bowl, *w), "connectivity", mixtures=9, curve=0)
    assert only(frame, metric="barrier")["value"].tolist() == [0.0] * 6
    rows, weights = only(frame, metric="mixture"), np.array(w)
    assert len(rows) == 4 + 1 + 9 and rows["value"].iloc[:4].abs().max() < 1e-15
    for row in (
        rows.itertuples()
    ):  # of a quadratic: half the spread around the mixture, with its sign turned
        a = np.array([float(s) for s in row.shares.split()])
        spread = (a * ((weights - a @ weights) ** 2).sum(1)).sum()
        assert a.sum() == pytest.approx(1) and row.value == pytest.approx(-spread / 2, abs=1e-12)
    assert number(frame, "mixture_mean") == pytest.approx(rows["value"].iloc[5:].mean())
    assert (
        number(frame, "mixture_centre") == rows["value"].iloc[4]
        and number(frame, "mixture_max") == 0
    )


def test_the_centre_is_exact_also_where_it_is_the_highest_mixture():
    def hill(z, y):
        return -0.5 * z.square().sum(1).mean()

    frame = fldiag.diagnose(
        points(hill, (1.0, 0.0), (-0.5, 0.75**0.5), (-0.5, -(0.75**0.5))),
        "connectivity",
        mixtures=9,
        curve=0,
    )
    centre, top = (only(frame, metric=f"mixture_{m}").iloc[0] for m in ("centre", "max"))
    assert centre.value == top.value == pytest.approx(0.5) and (
        centre.estimator,
        top.estimator,
    ) == ("exact", "monte-carlo")


def test_refinement_estimates_what_it_may_have_missed():
    def f(t):
        return float(np.exp(-(((t - 0.31) / 0.05) ** 2)))

    x = np.linspace(0, 1, 11)
    places, values, error = highest(f, x, np.array([f(t) for t in x]), 30, 1e-3)
    assert (
        1 - values.max() <= error <= 2e-3
        and len(places) == len(values) < 41
        and (np.diff(places) > 0).all()
    )


def test_the_bent_path_finds_the_best_theta_of_a_ring():
    """By symmetry theta = (s, s): the best s by scipy."""
    a, b = points(ring, (1.0, 0.0), (0.0, 1.0))
    t = np.linspace(0, 1, 2001)[:, None]

    def mean(s):
        phi = (1 - t) ** 2 * [[1, 0]] + 2 * t * (1 - t) * s + t**2 * [[0, 1]]
        return (((phi**2).sum(1) - 1) ** 2).mean()

    best = minimize(lambda s: mean(s[0]), [0.5]).x[0]
    theta, _ = bend_path(Mixtures(a, [(a.w, {}), (b.w, {})], "mixed"), 150)
    assert theta.tolist() == pytest.approx([best, best], abs=5e-3)
    frame = fldiag.diagnose([a, b], "connectivity", curve=150, points=11)
    straight, curve = (number(frame, "barrier", path=p) for p in ("straight", "curve"))
    assert (
        straight == pytest.approx(0.25)
        and curve < 0.02
        and number(frame, "mean_loss", path="curve") == pytest.approx(mean(best), abs=2e-3)
    )
    assert number(frame, "budget", path="curve") == 150


# -- batch-norm


def normed(seed):
    torch.manual_seed(seed)
    made = nn.Sequential(
        nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)
    )
    for _ in range(5):
        made(torch.randn(64, 1, 4, 4) * (1 + seed) + seed)
    return made.eval()


def test_statistics_are_those_of_the_slice_at_the_weights():
    p = asked(normed(1), dtype=torch.float64)
    found = RunningStatistics(p)(p.w)
    hidden = p.module[1](p.read(0, p.n)[0].flatten(1))
    assert torch.allclose(found["2.running_mean"], hidden.mean(0)) and torch.allclose(
        found["2.running_var"], hidden.var(0)
    )
    assert not torch.allclose(
        p.buffers["2.running_mean"], found["2.running_mean"]
    )  # the problem's own are untouched


@pytest.mark.parametrize("how", ["mixed", "reestimated"])
def test_batch_norm_between_models(how):
    a, b = (asked(normed(s), name=str(s), dtype=torch.float64) for s in (0, 1))
    frame = fldiag.diagnose([a, b], "connectivity", buffers=how, points=3, refine=0, curve=0)
    middle, own = (
        copy.deepcopy(a.module),
        {n: (t + b.buffers[n]) / 2 for n, t in a.buffers.items() if t.is_floating_point()},
    )
    nn.utils.vector_to_parameters((a.w + b.w) / 2, middle.parameters())
    middle.load_state_dict({**middle.state_dict(), **own})
    if how == "reestimated":
        middle[2].train()  # normalised by the whole batch, whose variance there is the biased one
        middle[2](middle[1](middle[0](a.read(0, a.n)[0])))
        middle[2].running_mean, middle[2].running_var = (
            RunningStatistics(a)((a.w + b.w) / 2)[f"2.running_{n}"] for n in ("mean", "var")
        )
        middle.eval()
    x, y = a.read(0, a.n)
    assert number(only(frame, metric="loss"), x=0.5) == pytest.approx(
        float(cross_entropy(middle(x), y).detach()), rel=1e-9
    )
    assert set(frame["buffers"].dropna()) == {how}
    ends = only(frame, metric="loss")["value"].iloc[[0, -1]].tolist()
    assert (ends == pytest.approx([a.loss()[0], b.loss()[0]])) == (how == "mixed")


# -- alignment


def shuffled(made, seed=3):
    """A copy with its hidden units in another order."""
    units, layout, g = Units.of(made), Layout.of(made), torch.Generator().manual_seed(seed)
    orders = [torch.randperm(n, generator=g) for n in units.sizes]
    views = layout.views(flatten(made))
    other = copy.deepcopy(made)
    other.load_state_dict(
        {n: units.reorder(views.get(n, b), n, orders) for n, b in made.state_dict().items()}
    )
    return other


@pytest.mark.parametrize(
    "name, shape", [("mlp", (1, 8, 8)), ("small_cnn", (1, 8, 8)), ("small_resnet", (1, 8, 8))]
)
def test_a_shuffled_copy_is_found_and_computes_the_same(name, shape):
    made = net(0, name, shape)
    for m in made.modules():
        if isinstance(m, nn.BatchNorm2d):
            for t, low in (
                (m.running_mean, -1),
                (m.running_var, 0.5),
                (m.weight.data, 0.5),
                (m.bias.data, -1),
            ):
                t.uniform_(low, 1.5)
    x, y = torch.randn(12, *shape), torch.arange(12) % 3
    a, b = (
        Problem(m, cross_entropy, (x, y), name=n) for m, n in ((made, "a"), (shuffled(made), "b"))
    )
    assert torch.allclose(made(x), shuffled(made)(x), atol=1e-5) and not torch.equal(a.w, b.w)
    frame = fldiag.diagnose(
        [a, b], "connectivity", align=True, points=3, refine=0, curve=0, buffers="mixed"
    )
    assert number(frame, "distance") == 0 and number(frame, "barrier") == pytest.approx(0, abs=1e-6)
    assert only(frame, metric="moved")["value"].sum() > 0


def test_one_layer_is_matched_best_of_all_orders():
    a, b = net(1, hidden=[5]), net(2, hidden=[5])
    units = Units.of(a)
    to, of = ({n: t.detach().double() for n, t in m.named_parameters()} for m in (a, b))

    def product(order):
        return sum(
            float((to[n] * units.reorder(of[n], n, [torch.tensor(order), torch.arange(3)])).sum())
            for n in of
        )

    best = max(itertools.permutations(range(5)), key=product)
    assert match(units, to, of)[0].tolist() == list(best)


def test_alignment_lowers_the_barrier_of_independent_models_and_not_their_losses():
    pair = [asked(trained(s), name=f"seed {s}") for s in (0, 1)]
    plain, aligned = (
        fldiag.diagnose(pair, "connectivity", curve=0, align=align) for align in (False, True)
    )
    for frame in (plain, aligned):
        assert only(frame, metric="loss", x=[0.0, 1.0])["value"].tolist() == pytest.approx(
            [p.loss()[0] for p in pair], rel=1e-4
        )
    assert 0 < number(aligned, "barrier") < number(plain, "barrier") and number(
        aligned, "distance"
    ) < number(plain, "distance")


def test_layers_whose_units_are_not_known_are_named():
    torch.manual_seed(0)
    for layer, name in (
        (nn.LayerNorm(6), "'2' \\(LayerNorm\\)"),
        (nn.Softmax(1), "'2' \\(Softmax\\)"),
    ):
        made = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), layer, nn.Linear(6, 3))
        with pytest.raises(FldiagError, match=f"layer {name}"):
            fldiag.diagnose([asked(made), asked(copy.deepcopy(made))], "connectivity", align=True)


# -- who may be asked


def test_models_that_cannot_be_connected():
    a = asked(net(0, hidden=[4]), name="a")
    with pytest.raises(FldiagError, match="different architectures"):
        fldiag.diagnose([a, asked(net(0, hidden=[5]), name="b")], "connectivity")
    with pytest.raises(FldiagError, match="different examples"):
        fldiag.diagnose([a, asked(net(1, hidden=[4]), n=50, name="b")], "connectivity")
    with pytest.raises(FldiagError, match="at least two models"):
        fldiag.diagnose(a, "connectivity")
    lost = a.at(torch.full_like(a.w, torch.nan), name="lost")
    with pytest.raises(FldiagError, match="1 of 2 models"):
        fldiag.diagnose([a, lost], "connectivity")
    frame = fldiag.diagnose([lost, a, asked(net(1, hidden=[4]), name="b")], "connectivity", curve=0)
    masked = frame[frame.masked.fillna(False).astype(bool)]
    assert (
        masked.run.tolist() == ["lost"]
        and "not finite" in masked.note.iloc[0]
        and len(only(frame, metric="barrier")) == 1
    )


def test_the_callers_models_are_untouched_and_draw_draws():
    three = [asked(normed(s), name=str(s)) for s in range(3)]
    before = (
        [(p.w.clone(), {n: b.clone() for n, b in p.buffers.items()}) for p in three],
        torch.get_rng_state(),
    )
    frame = fldiag.diagnose(three, "connectivity", curve=2, points=3, mixtures=5)
    again = fldiag.diagnose(three, "connectivity", curve=2, points=3, mixtures=5)
    assert frame.equals(again) and torch.equal(before[1], torch.get_rng_state())
    for p, (w, buffers) in zip(three, before[0], strict=True):
        assert torch.equal(p.w, w) and all(torch.equal(b, p.buffers[n]) for n, b in buffers.items())
    assert len(fldiag.draw(frame).axes) == 3  # paths, simplex, its colours
    alone = fldiag.diagnose(three, "connectivity", pairs="none", mixtures=5, points=3)
    assert (
        only(alone, metric="mixture")["value"].tolist()
        == only(frame, metric="mixture")["value"].tolist()
    )
    edges = only(frame, metric="mixture").iloc[4:25]
    assert {float(min(s.split(), key=float)) for s in edges.shares} == {0.0} and len(
        only(frame, metric="mixture")
    ) == 25 + 5
    assert number(frame, "mixture_mean") == pytest.approx(
        only(frame, metric="mixture")["value"].iloc[25:].mean()
    )
    assert len(fldiag.draw(alone).axes) == 2 and "no barrier" not in str(list(summary(alone, {})))


# -- the clients of a run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
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
    return fldiag.train(config, out=tmp_path_factory.mktemp("connectivity") / "run", device="cpu")


def test_clients_of_a_round(run):
    frame = fldiag.diagnose(
        run, "connectivity", samples=60, curve=0, points=3, mixtures=4, device="cpu", round=1
    )
    checkpoint = run.checkpoint(1)
    assert only(frame, metric="model_loss")["client"].tolist() == list(
        checkpoint.client_ids
    ) and set(frame["round"].dropna()) == {1}
    pairs = only(frame, metric="barrier")[["client", "client_b"]]
    assert [tuple(p) for p in pairs.to_numpy()] == list(
        itertools.combinations(checkpoint.client_ids, 2)
    )
    one = fldiag.diagnose(
        checkpoint, "spectrum", samples=60, client=checkpoint.client_ids[1], device="cpu"
    )
    assert only(frame, metric="model_loss")["value"].iloc[1] == number(one, "loss")


# -- one layer at a time


class TwoPoints(nn.Module):
    """Two layers of one weight each, which are the outputs."""

    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = Point(a), Point(b)

    def forward(self, x):
        return torch.cat([self.a(x), self.b(x)], dim=1)


def test_a_barrier_in_one_layer_is_found_in_it_alone_and_depends_on_the_rest():
    def wells(
        z, y
    ):  # (a^2 - 1)^2 (1 + b): of layer a the barrier is 1 + b, layer b has none at a = 1 or -1
        return ((z[:, 0].square() - 1).square() * (1 + z[:, 1]) + 0 * y).mean()

    y = torch.zeros(5, dtype=torch.float64)
    problems = [
        Problem(TwoPoints(*w), wells, (torch.zeros(5, 1), y), name=f"m{i}", dtype=torch.float64)
        for i, w in enumerate(((-1.0, 0.0), (1.0, 2.0)))
    ]
    frame = fldiag.diagnose(problems, "connectivity", layers=True, curve=0, points=5)
    for layer, rest, value in (("a", "first", 1), ("a", "second", 3), ("b", "first", 0)):
        row = only(frame, metric="layer_barrier", layer=layer, rest=rest).iloc[0]
        assert row.value == pytest.approx(value) and (value == 0 or row.x == 0.5)
        middle = only(frame, metric="layer_midpoint", layer=layer, rest=rest).iloc[0]
        assert middle.value == pytest.approx(value)
        average = only(frame, metric="layer_average", layer=layer, rest=rest).iloc[0]
        assert average.value == pytest.approx(value)  # both models have the loss 0
    assert number(frame, "barrier") == pytest.approx(2, rel=0.1)  # (1 + 2 t) in the middle
    largest = "the largest 3 ± 0 (a, the rest of the second model)"
    assert f"single layers: {largest}; of all" in said(frame)
    assert f"a single layer averaged, above the mean of the two models': {largest}" in said(frame)
    assert layers_if_any(frame) is not None


def said(frame):
    return " ".join(item.text for item in summary(frame, {}) if hasattr(item, "text"))


def test_a_linear_network_has_no_barrier_in_a_layer_although_it_has_one_as_a_whole():
    """Its loss is convex in each layer (Adilova et al. 2024); the sign of a hidden unit makes two models of one function."""
    x = torch.linspace(-1, 1, 9, dtype=torch.float64)[:, None]
    problems = []
    for i, sign in enumerate((1.0, -1.0)):
        net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
        for p in net.parameters():
            nn.init.constant_(p, sign)
        loss = nn.functional.mse_loss
        problems.append(Problem(net, loss, (x, x.clone()), name=f"m{i}", dtype=torch.float64))
    frame = fldiag.diagnose(problems, "connectivity", layers=True, curve=0, points=5)
    rows = only(frame, metric="layer_barrier")
    assert rows["value"].tolist() == [0.0] * 4 and "barriers of single layers: none" in said(frame)
    assert number(frame, "barrier") == pytest.approx(float(x.square().mean()))  # the output is 0
    middles = only(frame, metric="layer_midpoint")["value"]
    assert middles.to_numpy(float) == pytest.approx(-float(x.square().mean()))


def test_layers_of_two_trained_networks_have_far_lower_barriers_than_the_whole():
    """The observation of Adilova et al. (2024) on a small network, each point against the definition spelled by hand."""
    problems = [asked(trained(seed), name=f"m{seed}") for seed in (0, 1)]
    frame = fldiag.diagnose(problems, "connectivity", layers=True, curve=0, points=11, refine=0)
    rows = only(frame, metric="layer_barrier")
    assert len(rows) == 2 * len(problems[0].layout.layers)
    assert rows["value"].max() < 0.6 * number(frame, "barrier")
    layout = problems[0].layout
    for row in rows.itertuples():
        ends = []
        for source in (0, 1):
            views = {
                n: v.clone() for n, v in layout.views(problems[row.rest == "second"].w).items()
            }
            for n in layout.layers[row.layer]:
                views[n] = layout.views(problems[source].w)[n]
            ends.append(torch.cat([v.flatten() for v in views.values()]))
        losses = np.array(
            [
                problems[0].at((1 - t) * ends[0] + t * ends[1], {}).scores().loss
                for t in np.linspace(0, 1, 11)
            ]
        )
        line = np.linspace(losses[0], losses[-1], 11)
        assert row.value == pytest.approx(max(0.0, (losses - line).max()), abs=1e-5)
        average = only(frame, metric="layer_average", layer=row.layer, rest=row.rest)
        models = np.mean([p.loss()[0] for p in problems])
        assert number(average) == pytest.approx(losses[5] - models, abs=1e-5)


def digits_cnn(start, order, examples):
    """A small CNN from a random start, trained on some of the digits in a random order; and the last 297 digits."""
    x, y = load_digits(return_X_y=True)
    x = torch.as_tensor(x / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.as_tensor(y)
    torch.manual_seed(start)
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    optimiser = torch.optim.Adam(net.parameters(), 2e-3)
    torch.manual_seed(100 + order)
    for _ in range(30):
        for batch in examples[torch.randperm(len(examples))].split(50):
            optimiser.zero_grad()
            cross_entropy(net(x[batch]), y[batch]).backward()
            optimiser.step()
    return Problem(net, cross_entropy, (x[1500:], y[1500:]), name=f"start {start}, order {order}")


@pytest.mark.slow
def test_averaging_one_layer_of_a_small_convolutional_network(capsys):
    """What Adilova et al. (2024) observed of deep networks, on a small one: true of clients that start alike and of most layers
    of networks that do not, but not of these networks' first layer. `pytest -s` prints docs/explanation/numbers.md's numbers."""
    examples = torch.arange(1500)
    pairs = {
        "two starts": [digits_cnn(0, 0, examples), digits_cnn(1, 1, examples)],
        "one start, halves": [digits_cnn(0, 0, examples[:750]), digits_cnn(0, 1, examples[750:])],
    }
    for name, problems in pairs.items():
        frame = fldiag.diagnose(problems, "connectivity", layers=True, curve=0, points=11)
        together = number(frame, "midpoint", path="straight")
        averages = only(frame, metric="layer_average").groupby("layer")["value"].max()
        barriers = only(frame, metric="layer_barrier")["value"]
        with capsys.disabled():
            print(
                f"\n{name}: all layers {together:.2f}; layer_barrier at most {barriers.max():.2f}"
            )
            print("layer_average", averages.round(2).to_dict())
        if name == "two starts":
            assert together > 1 and averages.iloc[1:].max() < 0.5 * together
            assert barriers.max() < 0.1 * together
        else:
            assert max(together, averages.max()) < 0.2


def test_without_layers_nothing_of_them_is_measured():
    frame = fldiag.diagnose(points(ring, (-1.0, 0.0), (1.0, 0.0)), "connectivity", curve=0)
    assert not frame["metric"].str.startswith("layer_").any() and layers_if_any(frame) is None
