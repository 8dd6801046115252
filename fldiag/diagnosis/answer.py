"""Run a diagnostic and write its table, provenance and pictures; and its summary in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fldiag.diagnosis import places
from fldiag.diagnosis.options import plain
from fldiag.errors import FldiagError
from fldiag.plotting import sheet
from fldiag.registry import Diagnostic
from fldiag.results import files
from fldiag.results.provenance import digest
from fldiag.results.standing import Standing
from fldiag.results.summary import Item, Note, Say, Small

if TYPE_CHECKING:
    from fldiag.diagnosis.measure import Bar
    from fldiag.diagnosis.subjects import Target


@dataclass
class Answer:
    """A diagnostic's table and the files it was written to; the picture, if there is one, is the last."""

    entry: Diagnostic
    table: pd.DataFrame
    options: dict[str, Any]
    files: list[Path] = field(default_factory=list)

    @cached_property
    def standing(self) -> Standing:
        return Standing.of(self.table)

    def summary(self) -> list[Item]:
        """What a person reads first."""
        items = (
            [plainly(self.table)]
            if self.entry.summary is None
            else list(self.entry.summary(self.table, self.options))
        )
        return [
            *items,
            *(Say(text) for text in self.standing.sentences),
            *(Note(text, {"warnings": text}) for text in self.standing.doubts),
        ]


def plainly(table: pd.DataFrame, most: int = 40) -> Small:
    """The first rows of a table, without the columns in which nothing stands, and those of which sentences speak."""
    rows = (
        table.head(most)
        .drop(columns=["guess", "inputs"], errors="ignore")
        .dropna(axis=1, how="all")
    )
    return Small(
        rows.astype(object).where(rows.notna(), None).to_dict("records"),
        {c: c for c in rows.columns},
    )


def answer(
    name: str,
    targets: Sequence[Target | Path],
    options: Mapping[str, Any],
    *,
    out: Path | None = None,
    stem: str = "",
    allow_code: Sequence[str] = (),
    bar: Bar,
    tell: Callable[[str], None],
) -> list[Answer]:
    """Measure, write and draw.

    Args:
        name: the diagnostic's.
        targets: what is diagnosed.
        options: of the diagnostic and its subject.
        out: the folder to write to; by default that of the run (``fldiag.diagnosis.places.folder``).
        stem: how the files' names begin; by default with a digest of the question.
        allow_code: user code that may be imported although only a run or checkpoint names it.
        bar: shows progress.
        tell: is told remarks: what was damaged, what takes long, what counts.

    Raises:
        FldiagError: the question is wrong, something cannot be computed, or the folder cannot be written.
    """
    # a report reads tables without PyTorch
    from fldiag.diagnosis.about import describe, file_name, paths_of, stem_of
    from fldiag.diagnosis.measure import measure_all, origin
    from fldiag.diagnosis.question import parse_question
    from fldiag.diagnosis.subjects import open_subjects

    question = parse_question(name, options)
    subjects = open_subjects(targets, question, allow_code)
    files_read = [path for subject in subjects for path in paths_of(subject)]
    about = describe(question, subjects)
    stem = stem or stem_of(question, subjects, about)
    folder = out or places.folder(set(files_read))
    has_folder = folder.exists()
    folder = places.prepare(folder)
    try:
        tables = measure_all(question, subjects, bar=bar, tell=tell, cache=folder / "cache")
    except FldiagError:
        if not has_folder:
            places.remove_empty(folder)
        raise
    first_subject = subjects[0]
    subject_values = about.pop("where", {})
    values = {question.entry: dict(question.options)}
    answers = []
    for entry, table in tables.items():
        reply = Answer(entry, table, values[entry])
        entry_about = {
            **origin(first_subject, values[entry]),
            "diagnostic": entry.name,
            **about,
            "options": {**subject_values, **plain(values[entry])},
            **reply.standing.about(),
            "answer": table.attrs["key"],
            "caption": [item.text for item in reply.summary() if isinstance(item, Say)],
        }
        rest = stem.removeprefix(file_name(question.entry.name))
        path = folder / (stem if entry is question.entry else entry.name + rest)
        paths = written_before(entry, path, entry_about)
        if paths is None:
            drawings = pictures(entry, table, path)
            entry_about["pictures"] = _about_pictures(entry, drawings)
            paths = [*files.write_table(table, path, entry_about), *drawings]
        reply.files = paths
        answers.append(reply)
    return answers


def written_before(entry: Diagnostic, path: Path, about: Mapping[str, Any]) -> list[Path] | None:
    """The files of the answer that ``about`` describes; None where there are none, a file was changed, or other code may have
    drawn them."""
    if str(about["commit"]).endswith("-dirty"):
        return None
    json, csv = files.beside(path, ".json"), files.beside(path, ".csv")
    try:
        note = files.read_json(json)
        drawings = [path.with_name(name) for name in note["pictures"]["files"]]
        if note["pictures"] != _about_pictures(entry, drawings):
            return None
        files.read_csv_bytes(csv, note)
        expected = {**about, "pictures": note["pictures"], "table": note["table"]}
        is_same = files.json_digest(note) == files.with_digest(expected)[files.DIGEST]
        return [json, csv, *drawings] if is_same else None
    except (OSError, ValueError, KeyError, TypeError, FldiagError):
        return None


def _about_pictures(entry: Diagnostic, paths: Sequence[Path]) -> dict[str, Any]:
    """How pictures are drawn, by which code (fldiag's own is the commit's), and the sha256 of their files."""
    from fldiag.diagnosis.measure import foreign

    current = sheet.current()
    return {
        "matplotlib": metadata.version("matplotlib"),
        "code": digest(*foreign(entry)),
        "width": current.width,
        "formats": list(current.formats),
        "files": {path.name: files.sha256(path) for path in paths},
    }


def pictures(entry: Diagnostic, table: pd.DataFrame, path: Path) -> list[Path]:
    """All pictures of a table, the main one's png last: that is what people look at first."""
    # half a second, which a table read from the cache does not need
    from matplotlib.figure import Figure

    from fldiag.plotting import pages, style
    from fldiag.plotting.pages import Section

    paths: list[Path] = []
    for ending, draw in sorted(entry.drawings.items(), reverse=True):  # the main one's is empty
        picture = draw(table)
        if isinstance(picture, Section):
            picture = pages.render(picture.title, "", [picture])
        if isinstance(picture, str):
            paths.append(files.write_text(path.with_name(path.name + ending), picture))
        elif isinstance(picture, bytes):
            paths.append(files.write_bytes(path.with_name(path.name + ending), picture))
        elif isinstance(picture, Figure):
            paths += style.save(picture, path.with_name(path.name + ending))
    return paths
