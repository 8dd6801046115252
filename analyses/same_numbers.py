"""Whether this working tree gives the numbers of commit 35863d3, diagnostic by diagnostic.

    python analyses/same_numbers.py make FOLDER      once: that commit's runs and its numbers
    python analyses/same_numbers.py compare FOLDER   this tree's numbers of the same weights
                                                     [--only drift matching]

``make`` unpacks the commit into FOLDER/source. Its code trains two runs and records two, and
diagnoses these and the example checkpoints, in one thread. Commit 848c3bd5 has
``analyses/convert_runs.py``, which writes FOLDER/runs in today's format to FOLDER/runs.new.
``compare`` lets the code of this tree diagnose the same files and train the two trained runs again.
Rows are matched by what names them (metric, client, round, ...). A number may differ by 1e-6 of the
largest one of its metric in the table, by the residuals of both, and by five standard errors where
it is an estimate. One line a table, and one for each metric that differs, is missing or is new; exit
code 1 where a number differs or a row is missing that is not named in GONE. About three minutes of
one core.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).parents[1]
COMMIT = "35863d3e"
TOLERANCE = 1e-6
#: Columns of numbers; every other column names the row, but those of sentences.
NUMBERS = ["value", "stderr", "residual", "low", "high"]
COORDINATES = ["x", "y", "rho", "eta"]
SENTENCES = [
    "what",
    "consequence",
    "remedy",
    "title",
    "note",
    "unit",
    "evidence",
    "products",
    "guess",
    "inputs",
    "converged",
    "bound",
    "eigenvalue",
]

SMALL = {
    "rounds": 3,
    "partition__alpha": 0.5,
    "train__epochs": 1,
    "clients__per_round": 3,
    "checkpoint__clients": "sampled",
    "metrics__steps": True,
}
#: The trained runs, as overrides of the preset digits.
TRAINED: dict[str, dict[str, Any]] = {
    "plain": {**SMALL, "method__name": "fedsol", "clients__total": 4},
    "lora": {
        **SMALL,
        "method__name": "scaffold",
        "clients__total": 6,
        "model__name": "mlp",
        "model__lora_rank": 2,
        "train__momentum": 0.9,
        "train__lr": 0.01,
    },
}
DIGITS = ("fedavg-digits", "fedsol-digits")
FEW = {"samples": 100}
#: (diagnostic, targets, options at the commit): what stays, by each way of computing.
CASES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("spectrum", ("fedsol-digits",), {**FEW, "k": 3, "trace": True, "diagonal": True}),
    ("spectrum", ("fedsol-digits",), {**FEW, "k": 2, "per_layer": True}),
    ("spectrum", ("fedsol-digits",), {**FEW, "k": 2, "matrix": "ggn"}),
    ("spectrum", ("fedsol-digits",), {**FEW, "k": 2, "which": "smallest"}),
    ("spectrum", ("fedsol-digits",), {**FEW, "k": 2, "which": "magnitude"}),
    ("spectrum", ("fedsol-digits",), {**FEW, "k": 2, "precision": "fp64"}),
    ("spectrum", ("fedsol-digits",), {**FEW, "k": 2, "engine": "pyhessian"}),
    ("spectrum", ("fedsol-cifar10",), {"k": 2, "trace": True, "diagonal": True}),
    ("spectrum", ("lora",), {**FEW, "k": 2, "trainable": True}),
    ("spectrum", ("norm",), {"k": 3, "trace": True, "diagonal": True}),
    ("spectrum", ("text",), {"k": 3, "trace": True, "diagonal": True}),
    ("density", ("fedsol-digits",), {**FEW}),
    ("sharpness", ("fedsol-digits",), {**FEW}),
    ("profile", ("fedsol-digits",), {**FEW, "k": 2, "points": 7}),
    ("profile", ("fedsol-digits",), {**FEW, "directions": "random", "points": 7}),
    ("connectivity", DIGITS, {"samples": 50, "points": 5}),
    ("landscape", ("fedsol-digits",), {**FEW, "k": 2}),
    ("landscape", ("fedsol-digits",), {**FEW, "directions": "random"}),
    ("landscape", DIGITS, {"samples": 50, "directions": "random"}),
    ("landscape", ("plain",), {**FEW, "directions": "pca"}),
    ("landscape", (*DIGITS, "plain"), {**FEW, "directions": "plane"}),
    *(
        (name, (run,), options)
        for run in ("plain", "lora", "norm", "text")
        for name, options in (
            ("account", {"k": 2, "every_round": True}),
            ("drift", {}),
            ("fairness", {}),
            ("fairness", {"on": "train", "every_round": True}),
            ("flatness", {"tol": 1e-4}),
            ("forgetting", {}),
            ("geometry", {}),
            ("matching", {"k": 2, "every_round": True}),
        )
    ),
    ("drift", ("lora",), {"loss": "l2", "strength": "fixed", "per": "tensor"}),
    ("lora", ("lora",), {}),
    ("personalise", ("plain",), {"epochs": [0, 1]}),
    ("personalise", ("lora",), {"epochs": [1]}),
]
#: Table of a case -> the diagnostic and options that give it today, where they are spelled otherwise.
SPELLED: dict[str, tuple[str, dict[str, Any]]] = {
    "density fedsol-digits samples=100": ("spectrum", {**FEW, "density": True}),
    "spectrum fedsol-digits samples=100 k=3 trace=True diagonal=True": (
        "spectrum",
        {**FEW, "k": 3, "trace": True},
    ),
    "spectrum fedsol-cifar10 k=2 trace=True diagonal=True": ("spectrum", {"k": 2, "trace": True}),
    "spectrum norm k=3 trace=True diagonal=True": ("spectrum", {"k": 3, "trace": True}),
    "spectrum text k=3 trace=True diagonal=True": ("spectrum", {"k": 3, "trace": True}),
    "profile fedsol-digits samples=100 k=2 points=7": ("paths", {**FEW, "points": 7}),
    "profile fedsol-digits samples=100 directions=random points=7": (
        "paths",
        {**FEW, "directions": "random", "points": 7},
    ),
    "connectivity fedavg-digits fedsol-digits samples=50 points=5": (
        "paths",
        {"samples": 50, "points": 33},  # the places to which it refined the barrier
    ),
}
#: Cases whose options went.
GONE_CASES = ["drift lora loss=l2 strength=fixed per=tensor"]
#: Of rows that went: of ``account`` the path integral and the terms by layer, of ``fairness`` the mean over clients of the
#: calibration error.
GONE_ESTIMATORS = ("path", "layer", "weighted mean of clients")
#: Estimators that are called otherwise today.
RENAMED = {"hutchinson-deflated": "hutchinson", "lanczos-ggn": "lanczos"}
#: Of which fewer rows are given: points of a surface that were interpolated, or evaluated elsewhere; calibration of single
#: clients; the features of clients' models on their own examples; how far single clients moved, which another row says.
FEWER = [
    "landscape loss",
    "fairness ece",
    "fairness ece_floor",
    "drift update_norm",
    *(f"geometry {m}" for m in ("effective_rank", "nc1", "nc2_cosines", "nc2_norms", "nc3", "nc4")),
]
#: What goes: patterns of "diagnostic metric".
GONE = [
    "matching curvature",  # shares by part; the trace stays
    "account path",
    "account *harm",
    "connectivity accuracy_barrier",
    "connectivity barrier",  # had a residual, of its refinement; the same value
    "connectivity budget",
    "connectivity mean_loss",
    "connectivity midpoint",
    "connectivity model_*",
    "profile accuracy",
    "profile eigenvalue*",
    "drift proposition_*",
    "drift update_snr",
    "fairness auc",
    "fairness bin_*",  # the reliability diagram; the calibration error stays
    "drift gradient_norm",
    "drift cka",  # is another number for chains with batch-norm or adapters: of what the head sees, not of the outputs
    "fairness f1",
    "flatness flatness_distance",
    "flatness gradient_score",
    "flatness *misalignment",
    "flatness *echo*",
    "fairness size_correlation",
    "forgetting average_forgetting",  # is another number: the model before training counts
    "forgetting class_fluctuation",
    "forgetting forgotten",
    "forgetting gem_*",
    "forgetting granular*",
    "forgetting learned",
    "forgetting restored",
    "forgetting unseen_classes",
    "landscape evaluated",
    "landscape interpolation_error",
    "lora rank_energy",
    "matching curvature_share",
    "matching diagonal_error",  # standard errors say it
    "matching *angle*",
]


class Norm(nn.Sequential):
    """A small convolutional network with batch-norm for the digits [n, 1, 8, 8]."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36, 10),
        )


