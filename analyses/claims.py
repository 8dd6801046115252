"""What the papers say in words, checked where the figures were made; the ledger has the outcome."""

from functools import partial

import pandas as pd

from fldiag.errors import FldiagError
from fldiag.figures.claims import Claim, Verdict, everywhere, lowest, ordered, per_seed
from fldiag.figures.evidence import REPEAT

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


def _iris_clients(table, lr, **where):
    """A number of the clients after local training in the last round, mean over them."""
    rows = table[table["run"].eq(f"one-standardised-lr{lr}-batch5")]
    return per_seed(rows[rows["round"] == rows["round"].max()], "method", ask="iris", scope="global", moment="trained", **where)


def diverging(table, lr):
    """Share of the plane in which a client decides otherwise than the model it received."""
    values = _iris_clients(table, lr, metric="disagreement", reference="received")
    return lowest(values, "fedproj", ["fedavg", "feddf", "fedproj"])


def remembering(table, lr):
    return lowest(_iris_clients(table, lr, metric="accuracy"), "fedproj", ["fedavg", "feddf", "fedproj"], highest=True)


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


def settings(table, check, by=("setting", "model", "data")):
    """The check in every setting that has all it compares; raises FldiagError where none has."""
    rows = table[table["origin"] == "measured"]
    keys = [k for k in by if k in rows]
    found = {}
    for key, _ in rows.groupby(keys, dropna=False, sort=False):
        own = table
        for column, wanted in zip(keys, key, strict=True):
            own = own[own[column].eq(wanted) | (own[column].isna() if wanted != wanted else False)]
        try:
            found[", ".join(str(k) for k in key if k == k)] = check(own)
        except FldiagError:
            continue
    return everywhere(found)


def above(table, high, low, metric="accuracy"):
    """Everywhere: ``high`` above ``low``."""
    return settings(table, lambda own: ordered(per_seed(own, "method", metric=metric), [low, high]))


def top(table, method, metric="accuracy", lowest_of=False, among=None):
    """Everywhere: ``method`` above (below) all others that were measured there."""
    def check(own):
        values = per_seed(own, "method", metric=metric)
        names = [n for n in among or values.columns if n in values.columns]
        if method not in names or len(names) < 2:
            raise FldiagError(f"nothing beside {method} was measured", "see why in the figure's json")
        return lowest(values, method, names, highest=not lowest_of)
    return settings(table, check)


def cells(table, labels, column="setting", metric="accuracy", **where):
    """An order of cells along one column, from low to high."""
    return ordered(per_seed(table, column, metric=metric, **where), labels)


def growing(table, method, base, low, high, metric="accuracy"):
    """Whether the gain of ``method`` over ``base`` is larger in setting ``high`` than in ``low``."""
    def gain(setting):
        values = per_seed(table, "method", metric=metric, setting=setting, data="cifar10")
        if not {method, base} <= set(values):
            raise FldiagError(f"nothing was measured of {method} or {base}", "see why in the figure's json")
        trained(values, (method, base))
        return values[method] - values[base], values.attrs
    (small, about), (large, _) = gain(low), gain(high)
    return ordered(of_gains({low: small, high: large}, about), [low, high])


def of_gains(columns, about):
    """Values that are differences of two accuracies: each has the noise of both, and is no accuracy itself."""
    values = pd.DataFrame(columns)
    tests = 2 * 2500 / about["examples"] if about.get("examples") else 0.0
    values.attrs = {**about, "floor": None, "examples": None,
                    "stds": dict.fromkeys(columns, (2 * REPEAT**2 + tests) ** 0.5)} if about else {}
    return values


def trained(values, names):
    """Raises FldiagError where one of them is near chance: a gain over it says nothing."""
    limit = values.attrs.get("floor")
    if limit is not None and (values[list(names)].mean() <= limit).any():
        raise FldiagError("models that are not trained far enough", "train longer, or on easier data")


def over(label_high, label_low, metric="accuracy"):
    return lambda table: ordered(per_seed(table, metric=metric), [label_low, label_high])


LDA, ALIGN = "partition=lda;alpha=", "partition=lda;alpha=0.5;clients=16;ratio=1;epochs="
DIR = "partition=dirichlet;alpha=0.6;clients=100;ratio=0.1"
SIX = ("fedavg", "fedprox", "moon", "mixup", "stochdepth", "gradaug")


