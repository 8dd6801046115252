"""How pictures write names: FedAvg for ``fedavg``, ρ for ``rho``, MNIST for ``mnist``. Tables keep the registry's."""

from __future__ import annotations

import re

#: Registered method -> its display name; a test holds the keys equal to the registry.
METHODS = {
    "fedacg": "FedACG",
    "fedadam": "FedAdam",
    "fedalign": "FedAlign",
    "fedasam": "FedASAM",
    "fedavg": "FedAvg",
    "fedavg_ft": "FedAvg + fine-tuning",
    "fedavgm": "FedAvgM",
    "fedbabu": "FedBABU",
    "fedcm": "FedCM",
    "feddc": "FedDC",
    "feddf": "FedDF",
    "feddyn": "FedDyn",
    "fedet": "FedET",
    "fedgamma": "FedGAMMA",
    "fedlesam": "FedLESAM",
    "fedlesam_d": "FedLESAM-D",
    "fedlesam_s": "FedLESAM-S",
    "fednova": "FedNova",
    "fedntd": "FedNTD",
    "fedproj": "FedProj",
    "fedprox": "FedProx",
    "fedrcl": "FedRCL",
    "fedsam": "FedSAM",
    "fedsmoo": "FedSMOO",
    "fedsol": "FedSOL",
    "fedsol_ft": "FedSOL + fine-tuning",
    "fedspeed": "FedSpeed",
    "fedtoga": "FedTOGA",
    "fedyogi": "FedYogi",
    "gradaug": "GradAug",
    "gradient_projection": "gradient projection",
    "knnper": "kNN-Per",
    "local_only": "local only",
    "mixup": "Mixup",
    "mofedsam": "MoFedSAM",
    "moon": "MOON",
    "perfedavg": "Per-FedAvg",
    "scaffold": "SCAFFOLD",
    "stochdepth": "stochastic depth",
    "strategy": "strategy",
}
#: Option or setting -> what is written for it.
SYMBOLS = {
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
DATA = {
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "cinic10": "CINIC-10",
    "svhn": "SVHN",
    "pathmnist": "PathMNIST",
    "tissuemnist": "TissueMNIST",
    "imagenet200": "ImageNet-200",
    "iris": "Iris",
    "agnews": "AG News",
    "marc": "MARC",
    "mnli": "MNLI",
    "snli": "SNLI",
    "sst2": "SST-2",
}
PARTITIONS = {
    "lda": "LDA",
    "lda_fedsol": "LDA",
    "iid": "IID",
    "dirichlet": "Dirichlet",
    "file": "from a file",
    "given": "as recorded",
}
#: Labels are other people's text: only names that mean nothing else, as whole words, are written anew in them.
_IN_LABELS = re.compile(
    r"(?<![A-Za-z0-9_])("
    + "|".join(sorted((n for n in METHODS if "fed" in n or n == "scaffold"), key=len, reverse=True))
    + r")(?![A-Za-z0-9_])"
)
_SYMBOL = re.compile(r"(?<![A-Za-z0-9_])(rho|beta|kappa|mu|alpha|tau|lam)(?: ?= ?| (?=[0-9]))")


def method(name: str) -> str:
    """The display name of a registered method; of one that is not known the name, and of pkg.mod:function the function.

    >>> method("fedlesam_d"), method("strategy:A1"), method("mine"), method("pkg.mine:steady")
    ('FedLESAM-D', 'strategy A1', 'mine', 'steady')
    """
    head, _, id = name.partition(":")
    if id and head not in METHODS:
        return id
    return " ".join(filter(None, (METHODS.get(head, head), id)))


def symbol(name: str) -> str:
    """What is written for an option: its symbol, or its words."""
    return SYMBOLS.get(name, name.replace("_", " "))


def data(name: str) -> str:
    """What is written for data; a number at the end is how many training images were kept of them.

    >>> data("cifar10"), data("mnist-2000"), data("npz:mine")
    ('CIFAR-10', 'MNIST (2,000 images)', 'npz:mine')
    """
    base, _, size = name.partition("@")[0].rpartition("-")
    if base in DATA and size.isdigit():
        return f"{DATA[base]} ({int(size):,} images)"
    return DATA.get(name, name)


def label(text: str) -> str:
    """A run's label with display names and symbols in it.

    >>> label("fedsol-1 rho=2.0"), label("FedSOL, rho 0.5"), label("my_fedavg_run")
    ('FedSOL-1 ρ = 2.0', 'FedSOL, ρ = 0.5', 'my_fedavg_run')
    """
    return _SYMBOL.sub(
        lambda m: f"{SYMBOLS[m.group(1)]} = ", _IN_LABELS.sub(lambda m: METHODS[m.group()], text)
    )
