"""FedSOL Figure 7: what local training forgets, and how the classes fare."""

import numpy as np

from fldiag.diagnostics.forgetting.picture import ceiling
from fldiag.plotting import style
from fldiag.plotting.curves import rounds_axis
from fldiag.results.select import only
from fldiag_papers.study import Study, Trial, diagnostic

PRESET = "fedsol-cifar10-shard2"


def draw(table):
    most = ceiling(table)
    table = only(table, scope="global", slice="test")
    labels, looks = list(dict.fromkeys(table["label"])), style.looks(table["label"])
    with style.paper():
        fig, (left, *heatmaps) = style.panels(1 + len(labels), 2.3, 0.3, across=1 + len(labels))
        for label in labels:
            rows = only(table, label=label, metric="accuracy")
            for moment, look, text in (
                ("received", "-", "before local training"),
                ("trained", ":", "after"),
            ):
                means = 100 * only(rows, moment=moment).groupby("round")["value"].mean()
                left.plot(
                    means.index,
                    means,
                    linestyle=look,
                    color=looks[label].color,
                    marker=looks[label].marker,
                    markersize=3,
                    label=f"{label}, {text}",
                )
            cells = 100 * only(
                table, label=label, metric="class_accuracy", moment="aggregated"
            ).pivot_table(index="index", columns="round", values="value", aggfunc="mean")
            ax = heatmaps[labels.index(label)]
            image = ax.imshow(
                cells, aspect="auto", cmap=style.COLORMAP, vmin=0, vmax=100, interpolation="nearest"
            )
            spacing = max(1, len(cells.columns) // 6)
            ax.set_xticks(
                np.arange(len(cells.columns))[::spacing],
                [f"{r:g}" for r in cells.columns[::spacing]],
            )
            ax.set(title=label, xlabel="round", ylabel="class")
            ax.set_yticks(range(len(cells)), [f"{c:g}" for c in cells.index])
        rounds_axis(left)
        left.set(xlabel="round", ylabel="test accuracy [%]")
        if most is not None:
            style.ceiling(left, 100 * most)
        style.chance(left, 10)
        left.grid(True)
        fig.colorbar(image, ax=heatmaps, label="accuracy on the class [%]")
        style.legend(fig, *left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


STUDY = Study(
    title="Knowledge preservation",
    source="FedSOL Figure 7",
    caption="Left: test accuracy of the model that the clients receive, and mean test accuracy of their trained models. Right: "
    "test accuracy of the averaged model by class, means over the seeds. Two shards per client, rho = 2.",
    trials=(
        Trial(PRESET, "fedavg", label="FedAvg"),
        Trial(PRESET, "fedsol", {"method.rho": 2.0}, label="FedSOL"),
    ),
    ask=(diagnostic("forgetting", own=False),),
    draw=draw,
    seeds=3,
)
