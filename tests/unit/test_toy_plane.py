"""The plane toy: closed forms against the fields they solve, and the training core's paths against both."""

import math

import numpy as np
import pytest
import torch
from helpers import close
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fldiag.errors import FldiagError
from fldiag.results.table import check
from fldiag_papers.toys import plane, plane_picture

W_G, W_L = plane.W_G, plane.W_L
D = math.hypot(2.5, 2.4)
coordinate = st.floats(-10, 10)
points = st.tuples(coordinate, coordinate).map(np.array)
curvature = st.floats(0.05, 20)


def distance(w_g, w_l):
    return math.hypot(w_l[0] - w_g[0], w_l[1] - w_g[1])


def fedsol_field(w, a, rho, w_g=W_G, w_l=W_L):
    """Gradient of the local loss at w + rho u/||u||: written out by hand, nothing of fldiag."""
    u = w - np.array(w_g)
    length = np.linalg.norm(u)
    e = rho * u / length if length > 0 else 0 * u
    return np.array([a, 1.0]) * (w + e - np.array(w_l))


def fedprox_field(w, a, beta, w_g=W_G, w_l=W_L):
    return np.array([a, 1.0]) * (w - np.array(w_l)) + beta * (w - np.array(w_g))


def pick(frame, metric, method, **where):
    rows = frame[(frame["metric"] == metric) & (frame["method"] == method)]
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return rows


@pytest.fixture(scope="module")
def default():
    return plane.run()


# Closed forms


@pytest.mark.parametrize(
    ("rho", "where"), [(0.5, (2.639306, 1.653734)), (1.5, (1.917919, 0.961202))]
)
def test_fedsol_numbers(rho, where):
    np.testing.assert_allclose(plane.fedsol_end(W_G, W_L, rho), where, atol=5e-7)


def test_fedprox_numbers():
    np.testing.assert_allclose(
        plane.fedprox_end(W_G, W_L, 5.0, 1.0), (0.5 + 5 / 6 * 2.5, 0.8), atol=1e-12
    )
    np.testing.assert_allclose(
        plane.fedprox_end(W_G, W_L, 0.2, 2.0), (0.5 + 2.5 / 11, -0.4 + 0.8), atol=1e-12
    )


@given(points, points, st.floats(0, 0.95), curvature)
def test_fedsol_end_is_rest_for_every_curvature(w_g, w_l, share, a):
    far = distance(w_g, w_l)
    assume(far > 0.01)
    rho = share * far
    end = plane.fedsol_end(w_g, w_l, rho)
    assert np.linalg.norm(fedsol_field(end, a, rho, w_g, w_l)) <= 1e-9 * max(a, 1.0) * 10
    # In polar coordinates around w_g: same angle, radius less by rho.
    assert np.linalg.norm(end - w_g) == pytest.approx(far - rho, rel=1e-9)
    np.testing.assert_allclose(end, np.array(w_l) - rho * (np.array(w_l) - w_g) / far, atol=1e-9)


@given(points, points, st.floats(0, 10), curvature)
def test_fedprox_end_is_rest_and_on_the_line_only_without_curvature(w_g, w_l, beta, a):
    assume(distance(w_g, w_l) > 0.01)
    end = plane.fedprox_end(w_g, w_l, a, beta)
    np.testing.assert_allclose(
        fedprox_field(end, a, beta, w_g, w_l), 0, atol=1e-11 * (max(a, 1) + beta)
    )
    (ux, uy), (dx, dy) = end - w_g, np.array(w_l) - w_g
    # u x d = d_x d_y (a/(a + beta) - 1/(1 + beta)): towards the x axis for a > 1.
    assert ux * dy - uy * dx == pytest.approx(
        dx * dy * beta * (a - 1) / ((a + beta) * (1 + beta)), abs=1e-11
    )
    flat = plane.fedprox_end(w_g, w_l, 1.0, beta) - w_g
    assert flat[0] * dy - flat[1] * dx == pytest.approx(0, abs=1e-11)


