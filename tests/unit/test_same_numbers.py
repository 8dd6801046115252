"""analyses/same_numbers.py: what counts as the same number, and that both sides are measured."""

import shutil

import helpers
import numpy as np
import pandas as pd
import pytest

from fldiag import registry

script = helpers.analysis("same_numbers")
TOLERANCE = 1e-5
#: Other code of the diagnostic lora: every number is larger by the smallest step.
CHANGE = """
_table = table
def table(rows, **common):
    frame = _table(rows, **common)
    return frame.assign(value=frame["value"] * (1 + 2.0**-52))
"""


def saved(folder, **changes):
    """A table as a side saves it, with columns replaced."""
    columns = {
        "metric": ["loss", "loss", "eigenvalue"],
        "client": pd.array([0, 1, None], dtype="Int64"),
        "value": [1.0, 3.0, 50.0],
        "residual": [np.nan, np.nan, 0.5],
        "evidence": ["0.1 % of 30", "", ""],
        "note": ["a remark", "", ""],
    }
    return pd.read_parquet(
        folder / script.save(folder, pd.DataFrame(columns | changes), TOLERANCE)["file"]
    )


def compared(folder, **changes):
    return script.compare_tables(saved(folder), saved(folder, **changes), TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"value": [1.0, 3.0 + 3e-15, 50.0]}, "differs by 1e-15"),
        ({"value": [1.0, 3.0 + 1e-4, 50.0]}, "differs by 3e-05 (tolerance 1e-05)"),
        ({"value": [1.0, np.nan, 50.0]}, "differs by inf"),
        ({"value": [1.0, 3.0, 50.6]}, "differs by 1e-02 (tolerance 2e-02)"),
        ({"residual": [np.nan, np.nan, 0.6]}, "differs by 2e-03"),
        ({"client": [0, 2, None]}, "differs"),
        ({"metric": ["loss", "error", "eigenvalue"]}, "differs"),
        ({"evidence": ["0.2 % of 30", "", ""]}, "differs"),
    ],
)
def test_what_differs(tmp_path, changes, line):
    text, equal = script.verdict(compared(tmp_path, **changes), "drift")
    assert text.startswith(line) and not equal


@pytest.mark.parametrize(
    ("changes", "news"),
    [
        ({}, []),
        ({"client": [0.0, 1.0, np.nan]}, []),
        ({"novel": [1.0, 2.0, 3.0]}, ["new column novel"]),
        ({"evidence": ["a share of 0.1 in 30", "", ""]}, ["1 of 3 in evidence are worded anew"]),
        ({"metric": ["loss", "loss", "top"]}, ["new rows: 1 of top"]),
    ],
)
def test_what_is_the_same(tmp_path, changes, news):
    """In the last case the row that is missing is one that goes."""
    result = script.compare_tables(
        saved(tmp_path), saved(tmp_path, **changes), TOLERANCE, {"eigenvalue"}.__contains__
    )
    assert script.verdict(result, "drift") == ("equal: 1 table, 3 rows", True)
    assert [text for text in result.news if "evidence" in text or "new" in text] == news


def test_a_listed_order_of_a_sum_may_differ_within_the_tolerance(tmp_path, monkeypatch):
    monkeypatch.setitem(script.REORDERED, "drift", "mean over clients")
    for size, passes in ((1e-15, True), (1e-4, False)):
        text, equal = script.verdict(compared(tmp_path, value=[1.0, 3.0 + size, 50.0]), "drift")
        assert equal is passes and ("mean over clients" in text) is passes


def test_rows_of_one_name_are_counted(tmp_path):
    clients = {"client": [0, 0, None]}
    one, other = (saved(tmp_path, **clients, value=v) for v in ([1.0, 3.0, 50.0], [3.0, 1.0, 50.0]))
    assert script.compare_tables(one, one, TOLERANCE).difference == 0
    assert script.compare_tables(one, other, TOLERANCE).difference > 0.5
    assert len(script.compare_tables(one, one[::2], TOLERANCE).faults) == 1


def test_every_diagnostic_has_a_case():
    names = {
        name
        for name in registry.diagnostic.names()
        if registry.diagnostic.get(name).build.__module__.startswith("fldiag.")
    }
    assert names <= {diagnostic for diagnostic, _, _ in script.CASES}


def side(diagnostics, **tables):
    """A side whose tables are there, or an error's text."""
    keys = {(name, "case"): table for name, table in tables.items()}
    return script.Side(diagnostics, {"plain round 1": "ab"}, keys, dict.fromkeys(keys, TOLERANCE))


def test_what_a_side_lacks(tmp_path):
    table = saved(tmp_path)
    base = side(["basins", "drift", "lora"], basins=table, drift=table, lora=table)
    lines, same = script.report(base, side(["drift", "lora", "novel"], drift=table, lora=table))
    assert same and [line.split(maxsplit=1) for line in lines] == [
        ["weights", "equal: 1 checkpoints"],
        ["basins", "gone, as listed"],
        ["drift", "equal: 1 table, 3 rows"],
        ["lora", "equal: 1 table, 3 rows"],
        ["novel", "is new"],
    ]
    for tree, word in (
        (side(["drift"], drift=table), "missing"),
        (side(["drift", "lora"], drift=table), "differs"),
        (side(["drift", "lora"], drift=table, lora="an error"), "differs"),
    ):
        lines, same = script.report(base, tree)
        assert not same and any(line.startswith(f"lora           {word}") for line in lines)
    assert not script.report(side(["uncovered"]), side(["uncovered"]))[1]
    assert not script.report(base, script.Side(base.diagnostics, {}, base.tables, base.tolerances))[
        1
    ]


@pytest.mark.slow
def test_a_commit_and_other_code_of_one_diagnostic(tmp_path):
    """Training has the numbers of the commit, and the diagnostic has not."""
    script.unpack("HEAD", tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "tree")
    with (tmp_path / "tree/fldiag/diagnostics/lora/__init__.py").open("a") as file:
        file.write(CHANGE)
    lines, same = script.compare_trees(
        tmp_path / "base", tmp_path / "tree", tmp_path / "tables", ["lora"]
    )
    assert not same and len(lines) > 3
    assert lines[0].startswith("weights        equal: 3 checkpoints")
    assert lines[1].startswith("lora           differs by ") and "in value" in lines[2]
    assert lines[-1].startswith("training       equal: 2 tables")
