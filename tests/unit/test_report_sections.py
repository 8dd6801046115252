"""Sections that diagnostics declare, those made for them, and which tables are found for them: also of other packages."""

import base64
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import reports

from fldiag import registry
from fldiag.diagnosis.answer import answer
from fldiag.diagnostics.forgetting.section import _clients as clients_of
from fldiag.plotting import style
from fldiag.plotting.sections import Figure, Group, Section, Table, lines
from fldiag.report import build
from fldiag.report.collect import collect
from fldiag.results.summary import Note, Say, Small
from fldiag.runs.run import Run

FORMAT1 = Path(__file__).parents[1] / "fixtures" / "format1"


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
    before = dict(registry.diagnostic._entries)

    def added(name, **declared):
        def bumps(
            problem, progress=None, *, exponent: int = 2, shape: str = "round"
        ) -> pd.DataFrame:
            """How many bumps there are.

            More about bumps."""

        return registry.diagnostic(name, **declared)(bumps)

    yield added
    registry.diagnostic._entries.clear()
    registry.diagnostic._entries.update(before)


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


def pictures(text):
    return [
        base64.b64decode(p)
        for p in re.findall(r'<img[^>]* src="data:image/png;base64,([^"]*)"', text)
    ]


# -- diagnostics without a section


def test_without_a_section_it_shows_its_summary_and_its_picture(tmp_path, add):
    add(
        "bumps",
        draw=draw,
        summary=summary,
        more={"-again": draw, ".html": lambda table: "<p>a page", "-none": lambda table: None},
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
        "checkpoint 0",
        "0.25",
        "yes",
        "–",
    ]
    assert "exponent 3, shape round" in shown, (
        "options of the table, with the defaults of the others"
    )
    assert "&lt;b&gt;two&lt;/b&gt; bumps" in shown and "<b>two" not in shown
    first, again = pictures(shown)
    assert 'width="320"' in shown
    assert first == again == style.png(draw(pd.DataFrame({"value": [0, 0.125, 0.25]})))
    assert first.startswith(b"\x89PNG") and "img-src data:" in re.search(
        'Content-Security-Policy" content="([^"]*)"', text
    ).group(1)
    assert f"<code>fldiag bumps {b.path}</code>" in shown and "not computed yet" in shown
    assert reports.sha(a, 3) in shown, "where it comes from"


def test_without_summary_its_rows_are_shown(tmp_path, add):
    add("bumps")
    made = reports.run(tmp_path / "a")
    bumps(made)
    shown = part(page(collect([made.path]), tmp_path), "bumps")
    assert '<th scope="col">metric</th>' in shown and "0.125" in shown and not pictures(shown)


def test_a_table_of_two_runs_is_shown_once_and_of_others_only_what_is_theirs(tmp_path, add):
    add("bumps", summary=summary, draw=draw)
    a, b = reports.run(tmp_path / "a"), reports.run(tmp_path / "b", "fedsol")
    bumps([a, b], labels=["of a", "of b"], folder=tmp_path / "fldiag-out")
    both = part(page(collect([a.path, b.path]), tmp_path), "bumps")
    assert (
        both.count("<h3>a, b</h3>") == 1
        and "of a" in both
        and "of b" in both
        and len(pictures(both)) == 1
    )
    alone = part(page(collect([b.path]), tmp_path), "bumps")
    assert ">of b<" in alone and ">of a<" not in alone


def test_nothing_is_shown_where_no_run_has_a_table(tmp_path, add):
    add("bumps", summary=summary, draw=draw)
    found = collect([reports.run(tmp_path / "a").path])
    assert [s.id for _, part in build.sections() for s in part(found)] == [
        "glance",
        "runs",
        "curves",
        "doctor",
        "landscapes",
        "curvature",
        "forgetting",
        "drift",
        "matching",
        "account",
        "personal",
        "steps",
    ]


def test_variants_stand_beside_each_other(tmp_path, add):
    add(
        "bumps",
        summary=summary,
        draw=draw,
        variant=lambda options: None if options["shape"] == "flat" else options["shape"],
    )
    made = reports.run(tmp_path / "a")
    for i, shape in enumerate(("round", "sharp", "flat")):
        bumps(made, name=f"bumps-{i}", shape=shape)
    shown = part(page(collect([made.path]), tmp_path), "bumps")
    assert (
        re.findall("<h3>(.*?)</h3>", shown) == ["a, round", "a, sharp"] and "shape sharp" in shown
    )


def test_what_fails_is_said_and_spoils_nothing_else(tmp_path, add):
    def fails(*_):
        raise ValueError("<i>no</i>")

    add("bumps", draw=fails, summary=fails)
    add("dents", section=fails)
    made = reports.run(tmp_path / "a")
    bumps(made)
    text = page(collect([made.path]), tmp_path)
    shown = part(text, "bumps")
    assert "is not drawn: ValueError &lt;i&gt;no&lt;/i&gt;" in shown and "is not summed up" in shown
    assert "could not be made: ValueError" in part(text, "dents") and 'id="steps"' in text


