"""How far FedSOL perturbs each layer under the two readings of Lambda: ||e|| / rho over the rounds of a run.

    FLDIAG_DATA=FOLDER python analyses/perturbation_by_layer.py RUN [RUN ...] [--every 20]

RUN: the folder of a run with its clients' weights. At the trained weights of every stored client, g_p is the gradient of the
proximal loss (KL, temperature 3) on the client's training images as they are. FedSOL's e = rho Lambda g_p / ||g_p||, with

    layer   Lambda[i] = |d[i]| / ||d|| over weight and bias of a layer, d = w - w_g     (the paper, Algorithm 1)
    dim0    Lambda[i] = |d[i]| / the norm of its column: the tensor along its first axis (the released code)

In training, e is that of a minibatch of augmented images and changes with every step. by_layer.csv has means over the clients and
their standard deviation: ``part`` alone, where only this layer is perturbed (of the last one, FedSOL's default), and full, where
all are, so that g_p is normed over all of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import vector_to_parameters

import fldiag
from fldiag import losses
from fldiag.params import Layout
from fldiag.plotting import style
from fldiag.training.setup import Setup
from fldiag_papers.study import write

NORMS = {"layer": "Λ by layer (paper's text)", "dim0": "Λ by column (released code)"}
TAU = 3.0
KEYS = ["run", "round", "layer", "norm", "part"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs with client weights")
    parser.add_argument("--every", type=int, default=1, help="only rounds divisible by this")
    parser.add_argument("--out", type=Path, default=Path("figures/perturbation"))
    args = parser.parse_args()
    tables = []
    for path in args.runs:
        run = fldiag.load(path)
        setup = Setup(run.config)
        for r in run.rounds:
            if r % args.every == 0:
                rows = round_rows(setup, run.checkpoint(r))
                tables.append(pd.DataFrame(rows).assign(run=path.name, round=r))
    clients = pd.concat(tables).groupby(KEYS, sort=False)["value"]
    table = clients.agg(value="mean", std="std", n_clients="count").reset_index()
    about = {"what": __doc__.split("\n")[0], "every": args.every}
    print(*write(table, args.out / "by_layer", about, draw(table)), sep="\n")


def round_rows(setup: Setup, checkpoint: fldiag.Checkpoint) -> list[dict[str, Any]]:
    """The numbers of every client of a round."""
    rows, module, dataset = [], setup.module.eval(), setup.dataset
    for client, weights in zip(checkpoint.client_ids, checkpoint.clients, strict=True):
        x = dataset.normalise(dataset.train_x[setup.parts[client]])
        vector_to_parameters(checkpoint.received, module.parameters())
        with torch.no_grad():
            teacher = torch.softmax(module(x) / TAU, -1)
        vector_to_parameters(weights, module.parameters())
        proximal = fldiag.Problem(module, divergence, (x, teacher))
        distance = weights - checkpoint.received
        rows += perturbation_norms(proximal.gradient(), distance, proximal.layout)
    return rows


def divergence(outputs: Tensor, teacher: Tensor) -> Tensor:
    """FedSOL's proximal loss: KL from the received model's probabilities."""
    return F.kl_div(torch.log_softmax(outputs / TAU, -1), teacher, reduction="batchmean")


def perturbation_norms(g_p: Tensor, d: Tensor, layout: Layout) -> list[dict[str, Any]]:
    """||e|| / rho of every layer for both norms, the layer perturbed alone or with all others; g_p and d are [P]."""
    rows, stop = [], 0
    sizes = dict(zip(layout.names, layout.sizes, strict=True))
    for layer, names in layout.layers.items():
        start, stop = stop, stop + sum(sizes[name] for name in names)
        for norm in NORMS:
            full = losses.perturbation(g_p, 1.0, losses.strengths(d, layout, norm))[start:stop]
            strengths = losses.strengths(d[start:stop], layout.part(start, stop), norm)
            alone = losses.perturbation(g_p[start:stop], 1.0, strengths)
            rows += [
                {"layer": layer, "norm": norm, "part": part, "value": float(e.double().norm())}
                for part, e in (("alone", alone), ("full", full))
            ]
    return rows


def draw(table: pd.DataFrame) -> Figure:
    """A panel for each run and norm, a line for each layer perturbed alone, with a band of one deviation over the clients."""
    table = table[table["part"] == "alone"]
    panels = [(run, norm) for run in table["run"].unique() for norm in NORMS]
    lines, looks = table.set_index(["run", "norm", "layer"]), style.looks(table["layer"])
    with style.paper():
        fig, axes = style.panels(len(panels), 2.2, 0.2, across=2, sharey=True, sharex=True)
        for ax, (run, norm) in zip(axes, panels, strict=True):
            for layer, look in looks.items():
                rows = lines.loc[[(run, norm, layer)]]
                ax.plot(rows["round"], rows["value"], label=layer, **look.line)
                low, high = rows["value"] - rows["std"], rows["value"] + rows["std"]
                ax.fill_between(rows["round"], low, high, color=look.color, alpha=0.15, linewidth=0)
            ax.set_title(f"{style.plain(run)}\n{NORMS[norm]}", fontsize=7)
            ax.set(xlabel="round", yscale="log", ylim=(1e-3, 1))
            ax.grid(True)
        for ax in axes[::2]:
            ax.set_ylabel("‖e‖ / ρ, this layer alone")
        style.legend(fig, *axes[0].get_legend_handles_labels(), ncols=len(looks))
    return fig


if __name__ == "__main__":
    main()
