"""FedTOGA Figure 1: the loss around the global model as clients differ more."""

from fldiag.diagnostics.landscape import picture as surfaces
from fldiag_papers.study import Study, Trial, diagnostic

SPLITS = {"dir0.6": "Dirichlet 0.6", "dir0.1": "Dirichlet 0.1", "path3": "3 classes a client"}


def draw(spectrum, landscape):
    return surfaces.draw(landscape, names=("eigenvector 1", "eigenvector 2"))


STUDY = Study(
    title="Loss landscapes and heterogeneity",
    source="FedTOGA Figure 1",
    caption="Training loss of FedAvg's final global models along the top two Hessian eigenvectors, from similar to dissimilar "
    "clients (λ ± the bound of its numerical error, not a spread over seeds). The paper's text names neither the method "
    "nor the partitions of its panels a to c; panels d to f are a sketch.",
    trials=tuple(
        Trial(f"fedtoga-cifar10-{split}", "fedavg", label=text) for split, text in SPLITS.items()
    ),
    ask=(diagnostic("spectrum"), diagnostic("landscape", seeds=1)),
    draw=draw,
)
