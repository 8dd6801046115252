"""FedSOL Table 5: which part of the net is perturbed."""

from dataclasses import replace

from fldiag_papers.paper_tables import table_of, trials


def without_default(trial):
    """``head`` is FedSOL's default: one run with theirs."""
    return replace(
        trial, over={k: v for k, v in trial.over.items() if (k, v) != ("method.part", "head")}
    )


STUDY = table_of(
    "fedsol",
    "table5",
    title="Partial perturbation",
    caption="Final test accuracy in percent. Costs are in table5_counts.",
    trials=tuple(map(without_default, trials("fedsol", "table5"))),
)
