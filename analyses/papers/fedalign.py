"""FedAlign: studies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

import fldiag

from .fedsol import draw_landscapes, landscapes
from .reported import cells
from .study import Scale, Study, asked, final, protocol, seconds, trained
from .tables import counts, table

Rows = Iterator[pd.DataFrame]


def fig1(scale: Scale, seed: int) -> Rows:
    lines = {"FedAvg": "fedavg", "GradAug": "gradaug"}
    preset = "fedalign-cifar100-lda0.5"
    over = {label: (preset, {"method.name": name}) for label, name in lines.items()}
    yield from landscapes(scale, seed, over)


#: Metric of the table -> the rows of ``matching`` that it is.
NUMBERS: dict[str, dict[str, Any]] = {
    "lambda_max": {"metric": "eigenvalue", "index": 1, "moment": "aggregated"},
    "trace": {"metric": "trace", "moment": "aggregated"},
    **{
        name: {
            "metric": name,
            "diag_mode": "tensor_trace",
            "self_pairs": True,
            "slice": "train",
        }
        for name in ("H_N", "H_D")
    },
}


def table1(scale: Scale, seed: int) -> Rows:
    for preset, over, labels in cells("fedalign/table1"):
        kept = {"checkpoint.clients": "sampled", **over}
        run = trained(scale, protocol(scale, preset, kept, seed=seed))
        yield final(run, **labels)
        rows = asked(scale, run, "matching", {"on": "global"}, **labels)
        rows = rows[rows["scope"] == "global"]
        for metric, where in NUMBERS.items():
            is_it = (rows[list(where)] == pd.Series(where)).all(axis=1)
            yield rows[is_it].assign(metric=metric)


def accuracy_and_seconds(run: fldiag.Run, **labels: Any) -> pd.DataFrame:
    return pd.concat([final(run, **labels), seconds(run, **labels)])


COUNTED = (
    "Multiply-adds per image of all forward passes of a local step, and parameters kept, counted at every scale on the paper's "
    "model, images and classes, without data; randomly drawn blocks and sub-networks count with their expectation. _profiled: as "
    "layer profilers count, with the pooling before the classifier and without the parameters of batch-norm."
)
STUDIES = (
    Study(
        "fedalign/fig1",
        "Loss landscapes",
        "FedAlign Figure 1",
        "Training loss of the final global models of FedAvg and GradAug along the top two Hessian eigenvectors (λ ± the "
        "bound of its numerical error, not a spread over seeds).",
        fig1,
        draw_landscapes,
    ),
    table(
        "fedalign/table1",
        "Accuracy and curvature",
        "Final test accuracy in percent; largest Hessian eigenvalue and trace of the global model; H_N and H_D of the "
        "clients' models as in the released code: one trace per tensor, on all clients' data, pairs k = j included. Traces "
        "and eigenvalues use one slice of training examples without augmentation instead of ten augmented batches.",
        rows=table1,
        seeds=3,
    ),
    table(
        "fedalign/table2",
        "Accuracy and heterogeneity",
        "Final test accuracy in percent under LDA 0.1, 0.5, 2.5 and with equal clients. For FedAlign see Table 6.",
    ),
    table(
        "fedalign/table3",
        "Accuracy and local epochs",
        "Final test accuracy in percent. For FedAlign see Table 6.",
    ),
    table(
        "fedalign/table4",
        "Accuracy and number of clients",
        "Final test accuracy in percent; with a quarter of 64 clients per round, after 25 and 100 rounds. For FedAlign see "
        "Table 6.",
    ),
    table(
        "fedalign/table5",
        "Accuracy and seconds",
        "Final test accuracy in percent, and seconds of processor time per round on one thread of this machine, of which "
        "only the ratios are meaningful. Counted costs are in table5_counts.",
        ask=accuracy_and_seconds,
    ),
    counts("fedalign/table5_counts", "Cost, counted", COUNTED, "flops"),
    table(
        "fedalign/table6",
        "FedAlign in all settings",
        "Final test accuracy in percent.",
    ),
    table(
        "fedalign/table7",
        "Accuracy on CIFAR-10 and ImageNet-200",
        "Final test accuracy in percent. Counted costs are in table7_counts.",
    ),
    counts(
        "fedalign/table7_counts",
        "Cost on CIFAR-10 and ImageNet-200, counted",
        f"{COUNTED} MFLOPs for CIFAR-10, GFLOPs for ImageNet-200.",
        "flops",
    ),
)
