"""Is FedX flatter? Methods on CIFAR-10 with three seeds: curvature, sharpness, accuracy and forgetting of the final models.

    python analyses/is_it_flatter.py run   [--only fedavg fedsam] [--store checkpoints/flatter]
    python analyses/is_it_flatter.py write [--store checkpoints/flatter] [--out figures/flatter]

The 50,000 images of CIFAR-10 under FedTOGA's protocol (100 clients, 10 a round, Dirichlet 0.1, lr 0.1, weight decay 1e-3,
clipping at 10, uniform averages), reduced to a core-minute a run: ``small_lenet`` in place of LeNet, 40 rounds in place of 800
with a decay of the lr of 0.97 in place of 0.997, one local epoch in batches of 20 in place of five in batches of 50.

``run``: train what is not there or was stopped, and measure it. ``write``: the numbers of all runs (``rows.csv.gz``, which is
read where no run is in the store), statements paired over the seeds, rank
correlations, a table and a picture, of the methods whose three seeds are measured. Runs name ``is_it_flatter:small_lenet`` as
their model: have ``analyses`` on PYTHONPATH, and FLDIAG_DATA. About a minute a run to train and half a minute to measure, on one
core.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats
from torch import nn

import fldiag
from fldiag.plotting import style
from fldiag_papers.study import write as write_table

ROWS = "rows.csv"
COLUMNS = ["method", "seed", "round", "client", "measure", "value", "stderr"]
PRESET, MODEL = "fedtoga-cifar10-dir0.1", "is_it_flatter:small_lenet"
ROUNDS, SEEDS = 40, (0, 1, 2)
#: Training images of which every number of a global model is the mean, and fewer, to see what they change.
EXAMPLES, FEW = 2000, 500
#: How many of the last round's clients are measured, each on at most so many of its training images.
CLIENTS, OWN_EXAMPLES = 5, 500
#: In the order of training, so that an early end leaves triples of seeds. Options: the defaults, which say their source
#: (``fldiag explain METHOD``), but FedProx's mu of FL-Simulator's table, and FedSOL's Lambda of the released code. FedTOGA's
#: own rho of FedSAM and MoFedSAM is 0.01, a tenth of what it gives the other methods: here all of these have 0.1.
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedsam": {"rho": 0.1},
    "fedsmoo": {"rho": 0.1, "lam": 0.1},
    "fedlesam": {"rho": 0.01},
    "fedsol": {"lambda_norm": "dim0", "rho": 1.5},
    "fedprox": {"mu": 0.1},
    "scaffold": {},
    "feddyn": {"lam": 0.1},
    "fedspeed": {"rho": 0.1, "lam": 0.1},
    "mofedsam": {"rho": 0.1},
    "fedasam": {},
    "fedtoga": {},
    "fedntd": {},
}
#: Nearly FedAvg's model at these options, so that each counts FedAvg once more in a rank correlation.
NEAR_FEDAVG = ("fedlesam", "fedprox")
#: Measure -> how a reader calls it, and how two methods are compared: by the ratio or by the difference.
MEASURES: dict[str, tuple[str, str]] = {
    "lambda_1": ("λ₁", "ratio"),
    "lambda_ratio": ("λ₁/λ₅", "ratio"),
    "trace": ("trace", "ratio"),
    "plain_sharpness": ("plain sharpness", "ratio"),
    "adaptive_sharpness": ("adaptive sharpness", "ratio"),
    "lambda_1_500": ("λ₁ on 500 images", "ratio"),
    "clients_lambda_1": ("clients' λ₁", "ratio"),
    "clients_adaptive_sharpness": ("clients' adaptive sharpness", "ratio"),
    "loss": ("training loss", "difference"),
    "clients_loss": ("clients' training loss", "difference"),
    "accuracy": ("test accuracy", "difference"),
    "forgetting": ("forgetting", "difference"),
}


def small_lenet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet with a stride of 2 and a quarter to a third of its widths: 39,338 parameters on 32x32x3 images."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (shape[1] // 8) * (shape[2] // 8), 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


def train(method: str, seed: int, path: Path) -> fldiag.Run:
    """The run of a method and seed; read where it is finished, continued where it was broken."""
    over = {f"method.{key}": value for key, value in METHODS[method].items()}
    config = fldiag.Config.load(
        PRESET,
        rounds=ROUNDS,
        seed=seed,
        train__epochs=1,
        train__batch_size=20,
        train__lr_decay=0.97,
        model__name=MODEL,
        checkpoint__every=10,
        checkpoint__clients="sampled",
        method__name=method,
        **over,
    )
    return fldiag.train(config, out=path, resume=True)


def measure(run: fldiag.Run) -> pd.DataFrame:
    """A row for each number of the run: of its final model and that round's clients; of FedAvg, of earlier models too."""
    final = measured(run, samples=EXAMPLES, k=5, trace=True)
    few = measured(run, samples=FEW).query("measure == 'lambda_1'")
    tables = [final, few.assign(measure="lambda_1_500")]
    if run.config.method.name == "fedavg":
        earlier = run.rounds[:-1]
        tables += [measured(run, samples=EXAMPLES, round=r).assign(round=r) for r in earlier]
    forgetting = fldiag.diagnose(run, "forgetting", rounds="last", own=False)
    whole = forgetting[(forgetting["scope"] == "global") & forgetting["index"].isna()]
    for metric, moment, name in (
        ("drop", "trained", "forgetting"),
        ("accuracy", "aggregated", "accuracy"),
    ):
        row = whole[(whole["metric"] == metric) & (whole["moment"] == moment)].head(1)
        tables.append(row.assign(measure=name)[["measure", "value", "stderr"]])
    for client in run.checkpoint().client_ids[:CLIENTS]:
        where = {"client": client, "slice": f"client:{client}", "samples": OWN_EXAMPLES}
        table = measured(run, **where).query("measure != 'plain_sharpness'")
        tables.append(table.assign(client=client))
    about = {"method": run.config.method.name, "seed": run.config.seed}
    table = pd.concat(tables, ignore_index=True).assign(**about)
    return table.fillna({"round": ROUNDS}).reindex(columns=COLUMNS)


