"""Every kind of picture, as it is printed: no text on another, none cut off, none below 6 points, colours apart for every eye."""

from __future__ import annotations

import io
import itertools

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from fldiag.diagnostics.account import picture as account
from fldiag.diagnostics.drift import picture as drift
from fldiag.diagnostics.forgetting import picture as forgetting
from fldiag.diagnostics.landscape import picture as landscape
from fldiag.diagnostics.matching import picture as matching
from fldiag.diagnostics.profile import picture as profile
from fldiag.diagnostics.spectrum import picture as spectrum
from fldiag.figures import make, pictures, reported
from fldiag.figures.lines import lines
from fldiag.plotting import curves, layers, partition, sheet, style
from fldiag.results import files
from fldiag.results.table import table
from fldiag.toys import plane_picture
from fldiag.training.diagnostics.personalise import picture as personal

RUNS = ("fedavg round 30", "fedsol rho=2.0 round 30")
CLIENTS = (0, 3, 12, 13, 14, 15, 17, 18)


def rng():
    return np.random.default_rng(0)


def over_rounds(metrics, **more):
    return [dict(metric=m, run="fedavg", round=r, slice="test", scope="global", moment=moment, estimator="exact", value=v, **more)
            for m, moment in metrics for r, v in enumerate(0.2 + 0.5 * rng().random(8), 1)]


def learning():
    return curves.draw(table([dict(metric="accuracy", run=n, method=n, round=r, seed=s, slice="test", value=0.1 + 0.02 * r + 0.01 * s)
                              for n in ("fedavg", "fednova", "scaffold", "fedsol") for s in (0, 1) for r in range(1, 20)]), chance=0.1)


def surface(log=False):
    grid = np.linspace(-1, 1, 11)
    rows = [dict(metric="loss", run=run, slice="test", n_examples=500, x=x, y=y, value=0.5 + (300 if log else 5) * x * x + y * y + 0.1 * x)
            for run in RUNS for y in grid for x in grid]
    return table(rows + [dict(metric="eigenvalue", run=run, index=i, value=9.0 / i, residual=1e-6) for run in RUNS for i in range(1, 6)])


def accounted(spread=1.0):
    draw, rows = rng(), []
    common = dict(run="fedavg", round=30, slice="train", moment="trained")
    for k in (*CLIENTS, None):
        who = {**common, "scope": "global" if k is None else "client", "client": k, "estimator": "exact"}
        rows += [{**who, "metric": m, "value": v * (spread if k == 3 else 1)}
                 for m, v in zip(("change", "linear", "quadratic", "rest"), draw.normal(size=4), strict=True)]
        rows += [{**who, "estimator": "eigen", "metric": m, "index": i, "value": draw.normal()}
                 for i in range(6) for m in ("linear", "quadratic")]
        rows += [{**who, "estimator": "layer", "metric": m, "layer": name, "value": draw.normal()}
                 for name in ("conv1", "conv2", "fc", "classifier") for m in ("linear", "quadratic")]
    rows += [{**common, "scope": "pair", "metric": "harm", "client": a, "client_b": b, "value": draw.normal() * 10}
             for a in CLIENTS for b in CLIENTS]
    return account.draw(table(rows))


def matched():
    draw, common = rng(), dict(run="fedavg", round=30, moment="trained")
    rows = [{**common, "scope": "pair", "metric": m, "client": a, "client_b": b, "diag_mode": mode, "data": "client",
             "value": 10 ** draw.uniform(-2, 4) if m == "H_N" else draw.random()}
            for m in ("H_N", "H_D") for mode in ("diag", "tensor_trace") for a, b in itertools.combinations(CLIENTS, 2)]
    rows += [{**common, "scope": "global", "metric": m, "diag_mode": mode, "data": "client", "self_pairs": False, "value": 0.5}
             for m in ("H_N", "H_D") for mode in ("diag", "tensor_trace")]
    rows += [{**common, "scope": "client" if k is not None else "global", "moment": "trained" if k is not None else "aggregated",
              "metric": m, "client": k, "index": 1, "value": draw.uniform(1, 200), "slice": "train", "converged": True}
             for m in ("eigenvalue", "trace", "curvature_share") for k in (*CLIENTS, None) if not (m == "curvature_share" and k is None)]
    return matching.draw(table(rows))


def ways():
    x = np.linspace(0, 1, 11)
    rows = [dict(metric="loss", run="fedavg round 30", index=i + 1, client=k, x=v, value=1 - 0.3 * v + (i + 1) * v * (1 - v) / 9)
            for i, k in enumerate(CLIENTS) for v in x]
    return profile.draw(table(rows + [dict(metric="barrier", run="fedavg round 30", index=i + 1, client=k, x=0.5, value=(i + 1) / 36)
                                      for i, k in enumerate(CLIENTS)]))


def held(clients, classes=10):
    draw = rng().dirichlet([0.1] * classes, clients) * 1700
    return pd.DataFrame([{"client": k, "class": c, "count": int(draw[k, c])} for k in range(clients) for c in range(classes)])


