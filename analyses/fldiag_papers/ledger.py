"""Every reported number with the measured one beside it: ``ledger.csv`` and a page made from it.

Rebuilt from ``reported.csv``, and the json and csv files beside the figures; nothing is filled in by hand."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.results import files
from fldiag.results.table import Row
from fldiag_papers import agreement, arithmetic, claims, evidence, reported
from fldiag_papers.caption import NOT_YET, command, unfinished
from fldiag_papers.gather import KEYS
from fldiag_papers.reported import FEDERATION, Reported
from fldiag_papers.scales import SCALES
from fldiag_papers.study import PROFILED

COLUMNS = [
    "kind",
    "paper",
    "id",
    "source",
    *KEYS,
    "metric",
    "reported",
    "reported_std",
    "scale",
    "measured",
    "measured_std",
    "last_rounds_std",
    "seeds",
    "difference",
    "agrees",
    "basis",
    "status",
    "trained_on",
    "trained_model",
    "runs",
    "machine",
    "code",
    "torch",
    "note",
]
#: Metrics that are a difference to the method named by the mark ``over``.
DIFFERENCES = {"accuracy_change": "accuracy", "accuracy_gain": "accuracy"}


@dataclass(frozen=True)
class Entry:
    """A figure on the disk: its json file, and what that says."""

    file: Path
    about: dict[str, Any]

    @property
    def name(self) -> tuple[str, str]:
        return self.about["paper"], self.about["id"]

    @cached_property
    def numbers(self) -> dict[tuple[str, ...], dict[str, Any]]:
        """Setting, method, model, data and metric -> what was measured; the first of several."""
        hits = reversed(self.about["measured"])
        return {(*(hit[k] for k in KEYS), hit["metric"]): hit for hit in hits}

    @property
    def origin(self) -> Row:
        """Scale and machine; the version and commit of fldiag (of the runs where they say it, they did the work) and the
        PyTorch."""
        runs = [run for run in self.about["runs"].values() if run.get("fldiag")] or [self.about]
        code = {
            f"{r.get('fldiag', 'version not recorded')} at {r.get('commit') or 'commit not recorded'}"
            for r in runs
        }
        return {
            "scale": self.about["scale"],
            "machine": self.about["machine"],
            "code": "; ".join(sorted(code)),
            "torch": "; ".join(sorted({str(r.get("torch", "not recorded")) for r in runs})),
        }

    @property
    def runs(self) -> str:
        return " ".join(sorted({run["hash"] for run in self.about["runs"].values()}))


def read_figures(out: Path) -> list[Entry]:
    """The figures of a folder, one of each at each scale (what lies beside a whole one is a part of it), larger scales first.

    Raises FldiagError for a json that cannot be read."""
    entries: dict[tuple[str, str, str], Entry] = {}
    parts = [f for s in SCALES for f in sorted(out.glob(f"{s}/*/*.json"))]
    for file in [*sorted(out.glob("*/*.json")), *parts]:
        try:
            about = files.read_json(file)
        except (OSError, ValueError) as error:
            raise FldiagError(
                f"{file} cannot be read: {error}", "remove it and make the figure again"
            ) from None
        keys = {"paper", "id", "scale", "measured"}
        if isinstance(about, dict) and keys <= about.keys() and about["scale"] in SCALES:
            about = {"command": command(about), **about}  # earlier versions did not write it
            entries.setdefault((about["paper"], about["id"], about["scale"]), Entry(file, about))
    order = list(SCALES)
    return sorted(entries.values(), key=lambda entry: -order.index(entry.about["scale"]))


def rows(out: Path) -> pd.DataFrame:
    """The ledger of what lies in a folder of figures."""
    figures = read_figures(out)
    lines = [
        line
        for paper in reported.papers()
        for row in reported.rows(paper)
        for line in _numbers(row, [e for e in figures if e.name == (row.paper, row.id)])
    ]
    lines += [line for entry in figures for line in _unreported(entry)]
    lines += [line for claim in claims.claims() for line in _claims(claim, figures)]
    return pd.DataFrame(lines, columns=COLUMNS)


# ---- numbers


def _numbers(row: Reported, figures: list[Entry]) -> Iterator[Row]:
    """A line for each scale at which a number was measured, or one that says why there is none."""
    base: Row = {
        "kind": "number" if row.metric else "figure",
        "paper": row.paper,
        "id": row.id,
        "source": row.source,
        **row.key,
        "metric": row.metric,
        "reported": row.value,
        "reported_std": row.std,
        "note": row.note,
    }
    if (worked := arithmetic.work_out(row)) is not None and row.value is not None:
        yield {
            **base,
            "measured": worked.value,
            "difference": worked.value - row.value,
            "basis": "arithmetic",
            "agrees": "yes" if worked.agrees(row) else "no",
            "status": f"worked out ({worked.text})",
        }
    lines = [line for entry in figures if (line := _line(row, base, entry)) is not None]
    yield from lines or [{**base, "status": _why_not(row, [entry.about for entry in figures])}]


def _line(row: Reported, base: Row, entry: Entry) -> Row | None:
    about = entry.about
    if not row.metric:
        if any(r.metric for r in reported.rows(row.paper) if r.id == row.id):
            return None  # the row says only that cells are lost
        seeds = len(about["seeds"])
        return {**base, **entry.origin, "status": "drawn", "seeds": seeds, "runs": entry.runs}
    hit = _find(entry, row, DIFFERENCES.get(row.metric, row.metric))
    if hit is None or "column" in row.settings:
        return None
    value, std, runs = hit["value"], hit["std"], hit["runs"]
    if row.metric in DIFFERENCES:
        other = _find_other(entry, row)
        if other is None or other["value"] is None or value is None:
            return None
        spreads = [s for s in (std, other["std"]) if s is not None]
        value -= other["value"]
        std = sum(s * s for s in spreads) ** 0.5 if spreads else None
        runs = sorted({*runs, *other["runs"]})
    late = agreement.last_rounds(row, runs, about)
    status = _status(hit)
    if late:
        status += "; mean of the last {rounds} rounds {accuracy:.1f} ± {std:.1f}".format(**late)
    line: Row = {
        **base,
        **entry.origin,
        "measured": value,
        "measured_std": hit.get("stderr", std),  # of counts over what is drawn at random
        "last_rounds_std": late.get("std"),
        "seeds": hit["seeds"],
        "trained_on": hit["trained_on"],
        "trained_model": hit["trained_model"],
        "runs": " ".join(runs),
        "basis": agreement.basis(row.metric),
        "status": status,
    }
    if value is not None and row.value is not None:
        line["difference"] = value - row.value
        line["agrees"] = agreement.verdict(row, line, value - row.value, about)
        profiled = _find(entry, row, row.metric + PROFILED)
        if profiled is not None and line["agrees"] == "no":
            number = profiled["value"]
            if agreement.printed(row, number - row.value) == "yes":
                line["agrees"] = agreement.AS_PROFILED
                line["status"] += f"; {number:.6g} {agreement.AS_PROFILED}"
    return line


def _find(entry: Entry, row: Reported, metric: str) -> dict[str, Any] | None:
    if row.method or row.model:
        return entry.numbers.get((row.plain, row.method, row.model, row.data, metric))
    hits = entry.about["measured"]  # a number of the data
    return next((hit for hit in hits if (hit["data"], hit["metric"]) == (row.data, metric)), None)


def _find_other(entry: Entry, row: Reported) -> dict[str, Any] | None:
    """The number of the method that a difference is to; it has no options of this one."""
    federation = [f"{k}={v}" for k, v in row.settings.items() if k in FEDERATION]
    for setting in (row.plain, ";".join(federation)):
        cell = (setting, row.settings.get("over", ""), row.model, row.data, DIFFERENCES[row.metric])
        if hit := entry.numbers.get(cell):
            return hit
    return None


def _status(hit: dict[str, Any]) -> str:
    """Whether there is a number; seeds without one are told of, for the mean is over the others."""
    without, seeds = hit.get("diverged", 0), hit["seeds"]
    word = "not reached" if hit["metric"].startswith(("rounds_to_", "cost_")) else "diverged"
    share = f"{without} of {seeds + without} seeds"
    if hit["value"] is None:
        return f"{word} by {share}" if seeds else word
    text = f"measured; {share} {word}" if without else "measured"
    later = hit.get("diverged_later", 0)
    return text + (f"; {later} of {seeds} seeds diverged later" if later else "")


def _why_not(row: Reported, figures: Sequence[dict[str, Any]]) -> str:
    if "nothing is measured" in row.note or (not row.metric and "other cells are lost" in row.note):
        return "nothing to measure"
    if row.note == "lost" and not figures:
        return "lost in the paper's text; not run"
    if "column" in row.settings:
        return "its column in the table is not known"
    if not figures:
        return "not run"
    cell = {**row.key, "setting": row.plain}
    reasons = [
        f"{word}: {hit['why']}"
        for about in figures
        for kind, word in (("left_out", "not run"), ("failed", "failed"))
        for hit in [h for h in about[kind] if cell.items() <= h.items()][:1]
    ]
    if reasons:  # what a scale cannot have says more than that a larger one is not finished
        return next((text for text in reasons if not text.endswith(NOT_YET)), reasons[0])
    relative = row.metric in DIFFERENCES or row.metric.startswith(("cost_", "rounds_to_best"))
    if relative and any(map(unfinished, figures)):
        return "not run: what it is relative to is not finished"
    return "not part of the study"


def _unreported(entry: Entry) -> Iterator[Row]:
    """Numbers of figures for which the text prints none."""
    about = entry.about
    printed = {
        (r.plain, r.method, r.model, r.data, r.metric)
        for r in reported.rows(about["paper"])
        if r.id == about["id"] and r.metric
    }
    varies = f"varies {about['varies']}" if "varies" in about else ""
    for hit in about["measured"]:
        cell = (*(hit[k] for k in KEYS), hit["metric"])
        if cell not in printed and not hit["metric"].endswith(PROFILED):
            yield {
                "kind": "number",
                **{k: about[k] for k in ("paper", "id", "source")},
                **{k: hit[k] for k in (*KEYS, "metric", "seeds", "trained_on", "trained_model")},
                **entry.origin,
                "measured": hit["value"],
                "measured_std": hit["std"],
                "runs": " ".join(hit["runs"]),
                "status": _status(hit),
                "note": varies or "no number in the paper's text",
            }


# ---- statements


def _claims(claim: claims.Claim, figures: Sequence[Entry]) -> Iterator[Row]:
    paper, id = claim.study.split("/")
    base: Row = {
        "kind": "claim",
        "paper": paper,
        "id": claim.id,
        "source": claim.source,
        "metric": claim.text,
    }
    entries = [entry for entry in figures if entry.name == (paper, id)]
    for entry in entries:
        about = entry.about
        try:
            verdict = _check(claim, entry, figures)
        except (FldiagError, OSError) as error:
            note = error.what if isinstance(error, FldiagError) else str(error)
            line: Row = {"status": "not decided", "note": note}
        else:
            configs = [run["config"] for run in about["runs"].values() if "config" in run]
            # Of runs that all divide the data in the same way.
            is_one = len({c["partition"].get("seed") for c in configs}) == 1
            line = {
                "status": verdict.text + (", for this partition" if is_one else ""),
                "note": verdict.numbers,
                "seeds": len(about["seeds"]),
                "agrees": {"holds": "yes", "does not hold": "no"}.get(verdict.outcome, "undecided"),
            }
        yield {**base, **entry.origin, **line, "runs": entry.runs}
    if not entries:
        yield {**base, "status": "not run"}


def _check(claim: claims.Claim, entry: Entry, figures: Sequence[Entry]) -> claims.Verdict:
    """The verdict on what the figure's csv has; undecided where models that it compares are near chance: what is said of such
    models says nothing of methods. Their accuracy is that in the csv, or else the one that any figure has of the same runs."""
    content = files.read_csv_bytes(entry.file.with_suffix(".csv"), entry.about)
    table = pd.read_csv(io.BytesIO(content), low_memory=False)
    table.attrs["cells"] = [trial.key() for trial in reported.studies()[claim.study].trials]
    verdict = claim.check(table)
    limit = evidence.floor_of(table)
    if limit is None:
        return verdict
    accuracies = _accuracies(table, verdict.labels) or _accuracies_elsewhere(entry, figures)
    low = [f"{name} {value:.3g} %" for name, value in accuracies.items() if value <= limit]
    return verdict.undecided(f"not trained far enough: {', '.join(low)}") if low else verdict


def _accuracies(table: pd.DataFrame, labels: tuple[Any, ...]) -> dict[Any, float]:
    """Test accuracy in percent of the global models, by label, from the first question that has it."""
    rows = table[
        (table["origin"] == "measured")
        & (table["metric"] == "accuracy")
        & table["label"].isin(labels)
    ]
    if "ask" in rows and len(rows):
        rows = rows[rows["ask"] == rows["ask"].iloc[0]]
    if "moment" in rows and (rows["moment"] == "aggregated").any():
        rows = rows[(rows["moment"] == "aggregated") & (rows["round"] == rows["round"].max())]
        rows = rows[rows["slice"] == "test"] if "slice" in rows else rows
    percent = rows["unit"].eq("%").to_numpy() if "unit" in rows else False
    values = pd.to_numeric(rows["value"]) * np.where(percent, 1.0, 100.0)
    return dict(values.groupby(rows["label"]).mean().dropna())


def _accuracies_elsewhere(entry: Entry, figures: Sequence[Entry]) -> dict[Any, float]:
    """Mean accuracy that figures have of these runs, by method."""
    runs = [run for run in entry.about["runs"].values() if "config" in run]
    methods = {run["hash"]: run["config"]["method"]["name"] for run in runs}
    accuracies: dict[str, list[float]] = {}
    for hit in (hit for other in figures for hit in other.about["measured"]):
        if hit["metric"] == "accuracy" and hit["value"] is not None:
            for name in {methods[run] for run in hit["runs"] if run in methods}:
                accuracies.setdefault(name, []).append(hit["value"])
    return {name: sum(values) / len(values) for name, values in accuracies.items()}


def write(out: Path) -> list[Path]:
    """Rebuild ``ledger.md`` with its picture, ``gallery.md``, ``ledger.csv`` and ``overview.md``; returns the texts.

    Raises FldiagError when it cannot write."""
    from fldiag_papers.ledger_page import gallery, overview, page
    from fldiag_papers.ledger_picture import draw

    ledger, figures = rows(out), read_figures(out)
    style.save(draw(ledger), out / "ledger", ("png",))
    pages = {
        "ledger.md": page(ledger, figures, out),
        "gallery.md": gallery(figures, out),
        "ledger.csv": files.csv_text(ledger, digits=6),
        "overview.md": overview(ledger, figures),
    }
    return [files.write_text(out / name, content) for name, content in pages.items()]
