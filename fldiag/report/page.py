"""The report: what is wrong, the runs, learning curves, and a section for each diagnostic."""

from __future__ import annotations

import html
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from fldiag import registry
from fldiag.diagnosis.diagnose import Answer
from fldiag.errors import __version__
from fldiag.plotting import style
from fldiag.registry import Diagnostic
from fldiag.report.collect import RunTables, reason
from fldiag.report.document import Section, render
from fldiag.results.numbers import Number, numbers
from fldiag.results.statistics import wilson
from fldiag.results.table import (
    SmallTable,
    cell,
    format_number,
    last_round,
    number,
    only,
    percent,
    plus_minus,
)

CURVES_LEAD = (
    "The global model after each round, on test examples where a run has them. Bars: standard "
    "deviation over seeds. Click on a name to hide its line."
)


def page(runs: Sequence[RunTables]) -> str:
    """The page as text."""
    sections = [wrong(runs), overview(runs), curves(runs)]
    for entry in registry.diagnostics():
        members = [member for member in runs if entry.name in member.tables]
        if members:
            sections.append(measured(entry, members))
    title = f"Federated runs: {', '.join(dict.fromkeys(member.method for member in runs))}"
    lead = f"Made with fldiag {__version__}. This file holds all that it shows and fetches nothing."
    return render(title, lead, sections)


# What is wrong, and the runs


def wrong(runs: Sequence[RunTables]) -> Section:
    """Runs that are not finished or not comparable, and what diagnostics say is wrong."""
    section = Section("wrong", "What is wrong")
    checks = [entry.name for entry in registry.diagnostics() if entry.alarms]
    for member in runs:
        if member.run.status != "finished":
            text = f"{member.run.status} after {member.run.done} of {member.config.get('rounds')} rounds"
            section.alarms.append(f"{member.label}: {text}.")
        for kind in checks:
            if kind not in member.tables:
                section.remark(member.label, f"not checked; run {command(kind, member)}")
            elif not member.tables[kind].alarms:
                section.remark(member.label, "no fault was found")
        for stored in member.tables.values():
            section.alarms += [f"{member.label}: {text}." for text in stored.alarms]
    conditions: dict[str, list[Any]] = {
        "data": [member.data for member in runs],
        "divisions of the data": [member.partition for member in runs],
        "models": [str(member.config.get("model")) for member in runs],
        "numbers of rounds": [member.run.done for member in runs],
    }
    different = [text for text, values in conditions.items() if len(set(values)) > 1]
    if different:
        section.alarms.append(f"The runs have different {', '.join(different)}: compare with care.")
    return section


def overview(runs: Sequence[RunTables]) -> Section:
    """The runs in one table, the mean over seeds, and the tables that are not shown."""
    section = Section("runs", "Runs", "Numbers of the global model after the last round.")
    columns = [n for n in numbers().values() if n.column]
    rows = [
        {
            "Run": member.label,
            "Seed": cell(member.config.get("seed")),
            "Data": data_of(member),
            "Rounds": str(member.run.done),
            "Accuracy (95 % interval)": accuracy(member),
            "Loss": format_number(last(member, "loss")),
            **{n.column: value_of(member, n) for n in columns},
            "Folder": str(member.run.path),
        }
        for member in runs
    ]
    section.add_table("Runs", rows)
    seeds = [
        {
            "Method": method_of(group[0]),
            "Seeds": ", ".join(cell(member.config.get("seed")) for member in group),
            "Accuracy": over_seeds(group, "accuracy"),
            "Loss": over_seeds(group, "loss"),
        }
        for group in replicates(runs)
        if len(group) > 1
    ]
    section.add_table("Mean ± standard deviation over seeds", seeds)
    for member in runs:
        for text in member.remarks:
            section.remark(member.label, text)
        missing = dict.fromkeys(n.source for n in columns if holder_of(member, n) is None)
        if missing:
            compute = command("report", member, "--compute", ",".join(missing))
            section.remark(member.label, f"to compute the numbers that are missing, run {compute}")
    section.downloads = [
        download(member, "metrics") for member in runs if "metrics" in member.tables
    ]
    return section


def command(verb: str, member: RunTables, *options: str) -> str:
    """What to type, quoted for a shell."""
    return shlex.join(["fldiag", verb, str(member.run.path), *options])


