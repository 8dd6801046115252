"""Diagonal and trace: exact ones against dense Hessians, estimates within their errors, and the right label."""

import dataclasses

import numpy as np
import pytest
import torch
from problems import double_backward
from torch import nn
from torch.nn import functional as F

from fldiag.curvature import exact_diagonal as exact
from fldiag.curvature import squares as kernels
from fldiag.curvature.hutchinson import hutchinson
from fldiag.curvature.lanczos import krylov
from fldiag.curvature.layer_rules import LAYERS, LINEAR
from fldiag.diagnostics.diagonal import diagonal
from fldiag.diagnostics.trace import trace
from fldiag.errors import FldiagError
from fldiag.models.bert import Bert
from fldiag.problem import diagonal as module
from fldiag.problem.diagonal import diagonal_of
from fldiag.problem.eigenpairs import eigenpairs
from fldiag.problem.exact_curvature import inexact
from fldiag.problem.problem import Problem
from fldiag.results.table import check


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.na = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.b, self.nb = (
            nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2, bias=False),
            nn.BatchNorm2d(4),
        )
        self.short, self.fc = nn.Conv2d(4, 4, 1, stride=2), nn.Linear(4, 3)
        for norm in (self.na, self.nb):
            (
                nn.init.normal_(norm.running_mean),
                nn.init.uniform_(norm.running_var, 0.5, 2),
                nn.init.normal_(norm.weight),
            )

    def forward(self, x):
        out = F.relu(self.na(self.a(x)), inplace=True)
        more = self.nb(self.b(out))
        more += self.short(out)
        return self.fc(F.relu(more).mean((2, 3)))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(F.relu(self.mix(x.flatten(1).reshape(-1, 4, 4))).mean(1))


NETS = {
    "residual": Residual,
    "tokens": Tokens,
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4, 6),
        nn.LeakyReLU(0.1),
        nn.Linear(6, 3),
    ),
    "one layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
    "norms": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.BatchNorm1d(5),
        nn.ReLU(),
        nn.Linear(5, 3),
        nn.BatchNorm1d(3, affine=False),
    ),
}
OTHERS = {
    "tanh": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3)),
    "group norm": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    ),
}


def concave(z, y):  # curvature of both signs
    return (0.5 * z[:, 0] ** 2 - 0.3 * z[:, 1] ** 2 + 0.2 * z[:, 2] ** 3 + z[:, 0] * z[:, 1]).mean()


LOSSES = {
    "cross entropy": F.cross_entropy,
    "squares": F.mse_loss,
    "concave": concave,
    "linear": lambda z, y: z.sum(1).mean(),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
}


def problem(name="residual", loss="cross entropy", n=9, scale=1.0, **options):
    torch.manual_seed(0)
    net = {**NETS, **OTHERS}[name]()
    y = torch.randn(n, 3) if loss == "squares" else torch.arange(n) % 3
    options.setdefault("dtype", torch.float64)
    criterion = LOSSES[loss]
    return Problem(
        net,
        criterion if scale == 1 else lambda z, y: scale * criterion(z, y),
        (torch.randn(n, 1, 4, 4), y),
        **options,
    )


def dense(p):
    x, y = p.read(0, p.n)
    return torch.func.jacrev(torch.func.jacrev(lambda w: p.user_loss(p.call(w, x), y)))(p.w)


# -- exact


