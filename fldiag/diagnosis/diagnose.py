"""The one call path: options are parsed (they are spelled once for command line, Python and documentation), subjects opened,
the table is read from the store or measured, and files are written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import pydantic
import torch
from pydantic import AfterValidator, Field

from fldiag import data as data_sets
from fldiag import registry
from fldiag.device import device_of, full_precision
from fldiag.errors import FldiagError, nearest
from fldiag.execution import Workspace, check_executor
from fldiag.plotting import style
from fldiag.problem.problem import Problem, code_of
from fldiag.registry import Diagnostic, Progress
from fldiag.results import files
from fldiag.results.files import digest, get_table, provenance, put_table, sha256, sources
from fldiag.results.table import (
    Item,
    SmallTable,
    check_schema,
    missing_notes,
    notebook_bar,
    standing,
)
from fldiag.runs.checkpoint import Checkpoint, trust_files
from fldiag.runs.history import History
from fldiag.runs.open_problem import open_problem
from fldiag.runs.run import Run, open_checkpoint
from fldiag.sections import read_normalisation

#: What a question can be about.
Target = Run | Checkpoint | Problem | History
#: What a diagnostic measures, one of these or a list of them.
Subject = Run | Problem | History


# Options


def read_size(memory: str | int) -> int:
    """A number of bytes, of such as 500M, 2GiB or 1500000000. Raises FldiagError for anything else, and for less than 1k: the
    unit may have been forgotten.

    >>> read_size("500M"), read_size("2GiB")
    (524288000, 2147483648)
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([kmg]?)i?b?", str(memory).strip().lower())
    count = int(float(match[1]) * 1024 ** " kmg".index(match[2] or " ")) if match else 0
    if count < 1024:
        what = f"memory = {memory!r} is no size, or too small"
        raise FldiagError(what, "give such as 500M or 2G, at least 1k", usage=True)
    return count


def read_names(text: str | Sequence[str]) -> list[str]:
    """Names of text with commas, or of a list. Raises FldiagError for an empty one, and for one twice.

    >>> read_names("FedAvg, Ours")
    ['FedAvg', 'Ours']
    """
    names = [name.strip() for name in (text.split(",") if isinstance(text, str) else text)]
    if not all(names) or len(set(names)) < len(names):
        what = f"names = {','.join(names)!r} has an empty name, or one name twice"
        raise FldiagError(what, "give each target a name of its own", usage=True)
    return names


def read_rounds(text: str | int | Sequence[int] | None, stored: Sequence[int]) -> list[int] | None:
    """The rounds of ``5``, ``1,5,20-30`` or ``last``, or of numbers, as far as they are stored; None for all.

    Raises FldiagError for anything else, and for a part of it of which nothing is stored.

    >>> read_rounds("1,7-last", [1, 5, 10])
    [1, 10]
    """
    if text is None:
        return None
    words = re.findall(r"[^\s,()\[\]]+", str(text).replace("last", str(max(stored, default=0))))
    ends = [re.fullmatch(r"(\d+)(?:-(\d+))?", word) for word in words]
    parts = [m and [r for r in stored if int(m[1]) <= r <= int(m[2] or m[1])] for m in ends]
    if not parts or not all(parts):
        raise FldiagError(
            f"--rounds {text!r} is not valid, or no such round is stored",
            "write for example 5, 1,5,20-30 or last",
            usage=True,
        )
    return sorted(set().union(*parts))  # type: ignore[arg-type]