def data_of(member: RunTables) -> str:
    """Data, partition with its option, and clients."""
    settings = member.settings
    names = (settings.get(key, "unknown") for key in ("data.name", "partition.kind"))
    parts = [style.display_name(str(name)) for name in names]
    for key in ("alpha", "shards", "classes"):
        if settings.get(f"partition.{key}") is not None:
            parts.append(f"{style.display_name(key)} = {settings[f'partition.{key}']}")
    total, sampled = (settings.get(f"clients.{key}", "?") for key in ("total", "per_round"))
    return ", ".join([*parts, f"{total} clients, {sampled} a round"])


def method_of(member: RunTables) -> str:
    """The label without the seed."""
    return member.label.partition(", seed ")[0]


def replicates(runs: Sequence[RunTables]) -> list[list[RunTables]]:
    """Runs that differ by nothing but the seed, together."""
    groups: dict[str, list[RunTables]] = {}
    for member in runs:
        groups.setdefault(member.recipe, []).append(member)
    return list(groups.values())


def over_seeds(runs: Sequence[RunTables], metric: str) -> str:
    """Mean ± standard deviation of the last round; none where a run lacks the number."""
    values = pd.Series([last(member, metric) for member in runs], dtype=float)
    mean, std = values.mean(skipna=False), values.std(skipna=False)
    return plus_minus(mean, std, metric == "accuracy")


def last(member: RunTables, metric: str, column: str = "value") -> float | None:
    """Of the global model in the last round."""
    return number(member.curve(metric).tail(1), column=column)


def accuracy(member: RunTables) -> str:
    """With Wilson's interval for so many examples, and the slice where that is not test."""
    value, n = last(member, "accuracy"), last(member, "accuracy", "n_examples")
    if value is None or not n:
        return percent(value)
    low, high = (format_number(100 * end, 3) for end in wilson(round(value * n), n))
    (slice_name,) = member.curve("accuracy")["slice"].tail(1)
    place = "" if slice_name == "test" else f" on {slice_name}"
    return f"{percent(value)} ({low}–{high}){place}"


def holder_of(member: RunTables, n: Number) -> str | None:
    """The diagnostic whose table holds the number."""
    return next((kind for kind in (n.source, *n.within) if kind in member.tables), None)


def value_of(member: RunTables, n: Number) -> str:
    """A diagnostic's number with its error, in the last round that its table has."""
    source = holder_of(member, n)
    if source is None:
        return "–"
    table = only(member.tables[source].table, scope="global")
    rows = only(table, **n.row)
    end = last_round(rows)
    rows = only(rows, round=end)
    error = number(rows, column="stderr") or number(rows, column="residual")
    if n.spread:
        error = number(table, n.spread, round=end)
    about = "" if end in (None, member.run.done) else f" (round {end})"
    return plus_minus(number(rows), error, n.share) + about


def download(member: RunTables, kind: str) -> tuple[str, str, bytes]:
    """A table's label, file name and bytes."""
    source = member.tables[kind]
    return f"{member.label}: {source.name}", source.name, source.content


# Learning curves


def curves(runs: Sequence[RunTables]) -> Section:
    """Accuracy and loss of the global model over rounds, a chart for each data set."""
    section = Section("curves", "Learning curves", CURVES_LEAD)
    looks = style.looks(member.label for member in runs)
    for data in dict.fromkeys(member.data for member in runs):
        groups = replicates([member for member in runs if member.data == data])
        name = style.display_name(str(groups[0][0].settings.get("data.name") or "unknown data"))
        for metric in ("accuracy", "loss"):
            traces = [trace for group in groups for trace in traces_of(group, metric, looks)]
            layout = {
                "xaxis": {"title": {"text": "round", "standoff": 4}, "tickformat": "d"},
                "yaxis": {"tickformat": "~%"} if metric == "accuracy" else {},
                "margin": {"l": 50, "r": 10, "t": 20, "b": 40},
                "legend": {"orientation": "h", "y": -0.25, "yanchor": "top"},
                "showlegend": True,
            }
            figure = {"data": traces, "layout": layout}
            section.charts.append((f"{metric.capitalize()} on {name}", figure))
    return section