def measured(run: fldiag.Run, k: int = 1, trace: bool = False, **where: Any) -> pd.DataFrame:
    """Curvature, sharpness and loss of one model of the run."""
    spectrum = fldiag.diagnose(run, "spectrum", k=k, trace=trace, **where)
    sharpness = fldiag.diagnose(run, "sharpness", steps=30, draws=1, **where)
    names = {"eigenvalue": "lambda_1", "eigenvalue_ratio": "lambda_ratio", "trace": "trace"}
    is_whole = spectrum["layer"].isna() & (spectrum["metric"] != "loss")
    is_later = (spectrum["metric"] == "eigenvalue") & (spectrum["index"] > 1)
    table = pd.concat([spectrum[is_whole & ~is_later], sharpness])
    table = table[table["metric"].isin([*names, "loss", "adaptive_sharpness", "plain_sharpness"])]
    return table.assign(measure=table["metric"].replace(names))[["measure", "value", "stderr"]]


def final_numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each method and seed, a column for each measure: of the final model, and means over the clients."""
    final = rows[rows["round"] == ROUNDS]
    name = final["measure"].where(final["client"].isna(), "clients_" + final["measure"])
    table = final.assign(measure=name).groupby(["method", "seed", "measure"])["value"].mean()
    return table.unstack("measure")


def compare(table: pd.DataFrame, measure: str, method: str, other: str) -> dict[str, Any]:
    """Method over the other (a ratio), or minus it, paired over the seeds that both have."""
    a, b = (table.loc[name, measure] for name in (method, other))
    if MEASURES[measure][1] == "difference":
        return interval((a - b).dropna())
    return interval((np.log(a) - np.log(b)).dropna(), is_ratio=True)


def interval(differences: Any, is_ratio: bool = False) -> dict[str, Any]:
    """Mean and 95 % t interval, of logarithms their exponentials; ``verdict``: lower or higher where the whole interval lies on
    one side of no difference, else open."""
    low, high = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    verdict = "lower" if high < 0 else "higher" if low > 0 else "open"
    ends = np.array([np.mean(differences), low, high])
    value, low, high = np.exp(ends) if is_ratio else ends
    return {"value": value, "low": low, "high": high, "verdict": verdict}


def at_equal_loss(rows: pd.DataFrame, measure: str, method: str) -> dict[str, Any] | None:
    """The final model's measure over FedAvg's at the same training loss and seed; None where FedAvg's loss crosses the model's
    between no neighbouring rounds."""
    wide = rows[rows["client"].isna()].pivot_table(
        index=["method", "seed", "round"], columns="measure", values="value"
    )
    logs = []
    for seed in SEEDS:
        model, path = wide.loc[(method, seed, ROUNDS)], wide.loc[("fedavg", seed)]
        log = latest_crossing(path["loss"], np.log(path[measure]), model["loss"])
        if log is None:
            return None
        logs.append(np.log(model[measure]) - log)
    return interval(logs, is_ratio=True)


def latest_crossing(losses: pd.Series, logs: pd.Series, loss: float) -> float | None:
    """The logarithm where the losses, by round, last pass this one: on the straight line between the two rounds."""
    for i in reversed(range(len(losses) - 1)):
        ends = losses.iloc[i : i + 2].to_numpy()
        if ends.min() <= loss <= ends.max():
            order = np.argsort(ends)
            return float(np.interp(loss, ends[order], logs.iloc[i : i + 2].to_numpy()[order]))
    return None


def statements(rows: pd.DataFrame) -> pd.DataFrame:
    """Every method against FedAvg and against FedSAM, in every measure; against FedAvg also at equal training loss."""
    table, methods = final_numbers(rows), rows["method"].unique()
    lines = [
        {"method": method, "other": other, "measure": m, **compare(table, m, method, other)}
        for other, method, m in product(("fedavg", "fedsam"), methods, MEASURES)
        if method != other
    ]
    for method, measure in product(methods, ("lambda_1", "adaptive_sharpness")):
        line = at_equal_loss(rows, measure, method) if method != "fedavg" else None
        if line is not None:
            name = f"{measure} at equal loss"
            lines.append({"method": method, "other": "fedavg", "measure": name, **line})
    return pd.DataFrame(lines)


def correlations(table: pd.DataFrame) -> pd.DataFrame:
    """Spearman's rank correlation over the methods of every measure with the test accuracy and with the training loss: of the
    methods' means, with its p by the t distribution, and the smallest and largest of one seed alone."""
    means = table.groupby("method").mean()
    lines = []
    for measure, outcome in product(MEASURES, ("accuracy", "loss")):
        if measure != outcome:
            test = stats.spearmanr(means[measure], means[outcome])
            seeds = rank_correlations(table, measure, outcome)
            lines.append(
                {
                    "measure": measure,
                    "outcome": outcome,
                    "value": float(test.statistic),
                    "p": float(test.pvalue),
                    "smallest": min(seeds),
                    "largest": max(seeds),
                    "methods": len(means),
                }
            )
    return pd.DataFrame(lines)