# Stability


def jacobian(w, a, rho, w_g, w_l, h=1e-6):
    columns = [
        (fedsol_field(w + h * e, a, rho, w_g, w_l) - fedsol_field(w - h * e, a, rho, w_g, w_l))
        / (2 * h)
        for e in np.eye(2)
    ]
    return np.stack(columns, 1)


@given(st.floats(0, 2 * math.pi), st.floats(0.05, 0.9), st.floats(0.1, 10))
def test_stability_bound_is_safe(angle, share, a):
    w_g, w_l = np.zeros(2), 3 * np.array([math.cos(angle), math.sin(angle)])
    rho = 3 * share
    eigenvalues = np.linalg.eigvals(jacobian(plane.fedsol_end(w_g, w_l, rho), a, rho, w_g, w_l))
    assert np.abs(eigenvalues.imag).max() < 1e-4
    assert eigenvalues.real.min() > 0
    assert eigenvalues.real.max() <= 2 / plane.stability_bound(a, rho, 3 - rho) * (1 + 1e-5)


@pytest.mark.parametrize(("a", "w_l"), [(5.0, (0.0, 3.0)), (0.2, (3.0, 0.0)), (1.0, (2.0, 2.0))])
def test_stability_bound_is_reached(a, w_l):
    rho, w_g, w_l = 1.0, np.zeros(2), np.array(w_l)
    eigenvalues = np.linalg.eigvals(
        jacobian(plane.fedsol_end(w_g, w_l, rho), a, rho, w_g, w_l)
    ).real
    bound = plane.stability_bound(a, rho, distance(w_g, w_l) - rho)
    assert bound == pytest.approx(2 / eigenvalues.max(), rel=1e-6)


@pytest.mark.slow
def test_training_rests_below_the_bound_and_not_above():
    # d almost on the axis of smaller curvature, where the bound is sharp.
    w_g, w_l = np.zeros(2), np.array([0.05, 3.0])
    method = {"name": "fedsol", "rho": 1.0, "loss": "l2", "strength": "fixed", "part": "full"}
    bound = plane.stability_bound(5.0, 1.0, distance(w_g, w_l) - 1.0)
    for factor, rests in ((0.95, True), (1.05, False)):
        ((path,), _) = plane.simulate(
            method, (5.0,), lr=factor * bound, steps=600, w_g=w_g, w_l=w_l
        )
        gradient = np.linalg.norm(path[-1] - path[-2]) / (factor * bound)
        assert (gradient <= plane.CONVERGED * distance(w_g, w_l)) == rests


# The training core


@pytest.mark.parametrize("a", [(0.2,), (0.2, 1.0, 5.0)])
def test_data_is_the_quadratic(a):
    dataset, parts = plane.clients(a)
    for value, part in zip(a, parts, strict=True):
        x, y = dataset.train_x[part].double(), dataset.train_y[part]
        torch.testing.assert_close(
            x.T @ x / len(x),
            torch.diag(torch.tensor([value, 1.0], dtype=torch.float64)),
            rtol=2e-7,
            atol=0,
        )
        assert not y.any()


@pytest.mark.parametrize("method", ["fedsol", "fedprox"])
def test_paths_are_gradient_descent(method):
    a, lr, steps = (0.2, 1.0, 5.0), 0.05, 40
    spec = (
        {"name": "fedsol", "rho": 1.5, "loss": "l2", "strength": "fixed", "part": "full"}
        if method == "fedsol"
        else {"name": "fedprox", "mu": 0.7}
    )
    paths, mean = plane.simulate(spec, a, lr=lr, steps=steps)
    assert paths.shape == (3, steps + 1, 2)
    for value, path in zip(a, paths, strict=True):
        w = np.array(W_G)
        for t in range(steps + 1):
            np.testing.assert_allclose(path[t], w, atol=5e-7)
            w = w - lr * (
                fedsol_field(w, value, 1.5) if method == "fedsol" else fedprox_field(w, value, 0.7)
            )
    close(mean, paths[:, -1].mean(0), terms=3)


