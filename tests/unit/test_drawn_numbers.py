"""What a picture shows is what its table says: every value that the pictures of the registry draw is read back from them."""

from pathlib import Path

import matplotlib.collections
import matplotlib.figure
import numpy as np
import pandas as pd
import pytest
import reports

from fldiag import registry
from fldiag.plotting.tables import several_runs

RUNS = ("FedAvg, seed 0", "FedSOL, seed 0")


def spectrum(run, size):
    rows = [{**row, "run": run} for row in reports.eigenvalues(4 * size)]
    return [{**row, "slice": "train", "n_examples": 100, "layer": None} for row in rows]


def fairness(run, size):
    base = {"run": run, "round": 3, "scope": "client"}
    rows = [
        {
            **base,
            "metric": "accuracy",
            "client": c,
            "value": 0.1 * c / size,
            "low": 0.05 * c / size,
            "high": 0.2 * c / size,
            "size": 10 * c,
            "n_examples": 20,
        }
        for c in reports.CLIENTS
    ]
    whole = {"run": run, "round": 3, "scope": "global", "n_examples": 60}
    rows += [
        {**whole, "metric": m, "value": v, "low": v, "high": v}
        for m, v in (("mean_accuracy", 0.4), ("worst_decile", 0.1), ("accuracy_gini", 0.2))
    ]
    return rows + [
        {**whole, "metric": m, "index": i, "value": v + i / 10, "low": v, "high": v + 0.3}
        for i in (1, 2, 3)
        for m, v in (("bin_accuracy", 0.2), ("bin_confidence", 0.3))
    ]


def paths(run, size):
    base = {"run": run, "slice": "train", "n_examples": 100}
    rows = [
        {**base, "metric": metric, "index": i, "x": x, "value": 1 + scale * size * i * x * x}
        for i in (1, 2)
        for x in (-1.0, -0.5, 0.0, 0.5, 1.0)
        for metric, scale in (("loss", 1.0), ("parabola", 1.1))
    ]
    return rows + [{**base, "metric": "curvature", "index": i, "value": size * i} for i in (1, 2)]


def named(make):
    return lambda run, size: [{**row, "run": run} for row in make(size)]


#: Diagnostic -> (run, size) -> rows of its table.
TABLES = {
    "spectrum": spectrum,
    "fairness": fairness,
    "paths": paths,
    "forgetting": named(lambda size: reports.forgetting(drop=0.2 * size)),
    "drift": named(lambda size: reports.drift(size=size)),
    "matching": named(lambda size: reports.matching(size=size)),
    "account": named(lambda size: reports.account(size=size)),
    "personalise": named(lambda size: reports.personal()),
}
#: Diagnostic and ending of the picture -> the rows that it must show.
SHOWN = {
    ("spectrum", ""): "metric == 'eigenvalue'",
    ("paths", ""): "metric in ('loss', 'parabola')",
    ("forgetting", ""): "(scope == 'global' and metric == 'accuracy' and index.isna()) or "
    "(metric == 'class_forgetting' and round == 3)",
    ("drift", ""): "layer.isna() and metric in ('global_local_divergence', 'update_cosine')",
    ("matching", ""): "diag_mode == 'diag' and data == 'client' and scope == 'pair'",
    ("account", ""): "metric in ('change', 'linear', 'quadratic', 'rest') and estimator == 'exact'",
    ("personalise", ""): "scope == 'client'",
    ("fairness", ""): "(scope == 'client' and metric == 'accuracy') or metric == 'bin_accuracy'",
}


def drawn_values(fig):
    """Every number that stands in the figure as a line's point, a bar's length or a cell."""
    values = []
    for ax in fig.axes:
        for line in ax.lines:
            values += [*np.ravel(line.get_xdata()), *np.ravel(line.get_ydata())]
        for patch in ax.patches:
            if hasattr(patch, "get_height"):
                values += [patch.get_height(), patch.get_width()]
        for image in ax.images:
            values += np.ma.filled(image.get_array().astype(float), np.nan).ravel().tolist()
        for collection in ax.collections:
            if isinstance(collection, matplotlib.collections.PathCollection):
                values += np.ravel(collection.get_offsets()).tolist()
    values = np.array([float(v) for v in values if isinstance(v, (int, float, np.number))])
    return values[np.isfinite(values)]


def cases():
    for name in TABLES:
        entry = registry.diagnostic.get(name)
        for ending, draw in entry.drawings.items():
            if not ending.startswith("."):
                yield pytest.param(name, ending, draw, id=name + ending)


@pytest.mark.parametrize("name, ending, draw", cases())
def test_drawn_numbers_are_the_tables(name, ending, draw):
    runs = RUNS if several_runs(draw) or registry.diagnostic.get(name).on == "problem" else RUNS[:1]
    rows = [row for i, run in enumerate(runs) for row in TABLES[name](run, 1.0 + i)]
    table = pd.DataFrame(reports.frame(rows))
    fig = draw(table)
    if (name, ending) not in SHOWN:
        assert fig is None, "this picture is not compared with its table: add a line to SHOWN"
        return
    assert isinstance(fig, matplotlib.figure.Figure)
    shown = table.query(SHOWN[name, ending])["value"].dropna().astype(float).unique()
    values = drawn_values(fig)
    assert len(shown) > 2
    missing = [v for v in shown if np.abs(values - v).min() > 1e-9 * max(1.0, abs(v))]
    assert not missing
    texts = [t.get_text() for legend in fig.legends for t in legend.get_texts()]
    if len(runs) > 1 and name not in ("matching", "paths"):
        assert set(runs) <= set(texts)


#: Diagnostics whose pictures are compared with their tables elsewhere.
ELSEWHERE = {
    "doctor": "test_doctor.py",
    "flatness": "test_flatness.py",
    "geometry": "test_geometry.py",
    "landscape": "test_landscape.py",
    "lora": "test_lora.py",
    "sharpness": "test_sharpness.py",
}


def test_every_picture_of_the_registry_is_compared_with_its_table():
    names = {e.name for e in registry.diagnostics() if e.drawings}
    assert names == set(TABLES) | set(ELSEWHERE)
    for file in ELSEWHERE.values():
        assert (Path(__file__).parent / file).is_file(), file
