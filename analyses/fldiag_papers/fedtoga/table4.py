"""FedTOGA Table 4: what the methods send and keep more than their base, counted."""

from fldiag_papers import pictures
from fldiag_papers.study import Study, Trial, traffic

METHODS = (
    "fedavg",
    "fedsam",
    "fedlesam",
    "fedcm",
    "mofedsam",
    "scaffold",
    "fedgamma",
    "fedlesam_s",
    "feddyn",
    "fedspeed",
    "fedsmoo",
    "fedlesam_d",
    "fedtoga",
)

STUDY = Study(
    title="What a client sends, receives and keeps",
    source="FedTOGA Table 4",
    caption="What a client uploads and downloads in a round and keeps until its next one, in multiples of the model's bytes, "
    "counted on LeNet without data. The paper's table is in words and relative to a base method: FedAvg for FedSAM and "
    "FedLESAM, FedCM for MoFedSAM, SCAFFOLD for FedGAMMA and FedLESAM-S, FedDyn for FedSpeed, FedSMOO and FedLESAM-D, "
    "FedDyn and FedCM for FedTOGA.",
    trials=tuple(
        Trial("fedtoga-cifar10-dir0.6", name, train=False, ask=(traffic(),)) for name in METHODS
    ),
    pick={m: {"metric": m} for m in ("uplink", "downlink", "client_state")},
    draw=pictures.dots,
    layout=pictures.cells,
)
