"""What studies share: a paper's protocol at a scale, its runs and what is asked of them, and what is written of a study.

A study is a function ``rows(scale, seed)``, which trains, asks and yields tables, and a function ``draw(table)``. It stands in
the module of its paper, among its ``STUDIES``::

    def fig5(scale, seed):
        for rho in RHOS:
            run = trained(scale, protocol(scale, "fedsol-cifar10-lda0.1", {"method.rho": rho, "seed": seed}))
            yield final(run, label="FedSOL", rho=rho)

A run lies in a folder that is named after the hash of its config, so studies share runs, and a call that was stopped goes on
where it was. The answers of diagnostics are cached in the run's folder. Every row says in the column ``question`` which of them
it belongs to, since several diagnostics have a metric of one name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import fldiag
from fldiag.plotting import style
from fldiag.results import files

STORE, OUT = Path("checkpoints/figures"), Path("figures")
#: Beside run.json: processor seconds of every round.
CLOCK = "seconds.json"
#: A protocol of so few rounds is made half as long as others.
SHORT = 25


class Share(NamedTuple):
    """Factors of a paper's numbers of clients (at least ``fewest`` stay), of sampled clients and of local epochs."""

    clients: float
    sampled: float
    epochs: float
    fewest: int = 10


@dataclass(frozen=True)
class Scale:
    """How small a paper's protocol is made, and how it is run.

    ``data``: what stands for every data set ("": the protocol is the paper's); of it ``images`` are kept for training, and
    ``public`` of these where a protocol has public data. ``shares``: by paper, "" of all others. ``options``: of diagnostics.
    ``seeds``: 0 for as many as the study wants. ``over``: overrides of every config. ``training``: arguments of fldiag.train;
    ``listen``: is told of every round."""

    name: str
    seeds: int = 0
    data: str = ""
    images: int = 0
    public: int = 0
    rounds: int = 0
    shares: Mapping[str, Share] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    over: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    listen: Callable[[dict[str, Any]], None] = lambda event: None
    store: Path = STORE


SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "smoke",
            seeds=1,
            data="digits",
            images=500,
            public=100,
            rounds=4,
            shares={
                "": Share(0.1, 0.4, 0.2),
                "fedproj": Share(0.1, 0.4, 0.05),
                "fedalign": Share(0.25, 0.25, 0.05, fewest=4),
            },
            options={
                **{k: {"samples": 200} for k in ("spectrum", "drift", "forgetting")},
                "landscape": {"samples": 200},
                "matching": {"samples": 100, "k": 1},
            },
        ),
        Scale(
            "paper",
            seeds=3,
            over={"checkpoint.every": 10},
            options={name: {"samples": 10_000} for name in ("landscape", "spectrum")},
        ),
    )
}


@dataclass(frozen=True)
class Study:
    """A figure or table. ``name``: as ``fedsol/fig6``; ``source``: where the paper has it; ``seeds``: how many it wants; 0 where
    no seed changes it."""

    name: str
    title: str
    source: str
    caption: str
    rows: Callable[[Scale, int], Iterator[pd.DataFrame]]
    draw: Callable[[pd.DataFrame], Figure]
    seeds: int = 1


# ---- protocols and runs


def protocol(scale: Scale, preset: str, over: Mapping[str, Any], **more: Any) -> fldiag.Config:
    """The paper's config with overrides by dotted key, made as small as the scale says."""
    config = fldiag.Config.load(preset, **{"checkpoint.clients": "none", **over, **more})
    return config.replace(**{**(_reduced(scale, config) if scale.data else {}), **scale.over})


def stand_in(scale: Scale, preset: str, over: Mapping[str, Any]) -> fldiag.Config:
    """The paper's config for what is counted of data: only its data are the scale's, all of them."""
    other = {"data.name": scale.data, "data.variant": None} if scale.data else {}
    return fldiag.Config.load(preset, **over).replace(**other)


