"""The loops that the tests of runs share."""

import pytest
from loops import record
from torch import nn


@pytest.fixture(scope="session")
def loop(tmp_path_factory):
    return record(tmp_path_factory.mktemp("loop") / "run")


@pytest.fixture(scope="session")
def chain(tmp_path_factory):
    def build():
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3))

    return record(tmp_path_factory.mktemp("chain") / "run", who=[[0, 1]], build=build)


@pytest.fixture(scope="session")
def gaps(tmp_path_factory):
    """Client 3 has no example; no test example has class 2, no training example class 3."""
    who = [[0, 1, 2], [2, 3, 0], [3, 1, 2]]
    return record(tmp_path_factory.mktemp("gaps") / "run", (12, 20, 31, 0), (0, 1, 3), who)
