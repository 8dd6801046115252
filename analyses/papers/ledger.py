"""The numbers and statements of the papers beside what lies in a folder of figures: ``ledger.csv``, ``overview.md``, pictures.

Compared is only what was measured with the paper's data, model and protocol; bf16 counts, and its rows say so. A printed count
agrees to its last digit; a trained number where 0 lies in the 95 % t-interval of the difference of two means. A statement needs
two seeds: it holds where the 95 % paired t-interval of each difference that it claims lies on its side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

import fldiag
from fldiag.plotting import style
from fldiag.results import files

from .reported import FOLDER
from .shapes import metric_text, settings
from .study import head
from .tables import PROFILED
from .verbs import PAPERS, studies

KEYS = ["setting", "method", "model", "data"]
#: Questions whose answer no seed changes, and those that no scale makes smaller.
COUNTED = ("examples", "flops", "relative", "traffic")
UNSCALED = (*COUNTED, "iris")
#: Runs behind a paper's number, as FedSOL and FedAlign say.
THEIR_SEEDS = 3
#: Classes of data sets that have not ten, and the points above chance from which a model counts as trained.
CLASSES = {"cifar100": 100, "imagenet200": 200, "agnews": 4, "sst2": 2, "snli": 3, "mnli": 3}
ABOVE_CHANCE = 3.0
#: The table of the runs under FedSOL's protocol, whose weights are not kept, and its pictures.
ROUNDS = Path("paper/rounds.csv.gz")
#: What README and the documentation show of them.
PICTURES = [f"fedsol/{name}" for name in ("fig3", "fig6", "fig7-bf16", "fig8", "strengths-bf16")]


# ---- what was measured


def measured(out: Path) -> pd.DataFrame:
    """The rows of all tables of a folder that have the paper's data, model and protocol."""
    tables = []
    for file in sorted(out.glob("*/*.json")):
        about, csv = files.read_json(file), next(file.parent.glob(f"{file.stem}.csv*"), None)
        if "scale" in about and csv is not None:
            table = pd.read_csv(csv, low_memory=False)
            if "study" not in table:
                precision = "bf16" if "precision=bf16" in about["command"] else "fp32"
                study = f"{file.parent.name}/{file.stem}"
                table = table.assign(study=study, precision=precision)
            tables.append(table[table["question"].isin(UNSCALED) | (about["scale"] == "paper")])
    if not tables:
        raise fldiag.FldiagError(f"no figure lies in {out}", "make one: fldiag figures fedsol/fig6")
    tables.append(pd.DataFrame(columns=[*KEYS, "unit"]))  # which a study may lack
    rows = pd.concat(tables, ignore_index=True).astype(dict.fromkeys(KEYS, object))
    rows[KEYS] = rows[KEYS].fillna("")
    rows.loc[rows["question"].isin(COUNTED), "precision"] = "counted"
    is_other = (rows["data"] != "") & (rows["data"] != rows["trained_on"])
    is_other |= (rows["model"] != "") & (rows["model"] != rows["trained_model"])
    return rows[~is_other & (rows["question"] != "seconds")]  # which depend on the machine


def draw(out: Path) -> list[Path]:
    """The pictures of the table of rounds, one for each precision."""
    paths = []
    table = pd.read_csv(out / ROUNDS, low_memory=False)
    for (name, precision), rows in table.groupby(["study", "precision"]):
        picture = name + "-bf16" * (precision == "bf16")
        if picture in PICTURES:
            figure = studies()[name].draw(rows.dropna(axis=1, how="all").reset_index(drop=True))
            seeds = rows["seed"].nunique()
            head(
                figure,
                f"Trained in {precision}, {f'up to {seeds} seeds' if seeds > 1 else '1 seed'}",
            )
            paths += style.save(figure, out / ROUNDS.parent / picture, ("png",))
    return paths


# ---- numbers


def numbers(rows: pd.DataFrame, printed: pd.DataFrame) -> pd.DataFrame:
    """A line for each printed number, and for each precision in which it was measured."""
    cell = ["study", *KEYS, "metric"]
    means = rows.groupby([*cell, "precision", "seed"])["value"].mean()
    of_seeds = means.groupby([*cell, "precision"])
    table = of_seeds.agg(measured="mean", measured_std="std", seeds="count").reset_index()
    profiled = table[table["metric"].str.endswith(PROFILED)].rename(
        columns={"measured": "profiled"}
    )
    profiled["metric"] = profiled["metric"].str.removesuffix(PROFILED)
    lines = printed.merge(table, "left", cell).merge(profiled[[*cell, "profiled"]], "left", cell)
    lines["difference"] = lines["measured"] - pd.to_numeric(lines["printed"])
    return lines.assign(verdict=[verdict(line) for line in lines.to_dict("records")])


