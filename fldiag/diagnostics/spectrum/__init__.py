"""The leading eigenvalues of the Hessian: how sharp the minimum is, and in how many directions.

lambda_1 and lambda_1 / lambda_5 are the sharpness measures of Jastrzebski et al. (2020), reported for
federated models by Lee et al. (CVPR 2024); the top eigenvalue by Mendieta et al. (CVPR 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
from pydantic import Field

from fldiag.choices import Matrix, Which
from fldiag.diagnostics.diagonal import diagonal as diagonal_table
from fldiag.diagnostics.spectrum import picture
from fldiag.diagnostics.trace import trace as trace_table
from fldiag.errors import FldiagError
from fldiag.plotting import layers
from fldiag.registry import Also, Progress, diagnostic
from fldiag.results.numbers import Number
from fldiag.results.summary import Item, Note, Small

if TYPE_CHECKING:
    from fldiag.problem.problem import Problem

COLUMNS = {
    "run": "checkpoint",
    "metric": "metric",
    "layer": "layer",
    "index": "index",
    "value": "value",
    "residual": "residual",
    "cross_block": "cross-block",
    "stderr": "± stderr",
    "converged": "converged",
    "estimator": "estimator",
    "products": "products",
    "which": "which",
    "matrix": "matrix",
}
ENGINES = ("lanczos", "pyhessian")
#: What goes without saying in the columns.
USUAL = {"which": {"largest"}, "matrix": {"hessian"}}


def check(problem: Problem, options: Mapping[str, Any]) -> None:
    """Refuse an unknown engine, more eigenvalues than there are, and flags that do not go together."""
    from fldiag.problem.eigenpairs import check_count

    if options["engine"] not in ENGINES:
        raise FldiagError(
            f"engine {options['engine']!r} is not one of {', '.join(ENGINES)}",
            "choose one of them",
            usage=True,
        )
    check_count(options["k"], problem.layout.size)
    if options["engine"] == "pyhessian":
        flags = {
            "--which": options["which"] not in ("largest", "magnitude"),
            "--matrix": options["matrix"] != "hessian",
            "--params": options["params"] is not None,
            "--per-layer": options["per_layer"],
            "--diagonal": options["diagonal"],
            "--density": options.get("density", False),
        }
        odd = [flag for flag, given in flags.items() if given]
        if odd:
            raise FldiagError(
                f"PyHessian cannot do {odd[0]}: it finds eigenvalues of largest magnitude, and traces",
                f"leave out {odd[0]}, or --engine pyhessian",
                usage=True,
            )
        return
    for flag in ("batches", "resample"):
        if options[flag]:
            raise FldiagError(
                f"--{flag} is for --engine pyhessian", "leave it out, or take --samples", usage=True
            )
    whole = [flag for flag in ("trace", "diagonal") if options[flag]]
    if whole and options["matrix"] != "hessian":
        raise FldiagError(f"--{whole[0]} is that of the Hessian", "leave out --matrix", usage=True)
    whole += ["density"] if options.get("density", False) else []
    if whole and options["params"] is not None:
        raise FldiagError(
            f"--{whole[0]} is that of the whole model",
            "leave out --params (--trace and --diagonal list all layers)",
            usage=True,
        )


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    """All rows, without the columns in which only the usual stands; and which numbers are rough."""
    known = ("run", "metric", "index", "value")
    kept = {
        c: h
        for c, h in COLUMNS.items()
        if c in known or (c in frame.columns and set(frame[c].dropna()) - USUAL.get(c, set()))
    }
    yield Small(
        frame[list(kept)].astype(object).where(frame[list(kept)].notna(), None).to_dict("records"),
        kept,
    )

    def open_(*metrics: str) -> bool:
        return bool(
            (~frame.loc[frame["metric"].isin(metrics), "converged"].fillna(True).astype(bool)).any()
        )

    own = options["engine"] == "lanczos"
    if not own:
        yield Note(
            "PyHessian's own stopping rules: 'converged' means that two estimates agreed; see the residuals"
        )
    elif open_("eigenvalue"):
        yield Note(
            "not all eigenvalues converged: their residuals say how far they can be off; raise --max-products"
        )
    if open_("trace") and own:
        yield Note(
            "the trace is an estimate that has not reached --rtol: see its stderr; raise --max-products"
        )
    elif open_("diagonal_norm"):
        yield Note(
            "entries of the diagonal are rough estimates here (see stderr); the trace is as good as its stderr says"
        )


def variant(options: Mapping[str, Any]) -> str | None:
    """A report shows the Hessian's largest; blocks and other matrices have eigenvalues of their own."""
    other = (
        options.get("params")
        or options.get("matrix", "hessian") != "hessian"
        or options.get("which") == "smallest"
    )
    return None if other else ""


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
    draw=picture.draw,
    more={"-layers": layers.draw_if_any},
    summary=summary,
    numbers=(LAMBDA_1,),
    check=check,
    also={
        "density": Also(
            "density", "Also compute and draw the spectral density.", sets={"strict": True}
        )
    },
    variant=variant,
    example="checkpoints/example/fedsol-digits.pt --k 5 --trace",
)
def spectrum(
    problem: Problem,
    progress: Progress | None = None,
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
        Matrix, Field(description="Matrix: hessian, or ggn (Gauss-Newton).")
    ] = "hessian",
    tol: Annotated[
        float, Field(gt=0, lt=1, description="Allowed relative error of each eigenvalue.")
    ] = 1e-3,
    rtol: Annotated[
        float,
        Field(
            gt=0,
            lt=1,
            description="Allowed relative standard error of a trace that has no closed form.",
        ),
    ] = 0.02,
    max_products: Annotated[
        int | None,
        Field(
            ge=1,
            description="Maximum number of Hessian-vector products (default: "
            "100, or 8 k if that is more; 200 "
            "for a trace).",
        ),
    ] = None,
    strict: Annotated[
        bool, Field(description="Require the residuals to be within tol too, not only the errors.")
    ] = False,
    engine: Annotated[
        str,
        Field(
            description="Engine: lanczos, or pyhessian (that package's power iteration, probes and stopping rules, as used "
            "in papers)."
        ),
    ] = "lanczos",
    batches: Annotated[
        int | None,
        Field(
            ge=1,
            description="With pyhessian: use only this many batches of 64 examples "
            "(FedAlign's code uses 10).",
        ),
    ] = None,
    resample: Annotated[
        bool, Field(description="With --batches: draw new batches for every product.")
    ] = False,
    seed: Annotated[int, Field(description="Random seed.")] = 0,
) -> pd.DataFrame:
    """Compute the top-k Hessian eigenvalues with residuals and convergence; optionally trace, diagonal and density.

    Rows ``loss`` and ``accuracy`` (with standard errors over the examples), ``eigenvalue`` (index 1..k, each with the
    residual ||Hv - lambda v||: an eigenvalue lies that close) and ``eigenvalue_ratio`` (not from the smallest ones, nor to
    a zero one); columns ``which`` (largest, smallest, magnitude) and ``matrix``. ``tol`` is the
    relative error of every eigenvalue; ``converged`` is false where ``max_products`` Hessian-vector products
    (default: 100, or 8 k) did not reach it, or did not suffice to look for overlooked eigenvalues. ``matrix``:
    hessian, or ggn (Gauss-Newton). ``params``: only the diagonal block of the tensors whose names match this
    pattern (``features.*``), named in ``layer``. Of a block's eigenvector x, ``cross_block`` is the length of H x outside the
    block: an eigenvalue of the whole matrix lies within sqrt(residual^2 + cross_block^2) of the block's. ``strict``: also the
    residuals are within ``tol``, not only the errors that follow from them (a few products more; ``density`` on the same problem
    then reuses the pairs). ``per_layer``: also the first eigenvalue of every layer's own block (weight and bias). Where
    the network is piecewise linear in each layer's weights, the block of a single layer is the same in both matrices and taken
    from the Gauss-Newton matrix (estimator ``lanczos-ggn``). Cost: about 15 to 20 products at a minimum (30 to 60 near the
    initialisation), each worth 1.2 to 2 gradients of the slice; ``per_layer`` about 10 more a layer, and one more an eigenvalue
    of a block. ``trace``, ``diagonal``: the rows of those diagnostics too
    (``rtol``). ``engine`` pyhessian: that package's own estimates (``pyhessian_engine``), with ``batches`` and ``resample``.

    Raises FldiagError when the loss is not finite or not a function of the weights alone, or no tensor matches.
    """
    from fldiag.diagnostics.spectrum import measure, pyhessian_engine

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
            "engine": engine,
            "batches": batches,
            "resample": resample,
        },
    )
    if engine == "pyhessian":
        sampling = pyhessian_engine.Batching(batches, resample=resample)
        return pyhessian_engine.spectrum(
            problem,
            k,
            trace_too=trace,
            sampling=sampling,
            seed=seed,
            tol=tol,
            most=max_products,
            progress=progress,
        )
    found = [
        measure.eigenvalues(
            problem, progress, k, which, tol, max_products, matrix, params, per_layer, strict, seed
        )
    ]
    if trace or diagonal:
        measured = diagonal_table if diagonal else trace_table
        limit = {} if max_products is None else {"max_products": max_products}
        traces = measured(problem, rtol=rtol, seed=seed, **limit)
        found.append(traces[~traces["metric"].isin(["loss", "accuracy"])])
    return pd.concat(found, ignore_index=True) if len(found) > 1 else found[0]
