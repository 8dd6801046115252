"""Largest Hessian eigenvalues of several runs side by side, with their residuals; and what single layers add."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.layers import is_main_block
from fldiag.plotting.tables import floats, names, need, select

#: What an axis calls each matrix.
MATRICES = {"hessian": "Hessian", "ggn": "Gauss-Newton"}
PICTURE = "spectrum"


def draw(table: pd.DataFrame, ax: Axes | None = None) -> Any:
    """Eigenvalues over their index, bars of ± residual, hollow markers where the solver has not converged.

    ``table``: rows ``metric="eigenvalue"`` with ``run, index, value`` and optionally ``residual`` and
    ``converged``. The axis is logarithmic where the values span more than a factor of 30, symmetric around 0 if some
    are not positive. ``ax``: draw into these axes. Returns the figure.

    Raises FldiagError for an unfit table.
    """
    need(table, ("metric", "run", "index", "value"), PICTURE)
    rows = select(table, "eigenvalue", PICTURE)
    rows = rows[is_main_block(rows)]
    flat = pd.DataFrame(
        {"run": names(rows["run"]), "index": floats(rows["index"]), "value": floats(rows["value"])}
    )
    flat["residual"] = floats(rows["residual"]) if "residual" in rows.columns else np.nan
    # A solver that does not say whether it converged is not accused of the contrary.
    flat["converged"] = (
        [bool(pd.isna(v) or v) for v in rows["converged"]] if "converged" in rows.columns else True
    )
    if not np.isfinite(flat["index"]).all() or not np.isfinite(flat["value"]).all():
        raise FldiagError(
            "the spectrum has an eigenvalue without index or without a finite value",
            "drop it or compute it again",
        )
    twice = flat[flat.duplicated(["run", "index"])]
    if len(twice):
        run, index = twice.iloc[0][["run", "index"]]
        raise FldiagError(
            f"run {run!r} has two eigenvalues of index {index:g}",
            "give every spectrum (slice, round) its own run label",
            usage=True,
        )
    runs = list(dict.fromkeys(flat["run"]))
    looks = style.looks(runs)
    indices = sorted(flat["index"].unique())
    width = style.wide(style.ONE_COLUMN if len(indices) * len(runs) <= 32 else style.TWO_COLUMNS)
    texts = list(runs)
    handles = [Line2D([], [], **looks[r].point) for r in runs]
    if not flat["converged"].all():
        texts.append("hollow: not converged")
        handles.append(
            Line2D([], [], **style.Look("#555555", "o", "-").point, markerfacecolor="white")
        )
    with style.panel(ax, width, 2.2) as (ax, owner, loc):
        for place, run in enumerate(runs):
            shift = (place - (len(runs) - 1) / 2) * min(0.8 / len(runs), 0.22)
            _points(ax, flat[flat["run"] == run], looks[run], shift)
        _scale(ax, flat["value"].to_numpy())
        of = set(rows["matrix"].dropna()) if "matrix" in rows.columns else set()
        ax.set(
            xlabel="index of the eigenvalue",
            ylabel=f"{MATRICES[of.pop()] if len(of) == 1 else 'Hessian'} eigenvalue",
        )
        stride = -(-len(indices) // 20)
        ax.xaxis.set_major_locator(FixedLocator(indices[::stride]))
        ax.set_xlim(indices[0] - 0.6, indices[-1] + 0.6)
        ax.grid(True, axis="y")
        style.legend(owner, handles, texts, loc=loc, handletextpad=0.3)
    return ax.figure


def _points(ax, part: pd.DataFrame, look: style.Look, shift: float) -> None:
    at, value = part["index"].to_numpy() + shift, part["value"].to_numpy()
    has_residual = np.isfinite(part["residual"])
    ax.errorbar(
        at[has_residual],
        value[has_residual],
        yerr=part["residual"].abs()[has_residual],
        fmt="none",
        ecolor=look.color,
        elinewidth=0.8,
    )
    for done, face in ((True, look.color), (False, "white")):
        kind = (part["converged"] == done).to_numpy()
        if kind.any():
            label = "converged" if done else "not converged"
            ax.plot(at[kind], value[kind], **look.point, markerfacecolor=face, label=label)


def _scale(ax, values: np.ndarray) -> None:
    sizes = np.abs(values[values != 0])
    log = bool(len(sizes) > 1 and sizes.max() > 30 * sizes.min())
    if log and (values > 0).all():
        ax.set_yscale("log", nonpositive="clip")
        # Fewer than two decades would otherwise show a single label.
        if values.max() < 100 * values.min():
            ax.yaxis.set_minor_formatter(
                lambda v, _: style.number(v) if f"{v:.0e}"[0] in "25" else ""
            )
            ax.tick_params(axis="y", which="minor", labelsize=6)
        ax.yaxis.set_major_formatter(lambda v, _: style.number(v))
    elif log and len(sizes):
        ax.set_yscale("symlog", linthresh=max(float(sizes.min()), 1e-4 * float(sizes.max())))
        ax.axhline(0, color="#888888", linewidth=0.6)
    else:
        ax.set_ylim(
            **{"bottom": 0} if (values > 0).all() else {"top": 0} if (values < 0).all() else {}
        )
        if (values < 0).any():
            ax.axhline(0, color="#888888", linewidth=0.6)


def vectors_if_any(table: pd.DataFrame) -> bytes | None:
    """The eigenvectors as the content of a safetensors file."""
    if "vectors" not in table.attrs:
        return None
    from safetensors.torch import save

    content: bytes = save(dict(table.attrs["vectors"]))
    return content
