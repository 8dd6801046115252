"""How clients drift apart, and in which sense: weights, gradients, proximal loss and representations, round by round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
import pandas as pd
from pydantic import Field

from fldiag.choices import Proximal, Rule, Strength
from fldiag.diagnostics.drift.summary import summary
from fldiag.errors import FldiagError
from fldiag.registry import diagnostic
from fldiag.results.numbers import Number
from fldiag.results.table import table

if TYPE_CHECKING:
    from fldiag.runs.history import History

Radius = Annotated[float, Field(ge=0)]


DISTANCE = Number(
    "drift",
    "distance of client weights from the received, mean over clients",
    "lower",
    {"metric": "global_local_divergence", "moment": "trained", "layer": None, "estimator": "exact"},
    needs=("model", "partition"),
    column="Drift: distance of client weights from the received",
    short="drift",
    options={"rounds": "last", "rho": (), "gradients": False, "representation": False},
)


@diagnostic(
    "drift",
    on="clients",
    draw={
        "": "fldiag.diagnostics.drift.picture:draw",
        "-conflict": "fldiag.diagnostics.drift.picture:conflict_if_any",
    },
    summary=summary,
    numbers=(DISTANCE,),
    example="checkpoints/digits-fedavg-s0-1a2b3c4d --rho 0 --rho 2",
)
def drift(
    history: History,
    *,
    rho: Annotated[
        tuple[Radius, ...],
        Field(description="Radius ρ of the perturbation in the FedSOL gradient g_u."),
    ] = (0.0, 0.5, 1.0, 2.0),
    loss: Annotated[Proximal, Field(description="Proximal loss: kl or l2.")] = "kl",
    tau: Annotated[float, Field(gt=0, description="Temperature of the KL loss.")] = 3.0,
    strength: Annotated[
        Strength, Field(description="Strength of the perturbation: adaptive or fixed.")
    ] = "adaptive",
    per: Annotated[
        Rule,
        Field(
            description="Normalise the adaptive strengths over each layer, tensor or dim0 (as the "
            "released code does)."
        ),
    ] = "layer",
    part: Annotated[
        str, Field(description="Which weights are perturbed: full, body or head.")
    ] = "full",
    batch: Annotated[
        int | None, Field(ge=1, description="Minibatch size (default: all examples of a client).")
    ] = None,
    gradients: Annotated[
        bool, Field(description="Also compute cosines with the global gradient.")
    ] = True,
    representation: Annotated[
        bool,
        Field(
            description="Also compute the CKA (similarity of representations) of trained "
            "and received models."
        ),
    ] = True,
) -> pd.DataFrame:
    """Measure how clients drift apart: distances and cosines of weights, updates and gradients, proximal loss, CKA.

    Rows of every stored round with client weights; scope client (each), pair (two clients) and global (the mean, over
    ``n_clients`` clients or their pairs). d_k is a client's update: trained minus received weights.

    - ``global_local_divergence`` ||d_k||, ``local_local_divergence`` ||w_k - w_j||, whole and by ``layer`` (also
      ``part:body``, ``part:head``); ``squared_divergence`` ||w_k - w_new||^2 to the aggregated model; ``update_norm`` of
      every client and (moment aggregated) of the server; ``update_cosine`` between two updates, ``server_cosine`` between
      a client's and the server's.
    - ``update_consensus``, whole and by ``layer``: ||sum p_k d_k|| / sum p_k ||d_k||, p_k the aggregation weights: 1 where all
      point the same way.
    - with ``gradients``: ``gradient_cosine`` between the gradient of a client's own training loss and that of all clients'
      data, at the received weights; ``gradient_norm`` of both.
    - at the trained weights, on the client's training data (full batch, or the mean over fixed minibatches of ``batch``):
      ``proximal_loss`` L_p (``loss``: kl with temperature ``tau``, or l2); ``cos_gu_gp`` for every radius ``rho``, with
      g_u the gradient of the local loss at w + e, e from ``part`` of the weights, ``strength`` and ``per`` as in FedSOL
      (layer part:head: over the head's entries only); ``lambda_mean`` by layer, and in column ``scaled`` times the root
      of the layer's size (1 when all entries moved alike; not with ``per`` = dim0, where a layer's strengths have no norm of 1).
    - The same names with estimator ``steps`` are means over the ``n_steps`` local steps that training recorded with
      ``metrics.steps = true`` (see ``Run.steps``), at the weights and minibatches of those steps and the method's own
      perturbation. Column ``proximal`` names the proximal loss.
    - with ``representation``: ``cka`` between what the heads of the trained and the received model see of the test data.

    A cosine with a vector that is zero (or g_p below its rounding noise) has no value and is ``masked``.
    Of a recorded run without data only the distances and cosines of weights and updates are measured.
    Cost a round: one gradient of all training data, and 1 + len(rho) of every stored client's own.

    Raises FldiagError when no round has client weights, or the model has no such part.
    """
    from fldiag.diagnostics.drift import measure

    if part not in ("full", "body", "head"):
        raise FldiagError(
            f"part = {part!r} is not one of full, body, head", "choose one of them", usage=True
        )
    if part != "full":
        _ = history.layout.head_size
    kind = loss if not history.alone and not history.dataset.regression else "l2"
    settings = measure.DriftSettings(
        gradients,
        representation,
        rho,
        strength,
        per,
        part,
        batch,
        {"kind": kind, "tau": tau},
    )
    rows = history.map_rounds(measure.round_rows, settings=settings)
    if history.alone:
        history.note(
            None,
            "there are no examples: gradients, proximal losses and representations are left out",
        )
    rows = [
        {
            "masked": row["value"] is None or bool(np.isnan(row["value"])),
            "estimator": "exact",
            **row,
        }
        for row in rows
    ]
    rows += [*measure.recorded(history), *history.final_rows()]
    return table([*rows, *history.notes], **history.common)
