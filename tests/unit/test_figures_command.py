"""Every picture of a paper's figure says the command that makes it again."""

import json
import shlex
from pathlib import Path

import pytest
import typer
from commands import commands

from fldiag.config import Config
from fldiag_papers import plan, reported
from fldiag_papers.caption import command
from fldiag_papers.scales import scale

FIGURES = Path(__file__).parents[2] / "figures"


def studies_on_disk():
    """The json files that name a study and a scale."""
    files = {file: json.loads(file.read_text("utf-8")) for file in FIGURES.rglob("*.json")}
    return {f: about for f, about in files.items() if {"id", "scale", "seeds"} <= about.keys()}


@pytest.mark.parametrize(
    "file", sorted(studies_on_disk()), ids=lambda file: file.relative_to(FIGURES).as_posix()
)
def test_the_command_in_a_json_makes_what_it_describes(file):
    about = json.loads(file.read_text("utf-8"))
    program, verb, *words = shlex.split(about["command"])
    assert (program, verb) == ("fldiag", "figures")
    figures = commands().get_command(typer.Context(commands()), "figures")
    options = figures.make_context("figures", words).params
    assert list(options["ids"]) == [f"{about['paper']}/{about['id']}"]
    assert options["scale"] == about["scale"]
    (study,) = reported.select(list(options["ids"]))
    configs = [Config(**run["config"]) for run in about["runs"].values() if "config" in run]
    is_trained = plan.only(options["only"] or [], configs)
    assert all(map(is_trained, configs)), "it trains all runs that are shown"
    seeds = scale(options["scale"]).seed_list(study.seeds)
    chosen = dict(choice.split("=") for choice in options["only"] or ())
    if "seed" in chosen:
        seeds = [seed for seed in seeds if str(seed) in chosen["seed"].split(",")]
    if configs or study.alone:
        assert seeds == about["seeds"]
    assert command(about) == about["command"]
