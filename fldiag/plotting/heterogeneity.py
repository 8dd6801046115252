"""Heterogeneity of a partition: distances between the clients' label distributions, and each client's own against its size."""

from __future__ import annotations

import pandas as pd
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fldiag.plotting import style
from fldiag.plotting.heatmap import draw_cells, of_pairs
from fldiag.plotting.tables import floats, need
from fldiag.results.select import number, only

PICTURE = "picture of heterogeneity"


def draw(table: pd.DataFrame, *, title: str = "") -> Figure | None:
    """Jensen-Shannon distances between clients; over the size of a client its distance from all, with that of a random client of
    the size (rings), and its effective classes. None where no two clients can be compared.

    ``table``: what ``fldiag.diagnosis.heterogeneity.measure`` returns. Raises FldiagError for another table.
    """
    need(table, ("metric", "scope", "client", "value"), PICTURE)
    pairs = only(table, metric="pair_jensen_shannon", scope="pair").dropna(subset=["value"])
    if pairs.empty:
        return None
    of_clients = only(table, scope="client")
    clients = of_clients.pivot(index="client", columns="metric", values="value")
    from_all = only(of_clients, metric="jensen_shannon").set_index("client").loc[clients.index]
    size = floats(clients["size"])
    shape, ring = style.look(2).point, {**style.look(1).point, "markerfacecolor": "white"}
    with style.paper():
        fig, (cells, distance, classes) = style.panels(3, 2.1)
        image = draw_cells(cells, of_pairs(pairs), Normalize(0, 1), most=6)
        cells.set_title("Jensen–Shannon distance\nof two clients", fontsize=8)
        fig.colorbar(image, ax=cells, shrink=0.7, ticks=(0, 0.5, 1))
        looks = {"a client": shape, "as many examples drawn at random": ring}
        for (name, look), values in zip(looks.items(), ("value", "floor"), strict=True):
            distance.plot(size, floats(from_all[values]), **look, label=name)
        style.legend(fig, [Line2D([], [], **look) for look in looks.values()], list(looks))
        distance.set_ylim(0, 1)
        distance.set_title("Jensen–Shannon distance\nfrom all", fontsize=8)
        classes.plot(size, floats(clients["effective_classes"]), **shape)
        limit = number(table, "effective_classes_of_all")
        classes.axhline(limit or 1, color="black", linewidth=0.5, linestyle=(0, (2, 2)))
        classes.set_ylim(bottom=0)
        classes.set_title("effective classes\n(dashed: of all)", fontsize=8)
        for ax in (distance, classes):
            ax.set_xlabel("examples of the client")
            ax.set_xlim(left=0)
            ax.grid(True)
        cells.set_xlabel("client")
        cells.set_ylabel("client")
        if title:
            lines = style.wrap(title, fig.get_figwidth() - 0.2, 2, 8)
            fig.set_figheight(fig.get_figheight() + 0.15 * len(lines))
            fig.suptitle("\n".join(lines), x=0.04, ha="left", fontsize=8)
    return fig
