"""What local training forgets under two methods, round by round.

    python analyses/forgotten.py [TABLE ...] [--rounds FIRST LAST]

TABLE: csv files of ``fldiag forgetting`` or of FedSOL's Figure 7, with two methods in all (default: Figure 7, seed 0). Printed
are means over the rounds that both have, and mean and deviation of the difference second - first in the same rounds, with the
number of rounds in which it is positive. The deviation is over rounds, not over seeds; of several seeds, a round is the mean over
those that both methods have.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fldiag.results.select import only

FIGURE = Path("figures/paper-bf16/fedsol/fig7.csv.gz")
ASKED = (
    ("accuracy", "received"),
    ("accuracy", "trained"),
    ("accuracy", "aggregated"),
    ("drop", "trained"),
)
SHARE = ("share lost", "trained")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", type=Path, default=[FIGURE])
    parser.add_argument(
        "--rounds",
        nargs=2,
        type=int,
        metavar=("FIRST", "LAST"),
        help="only rounds FIRST to LAST, both included",
    )
    args = parser.parse_args()
    if lacking := [path for path in args.tables if not path.is_file()]:
        parser.error(f"{lacking[0]} is not there: name the tables")
    table = pd.concat([pd.read_csv(path, low_memory=False) for path in args.tables])
    if (count := table["method"].dropna().nunique()) != 2:
        parser.error(f"tables with two methods are needed, and these have {count}")
    found = compare(table, args.rounds)
    if found.empty:
        parser.error("there is no round that both methods have")
    print(found.to_string(index=False, float_format="%.2f"))


def compare(table: pd.DataFrame, rounds: Sequence[int] | None = None) -> pd.DataFrame:
    """In points of accuracy on the test set; ``share lost``: the drop in percent of the accuracy before local training."""
    names = list(table["method"].dropna().unique())
    table = table if rounds is None else table[table["round"].between(*rounds)]
    rows = []
    for metric, moment in (*ASKED, SHARE):
        both = pd.concat(
            [by_seed(only(table, method=name), metric, moment) for name in names],
            axis=1,
            keys=names,
            join="inner",
        )
        each = both.groupby("round").mean()
        difference = each[names[1]] - each[names[0]]
        rows.append(
            {
                "metric": metric,
                "moment": moment,
                "rounds": len(each),
                **each.mean(),
                "difference": difference.mean(),
                "std": difference.std(),
                "positive in": int((difference > 0).sum()),
            }
        )
    return pd.DataFrame([row for row in rows if row["rounds"]])


def by_seed(table: pd.DataFrame, metric: str, moment: str) -> pd.Series:
    """By seed and round."""
    if (metric, moment) == SHARE:
        return 100 * by_seed(table, "drop", "trained") / by_seed(table, "accuracy", "received")
    rows = only(table, metric=metric, moment=moment, scope="global", slice="test", index=None)
    return 100 * rows.set_index(["seed", "round"])["value"].dropna()


if __name__ == "__main__":
    main()
