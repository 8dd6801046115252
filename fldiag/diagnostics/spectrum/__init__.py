"""The leading eigenvalues of the Hessian: how sharp the minimum is, and in how many directions.

lambda_1 and lambda_1 / lambda_5 are the sharpness measures of Jastrzebski et al. (2020), reported for
federated models by Lee et al. (CVPR 2024); the top eigenvalue by Mendieta et al. (CVPR 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from fldiag.choices import Matrix, Which
from fldiag.diagnostics.density import check_memory
from fldiag.diagnostics.diagonal import diagonal_rows
from fldiag.errors import FldiagError
from fldiag.execution import workspace
from fldiag.registry import Flag, diagnostic
from fldiag.results.numbers import Number
from fldiag.results.summary import Item, Note, Small
from fldiag.results.table import Row, table

if TYPE_CHECKING:
    from fldiag.problem.problem import Problem

COLUMNS = {
    "run": "checkpoint",
    "metric": "metric",
    "layer": "layer",
    "index": "index",
    "value": "value",
    "residual": "residual",
    "stderr": "± stderr",
    "converged": "converged",
    "estimator": "estimator",
    "which": "which",
    "matrix": "matrix",
}
#: What goes without saying in the columns.
USUAL = {"which": {"largest"}, "matrix": {"hessian"}}


def check(problem: Problem, options: Mapping[str, Any]) -> None:
    """Refuse more eigenvalues than there are, and flags that do not go together."""
    from fldiag.problem.eigenpairs import check_count

    check_count(options["k"], problem.layout.size)
    beyond = [name for name in ("params", "per_layer", "diagonal", "save_vectors") if options[name]]
    beyond += ["which"] if options["which"] == "smallest" else []
    beyond += ["matrix"] if options["matrix"] != "hessian" else []
    if options["engine"] == "pyhessian" and beyond:
        raise _beyond_pyhessian(f"--{beyond[0].replace('_', '-')}")
    flags = [flag for flag in ("trace", "diagonal") if options[flag]]
    if flags and options["matrix"] != "hessian":
        raise FldiagError(f"--{flags[0]} is that of the Hessian", "leave out --matrix", usage=True)
    if flags and is_block(options):
        raise _beyond_a_block(flags[0])


def check_density(
    problem: Problem, options: Mapping[str, Any], density_options: Mapping[str, Any]
) -> None:
    """Refuse a density beside what has none, and one beyond the memory."""
    if options["engine"] == "pyhessian":
        raise _beyond_pyhessian("--density")
    if is_block(options):
        raise _beyond_a_block("density")
    check_memory(problem, density_options["steps"])


def is_block(options: Mapping[str, Any]) -> bool:
    return options["params"] is not None


def _beyond_pyhessian(flag: str) -> FldiagError:
    return FldiagError(
        f"PyHessian cannot do {flag}: it finds eigenvalues of largest magnitude, and traces",
        f"leave out {flag}, or --engine pyhessian",
        usage=True,
    )


def _beyond_a_block(flag: str) -> FldiagError:
    return FldiagError(
        f"--{flag} is that of the whole model",
        "leave out --params (--trace and --diagonal list all layers)",
        usage=True,
    )


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """All rows, without the columns in which only the usual stands; and which numbers are rough."""
    columns = {
        column: heading
        for column, heading in COLUMNS.items()
        if column in ("run", "metric", "index", "value")
        or (column in frame.columns and set(frame[column].dropna()) - USUAL.get(column, set()))
    }
    values = frame[list(columns)]
    yield Small(values.astype(object).where(values.notna(), None).to_dict("records"), columns)

    def is_rough(metric: str) -> bool:
        converged = frame.loc[frame["metric"] == metric, "converged"]
        return not converged.fillna(True).astype(bool).all()

    if options["engine"] == "pyhessian":
        yield Note(
            "PyHessian's own stopping rules: 'converged' means that two estimates agreed; see the residuals"
        )
    elif is_rough("eigenvalue"):
        yield Note(
            "not all eigenvalues converged: their residuals say how far they can be off; raise --max-products"
        )
    if is_rough("trace") and options["engine"] == "lanczos":
        yield Note(
            "the trace is an estimate that has not reached --rtol: see its stderr; raise --max-products"
        )
    elif is_rough("diagonal_norm"):
        yield Note(
            "entries of the diagonal are rough estimates here (see stderr); the trace is as good as its stderr says"
        )


LAMBDA_1 = Number(
    "lambda_1",
    "largest Hessian eigenvalue of the global model on the training data",
    "lower",
    {"metric": "eigenvalue", "index": 1, "layer": None},
    needs=("model",),
    options={"k": 1},
    over="residuals",
    column="λ₁ ± residual",
    short="λ₁",
    within=("landscape",),
)


@diagnostic(
    "spectrum",
    draw={
        "": "fldiag.diagnostics.spectrum.picture:draw",
        "-layers": "fldiag.plotting.layers:draw",
        "-vectors.safetensors": "fldiag.diagnostics.spectrum.picture:vectors_if_any",
    },
    summary=summary,
    numbers=(LAMBDA_1,),
    flags={
        "density": Flag(
            "density",
            "Also compute and draw the spectral density.",
            sets={"strict": True},
            check=check_density,
        )
    },
    example="checkpoints/example/fedsol-digits.pt --k 5 --trace",
)
def spectrum(
    problem: Problem,
    *,
    k: Annotated[int, Field(ge=1, description="Number of eigenvalues.")] = 5,
    which: Annotated[
        Which,
        Field(
            description="Which eigenvalues: largest, smallest or magnitude (largest absolute "
            "value)."
        ),
    ] = "largest",
    trace: Annotated[
        bool, Field(description="Also compute the trace, whole and by layer.")
    ] = False,
    diagonal: Annotated[
        bool,
        Field(
            description="Also compute the trace and a summary of the diagonal, whole and by layer."
        ),
    ] = False,
    params: Annotated[
        str | None,
        Field(
            description="Restrict the Hessian to the block of these tensors, such as 'features.*'."
        ),
    ] = None,
    per_layer: Annotated[
        bool, Field(description="Also compute the largest eigenvalue of each layer's block.")
    ] = False,
    matrix: Annotated[
        Matrix,
        Field(
            description="Matrix: hessian or ggn (Gauss-Newton; of the cross entropy also the Fisher matrix)."
        ),
    ] = "hessian",
    save_vectors: Annotated[
        bool,
        Field(
            description="Also save the eigenvectors, by parameter, as a safetensors file.",
            json_schema_extra={"vectors": True},
        ),
    ] = False,
    tol: Annotated[
        float,
        Field(
            gt=0,
            lt=1,
            description="Allowed relative error of each eigenvalue.",
            json_schema_extra={"advanced": True},
        ),
    ] = 1e-3,
    rtol: Annotated[
        float,
        Field(
            gt=0,
            lt=1,
            description="Allowed relative standard error of a trace that has no closed form.",
            json_schema_extra={"advanced": True},
        ),
    ] = 0.02,
    max_products: Annotated[
        int | None,
        Field(
            ge=1,
            description="Maximum number of Hessian-vector products (default: "
            "100, or 8 k if that is more; 200 "
            "for a trace).",
            json_schema_extra={"advanced": True},
        ),
    ] = None,
    strict: Annotated[
        bool,
        Field(
            description="Require the residuals to be within tol too, not only the errors.",
            json_schema_extra={"advanced": True},
        ),
    ] = False,
    engine: Annotated[
        Literal["lanczos", "pyhessian"],
        Field(
            description="Engine: lanczos, or pyhessian (that package's power iteration, probes and stopping rules).",
            json_schema_extra={"advanced": True},
        ),
    ] = "lanczos",
    seed: Annotated[int, Field(description="Random seed.")] = 0,
) -> pd.DataFrame:
    """Compute the top-k Hessian eigenvalues with residuals and convergence; optionally trace, diagonal and density.

    Rows ``loss`` and ``accuracy`` (with standard errors over the examples), ``eigenvalue`` (index 1..k, each with the
    residual ||Hv - lambda v||: an eigenvalue lies that close) and ``eigenvalue_ratio`` (not from the smallest ones, nor to a
    zero one); columns ``which`` (largest, smallest, magnitude) and ``matrix``. ``tol`` is the relative error of every
    eigenvalue; ``converged`` is false where ``max_products`` Hessian-vector products (default: 100, or 8 k) did not reach it,
    or did not suffice to look for overlooked eigenvalues. ``matrix``: hessian, or ggn (Gauss-Newton; of a cross entropy of
    class labels it is the Fisher matrix). ``params``: only the diagonal block of the tensors whose names match this pattern
    (``features.*``), named in ``layer``. ``strict``: also the residuals are within ``tol``, not only the errors that follow
    from them (a few products more; ``density`` on the same problem then reuses the pairs). ``per_layer``: also the first
    eigenvalue of every layer's own block (weight and bias). Where the network is piecewise linear in each layer's weights,
    the block of a single layer is the same in both matrices and taken from the Gauss-Newton matrix (estimator
    ``lanczos-ggn``). Cost: about 15 to 20 products at a minimum (30 to 60 near the initialisation), each worth 1.2 to 2
    gradients of the slice; ``per_layer`` about 10 more a layer. ``trace``, ``diagonal``: the rows of those diagnostics too
    (``rtol``). ``save_vectors``: the eigenvectors of unit length, in the order of the eigenvalues, as tensors [k, ...] named
    as the parameters: in a file ``*-vectors.safetensors`` beside the table, and in Python in ``table.attrs["vectors"]``; no
    cache keeps them, so they are computed again at every call. ``engine`` pyhessian: that package's own estimates of
    eigenvalues of largest magnitude and of the trace, to compare with.

    Raises FldiagError when the loss is not finite or not a function of the weights alone, or no tensor matches.
    """
    from fldiag.diagnostics.spectrum.blocks import (
        Block,
        block_rows,
        take_vectors,
    )
    from fldiag.problem.diagonal import diagonal_of, trace_rows
    from fldiag.problem.eigenpairs import default_products, loss_rows

    check(
        problem,
        {
            "k": k,
            "which": which,
            "trace": trace,
            "diagonal": diagonal,
            "params": params,
            "per_layer": per_layer,
            "matrix": matrix,
            "save_vectors": save_vectors,
            "engine": engine,
        },
    )
    main_block = Block(params, k, params)

    def compute_eigenvalues() -> list[Row]:
        if engine == "pyhessian":
            from fldiag.diagnostics.spectrum.pyhessian_engine import pyhessian_rows

            most = max_products or default_products(k)
            return loss_rows(problem) + pyhessian_rows(problem, k, trace, tol, most, seed)
        rows, blocks = loss_rows(problem), [main_block]
        if per_layer:
            layers = problem.layout.layers.items()
            blocks += [
                Block(tuple(names), 1, layer or "(model)", is_single_layer=True)
                for layer, names in layers
            ]
        results = workspace().map(
            block_rows,
            problem,
            blocks,
            which=which,
            tol=tol,
            matrix=matrix,
            max_products=max_products or default_products(k),
            strict=strict,
            save_vectors=save_vectors,
            seed=seed,
        )
        return rows + [row for block in results for row in block]

    def compute_trace() -> list[Row]:
        result = diagonal_of(
            problem,
            entries=diagonal,
            rtol=rtol,
            max_products=max_products or 200,
            seed=seed,
            progress=workspace().show,
        )
        rows = diagonal_rows(problem, result, "layer") if diagonal else []
        return rows + trace_rows(problem, result, "layer")

    has_trace = (trace or diagonal) and engine == "lanczos"
    parts = 1 + has_trace
    with workspace().part(0, parts, "eigenvalues"):
        rows = compute_eigenvalues()
    vectors = take_vectors(problem, main_block, rows) if save_vectors else None
    if has_trace:
        with workspace().part(parts - 1, parts, "trace"):
            rows = rows + compute_trace()
    result = table(rows, **problem.common)
    if vectors is not None:
        result.attrs["vectors"] = vectors
    return result