def forgotten():
    rows = over_rounds([("accuracy", m) for m in ("received", "trained", "aggregated")])
    return forgetting.curves(table(rows + over_rounds([(m, "trained") for m in ("forgotten", "learned", "restored")])))


def lost_by_class():
    rows = [dict(metric=m, run="fedavg", round=30, moment="trained", scope="client", slice="test", client=k, index=c, value=v)
            for m in ("class_forgetting", "class_examples") for k in CLIENTS for c, v in enumerate(rng().uniform(-1, 1, 10))]
    return forgetting.heatmap(table(rows))


def drifted():
    rows = over_rounds([(m, "trained") for m in ("global_local_divergence", "local_local_divergence", "update_cosine", "server_cosine",
                                                 "gradient_cosine", "cka", "proximal_loss")])
    rows += [r for rho in (0.0, 0.5, 1.0, 2.0) for r in over_rounds([("cos_gu_gp", "trained")], rho=rho)]
    rows += [dict(metric="lambda_mean", run="fedavg", round=8, scope="global", moment="trained", estimator="exact", layer=name,
                  value=0.1, scaled=0.7) for name in ("conv1", "conv2", "fc", "classifier")]
    return drift.draw(table(rows))


def eigenvalues(per_layer=False):
    rows = [dict(metric="eigenvalue", run=r, index=i, value=30.0 / i, residual=1e-3) for r in RUNS for i in range(1, 6)]
    names = ("conv1", "conv2", "fc", "classifier") if per_layer else ()
    return table(rows + [dict(metric="trace", run=r, layer=name, value=3.0) for r in RUNS for name in names])


def own():
    return personal.draw(pd.DataFrame([{"metric": "personal_accuracy", "run": run, "scope": "client", "client": i, "index": e,
                                        "value": 0.3 + 0.02 * i} for run in RUNS for e in (0, 1, 5) for i in range(20)]))


def compared():
    rows = [dict(origin=origin, setting=f"partition=lda;alpha={a}", method=m, model="lenet", data="cifar10", trained_on="mnist-2000",
                 metric="rounds_to_80", value=v, seed=0) for a in (0.1, 0.5) for origin in ("measured", "reported")
            for m, v in (("fedavg", 12.0), ("fedlesam_d", 300.0), ("scaffold", np.nan if origin == "measured" else 800.0))]
    return pictures.dots(table(rows))


def plane():
    rows = [dict(metric=m, method=n, a=a, x=a, y=a / 2, index=i) for n in ("fedsol", "fedprox") for a in (0.2, 1.0, 3.0)
            for i, m in enumerate(("trajectory", "end_point", "closed_form"))]
    return plane_picture.draw(table(rows), {"w_g": [0.5, -0.4], "w_l": [3, 2], "a": [0.2, 1.0, 3.0]})


KINDS = {"learning": learning, "landscape": lambda: landscape.draw(surface(), names=("eigenvector 1", "eigenvector 2")),
         "landscape, log, notes": lambda: landscape.draw(surface(True), notes=True), "account": accounted,
         "account, far": lambda: accounted(1e3), "matching": matched, "ways": ways, "partition": lambda: partition.draw(held(12)),
         "partition, many": lambda: partition.draw(held(50), title="CIFAR-10, LDA, α = 0.1, 50 clients"), "forgetting": forgotten,
         "forgetting by class": lost_by_class, "drift": drifted, "spectrum": lambda: spectrum.draw(eigenvalues()),
         "layers": lambda: layers.draw(eigenvalues(True)), "personalise": own, "measured and reported": compared, "plane": plane}


def words_of(fig):
    """Texts that are drawn, with their boxes; ticks beyond the ends of their axis are not."""
    fig.canvas.draw()
    renderer = fig.canvas.get_renderer()
    hidden = {id(t) for ax in fig.axes for axis in (ax.xaxis, ax.yaxis) for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
              for t in (tick.label1, tick.label2)
              if not min(axis.get_view_interval()) - 1e-9 <= tick.get_loc() <= max(axis.get_view_interval()) + 1e-9}
    space = {id(t) for ax in fig.axes if ax.name == "3d" for t in ax.findobj(Text)}  # stands where the projection puts it
    return [(t, t.get_window_extent(renderer)) for t in fig.findobj(Text)
            if t.get_text().strip() and t.get_visible() and id(t) not in hidden | space]


