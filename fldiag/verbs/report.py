"""``fldiag report``: one self-contained HTML file of what is known about runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fldiag.console import Console
from fldiag.errors import FldiagError
from fldiag.report import build, summary
from fldiag.report.collect import Collection, Member, collect
from fldiag.results.provenance import digest
from fldiag.verbs import output

CHEAP = ("forgetting", "drift")
COLUMNS = {"run": "run", "method": "method", "rounds": "rounds", "accuracy": "test accuracy", "loss": "test loss",
           "lambda_1": "λ1", "forgetting": "lost in local training", "drift": "drift", "missing": "not in the report"}


def report(console: Console, runs: list[Path], out: Path | None, *, title: str | None, places: list[Path], compute: bool,
           where: dict[str, Any]) -> None:
    """See ``fldiag.report.collect`` for which tables it shows."""
    found = collect(runs, places)
    folder = output.prepare(out or _folder(found))
    if compute and _compute(console, found, where):
        found = collect(runs, places)
    labels = "-".join("".join(c if c.isalnum() or c in "._" else "-" for c in m.label) for m in found.members)
    name = labels if len(labels) <= 60 else f"{len(found.members)}-runs-{digest([m.label for m in found.members])[:8]}"
    with console.progress("report") as progress:
        path = build.write(found, folder / f"report-{name}.html", title=title, progress=progress)
    console.table([_row(m) for m in found.members], COLUMNS)
    for text in [*summary.remarks(found), *found.notes]:
        console.note(text)
    console.result["bytes"] = path.stat().st_size
    console.done(path)


def demo(console: Console, runs: list[Path], folder: Path, device: str) -> Path:
    """The report of the demo's runs beside its landscapes, with what they forget; its path."""
    found = collect(runs, [folder])
    if _compute(console, found, {"device": device}, kinds=("forgetting",)):
        found = collect(runs, [folder])
    with console.progress("report") as progress:
        return build.write(found, folder / "report.html", title="FedAvg and FedSOL on the digits", progress=progress)


def _folder(found: Collection) -> Path:
    """The run's own folder for its report, ``fldiag-out`` here for one of several runs."""
    if len(found.members) > 1 or not os.access(found.members[0].run.path, os.W_OK):
        return output.FALLBACK
    return found.members[0].run.path / "diagnostics"


def _row(m: Member) -> dict[str, Any]:
    values = {"accuracy": summary.accuracy(m), "loss": summary.loss(m), "lambda_1": summary.sharpness(m),
              "forgetting": summary.drop(m), "drift": summary.drift(m)}
    kinds = {k.split(":")[0] for k in m.tables}
    missing = [k for k in ("landscape", "spectrum", "forgetting", "drift", "matching", "account") if k not in kinds]
    return {"run": m.label, "method": str(m.setting("method", "name")), "rounds": m.run.done,
            **{k: None if v is None else v.value for k, v in values.items()}, "missing": ", ".join(missing)}


class _Quiet(Console):
    """Progress and remarks only: the tables of the diagnostics are in the report."""

    def table(self, rows: list[dict[str, Any]], columns: dict[str, str]) -> None: ...

    def say(self, text: str) -> None: ...

    def done(self, *paths: Path) -> None: ...


def _compute(console: Console, found: Collection, where: dict[str, Any], kinds: tuple[str, ...] = CHEAP) -> bool:
    """Make the cheap tables that are missing, forgetting and drift; what cannot be made is noted."""
    from fldiag.diagnostics.drift import drift as defaults
    from fldiag.verbs.drift import drift
    from fldiag.verbs.forgetting import forgetting

    quiet, made = _Quiet(), False
    options = {k: v for k, v in (defaults.__kwdefaults__ or {}).items() if k != "per"}  # as the command line has them
    for m in found.members:
        for kind in kinds:
            if kind in m.tables:
                continue
            try:
                if kind == "forgetting":
                    forgetting(quiet, m.run.path, None, rounds=None, options={"min_count": 5, "confidence": 0.95}, why=False,
                               slice_="train", k=5, seed=0, where=dict(where))
                else:
                    drift(quiet, m.run.path, None, rounds=None, options=options, where=dict(where))
                made = True
            except FldiagError as error:
                console.note(f"{m.label}: no {kind}: {error.what}")
    return made
