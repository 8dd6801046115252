"""Cross-client matching against closed forms and dense Hessians, its invariances, and what it leaves out."""

from itertools import combinations, pairwise

import helpers
import numpy as np
import pandas as pd
import pytest
import torch
from histories import history, moved, one, stored, tanh_net
from matplotlib.colors import to_rgba
from torch import nn

import fldiag
from fldiag.data import Dataset
from fldiag.diagnostics import spectrum
from fldiag.diagnostics.matching import picture
from fldiag.diagnostics.matching.comparison import _errors, norms_and_directions
from fldiag.errors import FldiagError
from fldiag.plotting import layers
from fldiag.results.select import only

SIZES = (20, 13, 17)
#: Krylov spaces of the whole dimension: also what cannot be had in closed form comes out to rounding.
EXACT = {"max_products": 200}


def relu_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def federation(net=None, clients=None, ids=None, sizes=SIZES, aggregated=None, **options):
    data, parts = helpers.classification(sizes)
    net = net or relu_net()
    w, others = moved(net)
    item = stored(w, others if clients is None else clients, aggregated, ids=ids)
    return (
        history(net, data, parts, item, **{"dtype": torch.float64, **options}),
        net,
        data,
        parts,
        item,
    )


def ask(made, **options):
    return fldiag.diagnose(made, "matching", **options)


