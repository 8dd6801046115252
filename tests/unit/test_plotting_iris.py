"""The Iris toy's pictures show the regions, flowers and numbers of their tables."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from fldiag.plotting import style
from fldiag.results.table import table
from fldiag_papers.toys import iris_picture

METHODS = ("fedavg", "fedproj")
GLOBAL = ["3a1c", "3a1c", "2a2c"]
LINES = {
    ("fedavg", 0): ["4a", "4a", "4a"],
    ("fedavg", 1): ["3a1c", "3a1c", "2a2c"],  # client 1 agrees everywhere
    ("fedproj", 0): ["3a1c", "3a1c", "1a1b2c"],
    ("fedproj", 1): ["4b", "2a2c", "4c"],
}


def regions(**changes):
    rows = []
    for m in METHODS:
        common = {"run": "p", "method": m, "seed": 4, "round": 20}
        for k in (0, 1, None):
            who = (
                {"moment": "trained", "scope": "client", "client": k}
                if k is not None
                else {"moment": "aggregated", "scope": "global", "client": None}
            )
            lines = GLOBAL if k is None else LINES[m, k]
            rows += [
                {
                    **common,
                    **who,
                    "metric": "region",
                    "index": i,
                    "x": -1.0,
                    "x_last": 2.0,
                    "y": 10.0 + i,
                    "line": line,
                }
                for i, line in enumerate(lines)
            ]
            value = 0.8 if k is None else 0.5 + 0.1 * k
            rows.append({**common, **who, "metric": "accuracy", "round": 19, "value": 0.01})
            rows.append({**common, **who, "metric": "accuracy", "seed": 5, "value": 0.02})
            rows.append({**common, **who, "metric": "accuracy", "value": value})
        rows.append(
            {**common, "moment": "received", "scope": "global", "metric": "accuracy", "value": 0.03}
        )
        rows.append(
            {**common, "moment": "trained", "scope": "global", "metric": "accuracy", "value": 0.04}
        )
        rows += [
            {
                **common,
                "round": None,
                "metric": "point",
                "index": i,
                "client": owner,
                "x": x,
                "y": 10.5,
                "value": float(c),
            }
            for i, (x, c, owner) in enumerate(
                [(-0.5, 0, 0), (0.5, 1, 1), (1.5, 2, 1), (1.6, 2, None)]
            )
        ]
    return table(rows).assign(**changes)


def panels(fig):
    return np.array(fig.axes).reshape(2, 3)


@pytest.mark.parametrize(
    ("line", "expected"), [("2a1c", [0, 0, 2]), ("1b", [1]), ("11a", [0] * 11)]
)
def test_lines_are_read(line, expected):
    assert iris_picture.classes(line).tolist() == expected


def test_panels_show_the_regions_where_they_are():
    fig = iris_picture.regions(
        regions().sample(frac=1, random_state=1).sort_values("method", kind="stable")
    )
    for i, method in enumerate(METHODS):
        for j, k in enumerate((0, 1, None)):
            (image,) = panels(fig)[i, j].get_images()
            expected = np.stack(
                [iris_picture.classes(line) for line in (GLOBAL if k is None else LINES[method, k])]
            )
            np.testing.assert_array_equal(image.get_array(), expected)
            assert image.origin == "lower" and image.get_extent() == pytest.approx(
                [-1.5, 2.5, 9.5, 12.5]
            )  # pixel centres
            for c in range(3):
                assert image.cmap(image.norm(c))[:3] == pytest.approx(to_rgb(iris_picture.FILLS[c]))


def test_hatches_cover_what_differs_from_the_global_model():
    fig = iris_picture.regions(regions())
    hatched = [
        [c for c in ax.collections if getattr(c, "hatches", [None])[0] == iris_picture.HATCH]
        for ax in fig.axes
    ]
    assert [len(h) for h in hatched] == [1, 0, 0, 1, 1, 0]
    (inside,) = [
        p.contains_points([(2, 10), (2, 11), (1, 12), (0, 10), (0, 12)], radius=1e-6)
        for p in hatched[0][0].get_paths()
    ]
    assert inside.tolist() == [True, True, True, False, False]


@pytest.mark.slow
def test_panels_tell_accuracy_and_disagreement():
    titles = [ax.get_title() for ax in iris_picture.regions(regions()).axes]
    assert titles == [
        "50.0 % right, differs in 33 %",
        "60.0 % right, differs in 0 %",
        "80.0 % right",
        "50.0 % right, differs in 8 %",
        "60.0 % right, differs in 58 %",
        "80.0 % right",
    ]
    bare = regions()
    assert (
        iris_picture.regions(bare[bare["metric"] != "accuracy"]).axes[0].get_title()
        == "differs in 33 %"
    )


def test_own_flowers_are_filled_with_the_marker_of_their_class():
    axes = panels(iris_picture.regions(regions()))[0]

    def shown(ax, filled):
        return {
            (round(float(x), 3), line.get_marker())
            for line in ax.lines
            for x in line.get_xdata()
            if (line.get_markerfacecolor() != "white") == filled
        }

    assert shown(axes[0], True) == {(-0.5, "o")} and shown(axes[0], False) == {
        (0.5, "s"),
        (1.5, "^"),
        (1.6, "^"),
    }
    assert shown(axes[1], True) == {(0.5, "s"), (1.5, "^")}
    assert shown(axes[2], True) == {(-0.5, "o"), (0.5, "s"), (1.5, "^")} and shown(
        axes[2], False
    ) == {(1.6, "^")}


def test_colours_stay_apart_in_greyscale():
    def grey(colours):
        return sorted(float(np.dot(to_rgb(c), (0.299, 0.587, 0.114))) for c in colours)

    assert np.diff(grey(iris_picture.FILLS)).min() > 0.12
    assert min(grey(iris_picture.FILLS)) - max(grey(iris_picture.INKS)) > 0.12


# --- measures and protocols ------------------------------------------------------------------------------------

VALUES = {
    "fedavg": ([0.5, 0.7], [0.6, 0.8]),
    "fedproj": ([0.5, 0.5], [0.9, 0.8]),
}  # by round, then seed


def rounds():
    rows = [
        {
            "run": "p",
            "method": m,
            "seed": s,
            "round": t,
            "moment": moment,
            "scope": "global",
            "metric": "accuracy",
            "value": VALUES[m][t - 1][s] - shift,
        }
        for m in METHODS
        for t in (1, 2)
        for s in (0, 1)
        for moment, shift in (("aggregated", 0), ("trained", 0.2), ("received", 0.4))
    ]
    rows.append({**rows[0], "scope": "client", "moment": "trained", "client": 0})
    return table(rows)


def seeds(run="p", shift=0.0):
    return pd.DataFrame(
        [
            {
                "run": run,
                "method": m,
                "seed": s,
                "accuracy": VALUES[m][1][s] + shift,
                "local": 0.3 + 0.1 * s + shift,
                "drop": 0.1 * s,
                "forgetting": 0.4 + 0.2 * s,
                "disagreement": 0.3,
            }
            for m in METHODS
            for s in (0, 1)
        ]
    )


def test_curves_are_means_over_seeds_with_their_deviation():
    fig = iris_picture.measures(seeds(), rounds(), {"fedavg": 0.64, "fedsol": 0.1})
    for ax, shift in zip(fig.axes[:2], (0, 20), strict=True):
        for m in METHODS:
            (line,) = [x for x in ax.lines if x.get_label() == m]
            means = [100 * np.mean(VALUES[m][t]) - shift for t in (0, 1)]
            np.testing.assert_allclose(line.get_ydata(), means)
            assert list(line.get_xdata()) == [1, 2]
        (band, other) = [c.get_paths()[0].vertices for c in ax.collections]
        spread = 100 * np.std([0.5, 0.7], ddof=1)
        assert band[:, 1].min() == pytest.approx(60 - shift - spread) and other[
            :, 1
        ].max() == pytest.approx(85 - shift + 100 * np.std([0.9, 0.8], ddof=1))
    dashed = [line.get_ydata()[0] for line in fig.axes[0].lines if list(line.get_xdata()) == [0, 1]]
    assert dashed == [64.0] and [t.get_text() for t in fig.axes[0].texts] == ["paper: FedAvg"]


def drawn_numbers(ax, across):
    """Dots of the seeds, and means: by the number of the category, sorted."""
    value, place = (0, 1) if across else (1, 0)
    dots = np.concatenate([c.get_offsets() for c in ax.collections])
    means = [x for line in ax.lines if line.get_marker() in "oDs^" for x in line.get_xydata()]
    return (
        sorted((round(p[place]), round(float(p[value]), 6)) for p in points)
        for points in (dots, means)
    )


@pytest.mark.parametrize("one_seed", [False, True])
def test_forgetting_has_a_dot_a_seed_and_the_mean(one_seed):
    table = seeds()[lambda f: f["seed"] == 0] if one_seed else seeds()
    dots, means = drawn_numbers(iris_picture.measures(table, rounds()).axes[2], across=False)
    measured = [[0, 10], [40, 60], [30, 30]]
    values = [v[:1] if one_seed else v for v in measured]
    assert dots == sorted((i, x) for i, v in enumerate(values) for x in v for _ in METHODS)
    assert means == sorted((i, np.mean(v)) for i, v in enumerate(values) for _ in METHODS)


def test_protocols_stand_below_each_other():
    both = pd.concat([seeds("one-lr0.01"), seeds("two-lr0.001", -0.1)])
    left, right = iris_picture.protocols(both, {"fedavg": 0.64, "fedproj": 0.64}).axes
    assert [t.get_text() for t in left.get_yticklabels()] == ["one lr 0.01", "two lr 0.001"]
    assert left.get_ylim()[0] > left.get_ylim()[1]
    for ax, expected in ((left, [70, 85, 60, 75]), (right, [35, 35, 25, 25])):
        _, means = drawn_numbers(ax, across=True)
        assert means == sorted(zip([0, 0, 1, 1], expected, strict=True))
    assert [t.get_text() for t in left.texts] == ["paper: FedAvg, FedProj"] and not right.texts


@pytest.mark.slow
def test_the_same_table_gives_the_same_bytes(tmp_path):
    [a], [b] = (
        style.save(iris_picture.regions(regions()), tmp_path / name, ["pdf"]) for name in "ab"
    )
    assert a.read_bytes() == b.read_bytes()
