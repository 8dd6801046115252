"""FedAlign Table 1: accuracy, curvature of the global model, and how alike the clients' curvatures are."""

from fldiag_papers.paper_tables import table_of
from fldiag_papers.study import diagnostic, final

GLOBAL = {"moment": "aggregated", "scope": "global"}
PAIRS = {"scope": "global", "diag_mode": "tensor_trace", "self_pairs": True, "slice": "train"}

STUDY = table_of(
    "fedalign",
    "table1",
    title="Accuracy and curvature",
    caption="Final test accuracy in percent; largest Hessian eigenvalue and trace of the global model; H_N and H_D of the "
    "clients' models as in the released code: one trace per tensor, on all clients' data, pairs k = j included. Traces "
    "and eigenvalues use one slice of training examples without augmentation instead of ten augmented batches.",
    ask=(final(), diagnostic("matching", on="global", split=False)),
    pick={
        "accuracy": {"metric": "accuracy"},
        "lambda_max": {"metric": "eigenvalue", "index": 1, **GLOBAL},
        "trace": {"metric": "trace", **GLOBAL},
        "H_N": {"metric": "H_N", **PAIRS},
        "H_D": {"metric": "H_D", **PAIRS},
    },
    seeds=3,
)
