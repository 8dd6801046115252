"""The spectrum of the Hessian: leading eigenvalues, trace and diagonal, density. How sharp is a minimum, in how many directions?

lambda_1 and lambda_1 / lambda_5 are the sharpness measures of Jastrzebski et al. (ICLR 2020), reported for federated models by
Lee et al. (CVPR 2024); top eigenvalue and trace by Mendieta et al. (CVPR 2022); density: Ghorbani, Krishnan and Xiao (ICML 2019).
"""

from __future__ import annotations

import warnings
from operator import truediv
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from safetensors.torch import save
from torch import Tensor

from fldiag.curvature.lanczos import EigenPairs, quadrature
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.plotting import style
from fldiag.plotting.style import floats, wide_range
from fldiag.problem.hessian import Diagonal, diagonal, eigenpairs
from fldiag.problem.module import copy_module
from fldiag.problem.problem import Problem
from fldiag.registry import diagnostic
from fldiag.results.numbers import Number
from fldiag.results.table import Note, Options, Row, SmallTable, Summary, only, table
from fldiag.sections import Matrix, Seed, Tol, Which
from fldiag.seeding import seed_for, torch_rng

#: The ratio reported is lambda_1 over this eigenvalue (or over the last one, when fewer are asked for).
RATIO_INDEX = 5
#: Lanczos steps from each of so many random vectors, and values at which the density is given.
STEPS, PROBES, POINTS = 30, 4, 501
#: Decades of the density that are drawn.
DECADES = 7
#: Columns of the summary, and headings that are not their names.
COLUMNS = ["run", "metric", "layer", "index", "value", "residual", "stderr", "converged"]
COLUMNS += ["estimator", "which", "matrix"]
HEADINGS = {"run": "checkpoint", "stderr": "± stderr"}

LAMBDA_1 = Number(
    "lambda_1",
    "largest Hessian eigenvalue of the global model on the training data",
    "lower",
    {"metric": "eigenvalue", "index": 1, "layer": None},
    needs=("model",),
    options={"k": 1},
    column="λ₁ ± residual",
    within=("landscape",),
)


class Vectors(dict[str, Any]):
    """Tensors [k, ...] by parameter's name, in a table's ``attrs["vectors"]``: pandas copies ``attrs`` at every step, and
    need not copy these."""

    def __deepcopy__(self, memo: Any) -> Vectors:
        return self


def eigenvalue_rows(
    problem: Problem, pairs: EigenPairs, *, which: Which = "largest", **about: Any
) -> list[Row]:
    """A row an eigenvalue (index from 1), and the ratio lambda_1 / lambda_k (index k: 5, or the last) with its first-order error.

    No ratio from the lower end of the spectrum, nor to an eigenvalue that is zero within its residual or within rounding.
    """
    method = "lanczos, differences" if problem.by_differences else "lanczos"
    common: Row = {"estimator": method, "which": which, **about}
    columns = (of.tolist() for of in (pairs.values, pairs.residuals, pairs.converged))
    rows: list[Row] = [
        {**common, "metric": "eigenvalue", "index": i, "value": v, "residual": r, "converged": c}
        for i, (v, r, c) in enumerate(zip(*columns, strict=True), start=1)
    ]
    if which == "smallest" or len(rows) < 2:
        return rows
    top, low = rows[0], rows[:RATIO_INDEX][-1]
    row: Row = {**low, "metric": "eigenvalue_ratio", "value": None, "residual": None}
    row["converged"] = top["converged"] and low["converged"]
    size = abs(low["value"])
    if size > max(low["residual"], problem.noise * float(np.abs(pairs.values).max())):
        row["value"] = top["value"] / low["value"]
        row["residual"] = (top["residual"] + abs(row["value"]) * low["residual"]) / size
    return [*rows, row]


def diagonal_rows(problem: Problem, result: Diagonal) -> list[Row]:
    """Trace, norm and extremes of the diagonal, of the whole and by layer."""
    rows: list[Row] = []
    layers = {layer or "(model)": names for layer, names in problem.layout.layers.items()}
    for layer, names in [(None, problem.layout.names), *layers.items()]:
        part = result.part(names)
        values, errors = part.vectors()
        numbers = {"trace": part.trace(), "diagonal_norm": part.norm()}
        for metric, i in (("diagonal_max", values.argmax()), ("diagonal_min", values.argmin())):
            numbers[metric] = float(values[i]), float(errors[i])
        is_exact = part.is_exact()
        common: Row = {"layer": layer, "estimator": part.estimator()}
        common["converged"] = is_exact or result.converged
        for metric, (value, stderr) in numbers.items():
            error = None if is_exact else stderr
            rows.append({**common, "metric": metric, "value": value, "stderr": error})
    return rows