def verdict(line: Mapping[str, Any]) -> str:
    """What a measured number says of the printed one."""
    if pd.isna(line["difference"]) or "protocol unknown" in line["note"]:
        return "not measured"
    gap, seeds, std = abs(line["difference"]), line["seeds"], line["measured_std"]
    if line["precision"] == "counted":
        digit = 0.5 * 10.0 ** -len(line["printed"].partition(".")[2]) + 1e-12
        as_profilers = abs(line["profiled"] - float(line["printed"])) <= digit
        return "agrees" if gap <= digit else "as profilers count" if as_profilers else "differs"
    if seeds < 2:
        return "undecided"
    theirs = float(line["printed"]), float(line["printed_std"] or std), THEIR_SEEDS
    welch = stats.ttest_ind_from_stats(line["measured"], std, seeds, *theirs, equal_var=False)
    return "differs" if welch.pvalue < 0.05 else "agrees"


# ---- statements


def side(text: str) -> dict[str, str]:
    """
    >>> side("label=FedAvg & index=1"), side("0.5")
    ({'label': 'FedAvg', 'index': '1'}, {})
    """
    return dict(pair.split("=", 1) for pair in text.split(" & ")) if "=" in text else {}


def chosen(rows: pd.DataFrame, where: Mapping[str, str]) -> pd.DataFrame:
    """The rows with these entries; "" is none."""
    for column, entry in where.items():
        entries = rows[column] if column in rows else pd.Series("", rows.index)
        texts = entries.map(
            lambda v: "" if pd.isna(v) else f"{v:g}" if isinstance(v, float) else str(v)
        )
        rows = rows[texts == entry]
    return rows


def comparisons(rows: pd.DataFrame, claim: Mapping[str, str]) -> list[pd.DataFrame]:
    """Lower and higher value by seed: in every column of the paper's table that has both sides, and with every rival where only
    one side is named; of the means where two labels share no column."""
    sides = []
    wheres = [side(claim[name]) for name in ("lower", "higher")]
    for text, where in zip((claim["lower"], claim["higher"]), wheres, strict=True):
        hidden = {*where, "method"} if "label" in where else {*where}
        by = ["seed", *(k for k in KEYS if k not in hidden)]
        values = chosen(rows, where).groupby(by)["value"].mean().to_frame()
        values["least"] = values["value"]  # what is no better than chance decides nothing
        if claim["minus"]:
            base = chosen(rows, {**where, **side(claim["minus"])}).groupby(by)["value"].mean()
            values["least"] = np.minimum(values["value"], base.reindex(values.index))
            values["value"] -= base
        if text and not where:
            values = pd.DataFrame({"seed": rows["seed"].unique()}).set_index("seed")
            values[["value", "least"]] = float(text), np.inf
        sides.append(values.dropna().reset_index())
    shared = [c for c in sides[0] if c in sides[1] and c not in ("value", "least")]
    pairs = sides[0].merge(sides[1], on=shared, suffixes=("_lower", "_higher"))
    if pairs.empty and "label" in wheres[0]:
        means = [values.groupby("seed")[["value", "least"]].mean() for values in sides]
        pairs = means[0].merge(means[1], on="seed", suffixes=("_lower", "_higher"))
    for column, entry in {**wheres[0], **wheres[1]}.items():
        pairs = pairs[pairs[column] != entry] if column in pairs else pairs
    by = [c for c in pairs if c in KEYS]
    return [part for _, part in pairs.groupby(by)] if by else [pairs] if len(pairs) else []


def vote(pairs: pd.DataFrame, claim: Mapping[str, str], is_counted: bool, floor: float) -> str:
    """What one comparison says; ``floor``: accuracies up to it are no better than chance."""
    lower, higher = pairs["value_lower"], pairs["value_higher"]
    least = pairs[["least_lower", "least_higher"]].mean()
    differences = higher * float(claim["times"] or 1) - lower
    if (not is_counted and len(pairs) < 2) or min(least) <= floor:
        return "undecided"
    half = 0.0 if is_counted else stats.t.ppf(0.975, len(pairs) - 1) * differences.sem()
    edge = -1e-9 if claim["may_be_equal"] else 0.0
    if differences.mean() - half > edge:
        return "holds"
    return "does not hold" if differences.mean() + half <= edge else "undecided"


def outcome(votes: Sequence[str], total: int) -> str:
    """The verdict on a statement of which ``total`` comparisons are printed."""
    if "does not hold" in votes or not votes:
        return "does not hold" if votes else "not measured"
    if len(votes) < total:
        return f"not decided: measured in {len(votes)} of {total} comparisons"
    return "undecided" if "undecided" in votes else "holds"


