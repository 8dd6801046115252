"""``fldiag sweep``: every combination of some keys' values, one table and one report of all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.clock import duration
from fldiag.config import Config, parse_override
from fldiag.console import Console
from fldiag.errors import FldiagError
from fldiag.execution.executor import Shard, parse_executor
from fldiag.plotting import words
from fldiag.results import files
from fldiag.results.provenance import digest, provenance
from fldiag.runs.run import Run
from fldiag.training import forecast as forecasts
from fldiag.training import sweep as sweeps
from fldiag.training.rounds import failure
from fldiag.user_code import importable
from fldiag.verbs import report

METRICS = ("accuracy", "loss", "personal_accuracy")


def several(texts: list[str]) -> dict[str, list[Any]]:
    """``key=a,b,c`` -> the key's values, each read as TOML or else as text."""
    over: dict[str, list[Any]] = {}
    for text in texts:
        key, eq, values = text.partition("=")
        if not eq or not key.strip() or not values.strip():
            raise FldiagError(
                f"{text!r} is not of the form key=value,value",
                "write for example --over seed=0,1,2",
                usage=True,
            )
        if key.strip() in over:
            raise FldiagError(
                f"{key.strip()} is given twice",
                "give all its values at once: key=a,b,c",
                usage=True,
            )
        over[key.strip()] = [parse_override(f"{key}={value}")[1] for value in values.split(",")]
    return over


