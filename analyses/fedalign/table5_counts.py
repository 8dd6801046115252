"""FedAlign Table 5: what the methods cost, counted."""

from dataclasses import replace

from fldiag.figures.paper_tables import table_of, trials
from fldiag.figures.study import flops

STUDY = table_of(
    "fedalign", "table5_counts", title="Cost, counted",
    caption="Multiply-adds of all forward passes of a local step, an image, and parameters kept, counted on the paper's model, "
            "images and classes at every scale, and without data.",
    trials=tuple(replace(t, ask=(flops(),), train=False) for t in trials("fedalign", "table5_counts")),
    ask=(), pick={m: {"metric": m} for m in ("MFLOPs", "params_M")})
