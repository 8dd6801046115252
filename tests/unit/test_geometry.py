"""The geometry of features: simplex frames, closed forms, scikit-learn, and what has no number."""

import copy

import helpers
import numpy as np
import pandas as pd
import pytest
import torch
from histories import history, identity, linear, moved, one, separable, stored
from sklearn.neighbors import NearestCentroid
from torch import nn

from fldiag.diagnostics.drift import cka
from fldiag.diagnostics.geometry import geometry, summary
from fldiag.diagnostics.geometry.measure import (
    COLLAPSE,
    METRICS,
    centred_gram,
    geometry_of,
    layer_outputs,
    spread_inputs,
)
from fldiag.diagnostics.geometry.picture import draw
from fldiag.results.summary import Say, Small


def frame_of(classes, width, counts, noise=0.0, seed=0):
    """Features near a rotated simplex frame off the origin, their labels, and the frame [classes, width]."""
    g = torch.Generator().manual_seed(seed)
    corners = torch.eye(classes, dtype=torch.float64) - 1 / classes
    rotation = torch.linalg.qr(torch.randn(width, width, generator=g, dtype=torch.float64))[0]
    corners = 3 * corners @ rotation[:classes]
    y = torch.repeat_interleave(torch.arange(classes), torch.tensor(counts))
    shift = torch.randn(width, generator=g, dtype=torch.float64)
    spread = noise * torch.randn(len(y), width, generator=g, dtype=torch.float64)
    return corners[y] + shift + spread, y, corners


def numbers(h, y, head, answers=None):
    return geometry_of(h, y, y if answers is None else answers, head)


@pytest.mark.parametrize("counts", [(7, 7, 7, 7), (1, 9, 2, 5)])
def test_a_simplex_frame_is_collapsed(counts):
    h, y, corners = frame_of(4, 6, counts)
    result = numbers(h, y, 2.5 * corners + 1.0)  # the rows' mean does not count
    for metric in COLLAPSE:
        assert abs(result[metric]) < 1e-6
    assert numbers(h, y, -corners)["nc3"] == pytest.approx(2.0)
    orthogonal = torch.linalg.qr(corners.T, mode="complete")[0].T[-2:]
    head = torch.stack([orthogonal[0], -orthogonal[0], orthogonal[1], -orthogonal[1]])
    assert numbers(h, y, head)["nc3"] == pytest.approx(2**0.5)


def test_nc1_by_the_definition():
    h, y, corners = frame_of(3, 5, (4, 7, 9), noise=0.5)
    means = torch.stack([h[y == c].mean(0) for c in range(3)])
    centred = means - means.mean(0)
    between = sum(torch.outer(m, m) for m in centred) / 3
    within = sum(torch.cov(h[y == c].T, correction=0) for c in range(3)) / 3
    expected = torch.trace(within @ torch.linalg.pinv(between, rtol=1e-9)) / 3
    assert numbers(h, y, corners)["nc1"] == pytest.approx(float(expected))


def test_nc1_in_one_dimension():
    h = torch.tensor([[0.0], [2.0], [10.0], [14.0]], dtype=torch.float64)
    y = torch.tensor([0, 0, 1, 1])
    result = numbers(h, y, torch.tensor([[-1.0], [1.0]], dtype=torch.float64))
    # variances 1 and 4, means 1 and 12, so (1 + 4)/2 over 5.5^2, over two classes
    assert result["nc1"] == pytest.approx(2.5 / 5.5**2 / 2)


def test_nc2_of_a_cross():
    """Means +-a e1 and +-b e2: cosines 0 (4 pairs) and -1 (2), against -1/3."""
    a, b = 1.0, 3.0
    h = torch.tensor([[a, 0], [-a, 0], [0, b], [0, -b]], dtype=torch.float64)
    result = numbers(h, torch.arange(4), None)
    assert result["nc2_cosines"] == pytest.approx((4 * (1 / 3) + 2 * (2 / 3)) / 6)
    assert result["nc2_norms"] == pytest.approx(np.std([a, a, b, b], ddof=1) / 2)
    assert result["nc3"] == "the head is not one linear layer"