@dataclass
class Plan:
    """What is asked: ``over`` and ``grid`` key -> values, ``fixed`` what all runs have, ``tries`` candidates a setting."""

    source: str | Config
    over: dict[str, list[Any]]
    fixed: dict[str, Any]
    grid: dict[str, list[Any]]
    tries: int

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The combinations without their seeds."""
        return sweeps.combinations({k: v for k, v in self.over.items() if k != "seed"})

    @property
    def all_keys(self) -> dict[str, list[Any]]:
        """``over`` and what all runs have, as one value each."""
        return {k: [v] for k, v in self.fixed.items()} | self.over


def read_plan(
    source: str | Config, over: list[str], overrides: list[str], tune: list[str], budget: int | None
) -> Plan:
    values, grid, fixed = several(over), several(tune), dict(parse_override(o) for o in overrides)
    if budget is not None and not grid:
        raise FldiagError(
            "--budget limits the candidates of --tune, and --tune is not given",
            "give --tune key=a,b,c",
            usage=True,
        )
    twice = sorted((set(values) & set(grid)) | ((set(values) | set(grid)) & set(fixed)))
    if twice:
        raise FldiagError(f"{twice[0]} is given in two ways", "give it once", usage=True)
    candidates = len(sweeps.combinations(grid)) if grid else 0
    return Plan(
        source, values, fixed, grid, candidates if budget is None else min(budget, candidates)
    )


def sweep(
    console: Console,
    source: str | Config,
    over: list[str],
    overrides: list[str],
    tune: list[str],
    budget: int | None,
    out: Path | None,
    dry_run: bool,
    executor: str,
    shard: str | None,
    download: bool,
    device: str,
) -> None:
    part = Shard.parse(shard)
    if part is not None and tune:
        raise FldiagError(
            "--shard trains a part of the runs, and --tune chooses for all of them",
            "tune first, and give the values found with --set",
            usage=True,
        )
    plan = read_plan(source, over, overrides, tune, budget)
    configs = sweeps.configs(source, plan.all_keys)
    before = (
        f", and before them {plan.tries} candidates for each of {len(plan.settings)} settings"
        if plan.grid
        else ""
    )
    console.say(f"{len(configs)} runs{before}")
    if dry_run:
        with importable():
            return forecast(
                console,
                plan,
                part.part(configs) if part is not None else configs,
                executor,
                download,
                device,
            )
    try:
        with importable():
            runs, tuned = trained(console, plan, out, executor, shard, download, device)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "stopped; everything up to the last checkpoint is kept",
            "run the same command again to continue",
        ) from None
    if part is not None:
        console.say(
            f"part {part}: {len(runs)} of {len(configs)} runs; when all parts are done, the same command without --shard "
            "makes the table"
        )
        return console.done(*(run.path for run in runs))
    frame = table(runs, plan.over, tuned)
    console.table(frame.to_dict("records"), {c: c.replace("_", " ") for c in frame})
    names, folder = [run.path.name for run in runs], out or sweeps.rounds.RUNS
    about = {
        "source": source if isinstance(source, str) else source.model_dump(mode="json"),
        "over": plan.over,
        "fixed": plan.fixed,
        "runs": names,
        "tuned": {
            k: {"chosen": t.best, "tried": [{"values": v, "score": s} for v, s in t.scores]}
            for k, t in tuned.items()
        },
        **provenance(),
    }
    stem = f"sweep-{digest(names, plan.grid, plan.tries)[:8]}"
    files.write_table(frame, folder / f"{stem}.csv", about)
    if "diverged" in frame:
        console.alarm("some runs diverged; the numbers are those of the others")
    report.report(
        console,
        [run.path for run in runs],
        folder / f"{stem}-report",
        title=None,
        places=[],
        compute=False,
        subject_options={},
        choices=[_choice(setting, tuning) for setting, tuning in tuned.items()],
    )


def forecast(
    console: Console, plan: Plan, configs: list[Config], executor: str, download: bool, device: str
) -> None:
    """What the runs take, and before them their candidates. Configs that differ by the seed alone are timed once."""
    alike: dict[Config, forecasts.Forecast] = {}
    firsts = dict.fromkeys(c.replace(seed=0) for c in configs)
    with console.progress("forecast") as progress:
        for i, config in enumerate(firsts):
            progress(i, len(firsts), config.method.name)
            alike[config] = forecasts.forecast(
                config,
                executor="serial" if len(configs) > 1 else executor,
                device=device,
                download=download,
            )
    estimates, spec = [alike[c.replace(seed=0)] for c in configs], parse_executor(executor)
    candidates = [[f.serial_seconds] * plan.tries for f in alike.values() if plan.grid]
    runs = [f.serial_seconds for f in estimates]
    at_a_time = spec.workers_here() if len(configs) > 1 or candidates else 1
    spent = forecasts.total(candidates, spec.workers_here()) if candidates else 0.0
    seconds = spent + (
        estimates[0].seconds if len(estimates) == 1 else forecasts.total([runs], at_a_time)
    )
    work = forecasts.total([*candidates, runs], 1)
    size = sum(f.bytes for f in estimates) + (
        plan.tries * sum(f.bytes for f in alike.values()) if plan.grid else 0
    )
    rows = [
        {"run": sweeps.rounds.run_path(c).name, "time": duration(f.seconds), "mb": f.bytes / 1e6}
        for c, f in zip(configs, estimates, strict=True)
    ]
    console.table(rows, {"run": "run", "time": "time", "mb": "MB"})
    console.result |= {
        "seconds": seconds,
        "serial_seconds": work,
        "bytes": size,
        "executor": str(spec),
    }
    speed = forecasts.speed_words(at_a_time, str(spec), work)
    before = f", {duration(spent)} of it for the candidates" if candidates else ""
    console.say(f"forecast: {duration(seconds)} {speed}{before}, {size / 1e6:,.0f} MB of disk")
    console.done()


def _choice(setting: str, tuning: sweeps.Tuning) -> str:
    """What a reader of the report must know of a tuned setting: how many tries it had, and on what it was judged."""
    return (
        f"{words.label(setting.removeprefix('name '))}: {_label(tuning.best)}, the best of {len(tuning.scores)} candidates on "
        "training examples that were held out; no test example was looked at."
    )


def trained(
    console: Console,
    plan: Plan,
    out: Path | None,
    executor: str,
    shard: str | None,
    download: bool,
    device: str,
) -> tuple[list[Run], dict[str, sweeps.Tuning]]:
    """The runs in the order of the combinations, and what was tuned for each setting."""
    with console.progress("sweep") as progress:
        planned = sweeps.combinations(plan.over)
        part = Shard.parse(shard)
        total = len(part.part(planned) if part else planned) + plan.tries * len(
            plan.settings
        ) * bool(plan.grid)
        finished = 0
        progress(finished, total, plan.source if isinstance(plan.source, str) else plan.source.name)

        def on_event(event: dict[str, Any]) -> None:
            nonlocal finished
            if event["event"] == "end":
                finished += 1
                progress(finished, total, Path(event["path"]).name)

        runs: list[Run] = []
        tuned: dict[str, sweeps.Tuning] = {}
        for setting in plan.settings if plan.grid else [None]:
            over, fixed = plan.over, plan.fixed
            if setting is not None:
                first = {"seed": over["seed"][0]} if "seed" in over else {}
                tuning = sweeps.tune(
                    plan.source,
                    plan.grid,
                    plan.tries,
                    fixed={**fixed, **setting, **first},
                    out=out,
                    executor=executor,
                    device=device,
                    download=download,
                    on_event=on_event,
                )
                tuned[_label(setting)] = tuning
                over = {k: v if k == "seed" else [setting[k]] for k, v in over.items()}
                fixed = {**fixed, **tuning.best}
            runs += sweeps.sweep(
                plan.source,
                {k: [v] for k, v in fixed.items()} | over,
                out=out,
                executor=executor,
                shard=shard,
                device=device,
                download=download,
                on_event=on_event,
            )
    return _in_order(runs, plan) if plan.grid else runs, tuned


def _in_order(runs: list[Run], plan: Plan) -> list[Run]:
    """Runs that were trained setting by setting, in the order of the combinations."""
    seeds = plan.over.get("seed", [None])
    by = {
        (_label(setting), seed): runs[i * len(seeds) + j]
        for i, setting in enumerate(plan.settings)
        for j, seed in enumerate(seeds)
    }
    return [
        by[_label({k: v for k, v in keys.items() if k != "seed"}), keys.get("seed")]
        for keys in sweeps.combinations(plan.over)
    ]


def _label(keys: dict[str, Any]) -> str:
    return (
        ", ".join(
            f"{k.removeprefix('method.').removeprefix('train.')} {v}" for k, v in keys.items()
        )
        or "all"
    )


def table(
    runs: list[Run], values: dict[str, list[Any]], tuned: dict[str, sweeps.Tuning]
) -> pd.DataFrame:
    """A row a setting: mean and deviation over the seeds of the last round's numbers, and what was tuned with which budget."""
    rows = []
    for run, keys in zip(runs, sweeps.combinations(values), strict=True):
        last = (
            run.metrics.query("scope == 'global' and slice != 'train'")
            .sort_values("round")
            .groupby("metric")["value"]
            .last()
        )
        why = failure(run)
        rows.append(
            {
                **{k: str(v) for k, v in keys.items()},
                "failed": why is not None,
                **{m: float(last[m]) for m in METRICS if m in last},
            }
        )
    frame, by = pd.DataFrame(rows), [k for k in values if k != "seed"]
    lines = []
    for key, part in frame.groupby(by, sort=False) if by else [((), frame)]:
        line: dict[str, Any] = dict(
            zip(by, key if isinstance(key, tuple) else (key,), strict=True)
        ) | {"runs": len(part)}
        ended = part[~part["failed"]]
        for metric in METRICS:
            if metric in part and len(ended):
                line |= {
                    metric: ended[metric].mean(),
                    f"{metric}_std": ended[metric].std(ddof=1) if len(ended) > 1 else None,
                }
        if part["failed"].any():
            line["diverged"] = int(part["failed"].sum())
        if tuned:
            tuning = tuned[
                _label(
                    {
                        k: v
                        for k, v in zip(by, key if isinstance(key, tuple) else (key,), strict=True)
                    }
                )
            ]
            line |= {"tuned": _label(tuning.best), "tries": len(tuning.scores)}
        lines.append(line)
    return pd.DataFrame(lines)