def dense(net, w, x, y):
    names, shapes = zip(*((n, p.shape) for n, p in net.named_parameters()), strict=True)

    def loss(v):
        pieces = v.split([s.numel() for s in shapes])
        views = {n: p.view(s) for n, p, s in zip(names, pieces, shapes, strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(net, views, (x.double(),)), y)

    return torch.func.hessian(loss)(w)


def pair(frame, metric, a, b, mode, data):
    return one(frame, metric, scope="pair", client=a, client_b=b, diag_mode=mode, data=data).value


# --- closed forms ----------------------------------------------------------------------------------------------


def regression(*inputs, out=2, weight=0.3, **options):
    """Least squares without bias: H_k = X_k'X_k / n_k for each of ``out`` outputs, whatever the weights."""
    x = torch.cat([torch.as_tensor(i) for i in inputs]).float()
    ends = np.cumsum([0, *map(len, inputs)])
    parts = [np.arange(a, b) for a, b in pairwise(ends)]
    data = Dataset("squares", x, torch.zeros(len(x), out), x[:3], torch.zeros(3, out), out)
    net = nn.Sequential(nn.Linear(x.shape[1], out, bias=False))
    w = torch.full((x.shape[1] * out,), weight, dtype=torch.float64)
    return history(
        net,
        data,
        parts,
        stored(w, [w + k for k in range(len(inputs))]),
        dtype=torch.float64,
        **options,
    )


@pytest.fixture
def inputs():
    rng = np.random.default_rng(3)
    return rng.normal(size=(9, 4)).astype(np.float32), rng.normal(size=(7, 4)).astype(np.float32)


def test_known_hessians_of_least_squares(inputs):
    frame = ask(regression(*inputs), k=2)
    blocks = [i.astype(float).T @ i / len(i) for i in inputs]
    for k, block in enumerate(blocks):
        about = {"client": k, "moment": "trained", "slice": f"client:{k}/train"}
        top = np.linalg.eigvalsh(block)[-1]
        found = one(frame, "eigenvalue", index=1, **about)
        assert (
            found.value == pytest.approx(top, rel=1e-6)
            and found.residual < 1e-3
            and found.converged
        )
        assert one(frame, "eigenvalue", index=2, **about).value == pytest.approx(
            top, rel=1e-6
        )  # one for each output
        assert one(frame, "trace", **about).value == pytest.approx(2 * np.trace(block))
        assert one(frame, "diagonal_norm", **about).value == pytest.approx(
            np.sqrt(2) * np.linalg.norm(np.diag(block))
        )
    a, b = (np.tile(np.diag(block), 2) for block in blocks)
    assert pair(frame, "H_N", 0, 1, "diag", "client") == pytest.approx(
        (np.linalg.norm(a) - np.linalg.norm(b)) ** 2
    )
    assert pair(frame, "H_D", 0, 1, "diag", "client") == pytest.approx(
        a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    )
    assert pair(frame, "H_N", 0, 1, "tensor_trace", "client") == pytest.approx(
        (a.sum() - b.sum()) ** 2
    )
    # on the same data these Hessians do not depend on the weights
    assert pair(frame, "H_N", 0, 1, "diag", "global") == pytest.approx(0, abs=1e-20)
    assert pair(frame, "H_D", 0, 1, "diag", "global") == pytest.approx(1)


def test_T_HN_2_scaling_a_hessian_leaves_its_directions(inputs):
    frame = ask(regression(inputs[0], np.sqrt(3) * inputs[0], inputs[1]), on="client", k=2)
    size = one(frame, "diagonal_norm", client=0, data="client").value
    assert pair(frame, "H_D", 0, 1, "diag", "client") == pytest.approx(1)
    assert pair(frame, "H_N", 0, 1, "diag", "client") == pytest.approx(
        (3 * size - size) ** 2, rel=1e-5
    )
    for mode in ("diag", "tensor_trace"):
        assert pair(frame, "H_D", 0, 2, mode, "client") == pytest.approx(
            pair(frame, "H_D", 1, 2, mode, "client"), rel=1e-6
        )
    assert one(frame, "eigenspace_overlap", client=0, client_b=1).value == pytest.approx(1)


def test_a_client_without_curvature_has_no_direction(inputs):
    frame = ask(regression(inputs[0], inputs[1], np.zeros((5, 4), np.float32)), on="client", k=1)
    hit = one(frame, "H_D", scope="pair", client=0, client_b=2, diag_mode="diag")
    assert pd.isna(hit.value) and hit.masked
    known = pair(frame, "H_D", 0, 1, "diag", "client")
    mean = {"scope": "global", "diag_mode": "diag"}
    assert one(frame, "H_D", self_pairs=False, **mean).value == pytest.approx(known)
    assert one(frame, "H_D", self_pairs=True, **mean).value == pytest.approx((2 * known + 2) / 4)
    norms = [one(frame, "diagonal_norm", client=k, data="client").value for k in (0, 1, 2)]
    assert norms[2] == 0 and pair(frame, "H_N", 1, 2, "diag", "client") == pytest.approx(
        norms[1] ** 2
    )


# --- identities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", [relu_net, tanh_net], ids=["exact", "estimated"])
def test_T_HN_1_identical_clients(net):
    """Equal weights and data: also where probes estimate the diagonals, for all clients have the same ones."""
    w, _ = moved(net())
    made, *_ = federation(net(), [w, w, w], sizes=(12, 12, 12))
    made.parts[:] = [made.parts[0]] * 3
    frame = ask(
        history(
            made.network.module, made.dataset, made.parts, stored(w, [w, w, w]), dtype=torch.float64
        ),
        max_products=12,
        k=2,
    )
    for mode in ("diag", "tensor_trace"):
        for data in ("client", "global"):
            for a, b in combinations(range(3), 2):
                assert pair(frame, "H_N", a, b, mode, data) == 0
                assert pair(frame, "H_D", a, b, mode, data) == pytest.approx(1, abs=1e-12)
    assert one(frame, "eigenspace_overlap", scope="global").value == pytest.approx(1, abs=1e-9)
    estimator = set(frame[frame.metric == "H_N"].estimator)
    assert estimator == ({"exact"} if net is relu_net else {"hutchinson"})


def test_means_with_and_without_self_pairs():
    frame = ask(federation()[0], k=0)
    count = len(SIZES)
    for mode in ("diag", "tensor_trace"):
        for data in ("client", "global"):
            mean = {"scope": "global", "diag_mode": mode, "data": data}
            for metric, self_value in (("H_N", 0), ("H_D", 1)):
                values = [
                    pair(frame, metric, a, b, mode, data) for a, b in combinations(range(count), 2)
                ]
                alone, both = (
                    one(frame, metric, self_pairs=s, **mean).value for s in (False, True)
                )
                assert alone == pytest.approx(np.mean(values)) and np.std(values) > 0
                assert both == pytest.approx(self_value / count + (count - 1) / count * alone)
    assert not frame.metric.isin(["eigenvalue", "eigenspace_overlap", "curvature"]).any()


@pytest.mark.parametrize("net", [relu_net, tanh_net])
@pytest.mark.parametrize("aggregated", [None, 0])
@pytest.mark.slow
def test_dense_hessians(net, aggregated):
    _, w = moved(net())
    made, module, data, parts, item = federation(
        net(), aggregated=None if aggregated is None else w[aggregated] * 0.9
    )
    frame = ask(made, k=3, tol=1e-8, **EXACT)
    where = {
        "client": [(data.train_x[p], data.train_y[p]) for p in parts],
        "global": [(data.train_x, data.train_y)] * 3,
    }
    sizes = [p.numel() for p in module.parameters()]
    spaces = []
    for place, slices in where.items():
        hessians = [dense(module, v, *some) for v, some in zip(item.clients, slices, strict=True)]
        diagonals = [h.diagonal() for h in hessians]
        traces = [torch.stack([p.sum() for p in d.split(sizes)]) for d in diagonals]
        for mode, vectors in (("diag", diagonals), ("tensor_trace", traces)):
            for a, b in combinations(range(3), 2):
                u, v = vectors[a], vectors[b]
                assert pair(frame, "H_N", a, b, mode, place) == pytest.approx(
                    float((u.norm() - v.norm()) ** 2), rel=1e-6, abs=1e-9
                )
                assert pair(frame, "H_D", a, b, mode, place) == pytest.approx(
                    float(u @ v / u.norm() / v.norm()), rel=1e-6
                )
        for k, h in enumerate(hessians):
            assert one(frame, "trace", client=k, data=place).value == pytest.approx(
                float(h.trace()), rel=1e-6
            )
            if place == "client":
                values, vectors = torch.linalg.eigh(h)
                found = frame[
                    (frame.metric == "eigenvalue")
                    & (frame.client == k)
                    & (frame.moment == "trained")
                ]
                assert found.value.tolist() == pytest.approx(values.flip(0)[:3].tolist(), rel=1e-6)
                spaces.append(vectors.flip(1)[:, :3])
    whole = dense(module, item.aggregated, data.train_x, data.train_y)
    values, vectors = torch.linalg.eigh(whole)
    top = vectors.flip(1)[:, :3]
    for a, b in combinations(range(3), 2):
        expected = float((spaces[a].T @ spaces[b]).square().sum()) / 3
        assert one(frame, "eigenspace_overlap", client=a, client_b=b).value == pytest.approx(
            expected, rel=1e-4
        )
    for k, space in enumerate(spaces):
        expected = float((space.T @ top).square().sum()) / 3
        assert one(frame, "global_overlap", client=k).value == pytest.approx(expected, rel=1e-4)
    about = {"moment": "aggregated", "scope": "global"}
    assert one(frame, "trace", **about).value == pytest.approx(float(whole.trace()), rel=1e-6)
    for i in (1, 2, 3):
        assert one(frame, "eigenvalue", index=i, **about).value == pytest.approx(
            float(values[-i]), rel=1e-6
        )


def test_the_order_of_the_clients_does_not_matter():
    w, others = moved(relu_net())
    a = ask(federation(clients=others, ids=[0, 1, 2], aggregated=w)[0], k=2)
    b = ask(
        federation(clients=[others[2], others[0], others[1]], ids=[2, 0, 1], aggregated=w)[0], k=2
    )
    for metric in ("H_N", "H_D"):
        for mode in ("diag", "tensor_trace"):
            for data in ("client", "global"):
                assert pair(a, metric, 0, 2, mode, data) == pytest.approx(
                    pair(b, metric, 2, 0, mode, data), rel=1e-9
                )
                mean = {"scope": "global", "diag_mode": mode, "data": data, "self_pairs": True}
                assert one(a, metric, **mean).value == pytest.approx(
                    one(b, metric, **mean).value, rel=1e-9
                )
    for metric, where in (("eigenspace_overlap", {}), ("global_overlap", {})):
        assert one(a, metric, scope="global", **where).value == pytest.approx(
            one(b, metric, scope="global").value, rel=1e-6
        )


# --- estimates -------------------------------------------------------------------------------------------------


def test_standard_errors_are_the_scatter_of_noisy_vectors():
    rng = np.random.default_rng(0)
    values, errors = (
        torch.tensor([[3.0, 1, 0.5], [1, 2, 0.2]], dtype=torch.float64),
        torch.tensor([[0.01, 0.02, 0.01], [0.03, 0, 0.02]]),
    )
    n, d = _errors(values, errors, norms_and_directions(values)[1])
    samples = [
        norms_and_directions(values + errors * torch.from_numpy(rng.normal(size=(2, 3))))
        for _ in range(3000)
    ]
    assert np.std([float(s[0][0, 1]) for s in samples]) == pytest.approx(float(n[0, 1]), rel=0.08)
    assert np.std([float(s[1][0, 1]) for s in samples]) == pytest.approx(float(d[0, 1]), rel=0.08)


@pytest.mark.slow
def test_estimates_say_so_and_lie_within_their_errors(monkeypatch):
    exact = ask(federation(tanh_net())[0], k=0, **EXACT)
    monkeypatch.setattr("fldiag.problem.diagonal.STEPS", 1)
    rough = ask(federation(tanh_net())[0], k=0, max_products=30, rtol=1e-3)
    for metric in ("H_N", "H_D"):
        found = rough[
            (rough.metric == metric) & (rough.scope == "pair") & (rough.diag_mode == "tensor_trace")
        ]
        true = exact[
            (exact.metric == metric) & (exact.scope == "pair") & (exact.diag_mode == "tensor_trace")
        ]
        gap = np.abs(found.value.to_numpy(float) - true.value.to_numpy(float))
        assert (gap > 0).all() and (gap < 5 * found.stderr.to_numpy(float)).all()
        assert not found.converged.any() and set(found.estimator) == {"hutchinson"}
    assert (rough[rough.metric == "diagonal_error"].value > 0.05).all() and not rough[
        rough.metric == "diagonal_norm"
    ].converged.any()


# --- which clients, rounds and data ----------------------------------------------------------------------------


def test_only_the_data_asked_for():
    frame = ask(federation()[0], on="global", k=1)
    assert set(frame.data.dropna()) == {"global"} and set(frame["slice"]) == {"train"}
    assert (frame[frame.metric == "trace"].n_examples == sum(SIZES)).all()


def test_last_round_or_every_round():
    data, parts = helpers.classification(SIZES)
    w, others = moved(relu_net())
    rounds = [stored(w, others, round=1), stored(w, others[:2], round=2, ids=[0, 2])]
    made = history(relu_net(), data, parts, *rounds, dtype=torch.float64)
    assert set(ask(made, k=1)["round"]) == {2}
    frame = ask(made, k=1, every_round=True)
    assert [len(only(frame, round=r, metric="H_N", scope="pair")) for r in (1, 2)] == [12, 4]


def test_no_client_weights_is_one_complaint_with_the_remedy():
    data, parts = helpers.classification(SIZES)
    w, others = moved(relu_net())
    bare = stored(w, others)
    bare = bare.__class__(1, w)
    with pytest.raises(
        FldiagError, match=r"no round with client weights; train with .*checkpoint\.clients=sampled"
    ):
        ask(history(relu_net(), data, parts, bare, dtype=torch.float64))


def test_one_client_has_no_pairs():
    _w, others = moved(relu_net())
    frame = ask(federation(clients=others[:1], ids=[1])[0], k=2)
    notes = frame[frame.metric == "missing"].note.tolist()
    assert notes == [
        f"only client 1 on {d} data: there are no pairs to compare" for d in ("client", "global")
    ]
    assert only(frame, scope="pair").empty and one(frame, "eigenvalue", client=1, index=1).value > 0
    for metric, value in (("H_N", 0), ("H_D", 1)):
        mean = {"diag_mode": "diag", "data": "client"}
        assert (
            one(frame, metric, self_pairs=False, **mean).masked
            and one(frame, metric, self_pairs=True, **mean).value == value
        )
    assert picture.draw(frame) is None and picture.curvature(frame).axes


@pytest.mark.parametrize("what", [float("nan"), 1e300])
def test_a_client_whose_loss_is_not_a_number_is_left_out_and_named_once(what):
    w, others = moved(relu_net())
    frame = ask(
        federation(clients=[others[0], torch.full_like(w, what), others[2]], aggregated=w)[0], k=1
    )
    notes = frame[frame.metric == "missing"]
    assert notes.client.tolist() == [1] and "client 1 is left out: " in notes.note.iloc[0]
    found = only(frame, scope="pair", metric="H_N")
    assert set(zip(found.client, found.client_b, strict=True)) == {(0, 2)}
    assert only(frame, client=1, moment="trained").empty


def test_no_usable_client_raises_and_a_broken_global_model_is_named():
    w, others = moved(relu_net())
    bad = torch.full_like(w, float("nan"))
    with pytest.raises(FldiagError, match="not finite"):
        ask(federation(clients=[bad, bad, bad], aggregated=w)[0])
    frame = ask(federation(clients=others, aggregated=bad)[0], k=2)
    assert "aggregated model" in frame[frame.metric == "missing"].note.iloc[0]
    assert (
        only(frame, moment="aggregated").empty
        and not frame.metric.isin(["curvature", "global_overlap"]).any()
    )
    assert (frame.metric == "eigenspace_overlap").any()


def test_a_client_without_examples_has_no_hessian_of_its_own():
    frame = ask(federation(sizes=(20, 0, 17))[0], k=1)
    assert frame[frame.metric == "missing"].client.tolist() == [1]
    assert only(frame, metric="trace", data="client").client.tolist() == [0, 2]
    assert len(only(frame, metric="H_N", scope="pair", data="client")) == 2  # for each diag mode
    assert len(only(frame, metric="H_N", scope="pair", data="global")) == 6


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"on": "test"}, "on = 'test'"),
        ({"k": -1}, "greater than or equal to 0"),
        ({"rtol": 2.0}, "less than 1"),
    ],
)
def test_wrong_options(option, text):
    with pytest.raises(FldiagError, match=text):
        ask(federation()[0], **option)