def traces_of(
    group: Sequence[RunTables], metric: str, looks: Mapping[str, style.Look]
) -> list[dict[str, Any]]:
    """plotly's line of a run; of several seeds faint ones, and their mean ± standard deviation."""
    first, frames = group[0], [member.curve(metric) for member in group]
    look = looks[first.label]
    if len(group) == 1:
        return [trace(first.label, frames[0], look)]
    values = pd.concat(frames).astype({"value": float}).groupby("round")["value"]
    mean = values.agg(value="mean", std="std").reset_index()
    faint = [trace(r.label, f, look, 0.35) for r, f in zip(group, frames, strict=True)]
    return [*faint, trace(f"{method_of(first)}, mean of {len(group)} seeds", mean, look)]


def trace(label: str, rows: pd.DataFrame, look: style.Look, opacity: float = 1) -> dict[str, Any]:
    """A line over rounds, with bars where there is a column ``std``."""
    dash = ",".join(f"{3 * length}px" for length in look.dash[1] or ()) or "solid"
    line: dict[str, Any] = {
        "name": html.escape(label, quote=False),  # plotly reads a few tags in labels
        "x": rows["round"].astype(int).tolist(),
        "y": [float(f"{value:.5g}") for value in rows["value"]],
        "mode": "lines+markers" if len(rows) <= 30 else "lines",
        "opacity": opacity,
        "line": {"color": look.color, "width": 2 * opacity, "dash": dash},
    }
    if "std" in rows:
        line["error_y"] = {"array": rows["std"].fillna(0).tolist(), "width": 0}
    return line


# Diagnostics


def measured(entry: Diagnostic, runs: Sequence[RunTables]) -> Section:
    """A diagnostic's pictures, summaries and tables. Runs of the same data and model are drawn together if the picture can."""
    section = Section(entry.name, entry.name.replace("_", " ").capitalize(), entry.headline)
    draw = entry.drawings.get("", lambda table: None)
    can_compare = entry.on == "problem" or getattr(draw, "compares_runs", False)
    groups: dict[Any, list[RunTables]] = {}
    for member in runs:
        table = member.tables[entry.name].table
        same = (member.data, str(member.config.get("model")))
        if entry.on == "problem":
            same += tuple(sorted(table["slice"].dropna().unique()))
        groups.setdefault(same if can_compare else member.label, []).append(member)
        end = last_round(table) or member.run.done
        if end < member.run.done:
            section.remark(
                member.label, f"the table ends with round {end}, the run with {member.run.done}"
            )
        try:
            summarise(section, entry, member)
        except Exception as error:  # anybody may have edited a table
            section.remark(member.label, f"not summed up: {reason(error)}")
    for group in groups.values():
        caption = "; ".join(member.label for member in group)
        try:
            tables = [labelled(member, entry) for member in group]
            figure = draw(pd.concat(tables, ignore_index=True) if len(tables) > 1 else tables[0])
            if isinstance(figure, Figure):
                section.add_picture(caption, figure)
        except Exception as error:  # as above
            section.remark(caption, f"not drawn: {reason(error)}")
    section.downloads = [download(member, entry.name) for member in runs]
    return section


def labelled(member: RunTables, entry: Diagnostic) -> pd.DataFrame:
    """The table with the run's label in it, and of single weights their round and client; of several checkpoints their own."""
    table = member.tables[entry.name].table
    if entry.on == "checkpoints":
        return table
    names = {}
    for name, rows in table.groupby("run", dropna=False) if entry.on == "problem" else ():
        only_one = {c: rows[c].dropna().unique() for c in ("round", "client")}
        places = [f", {c} {values[0]}" for c, values in only_one.items() if len(values) == 1]
        names[name] = member.label + "".join(places)
    return table.assign(run=[names.get(name, member.label) for name in table["run"]])


def summarise(section: Section, entry: Diagnostic, member: RunTables) -> None:
    """Add the summary of a run's table; small tables with the same columns become one."""
    options = member.tables[entry.name].about.get("options", {})
    for item in Answer(entry, labelled(member, entry), options).summary():
        if not isinstance(item, SmallTable):
            section.remark(member.label, item.text.removeprefix(f"{member.label}: "))
            continue
        own = {} if "run" in item.columns else {"Run": member.label}
        rows = [
            {**own, **{head: cell(row.get(key)) for key, head in item.columns.items()}}
            for row in item.rows
        ]
        section.add_table(section.title, rows)
