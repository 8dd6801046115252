"""FedSOL Figure 5: adaptive beside fixed strength, and the strength of every layer."""

from matplotlib.ticker import LogLocator

from fldiag.plotting import style
from fldiag_papers import pictures
from fldiag_papers.lines import means
from fldiag_papers.study import Study, Trial, diagnostic, final

PRESET, ROUND = "fedsol-cifar10-lda0.1", 200
RHOS, AT = (0.5, 1.0, 1.5, 2.0), 1.0


def draw(final, drift):
    with style.paper():
        fig, (left, right) = style.panels(2, 2.4, least=2.5)
        accuracy = final.assign(rho=[float(pictures.parse(s)["rho"]) for s in final["setting"]])
        for label, look in style.looks(accuracy["label"]).items():
            means(left, accuracy[accuracy["label"] == label], "rho", look, label)
        left.set(xlabel="radius ρ", ylabel="test accuracy [%]", xticks=RHOS)
        style.legend(left, *left.get_legend_handles_labels())
        left.grid(True)
        _strength(right, drift[drift["metric"] == "lambda_mean"])
    return fig


def _strength(ax, rows):
    if rows.empty:  # that run is not there
        return ax.remove()
    strong = rows[(rows["scope"] == "global") & (rows["estimator"] == "exact")]
    round_ = min(strong["round"].unique(), key=lambda r: abs(r - ROUND))
    layers = (
        strong[strong["round"] == round_].groupby("layer", sort=False)[["value", "scaled"]].mean()
    )
    ax.bar(range(len(layers)), layers["value"], color=style.look(2).color)
    for at, (value, scaled) in enumerate(layers.to_numpy()):
        ax.text(at, value, f"{scaled:.2f}", ha="center", va="bottom", fontsize=6)
    ax.set_xticks(
        range(len(layers)),
        [style.plain(style.shorten(n, 14)) for n in layers.index],
        rotation=30,
        ha="right",
    )
    ax.set(
        ylabel="mean Λ",
        title=f"round {int(round_)}, ρ = {AT:g}; numbers: mean Λ × √size",
        yscale="log",
        ylim=(layers["value"].min() / 2, layers["value"].max() * 2),
    )
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()


STUDY = Study(
    title="Adaptive strength",
    source="FedSOL Figure 5",
    caption="Left: final test accuracy against rho with adaptive and with fixed strength, with the head perturbed. Right: mean "
    "strength of each layer, normalised by layer as the paper defines it, at the clients' trained weights in round 200, or in "
    "the last round if that is earlier, rho = 1; multiplied by the square root of the layer's size, it is 1 if all entries "
    "move equally.",
    trials=tuple(
        Trial(PRESET, "fedsol", {"method.rho": rho, **more}, label, setting=f"rho={rho}", ask=ask)
        for label, more in (("adaptive", {}), ("fixed", {"method.strength": "fixed"}))
        for rho in RHOS
        for ask in [
            (diagnostic("drift", rho=(), gradients=False, representation=False),)
            if (rho, label) == (AT, "adaptive")
            else ()
        ]
    ),
    ask=(final(),),
    draw=draw,
)