# --- the picture -----------------------------------------------------------------------------------------------


def test_the_picture_shows_the_tables_numbers():
    frame = ask(federation()[0], k=2)
    fig = picture.draw(frame)
    maps = [ax for ax in fig.axes if ax.images]
    assert len(maps) == 4
    cells = maps[1].images[0].get_array()
    assert cells[0, 2] == cells[2, 0] == pytest.approx(
        pair(frame, "H_D", 0, 2, "diag", "client")
    ) and np.isnan(cells.filled(np.nan)[0, 0])
    cells = maps[2].images[0].get_array()
    assert cells[0, 1] == pytest.approx(pair(frame, "H_N", 0, 1, "tensor_trace", "global"))
    mean = one(
        frame, "H_D", scope="global", diag_mode="diag", data="client", self_pairs=False
    ).value
    assert f"{mean:.3g}" in maps[1].get_title() and "own data" in maps[1].get_title()
    bars = [ax for ax in picture.curvature(frame).axes if ax.patches and not ax.images]
    heights = [[p.get_height() for p in ax.patches] for ax in bars]
    tops = frame[(frame.metric == "eigenvalue") & (frame["index"] == 1)].value.tolist()
    assert heights[0] == pytest.approx(tops)
    assert heights[1] == pytest.approx(
        frame[(frame.metric == "trace") & (frame.data != "global")].value.tolist()
    )


