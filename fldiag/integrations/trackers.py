"""A finished run as named series of numbers over rounds, and as a file of TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fldiag.errors import FldiagError, first_line
from fldiag.results.files import provenance_beside, read_csv, read_csv_bytes, refuse_links_above
from fldiag.results.table import COLUMNS
from fldiag.runs.run import Run

#: What tells the numbers of one metric apart, in the order in which tags spell it.
NAMES = ("moment", "slice", "layer", "estimator", "client", "client_b", "index")
#: Those of them that a tag always spells; the others only where they are needed.
_ALWAYS = ("moment", "slice", "layer", "client", "client_b", "index")
#: Further numbers about a number: they tell nothing apart.
_BESIDE = set(COLUMNS) - {"metric", *NAMES} | {
    "n_clients",
    "n_steps",
    "masked",
    "note",
    "predicted",
    "eigenvalue",
    "scaled",
    "low",
    "high",
    "products",
}


@dataclass(frozen=True)
class Scalars:
    """``series``: tag, step (the round), value, sorted by step; ``config``: the run's settings, keys as ``train.lr``."""

    name: str
    config: dict[str, Any]
    series: pd.DataFrame

    def by_step(self) -> Iterable[tuple[int, dict[str, float]]]:
        """All numbers of a round together, rounds in order."""
        for step, rows in self.series.groupby("step", sort=True):
            yield int(step), dict(zip(rows["tag"], rows["value"], strict=True))  # type: ignore[call-overload]


def collect(run: Run, tables: Sequence[Path] = (), *, per_client: bool = False) -> Scalars:
    """The run's own metrics, its diagnostics' tables (csv in RUN/diagnostics) and ``tables`` (csv or parquet).

    Rows of single clients only with ``per_client``. Surfaces over a plane and what is masked or not finite are left out.
    Raises FldiagError for a table that cannot be read, was changed after it was written, or is none of fldiag's.
    """
    paths = [*sorted((run.path / "diagnostics").glob("*.csv")), *tables]
    short = [re.sub(r"-[0-9a-f]{8}$", "", path.stem) for path in paths]
    names = [
        name if short.count(name) == 1 else path.stem
        for name, path in zip(short, paths, strict=True)
    ]
    frames = [series(run.metrics, "run", per_client)] if run.has_metrics else []
    for name, path in zip(names, paths, strict=True):
        frame = _read(path)
        if {"metric", "value"} <= set(frame.columns):
            frames.append(series(frame, name, per_client))
        elif path in tables:
            raise FldiagError(
                f"{path} is not a table of fldiag: it has no metric and value",
                "give a table that fldiag wrote",
                usage=True,
            )
    all_series = (
        pd.concat(frames, ignore_index=True)
        if frames
        else pd.DataFrame({"tag": [], "step": [], "value": []})
    )
    if all_series.empty:
        raise FldiagError(
            f"run {run.path} has no numbers to export", "train it, or diagnose it first", usage=True
        )
    name = run.path.resolve().name
    return Scalars(
        name,
        dict(_flat(run.index["config"])),
        all_series.sort_values(["step", "tag"], ignore_index=True),
    )


def series(frame: pd.DataFrame, name: str, per_client: bool = False) -> pd.DataFrame:
    """A tidy table as columns tag, step, value.

    A tag is ``name/metric``, then moment, slice, layer and so on, then further columns where rows of one tag and
    round differ in them, then a number."""
    frame = frame.reset_index(drop=True)
    value = pd.to_numeric(frame["value"], errors="coerce").astype(float)
    keep = np.isfinite(value) & _exportable(frame, per_client)
    frame, value = frame[keep].reset_index(drop=True), value[keep].reset_index(drop=True)
    step = (
        pd.to_numeric(frame["round"], errors="coerce").fillna(0).astype(int)
        if "round" in frame.columns
        else 0
    )
    scalars = pd.DataFrame(
        {"tag": f"{name}/" + frame["metric"].astype(str), "step": step, "value": value}
    )
    for column in _telling(frame):
        title = "" if column in ("moment", "slice", "layer", "estimator", "run") else f"{column} "
        text = _spell(frame[column], title)
        scalars["tag"] += text if column in _ALWAYS else text.where(_ambiguous(scalars, text), "")
    scalars["tag"] = (
        scalars["tag"]
        .str.replace("*", "all", regex=False)
        .str.replace(r"[^\w\-./ :]", "_", regex=True)
    )
    repeats = scalars.groupby(["tag", "step"]).cumcount()
    scalars["tag"] += pd.Series(
        np.where(repeats > 0, " (" + (repeats + 1).astype(str) + ")", ""), index=scalars.index
    )
    return scalars


def _exportable(frame: pd.DataFrame, per_client: bool) -> pd.Series:
    """Which rows are numbers over rounds: no cells of surfaces, nothing missing, no single client unless asked for."""
    keep = frame["metric"] != "missing"
    if {"x", "y"} <= set(frame.columns):
        keep = keep & ~(frame["x"].notna() & frame["y"].notna())
    if not per_client:
        for column in {"client", "client_b"} & set(frame.columns):
            keep = keep & frame[column].isna()
        if "slice" in frame.columns:
            keep = keep & ~frame["slice"].astype("string").str.match(r"client:\d").fillna(
                False
            ).astype(bool)
    return keep


def _telling(frame: pd.DataFrame) -> list[str]:
    """The columns that tell the numbers of one metric apart, in the order in which tags spell them."""
    columns = [c for c in NAMES if c in frame.columns]
    if "run" in frame.columns and frame["run"].nunique() > 1:
        columns.append("run")
    return columns + sorted(
        c for c in frame.columns if c not in _BESIDE and c not in NAMES and c != "metric"
    )


