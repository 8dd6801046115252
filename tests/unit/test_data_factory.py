"""Data sets that a user's own function makes."""

import sys
import textwrap

import pytest
import torch

import fldiag
from fldiag import data
from fldiag.errors import FldiagError

MODULE = """
    import numpy as np, torch
    from fldiag.data import Dataset
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    not_callable = 3
    def dataset(): return Dataset("mine", x, y, x, y, 2)
    def tensors(): return x, y, x, y
    def arrays(): return np.zeros((4, 5, 5), np.uint8), np.arange(4), np.zeros((2, 5, 5), np.uint8), [0, 5]
    t = torch.arange(30).view(6, 5) * 7 % 9
    def tokens(): return t, y, np.full((4, 5), 8, np.int32), [0, 1, 1, 0]
    def regression(): return x, x[:, 0], x, x[:, 1]
    def three(): return x, y, x
    def nothing(): return None
    def text(): return "a", y, x, y
    def fails(): raise KeyError("no column")
    def needs(argument): return argument
"""


def load(name):
    return data.load(name, allow_code={name})


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "mydata_for_test.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken_for_test.py").write_text("import a_module_nobody_has")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield "mydata_for_test"
    for name in ("mydata_for_test", "broken_for_test"):
        sys.modules.pop(name, None)


def test_factories_in_the_working_directory(module):
    path = list(sys.path)
    assert load(f"{module}:dataset").name == "mine"
    assert load(f"{module}:tensors").classes == 2
    arrays = load(f"{module}:arrays")
    assert (arrays.shape, arrays.classes, arrays.name) == ((1, 5, 5), 6, f"{module}:arrays")
    regression = load(f"{module}:regression")
    assert regression.regression and regression.classes == 1 and regression.train_y.shape == (6, 1)
    assert sys.path == path


def test_tokens_stay_integers_up_to_the_model(module):
    found = load(f"{module}:tokens")
    assert found.tokens and found.train_x.dtype == found.test_x.dtype == torch.int64
    net = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(20, 2))
    torch.save(net.state_dict(), "net.pt")
    asked = fldiag.diagnose(
        fldiag.load("net.pt", model=net, data=f"{module}:tokens"), "spectrum", k=1
    )
    same = fldiag.diagnose(
        fldiag.Problem(net, torch.nn.functional.cross_entropy, (found.train_x, found.train_y)),
        "spectrum",
        k=1,
    )
    value = asked[asked["metric"] == "eigenvalue"]["value"].tolist()
    assert value and value == pytest.approx(
        same[same["metric"] == "eigenvalue"]["value"].tolist(), rel=1e-3
    )


@pytest.mark.parametrize(
    "name, message",
    [
        ("mydata_for_test:tensor", "has no function 'tensor'; did you mean 'tensors'"),
        ("mydata_for_test:not_callable", "cannot be called"),
        ("mydata_for_test:three", "returned a tuple of 3"),
        ("mydata_for_test:nothing", "returned a NoneType; return fldiag.data.Dataset"),
        ("mydata_for_test:text", "train_x is an array of <U1"),
        ("mydata_for_test:fails", "failed .KeyError: 'no column'"),
        ("mydata_for_test:needs", "failed .TypeError.*called without arguments"),
        ("no_such_module_xyz:f", "cannot import no_such_module_xyz .*install it"),
        ("broken_for_test:f", "cannot import broken_for_test .*a_module_nobody_has.*fix it"),
        ("mydata_for_test:", "not pkg.mod:factory"),
        ("a b:c", "not pkg.mod:factory"),
        (":c", "not pkg.mod:factory"),
    ],
)
def test_faulty_factories_are_explained(module, name, message):
    with pytest.raises(FldiagError, match=message) as caught:
        load(name)
    assert caught.value.remedy
