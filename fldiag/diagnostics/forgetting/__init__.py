"""What local training forgets, what averaging restores, and how classes fare over the rounds.

Accuracy before and after local training as in Lee et al., "FedSOL" (CVPR 2024), figure 7; per-class forgetting as in
FedProj (Chunduru et al.); backward transfer as in Lee et al., "Preservation of the global knowledge by not-true
distillation in federated learning" (NeurIPS 2022).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import pandas as pd
from pydantic import Field

from fldiag.diagnostics.forgetting.summary import summary
from fldiag.registry import diagnostic
from fldiag.results.numbers import Number
from fldiag.results.table import table

if TYPE_CHECKING:
    from fldiag.runs.history import History

LAST = {"moment": "trained", "slice": "test", "layer": None, "index": None}
NUMBERS = (
    Number(
        "drop",
        "accuracy lost in local training, mean over clients",
        "lower",
        {"metric": "drop", **LAST},
        share=True,
        needs=("partition",),
        options={"rounds": "last"},
        spread="drop_std",
        short="lost in local training",
        column="Forgetting: accuracy lost in local training (± std over clients)",
    ),
    Number(
        "forgetting",
        "largest loss of accuracy on a class in local training, mean over clients",
        "lower",
        {"metric": "forgetting", **LAST},
        share=True,
        needs=("partition",),
        options={"rounds": "last"},
    ),
)


@diagnostic(
    "forgetting",
    meta={"read": "Chaudhry et al.: abstract and opening"},
    on="clients",
    draw={
        "": "fldiag.diagnostics.forgetting.picture:curves_if_any",
        "-classes": "fldiag.diagnostics.forgetting.picture:heatmap_if_any",
    },
    summary=summary,
    numbers=NUMBERS,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d",
)
def forgetting(
    history: History,
    *,
    min_count: Annotated[
        int, Field(ge=1, description="Leave out numbers that rest on fewer examples.")
    ] = 5,
    confidence: Annotated[
        float, Field(gt=0, lt=1, description="Confidence level of the accuracy intervals.")
    ] = 0.95,
    own: Annotated[
        bool,
        Field(
            description="Also measure on each client's own training data and on that of all "
            "others, which takes most of the time."
        ),
    ] = True,
    by: Annotated[
        Literal["round", "client"],
        Field(
            description="What the printed table has a row for: every round, or every client of the last one. The numbers are "
            "the same.",
            json_schema_extra={"drawing": True},
        ),
    ] = "round",
) -> pd.DataFrame:
    """Measure what local training forgets and averaging restores: accuracy before and after, by class, client and round.

    Every stored round, moments received, trained and aggregated, on slices ``test``, ``client:k/train`` (the client's
    own data) and ``client:k/others`` (all other clients' data); with ``own=False`` on ``test`` alone. A recorded run without test
    examples has slice ``train``, all training examples, in place of ``test`` in all that follows. Accuracies are
    shares in [0, 1] with Wilson's interval in columns ``low``, ``high``. Rows of scope client (those of scope global
    are means over the clients stored, ``n_clients`` of them, with ``_std`` their spread):

    - ``accuracy``, ``loss``; ``class_accuracy`` (index = class) on test; ``accuracy_seen``, ``accuracy_unseen``: on the
      test examples of classes that the client has, and has not, in its training data.
    - ``drop``: accuracy of the received minus the trained model on test; ``class_forgetting``: the same of one class;
      ``forgetting``: its largest value over the classes (a maximum of noisy numbers, so it is above 0 by chance alone
      when classes are small). Standard errors are paired, example by example.
    - ``forgotten``, ``learned``: share of the test examples that turn from right to wrong, and from wrong to right
      (drop = forgotten - learned); ``restored``: share of the forgotten examples that the aggregated model gets right.
    - Over the rounds, of the aggregated model: ``backward_transfer``: accuracy of a class now minus its best so far,
      and the mean over classes (below 0: forgotten); ``class_fluctuation``: absolute change of a class's accuracy
      since the round before, and the mean.
    - After the last round T, with a[t, c] the aggregated model's accuracy on class c after round t, of every class and in the
      mean: ``average_forgetting``, max over t < T of a[t, c] - a[T, c] (Chaudhry et al., ECCV 2018; t = 0 is the initial
      model). Column ``since``: that t. ``backward_transfer`` above, of every round, is that of Lee et al.
    - ``class_examples``: how many training examples of a class (index) a client has. ``missing``: what could not be
      read, in column ``note``.

    A number on fewer than ``min_count`` examples is not shown but ``masked``. Regression data have losses only.
    Cost: one evaluation of every stored model on test and, with ``own``, all training data a round.

    Raises FldiagError when no round has client weights.
    """
    from fldiag.diagnostics.forgetting import measure

    rows = history.map_rounds(
        measure.round_rows,
        clients="some",
        min_count=min_count,
        confidence=confidence,
        on_clients=own,
    )
    clients = {row["client"] for row in rows if row["scope"] == "client"}
    rows += measure.rows_over_rounds(history.rounds, rows)
    examples = measure.class_examples(history, clients)
    rows += [*measure.average_forgetting_rows(rows), *examples]
    return table([*rows, *history.notes], **history.common, estimator="exact")