def _reduced(scale: Scale, config: fldiag.Config) -> dict[str, Any]:
    """Overrides by dotted key that make a paper's config small."""
    clients, train, method = config.clients, config.train, config.method
    share = scale.shares.get(config.name.partition("-")[0], scale.shares[""])
    total = max(min(share.fewest, clients.total), round(clients.total * share.clients))
    rounds = scale.rounds if config.rounds > SHORT else scale.rounds // 2
    is_residual = config.model.name.startswith("resnet")
    changes: dict[str, Any] = {
        "data.name": f"{scale.data}-{scale.images}",
        "data.root": str(_folder_of_data(scale)),
        "data.variant": None,
        "data.normalise": "standard",
        "model.name": "small_resnet" if is_residual else "small_cnn",
        "clients.total": total,
        "clients.per_round": min(total, max(1, round(clients.per_round * share.sampled))),
        "train.epochs": max(1, round(train.epochs * share.epochs)),
        "rounds": min(config.rounds, rounds),
        # Per-FedAvg halves every minibatch.
        "train.batch_size": min(20 * (1 + (method.name == "perfedavg")), train.batch_size),
        # Clients are so small that a short minibatch may be all they have.
        "train.drop_last": False,
        "train.aggregate": "n" if train.aggregate == "batches" else train.aggregate,
    }
    if config.partition.kind in ("lda", "lda_fedsol"):
        changes["partition.min_size"] = min(config.partition.min_size or 1, 2)
    if config.data.public:
        changes["data.public"] = f"holdout:{scale.public}"
    most = {"memory_batch": 64, "batch_size": 64, "memory_size": scale.public, "first_round": 1}
    for option, limit in most.items():
        if isinstance(value := method.options.get(option), int) and value > limit:
            changes[f"method.{option}"] = limit
    return changes