def best_rho(table):
    """The best radius is one of 0.5 to 2.0: better than 0.1 and than FedAvg (rho = 0)."""
    values = per_seed(table, "setting", metric="accuracy")
    names = [f"rho={r}" for r in ("0.5", "1.0", "1.5", "2.0")]
    best_ = values[[n for n in names if n in values]].mean().idxmax()
    return lowest(values, best_, ["rho=0", "rho=0.1", best_], highest=True)


def participation(table):
    part = table[table["setting"].astype(str).str.startswith("ratio=")]
    return settings(part, lambda own: ordered(per_seed(own, metric="accuracy"), ["FedAvg", "FedSOL"]), ("setting",))


def later_layers(table):
    """Layers in the order of the net: the strength of the last above that of the first."""
    rows = table[(table["metric"] == "lambda_mean") & table["layer"].notna() & (table["scope"] == "global")
                 & (table["estimator"] == "exact")]
    names = list(dict.fromkeys(rows["layer"]))
    if len(names) < 2:
        raise FldiagError("no strength of layers was measured", "see why in the figure's json")
    return ordered(per_seed(rows, "layer", metric="lambda_mean"), [names[0], names[-1]])


def combined(table):
    """FedSOL with another proximal loss above the method itself, pair by pair."""
    values = per_seed(table, metric="accuracy")
    pairs = {"fedprox": "l2", "fednova": "fednova", "scaffold": "scaffold", "feddyn": "feddyn", "moon": "moon"}
    return everywhere({m: ordered(values, [m, name]) for m, loss in pairs.items() if m in values
                       and (name := f"fedsol (loss={loss}, part=full, rho=2.0)") in values})


def head_like_full(table):
    """Equal within the noise cannot be shown, only refuted: head not below full."""
    rows = table[table["setting"].astype(str).str.contains("rho=1.5")]
    values = per_seed(rows, "setting", metric="accuracy")
    named = {part: next((c for c in values if f"part={part}" in c), None) for part in ("full", "head")}
    return ordered(values, [named["full"], named["head"]], equal=[True])


def personalised(table):
    return top(table, "fedsol_ft", "personal_accuracy")


def ablation(table):
    return ordered(per_seed(table, metric="accuracy"), ["fedsam", "fedspeed", "fedtoga (kappa=0)", "fedtoga"])


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
        raise FldiagError("both partitions were not measured of FedTOGA and another method", "see why in the figure's json")
    return lowest(of_gains(lost, about), "fedtoga", list(lost))


def fastest(level):
    def check(table):
        rows = table[(table["metric"] == level) & (table["origin"] == "measured")]
        if rows["value"].isna().all():
            raise FldiagError("no run gets there", "train longer, or on easier data")
        return settings(rows, lambda own: lowest(values := per_seed(late(own), "method"), "fedtoga", list(values)), ("setting",))
    return check


def sharper_with_heterogeneity(table):
    return ordered(per_seed(table, metric="eigenvalue", index=1, ask="spectrum"),
                   ["Dirichlet 0.6", "Dirichlet 0.1", "3 classes a client"])


def tuned(option, best_, others):
    return lambda table: lowest(per_seed(table, "setting", metric="accuracy"), f"{option}={best_}",
                                [f"{option}={v}" for v in (best_, *others)], highest=True)


def monotone(alpha):
    return lambda table: cells(table, [f"{LDA}{alpha};proj_rate={r}" for r in ("0", "0.3", "0.7", "1")])


def falls(table):
    """Flat, then a drop: less with every round projected than with 70 %."""
    return cells(table, [f"{LDA}0.5;proj_rate={r}" for r in ("1", "0.7")])


#: Points of accuracy: a penalty that changes less is marginal. The paper's own table has up to 2.7 (CIFAR-10).
MARGINAL = 3.0


