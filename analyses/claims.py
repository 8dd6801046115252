"""What the papers say in words, checked where the figures were made; the ledger has the outcome."""

from functools import partial

from fldiag.errors import FldiagError
from fldiag.figures.claims import Claim, lowest, ordered, per_seed

RHOS = ["FedSOL, rho 2.0", "FedSOL, rho 1.0", "FedSOL, rho 0.5", "FedAvg"]
IRIS = "On Iris FedProj's global model is more accurate than FedDF's"
MEAN = {"scope": "global", "moment": "trained", "layer": None}


def divergence(table):
    return ordered(per_seed(table, metric="global_local_divergence", **MEAN), ["FedSOL", "FedAvg"])


def apart(table):
    return ordered(per_seed(table, metric="local_local_divergence", **MEAN), ["FedSOL", "FedAvg"])


def orthogonal(table):
    """Distance from a right angle in every round: cosines of both signs do not cancel."""
    values = per_seed(table.assign(value=table["value"].abs()), metric="cos_gu_gp", estimator="steps", **MEAN)
    return ordered(values, RHOS)


def preserved(table):
    return ordered(per_seed(table, metric="proximal_loss", estimator="exact", **MEAN), RHOS)


def forgotten(table):
    values = per_seed(table, metric="drop", slice="test", scope="global", moment="trained", index=None)
    return ordered(values, ["FedSOL", "FedAvg"])


def kept(table):
    values = per_seed(table, metric="accuracy", slice="test", scope="global", moment="trained", index=None)
    return ordered(values, ["FedAvg", "FedSOL"])


def sharpest(table):
    return ordered(per_seed(table, metric="eigenvalue", index=1, ask="spectrum"), ["FedSOL", "FedAvg"])


def ratio(table):
    return ordered(per_seed(table, metric="eigenvalue_ratio", ask="spectrum"), ["FedSOL", "FedAvg"])


def flattest(table):
    return lowest(per_seed(table, metric="lambda_max"), "gradaug",
                  among=["fedavg", "fedprox", "moon", "mixup", "stochdepth", "gradaug"])


def best(table):
    """In the column that the paper's other studies share."""
    values = per_seed(table, metric="accuracy", setting="partition=lda;alpha=0.1", data="cifar10")
    among = ["fedavg", "fedprox", "fednova", "scaffold", "fedntd", "fedsam", "fedasam", "fedsol"]
    return lowest(values, "fedsol", among, highest=True)


def adaptive(table):
    rows = table[table["metric"] == "accuracy"].dropna(subset=["value"])
    if "setting" in rows and rows.groupby(["seed", "label"])["setting"].nunique().nunique() > 1:
        raise FldiagError("not every radius was measured with both", "see why in the figure's json")
    return ordered(per_seed(table, metric="accuracy"), ["fixed", "adaptive"])


def _iris(table, lr):
    return per_seed(table, "method", metric="accuracy", ask="derived", setting=f"clients=3;rounds=20;epochs=5;lr={lr}")


def on_iris(table, lr):
    return ordered(_iris(table, lr), ["fedavg", "feddf", "fedproj"], equal=[True])


def projected(table, lr):
    return ordered(_iris(table, lr), ["feddf", "fedproj"])


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


CLAIMS = (
    Claim("fedsol-orthogonal", "The larger rho, the closer to 0 is the cosine of FedSOL's gradient and the proximal one.",
          "FedSOL Figure 3a", "fedsol/fig3", orthogonal),
    Claim("fedsol-proximal", "The larger rho, the smaller the proximal loss of FedSOL's clients after training.",
          "FedSOL Figure 3b", "fedsol/fig3", preserved),
    Claim("fedsol-forgetting", "The test accuracy of FedSOL's clients drops less in local training than that of FedAvg's.",
          "FedSOL Figure 7a", "fedsol/fig7", forgotten),
    Claim("fedsol-after", "After local training FedSOL's clients are more accurate on the test set than FedAvg's.",
          "FedSOL Figure 7a", "fedsol/fig7", kept),
    Claim("fedsol-divergence", "Clients of FedSOL stay closer to the global model than those of FedAvg.", "FedSOL Figure 6a",
          "fedsol/fig6", divergence),
    Claim("fedsol-divergence-local", "Clients of FedSOL stay closer to each other than those of FedAvg.", "FedSOL Figure 6b",
          "fedsol/fig6", apart),
    Claim("fedsol-lambda1", "The global model of FedSOL has a smaller largest Hessian eigenvalue than FedAvg's.",
          "FedSOL Figure 8", "fedsol/fig8", sharpest),
    Claim("fedsol-ratio", "The ratio of the first to the fifth eigenvalue is smaller for FedSOL than for FedAvg.",
          "FedSOL Figure 8", "fedsol/fig8", ratio),
    Claim("fedalign-flattest", "GradAug has the smallest largest eigenvalue of the six methods.", "FedAlign Table 1",
          "fedalign/table1", flattest),
    Claim("fedproj-iris", f"{IRIS}, FedDF's not less than FedAvg's (lr 0.01).", "FedProj Figure 1", "fedproj/fig1",
          partial(on_iris, lr=0.01)),
    Claim("fedproj-iris-projected", f"{IRIS} (lr 0.01).", "FedProj Figure 1", "fedproj/fig1", partial(projected, lr=0.01)),
    Claim("fedproj-iris-0.001", f"{IRIS}, FedDF's not less than FedAvg's (the paper's lr 0.001).", "FedProj Figure 1",
          "fedproj/fig1", partial(on_iris, lr=0.001)),
    Claim("fedproj-iris-projected-0.001", f"{IRIS} (the paper's lr 0.001).", "FedProj Figure 1", "fedproj/fig1",
          partial(projected, lr=0.001)),
    Claim("fedsol-best", "FedSOL is the most accurate of the eight methods (CIFAR-10, LDA 0.1).", "FedSOL Table 2",
          "fedsol/table2", best),
    Claim("fedsol-adaptive", "FedSOL is more accurate with adaptive than with fixed strength (mean over rho).", "FedSOL Figure 5",
          "fedsol/fig5", adaptive),
    Claim("fedtoga-corrected", "FedTOGA is more accurate with its corrected perturbation than without (kappa = 0).",
          "FedTOGA ablation", "fedtoga/ablation", corrected),
    Claim("fedtoga-reached", "FedTOGA has 80 % test accuracy in fewer rounds than FedSAM.", "FedTOGA Table 3", "fedtoga/table3",
          reached),
    Claim("fedtoga-sooner", "FedTOGA has the best accuracy of FedSAM in fewer rounds than FedSAM.", "FedTOGA Table 3",
          "fedtoga/table3", sooner),
)
