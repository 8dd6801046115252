"""Augmentation against plain slicing, one image at a time."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image
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
        padded = np.pad(
            x[i].numpy(), ((0, 0), (3, 3), (3, 3)), mode="reflect" if reflect else "constant"
        )
        assert np.array_equal(out[i].numpy(), padded[:, row : row + 10, column : column + 12])


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
    centres = torch.stack(
        [torch.randint(0, high, (len(x),), generator=generator) for high in (10, 12)]
    )
    out = augment.cutout(x, centres, side)
    for i, (row, column) in enumerate(centres.T.tolist()):
        expected = x[i].clone()
        top, left = row - side // 2, column - side // 2
        expected[:, max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = 0
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
    kept_by_chance = (
        1 / 81 if "crop" in name else 0
    )  # an offset equal to the padding changes nothing
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
    data = dataset(
        torch.full((300, 3, 8, 8), 255, dtype=torch.uint8), ("crop4", "hflip", "cutout4")
    )
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
        cut = transforms.functional.crop(
            transforms.functional.pad(image, 2), rows[i], columns[i], 10, 12
        )
        cut = transforms.functional.hflip(cut) if flips[i] else cut
        assert torch.equal(out[i], finish(cut.permute(1, 2, 0).numpy()))


@pytest.mark.parametrize(
    "part", [(0, 0, 20, 24), (3, 5, 9, 8), (0, 23, 20, 1), (7, 2, 13, 22), (19, 0, 1, 24)]
)
@pytest.mark.parametrize("side", [4, 11, 30])
def test_resize_of_a_part_equals_pillows(part, side):
    x = torch.rand(3, 3, 20, 24, generator=torch.Generator().manual_seed(0)) * 255
    parts = torch.tensor([part, (0, 0, 20, 24), part])  # each image has its own
    out = augment.resize(x, parts, side)
    for image, shown, (top, left, height, width) in zip(x, out, parts.tolist(), strict=True):
        for channel, found in zip(image.numpy(), shown.numpy(), strict=True):
            cut = Image.fromarray(channel[top : top + height, left : left + width])
            assert np.allclose(
                found, np.asarray(cut.resize((side, side), Image.Resampling.BILINEAR)), atol=2e-3
            )
    pixels = augment.resize(x.to(torch.uint8), parts, side)
    assert pixels.dtype == torch.uint8
    assert (
        pixels.float() - augment.resize(x.to(torch.uint8).float(), parts, side)
    ).abs().max() <= 0.5 + 1e-3


@pytest.mark.parametrize("height, width", [(40, 40), (30, 60)])
def test_windows_follow_torchvisions_distribution(height, width):
    parts = augment.windows(4000, height, width, torch_rng(0, "test")).double()
    top, left, high, wide = parts.T
    assert (
        (top >= 0).all()
        and (left >= 0).all()
        and (top + high <= height).all()
        and (left + wide <= width).all()
    )
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    theirs = torch.tensor(
        [
            transforms.RandomResizedCrop.get_params(image, [0.08, 1], [3 / 4, 4 / 3])
            for _ in range(4000)
        ]
    ).double()
    for mine, other in zip(parts.T, theirs.T, strict=True):
        spread = float(other.std()) / np.sqrt(2000)
        assert float(mine.mean()) == pytest.approx(float(other.mean()), abs=5 * spread)
        assert float(mine.std()) == pytest.approx(float(other.std()), rel=0.06)
    # Every place is equally likely: the free room is used evenly on both sides.
    room = height - high
    assert float((top / room)[room > 5].mean()) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    "height, width, part", [(100, 10, (43, 0, 13, 10)), (10, 100, (0, 43, 10, 13))]
)
def test_an_image_too_long_for_any_window_gives_its_centre(monkeypatch, height, width, part):
    monkeypatch.setattr(augment, "AREA", (0.3, 1.0))
    found = augment.windows(50, height, width, torch_rng(0, "test"))
    theirs = transforms.RandomResizedCrop.get_params(
        torch.empty(1, height, width), [0.3, 1], [3 / 4, 4 / 3]
    )
    assert theirs == part and (found == torch.tensor(part)).all()


def adjusted(x, which, factor):
    """Brightness (0), contrast (1) or saturation (2) of one image times ``factor``, written out."""
    gray = x[0] if len(x) == 1 else 0.2989 * x[0] + 0.587 * x[1] + 0.114 * x[2]
    without = (torch.zeros(()), gray.mean(), gray)[which]
    return (factor * x + (1 - factor) * without).clamp(0, 1)


@pytest.mark.parametrize("channels", [1, 3])
def test_jitter_is_its_definition_in_every_order(channels):
    orders = torch.tensor(list(itertools.permutations(range(3))))
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(6, channels, 7, 5, generator=generator)
    factors = 0.6 + 0.8 * torch.rand(6, 3, generator=generator)
    original = x.clone()
    out = augment.jitter(x, factors, orders)
    for i, order in enumerate(orders.tolist()):
        expected = x[i]
        for which in order:
            expected = adjusted(expected, which, float(factors[i, which]))
        assert torch.allclose(out[i], expected, atol=1e-5)
    assert torch.equal(x, original)


def test_jitter_draws_each_factor_and_each_order_evenly():
    seen = []

    def record(x, factors, order):
        seen.append((factors, order))
        return x

    x = torch.zeros(6000, 3, 2, 2, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(augment, "jitter", record)
        run(["jitter0.4"], x)
        run(["jitter0.4@0.25"], x)
    (factors, order), (some, _) = seen
    assert factors.min() >= 0.6 and factors.max() <= 1.4
    assert torch.allclose(factors.mean(0), torch.ones(3), atol=0.02) and torch.allclose(
        factors.std(0), torch.full((3,), 0.231), atol=0.01
    )
    assert (
        (order * torch.tensor([9, 3, 1])).sum(1).bincount(minlength=27).sort().values[-6:] - 1000
    ).abs().max() < 5 * 29
    spared = (some == 1).all(1).double().mean()
    assert float(spared) == pytest.approx(0.75, abs=0.03)


def test_jitter_of_pixels_rounds_to_the_nearest(images):
    out = run(["jitter0.4"], images)
    floats = run(["jitter0.4"], images.float() / 255) * 255
    assert out.dtype == torch.uint8 and (out.float() - floats).abs().max() <= 0.5 + 1e-3
    assert (out.float() - images.float()).abs().mean() > 5


def test_the_imagenet_recipe_is_reproducible_and_normalises_last():
    x = torch.randint(
        0, 256, (20, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    data = Dataset(
        "d",
        x,
        torch.zeros(20).long(),
        x,
        torch.zeros(20).long(),
        1,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        augment=("resizedcrop9", "jitter0.4", "hflip"),
        side=9,
    )
    first, again = (data.batch(torch.arange(20), torch_rng(1, "test")) for _ in range(2))
    assert first.shape == (20, 3, 9, 9) and torch.equal(first, again)
    twin = torch_rng(1, "test")
    before, after = augment.plan(data.augment)
    assert after == ()
    pixels = augment.apply(x, before, twin).float() / 255
    assert torch.allclose(first, (pixels - 0.5) / 0.25, atol=1e-6)


def test_colours_after_normalisation_and_of_other_channels_are_refused():
    with pytest.raises(FldiagError, match="write jitter before"):
        augment.plan(("normalise", "jitter0.4"))
    with pytest.raises(FldiagError, match="write jitter before"):
        augment.plan(("cutout4", "jitter0.4"))
    with pytest.raises(FldiagError, match="have 2 channels"):
        run(["jitter0.4"], torch.zeros(2, 2, 4, 4))


@pytest.mark.parametrize(
    "name, message",
    [
        ("resizedcrop", "resizedcrop"),
        ("resizedcrop9@0.5", "resizedcrop9@0.5"),
        ("jitter", "jitter"),
        ("jitter1.5", "jitter1.5"),
        ("normalise@0.5", "normalise@0.5"),
        ("crop", "unknown augmentation 'crop'"),
        ("crop0", "unknown augmentation"),
        ("rotate9", "rotate9"),
        ("hflip4", "hflip4"),
        ("crop4@2", "no valid probability"),
        ("crop4@1.2.3", "no valid probability"),
    ],
)
def test_unknown_names_are_refused(name, message):
    with pytest.raises(FldiagError, match=message) as caught:
        augment.plan((name,))
    assert caught.value.usage and caught.value.remedy


def test_normalise_twice_and_mirrors_wider_than_the_image_are_refused(images):
    with pytest.raises(FldiagError, match="normalises 2 times"):
        augment.plan(("normalise", "hflip", "normalise"))
    with pytest.raises(FldiagError, match="use at most reflectcrop9"):
        run(["reflectcrop10"], images)