def test_first_step_is_a_fedavg_step():
    step = np.array(W_G) + 0.05 * np.array([2.0, 1.0]) * (np.array(W_L) - W_G)
    for spec in (
        {"name": "fedavg"},
        {"name": "fedsol", "rho": 1.5, "loss": "l2", "strength": "fixed", "part": "full"},
    ):
        paths, _ = plane.simulate(spec, (2.0,), lr=0.05, steps=1)
        np.testing.assert_allclose(paths[0, 1], step, atol=1e-6)


def test_more_clients_than_a_stack():
    a = np.linspace(0.5, 2.0, 19).tolist()
    paths, mean = plane.simulate({"name": "fedprox", "mu": 1.0}, a, lr=0.3, steps=120)
    for value, path in zip(a, paths, strict=True):
        np.testing.assert_allclose(path[-1], plane.fedprox_end(W_G, W_L, value, 1.0), atol=1e-6)
    close(mean, paths[:, -1].mean(0), terms=19)


@pytest.mark.parametrize(
    ("rho", "where"), [(0.5, (2.639306, 1.653734)), (1.5, (1.917919, 0.961202))]
)
@pytest.mark.slow
def test_fedsol_rests_at_the_numbers(rho, where):
    frame = plane.run(rho=rho, a=(0.2, 1.0, 5.0))
    ends = pick(frame, "end_point", "fedsol")
    np.testing.assert_allclose(ends[["x", "y"]].astype(float), [where] * 3, atol=1e-6)
    assert ends["converged"].all()


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.floats(0, 0.7), st.lists(st.floats(0.4, 4), min_size=1, max_size=3), st.floats(0, 2))
def test_training_rests_at_the_closed_forms(share, a, beta):
    frame = plane.run(rho=share * D, beta=beta, a=a)
    assert frame.loc[frame["metric"] == "end_point", "converged"].all()
    assert frame.loc[frame["metric"].isin(["distance", "aggregate_distance"]), "value"].max() < 1e-6
    assert pick(frame, "angle", "fedsol")["value"].max() < 1e-3
    assert pick(frame, "aggregate_angle", "fedsol")["value"].max() < 1e-3


# The table


def test_table(default):
    check(default)
    steps = default["index"].max()
    for method in ("fedsol", "fedprox"):
        for client, a in enumerate(plane.CURVATURES):
            path = pick(default, "trajectory", method, client=client)
            assert list(path["index"]) == list(range(steps + 1))
            assert set(path["a"]) == {a}
            np.testing.assert_allclose(path[["x", "y"]].iloc[0].astype(float), W_G, atol=1e-15)
            end = pick(default, "end_point", method, client=client).iloc[0]
            assert (end["x"], end["y"]) == tuple(path[["x", "y"]].iloc[-1])
            assert end["value"] == pytest.approx(distance(W_G, (end["x"], end["y"])), rel=1e-12)
            assert pick(default, "distance", method, client=client)["value"].item() < 1e-6
    assert set(default.loc[default["metric"].str.contains("closed_form"), "estimator"]) == {"exact"}
    assert set(default.loc[~default["metric"].str.contains("closed_form"), "estimator"]) == {
        "simulated"
    }
    assert not default["metric"].eq("hover_radius").any()


def test_fedprox_leaves_the_line_and_fedsol_does_not(default):
    for a in plane.CURVATURES:
        assert pick(default, "angle", "fedsol", a=a)["value"].item() < 1e-5
        u = a / (a + 1) * 2.5, 0.5 * 2.4
        turned = math.degrees(abs(math.atan2(2.4, 2.5) - math.atan2(u[1], u[0])))
        assert pick(default, "angle", "fedprox", a=a)["value"].item() == pytest.approx(
            turned, abs=1e-5
        )


