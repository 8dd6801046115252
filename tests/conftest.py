"""Makes ``tests/helpers.py`` importable from every test folder, also in worker processes."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """The same bits whatever machine runs the tests, and no crowding under ``pytest -n``."""
    torch.set_num_threads(1)
