"""The spectral density of the Hessian by stochastic Lanczos quadrature.

Ubaru, Chen and Saad (2017); for networks Ghorbani, Krishnan and Xiao (ICML 2019), Yao et al. (2020).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from pydantic import Field

from fldiag.choices import Matrix
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.plotting import style
from fldiag.plotting.tables import floats, names, need, select
from fldiag.registry import diagnostic
from fldiag.results.table import Row, table
from fldiag.seeding import torch_rng

if TYPE_CHECKING:
    from torch import Tensor

    from fldiag.problem.problem import Problem

PICTURE = "spectral density"
#: Decades shown below the highest density: further down lie only the flanks of the smoothing.
DECADES = 7
#: Number of Lanczos steps from each random vector.
STEPS = 30
#: Vectors of so many bytes are computed however little memory is allowed.
SMALL = 16 * 2**20
#: More values of the density than these are a mistake.
MOST_POINTS = 100_000


def quadrature(
    operator: Callable[[Tensor], Tensor], start: Tensor, steps: int, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights (sum 1) of the Gauss rule for the operator's spectral measure at ``start``."""
    import torch

    from fldiag.curvature.iteration import Iteration

    it = Iteration(start.numel(), "largest", noise, 0, start.device)
    it.basis.append(start / torch.linalg.vector_norm(start))
    j: int | None = 0
    for _ in range(steps):
        if j is None:
            break
        j = it.append_product(j, operator(it.basis[j]))
    square = it.rows()[it.processed]
    nodes, vectors = np.linalg.eigh((square + square.T) / 2)
    return nodes, vectors[0] ** 2


def _smooth(grid: np.ndarray, nodes: np.ndarray, weights: np.ndarray, width: float) -> np.ndarray:
    steps = (grid[:, None] - nodes[None, :]) / width
    return np.exp(-0.5 * steps**2) @ weights / (width * np.sqrt(2 * np.pi))


def check_memory(problem: Problem, steps: int) -> None:
    """Raises FldiagError when half of the problem's memory (and ``SMALL``) does not hold the vectors that a density keeps."""
    each, room = 8 * problem.layout.size, problem.memory // 2
    if steps * each > max(room, SMALL):
        fit = room // each
        raise FldiagError(
            f"{steps} steps of the density keep {steps} vectors of {each / 2**20:,.1f} MiB, more than half of the "
            f"{problem.memory / 2**20:,.0f} MiB of memory",
            f"allow {-(-2 * steps * each // 2**20):,} MiB"
            + (f", or take steps = {fit}" if fit > 1 else ""),
            usage=True,
        )


