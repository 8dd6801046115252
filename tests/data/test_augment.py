"""Augmentation against plain slicing and torchvision, one image at a time."""

import pytest
import torch
from torchvision import transforms
from torchvision.transforms import functional

from fldiag.data import Dataset, augment
from fldiag.errors import FldiagError
from fldiag.seeding import torch_rng

IMAGES = torch.randint(1, 256, (40, 3, 10, 12), generator=torch.Generator().manual_seed(0)).byte()


def run(names, x=IMAGES, seed=0):
    before, after = augment.plan(tuple(names.split()))
    return augment.apply(x, before + after, torch_rng(seed, "test"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_a_crop_is_a_slice_of_the_padded_image(dtype, mode):
    x = IMAGES.to(dtype)
    offsets = torch.randint(0, 7, (2, 40), generator=torch.Generator().manual_seed(1))
    padded = functional.pad(x, [3], padding_mode=mode)
    crops = augment.crop(x, offsets, 3, mode)
    for image, crop, place in zip(padded, crops, offsets.T.tolist(), strict=True):
        assert torch.equal(crop, functional.crop(image, *place, 10, 12))
    assert crops.dtype == dtype


def test_cutout_erases_a_square_as_far_as_it_is_inside():
    centres = torch.stack([torch.arange(40) % 10, torch.arange(40) % 12])
    cut = augment.cutout(IMAGES, centres, 5)
    for image, result, (row, column) in zip(IMAGES, cut, centres.T.tolist(), strict=True):
        true = image.clone()
        true[:, max(row - 2, 0) : row + 3, max(column - 2, 0) : column + 3] = 0
        assert torch.equal(result, true)
    assert torch.equal(run("crop4@0 hflip@0 cutout5@0"), IMAGES)


def test_crops_and_colours_of_torchvision_are_its_own_and_touch_no_global_state():
    generator, before = torch_rng(0, "test"), torch.get_rng_state()
    both = run("resizedcrop8 jitter0.4")
    assert torch.equal(torch.get_rng_state(), before)
    x = IMAGES
    for step in (
        transforms.RandomResizedCrop(8, antialias=True),
        transforms.ColorJitter(*[0.4] * 3),
    ):
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
            x = torch.stack([step(image) for image in x])
    assert torch.equal(both, x)


def test_normalisation_stands_before_cutout_or_where_it_is_written():
    for names, kinds in {
        "crop4 hflip cutout16": [["crop", "hflip"], ["cutout"]],
        "normalise hflip crop4@0.5": [[], ["hflip", "crop"]],
        "crop4 hflip": [["crop", "hflip"], []],
    }.items():
        plan = augment.plan(tuple(names.split()))
        assert [[step.kind for step in part] for part in plan] == kinds
    options = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "augment": ("hflip@1", "cutout99")}
    y = torch.zeros(40, dtype=torch.int64)
    data = Dataset("x", IMAGES, y, IMAGES, y, 1, **options)
    assert not data.batch(torch.arange(40), torch_rng(0, "x")).any()  # zero after normalisation


@pytest.mark.parametrize(
    "names",
    ["flip", "crop-4", "crop4@x", "normalise normalise", "cutout4 jitter0.4"],
)
def test_what_has_no_meaning_is_refused(names):
    with pytest.raises(FldiagError, match="augmentation"):
        augment.plan(tuple(names.split()))
