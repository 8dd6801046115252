"""What each question of a study asks of a run: tables, one row a number."""

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
from fldiag.config import Config
from fldiag.diagnosis.dealt_partition import dealt
from fldiag.errors import FldiagError
from fldiag.registry import Progress
from fldiag.results.select import only
from fldiag.results.table import PERSONAL, table
from fldiag.runs.run import Run

#: Beside run.json: seconds of every round (on the CPU of its one thread's work), and the machine.
CLOCK = "clock.json"


@dataclass
class Subject:
    """What is asked: a run (None: the config alone), the rounds whose client weights were kept, where to keep halves."""

    config: Config | None
    run: Run | None = None
    rounds: tuple[int, ...] = ()
    seeds: tuple[int, ...] = (0,)
    keep: Path | None = None
    device: str = "cpu"
    download: bool = False
    progress: Progress | None = None
    executor: Any = "serial"

    @property
    def trained(self) -> Run:
        if self.run is None:
            raise FldiagError("this question needs a run", "ask it of a trial with train = True")
        return self.run


def answer(subject: Subject, name: str, options: dict[str, Any]) -> pd.DataFrame:
    """The table of a question. Raises FldiagError for unknown ones, and what the diagnostics raise."""
    if name in OWN:
        return OWN[name](subject, **options)
    run = subject.trained
    options_of_subject: dict[str, Any] = {
        "device": subject.device,
        "download": subject.download,
        "executor": subject.executor,
    }
    if registry.diagnostic.get(name).on == "run":
        options_of_subject["rounds"] = (
            subject.rounds
            if known.over_rounds(known.item("diagnostics", name) or {})
            else run.rounds[-1:]
        )
    return api.diagnose(
        run,
        name,
        cache=run.path / "diagnostics" / "cache",
        progress=subject.progress,
        **{**options_of_subject, **options},
    )


def _global(run: Run, metrics: tuple[str, ...]) -> pd.DataFrame:
    rows = run.metrics
    rows = only(rows, metric=metrics, scope=["global", "pair"]).copy()
    share = (rows["metric"] == "accuracy").to_numpy()
    rows.loc[share, "value"] *= 100
    rows.loc[share, "unit"] = "%"
    return rows


def _curve(s: Subject, metrics: tuple[str, ...]) -> pd.DataFrame:
    return _global(s.trained, metrics)


def _final(s: Subject, metrics: tuple[str, ...]) -> pd.DataFrame:
    """A run that diverged has no final value: the row says so in ``converged``."""
    run = s.trained
    rows = _global(run, metrics)
    if run.status != "diverged":
        return rows[rows["round"] == run.config.rounds]
    last = rows.drop_duplicates("metric", keep="last").copy()
    return last.assign(value=pd.NA, converged=False).astype(rows.dtypes)


def _best(s: Subject) -> pd.DataFrame:
    """Also of a run that diverged later, which ``converged`` says; one without any accuracy has a row without a value."""
    rows = _global(s.trained, ("accuracy",))
    first = (
        rows.loc[rows["value"].idxmax() :].iloc[:1]
        if rows["value"].notna().any()
        else rows.iloc[:1]
    )
    return (
        first.assign(converged=False).astype(rows.dtypes)
        if s.trained.status == "diverged"
        else first
    )


def _seconds(s: Subject) -> pd.DataFrame:
    file = s.trained.path / CLOCK
    clock = json.loads(file.read_text("utf-8"))["seconds"] if file.is_file() else []
    if (
        len(clock) < s.trained.done
    ):  # of a run that was gone on with elsewhere, the first rounds only
        raise FldiagError(
            f"{s.trained.path.name}: not all of its rounds were timed",
            "remove the folder to train it again",
        )
    value = statistics.median(clock[1:] or clock) if clock else None
    return table(
        [{"metric": "seconds_per_round", "value": value, "unit": "s", "scope": "global"}],
        **s.trained.common,
    )


def _reach(s: Subject, levels: tuple[float, ...]) -> pd.DataFrame:
    accuracies = _global(s.trained, ("accuracy",))
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
                "index": s.trained.config.rounds,
            }
        )
    return table(rows, **s.trained.common)


def _personal(s: Subject, epochs: tuple[int, ...], **options: Any) -> pd.DataFrame:
    rows = api.diagnose(
        s.trained,
        "personalise",
        epochs=epochs,
        device=s.device,
        download=s.download,
        progress=s.progress,
        executor=s.executor,
        **options,
    )
    rows = only(rows, scope="global", metric=[PERSONAL, f"{PERSONAL}_std"]).copy()
    return rows.assign(value=100 * rows["value"], stderr=100 * rows["stderr"], unit="%")


def _cost(s: Subject) -> pd.DataFrame:
    from fldiag_papers.costs import relative

    assert s.config is not None
    return table(
        [{"metric": "flops_relative", "value": relative(s.config), "unit": "x", "scope": "global"}],
        method=s.config.method.name,
        seed=s.config.seed,
    )


def _partition(s: Subject) -> pd.DataFrame:
    assert s.config is not None
    counts = dealt(s.config, download=s.download).counts
    return table(
        [
            {
                "metric": "count",
                "client": int(k),
                "index": int(c),
                "value": int(n),
                "scope": "client",
            }
            for k, c, n in counts[["client", "class", "count"]].itertuples(index=False)
        ],
        method=s.config.method.name,
    )


def _flops(s: Subject) -> pd.DataFrame:
    from fldiag_papers.costs import flops

    assert s.config is not None
    return flops(s.config)


def _traffic(s: Subject) -> pd.DataFrame:
    from fldiag_papers.costs import traffic

    assert s.config is not None
    return traffic(s.config)


def _examples(s: Subject) -> pd.DataFrame:
    assert s.config is not None
    dataset = data.load(s.config.data.name, s.config.data.root, s.download)
    counts = {"train_examples": dataset.train_y, "test_examples": dataset.test_y}
    return table([{"metric": name, "value": len(y)} for name, y in counts.items()], scope="global")


def _plane(s: Subject, **options: Any) -> pd.DataFrame:
    from fldiag_papers.toys import plane

    trajectory, geometry = plane.run(**options), plane.geometry(**options)
    ends = [{"metric": m, "x": geometry[m][0], "y": geometry[m][1]} for m in ("w_g", "w_l")]
    return pd.concat([trajectory, table(ends)], ignore_index=True).drop(columns="run")


def _iris(
    s: Subject, methods: tuple[str, ...] = ("fedavg", "feddf", "fedproj"), **protocol: Any
) -> pd.DataFrame:
    from fldiag_papers.toys import iris

    return iris.run([iris.Protocol(**protocol)], methods, s.seeds, keep=s.keep, progress=s.progress)


OWN: dict[str, Callable[..., pd.DataFrame]] = {
    "best": _best,
    "curve": _curve,
    "final": _final,
    "seconds": _seconds,
    "reach": _reach,
    "personal": _personal,
    "partition": _partition,
    "cost": _cost,
    "flops": _flops,
    "traffic": _traffic,
    "examples": _examples,
    "plane": _plane,
    "iris": _iris,
}


def finite(frame: pd.DataFrame) -> pd.DataFrame:
    """Infinities as missing: a csv that every reader takes."""
    return frame.assign(
        value=pd.to_numeric(frame["value"]).astype(float).replace([np.inf, -np.inf], np.nan)
    )
