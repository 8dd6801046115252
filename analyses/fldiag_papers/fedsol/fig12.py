"""FedSOL Figure 12: the toy in the plane."""

from fldiag_papers.study import Study, plane
from fldiag_papers.toys import plane_picture


def draw(table):
    start, goal = (
        table.loc[table["metric"] == m, ["x", "y"]].iloc[0].tolist() for m in ("w_g", "w_l")
    )
    return plane_picture.draw(
        table, {"w_g": start, "w_l": goal, "a": sorted(table["a"].dropna().unique())}
    )


STUDY = Study(
    title="FedSOL and FedProx in the plane",
    source="FedSOL Figure 12",
    caption="Paths of clients with the same optimum and different curvatures. FedSOL ends on the line from the global to the "
    "local optimum for every curvature; FedProx ends beside it unless a = 1. The figure is the same at every scale.",
    alone=(plane(rho=1.5, beta=1.0),),
    draw=draw,
)
