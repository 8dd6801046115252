"""The wheel holds everything: installed where there is no clone, ``fldiag demo`` runs, and presets and studies are there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]


def run(*command, cwd):
    here = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    found = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=here, capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


def test_a_wheel_in_an_empty_environment(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path / "dist", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("fldiag-*.whl")
    where = tmp_path / "installed"
    run(*pip, "install", "--no-deps", "--target", where, wheel, cwd=tmp_path)
    # The other packages are those of this environment; what it says of fldiag itself comes after the wheel's.
    empty = tmp_path / "empty"
    empty.mkdir()
    start = (
        f"import sys; sys.path[:0] = [{str(where)!r}]; from fldiag.cli import main; import fldiag; "
        f"assert fldiag.__file__.startswith({str(where)!r}); sys.argv = ['fldiag', *sys.argv[1:]]; main()"
    )
    assert Path(
        run(sys.executable, "-c", start, "demo", cwd=empty).strip().splitlines()[-1]
    ).suffix in (".html", ".png")
    assert "fedsol-cifar10-lda0.1" in run(sys.executable, "-c", start, "list", "presets", cwd=empty)
    assert "fedsol/fig6" in run(sys.executable, "-c", start, "list", "figures", cwd=empty)
