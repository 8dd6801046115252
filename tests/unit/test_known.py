"""The catalogue file says what the registry says, and whoever only asks what there is imports no PyTorch."""

import json
import subprocess
import sys
from importlib import resources

import pytest

import fldiag
from fldiag import known, registry, write_catalogue
from fldiag.errors import FldiagError

SCRIPT = """
import json, sys
from typer.testing import CliRunner
from fldiag.cli import app
for arguments in json.loads(sys.argv[1]):
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, (arguments, found.output)
    assert "torch" not in sys.modules, arguments
"""


def test_the_file_is_what_the_registry_says():
    file = json.loads(resources.files("fldiag").joinpath(known.FILE).read_text())
    assert file == json.loads(write_catalogue.text()), "run: python -m fldiag.write_catalogue"


@pytest.mark.slow
def test_asking_what_there_is_imports_no_torch():
    found = known.built_in()
    names = [name for kind in known.KINDS for name in found[kind]]
    asked = [
        ["--help"],
        ["-h"],
        ["--version"],
        *(["list", kind] for kind in known.kinds()),
        *(["explain", name] for name in names),
        *(
            [verb, "--help"]
            for verb in (
                *(n for n in found["diagnostics"] if n not in known.FLAGS),
                "train",
                "demo",
                "report",
                "figures",
                "convert",
                "partition",
                "diagnose",
                "list",
                "explain",
            )
        ),
        ["toy", "plane", "--help"],
        ["toy", "iris", "--help"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(asked)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_this_process_registers_is_there_too(monkeypatch):
    assert "bumps" not in known.names("diagnostics") and registry.diagnostic.names()
    monkeypatch.setattr(registry.diagnostic, "_entries", dict(registry.diagnostic._entries))

    @registry.diagnostic("bumps")
    def bumps(problem, progress=None, *, height: int = 2):
        """How many bumps."""

    assert fldiag.catalogue("diagnostics")["bumps"] == "How many bumps."
    assert known.item("diagnostics", "bumps")["options"][0]["name"] == "height"


@pytest.mark.parametrize(
    "annotation, kind, words",
    [
        (int, "int", "int"),
        (float | None, "float", "float | none"),
        (tuple[float, ...], "list[float]", "list of float"),
        (dict, "python", "dict"),
        (int | str, "python", "int | str"),
    ],
)
def test_types_in_words(annotation, kind, words):
    assert known.typed(annotation) == kind and known.values(annotation) == words


def test_unknown_kinds_are_refused_with_the_nearest():
    with pytest.raises(FldiagError, match="did you mean 'methods'"):
        known.names("method")


def test_every_option_of_a_diagnostic_says_what_it_is():
    silent = [
        f"{name}.{o['name']}"
        for name, item in known.built_in()["diagnostics"].items()
        for o in item["options"]
        if not o["help"] and o["type"] != "python"
    ]
    assert not silent
