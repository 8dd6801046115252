"""Verbs of other packages: found by their entry points, listed beside fldiag's own, and unable to harm them."""

import re
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer
from commands import invoke as run

from fldiag import known, plugins
from fldiag.errors import FldiagError

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "extend.md"
GREETING = re.search(r"```python\n(# greeting\.py.*?)```", PAGE.read_text("utf-8"), re.S).group(1)
SEVERAL = """
import typer
several = typer.Typer(no_args_is_help=True, help="Two of them.")
@several.command()
def one():
    "The first."
    print("one")
@several.command()
def two():
    "The second."
"""
LIST = "def herbs():\n    return {'sage': 'grey', 'mint': 'green'}\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package with modules and entry points, as pip does."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    names = []

    def package(points, folder=site, **modules):
        about = folder / f"herbarium_{len(names)}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: herbarium-{len(names)}\nVersion: 1.0\n"
        )
        (about / "entry_points.txt").write_text(points)
        for name, source in modules.items():
            (folder / f"{name}.py").write_text(source)
            names.append(name)
        plugins._entry_points.cache_clear()

    yield package
    plugins._entry_points.cache_clear()
    for name in names:
        sys.modules.pop(name, None)


def test_a_verb_of_another_package_runs_and_is_listed(install):
    install("[fldiag.verbs]\ngreet = greeting:greet\n", greeting=GREETING)
    assert run("greet", "Ada", "--loud").output == "HELLO ADA\n"
    assert "Greet somebody." in run("--help").output
    assert all(text in run("greet", "-h").output for text in ("--loud", "In capitals."))
    assert run("greet").exit_code == 2


def test_several_commands_under_one_verb(install):
    install("[fldiag.verbs]\nherb = several:several\n", several=SEVERAL)
    assert run("herb", "one").output == "one\n"
    text = run("herb", "-h").output
    assert "Two of them." in run("--help").output and "The second." in text
    assert "completion" not in text


@pytest.mark.parametrize(
    ("source", "group"),
    [
        ("app = typer.Typer(rich_help_panel='Compare')\n@app.command()\n", "Compare"),
        ("app = typer.Typer()\n@app.command(rich_help_panel='Compare')\n", "Compare"),
        ("app = typer.Typer()\n@app.command()\n", "Other packages"),
    ],
)
def test_a_verb_says_its_group_of_the_help(install, source, group):
    function = "def herb():\n    'All herbs.'\n"
    install("[fldiag.verbs]\nherb = herb:app\n", herb=f"import typer\n{source}{function}")
    page = run("--help").output
    assert re.findall(r"╭─ ([\w ]+) ─", page[: page.index("All herbs.")])[-1] == group


def test_it_replaces_no_verb_of_fldiag(install):
    install(
        "[fldiag.verbs]\ntrain = hostile:train\nspectrum = hostile:train\ntrace = hostile:train\n",
        hostile="raise RuntimeError('imported')",
    )
    for name in ("train", "spectrum"):
        assert "imported" not in run(name, "--help").output
    assert "spectrum --trace" in run("trace").output
    assert "hostile" not in sys.modules


@pytest.mark.parametrize(
    "source, why",
    [
        ("import nothing_of_that_name", "nothing_of_that_name"),
        ("raise SyntaxError('wrong')", "wrong"),
        ("raise SystemExit(5)", "SystemExit: 5"),
        ("broken = 3", "cannot be used"),
        ("", "broken"),
    ],
)
def test_a_broken_one_is_one_message_and_stops_nothing_else(install, source, why):
    install("[fldiag.verbs]\nbroken = bad:broken\n", bad=source)
    install("[fldiag.verbs]\ngreet = greeting:greet\n", greeting=GREETING)
    failed = run("broken", "x", "--y")
    assert failed.exit_code == 1 and "Traceback" not in failed.output
    assert failed.output.count("error:") == 1 and why in failed.output
    assert "fix or remove that package" in failed.output and "herbarium-0" in failed.output
    page = run("--help")
    assert page.exit_code == 0 and "Greet somebody." in page.output and "broken" in page.output
    assert run("greet", "Ada").output == "hello Ada\n"
    assert run("list", "presets").exit_code == 0


def test_ctrl_c_in_one_is_one_line(install):
    source = "def wait():\n    raise KeyboardInterrupt\n"
    install("[fldiag.verbs]\nwait = waiting:wait\n", waiting=source)
    stopped = run("wait")
    assert (stopped.exit_code, stopped.output) == (1, "error: stopped\n")


def test_what_lies_in_the_current_folder_is_not_imported(install, tmp_path, monkeypatch):
    folder = tmp_path / "archive"
    folder.mkdir()
    points = "[fldiag.verbs]\ngreet = greeting:greet\n[fldiag.lists]\nherbs = greeting:herbs\n"
    install(points, folder, greeting=GREETING)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for path in ("", str(folder)):  # python -c and python -m
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [path, *sys.path])
            assert "greet" in {p.name for p in entry_points(group="fldiag.verbs")}, "it is found"
            assert "greet" not in run("--help").output and run("greet", "Ada").exit_code == 2
            assert "herbs" not in known.kinds()
            patch.setenv("PYTHONPATH", str(folder))
            assert "Greet somebody." in run("--help").output, "where its folder is named"
            sys.modules.pop("greeting", None)


def test_a_list_of_another_package(install):
    install("[fldiag.lists]\nherbs = lists:herbs\n", lists=LIST)
    assert known.names("herbs") == {"mint": "green", "sage": "grey"}
    assert "grey" in run("list", "herbs").output and "grey" in run("list").output
    install("[fldiag.lists]\nweeds = weeds:weeds\n", weeds="raise RuntimeError('no weeds')")
    with pytest.raises(FldiagError, match="no weeds"):
        known.names("weeds")
    everything = run("list")
    assert everything.exit_code == 0 and "grey" in everything.output


def test_the_papers_package_is_one_of_them():
    points = {p.name: p for p in plugins.entry_points("fldiag.verbs")}
    assert isinstance(plugins.load(points["toy"], "verb"), typer.Typer)
    assert "fedsol/fig6" in known.names("figures")
