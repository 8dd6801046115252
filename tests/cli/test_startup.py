"""What is only read again is read without PyTorch."""

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
def test_a_cached_answer_and_a_report_need_no_torch(run):
    assert without_torch("forgetting", run).returncode == 1, "nothing can be measured without it"
    first = typed("forgetting", run)
    again = without_torch("forgetting", run)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
    table = [line for line in first.stdout.splitlines() if line.strip().startswith(("1", "2"))]
    assert table and all(
        line.split() in [other.split() for other in again.stdout.splitlines()] for line in table
    )
    made = without_torch("report", run)
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize(
    "name", ["rounds/0002.pt", "diagnostics/*.png", "diagnostics/cache/asked-*.parquet"]
)
@pytest.mark.slow
def test_what_was_changed_is_not_recalled(run, name):
    """Of a checkpoint, a picture and the table alike: the question then takes its usual way, which reads weights."""
    typed("forgetting", run)
    assert without_torch("forgetting", run).returncode == 0
    file = sorted(run.glob(name))[0]
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        assert "torch was imported" in without_torch("forgetting", run).stderr
    finally:
        file.write_bytes(content)
