"""FedSOL (Lee et al., CVPR 2024; FedSoL is its earlier version): studies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

import fldiag
from fldiag.plotting import style

from . import shapes
from .reported import Cell, cell, cells, parse, printed
from .study import (
    Scale,
    Study,
    asked,
    counted,
    curve,
    final,
    protocol,
    stand_in,
    trained,
)
from .tables import counts, sizes, table

LDA, SHARDS = "fedsol-cifar10-lda0.1", "fedsol-cifar10-shard2"
LDA_01 = "partition=lda;alpha=0.1"
Rows = Iterator[pd.DataFrame]
Over = dict[str, Any]
#: What runs keep that several figures ask: the clients, and the cosines and losses of every local step.
KEPT: Over = {
    "checkpoint.clients": "sampled",
    "metrics.steps": True,
    "metrics.proximal": "kl",
}
DRIFT = {"rho": (), "gradients": False, "representation": False}
FEDAVG: Over = {"method.name": "fedavg"}
FEDSOL2: Over = {"method.rho": 2.0}


def run(scale: Scale, seed: int, over: Over, preset: str = LDA) -> fldiag.Run:
    return trained(scale, protocol(scale, preset, over, seed=seed))


# ---- partitions


def fig2(scale: Scale, seed: int) -> Rows:
    for preset, label in ((SHARDS, "sharding, 2 shards"), (LDA, "LDA 0.1")):
        config = stand_in(scale, preset, {"clients.total": 10})
        yield counted("partition", config, label=label)


def bubbles(table: pd.DataFrame) -> Figure:
    data = style.display_name(table["trained_on"].iloc[0])
    return fldiag.draw(table.assign(run=data + ", " + table["label"]), name="partition")


# ---- what local training does


def fig3(scale: Scale, seed: int) -> Rows:
    lines = {f"FedSOL, rho {rho}": {"method.rho": rho} for rho in (0.5, 1.0, 2.0)}
    for label, over in {"FedAvg": FEDAVG, **lines}.items():
        rows = asked(scale, run(scale, seed, {**KEPT, **over}), "drift", DRIFT, label=label)
        rows = rows[(rows["scope"] == "global") & rows["layer"].isna()]
        cosine = rows[(rows["metric"] == "cos_gu_gp") & (rows["estimator"] == "steps")]
        yield cosine
        yield cosine.assign(metric="abs_cos_gu_gp", value=cosine["value"].abs())
        yield rows[(rows["metric"] == "proximal_loss") & (rows["estimator"] == "exact")]


def draw_fig3(table: pd.DataFrame) -> Figure:
    texts = {
        "cos_gu_gp": "cosine of applied\nand proximal gradient",
        "proximal_loss": "proximal loss (KL)",
    }
    return shapes.curves(table, "metric", texts)


def fig6(scale: Scale, seed: int) -> Rows:
    for label, over in (("FedAvg", FEDAVG), ("FedSOL", FEDSOL2)):
        run_ = run(scale, seed, {**KEPT, **over})
        rows = asked(scale, run_, "drift", DRIFT, label=label)
        is_whole = (rows["scope"] == "global") & rows["layer"].isna()
        yield rows[is_whole & rows["metric"].str.endswith("_local_divergence")]


def draw_fig6(table: pd.DataFrame) -> Figure:
    texts = {
        "global_local_divergence": "distance of a client\nfrom the global model",
        "local_local_divergence": "distance of two clients",
    }
    figure = shapes.curves(table[table["question"] == "drift"], "metric", texts)
    for ax in figure.axes:
        ax.set_ylim(bottom=0)
    return figure


def fig7(scale: Scale, seed: int) -> Rows:
    for label, over in (("FedAvg", FEDAVG), ("FedSOL", FEDSOL2)):
        run_ = run(scale, seed, {"checkpoint.clients": "sampled", **over}, SHARDS)
        rows = asked(scale, run_, "forgetting", {"own": False}, label=label)
        yield rows[(rows["scope"] == "global") & (rows["slice"] == "test")]


def draw_fig7(table: pd.DataFrame) -> Figure:
    import seaborn as sns  # a second, which ``fldiag list`` does not need

    looks = style.looks(table["label"])
    with style.paper():
        fig, (left, *heatmaps) = style.panels(1 + len(looks), 2.3, 0.3, across=1 + len(looks))
        for (label, look), ax in zip(looks.items(), heatmaps, strict=True):
            rows = table[table["label"] == label]
            accuracy = rows[rows["metric"] == "accuracy"]
            for moment, dash, text in (
                ("received", "-", "before local training"),
                ("trained", ":", "after"),
            ):
                means = (
                    100 * accuracy[accuracy["moment"] == moment].groupby("round")["value"].mean()
                )
                line = {**look.line, "linestyle": dash}
                left.plot(means.index, means, label=f"{label}, {text}", **line)
            shares = rows[(rows["metric"] == "class_accuracy") & (rows["moment"] == "aggregated")]
            by_class = shares.astype({"index": int, "round": int}).pivot_table(
                index="index", columns="round", values="value"
            )
            bar = {"label": "accuracy on the class [%]"} if ax is heatmaps[-1] else None
            cells_ = {"vmin": 0, "vmax": 100, "cmap": style.COLORMAP, "cbar": bar is not None}
            sns.heatmap(100 * by_class, ax=ax, cbar_kws=bar, **cells_)
            ax.set(title=label, xlabel="round", ylabel="class")
            ax.tick_params(axis="y", rotation=0)
        left.set(xlabel="round", ylabel="test accuracy [%]")
        left.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        style.chance(left, 10)
        left.grid(True)
        style.legend(fig, *left.get_legend_handles_labels(), ncols=4)
    return fig


def fig8(scale: Scale, seed: int) -> Rows:
    lines = {"FedAvg": FEDAVG, "FedASAM": {"method.name": "fedasam"}, "FedSOL": FEDSOL2}
    yield from landscapes(scale, seed, {label: (LDA, over) for label, over in lines.items()})


def landscapes(scale: Scale, seed: int, lines: dict[str, tuple[str, Over]]) -> Rows:
    """Eigenvalues of every final model, and of the first seed's the loss around it."""
    for label, (preset, over) in lines.items():
        run_ = run(scale, seed, over, preset)
        yield asked(scale, run_, "spectrum", label=label)
        if seed == 0:
            yield asked(scale, run_, "landscape", label=label)


