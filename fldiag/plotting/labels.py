"""Names beside points, where there is room for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

#: Where a name may stand: (offset in points, horizontal and vertical alignment), the best place first.
_PLACES = (
    ((2.5, 2.5), "left", "bottom"),
    ((-2.5, 2.5), "right", "bottom"),
    ((2.5, -2.5), "left", "top"),
    ((-2.5, -2.5), "right", "top"),
)
#: Half the size of a mark, in points.
_MARK = 2.0


def beside(ax: Axes, texts: Sequence[str], x: np.ndarray, y: np.ndarray, size: float = 6.0) -> None:
    """Names of points; ``settle`` finds a place for each when the figure is laid out."""
    for text, at in zip(texts, zip(x, y, strict=True), strict=True):
        ax.annotate(
            text, at, xytext=(0, 0), textcoords="offset points", fontsize=size, gid="beside"
        )


def settle(fig: Figure) -> None:
    """Put the names of ``beside`` where they lie on no point and no other name; a name without such a place is not drawn. Those
    of the points that are farthest from the others choose first."""
    fig.draw_without_rendering()
    renderer, scale = fig.canvas.get_renderer(), fig.dpi / 72  # type: ignore[attr-defined]
    for ax in fig.axes:
        names = [t for t in ax.texts if t.get_gid() == "beside" and isinstance(t, Annotation)]
        if not names:
            continue
        points = ax.transData.transform([t.xy for t in names])
        apart = np.sort(np.hypot(*(points[:, None] - points[None]).transpose(2, 0, 1)), axis=1)[
            :, min(1, len(points) - 1)
        ]
        boxes = [Bbox.from_extents(*(p - _MARK * scale), *(p + _MARK * scale)) for p in points]
        for i in np.argsort(-apart, kind="stable"):
            for offset, across, up in _PLACES:
                names[i].set(position=offset, ha=across, va=up, visible=True)
                box = names[i].get_window_extent(renderer)
                inside = (
                    fig.bbox.x0 <= box.x0
                    and box.x1 <= fig.bbox.x1
                    and ax.bbox.y0 - 2 <= box.y0
                    and box.y1 <= ax.bbox.y1 + 2
                )
                if inside and not any(box.overlaps(other) for other in boxes):
                    boxes.append(box)
                    break
            else:
                names[i].set_visible(False)
