"""GradAug."""

from typing import Annotated, Literal

from pydantic import Field

from fldiag.errors import FldiagError
from fldiag.method import Method, method
from fldiag.parts.augmentation import SubNetworks
from fldiag.sections import Fraction, NonNegative

WEIGHTS = {1: 2.0, 2: 1.75, 3: 1.5, 4: 1.25}


@method(
    "gradaug",
    source="Yang et al., NeurIPS 2020; as a federated method in Mendieta et al., CVPR 2022",
    neutral={"mu": 0.0},
    equals="fedavg",
    needs=("stages",),
)
def gradaug(
    n: Annotated[int, Field(ge=1)] = 2,
    mu: NonNegative | None = None,
    omega_b: Fraction = 0.8,
    sides: Annotated[tuple[Fraction, ...], Field(min_length=1)] = (1.0, 0.875, 0.75, 0.625),
    widths: Literal["code", "paper"] = "code",
) -> Method:
    """Gradient augmentation: sub-networks that see resized images learn from the full network.

    Objective:   CE(F(x), y) + mu sum_{i=1..n} mean_x KL(softmax(F(x)) || softmax(F_omega_i(T_i x))), F(x) constant in KL
    F_omega:     the first channels of every layer (shared weights, statistics of the batch), a fraction omega of them to
                 a multiple of 8; the image enters whole and all classes leave
    T_i:         bilinear resize to a fraction of the side, drawn from sides (32, 28, 24 or 20 of 32 pixels)
    Widths:      omega_1 = omega_b, the others uniform in [omega_b, 1] (widths = code), or all uniform (paper)
    Server:      as FedAvg.
    Cost:        2.5 P a step for n = 2 (1 P + n (0.3 to 1) P), uplink 1x. Needs a residual network and images.
    Values:      omega_b = 0.8, n = 2; mu, when not given: 2.0, 1.75, 1.5 and 1.25 for n = 1, 2, 3 and 4.
                 ImageNet: sides = 1, 0.857, 0.714, 0.571 (224, 192, 160 or 128 of 224 pixels).
    Paper vs code: widths.
    """
    if mu is None and n not in WEIGHTS:
        raise FldiagError(
            f"GradAug with n = {n} sub-networks has no published mu", "set method.mu", usage=True
        )
    return Method(SubNetworks(WEIGHTS[n] if mu is None else mu, n, omega_b, sides, widths))