def density_rows(problem: Problem, pairs: EigenPairs, matrix: Matrix, seed: int) -> list[Row]:
    """The share of eigenvalues per unit, smoothed: ``pairs`` as themselves, the rest by Lanczos quadrature."""
    size, k, q = problem.layout.size, len(pairs.values), pairs.vectors
    operator, rules = problem.hessian(matrix=matrix), []

    def outside(v: Tensor) -> Tensor:
        return v - (q @ v) @ q

    for i in range(PROBES if size > k else 0):
        workspace().show(i, PROBES, "density")
        rng = torch_rng(seed, "density probe", i)
        v = torch.randn(size, dtype=torch.float64, generator=rng).to(problem.device)
        rules.append(quadrature(lambda v: outside(operator(v)), outside(v), STEPS, problem.noise))
    nodes = np.concatenate([pairs.values, *(nodes for nodes, _ in rules)])
    low, high = nodes.min(), nodes.max()
    # two digits, and edges at multiples: rounding in the last Ritz value shall not move the grid
    width = float(f"{max((high - low) / 100, 1e-12 + 1e-6 * abs(high)):.1e}")
    grid = width * np.linspace(round(low / width) - 5, round(high / width) + 5, POINTS)

    def smooth(nodes: np.ndarray, weights: np.ndarray) -> np.ndarray:
        heights = np.exp(-0.5 * ((grid[:, None] - nodes) / width) ** 2) / np.sqrt(2 * np.pi)
        return heights @ weights / width

    peaks = smooth(pairs.values, np.full(k, 1 / size))
    curves = np.array([peaks + (1 - k / size) * smooth(*rule) for rule in rules] or [peaks] * 2)
    errors = curves.std(0, ddof=1) / np.sqrt(len(curves))
    common: Row = {"metric": "density", "estimator": "lanczos quadrature"}
    triples = np.stack([grid, curves.mean(0), errors], 1).tolist()
    return [{**common, "x": x, "value": value, "stderr": e} for x, value, e in triples]


def pyhessian_rows(
    problem: Problem, k: int, trace: bool, tol: float, most: int, seed: int
) -> list[Row]:
    """Eigenvalues of largest magnitude, and the trace, by PyHessian's own estimators and stopping rules."""
    import pyhessian

    loss, module = problem.criterion, copy_module(problem.module)
    for name, p in module.named_parameters():
        p.data = problem.state[name]
        p.requires_grad_(name in problem.layout.names)
    with problem.guarded(), torch.enable_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph=True")
        engine = pyhessian.hessian(
            module,
            lambda z, y: truediv(*loss.sums(z, y)),
            dataloader=list(problem.batches()),
            cuda=problem.device.type == "cuda",
        )
        torch.manual_seed(seed_for(seed, "pyhessian"))
        values, _ = engine.eigenvalues(maxIter=most, tol=tol, top_n=min(k, problem.layout.size))
        samples = engine.trace(maxIter=most, tol=tol) if trace else []
    common: Row = {"estimator": "pyhessian", "which": "magnitude", "matrix": "hessian"}
    rows: list[Row] = [
        {"metric": "eigenvalue", "index": i, "value": value} for i, value in enumerate(values, 1)
    ]
    if trace:
        rows.append({"metric": "trace", "value": float(np.mean(samples))})
    return [{**common, **row} for row in rows]


def summary(frame: pd.DataFrame, options: Options) -> Summary:
    """All rows but the density's, without the columns in which nothing or only the usual stands; and which numbers are rough."""
    rows = frame.loc[frame["metric"] != "density", frame.columns.intersection(COLUMNS)]
    rows = rows.astype(object).where(rows.notna(), None)
    columns = [c for c in COLUMNS if c in rows and set(rows[c]) - {None, "largest", "hessian"}]
    yield SmallTable(rows[columns].to_dict("records"), {c: HEADINGS.get(c, c) for c in columns})
    if options["engine"] == "pyhessian":
        yield Note("PyHessian's own estimates and stopping rules; they come without errors")
    rough = set(rows.loc[rows["converged"].eq(False), "metric"]) if "converged" in rows else set()
    for metric, target in (("eigenvalue", "its tolerance"), ("trace", "an error of 2 %")):
        if metric in rough:
            yield Note(f"not every {metric} reached {target}: raise --max-products")


