"""FedAlign Table 7: CIFAR-10 and ImageNet-200."""

from dataclasses import replace

from fldiag.figures.paper_tables import table_of, trials
from fldiag.figures.study import ACCURACY, final, flops

RUNS = trials("fedalign", "table7")
COUNTED = trials("fedalign", "table7", where=lambda row: row.metric == "GFLOPs")

STUDY = table_of(
    "fedalign", "table7", title="Accuracy on CIFAR-10 and ImageNet-200",
    caption="Final test accuracy in percent; for ImageNet-200 also the multiply-adds of all forward passes of a local step, an "
            "image, in thousands of millions, and the parameters kept in millions.",
    trials=tuple(replace(t, ask=(final(),)) for t in RUNS)
    + tuple(replace(t, ask=(flops(),), train=False) for t in COUNTED),
    ask=(), pick={**ACCURACY, "GFLOPs": {"metric": "GFLOPs"}, "params_M": {"metric": "params_M"}})
