"""FedSOL Table 5: which part of the net is perturbed, and what that costs."""

from dataclasses import replace

from fldiag.figures.paper_tables import table_of, trials
from fldiag.figures.study import ACCURACY, cost, final


def asked(trial):
    """Accuracies of the rows with a radius, the cost of those without. ``head`` is FedSOL's default: one run with theirs."""
    over = {k: v for k, v in trial.over.items() if (k, v) != ("method.part", "head")}
    return replace(trial, over=over, ask=(final() if "rho" in trial.setting else cost(),))


STUDY = table_of(
    "fedsol", "table5", title="Partial perturbation",
    caption="Final test accuracy in percent, and multiply-adds of a local step over those of FedAvg, counted without the "
            "received model's outputs (the paper's delta). Both passes of the head share the body's features here; the paper "
            "counts another forward pass.",
    ask=(), pick={**ACCURACY, "flops_relative": {"metric": "flops_relative"}},
    trials=tuple(map(asked, trials("fedsol", "table5"))))