def draw_landscapes(table: pd.DataFrame) -> Figure:
    rows = table[table["question"] == "landscape"]
    return fldiag.draw(rows.assign(run=rows["label"]).dropna(axis=1, how="all"), name="landscape")


# ---- accuracy over settings


def fig4(scale: Scale, seed: int) -> Rows:
    for factor, key, options in SWEEPS:
        for option in options:
            for label, over in (("FedAvg", FEDAVG), ("FedSOL", {})):
                run_ = run(scale, seed, {key: option, **over})
                config = run_.config  # the axes show what was trained
                share = 100 * config.clients.per_round / config.clients.total
                at = {"ratio": share, "epochs": config.train.epochs, "lr": config.train.lr}[factor]
                yield final(run_, label=label, factor=factor, at=at, setting=f"{factor}={option}")
    parts = [final(run(scale, seed, FEDAVG), label="FedAvg", factor="rho", setting="rho=0")]
    for rho in (0.1, 0.5, 1.0, 1.5, 2.0):
        labels = {"label": "FedSOL", "factor": "rho", "at": rho, "setting": f"rho={rho}"}
        parts.append(final(run(scale, seed, {"method.rho": rho}), **labels))
    yield from parts
    for label, of_range in (("rho to 0.1", parts[:2]), ("rho 0.5 to 2.0", parts[2:])):
        highest = pd.concat(of_range).nlargest(1, "value")
        yield highest.assign(question="range", label=label, setting="rho")


SWEEPS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("ratio", "clients.per_round", (2, 5, 10, 20)),
    ("epochs", "train.epochs", (1, 5, 10, 20)),
    ("lr", "train.lr", (0.003, 0.01, 0.03, 0.1)),
)


