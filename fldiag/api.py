"""The public functions: train, load, diagnose, and what there is."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag import registry
from fldiag.checkpoint import schema
from fldiag.checkpoint.run import Run
from fldiag.checkpoint.schema import Checkpoint
from fldiag.config import Config
from fldiag.errors import FldiagError
from fldiag.problem import from_checkpoint as targets
from fldiag.problem.problem import Problem
from fldiag.results import files, provenance
from fldiag.results.table import check
from fldiag.rounds import history as histories
from fldiag.rounds.history import History


def train(config: Config, *, out: str | Path | None = None, executor: str = "serial",
          on_event: Callable[[dict[str, Any]], None] | None = None, **options: Any) -> Run:
    """Train a config; see ``fldiag.training.rounds.train`` for the options (resume, device, download, setup)."""
    from fldiag.training import rounds

    return rounds.train(config, out=out, executor=executor, on_event=on_event, **options)


def load(path: str | Path, *, model: Any = None, data: Any = None) -> Run | Checkpoint:
    """A run folder as Run; a ``.pt`` or ``.safetensors`` file as Checkpoint.

    ``model`` (a module, a registered name or ``pkg.mod:factory``) and ``data`` ((x, y) tensors, a slice, a data
    set name, ``npz:PATH`` or ``pkg.mod:loader``) are needed for a plain state_dict, and override what a
    checkpoint of fldiag says. Raises FldiagError for files that are damaged, foreign or unsafe.
    """
    path = Path(path)
    if path.is_dir() or path.name == "run.json":
        if model is not None or data is not None:
            raise FldiagError(f"{path} is a run, which knows its model and data", "give model and data with one of its "
                              "checkpoints: rounds/NNNN.pt", usage=True)
        return Run.open(path)
    run = path.resolve().parent.parent
    if path.parent.name == "rounds" and (run / "run.json").is_file():
        Run.open(run).verified(f"rounds/{path.name}")  # a file of a run must be the one the run wrote
    return dataclasses.replace(schema.read(path), model=model, data=data)


def diagnose(target: Run | Checkpoint | Problem | History, name: str, *, cache: str | Path | None = None,
             progress: Callable[[int, int, str], None] | None = None, **options: Any) -> pd.DataFrame:
    """Run a diagnostic (``fldiag.diagnostics()``) and return its tidy table.

    ``options`` are the diagnostic's own and, for a run or checkpoint, those of
    ``fldiag.problem.from_checkpoint.problem`` (slice, samples, client, round, device, dtype, memory, root, download). A
    diagnostic of all rounds (forgetting, drift, account) takes a run or a History, and the options of ``History.of``
    (rounds, samples, stack, device, dtype, root, download, model, data, name).
    With ``cache`` (a folder) the table is kept under a hash of everything it depends on: asked again, it is read
    back; a landscape that was interrupted goes on.

    Raises FldiagError for unknown names and options.
    """
    entry = registry.diagnostic.get(name)
    of_run = entry.meta.get("on") == "run"
    chosen = histories.OPTIONS if of_run else targets.OPTIONS
    given = {k: v for k, v in options.items() if k in chosen and k not in entry.options.model_fields}
    checked = entry.validate({k: v for k, v in options.items() if k not in given})
    problem: Problem | History
    if isinstance(target, (Problem, History)):
        kind = type(target).__name__
        if of_run != isinstance(target, History):
            raise FldiagError(f"diagnostic {name!r} is not one of a {kind}",
                              "give a run" if of_run else "give a checkpoint or a Problem", usage=True)
        if given:
            raise FldiagError(f"option {sorted(given)[0]!r} has no effect on a {kind}, which has its data already",
                              f"leave it out, or give a {'run' if of_run else 'checkpoint'}", usage=True)
        problem = target
    elif not of_run:
        problem = targets.problem(target, **given)
    elif isinstance(target, Run):
        problem = History.of(target, **given)
    else:
        raise FldiagError(f"diagnostic {name!r} needs a run, and {target.path} is one checkpoint", "give the run's folder",
                          usage=True)
    if cache is None:
        return check(entry.build(problem, progress, **checked))
    return _cached(entry, problem, progress, checked, Path(cache))


def _cached(entry: registry.Entry, problem: Problem | History, progress: Any, options: dict[str, Any],
            folder: Path) -> pd.DataFrame:
    about = provenance.provenance(dtype=problem.dtype, device=problem.device, seed=options.get("seed"))
    plain = {k: v for k, v in options.items() if k != "store"}
    key = provenance.digest(entry.name, problem.digest(), problem.common, plain, about)[:16]
    file = folder / f"{entry.name}-{key}.parquet"
    if file.is_file():
        try:
            return check(pd.read_parquet(file))
        except (OSError, ValueError, FldiagError):  # a damaged cache is no cache
            file.unlink(missing_ok=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FldiagError(f"cannot create {folder}: {error.strerror}", "choose another folder with --out") from None
    partial = folder / f"{entry.name}-{key}.partial.npz"
    if "store" in options and options["store"] is None:
        options = {**options, "store": partial}
    frame = check(entry.build(problem, progress, **options))
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    files.write_atomic(file, lambda f: f.write(buffer.getvalue()))
    about = {**about, "diagnostic": entry.name, "problem": problem.digest(), "labels": problem.common,
             "options": {k: v for k, v in plain.items() if isinstance(v, (str, int, float, bool, type(None)))}}
    files.write_atomic(file.with_suffix(".json"), lambda f: f.write(json.dumps(about, indent=1, default=str).encode()))
    partial.unlink(missing_ok=True)
    return frame


def datasets() -> dict[str, str]:
    """Name -> description."""
    return registry.dataset.describe()
