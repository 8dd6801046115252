"""The toys: closed forms against the fields that they solve, paths against gradient descent; numbers of Iris against its regions."""

from __future__ import annotations

import json
import math
from contextvars import Context
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_iris
from typer.testing import CliRunner

from fldiag import FldiagError
from fldiag_papers.toys import iris, plane
from fldiag_papers.toys.verbs import toy

W_G, W_L, D = plane.W_G, plane.W_L, math.hypot(2.5, 2.4)
A = (0.5, 1.0, 5.0)


def rows(table, **where):
    for column, value in where.items():
        table = table[(table[column] == value).fillna(False).astype(bool)]
    return table


# ---- the plane


def fedsol_field(w, a, rho):
    """The gradient of the local loss at w + rho u/||u||."""
    u = w - W_G
    e = rho * u / max(np.linalg.norm(u), 1e-300)
    return np.array([a, 1.0]) * (w + e - W_L)


def fedprox_field(w, a, beta):
    return np.array([a, 1.0]) * (w - W_L) + beta * (w - W_G)


@pytest.mark.parametrize("a", A)
def test_closed_forms_are_rest(a):
    for rho in (0.0, 0.5, 1.5, 3.0):
        end = plane.fedsol_end(rho)
        assert fedsol_field(end, a, rho) == pytest.approx(0, abs=1e-13)
        assert np.linalg.norm(end - W_G) == pytest.approx(D - rho)  # before w_l*, not beyond
    for beta in (0.0, 0.3, 2.0):
        end = plane.fedprox_end(a, beta)
        assert fedprox_field(end, a, beta) == pytest.approx(0, abs=1e-13)
        # above the line for a < 1, below for a > 1
        side = np.linalg.det([W_L - W_G, end - W_G])
        assert np.sign(round(side, 9)) == (np.sign(1 - a) if beta else 0)


@pytest.mark.parametrize("method", ["fedsol", "fedprox"])
def test_paths_are_gradient_descent(method):
    options = {"fedsol": {"rho": 1.5, "loss": "l2", "strength": "fixed", "part": "full"}}
    options = options.get(method, {"mu": 0.7})
    paths = plane.simulate({"name": method, **options}, A, 0.05, 40)
    assert paths.shape == (3, 41, 2)
    for a, path in zip(A, paths, strict=True):
        w = W_G
        for place in path:
            # the data hold sqrt(a) in float32
            np.testing.assert_allclose(place, w, atol=1e-6)
            field = fedsol_field(w, a, 1.5) if method == "fedsol" else fedprox_field(w, a, 0.7)
            w = w - 0.05 * field


def test_clients_rest_at_their_closed_forms():
    table = plane.run(rho=0.5, a=A)
    assert rows(table, metric="distance")["value"].max() < 1e-6
    assert rows(table, metric="end_point", method="fedprox")["a"].tolist() == list(A)
    turned = [math.atan2(2.4, 2.5) - math.atan2(0.5 * 2.4, v / (v + 1) * 2.5) for v in A]
    angles = rows(table, metric="angle", method="fedprox")["value"]
    assert angles.tolist() == pytest.approx(np.abs(np.degrees(turned)).tolist(), abs=1e-5)
    assert rows(table, metric="angle", method="fedsol")["value"].max() < 1e-5


def test_more_clients_than_a_stack():
    a = np.linspace(0.5, 2.0, 19).tolist()
    paths = plane.simulate({"name": "fedprox", "mu": 1.0}, a, 0.3, 40)
    expected = [plane.fedprox_end(value, 1.0) for value in a]
    np.testing.assert_allclose(paths[:, -1], expected, atol=1e-6)


