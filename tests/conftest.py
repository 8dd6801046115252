"""For all tests: ``tests/helpers.py`` importable from every folder (also in worker processes), one thread, and which are numeric."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from processors import numeric

# torch.manual_seed also writes down the call stack for CUDA, which takes milliseconds below pytest.
if not torch.cuda.is_available():
    torch.manual_seed = torch.default_generator.manual_seed

settings.register_profile(
    "fldiag", deadline=None
)  # how long an example takes is the machine's affair
settings.load_profile("fldiag")


def pytest_collection_modifyitems(items):
    for item in items:
        if numeric(item.path):
            item.add_marker(pytest.mark.numeric)


def pytest_collection_finish():
    """Modules and tests stay to the end: the garbage collector need not look at them again and again."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """The same bits at every run on one machine (another processor rounds otherwise), and no crowding under ``pytest -n``."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _user_code_forgotten(tmp_path_factory):
    """What a test imported from its folder is not there for the next one, which may call its module the same."""
    before = set(sys.modules)
    yield
    base = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(base):
            del sys.modules[name]
