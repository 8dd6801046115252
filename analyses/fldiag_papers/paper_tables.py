"""Tables: trials from the paper's own rows, a picture and a layout of measured beside reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from fldiag import config as configs
from fldiag import registry
from fldiag.plotting import words
from fldiag_papers import pictures, reported
from fldiag_papers.reported import FEDERATION, Reported
from fldiag_papers.study import ACCURACY, PROFILED, Ask, Study, Trial, examples, final

#: Kind of a partition -> how presets are called after it, and the option that follows.
SPLITS = {
    "iid": ("iid", ""),
    "lda": ("lda", "alpha"),
    "sharding": ("shard", "shards"),
    "dirichlet": ("dir", "alpha"),
    "pathological": ("path", "classes"),
}


#: What is set for a method other than its preset's own: (paper, method) -> overrides; (paper-data, ...) and (paper/id, ...)
#: come after, and win.
VALUES: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("fedalign", "fedprox"): {"method.mu": 1e-4},
    ("fedalign", "moon"): {"method.mu": 1.0},
    ("fedalign-cifar10", "moon"): {"model.projection": True},
    ("fedalign-cifar100", "moon"): {"model.projection": True},
    ("fedalign-imagenet200", "gradaug"): {"method.sides": (1.0, 0.857, 0.714, 0.571)},
    ("fedproj", "fedprox"): {"method.mu": 1e-4},
    ("fedproj", "fedrcl"): {"train.clip": 10.0},
    ("fedproj", "feddyn"): {"train.clip": 5.0},
    ("fedsol", "fedsol_ft"): {"method.lambda_norm": "dim0"},  # as the presets' own method
    ("fedsol", "strategy"): {"method.lambda_norm": "dim0"},
    ("fedtoga", "fedsam"): {"method.rho": 0.01},
    ("fedtoga", "mofedsam"): {"method.rho": 0.01},
    ("fedtoga/table2_reference", "fedprox"): {"method.mu": 0.1},
    ("fedtoga/table2_reference", "mofedsam"): {"method.rho": 0.1},
    ("fedtoga/table2_reference", "fedgamma"): {"method.rho": 0.01},
}
#: Options of a preset's method that the paper gives to every method that has them: distillation on the server.
COMMON: Mapping[str, tuple[str, ...]] = {"fedproj": ("epochs", "batch_size", "lr")}


def table_of(
    paper: str,
    id: str,
    *,
    title: str,
    caption: str,
    ask: tuple[Ask, ...] = (final(),),
    pick: Mapping[str, Mapping[str, Any]] = ACCURACY,
    rows_where: Callable[[Reported], bool] = lambda row: True,
    over: Mapping[str, Any] | None = None,
    **more: Any,
) -> Study:
    """The study of a table, one trial for each setting, method, model and data set of its rows in reported.csv.

    ``rows_where`` chooses rows; ``over``: overrides of all trials; ``more``: other fields of the study."""
    source = next(row.source for row in reported.rows(paper) if row.id == id)
    return Study(
        **{
            "id": id,
            "title": title,
            "source": source.split(" = ")[0],
            "caption": caption,
            "ask": ask,
            "pick": pick,
            "draw": pictures.dots,
            "layout": pictures.cells,
            **(
                {}
                if "trials" in more
                else {"trials": trials(paper, id, rows_where=rows_where, over=over)}
            ),
            **more,
        }
    )


def counts_of(
    paper: str,
    id: str,
    *,
    title: str,
    caption: str,
    ask: Ask,
    pick: Mapping[str, Mapping[str, Any]],
) -> Study:
    """The study of a table's columns that are counted, on the paper's model and without data; each number also as profilers of
    layers count it, which the picture leaves away."""
    both = {
        name + end: {**conditions, "metric": conditions["metric"] + end}
        for name, conditions in pick.items()
        for end in ("", PROFILED)
    }
    return table_of(
        paper,
        id,
        title=title,
        caption=caption,
        ask=(),
        pick=both,
        trials=tuple(replace(t, ask=(ask,), train=False) for t in trials(paper, id)),
        draw=lambda table: pictures.dots(table[~table["metric"].str.endswith(PROFILED)]),
    )


def sizes_of(id: str, presets: Mapping[str, str], *, source: str, caption: str) -> Study:
    """The study of how many examples data sets have: name -> a preset that loads them."""
    return Study(
        id=id,
        title="Sizes of the data sets",
        source=source,
        caption=caption,
        trials=tuple(
            Trial(preset, label=words.data(name), data=name, train=False)
            for name, preset in presets.items()
        ),
        ask=(examples(),),
        pick={m: {"metric": m} for m in ("train_examples", "test_examples")},
        draw=lambda table: pictures.dots(pictures.by_data(table)),
        layout=lambda table: pictures.cells(pictures.by_data(table)),
    )


def trials(
    paper: str,
    id: str,
    *,
    rows_where: Callable[[Reported], bool] = lambda row: True,
    over: Mapping[str, Any] | None = None,
) -> tuple[Trial, ...]:
    """A trial for each cell of a table that can be run: those with a partition, a method and a registered data set."""
    unique: dict[tuple[str, ...], Trial] = {}
    for row in reported.rows(paper):
        if (
            row.id == id
            and row.method
            and "partition" in row.settings
            and row.data in registry.dataset
            and row.plain == row.setting
            and rows_where(row)
        ):
            unique.setdefault((row.setting, row.method, row.model, row.data), trial(row, over))
    return tuple(unique.values())


def trial(row: Reported, over: Mapping[str, Any] | None = None) -> Trial:
    """The trial of a row: the preset of its data and partition, with what its setting says."""
    s = dict(row.settings)
    short, key = SPLITS[s["partition"]]
    preset = f"{row.paper}-{row.data}{'-resnet18' if row.model == 'resnet18_gn' else ''}-{short}{s[key] if key else ''}"
    overrides = values(preset, row.method, row.id)
    if row.model in registry.model and configs.load(preset).model.name != row.model:
        overrides["model.name"] = row.model
    if "clients" in s:
        overrides["clients.total"] = int(s["clients"])
        overrides["clients.per_round"] = round(float(s.get("ratio", 1)) * int(s["clients"]))
    for name, place, kind in (
        ("rounds", "rounds", int),
        ("epochs", "train.epochs", int),
        ("lr", "train.lr", float),
    ):
        if name in s:
            overrides[place] = kind(s[name])
    overrides |= {
        f"method.{k}": value(v) for k, v in s.items() if k not in (*FEDERATION, *reported.MARKS)
    }
    return Trial(
        preset,
        row.method,
        {**overrides, **(over or {})},
        label(row.method, s),
        row.setting,
        row.model,
        row.data,
    )


def values(preset: str, method: str, id: str = "") -> dict[str, Any]:
    """What is set for a method that is not the preset's own; one with an id (``strategy:A1``) is called by its name."""
    paper, data = preset.split("-")[:2]
    overrides: dict[str, Any] = {}
    method_of_preset = configs.load(preset).method
    if method in registry.method and method != method_of_preset.name:
        theirs = registry.method.get(method).options.model_fields
        overrides = {
            f"method.{k}": method_of_preset.options[k] for k in COMMON.get(paper, ()) if k in theirs
        }
    for name in (paper, f"{paper}-{data}", f"{paper}/{id}"):
        overrides |= VALUES.get((name, method.partition(":")[0]), {})
    return overrides