def rank_correlations(table: pd.DataFrame, a: str, b: str) -> list[float]:
    """Spearman's over the methods, of every seed."""
    return [float(stats.spearmanr(part[a], part[b]).statistic) for _, part in table.groupby("seed")]


def changes(rows: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """What the answer depends on: mean, smallest and largest over the runs (of rank correlations over the seeds)."""
    of_models = rows[rows["client"].isna()]
    path = of_models[of_models["method"] == "fedavg"].pivot_table(
        index=["seed", "round"], columns="measure", values="value"
    )

    def over_rounds(measure: str, first: int) -> np.ndarray:
        values = path[measure].unstack("round")
        return (values[ROUNDS] / values[first]).to_numpy()

    values = {
        "λ₁ on 500 over λ₁ on 2,000 images": table["lambda_1_500"] / table["lambda_1"],
        "rank correlation of λ₁ on 500 and on 2,000 images": rank_correlations(
            table, "lambda_1_500", "lambda_1"
        ),
        "rank correlation of λ₁ and trace": rank_correlations(table, "lambda_1", "trace"),
        "rank correlation of λ₁ and adaptive sharpness": rank_correlations(
            table, "lambda_1", "adaptive_sharpness"
        ),
        "rank correlation of λ₁ and clients' λ₁": rank_correlations(
            table, "lambda_1", "clients_lambda_1"
        ),
        "FedAvg's λ₁, round 40 over round 20": over_rounds("lambda_1", 20),
        "FedAvg's adaptive sharpness, round 40 over round 20": over_rounds(
            "adaptive_sharpness", 20
        ),
    }
    return pd.DataFrame(
        {"number": name, "mean": np.mean(v), "smallest": np.min(v), "largest": np.max(v)}
        for name, v in values.items()
    )


def markdown(table: pd.DataFrame, lines: pd.DataFrame) -> str:
    """A row for each method, by accuracy: mean ± deviation over the seeds, and both sharpnesses over FedAvg's."""
    means, spread = (getattr(table.groupby("method"), f)() for f in ("mean", "std"))
    ratios = lines[lines["other"] == "fedavg"].set_index(["method", "measure"])

    def cell(method: str, measure: str, scale: float, digits: int) -> str:
        values = (scale * frame.loc[method, measure] for frame in (means, spread))
        return " ± ".join(f"{value:.{digits}f}" for value in values)

    def ratio(method: str, measure: str) -> str:
        if (method, measure) not in ratios.index:
            return "–"
        row = ratios.loc[(method, measure)]
        text = f"{row['value']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        return text if row["verdict"] == "open" else f"**{text}**"

    columns = (
        ("test accuracy %", lambda m: cell(m, "accuracy", 100, 1)),
        ("training loss", lambda m: cell(m, "loss", 1, 2)),
        ("λ₁", lambda m: cell(m, "lambda_1", 1, 1)),
        ("λ₁ / FedAvg's", lambda m: ratio(m, "lambda_1")),
        ("adaptive sharpness / FedAvg's", lambda m: ratio(m, "adaptive_sharpness")),
        ("clients' λ₁ / FedAvg's", lambda m: ratio(m, "clients_lambda_1")),
        ("forgetting %", lambda m: cell(m, "forgetting", 100, 1)),
    )
    order = means["accuracy"].sort_values(ascending=False).index
    head = ["method", *(title for title, _ in columns)]
    body = [[style.display_name(m), *(text(m) for _, text in columns)] for m in order]
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *body])


