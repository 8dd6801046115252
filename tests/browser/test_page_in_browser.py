"""The report in a real browser: it draws, answers to mouse and keyboard, and asks for nothing from anywhere."""

import re

import pytest
import reports
from chromium import Browser

from fldiag.report import build
from fldiag.report.collect import collect

pytestmark = [pytest.mark.browser, pytest.mark.slow]
SCENES = "Array.from(document.querySelectorAll('.plot.scene'))"
MAPS = "Array.from(document.querySelectorAll('.plot.map'))"
COLOUR = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(collection, page): two runs with all tables, one of them called like an attack, and an empty one."""
    folder = tmp_path_factory.mktemp("report")
    a = reports.everything(reports.run(folder / reports.EVIL, steps=4))
    b = reports.everything(
        reports.run(folder / "b" / "script>", "fedsol", accuracy=0.6, steps=4), 2.0
    )
    c = reports.run(folder / "c", "fedprox", keep="none", data="others")
    found = collect([a.path, b.path, c.path])
    return found, build.write(found, folder / "r.html", title=reports.EVIL)


@pytest.fixture(scope="module")
def desktop(made):
    with Browser() as browser:
        yield browser.open(made[1])


@pytest.fixture(scope="module")
def phone(made):
    with Browser(width=390, height=844, mobile=True) as browser:
        yield browser.open(made[1])


def test_every_figure_is_drawn_without_complaint_or_request(desktop, made):
    drawn = desktop.run("""Array.from(document.querySelectorAll('.plot'), (plot) => {
        const canvas = plot.querySelector('canvas'), box = plot.getBoundingClientRect();
        return {kind: plot.classList[1], size: [box.width, box.height],
                marks: plot.querySelectorAll('.trace path, .point path, .contourlayer path').length,
                scene: Boolean(canvas && canvas.width > 50 && plot._fullLayout.scene)};
    })""")
    assert {d["kind"] for d in drawn} == {"lines", "scene", "map"}
    for figure in drawn:
        assert min(figure["size"]) > 150 and (
            figure["scene"] if figure["kind"] == "scene" else figure["marks"] > 0
        ), figure
    images = desktop.run("""Promise.all(Array.from(document.images, (image) => image.decode().then(
        () => [image.naturalWidth, image.naturalHeight, image.alt.length])))""")
    assert len(images) > 8 and all(min(size) > 50 for size in images)
    assert desktop.errors == [] and desktop.requests == [made[1].resolve().as_uri()]


def test_a_surface_is_really_painted(desktop):
    """The colours of the scale are in the picture that the canvas makes."""
    count = desktop.run(f"""Plotly.toImage({SCENES}[0], {{format: 'png', width: 200, height: 200}}).then((url) => new Promise((done) => {{
        const image = new Image();
        image.onload = () => {{
            const c = document.createElement('canvas').getContext('2d');
            c.drawImage(image, 0, 0);
            const pixels = c.getImageData(0, 0, 200, 200).data, seen = new Set();
            for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3]) seen.add(pixels[i] + ',' + pixels[i + 1] + ',' + pixels[i + 2]);
            done(seen.size);
        }};
        image.src = url;
    }}))""")
    assert count > 100


def test_names_are_shown_and_not_run(desktop):
    assert (
        desktop.run("document.title")
        == desktop.run("document.querySelector('h1').textContent")
        == reports.EVIL
    )
    assert (
        desktop.run("document.querySelectorAll('main script, header script, svg script').length")
        == 0
    )
    names = desktop.run(
        "Array.from(document.querySelectorAll('#curves .legendtext'), (e) => e.textContent.trim())"
    )
    assert {"FedAvg, seed 0", "FedSOL, seed 0"} <= set(names)
    assert reports.EVIL in desktop.run("document.querySelector('#runs table').innerText")


def test_cameras_are_linked_to_the_mouse(desktop):
    eyes = f"{SCENES}.map((p) => p._fullLayout.scene._scene.getCamera().eye)"
    before = desktop.run(eyes)
    assert len(before) == 2 and before[0] == before[1]
    desktop.run(f"{SCENES}[0].scrollIntoView({{block: 'center'}})")
    box = desktop.run(
        f"(() => {{ const b = {SCENES}[0].getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; }})()"
    )
    desktop.drag(box, [box[0] + 120, box[1] + 30])
    close = "['x', 'y', 'z'].every((k) => Math.abs(e[0][k] - e[1][k]) < 1e-6)"
    after = desktop.wait(
        f"(() => {{ const e = {eyes}; return Math.abs(e[1].x - {before[1]['x']}) > 0.1 && {close} && e; }})()"
    )
    assert after[0] == pytest.approx(after[1])  # and so they stay
    assert desktop.run(eyes) == after


def test_csv_is_the_table_itself(desktop, made):
    source = made[0].members[1].tables["forgetting"]
    name, content = desktop.download(
        f"document.querySelector('[data-packed=\"file-{source.place}\"]').click()"
    )
    assert content == source.raw and name.endswith(".csv")
    name, content = desktop.download("document.querySelector('#runs button[data-table]').click()")
    lines = content.decode("utf-8").splitlines()
    assert (
        name == "runs-1-1.csv"
        and len(lines) == 3
        and lines[0].startswith("Run,Method,Data")
        and reports.EVIL in lines[1]
    )
    name, content = desktop.download("document.querySelector('figure.drawn button').click()")
    assert name.endswith(".svg") and b"<svg" in content


CURVES = "document.querySelector('#drift table')"


def test_rows_are_sorted_by_mouse_and_keyboard(desktop):
    column = desktop.run(
        f"Array.from({CURVES}.tHead.rows[0].cells).findIndex((c) => c.innerText.startsWith('global–local'))"
    )
    values = (
        f"Array.from({CURVES}.tBodies[0].rows, (r) => parseFloat(r.cells[{column}].textContent))"
    )
    head = f"{CURVES}.tHead.rows[0].cells[{column}]"
    before = desktop.run(values)
    desktop.run(f"{head}.querySelector('button').click()")
    assert (
        desktop.run(values) == sorted(before) != sorted(before, reverse=True)
        and desktop.run(f"{head}.ariaSort") == "ascending"
    )
    desktop.run(f"{head}.querySelector('button').focus()")
    desktop.key(" ", 32)
    assert desktop.wait(f"{head}.ariaSort === 'descending'") and desktop.run(values) == sorted(
        before, reverse=True
    )
    desktop.run(f"{CURVES}.tHead.rows[0].cells[0].querySelector('button').click()")
    assert desktop.run(f"{CURVES}.querySelectorAll('[aria-sort]').length") == 1


def test_a_link_to_what_is_folded_away_opens_it(desktop):
    desktop.run("location.hash = '#config-1'")
    assert desktop.wait("document.getElementById('config-1').open")
    assert desktop.run("""Array.from(document.querySelectorAll('h2 .link, h3 .link'))
        .every((a) => document.getElementById(a.hash.slice(1)))""")


def test_a_run_can_be_hidden(desktop):
    hidden = "document.querySelector('#curves .plot')._fullData.filter((t) => t.visible === 'legendonly').length"
    click = "document.querySelector('#curves .plot .legendtoggle')"
    box = desktop.run(
        f"(() => {{ {click}.scrollIntoView({{block: 'center'}}); const b = {click}.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; }})()"
    )
    desktop.drag(box, box)
    assert desktop.wait(f"{hidden} === 1")
    assert desktop.errors == []


def test_everything_that_acts_can_be_reached_by_the_tab_key(desktop):
    assert desktop.run("""Array.from(document.querySelectorAll('a[href], button, summary, .wide'))
        .every((e) => e.tabIndex >= 0)""")
    desktop.run(
        "document.activeElement.blur(); window.getSelection().removeAllRanges(); document.querySelector('.skip').focus()"
    )
    assert desktop.run("document.querySelector('.skip').getBoundingClientRect().left") >= 0
    desktop.key("Tab", 9)
    assert desktop.run("document.activeElement.closest('nav') !== null")


def test_provenance_opens(desktop, made):
    sha = reports.sha(made[0].members[0].run, 3)
    desktop.run("document.querySelector('#forgetting details summary').click()")
    assert desktop.wait(
        f"document.querySelector('#forgetting details').innerText.includes('{sha}')"
    )


def test_it_follows_the_dark_mode_and_figures_stay_black_on_white(desktop):
    assert desktop.run(COLOUR) == "rgb(255, 255, 255)"
    try:
        desktop.dark(True)
        assert desktop.run(COLOUR) == "rgb(22, 24, 28)"
        for figure in (".plot", ".picture"):
            style = f"getComputedStyle(document.querySelector('#content {figure}'))"
            assert desktop.run(f"{style}.backgroundColor") == "rgb(255, 255, 255)"
    finally:
        desktop.dark(False)


def test_it_prints_light_also_from_the_dark(desktop):
    desktop.dark(True)
    content = desktop.pdf()
    desktop.dark(False)
    assert (
        content.startswith(b"%PDF")
        and len(re.findall(rb"/Type\s*/Page\b", content)) > 3
        and desktop.errors == []
    )


def test_a_phone_needs_no_sideways_scrolling(phone):
    assert phone.run("document.documentElement.scrollWidth") == 390
    phone.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert phone.run("document.documentElement.scrollWidth") == 390
    outside = phone.run("""Array.from(document.querySelectorAll('main *')).filter((e) => !e.closest('.wide, .plot, .skip, pre, thead')
        && e.getBoundingClientRect().right > 391).map((e) => e.outerHTML.slice(0, 80))""")
    assert outside == []
    assert phone.run(
        "Array.from(document.querySelectorAll('.plot')).every((p) => p.getBoundingClientRect().width > 300)"
    )
    assert phone.errors == []


def test_a_finger_scrolls_past_the_curves_of_a_phone(phone):
    assert phone.run(
        "Array.from(document.querySelectorAll('.plot:not(.scene)')).every((p) => p._fullLayout.dragmode === false)"
    )


def test_without_webgl_surfaces_are_maps(made):
    with Browser(flags=("--disable-3d-apis",)) as browser:
        browser.open(made[1])
        assert browser.run(
            f"{SCENES}.every((p) => p.closest('figure').hidden) && {MAPS}.every((p) => p.querySelector('.contourlayer'))"
        )
        limits = browser.run(f"{MAPS}.map((p) => [p.data[0].zmin, p.data[0].zmax])")
        assert limits[0] == limits[1] and browser.errors == []


def test_an_old_browser_is_told_and_shows_the_tables(made):
    with Browser(before="delete window.DecompressionStream") as browser:
        browser.send("Page.navigate", url=made[1].resolve().as_uri())
        assert browser.wait("document.documentElement?.dataset.ready") == "failed"
        assert "2023" in browser.run("document.getElementById('trouble').innerText")
        assert "63 %" in browser.run("document.querySelector('#runs table').innerText")


def test_an_almost_empty_run_makes_a_whole_page(tmp_path):
    found = collect([reports.run(tmp_path / "only", rounds=1, keep="none").path])
    with Browser() as browser:
        browser.open(build.write(found, tmp_path / "r.html"))
        assert (
            browser.errors == []
            and browser.run("document.querySelectorAll('#curves .plot svg.main-svg').length") >= 2
        )
        assert browser.run("document.querySelectorAll('#absent tbody tr').length") >= 7


def test_the_packed_data_is_what_the_page_reads(desktop, made):
    text = made[1].read_text("utf-8")
    packed = re.search(r'id="packed-charts">([^<]*)<', text).group(1)
    assert len(reports.unpacked(packed)) > 10_000
    assert desktop.run("document.getElementById('packed-charts').textContent.length") == len(packed)