def draw(table: pd.DataFrame, ax: Axes | None = None) -> Any:
    """Density of eigenvalues over their size, one line a run, with a band of ± one standard error and ticks at the
    eigenvalues that are known.

    ``table``: what the diagnostic ``density`` returns (rows ``density`` with ``x``, ``value``, ``stderr``; rows
    ``eigenvalue``); several concatenated. ``ax``: draw into these axes. Returns the figure. Raises FldiagError for an unfit
    table.
    """
    need(table, ("metric", "run", "x", "value"), PICTURE)
    rows = select(table, "density", PICTURE)
    table, rows = table.assign(run=names(table["run"])), rows.assign(run=names(rows["run"]))
    runs = list(dict.fromkeys(rows["run"]))
    looks, values = style.looks(runs), floats(rows["value"])
    high = float(np.nanmax(values)) if np.isfinite(values).any() else 0.0
    if not high > 0:
        raise FldiagError("the spectral density has no positive value", "compute it again")
    width = style.wide(style.ONE_COLUMN)
    texts = list(runs)
    runs_with_eigenvalues = [
        run for run in runs if ((table["metric"] == "eigenvalue") & (table["run"] == run)).any()
    ]
    handles = [Line2D([], [], color=looks[r].color, linestyle=looks[r].dash) for r in runs]
    if runs_with_eigenvalues:
        handles.append(Line2D([], [], color="#555555", marker="|", linestyle="none"))
        texts.append("computed eigenvalues")
    with style.panel(ax, width, 2.2) as (ax, owner, loc):
        for place, run in enumerate(runs):
            part, look = rows[rows["run"] == run].sort_values("x"), looks[run]
            x, middle = floats(part["x"]), floats(part["value"])
            if "stderr" in part.columns:
                error = np.nan_to_num(floats(part["stderr"]))
                ax.fill_between(
                    x,
                    np.maximum(middle - error, 1e-300),
                    middle + error,
                    color=look.color,
                    alpha=0.2,
                    linewidth=0,
                )
            ax.plot(x, middle, color=look.color, linestyle=look.dash)
            if run in runs_with_eigenvalues:
                tops = floats(
                    table.loc[(table["metric"] == "eigenvalue") & (table["run"] == run), "value"]
                )
                # rows of ticks at the foot of the panel, one a run
                ax.plot(
                    tops,
                    np.full(len(tops), 0.03 + 0.04 * place),
                    linestyle="none",
                    marker="|",
                    markersize=5,
                    color=look.color,
                    transform=ax.get_xaxis_transform(),
                    label="eigenvalues",
                )
        ax.set_yscale("log", nonpositive="clip")
        ax.set_ylim(high * 10.0**-DECADES, high * 3)
        ax.set(xlabel="eigenvalue of the Hessian", ylabel="density")
        ax.margins(x=0.02)
        ax.grid(True)
        style.legend(owner, handles, texts, loc=loc)
    return ax.figure


