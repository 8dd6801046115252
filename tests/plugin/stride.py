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


def round_rows(history, stored, scale):
    """The numbers of one round."""
    rows = []
    for j, k in enumerate(stored.ids):
        name, examples = f"client:{k}/train", history.pool.train_slice(k)
        problem = history.problem(stored.start_of(j), examples, name)
        slope = float(problem.gradient().norm())
        value = scale * float(stored.moved[j].norm()) / slope if slope else None
        row = {"metric": "stride", "scope": "client", "client": k, "value": value}
        row |= {"moment": "trained", "slice": name, "n_examples": problem.n, "estimator": "exact"}
        rows.append(row)
    return rows


@diagnostic("stride", on="run", draw=draw, example="RUN --scale 2")
def stride(
    history, *, scale: Annotated[float, Field(gt=0, description="Factor of all strides.")] = 1.0
):
    """Measure how far each client moves, over the gradient of its own loss where it began.

    Rows ``stride``: s ||w_k - w|| / ||grad L_k(w)||, with w the weights that client k received, w_k those
    that it trained, L_k the loss on its own training data and s the ``scale``.
    """
    rows = history.map_rounds(round_rows, scale=scale)
    rows = [{**row, "masked": row["value"] is None} for row in rows]
    return table([*rows, *history.notes], **history.common)