def test_aggregate():
    a, beta = (0.5, 2.0, 5.0), 1.0
    frame = plane.run(a=a, beta=beta)
    sol, prox = (pick(frame, "aggregate", m).iloc[0] for m in ("fedsol", "fedprox"))
    np.testing.assert_allclose((sol["x"], sol["y"]), (1.917919, 0.961202), atol=1e-6)
    share = np.mean([v / (v + beta) for v in a])
    np.testing.assert_allclose((prox["x"], prox["y"]), (0.5 + share * 2.5, 0.8), atol=1e-6)
    assert pick(frame, "aggregate_angle", "fedsol")["value"].item() < 1e-5
    assert pick(frame, "aggregate_angle", "fedprox")["value"].item() > 2
    assert sol["moment"] == "aggregated"


@pytest.mark.slow
def test_symmetric_curvatures_bring_fedprox_back_in_the_mean(default):
    # 1/(1 + 1/a) + 1/(1 + a) = 1, so with beta = 1 pairs a, 1/a hide each other's bias.
    hidden = plane.run(a=(0.2, 1.0, 5.0))
    assert pick(hidden, "aggregate_angle", "fedprox")["value"].item() < 1e-4
    assert pick(default, "aggregate_angle", "fedprox")["value"].item() > 1, (
        "the default shows what aggregation does"
    )
    assert pick(default, "aggregate_angle", "fedsol")["value"].item() < 1e-3


@pytest.mark.parametrize("rho", [D, 5.0])
def test_hovering(rho):
    frame = plane.run(rho=rho, a=(0.5, 5.0))
    assert not pick(frame, "end_point", "fedsol")["converged"].any()
    for absent in ("closed_form", "distance", "angle", "aggregate_closed_form"):
        assert pick(frame, absent, "fedsol").empty
        assert not pick(frame, absent, "fedprox").empty
    for client in (0, 1):
        path = pick(frame, "trajectory", "fedsol", client=client)["value"]
        hover = pick(frame, "hover_radius", "fedsol", client=client)
        close(hover["value"].item(), path.iloc[-(len(path) // 4) :].max(), terms=2)
        assert 0 < hover["value"].item() < D / 2
        assert not hover["converged"].item()
    assert pick(frame, "end_point", "fedprox")["converged"].all()


def test_geometry_and_picture(default):
    found = plane.geometry()
    assert found["distance"] == pytest.approx(D)
    np.testing.assert_allclose(found["equilibrium"], (1.917919, 0.961202), atol=5e-7)
    assert plane.geometry(rho=5.0)["equilibrium"] is None
    assert len(plane_picture.draw(default, found).axes) == 2


def test_repeats_and_leaves_the_global_generator_alone():
    state = torch.random.get_rng_state()
    one, two = (plane.run(a=(0.5, 2.0)) for _ in range(2))
    assert one.equals(two)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"a": (1.0, 0.0)}, "curvatures"),
        ({"a": (-1.0,)}, "curvatures"),
        ({"a": ()}, "curvatures"),
        ({"a": (math.nan,)}, "curvatures"),
        ({"a": (1e9,)}, "1e\\+06"),
        ({"rho": -0.1}, r"rho = -0\.1"),
        ({"rho": math.inf}, "rho"),
        ({"beta": -1.0}, r"beta = -1\.0"),
        ({"a": (1e-5, 1e4)}, "steps"),
        ({"rho": D - 1e-9}, "steps"),
    ],
)
def test_wrong_values_are_refused(wrong, message):
    with pytest.raises(FldiagError, match=message) as caught:
        plane.run(**wrong)
    assert caught.value.usage


def test_diverging_paths_are_refused():
    with pytest.raises(FldiagError, match="fedprox diverged"):
        plane.simulate({"name": "fedprox", "mu": 1.0}, (5.0,), lr=500.0, steps=300)
