"""Sections that diagnostics declare, those made for them, and which tables are found for them: also of other packages."""

import json
import re

import pandas as pd
import pytest
import reports

from fldiag import registry
from fldiag.config import Config
from fldiag.diagnosis.answer import answer
from fldiag.plotting import style
from fldiag.plotting.pages import Section
from fldiag.report import build
from fldiag.report.collect import collect
from fldiag.results.summary import Note, Say, Small
from fldiag.training import train


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def draw(table):
    fig = style.figure(2.0, 1.5)
    fig.subplots().plot(table["value"].astype(float))
    return fig


def summary(table, options):
    yield Small(
        [
            {"run": run, "height": float(part["value"].max()), "sure": True, "of": None}
            for run, part in table.groupby("run")
        ],
        {"run": "checkpoint", "height": "highest", "sure": "sure", "of": "of"},
    )
    yield Say(f"exponent {options['exponent']}, shape {options['shape']}")
    yield Note("<b>two</b> bumps were left out")


@pytest.fixture
def add():
    """Registers made-up diagnostics, and takes them away again."""
    registry.diagnostic.names()
    before = dict(registry.diagnostic.entries)

    def added(name, **declared):
        def bumps(
            problem, progress=None, *, exponent: int = 2, shape: str = "round"
        ) -> pd.DataFrame:
            """How many bumps there are.

            More about bumps."""

        return registry.diagnostic(name, **declared)(bumps)

    yield added
    registry.diagnostic.entries.clear()
    registry.diagnostic.entries.update(before)


def bumps(made, **more):
    """A table as the made-up diagnostic's verb would leave it."""
    more = {"exponent": 3, "named": True, **more}
    return reports.of_checkpoints(
        made,
        "bumps",
        lambda label: [{"metric": "bump", "index": i, "value": i / 8} for i in range(3)],
        **more,
    )


def page(found, folder):
    return build.write(found, folder / "r.html").read_text("utf-8")


def part(text, mark):
    """A section, without its links and the buttons of its heads."""
    found = re.search(rf'<section id="{mark}".*?</section>', text, re.DOTALL).group()
    found = re.sub(r' <a class="link"[^>]*>#</a>|(?<=<h3) id="[^"]*"', "", found)
    return re.sub(r'<button type="button" class="sort"[^>]*>(.*?)</button>', r"\1", found)


def pictures(text, shown=None):
    """The images of a part of the page."""
    places = re.findall(r'data-picture="(\d+)"', text if shown is None else shown)
    return [
        reports.unpacked(re.search(f'id="packed-picture-{i}">(.*?)</script>', text).group(1))
        for i in places
    ]


# -- diagnostics without a section


def test_without_a_section_it_shows_its_summary_and_its_picture(tmp_path, add):
    add(
        "bumps",
        summary=summary,
        draw={
            "": draw,
            "-again": draw,
            ".html": lambda table: "<p>a page",
            "-none": lambda table: None,
        },
    )
    a, b = reports.run(tmp_path / "a"), reports.run(tmp_path / "b", "fedsol")
    bumps(a)
    text = page(collect([a.path, b.path]), tmp_path)
    shown = part(text, "bumps")
    assert (
        '<h2 id="bumps-title">Bumps</h2>' in shown
        and "How many bumps there are." in shown
        and "More about" not in shown
    )
    assert re.findall(r"<th scope=\"col\">(.*?)</th>", shown) == [
        "checkpoint",
        "highest",
        "sure",
        "of",
    ]
    assert re.findall(r"<t[hd] [^>]*>([^<]*)</t[hd]>", shown)[4:] == [
        "FedAvg, seed 0, round 3",
        "0.25",
        "yes",
        "–",
    ]
    assert "exponent 3, shape round" in shown, (
        "options of the table, with the defaults of the others"
    )
    assert "&lt;b&gt;two&lt;/b&gt; bumps" in shown and "<b>two" not in shown
    first, again = pictures(text, shown)
    assert 'width="260"' in shown
    assert first == again == style.image(draw(pd.DataFrame({"value": [0, 0.125, 0.25]})), "svg")
    assert b"<svg" in first and "img-src data:" in re.search(
        'Content-Security-Policy" content="([^"]*)"', text
    ).group(1)
    assert f"<code>fldiag bumps {b.path}</code>" in shown and "not computed yet" in shown
    assert reports.sha(a, 3) in shown, "where it comes from"


