"""Every reported number with the measured one beside it: ``ledger.csv`` and a page made from it.

Rebuilt from ``reported.csv``, and the json and csv files beside the figures; nothing is filled in by hand."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag import registry
from fldiag.errors import FldiagError
from fldiag.figures import claims, reported
from fldiag.figures.caption import unfinished
from fldiag.figures.gather import KEYS
from fldiag.figures.reported import Reported
from fldiag.figures.scales import SCALES
from fldiag.results import files
from fldiag.results.table import Row

#: Standard deviations from which on a number does not agree with another whose spread is not known.
FAR = 3.0
COLUMNS = ["kind", "paper", "id", "source", *KEYS, "metric", "reported", "reported_std", "scale", "measured", "measured_std",
           "seeds", "difference", "agrees", "status", "trained_on", "trained_model", "runs", "machine", "note"]
#: Metrics that are a difference to the method named by the mark ``over``.
DIFFERENCES = {"accuracy_change": "accuracy", "accuracy_gain": "accuracy"}


def made(out: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The json files of the figures, one of each at each scale (what lies beside a whole one is a part of it), smaller scales
    first. Raises FldiagError for one that cannot be read."""
    found: dict[tuple[str, str, str], tuple[Path, dict[str, Any]]] = {}
    for file in [*sorted(out.glob("*/*.json")), *(f for s in SCALES for f in sorted(out.glob(f"{s}/*/*.json")))]:
        try:
            about = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise FldiagError(f"{file} cannot be read: {error}", "remove it and make the figure again") from None
        if isinstance(about, dict) and {"paper", "id", "scale", "measured"} <= about.keys() and about["scale"] in SCALES:
            found.setdefault((about["paper"], about["id"], about["scale"]), (file, about))
    order = list(SCALES)
    return sorted(found.values(), key=lambda pair: order.index(pair[1]["scale"]))


def rows(out: Path) -> pd.DataFrame:
    """The ledger of what lies in a folder of figures."""
    every = made(out)
    lines = [line for paper in reported.papers() for row in reported.rows(paper) for line in _numbers(row, every)]
    lines += [line for _, about in every for line in _unreported(about)]
    lines += [line for claim in claims.claims() for line in _claims(claim, every)]
    return pd.DataFrame(lines, columns=COLUMNS)


def _numbers(row: Reported, every: list[tuple[Path, dict[str, Any]]]) -> Iterator[Row]:
    """A line for each scale at which a number was measured, or one that says why there is none."""
    base: Row = {"kind": "number" if row.metric else "figure", "paper": row.paper, "id": row.id, "source": row.source,
                 "setting": row.setting, "method": row.method, "model": row.model, "data": row.data, "metric": row.metric,
                 "reported": row.value, "reported_std": row.std, "note": row.note}
    mine = [(file, about) for file, about in every if (about["paper"], about["id"]) == (row.paper, row.id)]
    lines = [line for file, about in mine if (line := _line(row, base, file, about)) is not None]
    yield from lines or [{**base, "status": _why_not(row, mine)}]


def _line(row: Reported, base: Row, file: Path, about: dict[str, Any]) -> Row | None:
    common = {**base, "scale": about["scale"], "machine": about["machine"]}
    if not row.metric:
        if any(r.metric for r in reported.rows(row.paper) if r.id == row.id):  # says only that cells are lost
            return None
        return {**common, "status": "drawn", "seeds": len(about["seeds"]), "runs": " ".join(sorted(
            {run["hash"] for run in about["runs"].values()}))}
    hit = _find(about, row, row.method, DIFFERENCES.get(row.metric, row.metric))
    if hit is None or "column" in row.settings:
        return None
    value, std, runs = hit["value"], hit["std"], hit["runs"]
    if row.metric in DIFFERENCES:
        base_hit = _find(about, row, row.settings.get("over", ""), DIFFERENCES[row.metric])
        if base_hit is None or base_hit["value"] is None or value is None:
            return None
        spreads = [s for s in (std, base_hit["std"]) if s is not None]
        value, std = value - base_hit["value"], sum(s * s for s in spreads) ** 0.5 if spreads else None
        runs = sorted({*runs, *base_hit["runs"]})
    line = {**common, "measured": value, "measured_std": std, "seeds": hit["seeds"], "trained_on": hit["trained_on"],
            "trained_model": hit["trained_model"], "runs": " ".join(runs),
            "status": _status(hit)}
    if value is not None and row.value is not None:
        line |= {"difference": value - row.value, "agrees": _agrees(row, line, value - row.value, bool(about.get("reduction")))}
    return line


def _find(about: dict[str, Any], row: Reported, method: str, metric: str) -> dict[str, Any] | None:
    wanted = [row.plain, method, row.model, row.data, metric]
    if method != row.method:  # the method compared with has no options of this one
        own = {k for k in row.settings if k not in (*reported.FEDERATION, *reported.MARKS)}
        for plain in (row.plain, ";".join(p for p in row.plain.split(";") if p.split("=")[0] not in own)):
            for hit in about["measured"]:
                if [hit[k] for k in KEYS] + [hit["metric"]] == [plain, *wanted[1:]]:
                    return dict(hit)
        return None
    return next((dict(hit) for hit in about["measured"] if [hit[k] for k in KEYS] + [hit["metric"]] == wanted), None)


