"""``fldiag demo``: the main job end to end on data that is always there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fldiag import config as configs
from fldiag.console import Console
from fldiag.diagnosis import places
from fldiag.diagnosis.answer import answer
from fldiag.execution.worker import threads
from fldiag.results.summary import Small
from fldiag.runs.run import Run
from fldiag.training import rounds
from fldiag.verbs import report

METHODS = ("fedavg", "fedsol")
COLUMNS = {
    "method": "method",
    "accuracy": "test accuracy",
    "test_loss": "test loss",
    "loss": "train loss",
    "lambda_1": "λ1",
    "residual": "± (residual)",
    "ratio": "λ1/λ5",
}


def demo(console: Console, out: Path | None, device: str, seed: int) -> None:
    """Train both methods on the digits, draw both landscapes on shared axes, print a summary, write a report."""
    folder = places.prepare(out or places.FALLBACK / "demo")
    with threads(
        1
    ):  # as fast as two on such small networks, which wait for each other where other programs use the cores
        runs = [_train(console, folder, name, seed, device) for name in METHODS]
        (landscapes,) = answer(
            "landscape",
            [run.checkpoint() for run in runs],
            {"points": 21, "seed": seed, "device": device},
            out=folder,
            stem="landscape",
            bar=console.progress,
            tell=console.note,
        )
    first = next(item for item in landscapes.summary() if isinstance(item, Small))
    rows = []
    for run, row in zip(runs, first.rows, strict=True):
        scores = run.metrics[run.metrics["slice"] == "test"].set_index(["round", "metric"])["value"]
        rows.append(
            {
                **row,
                "method": run.config.method.name,
                "accuracy": float(scores[run.done, "accuracy"]),
                "test_loss": float(scores[run.done, "loss"]),
            }
        )
    console.say(
        f"digits, 20 clients (LDA 0.1), 10 sampled a round, {runs[0].done} rounds, seed {seed}:"
    )
    console.table(rows, COLUMNS)
    page = report.demo(console, [run.path for run in runs], folder, device)
    console.say(f"interactive: {next(file for file in landscapes.files if file.suffix == '.html')}")
    console.say(f"everything on one page: {page}")
    console.done(page, *landscapes.files)


def _train(console: Console, folder: Path, method: str, seed: int, device: str) -> Run:
    config = configs.load(
        "digits",
        [
            f"method.name={method}",
            f"seed={seed}",
            "checkpoint.every=10",
            "checkpoint.clients=sampled",
        ],
    )
    with console.progress(f"training {method}") as progress:

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "round":
                progress(event["round"], event["rounds"], f"accuracy {event['accuracy']:.3f}")

        path = folder / f"{method}-s{seed}-{config.hash[:8]}"
        return rounds.train(config, out=path, on_event=on_event, resume=True, device=device)
