"""What a figure or table of a paper is: which runs, which diagnostics, one pure function that draws.

How to write a study
--------------------
A file ``fldiag_papers/<paper>/<id>.py`` with the name of the id in ``reported.csv`` and one variable ``STUDY``; it is found by
itself. A table whose cells are final accuracies takes its runs from ``reported.csv``, and is an entry of ``STUDIES`` in
``<paper>/tables.py``::

    table_of("fedsol", "table2", title="Accuracy of 8 methods", caption="Final test accuracy.")

A figure names its trials, what is asked of each finished run, and draws::

    from fldiag_papers.study import Study, Trial, diagnostic
    from fldiag_papers import learning_curves

    def draw(table):
        return learning_curves.draw(table[table["scope"] == "global"], ["global_local_divergence", "local_local_divergence"])

    STUDY = Study(
        title="Weight divergence", caption="...", source="FedSOL Figure 6",
        trials=(Trial("fedsol-cifar10-lda0.1", "fedavg"),
                Trial("fedsol-cifar10-lda0.1", "fedsol", {"method.rho": 2.0}, label="FedSOL")),
        ask=(diagnostic("drift", rho=()),), draw=draw)

- ``Trial(preset, method, overrides)`` is the *paper's* protocol: presets and overrides as in ``fldiag train --set``. What
  a scale makes of it is the business of ``scales.py``; write nothing about it. Trials of any studies with the same
  protocol are one run.
- ``ask``: the functions at the end of this file, with options of the diagnostic of that name. An ask of few seeds:
  ``diagnostic("landscape", seeds=1)``. Questions without a run (toys): ``alone``.
- The table that ``draw`` gets: the answers to one question, one below the other, in the columns of a result table, and
  ``run`` and ``label`` (the trial's label), ``ask`` (the name), ``seed``, ``setting``, ``method``, ``model``, ``data`` (as
  in reported.csv), ``trained_on``, ``trained_model`` (what the scale made of data and model),
  ``trained_with`` (and of the numbers that the trial varies), ``origin`` (measured, or reported: rows with the paper's
  numbers, column ``std``). It is read back from the csv: columns without an entry are not
  there, and texts that are missing are NaN. ``draw`` computes nothing but means, and returns a matplotlib Figure in the
  style of ``fldiag.plotting.style``; ``fldiag.plotting`` and ``fldiag_papers.pictures`` have most of what is needed.
- Metrics of several questions may have one name and be other numbers (``accuracy`` of ``final`` is in percent, that of
  ``drift`` a share). So ``draw`` and ``derive`` get a table for each question, in the order in which the study and then its
  trials ask them, and what chooses from the csv of all (``pick``, statements) fails where its rows answer several questions
  (``one_question``).
- ``pick``: which rows are the numbers of the ledger: name of the metric in reported.csv -> values of columns. They are
  matched by setting, method, model, data and metric, so give a trial the ``setting`` of reported.csv (``table_of`` does).
  ``derive(*tables) -> rows`` adds numbers that need more than a choice of rows, such as ratios of methods. Without
  ``pick``, the derived rows (ask "derived") are the numbers of the ledger; with it, ``draw`` gets the numbers alone, in one
  table.
- ``seeds``: at least so many where the scale has fewer (for claims that need a spread).
- Statements to check are in ``claims.py`` beside it.
- A study that is no figure of the paper, but varies one (other clients, other weights), has ``varies``: that one's id, whose
  numbers its table holds as the reported ones. Its own numbers are told apart in the ledger.

Try it: ``fldiag figures fedsol/fig6 --scale smoke --out fldiag-out/figures``, and look at the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from fldiag import config as configs
from fldiag import known
from fldiag.config import Config
from fldiag.errors import FldiagError, unknown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Needs = Literal["nothing", "metrics", "last", "clients", "rounds", "state"]


@dataclass(frozen=True)
class Ask:
    """A question to a run. ``needs``: what the run must have kept for it; ``steps``: that local steps were recorded (the
    proximal loss); ``seeds``: asked of the first seeds only."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: Needs = "metrics"
    steps: str | None = None
    seeds: int | None = None


@dataclass(frozen=True)
class Trial:
    """One line of a figure or cell of a table: a protocol of the paper, trained once a seed.

    ``method``: as in reported.csv (``strategy:A1``: with this id), default: the preset's. ``over``: dotted overrides.
    ``setting``, ``model``, ``data``: the key in reported.csv. ``train``: False for questions about the config alone.
    """

    preset: str
    method: str = ""
    over: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    setting: str = ""
    model: str | None = None
    data: str | None = None
    ask: tuple[Ask, ...] = ()
    train: bool = True

    @property
    def paper(self) -> str:
        return self.preset.partition("-")[0]

    def protocol(self) -> Config:
        """The paper's config. Raises FldiagError for unknown presets, methods and options."""
        name, _, id = self.method.partition(":")
        overrides = {
            **({"method.name": name} if name else {}),
            **({"method.id": id} if id else {}),
            **self.over,
        }
        return configs.build(configs.load(self.preset).model_dump(), overrides)

    def key(self) -> dict[str, str]:
        """What its numbers are called in reported.csv."""
        config = self.protocol()
        return {
            "setting": self.setting,
            "method": self.method or config.method.name,
            "model": config.model.name if self.model is None else self.model,
            "data": config.data.name if self.data is None else self.data,
        }

    @property
    def name(self) -> str:
        return self.label or self.method or self.protocol().method.name


