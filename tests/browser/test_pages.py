"""Pages in a real browser: the report, a landscape to turn, the documentation. They draw, ask for nothing, and axe-core finds nothing."""

import json
from importlib import resources
from pathlib import Path

import pytest
from chromium import Browser
from commands import run

import fldiag
from fldiag.report.collect import collect

axe = pytest.importorskip("axe_core_python", reason="pip install 'fldiag[dev]' brings axe-core")
pytestmark = [pytest.mark.browser, pytest.mark.slow]
SITE = Path(__file__).parents[2] / "site"
#: What says that a page is drawn; the landscape's is plotly's own.
READY = {
    "report": "document.documentElement?.dataset.ready",
    "landscape": "document.querySelector('#landscape canvas') && 'yes'",
}
PHONE = {"width": 390, "height": 844, "mobile": True}


def barriers(browser):
    """What axe-core finds serious or critical: rule, and the first element."""
    browser.run((resources.files(axe) / "axe.min.js").read_text("utf-8") + "; 0")
    call = (
        "axe.run(document, {resultTypes: ['violations']}).then((r) => JSON.stringify(r.violations))"
    )
    grave = [v for v in json.loads(browser.run(call)) if v["impact"] in ("serious", "critical")]
    return [(v["id"], v["nodes"][0]["html"][:200]) for v in grave]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Two runs of 30 rounds with seven diagnostics each."""
    folder, paths = tmp_path_factory.mktemp("pages"), []
    for method in ("fedavg", "fedsol"):
        keys = {"model__name": "mlp", "rounds": 30, "checkpoint__clients": "sampled"}
        config = fldiag.Config.load("digits", method__name=method, clients__per_round=4, **keys)
        paths.append(fldiag.train(config, out=folder / method).path)
    names = "doctor,spectrum,landscape,drift,forgetting,account,flatness"
    run("report", *paths, "--compute", names, "--out", folder)
    (surface,) = (paths[0] / "diagnostics").glob("landscape*.html")
    (report,) = folder.glob("report*.html")
    return {"paths": paths, "report": report, "landscape": surface}


@pytest.mark.parametrize("look", [{}, {"dark": True}, PHONE], ids=["light", "dark", "phone"])
@pytest.mark.parametrize("page", ["report", "landscape"])
def test_a_page_draws_fits_and_has_no_barrier(pages, page, look):
    with Browser(**look) as browser:
        assert barriers(browser.open(pages[page], READY[page])) == []
        assert browser.requests == [pages[page].resolve().as_uri()]
        assert browser.run("document.documentElement.scrollWidth") <= look.get("width", 1280)
        marks = "(c) => c.querySelectorAll('.trace path, canvas').length"
        assert all(browser.run(f"Array.from(document.querySelectorAll('.chart'), {marks})"))
        widths = (
            "Promise.all(Array.from(document.images, (i) => i.decode().then(() => i.naturalWidth)))"
        )
        assert all(width > 50 for width in browser.run(widths))
        assert browser.errors == []


def test_a_report_is_small_and_gives_its_tables_back(pages):
    assert pages["report"].stat().st_size <= 4e6
    source = collect(pages["paths"])[0].tables["drift"]
    with Browser() as browser:
        browser.open(pages["report"])
        assert browser.run("document.images.length") >= 7
        button = f"document.querySelector('[data-file=\"{source.name}\"]')"
        assert browser.download(f"{button}.click()") == (source.name, source.content)


def test_an_old_browser_is_told_and_shows_the_tables(pages):
    with Browser(before="delete window.DecompressionStream") as browser:
        browser.send("Page.navigate", url=pages["report"].resolve().as_uri())
        assert "DecompressionStream" in browser.wait("document.documentElement?.dataset.ready")
        assert "2023" in browser.run("document.getElementById('trouble').innerText")
        assert "FedSOL" in browser.run("document.querySelector('#runs table').innerText")


@pytest.mark.skipif(not SITE.is_dir(), reason="make docs builds the documentation")
@pytest.mark.parametrize("page", ["index.html", "own_loop.html"])
@pytest.mark.parametrize("dark", [False, True])
def test_the_documentation_has_no_barrier(page, dark):
    with Browser(dark=dark) as browser:
        browser.send("Page.navigate", url=(SITE / page).resolve().as_uri())
        browser.wait("document.readyState === 'complete'")
        assert barriers(browser) == []
