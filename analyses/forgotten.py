"""What local training forgets under two methods, round by round.

    python analyses/forgotten.py [TABLE ...]

TABLE: csv files of ``fldiag forgetting`` or of FedSOL's Figure 7, with two methods in all (default: Figure 7). Printed are means
over the rounds that both have, and mean and deviation of the difference second - first in the same rounds, with the number of
rounds in which it is positive. The deviation is over rounds, not over seeds; of several seeds a round is their mean.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from fldiag.results.select import only

FIGURE = Path("figures/paper-bf16/fedsol/fig7.csv")
ASKED = (("accuracy", "received"), ("accuracy", "trained"), ("accuracy", "aggregated"), ("drop", "trained"))
SHARE = ("share lost", "trained")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", type=Path, default=[FIGURE])
    table = pd.concat([pd.read_csv(path, low_memory=False) for path in parser.parse_args().tables])
    if (found := table["method"].dropna().nunique()) != 2:
        parser.error(f"{found} methods are in these tables: give tables with two")
    print(compare(table).to_string(index=False, float_format="%.2f"))


def compare(table: pd.DataFrame) -> pd.DataFrame:
    """In points of accuracy on the test set; ``share lost``: the drop in percent of the accuracy before local training."""
    first, second = table["method"].dropna().unique()
    rows = []
    for metric, moment in (*ASKED, SHARE):
        one, two = (by_round(only(table, method=name), metric, moment) for name in (first, second))
        difference = (two - one).dropna()
        shared = difference.index
        rows.append({"metric": metric, "moment": moment, "rounds": len(shared), first: one[shared].mean(),
                     second: two[shared].mean(), "difference": difference.mean(), "std": difference.std(),
                     "positive in": int((difference > 0).sum())})
    return pd.DataFrame(rows)


def by_round(table: pd.DataFrame, metric: str, moment: str) -> pd.Series:
    if (metric, moment) == SHARE:
        return 100 * by_round(table, "drop", "trained") / by_round(table, "accuracy", "received")
    rows = only(table, metric=metric, moment=moment, scope="global", slice="test", index=None)
    return 100 * rows.groupby("round")["value"].mean()


if __name__ == "__main__":
    main()