@pytest.mark.parametrize(
    "name, loss", [(n, "cross entropy") for n in NETS] + [("residual", k) for k in LOSSES]
)
def test_exact_diagonal_and_traces_are_those_of_the_dense_hessian(name, loss):
    p = problem(name, loss)
    p.__dict__["bounds"] = [(0, 4), (4, 8), (8, 9)]
    expected = dense(p).diagonal()
    scale = float(expected.abs().max()) or 1.0
    both = diagonal_of(p), diagonal_of(p, entries=False)
    for d in both:
        assert (d.estimator, d.converged, d.why, d.stderr, d.trace_stderr) == (
            "exact",
            True,
            None,
            None,
            None,
        )
        assert d.trace == pytest.approx(float(expected.sum()), rel=1e-10, abs=1e-12 * scale)
        for tensor, where in p.layout.slices().items():
            assert d.traces[tensor] == pytest.approx(
                float(expected[where].sum()), rel=1e-9, abs=1e-12 * scale
            )
    assert both[1].values is None and both[0].values.dtype == torch.float64
    assert torch.allclose(both[0].values, expected, rtol=1e-9, atol=1e-12 * scale)


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(3, 2, 5, 4, 7), (2, 9, 5, 3, 11), (2, 9, 40, 4, 30), (3, 2, 3, 30, 2), (2, 1, 4, 1, 3)],
)
def test_every_way_of_summing_squares_over_positions_is_the_same_sum(shape, total, monkeypatch):
    b, r, o, length, k = shape
    g, u = (
        torch.randn(b, r, o, length, dtype=torch.float64),
        torch.randn(b, k, length, dtype=torch.float64),
    )
    expected = torch.einsum("nrol,nkl->nrok", g, u).square().sum((0, 1))
    expected = expected.sum() if total else expected
    assert torch.allclose(kernels.position_squares(g, u, total), expected)
    assert torch.allclose(
        kernels._paired_squares(g, u), torch.einsum("nrol,nkl->nrok", g, u).square().sum((0, 1))
    )
    assert torch.allclose(
        kernels._gram_squares(g, u), torch.einsum("nrol,nkl->nrok", g, u).square().sum()
    )
    monkeypatch.setattr(kernels, "PIECE", 1)  # one example at a time
    assert torch.allclose(kernels.position_squares(g, u, total), expected)
    assert torch.allclose(
        kernels._paired_squares(g, u), torch.einsum("nrol,nkl->nrok", g, u).square().sum((0, 1))
    )


def test_single_precision_is_exact_to_its_rounding_also_for_confident_outputs():
    p = problem("cnn", dtype=torch.float32)
    p.w[-21:] *= 40  # saturated softmax
    q = Problem(
        p.module,
        F.cross_entropy,
        (p.read(0, 9)[0], p.read(0, 9)[1]),
        params=p.w,
        dtype=torch.float64,
    )
    found, expected = diagonal_of(p), dense(q).diagonal()
    assert found.estimator == "exact" and found.trace == pytest.approx(
        float(expected.sum()), rel=1e-5
    )
    assert (found.values - expected).norm() <= 1e-5 * expected.norm()


def test_memory_and_order_of_the_examples_do_not_matter():
    whole, pieces = diagonal_of(problem()), diagonal_of(problem(memory=1))
    assert torch.allclose(whole.values, pieces.values, rtol=1e-10, atol=1e-13)
    p = problem()
    x, y = p.read(0, 9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    mixed = Problem(p.module, F.cross_entropy, (x[order], y[order]), dtype=torch.float64)
    assert torch.allclose(whole.values, diagonal_of(mixed).values, rtol=1e-10, atol=1e-13)


def test_scaling_the_loss_scales_the_diagonal():
    assert torch.allclose(
        diagonal_of(problem(scale=3.0)).values, 3 * diagonal_of(problem()).values, rtol=1e-10
    )


# -- what keeps it from being exact


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_are_estimated_and_said_to_be(name):
    p = problem(name)
    d = diagonal_of(p, max_products=40)
    assert d.estimator == "hutchinson-deflated" and d.trace_stderr is not None
    assert ("Tanh" if name == "tanh" else "GroupNorm") in d.why
    with pytest.raises(FldiagError, match="the exact diagonal is not known for this model"):
        diagonal_of(p, estimate="exact", max_products=40)


@pytest.mark.parametrize("name", OTHERS)
def test_as_many_products_as_weights_are_exact(name):
    p = problem(name)
    for options in ({}, {"estimate": "exact"}, {"max_products": p.layout.size}):
        d = diagonal_of(p, **options)
        assert d.estimator == "exact" and d.trace_stderr is None and d.converged
        assert d.products <= p.layout.size
        assert torch.allclose(d.values, dense(p).diagonal(), rtol=1e-9, atol=1e-12)
        assert d.trace == pytest.approx(float(dense(p).diagonal().sum()), rel=1e-9)


def test_losses_that_couple_examples_or_outputs_without_a_batch_are_not_exact():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(x.flatten(1)[:, :4])

    given = torch.randn(8, 4), torch.arange(8) % 3
    assert inexact(Problem(Centred(), F.cross_entropy, given)) is None
    with_batch = Problem(
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)),
        F.cross_entropy,
        given,
    )
    assert "batch" in inexact(with_batch)
    with pytest.raises(ValueError, match="couples"):
        exact.factors(lambda z, y: z.mean(0).square().sum(), torch.randn(5, 3), None)
    with pytest.raises(ValueError, match="2000 outputs"):
        exact.factors(lambda z, y: z.square().sum(), torch.randn(2, 2000), None)


