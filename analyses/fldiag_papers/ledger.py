"""Every reported number with the measured one beside it: ``ledger.csv`` and a page made from it.

Rebuilt from ``reported.csv``, and the json and csv files beside the figures; nothing is filled in by hand."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fldiag.errors import FldiagError
from fldiag.results import files
from fldiag.results.table import Row
from fldiag_papers import agreement, arithmetic, claims, evidence, reported
from fldiag_papers.agreement import AS_PROFILED
from fldiag_papers.caption import NOT_YET, command, unfinished
from fldiag_papers.gather import KEYS
from fldiag_papers.reported import Reported
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


def read_figures(out: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The json files of the figures, one of each at each scale (what lies beside a whole one is a part of it), larger scales
    first. Raises FldiagError for one that cannot be read."""
    entries: dict[tuple[str, str, str], tuple[Path, dict[str, Any]]] = {}
    for file in [
        *sorted(out.glob("*/*.json")),
        *(f for s in SCALES for f in sorted(out.glob(f"{s}/*/*.json"))),
    ]:
        try:
            about = files.read_json(file)
        except (OSError, ValueError) as error:
            raise FldiagError(
                f"{file} cannot be read: {error}", "remove it and make the figure again"
            ) from None
        if (
            isinstance(about, dict)
            and {"paper", "id", "scale", "measured"} <= about.keys()
            and about["scale"] in SCALES
        ):
            about = {"command": command(about), **about}  # earlier versions did not write it
            entries.setdefault((about["paper"], about["id"], about["scale"]), (file, about))
    order = list(SCALES)
    return sorted(entries.values(), key=lambda pair: -order.index(pair[1]["scale"]))


def rows(out: Path) -> pd.DataFrame:
    """The ledger of what lies in a folder of figures."""
    figures = read_figures(out)
    lines = [
        line
        for paper in reported.papers()
        for row in reported.rows(paper)
        for line in _numbers(row, figures)
    ]
    lines += [line for _, about in figures for line in _unreported(about)]
    lines += [line for claim in claims.claims() for line in _claims(claim, figures)]
    return pd.DataFrame(lines, columns=COLUMNS)


def _numbers(row: Reported, figures: list[tuple[Path, dict[str, Any]]]) -> Iterator[Row]:
    """A line for each scale at which a number was measured, or one that says why there is none."""
    base: Row = {
        "kind": "number" if row.metric else "figure",
        "paper": row.paper,
        "id": row.id,
        "source": row.source,
        "setting": row.setting,
        "method": row.method,
        "model": row.model,
        "data": row.data,
        "metric": row.metric,
        "reported": row.value,
        "reported_std": row.std,
        "note": row.note,
    }
    mine = [
        (file, about)
        for file, about in figures
        if (about["paper"], about["id"]) == (row.paper, row.id)
    ]
    derived = arithmetic.worked(row)
    if derived is not None:
        assert row.value is not None
        yield {
            **base,
            "measured": derived.value,
            "difference": derived.value - row.value,
            "basis": "arithmetic",
            "agrees": "yes" if derived.agrees(row) else "no",
            "status": f"worked out ({derived.text})",
        }
    lines = [line for file, about in mine if (line := _line(row, base, file, about)) is not None]
    yield from lines or [{**base, "status": _why_not(row, mine)}]


