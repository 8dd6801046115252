"""The one call path: options are parsed, subjects opened, the table is read from the store or measured, and files are written."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fldiag import registry, user_code
from fldiag.device import device_of, full_precision
from fldiag.diagnosis.subjects import (
    BY_SUBJECT,
    Subject,
    SubjectOptions,
    Target,
    open_subjects,
    plain,
    remarks,
)
from fldiag.errors import FldiagError, nearest
from fldiag.execution import Workspace
from fldiag.plotting import style
from fldiag.problem.problem import code_of
from fldiag.registry import Diagnostic, Progress
from fldiag.results import files
from fldiag.results.files import get_table, put_table, sha256
from fldiag.results.progress import notebook_bar
from fldiag.results.provenance import digest, provenance, sources
from fldiag.results.summary import Item, SmallTable, missing_notes, standing
from fldiag.results.table import check
from fldiag.runs.checkpoint import Checkpoint
from fldiag.runs.history import History
from fldiag.runs.run import Run

#: Where results go that belong to no single run, or to one that cannot be written to.
FALLBACK = Path("fldiag-out")
#: What shows progress: a title -> a context that gives the callback.
Bar = Callable[[str], AbstractContextManager[Progress]]


@dataclass
class Answer:
    """A diagnostic's table, and the files it was written to; the picture, if there is one, is the last."""

    entry: Diagnostic
    table: pd.DataFrame
    options: dict[str, Any]
    files: list[Path] = field(default_factory=list)

    def summary(self) -> list[Item]:
        """What a person reads first (of a diagnostic without a summary the first rows), what is missing, and where the models
        stand."""
        items = [SmallTable.of(self.table.head(40).dropna(axis=1, how="all"))]
        if self.entry.summary is not None:
            items = self.entry.summary(self.table, self.options)
        return [*items, *missing_notes(self.table), *standing(self.table)]


