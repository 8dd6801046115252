"""FedSOL Figure 8: the loss around the global models."""

from fldiag.diagnostics.landscape import picture as surfaces
from fldiag_papers.study import Study, Trial, diagnostic

PRESET = "fedsol-cifar10-lda0.1"


def draw(spectrum, landscape):
    return surfaces.draw(landscape, names=("eigenvector 1", "eigenvector 2"))


STUDY = Study(
    title="Loss landscapes",
    source="FedSOL Figure 8",
    caption="Training loss of the final global models along the top two Hessian eigenvectors, with the largest eigenvalue "
    "(± the bound of its numerical error, not a spread over seeds) and its ratio to the fifth. The picture shows seed "
    "0; the ledger's statements use all seeds.",
    trials=(
        Trial(PRESET, "fedavg", label="FedAvg"),
        Trial(PRESET, "fedasam", label="FedASAM"),
        Trial(PRESET, "fedsol", {"method.rho": 2.0}, label="FedSOL"),
    ),
    ask=(diagnostic("spectrum"), diagnostic("landscape", seeds=1)),
    draw=draw,
    seeds=3,
)
