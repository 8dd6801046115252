"""FedAlign Table 7: what the methods cost on CIFAR-10 and ImageNet-200, counted."""

from fldiag_papers.paper_tables import counts_of
from fldiag_papers.study import flops

STUDY = counts_of(
    "fedalign",
    "table7_counts",
    title="Cost on CIFAR-10 and ImageNet-200, counted",
    caption="Multiply-adds per image of all forward passes of a local step, and parameters kept, counted at every scale on the "
    "paper's model, images and classes, without data (MFLOPs for CIFAR-10, GFLOPs for ImageNet-200); randomly drawn "
    "blocks and sub-networks count with their expectation. _profiled: as layer profilers count, with the pooling before "
    "the classifier and without the parameters of batch-norm.",
    ask=flops(),
    pick={
        "MFLOPs": {"metric": "MFLOPs", "data": "cifar10"},
        "GFLOPs": {"metric": "GFLOPs", "data": "imagenet200"},
        "params_M": {"metric": "params_M"},
    },
)
