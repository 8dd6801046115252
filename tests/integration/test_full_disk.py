"""A disk that takes no more: one error with what to do, and the run goes on. The limit is the system's own, on the size of every
file (RLIMIT_FSIZE), so that the write itself fails, as on a full disk."""

import pytest
from reference import train

import fldiag

resource = pytest.importorskip("resource")  # not on Windows


def test_training_goes_on_when_there_is_space(tmp_path):
    how = {"out": tmp_path / "run", "rounds": 2, "clients__per_round": 2}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
    try:
        with pytest.raises(fldiag.FldiagError, match="cannot write") as caught:
            train(**how)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "free some disk" in caught.value.remedy
    assert not {".tmp", ".safetensors"} & {path.suffix for path in tmp_path.rglob("*")}
    assert train(**how, resume=True).status == "finished"
