"""FedAlign Table 7: what the methods cost on CIFAR-10 and ImageNet-200, counted."""

from dataclasses import replace

from fldiag.figures.paper_tables import table_of, trials
from fldiag.figures.study import flops

STUDY = table_of(
    "fedalign", "table7_counts", title="Cost on CIFAR-10 and ImageNet-200, counted",
    caption="Multiply-adds of all forward passes of a local step, an image, and parameters kept, counted on the paper's model, "
            "images and classes at every scale, and without data (MFLOPs for CIFAR-10, GFLOPs for ImageNet-200).",
    trials=tuple(replace(t, ask=(flops(),), train=False) for t in trials("fedalign", "table7_counts")),
    ask=(), pick={"MFLOPs": {"metric": "MFLOPs", "data": "cifar10"}, "GFLOPs": {"metric": "GFLOPs", "data": "imagenet200"},
                  "params_M": {"metric": "params_M"}})
