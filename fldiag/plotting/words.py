"""How pictures write names: FedAvg for ``fedavg``, ρ for ``rho``, MNIST for ``mnist``. Tables keep the registry's."""

from __future__ import annotations

import re

# fmt: off
_WRITTEN = (
    "FedACG", "FedAdam", "FedAlign", "FedASAM", "FedAvg", "FedAvgM", "FedBABU", "FedCM",
    "FedDC", "FedDF", "FedDyn", "FedET", "FedGAMMA", "FedLESAM", "FedNova", "FedNTD",
    "FedProj", "FedProx", "FedRCL", "FedSAM", "FedSMOO", "FedSOL", "FedSpeed", "FedTOGA",
    "FedYogi", "GradAug", "Mixup", "MoFedSAM", "MOON", "SCAFFOLD", "MNIST", "SVHN",
    "PathMNIST", "TissueMNIST", "Iris", "MARC", "MNLI", "SNLI", "LDA", "IID", "Dirichlet",
)
# fmt: on
#: A registered name of a method, a data set, a partition or an option -> how it is written, where not by its own words.
NAMES = {name.lower(): name for name in _WRITTEN} | {
    "fedavg_ft": "FedAvg + fine-tuning",
    "fedlesam_d": "FedLESAM-D",
    "fedlesam_s": "FedLESAM-S",
    "fedsol_ft": "FedSOL + fine-tuning",
    "knnper": "kNN-Per",
    "perfedavg": "Per-FedAvg",
    "stochdepth": "stochastic depth",
    "agnews": "AG News",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "cinic10": "CINIC-10",
    "imagenet200": "ImageNet-200",
    "sst2": "SST-2",
    "lda_fedsol": "LDA",
    "file": "from a file",
    "given": "as recorded",
    "rho": "ρ",
    "lam": "λ",
    "beta": "β",
    "beta_dual": "β (dual)",
    "kappa": "κ",
    "mu": "μ",
    "alpha": "α",
    "tau": "τ",
    "gamma": "γ",
    "lr": "learning rate",
    "lr_decay": "decay of the learning rate",
}
#: What is surely a name within other people's text: a method's, and an option's before its value.
_METHOD = re.compile(r"(?<!\w)(\w*fed\w*|scaffold)(?!\w)")
_OPTION = re.compile(r"(?<!\w)(rho|beta|kappa|mu|alpha|tau|lam)(?: ?= ?| (?=\d))")


def name(registered: str) -> str:
    """The display name of what is registered; of ``pkg.mod:function`` the function, of others the words.

    >>> name("fedlesam_d"), name("strategy:A1"), name("pkg.mine:steady"), name("local_only")
    ('FedLESAM-D', 'strategy A1', 'steady', 'local only')
    """
    head, _, id = registered.rpartition(":")
    short = f"strategy {id}" if head == "strategy" else id
    return NAMES.get(short, short.replace("_", " "))


def data(registered: str) -> str:
    """What is written for data; a number at the end is how many training images were kept of them.

    >>> data("cifar10"), data("mnist-2000"), data("npz:mine")
    ('CIFAR-10', 'MNIST (2,000 images)', 'npz:mine')
    """
    base, _, size = registered.partition("@")[0].rpartition("-")
    if base in NAMES and size.isdigit():
        return f"{NAMES[base]} ({int(size):,} images)"
    return NAMES.get(registered, registered)


def label(text: str) -> str:
    """A run's label with display names and symbols in it.

    >>> label("fedsol-1 rho=2.0"), label("FedSOL, rho 0.5"), label("my_fedavg_run")
    ('FedSOL-1 ρ = 2.0', 'FedSOL, ρ = 0.5', 'my_fedavg_run')
    """
    text = _METHOD.sub(lambda match: NAMES.get(match.group(), match.group()), text)
    return _OPTION.sub(lambda match: f"{NAMES[match.group(1)]} = ", text)