def _ambiguous(scalars: pd.DataFrame, text: pd.Series) -> pd.Series:
    """Rows whose tag stands twice in some round, with different words in ``text``."""
    group = scalars.groupby(["tag", "step"])["tag"]
    differs = (group.transform("size") > 1) & (
        text.groupby([scalars["tag"], scalars["step"]]).transform("nunique") > 1
    )
    return scalars["tag"].isin(scalars["tag"][differs])


def _spell(column: pd.Series, title: str) -> pd.Series:
    def text(v: Any) -> str:
        if pd.isna(v):
            return ""
        number = isinstance(v, (int, float, np.number)) and not isinstance(v, (bool, np.bool_))
        return f"/{title}{f'{float(v):g}' if number else v}"

    return column.map(text, na_action=None).astype(str)


def _read(path: Path) -> pd.DataFrame:
    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        return read_csv(read_csv_bytes(path, provenance_beside(path)))
    except (OSError, ValueError, pd.errors.ParserError) as error:
        raise FldiagError(
            f"{path} cannot be read: {first_line(error)}", "give a csv or parquet table"
        ) from None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield (
                prefix + key,
                value if isinstance(value, (str, int, float, bool)) else json.dumps(value),
            )


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables set for a while, unless the user has set them."""
    new = {k: v for k, v in values.items() if k not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for key in new:
            os.environ.pop(key, None)


def need(module: str, extra: str) -> Any:
    """The module of an optional package. Raises FldiagError saying how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise FldiagError(
            f"{extra} is not installed", f"pip install 'fldiag[{extra}]'", usage=True
        ) from None


def write_tensorboard(scalars: Scalars, out: Path) -> Path:
    """Write ``out/NAME/events.out.tfevents…`` (earlier ones there are replaced) and return that folder; look at it with
    ``tensorboard --logdir out``. Raises FldiagError without TensorBoard."""
    need("tensorboard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    folder = out / scalars.name
    refuse_links_above(folder)
    earlier = list(folder.glob("events.out.tfevents.*"))
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("config", f"```\n{json.dumps(scalars.config, indent=1)}\n```")
        for tag, step, value in scalars.series[["tag", "step", "value"]].itertuples(index=False):
            writer.add_scalar(tag, value, step, new_style=True, double_precision=True)
    for file in earlier:
        file.unlink(missing_ok=True)
    return folder


def write_wandb(scalars: Scalars, out: Path, project: str = "fldiag") -> Path:
    """Write ``out/wandb/offline-run-…`` and return that folder. Nothing is sent: ``wandb sync FOLDER`` does that when you
    want it. Raises FldiagError without wandb."""
    with environment(
        WANDB_ERROR_REPORTING="false"
    ):  # it would look for its error tracker also when offline
        wandb = need("wandb", "wandb")
        settings = wandb.Settings(
            mode="offline",
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            save_code=False,
            disable_job_creation=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        out.mkdir(parents=True, exist_ok=True)
        alone = (
            wandb.setup().most_recent_active_run is None
        )  # wandb.run does not know those of reinit="create_new"
        with wandb.init(
            project=project,
            name=scalars.name,
            dir=str(out),
            config=scalars.config,
            settings=settings,
            reinit="create_new",
        ) as run:
            for step, numbers in scalars.by_step():
                run.log(numbers, step=step)
            folder = Path(run.settings.sync_dir)
        if alone:  # its service may still be writing the file; this waits for it, and would end the caller's own runs
            wandb.teardown()
    return folder


METRICS, PARAMS = 1000, 100  # entries that MLflow takes at once


def write_mlflow(scalars: Scalars, out: Path, experiment: str = "fldiag") -> Path:
    """Add a run to ``out/mlflow.db`` and return that file; look at it with ``mlflow ui --backend-store-uri
    sqlite:///out/mlflow.db``. (MLflow refuses its older store of plain files.) Raises FldiagError without MLflow."""
    with environment(
        MLFLOW_DISABLE_TELEMETRY="true"
    ):  # read when it is imported; it would call home
        need("sqlalchemy", "mlflow")
        need("mlflow", "mlflow")
        from mlflow.exceptions import MlflowException

        out.mkdir(parents=True, exist_ok=True)
        try:
            with _quiet("mlflow", "alembic"):
                return _add_run(scalars, out.resolve(), experiment)
        except MlflowException as error:
            raise FldiagError(
                f"MLflow refuses {out / 'mlflow.db'}: {first_line(error)}",
                "choose another folder with --out",
            ) from None


def _add_run(scalars: Scalars, out: Path, experiment: str) -> Path:
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    client, now = (
        MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}"),
        int(1000 * time.time()),
    )
    entry = client.get_experiment_by_name(experiment)
    experiment_id = (
        entry.experiment_id
        if entry
        else client.create_experiment(experiment, (out / "artifacts").as_uri())
    )
    run = client.create_run(experiment_id, run_name=scalars.name).info.run_id
    params = [Param(key, str(value)[:500]) for key, value in scalars.config.items()]
    metrics = [
        Metric(tag, float(value), now, int(step))
        for tag, step, value in scalars.series[["tag", "step", "value"]].itertuples(index=False)
    ]
    for i in range(0, len(params), PARAMS):
        client.log_batch(run, params=params[i : i + PARAMS])
    for i in range(0, len(metrics), METRICS):
        client.log_batch(run, metrics=metrics[i : i + METRICS])
    client.set_terminated(run)
    return out / "mlflow.db"


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


#: Name of a tracker -> the function that writes scalars for it.
WRITERS: dict[str, Callable[[Scalars, Path], Path]] = {
    "tensorboard": write_tensorboard,
    "wandb": write_wandb,
    "mlflow": write_mlflow,
}
