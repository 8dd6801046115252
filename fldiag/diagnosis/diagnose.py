"""The one call path: options are parsed, subjects opened, the table is read from the store or measured, and files are written."""

from __future__ import annotations

import contextlib
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
from fldiag.diagnosis.options import BY_SUBJECT, SubjectOptions, plain
from fldiag.diagnosis.subjects import Subject, Target, members, open_subjects, remarks
from fldiag.errors import FldiagError, nearest
from fldiag.execution import Workspace
from fldiag.plotting import style
from fldiag.problem.problem import Problem, code_of
from fldiag.registry import Diagnostic, Progress
from fldiag.results import files
from fldiag.results.files import sha256
from fldiag.results.provenance import digest, provenance
from fldiag.results.store import get_table, put_table
from fldiag.results.summary import Item, Small, standing
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
        """What a person reads first; of a diagnostic without a summary the first rows."""
        if self.entry.summary is not None:
            return [*self.entry.summary(self.table, self.options), *standing(self.table)]
        rows = self.table.head(40).dropna(axis=1, how="all").astype(object)
        small = Small(rows.where(rows.notna(), None).to_dict("records"), {c: c for c in rows})
        return [small, *standing(self.table)]


@full_precision()
def diagnose(
    name: str,
    targets: Sequence[Target | str | Path],
    values: Mapping[str, Any],
    *,
    out: Path | None = None,
    write: bool = True,
    cache: Path | None = None,
    bar: Bar = lambda title: contextlib.nullcontext(lambda done, total, text: None),
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
    subjects = open_subjects(entry, options, targets, subject_options)
    has_vectors = options.get("save_vectors")  # in a file of their own, and not in the store
    if len(subjects) > 1 and has_vectors:
        raise FldiagError("vectors are saved of one checkpoint at a time", usage=True)
    for text in dict.fromkeys(text for subject in subjects for text in remarks(subject)):
        tell(text)
    folder = out or folder_of(source_of(m) for s in subjects for m in members(s))
    if write:
        prepare(folder)
        cache = folder / "cache"
    store = None if has_vectors else cache
    questions = [digest(entry.name, identity(subject), options) for subject in subjects]
    tables: list[pd.DataFrame] = []
    with bar(entry.name) as progress, Workspace(subject_options.executor, progress) as workspace:
        workspace.show(0, 1, entry.name)
        for subject, question in zip(subjects, questions, strict=True):
            about = origin(subject, options)
            key = digest(question, about, code_of_plugin(entry))
            table = store and get_table(store, key)
            if table is None:
                with torch.autocast(torch.device(about["device"]).type, enabled=False):
                    table = check(entry.build(subject, **options))
                if store is not None:
                    try:
                        put_table(store, key, table, {**about, "options": plain(options)})
                    except FldiagError as error:  # the answer is there, and may have room elsewhere
                        tell(f"the table of {name} is not kept for later: {error.what}")
            tables.append(table)
    table = tables[0] if len(tables) == 1 else pd.concat(tables, ignore_index=True)
    table.attrs = {**tables[0].attrs, "diagnostic": entry.name, "options": plain(options)}
    answer = Answer(entry, table, options)
    if write:
        stem = f"{entry.name.replace(':', '-')}-{digest(*questions)[:8]}"
        write_files(answer, folder / stem, describe(subjects, options, values))
    return answer


def find_diagnostic(name: str) -> Diagnostic:
    """The diagnostic of this name, or the function ``pkg.mod:function``, which is imported because it is named here.

    Raises FldiagError for an unknown name, and for code that cannot be imported.
    """
    if not user_code.is_code(name):
        return registry.diagnostic.get(name)
    user_code.allow(name)
    return registry.diagnostic.own(name, user_code.load_user(name, "diagnostic"))


def split_options(
    entry: Diagnostic, values: Mapping[str, Any]
) -> tuple[dict[str, Any], SubjectOptions]:
    """The diagnostic's own options, completed, and those of its subject.

    Raises:
        FldiagError: an unknown option, one of another kind of subject, or a value out of range.
    """
    schema, own, title = BY_SUBJECT[entry.on], entry.options, f"{entry.kind} {entry.name!r}"
    names = {*own.model_fields, *schema.model_fields}
    if unknown := [name for name in values if name not in names]:
        remedy = nearest(unknown[0], names)
        raise FldiagError(f"{title}: unknown key {unknown[0]!r}", remedy, usage=True)
    of_subject = {k: v for k, v in values.items() if k not in own.model_fields and v is not None}
    own_values = {k: v for k, v in values.items() if k in own.model_fields}
    options = dict(registry.parse(own, own_values, title))
    # decided here, so that the store tells the answers apart
    if "device" in options:
        options["device"] = device_of(options["device"])
    if options.get("every_round", False) is None:
        options["every_round"] = of_subject.get("rounds", "all") != "all"
    return options, registry.parse(schema, of_subject, title)


def identity(subject: Subject) -> list[Any]:
    """What tells subjects apart: weights, model, data, labels and names; of a run what its files hold now, damaged or not."""
    if isinstance(subject, (Problem, History)):
        return [subject.digest(), subject.common]
    parts: list[Any] = []
    for member in subject:
        if isinstance(member, Problem):  # also what else is stored with it: a plane may lead there
            checkpoint = member.checkpoint and member.checkpoint.sha256
            parts.append([identity(member), checkpoint, member.run and member.run.files])
        else:
            paths = {name: member.path / name for name in member.files}
            contents = {name: sha256(path) for name, path in paths.items() if path.is_file()}
            parts += [member.name, member.about, member.records, contents]
            for thing in (member.model, member.data):  # somebody's objects are not read again
                is_name = isinstance(thing, (str, type(None)))
                parts.append(thing if is_name else uuid.uuid4().hex)
    return parts


def code_of_plugin(entry: Diagnostic) -> Any:
    """The source of a diagnostic that is not fldiag's own; the code of that one is its version."""
    module = entry.build.__module__
    if module.split(".")[0] == "fldiag":
        return None
    source = getattr(sys.modules.get(module), "__file__", None)
    return Path(source).read_bytes() if source else code_of(entry.build)


def origin(subject: Subject, options: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance of what is computed from this subject."""
    first = members(subject)[0]
    device = getattr(first, "device", options.get("device"))
    return provenance(dtype=getattr(first, "dtype", None), device=device, seed=options.get("seed"))


# -- files


def source_of(member: Problem | History | Run) -> Run | Checkpoint | None:
    """What weights or rounds were opened from."""
    return member if isinstance(member, Run) else member.run or getattr(member, "checkpoint", None)


def folder_of(sources: Iterable[Run | Checkpoint | None]) -> Path:
    """The ``diagnostics`` folder of the one run that these belong to, or ``fldiag-out`` in the working directory."""
    paths = {source.path for source in sources if source is not None}
    runs = {path.parent.parent if path.parent.name == "rounds" else path for path in paths}
    run = runs.pop() if len(runs) == 1 else FALLBACK
    is_run = (run / "run.json").is_file() and os.access(run, os.W_OK)
    return run / "diagnostics" if is_run else FALLBACK


def prepare(folder: Path) -> Path:
    """The folder, which is made when something is written. Raises FldiagError before any work is done if it cannot be."""
    files.refuse_links_above(folder)
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise FldiagError(f"cannot write to {folder}", "choose another folder with --out")
    return folder


def describe(
    subjects: Sequence[Subject], options: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """What the json beside a table says: the files that were read with their sha256, and all options."""
    about, checkpoints = origin(subjects[0], options), dict[str, Any]()
    for member in (m for subject in subjects for m in members(subject)):
        source = source_of(member)
        if isinstance(source, Run):
            about |= {"run": source.path.name, "config": source.about["hash"]}
        if isinstance(member, History):
            checkpoints |= member.files
        elif isinstance(member, Run):
            file = member.round_file(member.rounds[-1])
            checkpoints[member.name] = {"file": file, "sha256": member.files[file]}
        else:
            stored = member.checkpoint
            read = {"file": stored.path.name, "sha256": stored.sha256} if stored else {}
            seen = {"slice": member.slice_name, "n": member.n, "inputs": member.inputs}
            checkpoints[member.name] = {**read, **seen}
    return {**about, "checkpoints": checkpoints, "options": {**plain(values), **plain(options)}}


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
    """The files of an answer, if they were written before with this origin by unchanged code, and nobody changed them since."""
    json = files.beside(path, ".json")
    try:
        note = files.read_json(json)
        digests = {note["table"]["file"]: note["table"]["sha256"], **note["pictures"]}
        paths = [path.with_name(name) for name in digests]
        is_whole = [sha256(file) for file in paths] == list(digests.values())
        is_same = files.json_digest({key: note[key] for key in about}) == files.json_digest(about)
    except (OSError, ValueError, KeyError, FldiagError):
        return []
    is_dirty = str(about["commit"]).endswith("-dirty")
    return [json, *paths] if is_whole and is_same and not is_dirty else []


def pictures(entry: Diagnostic, table: pd.DataFrame, path: Path) -> list[Path]:
    """The pictures of a table, written; the main one's png last: that is what people look at first."""
    from matplotlib.figure import Figure

    paths: list[Path] = []
    for ending, draw in sorted(entry.drawings.items(), reverse=True):  # the main one's is empty
        picture, target = draw(table), path.with_name(path.name + ending)
        if isinstance(picture, Figure):
            paths += style.save(picture, target)
        elif picture is not None:
            content = picture.encode() if isinstance(picture, str) else picture
            paths.append(files.write_bytes(target, content))
    return paths
