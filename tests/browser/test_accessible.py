"""No page has a barrier that axe-core calls serious or critical: the report, the interactive landscape, the documentation."""

import json
from importlib import resources
from pathlib import Path

import pytest
import reports
from chromium import Browser

from fldiag.diagnostics import landscape
from fldiag.plotting import pages as plotting
from fldiag.report import build
from fldiag.report.collect import collect
from fldiag.results.table import table

axe = pytest.importorskip("axe_core_python", reason="pip install 'fldiag[dev]' brings axe-core")
pytestmark = [pytest.mark.browser, pytest.mark.slow]
SITE = Path(__file__).parents[2] / "site"


def barriers(browser):
    """What axe-core finds serious or critical: rule, and the first element."""
    browser.run((resources.files(axe) / "axe.min.js").read_text("utf-8") + "; 0")
    found = json.loads(
        browser.run(
            "axe.run(document, {resultTypes: ['violations']}).then((r) => JSON.stringify(r.violations))"
        )
    )
    return [
        (v["id"], v["nodes"][0]["html"][:200])
        for v in found
        if v["impact"] in ("serious", "critical")
    ]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    runs = [
        reports.everything(reports.run(folder / "a", steps=4)).path,
        reports.run(folder / "c", "fedprox", keep="none").path,
    ]
    surface = folder / "landscape.html"
    shown = landscape.page(table(reports.surface(), run="fedavg"))
    surface.write_text(plotting.interactive(shown), "utf-8")
    return {"report": build.write(collect(runs), folder / "r.html"), "landscape": surface}


@pytest.mark.parametrize(
    "look",
    [{}, {"dark": True}, {"width": 390, "height": 844, "mobile": True}],
    ids=["light", "dark", "phone"],
)
@pytest.mark.parametrize("page", ["report", "landscape"])
def test_a_page_has_no_serious_barrier(pages, page, look):
    with Browser(**look) as browser:
        assert barriers(browser.open(pages[page])) == [] and browser.errors == []


@pytest.mark.skipif(not SITE.is_dir(), reason="make docs builds the documentation")
@pytest.mark.parametrize("page", ["index.html", "how_to/runs.html"])
@pytest.mark.parametrize("dark", [False, True])
def test_the_documentation_has_no_serious_barrier(page, dark):
    with Browser(dark=dark) as browser:
        browser.send("Page.navigate", url=(SITE / page).resolve().as_uri())
        browser.wait("document.readyState === 'complete'")
        assert barriers(browser) == []