def test_nc4_is_what_a_nearest_centroid_classifier_answers_otherwise():
    h, y, corners = frame_of(4, 6, (9, 4, 12, 6), noise=1.5)
    answers = (h @ corners.T).argmax(1)
    nearest = NearestCentroid().fit(h.numpy(), y.numpy()).predict(h.numpy())
    result = numbers(h, y, corners, answers=answers)["nc4"]
    assert result == pytest.approx((nearest != answers.numpy()).mean()) and result > 0


@pytest.mark.parametrize("d", [2, 5])
def test_effective_rank(d):
    axes = torch.cat([torch.eye(d), -torch.eye(d)]).double()
    y = torch.arange(2 * d) % 2
    assert numbers(axes, y, None)["effective_rank"] == pytest.approx(d)
    line = torch.arange(4.0).double()[:, None] * torch.ones(d).double()
    assert numbers(line, torch.arange(4) % 2, None)["effective_rank"] == pytest.approx(1)
    g = torch.Generator().manual_seed(0)
    h = torch.randn(50, d, generator=g, dtype=torch.float64)
    shares = np.linalg.svd((h - h.mean(0)).numpy(), compute_uv=False)
    shares /= shares.sum()
    expected = np.exp(-(shares * np.log(shares)).sum())
    assert numbers(h, torch.arange(50) % 2, None)["effective_rank"] == pytest.approx(expected)


def test_what_has_no_number_says_why():
    h, y, corners = frame_of(3, 4, (2, 2, 2))
    same = torch.ones(6, 4).double()
    for features, labels, reason in (
        (h, torch.zeros(6, dtype=torch.long), "there is one class only"),
        (h, torch.zeros(6, 1), "the targets are not one class an example"),
        (same, y, "the features are the same for all examples"),
        (torch.cat([h[:1], h[2:3]]).repeat(3, 1), torch.arange(6) // 2, "class means are the same"),
    ):
        result = numbers(features, labels, corners)
        assert reason in result["nc1"] and reason in result["nc2_norms"]
    assert "outputs for 3 classes" in numbers(h, y, corners[:1])["nc3"]
    assert "same for all classes" in numbers(h, y, torch.ones(3, 4).double())["nc3"]


# -- of a federation


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def federation(net=None, clients=3, **options):
    data, parts = helpers.classification((20, 13, 17))
    net = net or network()
    w, models = moved(net)
    ids = range(clients)
    rounds = [stored(w, models[:clients], round=r, ids=ids) for r in (1, 2)]
    return history(net, data, parts, *rounds, **{"dtype": torch.float64, **options})


def test_rows_of_every_model():
    frame = geometry(federation())
    assert sorted(frame["round"].unique()) == [1, 2]
    for moment in ("received", "aggregated"):
        row = one(frame, "nc1", round=1, moment=moment, scope="global")
        assert row.n_examples == 50 and row.classes == 3 and row["slice"] == "train"
    for k, n in enumerate((20, 13, 17)):
        rows = frame[(frame["metric"] == "nc4") & (frame["round"] == 1) & (frame["client"] == k)]
        assert dict(zip(rows["slice"], rows["n_examples"], strict=True)) == {
            "train": 50,
            f"client:{k}/train": n,
        }
    each = frame[(frame["metric"] == "nc3") & (frame["slice"] == "train")]
    each = each[(each["round"] == 1) & (each["scope"] == "client")]["value"].astype(float)
    row = one(frame, "nc3", round=1, moment="trained", scope="global", slice="train")
    assert row.value == pytest.approx(each.mean())
    assert row.stderr == pytest.approx(each.std() / 3**0.5)
    test = geometry(federation(), slice="test")
    assert set(test[test["metric"] == "nc1"]["slice"]) == {"test"}


def test_features_are_those_before_the_head():
    """With the identity as body, features are the inputs, which are near the corners of a frame."""
    data, deal = separable(), [np.arange(i, 120, 2) for i in range(2)]
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    w = torch.cat([torch.eye(4).flatten(), identity()]).double()
    made = history(net, data, deal, stored(w, [w, w], w), dtype=torch.float64)
    frame = geometry(made)
    x, y = data.train_x[np.concatenate(deal)].double(), data.train_y[np.concatenate(deal)]
    expected = geometry_of(x, y, y, 5 * torch.eye(4).double())
    for metric, number in expected.items():
        row = one(frame, metric, moment="aggregated", scope="global")
        assert row.value == pytest.approx(number, rel=1e-5, abs=1e-9)
    assert expected["nc1"] < 0.02 and expected["nc3"] < 0.05 and expected["nc4"] == 0


def test_cka_of_clients_by_layer_is_that_of_two_representations():
    made = federation()
    frame = geometry(made, similar=20)
    stretch = made.stretch("train")
    x = spread_inputs(made, stretch, 20)
    assert len(x) <= 20 and one(frame, "cka", round=1, layer="0", scope="global").n_examples == len(
        x
    )
    record = made.stored(1)
    a, b = (layer_outputs(made, record.client(j), x) for j in (0, 2))
    assert list(a) == ["0", "2"]
    for layer in a:
        row = one(frame, "cka", round=1, layer=layer, client=0, client_b=2)
        assert row.value == pytest.approx(cka(a[layer], b[layer]))
    pairs = frame[(frame["metric"] == "cka") & (frame["scope"] == "pair") & (frame["round"] == 1)]
    mean = pairs[pairs["layer"] == "2"]["value"].astype(float).mean()
    assert one(frame, "cka", round=1, layer="2", scope="global").value == pytest.approx(mean)


def test_cka_is_1_under_rotation_shift_and_scale_and_0_for_no_relation():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=g, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=g, dtype=torch.float64))[0]
    gram = centred_gram(x)
    assert float((gram * centred_gram(-2 * x @ rotation + 3)).sum()) == pytest.approx(1)
    a, b = torch.tensor([1.0, -1, 1, -1]).double(), torch.tensor([1.0, 1, -1, -1]).double()
    assert float((centred_gram(a[:, None]) * centred_gram(b[:, None])).sum()) == pytest.approx(0)
    assert not centred_gram(torch.full((5, 3), 0.1)).any()


