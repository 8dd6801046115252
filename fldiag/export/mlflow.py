"""Scalars as a run in a local store of MLflow."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from fldiag.errors import FldiagError, first_line
from fldiag.export.scalars import Scalars, environment, need

METRICS, PARAMS = 1000, 100  # entries that MLflow takes at once


def export(scalars: Scalars, out: Path, experiment: str = "fldiag") -> Path:
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
                return _write(scalars, out.resolve(), experiment)
        except MlflowException as error:
            raise FldiagError(
                f"MLflow refuses {out / 'mlflow.db'}: {first_line(error)}",
                "choose another folder with --out",
            ) from None


def _write(scalars: Scalars, out: Path, experiment: str) -> Path:
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    client, now = (
        MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}"),
        int(1000 * time.time()),
    )
    known = client.get_experiment_by_name(experiment)
    where = (
        known.experiment_id
        if known
        else client.create_experiment(experiment, (out / "artifacts").as_uri())
    )
    run = client.create_run(where, run_name=scalars.name).info.run_id
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
