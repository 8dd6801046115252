"""Every verb as a user types it, in a process of its own where that matters."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import typer
from commands import commands, last, run

import fldiag
from fldiag.cli.app import Console
from fldiag.diagnosis import diagnose as diagnosis
from fldiag.results import files

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "checkpoints" / "example" / "fedsol-digits.pt"
#: One picture for a question whose subject is another thing than its pictures.
PNG = ("--format", "png")
TRAIN = (
    *("train", "digits", "--set", "rounds=3", "--set", "model.name=mlp"),
    *("--set", "checkpoint.clients=sampled", "--out"),
)


VERBS = {
    *("demo", "train", "sweep", "list", "explain"),
    *("landscape", "spectrum", "paths", "sharpness", "diagnose"),
    *("matching", "forgetting", "drift", "fairness", "flatness", "geometry", "account", "lora"),
    *("partition", "personalise", "doctor"),
    *("check", "diff", "report", "figures", "toy", "convert", "runs", "prune"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run with client weights, written by the command itself."""
    folder = tmp_path_factory.mktemp("run") / "r"
    run(*TRAIN, folder)
    return folder


def test_help_answers_without_numpy_and_torch():
    code = "import sys, fldiag.cli; fldiag.cli.app(['--help'], standalone_mode=False); sys.exit(bool({'numpy', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    groups = re.findall(r"╭─ (\w+) ─", done.stdout)
    assert groups == ["Options", "Start", "Weights", "Clients", "Compare", "Files", "Papers"]
    assert set(commands().list_commands(typer.Context(commands()))) == VERBS


def test_train_ends_with_the_checkpoint_and_resumes(trained):
    result = run(*TRAIN, trained, "--resume")
    assert last(result) == trained / "rounds" / "0003.safetensors" and last(result).is_file()
    assert fldiag.load(trained).status == "finished"


def test_dry_run_writes_nothing_and_says_how_large(tmp_path):
    result = run("train", "digits", "--dry-run", "--json")
    answer = json.loads(result.stdout)
    assert answer["bytes"] == 4 * answer["parameters"] == 4 * 46594
    assert answer["config"]["rounds"] == 20
    (tmp_path / "mine.py").write_text("raise SystemExit(9)")
    result = run("train", "digits", "--set", "model.name=mine:net", "--dry-run", "--json")
    assert "parameters" not in json.loads(result.stdout)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.py"]


def test_landscape_of_a_run_checkpoint(trained):
    result = run("landscape", trained / "rounds" / "0003.safetensors", *PNG, "--samples", 200)
    png = last(result)
    assert png.parent == trained / "diagnostics" and png.read_bytes()[:4] == b"\x89PNG"
    stem = png.name.removesuffix(".png")
    frame = pd.read_csv(png.with_name(stem + ".csv"))
    assert (frame["metric"] == "loss").sum() >= 11**2 and (frame["n_examples"] == 200).all()
    about = json.loads(png.with_name(stem + ".json").read_text())
    assert len(next(iter(about["checkpoints"].values()))["sha256"]) == 64
    assert "<html" in png.with_name(stem + ".html").read_text()[:2000].lower()


def test_spectrum_of_the_committed_example_has_the_promised_rows():
    result = run("spectrum", EXAMPLE, *PNG, "--k", 3, "--samples", 150, "--json")
    rows = json.loads(result.stdout)["rows"]
    values = [r for r in rows if r["metric"] == "eigenvalue"]
    assert [r["index"] for r in values] == [1, 2, 3]
    assert all(r["converged"] and r["residual"] >= 0 for r in values)
    assert values[0]["value"] >= values[1]["value"] >= values[2]["value"]
    ratio = next(r for r in rows if r["metric"] == "eigenvalue_ratio")
    assert ratio["value"] == pytest.approx(values[0]["value"] / values[2]["value"])


def test_a_repeated_question_computes_and_draws_nothing(trained, monkeypatch):
    monkeypatch.setattr(files, "commit", lambda: "1a2b")
    question = ("spectrum", trained, "--k", 2, "--json")

    def times():
        files = (trained / "diagnostics").rglob("spectrum-*")
        return {p: p.stat().st_mtime_ns for p in files if p.is_file()}

    first = run(*question)
    before = times()
    assert run(*question).stdout == first.stdout and times() == before
    picture = last(run("spectrum", trained, "--k", 2))
    content = picture.read_bytes()
    picture.write_bytes(content[:-1])  # damaged: drawn again
    assert last(run("spectrum", trained, "--k", 2)).read_bytes() == content
    run(*question, "--format", "svg")
    assert picture.with_suffix(".svg").is_file()
    before, tables = times(), len(list(trained.rglob("*.parquet")))
    monkeypatch.setattr(diagnosis, "sources", lambda: "edited")  # may compute and draw otherwise
    run(*question, "--format", "svg")
    assert times() != before and len(list(trained.rglob("*.parquet"))) == tables + 1