@pytest.mark.parametrize("width", [None, "single"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_can_be_printed_as_it_is(kind, width):
    with sheet.asked(width):
        fig = KINDS[kind]()
    with style.paper():
        found = words_of(fig)
    page, slack = fig.bbox, 1.0  # a pixel of a hundred an inch
    assert len(found) > 5
    for text, box in found:
        assert text.get_fontsize() >= 6, text
        assert box.x0 >= -slack and box.y0 >= -slack and box.x1 <= page.x1 + slack and box.y1 <= page.y1 + slack, (text, box)
    for (one, a), (other, b) in itertools.combinations(found, 2):
        if min(a.x1, b.x1) - max(a.x0, b.x0) > slack and min(a.y1, b.y1) - max(a.y0, b.y0) > slack:
            if one.get_rotation() % 90 or other.get_rotation() % 90:
                continue  # boxes of slanted texts overlap where the texts do not
            raise AssertionError(f"{one.get_text()!r} lies on {other.get_text()!r}")
    assert fig.get_figwidth() <= (style.ONE_COLUMN if width else style.TWO_COLUMNS) + 0.01


#: Red, green or blue cones missing (Machado, Oliveira and Fernandes, 2009, severity 1), in linear light.
EYES = {"all cones": np.eye(3),
        "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]}


def linear(colour):
    c = np.array(to_rgb(colour))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(light):
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(light, 0, 1)
    f = np.cbrt(np.maximum(xyz / [0.9505, 1.0, 1.089], 1e-6))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eye", EYES)
def test_colours_are_apart_and_visible_on_white(eye):
    """CIE76 distances: 2.3 is just noticeable."""
    seen = [lab(np.asarray(EYES[eye]) @ linear(style.look(i).color)) for i in range(7)]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 10
    more = [lab(np.asarray(EYES[eye]) @ linear(style.look(i).color)) for i in range(9)]
    assert min(np.linalg.norm(c - lab(np.ones(3))) for c in more) > 25
    assert len({(style.look(i).marker, str(style.look(i).dash), style.look(i).color) for i in range(60)}) == 60
    assert sum(style.look(i).color == style.look(0).color for i in range(60)) == 1  # two methods are never both black


@pytest.mark.slow
def test_a_large_png_is_light_and_fonts_are_in_the_pdf(tmp_path):
    fig = landscape.draw(surface(True))
    pdf, png = style.save(fig, tmp_path / "x", ("pdf", "png"))
    assert png.stat().st_size < 300_000 and pdf.stat().st_size < 300_000
    assert b"/Type3" not in pdf.read_bytes()
    raw = io.BytesIO()
    with style.paper():
        fig.savefig(raw, format="png", dpi=style.DPI)
    exact, light = (matplotlib.image.imread(f)[..., :3] for f in (io.BytesIO(raw.getvalue()), png))
    assert exact.shape == light.shape and np.abs(exact - light).mean() < 0.02


def test_redrawing_keeps_numbers_and_their_provenance(tmp_path):
    study = reported.studies()["fedsol/table5"]
    frame, folder = compared_rows(), tmp_path / study.paper
    files.write_table(frame, folder / study.id, {"caption": "C.", "commit": "abc"})
    before = (folder / f"{study.id}.csv").read_bytes()
    (made,) = make.redraw([study], tmp_path)
    about = files.provenance_beside(folder / f"{study.id}.csv")
    assert not made.error and (folder / f"{study.id}.csv").read_bytes() == before
    assert about["commit"] == "abc" and about["caption"] == "C." and "fldiag" in about["drawn"]
    assert (folder / f"{study.id}.md").read_text().startswith("C.\n\n|")
    (folder / f"{study.id}.csv").write_text("changed")
    assert "sha256" in make.redraw([study], tmp_path)[0].error


def compared_rows():
    return table([dict(origin=o, setting="", method=m, model="lenet", data="cifar10", metric="accuracy", value=v, seed=0)
                  for o in ("measured", "reported") for m, v in (("fedavg", 50.0), ("fedsol", 60.0))])


def test_one_method_in_many_settings_is_a_table():
    rows = [dict(origin=o, setting=f"partition=lda;alpha={a}", method="fedalign", model="resnet56", data="cifar100", metric="accuracy",
                 value=v, seed=0) for a in (0.1, 0.5, 2.5) for o, v in (("measured", 20.0 + a), ("reported", 50.0 + a))]
    texts = {t.get_text() for t in pictures.dots(table(rows)).texts}
    assert {"FedAlign", "LDA 0.1", "20.1", "50.1", "LDA 2.5", "22.5", "52.5"} <= texts


def test_an_accuracy_of_one_seed_has_its_standard_error_over_the_examples():
    rows = [dict(label="FedAvg", setting="", rate=r, metric="accuracy", unit="%", value=80.0, n_examples=400, seed=s)
            for r in (0.1, 0.2) for s in (0,)]
    one = lines(table(rows), "rate", {"accuracy": "accuracy"})
    (bars,) = [c for c in one.axes[0].containers if c.get_label() == "_sampled"]
    (segment, _) = bars.lines[2][0].get_segments()
    assert segment[:, 1] == pytest.approx([80 - 100 * (0.16 / 400) ** 0.5, 80 + 100 * (0.16 / 400) ** 0.5])
    several = lines(table([*rows, *({**r, "seed": 1} for r in rows)]), "rate", {"accuracy": "accuracy"})
    assert not [c for c in several.axes[0].containers if c.get_label() == "_sampled"]