def draw_fig4(table: pd.DataFrame) -> Figure:
    texts = {
        "ratio": "clients sampled [%]",
        "epochs": "local epochs",
        "lr": "learning rate",
        "rho": "radius ρ of FedSOL",
    }
    rows = table[table["question"] == "final"]
    return shapes.over(rows, texts, log=("ratio", "epochs", "lr"))


RHOS, AT = (0.5, 1.0, 1.5, 2.0), 1.0


def fig5(scale: Scale, seed: int) -> Rows:
    for strength in ("adaptive", "fixed"):
        for rho in RHOS:
            is_shown = (strength, rho) == ("adaptive", AT)
            over: Over = {"checkpoint.clients": "sampled"} if is_shown else {}
            run_ = run(scale, seed, {"method.rho": rho, "method.strength": strength, **over})
            yield final(run_, label=strength, at=rho, factor="rho")
            if is_shown:
                options = {**DRIFT, "rounds": run_.rounds[-1:]}
                rows = asked(scale, run_, "drift", options, label=strength)
                is_mean = (rows["metric"] == "lambda_mean") & (rows["scope"] == "global")
                rows = rows[is_mean & rows["layer"].notna()]
                ends = dict(zip(("first", "last"), rows["layer"].iloc[[0, -1]], strict=True))
                yield rows.assign(place=rows["layer"].map({v: k for k, v in ends.items()}))


def draw_fig5(table: pd.DataFrame) -> Figure:
    with style.paper():
        fig, (left, right) = style.panels(2, 2.4, least=2.5)
        accuracy = table[table["question"] == "final"]
        for label, look in style.looks(accuracy["label"]).items():
            by_rho = accuracy[accuracy["label"] == label].groupby("at")["value"]
            shapes.look_points(left, RHOS, by_rho.agg(["mean", "std"]), look, label=label)
        left.set(xlabel="radius ρ", ylabel="test accuracy [%]", xticks=RHOS)
        left.legend()
        left.grid(True)
        rows = table[table["question"] == "drift"]
        layers = rows.groupby("layer", sort=False)[["value", "scaled"]].mean()
        bars = right.bar(
            [style.shorten(n, 14) for n in layers.index], layers["value"], color=style.look(2).color
        )
        right.bar_label(bars, [f"{scaled:.2f}" for scaled in layers["scaled"]], fontsize=6)
        right.tick_params(axis="x", rotation=30)
        title = f"round {rows['round'].iloc[0]:g}, ρ = {AT:g}; numbers: mean Λ × √size"
        right.set(ylabel="mean Λ", yscale="log", title=title)
        right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        right.yaxis.set_major_formatter("{x:g}")
        right.minorticks_off()
        right.margins(y=0.1)
    return fig


# ---- learning curves


LATE = 20


def learning(
    scale: Scale, seed: int, lines: Iterator[Cell], base: str, until: int = 10_000
) -> Rows:
    """Curves up to a round, and of each run: ``accuracy`` in the last one, ``accuracy_late``, its mean over the last 20, and
    ``accuracy_ahead``, the mean over these of its difference to the line ``base`` on the same data, which comes first.

    Runs that have the same clients in a round swing together, so these differences swing less."""
    bases: dict[str, pd.Series] = {}
    for preset, over, labels in lines:
        rows = curve(run(scale, seed, over, preset), **labels)
        rows = rows[rows["round"] <= until]
        yield rows
        late = rows.tail(LATE).set_index("round")["value"]
        numbers = {"accuracy": late.iloc[[-1]], "accuracy_late": late}
        if labels["label"] == base:
            bases[labels["data"]] = late
        else:
            numbers["accuracy_ahead"] = late - bases[labels["data"]]
        for metric, of_rounds in numbers.items():
            end = rows.tail(1).drop(columns="round")
            spread = {"value": of_rounds.mean(), "std": of_rounds.std()}
            yield end.assign(question="late", metric=metric, **spread)