def draw(frame: pd.DataFrame) -> style.Figure:
    """Eigenvalues over their index, with bars of ± residual, hollow where they did not converge; the density beside them."""
    eigenvalues, density = (only(frame, metric=m) for m in ("eigenvalue", "density"))
    looks, count = style.looks(frame["run"]), 1 + (len(density) > 0)
    with style.paper():
        fig = style.figure(style.wide(style.ONE_COLUMN * count), 2.3, layout="constrained")
        axes = fig.subplots(1, count, squeeze=False)[0]
        # those of single layers come last
        first = only(eigenvalues, layer=eigenvalues["layer"].iloc[0])
        _draw_eigenvalues(axes[0], first, looks)
        if len(density):
            _draw_density(axes[1], density, looks)
        for ax in axes:
            ax.grid(True, axis="y")
        style.legend_of_runs(fig, looks)
    return fig


def _draw_eigenvalues(ax: style.Axes, rows: pd.DataFrame, looks: dict[str, style.Look]) -> None:
    from matplotlib.ticker import MaxNLocator

    for place, (run, look) in enumerate(looks.items()):
        part = only(rows, run=run)
        x, y, bars = (floats(part[c]) for c in ("index", "value", "residual"))
        x = x + min(0.8 / len(looks), 0.22) * (place - (len(looks) - 1) / 2)
        ax.errorbar(x, y, yerr=np.nan_to_num(bars), fmt="none", ecolor=look.color, elinewidth=0.8)
        done = part["converged"].fillna(True).to_numpy(bool)
        ax.plot(x[done], y[done], **look.point)
        ax.plot(x[~done], y[~done], **{**look.point, "markerfacecolor": "white"})
    values = floats(rows["value"])
    wide_range(ax, values)
    if ax.get_yscale() == "linear":
        ax.set_ylim(bottom=min(0, ax.get_ylim()[0]))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    matrix = "Gauss-Newton" if set(rows.get("matrix", [])) == {"ggn"} else "Hessian"
    rough = " (hollow: not converged)" if rows["converged"].eq(False).any() else ""
    ax.set(xlabel=f"index of the eigenvalue{rough}", ylabel=f"{matrix} eigenvalue")


def _draw_density(ax: style.Axes, rows: pd.DataFrame, looks: dict[str, style.Look]) -> None:
    for run, look in looks.items():
        x, y, error = (floats(only(rows, run=run)[c]) for c in ("x", "value", "stderr"))
        band = np.maximum(y - error, 1e-300), y + error
        ax.fill_between(x, *band, color=look.color, alpha=0.2, linewidth=0)
        ax.plot(x, y, color=look.color, linestyle=look.dash)
    high = float(rows["value"].max())
    ax.set_yscale("log", nonpositive="clip")
    ax.set_ylim(high * 10.0**-DECADES, high * 3)
    ax.set(xlabel="eigenvalue", ylabel="density (band: ± standard error)")


def vectors_if_any(frame: pd.DataFrame) -> bytes | None:
    """The eigenvectors as the content of a safetensors file."""
    vectors = frame.attrs.get("vectors")
    return None if vectors is None else bytes(save(dict(vectors)))


