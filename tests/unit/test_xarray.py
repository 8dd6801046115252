"""A table over rounds and clients as an xarray.Dataset: every number at its place."""

import sys

import numpy as np
import pytest

from fldiag.errors import FldiagError
from fldiag.results.notebook import as_results
from fldiag.results.table import table


def rows():
    for r in (1, 2):
        yield {
            "round": r,
            "scope": "global",
            "moment": "aggregated",
            "metric": "accuracy",
            "value": r / 10,
            "slice": "test",
        }
        for k in (3, 7):
            place = {"round": r, "scope": "client", "moment": "trained", "client": k}
            yield {
                **place,
                "metric": "accuracy",
                "value": r + k / 10,
                "stderr": 0.1,
                "slice": f"client:{k}/train",
            }
            yield {**place, "metric": "drop", "value": None if k == 7 else r / 100, "slice": "test"}


TABLE = as_results(table(rows(), run="a", seed=5))


def test_every_number_is_at_its_place():
    pytest.importorskip("xarray")
    data = TABLE.to_xarray()
    assert set(data) == {"global_accuracy", "client_accuracy", "client_accuracy_stderr", "drop"}
    assert data.attrs == {"run": "a", "seed": "5"}
    assert data["client_accuracy"].dims == ("round", "client")
    assert float(data["client_accuracy"].sel(round=2, client=7)) == 2.7
    assert float(data["global_accuracy"].sel(round=2)) == 0.2
    assert (
        np.isnan(data["drop"].sel(client=7)).all()
        and float(data["drop"].sel(round=1, client=3)) == 0.01
    )


def test_two_numbers_at_one_place_are_refused():
    pytest.importorskip("xarray")
    twice = as_results(table([*rows(), *rows()], run="a", seed=5))
    with pytest.raises(FldiagError, match="several numbers of accuracy"):
        twice.to_xarray()


def test_without_xarray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(FldiagError) as error:
        TABLE.to_xarray()
    assert "fldiag[xarray]" in error.value.remedy
