"""Agreement of updates on Gaussian updates of known covariance, and what uploads lose against expected errors."""

import numpy as np
import pandas as pd
import pytest
import torch
from histories import always, history, identity, linear, one, separable, stored
from torch.nn import functional as F

from fldiag.diagnostics.drift import agreement, drift, upload
from fldiag.diagnostics.drift.picture import agreement_if_any, upload_if_any
from fldiag.diagnostics.drift.summary import summary
from fldiag.params import Layout
from fldiag.results.uncertainty import jackknife

PARTS = [np.arange(0, 60), np.arange(60, 90), np.arange(90, 120)]
PLAIN = {"gradients": False, "representation": False, "propositions": False, "rho": ()}
#: Uneven weights of clients.
P = np.array([0.4, 0.2, 0.1, 0.1, 0.1, 0.1])


def squares(d):
    return (d**2).sum(1), ((d[:, None] - d[None]) ** 2).sum(-1)


def test_ratio_of_gaussian_updates_is_without_bias_in_both_of_its_parts():
    """E numerator = ||mu||^2 and E denominator = tr(Sigma), at uneven weights: so the ratio of their means is the true one."""
    rng, size = np.random.default_rng(0), 30
    mu, deviations = np.linspace(0, 0.4, size), np.linspace(0.1, 1, size)
    noise, q = (deviations**2).sum(), P @ P
    numerators, denominators = [], []
    for _ in range(4000):
        d = mu + deviations * rng.normal(size=(len(P), size))
        norms, apart = squares(d)
        mean = P @ d
        trace = (P * ((d - mean) ** 2).sum(1)).sum() / (1 - q)
        numerator = mean @ mean - q * trace
        assert agreement.signal_to_noise(P, norms, apart) == pytest.approx(numerator / trace)
        numerators.append(numerator)
        denominators.append(trace)
    for values, expected in ((numerators, mu @ mu), (denominators, noise)):
        error = np.std(values, ddof=1) / len(values) ** 0.5
        assert abs(np.mean(values) - expected) < 4 * error < 0.1 * expected


def test_interval_covers_the_ratio_about_as_often_as_it_says():
    rng, size, clients = np.random.default_rng(1), 40, 20
    mu, p, hits = np.full(size, 0.25), np.full(clients, 1 / clients), 0
    for _ in range(300):
        ratio = agreement.interval(p, *squares(mu + rng.normal(size=(clients, size))))
        hits += ratio.low <= mu @ mu / size <= ratio.high
    assert 0.88 * 300 < hits < 300


def test_jackknife_of_a_mean_is_its_t_interval():
    x = np.array([1.0, 4.0, 2.0, 8.0])
    left_out = [np.delete(x, i).mean() for i in range(4)]
    ends = jackknife(x.mean(), left_out)
    half = 3.182446 * x.std(ddof=1) / 2  # t of 3 degrees of freedom
    assert (ends.low, ends.high) == pytest.approx((x.mean() - half, x.mean() + half), rel=1e-6)
    assert jackknife(1.0, [1.0, 2.0]).low is None


def test_consensus_and_ratio_of_known_updates():
    w, a, b, c = (torch.zeros(20) for _ in range(4))
    a[0], b[1], c[17] = 3.0, 4.0, 1.0  # the third moves the bias
    parts = [np.arange(0, 60), np.arange(60, 90), np.arange(90, 120)]
    frame = drift(history(linear(), separable(), parts, stored(w, [a, b, c])), **PLAIN)
    length = (1.5**2 + 1 + 0.25**2) ** 0.5  # of 1/2 a + 1/4 b + 1/4 c
    row = one(frame, "update_consensus", layer=None)
    assert row.value == pytest.approx(length / (1.5 + 1 + 0.25)) and row.n_clients == 3
    spread = 0.5 * 9 + 0.25 * 16 + 0.25 - length**2
    q = 0.375
    row = one(frame, "update_snr", layer=None)
    assert row.value == pytest.approx(length**2 / (spread / (1 - q)) - q)
    assert row.low < row.value < row.high
    assert agreement_if_any(frame.assign(run="r")) is not None


def test_agreement_has_the_ends_of_its_scale():
    w, d = torch.zeros(20), torch.linspace(-1, 1, 20)
    same = drift(history(linear(), separable(), PARTS, stored(w, [d, d, d])), **PLAIN)
    assert one(same, "update_consensus", layer=None).value == pytest.approx(1)
    row = one(same, "update_snr", layer=None)
    assert row.masked and row.note == "all updates are the same"
    parts = [np.arange(0, 60), np.arange(60, 120)]
    opposed = drift(history(linear(), separable(), parts, stored(w, [d, -d])), **PLAIN)
    assert one(opposed, "update_consensus", layer=None).value == pytest.approx(0, abs=1e-7)
    assert one(opposed, "update_snr", layer=None).value == pytest.approx(-0.5)  # -q: noise alone


def test_one_client_and_clients_at_rest_are_masked():
    w = identity()
    single = drift(history(linear(), separable(), PARTS, stored(w, [always(0)])), **PLAIN)
    row = one(single, "update_snr", layer=None)
    assert row.masked and row.note == "one client has no spread"
    assert agreement_if_any(single) is None
    still = drift(history(linear(), separable(), PARTS, stored(w, [w, w])), **PLAIN, upload=True)
    assert one(still, "update_consensus", layer=None).note == "no client moved"
    row = one(still, "upload_error", layer=None, client=0, upload="top-k")
    assert row.masked and row.note == "it did not move"


