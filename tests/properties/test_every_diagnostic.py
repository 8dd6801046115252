"""Every registered diagnostic: a tidy table, the same again; a picture of its numbers, the same again; a summary. None is named."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection, PathCollection
from reference import typed

import fldiag
from fldiag import registry

COLUMNS = "run method seed round moment scope client client_b slice metric index layer value unit"
COLUMNS = [*COLUMNS.split(), "estimator", "stderr", "residual", "converged", "n_examples"]


def tidy(table):
    assert list(table.columns[: len(COLUMNS)]) == COLUMNS and len(table)
    assert table["metric"].notna().all() and table["run"].notna().any()
    assert set(table["moment"].dropna()) <= {"received", "trained", "aggregated"}
    assert set(table["scope"].dropna()) <= {"global", "client", "pair"}
    assert (table[["stderr", "residual"]].astype(float).fillna(0) >= 0).all(axis=None)
    value = table["value"].astype(float)
    assert not np.isinf(value).any()
    reasons = table[[c for c in table if c not in COLUMNS]].select_dtypes(["object", "string"])
    masked = table["masked"].fillna(False).astype(bool) if "masked" in table else False
    assert (value.notna() | masked | reasons.notna().any(axis=1)).all()
    keys = ["run", "round", "moment", "scope", "client", "client_b", "slice", "metric", "index"]
    others = [c for c in table if c not in COLUMNS[10:] and c not in keys]
    assert not table[value.notna()].duplicated([*keys, "layer", "estimator", *others]).any()


def numbers(table):
    """All that a picture of the table may show, with the ends of its error bars."""
    shown = [table[c].astype(float) for c in table if "float" in str(table[c].dtype).lower()]
    for error in ("stderr", "residual"):
        ends = table[error].astype(float)
        shown += [table["value"].astype(float) + sign * ends for sign in (1, -1)]
    shown = np.concatenate(shown)
    return np.unique(shown[np.isfinite(shown)])


def drawn(figure):
    """Places of lines, points, error bars, bars and cells [n, 2]."""
    for ax in figure.axes:
        yield from (line.get_xydata() for line in ax.lines)
        yield from ([[bar.get_width(), bar.get_height()]] for bar in ax.patches)
        yield from (np.repeat(np.ravel(i.get_array()), 2).reshape(-1, 2) for i in ax.images)
        for group in ax.collections:
            if isinstance(group, PathCollection):
                yield group.get_offsets()
            elif isinstance(group, LineCollection):
                yield from group.get_segments()


@pytest.mark.parametrize("name", registry.diagnostic.names())
def test_answers_with_a_table_a_picture_and_a_summary(name, trained, small, tmp_path):
    options = small(registry.diagnostic.get(name).options.model_fields)
    words = [w for k, v in options.items() for w in (f"--{k.replace('_', '-')}", v)]
    start = [name]
    if typed(name, "--help").code:  # no verb of its own
        start = ["diagnose", name]
        words = [w for k, v in options.items() for w in ("--set", f"{k}={v}")]
    for subjects in (trained[:1], trained[2:], trained[:2]):
        command = [*start, *subjects, *words, "--format", "png", "--out", tmp_path]
        answer = typed(*command)
        if answer.code != 2:
            break
    assert answer.code == 0, answer.err
    *summary, last = answer.out.strip().splitlines()
    assert Path(last).is_relative_to(tmp_path) and Path(last).suffix == ".png"
    assert [line for line in summary if line.strip() and not line.startswith(str(tmp_path))]
    pictures = {path: path.read_bytes() for path in tmp_path.rglob("*.png")}
    for path in pictures:
        path.unlink()
    assert json.loads(typed(*command, "--json").out)["paths"][-1] == last
    assert all(path.read_bytes() == content for path, content in pictures.items())

    table = fldiag.diagnose(subjects, name, **options)
    tidy(table)
    again = pd.read_csv(Path(last).with_suffix(".csv"))
    assert again["metric"].tolist() == table["metric"].tolist()
    np.testing.assert_allclose(again["value"], table["value"].astype(float), 1e-6, 1e-9)

    figure = fldiag.draw(table)
    places = np.concatenate([np.asarray(p, float) for p in drawn(figure)])
    places = places[np.isfinite(places).all(1)]
    known = np.isclose(places[..., None], numbers(table), rtol=1e-6, atol=1e-9).any((1, 2))
    assert known.sum() > 1 and known.mean() > 1 / 3
    figure.canvas.draw()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0, width - box.x1, height - box.y1) > -0.03, "text off the page"
