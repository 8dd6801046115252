"""How the test accuracies of runs stand to one another in their last rounds, of which the very last is only one.

    python analyses/late_rounds.py [RUN ...] [--rounds 20] [--out figures/paper]

RUN: folders of runs, or of their records (default: all in figures/paper/runs). late_rounds.csv has for each run the mean of its
last rounds, and for two runs that differ by the method at most their mean difference in these. Such runs have the same clients in
a round and swing together, so their difference swings less than they do. The deviations are over rounds: they say nothing about
other seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import pandas as pd

from fldiag.report.collect import collect
from fldiag.report.members import Member
from fldiag.report.summary import method, setting
from fldiag.results.files import write_table
from fldiag.results.provenance import provenance
from fldiag.results.select import only

RECORDS = Path("figures/paper/runs")
SHARED = ("data", "partition", "clients", "model", "train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs")
    parser.add_argument("--rounds", type=int, default=20, help="how many are the last ones")
    parser.add_argument("--out", type=Path, default=RECORDS.parent)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds: a deviation needs at least 2")
    paths = args.runs or sorted(p.parent for p in RECORDS.glob("*/run.json"))
    found = compare(collect(paths).members, args.rounds)
    files = write_table(found, args.out / "late_rounds", provenance(rounds=args.rounds), digits=6)
    print(found.drop(columns=["method", "setting", "minus"]).to_string(index=False, na_rep="–"))
    print(next(f for f in files if f.suffix == ".csv"))


def compare(members: list[Member], count: int) -> pd.DataFrame:
    """A row a run, then one for each two that can be compared; accuracies and differences in percent."""
    accuracy = {m.folder: of_rounds(m) for m in members}
    rows = [
        {**about(m), "last": accuracy[m.folder].iloc[-1], **late(accuracy[m.folder], count)}
        for m in members
    ]
    for one, other in itertools.combinations(members, 2):
        if alike(one) == alike(other):
            ahead = accuracy[other.folder] - accuracy[one.folder]
            rows.append(
                {
                    **about(other),
                    "than": one.folder,
                    "minus": method(one),
                    "last": ahead.iloc[-1],
                    **late(ahead, count),
                    "ahead_in": int((ahead.iloc[-count:] > 0).sum()),
                }
            )
    columns = [
        "run",
        "method",
        "setting",
        "rounds",
        "than",
        "minus",
        "last",
        "mean",
        "std",
        "ahead_in",
    ]
    return pd.DataFrame(rows).reindex(columns=columns).astype({"ahead_in": "Int64"})


def alike(m: Member) -> tuple[object, ...]:
    """What runs share whose rounds can be compared one by one: all but the method, and where the data lie."""
    config = {
        s: {k: v for k, v in m.config[s].items() if (s, k) != ("data", "root")} for s in SHARED
    }
    return json.dumps(config, sort_keys=True), m.data, m.seed, m.run.done


def about(m: Member) -> dict[str, object]:
    where = f"{setting(m)}, {m.setting('train', 'precision')}, seed {m.seed}"
    return {"run": m.folder, "method": method(m), "setting": where, "rounds": m.run.done}


def of_rounds(m: Member) -> pd.Series:
    rows = only(
        m.tables["metrics"].frame,
        metric="accuracy",
        moment="aggregated",
        scope="global",
        slice="test",
    )
    return 100 * rows.set_index("round")["value"].astype(float).sort_index()


def late(values: pd.Series, count: int) -> dict[str, float]:
    part = values.iloc[-count:]
    return {"mean": part.mean(), "std": part.std()}


if __name__ == "__main__":
    main()
