"""FedAlign Table 5: what the methods cost, counted."""

from fldiag.figures.paper_tables import counts_of
from fldiag.figures.study import flops

STUDY = counts_of(
    "fedalign", "table5_counts", title="Cost, counted",
    caption="Multiply-adds of all forward passes of a local step, an image, and parameters kept, counted on the paper's model, "
            "images and classes at every scale, and without data; blocks and sub-networks that are drawn at random with their "
            "expectation. As profilers of layers count (_profiled): with the pooling before the classifier, and without the "
            "parameters of batch-norm.",
    ask=flops(), pick={m: {"metric": m} for m in ("MFLOPs", "params_M")})