def marginal(table):
    """No weight of FedProj's penalty changes the accuracy by ``MARGINAL`` points: every one against none."""
    parts = {}
    for alpha in ("0.3", "0.5"):
        values = per_seed(table, "setting", metric="accuracy", data="cifar10")
        cell = f"{LDA}{alpha};gamma_wd=".__add__
        for weight in ("0.1", "0.3", "0.5"):
            if not {cell("0"), cell(weight)} <= set(values):
                raise FldiagError(f"nothing was measured of {cell(weight)}", "see why in the figure's json")
            trained(values, (cell("0"), cell(weight)))
            change = (values[cell(weight)] - values[cell("0")]).abs()
            limit = MARGINAL / values.attrs["percent"] + 0 * change
            parts[f"LDA {alpha}, {weight}"] = ordered(of_gains({"change": change, "limit": limit}, values.attrs),
                                                      ["change", "limit"])
    return everywhere(parts)


def first_order(number):
    """The error of a proposition falls as it says: with the step as its first power, with the radius as its second."""
    def check(table):
        parts = {}
        for kind in ("step", "perturbation"):
            rows = table[table["metric"] == f"proposition_{number}_{kind}_order"]
            if rows.empty or "predicted" not in rows:
                raise FldiagError("the table has no rows for this claim", "make the figure again")
            off = rows.assign(value=(pd.to_numeric(rows["value"]) - pd.to_numeric(rows["predicted"])).abs())
            values = per_seed(off, "metric", label="FedSOL").set_axis(["off"], axis=1)
            parts[kind] = ordered(values.assign(**{"half an order": 0.5}), ["off", "half an order"])
        return everywhere(parts, "errors")
    return check


def stagnates(table):
    """More local epochs than 20 do not help FedAvg and FedProx: 30 not clearly above 20; a clear gain refutes it."""
    parts = {}
    for name in ("fedavg", "fedprox"):
        values = per_seed(table, "setting", metric="accuracy", method=name)
        parts[name] = ordered(values, [f"{ALIGN}30;rounds=25", f"{ALIGN}20;rounds=25"], equal=[True])
    return everywhere(parts, "methods")


def saves(base, percent, name="fedalign", metric="MFLOPs"):
    """``name`` needs at least so many percent (less 1) fewer multiply-adds than ``base``."""
    def check(table):
        values = per_seed(table, metric=metric)
        if not {name, base} <= set(values):
            raise FldiagError(f"nothing was measured of {name} or {base}", "see why in the figure's json")
        saved = float((1 - values[name] / values[base]).mean() * 100)
        right = saved >= percent - 1
        return Verdict((right,), f"{saved:.3g} % saved", "holds" if right else "does not hold", "counted", (name, base), "counts")
    return check