#: Questions to a config that need no data.
COUNTED = ("flops", "cost", "traffic")
#: Ends the name of what is counted as profilers of layers count: with the average over positions before the classifier, and of
#: the parameters those of convolutions and linear layers alone.
PROFILED = "_profiled"
#: What the ledger takes of a table of accuracies.
ACCURACY: Mapping[str, Mapping[str, Any]] = MappingProxyType({"accuracy": {"metric": "accuracy"}})


@dataclass(frozen=True)
class Study:
    """A figure or table; see the top of this file. ``paper`` and ``id`` are those of its file."""

    title: str
    source: str
    caption: str
    draw: Callable[..., Figure]
    trials: tuple[Trial, ...] = ()
    ask: tuple[Ask, ...] = ()
    alone: tuple[Ask, ...] = ()
    pick: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    derive: Callable[..., pd.DataFrame] | None = None
    layout: Callable[[pd.DataFrame], pd.DataFrame] | None = None
    seeds: int = 1
    varies: str = ""
    paper: str = ""
    id: str = ""

    @property
    def name(self) -> str:
        return f"{self.paper}/{self.id}"

    def questions_for(self, trial: Trial, seed_number: int) -> tuple[Ask, ...]:
        """What is asked of the trial's run of this seed (counted from 0)."""
        return tuple(a for a in (*self.ask, *trial.ask) if a.seeds is None or seed_number < a.seeds)

    def answers(self, table: pd.DataFrame) -> list[pd.DataFrame]:
        """The table's rows by question, in the order in which these are asked; the paper's numbers are in each."""
        asks = (*self.ask, *(a for t in self.trials for a in t.ask), *self.alone)
        return [
            table[(table["ask"] == name) | (table["origin"] == "reported")]
            for name in dict.fromkeys(a.name for a in asks)
        ]

    def picture(self, table: pd.DataFrame) -> Figure:
        """The picture of the study's table."""
        return self.draw(table) if self.pick else self.draw(*self.answers(table))


def one_question(rows: pd.DataFrame) -> pd.DataFrame:
    """The same rows. Raises FldiagError where they answer several questions, whose metrics of one name are other numbers."""
    names = rows["ask"].dropna().unique() if "ask" in rows else ()
    if len(names) > 1:
        raise FldiagError(
            f"numbers of several questions under one name: {', '.join(names)}",
            "name one of them: ask=",
        )
    return rows


# ---- the questions


def final() -> Ask:
    """The last round's test ``accuracy`` in percent."""
    return Ask("final", {"metrics": ("accuracy",)})


def best() -> Ask:
    """The highest test ``accuracy`` in percent of any round (``round``), for papers whose code reports that."""
    return Ask("best")


def curve() -> Ask:
    """The test ``accuracy`` in percent of every round."""
    return Ask("curve", {"metrics": ("accuracy",)})


def seconds() -> Ask:
    """``seconds_per_round``: the median over the rounds after the first, of one thread's work when the run was trained."""
    return Ask("seconds")


def reach(*levels: float) -> Ask:
    """``rounds_to_80`` for level 80: the first round with that test accuracy in percent; none if it is never reached."""
    return Ask("reach", {"levels": levels})


def personal(*epochs: int, **options: Any) -> Ask:
    """``personal_accuracy`` in percent after so many epochs of fine-tuning (``index``), mean and std over the clients."""
    return Ask("personal", {"epochs": epochs or (1, 5), **options}, "state")


def cost() -> Ask:
    """``flops_relative``: multiply-adds of a local step over those of FedAvg on the same model, counted. For trials with
    ``train=False``: of the paper's model, images and classes at every scale."""
    return Ask("cost", needs="nothing", seeds=1)


def diagnostic(
    name: str, *, seeds: int | None = None, steps: str | None = None, **options: Any
) -> Ask:
    """The table of any diagnostic, also of another package: of the last global model, of the last round with its clients'
    weights, or of all rounds, whichever it looks at. ``steps``: own, kl or l2: also recorded at every local step.

    Raises FldiagError for an unknown one."""
    item = known.item("diagnostics", name)
    if item is None:
        raise unknown("diagnostic", name, known.names("diagnostics"))
    needs: Literal["last", "clients", "rounds"] = "clients" if item["on"] == "clients" else "last"
    needs = "rounds" if known.over_rounds(item) else needs
    return Ask(name, options, needs, steps, seeds)


def partition() -> Ask:
    """Label distribution per client: rows ``count`` with ``client``, ``index`` (the class); with ``train=False`` too."""
    return Ask("partition", needs="nothing", seeds=1)


def flops() -> Ask:
    """``MFLOPs`` (``GFLOPs``): multiply-adds of a local step's forward passes, an image; ``params_M``: parameters kept. For
    trials with ``train=False``: of the paper's model, images and classes at every scale."""
    return Ask("flops", needs="nothing", seeds=1)


def examples() -> Ask:
    """``train_examples`` and ``test_examples``: how many the data set has."""
    return Ask("examples", needs="nothing", seeds=1)


def traffic() -> Ask:
    """``uplink``, ``downlink`` and ``client_state``: what a client sends, receives and keeps between its rounds, in multiples of
    the model's bytes. For trials with ``train=False``: of the paper's model, images and classes at every scale."""
    return Ask("traffic", needs="nothing", seeds=1)


def plane(**options: Any) -> Ask:
    """The toy in the plane; goes into ``alone``."""
    return Ask("plane", options, "nothing")


def iris(**options: Any) -> Ask:
    """The Iris toy (fields of its Protocol); goes into ``alone``."""
    return Ask("iris", options, "nothing")