# -- declared sections


def test_a_declared_section_is_shown_at_its_place(tmp_path, add):
    def section(found):
        drawn = [
            {
                "name": m.label,
                "run": m.place,
                "look": m.place,
                "x": [0],
                "y": [float(s.frame["value"].max())],
            }
            for m, s in found.having("bumps")
        ]
        return Section(
            "my bumps",
            "All bumps",
            "Side by side.",
            [Group([Figure("Bumps", lines(drawn, "bumps"))])],
            [Table("Highest", ("Run",), [[m.label] for m in found.members])],
            sources=[s.place for _, s in found.having("bumps")],
        )

    add("bumps", draw=draw, summary=summary, section=section, order=35)
    made = reports.run(tmp_path / "a")
    bumps(made)
    text = page(collect([made.path]), tmp_path)
    marks = re.findall(r'<section id="([^"]*)"', text)
    assert marks[marks.index("forgetting") : marks.index("drift") + 1] == [
        "forgetting",
        "my-bumps",
        "drift",
    ]
    shown = part(text, "my-bumps")
    assert (
        "All bumps" in shown
        and 'class="plot lines"' in shown
        and "Highest" in shown
        and "exponent 3" not in re.sub("<details.*", "", shown, flags=re.DOTALL)
        and not pictures(shown)
    )
    assert 'href="#my-bumps"' in text


def test_sections_of_one_mark_are_told_apart(tmp_path, add):
    for name in ("bumps", "dents"):
        add(name, section=lambda found: Section("runs", "Mine", ""))
    add("sources", section=lambda found: Section("sources", "Mine", ""))
    marks = re.findall(
        r'<section id="([^"]*)"', page(collect([reports.run(tmp_path / "a").path]), tmp_path)
    )
    assert (
        len(marks) == len(set(marks)) and marks[:2] == ["glance", "runs"] and marks[-1] == "sources"
    )


def test_the_built_in_sections_are_declared(tmp_path):
    """And none of them fails, or it would say so."""
    found = collect([reports.everything(reports.run(tmp_path / "a", steps=2)).path])
    names = [e.name for e in registry.diagnostics() if e.section is not None]
    assert names == [
        "doctor",
        "landscape",
        "spectrum",
        "forgetting",
        "drift",
        "matching",
        "account",
        "personalise",
    ]
    assert "could not be made" not in page(found, tmp_path)


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
    """A run of the first format with a table of every built-in diagnostic, as today's code writes them."""
    path = tmp_path_factory.mktemp("asked") / "fedsol"
    shutil.copytree(FORMAT1 / "fedsol", path)
    run, small = Run.open(path), {"samples": 40}
    for name, options in (
        ("landscape", {"points": 3, **small}),
        ("landscape", {"points": 3, "directions": "random", **small}),
        ("profile", {"points": 5, "directions": "random", **small}),
        ("landscape", {"directions": "clients", "points": 3, **small}),
        ("spectrum", {"k": 2, "density": True, **small}),
        ("spectrum", {"matrix": "ggn", "k": 1, **small}),
        ("trace", small),
        ("diagonal", small),
        ("forgetting", {"why": True, "k": 1}),
        ("drift", {"propositions": False}),
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
        "landscape:eigen",
        "landscape:random",
        "profile:random",
        "profile:through",
        "spectrum",
        "density",
        "trace",
        "diagonal",
        "forgetting",
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
    assert len(found.notes) == 1 and "run.json has no digest" in found.notes[0]
    text = page(found, tmp_path)
    for name, count in (("trace", 1), ("diagonal", 1), ("density", 1), ("profile", 2)):
        shown = part(text, name)
        assert len(pictures(shown)) == count, name
        assert ("<table>" in shown) == (name != "density") and "is not" not in shown
    assert "could not be made" not in text


def test_many_clients_are_shown_by_percentiles():
    few, many = (
        clients_of(SimpleNamespace(label="A"), pd.DataFrame(reports.forgetting(clients=range(n))))
        for n in (3, 200)
    )
    assert [row[0] for row in few] == ["0", "1", "2"] and few[0][1:4] == ["A", "2", "2"]
    assert [row[0] for row in many][::5] == ["smallest", "median", "largest"] and len(many) == 11
    column = [
        float(row[7].split()[0].replace("×10³", "e3")) for row in many
    ]  # what is forgotten: it grows with the client's number
    assert (
        column == sorted(column)
        and column[0] == pytest.approx(5)
        and column[10] == pytest.approx(100 * (0.05 + 199 / 10), rel=1e-2)
    )
