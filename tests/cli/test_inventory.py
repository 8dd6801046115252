"""No verb and no option of the command line is lost: all that were there on 22 November 2026 still are.

``tests/fixtures/cli_options.json`` is what ``inventory`` found then; a verb or an option may join, an option may get a further
name. Written by ``json.dumps(inventory(app), indent=1)``; a new option is added to it by hand, when it is meant to stay.
"""

import json
from pathlib import Path

import pytest
import typer

from fldiag.cli import app

RECORDED = json.loads((Path(__file__).parents[1] / "fixtures" / "cli_options.json").read_text())
VERBS = sorted(RECORDED)
#: What a value may be instead without refusing what was accepted: a choice is a text that is checked sooner.
ALSO = {"integer": {"float", "text"}, "text": {"choice", "path"}, "path": {"text"}, "boolean": set(), "float": {"text"}}


def inventory(root):
    """"verb" or "verb sub-verb" -> its parameters; "" are the options before any verb."""
    found = {}
    pending = [("", typer.main.get_command(root))]
    while pending:
        path, command = pending.pop(0)
        found[path] = [described(p) for p in command.params]
        if hasattr(command, "list_commands"):  # also a group that finds its verbs only when asked
            context = typer.Context(command)
            pending += [(f"{path} {name}".strip(), command.get_command(context, name)) for name in command.list_commands(context)]
    return dict(sorted(found.items()))


def described(parameter):
    default = parameter.default
    return {"kind": parameter.param_type_name, "names": list(parameter.opts), "off": list(parameter.secondary_opts),
            "default": default if isinstance(default, (str, int, float, bool, type(None))) else
            list(map(str, default)) if isinstance(default, (tuple, list)) else str(default),
            "type": parameter.type.name, "flag": bool(getattr(parameter, "is_flag", False)),
            "multiple": bool(getattr(parameter, "multiple", False)), "nargs": parameter.nargs, "required": bool(parameter.required)}


NOW = inventory(app)


def of_kind(parameters, kind):
    return [p for p in parameters if p["kind"] == kind]


def same_values(now, then):
    """What was typed yesterday is understood, and what was not typed means the same."""
    assert now["type"] in {then["type"], *ALSO.get(then["type"], set())}
    assert all(now[what] == then[what] for what in ("flag", "multiple"))
    assert now["nargs"] in (then["nargs"], *([-1] if then["kind"] == "argument" else []))  # several where one was accepted
    if then["names"] == ["--seed"]:  # not given, it was 0 all along
        return
    assert (now["default"] or None) == (then["default"] or None) if then["multiple"] else now["default"] == then["default"]
    assert then["required"] or not now["required"]


def test_the_inventory_sees_the_verbs():
    assert {"train", "spectrum", "matching", "report", "toy", "toy plane", "toy iris"} <= set(RECORDED)
    assert sum(map(len, RECORDED.values())) > 150
    assert {"--set"} <= {n for p in RECORDED["train"] for n in p["names"]}


@pytest.mark.parametrize("verb", VERBS, ids=lambda v: v or "fldiag")
def test_no_option_is_lost(verb):
    assert verb in NOW, f"fldiag {verb} is gone"
    there = {name: p for p in of_kind(NOW[verb], "option") for name in (*p["names"], *p["off"])}
    for then in of_kind(RECORDED[verb], "option"):
        lost = [name for name in (*then["names"], *then["off"]) if name not in there]
        assert not lost, f"fldiag {verb} has no {lost}"
        now = there[then["names"][0]]
        assert set(then["names"]) <= set(now["names"]) and set(then["off"]) <= set(now["off"])
        same_values(now, then)


@pytest.mark.parametrize("verb", VERBS, ids=lambda v: v or "fldiag")
def test_arguments_stand_where_they_stood(verb):
    now, then = (of_kind(parameters[verb], "argument") for parameters in (NOW, RECORDED))
    assert len(now) >= len(then)
    for one, other in zip(now, then, strict=False):
        same_values(one, other)
    assert not any(p["required"] for p in now[len(then):])
