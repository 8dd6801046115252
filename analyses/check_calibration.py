"""How often ``fldiag check`` cries wolf, and what it can see: ``python analyses/check_calibration.py``.

200 pairs A/A: two sides of one method (FedAvg, a small MLP, 600 training and 300 test examples of five Gaussian classes, other
ones in every pair), three freshly trained runs a side. Each pair is asked both questions at the 95 % level:

- methods: three pairs of runs, paired by order. Whatever is decided is a false alarm.
- models: the first run of each side on the 300 test examples. Two trained models are not equally good, so the limit is set at
  their true difference, known from 20,000 further examples (standard error about 0.2 points): whatever is decided is a false
  alarm. Beside it, what must not be done: asking whether the two models are equal, and reading the answer as one about methods.

The power over seeds is drawn from the same 600 differences of runs, either way round (A and B are one method), resampled, with a
planted shift.

Writes figures/check/pairs.csv (a pair as soon as it is done; those that are there are not made again), power.csv and
calibration.md. About half an hour on one core.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

import fldiag
from fldiag.compare.check import check
from fldiag.compare.reading import Reader
from fldiag.compare.sides import Sides
from fldiag_papers.study import write

OUT = Path(__file__).parents[1] / "figures" / "check"
PAIRS, SEEDS, CLASSES, INPUTS, TRAIN, TEST, POPULATION = 200, 3, 5, 10, 600, 300, 20_000
POINTS, SIZES, RESAMPLED, LEVEL = (0, 1, 2, 4), (3, 5, 10), 4000, 0.95


def examples(pair, folder):
    """Two data sets with the same training examples: one with the test examples, one with the population in their place."""
    rng = np.random.default_rng([0, pair])
    centres = rng.normal(size=(CLASSES, INPUTS))

    def some(n):
        y = rng.integers(0, CLASSES, n)
        return (centres[y] + rng.normal(size=(n, INPUTS))).astype(np.float32), y

    train = some(TRAIN)
    for name, n in (("data", TEST), ("population", POPULATION)):
        x, y = some(n)
        np.savez(
            folder / f"{name}.npz",
            train_images=train[0],
            train_labels=train[1],
            test_images=x,
            test_labels=y,
        )
    return folder / "data.npz", folder / "population.npz"


def accuracy(run):
    return float(run.metrics.query("metric == 'accuracy' and scope == 'global'")["value"].iloc[-1])


def one(pair):
    """What both questions say of one pair."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, population = examples(pair, folder)
        start = fldiag.Config.load(
            "digits",
            rounds=6,
            data__name=f"npz:{data}",
            model__name="mlp",
            train__epochs=1,
            train__batch_size=10,
            train__lr=0.3,
            clients__total=5,
            clients__per_round=4,
            partition__alpha=3.0,
            partition__seed=pair,
            checkpoint__every=6,
            checkpoint__clients="none",
        )
        seeds = 2 * SEEDS * pair + np.arange(2 * SEEDS)
        runs = [
            fldiag.train(start.model_copy(update={"seed": int(s)}), out=folder / str(s))
            for s in seeds
        ]
        a, b = runs[:SEEDS], runs[SEEDS:]
        found = [accuracy(r) for r in runs]
        true = fldiag.diff(a[0], b[0], numbers=["accuracy"], data=f"npz:{population}")
        difference = float(true["difference"].iloc[0])
        sign = "-" if difference < 0 else "+"
        limit = f"accuracy < baseline {sign} {100 * abs(difference):.6f}pt"
        return {
            "pair": pair,
            "methods": check(Sides(a, b, ("a", "b")), Reader({}), [], LEVEL).verdict,
            "models_true_difference": fldiag.check(a[0], b[0], fail_if=[limit]).verdict,
            "models_equal": fldiag.check(a[0], b[0], fail_if=["accuracy < baseline"]).verdict,
            "true_difference": difference,
            **{f"difference_{i}": found[i] - found[SEEDS + i] for i in range(SEEDS)},
        }


def power(differences):
    """How often a planted shift is decided, for n pairs of runs."""
    rng = np.random.default_rng(0)
    rows = []
    for n in SIZES:
        drawn = rng.choice(differences, size=(RESAMPLED, n)) * rng.choice(
            [-1, 1], size=(RESAMPLED, n)
        )
        for points in POINTS:
            p = stats.ttest_1samp(drawn + points / 100, 0, axis=1).pvalue
            decided = np.mean(p <= 1 - LEVEL)
            low, high = stats.binomtest(round(decided * RESAMPLED), RESAMPLED).proportion_ci(
                method="wilson"
            )
            rows.append(
                {"points": points, "seeds": n, "decided": decided, "low": low, "high": high}
            )
    return pd.DataFrame(rows)


def named(points):
    return f"{points} point{'s' * (points > 1)}" if points else "none (false alarms)"


def page(pairs, table, spread):
    """The numbers in words, of which none is typed."""
    lines = [
        "# False alarms and power of `fldiag check`",
        "",
        "`python analyses/check_calibration.py`; what is asked of whom stands there.",
        "",
        f"Of {len(pairs)} pairs of one method with itself, decided at the {100 * LEVEL:g} % level:",
        "",
        "| question | alarms | share (95 % interval) |",
        "|---|---|---|",
    ]
    for column, text in (
        ("methods", f"methods, {SEEDS} pairs of runs"),
        ("models_true_difference", "two given models, limit at their true difference"),
        (
            "models_equal",
            "misuse: two given models called different, read as an answer about methods",
        ),
    ):
        alarms = int((pairs[column] != "undecided").sum())
        ends = stats.binomtest(alarms, len(pairs)).proportion_ci(method="wilson")
        lines.append(
            f"| {text} | {alarms} | {alarms / len(pairs):.1%} ({ends.low:.1%} to {ends.high:.1%}) |"
        )
    lines += [
        "",
        f"Power over seeds, from {SEEDS * len(pairs)} differences of such runs (standard deviation "
        f"{100 * spread:.2f} points), resampled {RESAMPLED} times, with a planted shift:",
        "",
        "| planted difference | " + " | ".join(f"{n} seeds" for n in SIZES) + " |",
        "|---|" + "---|" * len(SIZES),
    ]
    for points in POINTS:
        rows = table[table["points"] == points].set_index("seeds")["decided"]
        lines.append(f"| {named(points)} | " + " | ".join(f"{rows[n]:.1%}" for n in SIZES) + " |")
    return "\n".join([*lines, ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=PAIRS)
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    file = OUT / "pairs.csv"
    for pair in range(args.pairs):
        done = set(pd.read_csv(file)["pair"]) if file.exists() else set()
        if pair not in done:
            pd.DataFrame([one(pair)]).to_csv(
                file, mode="a", header=not file.exists(), index=False, float_format="%.9g"
            )
    pairs = pd.read_csv(file)
    differences = pairs[[f"difference_{i}" for i in range(SEEDS)]].to_numpy().ravel()
    table, spread = power(differences), float(differences.std(ddof=1))
    write(table, OUT / "power", {"pairs": len(pairs)})
    (OUT / "calibration.md").write_text(page(pairs, table, spread), "utf-8")
    print(OUT / "calibration.md")


if __name__ == "__main__":
    main()
