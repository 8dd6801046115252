"""What a release says of itself is the same everywhere."""

import json
import re
import tomllib
from pathlib import Path

import yaml
from inventory import INTERNAL

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_version_date_licence_and_authors():
    heading = next(line for line in CHANGELOG.splitlines() if line.startswith("## "))
    assert heading == f"## {CITATION['version']} ({CITATION['date-released']})"
    assert PROJECT["version"] == CITATION["version"]
    assert PROJECT["license"] == CITATION["license"]
    assert PROJECT["authors"][0]["name"].lower() == CITATION["authors"][0]["name"].lower()
    assert PROJECT["keywords"] == CITATION["keywords"]


def test_the_changelog_is_short():
    assert len(CHANGELOG.encode()) <= 8192


def test_the_workflow_uses_what_the_makefile_has():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    targets = {run.split()[1] for run in steps if run.startswith("make ")}
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert targets == {"lint", "test", "test-oldest", "docs", "wheel"}
    assert all(f"\n{target}:" in makefile for target in targets)
    assert json.dumps(workflow["jobs"]["tests"]["strategy"]["matrix"]).count('"') == 12


def test_the_page_of_the_python_names_shows_what_is_public():
    page = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")
    for name in ("Problem", "Recorder", "Run", "History"):
        options = re.search(rf"autoclass:: {name}\n((?:   :.*\n)+)", page)[1]
        excluded = re.search(r":exclude-members: (.*)", options)[1]
        assert set(excluded.split(", ")) == INTERNAL[name]
