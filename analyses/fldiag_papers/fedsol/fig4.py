"""FedSOL Figure 4: FedAvg and FedSOL over learning factors."""

from typing import Any

from fldiag.plotting import style
from fldiag_papers import pictures
from fldiag_papers.lines import means
from fldiag_papers.study import Study, Trial, final

PRESET, TEXT = (
    "fedsol-cifar10-lda0.1",
    {
        "ratio": "share of clients sampled [%]",
        "epochs": "local epochs",
        "lr": "learning rate",
        "rho": "radius ρ of FedSOL",
    },
)
SWEEPS: tuple[tuple[str, float, dict[str, Any]], ...] = (
    *(("ratio", r, {"clients.per_round": round(100 * r)}) for r in (0.02, 0.05, 0.1, 0.2)),
    *(("epochs", e, {"train.epochs": e}) for e in (1, 5, 10, 20)),
    *(("lr", lr, {"train.lr": lr}) for lr in (0.003, 0.01, 0.03, 0.1)),
)
RHOS = (0.1, 0.5, 1.0, 1.5, 2.0)


def trained(row):
    """The value on the axis, as it was trained: a scale changes shares of clients and epochs."""
    (factor,) = set(pictures.parse(row["setting"])) & set(TEXT)
    values = pictures.parse(row.get("trained_with"))
    if factor == "ratio" and values:
        return 100 * float(values["clients.per_round"]) / float(values["clients.total"])
    key = {"epochs": "train.epochs", "lr": "train.lr"}.get(factor)
    return (100 if factor == "ratio" else 1) * float(
        values.get(key, pictures.parse(row["setting"])[factor])
    )


def draw(table):
    table = table.assign(
        factor=[next(iter(set(pictures.parse(s)) & set(TEXT)), "") for s in table["setting"]],
        at=[trained(row) for _, row in table.iterrows()],
    )
    looks = style.looks(["FedAvg", "FedSOL"])
    with style.paper():
        fig, axes = style.panels(4, 2.2, across=4, least=1.5, sharey=True)
        for ax, (factor, text) in zip(axes, TEXT.items(), strict=True):
            for label, look in looks.items():
                part = table[(table["factor"] == factor) & (table["label"] == label)]
                if part.empty:  # of no finished run
                    continue
                if factor == "rho" and label == "FedAvg":  # without a radius
                    ax.axhline(
                        part["value"].mean(),
                        color=look.color,
                        linestyle=look.dash,
                        linewidth=1,
                        label=label,
                    )
                    continue
                means(ax, part, "at", look, label)
                lost = part[part["value"].isna()]
                ax.plot(
                    lost["at"],
                    [0.04 if label == "FedAvg" else 0.12] * len(lost),
                    "x",
                    color=look.color,
                    markersize=5,
                    markeredgewidth=1.2,
                    transform=ax.get_xaxis_transform(),
                )
            ax.set(xlabel=text, xscale="linear" if factor == "rho" else "log")
            ax.minorticks_off()
            ticks = sorted({at for at in table.loc[table["factor"] == factor, "at"] if at})
            ax.set_xticks(ticks, [f"{t:g}" for t in ticks], fontsize=6)
            ax.grid(True)
        for ax in axes:
            style.chance(ax, 10, name=ax is axes[0])
        axes[0].set_ylabel("test accuracy [%]")
        handles = {
            label: handle
            for ax in reversed(axes)
            for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
        handles = {label: handles[label] for label in looks if label in handles}
        if table["value"].isna().any():
            handles["diverged"] = style.diverged()
        style.legend(
            fig, list(handles.values()), list(handles), loc="outside lower center", ncols=3
        )
    return fig


STUDY = Study(
    title="Learning factors",
    source="FedSOL Figure 4",
    caption="Final test accuracy against the share of sampled clients, the local epochs, the learning rate and rho (1.5 where "
    "it does not vary). The axes show the values that were trained. A cross marks diverged weights.",
    trials=(
        *(
            Trial(PRESET, method, over, label, setting=f"{factor}={value}")
            for factor, value, over in SWEEPS
            for method, label in (("fedavg", "FedAvg"), ("fedsol", "FedSOL"))
        ),
        Trial(PRESET, "fedavg", label="FedAvg", setting="rho=0"),
        *(Trial(PRESET, "fedsol", {"method.rho": rho}, "FedSOL", f"rho={rho}") for rho in RHOS),
    ),
    ask=(final(),),
    draw=draw,
)
