"""The geometry of features: simplex frames, closed forms, scikit-learn, heads of any model, and what has no number."""

import copy

import helpers
import numpy as np
import pytest
import torch
from histories import history, identity, linear, moved, one, separable, stored
from sklearn.neighbors import NearestCentroid
from torch import nn

from fldiag.diagnostics.geometry import METRICS, draw, geometry, geometry_of, unit_gram


def frame_of(classes, width, counts, noise=0.0):
    """Features near a rotated simplex frame off the origin, their labels, and the frame [classes, width]."""
    g = torch.Generator().manual_seed(0)
    corners = torch.eye(classes, dtype=torch.float64) - 1 / classes
    rotation = torch.linalg.qr(torch.randn(width, width, generator=g, dtype=torch.float64))[0]
    corners = 3 * corners @ rotation[:classes]
    y = torch.repeat_interleave(torch.arange(classes), torch.tensor(counts))
    shift = torch.randn(width, generator=g, dtype=torch.float64)
    spread = noise * torch.randn(len(y), width, generator=g, dtype=torch.float64)
    return corners[y] + shift + spread, y, corners


@pytest.mark.parametrize("counts", [(7, 7, 7, 7), (1, 9, 2, 5)])
def test_a_simplex_frame_is_collapsed(counts):
    h, y, corners = frame_of(4, 6, counts)
    result = geometry_of(h, y, y, 2.5 * corners + 1.0)  # the rows' mean does not count
    for metric in set(METRICS) - {"effective_rank"}:
        assert abs(result[metric]) < 1e-6
    assert geometry_of(h, y, y, -corners)["nc3"] == pytest.approx(2.0)


def test_nc1_by_the_definition():
    h, y, corners = frame_of(3, 5, (4, 7, 9), noise=0.5)
    means = torch.stack([h[y == c].mean(0) for c in range(3)])
    between = (means - means.mean(0)).T @ (means - means.mean(0)) / 3
    within = sum(torch.cov(h[y == c].T, correction=0) for c in range(3)) / 3
    expected = torch.trace(within @ torch.linalg.pinv(between, rtol=1e-9)) / 3
    assert geometry_of(h, y, y, corners)["nc1"] == pytest.approx(float(expected))


def test_nc2_of_a_cross():
    """Means +-a e1 and +-b e2: cosines 0 (4 pairs) and -1 (2), against -1/3."""
    a, b = 1.0, 3.0
    h = torch.tensor([[a, 0], [-a, 0], [0, b], [0, -b]], dtype=torch.float64)
    result = geometry_of(h, torch.arange(4), torch.arange(4), h)
    assert result["nc2_cosines"] == pytest.approx((4 * (1 / 3) + 2 * (2 / 3)) / 6)
    assert result["nc2_norms"] == pytest.approx(np.std([a, a, b, b], ddof=1) / 2)
    assert result["effective_rank"] == pytest.approx(
        np.exp(-(0.25 * np.log(0.25) + 0.75 * np.log(0.75)))
    )


def test_nc4_is_what_a_nearest_centroid_classifier_answers_otherwise():
    h, y, corners = frame_of(4, 6, (9, 4, 12, 6), noise=1.5)
    answers = (h @ corners.T).argmax(1)
    nearest = NearestCentroid().fit(h.numpy(), y.numpy()).predict(h.numpy())
    result = geometry_of(h, y, answers, corners)["nc4"]
    assert result == pytest.approx((nearest != answers.numpy()).mean()) and result > 0