def test_a_rule_that_disagrees_with_products_is_not_used(monkeypatch):
    monkeypatch.setitem(
        LAYERS,
        nn.Linear,
        dataclasses.replace(
            LINEAR,
            squares=lambda m, a, g, total: {
                k: 1.01 * v for k, v in LINEAR.squares(m, a, g, total).items()
            },
        ),
    )
    assert "disagrees" in inexact(problem("cnn"))
    assert diagonal_of(problem("cnn"), max_products=40).estimator == "hutchinson-deflated"


# -- estimates


def planted(size=60, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=g)).Q
    values = torch.cat(
        [torch.tensor([50.0, 20.0, -10.0]), torch.linspace(-1, 2, size - 3)]
    ).double()
    return q @ torch.diag(values) @ q.T


@pytest.mark.parametrize("deflated", [False, True])
def test_estimates_lie_within_their_standard_errors_as_often_as_they_should(deflated):
    a = planted()
    groups = [torch.arange(0, 20), torch.arange(20, 60)]
    expected = torch.stack([a.diagonal()[g].sum() for g in groups] + [a.trace()])
    known = krylov(lambda v: a @ v, 60, 4, noise=1e-12) if deflated else None  # far from invariant
    scores, entries = [], []
    for seed in range(40):
        s = hutchinson(
            lambda v: a @ v, 60, groups, krylov=known, rtol=1e-9, most=24, diagonal=True, seed=seed
        )
        assert s.probes == 24 and not s.converged
        scores.append((s.traces - expected) / s.stderrs)
        entries.append((s.diagonal - a.diagonal()) / s.diagonal_stderr)
    for z in (torch.stack(scores), torch.stack(entries)):
        assert 0.8 < float(z.square().mean().sqrt()) < 1.3
        assert float(z.mean().abs()) < 0.3


@pytest.mark.slow
def test_the_diagonal_is_not_biased_by_a_space_that_is_far_from_invariant():
    a = planted(8)
    s = hutchinson(
        lambda v: a @ v,
        8,
        [],
        krylov=krylov(lambda v: a @ v, 8, 2, noise=1e-12),
        rtol=1e-9,
        most=3000,
        diagonal=True,
    )
    assert ((s.diagonal - a.diagonal()).abs() <= 5 * s.diagonal_stderr).all()
    assert float(s.diagonal_stderr.max()) < 0.1 * float(a.diagonal().abs().max())


def test_deflation_takes_the_variance_of_the_leading_part_away():
    a = planted()
    known = krylov(lambda v: a @ v, 60, 12, noise=1e-12)
    plain, better = (
        hutchinson(lambda v: a @ v, 60, [], krylov=k, rtol=1e-9, most=50) for k in (None, known)
    )
    assert float(better.stderrs[-1]) < 0.35 * float(plain.stderrs[-1])


def test_a_space_that_is_all_known_needs_no_probe():
    a = planted(8)
    s = hutchinson(
        lambda v: a @ v, 8, [], krylov=krylov(lambda v: a @ v, 8, 8, noise=1e-12), diagonal=True
    )
    assert s.probes == 0 and s.converged and float(s.stderrs[-1]) == 0
    assert torch.allclose(s.diagonal, a.diagonal(), atol=1e-9) and float(
        s.traces[-1]
    ) == pytest.approx(float(a.trace()))


def test_the_target_is_reached_or_not_and_the_budget_kept():
    p = problem("tanh")
    expected = dense(p).diagonal()
    done = diagonal_of(p, entries=False, rtol=0.15, max_products=400, estimate="hutchinson")
    assert done.converged and done.trace_stderr <= 0.15 * abs(done.trace) and done.products <= 400
    assert abs(done.trace - float(expected.sum())) <= 5 * done.trace_stderr
    short = diagonal_of(p, rtol=1e-4, max_products=30, deflate=10, estimate="hutchinson")
    assert not short.converged and short.products == 30
    assert ((short.values - expected).abs() <= 6 * short.stderr + 1e-9).double().mean() > 0.95
    plain = diagonal_of(p, max_products=30, deflate=0, estimate="hutchinson")
    assert plain.estimator == "hutchinson" and plain.products == 30
    with pytest.raises(FldiagError, match="rtol = 0"):
        diagonal_of(p, rtol=0)


# -- tables


