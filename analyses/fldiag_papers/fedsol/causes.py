"""FedSOL Table 2, FedProx: what its accuracy owes to choices that the paper leaves open, in the first forty rounds.

Each line differs in one thing from the run of Table 2 and has the same clients in every round, so rounds can be compared one by
one.
"""

from typing import Any

from fldiag_papers.lines import ends, learning
from fldiag_papers.study import Study, Trial, curve

PRESET, ROUNDS = "fedsol-cifar10-lda0.1", 40
AS_IS = "as in Table 2"
#: The paper's algorithm weighs all clients alike, its code by examples. FedSoL's text and the code name augmentation.
OTHERS: dict[str, dict[str, Any]] = {
    "uniform weights": {"train.aggregate": "uniform"},
    "no augmentation": {"data.augment": False},
}


def first(table):
    """The rounds that all lines have."""
    return table[table["round"].isna() | (table["round"] <= ROUNDS)]


def draw(table):
    return learning(first(table))


def changes(table):
    return ends(first(table), AS_IS, by="label", alike=("data", "seed", "round"))


STUDY = Study(
    title="FedProx with other choices",
    source="FedSOL Table 2",
    caption=f"Test accuracy of FedProx under LDA 0.1 in the first {ROUNDS} rounds, as in Table 2 and with one thing changed. The "
    "clients of every round are the same. With thirty rounds or more, lines are moving means over a fifteenth of the "
    "rounds, and raw curves are faint.",
    trials=(
        Trial(PRESET, "fedprox", label=AS_IS),
        *(
            Trial(PRESET, "fedprox", {"rounds": ROUNDS, **over}, label=name, setting=name)
            for name, over in OTHERS.items()
        ),
    ),
    ask=(curve(),),
    derive=changes,
    draw=draw,
    varies="table2",
)
