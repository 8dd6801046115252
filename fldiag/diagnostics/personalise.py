"""What the clients gain from a model of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pydantic import BeforeValidator, Field

from fldiag.choices import Data, Device, Download, Model, Root
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.plotting import style
from fldiag.plotting.tables import compares_runs, floats, names, need, select
from fldiag.registry import diagnostic
from fldiag.results.select import number, only
from fldiag.results.summary import Item, Say, Small
from fldiag.results.table import PERSONAL, check, table
from fldiag.runs.run import Run

SUMMARY = {
    "epochs": "fine-tuning epochs",
    "clients": "clients",
    "mean": "personal accuracy",
    "std": "± (over clients)",
    "lowest": "lowest",
    "highest": "highest",
}


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """One row for each run and number of epochs, none where the table holds no personal accuracy; and what voted."""
    several = frame["run"].nunique() > 1
    rows = []
    for (run, e), part in only(frame, metric=(PERSONAL, f"{PERSONAL}_std")).groupby(
        ["run", "index"], sort=False
    ):
        each = only(part, scope="client")["value"].dropna()
        if len(each):
            rows.append(
                {
                    **({"run": run} if several else {}),
                    "epochs": int(e),
                    "clients": len(each),
                    "mean": number(part, PERSONAL, scope="global"),
                    "std": number(part, f"{PERSONAL}_std", scope="global"),
                    "lowest": float(each.min()),
                    "highest": float(each.max()),
                }
            )
    yield Small(rows, {**({"run": "run"} if several else {}), **SUMMARY})
    for text in frame["voters"].dropna().unique() if "voters" in frame else ():
        yield Say(f"voted: {text}")


PICTURE = "picture of personal accuracy"
MEAN, MEDIAN = 0.9, 1.8  # widths of the two lines in a box
DASH: Any = (0, (2, 1))


@compares_runs
def draw(table: pd.DataFrame) -> Figure:
    """A dot a client over the number of fine-tuning epochs, boxes of their quartiles, a thick line at their median, a dashed
    one at their mean.

    ``table``: rows ``metric="personal_accuracy"`` with ``run, scope, client, index`` (epochs) and ``value`` (share in
    [0, 1]); only those of scope client are drawn. Several runs stand side by side. Raises FldiagError for an unfit
    table.
    """
    need(table, ("metric", "run", "scope", "client", "index", "value"), PICTURE)
    rows = select(table, PERSONAL, PICTURE)
    rows = rows[(rows["scope"] == "client").fillna(False).astype(bool)]
    flat = pd.DataFrame(
        {
            "run": names(rows["run"]),
            "client": floats(rows["client"]),
            "epochs": floats(rows["index"]),
            "value": floats(rows["value"]),
        }
    ).dropna(subset=["value"])
    if flat.empty:
        raise FldiagError(
            "no client has a personal accuracy",
            "clients need test examples of their classes",
            usage=True,
        )
    runs, epochs = list(dict.fromkeys(flat["run"])), sorted(flat["epochs"].unique())
    looks = style.looks(runs)
    width = style.wide(style.ONE_COLUMN if len(runs) * len(epochs) <= 8 else style.TWO_COLUMNS)
    ticks = [f"{e:g}" for e in epochs]
    if len(runs) == 1:
        spread = [flat.loc[flat["epochs"] == e, "value"] * 100 for e in epochs]
        ticks = [
            f"{tick}\n{v.mean():.1f} ± {v.std(ddof=0):.1f} %"
            for tick, v in zip(ticks, spread, strict=True)
        ]
    handles = [Line2D([], [], **looks[run].point) for run in runs if len(runs) > 1]
    texts = [*(runs if len(runs) > 1 else []), "mean", "median"]
    for size, dash in ((MEAN, DASH), (MEDIAN, (0, ()))):
        handles.append(Line2D([], [], color="#555555", linewidth=size, linestyle=dash))
    with style.paper():
        fig = style.figure(width, 2.3, layout="constrained")
        ax = fig.subplots()
        room = 0.8 / len(runs)
        for place, run in enumerate(runs):
            for at, e in enumerate(epochs):
                values = (
                    flat[(flat["run"] == run) & (flat["epochs"] == e)]
                    .sort_values("client")["value"]
                    .to_numpy()
                )
                _strip(
                    ax, at + (place - (len(runs) - 1) / 2) * room, values, 0.75 * room, looks[run]
                )
        ax.set(
            xlabel="epochs of fine-tuning",
            ylabel="personal accuracy",
            xlim=(-0.6, len(epochs) - 0.4),
        )
        ax.set_xticks(range(len(epochs)), ticks)
        low = min(float(flat["value"].min()), 0.95)
        ax.set_ylim(max(-0.02, low - 0.05), 1.02)
        style.percents(ax.yaxis)
        ax.grid(True, axis="y")
        style.legend(fig, handles, texts, handletextpad=0.4)
    return fig


def _strip(ax, x: float, values: np.ndarray, room: float, look: style.Look) -> None:
    if not len(values):
        return
    # Spread evenly by client number: no chance, and the same client keeps its place from box to box.
    across = (
        x + (np.linspace(-0.5, 0.5, len(values)) if len(values) > 1 else np.zeros(1)) * room * 0.8
    )
    ax.plot(
        across,
        values,
        linestyle="none",
        marker=look.marker,
        markersize=2.2,
        color=look.color,
        alpha=0.55,
        markeredgewidth=0,
        zorder=2,
    )
    ax.boxplot(
        [values],
        positions=[x],
        widths=room,
        showfliers=False,
        manage_ticks=False,
        zorder=3,
        **{
            f"{part}props": {"color": look.color, "linewidth": MEDIAN if part == "median" else 0.8}
            for part in ("box", "whisker", "cap", "median")
        },
    )
    mean = float(values.mean())
    ax.plot(
        [x - room / 2, x + room / 2],
        [mean, mean],
        color=look.color,
        linewidth=MEAN,
        linestyle=DASH,
        zorder=4,
    )


def _listed(value: Any) -> Any:
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple, range)) else value
    if text is not None and not re.fullmatch(r"\d{1,4}(,\d{1,4})*", str(text)):
        raise ValueError("not whole numbers up to 9999; write for example 0,1,5")
    return text


#: Whole numbers such as 0,1,5; in Python a sequence will do.
Numbers = Annotated[str | None, BeforeValidator(_listed)]


@diagnostic(
    "personalise",
    on="runs",
    draw=draw,
    summary=summary,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d --epochs 0,1,5",
)
def personalise(
    runs: Sequence[Run],
    *,
    epochs: Annotated[
        Numbers,
        Field(
            description="Epochs of fine-tuning, such as 0,1,5 (the default, unless the "
            "run's method has a fine-tuning plan)."
        ),
    ] = None,
    lr: Annotated[
        Literal["decayed", "initial"] | None,
        Field(description="Learning rate: decayed (that after the last round) or initial."),
    ] = None,
    model: Model = None,
    data: Data = None,
    root: Root = None,
    download: Download = False,
    device: Device = "auto",
    seed: Annotated[int | None, Field(description="Random seed.")] = None,
) -> pd.DataFrame:
    """Fine-tune the final model for each client and test it on the client's own class mixture: mean and std of the accuracy.

    From the last checkpoint of finished runs. Each client starts from the global model (with
    ``local_only``: from its own), trains e epochs by the run's local loop with plain cross entropy (or as the run's method says)
    and fresh momentum, for each e of ``epochs``, and is tested on test examples in its own mixture of classes. The first
    epochs of a longer training are those of a shorter one. What is not given is the method's own plan; the default is 0, 1 and 5
    epochs at the decayed lr. ``seed``: of minibatches, and of the examples that vote
    (default: the run's).

    Rows, with ``index`` = e: ``personal_accuracy`` of each client (binomial stderr; ``low`` and ``high``: Wilson's 95 %
    interval) and, with scope global, its mean over the clients (stderr over clients), ``personal_accuracy_std`` (the clients'
    standard deviation, divisor m), each client counting once. Clients without a test example have no value and do not enter.

    Raises FldiagError for unfinished runs, data without classes, and wrong epochs.
    """
    from fldiag.method import Personal
    from fldiag.training.personalise import GlobalModel, check_plan, measure
    from fldiag.training.setup import load_weights, setup_of

    tables = []
    for i, run in enumerate(runs):
        setup = setup_of(run, device=device, root=root, download=download, names=(model, data))
        plan = setup.method.personal or Personal((0, 1, 5))
        lengths = tuple(map(int, epochs.split(","))) if epochs else plan.epochs
        plan = replace(plan, epochs=lengths, lr=lr or plan.lr)
        check_plan(setup, plan)
        w, buffers = load_weights(run, setup)
        states = run.states if plan.method and plan.method.client_init(w) else {}
        start = GlobalModel(w, buffers, states, run.done)
        with workspace().part(i, len(runs), ""):
            rows = measure(setup, plan, start, seed=seed, run=run.name)
        tables.append(check(table(rows, **run.common)))
    return pd.concat(tables, ignore_index=True)
