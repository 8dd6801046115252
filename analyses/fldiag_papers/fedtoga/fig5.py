"""FedTOGA Figure 5 and following: test accuracy over the rounds, a panel for each data set, partition and participation."""

from fldiag_papers import learning_curves, pictures
from fldiag_papers.paper_tables import with_values
from fldiag_papers.study import Study, Trial, curve

METHODS = {
    "fedsam": "FedSAM",
    "mofedsam": "MoFedSAM",
    "fedgamma": "FedGAMMA",
    "fedspeed": "FedSpeed",
    "fedsmoo": "FedSMOO",
    "fedtoga": "FedTOGA",
}
SPLITS = {"dir0.6": "Dir 0.6", "dir0.1": "Dir 0.1", "path6": "6 classes", "path3": "3 classes"}
DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}


def methods(data, clients):
    """All where the tables have runs of them; the three with a dynamic regulariser elsewhere."""
    return METHODS if (data, clients) == ("cifar10", 100) else list(METHODS)[3:]


def draw(table):
    panels = list(dict.fromkeys(table["setting"]))
    figure = learning_curves.draw(
        table.assign(metric=table["setting"]),
        panels,
        chance=10 if set(table["data"]) == {"cifar10"} else None,
        note=pictures.trained_on(table),
    )
    for ax, panel in zip(figure.axes, panels, strict=True):
        for data, stand_in in pictures.stand_ins(table).items():
            panel = panel.replace(f"{DATA[data]}, ", f"{pictures.both_data(data, stand_in)}\n")
        ax.set_title(panel, fontsize=7)
        ax.set_ylabel("test accuracy [%]")
    return figure


STUDY = Study(
    title="Learning curves",
    source="FedTOGA Figure 5 and following",
    caption="Test accuracy of the global model by round, LeNet; 10 % of 100 clients or 5 % of 200 per round. Only three of the "
    "six methods are shown where no table needs the others.",
    trials=tuple(
        with_values(
            Trial(
                f"fedtoga-{data}-{split}",
                method,
                {"clients.total": clients},
                METHODS[method],
                f"{name}, {text}, {'10 % of 100' if clients == 100 else '5 % of 200'}",
            )
        )
        for data, name in DATA.items()
        for clients in (100, 200)
        for split, text in SPLITS.items()
        for method in methods(data, clients)
    ),
    ask=(curve(),),
    draw=draw,
)
