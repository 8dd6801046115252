"""What every registered diagnostic must keep to, found through the registry: a new file is tested at once."""

import copy
import random
from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fldiag import registry
from fldiag.diagnosis.measure import measure
from fldiag.errors import FldiagError
from fldiag.problem.problem import Problem
from fldiag.results.table import check

#: Those of a whole run see a History: test_run_diagnostics.py.
NAMES = [n for n in registry.diagnostic.names() if registry.diagnostic.get(n).on == "problem"]
#: Makes those that have them small; an option is used where the signature knows it.
SMALL = {"points": 3, "k": 3, "chains": 2, "draws": 4, "thin": 2, "curve": 3, "steps": 5}
EIGENVALUES = [6.0, 3.0, 1.5, 0.5, 0.0, -2.0]


def entry(name):
    return registry.diagnostic.get(name)


def run(name, problem, progress=None, **options):
    diagnostic = entry(name)
    names = diagnostic.options.model_fields
    options = {k: v for k, v in {**SMALL, **options}.items() if k in names}
    return measure(diagnostic, problem, diagnostic.options(**options), progress=progress)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Dropout(0.4),
        nn.Flatten(),
        nn.Linear(48, 3),
    )


def examples(n=13):
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 1, 6, 6, generator=g), torch.arange(n) % 3


def test_there_are_diagnostics():
    assert NAMES


@pytest.mark.parametrize("name", NAMES)
def test_documented_and_validated(name):
    assert len(entry(name).headline) > 20
    with pytest.raises(FldiagError, match="unknown key 'no_such_option'"):
        entry(name).validate({"no_such_option": 1})


@cache
def evaluations(name):
    """How often a diagnostic asks for the loss."""
    calls = []
    run(name, Problem(network(), lambda z, y: calls.append(1) or cross_entropy(z, y), examples()))
    return len(calls)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.slow
def test_the_callers_things_are_untouched(name, error, training):
    calls, last = (
        [],
        evaluations(name) if error else None,
    )  # the error shall come at the very last evaluation

    def loss(z, y):
        calls.append(1)
        if len(calls) == last:
            raise error("stop")
        return cross_entropy(z, y)

    net, (x, y) = network().train(training), examples()
    state, inputs = copy.deepcopy(net.state_dict()), x.clone()
    modes = [m.training for m in net.modules()]
    before = (
        torch.get_rng_state(),
        np.random.get_state()[1].copy(),
        random.getstate(),
        torch.is_grad_enabled(),
    )
    try:
        run(name, Problem(net, loss, (x, y)))
        assert error is None
    except (RuntimeError, KeyboardInterrupt, FldiagError):
        assert error is not None
    assert len(calls) == last or not error
    assert all(torch.equal(state[k], v) for k, v in net.state_dict().items()) and torch.equal(
        x, inputs
    )
    assert modes == [m.training for m in net.modules()] and all(
        p.grad is None for p in net.parameters()
    )
    after = (
        torch.get_rng_state(),
        np.random.get_state()[1].copy(),
        random.getstate(),
        torch.is_grad_enabled(),
    )
    assert (
        torch.equal(before[0], after[0])
        and (before[1] == after[1]).all()
        and before[2:] == after[2:]
    )


@pytest.mark.parametrize("name", NAMES)
def test_table_schema_and_origin(name):
    labels = {"method": "fedavg", "round": 4, "seed": 1, "moment": "aggregated", "scope": "global"}
    frame = check(
        run(name, Problem(network(), cross_entropy, examples(), name="mine", labels=labels))
    )
    assert len(frame) and set(frame.run) == {"mine"} and frame["slice"].notna().all()
    assert (
        (frame.n_examples == 13).all()
        and set(frame.method) == {"fedavg"}
        and set(frame["round"]) == {4}
    )
    masked = frame.get("masked", pd.Series(False, index=frame.index)).astype(bool)
    assert (frame.estimator.notna() | masked).all() and (frame.value.notna() | masked).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_table(name):
    a, b = (run(name, Problem(network(), cross_entropy, examples()), seed=5) for _ in range(2))
    pd.testing.assert_frame_equal(a, b, check_exact=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_independent_of_the_batch_size(name):
    a, b = (
        run(
            name,
            Problem(network(), cross_entropy, examples(), dtype=torch.float64, memory=m),
            tol=1e-9,
        )
        for m in (2**31, 1)
    )
    pd.testing.assert_frame_equal(
        a.drop(columns="residual"), b.drop(columns="residual"), rtol=1e-6, atol=1e-9
    )


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(1, 2, 6).reshape(2, 3))

    def forward(self, x):
        return self.w.reshape(1, -1).expand(len(x), -1)


@pytest.mark.parametrize("name", NAMES)
def test_closed_forms_on_a_quadratic(name):
    a = torch.diag(torch.tensor(EIGENVALUES, dtype=torch.float64))

    def loss(z, y):
        return 0.5 * ((z @ a) * z).sum(1).mean()

    p = Problem(Weights(), loss, (torch.zeros(4, 1), torch.zeros(4)), dtype=torch.float64)
    frame = run(name, p, k=6, tol=1e-6)
    centre = 0.5 * float(p.w @ a @ p.w)
    known = {
        "eigenvalue": lambda row: EIGENVALUES[int(row.index_) - 1],
        "eigenvalue_ratio": lambda row: None,  # over an eigenvalue of zero
        "trace": lambda row: sum(EIGENVALUES),
    }
    checked = 0
    for row in frame.rename(columns={"index": "index_"}).itertuples():
        expected = None
        if row.metric == "loss" and getattr(row, "x", 0) == getattr(row, "y", 0) == 0:
            expected = centre
        elif row.metric in known and pd.isna(row.layer):
            expected = known[row.metric](row)
        if expected is not None:
            checked += 1
            slack = 0 if pd.isna(row.stderr) else 6 * row.stderr
            assert row.value == pytest.approx(expected, rel=1e-6, abs=1e-9 + slack)
    assert checked


@pytest.mark.parametrize("name", NAMES)
def test_progress_is_told_and_ends_within_its_total(name):
    seen = []
    run(name, Problem(network(), cross_entropy, examples()), lambda *a: seen.append(a))
    assert seen and all(0 <= done <= total and text for done, total, text in seen)