def statements(rows: pd.DataFrame, printed: pd.DataFrame, claims: pd.DataFrame) -> pd.DataFrame:
    """A line for each statement, in the precision in which there are the most seeds."""
    theirs = printed.assign(seed=0, value=pd.to_numeric(printed["printed"]))
    lines = []
    for (study, text), parts in claims.groupby(["study", "statement"], sort=False):
        here = rows[rows["study"] == study]
        precision = here.groupby("precision")["seed"].nunique().idxmax() if len(here) else ""
        here, votes, total, seeds = here[here["precision"] == precision], [], 0, 0
        for claim in parts.to_dict("records"):
            alike = here[
                (here["question"] == claim["question"]) & (here["metric"] == claim["metric"])
            ]
            of_table = theirs[(theirs["study"] == study) & (theirs["metric"] == claim["metric"])]
            pairs = comparisons(alike, claim)
            total += max(len(comparisons(of_table, claim)), len(pairs), 1)
            seeds = max([seeds, *map(len, pairs)])
            floor = -np.inf
            if set(alike["unit"]) == {"%"}:
                floor = 100 / CLASSES.get(alike["trained_on"].iloc[0], 10) + ABOVE_CHANCE
            votes += [vote(pair, claim, precision == "counted", floor) for pair in pairs]
        lines.append((study, text, precision, seeds, outcome(votes, total)))
    return pd.DataFrame(lines, columns=["study", "statement", "precision", "seeds", "verdict"])


# ---- pages


VERDICTS = (
    "agrees",
    "as profilers count",
    "differs",
    "holds",
    "does not hold",
    "undecided",
    "not measured",
)


def page(table: pd.DataFrame) -> str:
    """How many numbers and statements have which verdict; then what was measured: statements, and numbers by figure."""
    short = table["verdict"].str.replace("not decided.*", "undecided", regex=True)
    kind = np.where(table["statement"].isna(), "numbers", "statements")
    paper = table["study"].str.partition("/")[0].map(style.display_name)
    counts = pd.crosstab([paper.rename("paper"), pd.Series(kind, table.index, name="of")], short)
    counts = counts.reindex(columns=[v for v in VERDICTS if v in counts])
    parts = ["## Verdicts", _markdown(counts.reset_index().replace(0, ""))]
    shown = table.assign(order=short.map(VERDICTS.index))[short != "not measured"]
    said = shown.dropna(subset="statement").sort_values(["order", "study"], kind="stable")
    columns = ["verdict", "statement", "study", "evidence"]
    parts += ["## Statements", _markdown(said.assign(evidence=_evidence(said))[columns])]
    parts.append("## Numbers")
    for study, rows in shown[shown["statement"].isna()].groupby("study"):
        parts += [f"### {study}", _markdown(_numbers(rows))]
    return "\n\n".join(parts) + "\n"


def _evidence(lines: pd.DataFrame) -> list[str]:
    pairs = zip(lines["precision"], lines["seeds"], strict=True)
    return [p if p == "counted" else f"{n:g} seed{'s' * (n > 1)}, {p}" for p, n in pairs]


def _numbers(lines: pd.DataFrame) -> pd.DataFrame:
    """Of a figure: what tells its numbers apart, and the numbers."""
    std = lines["measured_std"].map(lambda s: "" if pd.isna(s) else f" ± {s:.2g}")
    columns = {
        "verdict": lines["verdict"],
        "method": lines["method"].map(style.display_name),
        "setting": [", ".join(filter(None, line)) for line in settings(lines).to_numpy()],
        "number": lines["metric"].map(metric_text),
        "printed": lines["printed"],
        "measured": lines["measured"].map("{:.6g}".format) + std,
        "evidence": _evidence(lines),
    }
    return pd.DataFrame(columns).loc[:, lambda t: t.ne("").any()]


def _markdown(table: pd.DataFrame) -> str:
    rows = [[*table], ["---"] * table.shape[1], *table.astype(str).to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write(out: Path) -> list[Path]:
    """Draw the pictures of the table of rounds, and write the ledger: ``ledger.csv`` and ``overview.md``.

    Raises FldiagError where a file cannot be read or written."""
    read = {"dtype": str, "keep_default_na": False}
    names = {"value": "printed", "std": "printed_std"}
    tables = [
        pd.read_csv(FOLDER / f"{paper}.csv", **read).rename(columns=names).assign(paper=paper)
        for paper in PAPERS
    ]
    printed, rows = pd.concat(tables, ignore_index=True), measured(out)
    printed["study"] = printed["paper"] + "/" + printed["id"]
    said = statements(rows, printed, pd.read_csv(FOLDER / "statements.csv", **read))
    table = pd.concat([numbers(rows, printed[printed["printed"] != ""]), said])
    texts = {
        "ledger.csv": files.csv_text(table.drop(columns=["paper", "id"]), digits=6),
        "overview.md": page(table),
    }
    pictures = draw(out) if (out / ROUNDS).is_file() else []
    return [*pictures, *(files.write_text(out / name, text) for name, text in texts.items())]
