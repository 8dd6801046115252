# stride.py
from typing import Annotated

from matplotlib.figure import Figure
from pydantic import Field

from fldiag.registry import diagnostic, table


def draw(frame):
    """A dot a client, over the rounds."""
    rows = frame[frame["metric"] == "stride"]
    figure = Figure(figsize=(3.4, 2.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(rows["round"].astype(int), rows["value"].astype(float), "o", alpha=0.6)
    axes.set(xlabel="round", ylabel="stride", yscale="log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def client_rows(history, stored, client, scale):
    """The numbers of one client in one round."""
    name, examples = f"client:{client}/train", history.pool.train_slice(client)
    problem = history.problem(stored.start, examples, name)
    weights, _ = stored.client(stored.ids.index(client))
    distance = float((weights - stored.received).norm())
    slope = float(problem.gradient().norm())
    row = {"metric": "stride", "moment": "trained", "slice": name, "n_examples": problem.n}
    return [{**row, "value": scale * distance / slope if slope else None, "estimator": "exact"}]


@diagnostic("stride", on="run", draw=draw, example="RUN --scale 2")
def stride(
    history, *, scale: Annotated[float, Field(gt=0, description="Factor of all strides.")] = 1.0
):
    """Measure how far each client moves, over the gradient of its own loss where it began.

    Rows ``stride``: s ||w_k - w|| / ||grad L_k(w)||, with w the weights that client k received, w_k those
    that it trained, L_k the loss on its own training data and s the ``scale``.
    """
    rows = history.map_clients(client_rows, every_round=True, scale=scale)
    rows = [{**row, "masked": row["value"] is None} for row in rows]
    return table([*rows, *history.notes], **history.common)
