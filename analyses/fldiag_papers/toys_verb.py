"""``fldiag toy``: pictures one can check by hand."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from fldiag.console import Console
from fldiag.diagnosis import places
from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.results import files
from fldiag.results.provenance import digest, provenance
from fldiag.results.select import number
from fldiag.results.table import Row
from fldiag_papers.toys import iris as iris_toy
from fldiag_papers.toys import iris_picture, iris_reported, plane_picture
from fldiag_papers.toys import plane as toy

#: Significant digits of the tables: enough to check a closed form by hand.
DIGITS = 12


def plane(
    console: Console, rho: float, beta: float, a: tuple[float, ...], out: Path | None
) -> None:
    frame = toy.run(rho, beta, a)
    geometry = toy.geometry(rho, beta, a)
    path = places.prepare(out or places.FALLBACK) / f"toy-plane-rho{rho:g}-beta{beta:g}"
    tables = files.write_table(frame, path, {**provenance(), "geometry": geometry}, DIGITS)
    pictures = style.write(plane_picture.draw(frame, geometry), path)
    rows = []
    for (method, client, curvature), part in frame.groupby(["method", "client", "a"]):
        row: Row = {"method": method, "client": int(client), "a": float(curvature)}
        for metric in ("end_point", "closed_form"):
            x, y = (number(part, metric, column=axis) for axis in ("x", "y"))
            if x is not None:
                row[metric] = f"({x:.6f}, {y:.6f})"
        row |= {m: value for m in ("distance", "angle") if (value := number(part, m)) is not None}
        rows.append(row)
    console.table(
        rows,
        {
            "method": "method",
            "a": "a",
            "end_point": "end point",
            "closed_form": "closed form",
            "distance": "distance",
            "angle": "angle to w_g–w_l* (°)",
        },
    )
    if geometry["equilibrium"] is None:
        console.note(
            f"rho = {rho:g} is not below |w_l* - w_g| = {geometry['distance']:.4g}: FedSOL has no equilibrium "
            "and hovers around w_g"
        )
    console.done(*tables, *pictures)


def iris(
    console: Console,
    protocol: iris_toy.Protocol | None,
    methods: Sequence[str],
    seeds: int,
    first: int,
    rounds: int,
    train_test: bool,
    executor: str,
    out: Path | None,
) -> None:
    """One protocol, or all variants when it is None (then ``rounds`` and ``train_test`` apply to each)."""
    if seeds < 1:
        raise FldiagError(
            f"seeds = {seeds} leaves nothing to train", "give --seeds 1 or more", usage=True
        )
    protocols = (
        iris_toy.variants(rounds=rounds, train_test=train_test) if protocol is None else (protocol,)
    )
    seed_range = range(first, first + seeds)
    label = "variants" if protocol is None else protocol.name
    about = {
        "protocols": [asdict(p) | {"name": p.name} for p in protocols],
        "methods": list(methods),
        "seeds": list(seed_range),
    }
    path = places.prepare(out or places.FALLBACK) / f"toy-iris-{label}-{digest(about)[:8]}"
    keep = path.with_name(f".{path.name}.parts")
    with console.progress("iris") as bar:
        frame = iris_toy.run(
            protocols,
            methods,
            seed_range,
            keep=keep,
            executor=executor,
            progress=bar,
            on_damage=console.note,
        )
    averages = iris_reported.summary(frame)
    sentences = iris_reported.statements(frame)
    about = {
        **provenance(seed=first),
        **about,
        "reported": iris_reported.REPORTED,
        "statements": sentences,
    }
    json_path, csv_path = files.write_table(frame, path, about, DIGITS)
    summary = files.write_text(files.beside(path, "-summary.csv"), files.csv_text(averages, DIGITS))
    seed_rows = iris_reported.per_seed(frame)
    if protocol is None:
        pictures = style.write(iris_picture.protocols(seed_rows, iris_reported.REPORTED), path)
    else:
        pictures = style.write(
            iris_picture.measures(seed_rows, frame, iris_reported.REPORTED),
            path.with_name(f"{path.name}-measures"),
        )
        pictures += style.write(iris_picture.regions(frame), path)
    shutil.rmtree(keep, ignore_errors=True)
    _print_averages(console, averages, several=len(protocols) > 1)
    for sentence in sentences:
        console.say(sentence)
    console.result["statements"] = sentences
    if protocol is not None and protocol.lr != iris_reported.REPORTED_LR:
        console.note(
            f"the paper's learning rate is {iris_reported.REPORTED_LR:g}: --lr {iris_reported.REPORTED_LR:g}, or "
            "--variants for other protocols beside this one"
        )
    console.done(json_path, summary, csv_path, *pictures)


def _print_averages(console: Console, table: pd.DataFrame, *, several: bool) -> None:
    if console.machine:
        console.result["rows"] = table.astype(object).where(table.notna(), None).to_dict("records")
        return
    columns = {
        "accuracy": "global (%)",
        "paper": "paper (%)",
        "late": "last 5 rounds",
        "local": "clients (%)",
        "drop": "drop",
        "forgetting": "worst class",
        "disagreement": "differs (%)",
    }
    rows = []
    for _, row in table.iterrows():
        cells = {
            "run": row["run"],
            "method": row["method"],
            "paper": "–" if pd.isna(row["reported"]) else f"{100 * row['reported']:.2f}",
        }
        for m in iris_reported.MEASURES:
            spread = "" if pd.isna(row[f"{m}_std"]) else f" ± {100 * row[f'{m}_std']:.1f}"
            cells[m] = f"{100 * row[m]:.1f}{spread}"
        rows.append(cells)
    console.table(rows, {**({"run": "protocol"} if several else {}), "method": "method", **columns})
