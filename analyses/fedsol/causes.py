"""FedSOL Table 2, FedProx: what its accuracy owes to choices that the paper leaves open, on the first hundred rounds.

Each line differs in one thing from the run of Table 2 and has the same clients in every round, so their rounds can be compared
one by one.
"""

import pandas as pd

from fldiag.figures.gather import KEYS
from fldiag.figures.lines import learning
from fldiag.figures.study import Study, Trial, curve

PRESET, ROUNDS = "fedsol-cifar10-lda0.1", 100
SHORT = {"rounds": ROUNDS, "train.precision": "bf16"}
AS_IS = "as in Table 2"
#: What the paper leaves open: its algorithm weighs all clients alike, its code by examples; only the code names augmentation.
OTHERS = {"uniform weights": {"train.aggregate": "uniform"}, "no augmentation": {"data.augment": False}}
#: Rounds that are compared: the second half.
LATE = ROUNDS // 2


def first(table):
    """The rounds that all lines have."""
    return table[table["round"].isna() | (table["round"] <= ROUNDS)]


def draw(table):
    return learning(first(table))


def changes(table):
    """Mean over the late rounds of a line's accuracy minus that of the run as it is, round by round."""
    late = first(table)
    late = late[late["round"] > late["round"].max() - LATE]
    base = late[late["label"] == AS_IS].set_index(["seed", "round"])["value"]
    found = []
    for label in OTHERS:
        mine = late[late["label"] == label]
        if len(mine) and len(base):
            change = mine["value"].to_numpy() - base.reindex(pd.MultiIndex.from_frame(mine[["seed", "round"]])).to_numpy()
            keys = [*KEYS, "label", "run", "seed", "origin", "trained_on", "trained_model", "unit"]
            found.append(mine.assign(metric="accuracy_change", value=change).groupby([*keys, "metric"], as_index=False)["value"]
                         .mean())
    return pd.concat(found) if found else table.head(0)


STUDY = Study(
    title="FedProx with other choices", source="FedSOL Table 2",
    caption=f"Test accuracy of FedProx under LDA 0.1 in the first {ROUNDS} rounds, as in Table 2 and with one thing changed; the "
            "changed ones are trained in bf16. The clients of every round are the same. With thirty rounds or more, lines are "
            "moving means over a fifteenth of the rounds, and raw curves are faint.",
    trials=(Trial(PRESET, "fedprox", label=AS_IS), *(Trial(PRESET, "fedprox", {**SHORT, **over}, label=label, setting=label)
                                                     for label, over in OTHERS.items())),
    ask=(curve(),), derive=changes, draw=draw, varies="table2")
