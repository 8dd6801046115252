"""The commands of docs/clusters.md, as they stand there, on this machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text("utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
#: Shorter runs than those of the page.
SHORT = " --set rounds=1 --set model.name=mlp --set clients.per_round=3 --set train.epochs=1"
pytestmark = pytest.mark.slow


def shell(text, folder, **more):
    """Runs a block in a shell that finds this environment's commands; what it leaves running ends with it."""
    here = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        **more,
    }
    found = subprocess.run(
        ["bash", "-c", f"set -e; trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{text}"],
        cwd=folder,
        env=here,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


def test_a_slurm_array_job_by_job(tmp_path):
    job, collect = (
        re.sub(r"(fldiag sweep digits)", rf"\1{SHORT}", BLOCKS[i]).replace("seed=0,1,2,3", "seed=0")
        for i in (0, 1)
    )
    assert "--array=1-8" in job
    for part in (1, 2):
        shell(job.replace("/8", "/2"), tmp_path, SLURM_ARRAY_TASK_ID=str(part))
    runs = sorted(p.parent.name for p in (tmp_path / "runs").glob("*/run.json"))
    assert len(runs) == 2
    told = shell(collect, tmp_path)
    assert (
        "fedsol" in told
        and sorted(p.parent.name for p in (tmp_path / "runs").glob("*/run.json")) == runs
    )


def test_a_dask_cluster(tmp_path):
    told = shell(
        BLOCKS[2].replace("fldiag train digits", f"sleep 5; fldiag train digits{SHORT}"), tmp_path
    )
    assert "0001.safetensors" in told
