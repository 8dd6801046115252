"""FedTOGA Table 5: how many examples the data sets have."""

from fldiag.figures import pictures
from fldiag.figures.study import Study, Trial, examples
from fldiag.plotting import words

SETS = {name: f"fedtoga-{name}-dir0.6" for name in ("cifar10", "cifar100")}

STUDY = Study(
    title="Sizes of the data sets", source="FedTOGA Table 5",
    caption="Examples that train and test.",
    trials=tuple(Trial(preset, label=words.data(name), data=name, train=False) for name, preset in SETS.items()),
    ask=(examples(),), pick={m: {"metric": m} for m in ("train_examples", "test_examples")},
    draw=lambda table: pictures.dots(pictures.by_data(table)), layout=lambda table: pictures.cells(pictures.by_data(table)))
