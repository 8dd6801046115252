"""For all tests: ``tests/helpers.py`` importable from every folder (also in worker processes), one thread, which are numeric, and a
few trained runs. PyTorch is imported by fixtures, for the process that hands out tests to others needs none."""

import gc
import importlib.metadata
import os
import sys
from functools import cache
from pathlib import Path

import pytest
import typer.main
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from processors import numeric

# Modules and tests stay to the end: the garbage collector need not look at them again and again while they are collected.
gc.disable()

# What all installed packages bring is read once for a path of imports, not several times a verb.
_installed = cache(lambda path, read=importlib.metadata.entry_points: read())
importlib.metadata.entry_points = lambda **which: _installed((*sys.path,)).select(**which)

# So are the commands built once.
typer.main.get_command = cache(typer.main.get_command)

# No test cuts the power: what is written need not be on the disk, for which half of a small run's time is waited.
os.fsync = lambda file: None

# how long an example takes is the machine's affair
settings.register_profile("fldiag", deadline=None)
settings.load_profile("fldiag")


def pytest_collection_modifyitems(items):
    for item in items:
        if numeric(item.path):
            item.add_marker(pytest.mark.numeric)
        if "integration" in item.path.parts:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """The same bits at every run on one machine (another processor rounds otherwise), and no crowding under ``pytest -n``."""
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        # it also writes down the call stack for CUDA, which takes milliseconds below pytest
        torch.manual_seed = torch.default_generator.manual_seed


@pytest.fixture(autouse=True, scope="session")
def users_dots():
    """Pictures are coarse, and without a pdf, which takes as long as all else. A new ``contextvars.Context`` has the formats of a
    user; this is how fine the user's are, as ``style.image.__defaults__``."""
    from fldiag.plotting import style

    style.SHEET.set((None, ("png",)))
    users, style.image.__defaults__ = style.image.__defaults__, (100,)
    return users


@pytest.fixture(autouse=True)
def _user_code_forgotten(tmp_path_factory):
    """What a test imported from its folder is not there for the next one, which may call its module the same."""
    before = set(sys.modules)
    yield
    base = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(base):
            del sys.modules[name]


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    from cases import Toy

    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A run of a method without and one with a memory, four rounds of digits."""
    from reference import train

    folder = tmp_path_factory.mktemp("runs")
    names = ("fedavg", "scaffold")
    return {n: train(folder / n, rounds=4, clients__per_round=3, method__name=n) for n in names}