def test_the_tables_say_what_their_numbers_are():
    p = problem("cnn")
    expected = dense(p).diagonal()
    frame = check(trace(p)).query("metric == 'trace'")
    assert frame.layer.isna().tolist() == [True] + [False] * 4 and frame.layer.tolist()[1:] == [
        "0",
        "3",
        "6",
        "8",
    ]
    assert (
        set(frame.estimator) == {"exact"} and frame.stderr.isna().all() and bool(frame.converged[0])
    )
    assert (
        frame.value[0]
        == pytest.approx(float(expected.sum()))
        == pytest.approx(frame.value[1:].sum())
    )
    tensors = trace(p, per="tensor").query("metric == 'trace'")
    assert tensors.layer.tolist()[1:] == list(p.layout.names)
    frame = check(diagonal(p, per="tensor"))
    for name, where in [(None, slice(None)), *p.layout.slices().items()]:
        rows = (
            frame[frame.layer.isna() if name is None else (frame.layer == name).fillna(False)]
            .set_index("metric")
            .value
        )
        d = expected[where]
        assert rows["diagonal_norm"] == pytest.approx(float(d.norm())) and rows[
            "trace"
        ] == pytest.approx(float(d.sum()))
        assert rows["diagonal_max"] == pytest.approx(float(d.max()))
        assert rows["diagonal_min"] == pytest.approx(float(d.min()), abs=1e-12)


def test_the_norm_of_a_noisy_diagonal_is_freed_of_its_noise():
    rng = np.random.default_rng(0)
    true, error = rng.normal(size=4000), np.full(4000, 0.8)
    norms = [
        module.norm(torch.tensor(true + error * rng.normal(size=4000)), torch.tensor(error))
        for _ in range(20)
    ]
    raw = np.linalg.norm(true)
    assert np.mean([n for n, _ in norms]) == pytest.approx(raw, rel=0.01)
    assert np.std([n for n, _ in norms]) == pytest.approx(np.mean([e for _, e in norms]), rel=0.6)


def test_estimated_tables_carry_errors_and_the_missed_target():
    frame = check(trace(problem("tanh"), rtol=1e-6, max_products=40, estimate="hutchinson")).query(
        "metric == 'trace'"
    )
    assert set(frame.estimator) == {"hutchinson-deflated"} and not bool(frame.converged[0])
    assert (frame.stderr >= 0).all() and frame.stderr[0] > 0


def test_a_trace_that_is_good_enough_is_not_blamed_for_the_rough_entries():
    options = {"estimate": "hutchinson", "deflate": 0, "max_products": 20}
    d = diagonal_of(regression()[0], rtol=0.03, **options)
    assert not d.converged and d.trace_converged and d.trace_stderr <= 0.03 * d.trace
    frame = diagonal(regression()[0], rtol=0.03, **options)
    whole = frame[frame.layer.isna()].set_index("metric").converged
    assert bool(whole["trace"]) and not bool(whole["diagonal_norm"])
    assert not diagonal_of(regression()[0], rtol=1e-6, **options).trace_converged


@pytest.mark.parametrize("margin", [10.0, 40.0, 100.0])
def test_a_perfectly_fitted_slice_is_still_exact(margin):
    """Where the loss is rounding, so is its curvature in the outputs: that is no sign of coupled examples."""
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.weight.copy_(torch.eye(6) * margin**0.5)
            layer.bias.zero_()
    p = Problem(net, F.cross_entropy, (torch.eye(6).repeat(5, 1), torch.arange(6).repeat(5)))
    d = diagonal_of(p)
    assert d.estimator == "exact", d.why
    prob = 1 / (1 + 5 * np.exp(-margin))  # of the right class, the same for every example
    last = (
        6 * (margin**0.5) ** 2 * (1 - prob) / 6 * (prob + (1 - (1 - prob) / 5))
    )  # sum over outputs of p (1 - p) |a|^2
    assert abs(d.traces["2.weight"] - last) <= 1e-6 * last + 1e-15 * margin


def regression(n=40, features=6, outputs=2):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n, features, generator=g, dtype=torch.float64) * torch.arange(1, features + 1)
    p = Problem(
        nn.Linear(features, outputs),
        lambda z, y: 0.5 * (z - y).square().sum(1).mean(),
        (x, torch.randn(n, outputs, generator=g, dtype=torch.float64)),
        dtype=torch.float64,
    )
    design = torch.cat([x, torch.ones(n, 1)], 1)
    return p, design.T @ design / n  # one such block for each output


def test_T_H_1_trace_of_a_linear_regression_is_exact_and_its_estimates_unbiased():
    p, block = regression()
    true = 2 * float(block.trace())
    assert diagonal_of(p).trace == pytest.approx(true, rel=1e-12)
    found = [
        diagonal_of(p, estimate="hutchinson", deflate=0, max_products=8, rtol=1e-6, seed=s).trace
        for s in range(100)
    ]
    assert abs(np.mean(found) - true) <= 3 * np.std(found, ddof=1) / np.sqrt(len(found))


