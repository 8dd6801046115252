"""``fldiag convert``: what is converted, round by round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fldiag.console import Console
from fldiag.integrations import convert as library
from fldiag.results.table import Row
from fldiag.runs.run import Run

COLUMNS = {
    "round": "round",
    "clients": "clients",
    "received": "received",
    "global": "global model",
    "accuracy": "accuracy",
    "loss": "loss",
}


def convert(console: Console, source: Path, out: Path, **options: Any) -> None:
    rows: list[Row] = []
    with console.progress(out.name) as progress:

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "note":
                return console.note(event["text"])
            rows.append({k: event[k] for k in COLUMNS if k in event})
            progress(event["done"], event["total"], f"round {event['round']}")

        output = library.convert(source, out, **options, on_event=on_event)
    if not isinstance(output, Run):
        return console.done(output)
    excerpt = rows if len(rows) <= 12 else [rows[j * (len(rows) - 1) // 11] for j in range(12)]
    scored = any("loss" in row for row in rows)
    console.table(
        excerpt, {k: v for k, v in COLUMNS.items() if scored or k not in ("accuracy", "loss")}
    )
    console.done(output.path / "run.json", output.path)
