"""The papers' own numbers, ``<paper>/reported.csv``, and the studies beside them."""

from __future__ import annotations

import csv
import importlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from fldiag.errors import FldiagError, nearest
from fldiag_papers.study import Study

#: Keys of a setting that describe the federation; those that only tell rows apart; all others are options of the method.
FEDERATION = (
    "partition",
    "alpha",
    "shards",
    "classes",
    "clients",
    "ratio",
    "rounds",
    "epochs",
    "lr",
    "public",
)
MARKS = ("over", "printed", "column", "survivor", "group")
#: The module of a paper's folder that is no study: what the paper says in words.
CLAIMS = "claims"


@dataclass(frozen=True)
class Reported:
    """A row of reported.csv; ``value`` is None where the number is lost or none was printed."""

    paper: str
    id: str
    source: str
    setting: str
    method: str
    model: str
    data: str
    metric: str
    value: float | None
    std: float | None
    note: str
    rounding: float = 0.0  # half of the last digit printed

    @property
    def key(self) -> dict[str, str]:
        return {
            "setting": self.setting,
            "method": self.method,
            "model": self.model,
            "data": self.data,
        }

    @property
    def settings(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for pair in self.setting.split(";")) if self.setting else {}

    @property
    def plain(self) -> str:
        """The setting without the marks: what can be run."""
        return ";".join(f"{k}={v}" for k, v in self.settings.items() if k not in MARKS)


#: Where the papers' folders lie.
FOLDER = Path(__file__).parent


def papers() -> list[str]:
    return sorted(path.parent.name for path in FOLDER.glob("*/reported.csv"))


@cache
def rows(paper: str) -> tuple[Reported, ...]:
    """Everything a paper reports."""
    with open(FOLDER / paper / "reported.csv", newline="", encoding="utf-8") as file:
        return tuple(
            Reported(
                paper,
                **{k: v for k, v in row.items() if k not in ("value", "std")},
                value=float(row["value"]) if row["value"] else None,
                rounding=_rounding(row["value"]),
                std=float(row["std"]) if row["std"] else None,
            )
            for row in csv.DictReader(file)
        )


def _rounding(printed: str) -> float:
    return 0.5 * 10.0 ** -len(printed.partition(".")[2]) if printed else 0.0


@cache
def studies() -> dict[str, Study]:
    """Name (``fedsol/fig6``) -> study, by paper: figures, then tables, by number."""
    unordered = {}
    for paper in papers():
        for path in (FOLDER / paper).glob("*.py"):
            if path.stem not in ("__init__", CLAIMS):
                content = importlib.import_module(f"fldiag_papers.{paper}.{path.stem}")
                for study in getattr(content, "STUDIES", None) or [content.STUDY]:
                    study = replace(study, paper=paper, id=study.id or path.stem)
                    unordered[study.name] = study
    return {name: unordered[name] for name in sorted(unordered, key=_order)}


def _order(name: str) -> tuple[str, str, int, str]:
    paper, _, id = name.partition("/")
    word = id.rstrip("0123456789")
    number = int(id[len(word) :] or 0)
    return paper, {"table": "z", "fig": "y"}.get(word, "x"), number, id


def select(ids: list[str]) -> list[Study]:
    """The studies called for: ``fedsol/fig6``, ``fedsol`` (all of a paper), ``fig6`` where only one paper has it; none: all.

    Raises FldiagError for anything else."""
    by_name = studies()
    if not ids:
        return list(by_name.values())
    selection: dict[str, Study] = {}
    for id in ids:
        hits = [n for n in by_name if n == id or n.split("/")[0] == id] or [
            n for n in by_name if n.split("/")[1] == id
        ]
        if len(hits) > 1 and id not in papers():
            raise FldiagError(
                f"{id!r} is in several papers", f"say which: {', '.join(hits)}", usage=True
            )
        if not hits:
            raise FldiagError(
                f"unknown figure {id!r}",
                nearest(id, [*by_name, *papers()]) + _silent(id),
                usage=True,
            )
        selection |= {n: by_name[n] for n in hits}
    return list(selection.values())


def _silent(id: str) -> str:
    paper, _, short = id.partition("/")
    notes = [r.note for r in rows(paper) if r.id == short] if short and paper in papers() else []
    return f"; of {id} the paper's text says: {notes[0]}" if notes and notes[0] else ""
