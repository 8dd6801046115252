"""How evenly one model serves the clients, and whether its confidence can be trusted.

Spread of accuracy over clients as in Li et al., "Fair Resource Allocation in Federated Learning" (ICLR 2020); expected
calibration error of Guo et al. (ICML 2017).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import pandas as pd
from pydantic import Field

from fldiag.choices import BINS, FEWEST, ClientSlice
from fldiag.diagnostics.fairness.summary import summary
from fldiag.registry import diagnostic
from fldiag.results.numbers import Number
from fldiag.results.table import table

if TYPE_CHECKING:
    from fldiag.runs.history import History


def spread(name: str, text: str, better: Literal["higher", "lower"], share: bool = True) -> Number:
    return Number(
        name,
        text,
        better,
        {"metric": name, "scope": "global", "estimator": "bayesian bootstrap"},
        share=share,
        needs=("partition",),
        over="examples of clients",
    )


NUMBERS = (
    spread("mean_accuracy", "accuracy on clients' class mixtures, mean over clients", "higher"),
    spread("worst_decile", "mean accuracy of the worst tenth of clients", "higher"),
    spread("accuracy_variance", "variance of accuracy over clients", "lower", share=False),
    spread("accuracy_gini", "Gini coefficient of accuracy over clients", "lower", share=False),
    spread("ece", "expected calibration error on all clients' examples", "lower"),
)


@diagnostic(
    "fairness",
    on="run",
    draw="fldiag.diagnostics.fairness.picture:draw",
    summary=summary,
    numbers=NUMBERS,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d",
)
def fairness(
    history: History,
    *,
    on: Annotated[
        ClientSlice,
        Field(
            description="Examples of a client: test (test examples in its class mixture), own "
            "(all test examples of its classes) or train (its training "
            "examples)."
        ),
    ] = "test",
    bins: Annotated[
        int, Field(ge=2, le=1000, description="Number of confidence bins, of equal width.")
    ] = BINS,
    min_count: Annotated[
        int, Field(ge=1, description="Leave out clients with fewer examples.")
    ] = FEWEST,
    every_round: Annotated[
        bool | None,
        Field(
            description="Use all rounds instead of only the last (default if --rounds is given)."
        ),
    ] = None,
) -> pd.DataFrame:
    """Measure how evenly the global model serves the clients, and how well its confidence is calibrated.

    The aggregated model on the examples of every client of the partition, sampled or not (``on``; clients may share test
    examples; in a recorded run without test examples always on its training examples).

    - scope client: ``accuracy`` with Wilson's interval, ``ece`` (expected calibration error), ``ece_floor``; in column ``size``
      how many training examples it has.
    - scope global, over clients, all counted alike: ``mean_accuracy``, ``worst_decile`` (mean of the worst tenth, rounded
      up), ``accuracy_variance``, ``accuracy_gini``.
    - scope global, of all clients' examples together: ``loss``, ``accuracy``, ``ece``, ``ece_floor``; ``bin_accuracy`` and
      ``bin_confidence`` (index: the bin) are the reliability diagram.

    Intervals are basic bootstraps over the examples, clients fixed; those of accuracies on the scale of log odds, which
    keeps them between 0 and 1. They carry the chance of the test examples, not that of training again. Few examples make a
    worst decile too low, and a variance, a Gini coefficient and a calibration error too high; the interval takes an estimate of
    that out. The estimate is too small where clients are in truth alike or a model is calibrated: the interval of a Gini
    coefficient or a calibration error may miss the true 0. ``ece_floor`` is the calibration error that a perfectly calibrated
    model would show on so few examples.
    Cost: one evaluation of the model a round.

    Raises FldiagError for data without classes, and where nobody says which examples are whose.
    """
    from fldiag.diagnostics.fairness import measure

    if not history.dataset.tested:
        on = "train"
    rows = history.map_rounds(
        measure.round_rows,
        every_round=every_round,
        clients=False,
        groups=measure.groups(history, on, min_count),
        on=on,
        bins=bins,
    )
    rows = [{"moment": "aggregated", "masked": row["value"] is None, **row} for row in rows]
    notes = [{"estimator": "exact", **note} for note in history.notes]
    return table([*rows, *notes], **history.common)