def of_table2(data: str = "", methods: tuple[str, ...] = (), **over: Any) -> Iterator[Cell]:
    """The cells of Table 2 with LDA 0.1: all, or those of some data or methods."""
    for c in cells("fedsol/table2", lambda rows: rows["setting"] == LDA_01):
        if data in ("", c.labels["data"]) and (c.labels["method"] in methods or not methods):
            yield c._replace(over={**c.over, **over})


def draw_learning(table: pd.DataFrame) -> Figure:
    rows = table[table["question"] == "curve"]
    rows = rows.assign(label=rows["label"].map(style.display_name))
    levels = printed("fedsol/table2")
    is_measured = levels["data"].isin(set(rows["trained_on"]))
    levels = levels[is_measured & (levels["setting"] == LDA_01)]
    levels = levels.assign(label=levels["method"].map(style.display_name))
    levels = levels[levels["label"].isin(rows["label"])]
    is_theirs = {*levels["label"]} == {*rows["label"]}  # not where lines are variants of a method
    texts, accuracy = shapes.data_text(rows), "test accuracy [%]"
    return shapes.curves(
        rows, "data", texts, ylabel=accuracy, chance=10, printed=levels if is_theirs else None
    )


def of_lines(lines: dict[str, Over]) -> Iterator[Cell]:
    """Runs of one data set that differ in a few overrides."""
    for label, over in lines.items():
        method = over.get("method.name", "fedsol")
        labels = {"setting": f"{LDA_01};line={label}", "method": method, "label": label}
        yield Cell(LDA, over, {**labels, "model": "fedavg_cifar", "data": "cifar10"})


#: The clients as FedSOL's released code draws them: dealt with a seed of its own, and those of a round by its number alone.
CODE = {
    "partition.kind": "lda_fedsol",
    "partition.seed": 19940817,
    "clients.sampling": "by_round",
}
PROX: Over = {"method.name": "fedprox"}
CAUSES: dict[str, Over] = {
    "as in Table 2": PROX,
    # The paper's algorithm weighs all clients alike, its code by examples. FedSoL's text and the code name augmentation.
    "uniform weights": {**PROX, "rounds": 40, "train.aggregate": "uniform"},
    "no augmentation": {**PROX, "rounds": 40, "data.augment": False},
}
FOUR = ("fedavg", "fedprox", "fedntd", "fedsol")
STRENGTHS: dict[str, Over] = {
    "FedAvg": FEDAVG,
    "FedProx, μ = 1": PROX,
    "FedProx, μ = 0.1": {**PROX, "method.mu": 0.1},
    "FedNTD": {"method.name": "fedntd"},
    "FedSOL, Λ by layer": {"method.lambda_norm": "layer"},
    "FedSOL, Λ dim0": {},
    "FedSOL, Λ dim0, all layers, ρ = 1": {"method.part": "full", "method.rho": 1.0},
}
CURVES = (
    "With thirty rounds or more, lines are moving means over a fifteenth of the rounds, and raw curves are faint. Dotted: the "
    "accuracies of the paper's Table 2, where its data were trained on."
)


# ---- the toy in the plane


def fig12(scale: Scale, seed: int) -> Rows:
    from .toys import plane  # imports torch, without which studies are listed

    yield plane.run().assign(question="plane")


def draw_fig12(table: pd.DataFrame) -> Figure:
    from .toys import plane

    return plane.draw(table)


# ---- tables


def table5(scale: Scale, seed: int) -> Rows:
    for preset, over, labels in cells("fedsol/table5"):
        if over.get("method.part") == "head":  # as by default: the runs of the other tables
            del over["method.part"]
        yield final(run(scale, seed, over, preset), **labels)


