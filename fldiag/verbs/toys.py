"""``fldiag toy``: pictures one can check by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from fldiag.checkpoint import schema
from fldiag.console import Console
from fldiag.plotting import style
from fldiag.plotting import toy as picture
from fldiag.results.provenance import provenance
from fldiag.toys import plane as toy
from fldiag.verbs import output


def plane(console: Console, rho: float, beta: float, a: tuple[float, ...] | None, out: Path | None) -> None:
    options: dict[str, Any] = {"rho": rho, "beta": beta, **({"a": a} if a else {})}
    geometry = toy.geometry(**options)
    frame = toy.run(**options)
    path = output.prepare(out or output.FALLBACK) / f"toy-plane-rho{rho:g}-beta{beta:g}"
    text = io.StringIO()
    frame.to_csv(text, index=False, float_format="%.12g")
    schema.write_atomic(output.beside(path, ".csv"), lambda f: f.write(text.getvalue().encode()))
    about = json.dumps({**provenance(), "geometry": geometry}, indent=1)
    schema.write_atomic(output.beside(path, ".json"), lambda f: f.write(about.encode()))
    pictures = style.save(picture.draw(frame, geometry), path, ("pdf", "png"))
    rows = []
    for (method, client), part in frame[frame["client"].notna()].groupby(["method", "client"], sort=True):
        value = {m: part[part["metric"] == m] for m in ("end_point", "closed_form", "distance", "angle")}
        row = {"method": method, "client": int(client), "a": float(part["a"].iloc[0])}
        for metric in ("end_point", "closed_form"):
            if len(value[metric]):
                row[metric] = f"({value[metric]['x'].iloc[0]:.6f}, {value[metric]['y'].iloc[0]:.6f})"
        row |= {m: float(value[m]["value"].iloc[0]) for m in ("distance", "angle") if len(value[m])}
        rows.append(row)
    console.table(rows, {"method": "method", "a": "a", "end_point": "end point", "closed_form": "closed form",
                         "distance": "distance", "angle": "angle to w_g–w_l* (°)"})
    if geometry["equilibrium"] is None:
        console.note(f"rho = {rho:g} is not below |w_l* - w_g| = {geometry['distance']:.4g}: FedSOL has no equilibrium "
                     "and hovers around w_g")
    console.done(output.beside(path, ".json"), output.beside(path, ".csv"), *pictures)