def no_more(metric, method, base):
    """``method`` does not need more of it than ``base``."""
    def check(table):
        values = per_seed(table, metric=metric)
        if not {method, base} <= set(values):
            raise FldiagError(f"nothing was measured of {method} or {base}", "see why in the figure's json")
        mine, theirs = float(values[method].mean()), float(values[base].mean())
        right = mine <= theirs
        return Verdict((right,), f"{method} {mine:.3g}, {base} {theirs:.3g}", "holds" if right else "does not hold", "counted",
                       (method, base), "counts")
    return check


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
    *(Claim(f"fedsol-proposition-{n}", f"Proposition {n} predicts what a perturbed step does, with errors of the orders it says.",
            f"FedSOL Proposition {n}", "fedsol/fig6", first_order(n)) for n in (1, 2)),
    Claim("fedalign-flattest", "GradAug has the smallest largest eigenvalue of the six methods.", "FedAlign Table 1",
          "fedalign/table1", flattest),
    Claim("fedproj-iris", f"{IRIS}, FedDF's not less than FedAvg's (lr 0.01).", "FedProj Figure 1", "fedproj/fig1",
          partial(on_iris, lr=0.01)),
    Claim("fedproj-iris-projected", f"{IRIS} (lr 0.01).", "FedProj Figure 1", "fedproj/fig1", partial(projected, lr=0.01)),
    Claim("fedproj-iris-0.001", f"{IRIS}, FedDF's not less than FedAvg's (the paper's lr 0.001).", "FedProj Figure 1",
          "fedproj/fig1", partial(on_iris, lr=0.001)),
    Claim("fedproj-iris-projected-0.001", f"{IRIS} (the paper's lr 0.001).", "FedProj Figure 1", "fedproj/fig1",
          partial(projected, lr=0.001)),
    *(Claim(f"fedproj-iris-{what}{id}", f"On Iris {text} than FedAvg's and FedDF's ({said}).", "FedProj Figure 1", "fedproj/fig1",
            partial(check, lr=lr))
      for lr, id, said in ((0.01, "", "lr 0.01"), (0.001, "-0.001", "the paper's lr 0.001"))
      for what, text, check in (
          ("divergence", "FedProj's trained clients differ from the model they received in less of the plane", diverging),
          ("local", "FedProj's trained clients are more accurate on the data of all", remembering))),
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
    Claim("fedsol-projection", "Projecting the proximal loss out loses against adding it (L2).", "FedSOL Table 1",
          "fedsol/table1",
          over("fedprox", "gradient_projection (loss=l2)")),
    Claim("fedsol-projection-kl", "Projecting the proximal loss out loses against adding it (KL).", "FedSOL Table 1",
          "fedsol/table1", lambda t: ordered(per_seed(t, "method", metric="accuracy", setting=f"{LDA}0.1;loss=kl"),
                                             ["gradient_projection", "strategy:A5"])),
    Claim("fedsol-everywhere", "FedSOL is more accurate than FedAvg in every column.", "FedSOL Table 2", "fedsol/table2",
          partial(above, high="fedsol", low="fedavg")),
    Claim("fedsol-heterogeneity", "FedSOL gains more over FedAvg at LDA 0.05 than at 0.5.", "FedSOL Table 2", "fedsol/table2",
          partial(growing, method="fedsol", base="fedavg", low=f"{LDA}0.5", high=f"{LDA}0.05")),
    Claim("fedsol-shards", "FedSOL gains more over FedAvg with 2 shards a client than with 10.", "FedSOL Table 2",
          "fedsol/table2",
          partial(growing, method="fedsol", base="fedavg", low="partition=sharding;shards=10",
          high="partition=sharding;shards=2")),
    Claim("fedsol-participation", "FedSOL is more accurate than FedAvg at every sampling ratio.", "FedSOL Figure 4a",
          "fedsol/fig4",
          participation),
    Claim("fedsol-rho", "The best rho of FedSOL lies in 0.5 to 2.0.", "FedSOL Figure 4d", "fedsol/fig4", best_rho),
    Claim("fedsol-later", "The adaptive strength is larger in the last layer than in the first.", "FedSOL Figure 5b",
          "fedsol/fig5",
          later_layers),
    Claim("fedsol-architectures", "FedSOL is more accurate than FedAvg with every architecture.", "FedSOL Table 3",
          "fedsol/table3",
          partial(above, high="fedsol", low="fedavg")),
    Claim("fedsol-combinations", "FedSOL's perturbation with a method's proximal loss is more accurate than the method.",
          "FedSOL Table 4", "fedsol/table4", combined),
    Claim("fedsol-head", "Perturbing the head alone is not less accurate than perturbing all (rho 1.5).", "FedSOL Table 5",
          "fedsol/table5", head_like_full),
    Claim("fedsol-personal", "FedSOL-FT is the most accurate after personalisation.", "FedSOL Table 9", "fedsol/table9",
          personalised),
    Claim("fedsol-a1", "Strategy A1 (FedSOL) is the most accurate of A0 to A6.", "FedSOL Table 10", "fedsol/table10",
          partial(top, method="strategy:A1")),
    Claim("fedtoga-best", "FedTOGA is the most accurate everywhere (LeNet).", "FedTOGA Table 1", "fedtoga/table1",
          partial(top, method="fedtoga")),
    Claim("fedtoga-best-resnet", "FedTOGA is the most accurate everywhere (ResNet-18).", "FedTOGA Table 2", "fedtoga/table2",
          partial(top, method="fedtoga")),
    Claim("fedtoga-drop", "FedTOGA loses the least accuracy of all from Dirichlet 0.6 to 0.1.", "FedTOGA Table 1",
          "fedtoga/table1", smallest_drop),
    Claim("fedtoga-fastest", "FedTOGA has 80 % in the fewest rounds of all.", "FedTOGA Table 3", "fedtoga/table3",
          fastest("rounds_to_80")),
    Claim("fedtoga-fastest-82", "FedTOGA has 82 % in the fewest rounds of all.", "FedTOGA Table 3", "fedtoga/table3",
          fastest("rounds_to_82")),
    Claim("fedtoga-fastest-everywhere", "FedTOGA has FedSAM's best accuracy in the fewest rounds on every partition.",
          "FedTOGA Table 8", "fedtoga/table8", fastest("rounds_to_best_of_fedsam")),
    Claim("fedtoga-ladder", "Every term of FedTOGA adds accuracy: SAM, regulariser, dual correction, SAM correction.",
          "FedTOGA ablation", "fedtoga/ablation", ablation),
    Claim("fedtoga-sharpness", "The more clients differ, the larger the global model's largest eigenvalue.", "FedTOGA Figure 1",
          "fedtoga/fig1", sharper_with_heterogeneity),
    *(Claim(f"fedtoga-{option}", f"{option} = {best_} is the best of FedTOGA's grid.", "FedTOGA Figure 2", "fedtoga/fig2",
            tuned(option, best_, others))
      for option, best_, others in (("lr_decay", "0.9995", ("0.997", "0.998")), ("lam", "0.1", ("0.01", "0.2")),
                                    ("kappa", "1", ("2", "4")), ("beta_dual", "0.9", ("0.8", "0.85")),
                                    ("rho", "0.1", ("0.001", "0.01")))),
    Claim("fedproj-best", "FedProj is the most accurate of the nine methods everywhere.", "FedProj Table 1", "fedproj/table1",
          partial(top, method="fedproj")),
    Claim("fedproj-best-texts", "FedProj is the most accurate of the four methods on every language task.", "FedProj Table 2",
          "fedproj/table2", partial(top, method="fedproj")),
    Claim("fedproj-monotone", "FedProj's accuracy rises with the rate of projection (LDA 0.3).", "FedProj Figure 3a",
          "fedproj/fig3", monotone("0.3")),
    Claim("fedproj-drop", "At LDA 0.5 FedProj loses accuracy when every round is projected.", "FedProj Figure 3a",
          "fedproj/fig3", falls),
    Claim("fedproj-penalty", f"FedProj's weight penalty is marginal: it changes the accuracy by less than {MARGINAL:g} points.",
          "FedProj Table 3", "fedproj/table3", marginal),
    Claim("fedalign-sharpest", "FedAvg has the largest largest eigenvalue of the six methods.", "FedAlign Table 1",
          "fedalign/table1", lambda t: lowest(per_seed(t, metric="lambda_max"), "fedavg", SIX, highest=True)),
    *(Claim(f"fedalign-{metric}", f"GradAug has the lowest {name} of the six methods.", "FedAlign Table 1", "fedalign/table1",
            lambda t, metric=metric: lowest(per_seed(t, metric=metric), "gradaug", SIX))
      for metric, name in (("trace", "trace H_T"), ("H_N", "H_N"))),
    Claim("fedalign-best", "GradAug is the most accurate of the six methods at every number of clients.", "FedAlign Table 4",
          "fedalign/table4", partial(top, method="gradaug")),
    Claim("fedalign-epochs", "GradAug is the most accurate at every number of local epochs.", "FedAlign Table 3",
          "fedalign/table3", partial(top, method="gradaug")),
    Claim("fedalign-stagnation", "FedAvg and FedProx gain nothing from 30 local epochs over 20.", "FedAlign Table 3",
          "fedalign/table3", stagnates),
    Claim("fedtoga-uplink", "FedTOGA's clients upload no more than FedAvg's.", "FedTOGA abstract", "fedtoga/table4",
          no_more("uplink", "fedtoga", "fedavg")),
    *(Claim(f"fedalign-saves-{percent}", f"FedAlign needs {percent} % fewer {what} than {label}.", "FedAlign Table 5",
            "fedalign/table5_counts", saves(base, percent, metric=metric))
      for base, label, percent, metric, what in (
          ("gradaug (n=1)", "GradAug (n = 1)", 33, "MFLOPs", "multiply-adds"),
          ("gradaug (n=2)", "GradAug (n = 2)", 47, "MFLOPs", "multiply-adds"),
          ("moon", "MOON", 65, "MFLOPs", "multiply-adds"), ("moon", "MOON", 70, "params_M", "parameters"))),
)
