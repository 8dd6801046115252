"""Drift: closed forms, identities, and the training side's own parts as an independent second spelling."""

import helpers
import numpy as np
import pandas as pd
import pytest
import torch
from histories import always, history, identity, linear, moved, one, separable, stored, tanh_net
from torch import nn
from torch.nn import functional as F

from fldiag.diagnostics.drift import drift
from fldiag.diagnostics.drift.measure import cka, features
from fldiag.errors import FldiagError
from fldiag.losses import strengths
from fldiag.params import Layout
from fldiag.runs import proximal
from fldiag.runs.proximal import Losses

PARTS = [np.arange(0, 60), np.arange(60, 120)]
PLAIN = {"gradients": False, "representation": False, "rho": ()}


@pytest.fixture
def federation():
    """Three clients of a smooth network, at weights around the received ones."""
    data, parts = helpers.classification((20, 13, 17))
    net = tanh_net()
    w, clients = moved(net)
    return history(net, data, parts, stored(w, clients), dtype=torch.float64)


def losses(made, k, **options):
    item = made.last()
    batch = proximal.batches(made.pool.train_slice(k), None)[0]
    return (
        Losses(made.network, made.pool, {}, item.start, batch, **options),
        item.clients[k],
        item.received,
    )


# -- divergence


def test_divergences_of_known_vectors():
    w, a, b = torch.zeros(20), torch.zeros(20), torch.zeros(20)
    a[0], b[17] = 3.0, 4.0  # weight of the only layer, and its bias
    frame = drift(history(linear(), separable(), PARTS, stored(w, [a, b], (a + b) / 2)), **PLAIN)
    assert [one(frame, "global_local_divergence", client=k, layer=None).value for k in (0, 1)] == [
        3,
        4,
    ]
    assert one(frame, "global_local_divergence", scope="global", layer=None).value == 3.5
    assert one(frame, "local_local_divergence", client=0, client_b=1).value == 5
    assert one(frame, "local_local_divergence", scope="global", layer=None).value == 5
    assert (
        one(frame, "squared_divergence", client=0).value == 6.25
        and one(frame, "squared_divergence", scope="global").value == 6.25
    )
    assert one(frame, "update_cosine", client=0, client_b=1).value == 0
    assert one(frame, "update_norm", moment="aggregated").value == 2.5
    assert one(frame, "server_cosine", client=0).value == pytest.approx(0.6)


def test_ordered_pairs_with_self_are_twice_the_spread_about_the_mean(federation):
    frame = drift(federation, **PLAIN)
    rows = federation.last().clients
    pairs = frame[
        (frame.metric == "local_local_divergence") & (frame.scope == "pair")
    ].value.astype(float)
    assert 2 * (pairs**2).sum() / len(rows) ** 2 == pytest.approx(
        float(2 * (rows - rows.mean(0)).square().sum(1).mean()), rel=1e-12
    )


def test_layers_and_head_and_body_make_up_the_whole(federation):
    frame = drift(federation, **PLAIN)
    mine = (
        frame[(frame.metric == "global_local_divergence") & (frame.client == 1)]
        .set_index("layer")
        .value.astype(float)
    )
    whole = mine[mine.index.isna()].iloc[0]
    assert (
        mine["0"] ** 2 + mine["2"] ** 2 == pytest.approx(whole**2)
        and mine["part:head"] == mine["2"]
        and mine["part:body"] == mine["0"]
    )


def test_identical_clients_do_not_drift():
    data, parts = helpers.classification((20, 13))
    parts = [parts[0], parts[0]]
    net = tanh_net()
    w, (v,) = moved(net, 1)
    frame = drift(history(net, data, parts, stored(w, [v, v]), dtype=torch.float64))
    assert (
        one(frame, "local_local_divergence", scope="pair").value == 0
        and one(frame, "squared_divergence", scope="global").value == 0
    )
    for metric in ("update_cosine", "server_cosine", "gradient_cosine"):
        assert frame[frame.metric == metric].value.astype(float).tolist() == pytest.approx(
            [1.0] * (frame.metric == metric).sum()
        )


