"""``fldiag personalise``: what the clients gain from a model of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.checkpoint.run import Run
from fldiag.console import Console
from fldiag.errors import FldiagError
from fldiag.method import Neighbours
from fldiag.plotting import personal as picture
from fldiag.plotting import style
from fldiag.results import files
from fldiag.results.provenance import digest, provenance
from fldiag.results.select import only
from fldiag.training import personalise as library
from fldiag.verbs import output

SUMMARY = {"epochs": "fine-tuning epochs", "clients": "clients", "mean": "personal accuracy", "std": "± (over clients)",
           "lowest": "lowest", "highest": "highest"}


def personalise(console: Console, path: Path, out: Path | None, *, epochs: str | None, clients: str | None, knn: bool,
                options: dict[str, Any]) -> None:
    run = Run.open(path)
    options |= {"epochs": _numbers(epochs, "epochs", "0,1,5"), "clients": _numbers(clients, "clients", "0,3,7")}
    folder = output.prepare(out or output.folder([run.checkpoint()], None))
    with console.progress(run.path.name) as progress, output.user_code():
        frame = library.personalise(run, neighbours=Neighbours() if knn else None, cache=folder / "cache", progress=progress,
                                    on_damage=console.note, **options)
    checkpoint = run.checkpoint()
    asked = {**{k: options[k] for k in ("epochs", "lr", "clients", "test", "seed")}, "knn": knn}
    name = folder / f"personalise-{checkpoint.path.stem}-{digest(checkpoint.sha256, asked)[:8]}"
    about = provenance(device=options["device"], seed=run.config.seed if options["seed"] is None else options["seed"],
                       run=run.path.name, config=run.index["hash"], options=asked,
                       checkpoint={"file": checkpoint.path.name, "sha256": checkpoint.sha256})
    written = files.write_table(frame, name, about)
    pictures = style.save(picture.draw(frame), name, ("pdf", "png"))
    console.table(summary(frame), SUMMARY)
    console.done(*written, *pictures)


def summary(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """One row for each number of epochs; none if the table holds no personal accuracy."""
    rows = []
    found = only(frame, metric=[library.METRIC, f"{library.METRIC}_std"])
    for e, part in found.groupby("index"):
        each = part.loc[part["scope"] == "client", "value"].dropna()
        whole = part[part["scope"] == "global"].set_index("metric")["value"]
        if len(each):
            rows.append({"epochs": int(e), "clients": len(each), "mean": float(whole[library.METRIC]),
                         "std": float(whole[f"{library.METRIC}_std"]), "lowest": float(each.min()),
                         "highest": float(each.max())})
    return rows


def _numbers(text: str | None, option: str, example: str) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise FldiagError(f"--{option} {text!r} is not a list of whole numbers", f"write for example --{option} {example}",
                          usage=True) from None