class SubjectOptions(pydantic.BaseModel):
    """What every diagnostic takes, also one of runs, which opens these itself."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    executor: Annotated[Any, AfterValidator(check_executor)] = Field(
        "serial",
        description="Where work runs: serial, processes[:N] or dask[:ADDRESS].",
    )
    names: Annotated[Any, AfterValidator(read_names)] = Field(
        None,
        description="Names of the targets in tables and pictures, in their order, such as FedAvg,Ours.",
    )


class OpenedOptions(SubjectOptions):
    """Of weights and of the rounds of a run: what both are evaluated on, and how."""

    samples: int | None = Field(
        None,
        ge=1,
        description="Maximum number of examples; class proportions are kept.",
    )
    precision: Literal["fp32", "fp64"] = Field(
        "fp32", description="Precision of the computation: fp32 or fp64."
    )
    memory: Annotated[Any, AfterValidator(read_size)] = Field(
        None,
        description="Memory limit for batches, graphs and bases of vectors, such as 500M (default 2G); "
        "model, data and single vectors are not counted.",
    )
    model: Any = Field(None, description="Model of a plain state_dict: NAME or pkg.mod:factory.")
    data: Any = Field(
        None,
        description="Data: NAME, npz:PATH, csv:PATH or pkg.mod:loader (a function that returns a data "
        "set's four arrays, or (x, y), a dict, a Dataset or a DataLoader).",
    )
    normalise: Annotated[Any, AfterValidator(read_normalisation)] = Field(
        None,
        description="How data given with --data are normalised: none (as stored), unit (pixels / 255), "
        "standard (subtract the mean, divide by the standard deviation of the training split), or "
        "with these given: MEAN/DEVIATION such as 0.1307/0.3081 or "
        "0.49,0.48,0.45/0.25,0.24,0.26 (of pixels / 255). Default: unit for uint8 pixels, "
        "else none.",
    )
    root: Any = Field(None, description="Folder that holds the data (default $FLDIAG_DATA).")
    download: bool = Field(False, description="Download a missing public data set.")
    device: Any = Field("auto", description="Device: auto, cpu, cuda, cuda:N or mps.")


class ProblemOptions(OpenedOptions):
    """Of the loss around stored weights (``fldiag.runs.open_problem``)."""

    slice: str = Field(
        "train",
        description="Examples to use: train, test, client:7, client:7/test (test examples in its class "
        "mixture) or client:7/own (all of its classes).",
    )
    client: int | None = Field(
        None,
        ge=0,
        description="Use the trained weights of this client instead of the global ones.",
    )
    key: str | None = Field(
        None,
        description="Set of weights to use of a file that holds several, such as model_ema.",
    )
    loss: Any = Field(
        None,
        description="Loss: cross_entropy, half_squared_error, mse, multi_label, own (the model's own "
        "loss) or pkg.mod:function of (outputs, y). Default: chosen by the type of the labels; own if "
        "batches are dicts.",
    )
    trainable: bool = Field(
        False,
        description="Treat only parameters with requires_grad as weights; frozen parameters are "
        "constants.",
    )
    weight_decay: float | None = Field(
        None,
        ge=0,
        description="Add the term L/2 |w|^2 to the loss, with this L (default: 0).",
    )
    round: int | None = Field(
        None,
        ge=0,
        description="For a run: use the checkpoint of this round instead of the last one.",
    )


class HistoryOptions(OpenedOptions):
    """Of the stored rounds of a run (``History``)."""

    rounds: Any = Field(None, description="Rounds to use, such as 5, 1,5,20-30 or last.")


#: The options of a diagnostic's subject, by what the diagnostic is on.
BY_SUBJECT: dict[str, type[SubjectOptions]] = {
    "problem": ProblemOptions,
    "checkpoints": ProblemOptions,
    "run": HistoryOptions,
    "runs": SubjectOptions,
}


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


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a file can hold: not objects. The executor is left out, for it changes nothing."""
    texts: dict[str, Any] = {}
    for name, value in options.items():
        with contextlib.suppress(TypeError, ValueError):
            if name != "executor":
                texts[name] = json.loads(json.dumps(value))
    return texts


# Opening


def load(
    path: str | Path,
    *,
    model: Any = None,
    data: Any = None,
    key: str | None = None,
    allow_code: str | Iterable[str] = (),
    trust_file: bool = False,
) -> Run | Checkpoint:
    """A run folder as Run; a ``.pt`` or ``.safetensors`` file, or a model's folder of transformers, as Checkpoint.

    Args:
        path: a run folder, a checkpoint file, or what ``save_pretrained`` wrote (config.json and safetensors).
        model: for a plain state_dict: a module, a registered name or ``pkg.mod:factory``; overrides what a checkpoint says.
        data: what ``Problem`` takes, a data set's name, ``npz:PATH`` or ``pkg.mod:loader``.
        key: which set of weights to read of a file that holds several (``model``, ``model_ema``).
        allow_code: user code (``pkg.mod:name``, one or several) that may be imported although only the file names it; the
            consent holds until the process ends.
        trust_file: a ``.pt`` file is your own. Torch before 2.10 cannot read those of strangers safely,
            so that they are refused there without this; the consent holds until the process ends.

    Returns:
        What the path is, with this model and these data.

    Raises:
        FldiagError: the file is damaged, foreign or unsafe.
    """
    if not isinstance(path, (str, Path)):
        what = f"a {type(path).__name__} is not a path"
        raise FldiagError(what, "give a run folder or a checkpoint file", usage=True)
    path = Path(path)
    registry.allow(allow_code)
    if trust_file:
        trust_files()
    is_run = (path / "run.json").is_file()
    target = Run.open(path) if is_run else open_checkpoint(path, key)
    return with_overrides(target, model, data, key)


def with_overrides(
    target: Run | Checkpoint, model: Any, data: Any, key: str | None
) -> Run | Checkpoint:
    """The target with another model, other data, or another of its file's sets of weights."""
    model, data = target.model if model is None else model, target.data if data is None else data
    if isinstance(target, Run):
        if key is not None:
            what = f"key = {key!r} chooses among the weights of a file, and {target.path} is a run"
            raise FldiagError(what, "leave it out", usage=True)
        target = copy(target)
        target.model, target.data = model, data
        return target
    if key is not None and key != target.key:
        target = open_checkpoint(target.path, key)
    return replace(target, model=model, data=data)