@diagnostic(
    "spectrum",
    draw={"": draw, "-vectors.safetensors": vectors_if_any},
    summary=summary,
    numbers=(LAMBDA_1,),
    example="checkpoints/example/fedsol-digits.pt --k 5 --trace",
)
def spectrum(
    problem: Problem,
    *,
    k: Annotated[int, Field(ge=1, description="Number of eigenvalues.")] = 5,
    which: Annotated[
        Which,
        Field(
            description="Which eigenvalues: largest, smallest or magnitude (largest absolute value)."
        ),
    ] = "largest",
    matrix: Annotated[
        Matrix,
        Field(
            description="Matrix: hessian or ggn (Gauss-Newton; of the cross entropy also the Fisher matrix)."
        ),
    ] = "hessian",
    params: Annotated[
        str | None,
        Field(
            description="Restrict the matrix to the block of these tensors, such as 'features.*'."
        ),
    ] = None,
    per_layer: Annotated[
        bool, Field(description="Also compute the largest eigenvalue of each layer's block.")
    ] = False,
    trace: Annotated[
        bool, Field(description="Also compute trace and diagonal, whole and by layer.")
    ] = False,
    density: Annotated[
        bool, Field(description="Also compute and draw the spectral density.")
    ] = False,
    save_vectors: Annotated[
        bool,
        Field(description="Also save the eigenvectors, by parameter, as a safetensors file."),
    ] = False,
    tol: Tol = 1e-3,
    max_products: Annotated[
        int | None,
        Field(
            ge=1,
            description="Maximum number of Hessian-vector products (default: 100, or 8 k if that is more; 200 for the trace).",
        ),
    ] = None,
    engine: Annotated[
        Literal["lanczos", "pyhessian"],
        Field(description="Engine: lanczos, or pyhessian (that package's own estimates)."),
    ] = "lanczos",
    seed: Seed = 0,
) -> pd.DataFrame:
    """Compute the top-k Hessian eigenvalues with residuals and convergence; optionally trace, diagonal and density.

    Rows ``loss`` and ``accuracy`` with standard errors over the examples. ``eigenvalue`` (index 1..k), each with the residual
    ||Hv - lambda v||: an eigenvalue lies that close. ``eigenvalue_ratio``: lambda_1 / lambda_index, not from the smallest ones,
    nor to a zero one. ``converged`` is false where ``max_products`` Hessian-vector products did not reach the relative error
    ``tol``, or did not suffice to look for overlooked eigenvalues. ``params`` restricts all this to the block of some tensors,
    ``per_layer`` adds the first eigenvalue of every layer's own block. ``trace``: rows ``trace``, ``diagonal_norm``,
    ``diagonal_max`` and ``diagonal_min``, exact for the layers in whose weights the outputs are piecewise linear (which is shown
    numerically), else by random signs, with standard errors. ``density``: the share of eigenvalues per unit, with the residuals
    of the eigenvalues within ``tol``, too. ``save_vectors``: the eigenvectors of unit length, the largest entry of each
    positive, as tensors [k, ...] named as the parameters, in a file beside the table, in Python in ``table.attrs["vectors"]``.
    ``engine`` pyhessian: that package's own estimates, to compare with.

    Cost: about 15 to 20 products at a minimum (30 to 60 near the initialisation), each worth 1.6 to 3 gradients of the slice;
    about 4 more for an exact diagonal with 10 classes, 120 for a density.

    Raises FldiagError when the loss is not a finite function of the weights alone, or no tensor matches.
    """
    is_usual = params is None and matrix == "hessian"
    if (trace and not is_usual) or (density and params is not None):
        text = "trace and density are of the whole model, and the trace is that of the Hessian"
        raise FldiagError(text, "leave out --params and --matrix", usage=True)
    most = max_products or max(100, 8 * k)
    rows = problem.centre.rows(problem)
    if engine == "pyhessian":
        is_more = density or save_vectors or per_layer or problem.weight_decay
        if is_more or not is_usual or problem.dtype != torch.float32:
            text = "PyHessian knows eigenvalues of largest magnitude and the trace, in float32, without weight decay"
            raise FldiagError(
                text, "leave out --engine pyhessian, or the other options", usage=True
            )
        return table(rows + pyhessian_rows(problem, k, trace, tol, most, seed), **problem.common)
    show, names = workspace().show, problem.layout.matching(params or "*")
    options: dict[str, Any] = {"matrix": matrix, "which": which, "tol": tol, "seed": seed}
    options |= {"max_products": most, "progress": show}
    pairs = eigenpairs(problem, k, names=names, strict=density, **options)
    about: dict[str, Any] = {"which": which, "matrix": matrix}
    rows += eigenvalue_rows(problem, pairs, layer=params, **about)
    for layer, tensors in problem.layout.layers.items() if per_layer else ():
        first = eigenpairs(problem, 1, names=tensors, **options)
        rows += eigenvalue_rows(problem, first, layer=layer or "(model)", **about)
    if trace:
        most = max_products or 200
        result = diagonal(problem, max_products=most, seed=seed, progress=show)
        rows += diagonal_rows(problem, result)
    if density:
        rows += density_rows(problem, pairs, matrix, seed)
    frame = table(rows, **problem.common)
    if save_vectors:
        shapes = [problem.state[n].shape for n in names]
        pieces = pairs.vectors.to("cpu", problem.dtype).split([s.numel() for s in shapes], 1)
        named = zip(names, pieces, shapes, strict=True)
        frame.attrs["vectors"] = Vectors(
            {n: piece.reshape(-1, *shape).contiguous() for n, piece, shape in named}
        )
    return frame