def test_a_client_that_did_not_move_has_no_cosine():
    frame = drift(
        history(linear(), separable(), PARTS, stored(identity(), [identity(), always(0)])),
    )
    row = one(frame, "update_cosine", scope="pair")
    assert pd.isna(row.value) and row.masked
    assert one(frame, "proximal_loss", client=0).value == pytest.approx(0, abs=1e-7)
    assert frame[(frame.metric == "cos_gu_gp") & (frame.client == 0)].value.isna().all()
    assert one(frame, "cka", client=0).value == pytest.approx(1)
    assert (frame[(frame.metric == "lambda_mean") & (frame.client == 0)].value == 0).all()


def test_a_single_client_has_no_pairs():
    frame = drift(history(linear(), separable(), PARTS, stored(identity(), [always(0)])), **PLAIN)
    assert pd.isna(
        one(frame, "local_local_divergence", scope="global", layer=None).value
    ) and "pair" not in set(frame.scope)


# -- gradients


def test_gradient_cosines_of_quadratics():
    q = helpers.quadratics((12, 9, 15))
    net = nn.Sequential(nn.Linear(4, 1, bias=False))
    w = torch.tensor([0.5, -1, 2, 0.3]).double()
    frame = drift(
        history(net, *q.data, stored(w, [w + 1, w - 1], ids=[0, 2]), dtype=torch.float64),
    )
    g = torch.stack([q.gradient(k, w) for k in range(3)])
    total = (
        torch.tensor([12, 9, 15.0]).double() / 36
    ) @ g  # of all clients, also the one that was not sampled
    for k in (0, 2):
        assert one(frame, "gradient_cosine", client=k).value == pytest.approx(
            float(F.cosine_similarity(g[k], total, 0)), rel=1e-6
        )
        assert one(frame, "gradient_norm", client=k).value == pytest.approx(
            float(g[k].norm()), rel=1e-6
        )
    assert one(frame, "gradient_norm", scope="global").value == pytest.approx(
        float(total.norm()), rel=1e-6
    )
    u = w + 1 - w
    expected = F.cosine_similarity(
        q.gradient(0, w + 1), u, 0
    )  # regression: g_p of the l2 loss is the displacement
    assert one(frame, "cos_gu_gp", client=0, rho=0.0, layer=None).value == pytest.approx(
        float(expected), rel=1e-6
    )


# -- proximal loss and Lambda


def test_kl_is_torchs_and_its_gradient_that_of_finite_differences(federation):
    made, w, start = losses(federation, 1, tau=2.0)
    x, _ = federation.pool.read(
        federation.pool.train_slice(1).start, federation.pool.train_slice(1).stop
    )
    net = federation.network
    student, teacher = (F.log_softmax(net.bind(v[None])(x[None])[0] / 2, -1) for v in (w, start))
    assert proximal.value(made.proximal(), w) == pytest.approx(
        float(F.kl_div(student, teacher, reduction="batchmean", log_target=True))
    )
    _, g = proximal.gradient(made.proximal(), w)
    v = torch.randn(len(w), generator=torch.Generator().manual_seed(0)).double()
    slope_ = (
        proximal.value(made.proximal(), w + 1e-5 * v)
        - proximal.value(made.proximal(), w - 1e-5 * v)
    ) / 2e-5
    assert float(g @ v) == pytest.approx(slope_, rel=1e-6)
    assert proximal.value(made.proximal(), start) == 0


def test_gradient_does_not_depend_on_the_pieces(federation, monkeypatch):
    whole = [proximal.gradient(losses(federation, 0)[0].local(), federation.last().received)]
    monkeypatch.setattr(proximal, "CHUNK", 6)
    whole.append(proximal.gradient(losses(federation, 0)[0].local(), federation.last().received))
    assert whole[0][0] == pytest.approx(whole[1][0]) and torch.allclose(
        whole[0][1], whole[1][1], rtol=1e-10
    )


