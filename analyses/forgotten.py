"""What local training forgets under two methods, round by round.

    python analyses/forgotten.py [TABLE OTHER]

TABLE, OTHER: csv files of ``fldiag forgetting`` over the same rounds (default: FedAvg and FedSOL with two shards a client).
Printed are means over the rounds, and mean and deviation of the difference OTHER - TABLE in the same rounds, with the number of
rounds in which it is positive. One seed each: the deviation is over rounds, not over seeds. The default tables were made by
``fldiag forgetting RUN --rounds 10,20,30,40,50,60,70,80,90,100,110,120,130,140,150,160 --samples 2000``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from fldiag.results.select import only

FOLDER = Path("figures/forgetting")
TABLES = FOLDER / "forgetting-7601ff0a.csv", FOLDER / "forgetting-d8d25fa7.csv"
ASKED = (("accuracy", "received"), ("accuracy", "trained"), ("accuracy", "aggregated"), ("drop", "trained"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="*", type=Path, default=TABLES)
    first, other = (pd.read_csv(path, low_memory=False) for path in parser.parse_args().tables)
    print(compare(first, other).to_string(index=False, float_format="%.2f"))


def compare(first: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """In points of accuracy on the test set; ``share lost``: the drop in percent of the accuracy before local training."""
    found = [{(m, moment): 100 * by_round(table, m, moment) for m, moment in ASKED} for table in (first, other)]
    for numbers in found:
        numbers["share lost", "trained"] = 100 * numbers["drop", "trained"] / numbers["accuracy", "received"]
    rows = []
    for metric, moment in found[0]:
        one, two = (numbers[metric, moment] for numbers in found)
        difference = (two - one).dropna()
        rows.append({"metric": metric, "moment": moment, "rounds": len(difference), first["method"].iloc[0]: one.mean(),
                     other["method"].iloc[0]: two.mean(), "difference": difference.mean(), "std": difference.std(),
                     "positive in": int((difference > 0).sum())})
    return pd.DataFrame(rows)


def by_round(table: pd.DataFrame, metric: str, moment: str) -> pd.Series:
    rows = only(table, metric=metric, moment=moment, scope="global", slice="test", index=None)
    return rows.set_index("round")["value"].astype(float)


if __name__ == "__main__":
    main()
