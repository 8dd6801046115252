"""``fldiag report`` as a user types it, on tables that the other verbs wrote."""

import html
import json
import re
import shlex
from pathlib import Path

import pytest
from commands import run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "my run"
    run(
        "train",
        "digits",
        "--set",
        "rounds=2",
        "--set",
        "model.name=mlp",
        "--set",
        "checkpoint.clients=sampled",
        "--set",
        "clients.per_round=3",
        "--set",
        "metrics.steps=true",
        "--out",
        folder,
    )
    return folder


@pytest.mark.slow
def test_the_commands_that_a_report_names_fill_it(trained):
    """What is missing is made by typing what the report says, until nothing is missing."""
    first = json.loads(run("report", trained, "--json").stdout)
    assert first["paths"][-1] == str(trained / "diagnostics" / "report-my-run.html")
    assert first["rows"][0]["missing"] == "spectrum, drift, forgetting"
    assert first["bytes"] == Path(first["paths"][-1]).stat().st_size
    page = Path(first["paths"][-1]).read_text("utf-8")
    commands = [
        *re.findall(r"<code>(.*?)</code>", page),
        *re.findall(r'"Command">(fldiag .*?)</td>', page),
    ]
    verbs = {shlex.split(html.unescape(text))[1] for text in commands}
    assert verbs >= {"report", "doctor", "drift", "forgetting", "landscape", "matching", "spectrum"}
    for text in commands:
        program, verb, *arguments = shlex.split(html.unescape(text))
        assert program == "fldiag"
        if verb in ("report", "doctor", "landscape", "matching"):
            run(
                verb,
                *arguments,
                *(["--points", 5, "--samples", 200] if verb == "landscape" else []),
            )
    second = json.loads(run("report", trained, "--json").stdout)
    assert second["rows"][0]["missing"] == ""
    page = Path(second["paths"][-1]).read_text("utf-8")
    assert not re.findall(r"<code>(.*?)</code>", page)
    assert {*re.findall(r'class="plot (\w+)"', page)} == {"lines", "scene", "map"}
    assert page.count("<img ") >= 5
    row = second["rows"][0]
    assert (
        row["lambda_1"] > 0
        and row["drift"] > 0
        and 0 < row["accuracy"] < 1
        and row["drop"] is not None
    )


@pytest.mark.slow
def test_compute_makes_the_cheap_tables_first(trained, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(trained, copy, ignore=shutil.ignore_patterns("diagnostics"))
    result = run("report", copy, "--compute", "--out", tmp_path / "o")
    assert list((copy / "diagnostics").glob("forgetting-*.csv")) and list(
        (copy / "diagnostics").glob("drift-*.csv")
    )
    path = result.stdout.strip().splitlines()[-1]
    assert path == str(tmp_path / "o" / "report-copy.html")
    assert "--compute" not in Path(path).read_text("utf-8")


def test_several_runs_go_to_one_file_here(trained, tmp_path):
    run(
        "train",
        "digits",
        "--set",
        "rounds=1",
        "--set",
        "model.name=mlp",
        "--set",
        "method.name=fedsol",
        "--set",
        "checkpoint.clients=none",
        "--out",
        tmp_path / "b",
    )
    result = run("report", trained, tmp_path / "b", "--title", "Both")
    path = Path(result.stdout.strip().splitlines()[-1])
    assert path == Path(
        "fldiag-out"
    ) / "report-my-run-b.html" and "<title>Both</title>" in path.read_text("utf-8")
    assert "different numbers of rounds" in result.stderr
    assert "checkpoint.clients=sampled" in path.read_text("utf-8")


@pytest.mark.slow
def test_compute_says_what_it_cannot_make(tmp_path):
    run(
        "train",
        "digits",
        "--set",
        "rounds=1",
        "--set",
        "model.name=mlp",
        "--set",
        "checkpoint.clients=none",
        "--out",
        tmp_path / "b",
    )
    result = run("report", tmp_path / "b", "--compute")
    assert (
        "no forgetting" in result.stderr and Path(result.stdout.strip().splitlines()[-1]).is_file()
    )
