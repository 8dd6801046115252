"""The first section: the runs in one table, the mean over seeds, what differs between them, what is not comparable."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from fldiag import identity, known, registry
from fldiag.plotting import style, words
from fldiag.plotting.pages import Group, Missing, Section, Table
from fldiag.report.members import Collected, Member, absent, plain, worlds
from fldiag.results import select
from fldiag.results.numbers import Number, numbers
from fldiag.results.select import last_round, only
from fldiag.results.shares import wilson
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
    group = Group()
    names = worlds(collection.members)
    for data, name in names.items():
        members = [m for m in collection.members if m.data == data]
        caption = f"Runs on {name}" if len(names) > 1 else "Runs"
        group.tables.append(Table(caption, head(), [row(m) for m in members]))
        if table := seeds(members, name if len(names) > 1 else ""):
            group.tables.append(table)
    section.notes = [*remarks(collection), *collection.notes]
    if len(collection.members) > 1 and (table := differences(collection.members)):
        group.tables.append(table)
    section.groups = [group]
    section.missing = [lack for m in collection.members for lack in _absent(m)]
    section.sources = [
        s.place for m in collection.members for k, s in m.tables.items() if k == "metrics"
    ]
    return section


def _absent(m: Member) -> list[Missing]:
    """What makes the numbers that the first table lacks of a run."""
    lacking = [n for n in shown_numbers() if measured(m, n) is None]
    entries = [registry.diagnostic.get(name) for name in lacking_tables(m)]
    reasons = {
        e.name: absent(m, known.command(e.name), clients=e.needs == "clients") for e in entries
    }
    missing = [
        replace(lack, why=f"no {name}: {lack.why}")
        for name, lack in reasons.items()
        if not lack.command
    ]
    computable = [n.short for n in lacking if reasons[n.source].command]
    if computable:
        compute = absent(m, "report", "--compute")
        missing.append(replace(compute, why=f"{', '.join(computable)}: not computed yet"))
    return missing


def head() -> list[str]:
    return [
        "Run",
        "Method",
        "Data",
        "Rounds",
        "Test accuracy (95 % interval)",
        "Test loss",
        *(n.column for n in shown_numbers()),
        "Seed",
        "Folder",
    ]


def shown_numbers() -> list[Number]:
    """What diagnostics show in the first table."""
    return [n for n in numbers().values() if n.column]


def lacking_tables(m: Member) -> list[str]:
    """The diagnostics whose numbers the first table lacks of a run."""
    return list(dict.fromkeys(n.source for n in shown_numbers() if measured(m, n) is None))


def row(m: Member) -> list[str]:
    total = m.run.index["config"].get("rounds")
    rounds = f"{m.run.done}" if m.run.done == total else f"{m.run.done} of {total} ({m.run.status})"
    return [
        m.label,
        method(m),
        setting(m),
        rounds,
        interval(accuracy(m)),
        format_value(loss(m)),
        *(format_value(measured(m, n), share=n.share) for n in shown_numbers()),
        "–" if m.seed is None else str(m.seed),
        m.folder,
    ]


def method(m: Member) -> str:
    """The display name, with its numbers and whatever is not as the method has it by default."""
    name = str(m.setting("method", "name", "unknown"))
    usual = {
        o["name"]: o["default"] for o in (known.item("methods", name) or {"options": []})["options"]
    }
    options = [
        f"{words.symbol(k)} = {plain(v)}"
        for k, v in m.config.get("method", {}).items()
        if k != "name"
        and v is not None
        and (
            k not in usual
            or v != usual[k]
            or (isinstance(v, (int, float)) and not isinstance(v, bool))
        )
    ]
    return words.method(name) + (f" ({', '.join(options)})" if options else "")


def setting(m: Member) -> str:
    kind = str(m.setting("partition", "kind", "unknown"))
    options = [
        f"{words.symbol(k)} = {plain(m.setting('partition', k))}"
        for k in ("alpha", "shards", "classes")
        if m.setting("partition", k) is not None
    ]
    data = words.data(str(m.setting("data", "name", "unknown")))
    return (
        f"{data}, {' '.join([words.PARTITIONS.get(kind, kind), *options])}, "
        f"{m.setting('clients', 'total', '?')} clients, {m.setting('clients', 'per_round', '?')} a round"
    )


def format_value(value: Value | None, share: bool = False) -> str:
    if value is None:
        return "–"
    return plus_minus(value.value, value.error, share) + (
        f" ({value.about})" if value.about else ""
    )


def interval(value: Value | None) -> str:
    if value is None:
        return "–"
    ends = (
        ""
        if value.low is None or value.high is None
        else f" ({style.number(100 * value.low, 3)}–{style.number(100 * value.high, 3)})"
    )
    return percent(value.value) + ends + (f" ({value.about})" if value.about else "")


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
    over_rounds = registry.diagnostic.get(number.source).on == "run"
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


def seeds(members: Sequence[Member], world: str) -> Table | None:
    """Mean ± standard deviation of the runs that differ by nothing but the seed."""
    rows = []
    for group in (g for g in replicates(members) if len(g) > 1):
        cells = [
            ", ".join(m.label for m in group),
            method(group[0]),
            ", ".join(str(m.seed) for m in group),
        ]
        cells += [
            over_seeds(list(map(accuracy, group)), share=True),
            over_seeds(list(map(loss, group))),
        ]
        cells += [over_seeds([measured(m, n) for m in group], n.share) for n in shown_numbers()]
        rows.append(cells)
    if not rows:
        return None
    heading = [
        "Runs",
        "Method",
        "Seeds",
        "Test accuracy",
        "Test loss",
        *(_heading(n.short) for n in shown_numbers()),
    ]
    return Table(
        f"Mean ± standard deviation over seeds{f' on {world}' if world else ''}", heading, rows
    )


def _heading(text: str) -> str:
    """With a capital, unless it begins with a symbol: λ₁ is not Λ₁."""
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
        [identity.recipe(m.run.index["config"]), m.data, m.federation, m.run.done], sort_keys=True
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


def differences(members: Sequence[Member]) -> Table | None:
    """The keys of the config that are not the same in all runs; options that only one kind of method or model has, are
    told by its name."""
    flat = [m.settings for m in members]
    keys = list(dict.fromkeys(k for f in flat for k in f))
    rows = [
        [key, *("–" if f.get(key) is None else plain(f[key]) for f in flat)]
        for key in keys
        if len(
            {
                json.dumps(f.get(key), default=str)
                for f in flat
                if key in f or not key.startswith(("method.", "model."))
            }
        )
        > 1
    ]
    head = ["Key", *(m.label for m in members)]
    return (
        Table("What differs between the runs' configs", head, rows, cards=False) if rows else None
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
        if m.run.status not in ("finished",):
            texts.append(
                f"{m.label} is {m.run.status} after {m.run.done} of {m.run.index['config'].get('rounds')} rounds."
            )
    return texts
