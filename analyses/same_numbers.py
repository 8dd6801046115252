"""Whether this working tree gives the numbers of another commit, diagnostic by diagnostic.

    python analyses/same_numbers.py BASE [--only spectrum doctor] [--base-python PYTHON]
                                         [--folder NEW_FOLDER]

BASE (a commit or a tag) is unpacked into a temporary folder. Both sides, each with its own code,
train the same two small federations on this machine and diagnose these and the example
checkpoints, in one thread. Rows are matched by what names them (metric, client, round, ...), and
the numbers of a pair must be the same bits. One line a diagnostic:

    trace          equal: 3 tables, 19 rows
    drift          equal to 3e-16 (tolerance 2e-04): mean over clients; 2 tables, 885 rows
    basins         gone, as listed
    doctor         differs
        plain: evidence in metric aggregate: '0.1 %' became '0.2 %'

A change of the order of a sum is named in REORDERED, and may then differ up to a tolerance that
follows from the precision and the number of terms (``relative_tolerance``) and from the error that
a number states itself (``residual``). What goes is named in GONE. New rows, columns and diagnostics
are listed. Exit code 1 where anything else differs or is missing. About two minutes of one core.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

ROOT = Path(__file__).parents[1]
#: What goes: diagnostics, and metrics or columns of a diagnostic.
GONE = {"basins", "client-floor", "doctor edge", "doctor optimiser_state"}
#: Diagnostic -> which sum has another order of its terms than at the base.
_FIRST_LAYER = "the first layer's outputs are no longer added up from those of w and each direction"
REORDERED: dict[str, str] = dict.fromkeys(("landscape", "profile", "connectivity"), _FIRST_LAYER)

#: Columns of numbers; every other column names the row. Coordinates do both.
NUMBERS = (
    "value",
    "stderr",
    "residual",
    "low",
    "high",
    "scaled",
    "predicted",
    "bound",
    "bias",
    "crossed",
    "cross_block",
    "loss",
    "eigenvalue",
    "fall",
    "p_value",
    "products",
)
ERRORS = (
    "stderr",
    "residual",
    "low",
    "high",
)  # are as large as the value's own rounding, or larger
COORDINATES = ("x", "y", "rho", "eta")
#: Columns of sentences, which may be worded anew; the numbers in those of EVIDENCE count.
SENTENCES = ("what", "consequence", "remedy", "title", "note", "unit")
EVIDENCE = "evidence"

#: The two federations, as overrides of the preset digits, both with recorded steps: a convolutional
#: network on few examples, and adapters.
SMALL = {
    "rounds": 3,
    "partition__alpha": 0.5,
    "train__epochs": 1,
    "clients__per_round": 3,
    "checkpoint__clients": "sampled",
    "metrics__steps": True,
}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {
        **SMALL,
        "method__name": "fedsol",
        "clients__total": 4,
        "data__public": "holdout:1200",
    },
    "lora": {
        **SMALL,
        "method__name": "scaffold",
        "clients__total": 6,
        "model__name": "mlp",
        "model__lora_rank": 2,
        "train__momentum": 0.9,
    },
}
DIGITS = ("fedavg-digits", "fedsol-digits")
#: (diagnostic, targets, options): every diagnostic, by each way of computing with code of its own.
CASES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    (
        "spectrum",
        ("fedsol-digits",),
        {"samples": 100, "k": 3, "trace": True, "diagonal": True, "density": True},
    ),
    ("spectrum", ("fedsol-digits",), {"samples": 100, "k": 2, "per_layer": True}),
    ("spectrum", ("fedsol-digits",), {"samples": 100, "k": 2, "matrix": "ggn"}),
    (
        "spectrum",
        ("fedsol-digits",),
        {"samples": 100, "k": 2, "which": "magnitude", "strict": True},
    ),
    ("spectrum", ("fedsol-digits",), {"samples": 100, "k": 2, "engine": "pyhessian"}),
    ("spectrum", ("fedsol-digits",), {"samples": 50, "k": 2, "differences": True}),
    ("spectrum", ("fedsol-digits",), {"samples": 50, "k": 2, "precision": "fp64"}),
    ("spectrum", ("fedsol-cifar10",), {"k": 2}),
    ("spectrum", ("lora",), {"samples": 100, "k": 2, "trainable": True}),
    ("sharpness", ("fedsol-digits",), {"samples": 100, "m": 20}),
    ("llc", ("fedsol-digits",), {"samples": 50, "draws": 8, "thin": 2}),
    ("stability", ("plain",), {"every": 2}),
    ("trace", ("fedsol-digits",), {"samples": 100, "per": "tensor"}),
    ("trace", ("fedsol-digits",), {"samples": 100, "estimate": "hutchinson", "max_products": 20}),
    ("trace", ("fedavg-cifar10",), {}),
    ("diagonal", ("fedsol-digits",), {"samples": 100, "per": "tensor"}),
    (
        "diagonal",
        ("fedsol-digits",),
        {"samples": 100, "estimate": "hutchinson", "max_products": 20},
    ),
    (
        "density",
        ("fedsol-digits",),
        {"samples": 100, "k": 2, "steps": 8, "probes": 2, "points": 51},
    ),
    ("basins", ("fedsol-digits",), {"samples": 100, "draws": 3}),
    ("profile", ("fedsol-digits",), {"samples": 100, "k": 2, "points": 7}),
    ("profile", ("fedsol-digits",), {"samples": 100, "directions": "random", "points": 7}),
    ("landscape", ("fedsol-digits",), {"samples": 100, "k": 2, "points": 11}),
    ("landscape", ("fedsol-digits",), {"samples": 100, "directions": "random", "points": 21}),
    ("landscape", DIGITS, {"samples": 50, "directions": "random", "points": 5, "full": True}),
    ("landscape", ("fedsol-cifar10",), {"directions": "random", "points": 3}),
    ("landscape", ("plain",), {"samples": 100, "directions": "pca", "points": 7}),
    ("landscape", ("plain",), {"samples": 100, "directions": "clients", "points": 7}),
    ("landscape", (*DIGITS, "plain"), {"samples": 100, "directions": "plane", "points": 7}),
    (
        "connectivity",
        ("plain",),
        {"samples": 50, "points": 5, "mixtures": 5, "curve": 5, "refine": 2},
    ),
    ("connectivity", DIGITS, {"samples": 50, "points": 5, "align": True, "refine": 2}),
    ("account", ("plain",), {"k": 2}),
    ("account", ("lora",), {"k": 2, "every_round": True, "slice": "test"}),
    ("doctor", ("plain",), {}),
    ("doctor", ("plain", "lora"), {}),
    ("drift", ("plain",), {}),
    ("drift", ("lora",), {"loss": "l2", "strength": "fixed", "per": "tensor", "part": "head"}),
    ("fairness", ("plain",), {}),
    ("fairness", ("lora",), {"on": "train", "every_round": True}),
    ("flatness", ("plain",), {"every": 2, "tol": 1e-2}),
    ("forgetting", ("plain",), {"why": True, "k": 2}),
    ("forgetting", ("lora",), {"own": False, "min_count": 2}),
    ("geometry", ("plain",), {"similar": 50}),
    ("lora", ("lora",), {"k": 2}),
    ("matching", ("plain",), {"k": 2}),
    (
        "matching",
        ("lora",),
        {"k": 1, "every_round": True, "on": "client", "estimate": "hutchinson", "max_products": 20},
    ),
    ("personalise", ("plain",), {"epochs": [0, 1], "knn": True}),
    ("personalise", ("lora",), {"epochs": [1], "clients": "0,1"}),
    ("client-floor", ("plain",), {"epochs": [1, 2]}),
]
TRAINING = "training"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base", help="commit to compare with")
    parser.add_argument("--only", nargs="+", default=[], help="these diagnostics")
    parser.add_argument(
        "--base-python", default=sys.executable, help="interpreter of the base's environment"
    )
    parser.add_argument(
        "--folder", type=Path, help="keep both sides' tables here, for a look at them"
    )
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        unpack(args.base, folder / "source")
        lines, same = compare_trees(folder / "source", ROOT, folder, args.only, args.base_python)
    print("\n".join(lines))
    return 0 if same else 1


def unpack(commit: str, folder: Path) -> None:
    """The files of a commit."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


