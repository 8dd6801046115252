"""A data set checks that its parts fit together, and names its content."""

import pytest
import torch

from fldiag import data
from fldiag.data import Dataset
from fldiag.errors import FldiagError

X, Y = torch.zeros(4, 3, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])


@pytest.mark.parametrize("change, message", [
    ({"train_x": X.numpy()}, "holds a ndarray"), ({"train_x": X[:3]}, "3 inputs and 4 labels"),
    ({"train_x": X.long()}, "train inputs are int64"), ({"test_x": X.float()}, "same input shape and dtype"),
    ({"train_y": Y + 1}, "hold 2, outside 0..1"), ({"test_y": Y - 1}, "hold -1"),
    ({"train_y": Y.int()}, "int32"),
    ({"train_y": Y.float()}, "targets are float32"), ({"mean": (0.5,), "std": (0.5,)}, "1 means"),
    ({"mean": (0.0,) * 3, "std": (1.0, 0.0, 1.0)}, "is not positive"),
    ({"augment": ("blur",)}, "unknown augmentation"),
    ({"repeat": 0}, "repeat = 0"),
    ({"train_x": torch.zeros(4, 2), "test_x": torch.zeros(4, 2), "augment": ("hflip",)}, "are for images"),
    ({"train_x": X[:, :, 0, 0], "test_x": X[:, :, 0, 0]}, "uint8 means pixels"),
])
def test_a_dataset_that_does_not_fit_together_is_refused(change, message):
    with pytest.raises(FldiagError, match=message):
        Dataset(**{"name": "d", "train_x": X, "train_y": Y, "test_x": X, "test_y": Y, "classes": 2, **change})


def test_the_fingerprint_names_the_content():
    base = {"name": "d", "train_x": X, "train_y": Y, "test_x": X, "test_y": Y, "classes": 2}
    mark = Dataset(**base).fingerprint()
    assert len(mark) == 16 and int(mark, 16) >= 0
    assert Dataset(**{**base, "name": "e", "augment": ("hflip",)}).fingerprint() == mark
    pixel = X.clone()
    pixel[0, 0, 0, 0] = 1
    changes = [{"train_x": pixel}, {"test_x": pixel}, {"train_y": Y.flip(0)}, {"test_y": Y.flip(0)},
               {"mean": (0.1,) * 3, "std": (1.0,) * 3}, {"repeat": 2}, {"train_x": X[:2], "train_y": Y[:2]}]
    assert len({mark, *(Dataset(**{**base, **change}).fingerprint() for change in changes)}) == 8


def test_moving_keeps_everything():
    digits = data.load("digits")
    mark, moved = digits.fingerprint(), digits.to("cpu")
    assert moved.fingerprint() == mark and moved.mean == digits.mean
    assert torch.equal(moved.train_x, digits.train_x)
