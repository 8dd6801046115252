"""From the answers of the runs to the one table that a study draws, and to the numbers of the ledger."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.results.select import only
from fldiag.results.table import table
from fldiag_papers import questions, reported
from fldiag_papers.plan import Answers, Plan, answers, ask_key
from fldiag_papers.scales import flat
from fldiag_papers.study import Ask, Study, Trial

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


def table_of(
    study: Study, plan: Plan, paths: Mapping[str, Path], download: bool = False
) -> pd.DataFrame:
    """All answers there are, and for studies with numbers (``pick``) the paper's rows, in one table.

    Raises FldiagError when there is no answer at all."""
    pieces = _alone(study, plan)
    for number, trial in enumerate(study.trials):
        for place, seed in enumerate(plan.scale.seed_list(study.seeds)):
            pieces += _of(study, plan, paths, number, trial, place, seed, download)
    if not pieces:
        why = sorted({text for (name, _), text in plan.left_out.items() if name == study.name})
        raise FldiagError(
            f"nothing of {study.name} could be made" + (f": {'; '.join(why)}" if why else ""),
            "see what failed above" if not why else "use --scale paper",
        )
    rows = pd.concat(pieces, ignore_index=True)
    if study.pick:
        rows = pd.concat([picked(rows, study), printed(study)], ignore_index=True)
    elif study.derive is not None:  # a picture of everything, and numbers beside it
        rows = pd.concat(
            [rows, study.derive(rows).assign(ask=DERIVED), printed(study)], ignore_index=True
        )
    return tidy(rows)


def answered(study: Study, plan: Plan, paths: Mapping[str, Path]) -> set[str]:
    """The runs that gave the study anything."""
    cores, seeds = set(), plan.scale.seed_list(study.seeds)
    for (name, number, seed), core in plan.cells.items():
        if name == study.name and core in paths:
            keys = (
                ask_key(plan.scale, a, plan.tasks[core].rounds)
                for a in study.questions_for(study.trials[number], seeds.index(seed))
            )
            stored_answers = answers(paths[core])
            cores |= {core} if any(map(stored_answers.has, keys)) else set()
    return cores


def _alone(study: Study, plan: Plan) -> list[pd.DataFrame]:
    pieces = []
    seeds = tuple(plan.scale.seed_list(study.seeds))
    for ask in study.alone:
        keep = plan.store / "toys" / ask_key(plan.scale, ask)
        subject = questions.Subject(None, seeds=seeds, keep=keep)
        answer = questions.finite(questions.answer(subject, ask.name, plan.scale.options(ask)))
        if "run" not in answer or answer["run"].isna().all():
            answer["run"] = answer["method"]
        pieces.append(
            answer.assign(
                origin="measured",
                label=answer["method"],
                ask=ask.name,
                setting="",
                model="",
                data="",
            )
        )
    return pieces


def _of(
    study: Study,
    plan: Plan,
    paths: Mapping[str, Path],
    number: int,
    trial: Trial,
    place: int,
    seed: int,
    download: bool,
) -> list[pd.DataFrame]:
    core = plan.cells.get((study.name, number, seed))
    config = plan.tasks[core].config if core else None
    pieces = []
    if config is None and not trial.train and (study.name, number) not in plan.left_out:
        config = plan.scale.config(trial, seed, plan.store)
    for ask in study.questions_for(trial, place) if config is not None else ():
        assert config is not None
        if core is None:
            answer = _counted(plan, study, number, config, ask, download)
        else:
            key = ask_key(plan.scale, ask, plan.tasks[core].rounds)
            answer = answers(paths[core]).get(key) if core in paths else None
        if answer is not None:
            about: dict[str, Any] = {
                **trial.key(),
                "origin": "measured",
                "label": trial.name,
                "run": trial.name,
                "seed": seed,
                "ask": ask.name,
                "trained_on": config.data.name,
                "trained_model": config.model.name,
            }
            if varied := _varied(trial, config):
                about["trained_with"] = varied
            pieces.append(questions.finite(answer).rename(columns={"data": "on"}).assign(**about))
    return pieces


def _varied(trial: Trial, config: Config) -> str:
    """What the scale made of the numbers that this trial varies, as in ``setting``: train.epochs=2."""
    keys = [
        key
        for key, value in trial.over.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    if "clients.per_round" in keys:
        keys.append("clients.total")
    trained = flat(config)
    return ";".join(f"{key}={trained[key]:g}" for key in keys if trained.get(key) is not None)


def _counted(
    plan: Plan, study: Study, number: int, config: Config, ask: Ask, download: bool
) -> pd.DataFrame | None:
    """The answer to a question about a config alone, kept beside the runs; None where it fails, which does not stop others."""
    stored_answers, key = (
        Answers(plan.store / "configs"),
        f"{config.hash}-{ask_key(plan.scale, ask)}",
    )
    answer = stored_answers.get(key)
    if answer is None:
        try:
            subject = questions.Subject(config, download=download)
            answer = questions.finite(questions.answer(subject, ask.name, plan.scale.options(ask)))
        except FldiagError as error:
            plan.failed[study.name, number] = error.what
            return None
        stored_answers.save(
            key,
            answer,
            {"config": config.hash, "question": ask.name, "options": plan.scale.options(ask)},
        )
    return answer


def picked(table: pd.DataFrame, study: Study) -> pd.DataFrame:
    """The rows of ``pick``, each under its name, and those that ``derive`` adds."""
    pieces = []
    for name, conditions in study.pick.items():
        pieces.append(only(table, **conditions).assign(metric=name))
    rows = pd.concat(pieces, ignore_index=True)
    if study.derive is not None:
        rows = pd.concat([rows, study.derive(table)], ignore_index=True)
    keys = [*KEYS, "metric", "seed", "label"]
    twice = rows[rows.duplicated(keys)]
    if len(twice):
        raise FldiagError(
            f"{study.name}: pick of {twice.iloc[0]['metric']!r} leaves several numbers of one run",
            "name more columns (moment, scope, layer, slice, index)",
        )
    return rows.drop(
        columns=[
            c
            for c in ("run", "round", "moment", "scope", "slice", "index", "client", "layer")
            if c in rows
        ]
    )


def printed(study: Study) -> pd.DataFrame:
    """The numbers of the paper as rows of the same table, those with marks under their setting without them; of a study that
    varies another those of its own trials."""
    mine = {tuple(trial.key().values()) for trial in study.trials} if study.varies else set()
    rows = [
        {
            "origin": "reported",
            "label": r.method,
            "setting": r.setting,
            "method": r.method,
            "model": r.model,
            "data": r.data,
            "metric": r.metric,
            "value": r.value,
            "std": r.std,
        }
        for r in reported.rows(study.paper)
        if r.id == (study.varies or study.id)
        and r.value is not None
        and r.plain == r.setting
        and (not study.varies or (r.setting, r.method, r.model, r.data) in mine)
    ]
    return table(rows)


def tidy(table: pd.DataFrame) -> pd.DataFrame:
    """Columns in a fixed order, those without any entry left out."""
    columns = [c for c in table.columns if c in FIRST or table[c].notna().any()]
    order = [c for c in FIRST if c in columns] + sorted(c for c in columns if c not in FIRST)
    return table[order].reset_index(drop=True)


def measured(
    table: pd.DataFrame, study: Study, plan: Plan, answered: Collection[str]
) -> list[dict[str, Any]]:
    """Mean, spread (one standard deviation, from two seeds on) and number of seeds of what ``pick`` chose, by cell.
    ``answered``: the runs that gave anything."""
    if not study.pick:
        if study.derive is None:
            return []
        table = table[table["ask"] == DERIVED]
    seeds = plan.scale.seed_list(study.seeds)
    cells: dict[
        tuple[Any, ...], list[tuple[str, set[str]]]
    ] = {}  # key and seed -> the runs, and what was asked of them
    for (name, number, seed), core in plan.cells.items():
        if name == study.name and core in answered:
            names = {
                DERIVED,
                *(a.name for a in study.questions_for(study.trials[number], seeds.index(seed))),
            }
            cells.setdefault((*(study.trials[number].key()[k] for k in KEYS), seed), []).append(
                (core, names)
            )
    rows = table[table["origin"] == "measured"]
    records = []
    for key, part in rows.groupby([*KEYS, "metric"], dropna=False, sort=False):
        values = part["value"].astype(float)
        numbers = values.dropna()
        # The mean of those that got there is too early.
        has_mean = len(numbers) > 0 and not (
            str(key[-1]).startswith("rounds_to_") and len(numbers) < len(values)
        )
        unconverged = part["converged"].eq(False) if "converged" in part else False
        late = part[values.notna() & (part["ask"] == "best") & unconverged]
        records.append(
            {
                **dict(zip([*KEYS, "metric"], key, strict=True)),
                "value": float(numbers.mean()) if has_mean else None,
                "std": float(numbers.std(ddof=1)) if has_mean and len(numbers) > 1 else None,
                "seeds": len(numbers),
                "diverged": int(values.isna().sum()),
                "diverged_later": len(late),
                "trained_on": _one(part, "trained_on"),
                "trained_model": _one(part, "trained_model"),
                "runs": sorted(
                    {
                        core[:10]
                        for seed, ask in set(zip(part["seed"], part["ask"], strict=True))
                        for core, names in cells.get((*key[:-1], seed), [])
                        if ask in names
                    }
                ),
            }
        )
    return records


def _one(part: pd.DataFrame, column: str) -> str:
    values = part[column].dropna().unique() if column in part else []
    return str(values[0]) if len(values) else ""
