"""Whether models lie in one valley: barriers on paths between them, and the loss inside the simplex that they span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import pandas as pd
from pydantic import Field

from fldiag.diagnostics.connectivity.summary import summary
from fldiag.registry import diagnostic
from fldiag.results.table import table

if TYPE_CHECKING:
    from fldiag.problem.problem import Problem


@diagnostic(
    "connectivity",
    meta={"read": "Adilova et al. (layers): abstract and opening, and their code"},
    on="checkpoints",
    draw={
        "": "fldiag.diagnostics.connectivity.picture:draw",
        "-layers": "fldiag.diagnostics.connectivity.picture:layers_if_any",
    },
    summary=summary,
    example="checkpoints/digits-fedavg-s0-1a2b3c4d checkpoints/digits-fedsol-s0-1a2b3c4d",
)
def connectivity(
    problems: Sequence[Problem],
    *,
    pairs: Annotated[
        Literal["all", "first", "none"],
        Field(
            description="Paths between models: all (every pair), first (from the first model to each "
            "other) or none."
        ),
    ] = "all",
    points: Annotated[
        int,
        Field(
            ge=3, le=9999, description="Number of points along each path before refinement (odd)."
        ),
    ] = 21,
    refine: Annotated[
        int,
        Field(
            ge=0,
            description="Maximum number of additional points around the largest loss of a path.",
        ),
    ] = 12,
    curve: Annotated[
        int | None,
        Field(
            ge=0,
            description="Number of full gradients used to bend each path around "
            "the barrier (default: 100 for up to three models, else "
            "0: straight paths only).",
        ),
    ] = None,
    mixtures: Annotated[
        int,
        Field(
            ge=0,
            le=9999,
            description="Number of random mixtures of all models (for three models or more).",
        ),
    ] = 100,
    align: Annotated[
        bool,
        Field(
            description="First reorder each model's hidden units to match those of the first "
            "model (for independently trained models)."
        ),
    ] = False,
    buffers: Annotated[
        Literal["mixed", "reestimated"] | None,
        Field(
            description="Batch-norm statistics between models: mixed (averaged like the weights) or reestimated on the "
            "slice (default: reestimated on paths, mixed in mixtures)."
        ),
    ] = None,
    seed: Annotated[int, Field(description="Random seed.")] = 0,
    layers: Annotated[
        bool,
        Field(
            description="Also measure barriers of single layers, the other layers being those of either model."
        ),
    ] = False,
) -> pd.DataFrame:
    """Measure loss barriers between models: on straight and curved paths, and in the simplex spanned by the clients of a round.

    Of one run or checkpoint, the models that its clients trained; of several, these. F is the mean loss on the slice. Rows:

    - ``model_loss`` of every model, with its own buffers.
    - along each path (column ``path``, ``index`` its number), at t = ``x``: ``loss`` and ``accuracy``. ``straight``:
      (1 - t) w_1 + t w_2. ``curve``: the quadratic Bezier curve (1 - t)^2 w_1 + 2 t (1 - t) theta + t^2 w_2 (Garipov et al.,
      NeurIPS 2018), theta from the midpoint by ``curve`` gradients of the whole slice (row ``budget``) on E_t F.
    - of each path ``barrier``: the largest F(t) - [(1 - t) F(0) + t F(1)], at t = ``x``; at least 0, as it is 0 at the ends.
      ``stderr`` is over the examples, each with its own difference (of the t found, so that of a small barrier is a little too
      small); ``residual`` is by how much the path may be higher between its points, which are refined where that is likely:
      ``estimator`` ``grid``. ``midpoint``: the same difference at t = 1/2, negative where the mixture is better than the models.
      ``accuracy_barrier``: the largest loss of accuracy, likewise. ``mean_loss``: E_t F (trapezoids). ``distance`` of the ends.
    - with ``layers`` ``layer_barrier`` of every path and ``layer``, and ``layer_midpoint``: as ``barrier`` and ``midpoint``, of
      the path on which this layer (a module's weights and bias) alone goes from w_1 to w_2; column ``rest``: the others are
      those of the first or the second model, so that w(0) and w(1) differ in the layer alone; and ``layer_average``: F with the
      mean of this layer alone, minus (F(w_1) + F(w_2)) / 2 of the models themselves (Adilova et al., "Layer-wise Linear Mode
      Connectivity", ICLR 2024, arXiv 2307.06966: what their code computes; of the text abstract and opening were read).
    - with three models or more ``mixture``: F(sum a_k w_k) - sum a_k F(w_k), shares a in column ``shares``: the corners, the
      centre, of three models points on the edges, and ``mixtures`` draws uniform on the simplex (group connectivity, FedGuCci,
      arXiv 2402.18949: an operational definition in its spirit). ``mixture_mean`` of the draws (``stderr`` over examples,
      ``residual``: the standard error over draws), ``mixture_max`` of all (the simplex may be higher elsewhere),
      ``mixture_centre``.
    - with ``align`` ``moved``: how many hidden units of a layer changed places, by weight matching (Git Re-Basin, Ainsworth et
      al., ICLR 2023); all paths and mixtures are between the models so permuted, whose outputs are unchanged.

    Column ``buffers`` of a model with batch-norm: ``mixed``, or ``reestimated`` at every point, also at the ends, so that the
    losses there may differ from ``model_loss``. A model with weights that are not finite is left out: a ``masked`` row with a
    ``note``. Cost: ``points`` evaluations of the slice a path, and ``curve`` gradients.

    Raises FldiagError for models of different architectures or on different examples, and for fewer than two sound ones.
    """
    from fldiag.diagnostics.connectivity.barriers import (
        Settings,
        check_alike,
        client_problems,
        common_columns,
        connectivity_rows,
    )

    if len(problems) == 1:
        problems = client_problems(problems[0])
    check_alike(problems)
    if curve is None:
        curve = 100 if len(problems) <= 3 else 0
    settings = Settings(pairs, points, refine, curve, mixtures, align, buffers, seed, layers)
    return table(connectivity_rows(problems, settings), **common_columns(problems))
