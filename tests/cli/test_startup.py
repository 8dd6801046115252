"""A report reads tables, and does so without PyTorch."""

import subprocess
import sys

import pytest
from commands import run as typed

import fldiag
from fldiag.config import Config

WITHOUT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name != "torch", "torch was imported"

sys.meta_path.insert(0, Refuse())
from fldiag.cli import main
main()
"""


def without_torch(*words):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *map(str, words)], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = Config.load(
        "digits",
        rounds=2,
        model__name="mlp",
        clients__per_round=2,
        train__epochs=1,
        checkpoint__clients="sampled",
    )
    return fldiag.train(config, out=tmp_path_factory.mktemp("startup") / "run").path


@pytest.mark.slow
def test_a_report_needs_no_torch(run):
    typed("forgetting", run)
    made = without_torch("report", run)
    assert made.returncode == 0, made.stderr