def test_what_has_not_converged_is_hollow():
    frame = ask(federation()[0], k=2)
    frame.loc[(frame.metric == "eigenvalue") & (frame.client == 1), "converged"] = False
    fig = picture.curvature(frame)
    (ax,) = [ax for ax in fig.axes if "lambda_1$\nclients" in ax.get_title()]
    assert [p.get_facecolor() == to_rgba("white") for p in ax.patches] == [
        False,
        True,
        False,
        False,
    ]
    assert "hollow" in fig.get_suptitle()


def test_the_picture_of_another_table_is_refused():
    frame = ask(federation()[0], k=0)
    with pytest.raises(FldiagError, match="no rows of metric 'H_N'"):
        picture.draw(frame[frame.metric == "trace"])


# --- the pictures beside the spectrum --------------------------------------------------------------------------


def spectra(**eigen):
    """Rows as of ``spectrum``, ``trace`` and ``density``: the whole first, then layers."""
    rows = []
    for run, by_layer in eigen.items():
        for layer, found in by_layer.items():
            rows += [
                {
                    "run": run,
                    "metric": "eigenvalue",
                    "index": i,
                    "layer": layer or None,
                    "value": v,
                    "residual": 0.1,
                    "converged": True,
                }
                for i, v in enumerate(found, start=1)
            ]
            rows.append(
                {
                    "run": run,
                    "metric": "trace",
                    "layer": layer or None,
                    "value": sum(found),
                    "stderr": None,
                }
            )
    return pd.DataFrame(rows)


def test_layers_are_apart_from_the_spectrum():
    frame = spectra(A={"": [9.0, 5], "conv": [6.0], "fc": [4.0]}, B={"": [8.0, 2], "fc": [3.0]})
    points = [
        v
        for line in spectrum.draw(frame).axes[0].lines
        if line.get_label() in set(frame["run"])
        for v in line.get_ydata()
    ]
    assert sorted(points) == [2, 5, 8, 9]
    tops, traces = layers.draw(frame).axes
    assert sorted(p.get_width() for p in tops.patches) == [3, 4, 6] and [
        t.get_text() for t in tops.get_yticklabels()
    ] == ["conv", "fc"]
    assert sorted(p.get_width() for p in traces.patches) == [3, 4, 6]
    blocks = spectra(
        A={"conv.*": [6.0, 3.0]}
    )  # a block that was asked for is the spectrum, not a layer of it
    assert layers.draw(blocks[blocks.metric == "eigenvalue"]) is None
