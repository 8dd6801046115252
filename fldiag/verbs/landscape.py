"""``fldiag landscape``: surfaces around checkpoints on one grid and one colour scale, and lines through them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from fldiag import api
from fldiag.checkpoint.run import Run
from fldiag.checkpoint.schema import Checkpoint
from fldiag.console import Console
from fldiag.errors import FldiagError
from fldiag.plotting import interactive, style
from fldiag.plotting import landscape as picture
from fldiag.problem.problem import Problem
from fldiag.results.select import number, only
from fldiag.verbs import output, profile

#: A trajectory shows at most so many checkpoints of a run, evenly chosen.
LONGEST = 50
NAMES = {"eigen": ("eigenvector 1", "eigenvector 2"), "random": ("random direction 1", "random direction 2"),
         "plane": ("towards checkpoint 2", "at right angles, to checkpoint 3"), "pca": ("principal axis 1", "principal axis 2")}


def landscape(console: Console, paths: list[Path], out: Path | None, *, directions: str, points: int | None, span: float | None,
              seed: int, model: str | None, data: str | None, where: dict[str, Any], grid_rtol: float = 0.01, full: bool = False,
              line: bool = False, precision: str = "fp32") -> None:
    bf16 = _precision(console, precision, where)
    if directions == "clients" or line:
        if bf16:
            raise FldiagError("bf16 is for surfaces; a line is a few evaluations", "leave --precision out", usage=True)
        return profile.lines(console, paths, out, directions=directions, points=points, span=span, seed=seed, model=model,
                             data=data, where=where)
    found = trajectory(paths, model, data) if directions == "pca" else output.checkpoints(paths, model, data)
    folder = output.prepare(output.folder(found, out))
    about, through, problems = found, None, []
    if directions == "pca":
        problems, through = output.problems(found[-1:], where), _weights(found[:-1])
        found = found[-1:]
        console.note(f"trajectory of {len(about)} checkpoints, {about[0].label} to {about[-1].label}"
                     + (", all with the buffers of the last" if problems[0].buffers else ""))
    else:
        problems = output.problems(found, where)
    if directions == "plane":
        if len(problems) != 3:
            raise FldiagError(f"a plane goes through three checkpoints, {len(problems)} given", "give three", usage=True)
        through = [{**p.layout.views(p.w), **p.buffers} for p in problems[1:]]
        found, problems = found[:1], problems[:1]
        if problems[0].buffers:
            console.note("the surface has the buffers of the first checkpoint everywhere; the losses of the points are with "
                         "their own")
    output.frozen(console, problems)
    options = {"directions": directions, "points": points or 41, "span": span, "seed": seed, "grid_rtol": grid_rtol,
               "full": full, "bf16": bf16}
    frame = surfaces(console, problems, folder / "cache", through=through, **options)
    path = folder / output.stem("landscape", about, options, where["slice"], where["samples"], where["client"], precision)
    written = output.write_table(frame, path, problems, found, **options)
    written += draw(frame, path, names(frame, directions))
    console.table(summary(frame, problems, found), SUMMARY)
    for problem in problems:
        say(console, frame[frame["run"] == problem.name], problem.name if len(problems) > 1 else "")
    console.done(*written)


SUMMARY = {"run": "checkpoint", "slice": "slice", "n": "n", "loss": "loss", "lambda_1": "λ1", "residual": "± (residual)",
           "ratio": "λ1/λ5", "converged": "converged"}


def _precision(console: Console, precision: str, where: dict[str, Any]) -> bool:
    """Whether the layers compute in bfloat16; fp64 is a property of the problem."""
    if precision == "fp64":
        where["dtype"] = output.dtype(precision)
    elif precision not in ("fp32", "bf16"):
        raise FldiagError(f"precision {precision!r} is not one of fp32, fp64, bf16", "choose one of them", usage=True)
    if precision == "bf16" and where.get("device") == "cpu":
        from fldiag.verbs.train import has_bf16

        if not has_bf16():
            console.note("this processor has no bf16 instructions: bf16 is emulated and much slower than fp32")
    return precision == "bf16"


def trajectory(paths: list[Path], model: str | None, data: str | None) -> list[Checkpoint]:
    """The checkpoints of a run folder (evenly thinned to ``LONGEST``), or the files given, in the order of their rounds.

    Raises FldiagError for fewer than three, which have no plane of their own.
    """
    if len(paths) == 1 and paths[0].is_dir():
        run = Run.open(paths[0])
        rounds, count = run.rounds, min(len(run.rounds), LONGEST)
        chosen = sorted({rounds[round(i * (len(rounds) - 1) / max(count - 1, 1))] for i in range(count)})
        found = [replace(run.checkpoint(r), model=model, data=data) for r in chosen]
    else:
        found = output.checkpoints(paths, model, data)
        if all(c.round is not None for c in found) and len({c.round for c in found}) == len(found):
            found.sort(key=lambda c: c.round or 0)
    if len(found) < 3:
        raise FldiagError(f"a trajectory needs at least three checkpoints, {len(found)} given",
                          "give a run folder with more rounds (checkpoint.every), or more files", usage=True)
    return found


def _weights(found: list[Checkpoint]) -> Any:
    rounds = [c.round for c in found]
    known = all(r is not None for r in rounds) and len(set(rounds)) == len(rounds)
    return {r: c.state for r, c in zip(rounds, found, strict=True)} if known else [c.state for c in found]


def surfaces(console: Console, problems: list[Problem], cache: Path, **options: Any) -> pd.DataFrame:
    """The landscape tables of several problems, one below the other."""
    return tables(console, problems, "landscape", cache, [options] * len(problems))


def tables(console: Console, problems: list[Problem], diagnostic: str, cache: Path,
           options: list[dict[str, Any]]) -> pd.DataFrame:
    """A diagnostic of several problems, each with its options, one below the other."""
    found = []
    for i, (problem, own) in enumerate(zip(problems, options, strict=True), start=1):
        with console.progress(f"{problem.name} ({i}/{len(problems)})") as progress:
            found.append(api.diagnose(problem, diagnostic, cache=cache, progress=progress, **own))
    return pd.concat(found, ignore_index=True)


def names(frame: pd.DataFrame, directions: str) -> tuple[str, str]:
    """What the two axes are; principal axes with the share of the variance they explain."""
    shares = only(frame, metric="explained_variance").set_index("index")["value"]
    first, second = NAMES[directions]
    if directions != "pca":
        return first, second
    return f"{first} ({100 * shares[1]:.0f} % of variance)", f"{second} ({100 * shares[2]:.0f} %)"


def draw(frame: pd.DataFrame, path: Path, axes: tuple[str, str] = ("direction 1", "direction 2")) -> list[Path]:
    """html, pdf and png (the last one is what people look at first)."""
    page = interactive.interactive(frame, output.beside(path, ".html"), names=axes)
    pictures = style.save(picture.draw(frame, names=axes), path, ("pdf", "png"))
    return [Path(page), *pictures]


def say(console: Console, part: pd.DataFrame, who: str) -> None:
    """How the surface was found and how far it can be trusted."""
    lead, total = f"{who}: " if who else "", len(only(part, metric="loss"))
    if (error := number(part, "grid_error")) is not None:
        console.say(f"{lead}{number(part, 'evaluated'):,.0f} of {total:,} points evaluated, a spline between them: error "
                    f"{100 * error:.2g} % of the loss range (from {number(part, 'grid_error', column='index'):.0f} check points)")
    if (error := number(part, "precision_error_share")) is not None:
        console.say(f"{lead}bf16 error {100 * error:.2g} % of the loss range, at most {number(part, 'precision_error'):.2g} "
                    f"(from {number(part, 'precision_error', column='index'):.0f} check points)")
    values = only(part, metric="eigenvalue").sort_values("index")
    flat = values["value"].abs() <= values["residual"].clip(lower=1e-6 * values["value"].abs().max())
    if len(values) and flat.iloc[:2].any():
        console.note(f"{lead}eigenvalue {1 if flat.iloc[0] else 2} is zero within its error: the direction shown for it is "
                     "arbitrary")
    shares = only(part, metric="explained_variance")["value"]
    if len(shares):
        away = only(part, metric="projection_error")["value"]
        console.say(f"{lead}the plane explains {100 * float(shares.sum()):.1f} % of the trajectory's variance; farthest "
                    f"checkpoint from it: {float(away.max()):.3g}")


def summary(frame: pd.DataFrame, problems: list[Problem], found: list[Checkpoint]) -> list[dict[str, Any]]:
    """One row a checkpoint: loss at the centre, λ1 with residual, λ1/λ5."""
    rows = []
    for problem in problems:
        part = frame[frame["run"] == problem.name]
        row: dict[str, Any] = {"run": problem.name, "slice": problem.slice_name, "n": problem.n,
                               "loss": number(part, "loss", x=0, y=0)}
        values = only(part, metric="eigenvalue")
        if len(only(values, index=1)):
            row |= {"lambda_1": number(values, index=1), "residual": number(values, index=1, column="residual"),
                    "converged": bool(values["converged"].all())}
        if (ratio := number(part, "eigenvalue_ratio")) is not None:
            row["ratio"] = ratio
        rows.append(row)
    return rows
