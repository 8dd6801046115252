"""The first section: the runs in one table, the mean over seeds, what differs between them, what is not comparable."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from fldiag import config, registry
from fldiag.plotting import style, words
from fldiag.plotting.pages import Group, Missing, Section, Table, tables_of
from fldiag.report.members import Collected, Member, absent, absent_diagnostic, plain, worlds
from fldiag.results import select
from fldiag.results.means import wilson
from fldiag.results.numbers import Number, numbers
from fldiag.results.select import last_round, only
from fldiag.results.summary import percent, plus_minus


@dataclass(frozen=True)
class Value:
    """A number of a run; ``about`` says what it is of where that differs from what the heading says."""

    value: float
    error: float | None = None
    low: float | None = None
    high: float | None = None
    about: str = ""


def summary(collection: Collected) -> Section:
    section = Section(
        "runs",
        "Runs",
        "Numbers of the last round. Each section below says which weights and data its numbers "
        "belong to, how uncertain they are and where they come from.",
    )
    group, names = Group(), worlds(collection.members)
    for data, name in names.items():
        members = [m for m in collection.members if m.data == data]
        world = f" on {name}" if len(names) > 1 else ""
        group.tables += tables_of(f"Runs{world}", [row(m) for m in members])
        group.tables += seeds(members, world)
    group.tables += differences(collection.members)
    section.groups = [group]
    section.notes = [*remarks(collection), *collection.notes]
    section.missing = [lack for m in collection.members for lack in _absent(m)]
    section.sources = [s.place for _, s in collection.having("metrics")]
    return section


def _absent(m: Member) -> list[Missing]:
    """What makes the numbers that the first table lacks of a run."""
    lacking = [n for n in shown_numbers() if measured(m, n) is None]
    entries = [registry.diagnostic.get(name) for name in lacking_tables(m)]
    reasons = {e.name: absent_diagnostic(m, e) for e in entries}
    missing = [
        replace(lack, why=f"no {name}: {lack.why}")
        for name, lack in reasons.items()
        if not lack.command
    ]
    computable = [n for n in lacking if reasons[n.source].command]
    if computable and m.setting("model", "name"):
        lacks = [(absent(m, "report", "--compute"), computable)]
    else:  # a report takes no --model, the diagnostics do
        lacks = [
            (lack, numbers_of_it)
            for name, lack in reasons.items()
            if (numbers_of_it := [n for n in computable if n.source == name])
        ]
    for lack, numbers_of_it in lacks:
        short = ", ".join(n.short for n in numbers_of_it)
        missing.append(replace(lack, why=f"{short}: not computed yet"))
    return missing


def shown_numbers() -> list[Number]:
    """What diagnostics show in the first table."""
    return [n for n in numbers().values() if n.column]


def lacking_tables(m: Member) -> list[str]:
    """The diagnostics whose numbers the first table lacks of a run."""
    return list(dict.fromkeys(n.source for n in shown_numbers() if measured(m, n) is None))


def row(m: Member) -> dict[str, str]:
    total = m.run.about["config"].get("rounds")
    rounds = f"{m.run.done}" if m.run.done == total else f"{m.run.done} of {total} ({m.run.status})"
    return {
        "Run": m.label,
        "Method": method(m),
        "Data": setting(m),
        "Rounds": rounds,
        "Test accuracy (95 % interval)": interval(accuracy(m)),
        "Test loss": format_value(loss(m)),
        **{n.column: format_value(measured(m, n), share=n.share) for n in shown_numbers()},
        "Seed": "–" if m.seed is None else str(m.seed),
        "Folder": m.folder,
    }


def method(m: Member) -> str:
    """The display name, with the options that have a symbol and whatever is not as the method has it by default."""
    name = str(m.setting("method", "name", "unknown"))
    fields = registry.method.get(name).options.model_fields if name in registry.method else {}
    usual = {key: field.default for key, field in fields.items()}
    options = []
    for key, value in m.config.get("method", {}).items():
        is_usual = key in usual and value == usual[key]
        if key != "name" and value is not None and (key in words.SYMBOLS or not is_usual):
            options.append(f"{words.symbol(key)} = {plain(value)}")
    return words.method(name) + (f" ({', '.join(options)})" if options else "")


def setting(m: Member) -> str:
    kind = str(m.setting("partition", "kind", "unknown"))
    values = {k: m.setting("partition", k) for k in ("alpha", "shards", "classes")}
    options = [f"{words.symbol(k)} = {plain(v)}" for k, v in values.items() if v is not None]
    partition = " ".join([words.PARTITIONS.get(kind, kind), *options])
    clients = (m.setting("clients", key, "?") for key in ("total", "per_round"))
    data = words.data(str(m.setting("data", "name", "unknown")))
    return "{}, {}, {} clients, {} a round".format(data, partition, *clients)


def format_value(value: Value | None, share: bool = False) -> str:
    if value is None:
        return "–"
    about = f" ({value.about})" if value.about else ""
    return plus_minus(value.value, value.error, share) + about


def interval(value: Value | None) -> str:
    if value is None:
        return "–"
    if value.low is None or value.high is None:
        return percent(value.value)
    low, high = (style.number(100 * end, 3) for end in (value.low, value.high))
    return f"{percent(value.value)} ({low}–{high})"


# -- the numbers


def accuracy(m: Member, split: str = "test") -> Value | None:
    """Of the global model on a split, with Wilson's interval for so many examples."""
    rows = _last(m, "accuracy", split)
    if rows is None or (value := select.number(rows)) is None:
        return None
    n = select.number(rows, column="n_examples")
    if not n or not 0 <= value <= 1:
        return Value(value)
    low, high = wilson(round(value * n), int(n))
    return Value(value, low=low, high=high)


