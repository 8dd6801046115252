"""The report: what stands in it is what the tables say, whatever names and damaged files there are."""

import base64
import functools
import gzip
import hashlib
import json
import re
import shutil
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest
from commands import run

import fldiag
from fldiag.errors import FldiagError
from fldiag.report import document, page
from fldiag.report.collect import collect, name_runs
from fldiag.results.files import with_digest
from fldiag.results.table import only

TAGS = (
    "html head meta title style body header h1 h2 p nav a noscript main section div figure img figcaption script table caption thead "
    "tbody tr th td details summary ul li b button"
)
EVIL = "</script><img src=x onerror=alert(1)> & <b>"


def train(folder, **keys):
    keys = {"rounds": 2, "clients__per_round": 2, "checkpoint__clients": "sampled"} | keys
    config = fldiag.Config.load("digits", model__name="mlp", train__epochs=1, **keys)
    return fldiag.train(config, out=folder).path


class Page(HTMLParser):
    """The elements of a page, and the content of each script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.words = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self.scripts += [""] if tag == "script" else []

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.words += data

    def files(self):
        """What is packed in it."""
        packed = [s for s in self.scripts if re.fullmatch(r"[\w+/=]{20,}", s)]
        return [gzip.decompress(base64.b64decode(text)) for text in packed]

    def charts(self):
        return [json.loads(s) for s in self.scripts if s.startswith('{"data"')]


@pytest.fixture(scope="module", autouse=True)
def _plotly_is_packed_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document, "pack", functools.cache(document.pack))
        yield


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """FedAvg with two seeds and FedSOL; the first has tables of spectrum, forgetting and drift, and FedSOL has a spectrum."""
    folder = tmp_path_factory.mktemp("runs")
    paths = [
        train(folder / "a"),
        train(folder / "b", seed=1),
        train(folder / "c", method__name="fedsol"),
    ]
    for path in (paths[0], paths[2]):
        run("spectrum", path, "--k", 2)
    run("forgetting", paths[0])
    run("drift", paths[0])
    return paths


@pytest.fixture(scope="module")
def text(paths):
    return page.page(collect(paths))


@pytest.fixture
def copy(paths, tmp_path):
    return shutil.copytree(paths[0], tmp_path / "copy")


def test_it_shows_what_the_tables_say(paths, text):
    runs = collect(paths)
    shown = Page(text)
    ids = [value for name, value in shown.attributes if name == "id" and value not in "plotly"]
    assert ids[1:4] == ["wrong", "runs", "curves"]
    assert {"spectrum", "forgetting", "drift"} == set(ids[4:])
    for metric, chart in zip(("accuracy", "loss"), shown.charts(), strict=True):
        for curve in chart["data"][:2]:
            (owner,) = [r for r in runs if r.label == curve["name"]]
            rows = only(owner.run.metrics, metric=metric, slice="test")
            assert curve["y"] == pytest.approx(rows["value"].tolist(), rel=1e-4)
    last = [
        run.run.metrics.query("metric == 'loss' and slice == 'test'")["value"].iloc[-1]
        for run in runs
    ]
    mean, std = statistics.mean(last[:2]), statistics.stdev(last[:2])
    tables = page.overview(runs).tables.items()
    (seeds,) = [rows for (caption, _), rows in tables if caption.startswith("Mean")]
    value, error = map(float, seeds[0][3].split(" ± "))
    assert value == pytest.approx(mean, abs=std / 10) and error == pytest.approx(std, rel=0.05)
    for source in runs[0].tables.values():
        assert source.content in shown.files()
    assert (
        runs[0].run.path / "diagnostics" / runs[0].tables["drift"].name
    ).read_bytes() in shown.files()
    assert sum(content.startswith(b"<?xml") for content in shown.files()) == 4 - 1
    assert "not drawn" not in text and "not summed" not in text
    assert page.page(runs) == text


def test_no_name_becomes_markup(paths, tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    runs = collect([shutil.copytree(paths[0], folder), paths[2]])
    runs[0].run.about["config"]["data"]["name"] = runs[0].run.records[-1]["status"] = EVIL
    runs[0].remarks.append(EVIL)
    for kind, source in runs[0].tables.items():
        texts = dict.fromkeys(("run", "layer", "estimator", "slice"), EVIL)
        source.table = source.table.assign(**({} if kind == "metrics" else texts))
        source.name, source.alarms = EVIL, [EVIL]
    name_runs(runs)
    runs[1].label = EVIL
    shown = Page(page.page(runs))
    attributes = [name for name, _ in shown.attributes]
    images, files = attributes.count("data-kind"), attributes.count("data-file")
    assert shown.tags.count("img") == images and shown.tags.count("b") == shown.tags.count("li")
    assert shown.tags.count("script") == images + files + len(shown.charts()) + 2
    assert set(shown.tags) <= set(TAGS.split())
    assert not [name for name in attributes if name.startswith("on") or name == "src"]
    assert shown.words.count(EVIL) > 8
    names = [trace["name"] for chart in shown.charts() for trace in chart["data"]]
    assert names and not [name for name in names if "<" in name]


def test_only_its_own_scripts_may_run(text):
    shown = Page(text)
    policy = next(value for _, value in shown.attributes if value and "default-src" in value)
    (plotly,) = [content.decode() for content in shown.files() if len(content) > 1e6]
    digests = [
        base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()
        for s in (shown.scripts[-1], plotly)
    ]
    assert re.findall("'sha256-([^']*)'", policy) == digests
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "connect" not in policy
    assert not re.search(r"https?://|fetch\(|innerHTML|eval\(", shown.scripts[-1])


def edit_json(file, **changes):
    file.write_text(json.dumps(with_digest(json.loads(file.read_text()) | changes)))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.with_suffix(".csv").write_text("a,b\n1,2\n"), "not the table"),
        (lambda file: file.with_suffix(".csv").unlink(), "No such file"),
        (lambda file: file.write_text("{"), "is not what fldiag wrote"),
        (
            lambda file: edit_json(file, checkpoints={"rounds/0002.safetensors": "f" * 64}),
            "of checkpoints that",
        ),
        (lambda file: edit_json(file, checkpoints=3), "AttributeError"),
        (lambda file: edit_json(file, diagnostic="other"), "no diagnostic 'other'"),
        (lambda file: edit_json(file, diagnostic=["x"]), "TypeError"),
    ],
)
def test_a_table_that_is_not_the_runs_is_named_and_not_shown(copy, damage, words):
    (file,) = (copy / "diagnostics").glob("drift*.json")
    damage(file)
    (member,) = collect([copy])
    assert set(member.tables) == {"metrics", "spectrum", "forgetting"}
    assert len(member.remarks) == 1 and words in member.remarks[0]
    assert any("drift" in text for text in page.overview([member]).remarks)


def test_the_newest_table_is_shown(copy):
    run("spectrum", copy, "--k", 1)
    (member,) = collect([copy])
    assert (member.tables["spectrum"].table["metric"] == "eigenvalue").sum() == 1
    assert "is newer" in member.remarks[0] and len(member.remarks) == 1


def test_damaged_metrics_stop_nothing(copy, monkeypatch):
    def metrics(run):
        raise FldiagError("the metrics are damaged")

    monkeypatch.setattr(fldiag.Run, "metrics", property(metrics))
    (member,) = collect([copy])
    for drawn_elsewhere in ("forgetting", "drift"):
        del member.tables[drawn_elsewhere]
    assert "damaged" in member.remarks[0] and "spectrum" in page.page([member])


def test_a_table_that_cannot_be_drawn_is_said(paths):
    runs = collect(paths[:1])
    runs[0].tables = {kind: runs[0].tables[kind] for kind in ("metrics", "drift")}
    runs[0].tables["drift"].table = runs[0].tables["drift"].table.drop(columns="value")
    assert "not drawn" in page.page(runs)


def test_what_is_wrong_stands_first(paths):
    runs = collect(paths)
    runs[0].tables["drift"].alarms = ["clients run away"]
    runs[2].run.about["provenance"]["data"] = "others"
    alarms = page.wrong(runs).alarms
    assert alarms[0].endswith("clients run away.") and "different data" in alarms[1]


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ([{}, {"method__name": "fedsol"}], ["FedAvg, seed 0", "FedSOL, seed 0"]),
        ([{"seed": 1}, {"train__lr": 0.5}], ["learning rate = 0.", "learning rate = 0.5"]),
        ([{}, {}], ["(", "("]),
    ],
)
def test_runs_are_called_by_what_they_differ_in(tmp_path, options, labels):
    runs = [train(tmp_path / str(i), rounds=1, **keys) for i, keys in enumerate(options)]
    names = [member.label for member in collect(runs)]
    assert len(set(names)) == 2
    assert all(part in name for part, name in zip(labels, names, strict=True)), names


def test_the_verb_computes_what_is_named(paths, tmp_path):
    copy = shutil.copytree(paths[1], tmp_path / "copy")
    answer = json.loads(run("report", copy, "--compute", "sharpness", "--json").stdout)
    file = Path(answer["paths"][-1])
    assert file.parent == copy / "diagnostics" and file.stat().st_size < 4e6
    assert "sharpness" in file.read_text("utf-8") and list(file.parent.glob("sharpness-*.csv"))
    bare = train(tmp_path / "bare", checkpoint__clients="none")
    assert run("report", paths[1], bare, "--out", tmp_path).stdout.strip().endswith(".html")
    assert "no drift" in run("report", bare, "--compute", "drift").stderr
    for words in ([copy, copy], [copy, "--compute", "sharpnes"], [tmp_path]):
        run("report", *words, code=2)