def test_without_summary_its_rows_are_shown(tmp_path, add):
    add("bumps")
    made = reports.run(tmp_path / "a")
    bumps(made)
    shown = part(page(collect([made.path]), tmp_path), "bumps")
    assert '<th scope="col">metric</th>' in shown and "0.125" in shown and "<img" not in shown


def test_a_table_of_two_runs_is_shown_once_and_of_others_only_what_is_theirs(tmp_path, add):
    add("bumps", summary=summary, draw=draw)
    a, b = reports.run(tmp_path / "a"), reports.run(tmp_path / "b", "fedsol")
    bumps([a, b], labels=["of a", "of b"], folder=tmp_path / "fldiag-out")
    both = part(page(collect([a.path, b.path]), tmp_path), "bumps")
    first, second = "FedAvg, seed 0, round 3", "FedSOL, seed 0, round 3"
    assert first in both and second in both and both.count("<img") == 1
    alone = part(page(collect([b.path]), tmp_path), "bumps")
    assert f">{second}<" in alone and first not in alone


def test_nothing_is_shown_where_no_run_has_a_table(tmp_path, add):
    add("bumps", summary=summary, draw=draw)
    found = collect([reports.run(tmp_path / "a").path])
    content = list(filter(None, (part(found) for part in build.sections().values())))
    assert [s.id for s in content] == ["glance", "runs", "curves", "absent"]
    assert any(row[0] == "bumps" for row in content[-1].tables[0].rows)


def test_a_note_names_its_run_once(tmp_path, add):
    def words(table, options):
        yield Say("mostly flat")
        yield Say(f"{table['run'].iloc[0]}: one bump")

    add("bumps", on="run", summary=words)
    made = [reports.run(tmp_path / "a"), reports.run(tmp_path / "b", "fedsol")]
    for run in made:
        reports.of_run(run, "bumps", [{"metric": "bump", "value": 1.0}])
    shown = part(page(collect([run.path for run in made]), tmp_path), "bumps")
    for label in ("FedAvg, seed 0", "FedSOL, seed 0"):
        assert f"{label}: mostly flat" in shown and f">{label}: one bump<" in shown


def test_tables_of_other_words_than_the_defaults_stand_beside_the_usual_one(tmp_path, add):
    add("bumps", summary=summary, draw=draw)
    made = reports.run(tmp_path / "a")
    for i, shape in enumerate(("round", "sharp")):
        bumps(made, name=f"bumps-{i}", shape=shape)
    shown = part(page(collect([made.path]), tmp_path), "bumps")
    assert (
        sorted(re.findall("<h3>(.*?)</h3>", shown)) == ["Sharp on train", "Train"]
        and "shape sharp" in shown
    )


def test_what_fails_is_said_and_spoils_nothing_else(tmp_path, add):
    def fails(*_):
        raise ValueError("<i>no</i>")

    add("bumps", draw=fails, summary=fails)
    made = reports.run(tmp_path / "a")
    bumps(made)
    text = page(collect([made.path]), tmp_path)
    shown = part(text, "bumps")
    assert "is not drawn: ValueError &lt;i&gt;no&lt;/i&gt;" in shown and "is not summed up" in shown
    assert 'id="absent"' in text


def test_sections_stand_by_what_they_say(tmp_path, add):
    """Alarms, numbers of the first table, then weights before runs."""
    names = [e.name for e in registry.diagnostics()]
    assert names[0] == "doctor" and names[1] == "spectrum"
    assert names.index("forgetting") < names.index("landscape") < names.index("matching")