def draw(table: pd.DataFrame, lines: pd.DataFrame) -> Figure:
    """Every method over FedAvg, a panel for each measure, with 95 % intervals; methods from the most accurate down."""
    panels = {
        "lambda_1": "λ₁",
        "trace": "trace",
        "adaptive_sharpness": "adaptive\nsharpness",
        "clients_adaptive_sharpness": "adaptive sharpness\nof the clients",
        "accuracy": "test accuracy,\npoints",
    }
    means = table.groupby("method")["accuracy"].mean().sort_values(ascending=False)
    methods = [m for m in means.index if m != "fedavg"]
    against = lines[lines["other"] == "fedavg"].set_index("method")
    ratios = against[against["measure"].isin(list(panels)[:-1])]
    limits = ratios["low"].min() / 1.1, ratios["high"].max() * 1.1
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10) if limits[0] <= t <= limits[1]]
    with style.paper():
        fig = style.figure(style.TWO_COLUMNS, 1.3 + 0.2 * len(methods), layout="constrained")
        for ax, (measure, title) in zip(
            fig.subplots(1, len(panels), sharey=True), panels.items(), strict=True
        ):
            scale = 100 if measure == "accuracy" else 1
            part = against[against["measure"] == measure].reindex(methods)
            value, low, high = (scale * part[c].to_numpy(float) for c in ("value", "low", "high"))
            ax.axvline(0 if measure == "accuracy" else 1, color="black", linewidth=0.6)
            ax.errorbar(
                value,
                range(len(methods)),
                xerr=(value - low, high - value),
                fmt="o",
                markersize=3.5,
                linewidth=0.9,
            )
            if measure != "accuracy":
                ax.set(xscale="log", xlim=limits)
                ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
                ax.set_xticks([], minor=True)
            ax.set_title(title, fontsize=7.5)
            ax.grid(True, axis="x")
        ax.set_yticks(range(len(methods)), [style.display_name(m) for m in methods])
        ax.invert_yaxis()
        fig.suptitle(
            f"Over FedAvg's (ratios), and minus FedAvg's (accuracy): CIFAR-10, small LeNet, {ROUNDS} rounds, {len(SEEDS)} seeds",
            fontsize=8,
        )
    return fig


