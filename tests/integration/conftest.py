"""Against the real packages: ``make test-integrations`` installs them, then ``pytest -m integration``."""

import os
from importlib.util import find_spec

import pytest

from fldiag.models import minilm

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure(config):
    """A package that is not there fails the whole, where these tests are asked for: none is left out unseen."""
    missing = [name for name in ("transformers", "peft", minilm.MODULE) if find_spec(name) is None]
    if config.option.markexpr == "integration" and missing:
        raise pytest.UsageError(
            f"not installed: {', '.join(missing)}; make test-integrations installs them"
        )


def pytest_collection_modifyitems(items):
    for item in items:
        if "integration" in item.path.parts:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