def probe_rule(
    shared: tuple[Problem, Tensor | None], number: int, *, steps: int, matrix: Matrix, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """``quadrature`` of the matrix without some of its eigenvectors [k, P], from a random vector."""
    import torch

    from fldiag.problem.eigenpairs import noise_of

    problem, eigenvectors = shared
    size, device = problem.layout.size, problem.device
    if eigenvectors is None:
        eigenvectors = torch.zeros(0, size, dtype=torch.float64)
    eigenvectors = eigenvectors.to(device)
    operator = problem.hessian(matrix=matrix)

    def project(v: Tensor) -> Tensor:
        for _ in range(2):
            v = v - (eigenvectors @ v) @ eigenvectors
        return v

    start = torch.randn(
        size, dtype=torch.float64, generator=torch_rng(seed, "density probe", number)
    ).to(device)
    return quadrature(lambda v: project(operator(v)), project(start), steps, noise_of(problem))


@diagnostic(
    "density",
    draw=draw,
    summary=lambda table, options: [],
    example="checkpoints/example/fedsol-digits.pt",
)
def density(
    problem: Problem,
    *,
    k: Annotated[
        int,
        Field(
            ge=0,
            description="Number of eigenvalues that are computed one by one and shown separately.",
        ),
    ] = 5,
    steps: Annotated[
        int, Field(ge=2, description="Number of Lanczos steps from each random vector.")
    ] = STEPS,
    probes: Annotated[int, Field(ge=1, description="Number of random vectors.")] = 4,
    points: Annotated[
        int, Field(ge=3, description="Number of points at which the density is evaluated.")
    ] = 501,
    smoothing: Annotated[
        float | None,
        Field(
            gt=0,
            description="Standard deviation of the Gaussian smoothing (default: "
            "a hundredth of the range).",
        ),
    ] = None,
    tol: Annotated[
        float, Field(gt=0, lt=1, description="Allowed relative error of each eigenvalue.")
    ] = 1e-3,
    max_products: Annotated[
        int | None,
        Field(ge=1, description="Maximum number of Hessian-vector products for the eigenvalues."),
    ] = None,
    matrix: Annotated[
        Matrix, Field(description="Matrix: hessian, or ggn (Gauss-Newton).")
    ] = "hessian",
    seed: Annotated[int, Field(description="Random seed.")] = 0,
) -> pd.DataFrame:
    """Estimate the spectral density of the Hessian: how its eigenvalues are distributed.

    The share of eigenvalues per unit, smoothed, over the whole range of the spectrum.

    The ``k`` largest eigenvalues are computed (or taken from a ``strict`` spectrum of the same problem), taken out
    and put back as themselves; ``steps`` Lanczos steps from each of ``probes`` random vectors sample the rest. Rows
    ``density`` (at ``points`` values of column ``x``, or at as many as two to a ``smoothing`` take; smoothed by a Gaussian of
    standard deviation ``smoothing``, default a hundredth of the range; integral 1; ``stderr`` over the probes) and
    ``eigenvalue``. Cost: the eigenpairs and probes * steps Hessian-vector products.

    Raises FldiagError when the loss is not finite or not a function of the weights alone, when half of the memory does not
    hold ``steps`` vectors, or when ``smoothing`` is too narrow for the range of the spectrum.
    """
    from fldiag.curvature.lanczos import EigenPairs
    from fldiag.problem.eigenpairs import default_products, loss_rows, strict_pairs

    check_memory(problem, steps)
    rows, size = loss_rows(problem), problem.layout.size
    pairs: EigenPairs | None = None
    with workspace().part(0, 2, "eigenvalues"):
        if k:
            pairs = strict_pairs(
                problem,
                k,
                tol=tol,
                matrix=matrix,
                max_products=max_products or default_products(k),
                seed=seed,
                progress=workspace().show,
            )
    eigenvalues = np.zeros(0) if pairs is None else pairs.values
    with workspace().part(1, 2, "spectral density"):
        rules = list(
            workspace().map(
                probe_rule,
                (problem, None if pairs is None else pairs.vectors),
                range(probes if size > len(eigenvalues) else 0),
                name=lambda number: f"probe {number + 1}",
                steps=steps,
                matrix=matrix,
                seed=seed,
            )
        )

    all_nodes = np.concatenate([eigenvalues, *(nodes for nodes, _ in rules)])
    low, high = float(all_nodes.min()), float(all_nodes.max())
    # two digits, and edges at multiples: rounding in the last Ritz value shall not move the grid
    smoothing = smoothing or float(f"{max((high - low) / 100, 1e-12 + 1e-6 * abs(high)):.1e}")
    first, last = round(low / smoothing) - 5, round(high / smoothing) + 5
    if last - first > MOST_POINTS / 2:
        raise FldiagError(
            f"smoothing = {smoothing:g} is too narrow for a spectrum from {low:.3g} to {high:.3g}",
            f"use a smoothing of at least {2.1 * (high - low) / MOST_POINTS:.2g}",
            usage=True,
        )
    grid = smoothing * np.linspace(first, last, max(points, 2 * (last - first) + 1))
    peaks = _smooth(grid, eigenvalues, np.full(len(eigenvalues), 1 / size), smoothing)
    rest = (size - len(eigenvalues)) / size
    curves = np.array(
        [peaks + rest * _smooth(grid, nodes, weights, smoothing) for nodes, weights in rules]
        or [peaks]
    )
    error = curves.std(0, ddof=1) / np.sqrt(len(curves)) if len(curves) > 1 else np.zeros(len(grid))
    densities: list[Row] = [
        {
            "metric": "density",
            "x": float(x),
            "value": float(v),
            "estimator": "lanczos quadrature",
            "stderr": float(e) if len(curves) > 1 or not rules else None,
        }
        for x, v, e in zip(grid, curves.mean(0), error, strict=True)
    ]
    if pairs is not None:
        densities += [
            {
                "metric": "eigenvalue",
                "index": i + 1,
                "value": float(v),
                "residual": float(r),
                "converged": bool(c),
                "estimator": "lanczos",
            }
            for i, (v, r, c) in enumerate(
                zip(pairs.values, pairs.residuals, pairs.converged, strict=True)
            )
        ]
    return table([*densities, *rows], **problem.common)