def loss(m: Member) -> Value | None:
    rows = _last(m, "loss")
    value = None if rows is None else select.number(rows)
    return None if value is None else Value(value)


def _last(m: Member, metric: str, split: str = "test") -> pd.DataFrame | None:
    if "metrics" not in m.tables:
        return None
    rows = only(
        m.tables["metrics"].frame, metric=metric, moment="aggregated", scope="global", slice=split
    )
    last = last_round(rows)
    return None if last is None else only(rows, round=last)


def measured(m: Member, number: Number) -> Value | None:
    """A diagnostic's number, by the tables of the run."""
    over_rounds = registry.diagnostic.get(number.source).on in ("run", "clients")
    return _of_a_round(m, number) if over_rounds else _of_a_checkpoint(m, number)


def _of_a_checkpoint(m: Member, number: Number) -> Value | None:
    """At the latest checkpoint of the global model that a table has, on train if it may be."""
    best: tuple[Any, ...] | None = None
    value = None
    for kind, source in m.tables.items():
        if kind != number.source and kind.partition(":")[0] not in number.within:
            continue
        for claim in source.claims:
            r = m.round_of.get(claim.sha256)
            rows = only(source.frame, run=claim.label, **number.row)
            if r is None or claim.client is not None or (scalar := select.number(rows)) is None:
                continue
            order = r, claim.slice == "train", claim.n or 0, kind == number.source
            if best is None or order > best:
                unsure = rows["converged"].iloc[0] in (False, "False")
                about = [f"round {r}"] * (r != m.run.done) + [claim.slice] * (
                    claim.slice not in ("train", "")
                )
                about += ["not converged"] * bool(unsure)
                best, value = (
                    order,
                    Value(scalar, select.number(rows, column="residual"), about=", ".join(about)),
                )
    return value


def _of_a_round(m: Member, number: Number) -> Value | None:
    """The mean over clients in the last round that has one, with the spread over clients (or its standard error)."""
    if number.source not in m.tables:
        return None
    frame, selection = m.tables[number.source].frame, {"scope": "global", **number.row}
    rows = only(frame, **selection).dropna(subset=["value"])
    last = last_round(rows)
    if last is None:
        return None
    rows = only(rows, round=last)
    error = (
        select.number(rows, column="stderr")
        if not number.spread
        else select.number(frame, **{**selection, "metric": number.spread, "round": last})
    )
    return Value(
        float(rows["value"].iloc[0]), error, about="" if last == m.run.done else f"round {last}"
    )


# -- several runs