@pytest.mark.parametrize("per", ["layer", "tensor"])
def test_lambda_is_that_of_the_definition(federation, per):
    item, layout = federation.last(), federation.layout
    d = item.clients[0] - item.received
    mine = strengths(d, layout, per)
    assert torch.equal(
        mine, strengths(torch.stack([item.clients[1] - item.received, d]), layout, per)[1]
    )  # a row as a vector
    moved = layout.views(d.abs())
    for names in layout.layers.values() if per == "layer" else [(n,) for n in layout.names]:
        length = torch.cat([moved[n].flatten() for n in names]).norm()
        assert all(
            torch.allclose(layout.views(mine)[n], moved[n] / length, rtol=1e-12) for n in names
        )
    groups = layout.layers.values() if per == "layer" else [(n,) for n in layout.names]
    views = layout.views(mine)
    assert [
        float(sum(views[n].square().sum() for n in names)) for names in groups
    ] == pytest.approx([1.0] * len(groups))


def test_lambda_mean_times_root_size_is_one_when_all_entries_move_alike():
    w = torch.zeros(20)
    frame = drift(history(linear(), separable(), PARTS, stored(w, [w + 0.1, identity()])), **PLAIN)
    assert (
        one(frame, "lambda_mean", client=0).scaled == pytest.approx(1)
        and one(frame, "lambda_mean", client=1).scaled < 0.5
    )
    assert one(frame, "lambda_mean", client=0).value == pytest.approx(20**-0.5)


@pytest.mark.parametrize("part", ["full", "body", "head"])
@pytest.mark.parametrize("strength", ["fixed", "adaptive"])
def test_cosines_of_perturbed_gradients(federation, part, strength):
    """Against the definition, spelled with torch alone."""
    frame = drift(
        federation,
        rho=(0.0, 0.7),
        part=part,
        strength=strength,
        gradients=False,
        representation=False,
    )
    made, w, start = losses(federation, 2)
    g_p = proximal.gradient(made.proximal(), w)[1]
    cut = 35  # 6*5 + 5 entries before the head
    mask = torch.ones(len(w)).double()
    mask[:cut] *= part != "head"
    mask[cut:] *= part != "body"
    e = 0.7 * mask * g_p / (mask * g_p).norm()
    if strength == "adaptive":
        d = (w - start).abs()
        e *= torch.cat([d[:cut] / d[:cut].norm(), d[cut:] / d[cut:].norm()])
    else:
        assert float(e.norm()) == pytest.approx(0.7)
    for rho, at in ((0.0, w), (0.7, w + e)):
        g_u = proximal.gradient(made.local(), at)[1]
        for layer, where in ((None, slice(None)), ("part:head", slice(cut, None))):
            expected = float(F.cosine_similarity(g_u[where], g_p[where], 0))
            assert one(frame, "cos_gu_gp", client=2, rho=rho, layer=layer).value == pytest.approx(
                expected, rel=1e-9
            )


def test_minibatches_are_averaged(federation):
    frame = drift(federation, rho=(0.0,), batch=7, gradients=False, representation=False)
    item, own = federation.last(), federation.pool.train_slice(0)
    found = []
    for batch in proximal.batches(own, 7):
        some = Losses(federation.network, federation.pool, {}, item.start, batch)
        g_l, g_p = (
            proximal.gradient(t, item.clients[0])[1] for t in (some.local(), some.proximal())
        )
        found.append(float(F.cosine_similarity(g_l, g_p, 0)))
    assert len(found) == 3 and one(frame, "cos_gu_gp", client=0, layer=None).value == pytest.approx(
        np.mean(found)
    )
    whole = drift(federation, gradients=False, representation=False)
    assert one(frame, "proximal_loss", client=0).value == pytest.approx(
        one(whole, "proximal_loss", client=0).value
    )


def test_strengths_along_the_first_axis_have_no_common_scale(federation):
    """As the released code normalises them: the picture then shows the means themselves."""
    frame = drift(federation, **PLAIN, per="dim0")
    rows = frame[(frame.metric == "lambda_mean") & (frame.client == 0)]
    item, layout = federation.last(), federation.layout
    assert "scaled" not in frame and list(rows.layer) == list(layout.names)
    expected = layout.views(strengths(item.clients[0] - item.received, layout, "dim0"))
    assert rows.value.astype(float).tolist() == pytest.approx(
        [float(v.mean()) for v in expected.values()]
    )


