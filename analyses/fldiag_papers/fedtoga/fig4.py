"""FedTOGA Figure 4: which client holds how much of which class."""

from fldiag.plotting import words
from fldiag.plotting.partition import draw_counts
from fldiag_papers.study import Study, Trial, partition

SPLITS = {
    "dir0.6": "Dirichlet 0.6",
    "dir0.1": "Dirichlet 0.1",
    "path6": "6 classes a client",
    "path3": "3 classes a client",
}
FEW = {"clients.total": 40}


def draw(table):
    title = f"{words.data(table['trained_on'].iloc[0])}, {table['client'].nunique()} clients"
    return draw_counts(table.rename(columns={"index": "class", "value": "count"}), title=title)


STUDY = Study(
    title="Label distributions",
    source="FedTOGA Figure 4",
    caption="Number of examples per class and client, 40 clients of equal size.",
    trials=tuple(
        Trial(f"fedtoga-cifar10-{split}", over=FEW, label=text, train=False)
        for split, text in SPLITS.items()
    ),
    ask=(partition(),),
    draw=draw,
)
