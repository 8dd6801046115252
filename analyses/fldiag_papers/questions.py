"""What each question of a study asks of a run, of a config alone or of a toy: tables, one row a number."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fldiag import api, data, known, registry
from fldiag.diagnosis.dealt_partition import dealt
from fldiag.errors import FldiagError
from fldiag.results.select import only
from fldiag.results.table import PERSONAL, table
from fldiag.runs.history import History
from fldiag_papers import costs, propositions
from fldiag_papers.toys import iris, plane

#: Beside run.json: seconds of every round (on the CPU of its one thread's work), and the machine.
CLOCK = "clock.json"


@dataclass
class Subject:
    """What is asked: a run (or its config alone) and the rounds whose clients' weights it has, or a toy with its seeds and a
    folder for its finished trainings."""

    config: Any = None
    run: Any = None
    rounds: tuple[int, ...] = ()
    seeds: tuple[int, ...] = (0,)
    keep: Path | None = None
    device: str = "cpu"
    download: bool = False
    executor: Any = "serial"


def answer(subject: Subject, name: str, options: dict[str, Any]) -> pd.DataFrame:
    """The table of a question, infinities as missing: a csv that every reader takes.

    Raises FldiagError for unknown questions, and what the diagnostics raise."""
    frame = OWN[name](subject, **options) if name in OWN else _diagnose(subject, name, **options)
    values = pd.to_numeric(frame["value"]).astype(float)
    return frame.assign(value=values.replace([np.inf, -np.inf], np.nan))


def _diagnose(s: Subject, name: str, **options: Any) -> pd.DataFrame:
    if registry.diagnostic.get(name).on in ("run", "clients") and name != "personalise":
        over_rounds = known.over_rounds(known.item("diagnostics", name) or {})
        options = {"rounds": s.rounds if over_rounds else s.run.rounds[-1:], **options}
    return api.diagnose(
        s.run,
        name,
        cache=s.run.path / "diagnostics" / "cache",
        **{"device": s.device, "download": s.download, "executor": s.executor, **options},
    )


def _curve(s: Subject, metrics: tuple[str, ...] = ("accuracy",)) -> pd.DataFrame:
    rows = only(s.run.metrics, metric=metrics, scope=["global", "pair"]).copy()
    share = (rows["metric"] == "accuracy").to_numpy()
    rows.loc[share, "value"] *= 100
    rows.loc[share, "unit"] = "%"
    return rows


def _final(s: Subject, metrics: tuple[str, ...]) -> pd.DataFrame:
    """A run that diverged has no final value: the row says so in ``converged``."""
    rows = _curve(s, metrics)
    if s.run.status != "diverged":
        return rows[rows["round"] == s.run.config.rounds]
    last = rows.drop_duplicates("metric", keep="last").copy()
    return last.assign(value=pd.NA, converged=False).astype(rows.dtypes)


def _best(s: Subject) -> pd.DataFrame:
    """Also of a run that diverged later, which ``converged`` says; one without any accuracy has a row without a value."""
    rows = _curve(s)
    has_value = rows["value"].notna().any()
    first = (rows.loc[rows["value"].idxmax() :] if has_value else rows).iloc[:1]
    if s.run.status != "diverged":
        return first
    return first.assign(converged=False).astype(rows.dtypes)


def _seconds(s: Subject) -> pd.DataFrame:
    file = s.run.path / CLOCK
    clock = json.loads(file.read_text("utf-8"))["seconds"] if file.is_file() else []
    if len(clock) < s.run.done:  # of a run that was continued elsewhere, the first rounds only
        raise FldiagError(
            f"{s.run.path.name}: not all of its rounds were timed",
            "remove the folder to train it again",
        )
    value = statistics.median(clock[1:] or clock) if clock else None
    row = {"metric": "seconds_per_round", "value": value, "unit": "s", "scope": "global"}
    return table([row], **s.run.common)


def _reach(s: Subject, levels: tuple[float, ...]) -> pd.DataFrame:
    accuracies = _curve(s)
    rows = []
    for level in levels:
        rounds = accuracies.loc[accuracies["value"] >= level, "round"]
        rows.append(
            {
                "metric": f"rounds_to_{level:g}",
                "value": int(rounds.min()) if len(rounds) else None,
                "unit": "rounds",
                "scope": "global",
                "converged": bool(len(rounds)),
                "index": s.run.config.rounds,
            }
        )
    return table(rows, **s.run.common)


def _personal(s: Subject, **options: Any) -> pd.DataFrame:
    rows = _diagnose(s, "personalise", **options)
    rows = only(rows, scope="global", metric=[PERSONAL, f"{PERSONAL}_std"]).copy()
    return rows.assign(value=100 * rows["value"], stderr=100 * rows["stderr"], unit="%")


def _cost(s: Subject) -> pd.DataFrame:
    ratio = costs.relative(s.config)
    row = {"metric": "flops_relative", "value": ratio, "unit": "x", "scope": "global"}
    return table([row], method=s.config.method.name, seed=s.config.seed)


def _partition(s: Subject) -> pd.DataFrame:
    counts = dealt(s.config, download=s.download).counts
    rows = [
        {"metric": "count", "client": int(k), "index": int(c), "value": int(n), "scope": "client"}
        for k, c, n in counts[["client", "class", "count"]].itertuples(index=False)
    ]
    return table(rows, method=s.config.method.name)


def _examples(s: Subject) -> pd.DataFrame:
    dataset = data.load(s.config.data.name, s.config.data.root, s.download)
    counts = {"train_examples": dataset.train_y, "test_examples": dataset.test_y}
    return table([{"metric": name, "value": len(y)} for name, y in counts.items()], scope="global")


def _plane(s: Subject, **options: Any) -> pd.DataFrame:
    geometry = plane.geometry(**options)
    ends = [{"metric": m, "x": geometry[m][0], "y": geometry[m][1]} for m in ("w_g", "w_l")]
    rows = pd.concat([plane.run(**options), table(ends)], ignore_index=True)
    return rows.drop(columns="run")


def _iris(s: Subject, **protocol: Any) -> pd.DataFrame:
    return iris.run([iris.Protocol(**protocol)], seeds=s.seeds, keep=s.keep)


def _propositions(s: Subject) -> pd.DataFrame:
    history = History.of(s.run, rounds=s.rounds[-1:], device=s.device, download=s.download)
    return propositions.of_history(history, s.rounds[-1])


OWN: dict[str, Callable[..., pd.DataFrame]] = {
    "best": _best,
    "curve": _curve,
    "final": _final,
    "seconds": _seconds,
    "reach": _reach,
    "personal": _personal,
    "partition": _partition,
    "cost": _cost,
    "flops": lambda s: costs.flops(s.config),
    "traffic": lambda s: costs.traffic(s.config),
    "examples": _examples,
    "plane": _plane,
    "iris": _iris,
    "propositions": _propositions,
}