def compare_trees(
    base: Path,
    tree: Path,
    folder: Path,
    only: Sequence[str] = (),
    base_python: str = sys.executable,
) -> tuple[list[str], bool]:
    """Measure both source trees, each in a process of its own.

    Returns:
        The lines to print, and whether all is the same but for what is listed.
    """
    sides = {"base": (base, base_python), "tree": (tree, sys.executable)}
    processes = [
        subprocess.Popen(
            [python, __file__, "--measure", str(source.resolve()), str(folder / side), *only],
            env={**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        for side, (source, python) in sides.items()
    ]
    messages = [process.communicate()[1] for process in processes]
    for side, process, message in zip(sides, processes, messages, strict=True):
        if process.returncode:
            raise SystemExit(f"the {side} could not be measured:\n{message}")
    return report(*(Side.read(folder / side) for side in sides))


# One side, in a process of its own


def measure(source: Path, folder: Path, only: Sequence[str]) -> None:
    """Write every table of this side: ``index.json`` and one parquet file a table."""
    import torch

    import fldiag

    assert Path(fldiag.__file__).is_relative_to(source), f"{fldiag.__file__} is not of {source}"
    torch.set_num_threads(1)
    folder.mkdir(parents=True)
    diagnostics = sorted(fldiag.catalogue("diagnostics"))
    cases = [case for case in CASES if case[0] in diagnostics and (not only or case[0] in only)]
    runs = {
        name: train(name, folder) for name in RUNS if any(name in names for _, names, _ in cases)
    }
    targets = example_checkpoints(source) | runs
    digests: dict[str, str] = {}
    records: list[dict[str, Any]] = []
    for name, run in runs.items():
        digests |= {f"{name} round {t}": weights_digest(run.checkpoint(t)) for t in run.rounds}
        records += save_training(folder, name, run)
    for diagnostic, names, options in cases:
        label = " ".join([*names, *(f"{key}={value}" for key, value in options.items())])
        record = {"diagnostic": diagnostic, "label": label}
        subjects = [targets[name] for name in names]
        try:
            subject = subjects if len(subjects) > 1 else subjects[0]
            table = fldiag.diagnose(subject, diagnostic, device="cpu", **options)
        except Exception as error:  # of this table; the others are measured all the same
            records.append(record | {"error": f"{type(error).__name__}: {error}"})
            continue
        weights = [s.checkpoint() if n in RUNS else s for n, s in zip(names, subjects, strict=True)]
        tolerance = max(relative_tolerance(w, options.get("precision", "fp32")) for w in weights)
        records.append(record | save(folder, table, tolerance))
    index = {"diagnostics": diagnostics, "digests": digests, "cases": records}
    (folder / "index.json").write_text(json.dumps(index, indent=1), "utf-8")


def train(name: str, folder: Path) -> Any:
    """One of RUNS."""
    import fldiag

    config = fldiag.Config.load("digits", **RUNS[name])
    return fldiag.train(config, out=folder / "runs" / name, device="cpu")


def save_training(folder: Path, name: str, run: Any) -> Iterator[dict[str, Any]]:
    """The numbers of training as tables: those of a round, and those of a local step."""
    steps = pd.concat([run.steps(t) for t in run.rounds if t], ignore_index=True)
    for label, table in ((f"metrics of {name}", run.metrics), (f"steps of {name}", steps)):
        tolerance = relative_tolerance(run.checkpoint())
        yield {"diagnostic": TRAINING, "label": label} | save(folder, table, tolerance)


def example_checkpoints(source: Path) -> dict[str, Any]:
    """Name -> checkpoint; those of CIFAR-10, whose images are not in the repository, with noise."""
    import fldiag

    paths = sorted((source / "checkpoints" / "example").glob("*.pt"))
    data = {path: noise_images() if "cifar10" in path.stem else None for path in paths}
    return {path.stem: fldiag.load(path, data=data[path]) for path in paths}


def noise_images() -> tuple[Any, Any]:
    """Random inputs and labels for the CIFAR-10 models: [16, 3, 32, 32] and [16]."""
    import torch

    generator = np.random.default_rng(0)
    inputs, labels = generator.normal(size=(16, 3, 32, 32)), generator.integers(0, 10, 16)
    return torch.from_numpy(inputs).float(), torch.from_numpy(labels)


def weights_digest(checkpoint: Any) -> str:
    """Of all tensors of a checkpoint, bit by bit."""
    tensors = {
        **checkpoint.state,
        **{f"buffers of clients: {name}": b for name, b in checkpoint.buffers.items()},
    }
    tensors |= {
        name: getattr(checkpoint, name)
        for name in ("received", "clients")
        if getattr(checkpoint, name) is not None
    }
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}".encode())
        digest.update(tensors[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def relative_tolerance(checkpoint: Any, precision: str = "fp32", examples: int = 2000) -> float:
    """How far another order of the sums may move a number, relative to the largest of its kind.

    Rounding errors of a sum of n terms grow like eps sqrt(n) (Higham and Mary 2019, with
    probability near 1). A number passes a sum over each layer's inputs and one over at most
    ``examples`` examples, in each of 4 passes: forward, backward and the two of a Hessian-vector
    product. A factor 2 for safety.
    """
    eps = float(np.finfo(np.float64 if precision == "fp64" else np.float32).eps)
    layers = sum(math.sqrt(t.numel() / t.shape[0]) for t in checkpoint.state.values() if t.ndim > 1)
    return 2 * 4 * eps * (layers + math.sqrt(examples))


def save(folder: Path, table: pd.DataFrame, tolerance: float) -> dict[str, Any]:
    """Write a table of float64 numbers and texts (empty for nothing)."""
    columns: dict[str, Any] = {}
    for name, column in table.items():
        if name in (*NUMBERS, *COORDINATES):
            columns[name] = np.array([math.nan if pd.isna(v) else float(v) for v in column])
        else:
            columns[name] = ["" if pd.isna(v) else plain_text(v) for v in column]
    file = f"{len(list(folder.glob('*.parquet'))):03d}.parquet"
    pd.DataFrame(columns).to_parquet(folder / file)
    return {"file": file, "tolerance": tolerance}


def plain_text(value: Any) -> str:
    """A count is the same text whether its column has gaps (and so is of floats) or not."""
    return f"{value:g}" if isinstance(value, float) else str(value)


# Both sides


@dataclass
class Side:
    """What one side measured.

    ``tables``: (diagnostic, label) -> table, or an error's text. ``tolerances``: likewise.
    """

    diagnostics: list[str]
    digests: dict[str, str]
    tables: dict[tuple[str, str], pd.DataFrame | str]
    tolerances: dict[tuple[str, str], float]

    @classmethod
    def read(cls, folder: Path) -> Side:
        index = json.loads((folder / "index.json").read_text("utf-8"))
        keys = [((case["diagnostic"], case["label"]), case) for case in index["cases"]]
        return cls(
            index["diagnostics"],
            index["digests"],
            {
                key: pd.read_parquet(folder / case["file"]) if "file" in case else case["error"]
                for key, case in keys
            },
            {key: case.get("tolerance", 1.0) for key, case in keys},
        )


@dataclass
class Comparison:
    """Of two tables, or of all tables of a diagnostic.

    ``difference``: the one that is largest against its ``tolerance``, both relative to the largest
    number of its kind; 0 where all bits are the same. ``differences``: in words, by column.
    ``faults``: what is missing, or differs and is no number. ``news``: what the base does not have.
    """

    tables: int = 0
    rows: int = 0
    difference: float = 0.0
    tolerance: float = 1.0
    differences: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    news: list[str] = field(default_factory=list)

    def add(self, other: Comparison, label: str) -> None:
        self.tables, self.rows = self.tables + other.tables, self.rows + other.rows
        self.raise_difference(other.difference, other.tolerance)
        for name in ("differences", "faults", "news"):
            getattr(self, name).extend(f"{label}: {text}" for text in getattr(other, name))

    def raise_difference(self, difference: float, tolerance: float) -> None:
        if difference / tolerance > self.difference / self.tolerance:
            self.difference, self.tolerance = difference, tolerance


def report(base: Side, tree: Side) -> tuple[list[str], bool]:
    """Lines to print, and whether all is the same but for what is listed."""
    lines, same = [], True
    changed = [name for name, digest in base.digests.items() if tree.digests.get(name) != digest]
    if base.digests:
        result = (
            f"differ: {', '.join(changed)}"
            if changed
            else f"equal: {len(base.digests)} checkpoints"
        )
        lines.append(f"{'weights':14s} {result}")
    same &= not changed
    measured = {diagnostic for diagnostic, _ in base.tables}
    untried = sorted(set(base.diagnostics) - {case[0] for case in CASES})
    for diagnostic in sorted(measured):
        keys = [key for key in base.tables if key[0] == diagnostic]
        if diagnostic not in (*tree.diagnostics, TRAINING):
            listed = diagnostic in GONE
            result = "gone, as listed" if listed else "missing: restore it, or name it in GONE"
            lines.append(f"{diagnostic:14s} {result}")
            same &= listed
            continue
        total = Comparison()
        for key in keys:
            table = tree.tables.get(key, "not measured in this tree")
            total.add(
                compare_cases(base.tables[key], table, base.tolerances[key], diagnostic), key[1]
            )
        text, equal = verdict(total, diagnostic)
        lines.append(f"{diagnostic:14s} {text}")
        lines += [f"    {detail}" for detail in details(total, equal)]
        same &= equal
    lines += [f"{name:14s} has no case here: add one to CASES" for name in untried]
    lines += [
        f"{name:14s} is new" for name in sorted(set(tree.diagnostics) - set(base.diagnostics))
    ]
    return lines, same and not untried


def verdict(total: Comparison, diagnostic: str) -> tuple[str, bool]:
    """The line of a diagnostic, and whether it passes."""
    count = (
        f"{total.tables} tables, {total.rows} rows"
        if total.tables != 1
        else f"1 table, {total.rows} rows"
    )
    size = f"{total.difference:.0e} (tolerance {total.tolerance:.0e})"
    if total.faults or total.difference > total.tolerance:
        return "differs" + (f" by {size}" if total.difference else ""), False
    if total.difference and diagnostic not in REORDERED:
        return (
            f"differs by {size}: name the sum in REORDERED, if its order was meant to change",
            False,
        )
    return (
        f"equal to {size}: {REORDERED[diagnostic]}; {count}"
        if total.difference
        else f"equal: {count}"
    ), True


def details(total: Comparison, equal: bool, most: int = 8) -> Iterator[str]:
    """At most ``most`` lines of each kind."""
    for texts in (total.faults, [] if equal else total.differences, total.news):
        yield from texts[:most]
        if len(texts) > most:
            yield f"and {len(texts) - most} more"


def compare_cases(
    base: pd.DataFrame | str, tree: pd.DataFrame | str, tolerance: float, diagnostic: str
) -> Comparison:
    if isinstance(base, str):
        return Comparison(faults=[f"not measured at the base: {base}"])
    if isinstance(tree, str):
        return Comparison(faults=[tree])
    return compare_tables(base, tree, tolerance, lambda name: f"{diagnostic} {name}" in GONE)


def compare_tables(
    base: pd.DataFrame,
    tree: pd.DataFrame,
    tolerance: float,
    goes: Callable[[str], bool] = lambda name: False,
) -> Comparison:
    """Match the rows of two tables by what names them, and compare their numbers.

    Args:
        base, tree: the tables, with numbers as float64 and everything else as text.
        tolerance: relative to the largest number of the same column and metric.
        goes: whether rows of this metric, or this column, may be missing.
    """
    result = Comparison(tables=1, rows=len(base))
    missing = [name for name in base.columns if name not in tree.columns]
    new = [name for name in tree.columns if name not in base.columns]
    result.faults += [f"column {name} is missing" for name in missing if not goes(name)]
    result.news += [f"new column {name}" for name in new]
    shared = [name for name in base.columns if name in tree.columns]
    names = [name for name in shared if name not in (*NUMBERS, *SENTENCES, EVIDENCE)]
    base, tree = by_name(base, names), by_name(tree, names)
    lost, added = base.index.difference(tree.index), tree.index.difference(base.index)
    metrics = zip(lost, base.loc[lost, "metric"], strict=True)
    result.faults += [f"no row {row}" for row, metric in metrics if not goes(metric)]
    counts = tree.loc[added, "metric"].value_counts()
    result.news += [f"new rows: {count} of {metric}" for metric, count in counts.items()]
    rows = base.index.intersection(tree.index)
    base, tree = base.loc[rows], tree.loc[rows]
    for name in (n for n in shared if n in (*NUMBERS, *COORDINATES)):
        compare_numbers(result, name, base, tree, tolerance)
    for name in (n for n in shared if n in (*SENTENCES, EVIDENCE)):
        compare_sentences(result, name, base, tree)
    return result


def compare_numbers(
    result: Comparison, name: str, base: pd.DataFrame, tree: pd.DataFrame, tolerance: float
) -> None:
    """Compare a column of numbers of the same rows."""
    a, b = base[name].to_numpy(), tree[name].to_numpy()
    unequal = (a.view(np.int64) != b.view(np.int64)) & ~(np.isnan(a) & np.isnan(b))
    if not unequal.any():
        return
    kinds = ["value", name] if name in ERRORS else [name]
    largest = base[kinds].abs().max(axis=1).groupby(base["metric"]).transform("max").to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.abs(a - b) / largest
        residuals = (base["residual"].abs() + tree["residual"].abs()).to_numpy() / largest
    relative[np.isnan(relative)] = np.inf  # a number for none, or none for a number
    relative[a == b] = sys.float_info.min  # 0 for -0
    allowed = np.full(len(a), tolerance)
    if name == "value":
        allowed += np.where(np.isfinite(residuals), residuals, 0.0)
    worst = int(np.argmax(np.where(unequal, relative / allowed, -1.0)))
    result.raise_difference(float(relative[worst]), float(allowed[worst]))
    result.differences.append(
        f"{int(unequal.sum())} of {len(a)} in {name}, at most {relative[worst]:.0e} "
        f"(tolerance {allowed[worst]:.0e}): {a[worst]} became {b[worst]} in {base.index[worst]}"
    )


def compare_sentences(
    result: Comparison, name: str, base: pd.DataFrame, tree: pd.DataFrame
) -> None:
    """Compare a column of sentences of the same rows."""
    for row, a, b in zip(base.index, base[name], tree[name], strict=True):
        if name == EVIDENCE and numbers(a) != numbers(b):
            result.faults.append(f"evidence in {row}: {a!r} became {b!r}")
    if count := int((base[name] != tree[name]).sum()):
        result.news.append(f"{count} of {len(base)} in {name} are worded anew")


def numbers(text: str) -> list[str]:
    """The numbers in a sentence."""
    return re.findall(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", text)


def by_name(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The table, indexed by what names a row; rows of the same name are counted in their order."""
    plain = table[list(names)].copy()
    for name in set(names) & set(COORDINATES):
        plain[name] = ["" if math.isnan(v) else f"{v:.9g}" for v in table[name]]
    records = plain.to_dict("records")
    index = ["; ".join(f"{n} {v}" for n, v in record.items() if v) for record in records]
    place = pd.Series(index).groupby(index).cumcount()
    return table.set_axis(
        [f"{name}; {i + 1}" if i else name for name, i in zip(index, place, strict=True)]
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(main())