# -- what an upload would lose


def test_expected_errors_of_uploads():
    layout, rng = Layout.of(linear(9)), np.random.default_rng(2)
    d = torch.from_numpy(rng.normal(size=layout.size))
    limit, z, n = 0.6 * float(d.norm()), 0.05, 400
    settings = upload.Upload(limit, z, 0.2)
    lost = {}
    for seed in range(n):
        for name, arrived in upload.altered_updates(d, limit, settings, layout, seed).items():
            lost.setdefault(name, []).append(arrived - d)
    errors = {
        name: np.array([float(v.square().sum()) for v in values]) for name, values in lost.items()
    }
    assert errors["clip"] == pytest.approx(0.16 * float(d.square().sum()))
    dropped = np.sort(np.square(d.numpy()))[: layout.size - round(0.2 * layout.size)].sum()
    assert errors["top-k"] == pytest.approx(dropped)
    step = torch.cat(
        [
            (d[place].abs().max() / upload.LEVELS).expand(place.stop - place.start)
            for place in layout.slices().values()
        ]
    )
    rest = d / step - torch.floor(d / step)
    expected = {
        "clip+noise": errors["clip"][0] + layout.size * (z * limit) ** 2,
        "8 bits": float((step**2 * rest * (1 - rest)).sum()),
    }
    for name, value in expected.items():
        standard = errors[name].std(ddof=1) / n**0.5
        assert abs(errors[name].mean() - value) < 4 * standard < 0.1 * value
    bias = torch.stack(lost["8 bits"]).mean(0) / step  # the mean is the entry itself
    assert float(bias.abs().max()) < 4.5 * 0.5 / n**0.5


@pytest.fixture
def world():
    return history(
        linear(), separable(), PARTS, stored(always(1) / 9, [identity(), always(0), always(2) / 3])
    )


def test_altered_means_are_evaluated_on_all_training_data(world):
    frame = drift(world, **PLAIN, upload=True, clip=2.0, keep=0.1)
    item, p = world.last(), torch.tensor([0.5, 0.25, 0.25]).double()
    data = separable()

    def losses(update):
        w = item.received.double() + update
        out = data.train_x.double() @ w[:16].reshape(4, 4).T + w[16:]
        return F.cross_entropy(out, data.train_y, reduction="none").numpy()

    moved = item.moved.double()
    clip = torch.stack([d * min(1.0, 2.0 / float(d.norm())) for d in moved])
    difference = losses(p @ clip) - losses(p @ moved)
    row = one(frame, "upload_loss", upload="clip")
    assert row.value == pytest.approx(difference.mean(), rel=1e-4)
    assert row.stderr == pytest.approx(difference.std(ddof=1) / 120**0.5, rel=1e-3)
    assert row.slice == "train" and row.n_examples == 120
    errors = [
        one(frame, "upload_error", upload="clip", layer=None, client=k).value for k in (0, 1, 2)
    ]
    assert errors == pytest.approx([1 - 2.0 / float(d.norm()) for d in moved], rel=1e-6)
    mean = one(frame, "upload_error", upload="clip", layer=None, scope="global")
    assert mean.value == pytest.approx(np.mean(errors))
    assert upload_if_any(frame) is not None


def test_uploads_are_drawn_alike_again_and_change_nothing_else(world):
    first, again = (drift(world, **PLAIN, upload=True) for _ in range(2))
    pd.testing.assert_frame_equal(first, again)
    without = drift(world, **PLAIN)
    assert "upload_error" not in set(without["metric"]) and upload_if_any(without) is None
    rest = first[~first["metric"].str.startswith("upload")]
    values = (table["value"].astype(float) for table in (rest, without))
    assert np.allclose(*values, equal_nan=True)
    assert first["clip"].dropna().unique() == pytest.approx(
        [float(world.last().moved.double().norm(dim=1).median())]
    )


@pytest.mark.parametrize(
    ("updates", "words"),
    [
        (3, "jackknife over 3 clients"),
        (2, "without interval (it needs three clients)"),
        (1, "none, as one client has no spread"),
    ],
)
def test_the_summary_says_how_certain_the_ratio_is(updates, words):
    w, moves = torch.zeros(20), 3 * torch.eye(20)[:updates]
    parts = [np.arange(0, 60), np.arange(60, 90), np.arange(90, 120)]
    frame = drift(history(linear(), separable(), parts, stored(w, list(moves))), **PLAIN)
    texts = [item.text for item in summary(frame, {"rho": ()}) if hasattr(item, "text")]
    assert sum(words in text and "of round 1" in text for text in texts) == 1


def test_clients_without_weight_do_not_count():
    torch.manual_seed(0)
    d = torch.randn(5, 7, dtype=torch.float64) + 1
    p = np.array([0.5, 0.3, 0.2, 0.0, 0.0])
    three = agreement.rows_of({None: squares(d[:3])}, p[:3])
    five = agreement.rows_of({None: squares(d)}, p)
    for a, b in zip(three, five, strict=True):
        assert a["n_clients"] == b["n_clients"] == 3
        assert b["value"] == pytest.approx(a["value"])
    ends = [[row[k] for k in ("low", "high")] for row in (three[0], five[0])]
    assert ends[1] == pytest.approx(ends[0])
    (ratio, _) = agreement.rows_of({None: squares(d)}, np.array([1.0, 0, 0, 0, 0]))
    assert ratio["note"] == "one client has no spread" and ratio["n_clients"] == 1