def with_all_seeds(rows: pd.DataFrame) -> pd.DataFrame:
    seeds = rows.groupby("method")["seed"].nunique()
    return rows[rows["method"].map(seeds) == len(SEEDS)]


def write(rows: pd.DataFrame, out: Path) -> None:
    """Tables, statements and the picture."""
    table, lines = final_numbers(rows), statements(rows)
    others = table.drop(index=list(NEAR_FEDAVG), level="method", errors="ignore")
    all_methods = correlations(table).assign(without="")
    correlation = pd.concat(
        [all_methods, correlations(others).assign(without=" ".join(NEAR_FEDAVG))]
    )
    dependence = changes(rows, table)
    table.to_csv(out / "runs.csv", float_format="%.6g")
    correlation.to_csv(out / "correlations.csv", index=False, float_format="%.3f")
    dependence.to_csv(out / "changes.csv", index=False, float_format="%.3f")
    (out / "flatter.md").write_text(markdown(table, lines), "utf-8")
    about = {"rounds": ROUNDS, "seeds": len(SEEDS), "examples": EXAMPLES, "preset": PRESET}
    print(*write_table(lines, out / "statements", about), sep="\n")
    style.save(draw(table, lines), out / "flatter", ("png",))
    for frame in (lines[lines["verdict"] != "open"], correlation, dependence):
        print(frame.to_string(index=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("verb", choices=["run", "write"])
    parser.add_argument("--only", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--store", type=Path, default=Path("checkpoints/flatter"))
    parser.add_argument("--out", type=Path, default=Path("figures/flatter"))
    args = parser.parse_args()
    if args.verb == "write":
        write(with_all_seeds(table_of(args.store, args.out)), args.out)
        return
    for method, seed in product(args.only, SEEDS):
        path = args.store / f"{method}-s{seed}"
        if not (path / ROWS).exists():
            train(method, seed, path)
            rows = measure(fldiag.load(path, allow_code=MODEL))
            rows.to_csv(path / ROWS, index=False, float_format="%.6g")
            print(f"{path.name}: {len(rows)} numbers", flush=True)


def table_of(store: Path, out: Path) -> pd.DataFrame:
    """The numbers of all runs: of those in the store, or where there are none, of the table that was written."""
    if files := sorted(store.glob(f"*/{ROWS}")):
        table = pd.concat([pd.read_csv(file) for file in files])
        packed = {"method": "gzip", "mtime": 0}  # the same bytes each time
        table.to_csv(out / f"{ROWS}.gz", index=False, float_format="%.6g", compression=packed)
    return pd.read_csv(out / f"{ROWS}.gz")


if __name__ == "__main__":
    main()
