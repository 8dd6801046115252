"""The papers' own numbers, ``PAPER.csv``, and the runs that stand beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

import fldiag
from fldiag import registry

FOLDER = Path(__file__).parent
#: Keys of a setting that describe the federation; those that only tell rows apart; all others are options of the method.
FEDERATION = (
    "partition",
    "alpha",
    "shards",
    "classes",
    "clients",
    "ratio",
    "rounds",
    "epochs",
    "lr",
    "public",
)
MARKS = ("over", "printed", "column", "survivor", "group")
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
COMMON = {"fedproj": ("epochs", "batch_size", "lr")}


def parse(setting: str) -> dict[str, str]:
    """
    >>> parse("partition=lda;alpha=0.1")
    {'partition': 'lda', 'alpha': '0.1'}
    """
    return dict(pair.split("=", 1) for pair in setting.split(";")) if setting else {}


@cache
def printed(name: str) -> pd.DataFrame:
    """The numbers that a paper (``fedsol``) prints, or one of its figures or tables (``fedsol/table2``); texts are "" where there
    is none."""
    paper, _, id = name.partition("/")
    table = pd.read_csv(FOLDER / f"{paper}.csv", keep_default_na=False)
    table[["value", "std"]] = table[["value", "std"]].apply(pd.to_numeric)
    return table[table["id"] == id] if id else table


class Cell(NamedTuple):
    """A cell of a paper's table that can be run: its preset and overrides by dotted key; ``labels``: how it is called."""

    preset: str
    over: dict[str, Any]
    labels: dict[str, str]


def cells(name: str, chosen: Callable[[pd.DataFrame], Any] | None = None) -> Iterator[Cell]:
    """The cells of a table: those with a partition, a method and a registered data set, each once. ``chosen``: which rows."""
    rows = printed(name)
    rows = rows if chosen is None else rows[chosen(rows)]
    keys = ["setting", "method", "model", "data"]
    for setting, method, model, data in rows[keys].drop_duplicates().itertuples(index=False):
        own = parse(setting)
        if "partition" in own and method and data in registry.dataset and not {*own} & {*MARKS}:
            labels = dict(zip(keys, (setting, method, model, data), strict=True))
            yield cell(name, labels)


def cell(name: str, labels: Mapping[str, str]) -> Cell:
    """The preset of the cell's data and partition, with what its setting says."""
    own, model = parse(labels["setting"]), labels["model"]
    short, key = SPLITS[own["partition"]]
    middle = "-resnet18" if model == "resnet18_gn" else ""
    preset = f"{name.partition('/')[0]}-{labels['data']}{middle}-{short}{own[key] if key else ''}"
    over = values(preset, labels["method"], name)
    if model in registry.model and fldiag.Config.load(preset).model.name != model:
        over["model.name"] = model
    if "clients" in own:
        over["clients.total"] = int(own["clients"])
        over["clients.per_round"] = round(float(own.get("ratio", 1)) * int(own["clients"]))
    places = {"rounds": "rounds", "epochs": "train.epochs", "lr": "train.lr"}
    over |= {place: own[key] for key, place in places.items() if key in own}
    options = {k: v for k, v in own.items() if k not in (*FEDERATION, "tune_epochs")}
    over |= {f"method.{key}": text for key, text in options.items()}
    shown = [f"{key}={value}" for key, value in options.items()]
    label = labels["method"] + (f" ({', '.join(shown)})" if shown else "")
    return Cell(preset, over, {**labels, "label": label})


def values(preset: str, method: str, table: str = "") -> dict[str, Any]:
    """The overrides of a method: its name, its id (``strategy:A1``), and what the paper sets where it is not the preset's own."""
    paper, data = preset.split("-")[:2]
    name, _, number = method.partition(":")
    over: dict[str, Any] = {"method.name": name, **({"method.id": number} if number else {})}
    own = fldiag.Config.load(preset).method
    if method in registry.method and method != own.name:
        theirs = registry.method.get(method).options.model_fields
        over |= {f"method.{k}": own.options[k] for k in COMMON.get(paper, ()) if k in theirs}
    for place in (paper, f"{paper}-{data}", table):
        over |= VALUES.get((place, name), {})
    return over
