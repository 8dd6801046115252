"""``fldiag spectrum``: leading eigenvalues with residuals, trace, diagonal and density of the Hessian."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from fldiag import api
from fldiag.console import Console
from fldiag.diagnostics.spectrum import pyhessian_engine as reference
from fldiag.diagnostics.density import affordable
from fldiag.errors import FldiagError
from fldiag.plotting import density as smooth
from fldiag.diagnostics.spectrum import picture
from fldiag.plotting import style
from fldiag.problem.problem import Problem
from fldiag.results.table import table
from fldiag.verbs import output

COLUMNS = {"run": "checkpoint", "metric": "metric", "layer": "layer", "index": "index", "value": "value", "residual": "residual",
           "stderr": "± stderr", "converged": "converged", "estimator": "estimator", "products": "products", "which": "which",
           "matrix": "matrix"}
ENGINES = ("lanczos", "pyhessian")


def spectrum(console: Console, paths: list[Path], out: Path | None, *, model: str | None, data: str | None, precision: str,
             options: dict[str, Any], where: dict[str, Any], trace: bool = False, diagonal: bool = False, density: bool = False,
             rtol: float = 0.02, engine: str = "lanczos", batches: int | None = None,
             resample: bool = False) -> None:
    found = output.checkpoints(paths, model, data)
    asked = {"trace": trace, "diagonal": diagonal, "density": density, "rtol": rtol, "engine": engine, "batches": batches,
             "resample": resample}
    _possible(options, asked)
    folder = output.prepare(output.folder(found, out))
    problems = output.problems(found, {**where, "dtype": output.dtype(precision)})
    output.frozen(console, problems)
    for problem in problems if density else []:
        affordable(problem)
    tables, curves = [], []
    for problem in problems:
        with console.progress(problem.name) as progress:
            if engine == "pyhessian":
                tables.append(_pyhessian(problem, options, asked, progress))
                continue

            def ask(name: str, problem: Problem = problem, progress: Any = progress, **more: Any) -> pd.DataFrame:
                return api.diagnose(problem, name, cache=folder / "cache", progress=progress, **more)

            # the density takes sharp vectors out: found once, for both
            tables.append(ask("spectrum", strict=density, **options))
            if trace or diagonal:
                limit = {} if options["max_products"] is None else {"max_products": options["max_products"]}
                tables.append(ask("diagonal" if diagonal else "trace", rtol=rtol, seed=options["seed"], **limit))
            if density:
                curves.append(ask("density", **{o: options[o] for o in ("k", "tol", "max_products", "matrix", "seed")}))
    frame = pd.concat(tables, ignore_index=True)
    name = options, asked, precision, where["slice"], where["samples"], where["client"]
    path = folder / output.stem("spectrum", found, *name)
    written = []
    if curves:
        beside = folder / output.stem("density", found, *name)
        every = pd.concat(curves, ignore_index=True)
        written += output.write_table(every, beside, problems, found, **options)
        written += style.save(smooth.draw(every), beside, ("pdf", "png"))
    written += output.write_table(frame, path, problems, found, **options, **asked)
    if picture.has_layers(frame):
        written += style.save(picture.layers(frame), output.beside(path, "-layers"), ("pdf", "png"))
    written += style.save(picture.draw(frame), path, ("pdf", "png"))
    known = ("run", "metric", "index", "value")
    usual = {"which": {"largest"}, "matrix": {"hessian"}}  # what goes without saying
    kept = {c: h for c, h in COLUMNS.items()
            if c in known or (c in frame.columns and set(frame[c].dropna()) - usual.get(c, set()))}
    console.table(frame[list(kept)].astype(object).where(frame[list(kept)].notna(), None).to_dict("records"), kept)
    _remark(console, frame, engine)
    console.done(*written)


def _possible(options: dict[str, Any], asked: dict[str, Any]) -> None:
    if asked["engine"] not in ENGINES:
        raise FldiagError(f"engine {asked['engine']!r} is not one of {', '.join(ENGINES)}", "choose one of them", usage=True)
    if asked["engine"] == "pyhessian":
        flags = {"--which": options["which"] not in ("largest", "magnitude"), "--matrix": options["matrix"] != "hessian",
                 "--params": options["params"] is not None, "--per-layer": options["per_layer"],
                 "--diagonal": asked["diagonal"], "--density": asked["density"]}
        odd = [flag for flag, given in flags.items() if given]
        if odd:
            raise FldiagError(f"PyHessian cannot do {odd[0]}: it finds eigenvalues of largest magnitude, and traces",
                              f"leave out {odd[0]}, or --engine pyhessian", usage=True)
        return
    for flag in ("batches", "resample"):
        if asked[flag]:
            raise FldiagError(f"--{flag} is for --engine pyhessian", "leave it out, or take --samples", usage=True)
    whole = [flag for flag in ("trace", "diagonal") if asked[flag]]
    if whole and options["matrix"] != "hessian":
        raise FldiagError(f"--{whole[0]} is that of the Hessian", "leave out --matrix", usage=True)
    whole += ["density"] if asked["density"] else []
    if whole and options["params"] is not None:
        raise FldiagError(f"--{whole[0]} is that of the whole model", "leave out --params (--trace and --diagonal list all "
                          "layers)", usage=True)


def _pyhessian(problem: Problem, options: dict[str, Any], asked: dict[str, Any], progress: Any) -> pd.DataFrame:
    sampling = reference.Sampling(asked["batches"], resample=asked["resample"])
    more = {"sampling": sampling, "seed": options["seed"], "tol": options["tol"], "progress": progress,
            "most": options["max_products"] or reference.MOST}
    rows = reference.eigenvalues(problem, options["k"], **more)
    return table(rows + (reference.trace(problem, **more) if asked["trace"] else []))


def _remark(console: Console, frame: pd.DataFrame, engine: str) -> None:
    def open_(*metrics: str) -> bool:
        return bool((~frame.loc[frame["metric"].isin(metrics), "converged"].fillna(True).astype(bool)).any())

    if engine == "pyhessian":
        console.note("PyHessian's own stopping rules: 'converged' means that two estimates agreed; see the residuals")
    elif open_("eigenvalue"):
        console.note("not all eigenvalues converged: their residuals say how far they can be off; raise --max-products")
    if open_("trace") and engine != "pyhessian":
        console.note("the trace is an estimate that has not reached --rtol: see its stderr; raise --max-products")
    elif open_("diagonal_norm"):
        console.note("entries of the diagonal are rough estimates here (see stderr); the trace is as good as its stderr says")
