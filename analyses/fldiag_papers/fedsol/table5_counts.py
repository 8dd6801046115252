"""FedSOL Table 5: what perturbing a part of the net costs, counted."""

from dataclasses import replace

from fldiag_papers.paper_tables import table_of, trials
from fldiag_papers.study import cost

STUDY = table_of(
    "fedsol",
    "table5_counts",
    title="Cost of partial perturbation, counted",
    caption="Multiply-adds of a local step divided by those of FedAvg, counted at every scale on the paper's model, images and "
    "classes, without the received model's outputs (the paper's delta). Here both passes of the head share the body's "
    "features; the paper counts one more forward pass.",
    trials=tuple(replace(t, ask=(cost(),), train=False) for t in trials("fedsol", "table5_counts")),
    ask=(),
    pick={"flops_relative": {"metric": "flops_relative"}},
)