def _agrees(row: Reported, line: Row, difference: float, reduced: bool) -> str:
    """Whether the difference is within both spreads (one standard deviation each), where the protocol is the paper's."""
    base = line["trained_on"].split("@")[0].rpartition("-")[0] or line["trained_on"]
    if row.data and line["trained_on"] and row.data not in (line["trained_on"], base):
        return "other data"
    if row.model and line["trained_model"] and row.model != line["trained_model"]:
        return "other model"
    if "not reached within" in row.note:
        return "bound"
    if reduced:
        return "reduced"
    spreads = [s for s in (row.std, line["measured_std"]) if s is not None]
    if len(spreads) < 2:
        far = bool(spreads) and abs(difference) > FAR * spreads[0]
        return "no" if far else "one spread" if spreads else "no spread"
    return "yes" if abs(difference) <= sum(spreads) else "no"


def _status(hit: dict[str, Any]) -> str:
    """Whether there is a number; seeds without one are told of, for the mean is over the others."""
    without, word = hit.get("diverged", 0), "not reached" if hit["metric"].startswith(("rounds_to_", "cost_")) else "diverged"
    some = f"{without} of {hit['seeds'] + without} seeds"
    if hit["value"] is None:
        return f"{word} by {some}" if hit["seeds"] else word
    later = f"; {n} of {hit['seeds']} seeds diverged later" if (n := hit.get("diverged_later", 0)) else ""
    return (f"measured; {some} {word}" if without else "measured") + later


def _why_not(row: Reported, mine: list[tuple[Path, dict[str, Any]]]) -> str:
    if "nothing is measured" in row.note or (not row.metric and "other cells are lost" in row.note):
        return "nothing to measure"
    if row.note == "lost" and not mine:
        return "lost in the paper's text; not run"
    if "column" in row.settings:
        return "its column in the table is not known"
    if not mine and row.model and row.model not in registry.model:
        return f"left out: there is no model {row.model} here"
    if not mine:
        return "not run"
    about = mine[-1][1]
    key = [row.plain, row.method, row.model, row.data]
    for kind, word in (("left_out", "not run"), ("failed", "failed")):
        why = next((hit["why"] for hit in about[kind] if [hit[k] for k in KEYS] == key), "")
        if why:
            return f"{word}: {why}"
    if unfinished(about) and (row.metric in DIFFERENCES or row.metric.startswith(("cost_", "rounds_to_best"))):
        return "not run: what it is relative to is not finished"
    return "not part of the study"


def _unreported(about: dict[str, Any]) -> Iterator[Row]:
    """Numbers of figures for which the text prints none."""
    printed = {(*(getattr(r, k) if k != "setting" else r.plain for k in KEYS), r.metric)
               for r in reported.rows(about["paper"]) if r.id == about["id"] and r.metric}
    for hit in about["measured"]:
        if (*(hit[k] for k in KEYS), hit["metric"]) not in printed:
            yield {"kind": "number", "paper": about["paper"], "id": about["id"], "source": about["source"],
                   **{k: hit[k] for k in (*KEYS, "metric", "seeds", "trained_on", "trained_model")}, "scale": about["scale"],
                   "measured": hit["value"], "measured_std": hit["std"], "runs": " ".join(hit["runs"]),
                   "machine": about["machine"], "status": _status(hit),
                   "note": "no number in the paper's text"}


def _claims(claim: claims.Claim, every: list[tuple[Path, dict[str, Any]]]) -> Iterator[Row]:
    paper, id = claim.study.split("/")
    base: Row = {"kind": "claim", "paper": paper, "id": claim.id, "source": claim.source, "metric": claim.text}
    mine = [(file, about) for file, about in every if (about["paper"], about["id"]) == (paper, id)]
    for file, about in mine:
        try:
            content = files.read_csv_bytes(file.with_suffix(".csv"), about)
            verdict = claim.check(pd.read_csv(io.BytesIO(content), low_memory=False))
            found = {"status": verdict.text, "note": verdict.numbers, "seeds": len(verdict.votes),
                     "agrees": {"holds": "yes", "undecided": "undecided"}.get(verdict.text.split(" (")[0], "no")}
        except (FldiagError, OSError) as error:
            found = {"status": "not decided", "note": error.what if isinstance(error, FldiagError) else str(error)}
        yield {**base, **found, "scale": about["scale"], "machine": about["machine"],
               "runs": " ".join(sorted({run["hash"] for run in about["runs"].values()}))}
    if not mine:
        yield {**base, "status": "not run"}


def write(out: Path) -> list[Path]:
    """Rebuild ``ledger.md``, ``gallery.md`` and ``ledger.csv``; returns them. Raises FldiagError when it cannot write."""
    from fldiag.figures.ledger_page import gallery, page

    found = rows(out)
    there = made(out)
    pages = {"ledger.md": page(found, there, out), "gallery.md": gallery(there, out),
             "ledger.csv": files.csv_text(found, digits=6)}
    return [files.write_text(out / name, content) for name, content in pages.items()]
