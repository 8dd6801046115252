"""The public functions on runs, checkpoints and their tables. (``fldiag.training`` has ``train`` and ``sweep``.)"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fldiag import registry
from fldiag.compare import check as checks
from fldiag.compare import picture
from fldiag.compare.check import Checked
from fldiag.compare.sides import Reader, Side, sides
from fldiag.diagnosis import diagnose as diagnosis
from fldiag.diagnosis.diagnose import ProblemOptions, Target, load
from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.registry import Progress
from fldiag.results.table import Note, notebook_bar, standing
from fldiag.runs.checkpoint import trust_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["catalogue", "check", "diagnose", "diff", "draw", "load"]


def diagnose(
    target: Target | str | Path | Sequence[Target | str | Path],
    name: str,
    *,
    cache: str | Path | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
    allow_code: str | Iterable[str] = (),
    trust_file: bool = False,
    **options: Any,
) -> pd.DataFrame:
    """Run a diagnostic (``fldiag.catalogue("diagnostics")``) and return its tidy table.

    Args:
        target: a Run, a Checkpoint, a Problem, a History, a path, or several of these.
        name: the diagnostic's.
        cache: a folder in which the table is stored under a digest of everything it depends on. A repeated call reads and
            verifies it.
        progress: is called with done, total and what is being done; in a notebook, a bar by default.
        tell: is told remarks in words, such as what a cache had damaged. Without it, a model that is no better than a guess is a
            warning of Python.
        allow_code: user code (``pkg.mod:name``, one or several) that may be imported although only a run or checkpoint names it;
            the consent holds until the process ends.
        trust_file: as for ``load``, of the paths.
        **options: the diagnostic's own (``fldiag explain NAME``), and those with which it opens a checkpoint or run, such as
            ``slice``, ``samples`` or ``rounds`` (``fldiag spectrum --help`` lists both). For any target ``executor``, and
            ``names``, what tables and pictures call the targets, such as ``["FedAvg", "Ours"]``.

    Returns:
        One row per number. ``attrs`` names the diagnostic, for ``fldiag.draw``.

    Raises:
        FldiagError: unknown names and options, targets of the wrong kind, or what cannot be computed.

    >>> import torch, fldiag
    >>> net, x, y = torch.nn.Linear(2, 3), torch.eye(2), torch.tensor([0, 2])
    >>> problem = fldiag.Problem(net, torch.nn.functional.cross_entropy, (x, y))
    >>> fldiag.diagnose(problem, "spectrum", k=2)["metric"].tolist()
    ['loss', 'accuracy', 'eigenvalue', 'eigenvalue', 'eigenvalue_ratio']
    """
    targets: Sequence[Any] = target if isinstance(target, (list, tuple)) else [target]
    registry.allow(allow_code)
    if trust_file:
        trust_files()
    answer = diagnosis.diagnose(
        name,
        targets,
        options,
        write=False,
        cache=None if cache is None else Path(cache),
        bar=lambda title: notebook_bar(title, progress),
        tell=tell or (lambda text: None),
    )
    say = tell or partial(warnings.warn, stacklevel=2)
    for item in standing(answer.table):
        if isinstance(item, Note):
            say(item.text)
    return answer.table


def check(
    a: Side,
    b: Side | None = None,
    *,
    fail_if: Sequence[str] = (),
    level: float = 0.95,
    allow_code: str | Iterable[str] = (),
    **options: Any,
) -> Checked:
    """Test whether A is better than B, or still as good as its baseline B.

    One run or checkpoint on each side: two given models, compared over test examples (McNemar's exact test, paired bootstrap).
    Several runs on each side: methods, compared over pairs of runs of equal seed (paired t; three pairs at least). The result
    says which of the two questions it answers.

    Args:
        a: a run, a checkpoint, a path, a pattern, a folder that holds runs of one method, or several runs that differ by the
            seed.
        b: the baseline, likewise; without one, conditions compare with numbers only.
        fail_if: conditions such as ``"accuracy < baseline - 1pt"`` or ``"forgetting > 0.2"`` (see
            ``fldiag.compare.check``); by default ``"accuracy < baseline"``.
        level: confidence level of the intervals; all verdicts of a check are correct together with this probability (Holm).
        allow_code: as for ``diagnose``.
        **options: ``model``, ``data``, ``root``, ``download`` and ``device``, as for ``diagnose``.

    Returns:
        ``verdict`` (pass, fail, undecided, or error where a number could not be computed and nothing was tested), ``table`` (one
        row per condition), ``question`` and ``notes``.

    Raises:
        FldiagError: a condition that cannot be read, sides on different data, or runs that cannot be paired.

    >>> import tempfile, fldiag
    >>> start = fldiag.Config.load("digits", rounds=1, model__name="mlp", clients__per_round=2, train__epochs=1)
    >>> run = fldiag.train(start, out=tempfile.mkdtemp() + "/run")
    >>> fldiag.check(run, run, fail_if=["loss > baseline + 5%", "accuracy > 90%"])
    Checked(verdict='pass', labels=('run', 'run'))
    """
    registry.allow(allow_code)
    return checks.check(sides(a, b), _reader(options), fail_if, level)


def diff(
    a: Side,
    b: Side,
    *,
    numbers: Sequence[str] | None = None,
    level: float = 0.95,
    allow_code: str | Iterable[str] = (),
    **options: Any,
) -> pd.DataFrame:
    """Compare all numbers of two sides, each with its difference and interval; like ``check``, but without conditions.

    Args:
        a, b: the two sides, as for ``check``.
        numbers: only these, such as ``["accuracy", "lambda_1"]``; by default all.
        level: as for ``check``.
        allow_code: as for ``check``.
        **options: as for ``check``.

    Returns:
        One row per number: ``value``, ``baseline``, ``difference`` with its interval (``low``, ``high``), ``p`` and Holm's
        ``p_holm``; ``masked``, with the reason in ``note``, where the two cannot be compared by it. ``attrs`` hold the question
        and the notes.

    Raises:
        FldiagError: sides on different data, runs that cannot be paired, or an unknown number.
    """
    registry.allow(allow_code)
    return checks.diff(sides(a, b), _reader(options), numbers, level)


def _reader(options: Mapping[str, Any]) -> Reader:
    registry.parse(ProblemOptions, options, "the comparison")
    return Reader(options)


def draw(table: pd.DataFrame, *, name: str = "", width: str | float | None = None) -> Figure:
    """The picture of a diagnostic's table, or of what ``diff`` returned.

    Args:
        table: what ``diagnose`` or ``diff`` returned; several of one diagnostic may stand one below the other.
        name: the diagnostic's name, for a table that does not hold it (such as one read from a csv), or that has rows of several.
        width: of the figure: single, double (a journal's columns), or millimetres.

    Returns:
        The figure.

    Raises:
        FldiagError: a table of no known diagnostic, one without a picture, or without the rows that it shows.
    """
    of = name or str(getattr(table, "attrs", {}).get("diagnostic", ""))
    if not of:
        raise FldiagError(
            "the table does not say which diagnostic it is of", "give name=", usage=True
        )
    if "diagnostic" in table.columns and of != "diff":
        table = table[table["diagnostic"] == of].drop(columns="diagnostic")
    paint: registry.Function | None = (
        picture.draw if of == "diff" else registry.diagnostic.get(of).drawings.get("")
    )
    try:
        with style.use_sheet(width):
            figure: Figure | None = paint and paint(table)
    except (LookupError, ValueError, TypeError, ArithmeticError) as error:
        what = f"this table has not what the picture of {of!r} shows ({error!r})"
        raise FldiagError(what, usage=True) from error
    if figure is None:
        raise FldiagError(f"this table of {of!r} has no picture", "see its rows", usage=True)
    return figure


def catalogue(kind: str) -> dict[str, str]:
    """The names of what is registered, with one-line descriptions.

    Args:
        kind: methods, models, datasets, diagnostics or presets, or a list of another package, such as figures.

    Returns:
        Name -> description. For entries of other packages that are not imported yet, the package's name instead.

    Raises:
        FldiagError: an unknown kind.

    >>> import fldiag
    >>> "fedsol" in fldiag.catalogue("methods")
    True
    """
    return registry.catalogue(kind)