def test_one_client_no_head_and_no_comparison():
    frame = geometry(federation(clients=1))
    row = one(frame, "cka", round=1)
    assert row.masked and "nobody to be compared with" in row.note
    assert pd.isna(
        one(frame, "nc1", round=1, moment="trained", scope="global", slice="train").stderr
    )
    w = identity().double()
    deal = [np.arange(0, 60), np.arange(60, 120)]
    made = history(linear(), separable(), deal, stored(w, [w, 2 * w], w), dtype=torch.float64)
    frame = geometry(made)
    rows = frame[frame["metric"].isin([*COLLAPSE, "effective_rank"])]
    assert rows["masked"].all() and rows["note"].str.contains("no head").all()
    assert one(frame, "cka", scope="pair").value == pytest.approx(1)  # scaled alike
    assert [ax.get_title() for ax in draw(frame).axes] == ["CKA of two clients"]  # no empty panels
    assert not (geometry(federation(), similar=0)["metric"] == "cka").any()


class Sequence(nn.Module):
    """Six inputs as a sequence of three pairs; features [n, 3, 4] before pooling, which the head sees as rows."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(2, 4), nn.LayerNorm(4)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))

    def features(self, x):
        return self.norm(torch.tanh(self.embed(x.unflatten(1, (3, 2)))))

    def forward(self, x):
        return self.head(self.features(x).mean(1))


def normalised():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


class TwoLayers(nn.Module):
    """A body and a head in one of the ways that models have them."""

    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)

    def before_head(self, x):
        return torch.tanh(self.body(x))

    def forward(self, x):
        return self.head(self.before_head(x))


def head_first():
    return TwoLayers(head=nn.Linear(5, 3), body=nn.Linear(6, 5))


class AuxiliaryLast(TwoLayers):
    """A second head for training, declared and called last; both answer 0 at first."""

    def forward(self, x):
        z = self.before_head(x)
        outputs, _ = self.head(z), self.other(self.first(x))
        return outputs


def auxiliary_last():
    layers = {"body": nn.Linear(6, 5), "first": nn.Linear(6, 5)}
    return AuxiliaryLast(**layers, head=nn.Linear(5, 3), other=nn.Linear(5, 3))


class GateLast(TwoLayers):
    def before_head(self, x):
        return torch.tanh(self.body(x)) * torch.sigmoid(self.gate(x))


def gate_last():
    return GateLast(head=nn.Linear(5, 3), body=nn.Linear(6, 5), gate=nn.Linear(6, 5))


class LogSoftmax(TwoLayers):
    def forward(self, x):
        return super().forward(x).log_softmax(1)


class Softmax(TwoLayers):
    def forward(self, x):
        return super().forward(x).softmax(1)


class Twice(TwoLayers):
    """One layer called twice: before the head's call comes that of the same layer."""

    def before_head(self, x):
        return torch.tanh(self.head(self.body(x)))


