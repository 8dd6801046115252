"""FedProj: studies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from . import shapes
from .study import Scale, Study, final, protocol, trained
from .tables import table

Rows = Iterator[pd.DataFrame]


def fig1(scale: Scale, seed: int) -> Rows:
    """Clients and global models after the last round (question iris), and what the picture shows besides (regions)."""
    from .toys import iris  # imports torch, without which studies are listed

    for lr in (0.01, 0.001):
        rows = iris.run(lr, seeds=[seed]).assign(lr=lr)
        is_number = rows["metric"].isin(("accuracy", "disagreement")) & (rows["scope"] == "global")
        is_number &= rows["round"] == rows["round"].max()
        numbers = rows[is_number]
        unit = np.where(numbers["metric"] == "accuracy", 100, 1)
        yield numbers.assign(question="iris", value=unit * numbers["value"].astype(float))
        yield rows.assign(question="regions")


def draw_fig1(table: pd.DataFrame) -> Figure:
    from .toys import iris

    rows = table[(table["question"] == "regions") & (table["lr"] == 0.01)]
    return iris.draw(rows)


def fig3(scale: Scale, seed: int) -> Rows:
    for alpha in (0.3, 0.5):
        for rate in (0.0, 0.3, 0.7, 1.0):
            over = {"method.proj_rate": rate}
            run = trained(scale, protocol(scale, f"fedproj-cifar10-lda{alpha}", over, seed=seed))
            labels = {"label": f"LDA {alpha}", "factor": "rate", "at": rate}
            yield final(run, **labels, setting=f"partition=lda;alpha={alpha};proj_rate={rate:g}")


def draw_fig3(table: pd.DataFrame) -> Figure:
    return shapes.over(table, {"rate": "rate of projection"})


STUDIES = (
    Study(
        "fedproj/fig1",
        "Forgetting on Iris in the plane",
        "FedProj Figure 1",
        "Decision regions of the clients after local training and of the global model in the last round, on Iris in the "
        "plane of its first two principal components, one class per client. Percentages: correctly classified test "
        "examples, and the area in which a client's regions differ from the global ones. The paper does not give split, "
        "minibatch, public data and scaling; they are chosen here. The picture shows seed 0 at lr = 0.01; the statements "
        "use all seeds, also at the paper's lr = 0.001.",
        fig1,
        draw_fig1,
        seeds=5,
    ),
    Study(
        "fedproj/fig3",
        "Accuracy and rate of projection",
        "FedProj Figure 3a",
        "Final test accuracy of FedProj against the share of rounds in which its clients project; rate 0 is FedDF with the "
        "same options. The paper's panel b is its Table 3.",
        fig3,
        draw_fig3,
    ),
    table(
        "fedproj/table1",
        "Accuracy of nine methods",
        "Final test accuracy in percent; FedProj with the weight penalty that was best in the paper's tests. Here the "
        "proximal term of FedProx is active; in the released code it has no effect.",
    ),
    table(
        "fedproj/table2",
        "Accuracy on language tasks",
        "Final test accuracy in percent. The paper's TinyBERT is pretrained; bert_tiny starts from scratch here.",
    ),
    table(
        "fedproj/table3",
        "FedProj and its weight penalty",
        "Final test accuracy in percent against gamma_wd, whose term has no effect in the released code but is active here.",
    ),
)
