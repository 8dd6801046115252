"""How wrong a coarse-to-fine landscape is, against what it says: true and reported errors of surfaces that are known whole.

    python analyses/speed/landscape_error.py [--cache FOLDER] [--set calibration] [--margins 2.8,3.4] [--out figures/speed]

Surfaces of 41x41 points (``landscape_surfaces.py``): networks trained on the digits, six architectures, four spans, along
eigenvectors and random directions; and synthetic ones, whose features span a known number of cells. ``grid.MARGIN`` was set
on the calibration set (``--set calibration --margins 2.8,3.4``); the test set has other seeds and had no part in it. Both are
printed apart. Each surface is also filled by the rule before
this one (``landscape_before.py``: a tensor-product spline, refined axis by axis), which says how many evaluations it took
and how wrong it was. A reported error *holds* when it is at least the true one; a surface whose points are all evaluated has
no error and holds. Smooth surfaces are those where a bicubic spline through every fourth point is within 1 % of the range.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import landscape_before as before
import numpy as np
import pandas as pd
import torch
from landscape_surfaces import COUNTED, NETWORKS, Known, of_network, synthetic
from scipy.interpolate import RectBivariateSpline

from fldiag.landscape import grid
from fldiag.results.machine import capability, machine
from fldiag.results.provenance import provenance

RTOL = 0.01
#: Seeds of the networks (the slow ones take the first only), seed and copies of the synthetic surfaces.
SETS = {"calibration": ((100, 101), 100, 3), "test": ((0, 1), 0, 4)}
SLOW = ("small_resnet", "vit")
#: Smaller errors are rounding, and no ratio of them says anything.
ROUNDING = 1e-6


def smooth(surface: Known) -> bool:
    every = slice(None, None, 4)
    spline = RectBivariateSpline(
        surface.axis[every], surface.axis[every], surface.losses[every, every], s=0
    )
    return bool(
        np.abs(spline(surface.axis, surface.axis) - surface.losses).max()
        <= RTOL * np.ptp(surface.losses)
    )


def filled(surface: Known, rule: Callable[..., Any]) -> tuple[int, float, float, float]:
    """Points evaluated, the error reported and the true one as shares of the range, seconds of the rule itself."""

    def evaluate(points: np.ndarray) -> np.ndarray:
        losses = surface.losses[tuple(points.T)]
        return np.stack([losses, np.zeros_like(losses)], axis=1)

    began = time.perf_counter()
    found = rule(evaluate)
    seconds = time.perf_counter() - began
    true = grid.Heights.of(surface.losses).share(found.value - surface.losses, surface.losses)
    return int(found.evaluated.sum()), found.error or 0.0, float(true.max()), seconds


def measure(surface: Known, which: str) -> dict[str, Any]:
    points, reported, true, seconds = filled(
        surface, lambda losses: grid.fill(len(surface.axis), losses, RTOL, 0)
    )
    old_points, old_reported, old_true, _ = filled(
        surface, lambda losses: before.fill(surface.axis, losses, RTOL, 0)
    )
    kind = (
        "trained"
        if surface.cells is None
        else "synthetic"
        if surface.cells >= COUNTED
        else "narrow"
    )
    return {
        "set": which,
        "kind": kind,
        "group": surface.group,
        "surface": surface.name,
        "cells": surface.cells,
        "smooth": smooth(surface),
        "points": points,
        "reported": reported,
        "true": true,
        "seconds": seconds,
        "before_points": old_points,
        "before_reported": old_reported,
        "before_true": old_true,
    }


def line(part: pd.DataFrame, title: str) -> dict[str, Any]:
    """What is said of some surfaces: how often the report held, how far below and above it was."""
    splines = part[(part["reported"] > 0) & (part["true"] > ROUNDING)]
    ratio = splines["reported"] / splines["true"]
    calm = part[part["smooth"]]
    return {
        "surfaces": title,
        "number": len(part),
        "interpolated": int((part["reported"] > 0).sum()),
        "held %": 100 * (part["reported"] >= part["true"].where(part["true"] > ROUNDING, 0)).mean(),
        "worst true/reported": (1 / ratio).max(),
        "median reported/true": ratio.median(),
        "before: held %": 100
        * (
            part["before_reported"] >= part["before_true"].where(part["before_true"] > ROUNDING, 0)
        ).mean(),
        "before: largest error %": 100 * part["before_true"].max(),
        "largest error %": 100 * part["true"].max(),
        "points/before": part["points"].sum() / part["before_points"].sum(),
        "smooth": len(calm),
        "smooth: points/before": calm["points"].sum() / calm["before_points"].sum()
        if len(calm)
        else np.nan,
        "smooth: largest": (calm["points"] / calm["before_points"]).max(),
    }


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for which, part in frame.groupby("set", sort=False):
        counted = part[part["kind"] != "narrow"]
        rows.append(line(counted, f"{which}: trained and synthetic"))
        for kind, title in (
            ("trained", "trained networks"),
            ("synthetic", f"synthetic, features of {COUNTED:g} cells or more"),
            ("narrow", "synthetic, narrower (not counted)"),
        ):
            chosen = part[part["kind"] == kind]
            if len(chosen):
                rows.append(line(chosen, f"{which}: {title}"))
        rows += [
            line(some, f"{which}: {kind}, {group}")
            for (kind, group), some in part.groupby(["kind", "group"], sort=False)
        ]
    return pd.DataFrame(rows)


def text(table: pd.DataFrame) -> str:
    """In Markdown."""

    def cell(value: Any) -> str:
        return (
            f"{value}"
            if isinstance(value, (str, int))
            else "–"
            if not np.isfinite(value)
            else f"{value:.3g}"
        )

    lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    return (
        "\n".join(
            [
                *lines,
                *(
                    "| " + " | ".join(cell(v) for v in row) + " |"
                    for row in table.itertuples(index=False)
                ),
            ]
        )
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cache", type=Path, help="a folder that keeps the networks' surfaces")
    parser.add_argument("--set", choices=list(SETS), help="only that one")
    parser.add_argument(
        "--margins", default="", help="comma-separated margins to try instead of the one in use"
    )
    parser.add_argument("--out", type=Path, default=Path("figures/speed"))
    args = parser.parse_args()
    surfaces: list[tuple[str, Known]] = []
    for which in [args.set] if args.set else SETS:
        seeds, seed, copies = SETS[which]
        surfaces += [
            (which, s)
            for run in seeds
            for name in NETWORKS
            if run == seeds[0] or name not in SLOW
            for s in of_network(name, run, args.cache)
        ]
        surfaces += [(which, s) for s in synthetic(seed, copies)]
    for margin in [float(m) for m in args.margins.split(",") if m]:
        grid.MARGIN = margin
        table = summary(pd.DataFrame([measure(s, which) for which, s in surfaces]))
        print(f"margin {margin:g}\n\n{text(table.head(4))}", flush=True)
    if args.margins:
        return
    frame = pd.DataFrame([measure(s, which) for which, s in surfaces])
    where = (
        f"{machine()}, {capability()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    table = text(summary(frame))
    head = f"Margin {grid.MARGIN:g}, error allowed {100 * RTOL:g} % of the range. {where}.\n\n"
    args.out.mkdir(parents=True, exist_ok=True)
    frame.to_csv(args.out / "landscape_error.csv", index=False, float_format="%.6g")
    (args.out / "landscape_error.md").write_text(head + table, "utf-8")
    about = provenance(
        margin=grid.MARGIN, rtol=RTOL, sets={k: list(v) for k, v in SETS.items()}, machine=where
    )
    (args.out / "landscape_error.json").write_text(json.dumps(about, indent=1), "utf-8")
    print(head + table)
    print(args.out / "landscape_error.md")


if __name__ == "__main__":
    main()
