"""FedTOGA Figure 2: how much its accuracy depends on each option."""

from fldiag.plotting import words
from fldiag_papers import pictures
from fldiag_papers.lines import lines
from fldiag_papers.study import ACCURACY, Study, Trial, best

PRESET = "fedtoga-cifar10-dir0.6"
#: The values tried in the paper's table of options; the others of each line stay at the preset's.
GRID = {
    "lr_decay": (0.997, 0.998, 0.9995),
    "lam": (0.01, 0.1, 0.2),
    "kappa": (1.0, 2.0, 4.0),
    "beta_dual": (0.8, 0.85, 0.9),
    "rho": (0.001, 0.01, 0.1),
}


def place(option):
    return "train.lr_decay" if option == "lr_decay" else f"method.{option}"


def draw(table):
    parsed = [next(iter(pictures.parse(s).items())) for s in table["setting"]]
    table = table.assign(metric=[k for k, _ in parsed], at=[float(v) for _, v in parsed])
    names = {option: words.symbol(option) for option in GRID} | {"lr_decay": "learning-rate decay"}
    return lines(table, "at", names, log=("lam", "rho"))


STUDY = Study(
    title="Sensitivity of FedTOGA",
    source="FedTOGA Figure 2",
    caption="Highest test accuracy of any round, varying one option at a time, Dirichlet 0.6; the values are those of the "
    "paper's table of options.",
    trials=tuple(
        Trial(PRESET, "fedtoga", {place(option): value}, "FedTOGA", f"{option}={value:g}")
        for option, values in GRID.items()
        for value in values
    ),
    ask=(best(),),
    pick=ACCURACY,
    draw=draw,
)
