"""Differences, intervals and verdicts of ``diff`` and ``check`` from the numbers of both sides, by numpy alone."""

from math import comb

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import fldiag

X, Y = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
X[range(60), Y] += 1.5


def models(strength, count=3):
    """Linear models that see their class the better the greater the strength."""
    nets = [torch.nn.Linear(4, 3) for _ in range(count)]
    for seed, net in enumerate(nets):
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            net.bias.zero_()
            net.weight.copy_(strength * torch.eye(3, 4) + 0.3 * torch.randn(3, 4, generator=g))
    return nets


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """Two methods with three seeds each: their runs, and the losses and rights of their models' examples."""
    out, found = tmp_path_factory.mktemp("sides"), {}
    for name, strength in (("weak", 0.1), ("strong", 1.0)):
        runs, nets = [], models(strength)
        for seed, net in enumerate(nets):
            path, data = out / f"{name}{seed}", {"data": (X, Y), "clients": [range(60)]}
            with fldiag.Recorder(path, net, **data, test=(X, Y), method=name, seed=seed) as rec:
                rec.round(received=net, clients={0: net}, aggregated=net)
            runs.append(fldiag.load(path))
        with torch.no_grad():
            z = [net(X).double() for net in nets]
        losses = np.array([cross_entropy(v, Y, reduction="none").numpy() for v in z])
        rights = np.array([(v.argmax(1) == Y).double().numpy() for v in z])
        found[name] = runs, {"accuracy": rights, "loss": losses}
    return found


NET = models(1.0, 1)[0]


def holm(p):
    order, adjusted, worst = np.argsort(p), np.empty(len(p)), 0.0
    for i, j in enumerate(order):
        worst = adjusted[j] = max(worst, min(1.0, (len(p) - i) * p[j]))
    return adjusted


def test_two_methods_over_three_seeds(sides):
    """Paired t: with two degrees of freedom its quantile and p have closed forms."""
    (a, mine), (b, other) = sides["weak"], sides["strong"]
    table = fldiag.diff(a, b, numbers=["accuracy", "loss"], model=NET)
    t975 = 0.95 / np.sqrt(2 * 0.975 * 0.025)
    ps = []
    for row in table.to_dict("records"):
        means = [side[row["metric"]].mean() for side in (mine, other)]
        assert [row["value"], row["baseline"]] == pytest.approx(means, rel=1e-5)
        d = (mine[row["metric"]] - other[row["metric"]]).mean(1)
        error = d.std(ddof=1) / np.sqrt(3)
        ps.append(1 - abs(d.mean() / error) / np.sqrt(2 + (d.mean() / error) ** 2))
        found = [row[c] for c in ("difference", "low", "high", "p")]
        ends = d.mean() - t975 * error, d.mean() + t975 * error
        assert found == pytest.approx([d.mean(), *ends, ps[-1]], rel=1e-4, abs=1e-6)
    assert len(ps) == 2 and table["p_holm"].tolist() == pytest.approx(holm(ps).tolist(), rel=1e-3)


def test_two_models_over_examples(sides):
    """McNemar's exact test for the accuracy, a paired Bayesian bootstrap (here of other draws) for both intervals."""
    (a, mine), (b, other) = (sides[name] for name in ("weak", "strong"))
    table = fldiag.diff(a[0], b[0], model=NET)
    rng = np.random.default_rng(1)
    for name in ("accuracy", "loss"):
        d = mine[name][0] - other[name][0]
        w = rng.standard_exponential((4000, len(d)))
        drawn = w @ d / w.sum(1)
        (row,) = table[table["metric"] == name].to_dict("records")
        ends = 2 * d.mean() - np.quantile(drawn, [0.975, 0.025])
        assert row["difference"] == pytest.approx(d.mean(), rel=1e-5)
        assert (row["low"], row["high"]) == pytest.approx(ends, abs=0.2 * drawn.std())
    rights = [r["accuracy"][0] for r in (mine, other)]
    only = [int((rights[i] > rights[1 - i]).sum()) for i in (0, 1)]
    p = 2 * sum(comb(sum(only), i) for i in range(min(only) + 1)) / 2 ** sum(only)
    (row,) = table[table["metric"] == "accuracy"].to_dict("records")
    assert 0 < p < 1 and row["p"] == pytest.approx(p)


def test_holms_correction_of_many_numbers(runs):
    table = fldiag.diff(runs["fedavg"], runs["scaffold"])
    table = table[table["p"].notna()]
    assert len(table) == 2  # of two given models
    adjusted = holm(table["p"].to_numpy(float))
    assert table["p_holm"].tolist() == pytest.approx(adjusted.tolist())


@pytest.mark.parametrize(
    ("condition", "verdict"),
    [
        ("accuracy < baseline", "fail"),
        ("accuracy > baseline", "pass"),
        ("loss > baseline", "fail"),
        ("accuracy < {mean}", "undecided"),
        ("accuracy < baseline - 99pt", "pass"),
        ("loss > baseline + 900%", "pass"),
    ],
)
@pytest.mark.parametrize("seeds", [1, 3])
def test_verdicts(condition, verdict, seeds, sides):
    """A condition that surely holds fails, one that surely does not passes; else nothing is decided."""
    (a, mine), (b, _) = sides["weak"], sides["strong"]
    condition = condition.format(mean=float(mine["accuracy"][:seeds].mean()) + 1e-4)
    checked = fldiag.check(a[:seeds], b[:seeds], fail_if=[condition], model=NET)
    assert checked.verdict == verdict and checked.table["verdict"].tolist() == [verdict]
    both = fldiag.check(a[:seeds], b[:seeds], fail_if=[condition, "loss > 1e9"], model=NET)
    assert both.verdict == verdict and both.table["verdict"].tolist() == [verdict, "pass"]


def test_what_cannot_be_compared_is_an_error_and_no_pass(sides):
    checked = fldiag.check(sides["weak"][0][0], fail_if=["accuracy < 1%"])
    assert checked.verdict == "error" and checked.table["note"].str.contains("model").all()
