"""FedProj Figure 3a: accuracy over the rate of projection."""

from fldiag_papers.lines import lines
from fldiag_papers.study import ACCURACY, Study, Trial, final

RATES = (0.0, 0.3, 0.7, 1.0)


def draw(table):
    return lines(table, "proj_rate", {"accuracy": "rate of projection"})


STUDY = Study(
    title="Accuracy and rate of projection",
    source="FedProj Figure 3a",
    caption="Final test accuracy of FedProj against the share of rounds in which its clients project; rate 0 is FedDF with the "
    "same options. The paper's panel b is its Table 3.",
    trials=tuple(
        Trial(
            f"fedproj-cifar10-lda{alpha}",
            "fedproj",
            {"method.proj_rate": rate},
            f"LDA {alpha}",
            f"partition=lda;alpha={alpha};proj_rate={rate:g}",
        )
        for alpha in (0.3, 0.5)
        for rate in RATES
    ),
    ask=(final(),),
    pick=ACCURACY,
    draw=draw,
)
