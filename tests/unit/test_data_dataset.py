"""A data set checks that its parts fit together, and names its content."""

from dataclasses import replace

import pytest
import torch
from torchvision.transforms import functional as F

from fldiag import data
from fldiag.data import Dataset
from fldiag.data.arrays import moments
from fldiag.errors import FldiagError

X, Y = torch.zeros(4, 3, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"train_x": X.numpy()}, "holds a ndarray"),
        ({"train_x": X[:3]}, "3 inputs and 4 labels"),
        ({"train_x": X.long()}, "train inputs are int64"),
        ({"test_x": X.float()}, "same input shape and dtype"),
        ({"train_y": Y + 1}, "hold 2, outside 0..1"),
        ({"test_y": Y - 1}, "hold -1"),
        ({"train_y": Y.int()}, "int32"),
        ({"train_y": Y.float()}, "targets are float32"),
        ({"mean": (0.5,), "std": (0.5,)}, "1 means"),
        ({"mean": (0.0,) * 3, "std": (1.0, 0.0, 1.0)}, "is not positive"),
        ({"augment": ("blur",)}, "unknown augmentation"),
        ({"repeat": 0}, "repeat = 0"),
        ({"side": 3}, "side = 3 for inputs"),
        ({"side": 0}, "side = 0"),
        ({"augment": ("resizedcrop1",)}, "resizedcrop1 for a model that sees .2, 2."),
        ({"side": 1, "augment": ("resizedcrop2",)}, "resizedcrop2 for a model that sees .1, 1."),
        (
            {"train_x": torch.zeros(4, 2), "test_x": torch.zeros(4, 2), "augment": ("hflip",)},
            "are for images",
        ),
        ({"train_x": X[:, :, 0, 0], "test_x": X[:, :, 0, 0]}, "uint8 means pixels"),
    ],
)
def test_a_dataset_that_does_not_fit_together_is_refused(change, message):
    with pytest.raises(FldiagError, match=message):
        Dataset(
            **{
                "name": "d",
                "train_x": X,
                "train_y": Y,
                "test_x": X,
                "test_y": Y,
                "classes": 2,
                **change,
            }
        )


def test_the_fingerprint_names_the_content():
    base = {"name": "d", "train_x": X, "train_y": Y, "test_x": X, "test_y": Y, "classes": 2}
    mark = Dataset(**base).fingerprint()
    assert len(mark) == 16 and int(mark, 16) >= 0
    assert Dataset(**{**base, "name": "e", "augment": ("hflip",)}).fingerprint() == mark
    pixel = X.clone()
    pixel[0, 0, 0, 0] = 1
    changes = [
        {"train_x": pixel},
        {"test_x": pixel},
        {"train_y": Y.flip(0)},
        {"test_y": Y.flip(0)},
        {"mean": (0.1,) * 3, "std": (1.0,) * 3},
        {"repeat": 2},
        {"side": 1},
        {"train_x": X[:2], "train_y": Y[:2]},
    ]
    assert len({mark, *(Dataset(**{**base, **change}).fingerprint() for change in changes)}) == 9


@pytest.mark.parametrize("height, width, side", [(8, 8, 6), (9, 8, 6), (10, 13, 5), (11, 6, 6)])
def test_evaluation_shows_the_central_square(height, width, side):
    x = torch.randint(
        0, 256, (5, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    made = Dataset("d", x, torch.zeros(5).long(), x, torch.zeros(5).long(), 1, side=side)
    assert made.shape == (3, side, side)
    expected = F.center_crop(x, side).float() / 255
    assert torch.equal(made.normalise(x), expected)
    assert torch.equal(made.batch(torch.arange(5)), expected)
    flipped = replace(made, augment=("hflip@1",)).batch(torch.arange(5), torch.Generator())
    assert torch.equal(flipped, expected.flip(-1))


def test_a_resized_crop_sees_the_whole_stored_image():
    """The outermost pixels never reach a central square, and do reach crops of the whole."""
    x = torch.zeros(400, 1, 12, 12, dtype=torch.uint8)
    x[:, :, 0] = 255
    made = Dataset(
        "d",
        x,
        torch.zeros(400).long(),
        x,
        torch.zeros(400).long(),
        1,
        side=6,
        augment=("resizedcrop6",),
    )
    assert not made.normalise(x).any()
    out = made.batch(torch.arange(400), torch.Generator().manual_seed(0))
    assert out.shape == (400, 1, 6, 6) and 20 < int(out.flatten(1).any(1).sum()) < 300


def test_moving_keeps_everything():
    digits = data.load("digits")
    mark, moved = digits.fingerprint(), digits.to("cpu")
    assert moved.fingerprint() == mark and moved.mean == digits.mean
    assert torch.equal(moved.train_x, digits.train_x)


@pytest.mark.numeric
def test_moments_are_the_same_bits_everywhere():
    """They are part of a data set's fingerprint. Bits that were written down on one processor."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (5000, 3, 6, 6), dtype=torch.uint8, generator=generator)
    mean, std = moments(images)
    exact = images.double().div(255).transpose(0, 1).flatten(1)
    assert mean == pytest.approx(exact.mean(1).tolist(), rel=1e-13) and std == pytest.approx(
        exact.std(1, correction=0).tolist(), rel=1e-13
    )
    assert [v.hex() for v in (*mean, *std)] == [
        "0x1.ff472b2236a5ep-2",
        "0x1.00a3d4d8ce6e1p-1",
        "0x1.ffa833a5d5cddp-2",
        "0x1.287d0da995465p-2",
        "0x1.2920959f2170cp-2",
        "0x1.28dbc0c97cee4p-2",
    ]
    assert moments(torch.ones(3, 2)) == ((1.0, 1.0), (1.0, 1.0))
