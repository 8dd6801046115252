"""How far the clients' own optima lie from the final model, and how far the model still swings.

The client floor of arXiv 2511.00469; a definition of ours, the paper's abstract was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from fldiag.checkpoint.run import Run
from fldiag.choices import Data, Device, Download, Executor, Model, Root
from fldiag.plotting.tables import of_clients
from fldiag.registry import Progress, diagnostic
from fldiag.results import missing
from fldiag.results.kept_units import KeptUnits
from fldiag.results.provenance import digest
from fldiag.results.select import number, only
from fldiag.results.summary import Item, Say, Small
from fldiag.results.table import table
from fldiag.training.diagnostics.client_floor import picture

Epochs = Annotated[int, Field(ge=1)]
CLIENTS = {"client": "client", "floor": "distance to its optimum", "epochs": "epochs",
           "fall": "gradient fell to", "reached": "reached"}


def summary(frame: pd.DataFrame, options: Mapping[str, Any]) -> Iterator[Item]:
    for run in frame["run"].unique():
        rows = only(frame, run=run)
        mean, radius = number(rows, "client_floor", scope="global"), number(rows, "oscillation")
        yield Say(f"{run}: mean distance to the clients' optima {'–' if mean is None else f'{mean:.4g}'}, radius of the late "
                  f"oscillation {'–' if radius is None else f'{radius:.4g}'}")
        floors = only(rows, metric="client_floor", scope="client")
        each = [{"client": int(row["client"]), "floor": row["value"], "epochs": int(row["index"]), "fall": row["fall"],
                 "reached": bool(row["converged"])} for _, row in floors.dropna(subset="value").iterrows()]
        yield Small(of_clients(each), CLIENTS)
    yield from missing.notes(frame)


@diagnostic("client-floor", on="runs", draw=picture.draw, summary=summary, order=75,
            example="checkpoints/digits-fedavg-s0-1a2b3c4d --epochs 10 --epochs 50")
def client_floor(runs: Sequence[Run], progress: Progress | None = None, *,
                 epochs: Annotated[tuple[Epochs, ...], Field(description="Epochs after which a client's gradient is measured; "
                                                                         "the largest "
                                                                         "is the budget.")] = (1, 2, 5, 10, 20, 50, 100),
                 fall: Annotated[float, Field(gt=0, lt=1, description="A client is at its optimum when its gradient norm has "
                                                                      "fallen to this fraction of its initial value.")] = 0.01,
                 late: Annotated[int, Field(ge=2, description="Number of last rounds over which the late oscillation is "
                                                              "measured.")] = 10,
                 lr: Annotated[Literal["decayed", "initial"], Field(description="Learning rate: decayed (that after the last "
                                                                                "round) or initial."
                                                                    )] = "decayed",
                 model: Model = None, data: Data = None, root: Root = None, download: Download = False,
                 device: Device = "auto", executor: Executor = "serial",
                 seed: Annotated[int | None, Field(description="Random seed of the minibatches (default: the run's).")] = None,
                 store: Any = None) -> pd.DataFrame:
    """Measure how far each client's own optimum is from the final model, and how much the model oscillates in the last rounds.

    Every client trains on from the final global weights w, by the run's local loop with plain loss and fresh momentum, until the
    norm of its gradient (on all its examples) has fallen to ``fall`` times that at w, or for as many epochs as the last of
    ``epochs``. Rows:

    - ``floor_distance`` ||w_k - w|| and ``floor_gradient``, the gradient's norm over that at w, after every one of ``epochs``
      (``index``), and ``client_floor``: the distance at the first of them (``index``) where the gradient has fallen that far
      (``converged``; column ``fall``: how far), or at the last; and its mean over the clients (``stderr`` over them).
    - ``oscillation``: the mean over the last ``late`` stored rounds of ||w_t - their mean||, by the stored weights (``stderr``
      over the rounds, as if independent).

    A client without examples, or with a gradient of rounding noise at w, is masked. ``store`` as for ``landscape``, of trained
    clients. Cost: training every client for the epochs, and two passes over its data for each entry of ``epochs``.

    Raises FldiagError for a run that is not finished, of another program, or whose data are not there.
    """
    from fldiag.training.diagnostics.client_floor import measure
    from fldiag.training.setup_of_run import setup_of

    kept = KeptUnits(store, lambda: digest("client-floor", [run.index for run in runs], epochs, lr, seed, model, data,
                                           str(device)))
    tables = []
    for run in runs:
        setup = setup_of(run, device=device, root=root, download=download, model=model, data=data)
        rows = measure.of_run(run, setup, sorted(set(epochs)), fall, lr, run.config.seed if seed is None else seed, executor,
                              progress, kept)
        rows += measure.oscillation(run, setup, late)
        tables.append(table(rows, **run.common))
    return pd.concat(tables, ignore_index=True)
