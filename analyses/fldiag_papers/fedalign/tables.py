"""The tables of the FedAlign paper whose cells come straight from the runs of their rows."""

from fldiag_papers.paper_tables import counts_of, table_of
from fldiag_papers.study import ACCURACY, diagnostic, final, flops, seconds

GLOBAL = {"moment": "aggregated", "scope": "global"}


PAIRS = {"scope": "global", "diag_mode": "tensor_trace", "self_pairs": True, "slice": "train"}

STUDIES = (
    table_of(
        "fedalign",
        "table1",
        title="Accuracy and curvature",
        caption="Final test accuracy in percent; largest Hessian eigenvalue and trace of the global model; H_N and H_D of the "
        "clients' models as in the released code: one trace per tensor, on all clients' data, pairs k = j included. Traces "
        "and eigenvalues use one slice of training examples without augmentation instead of ten augmented batches.",
        ask=(final(), diagnostic("matching", on="global")),
        pick={
            "accuracy": {"metric": "accuracy", "ask": "final"},
            "lambda_max": {"metric": "eigenvalue", "index": 1, **GLOBAL},
            "trace": {"metric": "trace", **GLOBAL},
            "H_N": {"metric": "H_N", **PAIRS},
            "H_D": {"metric": "H_D", **PAIRS},
        },
        seeds=3,
    ),
    table_of(
        "fedalign",
        "table2",
        title="Accuracy and heterogeneity",
        caption="Final test accuracy in percent under LDA 0.1, 0.5, 2.5 and with equal clients. For FedAlign see Table "
        "6.",
    ),
    table_of(
        "fedalign",
        "table3",
        title="Accuracy and local epochs",
        caption="Final test accuracy in percent. For FedAlign see Table 6.",
    ),
    table_of(
        "fedalign",
        "table4",
        title="Accuracy and number of clients",
        caption="Final test accuracy in percent; with a quarter of 64 clients per round, after 25 and 100 rounds. For "
        "FedAlign see Table 6.",
    ),
    table_of(
        "fedalign",
        "table5",
        title="Accuracy and seconds",
        caption="Final test accuracy in percent, and seconds of processor time per round on one thread of this machine, of which "
        "only the ratios are meaningful. Counted costs are in table5_counts.",
        ask=(final(), seconds()),
        pick={**ACCURACY, "seconds_per_round": {"metric": "seconds_per_round"}},
    ),
    counts_of(
        "fedalign",
        "table5_counts",
        title="Cost, counted",
        caption="Multiply-adds per image of all forward passes of a local step, and parameters kept, counted at every scale on "
        "the paper's model, images and classes, without data; randomly drawn blocks and sub-networks count with their "
        "expectation. _profiled: as layer profilers count, with the pooling before the classifier and without the "
        "parameters of batch-norm.",
        ask=flops(),
        pick={m: {"metric": m} for m in ("MFLOPs", "params_M")},
    ),
    table_of(
        "fedalign",
        "table6",
        title="FedAlign in all settings",
        caption="Final test accuracy in percent.",
    ),
    table_of(
        "fedalign",
        "table7",
        title="Accuracy on CIFAR-10 and ImageNet-200",
        caption="Final test accuracy in percent. Counted costs are in table7_counts.",
    ),
    counts_of(
        "fedalign",
        "table7_counts",
        title="Cost on CIFAR-10 and ImageNet-200, counted",
        caption="Multiply-adds per image of all forward passes of a local step, and parameters kept, counted at every scale on "
        "the paper's model, images and classes, without data (MFLOPs for CIFAR-10, GFLOPs for ImageNet-200); randomly drawn "
        "blocks and sub-networks count with their expectation. _profiled: as layer profilers count, with the pooling before "
        "the classifier and without the parameters of batch-norm.",
        ask=flops(),
        pick={
            "MFLOPs": {"metric": "MFLOPs", "data": "cifar10"},
            "GFLOPs": {"metric": "GFLOPs", "data": "imagenet200"},
            "params_M": {"metric": "params_M"},
        },
    ),
)
