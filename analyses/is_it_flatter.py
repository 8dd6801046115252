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
import itertools
import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy import stats
from torch import nn

import fldiag
from fldiag import Config, Problem
from fldiag.curvature.lanczos import lanczos
from fldiag.plotting import style, words
from fldiag.problem.diagonal import diagonal
from fldiag.results.provenance import provenance
from fldiag.results.select import WHOLE, number
from fldiag.results.uncertainty import Interval, paired_t
from fldiag.runs.open_problem import open_problem
from fldiag.runs.run import Run

ROWS = "rows.csv"
PRESET, MODEL = "fedtoga-cifar10-dir0.1", "is_it_flatter:small_lenet"
ROUNDS, SEEDS = 40, (0, 1, 2)
#: Training images of which every number of a global model is the mean, and the parts of them that its error comes from.
EXAMPLES, PARTS = 2000, 4
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
        OrderedDict(
            [
                ("conv1", nn.Conv2d(shape[0], 16, 5, stride=2, padding=2)),
                ("relu1", nn.ReLU()),
                ("pool1", nn.MaxPool2d(2)),
                ("conv2", nn.Conv2d(16, 32, 3, padding=1)),
                ("relu2", nn.ReLU()),
                ("pool2", nn.MaxPool2d(2)),
                ("flatten", nn.Flatten()),
                ("fc", nn.Linear(32 * (shape[1] // 8) * (shape[2] // 8), 64)),
                ("relu3", nn.ReLU()),
                ("classifier", nn.Linear(64, classes)),
            ]
        )
    )


def train(method: str, seed: int, path: Path) -> Run:
    """The run of a method and seed; read where it is finished, continued where it was broken."""
    config = Config.load(
        PRESET,
        rounds=ROUNDS,
        seed=seed,
        train__epochs=1,
        train__batch_size=20,
        train__lr_decay=0.97,
        model__name=MODEL,
        checkpoint__every=10,
        checkpoint__clients="sampled",
        **{
            "method__name": method,
            **{f"method__{key}": value for key, value in METHODS[method].items()},
        },
    )
    return fldiag.train(config, out=path, resume=True)


def measure(run: Run) -> pd.DataFrame:
    """A row for each number of the run: of its final model and that round's clients; of FedAvg, of earlier models too."""
    rows = list(global_rows(open_problem(run, samples=EXAMPLES)))
    if run.config.method.name == "fedavg":
        for r in run.rounds[:-1]:
            problem = open_problem(run, samples=EXAMPLES, round=r)
            rows += [{**row, "round": r} for row in earlier_rows(problem)]
    forgetting = fldiag.diagnose(run, "forgetting", rounds="last", own=False)
    rows.append(row_of(forgetting, "drop", "forgetting", moment="trained", **WHOLE))
    rows.append(row_of(forgetting, "accuracy", "accuracy", moment="aggregated", **WHOLE))
    for client in run.checkpoint().client_ids[:CLIENTS]:
        problem = open_problem(run, client=client, slice=f"client:{client}", samples=OWN_EXAMPLES)
        spectrum = fldiag.diagnose(problem, "spectrum", k=1)
        sharpness = fldiag.diagnose(problem, "sharpness", steps=30, draws=1)
        rows.append({**row_of(spectrum, "eigenvalue", "lambda_1", index=1), "client": client})
        for metric in ("loss", "adaptive_sharpness"):
            rows.append({**row_of(sharpness, metric), "client": client})
    about = {"method": run.config.method.name, "seed": run.config.seed}
    return pd.DataFrame([{**about, "round": ROUNDS, "client": None, **row} for row in rows])


def row_of(frame: pd.DataFrame, metric: str, name: str = "", **where: Any) -> dict[str, Any]:
    value, stderr = (number(frame, metric, column=c, **where) for c in ("value", "stderr"))
    return {"measure": name or metric, "value": value, "stderr": stderr}


def part_of(problem: Problem, examples: torch.Tensor) -> Problem:
    """The same loss at the same weights on some examples."""
    x, y = problem.data.batch(0, problem.n)
    data = x[examples], y[examples]
    return Problem(problem.module, problem.user_loss, data, problem.w, problem.buffers)


def global_rows(problem: Problem) -> Iterator[dict[str, Any]]:
    """Numbers of one model. The error of lambda_1, with its eigenvector held fixed, and that of the trace are over the parts."""
    pairs = lanczos(problem.hessian(), problem.layout.size, 5)
    parts = [part_of(problem, torch.arange(i, EXAMPLES, PARTS)) for i in range(PARTS)]
    vector = pairs.vectors[0]
    quotients = [float(vector @ part.hvp(vector)) for part in parts]
    traces = [diagonal(part).trace()[0] for part in parts]
    for name, values in (("lambda_1", quotients), ("trace", traces)):
        yield {"measure": name, "value": np.mean(values), "stderr": stats.sem(values)}
    yield {"measure": "lambda_ratio", "value": float(pairs.values[0] / pairs.values[4])}
    small = lanczos(parts[0].hessian(), problem.layout.size, 1)
    yield {"measure": "lambda_1_500", "value": float(small.values[0])}
    sharpness = fldiag.diagnose(problem, "sharpness", steps=30, draws=1)
    for metric in ("loss", "adaptive_sharpness", "plain_sharpness"):
        yield row_of(sharpness, metric)


def earlier_rows(problem: Problem) -> Iterator[dict[str, Any]]:
    """What a comparison at equal training loss needs of a model."""
    yield row_of(fldiag.diagnose(problem, "spectrum", k=1), "eigenvalue", "lambda_1", index=1)
    sharpness = fldiag.diagnose(problem, "sharpness", steps=30, draws=1)
    for metric in ("loss", "adaptive_sharpness"):
        yield row_of(sharpness, metric)


def final_numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each method and seed, a column for each measure: of the final model, and means over the clients."""
    final = rows[rows["round"] == ROUNDS]
    name = final["measure"].where(final["client"].isna(), "clients_" + final["measure"])
    table = final.assign(measure=name).groupby(["method", "seed", "measure"])["value"].mean()
    return table.unstack("measure")


def compare(table: pd.DataFrame, measure: str, method: str, other: str) -> Interval:
    """Method over the other (a ratio), or minus it, paired over the seeds that both have: mean and 95 % t interval."""
    a, b = (table.loc[name, measure] for name in (method, other))
    if MEASURES[measure][1] == "difference":
        return paired_t((a - b).dropna().to_numpy())
    return exponential(paired_t((np.log(a) - np.log(b)).dropna().to_numpy()))


def exponential(logs: Interval) -> Interval:
    """The interval of a geometric mean from that of the logarithms; without an interval where those have none."""
    ends = (None if end is None else float(np.exp(end)) for end in (logs.low, logs.high))
    return Interval(float(np.exp(logs.value)), *ends, logs.p)


def at_equal_loss(rows: pd.DataFrame, measure: str, method: str) -> Interval | None:
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
    return exponential(paired_t(np.array(logs)))


def latest_crossing(losses: pd.Series, logs: pd.Series, loss: float) -> float | None:
    """The logarithm where the losses, by round, last pass this one: on the straight line between the two rounds."""
    for i in reversed(range(len(losses) - 1)):
        ends = losses.iloc[i : i + 2].to_numpy()
        if ends.min() <= loss <= ends.max():
            order = np.argsort(ends)
            return float(np.interp(loss, ends[order], logs.iloc[i : i + 2].to_numpy()[order]))
    return None


def verdict(interval: Interval, neutral: float) -> str:
    """Lower, higher or open: on which side of the neutral value the whole interval lies."""
    if interval.low is None or interval.high is None or interval.low <= neutral <= interval.high:
        return "open"
    return "lower" if interval.high < neutral else "higher"


def statements(rows: pd.DataFrame) -> pd.DataFrame:
    """Every method against FedAvg and against FedSAM, in every measure; against FedAvg also at equal training loss."""
    table = final_numbers(rows)
    lines = [
        {
            "method": method,
            "other": other,
            "measure": measure,
            **columns_of(compare(table, measure, method, other), measure),
        }
        for other in ("fedavg", "fedsam")
        for method in dict.fromkeys(rows["method"])
        for measure in MEASURES
        if method != other
    ]
    for method in dict.fromkeys(rows["method"]):
        for measure in ("lambda_1", "adaptive_sharpness"):
            interval = at_equal_loss(rows, measure, method) if method != "fedavg" else None
            if interval is not None:
                name = f"{measure} at equal loss"
                lines.append(
                    {
                        "method": method,
                        "other": "fedavg",
                        "measure": name,
                        **columns_of(interval, measure),
                    }
                )
    return pd.DataFrame(lines)


def columns_of(interval: Interval, measure: str) -> dict[str, Any]:
    neutral = 0.0 if MEASURES[measure][1] == "difference" else 1.0
    ends = {"value": interval.value, "low": interval.low, "high": interval.high}
    return {**ends, "verdict": verdict(interval, neutral)}


def correlations(table: pd.DataFrame) -> pd.DataFrame:
    """Spearman's rank correlation over the methods of every measure with the test accuracy and with the training loss: of the
    methods' means, with its p by the t distribution, and the smallest and largest of one seed alone."""
    means = table.groupby("method").mean()
    lines = []
    for measure, outcome in itertools.product(MEASURES, ("accuracy", "loss")):
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
    lambda_1 = of_models[(of_models["measure"] == "lambda_1") & (of_models["round"] == ROUNDS)]

    def over_rounds(measure: str, first: int) -> np.ndarray:
        values = path[measure].unstack("round")
        return (values[ROUNDS] / values[first]).to_numpy()

    values = {
        "λ₁ on 500 over λ₁ on 2,000 images": table["lambda_1_500"] / table["lambda_1"],
        "standard error of λ₁ over λ₁": lambda_1["stderr"] / lambda_1["value"],
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
    body = [[words.method(m), *(text(m) for _, text in columns)] for m in order]
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
        ax.set_yticks(range(len(methods)), [words.method(m) for m in methods])
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
    correlation = pd.concat(
        [
            correlations(table).assign(without=""),
            correlations(others).assign(without=" ".join(NEAR_FEDAVG)),
        ]
    )
    dependence = changes(rows, table)
    about = provenance(rounds=ROUNDS, seeds=len(SEEDS), examples=EXAMPLES, preset=PRESET)
    text = markdown(table, lines)
    table.to_csv(out / "runs.csv", float_format="%.6g")
    lines.to_csv(out / "statements.csv", index=False, float_format="%.4g")
    correlation.to_csv(out / "correlations.csv", index=False, float_format="%.3f")
    dependence.to_csv(out / "changes.csv", index=False, float_format="%.3f")
    (out / "flatter.json").write_text(json.dumps(about, indent=1), "utf-8")
    (out / "flatter.md").write_text(text, "utf-8")
    style.save(draw(table, lines), out / "flatter.png")
    print(lines[lines["verdict"] != "open"].to_string(index=False))
    print(correlation.to_string(index=False))
    print(dependence.to_string(index=False))
    print(text)
    print(out / "flatter.md")


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
    for method, seed in itertools.product(args.only, SEEDS):
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