class Text(nn.Module):
    """One layer of attention over token numbers [n, 8], two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 2)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(x)).mean(1))


MODULES = {"norm": Norm, "text": Text}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=["make", "compare", "measure"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=[], help="these diagnostics")
    parser.add_argument("--side", choices=SIDES, default="now", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = args.folder.resolve()
    if args.task == "measure":
        measure(folder, args.side, args.only)
        return 0
    if args.task == "make":
        unpack(folder / "source")
        run_side(folder, "then", folder / "source", [])
        return 0
    run_side(folder, "now", ROOT, args.only)
    return compare(folder)


def unpack(folder: Path) -> None:
    """The files of the commit."""
    command = ["git", "-C", str(ROOT), "archive", COMMIT]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def run_side(folder: Path, side: str, source: Path, only: list[str]) -> None:
    """Measure in a process that imports fldiag from ``source``."""
    command = [sys.executable, __file__, "measure", str(folder), "--side", side]
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *(["--only", *only] if only else [])], env=environment, check=True)


# One side


def measure(folder: Path, side: str, only: list[str]) -> None:
    """Write each case's table to FOLDER/SIDE/NUMBER.parquet, and what could not be measured."""
    import fldiag

    torch.set_num_threads(1)
    if side == "then":
        for name, options in TRAINED.items():
            train(folder / "runs" / name, options)
        record_norm(folder / "runs" / "norm")
        record_text(folder / "runs" / "text")
    out = folder / side
    out.mkdir(exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    errors: dict[str, str] = {}
    for number, (diagnostic, targets, options) in enumerate(CASES):
        label = label_of(diagnostic, targets, options)
        if (only and diagnostic not in only) or (side == "now" and label in GONE_CASES):
            continue
        name, values = (
            SPELLED.get(label, (diagnostic, options)) if side == "now" else (diagnostic, options)
        )
        print(f"\r{side} {number + 1} of {len(CASES)}: {label:70.70s}", end="", file=sys.stderr)
        try:
            subjects = [subject(folder, side, target) for target in targets]
            more = {"model": MODULES[targets[0]]()} if targets[0] in MODULES else {}
            table = fldiag.diagnose(
                subjects if len(subjects) > 1 else subjects[0], name, device="cpu", **values, **more
            )
            save(table, out / f"{number}.parquet")
        except Exception as error:  # of this table; the others are measured all the same
            errors[label] = f"{type(error).__name__}: {error}"
    print(file=sys.stderr)
    for name, options in TRAINED.items():
        if not only:
            again = train(folder / "again" / side / name, options)
            save(weights(again), out / f"training {name}.parquet")
    (out / "errors.json").write_text(json.dumps(errors, indent=1), "utf-8")


def label_of(diagnostic: str, targets: tuple[str, ...], options: dict[str, Any]) -> str:
    return " ".join([diagnostic, *targets, *(f"{key}={value}" for key, value in options.items())])


def train(out: Path, options: dict[str, Any]) -> Any:
    import fldiag

    config = fldiag.Config.load("digits", **options)
    return fldiag.train(config, out=out, device="cpu", resume=True)


def weights(run: Any) -> pd.DataFrame:
    """Metrics of a trained run and, of each round and tensor, norm and a random projection."""
    rows = [run.metrics]
    for t in run.rounds:
        for name, tensor in run.checkpoint(t).state.items():
            v = tensor.double().flatten()
            random = torch.randn(len(v), generator=torch.Generator().manual_seed(1)).double()
            for metric, value in (("weights_norm", v.norm()), ("weights_projection", v @ random)):
                row = {"metric": metric, "round": t, "layer": name, "value": float(value)}
                rows.append(pd.DataFrame([row]))
    return pd.concat(rows, ignore_index=True)


def record_norm(out: Path) -> None:
    """FedAvg by hand on the digits: four clients, three rounds, one missing in each."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x, y = torch.from_numpy(x / 16).float().view(-1, 1, 8, 8), torch.from_numpy(y).long()
    order = torch.argsort(y[:400] * 400 + torch.arange(400))  # clients with few classes each
    parts = [order[k::5][: 30 + 20 * k].tolist() for k in range(4)]
    record(out, Norm, (x[:400], y[:400]), parts, (x[400:600], y[400:600]))


def record_text(out: Path) -> None:
    """The same with token numbers: the class is whether token 0 to 9 are the more frequent."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randint(0, 20, (260, 8), generator=generator)
    y = ((x < 10).sum(1) > 4).long()
    parts = [list(range(40 * k, 40 * k + 20 + 6 * k)) for k in range(4)]
    record(out, Text, (x[:160], y[:160]), parts, (x[160:], y[160:]))


def record(out: Path, module: Any, data: Any, parts: list[list[int]], test: Any) -> None:
    import fldiag

    torch.manual_seed(0)
    net = module()
    with fldiag.Recorder(
        out, net, data=data, clients=parts, test=test, method="fedavg"
    ) as recorder:
        for t in range(3):
            received = {name: v.clone() for name, v in net.state_dict().items()}
            ends = {k: step(module, received, data, parts[k]) for k in range(4) if k != t}
            size = sum(len(parts[k]) for k in ends)
            mean = {
                name: sum(len(parts[k]) / size * ends[k][name].double() for k in ends).to(v.dtype)
                for name, v in received.items()
            }
            net.load_state_dict(mean)
            recorder.round(received=received, clients=ends, aggregated=mean)


def step(module: Any, received: Any, data: Any, part: list[int]) -> Any:
    """Thirty steps of SGD on a client's examples."""
    net = module()
    net.load_state_dict(received)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(30):
        optimiser.zero_grad()
        F.cross_entropy(net(data[0][part]), data[1][part]).backward()
        optimiser.step()
    return {name: v.clone() for name, v in net.state_dict().items()}


def subject(folder: Path, side: str, target: str) -> Any:
    """A run, or an example checkpoint; those of CIFAR-10 with random images."""
    import fldiag

    run = folder / ("runs" if side == "then" else "runs.new") / target
    if run.is_dir():
        return fldiag.load(run)
    data = None
    if "cifar10" in target:
        generator = np.random.default_rng(0)
        images = torch.from_numpy(generator.normal(size=(16, 3, 32, 32))).float()
        data = images, torch.from_numpy(generator.integers(0, 10, 16))
    path = folder / "source" / "checkpoints" / "example" / f"{target}.pt"
    return fldiag.load(path, data=data, trust_file=True)


def save(table: pd.DataFrame, path: Path) -> None:
    """Numbers as float64, all else as text."""
    columns = {
        name: column.astype(float)
        if name in NUMBERS
        else ["" if pd.isna(v) else f"{v:.9g}" if isinstance(v, float) else str(v) for v in column]
        for name, column in table.items()
    }
    pd.DataFrame(columns).to_parquet(path)


# Both sides


def compare(folder: Path) -> int:
    """Print what differs; 1 where a number does or a row is missing that may not."""
    errors = {
        side: json.loads((folder / side / "errors.json").read_text("utf-8")) for side in SIDES
    }
    labels = {f"{i}": label_of(*case) for i, case in enumerate(CASES)}
    failed = False
    names = {path.stem for side in SIDES for path in (folder / side).glob("*.parquet")}
    names |= {i for i, label in labels.items() if label in errors["now"]}
    for name in sorted(names, key=lambda n: (len(n), n)):
        label = labels.get(name, name)
        paths = [folder / side / f"{name}.parquet" for side in SIDES]
        if not paths[0].exists():
            print(f"{label}: not measured at {COMMIT}: {errors['then'].get(label)}")
            continue
        if not paths[1].exists():
            if label in errors["now"]:
                print(f"{label}: FAILED: {errors['now'][label]}")
                failed = True
            continue
        lines, wrong = compare_tables(label.split()[0], *(pd.read_parquet(path) for path in paths))
        print(f"{label}: {'DIFFERS' if wrong else 'equal'}", *lines, sep="\n    ")
        failed |= wrong
    return int(failed)


SIDES = ("then", "now")


def compare_tables(
    diagnostic: str, then: pd.DataFrame, now: pd.DataFrame
) -> tuple[list[str], bool]:
    """A line for each metric that is not the same bits, and whether one is wrong."""
    then = then[~then["estimator"].isin(GONE_ESTIMATORS)]
    if "path" in then:  # curves between models went
        then = then[then["path"] != "curve"]
    names = [n for n in then.columns if n in now.columns and n not in (*NUMBERS, *SENTENCES)]
    then = then.replace(RENAMED)
    then, now = by_name(then, names), by_name(now, names)
    lines, wrong = [], False
    both = then.join(now, how="outer", lsuffix=" then", rsuffix=" now")
    metric = both["metric then"].fillna(both["metric now"])
    for key, rows in both.groupby(metric):
        goes = any(fnmatch.fnmatch(f"{diagnostic} {key}", pattern) for pattern in GONE)
        missing, new = rows["metric now"].isna(), rows["metric then"].isna()
        if new.any():
            lines.append(f"{key}: {new.sum()} new rows")
        if missing.any():
            lines.append(
                f"{key}: {missing.sum()} of {len(rows)} rows {'gone' if goes else 'MISSING'}"
            )
            wrong |= not goes and f"{diagnostic} {key}" not in FEWER
        rows = rows[~missing & ~new]
        for column in (n for n in NUMBERS if f"{n} then" in rows and f"{n} now" in rows):
            line, bad = compare_numbers(rows, column)
            lines += [f"{key}, {column}: {line}"] if line else []
            wrong |= bad and not goes
    return lines, wrong


def compare_numbers(rows: pd.DataFrame, column: str) -> tuple[str, bool]:
    """In words how far a column differs, and whether by more than it may."""
    a, b = (rows[f"{column} {side}"].to_numpy() for side in SIDES)
    different = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if not different.any():
        return "", False
    sizes = [rows[f"{name} then"].abs().max() for name in {"value", column}]
    largest = np.nanmax(sizes, initial=1e-300)  # an error is as exact as what it is the error of
    allowed = np.full(len(a), TOLERANCE * largest)
    if column == "value":
        for name, factor in (("residual", 1), ("stderr", 5)):
            for side in SIDES:
                if f"{name} {side}" in rows and not is_exact(rows):
                    allowed += factor * rows[f"{name} {side}"].fillna(0).to_numpy()
    difference = np.where(np.isnan(a) ^ np.isnan(b), np.inf, np.abs(a - b))
    excess = np.where(different, difference / allowed, 0)
    worst = int(np.argmax(excess))
    text = f"{different.sum()} of {len(a)} by at most {np.max(difference[different]) / largest:.1e}"
    if excess[worst] > 1:
        text += f" WRONG: {a[worst]:.9g} became {b[worst]:.9g} in {rows.index[worst]}"
    return text, bool(excess[worst] > 1)


def is_exact(rows: pd.DataFrame) -> bool:
    """A standard error over examples or clients is no error of the computation."""
    return "estimator then" not in rows or not rows["estimator then"].str.contains("hutch").any()


def by_name(table: pd.DataFrame, names: list[str]) -> pd.DataFrame:
    """Indexed by what names a row; rows of one name are counted in their order."""
    index = pd.Series(
        [
            "; ".join(f"{n} {v}" for n, v in row.items() if v)
            for row in table[names].to_dict("records")
        ],
        dtype=str,
    )
    count = index.groupby(index).cumcount().astype(str)
    return table.set_axis(index + "; " + count)


if __name__ == "__main__":
    sys.exit(main())
