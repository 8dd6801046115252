"""MedMNIST (Yang et al., Scientific Data 2023): the single-label 2-D sets, from their official npz files.

As in the FedSOL experiments the training split is the official one and the validation split together; a file
without val_images and val_labels is taken as it is. ChestMNIST is not here: its labels are not one class an image.
"""

from __future__ import annotations

import os
from typing import Any

from fldiag.data.arrays import read_npz
from fldiag.data.dataset import Dataset
from fldiag.data.images import build, need_folder, register
from fldiag.data.preprocessing import PREPROCESSING, choose
from fldiag.errors import FldiagError

#: name -> (what it shows, classes, size in words)
SETS: dict[str, tuple[str, int, str]] = {
    "pathmnist": ("PathMNIST colon tissue", 9, "100,000 train / 7,180 test"),
    "dermamnist": ("DermaMNIST skin lesions", 7, "8,010 train / 2,005 test"),
    "octmnist": ("OCTMNIST retinal scans", 4, "108,309 train / 1,000 test"),
    "pneumoniamnist": ("PneumoniaMNIST chest X-rays", 2, "5,232 train / 624 test"),
    "retinamnist": ("RetinaMNIST fundus photographs", 5, "1,200 train / 400 test"),
    "breastmnist": ("BreastMNIST ultrasound", 2, "624 train / 156 test"),
    "bloodmnist": ("BloodMNIST blood cells", 8, "13,671 train / 3,421 test"),
    "tissuemnist": ("TissueMNIST kidney cortex cells", 8, "189,106 train / 47,280 test"),
    "organamnist": ("OrganAMNIST axial abdominal CT", 11, "about 41,000 train / 17,800 test"),
    "organcmnist": ("OrganCMNIST coronal abdominal CT", 11, "about 15,400 train / 8,200 test"),
    "organsmnist": ("OrganSMNIST sagittal abdominal CT", 11, "about 16,400 train / 8,800 test"),
}
WHERE = "medmnist.com (Zenodo record 10519652)"


def find(name: str, root: str | os.PathLike[str] | None = None, download: bool = False,
         variant: str | None = None) -> Dataset:
    """The set ``name`` from ``<root>/<name>.npz``. Raises FldiagError for a missing or foreign file."""
    choose(name, variant)
    at = need_folder(name, root, f"{name}.npz from {WHERE}")
    path = at / f"{name}.npz"
    if not path.exists():
        asked = " (fldiag does not download it)" if download else ""
        raise FldiagError(f"data set {name!r} was not found{asked}: looked for {path}",
                          f"get {name}.npz (28x28) from {WHERE} and put it there, or set FLDIAG_DATA to the "
                          "folder that has it")
    channels = len(PREPROCESSING[name][choose(name, variant)[0]].mean)
    return build(name, (channels, 28, 28), SETS[name][1], read_npz(path, join_val=True), str(path), variant)


def _builder(name: str) -> Any:
    def made(root: str | None = None, download: bool = False, variant: str | None = None) -> Dataset:
        return find(name, root, download, variant)

    return made


for _name, (_what, _classes, _sizes) in SETS.items():
    _kind = "colour" if len(PREPROCESSING[_name]["fedsol"].mean) == 3 else "gray (shown as 3 channels)"
    register(_name, _builder(_name), f"{_what}, 28x28 {_kind}, {_classes} classes, {_sizes} (MedMNIST).",
             "J. Yang et al., MedMNIST v2, 2023. Training is the official training and validation split.")