def _line(row: Reported, base: Row, file: Path, about: dict[str, Any]) -> Row | None:
    common = {**base, "scale": about["scale"], "machine": about["machine"], **_made_by(about)}
    if not row.metric:
        if any(
            r.metric for r in reported.rows(row.paper) if r.id == row.id
        ):  # says only that cells are lost
            return None
        return {
            **common,
            "status": "drawn",
            "seeds": len(about["seeds"]),
            "runs": " ".join(sorted({run["hash"] for run in about["runs"].values()})),
        }
    hit = _find(about, row, row.method, DIFFERENCES.get(row.metric, row.metric))
    if hit is None or "column" in row.settings:
        return None
    value, std, runs = hit["value"], hit["std"], hit["runs"]
    if row.metric in DIFFERENCES:
        base_hit = _find(about, row, row.settings.get("over", ""), DIFFERENCES[row.metric])
        if base_hit is None or base_hit["value"] is None or value is None:
            return None
        spreads = [s for s in (std, base_hit["std"]) if s is not None]
        value, std = (
            value - base_hit["value"],
            sum(s * s for s in spreads) ** 0.5 if spreads else None,
        )
        runs = sorted({*runs, *base_hit["runs"]})
    std = hit.get("stderr", std)  # of counts over what was drawn at random
    late = agreement.last_rounds(row, runs, about)
    remark = (
        "; mean of the last {rounds} rounds {accuracy:.1f} ± {std:.1f}".format(**late)
        if late
        else ""
    )
    line = {
        **common,
        "measured": value,
        "measured_std": std,
        "last_rounds_std": late.get("std"),
        "seeds": hit["seeds"],
        "trained_on": hit["trained_on"],
        "trained_model": hit["trained_model"],
        "runs": " ".join(runs),
        "basis": "cost"
        if row.metric in agreement.COSTS
        else "data"
        if row.metric in agreement.EXAMPLES
        else "trained",
        "status": _status(hit) + remark,
    }
    if value is not None and row.value is not None:
        line |= {
            "difference": value - row.value,
            "agrees": agreement.verdict(row, line, value - row.value, about),
        }
        profiled = _find(about, row, row.method, row.metric + PROFILED)
        if (
            profiled is not None
            and line["agrees"] == "no"
            and agreement.printed(row, profiled["value"] - row.value) == "yes"
        ):
            line |= {
                "agrees": AS_PROFILED,
                "status": f"{line['status']}; {profiled['value']:.6g} {AS_PROFILED}",
            }
    return line


def _made_by(about: dict[str, Any]) -> Row:
    """The version and commit of fldiag (of the runs where they say it, they did the work) and the PyTorch."""
    makers = [run for run in about["runs"].values() if run.get("fldiag")] or [about]
    code = {
        f"{m.get('fldiag', 'version not recorded')} at {m.get('commit') or 'commit not recorded'}"
        for m in makers
    }
    return {
        "code": "; ".join(sorted(code)),
        "torch": "; ".join(sorted({str(m.get("torch", "not recorded")) for m in makers})),
    }


def _find(about: dict[str, Any], row: Reported, method: str, metric: str) -> dict[str, Any] | None:
    cell = [row.plain, method, row.model, row.data, metric]
    if not method and not row.model:  # a number of the data
        return next(
            (
                dict(hit)
                for hit in about["measured"]
                if (hit["data"], hit["metric"]) == (row.data, metric)
            ),
            None,
        )
    if method != row.method:  # the method compared with has no options of this one
        options = {k for k in row.settings if k not in (*reported.FEDERATION, *reported.MARKS)}
        for plain in (
            row.plain,
            ";".join(p for p in row.plain.split(";") if p.split("=")[0] not in options),
        ):
            for hit in about["measured"]:
                if [hit[k] for k in KEYS] + [hit["metric"]] == [plain, *cell[1:]]:
                    return dict(hit)
        return None
    return next(
        (
            dict(hit)
            for hit in about["measured"]
            if [hit[k] for k in KEYS] + [hit["metric"]] == cell
        ),
        None,
    )


def _status(hit: dict[str, Any]) -> str:
    """Whether there is a number; seeds without one are told of, for the mean is over the others."""
    without, word = (
        hit.get("diverged", 0),
        "not reached" if hit["metric"].startswith(("rounds_to_", "cost_")) else "diverged",
    )
    share = f"{without} of {hit['seeds'] + without} seeds"
    if hit["value"] is None:
        return f"{word} by {share}" if hit["seeds"] else word
    later = (
        f"; {n} of {hit['seeds']} seeds diverged later"
        if (n := hit.get("diverged_later", 0))
        else ""
    )
    return (f"measured; {share} {word}" if without else "measured") + later