def test_sections_of_one_mark_are_told_apart():
    content = [Section(name, "Mine", "") for name in ("my runs", "my-runs", "sources", "runs")]
    marks = [s.id for s in build.apart(content)]
    assert len(marks) == len(set(marks)) and marks[0] == "my-runs" and marks[3] == "runs"
    assert "sources" not in marks


# -- which tables are found


def test_a_table_of_a_diagnostic_that_is_not_here_is_named(tmp_path):
    made = reports.run(tmp_path / "a")
    bumps(made)
    assert collect([made.path]).notes == [
        "bumps-1.csv is not shown: no diagnostic 'bumps' is installed here."
    ]


def test_a_table_of_rounds_is_one_runs_and_one_of_checkpoints_everybodys(tmp_path, add):
    add("of_rounds", on="run")
    add("of_runs", on="runs")
    add("of_some", on="checkpoints")
    a, b = reports.run(tmp_path / "a"), reports.run(tmp_path / "b", "fedsol")
    rows = [{"metric": "bump", "value": 1.0}]
    reports.of_run(a, "of_rounds", rows, folder=tmp_path)
    for name in ("of_runs", "of_some"):
        reports.write(
            tmp_path / f"{name}-1",
            rows,
            {
                "diagnostic": name,
                "options": {},
                "checkpoints": {
                    r.path.name: {"file": "0003.pt", "sha256": reports.sha(r, 3)} for r in (a, b)
                },
            },
            run="both",
        )
    tables = [set(m.tables) - {"metrics"} for m in collect([a.path, b.path]).members]
    assert tables == [{"of_rounds", "of_runs", "of_some"}, {"of_runs", "of_some"}]


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A run with a table of every built-in diagnostic, as today's code writes them."""
    path = tmp_path_factory.mktemp("asked") / "fedsol"
    config = Config.load(
        "digits",
        rounds=2,
        method__name="fedsol",
        clients__total=4,
        clients__per_round=3,
        train__epochs=1,
        metrics__steps=True,
        checkpoint__clients="sampled",
    )
    run, small = train.train(config, out=path), {"samples": 40}
    for name, options in (
        ("landscape", {"points": 3, **small}),
        ("landscape", {"points": 3, "directions": "random", **small}),
        ("paths", {"points": 5, "directions": "random", **small}),
        ("spectrum", {"k": 2, "density": True, **small}),
        ("spectrum", {"matrix": "ggn", "k": 1, **small}),
        ("trace", small),
        ("diagonal", small),
        ("account", {"k": 1}),
        ("drift", {}),
        ("matching", {"k": 1, **small}),
    ):
        answer(name, [run], options, bar=SilentBar, tell=lambda text: None)
    return path


class SilentBar:
    """Shows no progress."""

    def __init__(self, title):
        pass

    def __enter__(self):
        return lambda done, total, text: None

    def __exit__(self, *_):
        return None


@pytest.mark.slow
def test_all_that_is_written_is_found_and_shown(asked, tmp_path):
    found = collect([asked])
    assert set(found.members[0].tables) >= {
        "metrics",
        "landscape",
        "landscape:random",
        "paths:random",
        "spectrum",
        "density",
        "trace",
        "diagonal",
        "account",
        "drift",
        "matching",
    }
    assert (
        json.loads(
            (asked / "diagnostics" / found.members[0].tables["spectrum"].name)
            .with_suffix(".json")
            .read_text()
        )["options"]["matrix"]
        == "hessian"
    )
    assert found.notes == []
    text = page(found, tmp_path)
    for name, count in (("trace", 1), ("diagonal", 1), ("density", 1), ("paths", 1)):
        shown = part(text, name)
        assert len(pictures(text, shown)) == count, name
        assert ("<table>" in shown) == (name != "density") and "is not" not in shown
    assert "could not be made" not in text


def test_where_a_model_and_data_are_makes_no_table_of_its_own():
    """A doctor that was told the model, and one that was not, are one section with one table."""
    for entry in registry.diagnostics():
        where = {"model": "mlp", "data": "digits", "root": "/data", "device": "cpu"}
        assert entry.variant(where) == "", entry.name
