"""FedAlign Table 5: what the methods cost."""

from dataclasses import replace

from fldiag.figures.paper_tables import table_of, trials
from fldiag.figures.study import ACCURACY, final, flops, seconds

RUNS = trials("fedalign", "table5")
METRICS = ("MFLOPs", "params_M", "seconds_per_round")

STUDY = table_of(
    "fedalign", "table5", title="Accuracy and cost",
    caption="Final test accuracy in percent; multiply-adds of all forward passes of a local step, an image, and parameters kept, "
            "both counted on the paper's model at every scale (MOON with its projection head, which small models lack); seconds "
            "of processor time per round on one thread of this machine: only their ratios mean something.",
    trials=tuple(replace(t, ask=(final(), seconds())) for t in RUNS)
    + tuple(replace(t, ask=(flops(),), train=False) for t in RUNS),
    ask=(), pick={**ACCURACY, **{m: {"metric": m} for m in METRICS}})
