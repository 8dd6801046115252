"""What parts need of the data and of the model: named once, and refused before anything is trained."""

import pytest
from helpers import classification, config, images, quadratics, setup
from torch import nn

from fldiag.errors import FldiagError


class Hidden(nn.Module):
    """No features() that the head sees; with ``shown`` one whose output is not what the head is given."""

    def __init__(self, shown=False):
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)
        if shown:
            self.features = lambda x: self.a(x)

    def forward(self, x):
        return self.b(self.a(x).relu())


@pytest.mark.parametrize("name", ["fedntd", "fedsol", "fedrcl", "feddf", "fedproj", "knnper"])
def test_class_labels(name):
    with pytest.raises(FldiagError, match="needs data with class labels"):
        setup(quadratics().config(name), quadratics().data)


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("name", ["moon", "fedrcl", "knnper"])
def test_features(name, shown):
    with pytest.raises(FldiagError, match=r"needs a model that is head\(features\(x\)\)"):
        setup(config(name), classification(), module=Hidden(shown))


@pytest.mark.parametrize("name", ["fedbabu", "fedsol"])
def test_a_head(name):
    with pytest.raises(FldiagError, match="whose last child module is its classifier"):
        setup(config(name, model_options={"hidden": ()}), classification())


@pytest.mark.parametrize("name", ["gradaug", "fedalign"])
def test_stages(name):
    with pytest.raises(FldiagError, match=r"needs a residual network.*'small_resnet'"):
        setup(config(name, model="small_cnn", model_options={}), images())
    with pytest.raises(FldiagError, match=r"needs (images|a residual network)"):
        setup(config(name), classification())
