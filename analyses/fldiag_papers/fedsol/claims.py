"""What the FedSOL paper says in words, checked where its figures were made; the ledger has the outcome."""

from functools import partial

import pandas as pd

from fldiag.errors import FldiagError
from fldiag.results.select import only
from fldiag_papers.claims import (
    Claim,
    everywhere,
    lowest,
    of_gains,
    ordered,
    per_seed,
    settings,
    top,
    trained,
)

RHOS = ["FedSOL, rho 2.0", "FedSOL, rho 1.0", "FedSOL, rho 0.5", "FedAvg"]
MEAN = {"scope": "global", "moment": "trained", "layer": None}
CLIENTS = {"slice": "test", "scope": "global", "moment": "trained", "index": None}
LDA = "partition=lda;alpha="


def order(*labels, absolute=False, **where):
    """Check of an order of labels; ``absolute``: of distances from 0, where numbers of both signs do not cancel."""

    def check(table):
        values = table.assign(value=table["value"].abs()) if absolute else table
        return ordered(per_seed(values, **where), labels)

    return check


def best(table):
    """In the column that the paper's other studies share."""
    values = per_seed(table, metric="accuracy", setting="partition=lda;alpha=0.1", data="cifar10")
    among = ["fedavg", "fedprox", "fednova", "scaffold", "fedntd", "fedsam", "fedasam", "fedsol"]
    return lowest(values, "fedsol", among, highest=True)


def adaptive(table):
    rows = only(table, metric="accuracy", ask="final").dropna(subset=["value"])
    if "setting" in rows and rows.groupby(["seed", "label"])["setting"].nunique().nunique() > 1:
        raise FldiagError("not every radius was measured with both", "see why in the figure's json")
    return ordered(per_seed(rows), ["fixed", "adaptive"])


def above(table, high, low, metric="accuracy"):
    """Everywhere: ``high`` above ``low``."""
    return settings(
        table,
        lambda own: ordered(per_seed(own, "method", metric=metric), [low, high]),
        (low, high),
    )


def growing(table, method, base, low, high, metric="accuracy"):
    """Whether the gain of ``method`` over ``base`` is larger in setting ``high`` than in ``low``."""

    def gain(setting):
        values = per_seed(table, "method", metric=metric, setting=setting, data="cifar10")
        trained(values, (method, base))
        return values[method] - values[base], values.attrs

    (small, about), (large, _) = gain(low), gain(high)
    return ordered(of_gains({low: small, high: large}, about), [low, high])


def best_rho(table):
    """The best radius is one of 0.5 to 2.0: better than 0.1 and than FedAvg (rho = 0)."""
    values = per_seed(table, "setting", metric="accuracy")
    names = [f"rho={r}" for r in ("0.5", "1.0", "1.5", "2.0")]
    best_ = values[[n for n in names if n in values]].mean().idxmax()
    return lowest(values, best_, ["rho=0", "rho=0.1", best_], highest=True)


def participation(table):
    return settings(
        table,
        lambda own: ordered(per_seed(own, metric="accuracy"), ["FedAvg", "FedSOL"]),
        ("fedavg", "fedsol"),
        ("setting",),
        begins="ratio=",
    )


def later_layers(table):
    """Layers in the order of the net: the strength of the last above that of the first."""
    rows = only(table, metric="lambda_mean", scope="global", estimator="exact")
    rows = rows.drop(only(rows, layer=None).index)
    names = list(dict.fromkeys(rows["layer"])) if len(rows) else []
    if len(names) < 2:
        raise FldiagError("no strength of layers was measured", "see why in the figure's json")
    return ordered(per_seed(rows, "layer", metric="lambda_mean"), [names[0], names[-1]])


def combined(table):
    """FedSOL with another proximal loss above the method itself, pair by pair."""
    values = per_seed(table, metric="accuracy")
    pairs = {
        "fedprox": "l2",
        "fednova": "fednova",
        "scaffold": "scaffold",
        "feddyn": "feddyn",
        "moon": "moon",
    }
    return everywhere(
        {
            m: ordered(values, [m, name])
            for m, loss in pairs.items()
            if m in values and (name := f"fedsol (loss={loss}, part=full, rho=2.0)") in values
        },
        "pairs",
        len(pairs),
    )