def _why_not(row: Reported, mine: list[tuple[Path, dict[str, Any]]]) -> str:
    if "nothing is measured" in row.note or (not row.metric and "other cells are lost" in row.note):
        return "nothing to measure"
    if row.note == "lost" and not mine:
        return "lost in the paper's text; not run"
    if "column" in row.settings:
        return "its column in the table is not known"
    if not mine:
        return "not run"
    key = [row.plain, row.method, row.model, row.data]
    reasons = [
        f"{word}: {why}"
        for _, about in mine
        for kind, word in (("left_out", "not run"), ("failed", "failed"))
        if (why := next((hit["why"] for hit in about[kind] if [hit[k] for k in KEYS] == key), ""))
    ]
    if reasons:  # what a scale cannot have says more than that a larger one is not finished
        return next((text for text in reasons if not text.endswith(NOT_YET)), reasons[0])
    relative = row.metric in DIFFERENCES or row.metric.startswith(("cost_", "rounds_to_best"))
    if relative and any(unfinished(about) for _, about in mine):
        return "not run: what it is relative to is not finished"
    return "not part of the study"


def _unreported(about: dict[str, Any]) -> Iterator[Row]:
    """Numbers of figures for which the text prints none."""
    printed = {
        (*(getattr(r, k) if k != "setting" else r.plain for k in KEYS), r.metric)
        for r in reported.rows(about["paper"])
        if r.id == about["id"] and r.metric
    }
    for hit in about["measured"]:
        if (*(hit[k] for k in KEYS), hit["metric"]) not in printed and not hit["metric"].endswith(
            PROFILED
        ):
            yield {
                "kind": "number",
                "paper": about["paper"],
                "id": about["id"],
                "source": about["source"],
                **{k: hit[k] for k in (*KEYS, "metric", "seeds", "trained_on", "trained_model")},
                "scale": about["scale"],
                "measured": hit["value"],
                "measured_std": hit["std"],
                "runs": " ".join(hit["runs"]),
                "machine": about["machine"],
                **_made_by(about),
                "status": _status(hit),
                "note": f"varies {about['varies']}"
                if "varies" in about
                else "no number in the paper's text",
            }


def _claims(claim: claims.Claim, figures: list[tuple[Path, dict[str, Any]]]) -> Iterator[Row]:
    paper, id = claim.study.split("/")
    base: Row = {
        "kind": "claim",
        "paper": paper,
        "id": claim.id,
        "source": claim.source,
        "metric": claim.text,
    }
    mine = [
        (file, about) for file, about in figures if (about["paper"], about["id"]) == (paper, id)
    ]
    for file, about in mine:
        try:
            content = files.read_csv_bytes(file.with_suffix(".csv"), about)
            table = pd.read_csv(io.BytesIO(content), low_memory=False)
            table.attrs["last_rounds"] = _swings(about)
            verdict = _of_trained_models(claim.check(table), table, about, figures)
            verdict_row = {
                "status": verdict.text + _for_this_partition(about),
                "note": verdict.numbers,
                "seeds": len(about["seeds"]),
                "agrees": {"holds": "yes", "does not hold": "no"}.get(verdict.outcome, "undecided"),
            }
        except (FldiagError, OSError) as error:
            verdict_row = {
                "status": "not decided",
                "note": error.what if isinstance(error, FldiagError) else str(error),
            }
        yield {
            **base,
            **verdict_row,
            "scale": about["scale"],
            "machine": about["machine"],
            **_made_by(about),
            "runs": " ".join(sorted({run["hash"] for run in about["runs"].values()})),
        }
    if not mine:
        yield {**base, "status": "not run"}


