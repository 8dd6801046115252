"""How large a report is and how soon it shows itself: ``python analyses/speed/report.py [RUN...]``.

Without runs, FedAvg and FedSOL are trained on the digits for 30 rounds, and whatever a report shows of them is computed first
(some twenty minutes). The page is opened in Chromium in a fresh profile, TIMES times; printed are the medians of the first
contentful paint (as the browser tells it) and of the moment at which all figures are drawn, and how the bytes are shared. Aims:
1 s and 3 MB.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fldiag.report import build
from fldiag.report.collect import collect
from fldiag.results.machine import machine

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "browser"))
from chromium import Browser

PAINT, SIZE, TIMES = 1.0, 3e6, 5
DIAGNOSTICS = (
    ["forgetting"],
    ["drift"],
    ["matching"],
    ["account"],
    ["fairness"],
    ["flatness", "--rounds", "10,20,30"],
)


def fldiag(*words, cwd):
    done = subprocess.run(
        [sys.executable, "-m", "fldiag.cli", *words], cwd=cwd, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def runs(folder):
    """Two runs of 30 rounds with the tables that a report shows."""
    made = [
        Path(
            folder,
            fldiag(
                "train", "digits", "--set", f"method.name={name}", "--set", "rounds=30", cwd=folder
            ),
        ).parents[1]
        for name in ("fedavg", "fedsol")
    ]
    for name, *options in DIAGNOSTICS:
        for run in made:
            fldiag(name, str(run), *options, cwd=folder)
    for name in ("landscape", "spectrum"):
        fldiag(name, *map(str, made), cwd=folder)
    return made


def opened(page):
    """Seconds to the first contentful paint and until all figures are drawn."""
    with Browser() as browser:
        began = time.perf_counter()
        browser.open(page)
        drawn = time.perf_counter() - began
        return browser.wait(
            "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        ) / 1000, drawn


def shares(page):
    """(what, bytes) of a page, the largest first."""
    text = page.read_text("utf-8")
    packed = {
        name: len(content)
        for name, content in re.findall(r'<script[^>]*id="([^"]+)"[^>]*>([^<]*)<', text)
    }
    pictures = sum(map(len, re.findall(r'src="data:[^"]*"', text)))
    found = {
        "plotly": packed["plotly"],
        "figures": packed["data"],
        "pictures": pictures,
        "tables to download": sum(
            size for name, size in packed.items() if name.startswith("file-")
        ),
    }
    found["text, tables shown, script"] = page.stat().st_size - sum(found.values())
    return sorted(found.items(), key=lambda part: -part[1])


def main():
    with tempfile.TemporaryDirectory() as folder:
        page = build.write(collect(sys.argv[1:] or runs(folder)), Path(folder, "report.html"))
        size = page.stat().st_size
        print(
            f"{size / 1e6:.2f} MB (aim: {SIZE / 1e6:g} MB, {'met' if size <= SIZE else 'MISSED'}): "
            + ", ".join(f"{what} {count / 1e6:.2f}" for what, count in shares(page))
        )
        paint, drawn = (
            statistics.median(column)
            for column in zip(*(opened(page) for _ in range(TIMES)), strict=True)
        )
        print(
            f"first contentful paint {paint:.2f} s (aim: {PAINT:g} s, {'met' if paint <= PAINT else 'MISSED'}), "
            f"all figures drawn after {drawn:.1f} s; medians of {TIMES}; {machine()}"
        )


if __name__ == "__main__":
    main()