def table9(scale: Scale, seed: int) -> Rows:
    """Clients' own models after fine-tuning: one training of 200 epochs of local models; Per-FedAvg halves its minibatches."""
    rows = printed("fedsol/table9").query("metric == 'personal_accuracy'")
    names = ["setting", "method", "model", "data"]
    for labels in rows[names].to_dict("records"):
        over = dict(OWN.get(labels["method"], {}))
        if "clients.per_round" in over and labels["data"] == "tissuemnist":
            over["clients.per_round"] = 200
        c = cell("fedsol/table9", labels)
        run_ = run(scale, seed, {**c.over, **over}, f"fedsol-{labels['data']}-lda0.1")
        epochs = int(parse(labels["setting"]).get("tune_epochs", 0))
        table = asked(scale, run_, "personalise", {"epochs": (epochs,)}, **labels)
        is_mean = (table["scope"] == "global") & table["metric"].str.startswith("personal_accuracy")
        yield table[is_mean].assign(value=100 * table["value"], unit="%")


OWN: dict[str, Over] = {
    "local_only": {
        "rounds": 200,
        "clients.per_round": 100,
        "train.epochs": 1,
        "train.keep_momentum": True,
    },
    "perfedavg": {"train.batch_size": 100, "train.epochs": 2},
}