def _swings(about: Mapping[str, Any]) -> dict[str, float]:
    """How much the accuracy in percent changes from one to another of a run's last rounds: the largest deviation by method."""
    deviations: dict[str, float] = {}
    for run in about["runs"].values():
        if "last_rounds" in run:
            name = run["config"]["method"]["name"]
            deviations[name] = max(deviations.get(name, 0.0), run["last_rounds"]["std"])
    return deviations


def _of_trained_models(
    verdict: claims.Verdict,
    table: pd.DataFrame,
    about: dict[str, Any],
    figures: list[tuple[Path, dict[str, Any]]],
) -> claims.Verdict:
    """Undecided where models that it compares are near chance: what is said of such models says nothing of methods.

    Their accuracy is that in the table, or else the one that any figure has of the same runs."""
    names = table["trained_on"].dropna().unique() if "trained_on" in table else []
    limit = max((f for name in names if (f := evidence.floor(str(name))) is not None), default=None)
    if limit is None:
        return verdict
    accuracies = _accuracies(table, verdict.labels) or _elsewhere(about, figures)
    low = [f"{name} {value:.3g} %" for name, value in accuracies.items() if value <= limit]
    return verdict.undecided(f"not trained far enough: {', '.join(low)}") if low else verdict


def _accuracies(table: pd.DataFrame, labels: tuple[Any, ...]) -> dict[str, float]:
    """Test accuracy in percent of the global models, by label."""
    rows = table[
        (table["origin"] == "measured")
        & (table["metric"] == "accuracy")
        & table["label"].isin(labels)
    ]
    if "moment" in rows and (rows["moment"] == "aggregated").any():
        rows = rows[(rows["moment"] == "aggregated") & (rows["round"] == rows["round"].max())]
        rows = rows[rows["slice"] == "test"] if "slice" in rows else rows
    percent = rows["unit"].eq("%").to_numpy() if "unit" in rows else False
    values = rows.assign(value=pd.to_numeric(rows["value"]) * np.where(percent, 1.0, 100.0))
    return {
        str(name): float(value)
        for name, value in values.groupby("label")["value"].mean().dropna().items()
    }


def _elsewhere(
    about: dict[str, Any], figures: list[tuple[Path, dict[str, Any]]]
) -> dict[str, float]:
    """Mean accuracy that figures have of these runs, by method."""
    method = {
        run["hash"]: run["config"]["method"]["name"]
        for run in about["runs"].values()
        if "config" in run
    }
    accuracies: dict[str, list[float]] = {}
    for _, other in figures:
        for hit in other["measured"]:
            if hit["metric"] == "accuracy" and hit["value"] is not None:
                for name in {method[run] for run in hit["runs"] if run in method}:
                    accuracies.setdefault(name, []).append(hit["value"])
    return {name: sum(values) / len(values) for name, values in accuracies.items()}


def _for_this_partition(about: dict[str, Any]) -> str:
    """What is said of runs that all divide the data in the same way holds of that division."""
    seeds = {
        run["config"]["partition"].get("seed") for run in about["runs"].values() if "config" in run
    }
    return ", for this partition" if len(seeds) == 1 else ""


def write(out: Path) -> list[Path]:
    """Rebuild ``ledger.md`` with its picture, ``gallery.md`` and ``ledger.csv``; returns the texts. Raises FldiagError when it
    cannot write."""
    from fldiag.plotting import style
    from fldiag_papers.ledger_page import gallery, page
    from fldiag_papers.ledger_picture import draw

    ledger = rows(out)
    figures = read_figures(out)
    style.save(draw(ledger), out / "ledger", ("png",))
    pages = {
        "ledger.md": page(ledger, figures, out),
        "gallery.md": gallery(figures, out),
        "ledger.csv": files.csv_text(ledger, digits=6),
    }
    return [files.write_text(out / name, content) for name, content in pages.items()]
