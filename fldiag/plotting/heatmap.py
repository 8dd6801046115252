"""Cells in colour: the shape of pictures of clients and classes, or of pairs of clients."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.image import AxesImage

from fldiag.plotting import style
from fldiag.plotting.tables import floats


def draw_cells(
    ax: Axes,
    cells: pd.DataFrame,
    norm: Normalize,
    *,
    colors: str = style.COLORMAP,
    most: int = 12,
    square: bool = True,
) -> AxesImage:
    """The table's cells, with its index and columns at the axes, about ``most`` names at each; what is not there is blank."""
    image = ax.imshow(
        cells.to_numpy(float),
        cmap=colors,
        norm=norm,
        interpolation="nearest",
        aspect="equal" if square else "auto",
    )
    for axis, names in ((ax.xaxis, cells.columns), (ax.yaxis, cells.index)):
        stride = -(-len(names) // most)
        axis.set_ticks(range(0, len(names), stride), [str(name) for name in names[::stride]])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return image


def of_pairs(rows: pd.DataFrame, a: str = "client", b: str = "client_b") -> pd.DataFrame:
    """The value of every pair in both halves of a square table; nan for one with itself."""
    wide = rows.assign(value=floats(rows["value"])).pivot(index=a, columns=b, values="value")
    names = wide.index.union(wide.columns)
    wide = wide.reindex(index=names, columns=names)
    return wide.combine_first(wide.T)
