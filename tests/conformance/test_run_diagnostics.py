"""What every diagnostic of a whole run must keep to, found through the registry."""

import copy
import random

import helpers
import numpy as np
import pandas as pd
import pytest
import torch
from histories import history, moved, stored, tanh_net
from torch import nn

import fldiag
from fldiag import registry
from fldiag.diagnosis.measure import measure
from fldiag.errors import FldiagError
from fldiag.models.lora import with_adapters
from fldiag.params import flatten
from fldiag.problem.problem import Problem
from fldiag.results.table import check

NAMES = [
    n for n in registry.diagnostic.names() if registry.diagnostic.get(n).on in ("run", "clients")
]
#: Fewer products, where their number is not the subject.
FEW = {
    "matching": {"k": 1, "tol": 0.5, "rtol": 0.5, "deflate": 2, "max_products": 20},
    "flatness": {"rtol": 0.9, "max_products": 4, "tol": 0.5},
}


def fitted(name, net):
    """The net, with adapters for the diagnostic of adapters."""
    return with_adapters(net, 2, 4.0, ("*",), "") if name == "lora" else net


def federation(name="", net=None, **options):
    data, parts = helpers.classification((20, 13, 17))
    net = fitted(name, net or tanh_net())
    w, clients = moved(net)
    rounds = [stored(w, clients, round=1), stored(clients[0], [w, clients[1]], round=2, ids=[0, 2])]
    return history(net, data, parts, *rounds, **{"dtype": torch.float64, **options})


def run(name, made, progress=None, **options):
    entry = registry.diagnostic.get(name)
    return measure(entry, made, entry.options(**FEW.get(name, {}) | options), progress=progress)


def diagnose(made, name, **options):
    return fldiag.diagnose(made, name, **FEW.get(name, {}), **options)


def test_there_are_diagnostics_of_runs():
    assert {"forgetting", "drift", "account"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_documented_and_validated(name):
    assert len(registry.diagnostic.get(name).headline) > 20
    with pytest.raises(FldiagError, match="unknown key 'no_such_option'"):
        fldiag.diagnose(federation(name), name, no_such_option=1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_table_schema_and_origin(name):
    frame = check(diagnose(federation(name), name))
    assert (
        set(frame.run) == {"made"}
        and set(frame.method) == {"none"}
        and frame.estimator.notna().all()
    )
    shown = frame[frame.value.isna()]
    assert (
        shown.get("masked", pd.Series(True, index=shown.index)).fillna(False).astype(bool)
        | (shown.metric.str.endswith("order"))
    ).all()
    assert frame.value.map(lambda v: pd.isna(v) or np.isfinite(v)).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_the_same_table_again_and_however_it_is_computed(name):
    a, b = (fldiag.diagnose(federation(name), name) for _ in range(2))
    pd.testing.assert_frame_equal(a, b, check_exact=True)
    c = fldiag.diagnose(federation(name, stack="off"), name)
    columns = [n for n in a.columns if n != "residual"]
    pd.testing.assert_frame_equal(a[columns], c[columns], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_a_model_with_buffers_and_dropout(name):
    """Batch-norm with running statistics of its own for every model, and dropout that must be off."""
    torch.manual_seed(0)
    net = fitted(
        name,
        nn.Sequential(
            nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.ReLU(), nn.Linear(5, 3)
        ),
    )
    data, parts = helpers.classification((20, 13, 17))
    w, clients = moved(net)
    item = stored(w, clients)
    own = {
        n: torch.stack([b.clone() + k if b.is_floating_point() else b for k in range(3)])
        for n, b in net.named_buffers()
    }
    start = {
        n: b.clone().double() if b.is_floating_point() else b.clone()
        for n, b in net.named_buffers()
    }
    own = {n: b.double() if b.is_floating_point() else b for n, b in own.items()}
    item = item.__class__(
        1, item.aggregated, item.ids, item.clients, item.received, start, own, start
    )
    before = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    a, b = (diagnose(history(net, data, parts, item, dtype=torch.float64), name) for _ in range(2))
    pd.testing.assert_frame_equal(a, b, check_exact=True)
    assert all(torch.equal(before[0][k], v) for k, v in net.state_dict().items()) and before[1] == [
        m.training for m in net.modules()
    ]
    if name == "forgetting":
        x, y = data.test_x.double(), data.test_y
        v = dict(
            zip(
                [n for n, _ in net.named_parameters()],
                clients[2].split([p.numel() for p in net.parameters()]),
                strict=True,
            )
        )
        v = {n: t.view_as(p) for (n, p), t in zip(net.named_parameters(), v.values(), strict=True)}
        out = torch.func.functional_call(
            net.eval(), {**v, **{n: t[2] for n, t in own.items()}}, (x,)
        )
        loss = a[(a.metric == "loss") & (a["slice"] == "test")].query("client == 2").value.iloc[0]
        assert loss == pytest.approx(float(nn.functional.cross_entropy(out, y)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stop", [False, True])
def test_the_callers_things_are_untouched(name, stop):
    net = fitted(name, tanh_net()).train()
    made = federation("", net)
    weights, w = flatten(net), made.last().clients.clone()
    before = (
        torch.get_rng_state(),
        np.random.get_state()[1].copy(),
        random.getstate(),
        torch.is_grad_enabled(),
    )

    def progress(done, total, text):
        if stop and done:
            raise KeyboardInterrupt

    try:
        run(name, made, progress)
        assert not stop
    except KeyboardInterrupt:
        assert stop
    assert (
        torch.equal(flatten(net), weights)
        and net.training
        and all(p.grad is None for p in net.parameters())
    )
    assert torch.equal(made.last().clients, w)
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
@pytest.mark.slow
def test_progress_is_told_and_ends_within_its_total(name):
    seen = []
    run(name, federation(name), lambda *a: seen.append(a))
    assert seen and all(0 <= done <= total and text for done, total, text in seen)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_cached_under_everything_it_depends_on(name, tmp_path):
    first = diagnose(federation(name), name, cache=tmp_path)
    (kept,) = tmp_path.glob("*.parquet")
    stamp = kept.stat().st_mtime_ns
    again = diagnose(federation(name), name, cache=tmp_path)
    plain = [
        f.astype(object).where(f.notna(), None) for f in (first, again)
    ]  # parquet knows one kind of nothing
    pd.testing.assert_frame_equal(*plain)
    assert kept.stat().st_mtime_ns == stamp
    diagnose(federation(name, samples=12), name, cache=tmp_path)
    diagnose(federation(name, tanh_net(seed=3)), name, cache=tmp_path)
    assert len(list(tmp_path.glob("*.parquet"))) == 3


def test_a_run_s_diagnostic_wants_a_run_and_a_problem_s_a_problem():
    data, _ = helpers.classification((20,))
    problem = Problem(tanh_net(), nn.functional.cross_entropy, (data.train_x, data.train_y))
    with pytest.raises(FldiagError, match="'forgetting' cannot be run on a Problem; give a run"):
        fldiag.diagnose(problem, "forgetting")
    with pytest.raises(FldiagError, match="'spectrum' cannot be run on a History"):
        fldiag.diagnose(federation(), "spectrum")
    with pytest.raises(FldiagError, match="samples = 3 has no effect on a History"):
        fldiag.diagnose(federation(), "drift", samples=3)
