"""A diagnostic is one object: a file of another package, found by its entry point, is a verb with help, cache, files and
pictures, can be asked by name, stands in the report, and is a question of a paper's figure."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from commands import run

HERE = Path(__file__).parents[1]
ENTRY_POINTS = "[fldiag.diagnostics]\nroughness = made_up\nstride = stride\ntallest = made_up\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the made-up package installed as pip installs it, and a run to ask."""
    folder = tmp_path_factory.mktemp("plugin")
    site, about = folder / "site", folder / "site" / "made_up-1.0.dist-info"
    about.mkdir(parents=True)
    for name in ("made_up.py", "stride.py"):
        shutil.copy(HERE / "plugin" / name, site)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    run(
        "train",
        "digits",
        "--set",
        "rounds=2",
        "--set",
        "model.name=mlp",
        "--set",
        "model.hidden=[8]",
        "--set",
        "checkpoint.clients=sampled",
        "--set",
        "train.epochs=1",
        "--set",
        "clients.per_round=3",
        "--out",
        folder / "run",
    )
    return folder


def environment(folder):
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(folder / "site"), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        ),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }


def typed(folder, *arguments, code=0):
    """As typed in a shell: a process of its own."""
    found = subprocess.run(
        [sys.executable, "-m", "fldiag.cli", *map(str, arguments)],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert found.returncode == code, (found.stdout, found.stderr)
    return found.stdout + found.stderr if code else found.stdout


ANSWERS = """
import json, sys
from typer.testing import CliRunner
from fldiag.cli import app
for line in sys.stdin:
    found = CliRunner().invoke(app, json.loads(line))
    print(json.dumps([found.exit_code, found.stdout, found.stderr]), flush=True)
"""


@pytest.fixture(scope="module")
def told(place):
    """Commands that one process with the package runs one after another: PyTorch is imported once."""
    process = subprocess.Popen(
        [sys.executable, "-c", ANSWERS],
        cwd=place,
        env=environment(place),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    def tell(*arguments, code=0):
        print(json.dumps([str(a) for a in arguments]), file=process.stdin, flush=True)
        found, out, err = json.loads(process.stdout.readline())
        assert found == code, (out, err)
        return out + err if code else out

    yield tell
    process.stdin.close()
    assert process.wait(30) == 0


def test_the_page_shows_a_diagnostic_of_clients_in_full():
    page = (HERE.parent / "docs" / "own_diagnostic.md").read_text("utf-8")
    assert f"```python\n{(HERE / 'plugin' / 'stride.py').read_text('utf-8')}```" in page


@pytest.mark.slow
def test_it_is_named_without_being_imported(place):
    shutil.copytree(place / "site", place / "broken")
    (place / "broken" / "made_up.py").write_text("raise RuntimeError('imported')")
    env = {
        **environment(place),
        "PYTHONPATH": os.pathsep.join([str(place / "broken"), str(HERE.parent)]),
    }

    def read(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "fldiag.cli", *arguments],
            env=env,
            capture_output=True,
            text=True,
        )

    assert "roughness" in read("--help").stdout and "made-up" in read("list", "diagnostics").stdout
    failed = read("roughness", "x.pt")
    assert failed.returncode == 1 and "Traceback" not in failed.stderr


@pytest.mark.slow
def test_the_verb_and_its_help(place):
    text = typed(place, "roughness", "--help")
    assert all(
        part in text
        for part in (
            "--power",
            "Which norm of the gradient",
            "--samples",
            "--json",
            "--out",
            "fldiag roughness",
        )
    )
    assert "--scale" in typed(place, "stride", "-h") and "made-up" in typed(
        place, "list", "diagnostics"
    )
    assert "Which norm" in typed(place, "explain", "roughness")


@pytest.mark.slow
def test_files_pictures_cache_and_summary(place, told):
    for _ in range(2):
        text = told("roughness", "run", "--power", "3", "--called", "calls", "--device", "cpu")
    png = place / text.strip().splitlines()[-1]
    assert (
        png.read_bytes()[:4] == b"\x89PNG"
        and png.with_suffix(".pdf").is_file()
        and "power 3" in text
    )
    frame, about = (
        pd.read_csv(png.with_suffix(".csv")),
        json.loads(png.with_suffix(".json").read_text()),
    )
    assert (
        frame["metric"].tolist() == ["roughness"]
        and about["diagnostic"] == "roughness"
        and about["options"]["power"] == 3
    )
    assert (place / "calls").read_text() == "x", "asked again, it is read from the cache"
    found = json.loads(
        told("roughness", "run", "--power", "3", "--called", "calls", "--json", "--device", "cpu")
    )
    assert found["rows"][0]["value"] == pytest.approx(frame["value"].iloc[0], rel=1e-6) and found[
        "paths"
    ][-1].endswith(".png")


@pytest.mark.slow
def test_another_version_of_it_does_not_get_the_numbers_of_the_former(place):
    source, answers = place / "site" / "made_up.py", []
    before = source.read_text()
    for text in (before, before.replace('"value": value', '"value": 2 * value')):
        source.write_text(text)
        answers.append(
            json.loads(
                typed(place, "roughness", "run", "--power", "2", "--json", "--device", "cpu")
            )["rows"][0]["value"]
        )
    source.write_text(before)
    assert answers[1] == pytest.approx(2 * answers[0])


@pytest.mark.slow
def test_of_a_run_and_by_name(place, told):
    stride = pd.read_csv(
        place
        / told("stride", "run", "--device", "cpu").strip().splitlines()[-1].replace(".png", ".csv")
    )
    assert stride["round"].tolist() == [1, 1, 1, 2, 2, 2] and stride["client"].notna().all()
    by_name = (
        told("diagnose", "stride", "run", "--set", "scale=2.0", "--device", "cpu")
        .strip()
        .splitlines()[-1]
    )
    twice = pd.read_csv(place / by_name.replace(".png", ".csv"))
    assert (twice["value"] / stride["value"]).tolist() == pytest.approx([2] * 6)
    for verb in (
        ["tallest"],
        ["diagnose", "tallest"],
    ):  # of several runs, which are put on no device
        (row,) = json.loads(told(*verb, "run", "--json"))["rows"]
        assert row["metric"] == "tallest" and row["value"] > 0
    assert "scale = '-1'" in told("stride", "run", "--scale", "-1", code=2)


@pytest.mark.slow
def test_it_stands_in_the_report(place, told):
    told("stride", "run", "--device", "cpu")
    told("report", "run", "--out", "page")
    (page,) = (place / "page").glob("*.html")
    assert "stride" in page.read_text("utf-8")