def head_like_full(table):
    """Equal within the noise cannot be shown, only refuted: head not below full."""
    rows = table[table["setting"].astype(str).str.contains("rho=1.5")]
    values = per_seed(rows, "setting", metric="accuracy")
    columns = {
        part: next((c for c in values if f"part={part}" in c), f"part={part}")
        for part in ("full", "head")
    }
    return ordered(values, [columns["full"], columns["head"]], equal=[True])


def personalised(table):
    return top(table, "fedsol_ft", "personal_accuracy")


def first_order(number):
    """The error of a proposition falls as it says: with the step as its first power, with the radius as its second."""

    def check(table):
        parts = {}
        for kind in ("step", "perturbation"):
            rows = table[table["metric"] == f"proposition_{number}_{kind}_order"]
            if rows.empty or "predicted" not in rows:
                raise FldiagError("the table has no rows for this claim", "make the figure again")
            off = rows.assign(
                value=(pd.to_numeric(rows["value"]) - pd.to_numeric(rows["predicted"])).abs()
            )
            values = per_seed(off, "metric", label="FedSOL").set_axis(["off"], axis=1)
            parts[kind] = ordered(values.assign(**{"half an order": 0.5}), ["off", "half an order"])
        return everywhere(parts, "errors")

    return check


CLAIMS = (
    Claim(
        "fedsol-orthogonal",
        "The larger rho, the closer to 0 is the cosine of FedSOL's gradient and the proximal one.",
        "FedSOL Figure 3a",
        "fedsol/fig3",
        order(*RHOS, absolute=True, metric="cos_gu_gp", estimator="steps", **MEAN),
    ),
    Claim(
        "fedsol-proximal",
        "The larger rho, the smaller the proximal loss of FedSOL's clients after training.",
        "FedSOL Figure 3b",
        "fedsol/fig3",
        order(*RHOS, metric="proximal_loss", estimator="exact", **MEAN),
    ),
    Claim(
        "fedsol-forgetting",
        "The test accuracy of FedSOL's clients drops less in local training than that of FedAvg's.",
        "FedSOL Figure 7a",
        "fedsol/fig7",
        order("FedSOL", "FedAvg", metric="drop", **CLIENTS),
    ),
    Claim(
        "fedsol-after",
        "After local training FedSOL's clients are more accurate on the test set than FedAvg's.",
        "FedSOL Figure 7a",
        "fedsol/fig7",
        order("FedAvg", "FedSOL", metric="accuracy", **CLIENTS),
    ),
    Claim(
        "fedsol-divergence",
        "Clients of FedSOL stay closer to the global model than those of FedAvg.",
        "FedSOL Figure 6a",
        "fedsol/fig6",
        order("FedSOL", "FedAvg", metric="global_local_divergence", **MEAN),
    ),
    Claim(
        "fedsol-divergence-local",
        "Clients of FedSOL stay closer to each other than those of FedAvg.",
        "FedSOL Figure 6b",
        "fedsol/fig6",
        order("FedSOL", "FedAvg", metric="local_local_divergence", **MEAN),
    ),
    Claim(
        "fedsol-lambda1",
        "The global model of FedSOL has a smaller largest Hessian eigenvalue than FedAvg's.",
        "FedSOL Figure 8",
        "fedsol/fig8",
        order("FedSOL", "FedAvg", metric="eigenvalue", index=1, ask="spectrum"),
    ),
    Claim(
        "fedsol-ratio",
        "The ratio of the first to the fifth eigenvalue is smaller for FedSOL than for FedAvg.",
        "FedSOL Figure 8",
        "fedsol/fig8",
        order("FedSOL", "FedAvg", metric="eigenvalue_ratio", ask="spectrum"),
    ),
    *(
        Claim(
            f"fedsol-proposition-{n}",
            f"Proposition {n} predicts what a perturbed step does, with errors of the orders it says.",
            f"FedSOL Proposition {n}",
            "fedsol/fig6",
            first_order(n),
        )
        for n in (1, 2)
    ),
    Claim(
        "fedsol-best",
        "FedSOL is the most accurate of the eight methods (CIFAR-10, LDA 0.1).",
        "FedSOL Table 2",
        "fedsol/table2",
        best,
    ),
    Claim(
        "fedsol-adaptive",
        "FedSOL is more accurate with adaptive than with fixed strength (mean over rho).",
        "FedSOL Figure 5",
        "fedsol/fig5",
        adaptive,
    ),
    Claim(
        "fedsol-projection",
        "Projecting the proximal loss out loses against adding it (L2).",
        "FedSOL Table 1",
        "fedsol/table1",
        order("gradient_projection (loss=l2)", "fedprox", metric="accuracy"),
    ),
    Claim(
        "fedsol-projection-kl",
        "Projecting the proximal loss out loses against adding it (KL).",
        "FedSOL Table 1",
        "fedsol/table1",
        order(
            "gradient_projection",
            "strategy:A5",
            by="method",
            metric="accuracy",
            setting=f"{LDA}0.1;loss=kl",
        ),
    ),
    Claim(
        "fedsol-everywhere",
        "FedSOL is more accurate than FedAvg in every column.",
        "FedSOL Table 2",
        "fedsol/table2",
        partial(above, high="fedsol", low="fedavg"),
    ),
    Claim(
        "fedsol-heterogeneity",
        "FedSOL gains more over FedAvg at LDA 0.05 than at 0.5.",
        "FedSOL Table 2",
        "fedsol/table2",
        partial(growing, method="fedsol", base="fedavg", low=f"{LDA}0.5", high=f"{LDA}0.05"),
    ),
    Claim(
        "fedsol-shards",
        "FedSOL gains more over FedAvg with 2 shards a client than with 10.",
        "FedSOL Table 2",
        "fedsol/table2",
        partial(
            growing,
            method="fedsol",
            base="fedavg",
            low="partition=sharding;shards=10",
            high="partition=sharding;shards=2",
        ),
    ),
    Claim(
        "fedsol-participation",
        "FedSOL is more accurate than FedAvg at every sampling ratio.",
        "FedSOL Figure 4a",
        "fedsol/fig4",
        participation,
    ),
    Claim(
        "fedsol-rho",
        "The best rho of FedSOL lies in 0.5 to 2.0.",
        "FedSOL Figure 4d",
        "fedsol/fig4",
        best_rho,
    ),
    Claim(
        "fedsol-later",
        "The adaptive strength is larger in the last layer than in the first.",
        "FedSOL Figure 5b",
        "fedsol/fig5",
        later_layers,
    ),
    Claim(
        "fedsol-architectures",
        "FedSOL is more accurate than FedAvg with every architecture.",
        "FedSOL Table 3",
        "fedsol/table3",
        partial(above, high="fedsol", low="fedavg"),
    ),
    Claim(
        "fedsol-combinations",
        "FedSOL's perturbation with a method's proximal loss is more accurate than the method.",
        "FedSOL Table 4",
        "fedsol/table4",
        combined,
    ),
    Claim(
        "fedsol-head",
        "Perturbing the head alone is not less accurate than perturbing all (rho 1.5).",
        "FedSOL Table 5",
        "fedsol/table5",
        head_like_full,
    ),
    Claim(
        "fedsol-personal",
        "FedSOL-FT is the most accurate after personalisation.",
        "FedSOL Table 9",
        "fedsol/table9",
        personalised,
    ),
    Claim(
        "fedsol-a1",
        "Strategy A1 (FedSOL) is the most accurate of A0 to A6.",
        "FedSOL Table 10",
        "fedsol/table10",
        partial(top, method="strategy:A1"),
    ),
)
