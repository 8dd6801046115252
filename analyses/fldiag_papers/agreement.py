"""Whether a measured number agrees with the reported one, and whether the two may be compared at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from scipy import stats

from fldiag import config as configs
from fldiag.results.table import Row
from fldiag.results.uncertainty import LEVEL
from fldiag_papers.reported import Reported

#: Runs behind a paper's number, where its text says so (FedSOL, FedAlign); taken for the others too.
PAPER_SEEDS = 3
#: Metrics that are counted, of a step of a method and of a data set: no seed changes them.
COSTS, EXAMPLES = (
    ("MFLOPs", "GFLOPs", "params_M", "flops_relative"),
    ("train_examples", "test_examples"),
)
#: What numbers that were measured like for like rest on -> how the page says it.
BASES = {
    "trained": "trained under the paper's protocol",
    "cost": "costs, counted",
    "data": "sizes of data sets, counted",
    "arithmetic": "arithmetic: worked out again from other numbers that the paper prints",
}
#: What ``agrees`` says of numbers that were not measured like for like.
UNLIKE = ("other data", "other model", "other machine", "reduced", "protocol unknown")
#: What it says where the paper's number is what profilers of layers count.
AS_PROFILED = "as profilers count"


def basis(metric: str) -> str:
    return "cost" if metric in COSTS else "data" if metric in EXAMPLES else "trained"


def verdict(row: Reported, line: Row, difference: float, about: dict[str, Any]) -> str:
    """Whether the difference may be noise, where the protocol is the paper's."""
    base = line["trained_on"].split("@")[0].rpartition("-")[0] or line["trained_on"]
    if "protocol unknown" in row.note:
        return "protocol unknown"
    if row.data and line["trained_on"] and row.data not in (line["trained_on"], base):
        return "other data"
    if _other_public_data(line["runs"].split(), about):
        return "other data"
    if row.model and line["trained_model"] and row.model != line["trained_model"]:
        return "other model"
    if row.metric in (*COSTS, *EXAMPLES):
        return printed(row, difference)
    if row.metric == "seconds_per_round":
        return "other machine"
    if "not reached within" in row.note:
        return "bound"
    if about.get("reduction"):
        return "reduced"
    return _within(
        row.std,
        line["measured_std"],
        int(line["seeds"]),
        difference,
        last_rounds(row, line["runs"].split(), about),
    )


def last_rounds(row: Reported, runs: list[str], about: dict[str, Any]) -> dict[str, Any]:
    """Mean ``accuracy`` and deviation ``std`` over the last ``rounds`` of the one run behind an accuracy: the last round is one
    of many. Empty for other numbers, for several runs and for short ones."""
    entries = [
        run["last_rounds"]
        for run in about["runs"].values()
        if run["hash"] in runs and "last_rounds" in run
    ]
    return dict(entries[0]) if row.metric == "accuracy" and len(runs) == 1 and entries else {}


def printed(row: Reported, difference: float) -> str:
    """Of counts: whether they are the same to the last digit printed."""
    return "yes" if abs(difference) <= row.rounding + 1e-12 else "no"


def _within(
    theirs: float | None, ours: float | None, seeds: int, difference: float, late: Mapping[str, Any]
) -> str:
    """Whether 0 lies in the 95 % t-interval of the difference of the two means: Welch's, or with the one deviation that is
    known taken for both. Of one seed's run that is the deviation over its last rounds, where it is larger than the paper's."""
    spreads = [
        (std, n) for std, n in ((theirs, PAPER_SEEDS), (ours, seeds)) if std is not None and n > 1
    ]
    if late and late["std"] > max((std for std, _ in spreads), default=0.0):
        spreads = [(late["std"], late["rounds"])]
    if not spreads:
        return "no spread"
    if len(spreads) == 1:
        ((std, n),) = spreads
        freedom, error = n - 1.0, std * (1 / PAPER_SEEDS + 1 / max(1, seeds)) ** 0.5
    else:
        parts = [(std * std / n, n) for std, n in spreads]
        total = sum(v for v, _ in parts)
        error, freedom = (
            total**0.5,
            total**2 / sum(v * v / (n - 1) for v, n in parts) if total else 1.0,
        )
    if abs(difference) > stats.t.ppf((1 + LEVEL) / 2, freedom) * error:
        return "no"
    return "yes" if len(spreads) == 2 else "one spread"


def _other_public_data(runs: list[str], about: dict[str, Any]) -> bool:
    """Whether another set stood in for the public data of a paper's protocol."""
    for run in about["runs"].values():
        data = run.get("config", {}).get("data", {})
        if (
            run["hash"] in runs
            and data.get("public")
            and data["public"] != configs.load(run["config"]["name"]).data.public
        ):
            return True
    return False


def trained(ledger: pd.DataFrame) -> pd.DataFrame:
    """The numbers of a ledger that were trained under their paper's protocol."""
    return ledger[
        (ledger["basis"] == "trained")
        & ledger["reported"].notna()
        & ledger["measured"].notna()
        & ~ledger["agrees"].isin(UNLIKE)
    ]


def counts(ledger: pd.DataFrame) -> pd.DataFrame:
    """How many of a ledger's reported numbers were measured like for like, by what they rest on: a row each of :data:`BASES`,
    with ``numbers``, ``yes``, :data:`AS_PROFILED`, ``no`` and ``undecided``. ``attrs``: how many there are (``printed``),
    measured like for like (``like``), and measured otherwise alone (``otherwise``). Derived numbers are nobody's report."""
    cell = ["paper", "id", "setting", "method", "model", "data", "metric"]
    printed = ledger[
        (ledger["kind"] == "number")
        & ledger["reported"].notna()
        & ~ledger["note"].fillna("").str.contains("derived")
    ]
    numbers = printed[printed["measured"].notna()]
    like = numbers[~numbers["agrees"].isin(UNLIKE)].drop_duplicates([*cell, "basis"])
    decided = like["agrees"].where(like["agrees"].isin(["yes", AS_PROFILED, "no"]), "undecided")
    table = pd.crosstab(like["basis"], decided).reindex(
        index=list(BASES), columns=["yes", AS_PROFILED, "no", "undecided"], fill_value=0
    )
    table.insert(0, "numbers", table.sum(axis=1))
    each, alike, measured = (
        set(part[cell].fillna("").itertuples(index=False, name=None))
        for part in (printed, like, numbers)
    )
    table.attrs = {"printed": len(each), "like": len(alike), "otherwise": len(measured - alike)}
    return table