def _folder_of_data(scale: Scale) -> Path:
    """Where the scale's data lie: the first images of every class, equally many, in the order of the whole set."""
    folder = (scale.store / "data").absolute()
    file = folder / f"{scale.data}-{scale.images}.npz"
    if not file.is_file():
        from .costs import dataset_and_parts  # torch

        full, _ = dataset_and_parts(fldiag.Config.load("digits", data__name=scale.data))
        arrays: dict[str, Any] = {}
        for split, x, y, most in (
            ("train", full.train_x, full.train_y, scale.images),
            ("test", full.test_x, full.test_y, min(1000, len(full.test_y))),
        ):
            share = -(-most // full.classes)
            first = [np.flatnonzero(y.numpy() == c)[:share] for c in range(full.classes)]
            index = np.sort(np.concatenate(first))[:most]
            pixels = x[index].permute(0, 2, 3, 1).numpy()
            arrays[f"{split}_images"] = np.repeat(pixels, full.repeat, -1)
            arrays[f"{split}_labels"] = y[index].numpy()
        files.write_atomic(file, lambda f: np.savez_compressed(f, **arrays))
    return folder


def trained(scale: Scale, config: fldiag.Config) -> fldiag.Run:
    """The run of a config: there, gone on with, or trained. The processor seconds of its rounds are written beside it, where
    this process trained all of them itself."""
    kept = "" if config.checkpoint.clients == "none" else "-clients"
    name = f"{config.name}-{config.method.name}-s{config.seed}-{config.hash[:10]}{kept}"
    clock = [time.process_time()]

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            clock.append(time.process_time())
            scale.listen(event)

    run = fldiag.train(
        config, out=scale.store / name, resume=True, on_event=listen, **scale.training
    )
    if len(clock) > run.done and scale.training.get("executor", "serial") == "serial":
        files.write_text(run.path / CLOCK, json.dumps(np.diff(clock).tolist()))
    return run


# ---- questions


def answer(question: str, table: pd.DataFrame, subject: Any, **labels: Any) -> pd.DataFrame:
    """Rows with the question that they answer, the run or the config alone that they are of, and the study's labels."""
    config = getattr(subject, "config", subject)
    values = pd.to_numeric(table["value"]).astype(float)
    return table.assign(
        value=values.replace([np.inf, -np.inf], np.nan),  # a csv that every reader takes
        question=question,
        run=None if config is subject else subject.path.name,
        trained_on=config.data.name,
        trained_model=config.model.name,
        seed=config.seed,
        **labels,
    )


def curve(run: fldiag.Run, **labels: Any) -> pd.DataFrame:
    """The test ``accuracy`` in percent of every round."""
    rows = run.metrics.query("metric == 'accuracy' and scope == 'global'")
    rows = rows.assign(value=100 * rows["value"].astype(float), unit="%")
    return answer("curve", rows, run, **labels)


def final(run: fldiag.Run, **labels: Any) -> pd.DataFrame:
    """The last round's test ``accuracy`` in percent; no value for a run that diverged."""
    rows = curve(run, **labels).tail(1).assign(question="final")
    return rows if run.status != "diverged" else rows.assign(value=np.nan)


def best(run: fldiag.Run, **labels: Any) -> pd.DataFrame:
    """The highest test ``accuracy`` in percent of any round, for papers whose code reports that."""
    rows = curve(run, **labels).sort_values("value", ascending=False, kind="stable")
    return rows.head(1).assign(question="best")


def reach(run: fldiag.Run, levels: tuple[float, ...], **labels: Any) -> pd.DataFrame:
    """``rounds_to_80`` for level 80: the first round with that test accuracy in percent; no value if it is never reached."""
    rows = curve(run)
    rounds = rows["round"].astype(float)
    first = {f"rounds_to_{level}": rounds[rows["value"] >= level].min() for level in levels}
    table = pd.DataFrame({"metric": list(first), "value": list(first.values()), "unit": "rounds"})
    return answer("reach", table, run, **labels)


def seconds(run: fldiag.Run, **labels: Any) -> pd.DataFrame:
    """``seconds_per_round``: the median of the processor time of the rounds after the first; no value for a run that was not
    trained here in one piece."""
    file = run.path / CLOCK
    clock = json.loads(file.read_text("utf-8"))[1:] if file.is_file() else [np.nan]
    row = {"metric": "seconds_per_round", "value": np.median(clock), "unit": "s"}
    return answer("seconds", pd.DataFrame([row]), run, **labels)


def asked(
    scale: Scale,
    run: fldiag.Run,
    diagnostic: str,
    options: Mapping[str, Any] | None = None,
    **labels: Any,
) -> pd.DataFrame:
    """The table of a diagnostic, with the scale's options where the study has none."""
    options = {**scale.options.get(diagnostic, {}), **(options or {})}
    table = fldiag.diagnose(run, diagnostic, cache=run.path / "diagnostics" / "cache", **options)
    return answer(diagnostic, table.drop(columns="data", errors="ignore"), run, **labels)


def counted(question: str, config: fldiag.Config, **labels: Any) -> pd.DataFrame:
    """What is counted of a config without training it: a function of ``costs``."""
    from . import costs  # imports torch, without which studies are listed

    return answer(question, getattr(costs, question)(config), config, **labels)


# ---- making a study


def _seeds(study: Study, scale: Scale) -> list[int]:
    return list(range((scale.seeds or study.seeds) if study.seeds else 1))


def table_of(study: Study, scale: Scale) -> pd.DataFrame:
    """All rows of a study at a scale; columns without an entry are left out."""
    pieces = [t for seed in _seeds(study, scale) for t in study.rows(scale, seed)]
    return pd.concat(pieces, ignore_index=True).dropna(axis=1, how="all")


def make(study: Study, scale: Scale, out: Path = OUT) -> list[Path]:
    """Train, ask, draw and write a study; returns its files: json, csv and the pictures, png last.

    Raises FldiagError where training or a diagnostic does."""
    table = table_of(study, scale)
    over = [f" --set {k}={v}" for k, v in scale.over.items() if k not in SCALES[scale.name].over]
    about = {
        **{key: getattr(study, key) for key in ("title", "source", "caption")},
        "scale": scale.name,
        "command": f"fldiag figures {study.name} --scale {scale.name}{''.join(over)}",
        "seeds": _seeds(study, scale),
        "runs": sorted(table["run"].dropna().unique()) if {"run", "trained_on"} <= {*table} else [],
    }
    figure = study.draw(table)
    if scale.data and about["runs"]:
        data = f"{scale.images:,} images of {style.display_name(scale.data)}"
        rounds = f"{table['round'].max():g} rounds, " if "round" in table else ""
        seeds = f"{len(about['seeds'])} seed{'s' * (len(about['seeds']) > 1)}"
        head(figure, f"Reduced: {data}, {rounds}{seeds}")
    return write(table, out / study.name, about, figure)


def write(
    table: pd.DataFrame, path: Path, about: Mapping[str, Any], figure: Figure | None = None
) -> list[Path]:
    """A table as csv, with a json of what it is and by which code, and its picture."""
    tables = files.write_table(table, path, about)
    return tables + style.save(figure, path) if figure else tables


def head(figure: Figure, text: str) -> None:
    """A line above the picture, which grows by it; in the empty foot of one whose parts nobody else moves."""
    style_: dict[str, Any] = {"x": 0.01, "ha": "left", "fontsize": 7, "color": "#555555"}
    if figure.get_layout_engine() is None:
        figure.text(y=0.002, s=text, va="bottom", **style_)
    else:
        figure.set_figheight(figure.get_figheight() + 0.15)
        figure.suptitle(text, **style_)