def test_recorded_steps_are_read_as_means(federation):
    rows = [
        {"round": 1, "client": 0, "metric": "cos_gu_gp", "index": i, "layer": None, "value": v}
        for i, v in ((1, None), (2, 0.5), (3, 0.1))
    ]
    rows += [
        {"round": 1, "client": 2, "metric": "cos_gu_gp", "index": 2, "layer": None, "value": -0.5},
        {"round": 1, "client": 2, "metric": "loss", "index": 2, "layer": None, "value": 9.0},
    ]
    asked = []
    federation._steps = lambda r: asked.append(r) or pd.DataFrame(rows)
    frame = drift(federation, **PLAIN)
    row = one(frame, "cos_gu_gp", estimator="steps", client=0)
    assert (
        asked == [1] and row.value == pytest.approx(0.3) and row.n_steps == 2 and row["round"] == 1
    )
    mean = one(frame, "cos_gu_gp", estimator="steps", scope="global")
    assert mean.value == pytest.approx(-0.1) and mean.n_clients == 2 and mean.n_steps == 3
    assert set(frame[frame.estimator == "steps"].metric) == {"cos_gu_gp"}
    federation._steps = lambda r: None
    assert "steps" not in set(drift(federation, **PLAIN).estimator)


def test_wrong_choices():
    made = history(linear(), separable(), PARTS, stored(identity(), [always(0)]))
    with pytest.raises(FldiagError, match="no head"):
        drift(made, part="head")
    with pytest.raises(FldiagError, match="not one of full, body, head"):
        drift(made, part="heads")


def test_consensus_of_known_updates():
    w, a, b, c = (torch.zeros(20) for _ in range(4))
    a[0], b[1], c[17] = 3.0, 4.0, 1.0
    parts = [np.arange(0, 60), np.arange(60, 90), np.arange(90, 120)]
    frame = drift(history(linear(), separable(), parts, stored(w, [a, b, c])), **PLAIN)
    row = one(frame, "update_consensus", layer=None)
    length = (1.5**2 + 1 + 0.25**2) ** 0.5  # of 1/2 a + 1/4 b + 1/4 c
    assert row.value == pytest.approx(length / (1.5 + 1 + 0.25)) and row.n_clients == 3
    for clients, value in (([a, a, a], 1.0), ([a, -a, 0 * a], 1 / 3)):
        frame = drift(history(linear(), separable(), parts, stored(w, clients)), **PLAIN)
        assert one(frame, "update_consensus", layer=None).value == pytest.approx(value)
    still = drift(history(linear(), separable(), parts, stored(w, [w, w, w])), **PLAIN)
    row = one(still, "update_consensus", layer=None)
    assert row.masked and row.note == "no client moved"


# -- representations


@pytest.mark.parametrize("n", [40, 5])  # more examples than features, and fewer
def test_cka_knows_rotations_shifts_and_scales(n):
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(n, 8, generator=g).double(), torch.randn(n, 6, generator=g).double()
    turn = torch.linalg.qr(torch.randn(8, 8, generator=g).double())[0]
    assert cka(a, 3 * a @ turn + 5) == pytest.approx(1)
    assert cka(a, b) == pytest.approx(cka(-2 * a @ turn + 1, b)) and 0 < cka(a, b) < 1
    assert cka(a, a @ torch.diag(torch.arange(8.0).double())) < 0.99
    k, l = (v @ v.T for v in (a - a.mean(0), b - b.mean(0)))
    assert cka(a, b) == pytest.approx(float((k * l).sum() / (k.norm() * l.norm())))
    assert cka(a, torch.ones(n, 3)) is None


def test_features_are_what_the_head_sees(federation):
    item, test = federation.last(), federation.pool.test
    x, _ = federation.pool.read(test.start, test.stop)
    layout = Layout.of(tanh_net())
    v = layout.views(item.clients[1])
    assert torch.allclose(
        features(federation, item.client(1), test), torch.tanh(x @ v["0.weight"].T + v["0.bias"])
    )