STUDIES = (
    Study(
        "fedsol/fig2",
        "Sharding and LDA partitions",
        "FedSOL Figure 2",
        "Number of examples per class and client: two shards per client, and LDA with concentration 0.1.",
        fig2,
        bubbles,
        seeds=0,
    ),
    Study(
        "fedsol/fig3",
        "Proximal orthogonality",
        "FedSOL Figure 3",
        "Left: cosine between the applied gradient and the proximal gradient (KL) over all parameters, mean over the local "
        "steps of the sampled clients. Right: proximal loss of the clients on their own data after training. rho = 0 is "
        "FedAvg.",
        fig3,
        draw_fig3,
        seeds=3,
    ),
    Study(
        "fedsol/fig4",
        "Learning factors",
        "FedSOL Figure 4",
        "Final test accuracy against the share of sampled clients, the local epochs, the learning rate and rho (1.5 where "
        "it does not vary). The axes show the values that were trained. A cross marks diverged weights.",
        fig4,
        draw_fig4,
    ),
    Study(
        "fedsol/fig5",
        "Adaptive strength",
        "FedSOL Figure 5",
        "Left: final test accuracy against rho with adaptive and with fixed strength, the head perturbed. Right: mean "
        "strength of each layer, normalised by layer as the paper defines it, at the clients' trained weights in the last "
        "round, rho = 1; multiplied by the square root of the layer's size, it is 1 if all entries move equally.",
        fig5,
        draw_fig5,
    ),
    Study(
        "fedsol/fig6",
        "Weight divergence",
        "FedSOL Figure 6",
        "Distance of the clients' trained weights from the received global ones (left) and between two clients (right), "
        "mean over the sampled clients; FedSOL with rho = 2.",
        fig6,
        draw_fig6,
        seeds=3,
    ),
    Study(
        "fedsol/fig7",
        "Knowledge preservation",
        "FedSOL Figure 7",
        "Left: test accuracy of the model that the clients receive, and mean test accuracy of their trained models. Right: "
        "test accuracy of the averaged model by class, means over the seeds. Two shards per client, rho = 2.",
        fig7,
        draw_fig7,
        seeds=3,
    ),
    Study(
        "fedsol/fig8",
        "Loss landscapes",
        "FedSOL Figure 8",
        "Training loss of the final global models along the top two Hessian eigenvectors, with the largest eigenvalue "
        "(± the bound of its numerical error, not a spread over seeds) and its ratio to the fifth. The picture shows seed "
        "0; statements use all seeds.",
        fig8,
        draw_landscapes,
        seeds=3,
    ),
    Study(
        "fedsol/fig10",
        "Learning curves",
        "FedSOL Figure 10",
        f"Test accuracy over the rounds under LDA 0.1. {CURVES}",
        lambda scale, seed: learning(scale, seed, of_table2(), "fedavg"),
        draw_learning,
    ),
    Study(
        "fedsol/fig12",
        "FedSOL and FedProx in the plane",
        "FedSOL Figure 12",
        "Paths of clients with the same optimum and different curvatures. FedSOL ends on the line from the global to the "
        "local optimum for every curvature; FedProx ends beside it unless a = 1. The figure is the same at every scale.",
        fig12,
        draw_fig12,
        seeds=0,
    ),
    Study(
        "fedsol/causes",
        "FedProx with other choices",
        "FedSOL Table 2",
        "Test accuracy of FedProx under LDA 0.1 in the first 40 rounds, as in Table 2 and with one thing changed. The "
        f"clients of every round are the same. {CURVES}",
        lambda scale, seed: learning(scale, seed, of_lines(CAUSES), "as in Table 2", 40),
        draw_learning,
    ),
    Study(
        "fedsol/clients",
        "Learning curves with the clients of the released code",
        "FedSOL Table 2",
        "Test accuracy over the rounds under LDA 0.1, with the partition and the clients of each round as FedSOL's released "
        f"code draws them: the same for every method and seed. {CURVES}",
        lambda scale, seed: learning(scale, seed, of_table2("cifar10", FOUR, **CODE), "fedavg"),
        draw_learning,
        seeds=3,
    ),
    Study(
        "fedsol/strengths",
        "FedSOL with both readings of Λ, FedProx with two weights",
        "FedSOL Table 2",
        "Test accuracy over the rounds under LDA 0.1. FedSOL perturbs the head with ρ = 1.5, with Λ normalised by layer (the "
        "paper's text) and along the first axis of each tensor (dim0, its released code), and all layers with ρ = 1 (the "
        f"code's settings). {CURVES}",
        lambda scale, seed: learning(scale, seed, of_lines(STRENGTHS), "FedAvg"),
        draw_learning,
        seeds=3,
    ),
    table(
        "fedsol/table1",
        "Proximal loss: additive or projected",
        "Final test accuracy in percent: L2 (fedprox) and KL (strategy:A5) as additive terms, and the local gradient "
        "without the part that opposes their gradient (gradient_projection). The weight of KL is assumed to be 1.",
    ),
    table(
        "fedsol/table2",
        "Accuracy of eight methods",
        "Final test accuracy in percent under sharding and LDA partitions.",
    ),
    table(
        "fedsol/table3",
        "Accuracy with other architectures",
        "Final test accuracy in percent with VGG11, ResNet-18 and SL-ViT, LDA 0.1.",
    ),
    table(
        "fedsol/table4",
        "FedSOL with other proximal losses",
        "Final test accuracy in percent of five methods alone, and of FedSOL with their proximal losses (loss=), with the "
        "full network perturbed and rho = 2. The proximal gradient of FedNova is reconstructed.",
    ),
    table(
        "fedsol/table5",
        "Partial perturbation",
        "Final test accuracy in percent. Costs are in table5_counts.",
        rows=table5,
    ),
    counts(
        "fedsol/table5_counts",
        "Cost of partial perturbation, counted",
        "Multiply-adds of a local step divided by those of FedAvg, counted at every scale on the paper's model, images and "
        "classes, without the received model's outputs (the paper's delta). Here both passes of the head share the body's "
        "features; the paper counts one more forward pass.",
        "relative",
    ),
    sizes(
        "fedsol/table7",
        {
            name: f"fedsol-{name}-lda0.1"
            for name in ("mnist", "cifar10", "svhn", "cinic10", "pathmnist", "tissuemnist")
        },
        "Number of training and test examples. The other columns of the paper's table are the clients, rounds and ratios of "
        "the presets.",
    ),
    table(
        "fedsol/table9",
        "Personalised models",
        "Accuracy of the clients' models in percent, each on test examples of its own mixture of classes, after 1 and 5 "
        "epochs of fine-tuning: mean over the clients, and in the table their standard deviation (_std).",
        rows=table9,
    ),
    table(
        "fedsol/table10",
        "Strategies",
        "Final test accuracy in percent of the strategies A0 (FedAvg), A1 (FedSOL) to A6. The paper does not print their "
        "radius and weight; here rho = 1.5, weight 1, with the head perturbed.",
    ),
)