def test_without_equilibrium_fedsol_hovers():
    table = plane.run(rho=5.0, a=(0.5, 5.0))
    assert set(rows(table, metric="closed_form")["method"]) == {"fedprox"}
    for client in (0, 1):
        path = rows(table, metric="trajectory", method="fedsol", client=client)["value"]
        hover = rows(table, metric="hover_radius", client=client)["value"].item()
        assert 0 < hover == path.iloc[-(len(path) // 4) :].max() < D / 2


def test_too_many_steps_are_refused():
    for wrong in ({"a": (0.0, 1.0)}, {"a": (1e-5, 1e4)}, {"rho": D - 1e-9}):
        with pytest.raises(FldiagError, match="steps"):
            plane.run(**wrong)


# ---- Iris


@pytest.fixture(scope="module")
def short():
    return iris.run(rounds=2, seeds=(3, 0))


def test_flowers_are_the_leading_components():
    x = load_iris().data
    x = (x - x.mean(0)) / x.std(0)
    u, s, _ = np.linalg.svd(x, full_matrices=False)
    z, y, (low, high) = iris.flowers()
    np.testing.assert_allclose(np.abs(z), np.abs(u[:, :2] * s[:2]), atol=1e-5)
    assert y.tolist() == load_iris().target.tolist()
    np.testing.assert_allclose(high - low, 1.1 * np.ptp(z, 0), rtol=1e-5)


def test_every_client_has_one_class(short):
    first = rows(short, round=1, moment="trained", metric="class_accuracy")
    for k in range(3):  # 50 steps on one class: that is all they know
        shares = rows(first, client=k).groupby("index")["value"].mean()
        assert shares.idxmax() == k and shares[k] == 1.0 and shares.sum() < 1.5


def test_models_of_a_round():
    first, second = iris.train("fedavg", 0.05, 2, seed=4)
    assert first.shape == (5, 2 * 64 + 64 + 64 * 64 + 64 + 64 * 3 + 3)
    np.testing.assert_allclose(first[4], first[1:4].mean(0), atol=1e-6)
    assert (second[0] == first[4]).all()


def test_numbers_follow_from_the_regions(short):
    assert set(rows(short, metric="region")["seed"]) == {3}  # the first one
    z, y, (low, high) = iris.flowers()
    last = rows(short, seed=3, round=2)
    for method in iris.METHODS:
        regions = rows(last, method=method, metric="region")
        maps = [iris.decode(text) for text in regions["classes"]]
        shares = [(grid != maps[-1]).mean() for grid in maps]
        assert regions["value"].tolist() == shares and len(maps) == 4
        told = rows(last, method=method, metric="disagreement", reference="aggregated")
        assert told["value"].tolist() == pytest.approx([*shares[:3], np.mean(shares[:3])])
        column, row = np.rint((z - low) / (high - low) * (iris.GRID - 1)).astype(int).T
        for k, grid in enumerate(maps[:3]):
            right = grid[row, column] == y  # where the next point of the grid is
            accuracy = rows(last, method=method, metric="accuracy", client=k)["value"].item()
            assert accuracy == pytest.approx(right.mean(), abs=0.04)


def test_drop_and_forgetting_follow_from_the_accuracies(short):
    for _, part in short.groupby(["method", "seed", "round"]):
        received = rows(part, moment="received")
        for k in range(3):
            value = rows(part, client=k).groupby("metric")["value"].first()
            before = rows(received, metric="accuracy")["value"].item()
            assert value["drop"] == pytest.approx(before - value["accuracy"])
            old, new = (
                rows(r, metric="class_accuracy")["value"].to_numpy(float)
                for r in (received, rows(part, client=k))
            )
            assert value["forgetting"] == (old - new).max()
            assert value["accuracy"] == pytest.approx(new.mean())
        mean = rows(part, moment="trained", scope="global", metric="drop")["value"].item()
        assert mean == pytest.approx(rows(part, scope="client", metric="drop")["value"].mean())


def test_methods_begin_alike_and_projection_holds_clients_nearer(short):
    first = rows(short, round=1, moment="trained", seed=0)
    values = [rows(first, method=m)["value"].tolist() for m in iris.METHODS]
    assert values[0] == values[1] == values[2]
    seen = rows(short, metric="disagreement", scope="global", reference="aggregated")
    mean = seen.groupby("method")["value"].mean()
    assert mean["fedproj"] < mean["fedavg"]


def test_scores_by_hand():
    y = np.array([0, 0, 1, 1, 1, 1, 2, 2])
    received, client = [0, 0, 1, 1, 1, 0, 2, 0], [0, 0, 0, 0, 0, 0, 2, 2]
    table = pd.DataFrame(iris._scores(np.array([received, client, client, client, y]), y))
    value = rows(table, client=0).groupby("metric")["value"].first()
    assert (value["accuracy"], value["drop"], value["forgetting"]) == (0.5, 0.25, 0.75)


def test_a_training_that_diverges_is_refused():
    with pytest.raises(FldiagError, match=r"fedavg diverged with lr = 1e\+12"):
        iris.run(1e12, 2, [0])


# ---- the verbs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("plane --a 0.2 --a 5", 16),
        ("iris --rounds 1 --seeds 1 --seed 5 --lr 0.001", 7),
    ],
)
def test_a_toy_writes_its_table_and_picture(words, count, tmp_path):
    words = [*words.split(), "--out", str(tmp_path), "--json"]
    result = Context().run(CliRunner().invoke, toy, words)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    paths = [Path(path) for path in answer["paths"]]
    assert [path.suffix for path in paths] == [".json", ".csv", ".pdf", ".png"]
    assert all(path.stat().st_size for path in paths) and len(answer["rows"]) == count
    again = pd.read_csv(paths[1])
    game = {"plane": plane, "iris": iris}[words[0]]
    assert len(game.draw(again).axes) == {"plane": 2, "iris": 12}[words[0]]
