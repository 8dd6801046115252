"""Finished runs without their weights: what they were, their metrics and their answers, in a few kilobytes each.

A run of a paper's protocol has gigabytes that a lost machine takes with it. Its record can be kept with the figures and be drawn
from later, beside runs that are trained elsewhere. A record is a run folder whose run.json says so (``record``); it has no
checkpoint, so what looks at weights is asked before. It keeps the checksums of the checkpoints that it no longer has
(``gone``), by which a report knows the tables that were made from them.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path

from fldiag.errors import FldiagError
from fldiag.results.files import write_bytes
from fldiag.runs import owner
from fldiag.runs.index import write_index
from fldiag.runs.prune import remove
from fldiag.runs.run import Run
from fldiag_papers.plan import Plan, is_finished, open_run
from fldiag_papers.questions import CLOCK

ANSWERS = "answers"


def keep_records(plan: Plan, paths: Iterable[Path]) -> None:
    """``keep`` the finished ones of the runs, where the plan has a folder for records. One that cannot be kept is a warning."""
    for path in paths if plan.records is not None else ():
        run = open_run(path)
        try:
            if run is not None and is_finished(run):
                keep(run, plan.records)  # type: ignore[arg-type]
        except FldiagError as error:
            warnings.warn(f"no record of {path} is kept: {error.what}", stacklevel=2)


def keep(run: Run, folder: Path) -> Path:
    """Write the record of a finished run, or add to it what was answered since.

    Args:
        run: finished or diverged.
        folder: where records lie.

    Returns:
        ``folder / run.name``. A record of that name of another training (other metrics) is replaced.

    Raises:
        FldiagError: the run is not finished, its metrics were changed, or the folder cannot be written.
    """
    if not is_finished(run):
        raise FldiagError(
            f"{run.path} is {run.status}",
            "finish it first: the same command with --resume",
            usage=True,
        )
    record = folder / run.name
    if record.resolve() == run.path.resolve():
        return record
    owner.refuse_links(record)
    former = open_run(record)
    if former is None or former.metrics_digest != run.metrics_digest:
        # First: without run.json nobody would know whose they are.
        shutil.rmtree(record / ANSWERS, ignore_errors=True)
        if former is not None:
            remove(record)
    metrics = run.index.get("metrics")
    if metrics is not None:
        write_bytes(record / metrics, run.verified(metrics).read_bytes())
    if (run.path / CLOCK).is_file():
        write_bytes(record / CLOCK, (run.path / CLOCK).read_bytes())
    answers = run.path / ANSWERS
    before = {file.stem for file in (record / ANSWERS).glob("*.json")}
    # A json vouches for the parquet before it.
    for file in sorted(answers.glob("*.parquet")) + sorted(answers.glob("*.json")):
        if file.stem not in before:
            write_bytes(record / ANSWERS / file.name, file.read_bytes())
    index = {
        **run.index,
        "record": True,
        "state": {},
        "thinned": {"rounds": [], "state": True},
        "files": {name: digest for name, digest in run.index["files"].items() if name == metrics},
        "gone": {
            name: digest
            for name, digest in run.index["files"].items()
            if name.startswith("rounds/")
        },
    }
    data = {**index["config"]["data"], "root": None}  # where data lay is nobody's business
    index["config"] = {**index["config"], "data": data}
    write_index(record, index)
    return record
