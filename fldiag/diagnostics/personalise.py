"""What the clients gain from a model of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import pandas as pd
from pydantic import BeforeValidator, Field

from fldiag import registry
from fldiag.plotting import style
from fldiag.plotting.style import compares_runs
from fldiag.registry import diagnostic
from fldiag.results.table import (
    PERSONAL,
    Options,
    Sentence,
    SmallTable,
    Summary,
    check_schema,
    only,
    table,
)
from fldiag.runs.run import Run
from fldiag.sections import Device, Download, Root


def summary(frame: pd.DataFrame, options: Options) -> Summary:
    """One row for each run and number of epochs."""
    yield Sentence(
        "personal accuracy after epochs of fine-tuning: mean, deviation and range over clients"
    )
    groups = of_clients(frame).groupby(["run", "index"], sort=False)["value"]
    numbers = groups.agg(clients="count", mean="mean", lowest="min", highest="max")
    numbers.insert(2, "std", groups.std(ddof=0))
    yield SmallTable.of(numbers.rename_axis(["run", "epochs"]).reset_index())


def of_clients(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the clients that have a personal accuracy."""
    rows = only(frame, metric=PERSONAL, scope="client").dropna(subset=["value"])
    return rows.astype({"index": int, "value": float})


@compares_runs
def draw(frame: pd.DataFrame) -> style.Figure:
    """A faint dot a client over the number of fine-tuning epochs, and beside them their mean with their standard deviation;
    several runs stand side by side."""
    rows = of_clients(frame)
    looks, epochs = style.looks(rows["run"]), sorted(rows["index"].unique())
    with style.paper():
        fig, (ax,) = style.panels(1, 2.3, width=style.ONE_COLUMN)
        room = 0.8 / len(looks)
        for place, (run, look) in enumerate(looks.items()):
            part = only(rows, run=run)
            x = part["index"].map(epochs.index) + room * (place - (len(looks) - 1) / 2)
            ax.plot(x, part["value"], ".", color=look.color, alpha=0.4)
            groups = part.groupby(x)["value"]
            means, errors = groups.mean(), groups.std(ddof=0)
            ax.errorbar(means.index + room / 4, means, errors, label=run, **look.point)
        ax.set(xlabel="epochs of fine-tuning", ylabel="personal accuracy")
        ax.set(xlim=(-0.6, len(epochs) - 0.4), ylim=(None, 1.02))
        ax.set_xticks(range(len(epochs)), epochs)
        style.percents(ax.yaxis)
        ax.grid(True, axis="y")
        ax.set_title("dots: clients; bars: mean ± std. deviation")
        if len(looks) > 1:
            style.legend(fig, *ax.get_legend_handles_labels())
    return fig


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
    model: Annotated[
        str | None, Field(description="Model of the run, if it is your own code: pkg.mod:factory.")
    ] = None,
    data: Annotated[
        str | None,
        Field(description="Data of the run, if they come from your own code: pkg.mod:factory."),
    ] = None,
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
    from fldiag.method import PersonalPlan
    from fldiag.training.personalise import fine_tune
    from fldiag.training.server import Federation
    from fldiag.training.setup import setup_of

    registry.allow(model, data)
    tables = []
    for run in runs:
        setup = setup_of(run, device=device, root=root, download=download)
        plan = setup.method.personal or PersonalPlan((0, 1, 5))
        if epochs:
            plan = replace(plan, epochs=tuple(map(int, epochs.split(","))))
        federation = Federation(setup)
        federation.load(run)
        if plan.method is not None:
            federation.clients = run.states
        tables.append(check_schema(table(fine_tune(federation, plan, seed=seed), **run.common)))
    return pd.concat(tables, ignore_index=True)
