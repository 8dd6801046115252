"""From the answers of the runs to the one table that a study draws, and to the numbers of the ledger."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.results.cache import Cache
from fldiag.results.provenance import provenance
from fldiag.results.select import only
from fldiag.results.table import table
from fldiag_papers import questions, reported
from fldiag_papers.plan import Plan, answer_key, answers
from fldiag_papers.scales import flat
from fldiag_papers.study import Ask, Study, Trial, one_question

KEYS = ["setting", "method", "model", "data"]
#: What ``ask`` says of numbers that a study derives beside all that was asked.
DERIVED = "derived"
#: The first columns of a study's table.
FIRST = [
    "origin",
    "label",
    "ask",
    "seed",
    *KEYS,
    "trained_on",
    "trained_model",
    "metric",
    "value",
    "std",
    "unit",
]
#: Columns of an answer that tell nothing apart once a number is picked.
PLACES = ("run", "round", "moment", "scope", "slice", "index", "client", "layer")


def table_of(
    study: Study, plan: Plan, paths: Mapping[str, Path], download: bool = False
) -> pd.DataFrame:
    """All answers there are, and for studies with numbers (``pick``) the paper's rows, in one table.

    Raises FldiagError when there is no answer at all."""
    pieces = measured_rows(study, plan, paths, download)
    if not pieces:
        why = "; ".join(
            sorted({text for (name, _), text in plan.left_out.items() if name == study.name})
        )
        raise FldiagError(
            f"nothing of {study.name} could be made" + (f": {why}" if why else ""),
            "use --scale paper" if why else "see what failed above",
        )
    rows = pd.concat(pieces, ignore_index=True)
    if study.pick:
        rows = pd.concat([picked(rows, study), printed(study)], ignore_index=True)
    elif study.derive is not None:  # a picture of everything, and numbers beside it
        derived = study.derive(*study.answers(rows)).assign(ask=DERIVED)
        rows = pd.concat([rows, derived, printed(study)], ignore_index=True)
    return tidy(rows)


def tidy(table: pd.DataFrame) -> pd.DataFrame:
    """Columns in a fixed order, those without any entry left out."""
    columns = [c for c in table if c in FIRST or table[c].notna().any()]
    order = [c for c in FIRST if c in columns] + sorted(c for c in columns if c not in FIRST)
    return table[order].reset_index(drop=True)


def measured_rows(
    study: Study, plan: Plan, paths: Mapping[str, Path], download: bool
) -> list[pd.DataFrame]:
    """The answers of toys, then those of the runs, each with what it is of."""
    pieces = []
    scale, cells = plan.scale, plan.cells_of(study)
    for ask in study.alone:
        keep = plan.store / "toys" / "-".join(answer_key(scale, ask))
        seeds = tuple(scale.seed_list(study.seeds))
        toy = questions.Subject(seeds=seeds, keep=keep)
        rows = questions.answer(toy, ask.name, scale.options(ask))
        if "run" not in rows or rows["run"].isna().all():
            rows["run"] = rows["method"]
        about = {"origin": "measured", "ask": ask.name, "setting": "", "model": "", "data": ""}
        pieces.append(rows.assign(label=rows["method"], **about))
    for number, trial, seed, asks in plan.questions(study):
        core = cells.get((number, seed))
        if (study.name, number) in plan.left_out or (core is None and trial.train):
            continue
        config = plan.tasks[core].config if core else scale.config(trial, seed, plan.store)
        for ask in asks:
            if core is None:
                answer = _counted(plan, study, number, config, ask, download)
            else:
                key = answer_key(scale, ask, plan.tasks[core].rounds)
                answer = answers(paths[core]).get(*key) if core in paths else None
            if answer is not None:
                origin: dict[str, Any] = {
                    **trial.key(),
                    "origin": "measured",
                    "label": trial.name,
                    "run": trial.name,
                    "seed": seed,
                    "ask": ask.name,
                    "trained_on": config.data.name,
                    "trained_model": config.model.name,
                    **_varied(trial, config),
                }
                pieces.append(answer.rename(columns={"data": "on"}).assign(**origin))
    return pieces


def _varied(trial: Trial, config: Config) -> dict[str, str]:
    """What the scale made of the numbers that this trial varies, as in ``setting``: train.epochs=2."""
    keys = [k for k, v in trial.over.items() if type(v) in (int, float)]
    if "clients.per_round" in keys:
        keys.append("clients.total")
    trained = flat(config)
    pairs = [f"{key}={trained[key]:g}" for key in keys if trained.get(key) is not None]
    return {"trained_with": ";".join(pairs)} if pairs else {}


def _counted(
    plan: Plan, study: Study, number: int, config: Config, ask: Ask, download: bool
) -> pd.DataFrame | None:
    """The answer to a question about a config alone, kept beside the runs; None where it fails, which does not stop others."""
    cache, options = Cache(plan.store / "configs"), plan.scale.options(ask)
    name, digits = answer_key(plan.scale, ask)
    name = f"{config.hash}-{name}"
    answer = cache.get(name, digits)
    if answer is None:
        try:
            subject = questions.Subject(config, download=download)
            answer = questions.answer(subject, ask.name, options)
        except FldiagError as error:
            plan.failed[study.name, number] = error.what
            return None
        about = {"config": config.hash, "question": ask.name, "options": options}
        cache.put(name, digits, answer, {**provenance(), **about})
    return answer


def answered(study: Study, plan: Plan, paths: Mapping[str, Path]) -> set[str]:
    """The runs that gave the study anything."""
    cores, cells = set(), plan.cells_of(study)
    for number, _, seed, asks in plan.questions(study):
        core = cells.get((number, seed), "")
        if core in paths:
            cache, rounds = answers(paths[core]), plan.tasks[core].rounds
            if any(cache.has(*answer_key(plan.scale, ask, rounds)) for ask in asks):
                cores.add(core)
    return cores


def picked(table: pd.DataFrame, study: Study) -> pd.DataFrame:
    """The rows of ``pick``, each under its name, and those that ``derive`` adds."""
    pieces = [
        one_question(only(table, **conditions)).assign(metric=m)
        for m, conditions in study.pick.items()
    ]
    rows = pd.concat(pieces, ignore_index=True)
    if study.derive is not None:
        rows = pd.concat([rows, study.derive(*study.answers(table))], ignore_index=True)
    twice = rows[rows.duplicated([*KEYS, "metric", "seed", "label"])]
    if len(twice):
        raise FldiagError(
            f"{study.name}: pick of {twice.iloc[0]['metric']!r} leaves several numbers of one run",
            "name more columns (moment, scope, layer, slice, index)",
        )
    return rows.drop(columns=[c for c in PLACES if c in rows])


def printed(study: Study) -> pd.DataFrame:
    """The numbers of the paper as rows of the same table, those with marks under their setting without them; of a study that
    varies another those of its own trials."""
    cells = {tuple(trial.key().values()) for trial in study.trials}
    rows = [
        {
            "origin": "reported",
            "label": r.method,
            **r.key,
            "metric": r.metric,
            "value": r.value,
            "std": r.std,
        }
        for r in reported.rows(study.paper)
        if r.id == (study.varies or study.id)
        and r.value is not None
        and r.plain == r.setting
        and (not study.varies or tuple(r.key.values()) in cells)
    ]
    return table(rows)


def measured(
    table: pd.DataFrame, study: Study, plan: Plan, answered: Collection[str]
) -> list[dict[str, Any]]:
    """Mean, spread (one standard deviation, from two seeds on) and number of seeds of what ``pick`` chose, by cell.
    ``answered``: the runs that gave anything."""
    if not study.pick:
        if study.derive is None:
            return []
        table = table[table["ask"] == DERIVED]
    cells = plan.cells_of(study)
    runs: dict[tuple[Any, ...], set[str]] = {}  # cell, seed and question -> the runs
    for number, trial, seed, asks in plan.questions(study):
        core = cells.get((number, seed))
        for name in {DERIVED, *(a.name for a in asks)} if core in answered else ():
            runs.setdefault((*trial.key().values(), seed, name), set()).add(str(core)[:10])
    rows = table[table["origin"] == "measured"]
    records = []
    for key, part in rows.groupby([*KEYS, "metric"], dropna=False, sort=False):
        values = part["value"].astype(float)
        numbers = values.dropna()
        # Of rounds to a level, the mean of those that got there is too early.
        is_late = str(key[-1]).startswith("rounds_to_") and len(numbers) < len(values)
        has_mean = len(numbers) > 0 and not is_late
        unconverged = part["converged"].eq(False) if "converged" in part else False
        pairs = set(zip(part["seed"], part["ask"], strict=True))
        records.append(
            {
                **dict(zip([*KEYS, "metric"], key, strict=True)),
                "value": float(numbers.mean()) if has_mean else None,
                "std": float(numbers.std(ddof=1)) if has_mean and len(numbers) > 1 else None,
                "seeds": len(numbers),
                "diverged": int(values.isna().sum()),
                "diverged_later": len(part[values.notna() & (part["ask"] == "best") & unconverged]),
                "trained_on": _one(part, "trained_on"),
                "trained_model": _one(part, "trained_model"),
                "runs": sorted(set().union(*(runs.get((*key[:-1], *pair), ()) for pair in pairs))),
            }
        )
    return records


def _one(part: pd.DataFrame, column: str) -> str:
    values = list(part[column].dropna()) if column in part else []
    return str(values[0]) if values else ""
