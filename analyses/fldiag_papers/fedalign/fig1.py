"""FedAlign Figure 1: the loss around the global models."""

from fldiag.diagnostics.landscape import picture as surfaces
from fldiag_papers.study import Study, Trial, diagnostic

PRESET = "fedalign-cifar100-lda0.5"


def draw(spectrum, landscape):
    return surfaces.draw(landscape, names=("eigenvector 1", "eigenvector 2"))


STUDY = Study(
    title="Loss landscapes",
    source="FedAlign Figure 1",
    caption="Training loss of the final global models of FedAvg and GradAug along the top two Hessian eigenvectors (λ ± the "
    "bound of its numerical error, not a spread over seeds).",
    trials=(Trial(PRESET, "fedavg", label="FedAvg"), Trial(PRESET, "gradaug", label="GradAug")),
    ask=(diagnostic("spectrum"), diagnostic("landscape", seeds=1)),
    draw=draw,
)