def open_subjects(
    entry: Diagnostic, targets: Sequence[Target | str | Path], options: SubjectOptions
) -> list[Subject]:
    """What the diagnostic measures, each under a name of its own.

    Args:
        entry: the diagnostic.
        targets: runs, checkpoints, Problems or a History, as the diagnostic takes them, or paths.
        options: of the targets.

    Raises:
        FldiagError: targets of the wrong kind, or what cannot be opened.
    """
    is_of_run = entry.on == "run"
    names = options.names or [None] * len(targets)
    if not targets or (is_of_run and len(targets) > 1):
        what = f"{len(targets)} targets are given to {entry.name}"
        remedy = "give one run" if is_of_run else "give a run, a checkpoint or a Problem"
        raise FldiagError(what, remedy, usage=True)
    if len(names) != len(targets):
        what = f"names = {','.join(names)!r} has {len(names)} names for {len(targets)} targets"
        raise FldiagError(what, "give a name for each, with commas between them", usage=True)
    subjects = [open_subject(target, options, entry.name) for target in targets]
    counts = Counter(subject.name for subject in subjects)
    for i, (subject, name) in enumerate(zip(subjects, names, strict=True)):
        is_own = subject in targets
        if name and is_own:  # its owner goes on calling it as before
            subject = subject.at(subject.state) if isinstance(subject, Problem) else copy(subject)
            subjects[i] = subject
        elif counts[subject.name] > 1 and not is_own:
            subject.name += f" ({i + 1})"
        subject.name = name or subject.name
    return subjects


def open_subject(target: Any, options: SubjectOptions, diagnostic: str = "") -> Subject:
    """The one door: the loss around weights, the stored rounds of a run, or the run itself. The class of the options says which.

    Raises FldiagError for what cannot be opened, and for an option that would change nothing.
    """
    if isinstance(target, (str, Path)):
        target = load(target, key=getattr(options, "key", None))
    kind = Problem if isinstance(options, ProblemOptions) else History
    named = options.model_fields_set - {"executor", "names"}
    values = {name: value for name, value in options if name in named}
    if isinstance(target, kind) and isinstance(options, OpenedOptions):
        for name, value in values.items():
            what = f"option {name} = {value!r} has no effect on a {kind.__name__}, which has its weights and data"
            raise FldiagError(what, "leave it out, or set it where that is created", usage=True)
        return target
    if not isinstance(target, Run) and (kind is History or not isinstance(target, Checkpoint)):
        what = f"a {type(target).__name__} cannot be diagnosed by {diagnostic}"
        remedy = "give a run; of weights also a checkpoint or fldiag.Problem(net, loss, (x, y))"
        raise FldiagError(what, remedy, usage=True)
    if not isinstance(options, OpenedOptions):
        return copy(target)  # type: ignore[return-value]
    is_double = values.pop("precision", "") == "fp64"
    values["dtype"] = torch.float64 if is_double else torch.float32
    key, round = (values.pop(name, None) for name in ("key", "round"))
    target = with_overrides(target, values.pop("model", None), values.pop("data", None), key)
    if isinstance(options, HistoryOptions):
        values["rounds"] = read_rounds(options.rounds, target.rounds)
        return History(target, **values)
    if round is not None and isinstance(target, Checkpoint):
        what = f"round = {round} chooses a checkpoint of a run, but {target.path} is one checkpoint"
        raise FldiagError(what, "leave it out, or give the run's folder", usage=True)
    return open_problem(target if round is None else target.checkpoint(round), **values)


def remarks(subject: Subject) -> list[str]:
    """How data of one's own are seen, what a loss is the mean of, and where frozen parameters are counted as weights."""
    if isinstance(subject, History):
        return [] if subject.alone else data_sets.remarks(subject.dataset)
    if isinstance(subject, Run):
        return []
    # of one's own data, the probe sees what the targets look like
    if subject.inputs == "as passed" and bool(subject.w.isfinite().all()):
        subject.probe()
    frozen = sum(p.numel() for p in subject.module.parameters() if not p.requires_grad)
    how = "constants" if subject.trainable else "weights (--trainable: as constants)"
    text = f"{subject.name}: {frozen:,} frozen parameters count as {how}"
    return [*subject.remarks, text] if frozen else subject.remarks


# Asking

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
    registry.allow(name)  # pkg.mod:function is imported because it is named here
    entry = registry.diagnostic.get(name)
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
                    table = check_schema(entry.build(group if is_joint else group[0], **options))
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


# Files


def source_of(subject: Subject) -> Run | Checkpoint | None:
    """What weights or rounds were opened from."""
    return (
        subject if isinstance(subject, Run) else subject.run or getattr(subject, "checkpoint", None)
    )


#: Where results go that belong to no single run, or to one that cannot be written to.
FALLBACK = Path("fldiag-out")


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
    paths: list[Path] = []
    for ending, draw in sorted(entry.drawings.items(), reverse=True):  # the main one's is empty
        picture, target = draw(table), files.beside(path, ending)
        if isinstance(picture, str | bytes):
            content = picture.encode() if isinstance(picture, str) else picture
            paths.append(files.write_bytes(target, content))
        elif picture is not None:
            paths += style.save(picture, target)
    return paths
