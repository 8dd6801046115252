"""What the FedTOGA paper says in words, checked where its figures were made; the ledger has the outcome."""

from functools import partial

from fldiag.errors import FldiagError
from fldiag_papers.claims import (
    Claim,
    counted,
    lowest,
    need,
    of_gains,
    ordered,
    per_seed,
    settings,
    top,
    trained,
)

DIR = "partition=dirichlet;alpha=0.6;clients=100;ratio=0.1"


def corrected(table):
    return ordered(per_seed(table, metric="accuracy"), ["fedtoga (kappa=0)", "fedtoga"])


def late(rows):
    """Runs that never get there are one round later than the latest that does: they are at least that late."""
    values = rows["value"].astype(float)
    return rows.assign(value=values.fillna(values.max() + 1))


def reached(table):
    """Where no run has 80 %, nothing is decided."""
    rows = table[(table["metric"] == "rounds_to_80") & (table["origin"] == "measured")]
    if rows["value"].isna().all():
        raise FldiagError("no run has 80 %", "train longer, or on easier data")
    return ordered(per_seed(late(rows)), ["fedtoga", "fedsam"])


def sooner(table):
    rows = table[(table["metric"] == "rounds_to_best_of_fedsam") & (table["origin"] == "measured")]
    return ordered(per_seed(late(rows)), ["fedtoga", "fedsam"])


def ablation(table):
    return ordered(
        per_seed(table, metric="accuracy"), ["fedsam", "fedspeed", "fedtoga (kappa=0)", "fedtoga"]
    )


def smallest_drop(table):
    """From Dirichlet 0.6 to 0.1: accuracy lost, per method that was measured on both."""
    rows = table[(table["metric"] == "accuracy") & (table["data"] == "cifar10")]
    names, lost = [DIR, DIR.replace("0.6", "0.1", 1)], {}
    for method in rows.loc[rows["origin"] == "measured", "method"].unique():
        values = per_seed(rows, "setting", method=method)
        if set(names) <= set(values):
            trained(values, names)
            lost[method], about = values[names[0]] - values[names[1]], values.attrs
    if "fedtoga" not in lost or len(lost) < 2:
        raise FldiagError(
            "both partitions were not measured of FedTOGA and another method",
            "see why in the figure's json",
        )
    return lowest(of_gains(lost, about), "fedtoga", list(lost))


def fastest(level):
    def check(table):
        rows = table[(table["metric"] == level) & (table["origin"] == "measured")]
        if rows["value"].isna().all():
            raise FldiagError("no run gets there", "train longer, or on easier data")
        return settings(
            rows,
            lambda own: lowest(values := per_seed(late(own), "method"), "fedtoga", list(values)),
            ("fedtoga",),
            ("setting",),
        )

    return check


def sharper_with_heterogeneity(table):
    return ordered(
        per_seed(table, metric="eigenvalue", index=1, ask="spectrum"),
        ["Dirichlet 0.6", "Dirichlet 0.1", "3 classes a client"],
    )


def tuned(option, best_, rivals):
    return lambda table: lowest(
        per_seed(table, "setting", metric="accuracy"),
        f"{option}={best_}",
        [f"{option}={v}" for v in (best_, *rivals)],
        highest=True,
    )


def no_more(metric, method, base):
    """``method`` does not need more of it than ``base``."""

    def check(table):
        values = per_seed(table, metric=metric)
        need(values, (method, base))
        value, limit = float(values[method].mean()), float(values[base].mean())
        return counted(value <= limit, f"{method} {value:.3g}, {base} {limit:.3g}", (method, base))

    return check


CLAIMS = (
    Claim(
        "fedtoga-corrected",
        "FedTOGA is more accurate with its corrected perturbation than without (kappa = 0).",
        "FedTOGA ablation",
        "fedtoga/ablation",
        corrected,
    ),
    Claim(
        "fedtoga-reached",
        "FedTOGA has 80 % test accuracy in fewer rounds than FedSAM.",
        "FedTOGA Table 3",
        "fedtoga/table3",
        reached,
    ),
    Claim(
        "fedtoga-sooner",
        "FedTOGA has the best accuracy of FedSAM in fewer rounds than FedSAM.",
        "FedTOGA Table 3",
        "fedtoga/table3",
        sooner,
    ),
    Claim(
        "fedtoga-best",
        "FedTOGA is the most accurate everywhere (LeNet).",
        "FedTOGA Table 1",
        "fedtoga/table1",
        partial(top, method="fedtoga"),
    ),
    Claim(
        "fedtoga-best-resnet",
        "FedTOGA is the most accurate everywhere (ResNet-18).",
        "FedTOGA Table 2",
        "fedtoga/table2",
        partial(top, method="fedtoga"),
    ),
    Claim(
        "fedtoga-drop",
        "FedTOGA loses the least accuracy of all from Dirichlet 0.6 to 0.1.",
        "FedTOGA Table 1",
        "fedtoga/table1",
        smallest_drop,
    ),
    Claim(
        "fedtoga-fastest",
        "FedTOGA has 80 % in the fewest rounds of all.",
        "FedTOGA Table 3",
        "fedtoga/table3",
        fastest("rounds_to_80"),
    ),
    Claim(
        "fedtoga-fastest-82",
        "FedTOGA has 82 % in the fewest rounds of all.",
        "FedTOGA Table 3",
        "fedtoga/table3",
        fastest("rounds_to_82"),
    ),
    Claim(
        "fedtoga-fastest-everywhere",
        "FedTOGA has FedSAM's best accuracy in the fewest rounds on every partition.",
        "FedTOGA Table 8",
        "fedtoga/table8",
        fastest("rounds_to_best_of_fedsam"),
    ),
    Claim(
        "fedtoga-ladder",
        "Every term of FedTOGA adds accuracy: SAM, regulariser, dual correction, SAM correction.",
        "FedTOGA ablation",
        "fedtoga/ablation",
        ablation,
    ),
    Claim(
        "fedtoga-sharpness",
        "The more clients differ, the larger the global model's largest eigenvalue.",
        "FedTOGA Figure 1",
        "fedtoga/fig1",
        sharper_with_heterogeneity,
    ),
    *(
        Claim(
            f"fedtoga-{option}",
            f"{option} = {best_} is the best of FedTOGA's grid.",
            "FedTOGA Figure 2",
            "fedtoga/fig2",
            tuned(option, best_, others),
        )
        for option, best_, others in (
            ("lr_decay", "0.9995", ("0.997", "0.998")),
            ("lam", "0.1", ("0.01", "0.2")),
            ("kappa", "1", ("2", "4")),
            ("beta_dual", "0.9", ("0.8", "0.85")),
            ("rho", "0.1", ("0.001", "0.01")),
        )
    ),
    Claim(
        "fedtoga-uplink",
        "FedTOGA's clients upload no more than FedAvg's.",
        "FedTOGA abstract",
        "fedtoga/table4",
        no_more("uplink", "fedtoga", "fedavg"),
    ),
)