@full_precision()
def diagnose(
    name: str,
    targets: Sequence[Target | str | Path],
    values: Mapping[str, Any],
    *,
    out: Path | None = None,
    write: bool = True,
    cache: Path | None = None,
    bar: Bar = notebook_bar,
    tell: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Measure, keep, write and draw.

    Args:
        name: of a diagnostic, or ``pkg.mod:function``.
        targets: runs, checkpoints, Problems, a History, or their paths.
        values: options of the diagnostic and of its subject, together.
        out: the folder to write to; by default ``diagnostics`` in the run's, or ``fldiag-out``.
        write: False: nothing is written, and tables are kept in ``cache`` alone.
        cache: where tables are kept; by default ``cache`` in the folder that is written to.
        bar: shows progress.
        tell: is told remarks.

    Returns:
        The table with its files; those of several subjects stand one below the other.

    Raises:
        FldiagError: the question is wrong, something cannot be computed, or the folder cannot be written.
    """
    entry = find_diagnostic(name)
    options, subject_options = split_options(entry, values)
    subjects = open_subjects(entry, targets, subject_options)
    is_joint = entry.on in ("runs", "checkpoints") or entry.joint(options)
    for text in dict.fromkeys(text for subject in subjects for text in remarks(subject)):
        tell(text)
    folder = out or folder_of(map(source_of, subjects))
    if write:
        cache = check_writable(folder) / "cache"
    if options.get("save_vectors"):  # in a file of their own, and not in the store
        cache = None
        if len(subjects) > 1:
            raise FldiagError("vectors are saved of one checkpoint at a time", usage=True)
    questions, tables = list[str](), list[pd.DataFrame]()
    with bar(entry.name) as progress, Workspace(subject_options.executor, progress) as workspace:
        workspace.show(0, 1, entry.name)
        for group in [subjects] if is_joint else [[subject] for subject in subjects]:
            identities = [identity(subject, is_joint) for subject in group]
            questions.append(digest(entry.name, identities, options))
            about = provenance(
                dtype=getattr(group[0], "dtype", None),
                device=getattr(group[0], "device", options.get("device")),
                seed=options.get("seed"),
                code=digest(sources(), code_of_plugin(entry)),
            )
            key = digest(questions[-1], about)
            table = get_table(cache, key) if cache else None
            if table is None:
                with torch.autocast(torch.device(about["device"]).type, enabled=False):
                    table = check(entry.build(group if is_joint else group[0], **options))
                try:
                    if cache:
                        put_table(cache, key, table, {**about, "options": plain(options)})
                except FldiagError as error:  # the answer is there, and may have room elsewhere
                    tell(f"the table of {name} is not kept for later: {error.what}")
            tables.append(table)
    table = tables[0] if len(tables) == 1 else pd.concat(tables, ignore_index=True)
    table.attrs = {**tables[0].attrs, "diagnostic": entry.name, "options": plain(options)}
    answer = Answer(entry, table, options)
    if write:
        stem = f"{entry.name.replace(':', '-')}-{digest(*questions)[:8]}"
        about |= {**describe(subjects), "options": {**plain(values), **plain(options)}}
        write_files(answer, folder / stem, about)
    return answer


def find_diagnostic(name: str) -> Diagnostic:
    """The diagnostic of this name, or the function ``pkg.mod:function``, which is imported because it is named here.

    Raises FldiagError for an unknown name, and for code that cannot be imported.
    """
    user_code.allow(name)
    return registry.diagnostic.get(name)


def split_options(
    entry: Diagnostic, values: Mapping[str, Any]
) -> tuple[dict[str, Any], SubjectOptions]:
    """The diagnostic's own options, completed, and those of its subject.

    Raises:
        FldiagError: an unknown option, one of another kind of subject, or a value out of range.
    """
    schema, own, title = BY_SUBJECT[entry.on], entry.options, f"{entry.kind} {entry.name!r}"
    names = {*own.model_fields, *schema.model_fields}
    for name in values.keys() - names:
        raise FldiagError(f"{title}: unknown key {name!r}", nearest(name, names), usage=True)
    own_values = {k: v for k, v in values.items() if k in own.model_fields}
    of_subject = {k: v for k, v in values.items() if k not in own_values and v is not None}
    options = dict(registry.parse(own, own_values, title))
    # decided here, so that the store tells the answers apart
    if "device" in options:
        options["device"] = device_of(options["device"])
    if options.get("every_round", False) is None:
        options["every_round"] = "rounds" in of_subject
    return options, registry.parse(schema, of_subject, title)


def identity(subject: Subject, is_joint: bool) -> list[Any]:
    """What tells subjects apart: weights, model, data, labels and names; of a run what its files hold now, damaged or not.

    Of a trajectory or a plane also what else is stored in the run, for it may lead there.
    """
    if not isinstance(subject, Run):
        return [subject.digest(), subject.common, is_joint and subject.run and subject.run.files]
    paths = {name: subject.path / name for name in subject.files}
    contents = {name: sha256(path) for name, path in paths.items() if path.is_file()}
    objects = (subject.model, subject.data)  # somebody's objects are not read again
    names = [x if isinstance(x, (str, type(None))) else uuid.uuid4().hex for x in objects]
    return [subject.name, subject.about, subject.records, contents, names]


def code_of_plugin(entry: Diagnostic) -> Any:
    """The source of a diagnostic that is not fldiag's own."""
    module = entry.build.__module__
    if module.startswith("fldiag."):
        return None
    source = getattr(sys.modules[module], "__file__", None)
    return Path(source).read_bytes() if source else code_of(entry.build)


# -- files


def source_of(subject: Subject) -> Run | Checkpoint | None:
    """What weights or rounds were opened from."""
    return (
        subject if isinstance(subject, Run) else subject.run or getattr(subject, "checkpoint", None)
    )


def folder_of(sources: Iterable[Run | Checkpoint | None]) -> Path:
    """The ``diagnostics`` folder of the one run that these belong to, or ``fldiag-out`` in the working directory."""
    paths = {source.path for source in sources if source}
    runs = {path.parent.parent if path.parent.name == "rounds" else path for path in paths}
    run = runs.pop() if len(runs) == 1 else FALLBACK
    is_run = (run / "run.json").is_file() and os.access(run, os.W_OK)
    return run / "diagnostics" if is_run else FALLBACK


def check_writable(folder: Path) -> Path:
    """The folder, which is made when something is written. Raises FldiagError before any work is done if it cannot be."""
    files.refuse_links_above(folder)
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise FldiagError(f"cannot write to {folder}", "choose another folder with --out")
    return folder


def describe(subjects: Sequence[Subject]) -> dict[str, Any]:
    """What the json beside a table says of subjects: their run, and the files that were read with their sha256."""
    about, checkpoints = dict[str, Any](), dict[str, Any]()
    for subject in subjects:
        source = source_of(subject)
        if isinstance(source, Run):
            about |= {"run": source.path.name, "config": source.about["hash"]}
        if isinstance(subject, Run | History):
            checkpoints |= subject.files
        else:
            stored = subject.checkpoint
            read = {"file": stored.path.name, "sha256": stored.sha256} if stored else {}
            seen = {"slice": subject.slice_name, "n": subject.n, "inputs": subject.inputs}
            checkpoints[subject.name] = {**read, **seen}
    return {**about, "checkpoints": checkpoints}


def write_files(answer: Answer, path: Path, about: Mapping[str, Any]) -> None:
    """Write table, pictures and provenance under a path without ending, unless the very same lie there and are whole."""
    width, formats = style.SHEET.get()
    about = {"diagnostic": answer.entry.name, **about, "sheet": [width, *formats]}
    answer.files = files_there(path, about)
    if not answer.files:
        drawn = pictures(answer.entry, answer.table, path)
        about["pictures"] = {file.name: sha256(file) for file in drawn}
        answer.files = [*files.write_table(answer.table, path, about), *drawn]


def files_there(path: Path, about: Mapping[str, Any]) -> list[Path]:
    """The files of an answer, if they were written before with this origin, and nobody changed them since."""
    json = files.beside(path, ".json")
    try:
        note = files.read_json(json)
        digests = {note["table"]["file"]: note["table"]["sha256"], **note["pictures"]}
        is_whole = all(sha256(path.with_name(name)) == digests[name] for name in digests)
    except (OSError, KeyError, FldiagError):
        return []
    is_same = about.items() <= note.items()
    return [json, *map(path.with_name, digests)] if is_whole and is_same else []


def pictures(entry: Diagnostic, table: pd.DataFrame, path: Path) -> list[Path]:
    """The pictures of a table, written; the main one's png last: that is what people look at first."""
    from matplotlib.figure import Figure

    paths: list[Path] = []
    for ending, draw in sorted(entry.drawings.items(), reverse=True):  # the main one's is empty
        picture, target = draw(table), files.beside(path, ending)
        if isinstance(picture, Figure):
            paths += style.save(picture, target)
        elif picture is not None:
            content = picture.encode() if isinstance(picture, str) else picture
            paths.append(files.write_bytes(target, content))
    return paths
