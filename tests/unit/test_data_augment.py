"""Augmentation against plain slicing, one image at a time."""

import numpy as np
import pytest
import torch
from torchvision import transforms

from fldiag.data import Dataset, augment
from fldiag.errors import FldiagError
from fldiag.seeding import torch_rng


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (40, 3, 10, 12), dtype=torch.uint8, generator=generator)


def run(names, x, seed=0):
    before, after = augment.plan(tuple(names))
    return augment.apply(x, before + after, torch_rng(seed, "test"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("reflect", [False, True])
def test_crop_is_a_slice_of_the_padded_image(images, dtype, reflect):
    x = images.to(dtype)
    offsets = torch.randint(0, 7, (2, len(x)), generator=torch.Generator().manual_seed(1))
    out = augment.crop(x, offsets, 3, reflect=reflect)
    assert out.dtype == dtype
    for i, (row, column) in enumerate(offsets.T.tolist()):
        padded = np.pad(x[i].numpy(), ((0, 0), (3, 3), (3, 3)), mode="reflect" if reflect else "constant")
        assert np.array_equal(out[i].numpy(), padded[:, row:row + 10, column:column + 12])


def test_crop_offsets_are_uniform_over_all_places():
    x = torch.zeros(8000, 1, 5, 5)
    x[:, 0, 2, 2] = 1
    out = run(["crop2"], x)[:, 0]
    # The middle pixel lands on each of the 25 pixels with probability 1/25: 320 times, deviation 17.5.
    assert out.sum() == 8000
    assert (out.sum(0) - 320).abs().max() < 5 * 17.5


def test_hflip_mirrors_half_of_the_images_and_only_left_right(images):
    out = run(["hflip"], images.repeat(50, 1, 1, 1))
    kept = (out == images.repeat(50, 1, 1, 1)).flatten(1).all(1)
    mirrored = (out == images.repeat(50, 1, 1, 1).flip(3)).flatten(1).all(1)
    assert (kept ^ mirrored).all()
    assert abs(int(mirrored.sum()) - 1000) < 5 * np.sqrt(2000 / 4)


def test_hflip_twice_is_the_image(images):
    assert torch.equal(run(["hflip@1", "hflip@1"], images), images)
    assert torch.equal(run(["hflip@1"], images), images.flip(-1))


@pytest.mark.parametrize("side", [1, 4, 5, 16])
def test_cutout_zeroes_the_clipped_square(images, side):
    x = images.float()
    generator = torch.Generator().manual_seed(2)
    centres = torch.stack([torch.randint(0, high, (len(x),), generator=generator) for high in (10, 12)])
    out = augment.cutout(x, centres, side)
    for i, (row, column) in enumerate(centres.T.tolist()):
        expected = x[i].clone()
        top, left = row - side // 2, column - side // 2
        expected[:, max(top, 0):max(top + side, 0), max(left, 0):max(left + side, 0)] = 0
        assert torch.equal(out[i], expected)


def test_cutout_area_follows_a_uniform_centre():
    out = run(["cutout16"], torch.ones(6000, 1, 32, 32))[:, 0]
    area = (out == 0).sum((1, 2)).double()
    # The border leaves min(c + 8, 32) - max(c - 8, 0) rows for c = 0..31, and columns are independent.
    side = np.mean([min(c + 8, 32) - max(c - 8, 0) for c in range(32)])
    assert area.min() >= 64 and area.max() == 256
    assert float(area.mean()) == pytest.approx(side**2, abs=5 * float(area.std()) / np.sqrt(6000))


@pytest.mark.parametrize("name", ["crop4@0.25", "reflectcrop4@0.25", "cutout4@0.25", "hflip@0.25"])
def test_a_probability_spares_the_other_images(name):
    x = torch.rand(4000, 1, 9, 9) + 1
    changed = (run([name], x) != x).flatten(1).any(1).double().mean()
    kept_by_chance = 1 / 81 if "crop" in name else 0  # an offset equal to the padding changes nothing
    assert float(changed) == pytest.approx(0.25 * (1 - kept_by_chance), abs=0.035)
    assert torch.equal(run([name.replace("0.25", "0")], x), x)


@pytest.mark.parametrize("name", ["crop4", "reflectcrop4", "hflip", "cutout16"])
def test_same_generator_state_same_batch_and_the_input_stays(images, name):
    original = images.clone()
    first, again, other = run([name], images), run([name], images), run([name], images, seed=1)
    assert first.shape == images.shape and first.dtype == images.dtype
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(images, original)


def test_global_random_state_is_untouched(images):
    before = torch.get_rng_state()
    run(["crop4", "hflip", "cutout16"], images)
    assert torch.equal(before, torch.get_rng_state())


def dataset(x, names, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25)):
    y = torch.zeros(len(x), dtype=torch.int64)
    return Dataset("d", x, y, x, y, 2, mean=mean, std=std, augment=names)


def test_crop_pads_with_black_pixels_and_cutout_erases_to_zero_after_normalisation():
    data = dataset(torch.full((300, 3, 8, 8), 255, dtype=torch.uint8), ("crop4", "hflip", "cutout4"))
    out = data.batch(torch.arange(300), torch_rng(0, "test"))
    for channel, (mean, std) in enumerate(zip(data.mean, data.std, strict=True)):
        expected = torch.tensor([-mean / std, 0.0, (1 - mean) / std])
        assert torch.allclose(out[:, channel].unique(), expected, atol=1e-6)


def test_normalise_can_be_placed_first():
    data = dataset(torch.full((300, 3, 8, 8), 255, dtype=torch.uint8), ("normalise", "crop4@0.5"))
    out = data.batch(torch.arange(300), torch_rng(0, "test"))[:, 0].unique()
    assert torch.allclose(out, torch.tensor([0.0, 3.0]), atol=1e-6)


def test_the_batch_equals_torchvisions_transforms_with_the_same_draws(images):
    """Crop and flip one by one with the draws of a twin generator, in torchvision's order."""
    data = dataset(images, ("crop2", "hflip"))
    out = data.batch(torch.arange(len(images)), torch_rng(3, "test"))
    twin = torch_rng(3, "test")
    rows, columns = (torch.randint(5, (len(images),), generator=twin).tolist() for _ in range(2))
    flips = (torch.rand(len(images), generator=twin) < 0.5).tolist()
    finish = transforms.Compose([transforms.ToTensor(), transforms.Normalize(data.mean, data.std)])
    for i, image in enumerate(images):
        cut = transforms.functional.crop(transforms.functional.pad(image, 2), rows[i], columns[i], 10, 12)
        cut = transforms.functional.hflip(cut) if flips[i] else cut
        assert torch.equal(out[i], finish(cut.permute(1, 2, 0).numpy()))


@pytest.mark.parametrize("name, message", [
    ("crop", "unknown augmentation 'crop'"), ("crop0", "unknown augmentation"), ("rotate9", "rotate9"),
    ("hflip4", "hflip4"), ("crop4@2", "no valid probability"), ("crop4@1.2.3", "no valid probability"),
])
def test_unknown_names_are_refused(name, message):
    with pytest.raises(FldiagError, match=message) as caught:
        augment.plan((name,))
    assert caught.value.usage and caught.value.remedy


def test_normalise_twice_and_mirrors_wider_than_the_image_are_refused(images):
    with pytest.raises(FldiagError, match="normalises 2 times"):
        augment.plan(("normalise", "hflip", "normalise"))
    with pytest.raises(FldiagError, match="use at most reflectcrop9"):
        run(["reflectcrop10"], images)
