"""The spectral density of the Hessian: how many eigenvalues lie where, on a logarithmic axis."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fldiag.errors import FldiagError
from fldiag.plotting import style
from fldiag.plotting.tables import floats, names, need, select
from fldiag.results.select import only

PICTURE = "spectral density"
#: Decades shown below the highest density: further down lie only the flanks of the smoothing.
DECADES = 7


def draw(table: pd.DataFrame, *, width: float = style.ONE_COLUMN) -> Figure:
    """Density of eigenvalues over their size, one line a run, with a band of ± one standard error and ticks at the
    eigenvalues that are known.

    ``table``: what the diagnostic ``density`` returns (rows ``density`` with ``x``, ``value``, ``stderr``; rows
    ``eigenvalue``); several concatenated. Raises FldiagError for an unfit table.
    """
    need(table, ("metric", "run", "x", "value"), PICTURE)
    rows = select(table, "density", PICTURE)
    table, rows = table.assign(run=names(table["run"])), rows.assign(run=names(rows["run"]))
    runs = list(dict.fromkeys(rows["run"]))
    looks, values = style.looks(runs), floats(rows["value"])
    high = float(np.nanmax(values)) if np.isfinite(values).any() else 0.0
    if not high > 0:
        raise FldiagError("the spectral density has no positive value", "compute it again")
    texts = [style.wrap(r, width - 0.6)[0] for r in runs]
    known = [run for run in runs if len(only(table, metric="eigenvalue", run=run))]
    handles = [Line2D([], [], color=looks[r].color, linestyle=looks[r].dash) for r in runs]
    if known:
        handles.append(Line2D([], [], color="#555555", marker="|", linestyle="none"))
        texts.append("computed eigenvalues")
    with style.paper():
        fig = style.figure(width, 2.2 + 0.15 * len(texts), layout="constrained")
        ax = fig.subplots()
        for place, run in enumerate(runs):
            part, look = rows[rows["run"] == run].sort_values("x"), looks[run]
            x, middle = floats(part["x"]), floats(part["value"])
            if "stderr" in part.columns:
                error = np.nan_to_num(floats(part["stderr"]))
                ax.fill_between(x, np.maximum(middle - error, 1e-300), middle + error, color=look.color, alpha=0.2, linewidth=0)
            ax.plot(x, middle, color=look.color, linestyle=look.dash)
            if run in known:
                tops = floats(only(table, metric="eigenvalue", run=run)["value"])
                # rows of ticks at the foot of the panel, one a run
                ax.plot(tops, np.full(len(tops), 0.03 + 0.04 * place), linestyle="none", marker="|", markersize=5,
                        color=look.color, transform=ax.get_xaxis_transform(), label="eigenvalues")
        ax.set_yscale("log", nonpositive="clip")
        ax.set_ylim(high * 10.0**-DECADES, high * 3)
        ax.set(xlabel="eigenvalue of the Hessian", ylabel="density")
        ax.margins(x=0.02)
        ax.grid(True)
        style.legend(fig, handles, texts, loc="outside lower center", borderpad=0.2, labelspacing=0.3)
    return fig
