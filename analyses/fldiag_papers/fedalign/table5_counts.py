"""FedAlign Table 5: what the methods cost, counted."""

from fldiag_papers.paper_tables import counts_of
from fldiag_papers.study import flops

STUDY = counts_of(
    "fedalign",
    "table5_counts",
    title="Cost, counted",
    caption="Multiply-adds per image of all forward passes of a local step, and parameters kept, counted at every scale on the "
    "paper's model, images and classes, without data; randomly drawn blocks and sub-networks count with their "
    "expectation. _profiled: as layer profilers count, with the pooling before the classifier and without the "
    "parameters of batch-norm.",
    ask=flops(),
    pick={m: {"metric": m} for m in ("MFLOPs", "params_M")},
)