HEADS = {
    "batch norm": (normalised, lambda net, x: net[:-1](x), "3"),
    "sequence": (Sequence, lambda net, x: net.features(x).mean(1), "head.1"),
    **{
        name: (build, lambda net, x: net.before_head(x), "head")
        for name, build in {
            "head first": head_first,
            "auxiliary last": auxiliary_last,
            "gate last": gate_last,
            "log-softmax": lambda: LogSoftmax(head=nn.Linear(5, 3), body=nn.Linear(6, 5)),
            "softmax": lambda: Softmax(head=nn.Linear(5, 3), body=nn.Linear(6, 5)),
            "called twice": lambda: Twice(body=nn.Linear(6, 6), head=nn.Linear(6, 6)),
        }.items()
    },
}


@pytest.mark.parametrize("case", HEADS)
def test_features_of_any_model_are_what_the_linear_layer_receives_that_answers(case):
    """Wherever it is declared; against the layers called by hand."""
    torch.manual_seed(0)
    build, features, head = HEADS[case]
    net = build().double().train()  # the mode of the caller's module does not matter
    if case == "batch norm":
        nn.init.normal_(net[1].running_mean), nn.init.uniform_(net[1].running_var, 1, 2)
    made = federation(net)
    record = made.stored(1)
    frame = geometry(made)
    stretch = made.stretch("train")
    x, y = made.pool.read(stretch.start, stretch.stop)[0], made.pool.y[stretch]
    copy_of_net = copy.deepcopy(net).eval()
    state = {**made.layout.views(record.aggregated), **record.buffers}
    copy_of_net.load_state_dict(state, strict=False)
    h, matrix = features(copy_of_net, x), copy_of_net.get_submodule(head).weight
    expected = geometry_of(h.detach(), y, copy_of_net(x).argmax(1), matrix.detach())
    for metric, number in expected.items():
        row = one(frame, metric, round=1, moment="aggregated", scope="global")
        assert row.value == pytest.approx(number, rel=1e-6, abs=1e-9), metric


def test_heads_that_are_zero_are_told_apart():
    """At the start all heads may answer 0, and the last one called is not the model's."""
    net = auxiliary_last()
    for layer in (net.head, net.other):
        nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
    made = federation(net)
    row = one(geometry(made), "effective_rank", round=1, moment="received")
    stretch = made.stretch("train")
    x, y = made.pool.read(stretch.start, stretch.stop)[0], made.pool.y[stretch]
    h = net.double().before_head(x).detach()
    assert row.value == pytest.approx(numbers(h, y, None)["effective_rank"])


class ConvolutionLast(TwoLayers):
    def forward(self, x):
        return self.head(self.before_head(x).unsqueeze(1)).squeeze(2)


class AttentionLast(TwoLayers):
    """Attention over one token: its linear layer `out_proj` is never called as a module."""

    def forward(self, x):
        z = self.before_head(x).unsqueeze(1)
        return self.head(z, z, z, need_weights=False)[0].squeeze(1)


class Scaled(TwoLayers):
    def forward(self, x):
        return 3 * super().forward(x)


class Dictionary(TwoLayers):
    def forward(self, x):
        return {"logits": super().forward(x)}


