"""Variants: how each paper shows a set to its models."""

import numpy as np
import pytest
import torch
from torchvision import transforms

from fldiag import data, registry
from fldiag.data import augment
from fldiag.data.preprocessing import PREPROCESSING
from fldiag.errors import FldiagError
from fldiag.seeding import torch_rng


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("FLDIAG_DATA", raising=False)


@pytest.fixture
def root(tmp_path):
    rng = np.random.default_rng(0)
    for name, shape in (
        ("mnist", (28, 28)),
        ("cifar10", (32, 32, 3)),
        ("cifar100", (32, 32, 3)),
        ("svhn", (32, 32, 3)),
    ):
        np.savez(
            tmp_path / f"{name}.npz",
            **{
                f"{split}_images": rng.integers(0, 256, (10, *shape), dtype=np.uint8)
                for split in ("train", "test")
            },
            **{f"{split}_labels": np.arange(10) for split in ("train", "test")},
        )
    return tmp_path


#: set, variant -> first mean, first std, augmentation (the papers' values and their released code).
PAPERS = [
    ("mnist", "fedsol", 0.1307, 0.3081, ("crop4", "hflip", "cutout16")),
    ("mnist", "fedsol_paper", 0.1307, 0.3081, ("crop4", "hflip")),
    ("cifar10", "fedsol", 0.49139968, 0.24703233, ("crop4", "hflip", "cutout16")),
    ("cifar10", "fedtoga", 0.491, 0.247, ("normalise", "hflip", "crop4@0.5")),
    ("cifar10", "fedproj", 0.4914, 0.2023, ()),
    ("cifar10", "fedalign", 0.49139968, 0.24703233, ("crop4", "hflip")),
    ("cifar100", "fedalign", 0.5071, 0.2673, ("crop4", "hflip")),
    ("cifar100", "fedtoga", 0.5071, 0.2675, ("normalise", "hflip", "crop4@0.5")),
    ("cifar100", "fedproj", 0.507, 0.267, ()),
    ("svhn", "fedsol", 0.4376821, 0.19803012, ("crop4", "hflip")),
]


@pytest.mark.parametrize("name, variant, mean, std, steps", PAPERS)
def test_a_variant_is_its_papers_normalisation_and_augmentation(
    root, name, variant, mean, std, steps
):
    loaded = data.load(name, root=root, variant=variant)
    assert (loaded.name, loaded.mean[0], loaded.std[0], loaded.augment) == (name, mean, std, steps)
    assert data.load(f"{name}@{variant}", root=root).fingerprint() == loaded.fingerprint()
    default = data.load(name, root=root)
    if variant == next(iter(PREPROCESSING[name])):
        assert (default.mean, default.std, default.augment) == (
            loaded.mean,
            loaded.std,
            loaded.augment,
        )
    else:
        assert (default.mean, default.std, default.augment) != (
            loaded.mean,
            loaded.std,
            loaded.augment,
        )


@pytest.mark.parametrize(
    "name, default",
    [
        ("cifar10", "fedsol"),
        ("cifar100", "fedalign"),
        ("cinic10", "fedsol"),
        ("imagenet200", "fedalign"),
        ("mnist", "fedsol"),
        ("tissuemnist", "fedsol"),
    ],
)
def test_the_default_variant_and_its_mention(name, default):
    assert next(iter(PREPROCESSING[name])) == default
    text = registry.dataset.get(name).doc
    assert all(variant in text for variant in PREPROCESSING[name])


def test_every_preprocessing_is_well_formed_and_every_set_with_one_is_registered():
    for name, variants in PREPROCESSING.items():
        assert name in registry.dataset and registry.dataset.get(name).headline.endswith(".")
        for look in variants.values():
            augment.plan(look.augment)
            assert len(look.mean) == len(look.std) and all(
                0 < v < 1 for v in (*look.mean, *look.std)
            )
            assert len(look.mean) * look.repeat == 3


def test_fedtogas_augmentation_against_torchvision_one_by_one(root):
    """Half of the normalised images are mirrored, half are cropped out of zeros; draws of a twin generator."""
    loaded = data.load("cifar10", root=root, variant="fedtoga")
    at = torch.arange(10).repeat(20)
    out = loaded.batch(at, torch_rng(5, "test"))
    twin = torch_rng(5, "test")
    flips = (torch.rand(200, generator=twin) < 0.5).tolist()
    rows, columns = (torch.randint(9, (200,), generator=twin).tolist() for _ in range(2))
    crops = (torch.rand(200, generator=twin) < 0.5).tolist()
    for i, x in enumerate(loaded.normalise(loaded.train_x)[at]):
        x = transforms.functional.hflip(x) if flips[i] else x
        if crops[i]:
            x = transforms.functional.crop(
                transforms.functional.pad(x, 4), rows[i], columns[i], 32, 32
            )
        assert torch.equal(out[i], x)
    assert 70 < sum(flips) < 130 and 70 < sum(crops) < 130


@pytest.mark.parametrize(
    "name, message",
    [
        ("cifar10", "unknown variant of data set 'cifar10' 'fedsool'; did you mean 'fedsol'"),
        ("svhn", "unknown variant of data set 'svhn' 'fedsool'.*known: fedsol"),
        ("tissuemnist", "known: fedsol"),
        ("cinic10", "known: enlarged, fedproj, fedsol"),
        ("imagenet200", "known: fedalign, small"),
        ("digits", "'digits' has no variants, so 'fedsool' cannot be chosen; remove data.variant"),
        ("npz:x.npz", "'npz:x.npz' has no variants"),
        ("pkg.mod:f", "'pkg.mod:f' has no variants"),
        ("mine", "'mine' has no variants"),
    ],
)
def test_unknown_variants_are_refused_before_anything_is_read(name, message):
    with pytest.raises(FldiagError, match=message) as caught:
        data.load(name, variant="fedsool")
    assert caught.value.usage


def test_two_variants_at_once_are_refused(root):
    assert data.load("cifar10@fedproj", root=root, variant="fedproj").augment == ()
    with pytest.raises(FldiagError, match="name one variant"):
        data.load("cifar10@fedproj", root=root, variant="fedsol")
    with pytest.raises(FldiagError, match="unknown data set 'nothing@fedsol'"):
        data.load("nothing@fedsol", root=root)
