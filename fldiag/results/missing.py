"""What a run lacked, as its table says it: rows ``missing`` with a note."""

from __future__ import annotations

import pandas as pd

from fldiag.results.summary import Note


def notes(table: pd.DataFrame, most: int = 8) -> list[Note]:
    """A remark for each thing that was missing, and one that counts those beyond ``most``."""
    rows = table[table["metric"] == "missing"] if "note" in table.columns else table.iloc[:0]
    texts = [
        f"{'' if pd.isna(r) else f'round {r}: '}{note}"
        for r, note in zip(rows["round"], rows.get("note", []), strict=True)
    ]
    shown = [Note(text) for text in texts[:most]]
    if len(texts) > most:
        shown.append(Note(f"and {len(texts) - most} more (rows metric = missing of the table)"))
    return shown