def test_a_renamed_run_has_an_answer_under_its_new_name(trained, tmp_path):
    folder = Path(shutil.copytree(trained, tmp_path / "before"))
    run("forgetting", folder, *PNG)
    picture = last(run("forgetting", folder.rename(tmp_path / "after"), *PNG))
    assert set(pd.read_csv(picture.with_suffix(".csv"), usecols=["run"])["run"]) == {"after"}


@pytest.mark.slow
def test_what_a_repeated_question_needs_is_imported_and_no_more(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "commit", lambda: "1a2b")
    code = (
        "import sys, fldiag.cli; from fldiag.results import files; files.commit = lambda: '1a2b'; "
        "fldiag.cli.app(sys.argv[1:], standalone_mode=False); "
        "print({'plotly', 'seaborn', 'matplotlib', 'scipy', 'sklearn', 'torchvision', 'fldiag.config'} & set(sys.modules))"
    )
    for words in (
        ("landscape", EXAMPLE, *PNG, "--samples", 50),
        ("forgetting", trained, *PNG),
    ):
        words = [*map(str, words), "--out", str(tmp_path)]
        answer = run(*words).stdout
        again = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT
        )
        assert again.stdout == f"{answer}set()\n", again


def test_a_diagnostic_of_ones_own_is_asked_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own_norm.py").write_text(
        "from fldiag.results.table import table\n\n\n"
        "def norm(problem, *, scale: float = 1.0):\n"
        '    """The norm of the weights."""\n'
        "    row = {'metric': 'norm', 'value': scale * float(problem.w.norm())}\n"
        "    return table([row], **problem.common)\n",
        "utf-8",
    )
    plain, scaled = (
        json.loads(run("diagnose", "own_norm:norm", EXAMPLE, "--json", *more).stdout)["rows"]
        for more in ((), ("--set", "scale=2"))
    )
    assert scaled[0]["value"] == pytest.approx(2 * plain[0]["value"])
    assert "own_norm has no function" in run("diagnose", "own_norm:no", EXAMPLE, code=2).stderr


@pytest.mark.slow
def test_partition_picture_and_counts(trained):
    result = run("partition", "digits", "--set", "partition.kind=sharding")
    rows = pd.read_csv(last(result).with_name(last(result).name.removesuffix(".png") + ".csv"))
    counts = rows[rows["metric"] == "count"]
    assert counts["value"].sum() == 1500
    assert (counts[counts["value"] > 0].groupby("client").size() <= 2).all()
    assert last(run("partition", trained)).parent == trained / "diagnostics"


@pytest.mark.parametrize(
    ("what", "name"),
    [
        *(("methods", "fedsol"), ("models", "mlp"), ("datasets", "digits")),
        *(("diagnostics", "spectrum"), ("presets", "digits")),
    ],
)
def test_lists_name_what_is_registered(what, name):
    rows = json.loads(run("list", what, "--json").stdout)["rows"]
    assert name in {row["name"] for row in rows}


def test_explain_gives_equations_options_and_source():
    text = run("explain", "fedsol").stdout
    parts = (
        "Lambda",
        "rho",
        "CVPR 2024",
        "number from 0 ",
        "full, body, head",
        "equals: fedavg",
    )
    assert all(part in text for part in parts)
    assert "several: number from 0 " in run("explain", "drift").stdout
    # also of a diagnostic with flags, which have names too
    assert json.loads(run("explain", "spectrum", "--json").stdout)["name"] == "spectrum"


@pytest.mark.slow
def test_every_method_model_and_diagnostic_can_be_explained():
    for summaries in map(fldiag.catalogue, ("methods", "models", "datasets", "diagnostics")):
        for name, summary in summaries.items():
            sentence, _, read = summary.partition(" [of its sources read: ")
            text = run("explain", name).stdout
            assert sentence and sentence in text and read.rstrip("]") in text, name


@pytest.mark.slow
def test_the_method_of_the_readme_is_complete(tmp_path):
    """The example file of the README, as a package with an entry point, trains and meets its own neutral setting."""
    source = re.search(
        r"```python\n(# steady\.py.*?)```", (ROOT / "README.md").read_text(), re.S
    ).group(1)
    (tmp_path / "steady.py").write_text(source)
    info = tmp_path / "steady-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: steady\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fldiag.methods]\nsteady = steady\n")
    code = (
        "from fldiag import config; from fldiag.training import train; import torch\n"
        "w = {}\n"
        "for m in ('fedavg', 'steady', 'steady0'):\n"
        "    o = {'rounds': 1, 'model__name': 'mlp', 'method__name': m.rstrip('0')} | ({'method__force': 0.0} if m == 'steady0' else {})\n"
        "    w[m] = torch.cat([v.flatten() for v in train.train(config.Config.load('digits', **o), out=m).checkpoint().state.values()])\n"
        "assert torch.equal(w['fedavg'], w['steady0']) and not torch.equal(w['fedavg'], w['steady'])\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_entry_is_a_dash_and_null(capsys):
    for machine in (False, True):
        console = Console(machine)
        console.table([{"a": pd.NA, "b": 1.5}], {"a": "a", "b": "b"})
        console.done(Path("x"))
        out = capsys.readouterr().out
        assert json.loads(out)["rows"] == [{"a": None, "b": 1.5}] if machine else "–" in out
