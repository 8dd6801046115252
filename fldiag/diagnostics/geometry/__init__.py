"""The geometry of features: neural collapse, effective rank, and how alike clients' layers see the same examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from fldiag.registry import diagnostic
from fldiag.results.select import last_round, number, only, spread_rounds
from fldiag.results.summary import Item, Note, Say, Small, missing_notes, plus_minus
from fldiag.results.table import table

if TYPE_CHECKING:
    from fldiag.runs.history import History

NUMBERS = {
    "round": "round",
    "model": "model",
    "nc1": "NC1",
    "nc2_norms": "NC2 lengths",
    "nc2_cosines": "NC2 angles",
    "nc3": "NC3",
    "nc4": "NC4",
    "effective_rank": "effective rank",
}
LAYERS = {"layer": "layer", "value": "CKA of two clients", "stderr": "± stderr"}
#: Rounds shown.
MOST = 4


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    overall = only(frame, scope="global")
    collapse = overall.dropna(subset=["value"])
    split = options["slice"]
    models = {
        "received": {"moment": "received"},
        "clients, all examples": {"moment": "trained", "slice": split},
        "clients, own examples": {"moment": "trained", "slice": "client:*/train"},
        "aggregated": {"moment": "aggregated"},
    }
    yield Small(
        [
            {
                "round": r,
                "model": name,
                **{m: number(overall, m, round=r, **place) for m in list(NUMBERS)[2:]},
            }
            for r in spread_rounds(collapse, "effective_rank", MOST)
            for name, place in models.items()
            if len(only(collapse, metric="effective_rank", round=r, **place))
        ],
        NUMBERS,
    )
    clients: dict[str, Any] = {
        **models["clients, all examples"],
        "round": last_round(collapse, "effective_rank"),
    }
    if len(only(collapse, metric="effective_rank", **clients)):
        texts = [
            f"{heading} {plus_minus(number(overall, m, **clients), number(overall, m, column='stderr', **clients))}"
            for m, heading in list(NUMBERS.items())[2:]
        ]
        yield Say(f"clients in round {clients['round']}, all examples: {', '.join(texts)}")
    last = last_round(overall, "cka")
    similarity = only(overall, metric="cka", round=last).dropna(subset=["layer"])
    yield Small(
        [
            {
                "layer": layer,
                **{c: number(similarity, column=c, layer=layer) for c in ("value", "stderr")},
            }
            for layer in similarity["layer"]
        ],
        LAYERS,
    )
    masked = only(frame, masked=True)
    for note in masked[masked["metric"] != "missing"]["note"].dropna().unique():
        yield Note(f"no number where {note}")
    yield from missing_notes(frame)


@diagnostic(
    "geometry",
    meta={
        "read": "Papyan et al.: excerpts, and their notebook; Roy and Vetterli, Kornblith et al.: as quoted by others"
    },
    on="clients",
    draw="fldiag.diagnostics.geometry.picture:draw",
    summary=summary,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d --slice test",
)
def geometry(
    history: History,
    *,
    slice: Annotated[
        Literal["train", "test"],
        Field(description="Examples: train (those of all clients) or test."),
    ] = "train",
    similar: Annotated[
        int,
        Field(
            ge=0, description="Number of examples on which clients' layers are compared (0: none)."
        ),
    ] = 200,
) -> pd.DataFrame:
    """Measure the geometry of features before the head: neural collapse (NC1 to NC4), effective rank, CKA between clients.

    Of every round, for the received, every trained and the aggregated model on the ``slice``; of a trained model also on its
    client's own examples (client:k/train, with ``slice`` train). h are the features that the head sees, of n examples in
    C classes (those that occur, column ``classes``) with means mu_c and their mean mu, M = [mu_c - mu], W the head's matrix.
    Every class counts alike in both covariances.

    - ``nc1`` tr(Sigma_W Sigma_B^+) / C, the covariance within classes over that between them (its pseudo-inverse on the at most
      C - 1 directions of the means).
    - ``nc2_norms`` standard deviation over mean of ||mu_c - mu||, ``nc2_cosines`` mean over pairs of
      |cos(mu_c - mu, mu_c' - mu) + 1 / (C - 1)|: both 0 for a simplex frame (with two classes always).
    - ``nc3`` || W / ||W||_F - M / ||M||_F ||_F, from 0 to 2. The norm, where the authors' code has its square; the rows of W
      are those of the classes that occur, minus their mean, which no answer depends on (their code takes W as it is).
    - ``nc4`` share of the examples whose nearest class mean is not the class that the head answers.
    - ``effective_rank`` exp of the entropy of the singular values' shares of their sum, of the centred features: 1 to d.
    - ``cka`` of two clients' trained models (scope pair) by ``layer``, and its mean over the pairs (scope global): linear CKA
      ||X'Y||_F^2 / (||X'X||_F ||Y'Y||_F) of the layer's centred outputs X and Y, on ``similar`` examples evenly spread. With
      fewer examples than outputs of a layer it is biased upwards: compare runs on as many examples.

    Rows of scope global and moment trained are means over the clients with their standard error as a sample.
    After Papyan, Han and Donoho (PNAS 2020; the measures in the authors' notebook were read, of the text excerpts), Roy and
    Vetterli (EUSIPCO 2007, definition 2; read as quoted by others) and Kornblith et al. (ICML 2019; read as quoted by others).

    Args:
        history: A run with client weights.
        slice: Which examples.
        similar: Examples, 0 or more.

    Returns:
        A row a number, without units; masked with a reason in ``note`` where it is not defined: no head, one class, targets that
        are no classes, features that are all the same, one client.

    Raises:
        FldiagError: no round has client weights, or there are no examples.

    >>> from fldiag.registry import diagnostic
    >>> sorted(diagnostic.get("geometry").options.model_fields)
    ['similar', 'slice']
    """
    from fldiag.diagnostics.geometry.measure import round_rows

    history.stretch(slice)
    rows = history.map_rounds(round_rows, split=slice, similar=similar)
    rows = [{"masked": row["value"] is None, **row} for row in rows]
    return table([*rows, *history.final_rows(), *history.notes], **history.common)
