"""The wheel alone, in an environment without a clone: verbs, presets, the papers' package and types are there."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SCRIPT = """
import fldiag

config: fldiag.Config = fldiag.Config.load("digits", rounds=2)
run: fldiag.Run = fldiag.train(config, out="run")
problem = fldiag.Problem
names: dict[str, str] = fldiag.catalogue("methods")
for subject in (run, fldiag.load("run")):
    print(fldiag.diagnose(subject, "spectrum", k=5))
try:
    fldiag.sweep(config, over={"seed": [0, 1]})
except fldiag.FldiagError as error:
    print(error.remedy)
"""
#: A wrong line -> the kind of complaint.
WRONG = {
    "fldiag.load(3, 4, 5)": "call-arg",
    "fldiag.load(3)": "arg-type",
    "fldiag.train('digits')": "arg-type",
    "fldiag.train(config, rounds=3)": "call-arg",
    "number: int = fldiag.catalogue('methods')": "assignment",
    "fldiag.lode('run')": "attr-defined",
}


def run(*words, cwd, code=0):
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    process = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == code, process.stdout[-2000:] + process.stderr[-2000:]
    return process.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment with the wheel; the other packages are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--wheel-dir", folder / "dist"]
    run(*build, ROOT, cwd=folder)
    (wheel,) = (folder / "dist").glob("fldiag-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", wheel, cwd=folder)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", code, cwd=folder).strip())
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for package in ("fldiag", "fldiag_papers"):
        assert (site / package / "__init__.py").is_file()
        assert run(python, "-c", f"import {package}; print({package}.__file__)", cwd=folder) == (
            f"{site / package / '__init__.py'}\n"
        )
    return folder / "venv" / "bin"


def test_verbs_presets_and_figures(environment, tmp_path):
    def fldiag(*words):
        return run(environment / "fldiag", *words, cwd=tmp_path)

    demo = fldiag("demo").strip().splitlines()[-1]
    assert Path(demo).suffix in (".html", ".png")
    page = fldiag("--help")
    assert "figures" in page and "toy" in page
    assert "fedsol-cifar10-lda0.1" in fldiag("list", "presets")
    assert "fedsol/fig6" in fldiag("list", "figures")
    for words in (("toy", "plane"), ("figures", "fedsol/fig6", "--scale", "smoke")):
        picture = tmp_path / fldiag(*words).strip().splitlines()[-1]
        assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_type_checker_sees_the_public_names(environment, tmp_path):
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", environment / "python"]
    user = tmp_path / "user.py"
    user.write_text(SCRIPT)
    run(*mypy, user, cwd=tmp_path)
    user.write_text(SCRIPT + "\n".join(WRONG) + "\n")
    complaints = run(*mypy, user, cwd=tmp_path, code=1).splitlines()
    first = len(SCRIPT.splitlines()) + 1
    for number, (line, kind) in enumerate(WRONG.items(), start=first):
        assert any(
            c.startswith(f"user.py:{number}: error") and f"[{kind}]" in c for c in complaints
        ), (line, complaints)
