"""FedSOL Table 7: how many examples the data sets have."""

from fldiag.figures import pictures
from fldiag.figures.study import Study, Trial, examples
from fldiag.plotting import words

SETS = {name: f"fedsol-{name}-lda0.1" for name in ("mnist", "cifar10", "svhn", "cinic10", "pathmnist", "tissuemnist")}

STUDY = Study(
    title="Sizes of the data sets", source="FedSOL Table 7",
    caption="Examples that train and test. The other columns of the table are the presets' clients, rounds and ratios.",
    trials=tuple(Trial(preset, label=words.data(name), data=name, train=False) for name, preset in SETS.items()),
    ask=(examples(),), pick={m: {"metric": m} for m in ("train_examples", "test_examples")},
    draw=lambda table: pictures.dots(pictures.by_data(table)), layout=lambda table: pictures.cells(pictures.by_data(table)))
