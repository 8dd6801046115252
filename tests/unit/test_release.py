"""What a release says of itself is the same everywhere."""

import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_version_date_licence_and_authors():
    headings = [line for line in CHANGELOG.splitlines() if line.startswith("## ")]
    heading = next(line for line in headings if line != "## Unreleased")
    assert heading == f"## {CITATION['version']} ({CITATION['date-released']})"
    assert PROJECT["version"] == CITATION["version"]
    assert PROJECT["license"] == CITATION["license"]
    assert PROJECT["authors"][0]["name"].lower() == CITATION["authors"][0]["name"].lower()
    assert PROJECT["keywords"] == CITATION["keywords"]
