"""The page itself: inert whatever its runs are called, complete, and what it packs is what was there."""

import base64
import hashlib
import json
import re
import time
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import reports

from fldiag.errors import FldiagError
from fldiag.plotting import pages, style
from fldiag.report import build, performance
from fldiag.report.collect import collect

EVIL, unpack = reports.EVIL, reports.unpacked
KNOWN = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "a",
    "header",
    "h1",
    "h2",
    "h3",
    "p",
    "nav",
    "ul",
    "li",
    "div",
    "label",
    "input",
    "span",
    "svg",
    "path",
    "noscript",
    "main",
    "section",
    "figure",
    "figcaption",
    "table",
    "caption",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "button",
    "details",
    "summary",
    "dl",
    "dt",
    "dd",
    "pre",
    "code",
    "b",
    "br",
    "script",
    "img",
}


SVG = {
    "svg",
    "defs",
    "style",
    "metadata",
    "RDF",
    "Work",
    "type",
    "format",
    "g",
    "path",
    "use",
    "clipPath",
    "rect",
    "image",
    "pattern",
}


class Reader(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.attributes, self.inside = [], [], [], None
        self.scripts = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.inside = dict(attrs).get("id", "own") if tag == "script" else None

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data
        else:
            self.words.append(data)


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    """A report whose every name is an attack: title, folders, methods, labels, options, layers, provenance."""
    folder = tmp_path_factory.mktemp("evil")
    a = reports.everything(reports.run(folder / EVIL, steps=2), note=EVIL, **{EVIL: EVIL})
    b = reports.everything(reports.run(folder / "b'\"&" / "script>", "fedsol", salt=EVIL))
    reports.of_checkpoints(
        b,
        "landscape",
        lambda _: reports.surface(),
        name="landscape-" + "<i>",
        labels=[EVIL + " client 4"],
        directions="random",
        slice=EVIL,
    )
    reports.of_checkpoints(
        b,
        "trace",
        lambda _: [
            {"metric": "trace", "value": 1.0, "layer": layer, "estimator": EVIL}
            for layer in (None, EVIL, "<b>head</b>")
        ],
        labels=[EVIL],
    )
    a.about["config"]["method"]["name"] = a.about["config"]["data"]["name"] = EVIL
    a.about["provenance"]["device_name"] = EVIL
    a.begin()
    a.append(a.done, [], status=EVIL)
    (folder / "diagnostics").mkdir()
    found = collect([a.path, b.path])
    path = build.write(found, folder / "evil.html", title=EVIL)
    return found, path, path.read_text("utf-8")


def test_no_name_becomes_markup(evil):
    _, _, text = evil
    read = Reader(text)
    assert set(read.tags) <= KNOWN and not [k for k, _ in read.attributes if k.startswith("on")]
    packed = sum(k == "data-picture" for k, _ in read.attributes) + len(evil[0].sources)
    count = 2 + packed + 1  # plotly, charts, pictures and tables, the page's own
    assert packed > 10 and read.tags.count("script") == count == text.count(
        "<script"
    ) == text.count("</script")
    assert (
        sum(EVIL in words for words in read.words) > 10
    )  # shown as it is: title, method, device, options
    assert all(v.startswith("#") for k, v in read.attributes if k in ("src", "href"))


def test_every_built_in_section_is_drawn_and_summed_up(evil):
    _, _, text = evil
    sections = set(re.findall(r'<section id="([^"]*)"', text))
    assert sections >= {
        "landscape",
        "spectrum",
        "forgetting",
        "drift",
        "matching",
        "account",
        "personalise",
    }
    for words in ("could not be made", "is not drawn", "is not summed"):
        assert words not in text


def test_charts_hold_names_that_plotly_cannot_read_as_markup(evil):
    data = unpack(Reader(evil[2]).scripts["packed-charts"]).decode()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in data and "<script" not in data


def test_pictures_are_inert_and_drawn_with_the_names_as_text(evil):
    """An image cannot run a script, and no name of a file is markup in it."""
    read = Reader(evil[2])
    images = [unpack(v) for k, v in read.scripts.items() if k.startswith("packed-picture-")]
    for image in images:
        root = ElementTree.fromstring(image)
        assert {e.tag.partition("}")[2] for e in root.iter()} <= SVG
    assert any(EVIL in v for k, v in read.attributes if k == "alt")


def test_only_the_scripts_of_the_page_may_run_and_nothing_is_fetched(evil):
    read = Reader(evil[2])
    policy = next(v for k, v in read.attributes if v and v.startswith("default-src"))
    assert "default-src 'none'" in policy and "connect-src" not in policy and "eval" not in policy
    allowed = re.findall(r"'sha256-([^']*)'", policy)
    held = [unpack(read.scripts["packed-plotly"]).decode(), read.scripts["own"]]
    assert [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in held] == allowed
    assert "'unsafe-inline'" not in re.search("script-src[^;]*", policy).group()
    assert not re.search(r"https?://|fetch\(|XMLHttpRequest|innerHTML|eval\(", read.scripts["own"])


def test_downloads_are_the_tables_byte_for_byte(evil):
    found, _, text = evil
    read = Reader(text)
    held = {
        name: unpack(script)
        for name, script in read.scripts.items()
        if name.startswith("packed-file-")
    }
    for source in found.sources:
        assert held[f"packed-file-{source.place}"] == source.raw
        assert re.fullmatch(r"[\w.-]+\.csv", source.file)
    disk = found.members[1].run.path / "diagnostics" / "forgetting-1.csv"
    assert disk.read_bytes() in held.values()


def test_provenance_names_checkpoints_config_version_device_and_options(evil):
    found, _, _ = evil
    member = found.members[1]
    about = dict(build.about(member.tables["forgetting"]))
    assert (
        about["sha256 of round 3"] == reports.sha(member.run, 3)
        and about["Config hash"] == member.run.hash
    )
    assert about["fldiag"] == "1.2.3" and about["Device"] == "cpu" and about["Seed"] == "0"
    assert (
        about["sha256 of the table"] == hashlib.sha256(member.tables["forgetting"].raw).hexdigest()
    )
    surface = dict(build.about(member.tables["landscape"]))
    assert surface["sha256 of checkpoint 0 (train, 100 examples)"] == reports.sha(member.run, 3)
    assert surface["Options"] == "directions = eigen"
    text = "".join(Reader(evil[2]).words)
    for source in found.sources:
        assert source.sha256 in text and source.claims[-1].sha256 in text


def test_every_chart_and_picture_has_its_place_on_the_page(evil):
    read = Reader(evil[2])
    charts = json.loads(unpack(read.scripts["packed-charts"]))
    places = {
        k: [int(v) for a, v in read.attributes if a == k] for k in ("data-chart", "data-picture")
    }
    assert sorted(places["data-chart"]) == list(range(len(charts)))
    assert {f"packed-picture-{i}" for i in places["data-picture"]} < set(read.scripts)
    ids = [v for k, v in read.attributes if k == "id"]
    assert len(ids) == len(set(ids)) and {v[1:] for k, v in read.attributes if k == "href"} <= set(
        ids
    )


def test_a_run_looks_like_its_method_in_every_chart():
    dashes = set()
    for i in range(21):
        rows = pd.DataFrame({"round": [1], "value": [0.5]})
        trace = performance.line("a", rows, style.look(i))
        assert trace["line"]["color"] == trace["marker"]["color"] == style.look(i).color
        dashes.add(trace["line"]["dash"])
    assert all(re.fullmatch(r"solid|[\d.]+px(,[\d.]+px)+", dash) for dash in dashes)
    assert len(dashes) >= 4


def test_the_same_content_is_packed_the_same_way():
    assert (
        pages.pack("a" * 1000) == pages.pack(b"a" * 1000)
        and unpack(pages.pack("ü")) == "ü".encode()
    )


def test_a_folder_that_is_not_there_is_refused(evil, tmp_path):
    with pytest.raises(FldiagError, match="is not there"):
        build.write(evil[0], tmp_path / "no" / "r.html")


def test_progress_ends_at_its_total(tmp_path):
    made, seen = reports.run(tmp_path / "a"), []
    reports.of_checkpoints(made, "spectrum", lambda _: reports.eigenvalues())
    found = collect([made.path])
    build.write(found, tmp_path / "r.html", progress=lambda *a: seen.append(a))
    assert [d for d, _, _ in seen] == list(range(len(seen))) and seen[-1][0] == seen[-1][1]


@pytest.mark.slow
def test_two_runs_of_a_hundred_rounds_stay_small_and_quick(tmp_path):
    """Rows and digits as many as real ones have: 10 of 20 clients a round, 10 classes, a surface of 41 x 41 points."""
    rng = np.random.default_rng(0)
    ids, runs = tuple(range(10)), []
    for name in ("fedavg", "fedsol"):
        made = reports.everything(reports.run(tmp_path / name, name, rounds=100))
        base = {
            "slice": "test",
            "estimator": "exact",
            "masked": False,
            "scope": "client",
            "moment": "trained",
        }
        extra = [
            {
                **base,
                "round": r,
                "metric": m,
                "client": c,
                "index": k,
                "value": rng.integers(300) / 300,
                "stderr": rng.random() / 10,
            }
            for r in range(1, 101)
            for c in ids
            for k in range(10)
            for m in ("class_accuracy", "more", "and_more")
        ]
        reports.of_run(made, "forgetting", reports.forgetting(100, ids, 10) + extra)
        extra = [
            {**base, "round": r, "metric": m, "client": c, "index": k, "value": rng.random()}
            for r in range(1, 101)
            for c in ids
            for k in range(5)
            for m in ("cos_gu_gp", "local_local_divergence", "update_cosine")
        ]
        reports.of_run(made, "drift", reports.drift(100) + extra)
        reports.of_checkpoints(
            made,
            "landscape",
            lambda _: [
                {**row, "value": row["value"] + rng.random() / 100}
                for row in reports.surface(points=41)
            ],
        )
        runs.append(made.path)
    began = time.process_time()
    path = build.write(collect(runs), tmp_path / "r.html")
    assert time.process_time() - began < 30 and path.stat().st_size < 10e6