def test_T_H_3_the_trace_is_at_least_the_largest_eigenvalue_of_a_convex_loss():
    for p in (
        regression()[0],
        Problem(
            nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
            F.cross_entropy,
            (torch.randn(20, 1, 4, 4), torch.arange(20) % 3),
            dtype=torch.float64,
        ),
    ):
        top = eigenpairs(p, 1).values[0]
        assert 0 < top * (1 - 1e-3) <= diagonal_of(p).trace
        assert diagonal_of(p, estimate="hutchinson", rtol=0.05, max_products=400).trace >= 0.8 * top


def test_batch_norm_is_taken_with_the_problems_statistics():
    """A round's buffers are handed to the Problem: those that the module happens to hold must not enter."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    ).eval()
    buffers = {
        "1.running_mean": torch.randn(3),
        "1.running_var": 0.5 + torch.rand(3),
        "1.num_batches_tracked": torch.tensor(1),
    }
    x, y = torch.randn(20, 1, 4, 4), torch.arange(20) % 3
    p = Problem(net, F.cross_entropy, (x, y), buffers=buffers, dtype=torch.float64)
    found, h = diagonal_of(p, estimate="exact").values, double_backward(p)
    eye = torch.eye(p.layout.size, dtype=torch.float64)
    assert torch.allclose(
        found, torch.stack([h(e)[i] for i, e in enumerate(eye)]), rtol=1e-7, atol=1e-7
    )


class Head(nn.Module):
    """Something that bends, and what ``head`` makes of it with affine layers."""

    def __init__(self, head):
        super().__init__()
        self.first, self.a, self.b, self.head = (
            nn.Linear(4, 3),
            nn.Linear(3, 3),
            nn.Linear(3, 3),
            head,
        )

    def forward(self, x):
        return self.head(self, torch.tanh(self.first(x)))


@pytest.mark.parametrize(
    "head, affine",
    [
        (lambda m, h: m.a(h), ["a"]),
        (lambda m, h: m.b(m.a(h)), ["a", "b"]),
        (lambda m, h: m.b(torch.sigmoid(m.a(h))), ["b"]),
        (lambda m, h: m.b(h * m.a(h)), ["a", "b"]),
        (lambda m, h: m.a(m.a(h)) + m.b(h), ["b"]),
        (lambda m, h: m.a(h) + m.a(2 * h) + m.b(h), ["b"]),  # affine, but used twice
        (lambda m, h: m.a(h) + h @ m.a.weight + m.b(h), ["a.bias", "b"]),
    ],
)  # and elsewhere
def test_layers_that_the_outputs_are_affine_in_are_exact_in_any_network(head, affine):
    torch.manual_seed(4)
    p = Problem(
        Head(head), F.cross_entropy, (torch.randn(9, 4), torch.arange(9) % 3), dtype=torch.float64
    )
    with torch.enable_grad():
        x, y = p.read(0, p.n)
        dense = torch.autograd.functional.hessian(
            lambda w: F.cross_entropy(p.call(w, x), y), p.w
        ).diagonal()
    d = diagonal_of(p, max_products=14)
    for name, where in p.layout.slices().items():
        assert (name in d.exact) == any(name.startswith(a) for a in affine)
        assert (d.trace_stderrs[name] is None) == (name in d.exact)
        if name in d.exact:
            assert (
                torch.allclose(d.values[where], dense[where], rtol=1e-9, atol=1e-14)
                and not d.stderr[where].any()
            )
            assert d.traces[name] == pytest.approx(float(dense[where].sum()), rel=1e-9)
        else:
            assert ((d.values[where] - dense[where]).abs() < 7 * d.stderr[where] + 1e-9).all()
    assert abs(d.trace - float(dense.sum())) < 6 * d.trace_stderr + 1e-9


def test_the_classifier_of_a_transformer_is_exact_and_its_row_says_so():
    torch.manual_seed(0)
    net = Bert(11, 3, layers=1, width=4, heads=2, hidden=6, places=5)
    p = Problem(
        net,
        F.cross_entropy,
        (torch.randint(1, 11, (6, 5)), torch.arange(6) % 3),
        dtype=torch.float64,
    )
    for table in (trace(p, max_products=30), diagonal(p, max_products=30)):
        rows = table[table.metric == "trace"]
        assert (
            rows[rows.estimator == "exact"].layer.tolist() == ["classifier"]
            and rows[rows.estimator == "exact"].stderr.isna().all()
        )
    every = diagonal_of(p, estimate="hutchinson", max_products=30)
    assert not every.exact and every.trace_stderrs["classifier.weight"] is not None
