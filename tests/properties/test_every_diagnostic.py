"""Every registered diagnostic: a tidy table, the same again; a picture of its numbers, the same again; a summary. None is named."""

import json
import random
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.collections import LineCollection, PathCollection, QuadMesh
from reference import typed
from torch import nn
from torch.nn.functional import cross_entropy

import fldiag
from fldiag import registry
from fldiag.plotting import style

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
                yield from (piece for piece in group.get_segments() if len(piece))
            elif isinstance(group, QuadMesh) and ax.get_xlabel():  # cells, not their colour bar
                cells = np.ma.filled(group.get_array().astype(float), np.nan)
                yield np.repeat(np.ravel(cells), 2).reshape(-1, 2)


@pytest.mark.parametrize("name", registry.diagnostic.names())
def test_answers_with_a_table_a_picture_and_a_summary(name, trained, small, tmp_path, monkeypatch):
    options = small(registry.diagnostic.get(name).options.model_fields)
    words = [w for k, v in options.items() for w in (f"--{k.replace('_', '-')}", v)]
    start = [name]
    if typed(name, "--help").code:  # no verb of its own
        start = ["diagnose", name]
        words = [w for k, v in options.items() for w in ("--set", f"{k}={v}")]
    is_drawn = registry.diagnostic.get(name).draw is not None
    for subjects in (trained[:1], trained[2:], trained[:2]):
        command = [*start, *subjects, *words, "--out", tmp_path]
        command += ["--format", "png"] if is_drawn else []
        answer = typed(*command)
        if answer.code != 2:
            break
    assert answer.code == 0, answer.err
    *summary, last = answer.out.strip().splitlines()
    assert Path(last).is_relative_to(tmp_path)
    assert Path(last).suffix == (".png" if is_drawn else ".csv")
    assert [line for line in summary if line.strip() and not line.startswith(str(tmp_path))]
    pictures = {path: path.read_bytes() for path in tmp_path.rglob("*.png")}
    for path in pictures:
        path.unlink()
    figures, image = [], style.image
    monkeypatch.setattr(style, "image", lambda f, *how: figures.append(f) or image(f, *how))
    assert json.loads(typed(*command, "--json").out)["paths"][-1] == last
    assert all(path.read_bytes() == content for path, content in pictures.items())

    table = fldiag.diagnose(subjects, name, **options)
    tidy(table)
    again = pd.read_csv(Path(last).with_suffix(".csv"))
    assert again["metric"].tolist() == table["metric"].tolist()
    np.testing.assert_allclose(again["value"], table["value"].astype(float), 1e-6, 1e-9)
    if not is_drawn:
        return

    figure = figures[-1]
    places = np.concatenate([np.asarray(p, float) for p in drawn(figure)])
    places = places[np.isfinite(places).all(1)]
    known = np.isclose(places[..., None], numbers(table), rtol=1e-6, atol=1e-9).any((1, 2))
    assert known.sum() > 1 and known.mean() > 1 / 3
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0, width - box.x1, height - box.y1) > -0.03, "text off the page"


def answer(name, subjects, options, **others):
    """The table of the first of some subjects that the diagnostic takes."""
    for subject in subjects:
        try:
            return fldiag.diagnose(subject, name, **options, **others)
        except fldiag.FldiagError as error:
            refusal = error
    raise refusal


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.diagnostic.names())
def test_the_same_bits_however_it_is_computed(name, trained, small, tmp_path):
    options = small(registry.diagnostic.get(name).options.model_fields)
    subjects = trained[:1], trained[2:], trained[:2]
    table = answer(name, subjects, options)
    for others in ({"executor": "processes:2"}, {"cache": tmp_path}):
        again = answer(name, subjects, options, **others)
        pd.testing.assert_frame_equal(again, table, check_exact=True)
    stored = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = answer(name, subjects, options, cache=tmp_path)
    assert stored == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    pd.testing.assert_frame_equal(
        *(t.astype(object).where(t.notna(), None) for t in (again, table)), check_exact=True
    )


@pytest.mark.parametrize(
    "error", [RuntimeError, pytest.param(KeyboardInterrupt, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", registry.diagnostic.names())
def test_the_callers_things_are_untouched(name, error, trained, small):
    """Its module, data and random states, also where the very last evaluation fails."""
    options = small(registry.diagnostic.get(name).options.model_fields)
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.4), nn.Flatten()]
    net = nn.Sequential(*layers, nn.Linear(48, 3)).train()
    x, y = torch.randn(13, 1, 6, 6), torch.arange(13) % 3
    calls, last = [], None

    def stop():
        calls.append(1)
        if len(calls) == last:
            raise error("stop")

    def loss(outputs, targets):
        if len(outputs) > 1:  # example by example it may fail: then there is no standard error
            stop()
        return cross_entropy(outputs, targets)

    subjects = (
        lambda: fldiag.Problem(net, loss, (x, y)),
        lambda: trained[0],
        lambda: trained[2:],
        lambda: trained[:2],
    )

    def is_answered(subject):
        calls.clear()
        try:
            fldiag.diagnose(subject(), name, **options, progress=lambda *_: stop())
        except fldiag.FldiagError:
            return False
        return True

    def state():
        yield from (
            torch.get_rng_state(),
            x.clone(),
            *(v.clone() for v in net.state_dict().values()),
        )
        yield torch.from_numpy(np.random.get_state()[1].copy())
        yield torch.tensor(random.getstate()[1])
        yield torch.tensor([torch.is_grad_enabled(), *(m.training for m in net.modules())])

    def is_untouched():
        same = all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
        return same and all(p.grad is None for p in net.parameters())

    before = list(state())
    subject = next(filter(is_answered, subjects))
    assert is_untouched()
    last = len(calls)
    calls.clear()
    with pytest.raises((error, fldiag.FldiagError)):
        fldiag.diagnose(subject(), name, **options, progress=lambda *_: stop())
    assert is_untouched()
