"""The table of analyses/speed/curvature_minilm.py: a verdict stands behind the number that it is about."""

import importlib
from pathlib import Path

import pytest

BEFORE = 400.0  # MiB that a process holds before it begins


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "analyses/speed"))
        yield importlib.import_module("curvature_minilm")


def answer(peak, basis=0.0, **more):
    return {
        "peak": peak,
        "peak without basis": peak - basis,
        "before": BEFORE,
        "basis": basis,
        "seconds": 1.0,
        "products": 9,
        "values": [3.0, 2.0, 1.0],
        "residuals": [1e-4, 2e-4, 3e-4],
        **more,
    }


@pytest.mark.parametrize(
    ("peak", "verdict", "ratio", "added"),
    [(1450.0, "met", "2.50", "8.50"), (1500.0, "MISSED", "2.60", "9.00")],
)
def test_the_target_of_memory_is_of_the_whole_peaks(study, peak, verdict, ratio, added):
    """Without the basis the peaks are 1,250 and 1,300 MiB, of one gradient 500, of which 400 were there before."""
    line = study._line("fldiag", [answer(peak, basis=200.0)], [answer(500.0)])
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert len(cells) == len(study.COLUMNS)
    at = study.COLUMNS.index("peak without basis / that of one gradient")
    assert (cells[at], cells[at + 1]) == (ratio, f"≤ 2.5: {verdict}") and study.COLUMNS[
        at + 1
    ] == "target"
    assert cells[at + 2] == added and study.COLUMNS[at + 2].startswith("added")
    assert cells[4:6] == ["3.0e-04", "≤ 0.001: met"] and study.COLUMNS[4:6] == (
        "largest residual",
        "target",
    )
    whole = study._line(study.GRADIENT, [answer(500.0)], [answer(500.0)])
    assert whole.count("|") == len(cells) + 1 and "1.00 | – | 1.00" in whole
