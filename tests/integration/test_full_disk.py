"""A disk that takes no more: one error with what to do, and the run goes on. The limit is the system's own, on the size of every
file (RLIMIT_FSIZE), so that the write itself fails, as on a full disk."""

import commands
import pytest

import fldiag

resource = pytest.importorskip("resource")  # not on Windows
KEYS = "rounds=2 model.name=mlp train.epochs=1 clients.total=4 clients.per_round=2"


def test_training_goes_on_when_there_is_space(tmp_path):
    keys = [word for key in KEYS.split() for word in ("--set", key)]
    words = ["train", "digits", *keys, "--out", str(tmp_path / "run")]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, hard))
    try:
        result = commands.run(*words, code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.stderr.count("error: cannot write ") == 1 and "free some disk" in result.stderr
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.rglob("*.safetensors"))
    commands.run(*words, "--resume")
    assert fldiag.load(tmp_path / "run").status == "finished"