def value(text: str) -> Any:
    """A setting's value as TOML would read it."""
    return configs.parse_override(f"v={text}")[1]


def label(method: str, settings: Mapping[str, str]) -> str:
    """The method, and its own options where the setting has any."""
    options = [f"{k}={v}" for k, v in settings.items() if k not in (*FEDERATION, *reported.MARKS)]
    return method + (f" ({', '.join(options)})" if options else "")


def with_values(trial: Trial) -> Trial:
    """A trial written by hand, with what the paper sets for its method, so that it is a run of the tables too."""
    return replace(trial, over={**values(trial.preset, trial.method), **trial.over})


def first_rounds(curve: pd.DataFrame, method: str) -> pd.DataFrame:
    """In which round every run first has the best accuracy of ``method`` in its setting and seed: rows
    ``rounds_to_best_of_<method>``, empty values for runs that never have it, no rows where that method was not run.

    ``curve``: that of every run."""
    pieces = []
    for _, part in curve.groupby(["setting", "seed"], sort=False):
        level = part.loc[part["method"] == method, "value"].max()
        if pd.isna(level):
            continue
        first = part[part["value"] >= level].groupby("label")["round"].min()
        runs = part.drop_duplicates("label")
        pieces.append(
            runs.assign(
                metric=f"rounds_to_best_of_{method}", value=runs["label"].map(first), unit="rounds"
            )
        )
    return pd.concat(pieces, ignore_index=True) if pieces else curve.iloc[:0]
