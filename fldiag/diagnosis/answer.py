"""What is written when a diagnostic is asked: table, provenance, pictures; and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.figure import Figure

from fldiag import registry
from fldiag.checkpoint.index import unverified
from fldiag.checkpoint.run import Run
from fldiag.checkpoint.schema import Checkpoint
from fldiag.diagnosis import places, recalled
from fldiag.diagnosis.options import plain
from fldiag.plotting import pages, style
from fldiag.plotting.sections import Interactive
from fldiag.registry import Diagnostic
from fldiag.results import files, standing
from fldiag.results.summary import Item, Note, Say, Small

if TYPE_CHECKING:
    from fldiag.diagnosis.subjects import Target
    from fldiag.diagnosis.tables import Bar


@dataclass
class Answer:
    """A diagnostic's table and the files it was written to; the picture, if there is one, is the last."""

    entry: Diagnostic
    table: pd.DataFrame
    options: dict[str, Any]
    files: list[Path] = field(default_factory=list)

    def summary(self) -> list[Item]:
        """What a person reads first."""
        items = (
            [plainly(self.table)]
            if self.entry.summary is None
            else list(self.entry.summary(self.table, self.options))
        )
        return [
            *items,
            *(Say(text) for text in standing.sentences(self.table)),
            *(Note(text, {"warnings": text}) for text in standing.doubts(self.table)),
        ]


def plainly(table: pd.DataFrame, most: int = 40) -> Small:
    """The first rows of a table, without the columns in which nothing stands, and those of which sentences speak."""
    shown = (
        table.head(most)
        .drop(columns=["guess", "inputs"], errors="ignore")
        .dropna(axis=1, how="all")
    )
    return Small(
        shown.astype(object).where(shown.notna(), None).to_dict("records"),
        {c: c for c in shown.columns},
    )


def answer(
    name: str,
    targets: Sequence[Target],
    options: Mapping[str, Any],
    *,
    out: Path | None = None,
    stem: str = "",
    bar: Bar,
    tell: Callable[[str], None],
) -> list[Answer]:
    """Ask, measure, write and draw: the diagnostic's own answer first, then those of its flags.

    Args:
        name: the diagnostic's.
        targets: what it is asked of.
        options: as for ``question``.
        out: the folder to write to; by default that of the run (``fldiag.diagnosis.places.folder``).
        stem: how the files' names begin; by default with what tells the question from others.
        bar: shows progress.
        tell: is told remarks: what was damaged, what takes long, what counts.

    Raises:
        FldiagError: the question is wrong, something cannot be computed, or the folder cannot be written.
    """
    for text in unverified(t.path for t in targets if isinstance(t, Run)):
        tell(text)
    folder = out or places.folder([t for t in targets if isinstance(t, (Run, Checkpoint))])
    known = "" if stem else recalled.key(registry.diagnostic.get(name), targets, options)
    if known and (found := recalled.recall(folder, name, known, tell)):
        return [Answer(registry.diagnostic.get(a.name), a.table, a.options, a.files) for a in found]
    from fldiag.diagnosis.measure import origin
    from fldiag.diagnosis.question import question
    from fldiag.diagnosis.tables import tables

    asked = question(name, targets, options)
    asked.stem = stem or asked.stem
    folder = places.prepare(folder)
    flags = {
        flag: True
        for flag, also in asked.entry.also.items()
        if also.name in {e.name for e in asked.more}
    }
    answers = []
    for entry, table in tables(asked, bar=bar, tell=tell, cache=folder / "cache").items():
        own = {**asked.asked[0][2], **flags} if entry is asked.entry else asked.more[entry]
        stem = (
            asked.stem
            if entry is asked.entry
            else entry.name + asked.stem.removeprefix(asked.entry.name)
        )
        about = {
            **origin(asked.asked[0][1], own),
            "diagnostic": entry.name,
            **{k: v for k, v in asked.about.items() if k != "where"},
            "options": {**asked.about.get("where", {}), **plain(own)},
            **standing.about(table),
        }
        path = folder / stem
        answers.append(
            Answer(
                entry,
                table,
                own,
                [*files.write_table(table, path, about), *pictures(entry, table, path)],
            )
        )
    if known:
        recalled.remember(
            folder,
            name,
            known,
            [recalled.Given(a.entry.name, a.table, a.options, a.files) for a in answers],
            asked.notes,
        )
    return answers


def pictures(entry: Diagnostic, table: pd.DataFrame, path: Path) -> list[Path]:
    """All pictures of a table, the main one's png last: that is what people look at first."""
    found: list[Path] = []
    for ending, draw in entry.more.items():
        made = draw(table)
        if isinstance(made, Interactive):
            made = pages.interactive(made)
        if isinstance(made, str):
            found.append(files.write_text(path.with_name(path.name + ending), made))
        elif made is not None:
            found += style.write(made, path.with_name(path.name + ending))
    drawn = entry.draw(table) if entry.draw is not None else None
    return found + (style.write(drawn, path) if isinstance(drawn, Figure) else [])
