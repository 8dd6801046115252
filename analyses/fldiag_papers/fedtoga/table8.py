"""FedTOGA Table 8: rounds until an accuracy is reached, four partitions."""

from dataclasses import replace

from fldiag_papers.paper_tables import first_rounds, table_of, trials
from fldiag_papers.study import curve, reach

#: By partition, those of the paper.
LEVELS = {
    "partition=dirichlet;alpha=0.6": (80, 82),
    "partition=dirichlet;alpha=0.1": (76, 78),
    "partition=pathological;classes=6": (80, 82),
    "partition=pathological;classes=3": (76, 78),
}


def levels(trial):
    return next(
        thresholds for split, thresholds in LEVELS.items() if trial.setting.startswith(split)
    )


STUDY = table_of(
    "fedtoga",
    "table8",
    title="Rounds to an accuracy, four partitions",
    caption="First round with the test accuracies of the paper's columns, and (rounds_to_best_of_fedsam) with the best accuracy "
    "that FedSAM reaches in the same federation. A missing dot: not reached by all seeds; 800 in the paper is its "
    "number of rounds. "
    "The paper does not state the model; here LeNet.",
    trials=tuple(replace(t, ask=(reach(*levels(t)),)) for t in trials("fedtoga", "table8")),
    ask=(curve(),),
    pick={f"rounds_to_{n}": {"metric": f"rounds_to_{n}"} for n in (76, 78, 80, 82)},
    derive=lambda curve, reach: first_rounds(curve, "fedsam"),
)
