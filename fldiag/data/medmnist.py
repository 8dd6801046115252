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

#: name -> (what it shows, classes, examples to train and to test on)
SETS: dict[str, tuple[str, int, tuple[int, int]]] = {
    "pathmnist": ("PathMNIST colon tissue", 9, (100_000, 7_180)),
    "dermamnist": ("DermaMNIST skin lesions", 7, (8_010, 2_005)),
    "octmnist": ("OCTMNIST retinal scans", 4, (108_309, 1_000)),
    "pneumoniamnist": ("PneumoniaMNIST chest X-rays", 2, (5_232, 624)),
    "retinamnist": ("RetinaMNIST fundus photographs", 5, (1_200, 400)),
    "breastmnist": ("BreastMNIST ultrasound", 2, (624, 156)),
    "bloodmnist": ("BloodMNIST blood cells", 8, (13_671, 3_421)),
    "tissuemnist": ("TissueMNIST kidney cortex cells", 8, (189_106, 47_280)),
    "organamnist": ("OrganAMNIST axial abdominal CT", 11, (41_000, 17_800)),
    "organcmnist": ("OrganCMNIST coronal abdominal CT", 11, (15_400, 8_200)),
    "organsmnist": ("OrganSMNIST sagittal abdominal CT", 11, (16_400, 8_800)),
}
WHERE = "medmnist.com (Zenodo record 10519652)"


def find(
    name: str,
    root: str | os.PathLike[str] | None = None,
    download: bool = False,
    variant: str | None = None,
) -> Dataset:
    """The set ``name`` from ``<root>/<name>.npz``. Raises FldiagError for a missing or foreign file."""
    choose(name, variant)
    at = need_folder(name, root, f"{name}.npz from {WHERE}")
    path = at / f"{name}.npz"
    if not path.exists():
        asked = " (fldiag does not download it)" if download else ""
        raise FldiagError(
            f"data set {name!r} was not found{asked}: looked for {path}",
            f"get {name}.npz (28x28) from {WHERE} and put it there, or set FLDIAG_DATA to the "
            "folder that has it",
        )
    channels = len(PREPROCESSING[name][choose(name, variant)[0]].mean)
    return build(
        name, (channels, 28, 28), SETS[name][1], read_npz(path, join_val=True), str(path), variant
    )


def _builder(name: str) -> Any:
    def made(
        root: str | None = None, download: bool = False, variant: str | None = None
    ) -> Dataset:
        return find(name, root, download, variant)

    return made


for _name, (_what, _classes, _sizes) in SETS.items():
    _kind = (
        "colour" if len(PREPROCESSING[_name]["fedsol"].mean) == 3 else "gray (shown as 3 channels)"
    )
    _about = "about " if _name.startswith("organ") else ""  # their releases differ by a few
    register(
        _name,
        _builder(_name),
        f"{_what}, 28x28 {_kind}, {_classes} classes, {_about}{_sizes[0]:,} train / "
        f"{_sizes[1]:,} test (MedMNIST).",
        "J. Yang et al., MedMNIST v2, 2023. Training is the official training and validation split.",
        (len(PREPROCESSING[_name]["fedsol"].mean), 28, 28),
        _classes,
        _sizes,
    )
