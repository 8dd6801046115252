"""FedProj Figure 1: what clients forget on Iris in the plane."""

import numpy as np

from fldiag_papers.study import Study, iris
from fldiag_papers.toys import iris_picture


def draw(table):
    return iris_picture.regions(table[table["run"] == table["run"].iloc[0]])


def derive(table):
    """Accuracy of the global models after the last round, under the paper's learning rate and under the one chosen here."""
    rows = table[(table["metric"] == "accuracy") & (table["moment"] == "aggregated")]
    rows = rows[rows["round"] == rows["round"].max()]
    rate = np.where(rows["run"].str.contains("lr0.001", regex=False), "0.001", "0.01")
    federation = f"clients=3;rounds={int(rows['round'].iloc[0])};epochs=5;lr="
    return rows.assign(
        value=100 * rows["value"],
        unit="%",
        setting=[federation + r for r in rate],
        model="mlp_iris",
        data="iris",
        trained_on="iris",
        trained_model="mlp_iris",
    )


STUDY = Study(
    title="Forgetting on Iris in the plane",
    source="FedProj Figure 1",
    caption="Decision regions of the clients after local training and of the global model in the last round, on Iris in the "
    "plane of its first two principal components, one class per client. Percentages: correctly classified test "
    "examples, and the area in which a client's regions differ from the global ones. The paper does not give split, "
    "minibatch, public data and scaling; they are chosen here. The picture shows seed 0 at lr = 0.01; the ledger has "
    "the means over the seeds, also for the paper's lr = 0.001.",
    alone=(iris(), iris(lr=1e-3)),
    derive=derive,
    draw=draw,
    seeds=5,
)