def adapted(kind=TwoLayers):
    """The head as a base and an adapter, whose last linear layer sees a code of two numbers."""
    return kind(body=nn.Linear(6, 5), head=Adapted())


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.A, self.B = nn.Linear(5, 3), nn.Linear(5, 2), nn.Linear(2, 3)

    def forward(self, x):
        return self.base(x) + self.B(self.A(x))


class AdaptedInPlace(Adapted):
    def forward(self, x):
        outputs = self.base(x)
        outputs += self.B(self.A(x))
        return outputs


@pytest.mark.parametrize(
    "net",
    [
        adapted(),
        TwoLayers(body=nn.Linear(6, 5), head=AdaptedInPlace()),
        ConvolutionLast(body=nn.Linear(6, 6), head=nn.Conv1d(1, 3, 6)),
        AttentionLast(body=nn.Linear(6, 4), head=nn.MultiheadAttention(4, 1, batch_first=True)),
        Scaled(body=nn.Linear(6, 5), head=nn.Linear(5, 3)),
        Dictionary(body=nn.Linear(6, 5), head=nn.Linear(5, 3)),
    ],
    ids=["adapted", "adapted in place", "convolution", "attention", "scaled", "dictionary"],
)
def test_models_without_one_linear_head_are_masked(net):
    frame = geometry(federation(net))
    rows = frame[frame["metric"].isin([*COLLAPSE, "effective_rank"])]
    assert rows["masked"].all() and rows["note"].str.contains("method `features`").all()


class WithFeatures(TwoLayers):
    def features(self, x):
        return self.before_head(x)


class WrongFeatures(TwoLayers):
    """A method `features` that leaves something out."""

    def features(self, x):
        return self.body(x)


def test_the_remedy_for_models_without_a_linear_head():
    net = adapted(WithFeatures)
    made = federation(net)
    row = one(geometry(made), "effective_rank", round=1, moment="received")
    stretch = made.stretch("train")
    x, y = made.pool.read(stretch.start, stretch.stop)[0], made.pool.y[stretch]
    h = net.double().features(x).detach()
    assert row.value == pytest.approx(numbers(h, y, None)["effective_rank"])
    frame = geometry(federation(adapted(WrongFeatures)))
    assert frame[frame["metric"].isin(METRICS)]["masked"].all()


def test_models_that_overflow_are_masked():
    """A diverged aggregated model, and a client whose outputs overflow, take no other number with them."""
    data, parts = helpers.classification((20, 13, 17))
    net = network()
    w, models = moved(net)
    models[1] = models[1] * 1e200
    made = history(net, data, parts, stored(w, models, w * float("nan")), dtype=torch.float64)
    frame = geometry(made)
    rows = frame[(frame["moment"] == "aggregated") & frame["metric"].isin(METRICS)]
    assert set(rows["note"]) == {"the features are not finite"}
    pairs = frame[(frame["metric"] == "cka") & (frame["scope"] == "pair") & frame["masked"]]
    assert set(zip(pairs["client"], pairs["client_b"], strict=True)) == {(0, 1), (1, 2)}
    assert set(pairs["note"]) == {"the outputs of a client are not finite"}
    assert (frame["masked"] | np.isfinite(frame["value"].astype(float))).all()
    assert one(frame, "nc1", moment="received", slice="train").value > 0


def test_the_picture_and_the_summary_show_the_numbers():
    frame = geometry(federation())
    fig = draw(frame)
    drawn = np.concatenate(
        [np.asarray(line.get_ydata(), float) for ax in fig.axes for line in ax.lines]
    )
    metrics = frame["metric"].isin([*COLLAPSE, "effective_rank"])
    shown = frame[metrics | ((frame["metric"] == "cka") & (frame["scope"] == "global"))]
    own = shown["slice"].str.startswith("client:") & (shown["scope"] == "client")
    for number in shown[~own]["value"].dropna().astype(float):
        assert np.nanmin(np.abs(drawn - number)) < 1e-9
    items = list(summary(frame, {"slice": "train"}))
    tables = [item for item in items if isinstance(item, Small)]
    assert [len(item.rows) for item in tables] == [8, 2]
    sentence = next(item.text for item in items if isinstance(item, Say))
    assert "clients in round 2, all examples: NC1 " in sentence and " ± " in sentence
