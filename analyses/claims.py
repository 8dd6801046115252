"""What the papers say in words, checked where the figures were made; the ledger has the outcome."""

import numpy as np

from fldiag.figures.claims import Claim, lowest, ordered, per_seed

RHOS = ["FedSOL, rho 2.0", "FedSOL, rho 1.0", "FedSOL, rho 0.5", "FedAvg"]
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


def _iris(table):
    return per_seed(table, "method", metric="accuracy", ask="derived", setting="clients=3;rounds=20;epochs=5;lr=0.01")


def on_iris(table):
    return ordered(_iris(table), ["fedavg", "feddf", "fedproj"], equal=[True])


def projected(table):
    return ordered(_iris(table), ["feddf", "fedproj"])


def sooner(table):
    """A run that never has FedSAM's best accuracy is infinitely late, not absent."""
    rows = table[table["metric"] == "rounds_to_best_of_fedsam"]
    with np.errstate(invalid="ignore"):
        return ordered(per_seed(rows.assign(value=rows["value"].fillna(np.inf))), ["fedtoga", "fedsam"])


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
    Claim("fedproj-iris", "On Iris FedProj's global model is more accurate than FedDF's, and FedDF's not less than FedAvg's.",
          "FedProj Figure 1", "fedproj/fig1", on_iris),
    Claim("fedproj-iris-projected", "On Iris FedProj's global model is more accurate than FedDF's.", "FedProj Figure 1",
          "fedproj/fig1", projected),
    Claim("fedtoga-sooner", "FedTOGA has the best accuracy of FedSAM in fewer rounds than FedSAM.", "FedTOGA Table 3",
          "fedtoga/table3", sooner),
)