def seeds(members: Sequence[Member], world: str = "") -> list[Table]:
    """Mean ± standard deviation of the runs that differ by nothing but the seed."""
    rows = [
        {
            "Runs": ", ".join(m.label for m in group),
            "Method": method(group[0]),
            "Seeds": ", ".join(str(m.seed) for m in group),
            "Test accuracy": over_seeds([accuracy(m) for m in group], share=True),
            "Test loss": over_seeds([loss(m) for m in group]),
            **{
                _heading(n): over_seeds([measured(m, n) for m in group], n.share)
                for n in shown_numbers()
            },
        }
        for group in replicates(members)
        if len(group) > 1
    ]
    return tables_of(f"Mean ± standard deviation over seeds{world}", rows)


def _heading(number: Number) -> str:
    """With a capital, unless it begins with a symbol: λ₁ is not Λ₁."""
    text = number.short
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def replicates(members: Sequence[Member]) -> list[list[Member]]:
    """Runs that differ by nothing but the seed, together. One that was trained again with a seed that is there is no further
    seed: it is in a group with the others of its kind, or alone."""
    groups: dict[tuple[str, int], list[Member]] = {}
    counts: Counter[tuple[str, int | None]] = Counter()
    for m in members:
        groups.setdefault((recipe(m), counts[recipe(m), m.seed]), []).append(m)
        counts[recipe(m), m.seed] += 1
    return list(groups.values())


def recipe(m: Member) -> str:
    """Everything of the config but the seed and what leaves the numbers as they are. Of a run trained elsewhere the
    config does not say how: it is like no other."""
    if m.run.origin:
        return f"trained elsewhere: {m.place}"
    return json.dumps(
        [config.recipe(m.run.about["config"]), m.data, m.federation, m.run.done], sort_keys=True
    )


def over_seeds(seed_values: Sequence[Value | None], share: bool = False) -> str:
    values = [v for v in seed_values if v is not None and not v.about]
    if not values:
        return "–"
    each = [v.value for v in values]
    if len(each) == 1:
        return f"{plus_minus(each[0], None, share)} (1 seed)"
    text = plus_minus(statistics.mean(each), statistics.stdev(each), share)
    return text if len(each) == len(seed_values) else f"{text} ({len(each)} seeds)"


def differences(members: Sequence[Member]) -> list[Table]:
    """The keys of the config that are not the same in all runs; options that only one kind of method or model has, are
    told by its name."""
    settings = [m.settings for m in members]
    rows = []
    for key in dict.fromkeys(k for s in settings for k in s):
        is_own = key.startswith(("method.", "model."))
        values = [json.dumps(s.get(key), default=str) for s in settings if key in s or not is_own]
        if len(set(values)) > 1:
            cells = ["–" if s.get(key) is None else plain(s[key]) for s in settings]
            rows.append([key, *cells])
    head = ["Key", *(m.label for m in members)]
    return (
        [Table("What differs between the runs' configs", head, rows, cards=False)] if rows else []
    )


def remarks(collection: Collected) -> list[str]:
    """What must not be compared, in words."""
    members, names, texts = collection.members, worlds(collection.members), []
    if len(names) > 1:
        texts.append(
            f"The runs are on different data ({', '.join(names.values())}): accuracies, losses and everything made from "
            "them are drawn separately and must not be compared across data sets."
        )
    for data, name in names.items():
        group = [m for m in members if m.data == data]
        on = f" on {name}" if len(names) > 1 else ""
        if len({m.model for m in group}) > 1:
            texts.append(
                f"The runs{on} have different models: landscapes, λ₁ and distances of weights are drawn separately."
            )
        if len({m.federation for m in group}) > 1:
            texts.append(
                f"The runs{on} divide the data differently among clients: client numbers do not mean the same client, "
                "and numbers per client, such as forgetting and drift, belong to different federations."
            )
        if len({m.run.done for m in group}) > 1:
            texts.append(f"The runs{on} have been trained for different numbers of rounds.")
    for m in members:
        if m.run.status != "finished":
            texts.append(
                f"{m.label} is {m.run.status} after {m.run.done} of {m.run.about['config'].get('rounds')} rounds."
            )
    return texts
