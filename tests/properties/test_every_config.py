"""Every preset resolves to what is registered, and comes back from its own file; every data set loads, or says what it lacks."""

import pytest

import fldiag
from fldiag import registry


@pytest.mark.parametrize("name", sorted(fldiag.catalogue("presets")))
def test_presets(name, tmp_path):
    config = fldiag.Config.load(name)
    assert config.method.name in registry.method.names()
    assert config.model.name in registry.model.names()
    assert config.data.name in registry.dataset.names()
    other = fldiag.Config.load(name, seed=7)
    assert config != other and other.seed == 7
    with pytest.raises(fldiag.FldiagError, match="no_such_key"):
        fldiag.Config.load(name, train__no_such_key=1)
