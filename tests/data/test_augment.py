"""Augmentation against plain slicing and torchvision, one image at a time."""

import numpy as np
import pytest
import torch
from torchvision import transforms

from fldiag.data import Dataset, augment
from fldiag.errors import FldiagError
from fldiag.seeding import torch_rng
from fldiag.training.client import Minibatches

IMAGES = torch.randint(1, 256, (40, 3, 10, 12), generator=torch.Generator().manual_seed(0)).byte()


def run(names, x=IMAGES, seed=0):
    before, after = augment.plan(tuple(names.split()))
    return augment.apply(x, before + after, torch_rng(seed, "test"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_a_crop_is_a_slice_of_the_padded_image(dtype, mode):
    x = IMAGES.to(dtype)
    offsets = torch.randint(0, 7, (2, 40), generator=torch.Generator().manual_seed(1))
    crops = augment.crop(x, offsets, 3, mode)
    for image, crop, (row, column) in zip(x, crops, offsets.T.tolist(), strict=True):
        padded = np.pad(image.numpy(), ((0, 0), (3, 3), (3, 3)), mode=mode)
        assert np.array_equal(crop.numpy(), padded[:, row : row + 10, column : column + 12])
    assert crops.dtype == dtype and torch.equal(augment.crop(x, torch.full((2, 40), 3), 3, mode), x)


def test_places_of_crops_are_uniform():
    x = torch.zeros(8000, 1, 5, 5)
    x[:, 0, 2, 2] = 1
    # The middle pixel lands on each of the 25 pixels with probability 1/25: 320 times, deviation 17.5.
    counts = run("crop2", x)[:, 0].sum(0)
    assert counts.sum() == 8000 and (counts - 320).abs().max() < 5 * 17.5


@pytest.mark.parametrize("share", [None, 0.2])
def test_a_flip_mirrors_its_share_of_the_images(share):
    x = IMAGES.repeat(50, 1, 1, 1)
    flips = run("hflip" if share is None else f"hflip@{share}", x)
    same, mirrored = ((flips == y).flatten(1).all(1) for y in (x, x.flip(3)))
    assert (same ^ mirrored).all()
    p = share or 0.5
    assert abs(int(mirrored.sum()) - 2000 * p) < 5 * np.sqrt(2000 * p * (1 - p))


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
    assert torch.equal(torch.get_rng_state(), before) and both.shape == (40, 3, 8, 8)
    steps = (
        transforms.RandomResizedCrop(8, antialias=True),
        transforms.ColorJitter(0.4, 0.4, 0.4),
    )
    x = IMAGES
    for step in steps:
        with torch.random.fork_rng():
            torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
            x = torch.stack([step(image) for image in x])
    assert torch.equal(both, x) and torch.equal(run("resizedcrop8 jitter0.4"), both)


def test_normalisation_stands_before_cutout_or_where_it_is_written():
    for names, kinds in {
        "crop4 hflip cutout16": [["crop", "hflip"], ["cutout"]],
        "normalise hflip crop4@0.5": [[], ["hflip", "crop"]],
        "crop4 hflip": [["crop", "hflip"], []],
    }.items():
        assert [
            [step.kind for step in part] for part in augment.plan(tuple(names.split()))
        ] == kinds
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


def test_training_augments_by_client_and_round_only():
    x, y = IMAGES[:20, :1], torch.arange(20) % 2
    data = Dataset("x", x, y, x, y, 2, augment=("crop2",))

    def inputs(ids, t):
        generators = [torch_rng(3, "augment", t, i) for i in ids]
        parts, batches = [np.arange(10)] * len(ids), [np.split(np.arange(10), 2)] * len(ids)
        feed = Minibatches(data, parts, batches, torch.zeros(1), generators)
        return torch.stack([x for x, *_ in feed.steps()], 1)

    first, second = inputs([4, 7], 2)
    assert torch.equal(second, inputs([7], 2)[0]) and not torch.equal(first, second)
    assert not torch.equal(inputs([7], 3)[0], second)