def test_what_is_not_defined_has_no_number():
    h, y, corners = frame_of(3, 4, (2, 2, 2))
    pairs = torch.cat([h[:1], h[2:3]]).repeat(3, 1)
    for features, labels in (
        (h, torch.zeros(6, dtype=torch.long)),  # one class
        (h, torch.zeros(6, 1)),  # no classes
        (torch.ones(6, 4).double(), y),  # all alike
        (pairs, torch.arange(6) // 2),  # equal means
        (h / 0, y),
    ):
        assert np.isnan(geometry_of(features, labels, y, corners)["nc1"])
    numbers = geometry_of(h, y, y, corners[:1])  # a head with fewer outputs than classes
    assert np.isnan(numbers["nc3"]) and np.isfinite(numbers["nc1"])


def test_cka_is_1_under_rotation_shift_and_scale_and_0_for_no_relation():
    x, _, corners = frame_of(4, 4, (5, 5, 5, 5), noise=1.0)
    rotation = torch.linalg.qr(corners + torch.eye(4))[0]
    assert float(unit_gram(x) @ unit_gram(-2 * x @ rotation + 3)) == pytest.approx(1)
    a, b = torch.tensor([[1.0, 1, -1, -1], [1, -1, 1, -1]]).double()
    assert float(unit_gram(a[:, None]) @ unit_gram(b[:, None])) == pytest.approx(0)
    assert unit_gram(torch.full((5, 3), 0.1)).isnan().all()


# Of a federation


def federation(net, clients=3):
    data, parts = helpers.classification((20, 13, 17))
    w, models = moved(net)
    rounds = [stored(w, models[:clients], round=r, ids=range(clients)) for r in (1, 2)]
    return history(net, data, parts, *rounds, dtype=torch.float64)


def normalised():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def test_rows_means_and_picture():
    frame = geometry(federation(normalised()))
    assert set(frame.query("metric == 'nc4'")["n_examples"].dropna()) == {50}
    for scope, metric, where in (
        ("client", "nc3", {"slice": "train", "layer": None}),
        ("pair", "cka", {"layer": "3"}),
    ):
        each = frame.query("metric == @metric and scope == @scope and round == 1")
        each = each[each["layer"] == "3"] if scope == "pair" else each[each["slice"] == "train"]
        each = each["value"].astype(float)
        row = one(frame, metric, round=1, moment="trained", scope="global", **where)
        assert row["value"] == pytest.approx(each.mean()) and row["n_clients"] == 3
        if scope == "client":
            assert row["stderr"] == pytest.approx(each.sem())
    fig = draw(frame)
    lines = {ax.get_title(): ax.get_lines() for ax in fig.axes}
    drawn = lines["NC3: head and means"][-1].get_ydata()
    assert drawn == pytest.approx(
        [
            one(frame, "nc3", round=r, moment="trained", scope="global", slice="train")["value"]
            for r in (1, 2)
        ]
    )
    shown = [bar.get_width() for bar in fig.axes[-1].patches]
    alike = frame.query("metric == 'cka' and scope == 'global' and round == 2")["value"]
    assert shown == pytest.approx(list(alike.astype(float)))


class TwoLayers(nn.Module):
    """The head is declared first; another one, of no use here, is called last. Both answer 0 at first."""

    def __init__(self):
        super().__init__()
        self.head, self.body, self.other = nn.Linear(5, 3), nn.Linear(6, 5), nn.Linear(5, 3)
        for p in (*self.head.parameters(), *self.other.parameters()):
            nn.init.zeros_(p)

    def features(self, x):
        return torch.tanh(self.body(x))

    def forward(self, x):
        outputs, _ = self.head(self.features(x)), self.other(self.features(x))
        return outputs


@pytest.mark.parametrize("build", [normalised, TwoLayers])
def test_features_are_what_the_linear_layer_receives_that_answers(build):
    """Wherever it is declared; against the layers called by hand."""
    torch.manual_seed(0)
    net = build().double().train()  # the mode of the caller's module does not matter
    past = federation(net)
    frame, record, segment = geometry(past), past.stored(1), past.segment("train")
    x, y = past.pool.read(segment.start, segment.stop)[0], past.pool.y[segment]
    for moment, w in (("received", record.received), ("aggregated", record.aggregated)):
        model = copy.deepcopy(net).eval()
        model.load_state_dict({**past.layout.views(w), **record.buffers}, strict=False)
        h, head = (
            (model.features(x), model.head) if build is TwoLayers else (model[:-1](x), model[-1])
        )
        expected = geometry_of(h.detach(), y, model(x).argmax(1), head.weight.detach())
        for metric, number in expected.items():
            row = one(frame, metric, round=1, moment=moment, scope="global")
            if np.isfinite(number):
                assert row["value"] == pytest.approx(number, rel=1e-6, abs=1e-9), metric
            else:  # the received head is 0 for all classes
                assert row["masked"] and row["note"].startswith("not defined")


def test_no_head_and_one_client():
    w, parts = identity().double(), [np.arange(0, 60), np.arange(60, 120)]
    frame = geometry(history(linear(), separable(), parts, stored(w, [w, 2 * w], w)))
    rows = frame[frame["metric"].isin([*METRICS])]
    assert rows["masked"].all() and rows["note"].str.contains("no head").all()
    assert one(frame, "cka", scope="pair")["value"] == pytest.approx(1)  # scaled alike
    assert [ax.get_title() for ax in draw(frame).axes] == ["CKA, last round"]
    alone = geometry(federation(normalised(), clients=1))
    assert "cka" not in set(alone["metric"])
